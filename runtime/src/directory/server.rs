use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use connex_actors::Clock;
use connex_protocol::directory::{Registry, RegistryConfig, RegistryInput, RegistryOutput};
use connex_protocol::wire::directory::Route;
use connex_protocol::wire::hello::Lane;
use connex_protocol::wire::{self, Control, Frame};
use connex_protocol::{Address, Group, Incarnation, Machine, Peer};
use connex_transport::{Event, Handler, Identity, Op, Transport};
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

/// Why a directory could not be started.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// Its transport could not be started.
    #[error("{0}")]
    Transport(String),
    /// Its boot number could not be kept.
    #[error("the state file {path} can't be used: {source}")]
    StateFile {
        /// Where.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
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
    transport: OnceLock<Arc<dyn Transport>>,
    /// Rung when the next deadline may have come nearer.
    changed: Notify,
}

impl Serving {
    fn drive(&self, input: RegistryInput) {
        let mut registry = self.registry.lock().expect("no holder panics");
        registry.handle(self.clock.now(), input);
        while let Some(RegistryOutput::Send { to, message }) = registry.poll() {
            let frame = wire::encode(self.me, to, &Frame::Control(Control::Directory(message)));
            let Some(transport) = self.transport.get() else { continue };
            if transport.post(Op::Message { to, lane: Lane::Control, frame }).is_err() {
                // A watcher that takes nothing would miss a change: it starts anew from a whole picture.
                tracing::warn!(peer = %to, "a client of the directory takes no messages: its link ends");
                transport.disconnect(to);
            }
        }
        self.changed.notify_one();
    }
}

impl Handler for Serving {
    fn handle(&self, event: Event) {
        match event {
            Event::Message { from, frame, .. } => match wire::decode(frame) {
                Ok(wire::Envelope { frame: Frame::Control(Control::Directory(message)), .. }) => {
                    self.drive(RegistryInput::Message { from, message });
                }
                // Heartbeats and goodbyes are not for the registry.
                Ok(wire::Envelope { frame: Frame::Control(_), .. }) => {}
                _ => {
                    if let Some(transport) = self.transport.get() {
                        transport.disconnect(from);
                    }
                }
            },
            Event::Down { peer, .. } => self.drive(RegistryInput::Gone(peer.incarnation)),
            Event::Up { .. } | Event::Relinked { .. } | Event::Completed(_) => {}
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
            registry: Mutex::new(Registry::new(clock.now(), boot, config.registry)),
            transport: OnceLock::new(),
            changed: Notify::new(),
        });
        let identity = Identity { peer: me, deployment: config.deployment };
        let transport = config.reach.start(identity, serving.clone()).map_err(DirectoryError::Transport)?;
        if serving.transport.set(transport.clone()).is_err() {
            unreachable!("a directory is started once");
        }
        let ticker = tokio::spawn(tick(serving.clone()));
        Ok(Directory { transport, serving, ticker })
    }

    /// Where it is reached.
    pub fn address(&self) -> Address {
        self.transport.local()
    }

    /// Who holds what now.
    pub fn routes(&self) -> Vec<Route> {
        self.serving.registry.lock().expect("no holder panics").routes().cloned().collect()
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

/// Ticks the registry whenever a lease may have run out.
async fn tick(serving: Arc<Serving>) {
    loop {
        let deadline = serving.registry.lock().expect("no holder panics").deadline();
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
fn next_boot(state_file: Option<&std::path::Path>) -> Result<u64, DirectoryError> {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_secs());
    let Some(path) = state_file else { return Ok(wall) };
    let failed = |source| DirectoryError::StateFile { path: path.to_owned(), source };
    let kept = match std::fs::read_to_string(path) {
        Ok(text) => text.trim().parse::<u64>().ok(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => return Err(failed(error)),
    };
    let boot = kept.map_or(wall, |kept| wall.max(kept + 1));
    let staged = path.with_extension("new");
    std::fs::write(&staged, boot.to_string()).map_err(failed)?;
    std::fs::rename(&staged, path).map_err(failed)?;
    Ok(boot)
}
