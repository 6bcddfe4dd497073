//! Links, addresses and ports.

use std::collections::HashSet;
use std::io::Write;
use std::net::{Shutdown, TcpListener};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use connex_protocol::wire::hello::{Lane, Opening, Reject};
use connex_protocol::wire::{self, Control, Frame, RegionKey};
use connex_protocol::{Address, Evidence, Incarnation};
use connex_transport::conformance::{PATIENCE, block_on, fresh_incarnation, identity, pattern};
use connex_transport::{
    ConnectError, Op, OpId, RefusedWhy, RegionSlice, StartError, TcpConfig, TcpTransport, Transport,
};

use crate::raw::{
    Raw, Real, assert_ended, connect, control, hello_of, impatient, read_frame, read_opening, tcp,
};

fn message(real: &Real, to: Incarnation, lane: Lane, seq: u64, body: Bytes) -> Op {
    Op::Message { to, lane, frame: connex_transport::conformance::frame(real.life, to, seq, body) }
}

fn listen(config: TcpConfig) -> Result<std::sync::Arc<TcpTransport>, StartError> {
    let seen = std::sync::Arc::new(connex_transport::conformance::Recorder::default());
    TcpTransport::start(config, identity("x", fresh_incarnation()), seen)
}

#[test]
fn the_evidence_of_a_links_end_is_what_the_connection_says() {
    let real = Real::start();
    let ended = |raw: Raw, what: &str, expected: Evidence, end: &dyn Fn(&Raw)| {
        end(&raw);
        real.seen.wait_for(what, |seen| !seen.down(raw.life).is_empty());
        assert_eq!(real.seen.look(|seen| seen.down(raw.life)), [expected], "{what}");
    };
    let dial = || Raw::dial(&real, fresh_incarnation(), 1);
    let close = |stream: &std::net::TcpStream| stream.shutdown(Shutdown::Both).unwrap();
    ended(dial(), "both connections closed", Evidence::ConnectionClosed, &|raw| {
        close(&raw.control);
        close(&raw.bulk);
    });
    ended(dial(), "only the control connection closed", Evidence::ConnectionClosed, &|raw| {
        close(&raw.control)
    });
    ended(dial(), "only the bulk connection closed", Evidence::ConnectionClosed, &|raw| close(&raw.bulk));
    ended(dial(), "a goodbye first", Evidence::Left, &|raw| {
        let mut stream = &raw.control;
        stream.write_all(&control(raw.life, real.life, Control::Goodbye)).unwrap();
        close(&raw.control);
        close(&raw.bulk);
    });
    ended(dial(), "the bulk connection closed, the goodbye behind it", Evidence::Left, &|raw| {
        close(&raw.bulk);
        let mut stream = &raw.control;
        stream.write_all(&control(raw.life, real.life, Control::Goodbye)).unwrap();
        close(&raw.control);
    });
}

#[test]
fn a_reset_connection_is_told_from_a_closed_one() {
    let real = Real::start();
    let raw = Raw::dial(&real, fresh_incarnation(), 1);
    let life = raw.life;
    // Bytes that the peer has not read when it closes make its kernel send a reset.
    real.transport.post(message(&real, life, Lane::Control, 1, pattern(1, 1000))).unwrap();
    let mut byte = [0];
    raw.control.peek(&mut byte).unwrap();
    drop(raw);
    real.seen.wait_for("the end", |seen| !seen.down(life).is_empty());
    assert_eq!(real.seen.look(|seen| seen.down(life)), [Evidence::ConnectionReset]);
}

#[test]
fn frames_before_an_end_are_still_delivered() {
    let real = Real::start();
    let mut raw = Raw::dial(&real, fresh_incarnation(), 1);
    for seq in 0..500 {
        let frame = raw.frame(&real, seq);
        raw.control.write_all(&frame).unwrap();
    }
    let life = raw.life;
    drop(raw);
    real.seen.wait_for("the end", |seen| !seen.down(life).is_empty());
    assert_eq!(real.seen.look(|seen| seen.steps(life, Lane::Control).len()), 500);
}

/// Both sides have dialled: frames keep going over the first link; one may be lost without a `Down`.
#[test]
fn of_two_links_the_first_carries_the_frames_and_either_may_end() {
    let real = Real::start();
    let life = fresh_incarnation();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut first = Raw::dial(&real, life, 1);
    let address = tcp(&listener.local_addr().unwrap().to_string());
    let dialled = std::thread::spawn(move || Raw::answer(&listener, life));
    // It does not know who is there, so it dials although the life is linked.
    assert_eq!(block_on(real.transport.connect(&address, None)).unwrap().incarnation, life);
    let mut second = dialled.join().unwrap();
    for seq in 0..10 {
        real.transport.post(message(&real, life, Lane::Control, seq, Bytes::new())).unwrap();
    }
    for seq in 0..10 {
        let frame = wire::decode(read_frame(&mut first.control).unwrap().into()).unwrap().frame;
        assert!(
            matches!(frame, Frame::Step(step) if step.id.seq == seq),
            "the first link carries frame {seq}"
        );
    }
    first.control.shutdown(Shutdown::Both).unwrap();
    real.seen.wait_for("the news of the loss", |seen| seen.relinked(life) == 1);
    assert_ended(&mut first.bulk, "the other connection of a link that lost one");
    real.transport.post(message(&real, life, Lane::Control, 10, Bytes::new())).unwrap();
    assert!(read_frame(&mut second.control).is_some(), "the second link goes on");
    second.bulk.shutdown(Shutdown::Both).unwrap();
    real.seen.wait_for("the death", |seen| seen.down(life) == [Evidence::ConnectionClosed]);
    assert_eq!(real.seen.look(|seen| (seen.up(life), seen.relinked(life))), (1, 1));
}

/// F13: a peer that forgets its side and shakes hands a hundred times ends up with one link, and is never down.
#[test]
fn repeated_handshakes_of_one_life_converge_on_the_last_link() {
    let real = Real::start();
    let life = fresh_incarnation();
    let mut earlier: Vec<Raw> = Vec::new();
    for link in 1..=100 {
        earlier.push(Raw::dial(&real, life, link));
    }
    let mut last = earlier.pop().unwrap();
    for raw in &mut earlier {
        assert_ended(&mut raw.control, "a link that was replaced");
        assert_ended(&mut raw.bulk, "a link that was replaced");
    }
    let frame = last.frame(&real, 1);
    last.control.write_all(&frame).unwrap();
    real.seen.wait_for("a frame on the last", |seen| seen.steps(life, Lane::Control).len() == 1);
    real.transport.post(message(&real, life, Lane::Control, 1, Bytes::new())).unwrap();
    assert!(read_frame(&mut last.control).is_some());
    assert_eq!(real.seen.look(|seen| (seen.up(life), seen.down(life).len())), (1, 0));
    assert_eq!(real.seen.look(|seen| seen.relinked(life)), 99);
}

/// F13: whoever dials in a loop is slowed down, on the dialling side.
#[test]
fn dials_in_a_loop_are_paced() {
    let real = Real::start();
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let began = Instant::now();
    for _ in 0..250 {
        let error = block_on(real.transport.connect(&tcp(&free.to_string()), None)).unwrap_err();
        assert!(matches!(error, ConnectError::Io { .. }), "{error}");
    }
    assert!(began.elapsed() >= Duration::from_millis(500), "250 dials took {:?}", began.elapsed());
}

/// A stuffed bulk lane delays no control frame.
#[test]
fn a_heartbeat_does_not_queue_behind_a_tensor() {
    let real = Real::start();
    let mut raw = Raw::dial(&real, fresh_incarnation(), 1);
    let mut seq = 0;
    while real.transport.backlog(raw.life) < 8 << 20 {
        real.transport.post(message(&real, raw.life, Lane::Bulk, seq, pattern(1, 1 << 20))).unwrap();
        seq += 1;
    }
    real.transport.post(message(&real, raw.life, Lane::Control, 77, Bytes::new())).unwrap();
    let frame = wire::decode(read_frame(&mut raw.control).unwrap().into()).unwrap().frame;
    assert!(matches!(frame, Frame::Step(step) if step.id.seq == 77));
}

#[test]
fn a_fenced_peer_is_told_before_its_link_ends() {
    let real = Real::start();
    let mut raw = Raw::dial(&real, fresh_incarnation(), 1);
    real.transport.fence(raw.life);
    let frame = wire::decode(read_frame(&mut raw.control).unwrap().into()).unwrap().frame;
    assert_eq!(frame, Frame::Control(Control::Fenced));
    // What it still sends is not heard.
    let late = raw.frame(&real, 1);
    let _ = raw.control.write_all(&late);
    assert_ended(&mut raw.control, "a fenced peer");
    let mut again = connect(&real.host());
    let opening = Opening::Hello(hello_of(raw.life, Lane::Control, 2));
    again.write_all(&wire::hello::encode(&opening)).unwrap();
    assert_eq!(read_opening(&mut again), Opening::Reject(Reject::Fenced));
    assert!(real.seen.look(|seen| seen.steps(raw.life, Lane::Control).is_empty()));
}

/// F17: a port in use is a clear error; endpoints that start together all get their own; the advertised port is the
/// bound one.
#[test]
fn a_port_in_use_is_named_and_free_ones_are_found() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let text = taken.local_addr().unwrap().to_string();
    let error = listen(TcpConfig { listen: text.clone(), ..TcpConfig::default() }).unwrap_err();
    assert!(matches!(&error, StartError::InUse { address } if address.as_str() == format!("tcp://{text}")));
    assert!(error.to_string().contains(&text) && error.to_string().contains("in use"), "{error}");
    let all: Vec<_> = std::thread::scope(|scope| {
        let starts: Vec<_> = (0..14).map(|_| scope.spawn(|| listen(TcpConfig::default()).unwrap())).collect();
        starts.into_iter().map(|start| start.join().unwrap()).collect()
    });
    let addresses: HashSet<Address> = all.iter().map(|transport| transport.local()).collect();
    assert_eq!(addresses.len(), 14);
    for transport in &all {
        connect(transport.local().split().1);
    }
}

/// F17: a restart binds at once although the connections of its predecessor linger.
#[test]
fn a_restart_binds_the_same_port_within_a_second() {
    for _ in 0..10 {
        let real = Real::start();
        let host = real.host();
        let peers: Vec<Raw> = (0..4).map(|link| Raw::dial(&real, fresh_incarnation(), link)).collect();
        let began = Instant::now();
        drop(real);
        let again = listen(TcpConfig { listen: host.clone(), ..TcpConfig::default() }).unwrap();
        assert!(began.elapsed() < Duration::from_secs(1));
        assert_eq!(again.local(), tcp(&host));
        drop(peers);
    }
}

/// F44: every way to write loopback works; what can't work names its address, and nothing hangs.
#[test]
fn every_form_of_address_works_or_names_itself() {
    let v6 = Real::with(TcpConfig { listen: "[::1]:0".into(), ..TcpConfig::default() });
    let port = v6.host().rsplit_once(':').unwrap().1.to_string();
    for form in ["[::1]", "[0:0:0:0:0:0:0:1]", "[0000:0000:0000:0000:0000:0000:0000:0001]", "[::1%0]"] {
        let caller = Real::start();
        let address = tcp(&format!("{form}:{port}"));
        assert_eq!(
            block_on(caller.transport.connect(&address, None)).unwrap().incarnation,
            v6.life,
            "{form}"
        );
    }
    let v4 = Real::with(TcpConfig { listen: "localhost:0".into(), ..TcpConfig::default() });
    let port = v4.host().rsplit_once(':').unwrap().1.to_string();
    let caller = Real::start();
    let found = block_on(caller.transport.connect(&tcp(&format!("localhost:{port}")), None)).unwrap();
    assert_eq!(found.incarnation, v4.life, "a name is looked up, and each of its addresses tried");
    for bad in [
        "[fe80::1]:9",
        "[fe80::1%lo]:9",
        "[fe80::1%no-such-interface]:9",
        "no-such-host.invalid:9",
        "localhost",
        "::1:9",
        "127.0.0.1:99999",
        "",
        "[::1]:0",
    ] {
        let error = block_on(caller.transport.connect(&tcp(bad), None)).unwrap_err();
        assert!(error.to_string().contains(&format!("tcp://{bad}")), "{bad}: {error}");
    }
    for bad in ["nowhere", "[::1]", "127.0.0.1:x", "192.0.2.1:0"] {
        let error = listen(TcpConfig { listen: bad.into(), ..TcpConfig::default() }).unwrap_err();
        assert!(error.to_string().contains(bad), "{bad}: {error}");
    }
}

/// F44: an IPv4-only client of a dual-stack server; and a server on every interface is a decision.
#[test]
fn a_dual_stack_server_takes_both_and_needs_to_be_trusted() {
    let any = TcpConfig { listen: "[::]:0".into(), ..TcpConfig::default() };
    let error = listen(any.clone()).unwrap_err().to_string();
    assert!(error.contains("loopback") && error.contains("[::]:0"), "{error}");
    let both = Real::with(TcpConfig { trusted_network: true, ..any });
    let port = both.host().rsplit_once(':').unwrap().1.to_string();
    for host in ["127.0.0.1", "[::1]"] {
        let caller = Real::start();
        let address = tcp(&format!("{host}:{port}"));
        assert_eq!(block_on(caller.transport.connect(&address, None)).unwrap().incarnation, both.life);
    }
}

#[test]
fn whoever_answers_with_something_else_or_not_at_all_is_no_peer() {
    let real = Real::with(impatient());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = tcp(&listener.local_addr().unwrap().to_string());
    // Accepted by the kernel, and never answered.
    let error = block_on(real.transport.connect(&address, None)).unwrap_err();
    assert!(matches!(error, ConnectError::NoAnswer { waited_ms: 250.., .. }), "{error:?}");
    // The attempts so far wait in the queue: the next ones get a web server's answer.
    let server = std::thread::spawn(move || {
        for _ in 0..4 {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    let error = block_on(real.transport.connect(&address, None)).unwrap_err();
    assert!(matches!(error, ConnectError::NoAnswer { .. }), "{error:?}");
    server.join().unwrap();
    assert!(
        block_on(real.transport.connect(&real.transport.local(), None)).is_err(),
        "it is no peer of itself"
    );
    assert!(real.seen.look(|seen| seen.events.is_empty()));
}

#[test]
fn more_connections_than_allowed_are_told_so() {
    let real = Real::with(TcpConfig { connections_max: 4, ..TcpConfig::default() });
    let peers: Vec<Raw> = (1..=2).map(|link| Raw::dial(&real, fresh_incarnation(), link)).collect();
    let caller = Real::start();
    match block_on(caller.transport.connect(&real.transport.local(), None)) {
        Err(ConnectError::Rejected { reject: Reject::Full, .. }) => {}
        other => panic!("{other:?}"),
    }
    drop(peers);
    // Room again, as soon as the node has seen them go.
    let until = Instant::now() + PATIENCE;
    while block_on(caller.transport.connect(&real.transport.local(), None)).is_err() {
        assert!(Instant::now() < until, "the places of those who left stay taken");
    }
}

/// An idle transport sleeps: no thread is woken, with a link up and a borrower gone.
#[test]
fn an_idle_transport_wakes_nobody() {
    let (real, other) = (Real::start(), Real::start());
    block_on(real.transport.connect(&other.transport.local(), None)).unwrap();
    // One who borrows for longer than he is looked after, and leaves.
    real.transport.progress(Duration::from_millis(50));
    // The native thread takes over, and from then on a while passes without a wake-up.
    let until = Instant::now() + PATIENCE;
    let woken = loop {
        let before = real.transport.wakeups();
        std::thread::sleep(Duration::from_millis(500));
        let woken = real.transport.wakeups() - before;
        if woken <= 1 || Instant::now() > until {
            break woken;
        }
    };
    assert!(woken <= 1, "woken {woken} times");
    real.still_serves();
}

/// F28: what is larger than an operation may be is refused as such, and comes back.
#[test]
fn an_operation_above_the_limit_is_refused() {
    let real = Real::start();
    let raw = Raw::dial(&real, fresh_incarnation(), 1);
    for len in [(1u64 << 31) - 1, 1 << 31, (1 << 32) + 17, u64::MAX] {
        let key = RegionKey { owner: raw.life, id: 1 };
        let from = RegionSlice { key, offset: 0, len };
        let into = BytesMut::from(&b"mine"[..]);
        let (to, deadline) = (raw.life, Duration::from_secs(1));
        let read = Op::Read { id: OpId(1), to, from, seal: None, crc: None, into, deadline };
        let refused = real.transport.post(read).unwrap_err();
        assert_eq!(refused.why, RefusedWhy::TooLarge, "{len} bytes");
        assert!(matches!(refused.op, Op::Read { into, .. } if into == b"mine"[..]));
    }
}
