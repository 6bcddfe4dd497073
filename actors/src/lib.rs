//! The supervision tree: ractor actors that own the protocol's machines and drive them over a transport.
//!
//! Actors own, supervise and hand over steps; they are not a hop on the undisturbed path. A submitting task drives
//! its group's [`Sender`](connex_protocol::step::Sender) under a short lock and posts to the transport itself; the
//! transport's progress thread drives the same machine with the replies. What an actor could lose by ending (the
//! mailbox, the reply cache, the routes) lives in cells that the node holds, so that the next actor goes on in order.
//!
//! ```text
//! NodeSupervisor
//! ├── TransportSupervisor ── TransportActor
//! ├── DirectoryClientActor
//! ├── LivenessActor
//! ├── GroupSupervisor ── ReplicaGroupActor(group) ── EndpointActor(lid, remote) ── StepActor × K
//! └── LocalSupervisor ── ServedEndpointActor(lid, local)
//! ```
//!
//! Nothing here decides the protocol: each decision is a machine's.
//!
//! # Locks
//!
//! Taken in this order and no other: a group's cell, the served cell, the inbox, the transport's own. The handler is
//! called by the transport without any of them.

mod clock;
mod core;
mod dispatch;
mod event;
mod group_cell;
pub mod pipeline;
mod send_slots;
mod serve;
mod served_cell;
mod sink;
mod supervision;

pub use clock::Clock;
pub use core::{Core, CoreConfig};
pub use dispatch::Dispatch;
pub use event::NodeEvent;
pub use group_cell::{GroupCell, ReplicaStatus};
pub use serve::{Endpoint, EndpointFactory, Place, StepContext, Wake};
pub use served_cell::ServedCell;
pub use sink::{StepEnd, StepSink};
pub use supervision::{CrashAt, Doors, Hook, Membership, NodeSupervisor, NodeSupervisorArgs, Standing};
