//! connex-runtime
