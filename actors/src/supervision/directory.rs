use std::sync::{Arc, Mutex};
use std::time::Duration;

use connex_protocol::directory::{Client, ClientConfig, ClientInput, ClientOutput, Registrant};
use connex_protocol::wire::directory::{Message, Refusal};
use connex_protocol::{Address, Epoch, Evidence, Incarnation, Machine, Peer};
use ractor::concurrency::JoinHandle;
use ractor::{Actor, ActorProcessingErr, ActorRef, MessagingErr, async_trait};
use tokio::sync::watch;

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

/// A node's membership: the client's machine and what it has come to, outliving the actor that drives it.
pub struct Membership {
    address: Address,
    client: Mutex<Client>,
    standing: watch::Sender<Standing>,
    directory: Mutex<Option<Incarnation>>,
    drained: watch::Sender<Option<Result<(), Refusal>>>,
}

impl Membership {
    /// A membership at the directory at `address`; with a registrant the node's identity is registered.
    pub fn new(address: Address, registrant: Option<Registrant>, random: u64) -> Arc<Self> {
        Arc::new(Membership {
            address,
            client: Mutex::new(Client::new(ClientConfig::default(), registrant, random)),
            standing: watch::Sender::new(Standing::Unknown),
            directory: Mutex::new(None),
            drained: watch::Sender::new(None),
        })
    }

    /// How the node stands with the directory, now and later.
    pub fn standing(&self) -> watch::Receiver<Standing> {
        self.standing.subscribe()
    }

    /// Answers to requests to drain.
    pub fn drained(&self) -> watch::Receiver<Option<Result<(), Refusal>>> {
        self.drained.subscribe()
    }

    /// Where the directory is.
    pub fn address(&self) -> &Address {
        &self.address
    }
}

/// Keeps the node's membership: its lease, its routes, its watch. Traffic goes on with cached routes while the
/// directory is away.
pub(crate) struct DirectoryClientActor;

/// What the directory client is told.
#[derive(Debug)]
pub enum DirectoryMsg {
    /// An input for the client's machine.
    Input(ClientInput),
    /// A message came from this life.
    Message(Incarnation, Message),
    /// A link came up or ended.
    Link(Peer, bool, Option<Evidence>),
    /// The connection was made, to this life, or could not be.
    Connected(Result<Incarnation, String>),
    /// It is time.
    Tick,
}

/// Rings the directory client from the transport's thread.
pub(crate) struct DirectoryDoor(pub(crate) ActorRef<DirectoryMsg>);

impl Hook<Message> for DirectoryDoor {
    fn take(&self, from: Incarnation, message: Message) {
        // An actor that is away has lost nothing: the machine asks again what stays unanswered.
        let _ = self.0.send_message(DirectoryMsg::Message(from, message));
    }

    fn link(&self, peer: &Peer, up: bool, evidence: Option<Evidence>) {
        let _ = self.0.send_message(DirectoryMsg::Link(peer.clone(), up, evidence));
    }
}

pub(crate) struct DirectoryState {
    core: Arc<Core>,
    membership: Arc<Membership>,
    timer: Option<JoinHandle<Result<(), MessagingErr<DirectoryMsg>>>>,
    complained: bool,
}

impl DirectoryState {
    fn drive(&mut self, myself: &ActorRef<DirectoryMsg>, input: ClientInput) {
        let now = self.core.clock().now();
        let (outputs, deadline) = {
            let mut client = self.membership.client.lock().expect("no holder panics");
            client.handle(now, input);
            let outputs: Vec<ClientOutput> = std::iter::from_fn(|| client.poll()).collect();
            (outputs, client.deadline())
        };
        for output in outputs {
            self.perform(myself, output);
        }
        if let Some(timer) = self.timer.take() {
            timer.abort();
        }
        if let Some(deadline) = deadline {
            let wait = deadline.since(self.core.clock().now()).max(Duration::from_millis(1));
            self.timer = Some(myself.send_after(wait, || DirectoryMsg::Tick));
        }
    }

    fn directory(&self) -> Option<Incarnation> {
        *self.membership.directory.lock().expect("no holder panics")
    }

    fn perform(&mut self, myself: &ActorRef<DirectoryMsg>, output: ClientOutput) {
        match output {
            ClientOutput::Connect => {
                let (core, address, door) =
                    (self.core.clone(), self.membership.address.clone(), myself.clone());
                tokio::spawn(async move {
                    let result = core.transport().connect(&address, None).await;
                    let result = result.map(|peer| peer.incarnation).map_err(|error| error.to_string());
                    let _ = door.send_message(DirectoryMsg::Connected(result));
                });
            }
            ClientOutput::Disconnect => {
                if let Some(directory) = self.directory() {
                    self.core.transport().disconnect(directory);
                }
            }
            ClientOutput::Send(message) => {
                if let Some(directory) = self.directory() {
                    self.core.send_directory(directory, message);
                }
            }
            ClientOutput::Change(change) => {
                self.core.on_change(change);
                self.stand_at_least_watching();
            }
            ClientOutput::Registered(epoch) => {
                self.core.transport().set_epoch(epoch);
                self.core.emit(NodeEvent::Registered { epoch });
                self.membership.standing.send_replace(Standing::Registered(epoch));
            }
            ClientOutput::Shadowing(holder) => {
                let peer = Peer { lid: holder.lid, incarnation: holder.incarnation };
                self.membership.standing.send_replace(Standing::Shadowing(peer, holder.epoch));
            }
            ClientOutput::Refused(refusal) => {
                tracing::info!(%refusal, "not registered yet");
                self.membership.standing.send_replace(Standing::Refused(refusal));
            }
            ClientOutput::Lost => {
                self.membership.standing.send_replace(Standing::Lost);
                self.core.emit(NodeEvent::IdentityLost);
            }
            ClientOutput::Left => {
                self.membership.standing.send_replace(Standing::Left);
            }
            ClientOutput::Kept(epoch) => {
                self.membership.standing.send_replace(Standing::Kept(epoch));
            }
            ClientOutput::Drained(result) => {
                self.membership.drained.send_replace(Some(result));
            }
            ClientOutput::Away => {
                self.core.emit(NodeEvent::DirectoryAway);
            }
            ClientOutput::Back => {
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
        core.doors().set_directory(Arc::new(DirectoryDoor(myself.clone())));
        core.doors().set_directory_actor(myself.clone());
        myself.send_message(DirectoryMsg::Input(ClientInput::Start))?;
        Ok(DirectoryState { core, membership, timer: None, complained: false })
    }

    async fn handle(
        &self,
        myself: ActorRef<DirectoryMsg>,
        message: DirectoryMsg,
        state: &mut DirectoryState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            DirectoryMsg::Input(input) => state.drive(&myself, input),
            DirectoryMsg::Tick => state.drive(&myself, ClientInput::Tick),
            DirectoryMsg::Message(from, message) => {
                // Only the directory's own word counts.
                if state.directory() == Some(from) {
                    let watching = matches!(message, Message::Response { .. });
                    state.drive(&myself, ClientInput::Message(message));
                    if watching {
                        state.stand_at_least_watching();
                    }
                }
            }
            DirectoryMsg::Connected(Ok(incarnation)) => {
                *state.membership.directory.lock().expect("no holder panics") = Some(incarnation);
                state.drive(&myself, ClientInput::Up);
            }
            DirectoryMsg::Connected(Err(why)) => {
                if !std::mem::replace(&mut state.complained, true) {
                    tracing::warn!(why, "the directory can't be reached; trying again");
                }
                state.drive(&myself, ClientInput::Down);
            }
            DirectoryMsg::Link(peer, false, _) if state.directory() == Some(peer.incarnation) => {
                state.drive(&myself, ClientInput::Down);
            }
            DirectoryMsg::Link(..) => {}
        }
        Ok(())
    }
}
