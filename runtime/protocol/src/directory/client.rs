use alloc::collections::{BTreeMap, VecDeque};
use alloc::string::ToString;
use alloc::vec::Vec;
use core::time::Duration;

use super::registration::{Grant, Registrant, Registration, TTL_MAX, TTL_MIN, Told};
use super::routes::{Heard, RouteCache};
use crate::wire::directory::{Change, Message, Refusal, Request, Response, Route, Seen};
use crate::{Epoch, Evidence, Incarnation, Instant, LogicalId, Machine};

/// A directory's lease, until it says how long that is.
const TTL_UNKNOWN: Duration = Duration::from_secs(2);

/// A client's habits and limits.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// How long a response is waited for; then the link is given up.
    pub answer_within: Duration,
    /// How long a connection may take; longer than the transport itself waits.
    pub connect_within: Duration,
    /// The first pause between attempts to connect; it doubles up to `backoff_max` until a watch has begun.
    pub backoff: Duration,
    /// The longest pause.
    pub backoff_max: Duration,
    /// Routes at most; a directory that names more is not believed.
    pub routes_max: usize,
    /// Reports and requests to drain that wait for the directory at most.
    pub commands_max: usize,
}

impl Default for ClientConfig {
    fn default() -> Self {
        ClientConfig {
            answer_within: Duration::from_millis(500),
            connect_within: Duration::from_secs(5),
            backoff: Duration::from_millis(20),
            backoff_max: Duration::from_millis(500),
            routes_max: 200_000,
            commands_max: 1024,
        }
    }
}

/// What happens to a client.
#[derive(Clone, Debug)]
pub enum ClientInput {
    /// Begin; or begin to listen again, after messages may have been lost on their way to this machine.
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
    /// The routes are the directory's as it sees them now.
    Watching,
    /// The identity is held under this epoch.
    Registered(Epoch),
    /// The directory knows this life as the shadow of this holder.
    Shadowing(Route),
    /// The identity could not be registered now; the client tries again.
    Refused(Refusal),
    /// The identity is another's, or the directory ended its lease and told everybody: peers refuse this life from
    /// now on. Serving it again takes a new incarnation.
    Lost,
    /// The identity is given up.
    Left,
    /// The shadow that it was to go to is not there: it is held on.
    Kept(Epoch),
    /// The request to drain this endpoint was answered.
    Drained(LogicalId, Result<(), Refusal>),
    /// The directory is out of reach; the routes known go on.
    Away,
    /// It is back.
    Back,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    /// Nothing is under way until this moment; `None` before the start.
    Idle(Option<Instant>),
    /// A connection is being made, until this moment at most.
    Connecting(Instant),
    Up,
}

/// What must reach the directory even if the link breaks.
#[derive(Clone, Debug)]
enum Command {
    Report { lid: LogicalId, incarnation: Incarnation, evidence: Evidence },
    Drain { lid: LogicalId, of: Option<Incarnation> },
}

enum Asked {
    Register,
    Renew,
    Leave,
    Watch,
    Command(Command),
}

/// A node's side of the directory: registers and renews, watches without a gap, and keeps the routes it knows while
/// the directory is away.
///
/// | the link is | up arrives | down arrives | no answer in time | the pause is over |
/// | --- | --- | --- | --- | --- |
/// | idle | up: watch and register | – | – | connecting |
/// | connecting | up: watch and register | idle, for a longer pause | idle, for a longer pause | – |
/// | up | – | idle: the directory is away | idle: the link is given up, the directory is away | – |
pub struct Client {
    config: ClientConfig,
    random: u64,
    link: Link,
    away: bool,
    backoff: Duration,
    next_id: u64,
    /// The open questions, by the order in which they were asked.
    asked: BTreeMap<u64, (Instant, Asked)>,
    commands: VecDeque<Command>,
    /// The greatest boot number heard of.
    boot: u64,
    cache: RouteCache,
    /// When to ask for a watch again that was refused.
    watch_at: Option<Instant>,
    /// When to watch on for no other reason than to hear an answer, and to be heard.
    check_at: Option<Instant>,
    /// The directory's lease.
    ttl: Duration,
    registration: Option<Registration>,
    outputs: VecDeque<ClientOutput>,
}

impl Client {
    /// A client that registers `registrant`, or only watches; `random` seeds its jitter.
    pub fn new(config: ClientConfig, registrant: Option<Registrant>, random: u64) -> Self {
        Client {
            cache: RouteCache::new(config.routes_max),
            backoff: config.backoff,
            config,
            random,
            link: Link::Idle(None),
            away: false,
            next_id: 1,
            asked: BTreeMap::new(),
            commands: VecDeque::new(),
            boot: 0,
            watch_at: None,
            check_at: None,
            ttl: TTL_UNKNOWN,
            registration: registrant.map(Registration::new),
            outputs: VecDeque::new(),
        }
    }

    /// The routes, as last heard.
    pub fn routes(&self) -> impl Iterator<Item = &Route> {
        self.cache.iter()
    }

    /// The epoch, while its lease is certain: nobody else can hold the identity at `now`.
    pub fn epoch(&self, now: Instant) -> Option<Epoch> {
        self.registration.as_ref().and_then(|registration| registration.epoch(now))
    }

    fn ask(&mut self, now: Instant, request: Request, asked: Asked) {
        let id = self.next_id;
        self.next_id += 1;
        self.asked.insert(id, (now, asked));
        self.outputs.push_back(ClientOutput::Send(Message::Request { id, request }));
    }

    fn watch(&mut self, now: Instant) {
        let boot = self.boot;
        let after = self.cache.seen().map(|(life, revision)| Seen { life, boot, revision });
        (self.watch_at, self.check_at) = (None, None);
        self.ask(now, Request::Watch { after }, Asked::Watch);
    }

    fn is_asking_to_watch(&self) -> bool {
        self.asked.values().any(|(_, asked)| matches!(asked, Asked::Watch))
    }

    /// Asks what is due: the registration's next request, and what waited for the link.
    fn ask_what_is_due(&mut self, now: Instant) {
        if self.link != Link::Up {
            return;
        }
        if let Some(request) = self.registration.as_mut().and_then(|registration| registration.request(now)) {
            let asked = match &request {
                Request::Renew { .. } => Asked::Renew,
                Request::Leave { .. } => Asked::Leave,
                _ => Asked::Register,
            };
            self.ask(now, request, asked);
        }
        if [self.watch_at, self.check_at].into_iter().flatten().any(|at| at <= now) {
            self.watch(now);
        }
        while let Some(command) = self.commands.pop_front() {
            let request = match command.clone() {
                Command::Report { lid, incarnation, evidence } => {
                    Request::Report { lid, incarnation, evidence }
                }
                Command::Drain { lid, of } => Request::Drain { lid, of },
            };
            self.ask(now, request, Asked::Command(command));
        }
    }

    fn connect(&mut self, now: Instant) {
        self.link = Link::Connecting(now + self.config.connect_within);
        self.outputs.push_back(ClientOutput::Connect);
    }

    fn on_start(&mut self, now: Instant) {
        match self.link {
            Link::Idle(None) => self.connect(now),
            Link::Idle(Some(_)) | Link::Connecting(_) => {}
            Link::Up if self.is_asking_to_watch() => {}
            Link::Up => self.watch(now),
        }
    }

    fn on_up(&mut self, now: Instant) {
        self.link = Link::Up;
        self.cache.on_link();
        self.watch(now);
        if let Some(registration) = &mut self.registration {
            registration.on_link(now);
        }
    }

    fn on_down(&mut self, now: Instant) {
        let pause = jitter(&mut self.random, self.backoff);
        self.link = Link::Idle(Some(now + pause));
        self.backoff = (self.backoff * 2).min(self.config.backoff_max);
        (self.watch_at, self.check_at) = (None, None);
        // The registration and the watch are asked anew with the next link; commands must not be lost with this one.
        let unanswered: Vec<Command> = core::mem::take(&mut self.asked)
            .into_values()
            .filter_map(|(_, asked)| match asked {
                Asked::Command(command) => Some(command),
                _ => None,
            })
            .collect();
        for command in unanswered.into_iter().rev() {
            self.commands.push_front(command);
        }
        if !self.away {
            self.away = true;
            self.outputs.push_back(ClientOutput::Away);
        }
    }

    fn give_the_link_up(&mut self, now: Instant) {
        self.outputs.push_back(ClientOutput::Disconnect);
        self.on_down(now);
    }

    fn on_message(&mut self, now: Instant, message: Message) {
        match message {
            // What a link that was given up still brings is nobody's.
            _ if self.link != Link::Up => {}
            Message::Event { life, revision, change } => {
                let heard = self.cache.on_event(life, revision, change);
                self.on_heard(now, heard);
            }
            Message::Snapshot { life, revision, routes, last } => {
                let heard = self.cache.on_part(now, self.grace(), (life, revision), routes, last);
                self.on_heard(now, heard);
            }
            Message::Response { id, life, boot, revision, response } => {
                // An answer to a question that is not open is nobody's: it is matched by its id alone.
                let Some((sent, asked)) = self.asked.remove(&id) else { return };
                self.boot = self.boot.max(boot);
                self.on_back(now);
                self.check_at = Some(now + jitter(&mut self.random, self.ttl * 3 / 8));
                let gap = !matches!(asked, Asked::Watch) && !self.cache.is_at(life, revision);
                self.on_response(now, Answer { sent, life }, asked, response);
                // A watcher has been sent everything up to the revision of an answer.
                if gap && self.link == Link::Up && self.watch_at.is_none() && !self.is_asking_to_watch() {
                    self.watch(now);
                }
            }
            Message::Request { .. } => {}
        }
    }

    /// For how long a route is believed that a restarted directory has not named.
    fn grace(&self) -> Duration {
        self.ttl * 2
    }

    fn on_back(&mut self, now: Instant) {
        if self.away {
            self.away = false;
            self.outputs.push_back(ClientOutput::Back);
            let grace = self.grace();
            self.cache.excuse(now, grace);
        }
    }

    fn on_heard(&mut self, now: Instant, heard: Heard) {
        match heard {
            Heard::Changes(changes) => self.pass_on(now, changes),
            // The watch that is being asked for fills it.
            Heard::Gap if self.is_asking_to_watch() => {}
            Heard::Gap => self.watch(now),
            Heard::TooMuch => self.give_the_link_up(now),
        }
    }

    fn pass_on(&mut self, now: Instant, changes: Vec<Change>) {
        for change in changes {
            let random = &mut self.random;
            let told = match &mut self.registration {
                Some(registration) => registration.on_change(now, &change, |most| jitter(random, most)),
                None => Told::Nothing,
            };
            self.outputs.push_back(ClientOutput::Change(change));
            self.on_told(now, told);
        }
    }

    fn on_response(&mut self, now: Instant, answer: Answer, asked: Asked, response: Response) {
        match (asked, response) {
            (Asked::Watch, Response::Watching { ttl_ms }) => {
                self.ttl = Duration::from_millis(ttl_ms).clamp(TTL_MIN, TTL_MAX);
                // The link is of use: the next one that fails starts with a short pause.
                self.backoff = self.config.backoff;
                self.outputs.push_back(ClientOutput::Watching);
            }
            (Asked::Watch, _) => {
                self.watch_at = Some(now + jitter(&mut self.random, self.config.backoff_max * 2))
            }
            (Asked::Command(Command::Drain { lid, .. }), Response::Refused(refusal)) => {
                self.outputs.push_back(ClientOutput::Drained(lid, Err(refusal)));
            }
            (Asked::Command(Command::Drain { lid, .. }), _) => {
                self.outputs.push_back(ClientOutput::Drained(lid, Ok(())));
            }
            (Asked::Command(Command::Report { .. }), _) => {}
            (asked, response) => self.on_own_response(now, answer, asked, response),
        }
    }

    /// An answer that concerns one's own identity.
    fn on_own_response(&mut self, now: Instant, answer: Answer, asked: Asked, response: Response) {
        let Some(registration) = &mut self.registration else { return };
        let random = &mut self.random;
        let pause = |most| jitter(random, most);
        let told = match (asked, response) {
            (Asked::Leave, Response::Done) => registration.on_left(),
            (_, Response::Refused(refusal)) => registration.on_refused(now, refusal, pause),
            (asked @ (Asked::Register | Asked::Renew), Response::Granted { epoch, ttl_ms }) => {
                let ttl = Duration::from_millis(ttl_ms);
                let registered = matches!(asked, Asked::Register);
                let grant = Grant { sent: answer.sent, life: answer.life, epoch, ttl, registered };
                registration.on_granted(now, grant, pause)
            }
            (Asked::Register, Response::Shadowing { holder }) => {
                registration.on_shadowing(now, holder, pause)
            }
            // A directory that answers another question than was asked is not one.
            _ => return self.give_the_link_up(now),
        };
        self.on_told(now, told);
    }

    fn on_told(&mut self, now: Instant, told: Told) {
        match told {
            Told::Nothing => {}
            Told::Registered(epoch) => {
                self.outputs.push_back(ClientOutput::Registered(epoch));
                self.drain_again(now);
            }
            Told::Shadowing(holder) => self.outputs.push_back(ClientOutput::Shadowing(holder)),
            Told::Refused(refusal) => self.outputs.push_back(ClientOutput::Refused(refusal)),
            Told::Lost => self.outputs.push_back(ClientOutput::Lost),
            Told::Left => self.outputs.push_back(ClientOutput::Left),
            Told::Kept(epoch) => self.outputs.push_back(ClientOutput::Kept(epoch)),
        }
    }

    /// A directory that has just granted the identity does not know that it was draining.
    fn drain_again(&mut self, now: Instant) {
        if let Some(registration) = &self.registration
            && registration.is_draining()
        {
            let who = registration.who();
            let (lid, of) = (who.lid.clone(), Some(who.incarnation));
            self.command(now, Command::Drain { lid, of });
        }
    }

    fn command(&mut self, now: Instant, command: Command) {
        let open = self.asked.len() + self.commands.len();
        if open < self.config.commands_max {
            self.commands.push_back(command);
            return self.ask_what_is_due(now);
        }
        match command {
            Command::Drain { lid, .. } => {
                let refusal = Refusal::Full { what: "requests that wait for the directory".to_string() };
                self.outputs.push_back(ClientOutput::Drained(lid, Err(refusal)));
            }
            // What was seen is advice, or is seen by the lease as well.
            Command::Report { .. } => {}
        }
    }

    fn on_leave(&mut self, now: Instant, to: Option<Incarnation>) {
        let linked = self.link == Link::Up;
        match &mut self.registration {
            None => self.outputs.push_back(ClientOutput::Left),
            Some(registration) => {
                let told = registration.leave(now, to, linked);
                self.on_told(now, told);
            }
        }
    }

    /// A zombie's wish to be drained must not touch its successor: for oneself only oneself is meant.
    fn on_drain(&mut self, now: Instant, lid: LogicalId) {
        let own = self.registration.as_ref().map(Registration::who).filter(|who| who.lid == lid);
        let of = own.map(|who| who.incarnation);
        self.command(now, Command::Drain { lid, of });
    }

    fn on_tick(&mut self, now: Instant) {
        match self.link {
            Link::Idle(Some(at)) if at <= now => self.connect(now),
            Link::Connecting(until) if until <= now => self.give_the_link_up(now),
            Link::Up
                if self
                    .asked
                    .values()
                    .next()
                    .is_some_and(|(sent, _)| *sent + self.config.answer_within <= now) =>
            {
                self.give_the_link_up(now);
            }
            _ => {}
        }
        // While the directory is away nobody can register again, so nobody is dropped for not having done so.
        if !self.away {
            let changes = self.cache.on_tick(now);
            self.pass_on(now, changes);
        }
    }
}

/// When the request was sent, and which directory answers.
struct Answer {
    sent: Instant,
    life: Incarnation,
}

/// Between a half and the whole of `most`, so that many clients don't act as one.
fn jitter(random: &mut u64, most: Duration) -> Duration {
    *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    most / 2 + most / 2 * ((*random >> 33) as u32 % 1024) / 1024
}

impl Machine for Client {
    type Input = ClientInput;
    type Output = ClientOutput;

    fn handle(&mut self, now: Instant, input: ClientInput) {
        match input {
            ClientInput::Start => self.on_start(now),
            ClientInput::Up if self.link != Link::Up => self.on_up(now),
            ClientInput::Up => {}
            ClientInput::Down if !matches!(self.link, Link::Idle(_)) => self.on_down(now),
            ClientInput::Down => {}
            ClientInput::Message(message) => self.on_message(now, message),
            ClientInput::Ready(ready) => {
                if let Some(registration) = &mut self.registration {
                    registration.set_ready(now, ready);
                }
            }
            ClientInput::Leave(to) => self.on_leave(now, to),
            ClientInput::Report { lid, incarnation, evidence } => {
                self.command(now, Command::Report { lid, incarnation, evidence });
            }
            ClientInput::Drain(lid) => self.on_drain(now, lid),
            ClientInput::Tick => self.on_tick(now),
        }
        self.ask_what_is_due(now);
        let bound = self.config.commands_max + 8;
        assert!(self.asked.len() + self.commands.len() <= bound, "the open questions are bounded");
    }

    fn poll(&mut self) -> Option<ClientOutput> {
        self.outputs.pop_front()
    }

    fn deadline(&self) -> Option<Instant> {
        let link = match self.link {
            Link::Idle(at) => at,
            Link::Connecting(until) => Some(until),
            Link::Up => self.asked.values().next().map(|(sent, _)| *sent + self.config.answer_within),
        };
        let registration = self.registration.as_ref().and_then(|registration| registration.due);
        let due = [registration, self.watch_at, self.check_at]
            .into_iter()
            .flatten()
            .min()
            .filter(|_| self.link == Link::Up);
        let unconfirmed = self.cache.deadline().filter(|_| !self.away);
        [link, due, unconfirmed].into_iter().flatten().min()
    }
}
