//! The built-in directory as a library, and a node's way to its routes.

mod registration;
mod server;

pub use registration::{Registration, Via};
pub use server::{Directory, DirectoryConfig, DirectoryError};
