//! One-sided operations on the bulk lane of a byte stream.
//!
//! Reads are receiver-driven: the reader sends [`Bulk::Read`], and the owner pushes the bytes as [`Bulk::Data`], in
//! order, in as many frames as the lane's cap demands; a refusal, or an end half way, is a [`Bulk::Done`] with its
//! reason. Writes are pushed as [`Bulk::Write`] and answered by one `Done`; a [`Bulk::Signal`] right behind the last
//! byte carries a frame for the owner's handler, which is dropped if the write was refused.
//!
//! Every frame begins like a frame of the control lane (kind, version, flags, checksum, both incarnations), so that
//! [`peek`](super::peek) reads both. Its checksum covers the fixed header; the bytes behind it are covered by the
//! checksum that the reader asked for.

use alloc::vec::Vec;

use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::frame::Head;
use super::{LENGTH_PREFIX, RegionKey, Seal, VERSION, WireError, crc32c};
use crate::{Incarnation, StepId};

/// The bytes of a bulk frame in front of its payload, without the length prefix.
pub const BULK_HEAD: usize = size_of::<BulkHead>();

/// The kinds of bulk frames begin here; below it are the frames of [`decode`](super::decode).
const FIRST_KIND: u8 = 16;
const KIND_READ: u8 = 16;
const KIND_DATA: u8 = 17;
const KIND_WRITE: u8 = 18;
const KIND_SIGNAL: u8 = 19;
const KIND_DONE: u8 = 20;
const KIND_CANCEL: u8 = 21;

const FLAG_SEAL: u16 = 1;

/// What a bulk frame says. `op` is chosen by the side that started the operation, unique per connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bulk {
    /// Push these bytes to me.
    Read {
        /// The operation.
        op: u64,
        /// Whose memory.
        region: RegionKey,
        /// Where it starts, in bytes.
        offset: u64,
        /// How many bytes.
        len: u64,
        /// What the slot must hold.
        seal: Option<Seal>,
    },
    /// Bytes that were asked for; they follow the header.
    Data {
        /// The operation.
        op: u64,
        /// Where in the operation's range these bytes belong.
        at: u64,
    },
    /// Bytes for your memory; they follow the header.
    Write {
        /// The operation.
        op: u64,
        /// Whose memory.
        region: RegionKey,
        /// Where the operation's range starts.
        offset: u64,
        /// The operation's length in bytes.
        len: u64,
        /// Where in the operation's range these bytes belong.
        at: u64,
    },
    /// A frame for your handler, if that write took effect; it follows the header, without a length prefix.
    Signal {
        /// The write.
        op: u64,
    },
    /// The operation ended.
    Done {
        /// The operation.
        op: u64,
        /// How.
        status: Status,
    },
    /// The asking side no longer wants the bytes.
    Cancel {
        /// The read.
        op: u64,
    },
}

/// How an operation ended at the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// It took effect.
    Done = 0,
    /// The key is stale or foreign.
    UnknownRegion = 1,
    /// The range, or the kind of access, is not the region's.
    OutOfBounds = 2,
    /// The slot holds another payload.
    SealMismatch = 3,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct BulkHead {
    head: Head,
    op: U64,
    region_owner: U64,
    region_id: U64,
    offset: U64,
    len: U64,
    at: U64,
    seal_origin: U64,
    seal_seq: U64,
    seal_generation: U64,
    seal_len: U64,
}

/// Whether a frame (without its length prefix) is one of these.
pub fn is_bulk(frame: &[u8]) -> bool {
    frame.first().is_some_and(|kind| *kind >= FIRST_KIND)
}

/// The length prefix and header of a bulk frame whose payload has `body` bytes.
pub fn encode(from: Incarnation, to: Incarnation, bulk: &Bulk, body: usize) -> Vec<u8> {
    let mut out = BulkHead::new_zeroed_head(from, to);
    match *bulk {
        Bulk::Read { op, region, offset, len, seal } => {
            out.head.kind = KIND_READ;
            out.set(op, region, offset, len);
            if let Some(seal) = seal {
                out.head.flags = FLAG_SEAL.into();
                out.seal_origin = seal.step.origin.bits().into();
                out.seal_seq = seal.step.seq.into();
                out.seal_generation = seal.generation.into();
                out.seal_len = seal.len.into();
            }
        }
        Bulk::Data { op, at } => {
            out.head.kind = KIND_DATA;
            out.op = op.into();
            out.at = at.into();
        }
        Bulk::Write { op, region, offset, len, at } => {
            out.head.kind = KIND_WRITE;
            out.set(op, region, offset, len);
            out.at = at.into();
        }
        Bulk::Signal { op } => {
            out.head.kind = KIND_SIGNAL;
            out.op = op.into();
        }
        Bulk::Done { op, status } => {
            out.head.kind = KIND_DONE;
            out.op = op.into();
            out.len = u64::from(status as u8).into();
        }
        Bulk::Cancel { op } => {
            out.head.kind = KIND_CANCEL;
            out.op = op.into();
        }
    }
    out.head.crc = crc32c(0, out.as_bytes()).into();
    let mut bytes = Vec::with_capacity(LENGTH_PREFIX + BULK_HEAD);
    let len = u32::try_from(BULK_HEAD + body).expect("a bulk frame is cut to its lane's cap");
    bytes.extend_from_slice(&len.to_le_bytes());
    bytes.extend_from_slice(out.as_bytes());
    bytes
}

/// Reads the header of a bulk frame of `len` bytes (without its length prefix), of which `bytes` is at least the
/// header. What carries no payload must end with the header.
pub fn decode(bytes: &[u8], len: usize) -> Result<Bulk, WireError> {
    let (header, _) = BulkHead::read_from_prefix(bytes).map_err(|_| WireError::Length)?;
    if u16::from(header.head.version) != VERSION {
        return Err(WireError::Unknown);
    }
    let blank = BulkHead { head: Head { crc: U32::ZERO, ..header.head }, ..header };
    if crc32c(0, blank.as_bytes()) != header.head.crc.get() {
        return Err(WireError::Checksum);
    }
    let body = len.checked_sub(BULK_HEAD).ok_or(WireError::Length)? as u64;
    let op = header.op.get();
    let (bulk, carries) = match header.head.kind {
        KIND_READ => {
            let seal = (header.head.flags.get() & FLAG_SEAL != 0).then(|| header.seal()).transpose()?;
            let (offset, len) = (header.offset.get(), header.len.get());
            (Bulk::Read { op, region: header.region()?, offset, len, seal }, false)
        }
        KIND_DATA => (Bulk::Data { op, at: header.at.get() }, true),
        KIND_WRITE => {
            let (offset, len, at) = (header.offset.get(), header.len.get(), header.at.get());
            // A piece that reaches past its operation's own end is a lie about one of the two.
            if at.checked_add(body).is_none_or(|end| end > len) {
                return Err(WireError::Length);
            }
            (Bulk::Write { op, region: header.region()?, offset, len, at }, true)
        }
        KIND_SIGNAL => (Bulk::Signal { op }, true),
        KIND_DONE => (Bulk::Done { op, status: status(header.len.get())? }, false),
        KIND_CANCEL => (Bulk::Cancel { op }, false),
        _ => return Err(WireError::Unknown),
    };
    if !carries && body != 0 {
        return Err(WireError::Length);
    }
    Ok(bulk)
}

impl BulkHead {
    fn new_zeroed_head(from: Incarnation, to: Incarnation) -> Self {
        let mut out = BulkHead::read_from_bytes(&[0; BULK_HEAD]).expect("the array has the header's size");
        out.head.version = VERSION as u8;
        out.head.from = from.bits().into();
        out.head.to = to.bits().into();
        out
    }

    fn set(&mut self, op: u64, region: RegionKey, offset: u64, len: u64) {
        self.op = op.into();
        self.region_owner = region.owner.bits().into();
        self.region_id = region.id.into();
        self.offset = offset.into();
        self.len = len.into();
    }

    fn region(&self) -> Result<RegionKey, WireError> {
        Ok(RegionKey { owner: incarnation(self.region_owner)?, id: self.region_id.get() })
    }

    fn seal(&self) -> Result<Seal, WireError> {
        let step = StepId { origin: incarnation(self.seal_origin)?, seq: self.seal_seq.get() };
        Ok(Seal { step, generation: self.seal_generation.get(), len: self.seal_len.get() })
    }
}

fn incarnation(bits: U64) -> Result<Incarnation, WireError> {
    match bits.get() {
        0 => Err(WireError::Unknown),
        bits => Ok(Incarnation::from_bits(bits)),
    }
}

fn status(code: u64) -> Result<Status, WireError> {
    [Status::Done, Status::UnknownRegion, Status::OutOfBounds, Status::SealMismatch]
        .into_iter()
        .find(|status| *status as u64 == code)
        .ok_or(WireError::Unknown)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::peek;
    use super::*;

    fn incarnation() -> impl Strategy<Value = Incarnation> {
        any::<u64>().prop_map(Incarnation::from_bits)
    }

    fn region() -> impl Strategy<Value = RegionKey> {
        (incarnation(), any::<u64>()).prop_map(|(owner, id)| RegionKey { owner, id })
    }

    fn bulk() -> impl Strategy<Value = Bulk> {
        let seal = (incarnation(), any::<[u64; 3]>()).prop_map(|(origin, [seq, generation, len])| Seal {
            step: StepId { origin, seq },
            generation,
            len,
        });
        let status = prop_oneof![
            Just(Status::Done),
            Just(Status::UnknownRegion),
            Just(Status::OutOfBounds),
            Just(Status::SealMismatch)
        ];
        prop_oneof![
            (any::<[u64; 3]>(), region(), prop::option::of(seal))
                .prop_map(|([op, offset, len], region, seal)| Bulk::Read { op, region, offset, len, seal }),
            any::<[u64; 2]>().prop_map(|[op, at]| Bulk::Data { op, at }),
            (any::<[u64; 2]>(), region(), 0u64..1000, 1000u64..2000)
                .prop_map(|([op, offset], region, at, len)| Bulk::Write { op, region, offset, len, at }),
            any::<u64>().prop_map(|op| Bulk::Signal { op }),
            (any::<u64>(), status).prop_map(|(op, status)| Bulk::Done { op, status }),
            any::<u64>().prop_map(|op| Bulk::Cancel { op }),
        ]
    }

    proptest! {
        #[test]
        fn a_bulk_header_round_trips(from in incarnation(), to in incarnation(), bulk in bulk()) {
            let bytes = encode(from, to, &bulk, 0);
            let frame = &bytes[LENGTH_PREFIX..];
            prop_assert!(is_bulk(frame));
            prop_assert_eq!(peek(frame), Some((from, to)));
            prop_assert_eq!(decode(frame, frame.len()), Ok(bulk));
        }

        #[test]
        fn a_changed_bulk_header_is_noticed(from in incarnation(), to in incarnation(), bulk in bulk(), at: usize, bit in 0u8..8) {
            let mut bytes = encode(from, to, &bulk, 0)[LENGTH_PREFIX..].to_vec();
            let at = at % bytes.len();
            bytes[at] ^= 1u8 << bit;
            prop_assert!(decode(&bytes, bytes.len()).is_err());
            prop_assert!(decode(&bytes[..at], at).is_err());
        }

        #[test]
        fn decoding_any_bulk_header_is_total(bytes in prop::collection::vec(any::<u8>(), 0..200), len: usize) {
            let _ = decode(&bytes, len);
            let _ = peek(&bytes);
        }
    }

    #[test]
    fn a_write_that_reaches_past_its_own_end_is_refused() {
        let region = RegionKey { owner: Incarnation::from_bits(2), id: 1 };
        let write = |len, at| Bulk::Write { op: 1, region, offset: 0, len, at };
        for (len, at, body, fits) in [(100, 60, 40, true), (100, 60, 41, false), (100, u64::MAX, 2, false)] {
            let bytes = encode(Incarnation::from_bits(1), Incarnation::from_bits(2), &write(len, at), body);
            assert_eq!(
                decode(&bytes[LENGTH_PREFIX..], BULK_HEAD + body).is_ok(),
                fits,
                "{at} + {body} of {len}"
            );
        }
    }

    #[test]
    fn what_carries_no_payload_ends_with_its_header() {
        let bytes = encode(Incarnation::from_bits(1), Incarnation::from_bits(2), &Bulk::Cancel { op: 1 }, 1);
        assert_eq!(decode(&bytes[LENGTH_PREFIX..], BULK_HEAD + 1), Err(WireError::Length));
    }
}
