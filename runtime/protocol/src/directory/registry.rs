use alloc::collections::BTreeMap;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::time::Duration;

use super::entries::{Entries, Entry, Shadow};
use super::fanout::Fanout;
use crate::wire::directory::{Change, Last, Message, Refusal, Request, Response, Route, Seen};
use crate::{Address, Epoch, Evidence, Group, Incarnation, Instant, LogicalId, Machine};

/// No boot number is as large: seconds reach it in 34,000 years.
const BOOT_MAX: u64 = 1 << 40;

/// A registry's limits.
#[derive(Clone, Debug)]
pub struct RegistryConfig {
    /// For how long an identity is held unless renewed.
    pub ttl: Duration,
    /// Identities at most.
    pub identities: usize,
    /// Watchers at most.
    pub watchers: usize,
    /// Changes that are kept for watchers that resume, and lives that are remembered as over.
    pub history: usize,
    /// The longest model, role or address that is kept, in bytes.
    pub name_max: usize,
    /// The largest part of a list of routes in one message, in bytes; far below the control lane's cap.
    pub part_max: usize,
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
            name_max: 512,
            part_max: 256 << 10,
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
    /// Send this message. If it can't be sent, the link to that life must end: a watcher would miss a change.
    Send {
        /// To whom.
        to: Incarnation,
        /// The message.
        message: Message,
    },
}

/// The whole logic of the built-in directory.
///
/// An identity is granted to whoever asks while nobody holds it; a holder keeps it by renewing, and loses it when its
/// lease runs out, when it leaves, when it hands it to the shadow that waits beside it, or when the process that
/// started it reports its exit. Every other report is advice and evicts nobody. A life that lost its identity is
/// over: peers refuse it, so it is granted nothing any more.
///
/// What becomes of a request to register:
///
/// | the identity is | asked by | answer |
/// | --- | --- | --- |
/// | held | its holder | granted, under the same epoch |
/// | held | a life that held it before | fenced |
/// | held | a shadow, while no other waits | shadowing |
/// | held | anybody else | held |
/// | free | a life that lost it in this life of the directory | fenced |
/// | free, known to a directory before | a holder whose lease is not over | granted: nobody else can hold it |
/// | free, known to a directory before | a holder whose lease is over | settling until one lease has passed; then granted to the last of them, the others are fenced |
/// | free | somebody new | settling until one lease has passed and while a former holder is awaited; then granted |
///
/// A registry that was stopped, or starved of its processor, for longer than a quarter of a lease could hear no
/// renewal: it excuses every holder for a whole lease. One that is cut off from everybody hears nobody at all, though
/// each client that is linked says something more than twice a lease: it evicts nobody until it hears somebody again, and then
/// excuses every holder likewise. So nobody is evicted for the directory's own deafness.
pub struct Registry {
    config: RegistryConfig,
    life: Incarnation,
    boot: u64,
    counter: u64,
    entries: Entries,
    fanout: Fanout,
    /// The lives that lost an identity, and under which epoch they held it.
    over: BTreeMap<Incarnation, Epoch>,
    /// The same in the order of their ends; the earliest is forgotten first.
    over_order: alloc::collections::VecDeque<Incarnation>,
    /// The last epochs of those who held an identity under a directory before and may have it back.
    awaited: BTreeMap<LogicalId, Epoch>,
    settled_at: Instant,
    ran_at: Instant,
    /// When somebody was heard.
    heard_at: Instant,
}

impl Registry {
    /// A registry that starts at `now`. `life` is drawn at random at each start; `boot` is the greatest of the wall
    /// clock's seconds and the persisted boot + 1, and outgrows whatever a client reports, too.
    pub fn new(now: Instant, life: Incarnation, boot: u64, config: RegistryConfig) -> Self {
        Registry {
            settled_at: if config.first { now } else { now + config.ttl },
            fanout: Fanout::new(life, config.history, config.part_max),
            config,
            life,
            boot,
            counter: 0,
            entries: Entries::default(),
            over: BTreeMap::new(),
            over_order: Default::default(),
            awaited: BTreeMap::new(),
            ran_at: now,
            heard_at: now,
        }
    }

    /// The boot number that it grants epochs under; it may grow. A driver that persists it does so when it grew.
    pub fn boot(&self) -> u64 {
        self.boot
    }

    /// The revision: the count of changes in this life.
    pub fn revision(&self) -> u64 {
        self.fanout.revision()
    }

    /// Who holds what.
    pub fn routes(&self) -> impl Iterator<Item = &Route> {
        self.entries.iter().map(|entry| &entry.route)
    }

    fn on_request(&mut self, now: Instant, from: Incarnation, id: u64, request: Request) {
        let response = match request {
            Request::Register { lid, incarnation, address, last, ready, shadow, guardian } => {
                if incarnation == from {
                    let claim = Claim { incarnation, address, ready, guardian };
                    self.on_register(now, lid, claim, last, shadow)
                } else {
                    Response::Refused(Refusal::NotYours)
                }
            }
            Request::Renew { lid, epoch, ready } => self.on_renew(now, from, lid, epoch, ready),
            Request::Leave { lid, epoch, to } => self.on_leave(now, from, lid, epoch, to),
            Request::Drain { lid, of } => self.on_drain(lid, of),
            Request::Report { lid, incarnation, evidence } => {
                self.on_report(now, from, &lid, incarnation, evidence);
                Response::Done
            }
            Request::Resolve { group } => return self.resolve(from, id, group.as_ref()),
            Request::Watch { after } => self.on_watch(from, after),
        };
        self.respond(from, id, response);
    }

    fn respond(&mut self, to: Incarnation, id: u64, response: Response) {
        let (life, boot, revision) = (self.life, self.boot, self.revision());
        self.fanout.answer(to, Message::Response { id, life, boot, revision, response });
    }

    fn granted(&self, epoch: Epoch) -> Response {
        Response::Granted { epoch, ttl_ms: self.config.ttl.as_millis() as u64 }
    }

    /// Epochs must never go backwards: a client has seen this boot number under an earlier directory.
    fn outgrow(&mut self, boot: u64) {
        // A client that lies must not use the numbers up.
        if boot < BOOT_MAX {
            self.boot = self.boot.max(boot + 1);
        }
    }

    fn on_register(
        &mut self,
        now: Instant,
        lid: LogicalId,
        claim: Claim,
        last: Option<Last>,
        shadow: bool,
    ) -> Response {
        if let Some(refusal) = self.too_long(&lid, &claim.address) {
            return Response::Refused(refusal);
        }
        let foreign = last.filter(|last| last.life != self.life);
        if let Some(last) = foreign {
            self.outgrow(last.epoch.boot);
        }
        let holder = self.entries.get(&lid).map(|entry| entry.route.incarnation);
        if holder == Some(claim.incarnation) {
            return self.on_registered_again(now, lid, claim);
        }
        if let Some(epoch) = self.over.get(&claim.incarnation) {
            return Response::Refused(Refusal::Fenced { lid, epoch: *epoch });
        }
        if let Some(entry) = self.entries.get(&lid) {
            let holder = entry.route.incarnation;
            if let Some(last) = last {
                return Response::Refused(Refusal::Fenced { lid, epoch: last.epoch });
            }
            if shadow {
                return self.on_shadow(now, lid, claim);
            }
            let remaining_ms = entry.lease.until().map_or(0, |until| until.since(now).as_millis() as u64);
            return Response::Refused(Refusal::Held { lid, holder, remaining_ms });
        }
        match self.may_grant(now, &lid, last, foreign) {
            Ok(()) => {
                let epoch = self.grant(now, lid, claim);
                self.granted(epoch)
            }
            Err(refusal) => Response::Refused(refusal),
        }
    }

    fn too_long(&self, lid: &LogicalId, address: &Address) -> Option<Refusal> {
        let (group, max) = (lid.group(), self.config.name_max);
        [("the model", group.model()), ("the role", group.role()), ("the address", address.as_str())]
            .into_iter()
            .find(|(_, text)| text.len() > max)
            .map(|(what, text)| Refusal::TooLong {
                what: what.to_string(),
                len: text.len() as u64,
                max: max as u64,
            })
    }

    /// Whether an identity that nobody holds may be granted to somebody who held `last`.
    fn may_grant(
        &mut self,
        now: Instant,
        lid: &LogicalId,
        last: Option<Last>,
        foreign: Option<Last>,
    ) -> Result<(), Refusal> {
        let awaited = self.awaited.get(lid).copied();
        match (last, foreign) {
            // It lost the identity in this life of the directory.
            (Some(last), None) => return Err(Refusal::Fenced { lid: lid.clone(), epoch: last.epoch }),
            (_, Some(last)) if awaited.is_some_and(|awaited| awaited > last.epoch) => {
                return Err(Refusal::Fenced { lid: lid.clone(), epoch: last.epoch });
            }
            // Nobody else can hold it: no directory but this one could have granted it since.
            (_, Some(last)) if last.valid => {}
            (_, Some(last)) if now < self.settled_at => {
                // A later holder may be there, whose lease is not over: it has until then to say so.
                if awaited.is_some() || self.awaited.len() < self.config.identities {
                    self.awaited.insert(lid.clone(), last.epoch);
                }
                return Err(self.settling(now, lid, self.settled_at));
            }
            (_, Some(_)) => {}
            (None, None) if now < self.settled_at => return Err(self.settling(now, lid, self.settled_at)),
            (None, None) if awaited.is_some() => return Err(self.settling(now, lid, self.await_until())),
            (None, None) => {}
        }
        if self.entries.len() >= self.config.identities {
            return Err(full("identities"));
        }
        Ok(())
    }

    fn settling(&self, now: Instant, lid: &LogicalId, until: Instant) -> Refusal {
        Refusal::Settling { lid: lid.clone(), remaining_ms: until.since(now).as_millis() as u64 + 1 }
    }

    /// Until when former holders are awaited who asked for their identities before the registry had settled.
    fn await_until(&self) -> Instant {
        self.settled_at + self.config.ttl / 2
    }

    fn on_registered_again(&mut self, now: Instant, lid: LogicalId, claim: Claim) -> Response {
        let entry = self.entries.get_mut(&lid).expect("the caller found it");
        let epoch = entry.route.epoch;
        entry.lease.renew(now, claim.incarnation, epoch);
        entry.guardian = claim.guardian;
        let (address, ready) = (claim.address, claim.ready);
        self.update(&lid, |route| {
            route.address = address;
            route.ready = ready;
        });
        self.granted(epoch)
    }

    fn on_shadow(&mut self, now: Instant, lid: LogicalId, claim: Claim) -> Response {
        let ttl = self.config.ttl;
        let entry = self.entries.get_mut(&lid).expect("the caller found it");
        if let Some(other) =
            entry.shadow.as_ref().filter(|shadow| shadow.claim.incarnation != claim.incarnation)
        {
            let remaining_ms = other.until.since(now).as_millis() as u64;
            let holder = other.claim.incarnation;
            return Response::Refused(Refusal::Held { lid, holder, remaining_ms });
        }
        let shown = Some((claim.incarnation, claim.address.clone()));
        self.entries.set_shadow(&lid, Some(Shadow { claim, until: now + ttl }));
        self.update(&lid, |route| route.shadow = shown);
        let holder = self.entries.get(&lid).expect("the caller found it").route.clone();
        Response::Shadowing { holder }
    }

    fn grant(&mut self, now: Instant, lid: LogicalId, claim: Claim) -> Epoch {
        self.counter += 1;
        let epoch = Epoch { boot: self.boot, counter: self.counter };
        let route = Route {
            lid: lid.clone(),
            incarnation: claim.incarnation,
            address: claim.address,
            epoch,
            ready: claim.ready,
            draining: false,
            shadow: None,
        };
        self.awaited.remove(&lid);
        let entry = Entry::new(self.config.ttl, now, route.clone(), claim.guardian);
        if let Some(before) = self.entries.insert(entry) {
            assert!(before.route.epoch < epoch, "epochs only grow");
            self.remember_over(before.route.incarnation, before.route.epoch);
        }
        self.fanout.publish(Change::Put(route));
        epoch
    }

    fn on_renew(
        &mut self,
        now: Instant,
        from: Incarnation,
        lid: LogicalId,
        epoch: Epoch,
        ready: bool,
    ) -> Response {
        let renewed = self.entries.get_mut(&lid).is_some_and(|entry| entry.lease.renew(now, from, epoch));
        if !renewed {
            return Response::Refused(Refusal::Fenced { lid, epoch });
        }
        self.update(&lid, |route| route.ready = ready);
        self.granted(epoch)
    }

    fn on_leave(
        &mut self,
        now: Instant,
        from: Incarnation,
        lid: LogicalId,
        epoch: Epoch,
        to: Option<Incarnation>,
    ) -> Response {
        let held = |entry: &&mut Entry| (entry.route.incarnation, entry.route.epoch) == (from, epoch);
        let Some(entry) = self.entries.get_mut(&lid).filter(held) else {
            return Response::Refused(Refusal::Fenced { lid, epoch });
        };
        let Some(to) = to else {
            self.end(now, &lid, Evidence::Left);
            return Response::Done;
        };
        match entry.shadow.take_if(|shadow| shadow.claim.incarnation == to) {
            Some(shadow) => {
                // One change: there is no moment in which nobody holds it.
                self.grant(now, lid, shadow.claim);
                Response::Done
            }
            None => Response::Refused(Refusal::NotShadow { lid, to }),
        }
    }

    fn on_drain(&mut self, lid: LogicalId, of: Option<Incarnation>) -> Response {
        match self.entries.get(&lid) {
            None => Response::Refused(Refusal::Unknown { lid }),
            Some(entry) if of.is_some_and(|of| of != entry.route.incarnation) => {
                Response::Refused(Refusal::Unknown { lid })
            }
            Some(_) => {
                self.update(&lid, |route| route.draining = true);
                Response::Done
            }
        }
    }

    fn on_report(
        &mut self,
        now: Instant,
        from: Incarnation,
        lid: &LogicalId,
        incarnation: Incarnation,
        evidence: Evidence,
    ) {
        let Some(entry) = self.entries.get_mut(lid) else { return };
        if evidence != Evidence::ProcessExited {
            return;
        }
        if entry.guardian == Some(from) && entry.route.incarnation == incarnation {
            self.end(now, lid, evidence);
        } else if entry.shadow.as_ref().is_some_and(|shadow| {
            shadow.claim.guardian == Some(from) && shadow.claim.incarnation == incarnation
        }) {
            self.drop_shadow(lid);
        }
    }

    fn resolve(&mut self, to: Incarnation, id: u64, group: Option<&Group>) {
        let wanted = |route: &&Route| group.is_none_or(|group| route.lid.group() == group);
        let routes: Vec<Route> = self.routes().filter(wanted).cloned().collect();
        for (part, last) in self.fanout.parts(routes) {
            self.respond(to, id, Response::Routes { routes: part, last });
        }
    }

    fn on_watch(&mut self, from: Incarnation, after: Option<Seen>) -> Response {
        if let Some(seen) = after.filter(|seen| seen.life != self.life) {
            self.outgrow(seen.boot);
        }
        if !self.fanout.is_watching(from) && self.fanout.watchers() >= self.config.watchers {
            return Response::Refused(full("watchers"));
        }
        let after = after.filter(|seen| seen.life == self.life).map(|seen| seen.revision);
        self.fanout.watch(from, after);
        Response::Watching { ttl_ms: self.config.ttl.as_millis() as u64 }
    }

    /// Changes a route and tells of it, if that is news.
    fn update(&mut self, lid: &LogicalId, change: impl FnOnce(&mut Route)) {
        let entry = self.entries.get_mut(lid).expect("the caller found it");
        let before = entry.route.clone();
        change(&mut entry.route);
        if entry.route != before {
            let route = entry.route.clone();
            self.fanout.publish(Change::Put(route));
        }
    }

    /// Nobody holds the identity any more; the shadow that waited for it does from now on.
    fn end(&mut self, now: Instant, lid: &LogicalId, evidence: Evidence) {
        let Some(entry) = self.entries.remove(lid) else { return };
        let Route { lid, incarnation, epoch, .. } = entry.route;
        self.remember_over(incarnation, epoch);
        self.fanout.publish(Change::Remove { lid: lid.clone(), incarnation, epoch, evidence });
        if let Some(shadow) = entry.shadow.filter(|shadow| now < shadow.until) {
            self.grant(now, lid, shadow.claim);
        }
    }

    fn drop_shadow(&mut self, lid: &LogicalId) {
        self.entries.set_shadow(lid, None);
        self.update(lid, |route| route.shadow = None);
    }

    fn remember_over(&mut self, incarnation: Incarnation, epoch: Epoch) {
        if self.over.insert(incarnation, epoch).is_none() {
            self.over_order.push_back(incarnation);
        }
        if self.over_order.len() > self.config.history
            && let Some(oldest) = self.over_order.pop_front()
        {
            self.over.remove(&oldest);
        }
    }

    fn on_gone(&mut self, incarnation: Incarnation) {
        self.fanout.unwatch(incarnation);
        for lid in self.entries.shadowed_by(incarnation) {
            self.drop_shadow(&lid);
        }
    }

    /// Nobody was heard for so long that it must be this registry that does not hear: each client says something
    /// every three eighths of a lease at least, and a holder's lease has two thirds left when it is last heard.
    fn is_deaf(&self, now: Instant) -> bool {
        now.since(self.heard_at) > self.config.ttl / 2
    }

    /// Time has passed, and somebody is heard now or not.
    fn pass(&mut self, now: Instant, heard: bool) {
        let stall = now.since(self.ran_at);
        self.ran_at = now;
        let was_deaf = self.is_deaf(now);
        if heard {
            self.heard_at = now;
        }
        if stall > self.config.ttl / 4 || (was_deaf && heard) {
            self.entries.excuse(now, self.config.ttl);
        }
        if self.is_deaf(now) {
            return;
        }
        while let Some(lid) = self.entries.due(now) {
            let entry = self.entries.get(&lid).expect("what is due is there");
            if entry.lease.holder(now).is_none() {
                self.end(now, &lid, Evidence::LeaseExpired);
            } else {
                self.drop_shadow(&lid);
            }
        }
        if now >= self.await_until() {
            self.awaited.clear();
        }
    }
}

fn full(what: &str) -> Refusal {
    Refusal::Full { what: String::from(what) }
}

/// Who wants an identity.
pub(super) struct Claim {
    pub(super) incarnation: Incarnation,
    pub(super) address: Address,
    pub(super) ready: bool,
    pub(super) guardian: Option<Incarnation>,
}

impl Machine for Registry {
    type Input = RegistryInput;
    type Output = RegistryOutput;

    fn handle(&mut self, now: Instant, input: RegistryInput) {
        self.pass(now, matches!(input, RegistryInput::Message { .. }));
        match input {
            RegistryInput::Message { from, message: Message::Request { id, request } } => {
                self.on_request(now, from, id, request);
            }
            // Answers and events are a directory's to send.
            RegistryInput::Message { .. } => {}
            RegistryInput::Gone(incarnation) => self.on_gone(incarnation),
            RegistryInput::Tick => {}
        }
        assert!(self.entries.len() <= self.config.identities, "the identities are bounded");
        assert!(self.over.len() <= self.config.history, "the lives that are over are bounded");
    }

    fn poll(&mut self) -> Option<RegistryOutput> {
        let (to, message) =
            self.fanout.poll(|| self.entries.iter().map(|entry| entry.route.clone()).collect())?;
        Some(RegistryOutput::Send { to, message })
    }

    /// The next end of a lease, and often enough to tell a stall from silence.
    fn deadline(&self) -> Option<Instant> {
        if self.is_deaf(self.ran_at) {
            return None;
        }
        let check = self.ran_at + self.config.ttl / 8;
        self.entries.deadline().map(|at| at.min(check))
    }
}
