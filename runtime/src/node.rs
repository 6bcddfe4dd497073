use std::sync::Arc;
use std::time::Duration;

use connex_actors::{
    Core, CoreConfig, Dispatch, EndpointFactory, NodeEvent, NodeSupervisor, NodeSupervisorArgs, Standing,
};
use connex_protocol::wire::directory::Route;
use connex_protocol::{Address, Epoch, Group, Incarnation, LogicalId, Peer};
use connex_transport::mem::MemHub;
use connex_transport::tcp::{TcpConfig, TcpTransport};
use connex_transport::{Handler, Identity, Transport};
use ractor::{Actor, ActorCell};
use tokio::sync::broadcast;

use crate::GroupHandle;
use crate::directory::{Registration, Via};
use crate::migration::Migration;

/// How a node reaches others.
#[derive(Clone)]
pub enum Reach {
    /// Over TCP, bound to this address.
    Tcp(TcpConfig),
    /// Inside one process, under this name of the hub; for tests.
    Mem(MemHub, String),
    /// By this transport, which somebody else started and whose events go elsewhere.
    Given(Arc<dyn Transport>),
}

impl Reach {
    /// Starts the transport that this asks for.
    pub(crate) fn start(
        self,
        identity: Identity,
        handler: Arc<dyn Handler>,
    ) -> Result<Arc<dyn Transport>, connex_transport::StartError> {
        Ok(match self {
            Reach::Tcp(config) => TcpTransport::start(config, identity, handler)?,
            Reach::Given(transport) => transport,
            Reach::Mem(hub, name) => hub.start(&name, identity, handler)?,
        })
    }
}

/// Why a node could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Its transport could not be started.
    #[error(transparent)]
    Transport(#[from] connex_transport::StartError),
    /// Its supervision tree could not be started.
    #[error("the supervision tree could not be started: {0}")]
    Supervision(#[from] ractor::SpawnErr),
}

/// What a node is to be.
pub struct NodeBuilder {
    lid: LogicalId,
    reach: Reach,
    directory: Via,
    deployment: String,
    config: CoreConfig,
    endpoint: Option<EndpointFactory>,
    shadow: bool,
    guardian: Option<Incarnation>,
}

/// A process's place in a deployment: one identity, one transport, one supervision tree. Dropping it ends it.
pub struct Node {
    core: Arc<Core>,
    root: ActorCell,
    registration: Option<Registration>,
}

impl NodeBuilder {
    /// Over TCP, on this `host:port`; port 0 takes a free one.
    pub fn listen(mut self, listen: &str) -> Self {
        self.reach = Reach::Tcp(TcpConfig { listen: listen.to_owned(), ..TcpConfig::default() });
        self
    }

    /// Reached this way.
    pub fn reach(mut self, reach: Reach) -> Self {
        self.reach = reach;
        self
    }

    /// With the directory at this address.
    pub fn directory(mut self, address: Address) -> Self {
        self.directory = Via::Directory(address);
        self
    }

    /// Told of routes this way.
    pub fn via(mut self, via: Via) -> Self {
        self.directory = via;
        self
    }

    /// In this deployment; connections between deployments are refused.
    pub fn deployment(mut self, name: &str) -> Self {
        self.deployment = name.to_owned();
        self
    }

    /// With these limits.
    pub fn config(mut self, config: CoreConfig) -> Self {
        self.config = config;
        self
    }

    /// Serving its identity with this endpoint.
    pub fn serve(mut self, endpoint: EndpointFactory) -> Self {
        self.endpoint = Some(endpoint);
        self
    }

    /// As the target of a migration: takes the identity over from the process that holds it.
    pub fn migrate(mut self) -> Self {
        self.shadow = true;
        self
    }

    /// Started by the process of this life, whose word on this one's exit ends its lease at once.
    pub fn guardian(mut self, guardian: Incarnation) -> Self {
        self.guardian = Some(guardian);
        self
    }

    /// Starts the node on the caller's tokio runtime.
    pub async fn start(self) -> Result<Node, StartError> {
        let incarnation = Incarnation::from_bits(uuid::Uuid::new_v4().as_u64_pair().0);
        let peer = Peer { lid: self.lid, incarnation };
        let core = Core::new(peer.clone(), self.config);
        let identity = Identity { peer, deployment: self.deployment };
        let handler = Dispatch::new(&core);
        core.set_transport(self.reach.start(identity, handler)?);
        let serves = self.endpoint.is_some();
        if serves {
            core.serve();
        }
        if self.shadow {
            core.take_over();
        }
        let membership = Registration::membership(&core, &self.directory, serves, self.shadow, self.guardian);
        let args =
            NodeSupervisorArgs { core: core.clone(), factory: self.endpoint, membership: membership.clone() };
        let (root, _) = NodeSupervisor::spawn(None, NodeSupervisor, args).await?;
        self.directory.tell(&core);
        let registration = membership.map(|membership| Registration::new(core.clone(), membership));
        if let Some(registration) = registration.clone().filter(|_| serves) {
            Migration::start(core.clone(), registration, self.shadow);
        }
        Ok(Node { core, root: root.get_cell(), registration })
    }
}

impl Node {
    /// A node that serves or submits as this endpoint.
    pub fn builder(lid: LogicalId) -> NodeBuilder {
        NodeBuilder {
            lid,
            reach: Reach::Tcp(TcpConfig::default()),
            directory: Via::Nobody,
            deployment: "default".to_owned(),
            config: CoreConfig::default(),
            endpoint: None,
            shadow: false,
            guardian: None,
        }
    }

    /// A node that only submits: it takes part under a random number of the role `client`.
    pub fn client() -> NodeBuilder {
        let number = uuid::Uuid::new_v4().as_u64_pair().1 as u32;
        Node::builder(Group::new("connex", "client", 0).replica(number))
    }

    /// Who it is.
    pub fn me(&self) -> &Peer {
        self.core.me()
    }

    /// Where peers reach it.
    pub fn address(&self) -> Address {
        self.core.transport().local()
    }

    /// The route to what it serves, for peers that are told of it without a directory ([`Via::Fixed`]).
    pub fn route(&self) -> Route {
        let Peer { lid, incarnation } = self.me().clone();
        let registered = self.registration.as_ref().and_then(Registration::epoch);
        let epoch = registered.unwrap_or(Epoch { boot: 1, counter: 1 });
        Route { lid, incarnation, address: self.address(), epoch, ready: true, draining: false, shadow: None }
    }

    /// Its membership at the directory, if it has one.
    pub fn registration(&self) -> Option<&Registration> {
        self.registration.as_ref()
    }

    /// Waits until the node holds its identity, or, if it serves nothing, until it knows the routes.
    pub async fn ready(&self) -> Standing {
        match &self.registration {
            None => Standing::Watching,
            Some(registration) => {
                let serves = self.core.served().is_some();
                registration
                    .wait_for(|standing| match standing {
                        Standing::Registered(_) | Standing::Kept(_) | Standing::Lost | Standing::Left => true,
                        Standing::Watching => !serves,
                        _ => false,
                    })
                    .await
            }
        }
    }

    /// The node's core, for those who drive its machines themselves.
    pub fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// A group of replicas to submit steps to.
    pub fn group(&self, group: &Group) -> GroupHandle {
        GroupHandle::new(self.core.clone(), group)
    }

    /// Watches what happens from now on.
    pub fn events(&self) -> broadcast::Receiver<NodeEvent> {
        self.core.events()
    }

    /// Leaves in order: takes no new work, gives back what has not begun, waits at most `patience` for what executes,
    /// and gives the identity up.
    pub async fn drain(&self, patience: Duration) {
        if let Some(served) = self.core.served() {
            // What still executes after that is moved by its submitters when the identity is given up.
            let _ = tokio::time::timeout(patience, served.fence()).await;
        }
        if let Some(registration) = &self.registration {
            registration.leave(patience).await;
        }
    }

    /// Ends the node: says goodbye to its peers and stops its actors.
    pub async fn shutdown(self) {
        let patience = Some(Duration::from_secs(2));
        // An actor that does not stop in time is aborted with the runtime; there is nothing else to undo.
        let _ = self.root.stop_and_wait(Some("shutdown".into()), patience).await;
        self.core.transport().shutdown().await;
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.root.stop(Some("dropped".into()));
    }
}
