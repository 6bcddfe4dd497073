//! connex-tests
