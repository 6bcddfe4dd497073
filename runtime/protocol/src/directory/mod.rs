//! The directory: who holds which identity, and where. [`Registry`] is its one process; [`Client`] is every other
//! node's side of it.

mod client;
mod registry;

pub use client::{Client, ClientConfig, ClientInput, ClientOutput, Registrant};
pub use registry::{Registry, RegistryConfig, RegistryInput, RegistryOutput};

#[cfg(test)]
mod tests;
