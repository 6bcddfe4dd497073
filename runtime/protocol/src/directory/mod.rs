//! The directory: who holds which identity, and where. [`Registry`] is its one process; [`Client`] is every other
//! node's side of it.
//!
//! | what fails | what follows |
//! | --- | --- |
//! | a holder dies | its lease runs out, or its guardian reports its exit; the shadow or the next who asks gets the identity |
//! | a holder hangs past its lease and comes back | its renewal is refused as fenced, and so is everything else it asks |
//! | the link breaks | the client connects again, and watches on from the revision that it saw last |
//! | the directory hangs and comes back | nobody is evicted for renewals that it could not hear |
//! | the directory restarts empty | its clients register again; known routes are believed for two leases meanwhile |
//! | the directory stays away | traffic goes on with the routes known; nobody gives an identity up for that alone |
//! | an answer comes late, twice or never | it is matched by its request's id, or the link is given up and made anew |
//! | a client lies or floods | it can evict nobody; names, identities, watchers and history are bounded |

mod client;
mod entries;
mod fanout;
mod registration;
mod registry;
mod routes;

pub use client::{Client, ClientConfig, ClientInput, ClientOutput};
pub use registration::Registrant;
pub use registry::{Registry, RegistryConfig, RegistryInput, RegistryOutput};

#[cfg(test)]
mod tests;
