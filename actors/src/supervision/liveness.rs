use std::collections::HashMap;
use std::sync::{Arc, Mutex};

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
    /// Peers were heard.
    Heard,
    /// Time for the next heartbeats.
    Tick,
}

/// What peers said since the liveness actor last looked: the latest word of each that is linked, however often it
/// speaks, so that a flood of heartbeats fills nobody's mailbox.
#[derive(Default)]
pub(crate) struct Heard {
    words: Mutex<HashMap<Incarnation, Word>>,
}

/// A peer's latest word.
#[derive(Debug, Default)]
struct Word {
    heartbeat: Option<Heartbeat>,
    /// It wants to hear from this node now.
    nudged: bool,
}

impl Heard {
    /// A heartbeat came; true if the actor has to be told that something waits.
    pub(crate) fn heartbeat(&self, from: Incarnation, heartbeat: Heartbeat) -> bool {
        self.note(from, |word| word.heartbeat = Some(heartbeat))
    }

    /// The same for a peer that wants to hear from this node now.
    pub(crate) fn nudge(&self, from: Incarnation) -> bool {
        self.note(from, |word| word.nudged = true)
    }

    fn note(&self, from: Incarnation, note: impl FnOnce(&mut Word)) -> bool {
        let mut words = self.words.lock().expect("no holder panics");
        let first = words.is_empty();
        note(words.entry(from).or_default());
        first
    }

    fn take(&self) -> HashMap<Incarnation, Word> {
        std::mem::take(&mut *self.words.lock().expect("no holder panics"))
    }
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

    fn hear(&mut self) {
        for (peer, Word { heartbeat, nudged }) in self.core.heard().take() {
            if let Some(heartbeat) = heartbeat {
                self.judge(DetectInput::Heard(peer, heartbeat));
            }
            if nudged {
                let beat = self.beat();
                self.core.send(peer, &beat);
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
        // What the actor before this one did not come to: nobody rings again while something waits.
        state.hear();
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
                // Nobody is judged before what is here has been heard.
                state.hear();
                state.judge(DetectInput::Tick);
                myself.send_after(state.core.config().heartbeat, || LivenessMsg::Tick);
            }
            LivenessMsg::Up(peer) => state.judge(DetectInput::Up(peer.incarnation)),
            LivenessMsg::Down(peer) => state.judge(DetectInput::Down(peer.incarnation)),
            LivenessMsg::Heard => state.hear(),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_heartbeats_waits_as_one_word_and_rings_once() {
        let heard = Heard::default();
        let peer = Incarnation::from_bits(7);
        let beat = |seq| Heartbeat { seq, ..Heartbeat::default() };
        assert!(heard.heartbeat(peer, beat(0)));
        for seq in 1..100_000 {
            assert!(!heard.heartbeat(peer, beat(seq)));
        }
        assert!(!heard.nudge(peer));
        let words = heard.take();
        assert_eq!(words.len(), 1);
        assert_eq!(words[&peer].heartbeat.unwrap().seq, 99_999, "the latest one counts");
        assert!(words[&peer].nudged);
        assert!(heard.heartbeat(peer, beat(1)), "whoever looked is told again");
    }
}
