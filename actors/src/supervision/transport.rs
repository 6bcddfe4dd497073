use std::sync::Arc;

use ractor::{Actor, ActorProcessingErr, ActorRef, async_trait};

use crate::Core;

/// Owns the transport: registers the send ring with it, and shuts it down when the node ends.
pub(crate) struct TransportSupervisor;

#[async_trait]
impl Actor for TransportSupervisor {
    type Msg = ();
    type State = Arc<Core>;
    type Arguments = Arc<Core>;

    async fn pre_start(
        &self,
        _myself: ActorRef<()>,
        core: Arc<Core>,
    ) -> Result<Arc<Core>, ActorProcessingErr> {
        core.transport().register(core.region().clone()).await?;
        Ok(core)
    }

    async fn post_stop(&self, _myself: ActorRef<()>, core: &mut Arc<Core>) -> Result<(), ActorProcessingErr> {
        core.transport().deregister(core.region()).await;
        Ok(())
    }
}
