//! The sending side of one connection: a bounded queue in front of a non-blocking socket.

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, Write};
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use connex_protocol::Incarnation;
use connex_protocol::wire::Encoded;
use connex_protocol::wire::bulk::{self, Bulk, Status};
use mio::Token;
use mio::net::TcpStream;

use super::regions::Registration;
use crate::RefusedWhy;

/// Slices handed to the kernel in one call.
const SLICES: usize = 16;

/// One connection's socket and what waits to be written to it.
pub(super) struct Lane {
    pub(super) stream: TcpStream,
    pub(super) token: Token,
    out: Mutex<Outbox>,
    /// Something waits: the driver looks into the queue only then.
    waiting: AtomicBool,
    reset: AtomicBool,
}

struct Outbox {
    queue: VecDeque<Item>,
    /// How much of the first frame is written.
    sent: usize,
    /// Bytes that were posted and are not yet with the kernel. Pushes do not count: they hold no memory of their own.
    queued: usize,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    /// The queue is written out, then the sending side closed.
    Finishing,
    Closed,
}

enum Item {
    Frame { frame: Encoded, op: u64, counted: bool },
    Push(Push),
}

/// A read that is being served: it makes its frames as the socket takes them.
pub(super) struct Push {
    pub(super) op: u64,
    pub(super) from: Incarnation,
    pub(super) to: Incarnation,
    pub(super) registration: Arc<Registration>,
    pub(super) source: Source,
    pub(super) len: u64,
    pub(super) at: u64,
    pub(super) chunk: usize,
}

/// Where a read's bytes are.
pub(super) enum Source {
    /// A slot's payload, by reference: it can't change (P-6).
    Slot(Bytes),
    /// Plain memory from this offset on, copied piece by piece.
    Plain(u64),
}

/// How a flush went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flushed {
    /// Nothing waits any more.
    Drained,
    /// The socket takes no more now.
    Blocked,
    /// The budget is used up, and the socket would take more.
    More,
    /// The connection is broken; the driver hears of it from the socket.
    Broken,
}

impl Lane {
    pub(super) fn new(stream: TcpStream, token: Token) -> Self {
        let out = Outbox { queue: VecDeque::new(), sent: 0, queued: 0, state: State::Open };
        Lane {
            stream,
            token,
            out: Mutex::new(out),
            waiting: AtomicBool::new(false),
            reset: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Outbox> {
        self.out.lock().expect("nothing under this lock panics")
    }

    /// Sends a frame: at once as far as the socket takes it, the rest through the queue. A queue that would exceed
    /// `queue_max` bytes refuses, unless it is empty.
    pub(super) fn post(&self, frame: Encoded, queue_max: usize) -> Result<(), (Encoded, RefusedWhy)> {
        let mut out = self.lock();
        let len = frame.len();
        if out.state != State::Open {
            return Err((frame, RefusedWhy::NotConnected));
        }
        if out.queued > 0 && out.queued + len > queue_max {
            return Err((frame, RefusedWhy::Full));
        }
        let was_idle = out.queue.is_empty();
        out.queued += len;
        out.queue.push_back(Item::Frame { frame, op: 0, counted: true });
        if was_idle && self.write(&mut out, usize::MAX) == Flushed::Broken {
            // A frame that went out in part is still refused: the peer drops what is not whole.
            return match out.queue.pop_front() {
                Some(Item::Frame { frame, .. }) => Err((frame, RefusedWhy::NotConnected)),
                _ => Ok(()),
            };
        }
        self.note(&out);
        Ok(())
    }

    /// Sends several frames of one operation, all or none.
    pub(super) fn post_all(&self, frames: Vec<Encoded>, op: u64, queue_max: usize) -> Result<(), RefusedWhy> {
        let mut out = self.lock();
        let len: usize = frames.iter().map(Encoded::len).sum();
        if out.state != State::Open {
            return Err(RefusedWhy::NotConnected);
        }
        if out.queued > 0 && out.queued + len > queue_max {
            return Err(RefusedWhy::Full);
        }
        let was_idle = out.queue.is_empty();
        out.queued += len;
        out.queue.extend(frames.into_iter().map(|frame| Item::Frame { frame, op, counted: true }));
        if was_idle && self.write(&mut out, usize::MAX) == Flushed::Broken {
            return Err(RefusedWhy::NotConnected);
        }
        self.note(&out);
        Ok(())
    }

    /// Serves a read; false if the peer asked for more at once than an honest one does.
    pub(super) fn push(&self, push: Push, pushes_max: usize) -> bool {
        let mut out = self.lock();
        if out.state != State::Open {
            return true;
        }
        if out.queue.len() > pushes_max
            && out.queue.iter().filter(|item| matches!(item, Item::Push(_))).count() >= pushes_max
        {
            return false;
        }
        let was_idle = out.queue.is_empty();
        out.queue.push_back(Item::Push(push));
        if was_idle {
            self.write(&mut out, usize::MAX);
        }
        self.note(&out);
        true
    }

    /// Sends what the transport itself has to say: hellos, refusals, completions. An answer that a dying connection
    /// does not take is lost with it. False if so much waits that the peer asks without ever reading an answer.
    pub(super) fn tell(&self, head: Vec<u8>, queue_max: usize) -> bool {
        let posted = self.post(Encoded { head: head.into(), body: Bytes::new() }, queue_max);
        !matches!(posted, Err((_, RefusedWhy::Full)))
    }

    /// Whether a write found the connection reset: reading then only finds it at its end.
    pub(super) fn was_reset(&self) -> bool {
        self.reset.load(Ordering::Acquire)
    }

    /// Drops what is left to send of a write of this side.
    pub(super) fn forget_write(&self, op: u64) {
        self.forget(|item| matches!(item, Item::Frame { op: of, .. } if *of == op));
    }

    /// Drops what is left to send of a read of the peer's.
    pub(super) fn forget_push(&self, op: u64) {
        self.forget(|item| matches!(item, Item::Push(push) if push.op == op));
    }

    fn forget(&self, is: impl Fn(&Item) -> bool) {
        let mut out = self.lock();
        // The first item may be partly written: it has to be finished.
        let keep_first = out.sent > 0;
        let mut first = true;
        let mut freed = 0;
        out.queue.retain(|item| {
            let keep = std::mem::take(&mut first) && keep_first || !is(item);
            if let (false, Item::Frame { frame, counted: true, .. }) = (keep, item) {
                freed += frame.len();
            }
            keep
        });
        out.queued -= freed;
        self.note(&out);
    }

    /// Writes out what waits, `budget` bytes at most.
    pub(super) fn flush(&self, budget: usize) -> Flushed {
        if !self.waiting.load(Ordering::Acquire) {
            return Flushed::Drained;
        }
        let mut out = self.lock();
        let flushed = self.write(&mut out, budget);
        self.note(&out);
        flushed
    }

    /// Closes the sending side once everything posted is written.
    pub(super) fn finish(&self) {
        let mut out = self.lock();
        if out.state == State::Open {
            out.state = State::Finishing;
            // What was to be served is not part of a goodbye.
            out.queue.retain(|item| matches!(item, Item::Frame { .. }));
            self.write(&mut out, usize::MAX);
            self.note(&out);
        }
    }

    /// Ends the connection both ways at once.
    pub(super) fn close(&self) {
        let mut out = self.lock();
        out.break_off();
        self.note(&out);
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Bytes posted and not yet with the kernel.
    pub(super) fn queued(&self) -> usize {
        self.lock().queued
    }

    fn note(&self, out: &Outbox) {
        self.waiting.store(!out.queue.is_empty() || out.state == State::Finishing, Ordering::Release);
    }

    fn write(&self, out: &mut Outbox, mut budget: usize) -> Flushed {
        loop {
            out.prepare();
            if out.queue.is_empty() {
                if out.state == State::Finishing {
                    out.state = State::Closed;
                    let _ = self.stream.shutdown(Shutdown::Write);
                }
                return Flushed::Drained;
            }
            if budget == 0 {
                return Flushed::More;
            }
            let mut slices = [IoSlice::new(&[]); SLICES];
            let count = out.gather(&mut slices);
            match (&self.stream).write_vectored(&slices[..count]) {
                Ok(written) => {
                    budget = budget.saturating_sub(written);
                    out.advance(written);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Flushed::Blocked,
                Err(_) => {
                    self.reset.store(true, Ordering::Release);
                    out.state = State::Closed;
                    return Flushed::Broken;
                }
            }
        }
    }
}

impl Outbox {
    /// Turns a push at the front into its next frame; what is left of it goes to the back, so that several take turns.
    fn prepare(&mut self) {
        if !matches!(self.queue.front(), Some(Item::Push(_))) {
            return;
        }
        let Some(Item::Push(mut push)) = self.queue.pop_front() else { unreachable!("looked at above") };
        let (frame, more) = push.next();
        if more {
            self.queue.push_back(Item::Push(push));
        }
        self.queue.push_front(Item::Frame { frame, op: 0, counted: false });
    }

    fn gather<'a>(&'a self, slices: &mut [IoSlice<'a>; SLICES]) -> usize {
        let mut count = 0;
        let mut skip = self.sent;
        for item in &self.queue {
            let Item::Frame { frame, .. } = item else { break };
            for part in [&frame.head, &frame.body] {
                let part = &part[skip.min(part.len())..];
                skip = skip.saturating_sub(frame.head.len());
                if !part.is_empty() {
                    slices[count] = IoSlice::new(part);
                    count += 1;
                }
            }
            skip = 0;
            if count + 2 > SLICES {
                break;
            }
        }
        count
    }

    fn advance(&mut self, written: usize) {
        self.sent += written;
        while let Some(Item::Frame { frame, counted, .. }) = self.queue.front() {
            let len = frame.len();
            if self.sent < len {
                break;
            }
            self.sent -= len;
            if *counted {
                self.queued -= len;
            }
            self.queue.pop_front();
        }
    }

    fn break_off(&mut self) {
        self.state = State::Closed;
        self.queue.clear();
        self.queued = 0;
        self.sent = 0;
    }
}

impl Push {
    /// The next frame, and whether another one follows.
    fn next(&mut self) -> (Encoded, bool) {
        let len = (self.len - self.at).min(self.chunk as u64);
        let body = self.registration.with(|region| match &self.source {
            Source::Slot(payload) => Ok(payload.slice(self.at as usize..(self.at + len) as usize)),
            Source::Plain(offset) => region.read(offset + self.at, len, None),
        });
        // A region that was deregistered half way fails the read (F19).
        let Some(Ok(body)) = body else {
            let done = Bulk::Done { op: self.op, status: Status::UnknownRegion };
            let head = bulk::encode(self.from, self.to, &done, 0);
            return (Encoded { head: head.into(), body: Bytes::new() }, false);
        };
        let head = bulk::encode(self.from, self.to, &Bulk::Data { op: self.op, at: self.at }, body.len());
        self.at += len;
        (Encoded { head: head.into(), body }, self.at < self.len)
    }
}
