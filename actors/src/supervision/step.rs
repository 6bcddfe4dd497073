use std::sync::Arc;

use connex_protocol::{Instant, StepId};
use ractor::{Actor, ActorProcessingErr, ActorRef, async_trait};

use crate::{Core, NodeEvent};

/// Watches over one slot of an endpoint: a step that came by a handover, until it ends. Reused for the slot's next.
///
/// An undisturbed step never wakes it: its submitter and the transport's thread drive the machine themselves.
pub(crate) struct StepActor;

/// What a step's actor is told.
#[derive(Debug)]
pub(crate) enum StepMsg {
    /// The step came here by a handover.
    Adopt(StepId),
    /// It ended at its submitter.
    Ended(StepId),
}

/// The step in the slot, and since when.
pub(crate) struct StepState {
    core: Arc<Core>,
    watched: Vec<(StepId, Instant)>,
}

#[async_trait]
impl Actor for StepActor {
    type Msg = StepMsg;
    type State = StepState;
    type Arguments = Arc<Core>;

    async fn pre_start(
        &self,
        _myself: ActorRef<StepMsg>,
        core: Arc<Core>,
    ) -> Result<StepState, ActorProcessingErr> {
        Ok(StepState { core, watched: Vec::new() })
    }

    async fn handle(
        &self,
        _myself: ActorRef<StepMsg>,
        message: StepMsg,
        state: &mut StepState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            StepMsg::Adopt(step) => state.watched.push((step, state.core.clock().now())),
            StepMsg::Ended(step) => {
                if let Some(at) = state.watched.iter().position(|(id, _)| *id == step) {
                    let (step, since) = state.watched.swap_remove(at);
                    let took = state.core.clock().now().since(since);
                    state.core.emit(NodeEvent::Recovered { step, took });
                }
            }
        }
        Ok(())
    }
}
