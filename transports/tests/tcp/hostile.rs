//! F39 and its kind: whatever arrives on the port ends at most its own session. The node lives, and its memory stays.

use std::io::Write;
use std::time::Duration;

use bytes::BytesMut;
use connex_protocol::wire::bulk::{self, Bulk, Status};
use connex_protocol::wire::hello::{self, Lane, Opening, Reject};
use connex_protocol::wire::{Control, LENGTH_PREFIX, RegionKey};
use connex_protocol::{Evidence, Incarnation};
use connex_transport::conformance::{fresh_incarnation, pattern};
use connex_transport::{Op, OpError, OpId, RegionSlice, Transport};

use crate::raw::{Raw, Real, assert_ended, connect, control, hello_of, impatient, read_frame, read_opening};

#[test]
fn garbage_instead_of_a_hello_ends_that_connection_only() {
    let real = Real::with(impatient());
    let hello = hello::encode(&Opening::Hello(hello_of(fresh_incarnation(), Lane::Control, 1)));
    let mut flipped = hello.clone();
    flipped[LENGTH_PREFIX + 1] ^= 1;
    for (what, bytes) in [
        ("a length of 2^63", (1u64 << 63).to_le_bytes().to_vec()),
        ("a length of 2^32 - 1", u32::MAX.to_le_bytes().to_vec()),
        ("an HTTP request", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".to_vec()),
        ("zeroes", vec![0; 10_000]),
        ("a hello with another magic", flipped),
        ("a truncated hello", hello[..hello.len() - 3].to_vec()),
        ("nothing at all", Vec::new()),
    ] {
        let mut stream = connect(&real.host());
        // The node may have closed already.
        let _ = stream.write_all(&bytes);
        assert_ended(&mut stream, what);
    }
    assert!(real.seen.look(|seen| seen.events.is_empty()), "no stranger is an event");
    real.still_serves();
}

#[test]
fn a_hello_sent_one_byte_at_a_time_ends_at_the_deadline() {
    let real = Real::with(impatient());
    let hello = hello::encode(&Opening::Hello(hello_of(fresh_incarnation(), Lane::Control, 1)));
    let mut stream = connect(&real.host());
    // Slower than the deadline allows in all, however fast the machine is.
    for byte in &hello {
        if stream.write_all(&[*byte]).is_err() {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_ended(&mut stream, "a slow hello");
    // One lane without the other is no link either.
    let mut half = connect(&real.host());
    half.write_all(&hello).unwrap();
    assert!(matches!(read_opening(&mut half), Opening::Hello(_)));
    assert_ended(&mut half, "half a link");
    assert!(real.seen.look(|seen| seen.events.is_empty()));
    real.still_serves();
}

/// Sends bytes on a lane of a fresh link, and expects that link to end as a violation.
fn violates(real: &Real, what: &str, lane: Lane, bytes: impl FnOnce(&Raw) -> Vec<u8>) {
    let mut raw = Raw::dial(real, fresh_incarnation(), 1);
    let bytes = bytes(&raw);
    let stream = if lane == Lane::Control { &mut raw.control } else { &mut raw.bulk };
    let _ = stream.write_all(&bytes);
    real.seen.wait_for(what, |seen| !seen.down(raw.life).is_empty());
    let down = real.seen.look(|seen| seen.down(raw.life));
    assert_eq!(down, [Evidence::ProtocolViolation], "{what}");
    assert_ended(&mut raw.control, what);
    assert_ended(&mut raw.bulk, what);
}

#[test]
fn a_frame_that_lies_ends_its_link_and_no_other() {
    let real = Real::with(impatient());
    let honest = Raw::dial(&real, fresh_incarnation(), 7);
    let stranger = fresh_incarnation();
    let prefixed = |bytes: &[u8]| [&(bytes.len() as u32).to_le_bytes(), bytes].concat();
    violates(&real, "a length of 2^63", Lane::Control, |_| {
        (1u64 << 63 | u64::from(u32::MAX)).to_le_bytes().to_vec()
    });
    violates(&real, "17 MiB on the control lane", Lane::Control, |_| (17u32 << 20).to_le_bytes().to_vec());
    violates(&real, "17 MiB on the bulk lane", Lane::Bulk, |_| (17u32 << 20).to_le_bytes().to_vec());
    violates(&real, "a frame too short for a header", Lane::Control, |_| prefixed(&[1; 10]));
    violates(&real, "an empty frame", Lane::Control, |_| prefixed(&[]));
    violates(&real, "a frame from another life", Lane::Control, |_| {
        control(stranger, real.life, Control::Nudge)
    });
    violates(&real, "a frame to another life", Lane::Control, |raw| {
        control(raw.life, stranger, Control::Nudge)
    });
    violates(&real, "a bulk header with a bad checksum", Lane::Bulk, |raw| {
        let mut bytes = bulk::encode(raw.life, real.life, &Bulk::Cancel { op: 1 }, 0);
        *bytes.last_mut().unwrap() ^= 1;
        bytes
    });
    violates(&real, "a short bulk frame", Lane::Bulk, |raw| {
        let bytes = bulk::encode(raw.life, real.life, &Bulk::Cancel { op: 1 }, 0);
        prefixed(&bytes[LENGTH_PREFIX..40])
    });
    violates(&real, "a write that begins in its middle", Lane::Bulk, |raw| {
        let region = RegionKey { owner: real.life, id: 1 };
        let write = Bulk::Write { op: 1, region, offset: 0, len: 100, at: 50 };
        bulk::encode(raw.life, real.life, &write, 10)
    });
    assert!(real.seen.look(|seen| seen.down(honest.life).is_empty()), "the honest link lives");
    let mut control = &honest.control;
    control.write_all(&honest.frame(&real, 5)).unwrap();
    real.seen.wait_for("the honest peer's frame", |seen| !seen.steps(honest.life, Lane::Control).is_empty());
    real.still_serves();
}

#[test]
fn a_frame_that_trickles_in_ends_its_link() {
    let real = Real::with(impatient());
    for lane in [Lane::Control, Lane::Bulk] {
        let mut raw = Raw::dial(&real, fresh_incarnation(), 1);
        let stream = if lane == Lane::Control { &mut raw.control } else { &mut raw.bulk };
        stream.write_all(&200_000u32.to_le_bytes()).unwrap();
        let head = raw_head(raw.life, real.life);
        let mut bytes = head.into_iter().chain(std::iter::repeat(0));
        let ended = |seen: &connex_transport::conformance::Seen| !seen.down(raw.life).is_empty();
        while !real.seen.look(ended) {
            let _ = stream.write_all(&[bytes.next().unwrap()]);
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(real.seen.look(|seen| seen.down(raw.life)), [Evidence::ProtocolViolation], "{lane:?}");
    }
    real.still_serves();
}

/// The first bytes of an honest frame between these two.
fn raw_head(from: Incarnation, to: Incarnation) -> Vec<u8> {
    control(from, to, Control::Nudge)[LENGTH_PREFIX..LENGTH_PREFIX + 24].to_vec()
}

#[test]
fn a_large_frame_that_arrives_slowly_but_steadily_is_taken() {
    let real = Real::with(impatient());
    let mut raw = Raw::dial(&real, fresh_incarnation(), 1);
    let body = pattern(1, 900_000);
    let frame = connex_transport::conformance::frame(raw.life, real.life, 3, body.clone());
    let bytes = [&frame.head[..], &frame.body[..]].concat();
    // 900 kB in nine pieces of 100 ms take three stall deadlines; each gains far more than 64 KiB.
    for piece in bytes.chunks(100_000) {
        raw.control.write_all(piece).unwrap();
        std::thread::sleep(Duration::from_millis(100));
    }
    real.seen.wait_for("the frame", |seen| !seen.steps(raw.life, Lane::Control).is_empty());
    assert!(real.seen.look(|seen| seen.steps(raw.life, Lane::Control)[0].1 == body));
}

#[test]
fn data_beyond_what_a_read_asked_for_ends_the_link() {
    let real = Real::with(impatient());
    for (what, at, len) in [("too much", 0, 101), ("in the wrong place", 1, 99), ("far away", u64::MAX, 10)] {
        let mut raw = Raw::dial(&real, fresh_incarnation(), 1);
        real.transport.post(read(1, raw.life, 100, Duration::from_secs(20))).unwrap();
        let asked = read_frame(&mut raw.bulk).unwrap();
        let Ok(Bulk::Read { op, len: 100, .. }) = bulk::decode(&asked, asked.len()) else {
            panic!("{asked:?}")
        };
        raw.bulk.write_all(&bulk::encode(raw.life, real.life, &Bulk::Data { op, at }, len)).unwrap();
        let _ = raw.bulk.write_all(&vec![7; len]);
        let lost = OpError::LinkDown(Evidence::ProtocolViolation);
        assert_eq!(real.seen.result(OpId(1)), Err(lost), "{what}");
        real.seen.wait_for("the end", |seen| !seen.down(raw.life).is_empty());
        real.seen.clear();
    }
    real.still_serves();
}

fn read(id: u64, to: Incarnation, len: u64, deadline: Duration) -> Op {
    let from = RegionSlice { key: RegionKey { owner: to, id: 1 }, offset: 0, len };
    Op::Read { id: OpId(id), to, from, seal: None, crc: None, into: BytesMut::new(), deadline }
}

/// F01, F20: a read whose owner stops half way times out; what arrives later lands nowhere, and the link lives.
#[test]
fn late_bytes_of_a_read_that_timed_out_are_dropped() {
    let real = Real::start();
    let mut raw = Raw::dial(&real, fresh_incarnation(), 1);
    let len = 300_000;
    real.transport.post(read(1, raw.life, len, Duration::from_millis(100))).unwrap();
    let asked = read_frame(&mut raw.bulk).unwrap();
    let Ok(Bulk::Read { op: first, .. }) = bulk::decode(&asked, asked.len()) else { panic!("{asked:?}") };
    raw.bulk
        .write_all(&bulk::encode(raw.life, real.life, &Bulk::Data { op: first, at: 0 }, len as usize))
        .unwrap();
    raw.bulk.write_all(&vec![1; len as usize / 2]).unwrap();
    assert_eq!(real.seen.result(OpId(1)), Err(OpError::TimedOut));
    let cancel = read_frame(&mut raw.bulk).unwrap();
    assert_eq!(bulk::decode(&cancel, cancel.len()), Ok(Bulk::Cancel { op: first }));
    // The same id and destination for the next read, while the rest of the first is still to come.
    real.seen.clear();
    real.transport.post(read(1, raw.life, 1000, Duration::from_secs(20))).unwrap();
    let asked = read_frame(&mut raw.bulk).unwrap();
    let Ok(Bulk::Read { op: second, .. }) = bulk::decode(&asked, asked.len()) else { panic!("{asked:?}") };
    raw.bulk.write_all(&vec![2; len as usize / 2]).unwrap();
    raw.bulk.write_all(&bulk::encode(raw.life, real.life, &Bulk::Data { op: second, at: 0 }, 1000)).unwrap();
    raw.bulk.write_all(&[3; 1000]).unwrap();
    assert!(real.seen.result(OpId(1)).unwrap() == [3; 1000][..]);
    // A completion for an operation that is over changes nothing either.
    let done = Bulk::Done { op: first, status: Status::OutOfBounds };
    raw.bulk.write_all(&bulk::encode(raw.life, real.life, &done, 0)).unwrap();
    raw.bulk.write_all(&raw.frame(&real, 9)).unwrap();
    real.seen.wait_for("a frame behind it", |seen| seen.steps(raw.life, Lane::Bulk).len() == 1);
    assert!(real.seen.look(|seen| seen.down(raw.life).is_empty()));
}

#[test]
fn a_peer_of_another_version_is_told_so_both_ways() {
    let real = Real::start();
    let mut hello = hello::encode(&Opening::Hello(hello_of(fresh_incarnation(), Lane::Control, 1)));
    hello[LENGTH_PREFIX + 4] = 99;
    let mut stream = connect(&real.host());
    stream.write_all(&hello).unwrap();
    // The answer carries the node's own version: a peer of another one reads no more of it than that.
    match read_opening(&mut stream) {
        Opening::Reject(Reject::Version { theirs, .. }) => assert_eq!(theirs, connex_protocol::wire::VERSION),
        other => panic!("{other:?}"),
    }
    assert_ended(&mut stream, "another version");
    real.still_serves();
}

#[test]
fn memory_and_descriptors_stay_flat_under_hostile_sessions() {
    let real = Real::with(impatient());
    let session = |round: u64| {
        // Announces 16 MiB and sends hardly any of it; or says nothing; or sends garbage.
        let mut raw = Raw::dial(&real, fresh_incarnation(), round);
        let life = raw.life;
        let frame = connex_transport::conformance::frame(life, real.life, 1, pattern(1, 15 << 20));
        raw.bulk.write_all(&frame.head).unwrap();
        raw.bulk.write_all(&frame.body[..50_000]).unwrap();
        let mut stranger = connect(&real.host());
        let _ = stranger.write_all(&round.to_le_bytes());
        drop((raw, stranger));
        real.seen.wait_for("the end", |seen| !seen.down(life).is_empty());
        real.seen.clear();
    };
    (0..50).for_each(session);
    let before = (resident(), descriptors());
    (50..600).for_each(session);
    let after = (resident(), descriptors());
    assert!(after.0 < before.0 + (32 << 20), "resident bytes: {} before, {} after", before.0, after.0);
    assert!(after.1 < before.1 + 30, "descriptors: {} before, {} after", before.1, after.1);
    real.still_serves();
}

fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}
