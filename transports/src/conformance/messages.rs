use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use connex_protocol::wire::hello::Lane;
use connex_protocol::wire::{CONTROL_FRAME_MAX, STREAM_FRAME_MAX};

use super::{Backend, Node, PATIENCE, fresh_incarnation, identity, pair, pattern};
use crate::{Event, Handler, Op, RefusedWhy, Transport};

/// Frames to one peer on one lane arrive in the order of their posting, each once.
pub fn frames_keep_their_order_on_each_lane(backend: &dyn Backend) {
    let (a, b) = pair(backend);
    let count = 2_000;
    for seq in 0..count {
        a.send(b.life(), Lane::Control, seq, pattern(seq, (seq as usize * 37) % 900));
        a.send(b.life(), Lane::Bulk, seq, pattern(seq, (seq as usize * 113) % 20_000));
        b.send(a.life(), Lane::Control, seq, Bytes::new());
    }
    for (seen, from, lane) in
        [(&b.seen, &a, Lane::Control), (&b.seen, &a, Lane::Bulk), (&a.seen, &b, Lane::Control)]
    {
        seen.wait_for("every frame", |seen| seen.steps(from.life(), lane).len() as u64 >= count);
        let numbers: Vec<u64> =
            seen.look(|seen| seen.steps(from.life(), lane).into_iter().map(|(seq, _)| seq).collect());
        assert_eq!(numbers, (0..count).collect::<Vec<_>>(), "{lane:?}");
    }
}

/// A frame of any size up to its lane's cap arrives as it was sent.
pub fn frames_of_every_size_arrive_whole(backend: &dyn Backend) {
    let (a, b) = pair(backend);
    let control = [0, 1, 255, 4096, 65_536, 300_000, CONTROL_FRAME_MAX - 200];
    let bulk = [0, 1, 65_536, 1 << 20, 5_000_011, STREAM_FRAME_MAX - 200];
    for (lane, sizes) in [(Lane::Control, &control[..]), (Lane::Bulk, &bulk[..])] {
        for (seq, size) in sizes.iter().enumerate() {
            a.send(b.life(), lane, seq as u64, pattern(seq as u64, *size));
        }
        b.seen.wait_for("every frame", |seen| seen.steps(a.life(), lane).len() >= sizes.len());
        let steps = b.seen.look(|seen| seen.steps(a.life(), lane));
        for ((seq, body), size) in steps.into_iter().zip(sizes) {
            assert!(body == pattern(seq, *size), "{lane:?} frame of {size} bytes");
        }
    }
}

/// A frame above its lane's cap, or to a peer without a link, comes back whole.
pub fn refused_frames_come_back_with_their_buffers(backend: &dyn Backend) {
    let (a, b) = pair(backend);
    let stranger = fresh_incarnation();
    let large = pattern(1, STREAM_FRAME_MAX + 1);
    for (to, lane, body, why) in [
        (b.life(), Lane::Control, large.slice(..CONTROL_FRAME_MAX + 1), RefusedWhy::TooLarge),
        (b.life(), Lane::Bulk, large, RefusedWhy::TooLarge),
        (stranger, Lane::Control, pattern(2, 10), RefusedWhy::NotConnected),
    ] {
        let frame = a.frame(to, 1, body);
        let refused = a.transport.post(Op::Message { to, lane, frame: frame.clone() }).unwrap_err();
        assert_eq!(refused.why, why);
        let Op::Message { frame: back, .. } = refused.op else { panic!("another operation came back") };
        assert_eq!(back, frame);
    }
}

/// A handler that waits, once, until it is let go.
#[derive(Default)]
struct Gate {
    closed: AtomicBool,
}

impl Handler for Gate {
    fn handle(&self, event: Event) {
        while matches!(event, Event::Message { .. }) && self.closed.load(Ordering::Acquire) {
            thread::yield_now();
        }
    }
}

/// Frames to a peer that takes none are accepted up to a bound, then refused as `Full`; once it takes them again,
/// posting works again.
pub fn a_full_queue_refuses_and_later_accepts(backend: &dyn Backend) {
    let a = Node::start(backend, "a");
    let gate = Arc::new(Gate { closed: AtomicBool::new(true) });
    let b = identity("b", fresh_incarnation());
    let b_life = b.peer.incarnation;
    let slow = backend.start("b", b, gate.clone());
    super::block_on(a.transport.connect(&slow.local(), None)).unwrap();
    let body = pattern(3, 1 << 20);
    let mut accepted = 0usize;
    let refused = loop {
        let frame = a.frame(b_life, accepted as u64, body.clone());
        match a.transport.post(Op::Message { to: b_life, lane: Lane::Bulk, frame }) {
            Ok(()) => accepted += 1,
            Err(refused) => break refused,
        }
        assert!(accepted < 4096, "4 GiB were accepted for a peer that takes nothing");
    };
    assert_eq!(refused.why, RefusedWhy::Full);
    assert!(a.transport.backlog(b_life) > 0);
    gate.closed.store(false, Ordering::Release);
    let until = Instant::now() + PATIENCE;
    let mut op = refused.op;
    while let Err(refused) = a.transport.post(op) {
        assert!(Instant::now() < until, "the queue stays full after its reader went on");
        thread::yield_now();
        op = refused.op;
    }
    while a.transport.backlog(b_life) > 0 {
        assert!(Instant::now() < until, "the backlog does not end");
        thread::yield_now();
    }
}

/// Posts a frame to itself from inside the handler's lock.
struct Reentrant {
    transport: Mutex<Option<Arc<dyn Transport>>>,
    own: connex_protocol::Incarnation,
    replies: u64,
}

impl Handler for Reentrant {
    fn handle(&self, event: Event) {
        let Event::Message { from, .. } = event else { return };
        // The lock is held while posting, as an actor's state would be.
        let transport = self.transport.lock().unwrap();
        for seq in 0..self.replies {
            let frame = super::frame(self.own, from, seq, Bytes::new());
            transport
                .as_ref()
                .expect("set before the first frame")
                .post(Op::Message { to: from, lane: Lane::Control, frame })
                .unwrap();
        }
    }
}

/// `post` may be called under a lock that the handler takes: it calls no handler.
pub fn post_never_calls_the_handler(backend: &dyn Backend) {
    let a = Node::start(backend, "a");
    let b = identity("b", fresh_incarnation());
    let life = b.peer.incarnation;
    let handler = Arc::new(Reentrant { transport: Mutex::default(), own: life, replies: 50 });
    let transport = backend.start("b", b, handler.clone());
    *handler.transport.lock().unwrap() = Some(transport.clone());
    super::block_on(a.transport.connect(&transport.local(), Some(life))).unwrap();
    for seq in 0..20 {
        a.send(life, Lane::Control, seq, Bytes::new());
    }
    a.seen.wait_for("every reply", |seen| seen.steps(life, Lane::Control).len() == 20 * 50);
    // Ends the circle of references between handler and transport.
    super::block_on(transport.shutdown());
    *handler.transport.lock().unwrap() = None;
}

/// A caller of `progress` handles what arrives on its own thread.
pub fn a_caller_makes_progress_on_its_own_thread(backend: &dyn Backend) {
    let (a, b) = pair(backend);
    let me = thread::current().id();
    let until = Instant::now() + PATIENCE;
    let mut round = 0;
    // The borrower may lose the race for single frames; that it never gets one would be a failure.
    while !b.seen.look(|seen| seen.threads.contains(&me)) {
        assert!(Instant::now() < until, "no event was ever handled on the caller's thread");
        a.send(b.life(), Lane::Control, round, Bytes::new());
        round += 1;
        let came = |seen: &super::Seen| seen.steps(a.life(), Lane::Control).len() as u64 >= round;
        while !b.seen.look(came) {
            if !b.transport.progress(Duration::from_millis(1)) {
                thread::yield_now();
            }
        }
    }
    // Without a borrower the transport goes on by itself.
    a.send(b.life(), Lane::Control, round, Bytes::new());
    b.seen.wait_for("the last frame", |seen| seen.steps(a.life(), Lane::Control).len() as u64 > round);
}

/// A handler's panic stops the progress, is reported, and after a restart the next frames arrive.
pub fn a_panicking_handler_is_reported_and_restarted(backend: &dyn Backend) {
    let (a, b) = pair(backend);
    b.seen.panic_at(1);
    for seq in 0..4 {
        a.send(b.life(), Lane::Control, seq, Bytes::new());
    }
    b.seen.wait_for("the report of the panic", |seen| !seen.panics.is_empty());
    assert!(b.seen.look(|seen| seen.panics[0].contains("was to panic")));
    assert!(b.transport.failed());
    assert!(!b.transport.progress(Duration::ZERO), "nobody makes progress before the restart");
    b.transport.restart_progress();
    assert!(!b.transport.failed());
    b.seen.wait_for("the frames after the panic", |seen| seen.steps(a.life(), Lane::Control).len() >= 3);
    let numbers: Vec<u64> =
        b.seen.look(|seen| seen.steps(a.life(), Lane::Control).into_iter().map(|(seq, _)| seq).collect());
    assert_eq!(numbers, [0, 2, 3], "only the frame whose handling panicked is lost");
}
