//! connex-cli
fn main() {}
