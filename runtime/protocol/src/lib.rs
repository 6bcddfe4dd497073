//! The Connex protocol: every decision of the runtime as a synchronous state machine, and the bytes on the wire.
//!
//! Nothing here reads a clock, draws a random number, spawns a task or touches a socket. A machine is told what
//! happened and when ([`Machine::handle`]), and is then asked what to do about it ([`Machine::poll`]). Three drivers
//! run the same machines: the actors, the simulator and the fuzzer.
//!
//! The rule for every driver is *mutate, then drain, then mutate*: after each `handle`, call `poll` until it returns
//! `None`, and perform the outputs in the order in which they came.
//!
//! ```
//! use connex_protocol::{Instant, Machine};
//!
//! fn drive<M: Machine>(machine: &mut M, now: Instant, input: M::Input, mut perform: impl FnMut(M::Output)) {
//!     machine.handle(now, input);
//!     while let Some(output) = machine.poll() {
//!         perform(output);
//!     }
//! }
//! ```
#![no_std]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod cutover;
pub mod detect;
pub mod directory;
mod evidence;
pub mod group;
mod id;
pub mod lease;
mod machine;
pub mod ring;
pub mod step;
mod time;
pub mod wire;

pub use evidence::Evidence;
pub use id::{Address, Epoch, Group, IdError, Incarnation, LogicalId, Peer, ReplicaNo, StepId};
pub use machine::Machine;
pub use time::Instant;
