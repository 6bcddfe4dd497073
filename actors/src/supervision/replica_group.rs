use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use connex_protocol::{Address, Evidence, Incarnation, Peer};
use ractor::concurrency::JoinHandle;
use ractor::{Actor, ActorId, ActorProcessingErr, ActorRef, MessagingErr, SupervisionEvent, async_trait};

use super::{EndpointActor, EndpointArgs, EndpointMsg, EndpointState, end_of};
use crate::group_cell::Duty;
use crate::{Core, GroupCell, NodeEvent};

/// An endpoint's actor that lived for less than this has had a link that did not last.
const LASTING: Duration = Duration::from_secs(1);

/// How long such a link is not made again: the first pause, which doubles up to the last (F13).
const KEEP_OFF_FIRST: Duration = Duration::from_millis(5);
const KEEP_OFF_LAST: Duration = Duration::from_millis(50);

/// One group at this node: starts an actor for each replica's life, ticks the group's machines, and hands over what
/// was on a life that ended.
pub(crate) struct ReplicaGroupActor;

/// What a group's actor is told.
#[derive(Debug)]
pub(crate) enum ReplicaGroupMsg {
    /// The cell has something for it: duties, or an earlier tick.
    Duty,
    /// It is time.
    Tick,
    /// Fail, as a fault injected by a test; at this endpoint if one is named, else here.
    Crash(String, Option<Incarnation>),
}

struct Child {
    peer: Peer,
    address: Address,
    actor: ActorRef<EndpointMsg>,
    since: Instant,
    keep_off: Duration,
}

/// The group's endpoints.
pub(crate) struct ReplicaGroupState {
    core: Arc<Core>,
    cell: Arc<GroupCell>,
    children: HashMap<ActorId, Child>,
    timer: Option<JoinHandle<Result<(), MessagingErr<ReplicaGroupMsg>>>>,
}

impl ReplicaGroupState {
    fn child(&self, incarnation: Incarnation) -> Option<&Child> {
        self.children.values().find(|child| child.peer.incarnation == incarnation)
    }

    async fn start(
        &mut self,
        myself: &ActorRef<ReplicaGroupMsg>,
        peer: Peer,
        address: Address,
        keep_off: Duration,
    ) -> Result<(), ActorProcessingErr> {
        if self.child(peer.incarnation).is_some() {
            return Ok(());
        }
        let (core, since) = (self.core.clone(), Instant::now());
        let args = EndpointArgs { core, peer: peer.clone(), address: address.clone(), keep_off };
        let (actor, _) = EndpointActor::spawn_linked(None, EndpointActor, args, myself.get_cell()).await?;
        self.children.insert(actor.get_id(), Child { peer, address, actor, since, keep_off });
        self.cell.set_endpoints(self.children.len());
        Ok(())
    }

    async fn on_duties(&mut self, myself: &ActorRef<ReplicaGroupMsg>) -> Result<(), ActorProcessingErr> {
        for duty in self.cell.duties() {
            match duty {
                Duty::Connect { peer, address } => self.start(myself, peer, address, Duration::ZERO).await?,
                Duty::Down { peer, evidence } => match self.child(peer.incarnation) {
                    Some(child) => {
                        let _ = child.actor.send_message(EndpointMsg::Down(evidence));
                    }
                    None => self.cell.hand_over(&peer, evidence),
                },
                Duty::Adopt { to, steps } => {
                    if let Some(child) = self.child(to) {
                        let _ = child.actor.send_message(EndpointMsg::Adopt(steps));
                    }
                }
                Duty::Ended { on, step } => {
                    if let Some(child) = on.and_then(|on| self.child(on)) {
                        let _ = child.actor.send_message(EndpointMsg::Ended(step));
                    }
                }
            }
        }
        self.arm(myself);
        Ok(())
    }

    fn arm(&mut self, myself: &ActorRef<ReplicaGroupMsg>) {
        if let Some(timer) = self.timer.take() {
            timer.abort();
        }
        if let Some(wait) = self.cell.next_tick(self.core.clock().now()) {
            let wait = wait.max(Duration::from_micros(100));
            self.timer = Some(myself.send_after(wait, || ReplicaGroupMsg::Tick));
        }
    }

    /// An endpoint's actor ended. With evidence its life is over, and its steps move; without, it failed, and is
    /// started again on the same mailbox.
    async fn on_child_end(
        &mut self,
        myself: &ActorRef<ReplicaGroupMsg>,
        id: ActorId,
        evidence: Option<Evidence>,
        why: String,
    ) -> Result<(), ActorProcessingErr> {
        let Some(child) = self.children.remove(&id) else { return Ok(()) };
        self.cell.set_endpoints(self.children.len());
        match evidence {
            Some(evidence) => self.cell.hand_over(&child.peer, evidence),
            None => {
                let actor = format!("endpoint {}", child.peer.lid);
                self.core.emit(NodeEvent::Restarted { actor, why });
            }
        }
        // The directory may still name it: a live process whose link was lost comes back this way.
        let wanted = self.cell.wanted().into_iter().any(|(peer, _)| peer == child.peer);
        if wanted {
            let keep_off = match child.since.elapsed() < LASTING + child.keep_off {
                true => (child.keep_off * 2).clamp(KEEP_OFF_FIRST, KEEP_OFF_LAST),
                false => Duration::ZERO,
            };
            self.start(myself, child.peer, child.address, keep_off).await?;
        }
        self.on_duties(myself).await
    }
}

#[async_trait]
impl Actor for ReplicaGroupActor {
    type Msg = ReplicaGroupMsg;
    type State = ReplicaGroupState;
    type Arguments = (Arc<Core>, Arc<GroupCell>);

    async fn pre_start(
        &self,
        _myself: ActorRef<ReplicaGroupMsg>,
        (core, cell): (Arc<Core>, Arc<GroupCell>),
    ) -> Result<ReplicaGroupState, ActorProcessingErr> {
        Ok(ReplicaGroupState { core, cell, children: HashMap::new(), timer: None })
    }

    /// A new actor goes on where its predecessor ended: with the connections that the group wants, and with what is
    /// on lives that ended meanwhile.
    async fn post_start(
        &self,
        myself: ActorRef<ReplicaGroupMsg>,
        state: &mut ReplicaGroupState,
    ) -> Result<(), ActorProcessingErr> {
        state.core.doors().put_group(state.cell.group().clone(), myself.clone());
        for (peer, address) in state.cell.wanted() {
            state.start(&myself, peer, address, Duration::ZERO).await?;
        }
        for peer in state.cell.orphaned() {
            state.cell.hand_over(&peer, Evidence::ConnectionClosed);
        }
        state.on_duties(&myself).await
    }

    async fn handle(
        &self,
        myself: ActorRef<ReplicaGroupMsg>,
        message: ReplicaGroupMsg,
        state: &mut ReplicaGroupState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            ReplicaGroupMsg::Duty => state.on_duties(&myself).await,
            ReplicaGroupMsg::Tick => {
                state.cell.tick();
                state.on_duties(&myself).await
            }
            ReplicaGroupMsg::Crash(why, at) => match at.and_then(|at| state.child(at)) {
                Some(child) => Ok(child.actor.send_message(EndpointMsg::Crash(why))?),
                None => panic!("{why}"),
            },
        }
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<ReplicaGroupMsg>,
        mut event: SupervisionEvent,
        state: &mut ReplicaGroupState,
    ) -> Result<(), ActorProcessingErr> {
        let Some((id, why)) = end_of(&event) else { return Ok(()) };
        let evidence = match &mut event {
            SupervisionEvent::ActorTerminated(_, Some(last), _) => {
                last.take::<EndpointState>().ok().and_then(|last| last.evidence)
            }
            _ => None,
        };
        state.on_child_end(&myself, id, evidence, why).await
    }
}
