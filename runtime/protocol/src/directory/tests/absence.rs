//! The directory hangs, restarts or stays away: traffic goes on, nobody restarts, and the registry is the live set
//! within a lease after it is back (F08).

use alloc::vec::Vec;

use super::world::{TTL_MS, World, config, lid};
use crate::directory::{ClientInput, ClientOutput, RegistryConfig};

const NODES: u32 = 12;

fn restarted() -> RegistryConfig {
    RegistryConfig { first: false, ..config() }
}

/// Every node knows every live one, and nobody was told that a live one is gone or that it must restart.
#[track_caller]
fn nobody_noticed(world: &World) {
    for node in world.nodes.iter().filter(|node| node.alive) {
        assert_eq!(node.removals(), 0, "{} was told of a removal", node.lid);
        assert!(!node.lost(), "{} was told to restart", node.lid);
        let known = node.client.routes().filter(|route| world.live().contains_key(&route.lid)).count();
        assert_eq!(known, world.live().len(), "{} lost a route", node.lid);
    }
}

#[test]
fn a_directory_that_hangs_for_two_leases_evicts_nobody_when_it_goes_on() {
    for seed in 1..20 {
        let mut world = World::settled(seed, NODES);
        let epochs: Vec<_> = world.nodes.iter().map(|node| node.epoch_granted()).collect();
        world.frozen = true;
        for _ in 0..2 * TTL_MS {
            world.step();
        }
        nobody_noticed(&world);
        world.frozen = false;
        world.run_until(TTL_MS, |world| world.is_settled());
        world.run(3 * TTL_MS);
        nobody_noticed(&world);
        assert!(world.is_settled());
        let after: Vec<_> = world.nodes.iter().map(|node| node.epoch_granted()).collect();
        assert_eq!(epochs, after, "nobody needed a new epoch");
    }
}

#[test]
fn a_directory_that_hangs_for_any_time_evicts_nobody() {
    let mut world = World::settled(17, NODES);
    for ms in (100..2 * TTL_MS).step_by(130) {
        world.frozen = true;
        world.run(ms);
        world.frozen = false;
        world.run(TTL_MS / 2);
        nobody_noticed(&world);
    }
}

#[test]
fn a_holder_that_died_while_the_directory_hung_is_gone_a_lease_after_it_goes_on() {
    let mut world = World::settled(3, NODES);
    world.frozen = true;
    world.run(TTL_MS);
    world.kill(0);
    world.run(TTL_MS);
    world.frozen = false;
    world.run_until(TTL_MS + TTL_MS / 4, |world| world.is_settled());
    assert_eq!(world.registered().len(), NODES as usize - 1);
}

#[test]
fn a_directory_that_restarts_empty_learns_its_registry_within_a_lease_and_no_epoch_goes_back() {
    for seed in 1..20 {
        let mut world = World::settled(seed, NODES);
        let before = world.nodes[0].epoch_granted().unwrap();
        world.stop_directory();
        world.run(50);
        // The wall clock was set back meanwhile, or it is the same second: only what the clients report keeps epochs
        // growing.
        world.start_directory(before.boot - 500 * (seed % 2), restarted());
        let took = world.run_until(TTL_MS, |world| world.is_settled());
        assert!(took < TTL_MS / 2, "holders whose leases run need not wait: {took} ms");
        world.run(3 * TTL_MS);
        nobody_noticed(&world);
        assert!(world.nodes[0].epoch_granted().unwrap() > before);
    }
}

#[test]
fn a_directory_that_was_stopped_for_half_one_or_three_leases_is_whole_within_a_lease_after_it_returns() {
    for (tenths, seed) in [(5, 1), (10, 2), (30, 3), (5, 4), (10, 5), (30, 6)] {
        let mut world = World::settled(seed, NODES);
        world.stop_directory();
        for _ in 0..TTL_MS * tenths / 10 {
            world.step();
        }
        nobody_noticed(&world);
        world.start_directory(5000, restarted());
        // Half a lease of slack: whoever's lease ran out waits for one lease, and then comes with its jitter.
        world.run_until(TTL_MS + TTL_MS / 4, |world| world.is_settled());
        world.run(3 * TTL_MS);
        nobody_noticed(&world);
        assert!(world.is_settled());
    }
}

#[test]
fn a_node_that_died_with_the_directory_is_believed_for_two_leases_and_then_dropped() {
    let mut world = World::settled(9, NODES);
    world.stop_directory();
    world.kill(4);
    world.run(TTL_MS);
    assert!(world.nodes[0].client.routes().any(|route| route.lid == lid(4)), "known routes go on");
    world.start_directory(5000, restarted());
    world.run_until(3 * TTL_MS, |world| world.is_settled());
    assert_eq!(world.nodes[0].removals(), 1);
}

#[test]
fn a_directory_that_goes_away_again_before_it_has_learned_drops_nobody() {
    let mut world = World::settled(11, NODES);
    for _ in 0..3 {
        world.stop_directory();
        world.run(TTL_MS * 3);
        world.start_directory(5000, restarted());
        world.run(TTL_MS / 2);
    }
    world.run_until(2 * TTL_MS, |world| world.is_settled());
    nobody_noticed(&world);
}

#[test]
fn renewals_are_spread_out_even_if_everybody_starts_at_once() {
    let mut world = World::settled(5, 100);
    world.run(5 * TTL_MS);
    world.asked_at.clear();
    world.run(TTL_MS);
    let mut buckets = [0usize; 40];
    let start = world.now - TTL_MS;
    for at in &world.asked_at {
        buckets[((at - start) * 40 / (TTL_MS + 1)) as usize] += 1;
    }
    let (most, all) = (*buckets.iter().max().unwrap(), world.asked_at.len());
    assert!(all >= 300, "each renews at least three times a lease: {all}");
    assert!(most < all / 10, "in one fortieth of a lease there are {most} of {all}");
}

#[test]
fn a_restarted_directory_is_not_stormed_by_those_who_wait_for_it_to_settle() {
    let mut world = World::settled(6, 100);
    world.stop_directory();
    world.run(3 * TTL_MS);
    world.start_directory(5000, restarted());
    world.run(TTL_MS / 2);
    world.asked_at.clear();
    world.run(TTL_MS / 2 - 10);
    assert!(world.asked_at.len() < 20, "they were told when to come: {}", world.asked_at.len());
}

#[test]
fn drain_and_readiness_are_told_again_to_a_directory_that_forgot_them() {
    let mut world = World::settled(7, 3);
    world.tell(0, ClientInput::Drain(lid(1)));
    world.tell(2, ClientInput::Ready(false));
    let told = |world: &World| {
        let route =
            |replica| world.registry.as_ref()?.routes().find(|route| route.lid == lid(replica)).cloned();
        route(1).is_some_and(|route| route.draining) && route(2).is_some_and(|route| !route.ready)
    };
    world.run_until(100, told);
    world.run(10);
    assert_eq!(world.nodes[0].count(|output| *output == ClientOutput::Drained(lid(1), Ok(()))), 1);
    world.stop_directory();
    world.run(100);
    world.start_directory(5000, restarted());
    world.run_until(TTL_MS, told);
}

#[test]
fn what_was_said_while_the_directory_was_away_reaches_it_when_it_is_back() {
    let mut world = World::settled(8, 3);
    world.stop_directory();
    world.run(100);
    world.tell(0, ClientInput::Drain(lid(1)));
    world.run(100);
    world.start_directory(5000, restarted());
    world.run_until(TTL_MS, |world| world.is_settled());
    // It was not registered yet when the wish arrived, or it was: either way there was an answer.
    world.run_until(TTL_MS, |world| world.nodes[0].count(|o| matches!(o, ClientOutput::Drained(..))) == 1);
}

#[test]
fn a_directory_that_is_cut_off_from_everybody_evicts_nobody() {
    let mut world = World::settled(13, NODES);
    for node in &mut world.nodes {
        node.cut = true;
    }
    world.run(3 * TTL_MS);
    nobody_noticed(&world);
    assert_eq!(world.registered().len(), NODES as usize);
    for node in &mut world.nodes {
        node.cut = false;
    }
    world.run(3 * TTL_MS);
    nobody_noticed(&world);
    assert!(world.is_settled());
    // One that is cut off alone is evicted as ever.
    world.nodes[0].cut = true;
    world.run_until(2 * TTL_MS, |world| !world.registered().contains_key(&lid(0)));
    world.nodes[0].cut = false;
    world.run_until(2 * TTL_MS, |world| world.nodes[0].lost());
}

#[test]
fn a_cut_link_is_noticed_by_unanswered_renewals_and_made_anew() {
    let mut world = World::settled(12, 3);
    world.nodes[0].cut = true;
    world.run_until(TTL_MS, |world| world.nodes[0].count(|output| *output == ClientOutput::Away) > 0);
    world.nodes[0].cut = false;
    world.run_until(TTL_MS * 2, |world| world.nodes[0].count(|output| *output == ClientOutput::Back) > 0);
    assert!(!world.nodes[1].lost());
}
