use std::sync::Arc;
use std::time::{Duration, Instant};

use ractor::{Actor, ActorId, ActorProcessingErr, ActorRef, SupervisionEvent, async_trait};

use super::{ServedEndpointActor, ServedEndpointArgs, end_of};
use crate::serve::EndpointFactory;
use crate::{Core, NodeEvent};

/// How long an endpoint that can't be made, or fails again as soon as it is, is left alone before it is tried again.
const RETRY: Duration = Duration::from_millis(200);

/// Supervises the endpoint that this node serves.
pub(crate) struct LocalSupervisor;

/// What the local supervisor is told.
pub(crate) enum LocalSupervisorMsg {
    /// Start the endpoint, for the first time or again.
    Start,
}

/// The served endpoint's actor, if this node serves one.
pub(crate) struct LocalSupervisorState {
    core: Arc<Core>,
    factory: Option<EndpointFactory>,
    child: Option<ActorId>,
    since: Instant,
    /// Failures in a row, each within [`RETRY`] of its start.
    quick: u32,
}

#[async_trait]
impl Actor for LocalSupervisor {
    type Msg = LocalSupervisorMsg;
    type State = LocalSupervisorState;
    type Arguments = (Arc<Core>, Option<EndpointFactory>);

    async fn pre_start(
        &self,
        myself: ActorRef<LocalSupervisorMsg>,
        (core, factory): (Arc<Core>, Option<EndpointFactory>),
    ) -> Result<LocalSupervisorState, ActorProcessingErr> {
        myself.send_message(LocalSupervisorMsg::Start)?;
        Ok(LocalSupervisorState { core, factory, child: None, since: Instant::now(), quick: 0 })
    }

    async fn handle(
        &self,
        myself: ActorRef<LocalSupervisorMsg>,
        message: LocalSupervisorMsg,
        state: &mut LocalSupervisorState,
    ) -> Result<(), ActorProcessingErr> {
        let LocalSupervisorMsg::Start = message;
        let Some(factory) = state.factory.clone() else { return Ok(()) };
        state.since = Instant::now();
        let args = ServedEndpointArgs { core: state.core.clone(), factory };
        match ServedEndpointActor::spawn_linked(None, ServedEndpointActor, args, myself.get_cell()).await {
            Ok((actor, _)) => state.child = Some(actor.get_id()),
            Err(error) => {
                tracing::error!(%error, "the served endpoint could not be started; trying again");
                myself.send_after(RETRY, || LocalSupervisorMsg::Start);
            }
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<LocalSupervisorMsg>,
        event: SupervisionEvent,
        state: &mut LocalSupervisorState,
    ) -> Result<(), ActorProcessingErr> {
        if let Some((id, why)) = end_of(&event)
            && state.child == Some(id)
        {
            state.child = None;
            let actor = format!("served endpoint {}", state.core.me().lid);
            state.core.emit(NodeEvent::Restarted { actor, why });
            state.quick = if state.since.elapsed() < RETRY { state.quick + 1 } else { 0 };
            match state.quick {
                0 | 1 => myself.send_message(LocalSupervisorMsg::Start)?,
                _ => drop(myself.send_after(RETRY, || LocalSupervisorMsg::Start)),
            }
        }
        Ok(())
    }
}
