//! Everything at once, then peace: the world checks at each millisecond that no two lives hold an identity and that
//! no epoch goes back; afterwards the registry is the live set and every watcher knows exactly the registry.

use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;

use proptest::prelude::*;

use super::world::{TTL_MS, World, config, lid};
use crate::directory::{ClientInput, RegistryConfig};

#[derive(Clone, Debug)]
enum Fault {
    Kill(usize),
    Start(u32),
    Shadow(u32),
    HandOver(usize),
    Leave(usize),
    Freeze(usize),
    Thaw(usize),
    BreakLink(usize),
    Cut(usize),
    Heal(usize),
    FreezeDirectory,
    ThawDirectory,
    /// Stopped for so long, and restarted empty.
    Restart(u64),
    Delay(u64),
}

fn faults() -> impl Strategy<Value = Vec<(Fault, u64)>> {
    let node = 0usize..10;
    let fault = prop_oneof![
        node.clone().prop_map(Fault::Kill),
        (0u32..3).prop_map(Fault::Start),
        (0u32..3).prop_map(Fault::Shadow),
        node.clone().prop_map(Fault::HandOver),
        node.clone().prop_map(Fault::Leave),
        node.clone().prop_map(Fault::Freeze),
        node.clone().prop_map(Fault::Thaw),
        node.clone().prop_map(Fault::BreakLink),
        node.clone().prop_map(Fault::Cut),
        node.prop_map(Fault::Heal),
        Just(Fault::FreezeDirectory),
        Just(Fault::ThawDirectory),
        (0u64..7000).prop_map(Fault::Restart),
        (1u64..400).prop_map(Fault::Delay),
    ];
    prop::collection::vec((fault, 0u64..3000), 1..25)
}

fn apply(world: &mut World, fault: Fault) {
    let count = world.nodes.len();
    let live = |world: &World, node: usize| world.nodes[node % count].alive.then_some(node % count);
    match fault {
        Fault::Kill(node) => world.kill(node % count),
        Fault::Start(replica) => drop(world.add(lid(replica), false, None)),
        Fault::Shadow(replica) => drop(world.add(lid(replica), true, None)),
        Fault::HandOver(node) => {
            let route =
                world.nodes[node % count].client.routes().find(|route| route.shadow.is_some()).cloned();
            if let (Some(node), Some(route)) = (live(world, node), route)
                && !world.nodes[node].frozen
            {
                let to = route.shadow.map(|(shadow, _)| shadow);
                world.tell(node, ClientInput::Leave(to));
            }
        }
        Fault::Leave(node) => {
            if let Some(node) = live(world, node).filter(|node| !world.nodes[*node].frozen) {
                world.tell(node, ClientInput::Leave(None));
            }
        }
        Fault::Freeze(node) => world.nodes[node % count].frozen = true,
        Fault::Thaw(node) => world.nodes[node % count].frozen = false,
        Fault::BreakLink(node) => world.break_link(node % count),
        Fault::Cut(node) => world.nodes[node % count].cut = true,
        Fault::Heal(node) => world.nodes[node % count].cut = false,
        Fault::FreezeDirectory => world.frozen = true,
        Fault::ThawDirectory => world.frozen = false,
        Fault::Restart(down) => {
            // As its state file has it: there may be no client left to report an epoch.
            let boot = world.registry.as_ref().map_or(0, |registry| registry.boot()) + 1;
            world.stop_directory();
            world.run(down);
            world.start_directory(boot, RegistryConfig { first: false, history: 8, ..config() });
        }
        Fault::Delay(most) => world.delay_max = most,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]
    #[test]
    fn no_two_lives_hold_an_identity_and_all_is_well_after_the_faults(seed in 1u64.., faults in faults()) {
        let mut world = World::settled(seed, 3);
        for (fault, pause) in faults {
            apply(&mut world, fault);
            world.run(pause);
        }
        world.delay_max = 3;
        world.frozen = false;
        for node in &mut world.nodes {
            node.frozen = false;
            node.cut = false;
        }
        // Whoever waits for an identity that another holds goes on waiting: one live holder for each is enough.
        world.run_until(10 * TTL_MS, |world| {
            let registered = world.registered();
            let all_held = world.nodes.iter().filter(|node| node.alive && !node.lost() && !node.left()).all(|node| {
                registered.contains_key(&node.lid)
            });
            all_held && watchers_agree(world)
        });
        world.run(3 * TTL_MS);
        prop_assert!(watchers_agree(&world));
        // Where nobody is left there is nobody to whom a lease matters.
        let anybody = world.nodes.iter().any(|node| node.alive);
        for (lid, incarnation) in world.registered().into_iter().filter(|_| anybody) {
            let holder = world.nodes.iter().find(|node| node.incarnation == incarnation).unwrap();
            prop_assert!(holder.alive && !holder.lost() && !holder.left(), "{lid} is held by a ghost");
        }
    }
}

fn watchers_agree(world: &World) -> bool {
    let Some(registry) = &world.registry else { return false };
    let truth: BTreeMap<_, _> = registry.routes().map(|route| (route.lid.clone(), route.clone())).collect();
    world.nodes.iter().filter(|node| node.alive).all(|node| {
        let known: BTreeMap<_, _> =
            node.client.routes().map(|route| (route.lid.clone(), route.clone())).collect();
        known == truth && node.replayed == truth
    })
}
