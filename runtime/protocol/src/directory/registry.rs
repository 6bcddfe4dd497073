use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::string::ToString;
use alloc::vec::Vec;
use core::time::Duration;

use crate::lease::Grantor;
use crate::wire::directory::{Change, Message, Refusal, Request, Response, Route};
use crate::{Address, Epoch, Evidence, Group, Incarnation, Instant, LogicalId, Machine};

/// A registry's limits.
#[derive(Clone, Debug)]
pub struct RegistryConfig {
    /// For how long an identity is held unless renewed.
    pub ttl: Duration,
    /// Identities at most.
    pub identities: usize,
    /// Watchers at most.
    pub watchers: usize,
    /// Changes that are kept for watchers that resume.
    pub history: usize,
    /// This is the first directory of its deployment: there is nobody to wait for.
    pub first: bool,
}

impl Default for RegistryConfig {
    fn default() -> Self {
        RegistryConfig {
            ttl: Duration::from_secs(2),
            identities: 100_000,
            watchers: 10_000,
            history: 4096,
            first: false,
        }
    }
}

/// What happens to a registry.
#[derive(Clone, Debug)]
pub enum RegistryInput {
    /// A message from this life.
    Message {
        /// From whom.
        from: Incarnation,
        /// The message.
        message: Message,
    },
    /// The link to this life ended.
    Gone(Incarnation),
    /// Time passed.
    Tick,
}

/// What a registry wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegistryOutput {
    /// Send this message.
    Send {
        /// To whom.
        to: Incarnation,
        /// The message.
        message: Message,
    },
}

struct Entry {
    lease: Grantor,
    route: Route,
    guardian: Option<Incarnation>,
}

/// The whole logic of the built-in directory.
///
/// An identity is granted to whoever asks while nobody holds it; a holder keeps it by renewing, and loses it when its
/// lease runs out, when it leaves, when it hands it to the shadow that waits beside it, or when the process that
/// started it reports its exit. Every other report is advice and evicts nobody. After a restart the registry knows
/// nothing, and for one lease grants an identity only to somebody who held one before.
pub struct Registry {
    config: RegistryConfig,
    boot: u64,
    counter: u64,
    revision: u64,
    entries: BTreeMap<LogicalId, Entry>,
    watchers: BTreeSet<Incarnation>,
    history: VecDeque<(u64, Change)>,
    settled_at: Instant,
    outputs: VecDeque<RegistryOutput>,
}

impl Registry {
    /// A registry that starts at `now` with the boot number `boot`: the greatest of the wall clock's seconds and the
    /// persisted boot + 1. It outgrows whatever a client reports, too.
    pub fn new(now: Instant, boot: u64, config: RegistryConfig) -> Self {
        Registry {
            settled_at: if config.first { now } else { now + config.ttl },
            config,
            boot,
            counter: 0,
            revision: 0,
            entries: BTreeMap::new(),
            watchers: BTreeSet::new(),
            history: VecDeque::new(),
            outputs: VecDeque::new(),
        }
    }

    /// The life of this registry, as its answers name it.
    pub fn boot(&self) -> u64 {
        self.boot
    }

    /// Who holds what.
    pub fn routes(&self) -> impl Iterator<Item = &Route> {
        self.entries.values().map(|entry| &entry.route)
    }

    fn on_request(&mut self, now: Instant, from: Incarnation, id: u64, request: Request) {
        let response = match request {
            Request::Register { lid, incarnation, address, last, shadow, guardian } => {
                if incarnation == from {
                    self.register(now, lid, Claim { incarnation, address, last, shadow, guardian })
                } else {
                    Response::Refused(Refusal::NotYours)
                }
            }
            Request::Renew { lid, epoch, ready } => self.renew(now, lid, epoch, ready),
            Request::Leave { lid, epoch, to } => self.leave(now, lid, epoch, to),
            Request::Drain { lid } => self.drain(lid),
            Request::Report { lid, incarnation, evidence } => {
                self.report(from, &lid, incarnation, evidence);
                Response::Done
            }
            Request::Resolve { group } => {
                Response::Routes { routes: self.resolve(group.as_ref()), reset: false }
            }
            Request::Watch { after } => self.watch(from, after),
        };
        let message = Message::Response { id, boot: self.boot, revision: self.revision, response };
        self.outputs.push_back(RegistryOutput::Send { to: from, message });
    }

    fn register(&mut self, now: Instant, lid: LogicalId, claim: Claim) -> Response {
        if let Some(last) = claim.last
            && last.boot >= self.boot
            && self.entries.get(&lid).is_none_or(|entry| entry.route.epoch != last)
        {
            // A client has seen a later life of the directory than this one: epochs must never go backwards.
            self.boot = last.boot + 1;
        }
        if let Some(entry) = self.entries.get_mut(&lid)
            && let Some((holder, epoch, until)) = entry.lease.holder(now)
        {
            if holder == claim.incarnation {
                entry.lease.renew(now, epoch);
                return Response::Granted { epoch, ttl_ms: self.config.ttl.as_millis() as u64 };
            }
            if claim.shadow {
                entry.route.shadow = Some((claim.incarnation, claim.address));
                let holder = entry.route.clone();
                self.publish(Change::Put(holder.clone()));
                return Response::Shadowing { holder };
            }
            let remaining_ms = until.since(now).as_millis() as u64;
            return Response::Refused(Refusal::Held { lid, holder, remaining_ms });
        }
        if claim.last.is_none() && now < self.settled_at {
            let remaining_ms = self.settled_at.since(now).as_millis() as u64;
            return Response::Refused(Refusal::Settling { lid, remaining_ms });
        }
        if !self.entries.contains_key(&lid) && self.entries.len() >= self.config.identities {
            return Response::Refused(Refusal::Full { what: "identities".to_string() });
        }
        self.grant(now, lid, claim)
    }

    fn grant(&mut self, now: Instant, lid: LogicalId, claim: Claim) -> Response {
        self.counter += 1;
        let epoch = Epoch { boot: self.boot, counter: self.counter };
        let route = Route {
            lid: lid.clone(),
            incarnation: claim.incarnation,
            address: claim.address,
            epoch,
            ready: true,
            draining: false,
            shadow: None,
        };
        let lease = self.entries.remove(&lid).map_or(Grantor::new(self.config.ttl), |entry| entry.lease);
        let mut entry = Entry { lease, route: route.clone(), guardian: claim.guardian };
        let granted = entry.lease.grant(now, claim.incarnation, epoch);
        assert!(granted, "the caller saw that nobody holds it");
        self.entries.insert(lid, entry);
        self.publish(Change::Put(route));
        Response::Granted { epoch, ttl_ms: self.config.ttl.as_millis() as u64 }
    }

    fn renew(&mut self, now: Instant, lid: LogicalId, epoch: Epoch, ready: bool) -> Response {
        let ttl_ms = self.config.ttl.as_millis() as u64;
        let Some(entry) = self.entries.get_mut(&lid) else {
            return Response::Refused(Refusal::Fenced { lid, epoch });
        };
        if !entry.lease.renew(now, epoch) {
            return Response::Refused(Refusal::Fenced { lid, epoch });
        }
        if entry.route.ready != ready {
            entry.route.ready = ready;
            let route = entry.route.clone();
            self.publish(Change::Put(route));
        }
        Response::Granted { epoch, ttl_ms }
    }

    fn leave(&mut self, now: Instant, lid: LogicalId, epoch: Epoch, to: Option<Incarnation>) -> Response {
        let Some(entry) = self.entries.get_mut(&lid).filter(|entry| entry.route.epoch == epoch) else {
            return Response::Refused(Refusal::Fenced { lid, epoch });
        };
        let successor = match (to, entry.route.shadow.clone()) {
            (Some(to), Some((shadow, address))) if to == shadow => Some((shadow, address)),
            (Some(to), _) => return Response::Refused(Refusal::NotShadow { lid, to }),
            (None, _) => None,
        };
        entry.lease.end(epoch);
        match successor {
            Some((incarnation, address)) => {
                let guardian = entry.guardian;
                let claim = Claim { incarnation, address, last: Some(epoch), shadow: false, guardian };
                // One change: there is no moment in which nobody holds it.
                self.grant(now, lid, claim);
            }
            None => self.remove(&lid, Evidence::Left),
        }
        Response::Done
    }

    fn drain(&mut self, lid: LogicalId) -> Response {
        let Some(entry) = self.entries.get_mut(&lid) else {
            return Response::Refused(Refusal::Unknown { lid });
        };
        entry.route.draining = true;
        let route = entry.route.clone();
        self.publish(Change::Put(route));
        Response::Done
    }

    fn report(&mut self, from: Incarnation, lid: &LogicalId, incarnation: Incarnation, evidence: Evidence) {
        let Some(entry) = self.entries.get(lid) else { return };
        let sure = evidence == Evidence::ProcessExited && entry.guardian == Some(from);
        if sure && entry.route.incarnation == incarnation {
            self.remove(lid, evidence);
        }
    }

    fn resolve(&self, group: Option<&Group>) -> Vec<Route> {
        self.routes().filter(|route| group.is_none_or(|group| route.lid.group() == group)).cloned().collect()
    }

    fn watch(&mut self, from: Incarnation, after: Option<(u64, u64)>) -> Response {
        if !self.watchers.contains(&from) && self.watchers.len() >= self.config.watchers {
            return Response::Refused(Refusal::Full { what: "watchers".to_string() });
        }
        self.watchers.insert(from);
        let oldest = self.history.front().map_or(self.revision + 1, |(revision, _)| *revision);
        match after {
            Some((boot, revision))
                if boot == self.boot && revision <= self.revision && revision + 1 >= oldest =>
            {
                let missed: Vec<_> = self.history.iter().filter(|(at, _)| *at > revision).cloned().collect();
                for (revision, change) in missed {
                    let message = Message::Event { boot: self.boot, revision, change };
                    self.outputs.push_back(RegistryOutput::Send { to: from, message });
                }
                Response::Routes { routes: Vec::new(), reset: false }
            }
            _ => Response::Routes { routes: self.resolve(None), reset: true },
        }
    }

    fn remove(&mut self, lid: &LogicalId, evidence: Evidence) {
        let Some(entry) = self.entries.remove(lid) else { return };
        let Route { lid, incarnation, epoch, .. } = entry.route;
        self.publish(Change::Remove { lid, incarnation, epoch, evidence });
    }

    fn publish(&mut self, change: Change) {
        self.revision += 1;
        self.history.push_back((self.revision, change.clone()));
        if self.history.len() > self.config.history {
            self.history.pop_front();
        }
        for to in &self.watchers {
            let message = Message::Event { boot: self.boot, revision: self.revision, change: change.clone() };
            self.outputs.push_back(RegistryOutput::Send { to: *to, message });
        }
    }

    fn on_gone(&mut self, incarnation: Incarnation) {
        self.watchers.remove(&incarnation);
        let shadowed: Vec<LogicalId> = self
            .entries
            .values()
            .filter(|entry| entry.route.shadow.as_ref().is_some_and(|(shadow, _)| *shadow == incarnation))
            .map(|entry| entry.route.lid.clone())
            .collect();
        for lid in shadowed {
            let entry = self.entries.get_mut(&lid).expect("it was just listed");
            entry.route.shadow = None;
            let route = entry.route.clone();
            self.publish(Change::Put(route));
        }
    }

    fn on_tick(&mut self, now: Instant) {
        let over: Vec<LogicalId> = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.lease.holder(now).is_none())
            .map(|(lid, _)| lid.clone())
            .collect();
        for lid in over {
            self.remove(&lid, Evidence::LeaseExpired);
        }
    }
}

struct Claim {
    incarnation: Incarnation,
    address: Address,
    last: Option<Epoch>,
    shadow: bool,
    guardian: Option<Incarnation>,
}

impl Machine for Registry {
    type Input = RegistryInput;
    type Output = RegistryOutput;

    fn handle(&mut self, now: Instant, input: RegistryInput) {
        match input {
            RegistryInput::Message { from, message: Message::Request { id, request } } => {
                self.on_request(now, from, id, request);
            }
            // Answers and events are a directory's to send.
            RegistryInput::Message { .. } => {}
            RegistryInput::Gone(incarnation) => self.on_gone(incarnation),
            RegistryInput::Tick => self.on_tick(now),
        }
        assert!(self.entries.len() <= self.config.identities, "the identities are bounded");
        assert!(self.history.len() <= self.config.history, "the history is bounded");
    }

    fn poll(&mut self) -> Option<RegistryOutput> {
        self.outputs.pop_front()
    }

    fn deadline(&self) -> Option<Instant> {
        self.entries.values().filter_map(|entry| entry.lease.until()).min()
    }
}
