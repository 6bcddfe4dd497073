//! connex-actors
