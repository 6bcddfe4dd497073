//! connex-llama
