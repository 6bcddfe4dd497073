use std::sync::Arc;

use connex_protocol::wire::{Control, Frame, Heartbeat};
use connex_protocol::{Evidence, Incarnation, Peer};
use ractor::{Actor, ActorProcessingErr, ActorRef, async_trait};

use crate::Core;

/// Tells peers that this node is alive and how its work goes.
pub(crate) struct LivenessActor;

/// What the liveness actor is told.
#[derive(Debug)]
pub(crate) enum LivenessMsg {
    /// A link to this peer is up.
    Up(Peer),
    /// The last link to this peer ended.
    Down(Peer, Evidence),
    /// This peer's heartbeat came.
    Heard(Incarnation, Heartbeat),
    /// This peer wants to hear from this node now.
    Nudged(Incarnation),
    /// Time for the next heartbeats.
    Tick,
}

/// The beats sent so far.
pub(crate) struct LivenessState {
    core: Arc<Core>,
    beats: u64,
}

impl LivenessState {
    fn beat(&mut self) -> Frame {
        self.beats += 1;
        let progress = self.core.served().map(|served| served.heartbeat()).unwrap_or_default();
        Frame::Control(Control::Heartbeat(Heartbeat { seq: self.beats, ..progress }))
    }
}

#[async_trait]
impl Actor for LivenessActor {
    type Msg = LivenessMsg;
    type State = LivenessState;
    type Arguments = Arc<Core>;

    async fn pre_start(
        &self,
        myself: ActorRef<LivenessMsg>,
        core: Arc<Core>,
    ) -> Result<LivenessState, ActorProcessingErr> {
        core.doors().put_liveness(myself.clone());
        myself.send_interval(core.config().heartbeat, || LivenessMsg::Tick);
        Ok(LivenessState { core, beats: 0 })
    }

    async fn handle(
        &self,
        _myself: ActorRef<LivenessMsg>,
        message: LivenessMsg,
        state: &mut LivenessState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            LivenessMsg::Tick => {
                let beat = state.beat();
                for peer in state.core.peers() {
                    state.core.send(peer.incarnation, &beat);
                }
            }
            LivenessMsg::Nudged(peer) => {
                let beat = state.beat();
                state.core.send(peer, &beat);
            }
            LivenessMsg::Up(_) | LivenessMsg::Down(..) | LivenessMsg::Heard(..) => {}
        }
        Ok(())
    }
}
