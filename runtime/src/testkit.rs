//! A deployment inside one process, with faults, for the integration tests of those who embed the runtime.
//!
//! ```
//! # async fn test() {
//! use connex::testkit::Cluster;
//! use connex::{Bytes, Group, NodeEvent, Step, serve_fn};
//!
//! let mut cluster = Cluster::start().await;
//! let group = Group::new("m", "echo", 0);
//! for replica in 0..2 {
//!     cluster.serve(group.replica(replica), serve_fn(|step| Ok(step.payload().clone()))).await;
//! }
//! let handle = cluster.client().group(&group);
//! cluster.kill(&group.replica(0)).await;
//! cluster.expect(|event| matches!(event, NodeEvent::Down { .. })).await;
//! let reply = handle.call(Step::new("").payload("hello")).await.expect("the other replica answers");
//! assert_eq!(reply.body, Bytes::from("hello"));
//! # }
//! ```

use std::collections::BTreeMap;
use std::time::Duration;

use connex_actors::{CoreConfig, EndpointFactory, NodeEvent};
use connex_protocol::directory::RegistryConfig;
use connex_protocol::{Evidence, LogicalId, Peer};
use connex_transport::mem::MemHub;
use tokio::sync::broadcast;

use crate::directory::{Directory, DirectoryConfig};
use crate::{Node, Reach};

/// How long [`Cluster::expect`] waits: five times what any event of a healthy machine takes.
const PATIENCE: Duration = Duration::from_secs(20);

struct Served {
    node: Node,
    name: String,
    endpoint: EndpointFactory,
}

/// A directory, a client and any number of served endpoints on the mem transport.
pub struct Cluster {
    hub: MemHub,
    directory: Directory,
    client: Node,
    events: broadcast::Receiver<NodeEvent>,
    served: BTreeMap<LogicalId, Served>,
    config: CoreConfig,
    lives: u32,
}

impl Cluster {
    /// Starts the directory and the client.
    pub async fn start() -> Self {
        Self::with(CoreConfig::default()).await
    }

    /// Starts them with these limits for every node.
    pub async fn with(config: CoreConfig) -> Self {
        let hub = MemHub::default();
        let directory = Directory::start(DirectoryConfig {
            reach: Reach::Mem(hub.clone(), "directory".into()),
            deployment: "test".into(),
            registry: RegistryConfig { first: true, ..RegistryConfig::default() },
            state_file: None,
        })
        .await
        .expect("a fresh hub has the name free");
        let client = Node::client()
            .reach(Reach::Mem(hub.clone(), "client".into()))
            .directory(directory.address())
            .deployment("test")
            .config(config.clone())
            .start()
            .await
            .expect("a fresh hub has the name free");
        client.ready().await;
        let events = client.events();
        Cluster { hub, directory, client, events, served: BTreeMap::new(), config, lives: 0 }
    }

    /// The client, whose events [`Cluster::expect`] reads.
    pub fn client(&self) -> &Node {
        &self.client
    }

    /// The directory.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// The network, for faults beyond the verbs here; nodes are named by [`Cluster::name_of`].
    pub fn hub(&self) -> &MemHub {
        &self.hub
    }

    /// The name of an endpoint's present life on the network.
    pub fn name_of(&self, lid: &LogicalId) -> &str {
        &self.served[lid].name
    }

    /// A served endpoint's node.
    pub fn node(&self, lid: &LogicalId) -> &Node {
        &self.served[lid].node
    }

    /// Serves an endpoint, and waits until the client may choose it.
    pub async fn serve(&mut self, lid: LogicalId, endpoint: EndpointFactory) {
        self.begin(lid, endpoint, false).await;
    }

    async fn begin(&mut self, lid: LogicalId, endpoint: EndpointFactory, migrate: bool) -> Option<Served> {
        // The client is a submitter of the group from now on, so that it hears of its replicas.
        let handle = self.client.group(lid.group());
        self.lives += 1;
        let name = format!("{lid}#{}", self.lives);
        let mut builder = Node::builder(lid.clone())
            .reach(Reach::Mem(self.hub.clone(), name.clone()))
            .directory(self.directory.address())
            .deployment("test")
            .config(self.config.clone())
            .guardian(self.client.me().incarnation)
            .serve(endpoint.clone());
        if migrate {
            builder = builder.migrate();
        }
        let node = builder.start().await.expect("each life has a name of its own");
        node.ready().await;
        let me = node.me().clone();
        let before = self.served.insert(lid, Served { node, name, endpoint });
        let mut events = self.client.events();
        while !handle.replicas().iter().any(|replica| replica.peer == me && replica.routable) {
            // A missed event is no fault: the state is looked at again.
            let heard = tokio::time::timeout(PATIENCE, events.recv()).await;
            assert!(heard.is_ok(), "the client did not hear of {me}");
        }
        before
    }

    /// Ends an endpoint's process without a word, as SIGKILL does. Its parent reports the exit, as `connex up` does.
    pub async fn kill(&mut self, lid: &LogicalId) -> EndpointFactory {
        let Served { node, name, endpoint } = self.served.remove(lid).expect("it is served");
        self.hub.crash(&name);
        let peer: Peer = node.me().clone();
        if let Some(registration) = self.client.registration() {
            registration.report(peer.lid, peer.incarnation, Evidence::ProcessExited);
        }
        endpoint
    }

    /// Takes an endpoint's node out of the cluster's hands without ending it: a process that others think dead.
    pub fn take(&mut self, lid: &LogicalId) -> Node {
        self.served.remove(lid).expect("it is served").node
    }

    /// Stops an endpoint's process, as SIGSTOP does: its links stay up, and it does nothing.
    pub fn hang(&self, lid: &LogicalId) {
        self.hub.freeze(&self.served[lid].name);
    }

    /// Lets it go on, as SIGCONT does.
    pub fn thaw(&self, lid: &LogicalId) {
        self.hub.thaw(&self.served[lid].name);
    }

    /// Lets frames between the client and an endpoint vanish, both ways.
    pub fn cut(&self, lid: &LogicalId) {
        self.hub.cut("client", &self.served[lid].name);
    }

    /// Ends a cut.
    pub fn heal(&self, lid: &LogicalId) {
        self.hub.heal("client", &self.served[lid].name);
    }

    /// Ends the link between the client and an endpoint, on both sides; both live on.
    pub fn sever(&self, lid: &LogicalId) {
        self.hub.sever("client", &self.served[lid].name);
    }

    /// Delays what the client and an endpoint send each other.
    pub fn delay(&self, lid: &LogicalId, by: Duration) {
        self.hub.delay("client", &self.served[lid].name, by);
        self.hub.delay(&self.served[lid].name, "client", by);
    }

    /// Kills an endpoint and starts it again under the same identity, in a new life.
    pub async fn restart(&mut self, lid: &LogicalId) {
        let endpoint = self.kill(lid).await;
        self.serve(lid.clone(), endpoint).await;
    }

    /// Moves an endpoint's identity to a new life, without losing a step.
    pub async fn migrate(&mut self, lid: &LogicalId) {
        let endpoint = self.served[lid].endpoint.clone();
        if let Some(source) = self.begin(lid.clone(), endpoint, true).await {
            source.node.shutdown().await;
        }
    }

    /// Waits for an event of the client's that `wanted` accepts; panics after 20 s without one, and then says how many
    /// events came too fast for it to see.
    pub async fn expect(&mut self, mut wanted: impl FnMut(&NodeEvent) -> bool) -> NodeEvent {
        let mut missed = 0;
        let waiting = async {
            loop {
                match self.events.recv().await {
                    Ok(event) if wanted(&event) => return event,
                    Ok(_) => {}
                    Err(broadcast::error::RecvError::Lagged(events)) => missed += events,
                    Err(broadcast::error::RecvError::Closed) => {
                        unreachable!("the client lives as long as this")
                    }
                }
            }
        };
        let event = tokio::time::timeout(PATIENCE, waiting).await;
        event.unwrap_or_else(|_| {
            panic!("no such event in {PATIENCE:?}; {missed} were missed: if more than 0, raise `CoreConfig::events`")
        })
    }
}
