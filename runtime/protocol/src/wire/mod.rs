//! What crosses a connection: the versioned hello, the fixed step header, and control messages.
//!
//! A connection carries *frames*: a four-byte little-endian length, then that many bytes. The first frame each way
//! is the [`hello`]; every later one is an [`Envelope`]. A length above the lane's cap ends the session before
//! anything is allocated for it.

pub mod bulk;
pub mod codec;
mod control;
pub mod cutover;
pub mod directory;
mod frame;
pub mod hello;

pub use control::{Control, Heartbeat, StepState};
pub use frame::{
    Completed, Encoded, Envelope, ErrorCode, Frame, Item, Outcome, Payload, RegionKey, Reply, Seal, Slot,
    Step, StepError, decode, encode, peek,
};

/// The version that this build speaks; the hello carries it and both sides must agree.
pub const VERSION: u16 = 1;

/// The bytes of the length in front of each frame.
pub const LENGTH_PREFIX: usize = 4;

/// The default cap on a frame of the control lane.
pub const CONTROL_FRAME_MAX: usize = 1 << 20;

/// The default cap on a frame of the bulk lane; a larger payload travels in several.
pub const STREAM_FRAME_MAX: usize = 16 << 20;

/// Why bytes from a peer are no frame. It ends that session, and nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The frame ends before its own lengths say it should, or goes on after.
    #[error("the frame's length is not what its header says")]
    Length,
    /// The checksum over header and metadata does not match.
    #[error("the frame's checksum does not match its bytes")]
    Checksum,
    /// A kind, code or text that this version does not know.
    #[error("the frame holds a value that this version does not know")]
    Unknown,
    /// A frame above the lane's cap.
    #[error("the frame is larger than its lane allows")]
    TooLarge,
}

/// The CRC-32C of `bytes`, continued from `seed` (0 to start).
pub fn crc32c(seed: u32, bytes: &[u8]) -> u32 {
    const CRC: crc::Crc<u32, crc::Table<16>> = crc::Crc::<u32, crc::Table<16>>::new(&crc::CRC_32_ISCSI);
    // The algorithm inverts its register at both ends, so a finished value becomes a start value by inversion and
    // bit reversal.
    let mut digest = CRC.digest_with_initial((!seed).reverse_bits());
    digest.update(bytes);
    digest.finalize()
}

#[cfg(test)]
mod tests;
