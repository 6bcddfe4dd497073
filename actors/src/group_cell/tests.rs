use connex_transport::{Identity, MemHub};

use super::*;
use crate::{CoreConfig, Dispatch};

fn group() -> Group {
    Group::new("m", "pp", 1)
}

fn peer(life: u64) -> Peer {
    Peer { lid: group().replica(0), incarnation: Incarnation::from_bits(life) }
}

fn route(life: u64, counter: u64) -> Route {
    let Peer { lid, incarnation } = peer(life);
    let (address, epoch) = (Address::new("mem://nobody"), Epoch { boot: 1, counter });
    Route { lid, incarnation, address, epoch, ready: true, draining: false, shadow: None }
}

/// A node without actors, so that what its cells want done stays where it can be seen.
fn node(hub: &MemHub) -> Arc<Core> {
    let me = Peer { lid: Group::new("m", "pp", 0).replica(0), incarnation: Incarnation::from_bits(1) };
    let core = Core::new(me.clone(), CoreConfig::default());
    let identity = Identity { peer: me, deployment: "test".into() };
    core.set_transport(hub.start("me", identity, Dispatch::new(&core)).unwrap());
    core
}

fn is_down(duty: &Duty) -> bool {
    matches!(duty, Duty::Down { .. })
}

#[test]
fn a_route_that_comes_late_supersedes_nobody() {
    let core = node(&MemHub::default());
    let cell = core.group(&group(), None);
    cell.on_route(route(3, 2));
    cell.on_up(&peer(3));
    assert!(cell.is_ready());
    cell.on_route(route(2, 1));
    assert!(cell.is_ready(), "the newer life is still chosen");
    assert!(!cell.duties().iter().any(is_down));
    cell.on_route(route(4, 3));
    assert!(cell.duties().iter().any(is_down), "a newer one does supersede it");
}

#[test]
fn a_pause_is_looked_after_by_the_clock() {
    let core = node(&MemHub::default());
    let cell = core.group(&group(), None);
    cell.on_route(route(3, 1));
    assert!(cell.next_tick(core.clock().now()).is_none());
    cell.on_pausing(&peer(3));
    assert!(cell.next_tick(core.clock().now()).is_some(), "no source holds a mailbox back for ever");
}
