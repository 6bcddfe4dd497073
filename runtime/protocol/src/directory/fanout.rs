use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

use crate::Incarnation;
use crate::wire::directory::{Change, Message, Route};

/// What each watcher is still to be told.
///
/// Changes are kept once, in a bounded log; a watcher is a place in it. One that falls out of the log gets a whole
/// picture instead, so that neither a slow watcher nor a burst of changes makes anything grow.
pub(super) struct Fanout {
    life: Incarnation,
    history_max: usize,
    part_max: usize,
    revision: u64,
    /// The last changes; the newest is of `revision`.
    history: VecDeque<Change>,
    /// The last revision that each watcher was sent; `None` if it needs a whole picture.
    watchers: BTreeMap<Incarnation, Option<u64>>,
    /// The watchers that may be behind.
    behind: BTreeSet<Incarnation>,
    /// The parts of one watcher's picture.
    parts: VecDeque<(Incarnation, Message)>,
    answers: VecDeque<(Incarnation, Message)>,
}

impl Fanout {
    pub(super) fn new(life: Incarnation, history_max: usize, part_max: usize) -> Self {
        Fanout {
            life,
            history_max,
            part_max,
            revision: 0,
            history: VecDeque::new(),
            watchers: BTreeMap::new(),
            behind: BTreeSet::new(),
            parts: VecDeque::new(),
            answers: VecDeque::new(),
        }
    }

    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    pub(super) fn watchers(&self) -> usize {
        self.watchers.len()
    }

    pub(super) fn is_watching(&self, life: Incarnation) -> bool {
        self.watchers.contains_key(&life)
    }

    /// Tells this life of every change after `after`, a revision of this directory's life.
    pub(super) fn watch(&mut self, to: Incarnation, after: Option<u64>) {
        self.watchers.insert(to, after.filter(|after| *after <= self.revision));
        self.behind.insert(to);
    }

    pub(super) fn unwatch(&mut self, life: Incarnation) {
        self.watchers.remove(&life);
        self.behind.remove(&life);
    }

    pub(super) fn publish(&mut self, change: Change) {
        self.revision += 1;
        self.history.push_back(change);
        if self.history.len() > self.history_max {
            self.history.pop_front();
        }
        self.behind.extend(self.watchers.keys());
    }

    /// Answers after everybody has been told of what the request changed.
    pub(super) fn answer(&mut self, to: Incarnation, message: Message) {
        self.answers.push_back((to, message));
    }

    /// The next message. `picture` is every route there is.
    pub(super) fn poll(&mut self, picture: impl FnOnce() -> Vec<Route>) -> Option<(Incarnation, Message)> {
        if let Some(part) = self.parts.pop_front() {
            return Some(part);
        }
        while let Some(to) = self.behind.first().copied() {
            let sent = self.watchers.get_mut(&to).expect("whoever is behind watches");
            let oldest = self.revision - self.history.len() as u64 + 1;
            match *sent {
                Some(at) if at == self.revision => {
                    self.behind.remove(&to);
                }
                Some(at) if at + 1 >= oldest => {
                    let revision = at + 1;
                    *sent = Some(revision);
                    let change = self.history[(revision - oldest) as usize].clone();
                    return Some((to, Message::Event { life: self.life, revision, change }));
                }
                _ => {
                    *sent = Some(self.revision);
                    let (life, revision) = (self.life, self.revision);
                    let parts = self.parts(picture());
                    self.parts = parts
                        .into_iter()
                        .map(|(routes, last)| (to, Message::Snapshot { life, revision, routes, last }))
                        .collect();
                    return self.parts.pop_front();
                }
            }
        }
        self.answers.pop_front()
    }

    /// Splits routes so that each part fits a frame, and says which part is the last; there is always one.
    pub(super) fn parts(&self, routes: Vec<Route>) -> Vec<(Vec<Route>, bool)> {
        let mut parts = Vec::new();
        let (mut part, mut weight) = (Vec::new(), 0);
        for route in routes {
            let bytes = weigh(&route);
            if weight + bytes > self.part_max && !part.is_empty() {
                parts.push((core::mem::take(&mut part), false));
                weight = 0;
            }
            weight += bytes;
            part.push(route);
        }
        parts.push((part, true));
        parts
    }
}

/// An upper bound on a route's encoding, in bytes.
fn weigh(route: &Route) -> usize {
    let group = route.lid.group();
    let shadow = route.shadow.as_ref().map_or(0, |(_, address)| address.as_str().len() + 16);
    group.model().len() + group.role().len() + route.address.as_str().len() + shadow + 96
}
