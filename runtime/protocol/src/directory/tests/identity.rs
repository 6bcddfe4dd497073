//! One holder for each identity: zombies, shadows, guardians (the fencing half of F09).

use super::world::{TTL_MS, World, config, lid};
use crate::directory::{ClientInput, ClientOutput, Registry, RegistryConfig, RegistryInput, RegistryOutput};
use crate::wire::directory::{Change, Last, Message, Refusal, Request, Response};
use crate::{Address, Epoch, Evidence, Incarnation, Instant, LogicalId, Machine};
use core::time::Duration;

const TTL: Duration = Duration::from_millis(TTL_MS);

/// Asks a registry directly, without a client.
struct Asking {
    registry: Registry,
    now: Instant,
}

impl Asking {
    fn new(first: bool) -> Self {
        let registry = Registry::new(Instant::ZERO, life(99), 1000, RegistryConfig { first, ..config() });
        Asking { registry, now: Instant::ZERO }
    }

    /// Time passes, with the ticks that a driver gives.
    fn pass(&mut self, by: Duration) {
        let end = self.now + by;
        while let Some(at) = self.registry.deadline().filter(|at| *at <= end) {
            self.now = at.max(self.now);
            // Somebody else is always heard, so that the registry knows that it hears.
            self.ask(life(77), Request::Resolve { group: None });
        }
        self.now = end;
    }

    fn deaf(&mut self, by: Duration) {
        let end = self.now + by;
        while let Some(at) = self.registry.deadline().filter(|at| *at <= end) {
            self.now = at.max(self.now);
            self.registry.handle(self.now, RegistryInput::Tick);
            while self.registry.poll().is_some() {}
        }
        self.now = end;
    }

    fn ask(&mut self, from: Incarnation, request: Request) -> Response {
        let message = Message::Request { id: 7, request };
        self.registry.handle(self.now, RegistryInput::Message { from, message });
        let mut answer = None;
        while let Some(RegistryOutput::Send { to, message }) = self.registry.poll() {
            if let Message::Response { id: 7, response, .. } = message
                && to == from
            {
                answer = Some(response);
            }
        }
        answer.expect("every request is answered")
    }

    fn register(&mut self, from: Incarnation, last: Option<Last>) -> Response {
        self.ask(from, register(from, last, false))
    }

    fn granted(&mut self, from: Incarnation, last: Option<Last>) -> Epoch {
        match self.register(from, last) {
            Response::Granted { epoch, .. } => epoch,
            other => panic!("not granted: {other:?}"),
        }
    }
}

fn life(bits: u64) -> Incarnation {
    Incarnation::from_bits(bits)
}

fn register(from: Incarnation, last: Option<Last>, shadow: bool) -> Request {
    Request::Register {
        lid: lid(0),
        incarnation: from,
        address: Address::new("mem://x"),
        last,
        ready: true,
        shadow,
        guardian: Some(life(50)),
    }
}

fn held_before(counter: u64, valid: bool) -> Option<Last> {
    Some(Last { life: life(98), epoch: Epoch { boot: 900, counter }, valid })
}

fn refused(response: Response) -> Refusal {
    match response {
        Response::Refused(refusal) => refusal,
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn an_owner_that_slept_through_its_lease_is_told_so_and_touches_nothing_of_its_successor() {
    for seed in 1..20 {
        let mut world = World::settled(seed, 2);
        world.nodes[0].frozen = true;
        world.run(TTL_MS + TTL_MS / 2);
        let successor = world.add(lid(0), false, None);
        world.run_until(TTL_MS, |world| world.nodes[successor].epoch_granted().is_some());
        let epoch = world.nodes[successor].epoch_granted();
        world.nodes[0].frozen = false;
        // Whatever it wanted to say when it was stopped, and whatever it says now.
        world.tell(0, ClientInput::Drain(lid(0)));
        world.tell(0, ClientInput::Leave(None));
        world.run(2 * TTL_MS);
        let route =
            world.registry.as_ref().unwrap().routes().find(|route| route.lid == lid(0)).unwrap().clone();
        assert_eq!(route.incarnation, world.nodes[successor].incarnation);
        assert_eq!((Some(route.epoch), route.draining, route.ready), (epoch, false, true));
        assert!(!world.nodes[successor].lost() && world.nodes[successor].removals() == 0);
    }
}

#[test]
fn a_zombie_learns_that_its_identity_is_lost() {
    for seed in 1..20 {
        let mut world = World::settled(seed, 2);
        world.nodes[0].frozen = true;
        world.run(TTL_MS * 2);
        let successor = world.add(lid(0), false, None);
        world.run(TTL_MS / 2);
        world.nodes[0].frozen = false;
        world.run_until(TTL_MS, |world| world.nodes[0].lost());
        assert!(!world.nodes[successor].lost());
        world.run_until(TTL_MS, |world| world.is_settled());
    }
}

#[test]
fn a_zombies_requests_are_fenced_at_the_registry() {
    let mut asking = Asking::new(true);
    let (zombie, successor) = (life(1), life(2));
    let old = asking.granted(zombie, None);
    asking.pass(TTL * 2);
    let new = asking.granted(successor, None);
    assert!(new > old);
    let last = Some(Last { life: life(99), epoch: old, valid: false });
    let fenced = |response| matches!(refused(response), Refusal::Fenced { .. });
    assert!(fenced(asking.ask(zombie, Request::Renew { lid: lid(0), epoch: old, ready: true })));
    assert!(fenced(asking.ask(zombie, Request::Renew { lid: lid(0), epoch: new, ready: false })));
    assert!(fenced(asking.ask(zombie, Request::Leave { lid: lid(0), epoch: old, to: None })));
    assert!(fenced(asking.ask(zombie, Request::Leave { lid: lid(0), epoch: new, to: None })));
    assert!(fenced(asking.register(zombie, last)));
    assert!(fenced(asking.register(zombie, None)), "a life that lost its identity gets none any more");
    let drain = Request::Drain { lid: lid(0), of: Some(zombie) };
    assert!(matches!(refused(asking.ask(zombie, drain)), Refusal::Unknown { .. }));
    let route = asking.registry.routes().next().unwrap();
    assert_eq!((route.incarnation, route.ready, route.draining), (successor, true, false));
}

#[test]
fn a_directory_that_hears_nobody_at_all_evicts_nobody_until_it_does_and_then_after_a_lease() {
    let mut asking = Asking::new(true);
    let epoch = asking.granted(life(1), None);
    asking.pass(TTL / 3);
    asking.deaf(TTL * 5);
    assert!(matches!(refused(asking.register(life(2), None)), Refusal::Held { .. }));
    asking.pass(TTL / 2);
    let renew = Request::Renew { lid: lid(0), epoch, ready: true };
    assert!(matches!(asking.ask(life(1), renew), Response::Granted { .. }));
    asking.deaf(TTL * 5);
    assert!(matches!(refused(asking.register(life(2), None)), Refusal::Held { .. }));
    asking.pass(TTL);
    asking.granted(life(2), None);
}

#[test]
fn a_second_registration_is_refused_until_the_lease_ends() {
    let mut asking = Asking::new(true);
    asking.granted(life(1), None);
    asking.pass(TTL - Duration::from_millis(1));
    match refused(asking.register(life(2), None)) {
        Refusal::Held { holder, remaining_ms, .. } => assert_eq!((holder, remaining_ms), (life(1), 1)),
        other => panic!("{other:?}"),
    }
    asking.pass(Duration::from_millis(1));
    asking.granted(life(2), None);
}

#[test]
fn only_the_guardians_word_on_an_exit_ends_a_lease() {
    let mut asking = Asking::new(true);
    let epoch = asking.granted(life(1), None);
    let report = |evidence, incarnation| Request::Report { lid: lid(0), incarnation, evidence };
    for (from, evidence, incarnation) in [
        (life(50), Evidence::ConnectionClosed, life(1)),
        (life(50), Evidence::LeaseExpired, life(1)),
        (life(51), Evidence::ProcessExited, life(1)),
        (life(50), Evidence::ProcessExited, life(2)),
    ] {
        assert_eq!(asking.ask(from, report(evidence, incarnation)), Response::Done);
        assert_eq!(asking.registry.routes().next().unwrap().epoch, epoch, "{evidence:?} from {from}");
    }
    asking.ask(life(50), report(Evidence::ProcessExited, life(1)));
    assert_eq!(asking.registry.routes().count(), 0);
    assert!(asking.granted(life(2), None) > epoch, "its successor need not wait for the lease");
}

#[test]
fn a_restarted_directory_grants_nothing_to_somebody_new_before_a_lease_has_passed() {
    let mut asking = Asking::new(false);
    assert!(matches!(refused(asking.register(life(2), None)), Refusal::Settling { remaining_ms: 2001, .. }));
    asking.pass(TTL - Duration::from_millis(1));
    assert!(matches!(refused(asking.register(life(2), None)), Refusal::Settling { .. }));
    let epoch = asking.granted(life(1), held_before(4, true));
    assert!(epoch > Epoch { boot: 900, counter: 4 });
    asking.pass(Duration::from_millis(1));
    assert!(matches!(refused(asking.register(life(2), None)), Refusal::Held { .. }));
}

#[test]
fn of_two_former_holders_the_later_gets_the_identity_back_whoever_asks_first() {
    let mut asking = Asking::new(false);
    let (zombie, owner) = (life(1), life(2));
    // The zombie's lease was over long ago; the owner's may still run, so the zombie has to wait.
    assert!(matches!(refused(asking.register(zombie, held_before(3, false))), Refusal::Settling { .. }));
    let epoch = asking.granted(owner, held_before(5, true));
    assert!(matches!(refused(asking.register(zombie, held_before(3, false))), Refusal::Fenced { .. }));
    assert_eq!(asking.registry.routes().next().unwrap().epoch, epoch);

    let mut asking = Asking::new(false);
    // Both are over: they wait, and the later one gets it, even if it comes last and somebody new is there too.
    assert!(matches!(refused(asking.register(zombie, held_before(3, false))), Refusal::Settling { .. }));
    assert!(matches!(refused(asking.register(owner, held_before(5, false))), Refusal::Settling { .. }));
    asking.pass(TTL);
    assert!(matches!(refused(asking.register(zombie, held_before(3, false))), Refusal::Fenced { .. }));
    assert!(matches!(refused(asking.register(life(3), None)), Refusal::Settling { .. }));
    asking.granted(owner, held_before(5, false));
}

#[test]
fn a_former_holder_that_does_not_come_back_holds_nobody_up_for_long() {
    let mut asking = Asking::new(false);
    assert!(matches!(refused(asking.register(life(1), held_before(3, false))), Refusal::Settling { .. }));
    asking.pass(TTL + TTL / 2);
    asking.granted(life(3), None);
}

#[test]
fn boot_exceeds_what_any_client_reports_and_a_lie_does_not_use_it_up() {
    let mut asking = Asking::new(false);
    let last = |boot| Some(Last { life: life(98), epoch: Epoch { boot, counter: 1 }, valid: true });
    assert_eq!(asking.granted(life(1), last(7000)).boot, 7001);
    let other = LogicalId::new(lid(0).group().clone(), 1, 0);
    let request = Request::Register {
        lid: other,
        incarnation: life(2),
        address: Address::new("mem://x"),
        last: last(u64::MAX),
        ready: true,
        shadow: false,
        guardian: None,
    };
    assert!(matches!(asking.ask(life(2), request), Response::Granted { epoch, .. } if epoch.boot == 7001));
}

#[test]
fn a_life_can_register_only_itself() {
    let mut asking = Asking::new(true);
    assert_eq!(asking.ask(life(1), register(life(2), None, false)), Response::Refused(Refusal::NotYours));
}

#[test]
fn an_identity_is_handed_to_its_shadow_in_one_change() {
    let mut world = World::settled(4, 3);
    let shadow = world.add(lid(0), true, None);
    world.run_until(TTL_MS, |world| {
        world.nodes[shadow].count(|o| matches!(o, ClientOutput::Shadowing(_))) > 0
    });
    let target = world.nodes[shadow].incarnation;
    world.tell(0, ClientInput::Leave(Some(target)));
    world.run_until(TTL_MS, |world| world.nodes[0].left() && world.nodes[shadow].epoch_granted().is_some());
    world.run(2 * TTL_MS);
    assert!(world.is_settled());
    for node in &world.nodes {
        assert_eq!(node.removals(), 0, "there was no moment in which nobody held it");
    }
}

#[test]
fn a_hand_over_whose_answer_is_lost_is_asked_again_and_comes_to_the_same() {
    for lost_at in 0..8 {
        let mut world = World::settled(4, 2);
        let shadow = world.add(lid(0), true, None);
        world.run_until(TTL_MS, |world| {
            world.nodes[shadow].count(|o| matches!(o, ClientOutput::Shadowing(_))) > 0
        });
        let target = world.nodes[shadow].incarnation;
        world.tell(0, ClientInput::Leave(Some(target)));
        world.run(lost_at);
        world.break_link(0);
        world.run_until(2 * TTL_MS, |world| {
            world.nodes[0].left() && world.nodes[shadow].epoch_granted().is_some()
        });
        world.run_until(TTL_MS, |world| world.is_settled());
    }
}

#[test]
fn a_hand_over_that_begins_while_the_directory_is_away_is_not_asked_for_and_the_source_keeps_the_identity() {
    let mut world = World::settled(4, 2);
    let shadow = world.add(lid(0), true, None);
    world.run_until(TTL_MS, |world| {
        world.nodes[shadow].count(|o| matches!(o, ClientOutput::Shadowing(_))) > 0
    });
    let target = world.nodes[shadow].incarnation;
    world.break_link(0);
    world.run_until(TTL_MS, |world| world.nodes[0].count(|o| matches!(o, ClientOutput::Away)) > 0);
    world.tell(0, ClientInput::Leave(Some(target)));
    assert_eq!(world.nodes[0].count(|output| matches!(output, ClientOutput::Kept(_))), 1);
    world.run(2 * TTL_MS);
    assert!(!world.nodes[0].left() && world.registered()[&lid(0)] == world.nodes[0].incarnation);
}

#[test]
fn a_shadow_that_dies_or_falls_silent_is_cleaned_up_and_the_source_keeps_the_identity() {
    for silent in [false, true] {
        let mut world = World::settled(4, 2);
        let shadow = world.add(lid(0), true, None);
        let shadowed =
            |world: &World| world.registry.as_ref().unwrap().routes().any(|route| route.shadow.is_some());
        world.run_until(TTL_MS, shadowed);
        if silent {
            world.nodes[shadow].frozen = true;
        } else {
            world.kill(shadow);
        }
        let took = world.run_until(TTL_MS + TTL_MS / 4, |world| !shadowed(world));
        assert!(silent || took < 50, "a broken link is known at once: {took} ms");
        let target = world.nodes[shadow].incarnation;
        world.tell(0, ClientInput::Leave(Some(target)));
        world.run(TTL_MS);
        assert_eq!(world.nodes[0].count(|output| matches!(output, ClientOutput::Kept(_))), 1);
        assert!(!world.nodes[0].left() && world.registered()[&lid(0)] == world.nodes[0].incarnation);
    }
}

#[test]
fn a_shadow_takes_over_when_its_source_dies_and_no_second_one_waits_beside_it() {
    let mut world = World::settled(4, 2);
    let first = world.add(lid(0), true, None);
    world
        .run_until(TTL_MS, |world| world.nodes[first].count(|o| matches!(o, ClientOutput::Shadowing(_))) > 0);
    let second = world.add(lid(0), true, None);
    world.run_until(TTL_MS, |world| world.nodes[second].count(|o| matches!(o, ClientOutput::Refused(_))) > 0);
    world.kill(0);
    world.run_until(TTL_MS + TTL_MS / 4, |world| world.nodes[first].epoch_granted().is_some());
    let watcher = &world.nodes[1];
    let expired = |output: &ClientOutput| {
        matches!(output, ClientOutput::Change(Change::Remove { evidence: Evidence::LeaseExpired, .. }))
    };
    assert_eq!(watcher.count(expired), 1, "why the source is gone is told");
    assert!(world.nodes[second].epoch_granted().is_none());
}

#[test]
fn a_node_that_leaves_is_gone_at_once_and_its_successor_need_not_wait() {
    let mut world = World::settled(4, 3);
    world.tell(1, ClientInput::Leave(None));
    world.run_until(50, |world| world.nodes[1].left() && world.is_settled());
    let successor = world.add(lid(1), false, None);
    world.run_until(100, |world| world.nodes[successor].epoch_granted().is_some());
}

#[test]
fn a_late_answer_is_never_taken_for_anothers() {
    let mut world = World::settled(4, 1);
    let before = world.nodes[0].log.len();
    let refusal = Refusal::Fenced { lid: lid(0), epoch: Epoch { boot: 1000, counter: 1 } };
    for id in 0..3 {
        // Questions that were answered already.
        let response = Response::Refused(refusal.clone());
        let message = Message::Response { id, life: life(99), boot: 1000, revision: 1, response };
        world.tell(0, ClientInput::Message(message));
    }
    assert_eq!(world.nodes[0].log.len(), before);
}

#[test]
fn whoever_leaves_while_its_first_grant_is_on_its_way_holds_nothing_once_it_is_told_so() {
    for seed in 1..40 {
        let mut world = World::settled(seed, 1);
        let leaver = world.add(lid(1), false, None);
        let registered = |world: &World| world.registry.as_ref().unwrap().routes().any(|r| r.lid == lid(1));
        world.run_until(TTL_MS, registered);
        world.tell(leaver, ClientInput::Leave(None));
        world.run_until(TTL_MS / 2, |world| world.nodes[leaver].left());
        assert!(!registered(&world), "seed {seed}");
    }
}
