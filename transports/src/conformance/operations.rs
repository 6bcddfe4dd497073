use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use connex_protocol::StepId;
use connex_protocol::wire::hello::Lane;
use connex_protocol::wire::{RegionKey, Seal};

use super::{Backend, Node, PATIENCE, block_on, pair, pattern};
use crate::{Op, OpError, OpId, Region, RegionSlice};

const DEADLINE: Duration = Duration::from_secs(10);

fn slots(owner: &Node, len: u64) -> Arc<Region> {
    let region = Arc::new(Region::slots(RegionKey { owner: owner.life(), id: 7 }, len));
    block_on(owner.transport.register(region.clone())).unwrap();
    region
}

fn plain(owner: &Node, len: usize) -> Arc<Region> {
    let region = Arc::new(Region::plain(RegionKey { owner: owner.life(), id: 8 }, len));
    block_on(owner.transport.register(region.clone())).unwrap();
    region
}

fn seal(owner: &Node, generation: u64, len: usize) -> Seal {
    Seal { step: StepId { origin: owner.life(), seq: generation }, generation, len: len as u64 }
}

fn read(id: u64, owner: &Node, region: &Region, offset: u64, seal: Option<Seal>, len: usize) -> Op {
    Op::Read {
        id: OpId(id),
        to: owner.life(),
        from: RegionSlice { key: region.key(), offset, len: len as u64 },
        seal,
        crc: None,
        into: BytesMut::new(),
        deadline: DEADLINE,
    }
}

fn write(id: u64, owner: &Node, region: &Region, offset: u64, data: Bytes) -> Op {
    Op::Write {
        id: OpId(id),
        to: owner.life(),
        at: RegionSlice { key: region.key(), offset, len: data.len() as u64 },
        data,
        signal: None,
        deadline: DEADLINE,
    }
}

/// Reads of 0 B to more than one frame, at several offsets, return the right bytes and reuse their destination.
pub fn reads_of_every_size_fill_their_destination(backend: &dyn Backend) {
    let (a, b) = pair(backend);
    let largest = backend.largest();
    let region = slots(&b, 3 * largest as u64);
    let bytes = plain(&b, 200_000);
    bytes.write(0, &pattern(5, 200_000)).unwrap();
    for (id, (offset, len)) in
        [(0u64, 0usize), (1, 1), (4096, 65_536), (1 << 20, 1 << 20), (largest as u64 + 13, largest)]
            .into_iter()
            .enumerate()
    {
        let id = id as u64;
        region.publish(offset, seal(&b, id, len), pattern(id, len)).unwrap();
        // A destination with other content: it must be replaced, not appended to.
        let mut op = read(id, &b, &region, offset, Some(seal(&b, id, len)), len);
        let Op::Read { into, .. } = &mut op else { unreachable!() };
        into.extend_from_slice(b"what was here before");
        a.transport.post(op).unwrap();
        assert!(a.seen.result(OpId(id)).unwrap() == pattern(id, len), "{len} bytes at {offset}");
    }
    for (id, (offset, len)) in [(0u64, 16usize), (77, 100_000), (199_999, 1)].into_iter().enumerate() {
        let id = 100 + id as u64;
        a.transport.post(read(id, &b, &bytes, offset, None, len)).unwrap();
        let expected = pattern(5, 200_000).slice(offset as usize..offset as usize + len);
        assert!(a.seen.result(OpId(id)).unwrap() == expected, "{len} plain bytes at {offset}");
    }
}

/// Many reads under way at once, large and small, from both sides: each completes once, with its own bytes.
pub fn many_reads_at_once_each_complete_once(backend: &dyn Backend) {
    let (a, b) = pair(backend);
    let len = |id: u64| if id.is_multiple_of(16) { 2_000_000 } else { 1 + (id as usize * 997) % 40_000 };
    let (of_a, of_b) = (slots(&a, 1 << 40), slots(&b, 1 << 40));
    for id in 0..200 {
        for (owner, region) in [(&a, &of_a), (&b, &of_b)] {
            let payload = pattern(id ^ owner.life().bits(), len(id));
            region.publish(id << 24, seal(owner, id, len(id)), payload).unwrap();
        }
    }
    for id in 0..200 {
        a.transport.post(read(id, &b, &of_b, id << 24, Some(seal(&b, id, len(id))), len(id))).unwrap();
        b.transport.post(read(id, &a, &of_a, id << 24, Some(seal(&a, id, len(id))), len(id))).unwrap();
        a.send(b.life(), Lane::Bulk, id, pattern(id, 3000));
    }
    for id in 0..200 {
        assert!(a.seen.result(OpId(id)).unwrap() == pattern(id ^ b.life().bits(), len(id)), "read {id} of a");
        assert!(b.seen.result(OpId(id)).unwrap() == pattern(id ^ a.life().bits(), len(id)), "read {id} of b");
    }
    b.seen.wait_for("the frames between the reads", |seen| seen.steps(a.life(), Lane::Bulk).len() == 200);
    let steps = b.seen.look(|seen| seen.steps(a.life(), Lane::Bulk));
    assert!(
        steps.iter().enumerate().all(|(at, (seq, body))| *seq == at as u64 && *body == pattern(*seq, 3000))
    );
}

/// P-6: a slot that holds another payload than the one asked for is noticed.
pub fn a_read_checks_the_seal(backend: &dyn Backend) {
    let (a, b) = pair(backend);
    let region = slots(&b, 1 << 20);
    region.publish(0, seal(&b, 1, 1000), pattern(1, 1000)).unwrap();
    region.publish(0, seal(&b, 2, 1000), pattern(2, 1000)).unwrap();
    region.publish(4096, seal(&b, 3, 1000), pattern(3, 1000)).unwrap();
    region.retract(4096, 3);
    a.transport.post(read(1, &b, &region, 0, Some(seal(&b, 1, 1000)), 1000)).unwrap();
    assert_eq!(a.seen.result(OpId(1)), Err(OpError::SealMismatch), "an earlier generation");
    a.transport.post(read(2, &b, &region, 4096, Some(seal(&b, 3, 1000)), 1000)).unwrap();
    assert_eq!(a.seen.result(OpId(2)), Err(OpError::SealMismatch), "an empty slot");
    a.transport.post(read(3, &b, &region, 0, Some(seal(&b, 2, 1000)), 1000)).unwrap();
    assert!(a.seen.result(OpId(3)).unwrap() == pattern(2, 1000), "the present generation");
}

/// A payload whose checksum differs from the one asked for is refused at the reader.
pub fn a_read_checks_the_checksum_if_asked(backend: &dyn Backend) {
    let (a, b) = pair(backend);
    let region = slots(&b, 1 << 24);
    let len = 3_000_000;
    region.publish(0, seal(&b, 1, len), pattern(1, len)).unwrap();
    let right = connex_protocol::wire::crc32c(0, &pattern(1, len));
    for (id, asked) in [(1, right), (2, right ^ 1)] {
        let mut op = read(id, &b, &region, 0, Some(seal(&b, 1, len)), len);
        let Op::Read { crc, .. } = &mut op else { unreachable!() };
        *crc = Some(asked);
        a.transport.post(op).unwrap();
    }
    assert!(a.seen.result(OpId(1)).unwrap() == pattern(1, len));
    assert_eq!(a.seen.result(OpId(2)), Err(OpError::Checksum));
}

/// Ranges past the end, or past 2^64, and operations that the region does not take, are refused.
pub fn a_read_outside_the_region_is_refused(backend: &dyn Backend) {
    let (a, b) = pair(backend);
    let bytes = plain(&b, 1000);
    let region = slots(&b, 1000);
    for (id, (offset, len)) in [(1u64, (1000u64, 1usize)), (2, (990, 11)), (3, (u64::MAX, 2))] {
        a.transport.post(read(id, &b, &bytes, offset, None, len)).unwrap();
        assert_eq!(a.seen.result(OpId(id)), Err(OpError::OutOfBounds), "{len} bytes at {offset}");
        a.transport.post(write(10 + id, &b, &bytes, offset, pattern(1, len))).unwrap();
        assert_eq!(
            a.seen.result(OpId(10 + id)),
            Err(OpError::OutOfBounds),
            "{len} bytes written at {offset}"
        );
    }
    a.transport.post(write(20, &b, &region, 0, pattern(1, 10))).unwrap();
    assert_eq!(a.seen.result(OpId(20)), Err(OpError::OutOfBounds), "slots take no writes");
}

/// F10: a key from before a restart under the same name and address names nothing.
pub fn a_stale_key_after_a_restart_is_refused(backend: &dyn Backend) {
    let (a, b) = pair(backend);
    let region = plain(&b, 1000);
    let old = b.life();
    let (stale, address) = (region.key(), b.transport.local());
    b.kill(backend);
    a.seen.wait_for("the death", |seen| !seen.down(old).is_empty());
    let b = Node::start(backend, "b");
    assert_eq!(b.transport.local(), address);
    let again = plain(&b, 1000);
    again.write(0, &pattern(9, 1000)).unwrap();
    a.connect(&b);
    let mut op = read(1, &b, &again, 0, None, 10);
    let Op::Read { from, .. } = &mut op else { unreachable!() };
    from.key = stale;
    a.transport.post(op).unwrap();
    assert_eq!(a.seen.result(OpId(1)), Err(OpError::UnknownRegion));
    let mut op = write(2, &b, &again, 0, pattern(1, 10));
    let Op::Write { at, .. } = &mut op else { unreachable!() };
    at.key = stale;
    a.transport.post(op).unwrap();
    assert_eq!(a.seen.result(OpId(2)), Err(OpError::UnknownRegion));
    assert!(again.read(0, 1000, None).unwrap() == pattern(9, 1000), "nothing landed");
}

/// F23: the bytes are in place when the signal is handled, whatever else goes on.
pub fn a_write_lands_before_its_signal(backend: &dyn Backend) {
    let (a, b) = pair(backend);
    let len = 2_400_000;
    let region = plain(&b, len);
    for round in 0..40u64 {
        let mut op = write(round, &b, &region, 0, pattern(round, len));
        let Op::Write { signal, .. } = &mut op else { unreachable!() };
        *signal = Some(a.frame(b.life(), round, Bytes::new()));
        a.transport.post(op).unwrap();
        b.seen.wait_for("the signal", |seen| seen.steps(a.life(), Lane::Bulk).len() as u64 > round);
        assert!(region.read(0, len as u64, None).unwrap() == pattern(round, len), "round {round} is torn");
        assert!(a.seen.result(OpId(round)).is_ok());
    }
}

/// A write that the owner refuses delivers no signal, and the operations after it work.
pub fn a_refused_write_sends_no_signal(backend: &dyn Backend) {
    let (a, b) = pair(backend);
    let region = plain(&b, 100);
    let largest = backend.largest();
    let mut op = write(1, &b, &region, 50, pattern(1, largest));
    let Op::Write { signal, .. } = &mut op else { unreachable!() };
    *signal = Some(a.frame(b.life(), 1, Bytes::new()));
    a.transport.post(op).unwrap();
    assert_eq!(a.seen.result(OpId(1)), Err(OpError::OutOfBounds));
    let mut op = write(2, &b, &region, 50, pattern(2, 50));
    let Op::Write { signal, .. } = &mut op else { unreachable!() };
    *signal = Some(a.frame(b.life(), 2, Bytes::new()));
    a.transport.post(op).unwrap();
    assert!(a.seen.result(OpId(2)).is_ok());
    b.seen.wait_for("the second signal", |seen| !seen.steps(a.life(), Lane::Bulk).is_empty());
    let signals = b.seen.look(|seen| seen.steps(a.life(), Lane::Bulk));
    assert_eq!(signals.iter().map(|(seq, _)| *seq).collect::<Vec<_>>(), [2]);
    assert!(
        region.read(0, 50, None).unwrap().iter().all(|byte| *byte == 0),
        "nothing of the refused write landed"
    );
}

/// Every operation under way ends exactly once when its peer dies, before the news of the death.
pub fn operations_end_once_when_the_link_dies(backend: &dyn Backend) {
    let (a, b) = pair(backend);
    let len = backend.largest();
    let life = b.life();
    let region = slots(&b, 64 * len as u64);
    let bytes = plain(&b, len);
    let payload = pattern(1, len);
    for id in 0..16 {
        region.publish(id * len as u64, seal(&b, id, len), payload.clone()).unwrap();
    }
    let mut posted = Vec::new();
    for id in 0..16 {
        let read = read(id, &b, &region, id * len as u64, Some(seal(&b, id, len)), len);
        let write = write(100 + id, &b, &bytes, 0, payload.clone());
        for (id, op) in [(id, read), (100 + id, write)] {
            // A refused one has come back, and has no completion.
            if a.transport.post(op).is_ok() {
                posted.push(OpId(id));
            }
        }
    }
    b.kill(backend);
    a.seen.wait_for("the death", |seen| !seen.down(life).is_empty());
    a.seen.look(|seen| {
        for id in &posted {
            let all = seen.completions(*id);
            assert_eq!(all.len(), 1, "{id:?}");
            match &all[0].result {
                Ok(bytes) => assert!(id.0 >= 100 || *bytes == payload, "{id:?} completed with other bytes"),
                Err(error) => assert!(matches!(error, OpError::LinkDown(_)), "{id:?}: {error}"),
            }
        }
        let last = seen.events.last().unwrap();
        assert!(
            matches!(last, crate::Event::Down { .. }),
            "the death is the last event of that life: {last:?}"
        );
    });
}

/// F01: a read that is not served ends at its deadline, and what arrives later goes nowhere.
pub fn an_unserved_read_times_out_and_lands_nowhere(backend: &dyn Backend) {
    let (a, b) = pair(backend);
    let region = slots(&b, 1 << 24);
    let len = 1 << 20;
    region.publish(0, seal(&b, 1, len), pattern(1, len)).unwrap();
    // The owner's handler panics, and its progress with it: nothing is served until the restart.
    b.seen.panic_at(0);
    a.send(b.life(), Lane::Control, 0, Bytes::new());
    b.seen.wait_for("the panic", |seen| !seen.panics.is_empty());
    let mut op = read(1, &b, &region, 0, Some(seal(&b, 1, len)), len);
    let Op::Read { deadline, .. } = &mut op else { unreachable!() };
    *deadline = Duration::from_millis(50);
    let began = Instant::now();
    a.transport.post(op).unwrap();
    assert_eq!(a.seen.result(OpId(1)), Err(OpError::TimedOut));
    assert!(began.elapsed() >= Duration::from_millis(50) && began.elapsed() < PATIENCE);
    b.transport.restart_progress();
    // The same id again: only the new bytes arrive, and the late ones of the first disturb nothing.
    a.seen.clear();
    region.publish(0, seal(&b, 2, len), pattern(2, len)).unwrap();
    a.transport.post(read(1, &b, &region, 0, Some(seal(&b, 2, len)), len)).unwrap();
    assert!(a.seen.result(OpId(1)).unwrap() == pattern(2, len));
}

/// F19: once `deregister` has returned, no operation touches the region, and its key names nothing.
pub fn a_deregistered_region_is_neither_read_nor_written(backend: &dyn Backend) {
    let (a, b) = pair(backend);
    let len = backend.largest();
    for round in 0..5u64 {
        let region = plain(&b, len);
        region.write(0, &pattern(round, len)).unwrap();
        a.transport.post(read(round, &b, &region, 0, None, len)).unwrap();
        a.transport.post(write(100 + round, &b, &region, 0, pattern(99, len))).unwrap();
        block_on(b.transport.deregister(&region));
        let poison = vec![0xEE; len];
        region.write(0, &poison).unwrap();
        match a.seen.result(OpId(100 + round)) {
            Ok(_) | Err(OpError::UnknownRegion) => {}
            Err(error) => panic!("round {round}: {error}"),
        }
        match a.seen.result(OpId(round)) {
            Ok(bytes) => assert!(!bytes.contains(&0xEE) || bytes == pattern(round, len), "poison was read"),
            Err(error) => assert_eq!(error, OpError::UnknownRegion),
        }
        assert!(
            region.read(0, len as u64, None).unwrap() == poison,
            "round {round}: a write landed afterwards"
        );
    }
}
