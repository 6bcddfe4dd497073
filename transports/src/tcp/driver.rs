//! The event loop: everything that happens to sockets, under one lock.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use connex_protocol::wire::bulk::{self, Bulk};
use connex_protocol::wire::hello::{Hello, Lane as LaneKind};
use connex_protocol::wire::{self, Control, Frame};
use connex_protocol::{Evidence, Incarnation};
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token, Waker};
use tokio::sync::oneshot;

use super::handshake::Dial;
use super::lane::{Flushed, Lane};
use super::link::{Link, Pending};
use super::reader::{Outcome, Sink};
use super::{Command, Shared, lead};
use crate::{Completion, Event, OpError};

const WAKER: Token = Token(0);
const LISTENER: Token = Token(1);

/// Bytes of one read call that are not meant for a destination of their own.
pub(super) const SCRATCH: usize = 64 << 10;

/// How much one connection writes before the others have their turn.
const FLUSH_BUDGET: usize = 4 << 20;

/// How long a connection that was closed on purpose waits for its peer to close too.
const LINGER: Duration = Duration::from_secs(1);

/// How long the control connection may take to follow the bulk one into its end.
const GRACE: Duration = Duration::from_millis(50);

/// The least that a started frame gains in each stall deadline.
const STALL_GAIN: u64 = 64 << 10;

/// How long to wait for a free descriptor before accepting again.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

pub(super) struct Driver {
    poll: Poll,
    events: Events,
    listener: Option<TcpListener>,
    pub(super) conns: HashMap<Token, Conn>,
    next_token: usize,
    pub(super) dials: HashMap<u64, Dial>,
    pub(super) next_dial: u64,
    /// Accepted connections that wait for the other one of their link.
    pub(super) halves: HashMap<(Incarnation, u64), Token>,
    /// Connections to look at without an event of their own.
    ready: VecDeque<Token>,
    /// Events that a panicking handler was not given.
    undelivered: VecDeque<Event>,
    handled: u64,
    next_timer: Option<Instant>,
    accept_at: Option<Instant>,
    pub(super) scratch: Vec<u8>,
    /// Since when the transport shuts down, and who waits for it.
    closing: Option<(Instant, Vec<oneshot::Sender<()>>)>,
    distrusted: bool,
}

/// One connection's receiving side.
pub(super) struct Conn {
    pub(super) lane: Arc<Lane>,
    pub(super) kind: LaneKind,
    pub(super) phase: Phase,
    /// The beginning of something that is not whole yet.
    pub(super) carry: Vec<u8>,
    pub(super) sink: Sink,
    pub(super) received: u64,
    stall: Option<(Instant, u64)>,
    scheduled: bool,
    /// The last event said that the peer has closed, or that there is an error: it shows at the end of the data.
    pub(super) hung_up: bool,
    /// What was carried over is to be looked at before anything is read.
    pub(super) kept: bool,
    /// The peer's write that is arriving, and whether it is refused.
    pub(super) incoming: Option<super::reader::Incoming>,
    /// When to give up on this connection, whatever its phase.
    pub(super) deadline: Option<Instant>,
}

pub(super) enum Phase {
    Connecting {
        dial: u64,
    },
    /// Waits for the other side's hello.
    Greeting {
        dial: Option<u64>,
    },
    /// Waits for the other connection of its link.
    Half {
        dial: Option<u64>,
        hello: Box<Hello>,
    },
    Up(Arc<Link>),
    /// Closed on this side; what still arrives is dropped.
    Lingering,
}

impl Driver {
    pub(super) fn new(mut listener: TcpListener) -> io::Result<Self> {
        let poll = Poll::new()?;
        poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
        Ok(Driver {
            poll,
            events: Events::with_capacity(256),
            listener: Some(listener),
            conns: HashMap::new(),
            next_token: 2,
            dials: HashMap::new(),
            next_dial: 1,
            halves: HashMap::new(),
            ready: VecDeque::new(),
            undelivered: VecDeque::new(),
            handled: 0,
            next_timer: None,
            accept_at: None,
            scratch: vec![0; SCRATCH],
            closing: None,
            distrusted: false,
        })
    }

    pub(super) fn waker(&self) -> io::Result<Waker> {
        Waker::new(self.poll.registry(), WAKER)
    }

    /// Waits for something to happen, for `wait` at most, and lets it happen; whether the handler was called.
    pub(super) fn pass(&mut self, shared: &Shared, wait: Option<Duration>) -> bool {
        let before = self.handled;
        if std::mem::take(&mut self.distrusted) {
            self.start_over(shared);
        }
        while !shared.lead.failed()
            && let Some(event) = self.undelivered.pop_front()
        {
            self.call(shared, event);
        }
        self.run_commands(shared);
        let idle = self.handled == before && self.ready.is_empty();
        self.wait(shared, if idle { wait } else { Some(Duration::ZERO) });
        for _ in 0..self.ready.len() {
            if shared.lead.failed() {
                break;
            }
            let Some(token) = self.ready.pop_front() else { break };
            self.service(shared, token);
        }
        self.run_timers(shared);
        self.handled != before
    }

    /// Lets the operating system say which connections have news, and puts them among the ready.
    fn wait(&mut self, shared: &Shared, wait: Option<Duration>) {
        let now = Instant::now();
        let wanted = wait.is_none() && shared.lead.wanted();
        let deadline = shared.first_deadline.load(Ordering::SeqCst);
        let timers = [self.next_timer, self.accept_at, self.closing.as_ref().map(|(until, _)| *until)];
        let mut until = wait.and_then(|wait| now.checked_add(wait)).map_or(u64::MAX, |at| shared.nanos(at));
        until = timers.into_iter().flatten().map(|at| shared.nanos(at)).fold(until.min(deadline), u64::min);
        let sleeps = wait != Some(Duration::ZERO) && !wanted;
        let mut timeout =
            (until != u64::MAX).then(|| Duration::from_nanos(until.saturating_sub(shared.nanos(now))));
        if sleeps {
            shared.sleeps_until.store(until, Ordering::SeqCst);
            // An operation or a borrower that came before this store found nobody to wake.
            if shared.first_deadline.load(Ordering::SeqCst) < until
                || (wait.is_none() && shared.lead.wanted())
            {
                timeout = Some(Duration::ZERO);
            }
        } else {
            timeout = Some(Duration::ZERO);
        }
        self.poll_for(wait.is_some(), timeout);
        if sleeps {
            shared.sleeps_until.store(0, Ordering::SeqCst);
            shared.lead.count_wakeup();
        }
        let mut accept = self.accept_at.is_some_and(|at| at <= Instant::now());
        for event in &self.events {
            match event.token() {
                WAKER => {}
                LISTENER => accept = true,
                token => {
                    let Some(conn) = self.conns.get_mut(&token) else { continue };
                    conn.hung_up |= event.is_read_closed() || event.is_error();
                    if !std::mem::replace(&mut conn.scheduled, true) {
                        self.ready.push_back(token);
                    }
                }
            }
        }
        if accept {
            self.accept(shared);
        }
    }

    /// The operating system's clock for this has whole milliseconds: a borrower's shorter waits are spun.
    fn poll_for(&mut self, spin: bool, timeout: Option<Duration>) {
        let fine = timeout.filter(|timeout| spin && *timeout < Duration::from_millis(1));
        let until = fine.map(|timeout| Instant::now() + timeout);
        loop {
            let timeout = if until.is_some() { Some(Duration::ZERO) } else { timeout };
            // The only failure is an interruption by a signal: the next pass looks again.
            let _ = self.poll.poll(&mut self.events, timeout);
            if !self.events.is_empty() || until.is_none_or(|until| Instant::now() >= until) {
                return;
            }
        }
    }

    pub(super) fn schedule(&mut self, token: Token) {
        if let Some(conn) = self.conns.get_mut(&token)
            && !conn.scheduled
        {
            conn.scheduled = true;
            self.ready.push_back(token);
        }
    }

    fn service(&mut self, shared: &Shared, token: Token) {
        let Some(mut conn) = self.conns.remove(&token) else { return };
        conn.scheduled = false;
        if let Phase::Connecting { .. } = conn.phase {
            return self.on_writable(shared, conn);
        }
        let flushed = conn.lane.flush(FLUSH_BUDGET);
        let outcome = self.read(shared, &mut conn);
        self.watch_for_stalls(shared, &mut conn);
        self.conns.insert(token, conn);
        if flushed == Flushed::More || outcome == Outcome::More {
            self.schedule(token);
        }
        match outcome {
            Outcome::Drained | Outcome::More => {}
            Outcome::Greeted => self.pair(shared, token),
            Outcome::Ended(evidence) => self.conn_ended(shared, token, evidence),
        }
    }

    fn watch_for_stalls(&mut self, shared: &Shared, conn: &mut Conn) {
        let begun = !conn.carry.is_empty() || conn.sink.is_open();
        if !begun || !matches!(conn.phase, Phase::Up(_)) {
            conn.stall = None;
        } else if conn.stall.is_none() {
            let at = Instant::now() + shared.config.stall_deadline;
            conn.stall = Some((at, conn.received));
            self.at(at);
        }
    }

    /// Registers a socket as a connection that has begun to be one.
    pub(super) fn add(
        &mut self,
        mut stream: TcpStream,
        kind: LaneKind,
        phase: Phase,
        deadline: Instant,
    ) -> io::Result<Token> {
        // Small frames must not wait for the acknowledgement of earlier ones.
        let _ = stream.set_nodelay(true);
        let token = Token(self.next_token);
        self.next_token += 1;
        self.poll.registry().register(&mut stream, token, Interest::READABLE | Interest::WRITABLE)?;
        let conn = Conn {
            lane: Arc::new(Lane::new(stream, token)),
            kind,
            phase,
            carry: Vec::new(),
            sink: Sink::Closed,
            received: 0,
            stall: None,
            scheduled: false,
            hung_up: false,
            kept: false,
            incoming: None,
            deadline: Some(deadline),
        };
        self.conns.insert(token, conn);
        self.at(deadline);
        Ok(token)
    }

    fn accept(&mut self, shared: &Shared) {
        self.accept_at = None;
        let Some(listener) = self.listener.take() else { return };
        loop {
            match listener.accept() {
                Ok((stream, _)) => self.on_accepted(shared, stream),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // The peer gave up already.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    // No descriptor or memory to be had; nobody tells when there is.
                    self.accept_at = Some(Instant::now() + ACCEPT_AGAIN);
                    break;
                }
            }
        }
        self.listener = Some(listener);
    }

    fn run_commands(&mut self, shared: &Shared) {
        loop {
            let command = shared.commands.lock().expect("nothing under this lock panics").pop_front();
            let Some(command) = command else { return };
            match command {
                Command::Dial { address, expects } => self.dial(shared, address, expects),
                Command::Resolved { dial, found } => self.on_resolved(shared, dial, found),
                Command::Confirm { peer, answer } => {
                    if let Some(peer) = shared.with_link(peer, |link| link.peer.clone()) {
                        let _ = answer.send(Ok(peer));
                    }
                }
                Command::Disconnect(peer) => {
                    for link in links_of(shared, peer) {
                        self.part(shared, &link, &Control::Goodbye, Evidence::Left);
                    }
                }
                Command::Fence(peer) => {
                    for link in links_of(shared, peer) {
                        self.part(shared, &link, &Control::Fenced, Evidence::Superseded);
                    }
                }
                Command::Shutdown(done) => self.shut_down(shared, done),
            }
        }
    }

    fn shut_down(&mut self, shared: &Shared, done: oneshot::Sender<()>) {
        if let Some((_, waiting)) = &mut self.closing {
            return waiting.push(done);
        }
        self.listener = None;
        let peers: Vec<Incarnation> =
            shared.peers.read().expect("nothing under this lock panics").keys().copied().collect();
        for peer in peers {
            for link in links_of(shared, peer) {
                self.part(shared, &link, &Control::Goodbye, Evidence::Left);
            }
        }
        self.closing = Some((Instant::now() + LINGER / 2, vec![done]));
    }

    /// Ends a link from this side: a last word, then no more; the sockets close when the peer has read it.
    fn part(&mut self, shared: &Shared, link: &Arc<Link>, word: &Control, evidence: Evidence) {
        let frame = wire::encode(link.own, link.peer.incarnation, &Frame::Control(word.clone()));
        let _ = link.control.post(frame, usize::MAX);
        let until = Instant::now() + LINGER;
        for lane in [&link.control, &link.bulk] {
            lane.finish();
            if let Some(conn) = self.conns.get_mut(&lane.token) {
                let sink = std::mem::replace(&mut conn.sink, Sink::Closed);
                conn.phase = Phase::Lingering;
                conn.deadline = Some(until);
                conn.carry.clear();
                self.at(until);
                self.schedule(lane.token);
                self.put_back(link, sink);
            }
        }
        self.end_link(shared, link, evidence);
    }

    /// A read whose bytes were arriving is among its link's operations again.
    fn put_back(&self, link: &Link, sink: Sink) {
        if let Sink::Read { no, pending, .. } = sink {
            link.operations().table.insert(no, pending);
        }
    }

    /// A connection is at its end.
    pub(super) fn conn_ended(&mut self, shared: &Shared, token: Token, evidence: Evidence) {
        let Some(conn) = self.conns.remove(&token) else { return };
        let link = match conn.phase {
            Phase::Up(link) => link,
            Phase::Connecting { dial }
            | Phase::Greeting { dial: Some(dial) }
            | Phase::Half { dial: Some(dial), .. } => {
                return self.dial_lost(shared, dial);
            }
            Phase::Half { dial: None, hello } => {
                self.halves.remove(&(hello.peer.incarnation, hello.link));
                return;
            }
            Phase::Greeting { dial: None } | Phase::Lingering => return,
        };
        conn.lane.close();
        self.put_back(&link, conn.sink);
        if evidence == Evidence::ProtocolViolation {
            return self.end_link(shared, &link, evidence);
        }
        // What arrived before the end is still handled: frames, completions, and a goodbye.
        let other = if conn.kind == LaneKind::Control { link.bulk.token } else { link.control.token };
        let mut evidence = evidence;
        if let Some(mut last) = self.conns.remove(&other) {
            let outcome = loop {
                match self.read(shared, &mut last) {
                    Outcome::More => {}
                    outcome => break outcome,
                }
            };
            let open = outcome == Outcome::Drained;
            if let Outcome::Ended(Evidence::ConnectionReset) = outcome {
                evidence = Evidence::ConnectionReset;
            }
            if open && last.kind == LaneKind::Control && !link.left.load(Ordering::Acquire) {
                // Its goodbye may be a moment behind.
                let until = Instant::now() + GRACE;
                last.deadline = Some(until);
                self.at(until);
                self.conns.insert(other, last);
                return;
            }
            self.put_back(&link, std::mem::replace(&mut last.sink, Sink::Closed));
        }
        self.end_link(shared, &link, link.evidence(evidence));
    }

    /// Ends a link: its operations complete, then the handler hears of it.
    pub(super) fn end_link(&mut self, shared: &Shared, link: &Arc<Link>, evidence: Evidence) {
        for lane in [&link.control, &link.bulk] {
            let lingers =
                self.conns.get(&lane.token).is_some_and(|conn| matches!(conn.phase, Phase::Lingering));
            if lingers {
                continue;
            }
            if let Some(conn) = self.conns.remove(&lane.token) {
                self.put_back(link, conn.sink);
            }
            lane.close();
        }
        let life = link.peer.incarnation;
        let mut peers = shared.peers.write().expect("nothing under this lock panics");
        let mut known = false;
        let mut others = false;
        if let Some(links) = peers.get_mut(&life) {
            let before = links.len();
            links.retain(|other| !Arc::ptr_eq(other, link));
            known = links.len() < before;
            others = !links.is_empty();
        }
        if known && !others {
            peers.remove(&life);
        }
        drop(peers);
        let pending = link.operations().close();
        for Pending { id, .. } in pending {
            let result = Err(OpError::LinkDown(evidence));
            self.emit(shared, Event::Completed(Completion { id, peer: life, result }));
        }
        let peer = link.peer.clone();
        if known && others {
            self.emit(shared, Event::Relinked { peer });
        } else if known {
            shared.known.lock().expect("nothing under this lock panics").retain(|_, known| *known != life);
            self.emit(shared, Event::Down { peer, evidence });
        }
    }

    /// Gives an event to the handler, unless it has to wait for a restart.
    pub(super) fn emit(&mut self, shared: &Shared, event: Event) {
        if shared.lead.failed() || !self.undelivered.is_empty() {
            self.undelivered.push_back(event);
        } else {
            self.call(shared, event);
        }
    }

    fn call(&mut self, shared: &Shared, event: Event) {
        self.handled += 1;
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| shared.handler.handle(event))) {
            lead::fail(shared, panic.as_ref());
        }
    }

    /// Looks at the timers at `at`, at the latest.
    pub(super) fn at(&mut self, at: Instant) {
        self.next_timer = Some(self.next_timer.map_or(at, |next| next.min(at)));
    }

    fn run_timers(&mut self, shared: &Shared) {
        let now = Instant::now();
        if self.next_timer.is_some_and(|at| at <= now) {
            self.next_timer = None;
            self.expire_conns(shared, now);
            self.expire_dials(shared, now);
        }
        if shared.first_deadline.load(Ordering::SeqCst) <= shared.nanos(now) {
            self.expire_operations(shared, now);
        }
        let lingering =
            |driver: &Driver| driver.conns.values().any(|conn| matches!(conn.phase, Phase::Lingering));
        if let Some((until, _)) = &self.closing
            && (*until <= now || !lingering(self))
        {
            shared.lead.stop();
        }
    }

    fn expire_conns(&mut self, shared: &Shared, now: Instant) {
        let mut late = Vec::new();
        let mut next = self.next_timer;
        let mut note = |at: Instant| next = Some(next.map_or(at, |next| next.min(at)));
        for (token, conn) in &mut self.conns {
            match conn.deadline {
                Some(deadline) if deadline <= now => late.push((*token, conn.lost())),
                Some(deadline) => note(deadline),
                None => {}
            }
            match conn.stall {
                Some((deadline, from)) if deadline <= now => {
                    if conn.received - from < STALL_GAIN {
                        late.push((*token, Evidence::ProtocolViolation));
                    } else {
                        let at = now + shared.config.stall_deadline;
                        conn.stall = Some((at, conn.received));
                        note(at);
                    }
                }
                Some((deadline, _)) => note(deadline),
                None => {}
            }
        }
        self.next_timer = next;
        for (token, evidence) in late {
            self.conn_ended(shared, token, evidence);
        }
    }

    fn expire_operations(&mut self, shared: &Shared, now: Instant) {
        shared.first_deadline.store(u64::MAX, Ordering::SeqCst);
        let links: Vec<Arc<Link>> = shared
            .peers
            .read()
            .expect("nothing under this lock panics")
            .values()
            .flatten()
            .cloned()
            .collect();
        let mut first = u64::MAX;
        for link in links {
            let mut expired = Vec::new();
            for (no, pending) in &link.operations().table {
                if pending.deadline <= now {
                    expired.push(*no);
                } else {
                    first = first.min(shared.nanos(pending.deadline));
                }
            }
            let mut ended: Vec<(u64, Pending)> = expired
                .into_iter()
                .filter_map(|no| link.operations().table.remove(&no).map(|pending| (no, pending)))
                .collect();
            // The one whose bytes are arriving just now: the rest of them is dropped.
            if let Some(conn) = self.conns.get_mut(&link.bulk.token)
                && let Sink::Read { pending, left, .. } = &conn.sink
            {
                if pending.deadline <= now {
                    let left = *left;
                    if let Sink::Read { no, pending, .. } =
                        std::mem::replace(&mut conn.sink, Sink::Discard { left })
                    {
                        ended.push((no, pending));
                    }
                } else {
                    first = first.min(shared.nanos(pending.deadline));
                }
            }
            ended.sort_unstable_by_key(|(no, _)| *no);
            for (no, pending) in ended {
                if pending.read.is_some() {
                    link.bulk.tell(bulk::encode(
                        link.own,
                        link.peer.incarnation,
                        &Bulk::Cancel { op: no },
                        0,
                    ));
                } else {
                    link.bulk.forget_write(no);
                }
                let (peer, result) = (link.peer.incarnation, Err(OpError::TimedOut));
                self.emit(shared, Event::Completed(Completion { id: pending.id, peer, result }));
            }
        }
        shared.first_deadline.fetch_min(first, Ordering::SeqCst);
    }

    /// The driver itself panicked: every link is given up at the next pass, so that nothing goes on half done.
    pub(super) fn distrust(&mut self) {
        self.distrusted = true;
    }

    fn start_over(&mut self, shared: &Shared) {
        let links: Vec<Arc<Link>> = shared
            .peers
            .read()
            .expect("nothing under this lock panics")
            .values()
            .flatten()
            .cloned()
            .collect();
        for link in links {
            self.end_link(shared, &link, Evidence::ConnectionReset);
        }
        self.conns.clear();
        self.halves.clear();
        self.ready.clear();
        self.scratch.resize(SCRATCH, 0);
        let dials: Vec<u64> = self.dials.keys().copied().collect();
        for dial in dials {
            self.dial_lost(shared, dial);
        }
    }

    /// Closes everything without a word.
    pub(super) fn teardown(&mut self, shared: &Shared) {
        self.listener = None;
        for (_, conn) in self.conns.drain() {
            conn.lane.close();
        }
        let links = std::mem::take(&mut *shared.peers.write().expect("nothing under this lock panics"));
        for link in links.into_values().flatten() {
            link.control.close();
            link.bulk.close();
        }
        self.dials.clear();
        self.closing = None;
    }
}

impl Conn {
    /// What it means that this connection's deadline has passed.
    fn lost(&self) -> Evidence {
        match &self.phase {
            // Its bulk connection ended, and no goodbye followed.
            Phase::Up(_) => Evidence::ConnectionClosed,
            _ => Evidence::ProtocolViolation,
        }
    }
}

pub(super) fn links_of(shared: &Shared, peer: Incarnation) -> Vec<Arc<Link>> {
    let peers = shared.peers.read().expect("nothing under this lock panics");
    peers.get(&peer).cloned().unwrap_or_default()
}
