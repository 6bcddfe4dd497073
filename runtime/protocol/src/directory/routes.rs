use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::time::Duration;

use crate::wire::directory::{Change, Route};
use crate::{Evidence, Incarnation, Instant, LogicalId};

/// What a message to a watcher came to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Heard {
    /// These changes, in order.
    Changes(Vec<Change>),
    /// Something is missing: the watch must begin again.
    Gap,
    /// More than may be kept.
    TooMuch,
}

/// A picture that is still coming in.
struct Partial {
    life: Incarnation,
    revision: u64,
    routes: Vec<Route>,
}

/// The routes as a watcher knows them.
pub(super) struct RouteCache {
    routes_max: usize,
    /// The directory's life and the revision up to which everything is known.
    seen: Option<(Incarnation, u64)>,
    routes: BTreeMap<LogicalId, Route>,
    /// Routes that a restarted directory has not named yet, and until when they are believed all the same.
    unconfirmed: BTreeMap<LogicalId, Instant>,
    partial: Option<Partial>,
}

impl RouteCache {
    pub(super) fn new(routes_max: usize) -> Self {
        RouteCache {
            routes_max,
            seen: None,
            routes: BTreeMap::new(),
            unconfirmed: BTreeMap::new(),
            partial: None,
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Route> {
        self.routes.values()
    }

    pub(super) fn seen(&self) -> Option<(Incarnation, u64)> {
        self.seen
    }

    /// Whether everything up to this revision of this life is known.
    pub(super) fn is_at(&self, life: Incarnation, revision: u64) -> bool {
        self.seen.is_some_and(|(known, at)| known == life && at >= revision)
    }

    /// A link is new: what was half there is sent again from the start.
    pub(super) fn on_link(&mut self) {
        self.partial = None;
    }

    pub(super) fn on_event(&mut self, life: Incarnation, revision: u64, change: Change) -> Heard {
        match self.seen {
            Some((known, at)) if known == life && revision <= at => Heard::Changes(Vec::new()),
            Some((known, at)) if known == life && revision == at + 1 => {
                let new = matches!(&change, Change::Put(route) if !self.routes.contains_key(&route.lid));
                if new && self.routes.len() >= self.routes_max {
                    return Heard::TooMuch;
                }
                self.seen = Some((life, revision));
                self.apply(&change);
                Heard::Changes(Vec::from([change]))
            }
            _ => Heard::Gap,
        }
    }

    /// A part of a whole picture. What the whole does not name is gone; but a directory that has just restarted is
    /// still learning from its clients, so a route goes on for `grace`, in which its holder may register again.
    pub(super) fn on_part(
        &mut self,
        now: Instant,
        grace: Duration,
        (life, revision): (Incarnation, u64),
        routes: Vec<Route>,
        last: bool,
    ) -> Heard {
        let fits = |partial: &Partial| (partial.life, partial.revision) == (life, revision);
        let mut partial =
            self.partial.take().filter(fits).unwrap_or(Partial { life, revision, routes: Vec::new() });
        if partial.routes.len() + routes.len() > self.routes_max {
            return Heard::TooMuch;
        }
        partial.routes.extend(routes);
        if !last {
            self.partial = Some(partial);
            return Heard::Changes(Vec::new());
        }
        let restarted = self.seen.is_some_and(|(known, _)| known != life);
        self.seen = Some((life, revision));
        Heard::Changes(self.replace(now, grace, restarted, partial.routes))
    }

    fn replace(&mut self, now: Instant, grace: Duration, restarted: bool, routes: Vec<Route>) -> Vec<Change> {
        let named: BTreeMap<LogicalId, Route> =
            routes.into_iter().map(|route| (route.lid.clone(), route)).collect();
        let unnamed: Vec<LogicalId> =
            self.routes.keys().filter(|lid| !named.contains_key(*lid)).cloned().collect();
        let mut changes = Vec::new();
        for lid in unnamed {
            // A route that a directory before this one had not confirmed either is not believed for longer.
            if restarted {
                self.unconfirmed.entry(lid).or_insert(now + grace);
            } else if !self.unconfirmed.contains_key(&lid) {
                changes.extend(self.expire(&lid));
            }
        }
        for (lid, route) in named {
            self.unconfirmed.remove(&lid);
            if self.routes.get(&lid) != Some(&route) {
                changes.push(Change::Put(route));
            }
        }
        for change in &changes {
            self.apply(change);
        }
        changes
    }

    fn apply(&mut self, change: &Change) {
        match change {
            Change::Put(route) => {
                self.unconfirmed.remove(&route.lid);
                self.routes.insert(route.lid.clone(), route.clone());
            }
            Change::Remove { lid, incarnation, .. } => {
                if self.routes.get(lid).is_some_and(|route| route.incarnation == *incarnation) {
                    self.unconfirmed.remove(lid);
                    self.routes.remove(lid);
                }
            }
        }
    }

    /// The removal of a route that is not confirmed.
    fn expire(&self, lid: &LogicalId) -> Option<Change> {
        let Route { lid, incarnation, epoch, .. } = self.routes.get(lid)?.clone();
        Some(Change::Remove { lid, incarnation, epoch, evidence: Evidence::LeaseExpired })
    }

    /// The routes that were not confirmed in time.
    pub(super) fn on_tick(&mut self, now: Instant) -> Vec<Change> {
        let late: Vec<LogicalId> =
            self.unconfirmed.iter().filter(|(_, until)| **until <= now).map(|(lid, _)| lid.clone()).collect();
        let changes: Vec<Change> = late.iter().filter_map(|lid| self.expire(lid)).collect();
        for change in &changes {
            self.apply(change);
        }
        changes
    }

    /// The directory was away: nobody could register meanwhile, so everybody gets the whole grace again.
    pub(super) fn excuse(&mut self, now: Instant, grace: Duration) {
        for until in self.unconfirmed.values_mut() {
            *until = (*until).max(now + grace);
        }
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.unconfirmed.values().min().copied()
    }
}
