use alloc::string::{String, ToString};
use alloc::vec::Vec;

use bytes::{Buf, Bytes};
use serde::{Deserialize, Serialize};
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{Control, LENGTH_PREFIX, VERSION, WireError, codec, crc32c};
use crate::{Incarnation, ReplicaNo, StepId};

/// A frame and both sides of its connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// The life that sent it.
    pub from: Incarnation,
    /// The life that it is meant for; any other refuses it.
    pub to: Incarnation,
    /// The frame.
    pub frame: Frame,
}

/// Everything that crosses a control connection after the hello.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// A step for the receiver.
    Step(Step),
    /// A step's end.
    Reply(Reply),
    /// One item of a streaming step.
    Item(Item),
    /// Everything small.
    Control(Control),
}

/// One unit of work on its way to a replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Its identity, the same at every hop and every attempt.
    pub id: StepId,
    /// Counts this hop's sends of the step, from 1.
    pub attempt: u32,
    /// The replica chosen at each later stage.
    pub route: Vec<ReplicaNo>,
    /// What the origin knows to be finished.
    pub completed: Completed,
    /// What is left of its deadline, in milliseconds; `None` without one.
    pub deadline_ms: Option<u32>,
    /// The step yields items before its reply.
    pub streaming: bool,
    /// The items that its submitter already has, in order; a successor goes on after them.
    pub resume: Vec<Bytes>,
    /// The application's metadata.
    pub meta: Bytes,
    /// The payload, or where it can be read.
    pub payload: Payload,
}

/// Which of an origin's steps are finished (P-3).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Completed {
    /// Every step below this number is finished.
    pub below: u64,
    /// These are finished as well, although an earlier one is not.
    pub above: Vec<u64>,
}

/// A step's payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// It travels in the frame.
    Inline(Bytes),
    /// It is read from a registered slot of the sender.
    Slot(Slot),
}

/// Names registered memory of one incarnation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RegionKey {
    /// The life that registered it; the key dies with it.
    pub owner: Incarnation,
    /// Its number there; never reused within a life.
    pub id: u64,
}

/// A sealed part of a registered region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The region.
    pub region: RegionKey,
    /// Where the payload starts in it.
    pub offset: u64,
    /// The payload's length in bytes.
    pub len: u64,
    /// The slot's generation: another one means that the slot was reused (P-6).
    pub generation: u64,
    /// The payload's CRC-32C, if the transport wants one.
    pub crc: Option<u32>,
}

/// What a slot holds, checked before and after each read (P-6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Seal {
    /// The step whose payload it is.
    pub step: StepId,
    /// Counts the slot's uses.
    pub generation: u64,
    /// The payload's length in bytes.
    pub len: u64,
}

/// The end of a step at its submitter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The step.
    pub id: StepId,
    /// The replicas that really served it, at the replying stage and each later one.
    pub route: Vec<ReplicaNo>,
    /// How many items a streaming step has yielded in all.
    pub items: u32,
    /// The result.
    pub result: Result<Bytes, StepError>,
}

/// One item of a streaming step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// The step.
    pub id: StepId,
    /// Counts the step's items from 0, across handovers.
    pub index: u32,
    /// The application's bytes.
    pub body: Bytes,
}

/// Why a step ended without a result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct StepError {
    /// What kind of failure it is.
    pub code: ErrorCode,
    /// Whether the step's work was done.
    pub outcome: Outcome,
    /// For people: what happened and what to do.
    pub message: String,
}

/// The kind of a step's failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum ErrorCode {
    /// The application refused or failed the step.
    Application = 1,
    /// The submitter cancelled it.
    Cancelled = 2,
    /// Its deadline passed.
    DeadlineExceeded = 3,
    /// No replica of the group could take it in time.
    Unavailable = 4,
    /// A bounded queue had no room, and the caller chose not to wait.
    Overloaded = 5,
    /// The step, or its reply, is larger than its lane allows.
    TooLarge = 6,
    /// The origin had said that the step is finished (P-3).
    Stale = 7,
    /// Its payload could not be read.
    PayloadLost = 8,
    /// State that it needs was lost too often (the recovery budget is spent).
    RecoveryExhausted = 9,
    /// The engine panicked or broke its contract.
    Internal = 10,
    /// The replica is leaving and has not started it.
    Draining = 11,
}

/// Whether the work of a step that failed was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum Outcome {
    /// No replica began it.
    NotStarted = 1,
    /// A replica may have begun or even finished it.
    MayHaveRun = 2,
    /// A replica ran it to this failure.
    Ran = 3,
}

impl StepError {
    /// An error by its parts.
    pub fn new(code: ErrorCode, outcome: Outcome, message: impl Into<String>) -> Self {
        StepError { code, outcome, message: message.into() }
    }
}

impl Completed {
    /// Whether the origin has said that its step `seq` is finished.
    pub fn contains(&self, seq: u64) -> bool {
        seq < self.below || self.above.contains(&seq)
    }
}

/// A frame ready for a connection: the length prefix and all but the body, then the body, so that a body that is
/// already in memory is not copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// The length prefix, the header and the sections.
    pub head: Bytes,
    /// The payload or reply body; often empty.
    pub body: Bytes,
}

impl Encoded {
    /// The frame's length on the wire, prefix included.
    pub fn len(&self) -> usize {
        self.head.len() + self.body.len()
    }

    /// Never: a frame has at least its prefix.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The frame without its length prefix, in one piece.
    pub fn to_frame(&self) -> Bytes {
        let mut out = Vec::with_capacity(self.len() - LENGTH_PREFIX);
        out.extend_from_slice(&self.head[LENGTH_PREFIX..]);
        out.extend_from_slice(&self.body);
        out.into()
    }
}

const KIND_STEP: u8 = 1;
const KIND_REPLY: u8 = 2;
const KIND_ITEM: u8 = 3;
const KIND_CONTROL: u8 = 4;

const FLAG_STREAMING: u16 = 1;
const FLAG_SLOT: u16 = 2;
const FLAG_PAYLOAD_CRC: u16 = 4;
const FLAG_DEADLINE: u16 = 8;
const FLAG_FAILED: u16 = 16;

/// In front of every frame. `crc` covers the frame up to its body, itself taken as zero.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
pub(super) struct Head {
    pub(super) kind: u8,
    pub(super) version: u8,
    pub(super) flags: U16,
    pub(super) crc: U32,
    pub(super) from: U64,
    pub(super) to: U64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct StepHead {
    origin: U64,
    seq: U64,
    completed_below: U64,
    attempt: U32,
    deadline_ms: U32,
    completed_above: U16,
    route: U16,
    resume: U32,
    meta: U32,
    payload_crc: U32,
    payload_len: U64,
    region_owner: U64,
    region_id: U64,
    offset: U64,
    generation: U64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct ReplyHead {
    origin: U64,
    seq: U64,
    items: U32,
    route: U16,
    code: u8,
    outcome: u8,
    body: U32,
}

const HEAD: usize = size_of::<Head>();

/// Encodes a frame from one life to another.
pub fn encode(from: Incarnation, to: Incarnation, frame: &Frame) -> Encoded {
    let mut out = Vec::with_capacity(160);
    out.extend_from_slice(&[0; LENGTH_PREFIX]);
    let mut head = Head {
        kind: 0,
        version: VERSION as u8,
        flags: U16::ZERO,
        crc: U32::ZERO,
        from: from.bits().into(),
        to: to.bits().into(),
    };
    out.extend_from_slice(head.as_bytes());
    let (kind, flags, body) = match frame {
        Frame::Step(step) => write_step(&mut out, step),
        Frame::Reply(reply) => write_reply(&mut out, reply),
        Frame::Item(item) => {
            write_reply_head(&mut out, item.id, item.index, &[], (0, 0), item.body.len());
            (KIND_ITEM, 0, item.body.clone())
        }
        Frame::Control(control) => {
            codec::write(&mut out, control);
            (KIND_CONTROL, 0, Bytes::new())
        }
    };
    head.kind = kind;
    head.flags = flags.into();
    out[LENGTH_PREFIX..LENGTH_PREFIX + HEAD].copy_from_slice(head.as_bytes());
    head.crc = crc32c(0, &out[LENGTH_PREFIX..]).into();
    out[LENGTH_PREFIX..LENGTH_PREFIX + HEAD].copy_from_slice(head.as_bytes());
    let len = u32::try_from(out.len() - LENGTH_PREFIX + body.len()).unwrap_or(u32::MAX);
    out[..LENGTH_PREFIX].copy_from_slice(&len.to_le_bytes());
    Encoded { head: out.into(), body }
}

fn write_step(out: &mut Vec<u8>, step: &Step) -> (u8, u16, Bytes) {
    let mut flags = 0;
    let mut header = StepHead {
        origin: step.id.origin.bits().into(),
        seq: step.id.seq.into(),
        completed_below: step.completed.below.into(),
        attempt: step.attempt.into(),
        deadline_ms: step.deadline_ms.unwrap_or(0).into(),
        completed_above: (step.completed.above.len() as u16).into(),
        route: (step.route.len() as u16).into(),
        resume: (step.resume.len() as u32).into(),
        meta: (step.meta.len() as u32).into(),
        payload_crc: U32::ZERO,
        payload_len: U64::ZERO,
        region_owner: U64::ZERO,
        region_id: U64::ZERO,
        offset: U64::ZERO,
        generation: U64::ZERO,
    };
    let body = match &step.payload {
        Payload::Inline(bytes) => {
            header.payload_len = (bytes.len() as u64).into();
            bytes.clone()
        }
        Payload::Slot(slot) => {
            flags |= FLAG_SLOT;
            header.payload_len = slot.len.into();
            header.region_owner = slot.region.owner.bits().into();
            header.region_id = slot.region.id.into();
            header.offset = slot.offset.into();
            header.generation = slot.generation.into();
            if let Some(crc) = slot.crc {
                flags |= FLAG_PAYLOAD_CRC;
                header.payload_crc = crc.into();
            }
            Bytes::new()
        }
    };
    if step.streaming {
        flags |= FLAG_STREAMING;
    }
    if step.deadline_ms.is_some() {
        flags |= FLAG_DEADLINE;
    }
    out.extend_from_slice(header.as_bytes());
    for seq in &step.completed.above {
        out.extend_from_slice(&seq.to_le_bytes());
    }
    for replica in &step.route {
        out.extend_from_slice(&replica.to_le_bytes());
    }
    for item in &step.resume {
        out.extend_from_slice(&(item.len() as u32).to_le_bytes());
        out.extend_from_slice(item);
    }
    out.extend_from_slice(&step.meta);
    (KIND_STEP, flags, body)
}

fn write_reply(out: &mut Vec<u8>, reply: &Reply) -> (u8, u16, Bytes) {
    let (flags, status, body) = match &reply.result {
        Ok(body) => (0, (0, 0), body.clone()),
        Err(error) => {
            let text = Bytes::copy_from_slice(error.message.as_bytes());
            (FLAG_FAILED, (error.code as u8, error.outcome as u8), text)
        }
    };
    write_reply_head(out, reply.id, reply.items, &reply.route, status, body.len());
    (KIND_REPLY, flags, body)
}

fn write_reply_head(
    out: &mut Vec<u8>,
    id: StepId,
    items: u32,
    route: &[ReplicaNo],
    (code, outcome): (u8, u8),
    body: usize,
) {
    let header = ReplyHead {
        origin: id.origin.bits().into(),
        seq: id.seq.into(),
        items: items.into(),
        route: (route.len() as u16).into(),
        code,
        outcome,
        body: (body as u32).into(),
    };
    out.extend_from_slice(header.as_bytes());
    for replica in route {
        out.extend_from_slice(&replica.to_le_bytes());
    }
}

/// Decodes a frame (without its length prefix). The bodies share the frame's memory.
pub fn decode(mut frame: Bytes) -> Result<Envelope, WireError> {
    let whole = frame.clone();
    let head = take::<Head>(&mut frame)?;
    if u16::from(head.version) != VERSION {
        return Err(WireError::Unknown);
    }
    let flags = head.flags.get();
    let check = |body: usize| {
        let covered = whole.len().checked_sub(body).filter(|n| *n >= HEAD).ok_or(WireError::Length)?;
        let blank = Head { crc: U32::ZERO, ..head };
        let crc = crc32c(crc32c(0, blank.as_bytes()), &whole[HEAD..covered]);
        if crc == head.crc.get() { Ok(()) } else { Err(WireError::Checksum) }
    };
    let frame = match head.kind {
        KIND_STEP => Frame::Step(read_step(flags, frame, check)?),
        KIND_REPLY => Frame::Reply(read_reply(flags, frame, check)?),
        KIND_ITEM => {
            let (header, route, body) = read_reply_parts(frame, check)?;
            if !route.is_empty() {
                return Err(WireError::Unknown);
            }
            Frame::Item(Item { id: step_id(header.origin, header.seq)?, index: header.items.get(), body })
        }
        KIND_CONTROL => {
            check(0)?;
            Frame::Control(codec::read(&frame)?)
        }
        _ => return Err(WireError::Unknown),
    };
    Ok(Envelope { from: incarnation(head.from)?, to: incarnation(head.to)?, frame })
}

/// The two sides that a frame (without its length prefix) names, before anything else of it is looked at or
/// verified; `None` if it is too short to be a frame, or names nobody.
pub fn peek(frame: &[u8]) -> Option<(Incarnation, Incarnation)> {
    let (head, _) = Head::read_from_prefix(frame).ok()?;
    Some((incarnation(head.from).ok()?, incarnation(head.to).ok()?))
}

fn read_step(
    flags: u16,
    mut frame: Bytes,
    check: impl Fn(usize) -> Result<(), WireError>,
) -> Result<Step, WireError> {
    let header = take::<StepHead>(&mut frame)?;
    let inline = if flags & FLAG_SLOT == 0 { header.payload_len.get() } else { 0 };
    check(usize::try_from(inline).map_err(|_| WireError::Length)?)?;
    let mut above = Vec::new();
    for _ in 0..header.completed_above.get() {
        above.push(take::<U64>(&mut frame)?.get());
    }
    let mut route = Vec::new();
    for _ in 0..header.route.get() {
        route.push(take::<U32>(&mut frame)?.get());
    }
    let mut resume = Vec::new();
    for _ in 0..header.resume.get() {
        let len = take::<U32>(&mut frame)?.get() as usize;
        resume.push(split(&mut frame, len)?);
    }
    let meta = split(&mut frame, header.meta.get() as usize)?;
    let payload = if flags & FLAG_SLOT == 0 {
        if frame.len() as u64 != inline {
            return Err(WireError::Length);
        }
        Payload::Inline(frame)
    } else {
        if !frame.is_empty() {
            return Err(WireError::Length);
        }
        Payload::Slot(Slot {
            region: RegionKey { owner: incarnation(header.region_owner)?, id: header.region_id.get() },
            offset: header.offset.get(),
            len: header.payload_len.get(),
            generation: header.generation.get(),
            crc: (flags & FLAG_PAYLOAD_CRC != 0).then_some(header.payload_crc.get()),
        })
    };
    Ok(Step {
        id: step_id(header.origin, header.seq)?,
        attempt: header.attempt.get(),
        route,
        completed: Completed { below: header.completed_below.get(), above },
        deadline_ms: (flags & FLAG_DEADLINE != 0).then_some(header.deadline_ms.get()),
        streaming: flags & FLAG_STREAMING != 0,
        resume,
        meta,
        payload,
    })
}

fn read_reply(
    flags: u16,
    frame: Bytes,
    check: impl Fn(usize) -> Result<(), WireError>,
) -> Result<Reply, WireError> {
    let (header, route, body) = read_reply_parts(frame, check)?;
    let result = if flags & FLAG_FAILED == 0 {
        Ok(body)
    } else {
        let message = core::str::from_utf8(&body).map_err(|_| WireError::Unknown)?.to_string();
        Err(StepError { code: error_code(header.code)?, outcome: outcome(header.outcome)?, message })
    };
    Ok(Reply { id: step_id(header.origin, header.seq)?, route, items: header.items.get(), result })
}

fn read_reply_parts(
    mut frame: Bytes,
    check: impl Fn(usize) -> Result<(), WireError>,
) -> Result<(ReplyHead, Vec<ReplicaNo>, Bytes), WireError> {
    let header = take::<ReplyHead>(&mut frame)?;
    check(header.body.get() as usize)?;
    let mut route = Vec::new();
    for _ in 0..header.route.get() {
        route.push(take::<U32>(&mut frame)?.get());
    }
    if frame.len() != header.body.get() as usize {
        return Err(WireError::Length);
    }
    Ok((header, route, frame))
}

fn take<T: FromBytes>(frame: &mut Bytes) -> Result<T, WireError> {
    let (value, _) = T::read_from_prefix(frame).map_err(|_| WireError::Length)?;
    frame.advance(size_of::<T>());
    Ok(value)
}

fn split(frame: &mut Bytes, len: usize) -> Result<Bytes, WireError> {
    if len > frame.len() {
        return Err(WireError::Length);
    }
    Ok(frame.split_to(len))
}

fn incarnation(bits: U64) -> Result<Incarnation, WireError> {
    match bits.get() {
        0 => Err(WireError::Unknown),
        bits => Ok(Incarnation::from_bits(bits)),
    }
}

fn step_id(origin: U64, seq: U64) -> Result<StepId, WireError> {
    Ok(StepId { origin: incarnation(origin)?, seq: seq.get() })
}

fn error_code(code: u8) -> Result<ErrorCode, WireError> {
    use ErrorCode::*;
    [
        Application,
        Cancelled,
        DeadlineExceeded,
        Unavailable,
        Overloaded,
        TooLarge,
        Stale,
        PayloadLost,
        RecoveryExhausted,
        Internal,
        Draining,
    ]
    .into_iter()
    .find(|known| *known as u8 == code)
    .ok_or(WireError::Unknown)
}

fn outcome(code: u8) -> Result<Outcome, WireError> {
    [Outcome::NotStarted, Outcome::MayHaveRun, Outcome::Ran]
        .into_iter()
        .find(|known| *known as u8 == code)
        .ok_or(WireError::Unknown)
}
