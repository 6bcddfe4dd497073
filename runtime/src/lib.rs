//! Connex keeps in-flight work correct while the process behind a logical endpoint changes: joins, leaves, fails,
//! hangs, migrates.
//!
//! A [`Node`] is one process's place in a deployment. It serves an identity, or submits steps to groups of replicas, or
//! both. A step that was on a replica when that died is executed by another, once; its submitter sees one reply, or
//! one typed error that says whether the step ran.

mod call;
pub mod directory;
pub mod migration;
mod node;
mod serve;
#[cfg(feature = "testkit")]
pub mod testkit;

pub use bytes::Bytes;
pub use call::{CallError, GroupHandle, Pending, Reply, Step, Streaming};
pub use connex_actors::pipeline;
pub use connex_actors::{
    Core, CoreConfig, CrashAt, Endpoint, EndpointFactory, NodeEvent, Place, ReplicaStatus, Standing,
    StepContext, Wake,
};
pub use connex_engine as engine;
pub use connex_protocol as protocol;
pub use connex_protocol::step::WhenFull;
pub use connex_protocol::wire::{ErrorCode, Outcome, StepError};
pub use connex_protocol::{Address, Epoch, Evidence, Group, Incarnation, LogicalId, Peer, ReplicaNo, StepId};
pub use connex_transport as transport;
pub use directory::Via;
pub use node::{Node, NodeBuilder, Reach, StartError};
pub use serve::{serve_async, serve_fn};
