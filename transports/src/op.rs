use std::fmt;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use connex_protocol::Incarnation;
use connex_protocol::wire::hello::Lane;
use connex_protocol::wire::{Encoded, Seal};

use crate::RegionSlice;

/// Names an operation; chosen by the caller, unique among its operations under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub u64);

/// What can be posted.
#[derive(Debug)]
pub enum Op {
    /// A frame. It has no completion: the layer above has its own answers.
    Message {
        /// To whom.
        to: Incarnation,
        /// On which lane.
        lane: Lane,
        /// The frame.
        frame: Encoded,
    },
    /// Reads a peer's registered memory.
    Read {
        /// Comes back in the completion.
        id: OpId,
        /// Whose memory.
        to: Incarnation,
        /// Which bytes.
        from: RegionSlice,
        /// What the slot must hold, before and after the read.
        seal: Option<Seal>,
        /// The CRC-32C that the bytes must have.
        crc: Option<u32>,
        /// The destination; its memory is reused, its content replaced. One that is as long as the read already (a
        /// buffer that was used before) is not filled with zeroes first.
        into: BytesMut,
        /// How long it may take.
        deadline: Duration,
    },
    /// Writes a peer's registered memory.
    Write {
        /// Comes back in the completion.
        id: OpId,
        /// Whose memory.
        to: Incarnation,
        /// Where; the length is `data`'s.
        at: RegionSlice,
        /// What.
        data: Bytes,
        /// A frame that the peer receives after the bytes are in place.
        signal: Option<Encoded>,
        /// How long it may take.
        deadline: Duration,
    },
}

/// An operation that was not started, handed back whole.
pub struct Refused {
    /// The operation.
    pub op: Op,
    /// Why.
    pub why: RefusedWhy,
}

/// Why an operation was not started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RefusedWhy {
    /// No link to that peer is up.
    #[error("no link to the peer is up")]
    NotConnected,
    /// The peer's queue is full.
    #[error("the queue to the peer is full")]
    Full,
    /// The frame is larger than its lane's cap.
    #[error("the frame is larger than its lane's cap")]
    TooLarge,
    /// The transport is shut down.
    #[error("the transport is shut down")]
    ShutDown,
}

impl fmt::Debug for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Refused").field("why", &self.why).finish_non_exhaustive()
    }
}
