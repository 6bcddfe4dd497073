//! Connex keeps in-flight work correct while the process behind a logical endpoint changes: joins, leaves, fails,
//! hangs, migrates.
//!
//! A [`Node`] is one process's place in a deployment. It serves an identity, or submits steps to groups of replicas, or
//! both. A step that was on a replica when that died is executed by another, once; its submitter sees one reply, or
//! one typed error that says whether the step ran.
//!
//! ```
//! use connex::directory::{Directory, DirectoryConfig};
//! use connex::{Group, Node, Outcome, Step, serve_fn};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let directory = Directory::start(DirectoryConfig::local()).await?;
//! let group = Group::new("my-model", "echo", 0);
//! let server = Node::builder(group.replica(0))
//!     .directory(directory.address())
//!     .serve(serve_fn(|step| match &step.payload()[..] {
//!         b"" => Err("there is nothing to say".into()),
//!         _ => Ok(step.payload().clone()),
//!     }))
//!     .start()
//!     .await?;
//! server.ready().await;
//!
//! let client = Node::client().directory(directory.address()).start().await?;
//! let handle = client.group(&group);
//! handle.ready().await;
//! let reply = handle.call(Step::new("").payload("hello")).await?;
//! assert_eq!(reply.body, "hello");
//!
//! let error = handle.call(Step::new("").payload("")).await.expect_err("the engine refuses it");
//! assert_eq!(error.outcome(), Outcome::Ran);
//! # Ok(())
//! # }
//! ```
//!
//! # Where to go on
//!
//! - To serve: [`serve_fn`], [`serve_async`], or an [`Endpoint`] of one's own; [`pipeline`] for stages of a model.
//! - To submit: [`GroupHandle::call`], [`GroupHandle::stream`], [`GroupHandle::call_blocking`]. Dropping what they
//!   return cancels the step, here and at the replica; a [`CallError`] hands the step back.
//! - To be found: [`NodeBuilder::directory`], or without a daemon [`NodeBuilder::via`] with the [`Node::route`] of
//!   each peer.
//! - To come and go: [`Node::ready`], [`Node::drain`], [`Node::shutdown`], [`NodeBuilder::migrate`].
//! - To watch: [`Node::events`]. To test, with faults: `testkit`, a feature of this crate.

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
pub use connex_protocol::wire::directory::Route;
pub use connex_protocol::wire::{ErrorCode, Outcome, StepError};
pub use connex_protocol::{Address, Epoch, Evidence, Group, Incarnation, LogicalId, Peer, ReplicaNo, StepId};
pub use connex_transport as transport;
pub use directory::Via;
pub use node::{Node, NodeBuilder, Reach, StartError};
pub use serve::{serve_async, serve_fn};
