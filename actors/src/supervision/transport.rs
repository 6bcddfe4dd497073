use std::sync::Arc;

use ractor::{Actor, ActorProcessingErr, ActorRef, async_trait};

use crate::{Core, NodeEvent};

/// Owns the transport: registers the send ring with it, and sets its progress going again after a panic.
pub(crate) struct TransportSupervisor;

/// What the transport's supervisor is told.
#[derive(Debug)]
pub(crate) enum TransportMsg {
    /// The handler panicked with these words, and progress has stopped.
    ProgressFailed(String),
}

#[async_trait]
impl Actor for TransportSupervisor {
    type Msg = TransportMsg;
    type State = Arc<Core>;
    type Arguments = Arc<Core>;

    async fn pre_start(
        &self,
        myself: ActorRef<TransportMsg>,
        core: Arc<Core>,
    ) -> Result<Arc<Core>, ActorProcessingErr> {
        core.doors().put_transport(myself);
        core.transport().register(core.region().clone()).await?;
        if core.transport().failed() {
            core.transport().restart_progress();
        }
        Ok(core)
    }

    async fn handle(
        &self,
        _myself: ActorRef<TransportMsg>,
        message: TransportMsg,
        core: &mut Arc<Core>,
    ) -> Result<(), ActorProcessingErr> {
        let TransportMsg::ProgressFailed(why) = message;
        core.transport().restart_progress();
        core.emit(NodeEvent::Restarted { actor: format!("{} progress", core.transport().name()), why });
        Ok(())
    }

    async fn post_stop(
        &self,
        _myself: ActorRef<TransportMsg>,
        core: &mut Arc<Core>,
    ) -> Result<(), ActorProcessingErr> {
        core.transport().deregister(core.region()).await;
        Ok(())
    }
}
