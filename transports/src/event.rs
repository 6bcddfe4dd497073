use std::io;

use bytes::{Bytes, BytesMut};
use connex_protocol::wire::hello::{Lane, Reject};
use connex_protocol::{Address, Epoch, Evidence, Incarnation, Peer};

use crate::OpId;

/// What a transport reports.
#[derive(Debug)]
pub enum Event {
    /// A link to this peer is up, dialled by either side.
    Up {
        /// The peer.
        peer: Peer,
        /// The epoch that its hello carried.
        epoch: Epoch,
    },
    /// One of two links to a live peer was lost: frames may be missing, the peer is not.
    Relinked {
        /// The peer.
        peer: Peer,
    },
    /// The last link to this peer ended.
    Down {
        /// The peer.
        peer: Peer,
        /// What is known of its end.
        evidence: Evidence,
    },
    /// A frame from a peer, without its length prefix.
    Message {
        /// The peer's life.
        from: Incarnation,
        /// The lane it came on.
        lane: Lane,
        /// The frame.
        frame: Bytes,
    },
    /// An operation ended.
    Completed(Completion),
    /// A caller's hello was refused for something that somebody has to set right: its version, or its deployment.
    Refused {
        /// Why, as seen from this side.
        reject: Reject,
    },
}

/// The end of a one-sided operation.
#[derive(Debug)]
pub struct Completion {
    /// The operation.
    pub id: OpId,
    /// The peer it went to.
    pub peer: Incarnation,
    /// For a read, the destination, filled to the length asked for; empty for a write.
    pub result: Result<BytesMut, OpError>,
}

/// Why an operation failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpError {
    /// The link ended first. Whether a write took effect is unknown.
    #[error("the link to the peer ended ({0})")]
    LinkDown(Evidence),
    /// The owner does not know the region's key: it is of another life, or deregistered.
    #[error("the peer does not know this region: its key is stale or foreign")]
    UnknownRegion,
    /// The range lies outside the region, or the region does not take this kind of operation.
    #[error("the range lies outside the region, or the region does not allow the operation")]
    OutOfBounds,
    /// The memory does not hold what the seal promises: the slot was reused (P-6).
    #[error("the slot holds another payload than the one asked for")]
    SealMismatch,
    /// The bytes do not match their checksum.
    #[error("the payload's checksum does not match its bytes")]
    Checksum,
    /// It did not end within its deadline. Nothing of a read lands later; whether a write took effect is unknown.
    #[error("the operation did not end within its deadline")]
    TimedOut,
    /// It was larger than this backend carries.
    #[error("the operation is larger than this transport carries")]
    TooLarge,
}

/// Why a connection could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The address can't be used by this backend.
    #[error("{address}: {why}")]
    Address {
        /// The address.
        address: Address,
        /// What is wrong with it.
        why: String,
    },
    /// The operating system refused.
    #[error("{address}: {source}: is the process there running, and the address right?")]
    Io {
        /// The address.
        address: Address,
        /// Its error.
        source: io::Error,
    },
    /// The other side refused.
    #[error("{address}: {reject}")]
    Rejected {
        /// The address.
        address: Address,
        /// Its reason.
        reject: Reject,
    },
    /// The other side did not answer in time, or not in this protocol.
    #[error("{address}: no Connex process answered within {waited_ms} ms")]
    NoAnswer {
        /// The address.
        address: Address,
        /// How long was waited.
        waited_ms: u64,
    },
    /// This side has fenced the process that answers there.
    #[error("{address}: the process that answers there ({found}) is fenced here")]
    Fenced {
        /// The address.
        address: Address,
        /// Who answers.
        found: Incarnation,
    },
    /// The transport is shut down.
    #[error("the transport is shut down")]
    ShutDown,
}

/// Why a transport could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Somebody else listens there.
    #[error("{address} is in use by another process: choose another port, or port 0 for any free one")]
    InUse {
        /// The address.
        address: Address,
    },
    /// The address can't be used by this backend.
    #[error("{address}: {why}")]
    Address {
        /// The address.
        address: Address,
        /// What is wrong with it, and what to write instead.
        why: String,
    },
    /// The operating system refused.
    #[error("{address}: {source}")]
    Io {
        /// The address.
        address: Address,
        /// Its error.
        source: io::Error,
    },
}

/// Takes a transport's events, on the thread that makes progress. It must not block: a slow handler stalls every
/// peer's traffic.
pub trait Handler: Send + Sync + 'static {
    /// Takes one event.
    fn handle(&self, event: Event);

    /// The progress has stopped, because `handle` panicked with this message. Whoever supervises the transport calls
    /// [`Transport::restart_progress`](crate::Transport::restart_progress), from any thread, this one included.
    fn progress_failed(&self, panic: String) {
        let _ = panic;
    }
}
