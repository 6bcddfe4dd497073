//! Moves the bytes between endpoints: one contract, [`Transport`], and its backends.
//!
//! A transport knows connections, registered memory and peers' lives. It knows nothing of steps, groups or
//! directories: it delivers frames that others encode, and reads and writes that others asked for.
//!
//! # What every backend keeps
//!
//! - Messages to one peer on one lane arrive in the order in which they were posted, each at most once, for as long
//!   as the link lives. What a dead link swallowed is not repaired here: [`Event::Down`] or [`Event::Relinked`]
//!   tells the layer above, which sends again what is unanswered.
//! - An operation owns its buffers. It ends in exactly one [`Completion`], also when the link dies; a refused one
//!   comes back to its caller with its buffers.
//! - [`Transport::post`] never blocks and never calls the [`Handler`]: it may be called under a lock that the
//!   handler takes.
//! - The handler is called from the progress thread, or from a caller of [`Transport::progress`]; never from two
//!   threads at once. A handler that panics stops the progress, loses nothing but the event that it was given, and
//!   is told so ([`Handler::progress_failed`]); [`Transport::restart_progress`] goes on.
//! - [`Event::Up`] comes once per peer's life, before its first frame and before `connect` returns; from then on
//!   `post` accepts. [`Event::Down`] is the last event of that life, after the completions of its operations.
//! - A region's key names one life of one process. A read or write by a stale or foreign key is refused by the
//!   owner, never served.

#[cfg(feature = "conformance")]
pub mod conformance;
mod event;
pub mod mem;
mod op;
mod region;
pub mod tcp;

use std::sync::Arc;
use std::time::Duration;

use connex_protocol::wire::{self, Control, Frame};
use connex_protocol::{Address, Epoch, Incarnation, Peer};

pub use event::{Completion, ConnectError, Event, Handler, OpError, StartError};
pub use mem::{MemHub, MemTransport};
pub use op::{Op, OpId, Refused, RefusedWhy};
pub use region::{Region, RegionError, RegionSlice};
pub use tcp::{TcpConfig, TcpTransport};

/// Who a transport speaks for.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The endpoint and its life.
    pub peer: Peer,
    /// The deployment's name; peers of another are refused.
    pub deployment: String,
}

/// A backend: connections to peers, registered memory, and the operations between them.
#[async_trait::async_trait]
pub trait Transport: Send + Sync + 'static {
    /// The backend's name, as settings and logs spell it: `tcp`, `mem`.
    fn name(&self) -> &'static str;

    /// Where peers reach this transport: the bound address, with the advertised host.
    fn local(&self) -> Address;

    /// Whether payloads in registered slots should carry a checksum: true where they cross a network (P-6).
    fn wants_crc(&self) -> bool {
        false
    }

    /// The epoch that later hellos carry.
    fn set_epoch(&self, epoch: Epoch);

    /// Connects to whoever serves at `to`, or to exactly `expects`, and returns who it is. Returns at once if a link
    /// to that life is up. [`Event::Up`] precedes the first frame from it.
    async fn connect(&self, to: &Address, expects: Option<Incarnation>) -> Result<Peer, ConnectError>;

    /// Ends the link to a peer; its operations fail, and [`Event::Down`] follows.
    fn disconnect(&self, peer: Incarnation);

    /// Refuses this life from now on: its connections end, its hellos are rejected, its frames are dropped.
    fn fence(&self, peer: Incarnation);

    /// Registers memory for one-sided operations of peers.
    async fn register(&self, region: Arc<Region>) -> Result<(), RegionError>;

    /// Ends a region's registration: after it returns no peer's operation touches the region. It waits for those
    /// that are under way, or fails them.
    async fn deregister(&self, region: &Region);

    /// Starts an operation. Never blocks; what can't be started now comes back.
    fn post(&self, op: Op) -> Result<(), Refused>;

    /// Makes progress on the caller's thread until something was handled or `wait` has passed; false if another
    /// thread is making progress already (the caller then waits for its result by other means).
    fn progress(&self, wait: Duration) -> bool;

    /// Called by a thread that has made progress and goes to sleep or to longer work: the backend's own thread takes
    /// over at once, instead of a moment later.
    fn let_go(&self) {}

    /// Whether progress has stopped because the handler panicked.
    fn failed(&self) -> bool;

    /// Goes on after a panic: links and pending operations are as they were, less the event that was being handled.
    fn restart_progress(&self);

    /// How many bytes posted to a peer are not yet with the operating system; 0 for an unknown peer.
    fn backlog(&self, peer: Incarnation) -> usize;

    /// Says goodbye to every peer, ends all links and the progress thread; pending operations fail.
    async fn shutdown(&self);
}

/// What a panic said.
pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text =
        panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_string()
}

/// Whether a frame is [`Control::Goodbye`], the one message that a transport itself understands: the end of its
/// sender's links is then a departure.
pub(crate) fn is_goodbye(frame: &bytes::Bytes) -> bool {
    // It is one of the shortest frames; nothing longer needs to be decoded.
    const SHORTEST: usize = 25;
    frame.len() == SHORTEST
        && matches!(wire::decode(frame.clone()), Ok(envelope) if envelope.frame == Frame::Control(Control::Goodbye))
}
