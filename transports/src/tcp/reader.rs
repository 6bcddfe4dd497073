//! The receiving side of a connection: frames out of a byte stream, payloads straight into their destination.

use std::io::{self, ErrorKind, IoSliceMut, Read};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use connex_protocol::wire::bulk::{self, BULK_HEAD, Bulk, Status};
use connex_protocol::wire::hello::{HELLO_MAX, Lane as LaneKind};
use connex_protocol::wire::{self, LENGTH_PREFIX};
use connex_protocol::{Evidence, Incarnation};

use super::Shared;
use super::driver::{Conn, Driver, Phase, SCRATCH};
use super::lane::{Push, Source};
use super::link::{Landing, Link, Pending};
use super::regions::Registration;
use crate::{Completion, Event, OpError, RegionError};

/// How much one connection reads before the others have their turn.
const READ_BUDGET: usize = 4 << 20;

/// What is read at once from a bulk connection without a destination: a header and a small payload. The rest of a
/// large one goes straight to where it belongs.
const BULK_SCRATCH: usize = 20 << 10;

/// A frame shorter than this is gathered in the scratch buffer, a longer one in a buffer of its own.
const GATHERED: usize = 16 << 10;

/// How many reads a peer may ask for at once.
const PUSHES_MAX: usize = 8192;

/// Where the next bytes of a connection go.
pub(super) enum Sink {
    /// A frame's length comes next.
    Closed,
    /// A frame, without its length prefix.
    Frame { buf: Vec<u8>, got: usize },
    /// A read's destination, for `left` more bytes.
    Read { no: u64, pending: Pending, left: usize },
    /// Memory that a peer writes; `None` if the write is refused.
    Write { region: Option<Arc<Registration>>, at: u64, left: usize },
    /// Nowhere: the operation is over.
    Discard { left: usize },
}

/// A peer's write on its way in.
pub(super) struct Incoming {
    op: u64,
    len: u64,
    next: u64,
    refused: Option<Status>,
    done: bool,
}

/// How a look at a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Nothing more to read now.
    Drained,
    /// There may be more: others have their turn first.
    More,
    /// A hello was accepted.
    Greeted,
    /// The connection is over.
    Ended(Evidence),
}

/// Ends a session whose peer broke the protocol.
const VIOLATION: Outcome = Outcome::Ended(Evidence::ProtocolViolation);

impl Sink {
    pub(super) fn is_open(&self) -> bool {
        !matches!(self, Sink::Closed)
    }

    fn left(&self) -> usize {
        match self {
            Sink::Closed => 0,
            Sink::Frame { buf, got } => buf.len() - got,
            Sink::Read { left, .. } | Sink::Write { left, .. } | Sink::Discard { left } => *left,
        }
    }

    /// Where the kernel can put the next bytes itself.
    fn buffer(&mut self) -> Option<&mut [u8]> {
        match self {
            Sink::Frame { buf, got } => Some(&mut buf[*got..]),
            Sink::Read { pending: Pending { read: Some(landing), .. }, left, .. } => {
                Some(&mut landing.into[landing.at..landing.at + *left])
            }
            _ => None,
        }
    }

    /// Accounts for `count` bytes that are in the buffer.
    fn fill(&mut self, count: usize) {
        match self {
            Sink::Frame { got, .. } => *got += count,
            Sink::Read { pending: Pending { read: Some(landing), .. }, left, .. } => {
                landing.add(count);
                *left -= count;
            }
            _ => {}
        }
    }

    /// Takes bytes that were read elsewhere, as many as are its own, and returns how many.
    fn take(&mut self, bytes: &[u8]) -> usize {
        let count = bytes.len().min(self.left());
        let bytes = &bytes[..count];
        match self {
            Sink::Write { region, at, left } => {
                if let Some(registration) = region {
                    // A region that was deregistered half way takes no more (F19).
                    let written = registration.with(|memory| memory.write(*at, bytes));
                    if !matches!(written, Some(Ok(()))) {
                        *region = None;
                    }
                }
                *at += count as u64;
                *left -= count;
            }
            Sink::Discard { left } => *left -= count,
            Sink::Frame { .. } | Sink::Read { .. } => {
                if let Some(buffer) = self.buffer() {
                    buffer[..count].copy_from_slice(bytes);
                    self.fill(count);
                }
            }
            Sink::Closed => {}
        }
        count
    }
}

impl Landing {
    fn add(&mut self, count: usize) {
        if self.crc.is_some() {
            self.sum = crc32c::crc32c_append(self.sum, &self.into[self.at..self.at + count]);
        }
        self.at += count;
    }
}

impl Driver {
    /// Reads what has arrived, and handles it.
    pub(super) fn read(&mut self, shared: &Shared, conn: &mut Conn) -> Outcome {
        let mut scratch = std::mem::take(&mut self.scratch);
        let mut budget = READ_BUDGET;
        let mut drained = false;
        let outcome = loop {
            if matches!(conn.phase, Phase::Half { .. }) {
                // Frames of a link that is not whole wait in the socket.
                break Outcome::Drained;
            }
            if shared.lead.failed() || budget == 0 {
                break Outcome::More;
            }
            if std::mem::take(&mut conn.kept) {
                let carry = std::mem::take(&mut conn.carry);
                match self.feed(shared, conn, &carry) {
                    Outcome::Drained => continue,
                    outcome => break outcome,
                }
            }
            if drained {
                break Outcome::Drained;
            }
            let (result, asked, begun) = receive(conn, &mut scratch);
            let count = match result {
                Ok(0) if asked > 0 => break Outcome::Ended(Evidence::ConnectionClosed),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    conn.carry.extend_from_slice(&scratch[..begun]);
                    break Outcome::Drained;
                }
                Err(_) => break Outcome::Ended(Evidence::ConnectionReset),
            };
            conn.received += count as u64;
            budget = budget.saturating_sub(count);
            // A short read has emptied the socket; what comes later is an event of its own. An end of the stream that
            // was announced before has to be read.
            drained = count < asked && !conn.hung_up;
            let direct =
                if conn.sink.is_open() { count.min(conn.sink.buffer().map_or(0, |b| b.len())) } else { 0 };
            conn.sink.fill(direct);
            match self.feed(shared, conn, &scratch[..begun + count - direct]) {
                Outcome::Drained => {}
                outcome => break outcome,
            }
        };
        self.scratch = scratch;
        outcome
    }

    /// Handles bytes in the order of the stream; what is not whole is kept.
    fn feed(&mut self, shared: &Shared, conn: &mut Conn, mut bytes: &[u8]) -> Outcome {
        loop {
            if conn.sink.is_open() {
                let taken = conn.sink.take(bytes);
                bytes = &bytes[taken..];
                if conn.sink.left() > 0 {
                    return Outcome::Drained;
                }
                if let Err(outcome) = self.close_sink(shared, conn) {
                    return outcome;
                }
                continue;
            }
            match &conn.phase {
                Phase::Lingering => return Outcome::Drained,
                Phase::Half { .. } => {
                    conn.carry.extend_from_slice(bytes);
                    return Outcome::Greeted;
                }
                _ => {}
            }
            let Some((prefix, rest)) = bytes.split_first_chunk::<LENGTH_PREFIX>() else {
                conn.carry.extend_from_slice(bytes);
                return Outcome::Drained;
            };
            let len = u32::from_le_bytes(*prefix) as usize;
            let step = match &conn.phase {
                Phase::Up(link) => {
                    let link = link.clone();
                    self.frame(shared, conn, &link, len, rest)
                }
                _ if len > HELLO_MAX => return VIOLATION,
                _ if rest.len() < len => Ok(None),
                _ => self.on_opening(shared, conn, &rest[..len]).map(|()| Some(len)),
            };
            match step {
                Ok(Some(used)) => bytes = &rest[used..],
                Ok(None) => {
                    conn.carry.extend_from_slice(bytes);
                    return Outcome::Drained;
                }
                Err(outcome) => return outcome,
            }
        }
    }

    /// Begins with a frame of `len` bytes; returns how many of `bytes` are used, or `None` if more have to come first.
    fn frame(
        &mut self,
        shared: &Shared,
        conn: &mut Conn,
        link: &Arc<Link>,
        len: usize,
        bytes: &[u8],
    ) -> Result<Option<usize>, Outcome> {
        if len > shared.config.frame_max(conn.kind) {
            return Err(VIOLATION);
        }
        if conn.kind == LaneKind::Bulk && bulk::is_bulk(bytes) {
            if bytes.len() < BULK_HEAD {
                return if len < BULK_HEAD { Err(VIOLATION) } else { Ok(None) };
            }
            check_sides(link, bytes)?;
            let head = bulk::decode(bytes, len).map_err(|_| VIOLATION)?;
            match head {
                Bulk::Data { op, at } => return self.on_data(conn, link, op, at, len - BULK_HEAD).map(Some),
                Bulk::Write { .. } => return self.on_write(shared, conn, head, len - BULK_HEAD).map(Some),
                _ => {}
            }
        }
        if bytes.len() >= len {
            self.whole(shared, conn, link, Bytes::copy_from_slice(&bytes[..len]))?;
            return Ok(Some(len));
        }
        if len <= GATHERED {
            return Ok(None);
        }
        let mut buf = vec![0; len];
        buf[..bytes.len()].copy_from_slice(bytes);
        conn.sink = Sink::Frame { buf, got: bytes.len() };
        Ok(Some(bytes.len()))
    }

    /// Handles a frame that is there in one piece.
    fn whole(
        &mut self,
        shared: &Shared,
        conn: &mut Conn,
        link: &Arc<Link>,
        frame: Bytes,
    ) -> Result<(), Outcome> {
        check_sides(link, &frame)?;
        if conn.kind == LaneKind::Control || !bulk::is_bulk(&frame) {
            if crate::is_goodbye(&frame) {
                link.left.store(true, Ordering::Release);
            }
            self.message(shared, link, conn.kind, frame);
            return Ok(());
        }
        match bulk::decode(&frame, frame.len()).map_err(|_| VIOLATION)? {
            Bulk::Read { op, region, offset, len, seal } => {
                let found =
                    shared.regions.find(region).ok_or(Status::UnknownRegion).and_then(|registration| {
                        match registration.with(|region| region.find(offset, len, seal)) {
                            None => Err(Status::UnknownRegion),
                            Some(Err(error)) => Err(status(error)),
                            Some(Ok(payload)) => Ok((registration, payload)),
                        }
                    });
                match found {
                    Err(status) => self.done(shared, link, op, status)?,
                    Ok((registration, payload)) => {
                        let source = payload.map_or(Source::Plain(offset), Source::Slot);
                        let (from, to) = (link.own, link.peer.incarnation);
                        let chunk = shared.config.chunk();
                        let push = Push { op, from, to, registration, source, len, at: 0, chunk };
                        if !link.bulk.push(push, PUSHES_MAX) {
                            return Err(VIOLATION);
                        }
                    }
                }
            }
            Bulk::Signal { op } => {
                let inner = frame.slice(BULK_HEAD..);
                check_sides(link, &inner)?;
                let landed = conn
                    .incoming
                    .as_ref()
                    .is_some_and(|write| write.op == op && write.done && write.refused.is_none());
                if landed {
                    self.message(shared, link, LaneKind::Bulk, inner);
                }
            }
            Bulk::Done { op, status } => self.on_done(shared, link, op, status)?,
            Bulk::Cancel { op } => link.bulk.forget_push(op),
            Bulk::Data { .. } | Bulk::Write { .. } => return Err(VIOLATION),
        }
        Ok(())
    }

    fn message(&mut self, shared: &Shared, link: &Link, lane: LaneKind, frame: Bytes) {
        let from = link.peer.incarnation;
        if !shared.is_fenced(from) {
            self.emit(shared, Event::Message { from, lane, frame });
        }
    }

    /// Answers an operation; a peer that lets answers pile up is not served on.
    fn done(&self, shared: &Shared, link: &Link, op: u64, status: Status) -> Result<(), Outcome> {
        let done = bulk::encode(link.own, link.peer.incarnation, &Bulk::Done { op, status }, 0);
        if link.bulk.tell(done, shared.config.queue_max) { Ok(()) } else { Err(VIOLATION) }
    }

    /// Bytes of a read of this side follow: they go into its destination, or nowhere if it is over.
    fn on_data(
        &mut self,
        conn: &mut Conn,
        link: &Link,
        op: u64,
        at: u64,
        len: usize,
    ) -> Result<usize, Outcome> {
        let pending = link.operations().table.remove(&op);
        conn.sink = match pending {
            None => Sink::Discard { left: len },
            Some(pending) => {
                let fits = pending
                    .read
                    .as_ref()
                    .is_some_and(|landing| landing.at as u64 == at && landing.at + len <= landing.len);
                if !fits {
                    link.operations().table.insert(op, pending);
                    return Err(VIOLATION);
                }
                Sink::Read { no: op, pending, left: len }
            }
        };
        Ok(BULK_HEAD)
    }

    /// Bytes of a peer's write follow.
    fn on_write(
        &mut self,
        shared: &Shared,
        conn: &mut Conn,
        head: Bulk,
        body: usize,
    ) -> Result<usize, Outcome> {
        let Bulk::Write { op, region, offset, len, at } = head else {
            unreachable!("the caller matched a write")
        };
        let registration = shared.regions.find(region);
        if at == 0 {
            let admitted = match registration
                .as_ref()
                .and_then(|found| found.with(|region| region.takes(offset, len)))
            {
                None => Some(Status::UnknownRegion),
                Some(Err(error)) => Some(status(error)),
                Some(Ok(())) => None,
            };
            conn.incoming = Some(Incoming { op, len, next: 0, refused: admitted, done: false });
        }
        let Some(write) = conn.incoming.as_mut().filter(|write| write.op == op && write.next == at) else {
            return Err(VIOLATION);
        };
        if write.len != len || write.done {
            return Err(VIOLATION);
        }
        write.next = at + body as u64;
        if write.refused.is_none() && registration.is_none() {
            write.refused = Some(Status::UnknownRegion);
        }
        let region = registration.filter(|_| write.refused.is_none());
        // The range was admitted as a whole, so no piece of it overflows.
        conn.sink = Sink::Write { region, at: offset.wrapping_add(at), left: body };
        Ok(BULK_HEAD)
    }

    fn on_done(&mut self, shared: &Shared, link: &Link, op: u64, status: Status) -> Result<(), Outcome> {
        // An operation that timed out has ended already.
        let Some(pending) = link.operations().table.remove(&op) else { return Ok(()) };
        let result = match status {
            Status::Done if pending.read.is_some() => {
                link.operations().table.insert(op, pending);
                return Err(VIOLATION);
            }
            Status::Done => Ok(bytes::BytesMut::new()),
            Status::UnknownRegion => Err(OpError::UnknownRegion),
            Status::OutOfBounds => Err(OpError::OutOfBounds),
            Status::SealMismatch => Err(OpError::SealMismatch),
        };
        if result.is_err() {
            // The owner has refused it: the rest of a write need not go out.
            link.bulk.forget_write(op);
        }
        self.complete(shared, link.peer.incarnation, pending, result);
        Ok(())
    }

    fn complete(
        &mut self,
        shared: &Shared,
        peer: Incarnation,
        pending: Pending,
        result: Result<bytes::BytesMut, OpError>,
    ) {
        self.emit(shared, Event::Completed(Completion { id: pending.id, peer, result }));
    }

    /// What a sink was open for is complete.
    fn close_sink(&mut self, shared: &Shared, conn: &mut Conn) -> Result<(), Outcome> {
        let sink = std::mem::replace(&mut conn.sink, Sink::Closed);
        let Phase::Up(link) = &conn.phase else { return Ok(()) };
        let link = link.clone();
        match sink {
            Sink::Frame { buf, .. } => self.whole(shared, conn, &link, buf.into())?,
            Sink::Read { no, mut pending, .. } => {
                let Some(landing) = pending.read.take_if(|landing| landing.at == landing.len) else {
                    link.operations().table.insert(no, pending);
                    return Ok(());
                };
                let Landing { mut into, len, crc, sum, .. } = landing;
                into.truncate(len);
                let result = if crc.is_none_or(|crc| crc == sum) { Ok(into) } else { Err(OpError::Checksum) };
                self.complete(shared, link.peer.incarnation, pending, result);
            }
            Sink::Write { region, .. } => {
                let Some(write) = &mut conn.incoming else { return Err(VIOLATION) };
                if region.is_none() && write.refused.is_none() {
                    write.refused = Some(Status::UnknownRegion);
                }
                if write.next == write.len {
                    write.done = true;
                    let (op, status) = (write.op, write.refused.unwrap_or(Status::Done));
                    self.done(shared, &link, op, status)?;
                }
            }
            Sink::Discard { .. } | Sink::Closed => {}
        }
        Ok(())
    }
}

/// Reads once: into the sink's own buffer if it has one, and behind what was carried over into the scratch buffer.
/// Returns how many bytes could have come, and how many of the scratch buffer were there before.
fn receive(conn: &mut Conn, scratch: &mut [u8]) -> (io::Result<usize>, usize, usize) {
    let begun = conn.carry.len();
    scratch[..begun].copy_from_slice(&conn.carry);
    conn.carry.clear();
    let room = if conn.kind == LaneKind::Bulk { BULK_SCRATCH.max(begun + 1024) } else { SCRATCH };
    let rest = &mut scratch[begun..room];
    let mut socket = &conn.lane.stream;
    match conn.sink.buffer() {
        Some(buffer) => {
            let asked = buffer.len() + rest.len();
            let result = socket.read_vectored(&mut [IoSliceMut::new(buffer), IoSliceMut::new(rest)]);
            (result, asked, begun)
        }
        None => (socket.read(rest), rest.len(), begun),
    }
}

/// A frame between other lives than the link's two ends the session.
fn check_sides(link: &Link, frame: &[u8]) -> Result<(), Outcome> {
    match wire::peek(frame) {
        Some(sides) if sides == (link.peer.incarnation, link.own) => Ok(()),
        _ => Err(VIOLATION),
    }
}

fn status(error: RegionError) -> Status {
    match error {
        RegionError::OutOfBounds => Status::OutOfBounds,
        RegionError::SealMismatch => Status::SealMismatch,
        RegionError::Unsupported | RegionError::Full => Status::UnknownRegion,
    }
}
