use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use connex_protocol::directory::{Client, ClientConfig, ClientInput, ClientOutput, Registrant};
use connex_protocol::wire::directory::{Change, Message, Refusal};
use connex_protocol::{Address, Epoch, Evidence, Incarnation, LogicalId, Machine, Peer};
use ractor::concurrency::JoinHandle;
use ractor::{Actor, ActorProcessingErr, ActorRef, MessagingErr, async_trait};
use tokio::sync::{broadcast, watch};

use super::Hook;
use crate::{Core, NodeEvent};

/// How a node stands with the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Nothing is known yet.
    Unknown,
    /// The routes are known; this node holds no identity there.
    Watching,
    /// It waits beside the present holder of its identity.
    Shadowing(Peer, Epoch),
    /// It holds its identity.
    Registered(Epoch),
    /// It could not register yet, and tries again.
    Refused(Refusal),
    /// Its identity is another's now.
    Lost,
    /// It gave its identity up.
    Left,
    /// It was to hand its identity over, and the successor was gone: it holds it on.
    Kept(Epoch),
}

/// Messages from the directory that wait for the client; one that floods its clients loses messages, which they notice.
const INBOX_MAX: usize = 8192;

/// Answers to requests to drain that a slow reader may fall behind.
const DRAINED_MAX: usize = 64;

/// What the client is to be told.
#[derive(Debug)]
enum Item {
    Input(ClientInput),
    Message(Incarnation, Message),
    /// The link to this life ended.
    Down(Incarnation),
    Connected(Result<Incarnation, String>),
}

/// A node's membership: the client's machine, what it is still to be told and what it has come to. All of it outlives
/// the actor that drives it, so a panic loses neither the registration nor a change of a route.
pub struct Membership {
    address: Address,
    client: Mutex<Client>,
    inbox: Mutex<VecDeque<Item>>,
    standing: watch::Sender<Standing>,
    directory: Mutex<Option<Incarnation>>,
    away: AtomicBool,
    drained: broadcast::Sender<(LogicalId, Result<(), Refusal>)>,
}

/// A panic under one of these locks left what they guard as the machine made it; it goes on from there.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Membership {
    /// A membership at the directory at `address`; with a registrant the node's identity is registered.
    pub fn new(address: Address, registrant: Option<Registrant>, random: u64) -> Arc<Self> {
        Self::with_config(address, registrant, random, ClientConfig::default())
    }

    /// The same, with these habits.
    pub fn with_config(
        address: Address,
        registrant: Option<Registrant>,
        random: u64,
        config: ClientConfig,
    ) -> Arc<Self> {
        Arc::new(Membership {
            address,
            client: Mutex::new(Client::new(config, registrant, random)),
            inbox: Mutex::default(),
            standing: watch::Sender::new(Standing::Unknown),
            directory: Mutex::new(None),
            away: AtomicBool::new(false),
            drained: broadcast::Sender::new(DRAINED_MAX),
        })
    }

    /// How the node stands with the directory, now and later.
    pub fn standing(&self) -> watch::Receiver<Standing> {
        self.standing.subscribe()
    }

    /// Answers to requests to drain, from now on.
    pub fn drained(&self) -> broadcast::Receiver<(LogicalId, Result<(), Refusal>)> {
        self.drained.subscribe()
    }

    /// Where the directory is.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The directory is out of reach, as far as is known.
    pub fn is_away(&self) -> bool {
        self.away.load(Ordering::Relaxed)
    }

    /// The epoch, while the node's lease is certain.
    pub fn epoch(&self, core: &Core) -> Option<Epoch> {
        lock(&self.client).epoch(core.clock().now())
    }

    /// Tells the client something; it is told after what came before, even if its actor is just being restarted.
    pub fn tell(&self, core: &Core, input: ClientInput) {
        lock(&self.inbox).push_back(Item::Input(input));
        core.doors().ring_directory();
    }

    fn directory(&self) -> Option<Incarnation> {
        *lock(&self.directory)
    }
}

/// Keeps the node's membership: its lease, its routes, its watch. Traffic goes on with cached routes while the
/// directory is away.
pub(crate) struct DirectoryClientActor;

/// What the directory client is told.
#[derive(Debug)]
pub(crate) enum DirectoryMsg {
    /// Something waits in the membership's inbox.
    Ring,
    /// It is time.
    Tick,
    /// Fail, as a fault injected by a test.
    Crash(String),
}

/// Takes what concerns the directory from the transport's thread.
struct DirectoryDoor {
    membership: Arc<Membership>,
    actor: ActorRef<DirectoryMsg>,
}

impl DirectoryDoor {
    fn put(&self, item: Item) {
        let was_empty = {
            let mut inbox = lock(&self.membership.inbox);
            let was_empty = inbox.is_empty();
            if inbox.len() >= INBOX_MAX && matches!(item, Item::Message(..)) {
                return;
            }
            inbox.push_back(item);
            was_empty
        };
        if was_empty {
            // An actor that is ending looks at the inbox when it starts again.
            let _ = self.actor.send_message(DirectoryMsg::Ring);
        }
    }
}

impl Hook<Message> for DirectoryDoor {
    fn take(&self, from: Incarnation, message: Message) {
        // Only the directory's own word counts.
        if self.membership.directory() == Some(from) {
            self.put(Item::Message(from, message));
        } else {
            tracing::warn!(peer = %from, "a directory's message from somebody else");
        }
    }

    fn link(&self, peer: &Peer, up: bool, _evidence: Option<Evidence>) {
        if !up && self.membership.directory() == Some(peer.incarnation) {
            self.put(Item::Down(peer.incarnation));
        }
    }
}

pub(crate) struct DirectoryState {
    core: Arc<Core>,
    membership: Arc<Membership>,
    timer: Option<JoinHandle<Result<(), MessagingErr<DirectoryMsg>>>>,
    begun: bool,
    complained: bool,
}

impl DirectoryState {
    /// Tells the machine everything that waits, and performs what it wants done.
    fn run(&mut self, myself: &ActorRef<DirectoryMsg>) {
        self.begin();
        loop {
            let Some(item) = lock(&self.membership.inbox).pop_front() else { break };
            if let Some(input) = self.input(item) {
                self.handle(input);
            }
        }
        if let Some(timer) = self.timer.take() {
            timer.abort();
        }
        let deadline = lock(&self.membership.client).deadline();
        if let Some(deadline) = deadline {
            let wait = deadline.since(self.core.clock().now()).max(Duration::from_millis(1));
            self.timer = Some(myself.send_after(wait, || DirectoryMsg::Tick));
        }
    }

    /// Does first what an actor before this one left undone when it failed.
    fn begin(&mut self) {
        if std::mem::replace(&mut self.begun, true) {
            return;
        }
        self.perform_all();
        // The change that it failed in is made again; the others change nothing.
        for change in self.differences() {
            self.core.on_change(change);
        }
        self.handle(ClientInput::Start);
    }

    fn differences(&self) -> Vec<Change> {
        let known: Vec<_> = lock(&self.membership.client).routes().cloned().collect();
        let told = self.core.routes();
        let gone = told.iter().filter(|route| !known.iter().any(|known| known.lid == route.lid));
        let removals = gone.map(|route| Change::Remove {
            lid: route.lid.clone(),
            incarnation: route.incarnation,
            epoch: route.epoch,
            evidence: Evidence::LeaseExpired,
        });
        let news = known.iter().filter(|route| !told.contains(route));
        removals.chain(news.cloned().map(Change::Put)).collect()
    }

    fn input(&mut self, item: Item) -> Option<ClientInput> {
        match item {
            Item::Input(input) => Some(input),
            Item::Message(from, message) => {
                (self.membership.directory() == Some(from)).then_some(ClientInput::Message(message))
            }
            Item::Down(from) => (self.membership.directory() == Some(from)).then_some(ClientInput::Down),
            Item::Connected(Ok(incarnation)) => Some(self.on_connected(incarnation)),
            Item::Connected(Err(why)) => {
                if !std::mem::replace(&mut self.complained, true) {
                    tracing::warn!(why, "the directory can't be reached; trying again");
                }
                Some(ClientInput::Down)
            }
        }
    }

    fn on_connected(&self, incarnation: Incarnation) -> ClientInput {
        *lock(&self.membership.directory) = Some(incarnation);
        ClientInput::Up
    }

    fn handle(&mut self, input: ClientInput) {
        let now = self.core.clock().now();
        lock(&self.membership.client).handle(now, input);
        self.perform_all();
    }

    /// One after the other: if one of them fails, the rest wait in the machine for the next actor.
    fn perform_all(&mut self) {
        loop {
            let Some(output) = lock(&self.membership.client).poll() else { break };
            self.perform(output);
        }
    }

    fn connect(&self) {
        let (core, membership) = (self.core.clone(), self.membership.clone());
        tokio::spawn(async move {
            let result = core.transport().connect(&membership.address, None).await;
            let result = result.map(|peer| peer.incarnation).map_err(|error| error.to_string());
            lock(&membership.inbox).push_back(Item::Connected(result));
            core.doors().ring_directory();
        });
    }

    fn perform(&mut self, output: ClientOutput) {
        let stand = |standing| drop(self.membership.standing.send_replace(standing));
        match output {
            ClientOutput::Connect => self.connect(),
            ClientOutput::Disconnect => {
                if let Some(directory) = self.membership.directory() {
                    self.core.transport().disconnect(directory);
                }
            }
            ClientOutput::Send(message) => {
                if let Some(directory) = self.membership.directory() {
                    self.core.send_directory(directory, message);
                }
            }
            ClientOutput::Change(change) => self.core.on_change(change),
            ClientOutput::Watching => self.stand_at_least_watching(),
            ClientOutput::Registered(epoch) => {
                self.core.transport().set_epoch(epoch);
                self.core.emit(NodeEvent::Registered { epoch });
                stand(Standing::Registered(epoch));
            }
            ClientOutput::Shadowing(holder) => {
                let peer = Peer { lid: holder.lid, incarnation: holder.incarnation };
                stand(Standing::Shadowing(peer, holder.epoch));
            }
            ClientOutput::Refused(refusal) => {
                tracing::info!(%refusal, "not registered yet");
                stand(Standing::Refused(refusal));
            }
            ClientOutput::Lost => {
                stand(Standing::Lost);
                self.core.emit(NodeEvent::IdentityLost);
            }
            ClientOutput::Left => stand(Standing::Left),
            ClientOutput::Kept(epoch) => stand(Standing::Kept(epoch)),
            ClientOutput::Drained(lid, result) => {
                // Nobody waiting for it is no fault.
                let _ = self.membership.drained.send((lid, result));
            }
            ClientOutput::Away => {
                self.membership.away.store(true, Ordering::Relaxed);
                self.core.emit(NodeEvent::DirectoryAway);
            }
            ClientOutput::Back => {
                self.membership.away.store(false, Ordering::Relaxed);
                self.complained = false;
                self.core.emit(NodeEvent::DirectoryBack);
            }
        }
    }

    fn stand_at_least_watching(&self) {
        self.membership.standing.send_if_modified(|standing| {
            let first = *standing == Standing::Unknown;
            if first {
                *standing = Standing::Watching;
            }
            first
        });
    }
}

#[async_trait]
impl Actor for DirectoryClientActor {
    type Msg = DirectoryMsg;
    type State = DirectoryState;
    type Arguments = (Arc<Core>, Arc<Membership>);

    async fn pre_start(
        &self,
        myself: ActorRef<DirectoryMsg>,
        (core, membership): (Arc<Core>, Arc<Membership>),
    ) -> Result<DirectoryState, ActorProcessingErr> {
        let door = DirectoryDoor { membership: membership.clone(), actor: myself.clone() };
        core.doors().set_directory(Arc::new(door));
        core.doors().put_directory_actor(myself.clone());
        myself.send_message(DirectoryMsg::Ring)?;
        Ok(DirectoryState { core, membership, timer: None, begun: false, complained: false })
    }

    async fn handle(
        &self,
        myself: ActorRef<DirectoryMsg>,
        message: DirectoryMsg,
        state: &mut DirectoryState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            DirectoryMsg::Ring => state.run(&myself),
            DirectoryMsg::Tick => {
                state.begin();
                state.handle(ClientInput::Tick);
                state.run(&myself);
            }
            DirectoryMsg::Crash(why) => panic!("{why}"),
        }
        Ok(())
    }
}
