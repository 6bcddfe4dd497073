//! Everything is bounded, and a watcher has no gap however far it fell behind.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use proptest::prelude::*;

use super::world::{TTL_MS, World, config, lid};
use crate::directory::{
    Client, ClientConfig, ClientInput, ClientOutput, Registry, RegistryConfig, RegistryInput, RegistryOutput,
};
use crate::wire::directory::{Change, Message, Refusal, Request, Response, Seen};
use crate::wire::{CONTROL_FRAME_MAX, Control, WireError, codec};
use crate::{Address, Evidence, Group, Incarnation, Instant, LogicalId, Machine};

fn life(bits: u64) -> Incarnation {
    Incarnation::from_bits(bits)
}

fn register(lid: LogicalId, incarnation: Incarnation, address: &str) -> Request {
    let address = Address::new(address);
    Request::Register { lid, incarnation, address, last: None, ready: true, shadow: false, guardian: None }
}

fn ask(registry: &mut Registry, from: Incarnation, request: Request) -> Vec<Message> {
    registry
        .handle(Instant::ZERO, RegistryInput::Message { from, message: Message::Request { id: 1, request } });
    let mut all = Vec::new();
    while let Some(RegistryOutput::Send { to, message }) = registry.poll() {
        if to == from {
            all.push(message);
        }
    }
    all
}

fn answer(mut messages: Vec<Message>) -> Response {
    match messages.pop() {
        Some(Message::Response { response, .. }) => response,
        other => panic!("the answer comes last: {other:?}"),
    }
}

#[test]
fn identities_watchers_and_names_have_their_limits() {
    let config = RegistryConfig { identities: 2, watchers: 2, name_max: 100, ..config() };
    let mut registry = Registry::new(Instant::ZERO, life(9), 1, config);
    for number in 1..=2 {
        let request = register(lid(number), life(number.into()), "mem://x");
        assert!(matches!(answer(ask(&mut registry, life(number.into()), request)), Response::Granted { .. }));
        let watch = Request::Watch { after: None };
        assert_eq!(
            answer(ask(&mut registry, life(number.into()), watch)),
            Response::Watching { ttl_ms: TTL_MS }
        );
    }
    let full = |response| matches!(response, Response::Refused(Refusal::Full { .. }));
    assert!(full(answer(ask(&mut registry, life(3), register(lid(3), life(3), "mem://x")))));
    assert!(full(answer(ask(&mut registry, life(3), Request::Watch { after: None }))));
    let long = "x".repeat(101);
    let response = answer(ask(&mut registry, life(4), register(lid(4), life(4), &long)));
    assert!(matches!(response, Response::Refused(Refusal::TooLong { len: 101, max: 100, .. })));
    // Who is there goes on, and who leaves makes room.
    registry.handle(Instant::ZERO, RegistryInput::Gone(life(1)));
    assert_eq!(
        answer(ask(&mut registry, life(3), Request::Watch { after: None })),
        Response::Watching { ttl_ms: TTL_MS }
    );
}

#[test]
fn a_picture_of_many_routes_travels_in_parts_that_fit_a_frame() {
    let mut registry =
        Registry::new(Instant::ZERO, life(9), 1, RegistryConfig { identities: 20_000, ..config() });
    for number in 0..20_000u32 {
        let incarnation = life(u64::from(number) + 100);
        ask(&mut registry, incarnation, register(lid(number), incarnation, "tcp://[2001:db8::1]:40000"));
    }
    let parts = ask(&mut registry, life(1), Request::Watch { after: None });
    assert!(parts.len() > 3);
    let mut named = 0;
    for message in parts {
        let mut bytes = Vec::new();
        codec::write(&mut bytes, &Control::Directory(message.clone()));
        assert!(bytes.len() < CONTROL_FRAME_MAX / 2, "{}", bytes.len());
        if let Message::Snapshot { routes, .. } = message {
            named += routes.len();
        }
    }
    assert_eq!(named, 20_000);
    let answers = ask(&mut registry, life(1), Request::Resolve { group: Some(Group::new("m", "pp", 0)) });
    let lasts = answers.iter().filter(|message| {
        matches!(message, Message::Response { response: Response::Routes { last: true, .. }, .. })
    });
    assert_eq!(lasts.count(), 1);
}

#[test]
fn a_watcher_that_resumes_gets_what_it_missed_or_a_whole_picture() {
    let config = RegistryConfig { history: 4, ..config() };
    let mut registry = Registry::new(Instant::ZERO, life(9), 1, config);
    for number in 1..=3u32 {
        ask(&mut registry, life(number.into()), register(lid(number), life(number.into()), "mem://x"));
    }
    let watch = |registry: &mut Registry, life, revision| {
        ask(
            registry,
            Incarnation::from_bits(77),
            Request::Watch { after: Some(Seen { life, boot: 1, revision }) },
        )
    };
    let is_event = |message: &&Message| matches!(message, Message::Event { .. });
    let is_picture = |message: &&Message| matches!(message, Message::Snapshot { .. });
    assert_eq!(watch(&mut registry, life(9), 1).iter().filter(is_event).count(), 2);
    assert_eq!(watch(&mut registry, life(9), 3).len(), 1, "nothing was missed");
    assert_eq!(watch(&mut registry, life(8), 3).iter().filter(is_picture).count(), 1, "of another life");
    assert_eq!(watch(&mut registry, life(9), 9).iter().filter(is_picture).count(), 1, "from the future");
    for number in 4..=9u32 {
        ask(&mut registry, life(number.into()), register(lid(number), life(number.into()), "mem://x"));
    }
    assert_eq!(watch(&mut registry, life(9), 4).iter().filter(is_picture).count(), 1, "too long ago");
    assert_eq!(watch(&mut registry, life(9), 5).iter().filter(is_event).count(), 4);
}

#[test]
fn a_burst_that_exceeds_the_history_reaches_every_watcher_as_a_picture() {
    let mut registry = Registry::new(Instant::ZERO, life(9), 1, RegistryConfig { history: 8, ..config() });
    let mut cached: Vec<Client> = Vec::new();
    for number in 0..50u32 {
        let incarnation = life(u64::from(number) + 100);
        ask(&mut registry, incarnation, register(lid(number), incarnation, "mem://x"));
    }
    for watcher in [1, 2] {
        let mut client = Client::new(ClientConfig::default(), None, 1);
        client.handle(Instant::ZERO, ClientInput::Start);
        client.handle(Instant::ZERO, ClientInput::Up);
        for message in ask(&mut registry, life(watcher), Request::Watch { after: None }) {
            client.handle(Instant::ZERO, ClientInput::Message(message));
        }
        assert_eq!(client.routes().count(), 50);
        cached.push(client);
    }
    // All leases end at once: more changes than are kept. (Somebody is heard all the time, so that is no stall.)
    let mut now = Instant::ZERO;
    let mut heard: BTreeMap<Incarnation, Vec<Message>> = BTreeMap::new();
    while let Some(at) = registry.deadline() {
        now = at;
        let message = Message::Request { id: 1, request: Request::Resolve { group: None } };
        registry.handle(now, RegistryInput::Message { from: life(77), message });
        while let Some(RegistryOutput::Send { to, message }) = registry.poll() {
            heard.entry(to).or_default().push(message);
        }
    }
    for (watcher, client) in [1, 2].into_iter().zip(&mut cached) {
        let messages = heard.remove(&life(watcher)).unwrap();
        assert!(messages.len() < 50, "{}", messages.len());
        for message in messages {
            client.handle(now, ClientInput::Message(message));
        }
        assert_eq!(client.routes().count(), 0);
    }
}

#[test]
fn a_message_that_was_lost_on_the_way_is_noticed_by_the_next_answer() {
    let mut world = World::settled(3, 2);
    // As when the actor that owns the machine died with a message in its mailbox: nothing else changes after it.
    let before = world.nodes[0].client.routes().count();
    world.nodes[0].cut = true;
    world.add(lid(7), false, None);
    world.run(60);
    world.nodes[0].cut = false;
    assert_eq!(world.nodes[0].client.routes().count(), before, "it missed the change");
    world.run_until(TTL_MS, |world| world.is_settled());
    assert_eq!(world.nodes[0].count(|output| *output == ClientOutput::Away), 0, "without a new link");
}

#[test]
fn a_client_whose_actor_was_restarted_asks_for_what_it_missed() {
    let mut world = World::settled(3, 2);
    let watched = |world: &World| world.nodes[0].count(|output| *output == ClientOutput::Watching);
    let before = watched(&world);
    world.tell(0, ClientInput::Start);
    world.run(20);
    assert_eq!(watched(&world), before + 1);
}

#[test]
fn a_connection_that_nobody_reports_on_is_tried_again() {
    let config = ClientConfig::default();
    let mut client = Client::new(config.clone(), None, 1);
    client.handle(Instant::ZERO, ClientInput::Start);
    assert_eq!(client.poll(), Some(ClientOutput::Connect));
    let at = Instant::ZERO + config.connect_within;
    assert_eq!(client.deadline(), Some(at));
    client.handle(at, ClientInput::Tick);
    assert_eq!((client.poll(), client.poll()), (Some(ClientOutput::Disconnect), Some(ClientOutput::Away)));
    let retry = client.deadline().unwrap();
    client.handle(retry, ClientInput::Tick);
    assert_eq!(client.poll(), Some(ClientOutput::Connect));
}

#[test]
fn commands_that_wait_for_the_directory_are_bounded_and_the_rest_is_refused() {
    let config = ClientConfig { commands_max: 3, ..ClientConfig::default() };
    let mut client = Client::new(config, None, 1);
    for number in 0..5 {
        client.handle(Instant::ZERO, ClientInput::Drain(lid(number)));
    }
    let refused: Vec<_> = core::iter::from_fn(|| client.poll()).collect();
    let full = |output: &&ClientOutput| matches!(output, ClientOutput::Drained(_, Err(Refusal::Full { .. })));
    assert_eq!(refused.iter().filter(full).count(), 2);
}

#[test]
fn a_directory_that_names_too_many_routes_is_given_up() {
    let config = ClientConfig { routes_max: 10, ..ClientConfig::default() };
    let mut registry = Registry::new(Instant::ZERO, life(9), 1, super::world::config());
    for number in 0..11u32 {
        let incarnation = life(u64::from(number) + 100);
        ask(&mut registry, incarnation, register(lid(number), incarnation, "mem://x"));
    }
    let mut client = Client::new(config, None, 1);
    client.handle(Instant::ZERO, ClientInput::Start);
    client.handle(Instant::ZERO, ClientInput::Up);
    while client.poll().is_some() {}
    for message in ask(&mut registry, life(1), Request::Watch { after: None }) {
        client.handle(Instant::ZERO, ClientInput::Message(message));
    }
    assert_eq!(client.poll(), Some(ClientOutput::Disconnect));
    assert_eq!(client.routes().count(), 0);
}

fn any_message() -> impl Strategy<Value = Message> {
    let lives = prop_oneof![Just(life(9)), Just(life(8))];
    let route = (0u32..3, 1u64..4, 1u64..5, any::<bool>()).prop_map(|(replica, who, counter, flag)| {
        crate::wire::directory::Route {
            lid: lid(replica),
            incarnation: life(who),
            address: Address::new("mem://x"),
            epoch: crate::Epoch { boot: 1, counter },
            ready: flag,
            draining: !flag,
            shadow: flag.then(|| (life(who), Address::new("mem://y"))),
        }
    });
    let change = (route.clone(), any::<bool>()).prop_map(|(route, put)| match put {
        true => Change::Put(route),
        false => Change::Remove {
            lid: route.lid,
            incarnation: route.incarnation,
            epoch: route.epoch,
            evidence: Evidence::LeaseExpired,
        },
    });
    let refusal = (0u8..5, 0u32..3, any::<u64>()).prop_map(|(kind, replica, number)| {
        let (lid, epoch) = (lid(replica), crate::Epoch { boot: 1, counter: number });
        match kind {
            0 => Refusal::Held { lid, holder: life(1), remaining_ms: number },
            1 => Refusal::Settling { lid, remaining_ms: number },
            2 => Refusal::Fenced { lid, epoch },
            3 => Refusal::NotShadow { lid, to: life(2) },
            _ => Refusal::Full { what: "x".into() },
        }
    });
    let response = prop_oneof![
        (any::<u64>(), any::<u64>()).prop_map(|(counter, ttl_ms)| Response::Granted {
            epoch: crate::Epoch { boot: 1, counter },
            ttl_ms
        }),
        route.clone().prop_map(|holder| Response::Shadowing { holder }),
        Just(Response::Done),
        any::<u64>().prop_map(|ttl_ms| Response::Watching { ttl_ms }),
        refusal.prop_map(Response::Refused),
    ];
    prop_oneof![
        (lives.clone(), 0u64..5, change).prop_map(|(life, revision, change)| Message::Event {
            life,
            revision,
            change
        }),
        (lives.clone(), 0u64..5, prop::collection::vec(route, 0..4), any::<bool>())
            .prop_map(|(life, revision, routes, last)| Message::Snapshot { life, revision, routes, last }),
        (lives, 0u64..12, any::<u64>(), 0u64..5, response).prop_map(
            |(life, id, boot, revision, response)| {
                Message::Response { id, life, boot, revision, response }
            }
        ),
    ]
}

proptest! {
    /// A directory that lies, repeats itself and answers what was not asked: the client never panics, its questions
    /// stay bounded, and it always has something to wait for.
    #[test]
    fn a_client_survives_any_sequence_of_messages(
        messages in prop::collection::vec((any_message(), 0u8..8, 0u64..700), 0..60),
    ) {
        let who = super::super::Registrant {
            lid: lid(0),
            incarnation: life(1),
            address: Address::new("mem://me"),
            shadow: false,
            guardian: None,
        };
        let mut client = Client::new(ClientConfig::default(), Some(who), 1);
        let mut now = Instant::ZERO;
        client.handle(now, ClientInput::Start);
        for (message, act, pause) in messages {
            now = now + core::time::Duration::from_millis(pause);
            client.handle(now, match act {
                0 => ClientInput::Up,
                1 => ClientInput::Down,
                2 => ClientInput::Leave(Some(life(2))),
                3 => ClientInput::Tick,
                _ => ClientInput::Message(message),
            });
            let mut outputs = 0;
            while client.poll().is_some() {
                outputs += 1;
            }
            prop_assert!(outputs < 32);
            prop_assert!(client.deadline().is_some());
        }
    }

    /// Any bytes: they are a message or an error, never a panic or an allocation that they talk the decoder into.
    #[test]
    fn any_bytes_decode_or_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(message) = codec::read::<Message>(&bytes) {
            let mut out = Vec::new();
            codec::write(&mut out, &message);
            prop_assert_eq!(codec::read::<Message>(&out), Ok(message));
        }
    }
}

#[test]
fn a_message_that_lies_about_its_length_allocates_nothing() {
    // A snapshot whose list claims 2^60 routes.
    let mut bytes = Vec::new();
    codec::write(
        &mut bytes,
        &Message::Snapshot { life: life(9), revision: 1, routes: Vec::new(), last: true },
    );
    let at = bytes.len() - 2;
    assert_eq!(bytes[at], 0, "the length of the empty list");
    bytes.splice(at..=at, [253, 0, 0, 0, 0, 0, 0, 0, 16]);
    assert_eq!(codec::read::<Message>(&bytes), Err(WireError::Unknown));
}
