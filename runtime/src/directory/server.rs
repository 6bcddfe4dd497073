use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use connex_actors::Clock;
use connex_protocol::directory::{Registry, RegistryConfig, RegistryInput, RegistryOutput};
use connex_protocol::wire::directory::{Message, Route};
use connex_protocol::wire::hello::Lane;
use connex_protocol::wire::{self, Control, Frame};
use connex_protocol::{Address, Group, Incarnation, Machine, Peer};
use connex_transport::tcp::TcpConfig;
use connex_transport::{Event, Handler, Identity, Op, RefusedWhy, Transport};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::Reach;

/// How a directory is run.
#[derive(Clone)]
pub struct DirectoryConfig {
    /// How it is reached.
    pub reach: Reach,
    /// Its deployment's name.
    pub deployment: String,
    /// Its limits, and whether it is the first of its deployment.
    pub registry: RegistryConfig,
    /// Where its boot number is kept, so that it grows even if the wall clock steps back.
    pub state_file: Option<PathBuf>,
}

impl DirectoryConfig {
    /// The first directory of a deployment on this machine alone, on a free port of loopback.
    pub fn local() -> Self {
        DirectoryConfig {
            reach: Reach::Tcp(TcpConfig::default()),
            deployment: "default".into(),
            registry: RegistryConfig { first: true, ..RegistryConfig::default() },
            state_file: None,
        }
    }
}

/// Why a directory could not be started.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// Its transport could not be started.
    #[error(transparent)]
    Transport(#[from] connex_transport::StartError),
    /// Its boot number could not be kept.
    #[error("the state file {path} can't be used: {source}")]
    StateFile {
        /// Where.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The state file is somebody else's, or damaged.
    #[error(
        "the state file {path} holds no boot number: name another file, or delete this one if no directory that used it has clients left"
    )]
    StateFileContent {
        /// Where.
        path: PathBuf,
    },
}

/// A running directory. Dropping it ends it.
pub struct Directory {
    transport: Arc<dyn Transport>,
    serving: Arc<Serving>,
    ticker: JoinHandle<()>,
}

/// Drives the registry on the transport's progress thread: each message is one short step under its lock.
struct Serving {
    clock: Clock,
    me: Incarnation,
    registry: Mutex<Registry>,
    /// Held by the [`Directory`]: what holds this must not keep it alive.
    transport: OnceLock<Weak<dyn Transport>>,
    /// Rung when the next deadline has come nearer, or the boot number has grown.
    changed: Notify,
}

impl Serving {
    /// A registry that panicked is as its last step left it, and goes on with the next message.
    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn transport(&self) -> Option<Arc<dyn Transport>> {
        self.transport.get().and_then(Weak::upgrade)
    }

    fn drive(&self, input: RegistryInput) {
        // Upgraded before the lock, so let go of after it: to drop the last owner of a transport is to wait for its
        // handler, which takes the lock.
        let transport = self.transport();
        let mut registry = self.registry();
        let (before, boot) = (registry.deadline(), registry.boot());
        registry.handle(self.clock.now(), input);
        while let Some(RegistryOutput::Send { to, message }) = registry.poll() {
            self.send(transport.as_deref(), to, message);
        }
        let nearer = match (before, registry.deadline()) {
            (Some(before), Some(after)) => after < before,
            (before, after) => before.is_none() && after.is_some(),
        };
        if nearer || registry.boot() != boot {
            self.changed.notify_one();
        }
    }

    fn send(&self, transport: Option<&dyn Transport>, to: Incarnation, message: Message) {
        let Some(transport) = transport else { return };
        let frame = wire::encode(self.me, to, &Frame::Control(Control::Directory(message)));
        match transport.post(Op::Message { to, lane: Lane::Control, frame }).map_err(|refused| refused.why) {
            // Whoever is gone watches no more, as soon as its link's end is heard of.
            Ok(()) | Err(RefusedWhy::NotConnected | RefusedWhy::ShutDown) => {}
            Err(why @ (RefusedWhy::Full | RefusedWhy::TooLarge)) => {
                // A watcher that takes nothing would miss a change: it starts anew over another link.
                tracing::warn!(peer = %to, %why, "a client of the directory takes no messages: its link ends");
                transport.disconnect(to);
            }
        }
    }

    fn on_message(&self, from: Incarnation, frame: bytes::Bytes) {
        let why = match wire::decode(frame) {
            Ok(envelope) if envelope.from != from || envelope.to != self.me => {
                "its frame names another connection's lives".to_owned()
            }
            Ok(wire::Envelope { frame: Frame::Control(Control::Directory(message)), .. }) => {
                return self.drive(RegistryInput::Message { from, message });
            }
            // Heartbeats and goodbyes are not for the registry.
            Ok(wire::Envelope { frame: Frame::Control(_), .. }) => return,
            Ok(_) => "it sends steps to a directory".to_owned(),
            Err(error) => error.to_string(),
        };
        tracing::warn!(peer = %from, why, "a client's session ends");
        if let Some(transport) = self.transport() {
            transport.disconnect(from);
        }
    }
}

impl Handler for Serving {
    fn handle(&self, event: Event) {
        match event {
            Event::Message { from, frame, .. } => self.on_message(from, frame),
            Event::Down { peer, .. } => self.drive(RegistryInput::Gone(peer.incarnation)),
            Event::Refused { reject } => tracing::warn!(%reject, "a caller of the directory was refused"),
            Event::Up { .. } | Event::Relinked { .. } | Event::Completed(_) => {}
        }
    }

    fn progress_failed(&self, panic: String) {
        tracing::error!(panic, "the directory failed on one message, and goes on with the next");
        if let Some(transport) = self.transport() {
            transport.restart_progress();
        }
    }
}

impl Directory {
    /// Starts a directory on the caller's tokio runtime.
    pub async fn start(config: DirectoryConfig) -> Result<Self, DirectoryError> {
        let boot = next_boot(config.state_file.as_deref())?;
        let clock = Clock::start();
        let me = Peer {
            lid: Group::new("connex", "directory", 0).replica(0),
            incarnation: Incarnation::from_bits(uuid::Uuid::new_v4().as_u64_pair().0),
        };
        let serving = Arc::new(Serving {
            clock,
            me: me.incarnation,
            registry: Mutex::new(Registry::new(clock.now(), me.incarnation, boot, config.registry)),
            transport: OnceLock::new(),
            changed: Notify::new(),
        });
        let identity = Identity { peer: me, deployment: config.deployment };
        let transport = config.reach.start(identity, serving.clone())?;
        if serving.transport.set(Arc::downgrade(&transport)).is_err() {
            unreachable!("a directory is started once");
        }
        let ticker = tokio::spawn(tick(serving.clone(), config.state_file, boot));
        Ok(Directory { transport, serving, ticker })
    }

    /// Where it is reached.
    pub fn address(&self) -> Address {
        self.transport.local()
    }

    /// Who holds what now.
    pub fn routes(&self) -> Vec<Route> {
        self.serving.registry().routes().cloned().collect()
    }

    /// The boot number that it grants epochs under.
    pub fn boot(&self) -> u64 {
        self.serving.registry().boot()
    }

    /// Ends it; its clients go on with the routes they know.
    pub async fn shutdown(self) {
        self.ticker.abort();
        self.transport.shutdown().await;
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        self.ticker.abort();
    }
}

/// Ticks the registry whenever a lease may have run out, and keeps its boot number when it has grown past `kept`.
async fn tick(serving: Arc<Serving>, state_file: Option<PathBuf>, mut kept: u64) {
    loop {
        let (deadline, boot) = {
            let registry = serving.registry();
            (registry.deadline(), registry.boot())
        };
        if let Some(path) = state_file.as_deref()
            && std::mem::replace(&mut kept, boot) != boot
            && let Err(error) = keep(path, boot)
        {
            tracing::error!(%error, boot, "the directory's boot number could not be kept");
        }
        let now = serving.clock.now();
        match deadline {
            Some(at) if at <= now => serving.drive(RegistryInput::Tick),
            Some(at) => {
                let wait = at.since(now).max(Duration::from_millis(1));
                // Whichever comes first, the loop looks again.
                let _ = tokio::time::timeout(wait, serving.changed.notified()).await;
            }
            None => serving.changed.notified().await,
        }
    }
}

/// The greatest of the wall clock's seconds and the persisted boot + 1; the registry adds what clients report.
fn next_boot(state_file: Option<&Path>) -> Result<u64, DirectoryError> {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_secs());
    let Some(path) = state_file else { return Ok(wall) };
    let kept = match std::fs::read_to_string(path) {
        Ok(text) => match text.trim().parse::<u64>() {
            Ok(kept) if kept < u64::MAX => Some(kept),
            _ => return Err(DirectoryError::StateFileContent { path: path.to_owned() }),
        },
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(source) => return Err(DirectoryError::StateFile { path: path.to_owned(), source }),
    };
    let boot = kept.map_or(wall, |kept| wall.max(kept + 1));
    keep(path, boot)?;
    Ok(boot)
}

/// A crash in the middle, of the machine too, leaves the old number or the new one, never half of one.
fn keep(path: &Path, boot: u64) -> Result<(), DirectoryError> {
    let failed = |source| DirectoryError::StateFile { path: path.to_owned(), source };
    let staged = path.with_extension("new");
    let mut file = std::fs::File::create(&staged).map_err(failed)?;
    file.write_all(boot.to_string().as_bytes()).and_then(|()| file.sync_all()).map_err(failed)?;
    std::fs::rename(&staged, path).map_err(failed)
}
