//! The event loop: everything that happens to sockets, under one lock.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use connex_protocol::wire::Control;
use connex_protocol::wire::hello::{Hello, Lane as LaneKind};
use connex_protocol::{Address, Evidence, Incarnation};
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token, Waker};
use tokio::sync::oneshot;

use super::ends::links_of;
use super::handshake::{Dial, Pace};
use super::lane::{Flushed, Lane};
use super::link::Link;
use super::reader::{Outcome, Sink};
use super::{Command, Shared, lead};
use crate::Event;

const WAKER: Token = Token(0);
const LISTENER: Token = Token(1);

/// Bytes of one read call that are not meant for a destination of their own.
pub(super) const SCRATCH: usize = 64 << 10;

/// How much one connection writes before the others have their turn.
const FLUSH_BUDGET: usize = 4 << 20;

/// How long to wait for a free descriptor before accepting again.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

pub(super) struct Driver {
    poll: Poll,
    events: Events,
    pub(super) listener: Option<TcpListener>,
    pub(super) conns: HashMap<Token, Conn>,
    next_token: usize,
    pub(super) dials: HashMap<u64, Dial>,
    pub(super) next_dial: u64,
    pub(super) pace: Pace,
    /// Dials that begin later.
    pub(super) paced: Vec<(Instant, Address, Option<Incarnation>)>,
    /// Accepted connections that wait for the other one of their link.
    pub(super) halves: HashMap<(Incarnation, u64), Token>,
    /// Connections to look at without an event of their own.
    ready: VecDeque<Token>,
    /// Events that a panicking handler was not given.
    undelivered: VecDeque<Event>,
    handled: u64,
    pub(super) next_timer: Option<Instant>,
    accept_at: Option<Instant>,
    pub(super) scratch: Vec<u8>,
    /// Since when the transport shuts down, and who waits for it.
    pub(super) closing: Option<(Instant, Vec<oneshot::Sender<()>>)>,
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
    pub(super) stall: Option<(Instant, u64)>,
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
            pace: Pace::default(),
            paced: Vec::new(),
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
        if self.closing.is_some() && self.stop_if_closed(shared, Instant::now()) {
            return true;
        }
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
        self.next_timer = Some(Instant::now());
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
