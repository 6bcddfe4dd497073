//! Moving an identity to another process: its source gives it up, its target takes it over, and the directory makes
//! the change in one step.
//!
//! | what happens | what follows |
//! | --- | --- |
//! | the source dies before its fence | its lease ends, and the target registers like any successor |
//! | the source hangs | it answers nothing; the target waits, and takes over when the lease has run out |
//! | what executes does not end | the source calls it off after [`FENCE_MAX`] and serves on |
//! | the target dies before the hand-over | the directory refuses it, and the source serves on |
//! | the target dies after it | the identity is nobody's until its lease runs out; steps go to other replicas |

use std::sync::Arc;
use std::time::Duration;

use connex_actors::{Core, Hook, NodeEvent, Standing};
use connex_protocol::wire::cutover::Message;
use connex_protocol::wire::{Control, Frame};
use connex_protocol::{Epoch, Incarnation, Peer};
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use crate::directory::Registration;

/// How long a source waits for what it executes; then it calls the migration off.
pub const FENCE_MAX: Duration = Duration::from_secs(2);

/// How long a source that has handed over waits for its submitters to hear of it.
const PART_MAX: Duration = Duration::from_secs(1);

/// How often a target asks its source again.
const ASK_AGAIN: Duration = Duration::from_millis(500);

/// Answers a node's migration messages: as a source it is asked to fence; as a target it hears its source's answers.
pub(crate) struct Migration {
    asked: mpsc::Sender<(Incarnation, Message)>,
}

impl Hook<Message> for Migration {
    fn take(&self, from: Incarnation, message: Message) {
        // A full queue means that a migration is under way: the target asks again.
        let _ = self.asked.try_send((from, message));
    }
}

impl Migration {
    /// Takes part in migrations, as the source and, with `shadow`, as the target.
    pub(crate) fn start(core: Arc<Core>, registration: Registration, shadow: bool) {
        let (asked, requests) = mpsc::channel(16);
        core.doors().set_cutover(Arc::new(Migration { asked }));
        let runtime = Handle::current();
        if shadow {
            runtime.spawn(take_over(core.clone(), registration.clone()));
        }
        runtime.spawn(serve_requests(core, registration, requests));
    }
}

async fn serve_requests(
    core: Arc<Core>,
    registration: Registration,
    mut requests: mpsc::Receiver<(Incarnation, Message)>,
) {
    while let Some((from, message)) = requests.recv().await {
        if let Message::Fence { epoch, to } = message {
            if to != from || !registration.holds(epoch) {
                send(&core, from, Message::Refused { epoch });
                continue;
            }
            hand_over(&core, &registration, epoch, to).await;
        }
    }
}

/// The source's side.
async fn hand_over(core: &Arc<Core>, registration: &Registration, epoch: Epoch, to: Incarnation) {
    let Some(served) = core.served() else { return };
    // In front of everything that the fence gives back, on the same lane.
    let origins = served.origins();
    let submitters: Vec<Peer> =
        core.peers().into_iter().filter(|peer| origins.contains(&peer.incarnation)).collect();
    for peer in core.peers() {
        send(core, peer.incarnation, Message::Pausing { epoch });
    }
    let quiet = tokio::time::timeout(FENCE_MAX, served.fence()).await.is_ok();
    if quiet && registration.hand_to(to).await {
        // A submitter that hears of the new holder ends its link to this one; until then it holds its steps back, and
        // the end of this process would look like a death to it.
        let parted = core.parted_from(&submitters);
        let _ = tokio::time::timeout(PART_MAX, parted).await;
        core.emit(NodeEvent::HandedAway);
        return;
    }
    tracing::warn!(%epoch, quiet, "the migration was called off");
    served.unfence();
    for peer in core.peers() {
        send(core, peer.incarnation, Message::Abort { epoch });
    }
}

/// The target's side: asks whoever holds the identity for it until it holds it itself.
async fn take_over(core: Arc<Core>, registration: Registration) {
    loop {
        let standing = registration
            .wait_for(|standing| {
                matches!(standing, Standing::Shadowing(..) | Standing::Registered(_) | Standing::Lost)
            })
            .await;
        let Standing::Shadowing(holder, epoch) = standing else { return };
        let route = core.routes_of(holder.lid.group()).into_iter().find(|route| route.lid == holder.lid);
        if let Some(route) = route.filter(|route| route.incarnation == holder.incarnation) {
            // A source that can't be reached is not asked: its lease runs out, or it is reached the next time.
            if core.transport().connect(&route.address, Some(holder.incarnation)).await.is_ok() {
                let to = core.me().incarnation;
                send(&core, holder.incarnation, Message::Fence { epoch, to });
            }
        }
        let done = registration.wait_for(|standing| {
            matches!(standing, Standing::Registered(_) | Standing::Lost)
                || matches!(standing, Standing::Shadowing(now, _) if *now != holder)
        });
        // Either it is done, or it is time to ask again.
        let _ = tokio::time::timeout(ASK_AGAIN, done).await;
    }
}

fn send(core: &Core, to: Incarnation, message: Message) {
    core.send(to, &Frame::Control(Control::Cutover(message)));
}
