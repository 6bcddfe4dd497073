//! Drives the two machines of a migration on one task that ends with its node; it decides nothing.

use std::sync::Arc;
use std::time::Duration;

use connex_actors::{Core, Hook, NodeEvent, Standing};
use connex_protocol::cutover::{Source, SourceInput, SourceOutput, Target, TargetInput, TargetOutput};
use connex_protocol::wire::cutover::Message;
use connex_protocol::wire::{Control, Frame};
use connex_protocol::{Epoch, Evidence, Incarnation, Machine, Peer};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::directory::Registration;

/// Messages and completions that may wait for the driver: as many submitters may answer at once. A full queue loses
/// messages, which targets send again and sources wait for no longer than their time.
const WAITING_MAX: usize = 1024;

/// Takes a node's migration messages from the transport's thread.
pub(crate) struct Migration {
    heard: mpsc::Sender<Heard>,
}

enum Heard {
    Message(Incarnation, Message),
    /// The link to this life ended.
    Parted(Incarnation),
}

impl Hook<Message> for Migration {
    fn take(&self, from: Incarnation, message: Message) {
        // Every message of a migration may be lost.
        let _ = self.heard.try_send(Heard::Message(from, message));
    }

    fn link(&self, peer: &Peer, up: bool, _evidence: Option<Evidence>) {
        if !up {
            // If it is lost, the source waits for its time to pass.
            let _ = self.heard.try_send(Heard::Parted(peer.incarnation));
        }
    }
}

impl Migration {
    /// Takes part in migrations, as the source and, with `shadow`, as the target.
    pub(crate) fn start(core: Arc<Core>, registration: Registration, shadow: bool) {
        let (heard, hearing) = mpsc::channel(WAITING_MAX);
        // The node drops the hook when it ends, and with it the driver's reason to go on.
        core.doors().set_cutover(Arc::new(Migration { heard }));
        let (ended, endings) = mpsc::channel(WAITING_MAX);
        let driver = Driver {
            core,
            registration,
            source: Source::default(),
            target: shadow.then(Target::default),
            submitters: Vec::new(),
            ended,
            work: JoinSet::new(),
        };
        tokio::spawn(driver.run(hearing, endings));
    }
}

struct Driver {
    core: Arc<Core>,
    registration: Registration,
    source: Source,
    target: Option<Target>,
    /// Whose steps were here when the fence began.
    submitters: Vec<Peer>,
    ended: mpsc::Sender<SourceInput>,
    /// What takes time; it ends with the driver.
    work: JoinSet<()>,
}

impl Driver {
    async fn run(mut self, mut hearing: mpsc::Receiver<Heard>, mut endings: mpsc::Receiver<SourceInput>) {
        let mut standing = self.registration.watch();
        standing.mark_changed();
        loop {
            let target = self.target.as_ref().and_then(Machine::deadline);
            let deadline = [self.source.deadline(), target].into_iter().flatten().min();
            let wait = deadline.map_or(Duration::MAX, |at| at.since(self.core.clock().now()));
            tokio::select! {
                heard = hearing.recv() => match heard {
                    None => return,
                    Some(Heard::Message(from, message)) => self.on_message(from, message),
                    Some(Heard::Parted(from)) => self.tell_source(SourceInput::Gone(from)),
                },
                Some(input) = endings.recv() => self.tell_source(input),
                changed = standing.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    let standing = standing.borrow_and_update().clone();
                    self.on_standing(&standing);
                }
                () = tokio::time::sleep(wait) => {
                    self.tell_source(SourceInput::Tick);
                    self.tell_target(TargetInput::Tick);
                }
            }
            while self.work.try_join_next().is_some() {}
        }
    }

    fn on_message(&mut self, from: Incarnation, message: Message) {
        match message {
            Message::Fence { epoch, to } => {
                let held = self.core.served().and_then(|_| self.registration.can_hand());
                let shadow = self.shadow();
                self.tell_source(SourceInput::Asked { from, epoch, to, held, shadow });
            }
            Message::Refused { .. } => self.tell_target(TargetInput::Refused { from }),
            Message::Abort { .. } => self.tell_target(TargetInput::CalledOff { from }),
            Message::Seen { fence, .. } => self.tell_source(SourceInput::Seen { from, fence }),
            // For the submitters' mailboxes; they have taken it.
            Message::Pausing { .. } | Message::Quiet { .. } => {}
        }
    }

    /// Who waits for this node's identity, by the directory's word.
    fn shadow(&self) -> Option<Incarnation> {
        let me = self.core.me();
        let route = self.core.routes_of(me.lid.group()).into_iter().find(|route| route.lid == me.lid)?;
        route.shadow.map(|(incarnation, _)| incarnation)
    }

    fn on_standing(&mut self, standing: &Standing) {
        match standing {
            Standing::Shadowing(holder, epoch) => {
                self.tell_target(TargetInput::Shadowing { holder: holder.incarnation, epoch: *epoch });
            }
            Standing::Registered(_) => self.tell_target(TargetInput::Settled),
            Standing::Lost => {
                self.tell_target(TargetInput::Settled);
                self.tell_source(SourceInput::Lost);
            }
            Standing::Unknown
            | Standing::Watching
            | Standing::Refused(_)
            | Standing::Left
            | Standing::Kept(_) => {}
        }
    }

    fn tell_source(&mut self, input: SourceInput) {
        self.source.handle(self.core.clock().now(), input);
        while let Some(output) = self.source.poll() {
            self.perform(output);
        }
    }

    fn perform(&mut self, output: SourceOutput) {
        match output {
            SourceOutput::Refuse { to, epoch } => send(&self.core, to, Message::Refused { epoch }),
            SourceOutput::Pause(epoch) => {
                self.tell_all(&Message::Pausing { epoch });
                self.submitters = submitters(&self.core);
            }
            SourceOutput::Fence(fence) => {
                let Some(served) = self.core.served() else { return };
                let (core, known) = (self.core.clone(), self.submitters.clone());
                self.work_on(async move {
                    served.fence().await;
                    // One that came in front of the fence, and one whose steps have all been given back by now.
                    let all = submitters(&core).into_iter().chain(known).map(|peer| peer.incarnation);
                    let submitters = all.filter(|submitter| core.is_linked(*submitter)).collect();
                    SourceInput::Quiet { fence, submitters }
                });
            }
            SourceOutput::Settle { to, epoch, fence } => {
                send(&self.core, to, Message::Quiet { epoch, fence });
            }
            SourceOutput::Hand(to) => {
                let registration = self.registration.clone();
                self.work_on(async move { registration.hand_to(to).await });
            }
            SourceOutput::Unfence => {
                if let Some(served) = self.core.served() {
                    served.unfence();
                }
            }
            SourceOutput::Abort(epoch) => {
                tracing::warn!(%epoch, "the migration was called off");
                self.tell_all(&Message::Abort { epoch });
            }
            SourceOutput::Part => {
                let (core, submitters) = (self.core.clone(), std::mem::take(&mut self.submitters));
                self.work_on(async move {
                    core.parted_from(&submitters).await;
                    SourceInput::Parted
                });
            }
            SourceOutput::Over => self.core.emit(NodeEvent::HandedAway),
        }
    }

    fn tell_target(&mut self, input: TargetInput) {
        let now = self.core.clock().now();
        let Some(target) = &mut self.target else { return };
        target.handle(now, input);
        while let Some(TargetOutput::Ask { holder, epoch }) = target.poll() {
            self.work.spawn(ask(self.core.clone(), holder, epoch));
        }
    }

    fn work_on(&mut self, work: impl Future<Output = SourceInput> + Send + 'static) {
        let ended = self.ended.clone();
        self.work.spawn(async move {
            // A driver that is gone has nobody to tell.
            let _ = ended.send(work.await).await;
        });
    }

    fn tell_all(&self, message: &Message) {
        for peer in self.core.peers() {
            send(&self.core, peer.incarnation, message.clone());
        }
    }
}

/// The linked peers whose steps are remembered here.
fn submitters(core: &Core) -> Vec<Peer> {
    let known = core.served().map(|served| served.submitters()).unwrap_or_default();
    core.peers().into_iter().filter(|peer| known.contains(&peer.incarnation)).collect()
}

/// Asks the holder to fence. One that can't be reached is not asked: its lease runs out, or it is reached next time.
async fn ask(core: Arc<Core>, holder: Incarnation, epoch: Epoch) {
    let group = core.me().lid.group().clone();
    let route = core.routes_of(&group).into_iter().find(|route| route.incarnation == holder);
    if let Some(route) = route
        && core.transport().connect(&route.address, Some(holder)).await.is_ok()
    {
        let to = core.me().incarnation;
        send(&core, holder, Message::Fence { epoch, to });
    }
}

fn send(core: &Core, to: Incarnation, message: Message) {
    core.send(to, &Frame::Control(Control::Cutover(message)));
}
