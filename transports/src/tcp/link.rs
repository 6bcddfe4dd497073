//! A link: the control and the bulk connection to one peer's life, and the operations under way on it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use connex_protocol::wire::bulk::{self, Bulk};
use connex_protocol::wire::hello::Lane as LaneKind;
use connex_protocol::wire::{Encoded, LENGTH_PREFIX};
use connex_protocol::{Epoch, Evidence, Incarnation, Peer};

use super::TcpConfig;
use super::lane::Lane;
use crate::{Op, OpId, Refused, RefusedWhy};

pub(super) struct Link {
    pub(super) own: Incarnation,
    pub(super) peer: Peer,
    pub(super) epoch: Epoch,
    /// This side dialled it.
    pub(super) dialled: bool,
    pub(super) control: Arc<Lane>,
    pub(super) bulk: Arc<Lane>,
    pub(super) operations: Mutex<Operations>,
    /// The peer said goodbye.
    pub(super) left: AtomicBool,
}

/// The one-sided operations of this side on one link.
#[derive(Default)]
pub(super) struct Operations {
    next: u64,
    pub(super) table: HashMap<u64, Pending>,
    closed: bool,
}

/// An operation under way.
pub(super) struct Pending {
    pub(super) id: OpId,
    pub(super) deadline: Instant,
    /// `None` for a write.
    pub(super) read: Option<Landing>,
}

/// Where a read's bytes land.
pub(super) struct Landing {
    /// At least as long as the read.
    pub(super) into: BytesMut,
    pub(super) len: usize,
    pub(super) at: usize,
    /// The checksum that it must have, and the one so far.
    pub(super) crc: Option<u32>,
    pub(super) sum: u32,
}

impl Link {
    pub(super) fn new(
        own: Incarnation,
        peer: Peer,
        epoch: Epoch,
        dialled: bool,
        lanes: [Arc<Lane>; 2],
    ) -> Self {
        let [control, bulk] = lanes;
        Link {
            own,
            peer,
            epoch,
            dialled,
            control,
            bulk,
            operations: Mutex::default(),
            left: AtomicBool::new(false),
        }
    }

    pub(super) fn lane(&self, kind: LaneKind) -> &Arc<Lane> {
        match kind {
            LaneKind::Control => &self.control,
            LaneKind::Bulk => &self.bulk,
        }
    }

    pub(super) fn operations(&self) -> MutexGuard<'_, Operations> {
        self.operations.lock().expect("nothing under this lock panics")
    }

    /// Whether the peer's end is a departure, and else what the connection says.
    pub(super) fn evidence(&self, seen: Evidence) -> Evidence {
        if self.left.load(Ordering::Acquire) { Evidence::Left } else { seen }
    }

    /// Starts a read or a write.
    pub(super) fn start(&self, op: Op, now: Instant, config: &TcpConfig) -> Result<(), Refused> {
        let len = match &op {
            Op::Read { from, .. } => from.len,
            Op::Write { data, .. } => data.len() as u64,
            Op::Message { .. } => return Err(Refused { op, why: RefusedWhy::TooLarge }),
        };
        if len > config.operation_max as u64 {
            return Err(Refused { op, why: RefusedWhy::TooLarge });
        }
        match op {
            Op::Read { .. } => self.start_read(op, len as usize, now, config),
            _ => self.start_write(op, now, config),
        }
    }

    fn start_read(&self, op: Op, len: usize, now: Instant, config: &TcpConfig) -> Result<(), Refused> {
        let Op::Read { id, to, from, seal, crc, mut into, deadline } = op else {
            unreachable!("the caller matched a read")
        };
        let given = into.len();
        let refuse = |mut into: BytesMut, why| {
            into.truncate(given);
            Err(Refused { op: Op::Read { id, to, from, seal, crc, into, deadline }, why })
        };
        let mut operations = self.operations();
        if operations.closed {
            return refuse(into, RefusedWhy::NotConnected);
        }
        if operations.table.len() >= config.operations_max {
            return refuse(into, RefusedWhy::Full);
        }
        // Only what the caller's buffer lacks is filled: one that was used before costs nothing here.
        if into.len() < len {
            into.resize(len, 0);
        }
        let asked = crc.filter(|_| config.crc);
        let landing = Landing { into, len, at: 0, crc: asked, sum: 0 };
        let no = operations.add(Pending { id, deadline: now + deadline, read: Some(landing) });
        drop(operations);
        let read = Bulk::Read { op: no, region: from.key, offset: from.offset, len: from.len, seal };
        let head = bulk::encode(self.own, self.peer.incarnation, &read, 0);
        match self.bulk.post(Encoded { head: head.into(), body: Bytes::new() }, config.queue_max) {
            Ok(()) => Ok(()),
            // What the end of the link has completed meanwhile is not refused as well.
            Err((_, why)) => match self.operations().table.remove(&no).and_then(|pending| pending.read) {
                Some(landing) => refuse(landing.into, why),
                None => Ok(()),
            },
        }
    }

    fn start_write(&self, op: Op, now: Instant, config: &TcpConfig) -> Result<(), Refused> {
        let Op::Write { id, to, at, data, signal, deadline } = op else {
            unreachable!("the caller matched a write")
        };
        let refuse =
            |data, signal, why| Err(Refused { op: Op::Write { id, to, at, data, signal, deadline }, why });
        let signal_len = signal.as_ref().map_or(0, |frame| frame.len() - LENGTH_PREFIX + bulk::BULK_HEAD);
        if signal_len > config.bulk_frame_max {
            return refuse(data, signal, RefusedWhy::TooLarge);
        }
        let mut operations = self.operations();
        if operations.closed {
            return refuse(data, signal, RefusedWhy::NotConnected);
        }
        if operations.table.len() >= config.operations_max {
            return refuse(data, signal, RefusedWhy::Full);
        }
        let no = operations.add(Pending { id, deadline: now + deadline, read: None });
        drop(operations);
        let len = data.len() as u64;
        let peer = self.peer.incarnation;
        let mut frames = Vec::with_capacity(data.len() / config.chunk() + 2);
        let mut sent = 0;
        loop {
            let end = (sent + config.chunk()).min(data.len());
            let write = Bulk::Write { op: no, region: at.key, offset: at.offset, len, at: sent as u64 };
            let head = bulk::encode(self.own, peer, &write, end - sent);
            frames.push(Encoded { head: head.into(), body: data.slice(sent..end) });
            sent = end;
            if sent == data.len() {
                break;
            }
        }
        if let Some(frame) = &signal {
            let mut head =
                bulk::encode(self.own, peer, &Bulk::Signal { op: no }, frame.len() - LENGTH_PREFIX);
            head.extend_from_slice(&frame.head[LENGTH_PREFIX..]);
            frames.push(Encoded { head: head.into(), body: frame.body.clone() });
        }
        match self.bulk.post_all(frames, no, config.queue_max) {
            Ok(()) => Ok(()),
            Err(why) => match self.operations().table.remove(&no) {
                Some(_) => refuse(data, signal, why),
                None => Ok(()),
            },
        }
    }
}

impl Operations {
    fn add(&mut self, pending: Pending) -> u64 {
        self.next += 1;
        self.table.insert(self.next, pending);
        self.next
    }

    /// Takes no more operations, and gives up those under way, in the order of their start.
    pub(super) fn close(&mut self) -> Vec<Pending> {
        self.closed = true;
        let mut all: Vec<_> = self.table.drain().collect();
        all.sort_unstable_by_key(|(no, _)| *no);
        all.into_iter().map(|(_, pending)| pending).collect()
    }
}
