//! Everything that has a deadline.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use connex_protocol::Evidence;
use connex_protocol::wire::bulk::{self, Bulk};

use super::Shared;
use super::driver::{Conn, Driver, Phase};
use super::link::{Link, Pending};
use super::reader::Sink;
use crate::{Completion, Event, OpError};

/// The least that a started frame gains in each stall deadline.
const STALL_GAIN: u64 = 64 << 10;

impl Driver {
    pub(super) fn run_timers(&mut self, shared: &Shared) {
        let now = Instant::now();
        if self.next_timer.is_some_and(|at| at <= now) {
            self.next_timer = None;
            self.expire_conns(shared, now);
            self.expire_dials(shared, now);
        }
        if shared.first_deadline.load(Ordering::SeqCst) <= shared.nanos(now) {
            self.expire_operations(shared, now);
        }
        self.stop_if_closed(shared, now);
    }

    /// Ends the transport once every peer has closed too, or has had its time for it; whether it does.
    pub(super) fn stop_if_closed(&mut self, shared: &Shared, now: Instant) -> bool {
        let Some((until, _)) = &self.closing else { return false };
        let lingers = self.conns.values().any(|conn| matches!(conn.phase, Phase::Lingering));
        if lingers && now < *until {
            return false;
        }
        shared.lead.stop();
        true
    }

    fn expire_conns(&mut self, shared: &Shared, now: Instant) {
        let mut late = Vec::new();
        let mut next = self.next_timer;
        let mut note = |at: Instant| next = Some(next.map_or(at, |next| next.min(at)));
        for (token, conn) in &mut self.conns {
            match conn.deadline {
                Some(deadline) if deadline <= now => late.push((*token, conn.lost())),
                Some(deadline) => note(deadline),
                None => {}
            }
            match conn.stall {
                Some((deadline, from)) if deadline <= now => {
                    if conn.received - from < STALL_GAIN {
                        late.push((*token, Evidence::ProtocolViolation));
                    } else {
                        let at = now + shared.config.stall_deadline;
                        conn.stall = Some((at, conn.received));
                        note(at);
                    }
                }
                Some((deadline, _)) => note(deadline),
                None => {}
            }
        }
        self.next_timer = next;
        for (token, evidence) in late {
            self.conn_ended(shared, token, evidence);
        }
    }

    fn expire_operations(&mut self, shared: &Shared, now: Instant) {
        shared.first_deadline.store(u64::MAX, Ordering::SeqCst);
        let links: Vec<Arc<Link>> = shared
            .peers
            .read()
            .expect("nothing under this lock panics")
            .values()
            .flatten()
            .cloned()
            .collect();
        let mut first = u64::MAX;
        for link in links {
            let mut expired = Vec::new();
            for (no, pending) in &link.operations().table {
                if pending.deadline <= now {
                    expired.push(*no);
                } else {
                    first = first.min(shared.nanos(pending.deadline));
                }
            }
            let mut ended: Vec<(u64, Pending)> = expired
                .into_iter()
                .filter_map(|no| link.operations().table.remove(&no).map(|pending| (no, pending)))
                .collect();
            // The one whose bytes are arriving just now: the rest of them is dropped.
            if let Some(conn) = self.conns.get_mut(&link.bulk.token)
                && let Sink::Read { pending, left, .. } = &conn.sink
            {
                if pending.deadline <= now {
                    let left = *left;
                    if let Sink::Read { no, pending, .. } =
                        std::mem::replace(&mut conn.sink, Sink::Discard { left })
                    {
                        ended.push((no, pending));
                    }
                } else {
                    first = first.min(shared.nanos(pending.deadline));
                }
            }
            ended.sort_unstable_by_key(|(no, _)| *no);
            for (no, pending) in ended {
                if pending.read.is_some() {
                    let cancel = bulk::encode(link.own, link.peer.incarnation, &Bulk::Cancel { op: no }, 0);
                    // If it does not fit, the peer takes nothing at all: it will not push either.
                    link.bulk.tell(cancel, shared.config.queue_max);
                } else {
                    link.bulk.forget_write(no);
                }
                let (peer, result) = (link.peer.incarnation, Err(OpError::TimedOut));
                self.emit(shared, Event::Completed(Completion { id: pending.id, peer, result }));
            }
        }
        shared.first_deadline.fetch_min(first, Ordering::SeqCst);
    }
}

impl Conn {
    /// What it means that this connection's deadline has passed.
    fn lost(&self) -> Evidence {
        match &self.phase {
            // Its bulk connection ended, and no goodbye followed.
            Phase::Up(_) => Evidence::ConnectionClosed,
            _ => Evidence::ProtocolViolation,
        }
    }
}
