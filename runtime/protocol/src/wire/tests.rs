use alloc::vec::Vec;

use bytes::Bytes;
use proptest::prelude::*;

use super::hello::{Hello, Lane, Opening, Reject};
use super::*;
use crate::{Epoch, Group, Incarnation, Peer, StepId};

fn incarnation() -> impl Strategy<Value = Incarnation> {
    any::<u64>().prop_map(Incarnation::from_bits)
}

fn step_id() -> impl Strategy<Value = StepId> {
    (incarnation(), any::<u64>()).prop_map(|(origin, seq)| StepId { origin, seq })
}

fn bytes() -> impl Strategy<Value = Bytes> {
    prop::collection::vec(any::<u8>(), 0..40).prop_map(Bytes::from)
}

fn payload() -> impl Strategy<Value = Payload> {
    let slot = (incarnation(), any::<[u64; 4]>(), any::<Option<u32>>()).prop_map(
        |(owner, [id, offset, len, generation], crc)| {
            Payload::Slot(Slot { region: RegionKey { owner, id }, offset, len, generation, crc })
        },
    );
    prop_oneof![bytes().prop_map(Payload::Inline), slot]
}

fn frame() -> impl Strategy<Value = Frame> {
    let step = (
        (step_id(), any::<u32>(), prop::collection::vec(any::<u32>(), 0..4)),
        (any::<u64>(), prop::collection::vec(any::<u64>(), 0..4), any::<Option<u32>>(), any::<bool>()),
        (prop::collection::vec(bytes(), 0..3), bytes(), payload()),
    )
        .prop_map(
            |((id, attempt, route), (below, above, deadline_ms, streaming), (resume, meta, payload))| {
                Frame::Step(Step {
                    id,
                    attempt,
                    route,
                    completed: Completed { below, above },
                    deadline_ms,
                    streaming,
                    resume,
                    meta,
                    payload,
                })
            },
        );
    let error = "\\PC{0,20}".prop_map(|text| StepError::new(ErrorCode::Draining, Outcome::NotStarted, text));
    let result = prop_oneof![bytes().prop_map(Ok), error.prop_map(Err)];
    let reply = (step_id(), prop::collection::vec(any::<u32>(), 0..4), any::<u32>(), result)
        .prop_map(|(id, route, items, result)| Frame::Reply(Reply { id, route, items, result }));
    let item = (step_id(), any::<u32>(), bytes())
        .prop_map(|(id, index, body)| Frame::Item(Item { id, index, body }));
    let control = prop_oneof![
        (step_id(), any::<u32>()).prop_map(|(id, attempt)| Control::Ack { id, attempt }),
        (any::<u64>(), bytes()).prop_map(|(seq, body)| Control::Notice { seq, body: body.to_vec() }),
        Just(Control::Goodbye),
    ]
    .prop_map(Frame::Control);
    prop_oneof![step, reply, item, control]
}

proptest! {
    #[test]
    fn a_frame_round_trips(from in incarnation(), to in incarnation(), frame in frame()) {
        let encoded = encode(from, to, &frame);
        let length = u32::from_le_bytes(encoded.head[..LENGTH_PREFIX].try_into().unwrap());
        prop_assert_eq!(length as usize, encoded.len() - LENGTH_PREFIX);
        prop_assert_eq!(decode(encoded.to_frame()), Ok(Envelope { from, to, frame }));
    }

    #[test]
    fn a_changed_header_or_a_cut_is_noticed(from in incarnation(), to in incarnation(), frame in frame(), at: usize, bit in 0u8..8) {
        let encoded = encode(from, to, &frame);
        let whole = encoded.to_frame();
        let covered = encoded.head.len() - LENGTH_PREFIX;
        let mut changed = whole.to_vec();
        changed[at % covered] ^= 1u8 << bit;
        prop_assert!(decode(changed.into()).is_err());
        prop_assert!(decode(whole.slice(..at % whole.len())).is_err());
    }

    #[test]
    fn decoding_any_bytes_is_total(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = decode(bytes.clone().into());
        let _ = hello::decode(&bytes);
    }

    #[test]
    fn a_hello_round_trips(
        (incarnation, boot, counter, link) in (incarnation(), any::<u64>(), any::<u64>(), any::<u64>()),
        expects in prop::option::of(incarnation()),
        deployment in "\\PC{0,20}",
        bulk: bool,
    ) {
        let opening = Opening::Hello(Hello {
            peer: Peer { lid: Group::new("m/1", "pp", 3).replica(2), incarnation },
            epoch: Epoch { boot, counter },
            lane: if bulk { Lane::Bulk } else { Lane::Control },
            link,
            expects,
            deployment,
            auth: Vec::new(),
        });
        let bytes = hello::encode(&opening);
        prop_assert_eq!(hello::decode(&bytes[LENGTH_PREFIX..]), Ok(opening));
    }
}

#[test]
fn a_hello_of_another_version_is_told_apart_from_garbage() {
    let mut bytes = hello::encode(&Opening::Reject(Reject::Fenced));
    bytes[LENGTH_PREFIX + 4] = 9;
    let decoded = hello::decode(&bytes[LENGTH_PREFIX..]);
    assert_eq!(decoded, Ok(Opening::Reject(Reject::Version { ours: VERSION, theirs: 9 })));
    assert_eq!(hello::decode(b"GET / HTTP/1.1\r\n\r\n"), Err(WireError::Unknown));
}

#[test]
fn a_control_message_that_lies_about_its_length_allocates_nothing() {
    let encoded = encode(
        Incarnation::from_bits(1),
        Incarnation::from_bits(2),
        &Frame::Control(Control::Notice { seq: 1, body: Vec::new() }),
    );
    let mut lying = encoded.to_frame().to_vec();
    // The last byte is the body's length; 253 announces eight bytes of it.
    lying.pop();
    lying.push(253);
    lying.extend_from_slice(&u64::MAX.to_le_bytes());
    lying[4..8].fill(0);
    let crc = crc32c(0, &lying);
    lying[4..8].copy_from_slice(&crc.to_le_bytes());
    assert_eq!(decode(lying.into()), Err(WireError::Unknown));
}

#[test]
fn the_checksum_is_crc32c() {
    assert_eq!(crc32c(0, b"123456789"), 0xe306_9283);
    assert_eq!(crc32c(crc32c(0, b"1234"), b"56789"), 0xe306_9283);
}
