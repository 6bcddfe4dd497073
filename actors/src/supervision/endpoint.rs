use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use connex_protocol::wire::hello::Reject;
use connex_protocol::{Address, Evidence, Peer, StepId};
use connex_transport::ConnectError;
use ractor::{Actor, ActorProcessingErr, ActorRef, SupervisionEvent, async_trait};

use super::{StepActor, StepMsg, end_of};
use crate::{Core, NodeEvent};

/// The first pause between attempts to connect; it doubles up to the last.
const BACKOFF_FIRST: Duration = Duration::from_millis(10);
const BACKOFF_LAST: Duration = Duration::from_secs(1);

/// A life that does not answer so many times in a row is reported as unreachable: one that has just ended is forgotten
/// by then.
const FAILURES_MAX: u32 = 5;

/// One life of a remote endpoint: keeps the connection to it, and ends with the evidence when that life is over, so
/// that its supervisor hands its steps over.
pub(crate) struct EndpointActor;

/// What an endpoint's actor is told.
#[derive(Debug)]
pub(crate) enum EndpointMsg {
    /// Connect now.
    Connect,
    /// That did not work.
    ConnectFailed(ConnectError),
    /// The life is over or out of reach.
    Down(Evidence),
    /// Steps came here by a handover.
    Adopt(Vec<StepId>),
    /// A step that had come by a handover ended.
    Ended(StepId),
    /// Fail, as a fault injected by a test.
    Crash(String),
}

/// Whom to keep a connection to.
pub(crate) struct EndpointArgs {
    pub(crate) core: Arc<Core>,
    pub(crate) peer: Peer,
    pub(crate) address: Address,
    /// How long to keep off first: a link that ended as soon as it was up is not made again at once.
    pub(crate) keep_off: Duration,
}

/// The endpoint's state; the supervisor reads the evidence out of it when the actor has ended.
pub(crate) struct EndpointState {
    core: Arc<Core>,
    pub(crate) peer: Peer,
    address: Address,
    backoff: Duration,
    failures: u32,
    complained: bool,
    pub(crate) evidence: Option<Evidence>,
    /// One actor per slot, started at the first handover that needs it and reused from then on.
    slots: Vec<ActorRef<StepMsg>>,
    watched: HashMap<StepId, usize>,
}

impl EndpointState {
    async fn adopt(
        &mut self,
        myself: &ActorRef<EndpointMsg>,
        steps: Vec<StepId>,
    ) -> Result<(), ActorProcessingErr> {
        for step in steps {
            let free = (0..self.slots.len()).find(|slot| !self.watched.values().any(|used| used == slot));
            let slot = match free {
                Some(slot) => slot,
                None => {
                    let core = self.core.clone();
                    let (actor, _) =
                        StepActor::spawn_linked(None, StepActor, core, myself.get_cell()).await?;
                    self.slots.push(actor);
                    self.slots.len() - 1
                }
            };
            self.watched.insert(step, slot);
            let _ = self.slots[slot].send_message(StepMsg::Adopt(step));
        }
        Ok(())
    }

    /// Starts a slot's actor again after it failed; it watches over the same step.
    async fn restart_slot(
        &mut self,
        myself: &ActorRef<EndpointMsg>,
        id: ractor::ActorId,
        why: String,
    ) -> Result<(), ActorProcessingErr> {
        let Some(slot) = self.slots.iter().position(|actor| actor.get_id() == id) else { return Ok(()) };
        let (actor, _) =
            StepActor::spawn_linked(None, StepActor, self.core.clone(), myself.get_cell()).await?;
        for (step, at) in &self.watched {
            if *at == slot {
                let _ = actor.send_message(StepMsg::Adopt(*step));
            }
        }
        self.slots[slot] = actor;
        let actor = format!("step slot {slot} of {}", self.peer.lid);
        self.core.emit(NodeEvent::Restarted { actor, why });
        Ok(())
    }

    fn on_failure(&mut self, why: &ConnectError) {
        tracing::debug!(peer = %self.peer, %why, "no connection yet");
        self.failures += 1;
        // Of these the next attempt changes nothing.
        let lasting = matches!(
            why,
            ConnectError::Address { .. }
                | ConnectError::Rejected { reject: Reject::Version { .. } | Reject::Deployment { .. }, .. }
        );
        if (lasting || self.failures >= FAILURES_MAX) && !std::mem::replace(&mut self.complained, true) {
            tracing::warn!(peer = %self.peer, %why, "a replica can't be reached; trying again");
            self.core.emit(NodeEvent::Unreachable { peer: self.peer.clone(), why: why.to_string() });
        }
    }

    fn connect(&self, myself: &ActorRef<EndpointMsg>) {
        if self.core.is_linked(self.peer.incarnation) {
            return;
        }
        let (core, peer, address) = (self.core.clone(), self.peer.clone(), self.address.clone());
        let myself = myself.clone();
        tokio::spawn(async move {
            // The link that comes up reports itself through the transport's handler.
            if let Err(error) = core.transport().connect(&address, Some(peer.incarnation)).await {
                let _ = myself.send_message(EndpointMsg::ConnectFailed(error));
            }
        });
    }
}

#[async_trait]
impl Actor for EndpointActor {
    type Msg = EndpointMsg;
    type State = EndpointState;
    type Arguments = EndpointArgs;

    async fn pre_start(
        &self,
        myself: ActorRef<EndpointMsg>,
        args: EndpointArgs,
    ) -> Result<EndpointState, ActorProcessingErr> {
        let state = EndpointState {
            core: args.core,
            peer: args.peer,
            address: args.address,
            backoff: BACKOFF_FIRST,
            failures: 0,
            complained: false,
            evidence: None,
            slots: Vec::new(),
            watched: HashMap::new(),
        };
        match args.keep_off {
            Duration::ZERO => state.connect(&myself),
            keep_off => drop(myself.send_after(keep_off, || EndpointMsg::Connect)),
        }
        Ok(state)
    }

    async fn handle(
        &self,
        myself: ActorRef<EndpointMsg>,
        message: EndpointMsg,
        state: &mut EndpointState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            EndpointMsg::Connect => state.connect(&myself),
            EndpointMsg::ConnectFailed(why) => {
                state.on_failure(&why);
                myself.send_after(state.backoff, || EndpointMsg::Connect);
                state.backoff = (state.backoff * 2).min(BACKOFF_LAST);
            }
            EndpointMsg::Down(evidence) => {
                state.evidence = Some(evidence);
                myself.stop(Some(evidence.name().into()));
            }
            EndpointMsg::Adopt(steps) => state.adopt(&myself, steps).await?,
            EndpointMsg::Ended(step) => {
                if let Some(slot) = state.watched.remove(&step) {
                    let _ = state.slots[slot].send_message(StepMsg::Ended(step));
                }
            }
            EndpointMsg::Crash(why) => panic!("{why}"),
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<EndpointMsg>,
        event: SupervisionEvent,
        state: &mut EndpointState,
    ) -> Result<(), ActorProcessingErr> {
        match end_of(&event) {
            Some((id, why)) => state.restart_slot(&myself, id, why).await,
            None => Ok(()),
        }
    }
}
