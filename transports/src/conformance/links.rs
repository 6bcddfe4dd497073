use std::time::{Duration, Instant};

use bytes::Bytes;
use connex_protocol::wire::hello::{Lane, Reject};
use connex_protocol::{Epoch, Evidence};

use super::{Backend, Node, PATIENCE, block_on, fresh_incarnation, identity, pair};
use crate::{ConnectError, Event, Op, RefusedWhy};

/// Each side sees one `Up`, with the other's epoch; connecting again returns at once and makes no second link.
pub fn both_sides_see_one_up_and_connect_again_is_free(backend: &dyn Backend) {
    let (a, b) = (Node::start(backend, "a"), Node::start(backend, "b"));
    let epoch = Epoch { boot: 3, counter: 14 };
    a.transport.set_epoch(epoch);
    a.connect(&b);
    for _ in 0..10 {
        assert_eq!(block_on(a.transport.connect(&b.transport.local(), Some(b.life()))).unwrap(), b.peer);
        assert_eq!(block_on(a.transport.connect(&b.transport.local(), None)).unwrap(), b.peer);
    }
    a.send(b.life(), Lane::Control, 1, Bytes::new());
    b.seen.wait_for("the frame", |seen| !seen.steps(a.life(), Lane::Control).is_empty());
    b.seen.look(|seen| {
        assert_eq!(seen.up(a.life()), 1);
        let first = seen.events.first().expect("an event was waited for");
        assert!(matches!(first, Event::Up { epoch: seen, .. } if *seen == epoch), "{first:?}");
    });
    assert_eq!(a.seen.look(|seen| seen.up(b.life())), 1);
}

/// Both sides dial at once, again and again: nothing that was posted is lost, and the order holds.
pub fn crossing_connects_lose_nothing(backend: &dyn Backend) {
    for round in 0..20 {
        let (a, b) = (Node::start(backend, "a"), Node::start(backend, "b"));
        let talk = |own: &Node, other: &Node| {
            block_on(own.transport.connect(&other.transport.local(), Some(other.life()))).unwrap();
            for seq in 0..100 {
                own.send(other.life(), Lane::Control, seq, Bytes::new());
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| talk(&a, &b));
            scope.spawn(|| talk(&b, &a));
        });
        for (own, other) in [(&a, &b), (&b, &a)] {
            own.seen.wait_for("every frame", |seen| seen.steps(other.life(), Lane::Control).len() >= 100);
            own.seen.look(|seen| {
                let numbers: Vec<_> =
                    seen.steps(other.life(), Lane::Control).into_iter().map(|(seq, _)| seq).collect();
                assert_eq!(numbers, (0..100).collect::<Vec<_>>(), "round {round}");
                assert_eq!(seen.up(other.life()), 1, "round {round}");
                assert!(seen.down(other.life()).is_empty(), "round {round}");
            });
        }
        block_on(a.transport.shutdown());
        block_on(b.transport.shutdown());
    }
}

/// F13: many callers that connect to one address at once get one link.
pub fn concurrent_connects_share_a_link(backend: &dyn Backend) {
    let (a, b) = (Node::start(backend, "a"), Node::start(backend, "b"));
    std::thread::scope(|scope| {
        for at in 0..16 {
            let (a, b) = (&a, &b);
            scope.spawn(move || {
                let expects = (at % 2 == 0).then_some(b.life());
                assert_eq!(block_on(a.transport.connect(&b.transport.local(), expects)).unwrap(), b.peer);
            });
        }
    });
    a.send(b.life(), Lane::Control, 1, Bytes::new());
    b.seen.wait_for("a frame", |seen| !seen.steps(a.life(), Lane::Control).is_empty());
    for (own, other) in [(&a, &b), (&b, &a)] {
        own.seen.look(|seen| {
            assert_eq!(seen.up(other.life()), 1);
            let relinked = seen.events.iter().filter(|event| matches!(event, Event::Relinked { .. })).count();
            assert_eq!((relinked, seen.down(other.life()).len()), (0, 0));
        });
    }
}

/// A process that dies without a goodbye is `Down` by the evidence of its connection; frames are refused from then on.
pub fn a_dead_process_is_seen_as_closed(backend: &dyn Backend) {
    let (a, b) = pair(backend);
    let life = b.life();
    b.kill(backend);
    a.seen.wait_for("the death", |seen| !seen.down(life).is_empty());
    let evidence = a.seen.look(|seen| seen.down(life));
    assert!(
        matches!(evidence[..], [Evidence::ConnectionClosed] | [Evidence::ConnectionReset]),
        "{evidence:?}"
    );
    assert!(evidence[0].is_hard());
    let refused = a.transport.post(Op::Message {
        to: life,
        lane: Lane::Control,
        frame: a.frame(life, 1, Bytes::new()),
    });
    assert_eq!(refused.unwrap_err().why, RefusedWhy::NotConnected);
}

/// `disconnect` is a goodbye: `Left` on both sides, and both may connect again.
pub fn a_disconnect_is_seen_as_left(backend: &dyn Backend) {
    let (a, b) = pair(backend);
    a.transport.disconnect(b.life());
    a.seen.wait_for("its own Down", |seen| seen.down(b.life()) == [Evidence::Left]);
    b.seen.wait_for("the peer's Down", |seen| seen.down(a.life()) == [Evidence::Left]);
    assert_eq!(block_on(b.transport.connect(&a.transport.local(), None)).unwrap(), a.peer);
    b.send(a.life(), Lane::Control, 1, Bytes::new());
    a.seen.wait_for("a frame over the new link", |seen| seen.steps(b.life(), Lane::Control).len() == 1);
}

/// `shutdown` delivers what was posted before it, then says goodbye.
pub fn a_shutdown_is_seen_as_left(backend: &dyn Backend) {
    let (a, b) = pair(backend);
    for seq in 0..50 {
        a.send(b.life(), Lane::Control, seq, Bytes::new());
    }
    block_on(a.transport.shutdown());
    b.seen.wait_for("the goodbye", |seen| seen.down(a.life()) == [Evidence::Left]);
    assert_eq!(b.seen.look(|seen| seen.steps(a.life(), Lane::Control).len()), 50);
    assert_eq!(
        a.seen.look(|seen| seen.down(b.life())),
        [Evidence::Left],
        "its own handler learns of the end"
    );
}

/// A process that is started again is another peer: it is refused to who expects the old one, and connects anew.
pub fn a_new_life_at_the_same_address_is_another_peer(backend: &dyn Backend) {
    let (a, b) = pair(backend);
    let (old, address) = (b.life(), b.transport.local());
    b.kill(backend);
    a.seen.wait_for("the death", |seen| !seen.down(old).is_empty());
    let b = Node::start(backend, "b");
    assert_eq!(b.transport.local(), address);
    match block_on(a.transport.connect(&address, Some(old))) {
        Err(ConnectError::Rejected { reject: Reject::Unexpected { found }, .. }) => {
            assert_eq!(found, b.life())
        }
        other => panic!("{other:?}"),
    }
    a.connect(&b);
    assert_eq!(a.seen.look(|seen| seen.down(old).len()), 1);
}

/// F09: a fenced life loses its links, is told so, and can't come back; another life of the same process can.
pub fn a_fenced_life_is_refused(backend: &dyn Backend) {
    let (a, b) = pair(backend);
    let zombie = b.life();
    a.transport.fence(zombie);
    a.seen.wait_for("its own Down", |seen| !seen.down(zombie).is_empty());
    b.seen.wait_for("the zombie's Down", |seen| !seen.down(a.life()).is_empty());
    match block_on(b.transport.connect(&a.transport.local(), None)) {
        Err(ConnectError::Rejected { reject: Reject::Fenced, .. }) => {}
        other => panic!("{other:?}"),
    }
    match block_on(a.transport.connect(&b.transport.local(), None)) {
        Err(ConnectError::Fenced { found, .. }) => assert_eq!(found, zombie),
        other => panic!("{other:?}"),
    }
    assert_eq!(a.seen.look(|seen| (seen.up(zombie), seen.down(zombie).len())), (1, 1));
    b.kill(backend);
    let b = Node::start(backend, "b");
    a.connect(&b);
}

/// Peers of another deployment are refused, with its name on both sides.
pub fn a_peer_of_another_deployment_is_refused(backend: &dyn Backend) {
    let a = Node::start(backend, "a");
    let mut other = identity("b", fresh_incarnation());
    other.deployment = "elsewhere".into();
    let b = Node::start_as(backend, "b", other);
    match block_on(a.transport.connect(&b.transport.local(), None)) {
        Err(ConnectError::Rejected { reject: Reject::Deployment { theirs }, .. }) => {
            assert_eq!(theirs, "elsewhere");
        }
        other => panic!("{other:?}"),
    }
    let refused = |event: &Event| matches!(event, Event::Refused { reject: Reject::Deployment { theirs } } if theirs == "conformance");
    b.seen.wait_for("the word on the refusal", |seen| seen.events.len() == 1 && refused(&seen.events[0]));
}

/// Connecting where nobody listens fails with an error that names the address, well before any deadline.
pub fn an_address_without_a_listener_names_itself(backend: &dyn Backend) {
    let (a, b) = (Node::start(backend, "a"), Node::start(backend, "b"));
    let address = b.transport.local();
    b.kill(backend);
    let error = block_on(a.transport.connect(&address, None)).unwrap_err();
    assert!(error.to_string().contains(address.as_str()), "{error}");
    let foreign = connex_protocol::Address::new("carrier-pigeon://roof");
    let error = block_on(a.transport.connect(&foreign, None)).unwrap_err();
    assert!(matches!(error, ConnectError::Address { .. }), "{error}");
}

/// After `shutdown`, everything is refused as such, and a second one returns at once.
pub fn nothing_is_posted_after_a_shutdown(backend: &dyn Backend) {
    let (a, b) = pair(backend);
    block_on(a.transport.shutdown());
    let frame = a.frame(b.life(), 1, Bytes::new());
    let refused = a.transport.post(Op::Message { to: b.life(), lane: Lane::Control, frame }).unwrap_err();
    assert_eq!(refused.why, RefusedWhy::ShutDown);
    assert!(!a.transport.progress(Duration::ZERO));
    assert!(matches!(block_on(a.transport.connect(&b.transport.local(), None)), Err(ConnectError::ShutDown)));
    block_on(a.transport.shutdown());
}

/// F12, F41: a thousand links one after another leave no descriptor and no thread behind.
pub fn connect_and_disconnect_leak_nothing(backend: &dyn Backend) {
    let (a, b) = pair(backend);
    let cycle = |round: u64| {
        a.transport.disconnect(b.life());
        a.seen.wait_for("its own Down", |seen| !seen.down(b.life()).is_empty());
        b.seen.wait_for("the peer's Down", |seen| !seen.down(a.life()).is_empty());
        a.seen.clear();
        b.seen.clear();
        block_on(a.transport.connect(&b.transport.local(), Some(b.life()))).unwrap();
        a.send(b.life(), Lane::Control, round, Bytes::new());
        b.seen.wait_for("a frame", |seen| !seen.steps(a.life(), Lane::Control).is_empty());
        b.seen.look(|seen| assert_eq!(seen.steps(a.life(), Lane::Control)[0].0, round));
    };
    (0..100).for_each(cycle);
    let before = resources();
    (100..1_000).for_each(cycle);
    // Other tests of the same process come and go: the count must come down to where it was, not stay there.
    let until = Instant::now() + PATIENCE;
    while resources() > before + 100 {
        assert!(Instant::now() < until, "{before} descriptors and threads before, {} after", resources());
        std::thread::yield_now();
    }
}

/// Open descriptors and threads of this process; 0 where `/proc` does not say.
fn resources() -> usize {
    let count = |path: &str| std::fs::read_dir(path).map_or(0, Iterator::count);
    count("/proc/self/fd") + count("/proc/self/task")
}
