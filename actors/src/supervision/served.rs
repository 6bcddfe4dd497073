use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use connex_protocol::{Incarnation, Peer};
use ractor::{Actor, ActorProcessingErr, ActorRef, async_trait};

use crate::serve::{Endpoint, EndpointFactory, Place, Wake, Work};
use crate::{Core, ServedCell};

/// The endpoint that this node serves: owns the thread of its engine, and watches which origins are gone.
pub(crate) struct ServedEndpointActor;

/// What the served endpoint's actor is told.
#[derive(Debug)]
pub(crate) enum ServedEndpointMsg {
    /// The engine's thread ended.
    ThreadEnded(Option<String>),
    /// A link to this peer came up or ended.
    Link(Peer, bool),
    /// This origin has been away for the grace period.
    Gone(Incarnation),
}

/// What to serve, and with what.
pub(crate) struct ServedEndpointArgs {
    pub(crate) core: Arc<Core>,
    pub(crate) factory: EndpointFactory,
}

/// The served endpoint and its thread.
pub(crate) struct ServedEndpointState {
    core: Arc<Core>,
    cell: Arc<ServedCell>,
}

#[async_trait]
impl Actor for ServedEndpointActor {
    type Msg = ServedEndpointMsg;
    type State = ServedEndpointState;
    type Arguments = ServedEndpointArgs;

    async fn pre_start(
        &self,
        myself: ActorRef<ServedEndpointMsg>,
        args: ServedEndpointArgs,
    ) -> Result<ServedEndpointState, ActorProcessingErr> {
        let cell = args.core.serve();
        let thread_cell = cell.clone();
        let (core, factory) = (args.core.clone(), args.factory);
        let door = myself.clone();
        thread::Builder::new().name("connex-engine".into()).spawn(move || {
            let wake = Wake::new(thread_cell.inbox().clone());
            let place = Place { core: core.clone(), wake };
            let end = match catch(|| factory(place)) {
                Ok(Ok(mut endpoint)) => {
                    thread_cell.set_manned(true);
                    let served = catch(|| serve(&core, &thread_cell, endpoint.as_mut()));
                    // Apart from what it did before: a second panic while the first unwinds would end the process.
                    let dropped = catch(|| drop(endpoint));
                    served.and(dropped).err()
                }
                Ok(Err(why)) | Err(why) => {
                    // Whoever has no engine keeps no steps that another replica could take.
                    thread_cell.set_manned(false);
                    Some(why)
                }
            };
            thread_cell.mark_idle();
            let _ = door.send_message(ServedEndpointMsg::ThreadEnded(end));
        })?;
        args.core.doors().put_served(myself);
        Ok(ServedEndpointState { core: args.core, cell })
    }

    async fn handle(
        &self,
        myself: ActorRef<ServedEndpointMsg>,
        message: ServedEndpointMsg,
        state: &mut ServedEndpointState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            // The supervisor starts another actor, and with it another thread with a fresh engine.
            ServedEndpointMsg::ThreadEnded(Some(why)) => return Err(why.into()),
            ServedEndpointMsg::ThreadEnded(None) => myself.stop(Some("its engine's thread ended".into())),
            ServedEndpointMsg::Link(peer, false) => {
                let grace = state.core.config().origin_grace;
                myself.send_after(grace, move || ServedEndpointMsg::Gone(peer.incarnation));
            }
            ServedEndpointMsg::Link(_, true) => {}
            ServedEndpointMsg::Gone(origin) => {
                // An origin that the directory knows is over when the directory says so.
                let known = state.core.routes().iter().any(|route| route.incarnation == origin);
                if !known && !state.core.is_linked(origin) {
                    state.core.origin_gone(origin);
                }
            }
        }
        Ok(())
    }

    async fn post_stop(
        &self,
        _myself: ActorRef<ServedEndpointMsg>,
        state: &mut ServedEndpointState,
    ) -> Result<(), ActorProcessingErr> {
        state.cell.inbox().push(Work::Stop);
        Ok(())
    }
}

/// For how long an idle engine's thread makes the transport's progress itself before it goes to sleep: the next step
/// then needs no hand-off from the transport's thread to this one.
const BORROW: Duration = Duration::from_micros(500);

/// The next piece of work; meanwhile the thread makes progress for everybody, if nobody else does.
fn next_work(core: &Core, cell: &ServedCell) -> Work {
    let idle_since = Instant::now();
    loop {
        if let Some(work) = cell.inbox().try_pop() {
            return work;
        }
        let left = BORROW.saturating_sub(idle_since.elapsed());
        if left.is_zero() {
            core.transport().let_go();
            return cell.inbox().pop();
        }
        if !core.transport().progress(left) {
            return cell.inbox().pop();
        }
    }
}

/// The loop of the engine's thread.
fn serve(core: &Core, cell: &Arc<ServedCell>, endpoint: &mut dyn Endpoint) {
    loop {
        match next_work(core, cell) {
            Work::Execute(step) => {
                cell.mark_busy();
                endpoint.execute(step);
                cell.mark_idle();
            }
            Work::Abort(id, code) => endpoint.abort(id, code),
            Work::Notice(from, body) => endpoint.notice(from, body),
            Work::Forget(origin) => endpoint.forget(origin),
            Work::Woken => {
                cell.mark_busy();
                endpoint.woken();
                cell.mark_idle();
            }
            Work::Stop => return,
        }
    }
}

/// Runs `what`; a panic in it is an error with its words.
fn catch<T>(what: impl FnOnce() -> T) -> Result<T, String> {
    std::panic::catch_unwind(AssertUnwindSafe(what)).map_err(|panic| panic_text(panic.as_ref()))
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_else(|| "the engine panicked".to_owned())
}
