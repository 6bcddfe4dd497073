//! TCP: between any two processes that reach each other, over IPv4 and IPv6.
//!
//! A *link* to a peer's life is two connections, one for control and one for bulk, paired by their hellos, so that a
//! heartbeat never queues behind a tensor. Both sides may dial at once; then two links are up, and each side goes on
//! sending over the one that it had first. If either connection of a link ends, the link ends.
//!
//! One thread makes progress (reads, queued writes, deadlines). A caller of [`Transport::progress`] borrows its work,
//! and handles its own reply without a hand-off. `post` writes to the socket from the caller's own thread.

mod address;
mod driver;
mod ends;
mod handshake;
mod lane;
mod lead;
mod link;
mod reader;
mod regions;
mod timers;

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock, Weak};
use std::time::{Duration, Instant};

use connex_protocol::wire::hello::{Lane as LaneKind, Reject};
use connex_protocol::wire::{CONTROL_FRAME_MAX, Encoded, LENGTH_PREFIX, STREAM_FRAME_MAX, bulk};
use connex_protocol::{Address, Epoch, Incarnation, Peer};
use mio::Waker;
use mio::net::TcpListener;
use tokio::sync::oneshot;

use self::address::HostPort;
use self::driver::Driver;
use self::lead::Lead;
use self::link::Link;
use self::regions::Regions;
use crate::{
    ConnectError, Handler, Identity, Op, Refused, RefusedWhy, Region, RegionError, StartError, Transport,
};

/// Where a [`TcpTransport`] listens, and what bounds it.
#[derive(Clone, Debug)]
pub struct TcpConfig {
    /// `host:port` to listen on: a name, an IPv4 address or a bracketed IPv6 one, with its scope if it is link-local.
    /// Port 0 takes any free one.
    pub listen: String,
    /// What peers are told to connect to, if it is not the bound address: `host` or `host:port`.
    pub advertise: Option<String>,
    /// Listen on more than loopback. Peers do not authenticate yet, so whoever reaches the port is let in.
    pub trusted_network: bool,
    /// The largest frame on the control lane, in bytes.
    pub control_frame_max: usize,
    /// The largest frame on the bulk lane, in bytes; a larger operation travels in several.
    pub bulk_frame_max: usize,
    /// The largest one-sided operation, in bytes.
    pub operation_max: usize,
    /// How many bytes may wait for one peer on one lane. A single frame is taken by an empty queue whatever its size.
    pub queue_max: usize,
    /// How many one-sided operations may be under way to one peer.
    pub operations_max: usize,
    /// How many regions may be registered.
    pub regions_max: usize,
    /// How many connections may be open, two a link.
    pub connections_max: usize,
    /// How long a connection may take to be made and to say hello.
    pub handshake_deadline: Duration,
    /// In each period of this length, a frame that has begun must end or gain at least 64 KiB.
    pub stall_deadline: Duration,
    /// Payloads in slots carry a CRC-32C, checked by their reader (P-6).
    pub crc: bool,
}

impl Default for TcpConfig {
    fn default() -> Self {
        TcpConfig {
            listen: "127.0.0.1:0".into(),
            advertise: None,
            trusted_network: false,
            control_frame_max: CONTROL_FRAME_MAX,
            bulk_frame_max: STREAM_FRAME_MAX,
            operation_max: 1 << 30,
            queue_max: 64 << 20,
            operations_max: 4096,
            regions_max: 65_536,
            connections_max: 4096,
            handshake_deadline: Duration::from_secs(3),
            stall_deadline: Duration::from_secs(5),
            crc: true,
        }
    }
}

impl TcpConfig {
    fn frame_max(&self, lane: LaneKind) -> usize {
        match lane {
            LaneKind::Control => self.control_frame_max,
            LaneKind::Bulk => self.bulk_frame_max,
        }
    }

    /// The piece that an operation's bytes travel in: small enough that several operations take turns.
    fn chunk(&self) -> usize {
        (1 << 20).min(self.bulk_frame_max.saturating_sub(bulk::BULK_HEAD)).max(1)
    }
}

/// The TCP backend.
pub struct TcpTransport {
    shared: Arc<Shared>,
}

/// What callers, the borrowers of the progress and its own thread have in common.
struct Shared {
    /// Itself, for the threads that look names up.
    me: Weak<Shared>,
    identity: Identity,
    config: TcpConfig,
    handler: Arc<dyn Handler>,
    local: Address,
    epoch: Mutex<Epoch>,
    /// The links to each life, the one to send over first.
    peers: RwLock<HashMap<Incarnation, Vec<Arc<Link>>>>,
    /// Who answered at an address that this side dialled, while it is linked.
    known: Mutex<HashMap<Address, Incarnation>>,
    regions: Regions,
    fenced: Mutex<Fenced>,
    dials: Mutex<HashMap<Address, SharedDial>>,
    commands: Mutex<VecDeque<Command>>,
    driver: Mutex<Driver>,
    waker: Waker,
    lead: Lead,
    started: Instant,
    /// The earliest deadline of an operation, and until when the driver sleeps, in nanoseconds since `started`.
    first_deadline: AtomicU64,
    sleeps_until: AtomicU64,
    /// No more operations: `shutdown` has begun.
    closed: AtomicBool,
}

/// The lives that are refused, oldest first, so that the set stays bounded.
#[derive(Default)]
struct Fenced {
    lives: HashSet<Incarnation>,
    order: VecDeque<Incarnation>,
}

/// How many fenced lives are remembered. Each is a process that was evicted, so this covers years.
const FENCED_MAX: usize = 65_536;

/// Connections that may wait to be accepted.
const LISTEN_QUEUE: i32 = 4096;

type Answer = oneshot::Sender<Result<Peer, ConnectError>>;

/// A dial under way, and everybody who waits for it.
struct SharedDial {
    expects: Option<Incarnation>,
    waiting: Vec<Answer>,
}

/// What callers ask of the driver.
enum Command {
    Dial {
        address: Address,
        expects: Option<Incarnation>,
    },
    Resolved {
        dial: u64,
        found: io::Result<Vec<SocketAddr>>,
    },
    /// Answer once the handler knows of this peer.
    Confirm {
        peer: Incarnation,
        answer: Answer,
    },
    Disconnect(Incarnation),
    Fence(Incarnation),
    Shutdown(oneshot::Sender<()>),
}

impl TcpTransport {
    /// Binds the address and starts the progress thread.
    pub fn start(
        config: TcpConfig,
        identity: Identity,
        handler: Arc<dyn Handler>,
    ) -> Result<Arc<Self>, StartError> {
        let address = Address::new(&format!("tcp://{}", config.listen));
        let bad = |why: String| StartError::Address { address: address.clone(), why };
        let failed = |source| StartError::Io { address: address.clone(), source };
        let listen = HostPort::parse(&config.listen).map_err(bad)?;
        let listener = bind(&listen, &address, config.trusted_network)?;
        let bound = listener.local_addr().map_err(failed)?;
        let local = address::advertised(bound, config.advertise.as_deref()).map_err(bad)?;
        let driver = Driver::new(listener).map_err(failed)?;
        let waker = driver.waker().map_err(failed)?;
        let shared = Arc::new_cyclic(|me| Shared {
            me: me.clone(),
            identity,
            config,
            handler,
            local: Address::new(&format!("tcp://{}", local.text())),
            epoch: Mutex::default(),
            peers: RwLock::default(),
            known: Mutex::default(),
            regions: Regions::default(),
            fenced: Mutex::default(),
            dials: Mutex::default(),
            commands: Mutex::default(),
            driver: Mutex::new(driver),
            waker,
            lead: Lead::default(),
            started: Instant::now(),
            first_deadline: AtomicU64::new(u64::MAX),
            sleeps_until: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        });
        lead::spawn(&shared).map_err(failed)?;
        Ok(Arc::new(TcpTransport { shared }))
    }

    /// How often a thread was woken to make progress, or to hand it over, since the start.
    pub fn wakeups(&self) -> u64 {
        self.shared.lead.wakeups()
    }
}

/// Listens on the first address that `listen` means and that can be bound.
fn bind(listen: &HostPort, address: &Address, trusted: bool) -> Result<TcpListener, StartError> {
    let failed = |source| StartError::Io { address: address.clone(), source };
    let mut last = None;
    for candidate in listen.resolve().map_err(failed)? {
        if !trusted && !candidate.ip().is_loopback() {
            let why = format!(
                "{} is not a loopback address, and peers do not authenticate yet: listen on 127.0.0.1 or [::1], or \
                 allow it for a network that you trust",
                candidate.ip()
            );
            return Err(StartError::Address { address: address.clone(), why });
        }
        // mio sets SO_REUSEADDR, so that a restart binds although its predecessor's connections linger.
        match TcpListener::bind(candidate) {
            Ok(listener) => {
                // Many may dial at the same moment, two connections each; the default queue of 128 would drop some,
                // and they would try again only after a second. The kernel caps it as it likes.
                rustix::net::listen(&listener, LISTEN_QUEUE).map_err(|error| failed(error.into()))?;
                return Ok(listener);
            }
            Err(error) => last = Some(error),
        }
    }
    let error = last.unwrap_or_else(|| io::ErrorKind::NotFound.into());
    match error.kind() {
        io::ErrorKind::AddrInUse => Err(StartError::InUse { address: address.clone() }),
        _ => Err(failed(error)),
    }
}

impl Shared {
    fn own(&self) -> Incarnation {
        self.identity.peer.incarnation
    }

    fn command(&self, command: Command) {
        self.commands.lock().expect("nothing under this lock panics").push_back(command);
        self.wake();
        self.sweep();
    }

    /// Lets go of everybody who waits for a driver that has ended.
    fn sweep(&self) {
        if self.lead.ended() {
            let commands =
                std::mem::take(&mut *self.commands.lock().expect("nothing under this lock panics"));
            let dials = std::mem::take(&mut *self.dials.lock().expect("nothing under this lock panics"));
            drop((commands, dials));
        }
    }

    fn wake(&self) {
        // It fails only when the operating system is out of memory for an eventfd's counter: nothing to be done.
        let _ = self.waker.wake();
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    fn is_fenced(&self, life: Incarnation) -> bool {
        self.fenced.lock().expect("nothing under this lock panics").lives.contains(&life)
    }

    /// Runs `work` with the link to send over.
    fn with_link<T>(&self, to: Incarnation, work: impl FnOnce(&Arc<Link>) -> T) -> Option<T> {
        let peers = self.peers.read().expect("nothing under this lock panics");
        peers.get(&to).and_then(|links| links.first()).map(work)
    }

    /// The life that answers to `to`, if it is linked.
    fn linked(&self, to: &Address, expects: Option<Incarnation>) -> Option<Incarnation> {
        let known = || self.known.lock().expect("nothing under this lock panics").get(to).copied();
        let life = expects.or_else(known)?;
        self.with_link(life, |_| life)
    }

    /// Joins the dial to an address, or starts it; returns whom it expects as well.
    fn dial(
        &self,
        to: &Address,
        expects: Option<Incarnation>,
    ) -> (oneshot::Receiver<Result<Peer, ConnectError>>, Option<Incarnation>) {
        let (answer, result) = oneshot::channel();
        let mut dials = self.dials.lock().expect("nothing under this lock panics");
        if let Some(dial) = dials.get_mut(to) {
            dial.waiting.push(answer);
            return (result, dial.expects);
        }
        dials.insert(to.clone(), SharedDial { expects, waiting: vec![answer] });
        drop(dials);
        self.command(Command::Dial { address: to.clone(), expects });
        (result, expects)
    }

    fn nanos(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.started).as_nanos()).unwrap_or(u64::MAX)
    }

    /// Sees to it that the driver looks at the operations at `deadline`.
    fn note_deadline(&self, deadline: Instant) {
        let deadline = self.nanos(deadline);
        self.first_deadline.fetch_min(deadline, Ordering::SeqCst);
        if deadline < self.sleeps_until.load(Ordering::SeqCst) {
            self.wake();
        }
    }

    fn post_message(
        &self,
        to: Incarnation,
        lane: LaneKind,
        frame: Encoded,
    ) -> Result<(), (Encoded, RefusedWhy)> {
        if frame.len() - LENGTH_PREFIX > self.config.frame_max(lane) {
            return Err((frame, RefusedWhy::TooLarge));
        }
        let mut frame = Some(frame);
        let posted = self.with_link(to, |link| {
            let frame = frame.take().expect("it is taken once");
            link.lane(lane).post(frame, self.config.queue_max)
        });
        posted.unwrap_or_else(|| Err((frame.take().expect("no link took it"), RefusedWhy::NotConnected)))
    }

    fn start_operation(&self, op: Op) -> Result<(), Refused> {
        let (Op::Message { to, .. } | Op::Read { to, .. } | Op::Write { to, .. }) = &op;
        let link = self.with_link(*to, Arc::clone);
        let Some(link) = link else { return Err(Refused { op, why: RefusedWhy::NotConnected }) };
        let now = Instant::now();
        let deadline = match &op {
            Op::Read { deadline, .. } | Op::Write { deadline, .. } => now + *deadline,
            Op::Message { .. } => now,
        };
        link.start(op, now, &self.config)?;
        self.note_deadline(deadline);
        Ok(())
    }
}

impl Fenced {
    fn add(&mut self, life: Incarnation) {
        if self.lives.insert(life) {
            self.order.push_back(life);
        }
        if self.order.len() > FENCED_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.lives.remove(&oldest);
        }
    }
}

#[async_trait::async_trait]
impl Transport for TcpTransport {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn local(&self) -> Address {
        self.shared.local.clone()
    }

    fn wants_crc(&self) -> bool {
        self.shared.config.crc
    }

    fn set_epoch(&self, epoch: Epoch) {
        *self.shared.epoch.lock().expect("nothing under this lock panics") = epoch;
    }

    async fn connect(&self, to: &Address, expects: Option<Incarnation>) -> Result<Peer, ConnectError> {
        let shared = &self.shared;
        let ("tcp", _) = to.split() else {
            let why = "not an address of the tcp transport: write tcp://HOST:PORT".into();
            return Err(ConnectError::Address { address: to.clone(), why });
        };
        loop {
            if shared.is_closed() {
                return Err(ConnectError::ShutDown);
            }
            if let Some(peer) = shared.linked(to, expects) {
                let (answer, result) = oneshot::channel();
                shared.command(Command::Confirm { peer, answer });
                // A link that ended meanwhile is dialled anew.
                match result.await {
                    Ok(Ok(peer)) => return Ok(peer),
                    _ => continue,
                }
            }
            let (answer, dial_expects) = shared.dial(to, expects);
            let result = answer.await.unwrap_or(Err(ConnectError::ShutDown));
            match result {
                Ok(peer) if expects.is_none_or(|expects| expects == peer.incarnation) => return Ok(peer),
                Ok(peer) => {
                    let reject = Reject::Unexpected { found: peer.incarnation };
                    return Err(ConnectError::Rejected { address: to.clone(), reject });
                }
                // Somebody else's dial was refused for what only they expected.
                Err(ConnectError::Rejected { reject: Reject::Unexpected { .. }, .. })
                    if dial_expects != expects => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn disconnect(&self, peer: Incarnation) {
        self.shared.command(Command::Disconnect(peer));
    }

    fn fence(&self, peer: Incarnation) {
        self.shared.fenced.lock().expect("nothing under this lock panics").add(peer);
        self.shared.command(Command::Fence(peer));
    }

    async fn register(&self, region: Arc<Region>) -> Result<(), RegionError> {
        if region.key().owner != self.shared.own() {
            return Err(RegionError::Unsupported);
        }
        self.shared.regions.open(region, self.shared.config.regions_max)
    }

    async fn deregister(&self, region: &Region) {
        self.shared.regions.close(region.key());
    }

    fn post(&self, op: Op) -> Result<(), Refused> {
        if self.shared.is_closed() {
            return Err(Refused { op, why: RefusedWhy::ShutDown });
        }
        match op {
            Op::Message { to, lane, frame } => self
                .shared
                .post_message(to, lane, frame)
                .map_err(|(frame, why)| Refused { op: Op::Message { to, lane, frame }, why }),
            op => self.shared.start_operation(op),
        }
    }

    fn progress(&self, wait: Duration) -> bool {
        lead::borrow(&self.shared, wait)
    }

    fn let_go(&self) {
        lead::let_go(&self.shared);
    }

    fn failed(&self) -> bool {
        self.shared.lead.failed()
    }

    fn restart_progress(&self) {
        lead::restart(&self.shared);
    }

    fn backlog(&self, peer: Incarnation) -> usize {
        self.shared.with_link(peer, |link| link.control.queued() + link.bulk.queued()).unwrap_or(0)
    }

    async fn shutdown(&self) {
        if self.shared.lead.ended() {
            return;
        }
        self.shared.closed.store(true, Ordering::Release);
        lead::restart(&self.shared);
        let (done, ended) = oneshot::channel();
        self.shared.command(Command::Shutdown(done));
        // A dropped sender means that the progress had ended before.
        let _ = ended.await;
    }
}

impl Drop for TcpTransport {
    /// Without a `shutdown` the sockets close as they would at the process's death.
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
        self.shared.lead.stop();
        self.shared.wake();
        lead::end(&self.shared);
    }
}

impl fmt::Debug for TcpTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpTransport").field("local", &self.shared.local).finish_non_exhaustive()
    }
}
