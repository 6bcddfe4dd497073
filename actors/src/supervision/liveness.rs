use std::sync::Arc;

use connex_protocol::detect::{DetectConfig, DetectInput, DetectOutput, Detector};
use connex_protocol::wire::{Control, Frame, Heartbeat};
use connex_protocol::{Incarnation, Machine, Peer};
use ractor::{Actor, ActorProcessingErr, ActorRef, async_trait};

use crate::Core;

/// Tells peers that this node is alive and how its work goes, and judges their silence.
pub(crate) struct LivenessActor;

/// What the liveness actor is told.
#[derive(Debug)]
pub(crate) enum LivenessMsg {
    /// A link to this peer is up.
    Up(Peer),
    /// The last link to this peer ended.
    Down(Peer),
    /// This peer's heartbeat came.
    Heard(Incarnation, Heartbeat),
    /// This peer wants to hear from this node now.
    Nudged(Incarnation),
    /// Time for the next heartbeats.
    Tick,
}

/// The beats sent so far, and what those of the peers say.
pub(crate) struct LivenessState {
    core: Arc<Core>,
    beats: u64,
    detector: Detector,
}

impl LivenessState {
    fn judge(&mut self, input: DetectInput) {
        self.detector.handle(self.core.clock().now(), input);
        while let Some(output) = self.detector.poll() {
            let peer = match output {
                DetectOutput::Suspect { peer, .. }
                | DetectOutput::Cleared { peer }
                | DetectOutput::Down { peer, .. } => peer,
            };
            // Only replicas of groups in use matter: a client that falls silent is its own link's affair.
            let Some(peer) = self.core.linked(peer) else { continue };
            let Some(cell) = self.core.find_group(peer.lid.group()) else { continue };
            match output {
                DetectOutput::Suspect { evidence, .. } => cell.on_suspect(&peer, evidence),
                DetectOutput::Cleared { .. } => cell.on_cleared(&peer),
                DetectOutput::Down { evidence, .. } => {
                    cell.on_down(&peer, evidence);
                    // A peer that lost its side of the link can't say so: only another link will be heard (F13). One
                    // that was stopped answers the next dial when it goes on.
                    self.core.transport().disconnect(peer.incarnation);
                }
            }
        }
    }

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
        let interval = core.config().heartbeat;
        let quarter = interval / 4;
        // A jitter by who one is: nodes that start together do not beat together.
        let jitter = quarter * (core.me().incarnation.bits() % 100) as u32 / 100;
        myself.send_after(jitter, || LivenessMsg::Tick);
        let detector = Detector::new(DetectConfig { interval, ..core.config().detect.clone() });
        let mut state = LivenessState { core, beats: 0, detector };
        for peer in state.core.peers() {
            state.judge(DetectInput::Up(peer.incarnation));
        }
        Ok(state)
    }

    async fn handle(
        &self,
        myself: ActorRef<LivenessMsg>,
        message: LivenessMsg,
        state: &mut LivenessState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            LivenessMsg::Tick => {
                let beat = state.beat();
                for peer in state.core.peers() {
                    state.core.send(peer.incarnation, &beat);
                }
                state.judge(DetectInput::Tick);
                myself.send_after(state.core.config().heartbeat, || LivenessMsg::Tick);
            }
            LivenessMsg::Nudged(peer) => {
                let beat = state.beat();
                state.core.send(peer, &beat);
            }
            LivenessMsg::Up(peer) => state.judge(DetectInput::Up(peer.incarnation)),
            LivenessMsg::Down(peer) => state.judge(DetectInput::Down(peer.incarnation)),
            LivenessMsg::Heard(peer, heartbeat) => state.judge(DetectInput::Heard(peer, heartbeat)),
        }
        Ok(())
    }
}
