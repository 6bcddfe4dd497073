use std::collections::HashMap;
use std::sync::Arc;

use ractor::{Actor, ActorId, ActorProcessingErr, ActorRef, SupervisionEvent, async_trait};

use super::{
    DirectoryClientActor, GroupSupervisor, LivenessActor, LocalSupervisor, Membership, TransportSupervisor,
    end_of,
};
use crate::serve::EndpointFactory;
use crate::{Core, NodeEvent};

/// The root of a node's tree: starts its branches, and each of them again when it ends. It ends only when told to.
pub struct NodeSupervisor;

/// What the root is told.
pub enum NodeSupervisorMsg {}

/// What a node is made of.
pub struct NodeSupervisorArgs {
    /// The node.
    pub core: Arc<Core>,
    /// Makes the endpoint that it serves, if it serves one.
    pub factory: Option<EndpointFactory>,
    /// Its membership at a directory, if it has one.
    pub membership: Option<Arc<Membership>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Branch {
    Transport,
    Directory,
    Liveness,
    Groups,
    Local,
}

/// The local endpoint is there before the directory tells others of it.
const BRANCHES: [Branch; 5] =
    [Branch::Transport, Branch::Groups, Branch::Local, Branch::Liveness, Branch::Directory];

/// The root's children.
pub struct NodeSupervisorState {
    core: Arc<Core>,
    factory: Option<EndpointFactory>,
    membership: Option<Arc<Membership>>,
    children: HashMap<ActorId, Branch>,
}

impl NodeSupervisorState {
    async fn start(
        &mut self,
        myself: &ActorRef<NodeSupervisorMsg>,
        branch: Branch,
    ) -> Result<(), ActorProcessingErr> {
        let (core, root) = (self.core.clone(), myself.get_cell());
        let id = match branch {
            Branch::Transport => {
                TransportSupervisor::spawn_linked(None, TransportSupervisor, core, root).await?.0.get_id()
            }
            Branch::Directory => {
                let Some(membership) = self.membership.clone() else { return Ok(()) };
                let args = (core, membership);
                DirectoryClientActor::spawn_linked(None, DirectoryClientActor, args, root).await?.0.get_id()
            }
            Branch::Liveness => {
                LivenessActor::spawn_linked(None, LivenessActor, core, root).await?.0.get_id()
            }
            Branch::Groups => {
                GroupSupervisor::spawn_linked(None, GroupSupervisor, core, root).await?.0.get_id()
            }
            Branch::Local => {
                let args = (core, self.factory.clone());
                LocalSupervisor::spawn_linked(None, LocalSupervisor, args, root).await?.0.get_id()
            }
        };
        self.children.insert(id, branch);
        Ok(())
    }
}

impl Drop for NodeSupervisorState {
    /// However the root ends, even half way through its start: its branches are killed with it and run no hook of
    /// their own, so the node's end is here.
    fn drop(&mut self) {
        self.core.close();
    }
}

#[async_trait]
impl Actor for NodeSupervisor {
    type Msg = NodeSupervisorMsg;
    type State = NodeSupervisorState;
    type Arguments = NodeSupervisorArgs;

    async fn pre_start(
        &self,
        myself: ActorRef<NodeSupervisorMsg>,
        args: NodeSupervisorArgs,
    ) -> Result<NodeSupervisorState, ActorProcessingErr> {
        let NodeSupervisorArgs { core, factory, membership } = args;
        let mut state = NodeSupervisorState { core, factory, membership, children: HashMap::new() };
        for branch in BRANCHES {
            state.start(&myself, branch).await?;
        }
        Ok(state)
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<NodeSupervisorMsg>,
        event: SupervisionEvent,
        state: &mut NodeSupervisorState,
    ) -> Result<(), ActorProcessingErr> {
        let Some((id, why)) = end_of(&event) else { return Ok(()) };
        if let Some(branch) = state.children.remove(&id) {
            state.core.emit(NodeEvent::Restarted { actor: format!("{branch:?}").to_lowercase(), why });
            state.start(&myself, branch).await?;
        }
        Ok(())
    }
}
