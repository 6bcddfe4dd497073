use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::time::Duration;

use super::registry::Claim;
use crate::lease::Grantor;
use crate::wire::directory::Route;
use crate::{Group, Incarnation, Instant, LogicalId};

/// Somebody who waits beside a holder.
pub(super) struct Shadow {
    pub(super) claim: Claim,
    /// It asks again before this, or is taken for dead.
    pub(super) until: Instant,
}

/// An identity that is held.
pub(super) struct Entry {
    pub(super) lease: Grantor,
    pub(super) route: Route,
    pub(super) guardian: Option<Incarnation>,
    pub(super) shadow: Option<Shadow>,
    /// When it is to be looked at: never later than the end of its lease or of its shadow.
    look_at: Instant,
}

impl Entry {
    pub(super) fn new(ttl: Duration, now: Instant, route: Route, guardian: Option<Incarnation>) -> Self {
        let mut lease = Grantor::new(ttl);
        let granted = lease.grant(now, route.incarnation, route.epoch);
        assert!(granted, "a new lease is nobody's");
        Entry { lease, route, guardian, shadow: None, look_at: now + ttl }
    }

    /// When the lease or the shadow ends, whichever comes first.
    fn ends_at(&self) -> Instant {
        let lease = self.lease.until().unwrap_or(Instant::ZERO);
        self.shadow.as_ref().map_or(lease, |shadow| lease.min(shadow.until))
    }
}

/// The identities that are held, and which of them to look at next.
///
/// A renewal does not touch the order in which they are looked at: an entry that is looked at too early is put back.
#[derive(Default)]
pub(super) struct Entries {
    entries: BTreeMap<LogicalId, Entry>,
    order: BTreeSet<(Instant, LogicalId)>,
    shadows: BTreeSet<(Incarnation, LogicalId)>,
}

impl Entries {
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.entries.values()
    }

    pub(super) fn get(&self, lid: &LogicalId) -> Option<&Entry> {
        self.entries.get(lid)
    }

    pub(super) fn get_mut(&mut self, lid: &LogicalId) -> Option<&mut Entry> {
        self.entries.get_mut(lid)
    }

    /// Puts an entry in, and gives back the one that it replaces.
    pub(super) fn insert(&mut self, entry: Entry) -> Option<Entry> {
        let lid = entry.route.lid.clone();
        let before = self.remove(&lid);
        self.order.insert((entry.look_at, lid.clone()));
        self.entries.insert(lid, entry);
        before
    }

    pub(super) fn remove(&mut self, lid: &LogicalId) -> Option<Entry> {
        let entry = self.entries.remove(lid)?;
        self.order.remove(&(entry.look_at, lid.clone()));
        if let Some((shadow, _)) = &entry.route.shadow {
            self.shadows.remove(&(*shadow, lid.clone()));
        }
        Some(entry)
    }

    pub(super) fn set_shadow(&mut self, lid: &LogicalId, shadow: Option<Shadow>) {
        let Some(entry) = self.entries.get_mut(lid) else { return };
        if let Some(before) = &entry.shadow {
            self.shadows.remove(&(before.claim.incarnation, lid.clone()));
        }
        if let Some(shadow) = &shadow {
            self.shadows.insert((shadow.claim.incarnation, lid.clone()));
        }
        entry.shadow = shadow;
        let ends_at = entry.ends_at();
        if ends_at < entry.look_at {
            self.order.remove(&(entry.look_at, lid.clone()));
            entry.look_at = ends_at;
            self.order.insert((ends_at, lid.clone()));
        }
    }

    /// What this life waits beside.
    pub(super) fn shadowed_by(&self, incarnation: Incarnation) -> Vec<LogicalId> {
        let first = LogicalId::new(Group::new("", "", 0), 0, 0);
        self.shadows
            .range((incarnation, first)..)
            .take_while(|(by, _)| *by == incarnation)
            .map(|(_, lid)| lid.clone())
            .collect()
    }

    /// An entry whose lease or shadow has ended.
    pub(super) fn due(&mut self, now: Instant) -> Option<LogicalId> {
        while let Some((at, _)) = self.order.first()
            && *at <= now
        {
            let (_, lid) = self.order.pop_first().expect("it was just seen");
            let entry = self.entries.get_mut(&lid).expect("the order names what is there");
            entry.look_at = entry.ends_at();
            self.order.insert((entry.look_at, lid.clone()));
            if entry.look_at <= now {
                return Some(lid);
            }
        }
        None
    }

    /// When to look next.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.order.first().map(|(at, _)| *at)
    }

    /// Nobody could be heard until now: everybody gets a whole lease to be heard.
    pub(super) fn excuse(&mut self, now: Instant, ttl: Duration) {
        for entry in self.entries.values_mut() {
            entry.lease.excuse(now);
            if let Some(shadow) = &mut entry.shadow {
                shadow.until = shadow.until.max(now + ttl);
            }
        }
    }
}
