//! The registry against the plainest model of it.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use proptest::prelude::*;

use super::world::{TTL_MS, config, lid};
use crate::directory::{Registry, RegistryInput, RegistryOutput};
use crate::wire::directory::{Change, Message, Refusal, Request, Response, Route, Seen};
use crate::{Address, Epoch, Evidence, Incarnation, Instant, LogicalId, Machine};

const ME: u64 = 99;

#[derive(Clone, Debug)]
enum Act {
    Register { who: u64, replica: u32 },
    Renew { who: u64, replica: u32, ready: bool },
    Leave { who: u64, replica: u32 },
    Report { who: u64, replica: u32 },
    Drain { replica: u32 },
    Watch { who: u64 },
    Gone { who: u64 },
    Pass { ms: u64 },
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let (who, replica) = (1u64..5, 0u32..2);
    let act = prop_oneof![
        4 => (who.clone(), replica.clone()).prop_map(|(who, replica)| Act::Register { who, replica }),
        4 => (who.clone(), replica.clone(), any::<bool>())
            .prop_map(|(who, replica, ready)| Act::Renew { who, replica, ready }),
        1 => (who.clone(), replica.clone()).prop_map(|(who, replica)| Act::Leave { who, replica }),
        1 => (who.clone(), replica.clone()).prop_map(|(who, replica)| Act::Report { who, replica }),
        1 => replica.prop_map(|replica| Act::Drain { replica }),
        2 => who.clone().prop_map(|who| Act::Watch { who }),
        1 => who.prop_map(|who| Act::Gone { who }),
        4 => (1u64..1500).prop_map(|ms| Act::Pass { ms }),
    ];
    prop::collection::vec(act, 1..80)
}

/// Who holds what until when, and who is over: all of it in plain maps, looked through from end to end.
#[derive(Default)]
struct Model {
    held: BTreeMap<LogicalId, (u64, Epoch, u64, bool, bool)>,
    /// The last epoch that each life was granted for each identity.
    granted: BTreeMap<(u64, LogicalId), Epoch>,
    over: Vec<u64>,
    counter: u64,
}

impl Model {
    fn expire(&mut self, now: u64) {
        let over: Vec<LogicalId> =
            self.held.iter().filter(|(_, held)| held.2 <= now).map(|(lid, _)| lid.clone()).collect();
        for lid in over {
            let held = self.held.remove(&lid).unwrap();
            self.over.push(held.0);
        }
    }
}

fn life(bits: u64) -> Incarnation {
    Incarnation::from_bits(bits)
}

struct Driven {
    registry: Registry,
    now: u64,
    /// What each watcher knows, from what it was sent alone.
    watchers: BTreeMap<u64, (u64, BTreeMap<LogicalId, Route>)>,
}

impl Driven {
    fn at(&self) -> Instant {
        Instant::from_nanos(self.now * 1_000_000)
    }

    fn handle(&mut self, input: RegistryInput) -> Option<Response> {
        self.registry.handle(self.at(), input);
        let mut answer = None;
        while let Some(RegistryOutput::Send { to, message }) = self.registry.poll() {
            match message {
                Message::Response { response, .. } => answer = Some(response),
                Message::Event { revision, change, .. } => {
                    let (seen, routes) = self.watchers.entry(to.bits()).or_default();
                    assert_eq!(revision, *seen + 1, "no gap");
                    *seen = revision;
                    match change {
                        Change::Put(route) => drop(routes.insert(route.lid.clone(), route)),
                        Change::Remove { lid, .. } => drop(routes.remove(&lid)),
                    }
                }
                Message::Snapshot { revision, routes, last, .. } => {
                    assert!(last);
                    let routes = routes.into_iter().map(|route| (route.lid.clone(), route)).collect();
                    self.watchers.insert(to.bits(), (revision, routes));
                }
                Message::Request { .. } => panic!("a directory asks nothing"),
            }
        }
        answer
    }

    fn ask(&mut self, who: u64, request: Request) -> Response {
        let message = Message::Request { id: 1, request };
        self.handle(RegistryInput::Message { from: life(who), message }).expect("every request is answered")
    }

    fn pass(&mut self, ms: u64) {
        for _ in 0..ms {
            self.now += 1;
            if self.now.is_multiple_of(TTL_MS / 3) {
                // Somebody else is always heard, so that the registry knows that it hears.
                self.ask(1000, Request::Resolve { group: None });
            }
            if self.registry.deadline().is_some_and(|at| at <= self.at()) {
                self.handle(RegistryInput::Tick);
            }
        }
    }
}

fn answer_of(model: &mut Model, driven: &mut Driven, act: &Act) -> Result<(), TestCaseError> {
    let now = driven.now;
    match act.clone() {
        Act::Register { who, replica } => {
            let lid = lid(replica);
            let request = Request::Register {
                lid: lid.clone(),
                incarnation: life(who),
                address: Address::new("mem://x"),
                last: None,
                ready: true,
                shadow: false,
                guardian: Some(life(who + 1)),
            };
            let response = driven.ask(who, request);
            match model.held.get_mut(&lid) {
                Some(held) if held.0 == who => {
                    held.2 = now + TTL_MS;
                    held.3 = true;
                    prop_assert_eq!(response, Response::Granted { epoch: held.1, ttl_ms: TTL_MS });
                }
                _ if model.over.contains(&who) => {
                    let fenced = matches!(response, Response::Refused(Refusal::Fenced { .. }));
                    prop_assert!(fenced);
                }
                Some(_) => {
                    let held = matches!(response, Response::Refused(Refusal::Held { .. }));
                    prop_assert!(held);
                }
                None => {
                    model.counter += 1;
                    let epoch = Epoch { boot: 1000, counter: model.counter };
                    prop_assert_eq!(response, Response::Granted { epoch, ttl_ms: TTL_MS });
                    model.held.insert(lid.clone(), (who, epoch, now + TTL_MS, true, false));
                    model.granted.insert((who, lid), epoch);
                }
            }
        }
        Act::Renew { who, replica, ready } => {
            let lid = lid(replica);
            let epoch = model.granted.get(&(who, lid.clone())).copied().unwrap_or_default();
            let response = driven.ask(who, Request::Renew { lid: lid.clone(), epoch, ready });
            match model.held.get_mut(&lid).filter(|held| held.0 == who) {
                Some(held) => {
                    held.2 = now + TTL_MS;
                    held.3 = ready;
                    prop_assert_eq!(response, Response::Granted { epoch, ttl_ms: TTL_MS });
                }
                None => prop_assert_eq!(response, Response::Refused(Refusal::Fenced { lid, epoch })),
            }
        }
        Act::Leave { who, replica } => {
            let lid = lid(replica);
            let epoch = model.granted.get(&(who, lid.clone())).copied().unwrap_or_default();
            let response = driven.ask(who, Request::Leave { lid: lid.clone(), epoch, to: None });
            if model.held.get(&lid).is_some_and(|held| held.0 == who) {
                model.held.remove(&lid);
                model.over.push(who);
                prop_assert_eq!(response, Response::Done);
            } else {
                prop_assert_eq!(response, Response::Refused(Refusal::Fenced { lid, epoch }));
            }
        }
        Act::Report { who, replica } => {
            let lid = lid(replica);
            // Somebody reports the exit of whoever is before it: only that one's guardian is believed.
            let incarnation = life(who.max(2) - 1);
            let evidence = Evidence::ProcessExited;
            driven.ask(who, Request::Report { lid: lid.clone(), incarnation, evidence });
            if model.held.get(&lid).is_some_and(|held| held.0 + 1 == who && life(held.0) == incarnation) {
                let held = model.held.remove(&lid).unwrap();
                model.over.push(held.0);
            }
        }
        Act::Drain { replica } => {
            let response = driven.ask(1, Request::Drain { lid: lid(replica), of: None });
            match model.held.get_mut(&lid(replica)) {
                Some(held) => {
                    held.4 = true;
                    prop_assert_eq!(response, Response::Done);
                }
                None => prop_assert_eq!(response, Response::Refused(Refusal::Unknown { lid: lid(replica) })),
            }
        }
        Act::Watch { who } => {
            // It watches on from whatever it saw before it went away.
            let after = driven.watchers.get(&who).map(|(revision, _)| Seen {
                life: life(ME),
                boot: 1000,
                revision: *revision,
            });
            prop_assert_eq!(driven.ask(who, Request::Watch { after }), Response::Watching { ttl_ms: TTL_MS });
        }
        Act::Gone { who } => drop(driven.handle(RegistryInput::Gone(life(who)))),
        Act::Pass { ms } => {
            driven.pass(ms);
            model.expire(driven.now);
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn a_registry_agrees_with_plain_maps_and_each_watcher_with_the_registry(acts in acts()) {
        let registry = Registry::new(Instant::ZERO, life(ME), 1000, config());
        let mut driven = Driven { registry, now: 0, watchers: BTreeMap::new() };
        let mut model = Model::default();
        let mut watching: Vec<u64> = Vec::new();
        for act in &acts {
            answer_of(&mut model, &mut driven, act)?;
            match act {
                Act::Watch { who } => watching.push(*who),
                Act::Gone { who } => watching.retain(|watcher| watcher != who),
                _ => {}
            }
            let routes: BTreeMap<LogicalId, Route> =
                driven.registry.routes().map(|route| (route.lid.clone(), route.clone())).collect();
            let told: Vec<_> = routes
                .values()
                .map(|route| (route.lid.clone(), route.incarnation, route.epoch, route.ready, route.draining))
                .collect();
            let expected: Vec<_> = model
                .held
                .iter()
                .map(|(lid, held)| (lid.clone(), life(held.0), held.1, held.3, held.4))
                .collect();
            prop_assert_eq!(told, expected);
            for who in &watching {
                prop_assert_eq!(&driven.watchers[who].1, &routes);
            }
        }
    }
}
