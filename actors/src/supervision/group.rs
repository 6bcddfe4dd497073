use std::collections::HashMap;
use std::sync::Arc;

use connex_protocol::{Group, Incarnation};
use ractor::{Actor, ActorId, ActorProcessingErr, ActorRef, SupervisionEvent, async_trait};

use super::{ReplicaGroupActor, ReplicaGroupMsg, end_of};
use crate::{Core, GroupCell, NodeEvent};

/// Starts an actor for each group in use, and again when one fails.
pub(crate) struct GroupSupervisor;

/// What the supervisor of groups is told.
pub(crate) enum GroupSupervisorMsg {
    /// This group is in use.
    Ensure(Arc<GroupCell>),
    /// Fail, as a fault injected by a test; in this group if one is named, at this endpoint if one is named.
    Crash(String, Option<Group>, Option<Incarnation>),
}

/// The groups' actors.
pub(crate) struct GroupSupervisorState {
    core: Arc<Core>,
    children: HashMap<ActorId, (Group, ActorRef<ReplicaGroupMsg>)>,
}

impl GroupSupervisorState {
    async fn ensure(
        &mut self,
        myself: &ActorRef<GroupSupervisorMsg>,
        cell: Arc<GroupCell>,
    ) -> Result<(), ActorProcessingErr> {
        let group = cell.group().clone();
        if self.children.values().any(|(known, _)| *known == group) {
            return Ok(());
        }
        let args = (self.core.clone(), cell);
        let (actor, _) =
            ReplicaGroupActor::spawn_linked(None, ReplicaGroupActor, args, myself.get_cell()).await?;
        self.children.insert(actor.get_id(), (group, actor));
        Ok(())
    }
}

#[async_trait]
impl Actor for GroupSupervisor {
    type Msg = GroupSupervisorMsg;
    type State = GroupSupervisorState;
    type Arguments = Arc<Core>;

    async fn pre_start(
        &self,
        _myself: ActorRef<GroupSupervisorMsg>,
        core: Arc<Core>,
    ) -> Result<GroupSupervisorState, ActorProcessingErr> {
        Ok(GroupSupervisorState { core, children: HashMap::new() })
    }

    async fn post_start(
        &self,
        myself: ActorRef<GroupSupervisorMsg>,
        state: &mut GroupSupervisorState,
    ) -> Result<(), ActorProcessingErr> {
        state.core.doors().put_group_supervisor(myself.clone());
        for cell in state.core.groups() {
            state.ensure(&myself, cell).await?;
        }
        Ok(())
    }

    async fn handle(
        &self,
        myself: ActorRef<GroupSupervisorMsg>,
        message: GroupSupervisorMsg,
        state: &mut GroupSupervisorState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            GroupSupervisorMsg::Ensure(cell) => state.ensure(&myself, cell).await,
            GroupSupervisorMsg::Crash(why, group, endpoint) => {
                let child = state.children.values().find(|(known, _)| Some(known) == group.as_ref());
                match child {
                    Some((_, actor)) => Ok(actor.send_message(ReplicaGroupMsg::Crash(why, endpoint))?),
                    None => panic!("{why}"),
                }
            }
        }
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<GroupSupervisorMsg>,
        event: SupervisionEvent,
        state: &mut GroupSupervisorState,
    ) -> Result<(), ActorProcessingErr> {
        let Some((id, why)) = end_of(&event) else { return Ok(()) };
        let Some((group, _)) = state.children.remove(&id) else { return Ok(()) };
        let cell = state.core.groups().into_iter().find(|cell| *cell.group() == group);
        if let Some(cell) = cell {
            state.core.emit(NodeEvent::Restarted { actor: format!("group {group}"), why });
            state.ensure(&myself, cell).await?;
        }
        Ok(())
    }
}
