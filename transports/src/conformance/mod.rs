//! The suite that every backend passes: the contract of [`Transport`](crate::Transport), as code.
//!
//! A backend implements [`Backend`] and writes one line, which makes one test of each check:
//!
//! ```text
//! connex_transport::conformance!(MyBackend::default());
//! ```

mod links;
mod messages;
mod operations;
mod recorder;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use connex_protocol::wire::hello::Lane;
use connex_protocol::wire::{self, Completed, Encoded, Frame, Payload, Step};
use connex_protocol::{Group, Incarnation, Peer, StepId};

use crate::{Handler, Identity, Transport};

pub use links::*;
pub use messages::*;
pub use operations::*;
pub use recorder::{Recorder, Seen, block_on};

/// How long a check waits for what must happen; far above what any backend needs.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A backend under test. Every name is one place of its network.
pub trait Backend: Send + Sync {
    /// Starts a transport at `name`. Started again under the same name after its predecessor ended, it has the same
    /// address.
    fn start(&self, name: &str, identity: Identity, handler: Arc<dyn Handler>) -> Arc<dyn Transport>;

    /// Ends a transport as the death of its process would: without a goodbye. The default drops it, which must be
    /// the last reference.
    fn kill(&self, name: &str, transport: Arc<dyn Transport>) {
        let _ = name;
        drop(transport);
    }

    /// The largest payload that the checks move in one operation, in bytes.
    fn largest(&self) -> usize {
        17 << 20
    }
}

/// A transport under test, and what its handler has seen.
pub struct Node {
    /// The transport.
    pub transport: Arc<dyn Transport>,
    /// Its events.
    pub seen: Arc<Recorder>,
    /// Who it is.
    pub peer: Peer,
    name: String,
}

impl Node {
    /// Starts a node with a new incarnation.
    pub fn start(backend: &dyn Backend, name: &str) -> Node {
        Self::start_as(backend, name, identity(name, fresh_incarnation()))
    }

    /// Starts a node as exactly `identity`.
    pub fn start_as(backend: &dyn Backend, name: &str, identity: Identity) -> Node {
        let seen = Arc::new(Recorder::default());
        let peer = identity.peer.clone();
        let transport = backend.start(name, identity, seen.clone());
        Node { transport, seen, peer, name: name.into() }
    }

    /// The node's life.
    pub fn life(&self) -> Incarnation {
        self.peer.incarnation
    }

    /// Connects to another node and waits until both sides have seen it.
    pub fn connect(&self, to: &Node) {
        let peer =
            block_on(self.transport.connect(&to.transport.local(), Some(to.life()))).expect("it connects");
        assert_eq!(peer, to.peer);
        self.seen.wait_for("the peer's Up", |seen| seen.up(to.life()) > 0);
        to.seen.wait_for("the dialler's Up", |seen| seen.up(self.life()) > 0);
    }

    /// Ends it as a death would.
    pub fn kill(self, backend: &dyn Backend) -> Arc<Recorder> {
        let Node { transport, seen, name, .. } = self;
        backend.kill(&name, transport);
        seen
    }

    /// A step's frame to another node, with `seq` as its number and `body` as its payload.
    pub fn frame(&self, to: Incarnation, seq: u64, body: Bytes) -> Encoded {
        frame(self.life(), to, seq, body)
    }

    /// Posts a numbered frame; waits while the queue is full.
    pub fn send(&self, to: Incarnation, lane: Lane, seq: u64, body: Bytes) {
        let mut op = crate::Op::Message { to, lane, frame: self.frame(to, seq, body) };
        let until = std::time::Instant::now() + PATIENCE;
        while let Err(refused) = self.transport.post(op) {
            assert_eq!(refused.why, crate::RefusedWhy::Full, "frame {seq}");
            assert!(std::time::Instant::now() < until, "the queue stays full");
            std::thread::yield_now();
            op = refused.op;
        }
    }
}

/// Two nodes, `a` and `b`, with a link that `a` dialled.
pub fn pair(backend: &dyn Backend) -> (Node, Node) {
    let (a, b) = (Node::start(backend, "a"), Node::start(backend, "b"));
    a.connect(&b);
    (a, b)
}

/// An identity by its name and life.
pub fn identity(name: &str, incarnation: Incarnation) -> Identity {
    let lid = Group::new(name, "pp", 0).replica(0);
    Identity { peer: Peer { lid, incarnation }, deployment: "conformance".into() }
}

/// A life that no other node of this process has.
pub fn fresh_incarnation() -> Incarnation {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
    Incarnation::from_bits(NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed) << 16)
}

/// A step's frame with a number and a payload.
pub fn frame(from: Incarnation, to: Incarnation, seq: u64, body: Bytes) -> Encoded {
    wire::encode(
        from,
        to,
        &Frame::Step(Step {
            id: StepId { origin: from, seq },
            attempt: 1,
            route: Vec::new(),
            completed: Completed::default(),
            deadline_ms: None,
            streaming: false,
            resume: Vec::new(),
            meta: Bytes::new(),
            payload: Payload::Inline(body),
        }),
    )
}

/// Bytes that differ at every offset and for every seed, so that a misplaced or stale range shows.
pub fn pattern(seed: u64, len: usize) -> Bytes {
    let word = |at: u64| (seed ^ at).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    let mut out = Vec::with_capacity(len + 8);
    for at in 0..(len as u64).div_ceil(8) {
        out.extend_from_slice(&word(at).to_le_bytes());
    }
    out.truncate(len);
    out.into()
}

/// Makes one test of each check for a backend: `conformance!(expression)`.
#[macro_export]
macro_rules! conformance {
    ($backend:expr) => {
        $crate::conformance!(@tests $backend;
            frames_keep_their_order_on_each_lane
            frames_of_every_size_arrive_whole
            refused_frames_come_back_with_their_buffers
            a_full_queue_refuses_and_later_accepts
            post_never_calls_the_handler
            a_caller_makes_progress_on_its_own_thread
            a_panicking_handler_is_reported_and_restarted
            reads_of_every_size_fill_their_destination
            many_reads_at_once_each_complete_once
            a_read_checks_the_seal
            a_read_checks_the_checksum_if_asked
            a_read_outside_the_region_is_refused
            a_stale_key_after_a_restart_is_refused
            a_write_lands_before_its_signal
            a_refused_write_sends_no_signal
            operations_end_once_when_the_link_dies
            an_unserved_read_times_out_and_lands_nowhere
            a_deregistered_region_is_neither_read_nor_written
            both_sides_see_one_up_and_connect_again_is_free
            crossing_connects_lose_nothing
            concurrent_connects_share_a_link
            a_dead_process_is_seen_as_closed
            a_disconnect_is_seen_as_left
            a_shutdown_is_seen_as_left
            a_new_life_at_the_same_address_is_another_peer
            a_fenced_life_is_refused
            a_peer_of_another_deployment_is_refused
            an_address_without_a_listener_names_itself
            nothing_is_posted_after_a_shutdown
            connect_and_disconnect_leak_nothing
        );
    };
    (@tests $backend:expr; $($check:ident)*) => {
        $(#[test] fn $check() { $crate::conformance::$check(&$backend); })*
    };
}
