//! The membership of one group at one submitter, and which replica to choose.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

use crate::step::{Choose, Target};
use crate::wire::Heartbeat;
use crate::wire::directory::Route;
use crate::{Address, Epoch, Evidence, Incarnation, Instant, LogicalId, Machine, Peer, ReplicaNo};

/// A replica as the directory knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its endpoint and present life.
    pub peer: Peer,
    /// Where it is reached.
    pub address: Address,
    /// The epoch under which it serves.
    pub epoch: Epoch,
}

/// What happens to a group.
#[derive(Clone, Debug)]
pub enum GroupInput {
    /// The directory's word on a replica.
    Route(Route),
    /// The directory says that a life is over.
    Removed {
        /// The endpoint.
        lid: LogicalId,
        /// The life.
        incarnation: Incarnation,
        /// Its epoch.
        epoch: Epoch,
        /// Why.
        evidence: Evidence,
    },
    /// A link to this life is up.
    Up {
        /// The life.
        incarnation: Incarnation,
    },
    /// The last link to this life ended, or it is believed down.
    Down {
        /// The life.
        incarnation: Incarnation,
        /// On what evidence.
        evidence: Evidence,
    },
    /// It spoke of its state.
    Heartbeat {
        /// The life.
        incarnation: Incarnation,
        /// Its state.
        heartbeat: Heartbeat,
    },
    /// It is under suspicion.
    Suspected {
        /// The life.
        incarnation: Incarnation,
        /// On what evidence.
        evidence: Evidence,
    },
    /// The suspicion was wrong.
    Cleared {
        /// The life.
        incarnation: Incarnation,
    },
}

/// What a group wants done, and what it tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupOutput {
    /// Keep a link to this life.
    Connect {
        /// The life.
        peer: Peer,
        /// Where.
        address: Address,
    },
    /// It may be chosen from now on.
    Routable {
        /// The life.
        peer: Peer,
        /// Its epoch.
        epoch: Epoch,
    },
    /// It may not be chosen any more.
    Unroutable {
        /// The life.
        peer: Peer,
        /// The evidence of its end; `None` if it only takes no new work.
        evidence: Option<Evidence>,
    },
}

/// The state of one replica; [`Replica::state`] derives it from what is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Registered, no link.
    Unlinked,
    /// Linked, not taking new work.
    NotReady,
    /// Leaving.
    Draining,
    /// Linked and ready; others are preferred.
    Suspect,
    /// May be chosen.
    Routable,
}

#[derive(Clone, Debug)]
struct Replica {
    member: Member,
    ready: bool,
    draining: bool,
    linked: bool,
    suspect: bool,
    outstanding: usize,
    announced: bool,
}

impl Replica {
    fn state(&self) -> State {
        match self {
            Replica { linked: false, .. } => State::Unlinked,
            Replica { draining: true, .. } => State::Draining,
            Replica { ready: false, .. } => State::NotReady,
            Replica { suspect: true, .. } => State::Suspect,
            _ => State::Routable,
        }
    }
}

/// The routable set of one group.
///
/// Whether a replica may be chosen, by what is known of it:
///
/// | directory | link | ready | draining | suspect | chosen |
/// | --- | --- | --- | --- | --- | --- |
/// | unknown or removed | any | any | any | any | never |
/// | registered | none | any | any | any | never |
/// | registered | up | no | any | any | never |
/// | registered | up | yes | yes | any | never |
/// | registered | up | yes | no | yes | only if no other may be |
/// | registered | up | yes | no | no | yes |
#[derive(Clone, Debug)]
pub struct Group {
    name: crate::Group,
    replicas: BTreeMap<ReplicaNo, Replica>,
    /// The highest epoch known for each replica, also after its removal: earlier lives stay fenced.
    epochs: BTreeMap<ReplicaNo, Epoch>,
    /// Links that came up before their route did.
    early_links: BTreeMap<Incarnation, ()>,
    rotation: usize,
    outputs: VecDeque<GroupOutput>,
}

/// Links that may be up before the directory has told of their routes.
const EARLY_LINKS_MAX: usize = 4096;

impl Group {
    /// An empty group.
    pub fn new(name: crate::Group) -> Self {
        Group {
            name,
            replicas: BTreeMap::new(),
            epochs: BTreeMap::new(),
            early_links: BTreeMap::new(),
            rotation: 0,
            outputs: VecDeque::new(),
        }
    }

    /// Everyone that the directory names.
    pub fn members(&self) -> Vec<Member> {
        self.replicas.values().map(|replica| replica.member.clone()).collect()
    }

    /// The life that holds an identity now.
    pub fn current(&self, lid: &LogicalId) -> Option<Peer> {
        let replica = self.replicas.get(&lid.replica())?;
        Some(replica.member.peer.clone())
    }

    fn on_route(&mut self, route: Route) {
        if route.lid.group() != &self.name {
            return;
        }
        let number = route.lid.replica();
        if self.epochs.get(&number).is_some_and(|known| route.epoch < *known) {
            return;
        }
        self.epochs.insert(number, route.epoch);
        if let Some((incarnation, address)) = route.shadow
            && !self.early_links.contains_key(&incarnation)
        {
            // The target of a migration: its link is made now, and used once it holds the identity.
            let peer = Peer { lid: route.lid.clone(), incarnation };
            self.outputs.push_back(GroupOutput::Connect { peer, address });
        }
        let peer = Peer { lid: route.lid, incarnation: route.incarnation };
        let known = self.replicas.get(&number).is_some_and(|replica| {
            replica.member.peer.incarnation == peer.incarnation && replica.member.address == route.address
        });
        if known {
            let replica = self.replicas.get_mut(&number).expect("it was just found");
            replica.ready = route.ready;
            replica.draining = route.draining;
            replica.member.epoch = route.epoch;
        } else {
            self.remove(number, Evidence::Superseded);
            let linked = self.early_links.remove(&peer.incarnation).is_some();
            let member = Member { peer: peer.clone(), address: route.address.clone(), epoch: route.epoch };
            let replica = Replica {
                member,
                ready: route.ready,
                draining: route.draining,
                linked,
                suspect: false,
                outstanding: 0,
                announced: false,
            };
            self.replicas.insert(number, replica);
            if !linked {
                self.outputs.push_back(GroupOutput::Connect { peer, address: route.address });
            }
        }
        self.announce(number, None);
    }

    fn remove(&mut self, number: ReplicaNo, evidence: Evidence) {
        if let Some(replica) = self.replicas.remove(&number)
            && replica.announced
        {
            let peer = replica.member.peer;
            self.outputs.push_back(GroupOutput::Unroutable { peer, evidence: Some(evidence) });
        }
    }

    fn find(&mut self, incarnation: Incarnation) -> Option<(ReplicaNo, &mut Replica)> {
        self.replicas
            .iter_mut()
            .find(|(_, replica)| replica.member.peer.incarnation == incarnation)
            .map(|(number, replica)| (*number, replica))
    }

    fn change(
        &mut self,
        incarnation: Incarnation,
        evidence: Option<Evidence>,
        apply: impl FnOnce(&mut Replica),
    ) {
        if let Some((number, replica)) = self.find(incarnation) {
            apply(replica);
            self.announce(number, evidence);
        }
    }

    fn announce(&mut self, number: ReplicaNo, evidence: Option<Evidence>) {
        let Some(replica) = self.replicas.get_mut(&number) else { return };
        let routable = matches!(replica.state(), State::Routable | State::Suspect);
        if routable == replica.announced {
            return;
        }
        replica.announced = routable;
        let Member { peer, epoch, .. } = replica.member.clone();
        self.outputs.push_back(if routable {
            GroupOutput::Routable { peer, epoch }
        } else {
            GroupOutput::Unroutable { peer, evidence }
        });
    }

    fn on_up(&mut self, incarnation: Incarnation) {
        if self.find(incarnation).is_none() {
            if self.early_links.len() < EARLY_LINKS_MAX {
                self.early_links.insert(incarnation, ());
            }
            return;
        }
        self.change(incarnation, None, |replica| {
            replica.linked = true;
            replica.suspect = false;
        });
    }

    fn on_down(&mut self, incarnation: Incarnation, evidence: Evidence) {
        self.early_links.remove(&incarnation);
        self.change(incarnation, Some(evidence), |replica| replica.linked = false);
    }

    fn on_removed(&mut self, lid: &LogicalId, incarnation: Incarnation, epoch: Epoch, evidence: Evidence) {
        let number = lid.replica();
        let known = self.epochs.entry(number).or_default();
        *known = (*known).max(epoch);
        if self.replicas.get(&number).is_some_and(|replica| replica.member.peer.incarnation == incarnation) {
            self.remove(number, evidence);
        }
    }
}

impl Choose for Group {
    fn pick(&mut self, prefer: Option<ReplicaNo>, avoid: Option<ReplicaNo>) -> Option<Target> {
        let in_state = |wanted: State| {
            self.replicas
                .iter()
                .filter(move |(_, replica)| replica.state() == wanted)
                .map(|(number, replica)| (*number, replica.member.peer.incarnation, replica.outstanding))
        };
        let mut candidates: Vec<_> = in_state(State::Routable).collect();
        if candidates.is_empty() || (candidates.len() == 1 && avoid == Some(candidates[0].0)) {
            candidates.extend(in_state(State::Suspect));
        }
        if candidates.len() > 1 {
            candidates.retain(|(number, ..)| avoid != Some(*number));
        }
        let preferred = candidates.iter().find(|(number, ..)| prefer == Some(*number));
        let (replica, incarnation, _) = match preferred {
            Some(found) => *found,
            None => {
                let least = candidates.iter().map(|(_, _, outstanding)| *outstanding).min()?;
                candidates.retain(|(_, _, outstanding)| *outstanding == least);
                self.rotation = self.rotation.wrapping_add(1);
                candidates[self.rotation % candidates.len()]
            }
        };
        Some(Target { replica, incarnation })
    }

    fn started(&mut self, target: Target) {
        if let Some((_, replica)) = self.find(target.incarnation) {
            replica.outstanding += 1;
        }
    }

    fn finished(&mut self, target: Target) {
        if let Some((_, replica)) = self.find(target.incarnation) {
            replica.outstanding = replica.outstanding.saturating_sub(1);
        }
    }
}

impl Machine for Group {
    type Input = GroupInput;
    type Output = GroupOutput;

    fn handle(&mut self, _now: Instant, input: GroupInput) {
        match input {
            GroupInput::Route(route) => self.on_route(route),
            GroupInput::Removed { lid, incarnation, epoch, evidence } => {
                self.on_removed(&lid, incarnation, epoch, evidence);
            }
            GroupInput::Up { incarnation } => self.on_up(incarnation),
            GroupInput::Down { incarnation, evidence } => self.on_down(incarnation, evidence),
            GroupInput::Heartbeat { incarnation, heartbeat } => self.change(incarnation, None, |replica| {
                replica.ready = heartbeat.ready;
                replica.draining |= heartbeat.draining;
            }),
            GroupInput::Suspected { incarnation, .. } => {
                self.change(incarnation, None, |replica| replica.suspect = true);
            }
            GroupInput::Cleared { incarnation } => {
                self.change(incarnation, None, |replica| replica.suspect = false);
            }
        }
    }

    fn poll(&mut self) -> Option<GroupOutput> {
        self.outputs.pop_front()
    }

    fn deadline(&self) -> Option<Instant> {
        None
    }
}
