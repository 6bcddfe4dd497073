//! The actors, one file each, and the doorbells through which the cells and the transport's thread reach them.

mod directory;
mod endpoint;
mod group;
mod liveness;
mod local;
mod node;
mod replica_group;
mod served;
mod step;
mod transport;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use connex_protocol::wire;
use connex_protocol::{Evidence, Group, Incarnation, Peer};
use ractor::{ActorRef, Message};

pub(crate) use directory::{DirectoryClientActor, DirectoryMsg};
pub use directory::{Membership, Standing};
pub(crate) use endpoint::{EndpointActor, EndpointArgs, EndpointMsg, EndpointState};
pub(crate) use group::{GroupSupervisor, GroupSupervisorMsg};
pub(crate) use liveness::{Heard, LivenessActor, LivenessMsg};
pub(crate) use local::LocalSupervisor;
pub use node::{NodeSupervisor, NodeSupervisorArgs};
pub(crate) use replica_group::{ReplicaGroupActor, ReplicaGroupMsg};
pub(crate) use served::{ServedEndpointActor, ServedEndpointArgs, ServedEndpointMsg};
pub(crate) use step::{StepActor, StepMsg};
pub(crate) use transport::{TransportMsg, TransportSupervisor};

use crate::GroupCell;

/// Takes messages of one of the node's other protocols, on the progress thread; it must not block.
pub trait Hook<M>: Send + Sync {
    /// Takes one message.
    fn take(&self, from: Incarnation, message: M);

    /// A link to this peer came up or ended.
    fn link(&self, _peer: &Peer, _up: bool, _evidence: Option<Evidence>) {}
}

/// Which actor of the sending side a test makes panic.
#[derive(Clone, Debug)]
pub enum CrashAt {
    /// The supervisor of all groups.
    Groups,
    /// A group's actor.
    Group(Group),
    /// The actor of a remote endpoint.
    Endpoint(Peer),
}

type Slot<T> = Mutex<Option<T>>;

/// Where each actor can be reached now. An actor that starts puts its own reference here; while it is away its
/// doorbell rings nowhere, and it looks at its cell when it comes back.
#[derive(Default)]
pub struct Doors {
    group_supervisor: Slot<ActorRef<GroupSupervisorMsg>>,
    groups: Mutex<HashMap<Group, ActorRef<ReplicaGroupMsg>>>,
    liveness: Slot<ActorRef<LivenessMsg>>,
    transport: Slot<ActorRef<TransportMsg>>,
    served: Slot<ActorRef<ServedEndpointMsg>>,
    directory: Slot<Arc<dyn Hook<wire::directory::Message>>>,
    directory_actor: Slot<ActorRef<DirectoryMsg>>,
    cutover: Slot<Arc<dyn Hook<wire::cutover::Message>>>,
}

fn ring<M: Message>(slot: &Slot<ActorRef<M>>, message: M) {
    let actor = slot.lock().expect("no holder panics").clone();
    if let Some(actor) = actor {
        // An actor that is ending looks at its cell when it starts again.
        let _ = actor.send_message(message);
    }
}

fn put<T>(slot: &Slot<T>, value: T) {
    let before = slot.lock().expect("no holder panics").replace(value);
    // Without the lock: what it holds may ring here when it is dropped.
    drop(before);
}

impl Doors {
    /// Gives the directory's messages to this hook.
    pub fn set_directory(&self, hook: Arc<dyn Hook<wire::directory::Message>>) {
        put(&self.directory, hook);
    }

    /// Forgets everybody: what they hold of the node is let go.
    pub(crate) fn close(&self) {
        fn empty<T>(slot: &Slot<T>) {
            // Dropped without the lock: it may be the last one to hold the node.
            let value = slot.lock().expect("no holder panics").take();
            drop(value);
        }
        empty(&self.group_supervisor);
        empty(&self.liveness);
        empty(&self.transport);
        empty(&self.served);
        empty(&self.directory);
        empty(&self.directory_actor);
        empty(&self.cutover);
        let groups = std::mem::take(&mut *self.groups.lock().expect("no holder panics"));
        drop(groups);
    }

    pub(crate) fn put_directory_actor(&self, actor: ActorRef<DirectoryMsg>) {
        put(&self.directory_actor, actor);
    }

    /// Something waits in the inbox of the node's membership.
    pub(crate) fn ring_directory(&self) {
        ring(&self.directory_actor, DirectoryMsg::Ring);
    }

    /// Makes the directory client fail, as a fault injected by a test.
    pub fn crash_directory_client(&self, why: &str) {
        ring(&self.directory_actor, DirectoryMsg::Crash(why.to_owned()));
    }

    /// Gives the messages of migrations to this hook.
    pub fn set_cutover(&self, hook: Arc<dyn Hook<wire::cutover::Message>>) {
        put(&self.cutover, hook);
    }

    pub(crate) fn put_group_supervisor(&self, actor: ActorRef<GroupSupervisorMsg>) {
        put(&self.group_supervisor, actor);
    }

    pub(crate) fn put_group(&self, group: Group, actor: ActorRef<ReplicaGroupMsg>) {
        let before = self.groups.lock().expect("no holder panics").insert(group, actor);
        drop(before);
    }

    pub(crate) fn put_liveness(&self, actor: ActorRef<LivenessMsg>) {
        put(&self.liveness, actor);
    }

    pub(crate) fn put_transport(&self, actor: ActorRef<TransportMsg>) {
        put(&self.transport, actor);
    }

    pub(crate) fn progress_failed(&self, why: String) {
        ring(&self.transport, TransportMsg::ProgressFailed(why));
    }

    pub(crate) fn put_served(&self, actor: ActorRef<ServedEndpointMsg>) {
        put(&self.served, actor);
    }

    pub(crate) fn ensure_group(&self, cell: &Arc<GroupCell>) {
        ring(&self.group_supervisor, GroupSupervisorMsg::Ensure(cell.clone()));
    }

    /// Makes an actor of the sending side panic, as a fault that a test injects.
    pub fn crash(&self, at: CrashAt, why: &str) {
        let (group, endpoint) = match at {
            CrashAt::Groups => (None, None),
            CrashAt::Group(group) => (Some(group), None),
            CrashAt::Endpoint(peer) => (Some(peer.lid.group().clone()), Some(peer.incarnation)),
        };
        ring(&self.group_supervisor, GroupSupervisorMsg::Crash(why.to_owned(), group, endpoint));
    }

    pub(crate) fn group_duty(&self, group: &Group) {
        let actor = self.groups.lock().expect("no holder panics").get(group).cloned();
        if let Some(actor) = actor {
            let _ = actor.send_message(ReplicaGroupMsg::Duty);
        }
    }

    pub(crate) fn liveness(&self, msg: LivenessMsg) {
        ring(&self.liveness, msg);
    }

    pub(crate) fn on_link(&self, peer: &Peer, up: bool, evidence: Option<Evidence>) {
        ring(&self.served, ServedEndpointMsg::Link(peer.clone(), up));
        let hook = self.directory.lock().expect("no holder panics").clone();
        if let Some(hook) = hook {
            hook.link(peer, up, evidence);
        }
        let hook = self.cutover.lock().expect("no holder panics").clone();
        if let Some(hook) = hook {
            hook.link(peer, up, evidence);
        }
    }

    pub(crate) fn on_directory(&self, from: Incarnation, message: wire::directory::Message) {
        let hook = self.directory.lock().expect("no holder panics").clone();
        match hook {
            Some(hook) => hook.take(from, message),
            None => tracing::warn!(peer = %from, "a directory message for a node without one"),
        }
    }

    pub(crate) fn on_cutover(&self, from: Incarnation, message: wire::cutover::Message) {
        let hook = self.cutover.lock().expect("no holder panics").clone();
        match hook {
            Some(hook) => hook.take(from, message),
            None => tracing::warn!(peer = %from, "a migration message for a node that takes none"),
        }
    }
}

/// Whether a supervised child ended, and why.
pub(crate) fn end_of(event: &ractor::SupervisionEvent) -> Option<(ractor::ActorId, String)> {
    use ractor::SupervisionEvent::{ActorFailed, ActorTerminated};
    match event {
        ActorTerminated(who, _, reason) => {
            Some((who.get_id(), reason.clone().unwrap_or_else(|| "it stopped".into())))
        }
        ActorFailed(who, error) => Some((who.get_id(), error.to_string())),
        _ => None,
    }
}
