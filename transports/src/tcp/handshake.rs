//! How two connections become a link: dialling, hellos, refusals, and pairing.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use connex_protocol::wire::hello::{self, Hello, Lane as LaneKind, Opening, Reject};
use connex_protocol::{Address, Evidence, Incarnation};
use mio::Token;
use mio::net::TcpStream;

use super::address::HostPort;
use super::driver::{Conn, Driver, Phase};
use super::ends::links_of;
use super::link::Link;
use super::reader::Outcome;
use super::{Command, Shared};
use crate::{ConnectError, Event};

/// Connections above the limit that are told so before they are closed.
const TOLD_FULL: usize = 64;

/// How many names may be looked up at once, each by a thread of its own, as the lookup may block for long.
const LOOKUPS_MAX: usize = 16;

static LOOKUPS: AtomicUsize = AtomicUsize::new(0);

/// How many dials to one address may begin in one [`PACE_WINDOW`]: whoever dials in a loop is slowed down (F13).
const PACE_DIALS: u32 = 100;
const PACE_WINDOW: Duration = Duration::from_millis(250);

/// How many addresses are paced at once; beyond, the finished windows are forgotten.
const PACED_ADDRESSES: usize = 1024;

/// Counts the dials to each address.
#[derive(Default)]
pub(super) struct Pace {
    windows: HashMap<Address, (Instant, u32)>,
}

impl Pace {
    /// Admits a dial, or says when to try it again.
    fn admit(&mut self, address: &Address, now: Instant) -> Option<Instant> {
        if self.windows.len() >= PACED_ADDRESSES {
            self.windows.retain(|_, (began, _)| now < *began + PACE_WINDOW);
        }
        let (began, count) = self.windows.entry(address.clone()).or_insert((now, 0));
        if now >= *began + PACE_WINDOW {
            (*began, *count) = (now, 0);
        }
        *count += 1;
        (*count > PACE_DIALS).then(|| *began + PACE_WINDOW)
    }
}

/// A dial under way.
pub(super) struct Dial {
    address: Address,
    expects: Option<Incarnation>,
    /// The socket addresses not yet tried.
    hosts: VecDeque<SocketAddr>,
    trying: Option<SocketAddr>,
    /// The control and the bulk connection.
    conns: Vec<Token>,
    began: Instant,
    /// When the whole dial has failed.
    until: Instant,
    /// Why the last attempt failed.
    error: Option<ConnectError>,
}

impl Driver {
    /// Begins to dial an address.
    pub(super) fn dial(&mut self, shared: &Shared, address: Address, expects: Option<Incarnation>) {
        let now = Instant::now();
        if let Some(later) = self.pace.admit(&address, now) {
            self.paced.push((later, address, expects));
            return self.at(later);
        }
        let host = match HostPort::parse(address.split().1) {
            Ok(host) => host,
            Err(why) => {
                let error = ConnectError::Address { address: address.clone(), why };
                return finish(shared, &address, Err(error));
            }
        };
        let no = self.next_dial;
        self.next_dial += 1;
        let until = now + shared.config.handshake_deadline;
        let (hosts, trying, error) = (VecDeque::new(), None, None);
        let dial = Dial { address, expects, hosts, trying, conns: Vec::new(), began: now, until, error };
        self.dials.insert(no, dial);
        self.at(until);
        match host.literal() {
            Some(literal) => self.on_resolved(shared, no, Ok(vec![literal])),
            None => self.look_up(shared, no, host),
        }
    }

    /// Asks for a name's addresses on a thread of its own.
    fn look_up(&mut self, shared: &Shared, no: u64, host: HostPort) {
        let started = LOOKUPS.fetch_add(1, Ordering::SeqCst) < LOOKUPS_MAX
            && shared.me.upgrade().is_some_and(|shared| {
                let lookup = move || {
                    let found = host.resolve();
                    LOOKUPS.fetch_sub(1, Ordering::SeqCst);
                    shared.command(Command::Resolved { dial: no, found });
                };
                std::thread::Builder::new().name("connex-lookup".into()).spawn(lookup).is_ok()
            });
        if !started {
            LOOKUPS.fetch_sub(1, Ordering::SeqCst);
            let error = io::Error::new(io::ErrorKind::ResourceBusy, "too many names are being looked up");
            self.on_resolved(shared, no, Err(error));
        }
    }

    pub(super) fn on_resolved(&mut self, shared: &Shared, no: u64, found: io::Result<Vec<SocketAddr>>) {
        let Some(dial) = self.dials.get_mut(&no) else { return };
        match found {
            Ok(hosts) => dial.hosts = hosts.into(),
            Err(source) => dial.error = Some(ConnectError::Io { address: dial.address.clone(), source }),
        }
        self.try_next(shared, no);
    }

    /// Tries the next socket address of a dial; without one the dial has failed.
    fn try_next(&mut self, shared: &Shared, no: u64) {
        let now = Instant::now();
        loop {
            let Some(dial) = self.dials.get_mut(&no) else { return };
            let Some(host) = dial.hosts.pop_front() else { break };
            // Each address gets its share of the time, so that one that swallows packets leaves some to the next.
            let share = dial.until.saturating_duration_since(now) / (dial.hosts.len() as u32 + 1);
            dial.trying = Some(host);
            match self.open(no, host, now + share) {
                Ok(conns) => {
                    if let Some(dial) = self.dials.get_mut(&no) {
                        dial.conns = conns;
                    }
                    return;
                }
                Err(source) => self.note_failure(no, source),
            }
        }
        let Some(dial) = self.dials.remove(&no) else { return };
        let waited_ms = dial.began.elapsed().as_millis() as u64;
        let address = dial.address.clone();
        let error = dial.error.unwrap_or(ConnectError::NoAnswer { address, waited_ms });
        finish(shared, &dial.address, Err(error));
    }

    /// Starts both connections of a link; a failure of the second takes the first back.
    fn open(&mut self, no: u64, host: SocketAddr, deadline: Instant) -> io::Result<Vec<Token>> {
        let mut conns = Vec::new();
        for kind in [LaneKind::Control, LaneKind::Bulk] {
            let opened = TcpStream::connect(host)
                .and_then(|stream| self.add(stream, kind, Phase::Connecting { dial: no }, deadline));
            match opened {
                Ok(token) => conns.push(token),
                Err(error) => {
                    self.drop_conns(&conns);
                    return Err(error);
                }
            }
        }
        Ok(conns)
    }

    fn drop_conns(&mut self, tokens: &[Token]) {
        for token in tokens {
            if let Some(conn) = self.conns.remove(token) {
                conn.lane.close();
            }
        }
    }

    fn note_failure(&mut self, no: u64, source: io::Error) {
        let Some(dial) = self.dials.get_mut(&no) else { return };
        // A name may stand for several addresses: say which one this is about.
        let source = match dial.trying {
            Some(host) if !dial.address.as_str().ends_with(&host.to_string()) => {
                io::Error::new(source.kind(), format!("{host}: {source}"))
            }
            _ => source,
        };
        dial.error = Some(ConnectError::Io { address: dial.address.clone(), source });
    }

    /// A connection that is being made has news.
    pub(super) fn on_writable(&mut self, shared: &Shared, mut conn: Conn) {
        let Phase::Connecting { dial: no } = conn.phase else { return };
        let token = conn.lane.token;
        let failure = match conn.lane.stream.take_error() {
            Ok(Some(error)) | Err(error) => Some(error),
            Ok(None) => match conn.lane.stream.peer_addr() {
                Ok(_) => None,
                Err(error) if error.kind() == io::ErrorKind::NotConnected => {
                    self.conns.insert(token, conn);
                    return;
                }
                Err(error) => Some(error),
            },
        };
        if let Some(error) = failure {
            self.note_failure(no, error);
            return self.dial_lost(shared, no);
        }
        let Some(dial) = self.dials.get(&no) else { return };
        conn.lane
            .tell(hello::encode(&Opening::Hello(our_hello(shared, conn.kind, no, dial.expects))), usize::MAX);
        conn.phase = Phase::Greeting { dial: Some(no) };
        self.conns.insert(token, conn);
        self.schedule(token);
    }

    /// An attempt is over without a link: the next one, or the end of the dial.
    pub(super) fn dial_lost(&mut self, shared: &Shared, no: u64) {
        let Some(dial) = self.dials.get_mut(&no) else { return };
        let conns = std::mem::take(&mut dial.conns);
        self.drop_conns(&conns);
        self.try_next(shared, no);
    }

    /// A dial is over with an answer that another attempt would not change.
    fn dial_refused(&mut self, shared: &Shared, no: u64, error: ConnectError) {
        let Some(mut dial) = self.dials.remove(&no) else { return };
        let conns = std::mem::take(&mut dial.conns);
        self.drop_conns(&conns);
        finish(shared, &dial.address, Err(error));
    }

    pub(super) fn expire_dials(&mut self, shared: &Shared, now: Instant) {
        for (later, address, expects) in std::mem::take(&mut self.paced) {
            if later <= now {
                self.dial(shared, address, expects);
            } else {
                self.paced.push((later, address, expects));
                self.at(later);
            }
        }
        let late: Vec<u64> =
            self.dials.iter().filter(|(_, dial)| dial.until <= now).map(|(no, _)| *no).collect();
        for no in late {
            let Some(dial) = self.dials.get_mut(&no) else { continue };
            dial.hosts.clear();
            self.dial_lost(shared, no);
        }
        if let Some(next) = self.dials.values().map(|dial| dial.until).min() {
            self.at(next);
        }
    }

    /// Somebody connected.
    pub(super) fn on_accepted(&mut self, shared: &Shared, stream: TcpStream) {
        let deadline = Instant::now() + shared.config.handshake_deadline;
        let open = self.conns.len();
        if open >= shared.config.connections_max + TOLD_FULL {
            return;
        }
        let full = open >= shared.config.connections_max;
        let phase = if full { Phase::Lingering } else { Phase::Greeting { dial: None } };
        // The kind is known from the hello; until then the smaller cap counts.
        let Ok(token) = self.add(stream, LaneKind::Control, phase, deadline) else { return };
        if full && let Some(conn) = self.conns.get(&token) {
            conn.lane.tell(hello::encode(&Opening::Reject(Reject::Full)), usize::MAX);
            conn.lane.finish();
        }
        self.schedule(token);
    }

    /// The first frame of the other side.
    pub(super) fn on_opening(
        &mut self,
        shared: &Shared,
        conn: &mut Conn,
        frame: &[u8],
    ) -> Result<(), Outcome> {
        let violation = Outcome::Ended(Evidence::ProtocolViolation);
        let opening = hello::decode(frame).map_err(|_| violation)?;
        let Phase::Greeting { dial } = conn.phase else { return Err(violation) };
        match (dial, opening) {
            (Some(no), opening) => self.on_answer(shared, conn, no, opening),
            (None, Opening::Reject(reject @ Reject::Version { .. })) => {
                refuse(conn, reject.clone());
                self.emit(shared, Event::Refused { reject });
                Ok(())
            }
            (None, Opening::Reject(_)) => Err(violation),
            (None, Opening::Hello(hello)) => {
                if let Some(reject) = objection(shared, &hello) {
                    let foreign = matches!(reject, Reject::Deployment { .. });
                    refuse(conn, reject);
                    // A link has two connections: one of them speaks for it.
                    if foreign && hello.lane == LaneKind::Control {
                        let reject = Reject::Deployment { theirs: hello.deployment };
                        self.emit(shared, Event::Refused { reject });
                    }
                    return Ok(());
                }
                conn.kind = hello.lane;
                let ours = our_hello(shared, hello.lane, hello.link, Some(hello.peer.incarnation));
                conn.lane.tell(hello::encode(&Opening::Hello(ours)), usize::MAX);
                conn.phase = Phase::Half { dial: None, hello: Box::new(hello) };
                Ok(())
            }
        }
    }

    /// The answer to a hello of this side.
    fn on_answer(
        &mut self,
        shared: &Shared,
        conn: &mut Conn,
        no: u64,
        opening: Opening,
    ) -> Result<(), Outcome> {
        let Some(dial) = self.dials.get(&no) else { return Err(Outcome::Ended(Evidence::ConnectionClosed)) };
        let address = dial.address.clone();
        let own = shared.own();
        let refusal = match opening {
            Opening::Reject(Reject::Unexpected { found }) if found == own => {
                ConnectError::Address { address, why: "this is the process itself".into() }
            }
            Opening::Reject(reject) => ConnectError::Rejected { address, reject },
            Opening::Hello(hello) => {
                let found = hello.peer.incarnation;
                if hello.lane != conn.kind || hello.link != no {
                    return Err(Outcome::Ended(Evidence::ProtocolViolation));
                } else if hello.deployment != shared.identity.deployment {
                    ConnectError::Rejected {
                        address,
                        reject: Reject::Deployment { theirs: hello.deployment },
                    }
                } else if dial.expects.is_some_and(|expects| expects != found) {
                    ConnectError::Rejected { address, reject: Reject::Unexpected { found } }
                } else if shared.is_fenced(found) {
                    ConnectError::Fenced { address, found }
                } else {
                    conn.phase = Phase::Half { dial: Some(no), hello: Box::new(hello) };
                    return Ok(());
                }
            }
        };
        // This connection is not among the driver's while it is read: it ends by the outcome, without a dial.
        conn.phase = Phase::Lingering;
        self.dial_refused(shared, no, refusal);
        Err(Outcome::Ended(Evidence::ConnectionClosed))
    }

    /// A connection has its hello: with the other one of its link, the link is up.
    pub(super) fn pair(&mut self, shared: &Shared, token: Token) {
        let Some(conn) = self.conns.get(&token) else { return };
        let Phase::Half { dial, hello } = &conn.phase else { return };
        let (key, dialled) = ((hello.peer.incarnation, hello.link), dial.is_some());
        let other = match dial {
            Some(no) => {
                let Some(dial) = self.dials.get(no) else { return };
                dial.conns.iter().copied().find(|other| *other != token)
            }
            None => self.halves.insert(key, token),
        };
        let Some(other) = other else { return };
        let half = |token: &Token| match self.conns.get(token) {
            Some(Conn { phase: Phase::Half { hello, .. }, kind, lane, .. }) => Some((hello, *kind, lane)),
            _ => None,
        };
        let (Some(one), Some(two)) = (half(&token), half(&other)) else { return };
        // A life that was fenced since its hello gets no link either.
        let fenced = shared.is_fenced(one.0.peer.incarnation);
        let same = one.0.peer == two.0.peer && one.1 != two.1 && !fenced;
        let (control, bulk) = if one.1 == LaneKind::Control { (&one, &two) } else { (&two, &one) };
        let lanes = [control.2.clone(), bulk.2.clone()];
        let (peer, epoch) = (control.0.peer.clone(), control.0.epoch);
        if !dialled {
            self.halves.remove(&key);
        }
        if !same {
            // Two lives, or the same lane twice: neither is a link.
            match dialled {
                true => self.dial_lost(shared, key.1),
                false => self.drop_conns(&[token, other]),
            }
            return;
        }
        let link = Arc::new(Link::new(shared.own(), peer, epoch, dialled, lanes));
        self.up(shared, link, dialled.then_some(key.1));
    }

    fn up(&mut self, shared: &Shared, link: Arc<Link>, dial: Option<u64>) {
        for lane in [&link.control, &link.bulk] {
            if let Some(conn) = self.conns.get_mut(&lane.token) {
                conn.phase = Phase::Up(link.clone());
                conn.deadline = None;
                conn.kept = true;
                self.schedule(lane.token);
            }
        }
        let life = link.peer.incarnation;
        // Whoever dials again has lost the earlier link that it dialled, or replaces it (F13).
        let replaced: Vec<_> =
            links_of(shared, life).into_iter().filter(|old| old.dialled == link.dialled).collect();
        let mut peers = shared.peers.write().expect("nothing under this lock panics");
        let links = peers.entry(life).or_default();
        let first = links.is_empty();
        links.push(link.clone());
        drop(peers);
        let dial = dial.and_then(|no| self.dials.remove(&no));
        if let Some(dial) = &dial {
            shared.known.lock().expect("nothing under this lock panics").insert(dial.address.clone(), life);
        }
        if first {
            self.emit(shared, Event::Up { peer: link.peer.clone(), epoch: link.epoch });
        }
        for old in replaced {
            self.end_link(shared, &old, Evidence::ConnectionClosed);
        }
        if let Some(dial) = dial {
            finish(shared, &dial.address, Ok(link.peer.clone()));
        }
    }
}

/// Answers everybody who waits for a dial.
fn finish(shared: &Shared, address: &Address, result: Result<connex_protocol::Peer, ConnectError>) {
    let dial = shared.dials.lock().expect("nothing under this lock panics").remove(address);
    for answer in dial.into_iter().flat_map(|dial| dial.waiting) {
        let _ = answer.send(result.as_ref().map(Clone::clone).map_err(copy));
    }
}

/// The same error for another caller.
fn copy(error: &ConnectError) -> ConnectError {
    match error {
        ConnectError::Address { address, why } => {
            ConnectError::Address { address: address.clone(), why: why.clone() }
        }
        ConnectError::Io { address, source } => {
            let source = io::Error::new(source.kind(), source.to_string());
            ConnectError::Io { address: address.clone(), source }
        }
        ConnectError::Rejected { address, reject } => {
            ConnectError::Rejected { address: address.clone(), reject: reject.clone() }
        }
        ConnectError::NoAnswer { address, waited_ms } => {
            ConnectError::NoAnswer { address: address.clone(), waited_ms: *waited_ms }
        }
        ConnectError::Fenced { address, found } => {
            ConnectError::Fenced { address: address.clone(), found: *found }
        }
        ConnectError::ShutDown => ConnectError::ShutDown,
    }
}

fn our_hello(shared: &Shared, lane: LaneKind, link: u64, expects: Option<Incarnation>) -> Hello {
    Hello {
        peer: shared.identity.peer.clone(),
        epoch: *shared.epoch.lock().expect("nothing under this lock panics"),
        lane,
        link,
        expects,
        deployment: shared.identity.deployment.clone(),
        auth: Vec::new(),
    }
}

/// Why this side refuses a caller.
fn objection(shared: &Shared, hello: &Hello) -> Option<Reject> {
    let own = shared.own();
    let caller = hello.peer.incarnation;
    if hello.deployment != shared.identity.deployment {
        Some(Reject::Deployment { theirs: shared.identity.deployment.clone() })
    } else if caller == own || hello.expects.is_some_and(|expects| expects != own) {
        Some(Reject::Unexpected { found: own })
    } else if shared.is_fenced(caller) {
        Some(Reject::Fenced)
    } else if shared.is_closed() {
        Some(Reject::Full)
    } else {
        None
    }
}

/// Says why, and closes once the other side has read it: closing at once would let the kernel discard the answer.
fn refuse(conn: &mut Conn, reject: Reject) {
    conn.lane.tell(hello::encode(&Opening::Reject(reject)), usize::MAX);
    conn.lane.finish();
    conn.phase = Phase::Lingering;
}
