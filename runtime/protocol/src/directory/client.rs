use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::time::Duration;

use crate::lease::Holder;
use crate::wire::directory::{Change, Message, Refusal, Request, Response, Route};
use crate::{Address, Epoch, Evidence, Incarnation, Instant, LogicalId, Machine};

/// A client's habits.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// How long a response is waited for.
    pub answer_within: Duration,
    /// The first pause between attempts to connect or to register; it doubles up to `backoff_max`.
    pub backoff: Duration,
    /// The longest pause.
    pub backoff_max: Duration,
}

impl Default for ClientConfig {
    fn default() -> Self {
        ClientConfig {
            answer_within: Duration::from_millis(500),
            backoff: Duration::from_millis(20),
            backoff_max: Duration::from_millis(500),
        }
    }
}

/// The identity that a client registers.
#[derive(Clone, Debug)]
pub struct Registrant {
    /// The identity.
    pub lid: LogicalId,
    /// The life that registers.
    pub incarnation: Incarnation,
    /// Where it is reached.
    pub address: Address,
    /// Wait beside the present holder.
    pub shadow: bool,
    /// Whose word on this process's exit is taken.
    pub guardian: Option<Incarnation>,
}

/// What happens to a client.
#[derive(Clone, Debug)]
pub enum ClientInput {
    /// Begin.
    Start,
    /// The link to the directory is up.
    Up,
    /// It ended, or could not be made.
    Down,
    /// A message from the directory.
    Message(Message),
    /// Takes new work or not; told with the next renewal, at once if it changed.
    Ready(bool),
    /// Give the identity up, to this shadow if one is named.
    Leave(Option<Incarnation>),
    /// Tell the directory what was seen of somebody.
    Report {
        /// The endpoint.
        lid: LogicalId,
        /// Its life.
        incarnation: Incarnation,
        /// What was seen.
        evidence: Evidence,
    },
    /// Ask that somebody gets no new work.
    Drain(LogicalId),
    /// Time passed.
    Tick,
}

/// What a client wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientOutput {
    /// Connect to the directory.
    Connect,
    /// The connection answers nothing: end it.
    Disconnect,
    /// Send this to the directory.
    Send(Message),
    /// A route changed; in order, and none is left out.
    Change(Change),
    /// The identity is held under this epoch.
    Registered(Epoch),
    /// The directory knows this life as the shadow of this holder.
    Shadowing(Route),
    /// The identity could not be registered now; the client tries again.
    Refused(Refusal),
    /// The identity is another's, or its lease ran out unheard: this life must not serve it any more.
    Lost,
    /// The identity is given up.
    Left,
    /// The shadow that it was to go to is not there: it is held on.
    Kept(Epoch),
    /// The request to drain was answered.
    Drained(Result<(), Refusal>),
    /// The directory is out of reach; the routes known go on.
    Away,
    /// It is back.
    Back,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    Idle,
    Connecting,
    Up,
}

enum Asked {
    Register,
    Renew,
    Leave,
    Watch,
    Report { lid: LogicalId, incarnation: Incarnation, evidence: Evidence },
    Drain,
}

/// A node's side of the directory: registers and renews, watches without a gap, and keeps the routes it knows while
/// the directory is away.
pub struct Client {
    config: ClientConfig,
    registrant: Option<Registrant>,
    random: u64,
    link: Link,
    away: bool,
    backoff: Duration,
    /// When to connect again.
    retry_at: Option<Instant>,
    holder: Holder,
    ttl: Duration,
    /// When to renew, or to register again.
    renew_at: Option<Instant>,
    ready: bool,
    leaving: Option<Option<Incarnation>>,
    lost: bool,
    next_id: u64,
    asked: BTreeMap<u64, (Instant, Asked)>,
    seen: Option<(u64, u64)>,
    watching: bool,
    routes: BTreeMap<LogicalId, Route>,
    /// Routes that a restarted directory has not named yet, and until when they are believed all the same.
    unconfirmed: BTreeMap<LogicalId, Instant>,
    outputs: VecDeque<ClientOutput>,
}

impl Client {
    /// A client; `random` seeds its jitter.
    pub fn new(config: ClientConfig, registrant: Option<Registrant>, random: u64) -> Self {
        Client {
            backoff: config.backoff,
            config,
            registrant,
            random,
            link: Link::Idle,
            away: false,
            retry_at: None,
            holder: Holder::default(),
            ttl: Duration::from_secs(2),
            renew_at: None,
            ready: true,
            leaving: None,
            lost: false,
            next_id: 1,
            asked: BTreeMap::new(),
            seen: None,
            watching: false,
            routes: BTreeMap::new(),
            unconfirmed: BTreeMap::new(),
            outputs: VecDeque::new(),
        }
    }

    /// The routes, as last heard.
    pub fn routes(&self) -> impl Iterator<Item = &Route> {
        self.routes.values()
    }

    /// The epoch, while it is valid.
    pub fn epoch(&self, now: Instant) -> Option<Epoch> {
        self.holder.epoch(now)
    }

    fn ask(&mut self, now: Instant, request: Request, asked: Asked) {
        let id = self.next_id;
        self.next_id += 1;
        self.asked.insert(id, (now, asked));
        self.outputs.push_back(ClientOutput::Send(Message::Request { id, request }));
    }

    /// A share of `base` between a half and the whole, so that many clients don't act as one.
    fn jitter(&mut self, base: Duration) -> Duration {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        base / 2 + base / 2 * ((self.random >> 33) as u32 % 1024) / 1024
    }

    fn connect(&mut self) {
        self.link = Link::Connecting;
        self.retry_at = None;
        self.outputs.push_back(ClientOutput::Connect);
    }

    fn on_up(&mut self, now: Instant) {
        self.link = Link::Up;
        self.backoff = self.config.backoff;
        self.watching = false;
        self.ask(now, Request::Watch { after: self.seen }, Asked::Watch);
        self.register(now);
    }

    fn register(&mut self, now: Instant) {
        if self.lost || self.leaving.is_some() {
            return;
        }
        let Some(registrant) = &self.registrant else { return };
        let request = Request::Register {
            lid: registrant.lid.clone(),
            incarnation: registrant.incarnation,
            address: registrant.address.clone(),
            last: self.holder.last_epoch(),
            shadow: registrant.shadow,
            guardian: registrant.guardian,
        };
        self.renew_at = None;
        self.ask(now, request, Asked::Register);
    }

    fn on_down(&mut self, now: Instant) {
        self.link = Link::Idle;
        let unanswered = core::mem::take(&mut self.asked);
        for (_, (_, asked)) in unanswered {
            // A report must not be lost with the link; everything else is asked anew when the link is back.
            if let Asked::Report { lid, incarnation, evidence } = asked {
                let id = self.next_id;
                self.next_id += 1;
                self.asked.insert(id, (now, Asked::Report { lid, incarnation, evidence }));
            }
        }
        if !self.away {
            self.away = true;
            self.outputs.push_back(ClientOutput::Away);
        }
        let pause = self.jitter(self.backoff);
        self.backoff = (self.backoff * 2).min(self.config.backoff_max);
        self.retry_at = Some(now + pause);
    }

    fn on_message(&mut self, now: Instant, message: Message) {
        match message {
            Message::Event { boot, revision, change } => self.on_event(now, boot, revision, change),
            Message::Response { id, boot, revision, response } => {
                // An answer to a question that is not open is nobody's: never another's (it is matched by its id).
                let Some((sent, asked)) = self.asked.remove(&id) else { return };
                self.on_response(now, sent, asked, (boot, revision), response);
            }
            Message::Request { .. } => {}
        }
    }

    fn on_event(&mut self, now: Instant, boot: u64, revision: u64, change: Change) {
        match self.seen {
            Some((known, last)) if known == boot && revision == last + 1 => {
                self.seen = Some((boot, revision));
                self.apply(change);
            }
            // Seen already.
            Some((known, last)) if known == boot && revision <= last => {}
            // A gap, or another life of the directory: start from a whole picture.
            _ if self.watching => {
                self.watching = false;
                self.ask(now, Request::Watch { after: None }, Asked::Watch);
            }
            _ => {}
        }
    }

    fn apply(&mut self, change: Change) {
        match &change {
            Change::Put(route) => {
                self.unconfirmed.remove(&route.lid);
                self.routes.insert(route.lid.clone(), route.clone());
            }
            Change::Remove { lid, incarnation, .. } => {
                if self.routes.get(lid).is_some_and(|route| route.incarnation == *incarnation) {
                    self.routes.remove(lid);
                }
            }
        }
        self.check_own(&change);
        self.outputs.push_back(ClientOutput::Change(change));
    }

    /// Another life under one's own identity means that one's own is over; as a shadow it means that it has begun.
    fn check_own(&mut self, change: &Change) {
        let Some(registrant) = &self.registrant else { return };
        match change {
            Change::Put(route) if route.lid == registrant.lid => {
                if route.incarnation == registrant.incarnation {
                    if registrant.shadow && self.holder.last_epoch() != Some(route.epoch) {
                        // The source handed it over: the lease counts from the next renewal on.
                        self.renew_at = Some(Instant::ZERO);
                        self.holder.on_granted(Instant::ZERO, route.epoch, Duration::ZERO);
                    }
                } else if self.holder.last_epoch().is_some_and(|held| held < route.epoch) {
                    self.lose();
                }
            }
            _ => {}
        }
    }

    fn lose(&mut self) {
        if !self.lost && self.leaving.is_none() {
            self.lost = true;
            self.holder.on_lost();
            self.renew_at = None;
            self.outputs.push_back(ClientOutput::Lost);
        }
    }

    fn on_response(
        &mut self,
        now: Instant,
        sent: Instant,
        asked: Asked,
        (boot, revision): (u64, u64),
        response: Response,
    ) {
        if self.away {
            self.away = false;
            self.outputs.push_back(ClientOutput::Back);
        }
        match (asked, response) {
            (Asked::Watch, Response::Routes { routes, reset }) => {
                self.watching = true;
                if reset {
                    let restarted = self.seen.is_some_and(|(known, _)| known != boot);
                    self.on_reset(now, routes, restarted);
                    self.seen = Some((boot, revision));
                }
            }
            (Asked::Register | Asked::Renew, Response::Granted { epoch, ttl_ms }) => {
                self.on_granted(now, sent, epoch, Duration::from_millis(ttl_ms));
            }
            (Asked::Register, Response::Shadowing { holder }) => {
                // Asked again now and then: the directory may have restarted and forgotten it.
                self.renew_at = Some(now + self.ttl / 2);
                self.outputs.push_back(ClientOutput::Shadowing(holder));
            }
            (Asked::Register, Response::Refused(refusal)) => {
                let wait = match &refusal {
                    Refusal::Settling { remaining_ms, .. } => Duration::from_millis(remaining_ms + 1),
                    // The word on the holder's end may be on its way.
                    Refusal::Held { .. } => self.config.backoff * 2,
                    _ => self.config.backoff_max,
                };
                let jitter = self.jitter(self.config.backoff);
                self.renew_at = Some(now + wait.min(self.config.backoff_max) + jitter);
                self.outputs.push_back(ClientOutput::Refused(refusal));
                if self.holder.last_epoch().is_some()
                    && let Some(ClientOutput::Refused(Refusal::Held { .. })) = self.outputs.back()
                {
                    self.lose();
                }
            }
            // The directory does not know this epoch: it restarted, or the lease ran out. Registering again tells.
            (Asked::Renew, Response::Refused(_)) => self.register(now),
            (Asked::Leave, Response::Refused(Refusal::NotShadow { .. })) => {
                // The successor is gone: the identity stays here.
                self.leaving = None;
                self.renew_at = Some(now);
                if let Some(epoch) = self.holder.last_epoch() {
                    self.outputs.push_back(ClientOutput::Kept(epoch));
                }
            }
            (Asked::Leave, Response::Refused(_) | Response::Done) => {
                self.holder.on_lost();
                self.renew_at = None;
                self.outputs.push_back(ClientOutput::Left);
            }
            (Asked::Drain, Response::Refused(refusal)) => {
                self.outputs.push_back(ClientOutput::Drained(Err(refusal)));
            }
            (Asked::Drain, _) => self.outputs.push_back(ClientOutput::Drained(Ok(()))),
            _ => {}
        }
    }

    fn on_granted(&mut self, now: Instant, sent: Instant, epoch: Epoch, ttl: Duration) {
        if self.lost {
            return;
        }
        let before = self.holder.last_epoch();
        let was_valid = self.holder.valid_until().is_some_and(|until| until > Instant::ZERO);
        self.holder.on_granted(sent, epoch, ttl);
        self.ttl = ttl;
        if let Some(registrant) = &mut self.registrant {
            registrant.shadow = false;
        }
        let pause = self.jitter(ttl / 3);
        self.renew_at = Some(now + pause);
        if before != Some(epoch) || !was_valid {
            self.outputs.push_back(ClientOutput::Registered(epoch));
        }
    }

    /// A whole picture: what is not in it is gone, unless the directory has just restarted and is still learning its
    /// registry from its clients. Then a route goes on until its holder has had two leases to register again.
    fn on_reset(&mut self, now: Instant, routes: Vec<Route>, restarted: bool) {
        let named: BTreeMap<LogicalId, Route> =
            routes.into_iter().map(|route| (route.lid.clone(), route)).collect();
        let unnamed: Vec<LogicalId> =
            self.routes.keys().filter(|lid| !named.contains_key(*lid)).cloned().collect();
        for lid in unnamed {
            if restarted {
                self.unconfirmed.entry(lid).or_insert(now + self.ttl * 2);
            } else {
                self.drop_route(&lid);
            }
        }
        for (lid, route) in named {
            if self.routes.get(&lid) != Some(&route) {
                self.apply(Change::Put(route));
            }
        }
    }

    fn drop_route(&mut self, lid: &LogicalId) {
        if let Some(route) = self.routes.get(lid) {
            let Route { lid, incarnation, epoch, .. } = route.clone();
            self.apply(Change::Remove { lid, incarnation, epoch, evidence: Evidence::LeaseExpired });
        }
    }

    fn on_tick(&mut self, now: Instant) {
        let expired: Vec<LogicalId> =
            self.unconfirmed.iter().filter(|(_, until)| **until <= now).map(|(lid, _)| lid.clone()).collect();
        // While the directory is away nobody can register again, so nobody is dropped for not having done so.
        if !self.away {
            for lid in &expired {
                self.unconfirmed.remove(lid);
                self.drop_route(lid);
            }
        }
        if self.link == Link::Idle && self.retry_at.is_some_and(|at| at <= now) {
            self.connect();
        }
        if self.holder.last_epoch().is_some()
            && !self.lost
            && self.link == Link::Up
            && self.renew_at.is_some_and(|at| at <= now)
        {
            self.renew(now);
        } else if self.link == Link::Up && self.renew_at.is_some_and(|at| at <= now) {
            self.register(now);
        }
        let patience = self.config.answer_within;
        if self.link == Link::Up && self.asked.values().any(|(sent, _)| *sent + patience <= now) {
            self.outputs.push_back(ClientOutput::Disconnect);
            self.on_down(now);
        }
    }

    fn renew(&mut self, now: Instant) {
        let (Some(registrant), Some(epoch)) = (&self.registrant, self.holder.last_epoch()) else { return };
        let request = Request::Renew { lid: registrant.lid.clone(), epoch, ready: self.ready };
        self.renew_at = None;
        self.ask(now, request, Asked::Renew);
    }

    fn on_leave(&mut self, now: Instant, to: Option<Incarnation>) {
        self.leaving = Some(to);
        match (&self.registrant, self.holder.last_epoch(), self.link) {
            (Some(registrant), Some(epoch), Link::Up) => {
                let request = Request::Leave { lid: registrant.lid.clone(), epoch, to };
                self.ask(now, request, Asked::Leave);
            }
            _ => self.outputs.push_back(ClientOutput::Left),
        }
    }
}

impl Machine for Client {
    type Input = ClientInput;
    type Output = ClientOutput;

    fn handle(&mut self, now: Instant, input: ClientInput) {
        match input {
            ClientInput::Start if self.link == Link::Idle => self.connect(),
            ClientInput::Start => {}
            ClientInput::Up if self.link != Link::Up => {
                self.on_up(now);
                let kept: Vec<u64> = self
                    .asked
                    .iter()
                    .filter(|(_, (_, asked))| matches!(asked, Asked::Report { .. }))
                    .map(|(id, _)| *id)
                    .collect();
                for id in kept {
                    if let Some((_, Asked::Report { lid, incarnation, evidence })) = self.asked.remove(&id) {
                        self.handle(now, ClientInput::Report { lid, incarnation, evidence });
                    }
                }
            }
            ClientInput::Up => {}
            ClientInput::Down if self.link != Link::Idle => self.on_down(now),
            ClientInput::Down => {}
            ClientInput::Message(message) => self.on_message(now, message),
            ClientInput::Ready(ready) => {
                if core::mem::replace(&mut self.ready, ready) != ready && self.link == Link::Up {
                    self.renew(now);
                }
            }
            ClientInput::Leave(to) => self.on_leave(now, to),
            ClientInput::Report { lid, incarnation, evidence } => {
                let asked = Asked::Report { lid: lid.clone(), incarnation, evidence };
                if self.link == Link::Up {
                    self.ask(now, Request::Report { lid, incarnation, evidence }, asked);
                } else {
                    let id = self.next_id;
                    self.next_id += 1;
                    self.asked.insert(id, (now, asked));
                }
            }
            ClientInput::Drain(lid) => self.ask(now, Request::Drain { lid }, Asked::Drain),
            ClientInput::Tick => self.on_tick(now),
        }
    }

    fn poll(&mut self) -> Option<ClientOutput> {
        self.outputs.pop_front()
    }

    fn deadline(&self) -> Option<Instant> {
        let retry = self.retry_at.filter(|_| self.link == Link::Idle);
        let renew = self.renew_at.filter(|_| self.link == Link::Up);
        let answer = (self.link == Link::Up)
            .then(|| self.asked.values().map(|(sent, _)| *sent + self.config.answer_within).min())
            .flatten();
        let unconfirmed = self.unconfirmed.values().min().copied().filter(|_| !self.away);
        [retry, renew, answer, unconfirmed].into_iter().flatten().min()
    }
}
