//! connex-examples
