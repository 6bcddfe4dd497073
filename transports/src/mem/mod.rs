//! A network inside one process, for tests: named addresses (`mem://name`), and verbs that break it.
//!
//! It keeps the whole contract of [`Transport`], with payloads by reference. One hub thread delivers; a caller of
//! [`Transport::progress`] delivers its own node's events instead.

mod hub;
mod net;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use connex_protocol::{Address, Epoch, Incarnation, Peer};
use tokio::sync::oneshot;

use crate::{
    ConnectError, Handler, Identity, Op, Refused, RefusedWhy, Region, RegionError, StartError, Transport,
};
use hub::Shared;
use net::NodeNo;

/// What bounds a [`MemHub`]'s queues and waits.
#[derive(Clone, Debug)]
pub struct MemConfig {
    /// The largest frame on the control lane, in bytes.
    pub control_frame_max: usize,
    /// The largest frame on the bulk lane, in bytes.
    pub bulk_frame_max: usize,
    /// How many bytes of frames may wait for one peer on one lane.
    pub queue_max: usize,
    /// How many one-sided operations a transport may have under way.
    pub operations_max: usize,
    /// How long `connect` waits for an answer.
    pub handshake_deadline: Duration,
}

impl Default for MemConfig {
    fn default() -> Self {
        MemConfig {
            control_frame_max: connex_protocol::wire::CONTROL_FRAME_MAX,
            bulk_frame_max: connex_protocol::wire::STREAM_FRAME_MAX,
            queue_max: 64 << 20,
            operations_max: 4096,
            handshake_deadline: Duration::from_secs(2),
        }
    }
}

/// The network: a clonable handle. The hub's thread ends with the last handle and the last transport.
#[derive(Clone)]
pub struct MemHub {
    running: Arc<Running>,
}

/// Ends the hub's thread when nobody can reach it any more.
struct Running {
    shared: Arc<Shared>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.shared.stop();
    }
}

impl Default for MemHub {
    fn default() -> Self {
        Self::new(MemConfig::default())
    }
}

impl MemHub {
    /// A network without nodes.
    pub fn new(config: MemConfig) -> Self {
        let shared = Arc::new(Shared::new(config));
        let hub = shared.clone();
        std::thread::Builder::new()
            .name("connex-mem".into())
            .spawn(move || hub.run())
            .expect("the operating system can start a thread");
        MemHub { running: Arc::new(Running { shared }) }
    }

    /// Starts a node at `mem://name`. A crashed or shut down node's name is free again.
    pub fn start(
        &self,
        name: &str,
        identity: Identity,
        handler: Arc<dyn Handler>,
    ) -> Result<Arc<MemTransport>, StartError> {
        let address = Address::new(&format!("mem://{name}"));
        let own = identity.peer.incarnation;
        let node = self
            .shared()
            .start(name, identity, handler)
            .ok_or_else(|| StartError::InUse { address: address.clone() })?;
        Ok(Arc::new(MemTransport { running: self.running.clone(), node, own, address }))
    }

    /// Cuts the way from `a` to `b`: frames, requests and news of an end vanish silently, the link stays up.
    pub fn cut_one_way(&self, a: &str, b: &str) {
        self.shared().cut(a, b);
    }

    /// Cuts both ways between `a` and `b`.
    pub fn cut(&self, a: &str, b: &str) {
        self.cut_one_way(a, b);
        self.cut_one_way(b, a);
    }

    /// Ends every cut between `a` and `b`. What vanished stays lost; a peer that died meanwhile is now seen as reset.
    pub fn heal(&self, a: &str, b: &str) {
        self.shared().heal(a, b);
    }

    /// Breaks the link between `a` and `b`: both see `Down` with `ConnectionReset`.
    pub fn sever(&self, a: &str, b: &str) {
        self.shared().sever(a, b);
    }

    /// Delays everything between `a` and `b`, each way; zero ends it. The order of frames is kept.
    pub fn delay(&self, a: &str, b: &str, by: Duration) {
        self.shared().delay(a, b, by);
    }

    /// Ends a node as SIGKILL would: its peers see `Down` with `ConnectionClosed`, its own handler is not called any
    /// more once this has returned.
    pub fn crash(&self, name: &str) {
        self.shared().crash_name(name);
    }

    /// Stops a node as SIGSTOP would: it neither handles nor sends, and its links stay up.
    pub fn freeze(&self, name: &str) {
        self.shared().freeze(name, true);
    }

    /// Lets a frozen node go on, as SIGCONT would.
    pub fn thaw(&self, name: &str) {
        self.shared().freeze(name, false);
    }

    fn shared(&self) -> &Shared {
        &self.running.shared
    }
}

impl fmt::Debug for MemHub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MemHub")
    }
}

/// A node of a [`MemHub`]. Dropping it without `shutdown` is a crash.
pub struct MemTransport {
    running: Arc<Running>,
    node: NodeNo,
    own: Incarnation,
    address: Address,
}

impl MemTransport {
    fn shared(&self) -> &Shared {
        &self.running.shared
    }
}

impl Drop for MemTransport {
    fn drop(&mut self) {
        self.shared().crash(self.node);
    }
}

#[async_trait::async_trait]
impl Transport for MemTransport {
    fn name(&self) -> &'static str {
        "mem"
    }

    fn local(&self) -> Address {
        self.address.clone()
    }

    fn set_epoch(&self, epoch: Epoch) {
        self.shared().set_epoch(self.node, epoch);
    }

    async fn connect(&self, to: &Address, expects: Option<Incarnation>) -> Result<Peer, ConnectError> {
        let ("mem", name) = to.split() else {
            return Err(ConnectError::Address {
                address: to.clone(),
                why: "not an address of the mem transport: write mem://NAME".into(),
            });
        };
        let (reply, answer) = oneshot::channel();
        self.shared().connect(self.node, name, to, expects, reply);
        answer.await.unwrap_or(Err(ConnectError::ShutDown))
    }

    fn disconnect(&self, peer: Incarnation) {
        self.shared().disconnect(self.node, peer);
    }

    fn fence(&self, peer: Incarnation) {
        self.shared().fence(self.node, peer);
    }

    async fn register(&self, region: Arc<Region>) -> Result<(), RegionError> {
        if region.key().owner != self.own {
            return Err(RegionError::Unsupported);
        }
        self.shared().register(self.node, region)
    }

    async fn deregister(&self, region: &Region) {
        self.shared().deregister(self.node, region.key());
    }

    fn post(&self, op: Op) -> Result<(), Refused> {
        self.shared().post(self.node, op).map_err(|(op, why): (Op, RefusedWhy)| Refused { op, why })
    }

    fn progress(&self, wait: Duration) -> bool {
        self.shared().progress(self.node, wait)
    }

    fn failed(&self) -> bool {
        self.shared().failed(self.node)
    }

    fn restart_progress(&self) {
        self.shared().restart(self.node);
    }

    fn backlog(&self, peer: Incarnation) -> usize {
        self.shared().backlog(self.node, peer)
    }

    async fn shutdown(&self) {
        let (done, ended) = oneshot::channel();
        self.shared().shutdown(self.node, done);
        // A dropped sender means that the node had ended before.
        let _ = ended.await;
    }
}
