//! One identity that moves from a source to a target, one submitter with steps for it, and a directory between them.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use connex_protocol::cutover::{
    Source, SourceInput, SourceOutput, Submitter, SubmitterInput, SubmitterOutput, Target as Taker,
    TargetInput, TargetOutput,
};
use connex_protocol::group::{Group as Members, GroupInput};
use connex_protocol::step::{
    Receiver, ReceiverConfig, ReceiverInput, ReceiverOutput, Sender, SenderConfig, SenderInput, SenderOutput,
    Submission, Target, WhenFull,
};
use connex_protocol::wire::cutover::Message;
use connex_protocol::wire::directory::Route;
use connex_protocol::wire::{Control, Outcome, Reply, Step, StepError};
use connex_protocol::{Address, Epoch, Evidence, Group, Incarnation, Instant, Machine, StepId};

const SUBMITTER: Incarnation = Incarnation::from_bits(1);
const SOURCE: Incarnation = Incarnation::from_bits(2);
const TARGET: Incarnation = Incarnation::from_bits(3);
const FIRST: Epoch = Epoch { boot: 1, counter: 1 };

/// What may still happen, beside deliveries, executions and the migration itself.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Budget {
    pub(super) submits: u64,
    /// Deaths of the source or the target.
    pub(super) crashes: u32,
    /// Losses of the link between submitter and source, with what was on it.
    pub(super) relinks: u32,
    /// Messages between source and target that vanish.
    pub(super) vanishings: u32,
    /// Times at which a machine's clock runs to its deadline although something else could happen.
    pub(super) early_ticks: u32,
}

/// One thing that may happen next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    Submit,
    /// The next message from one to another arrives.
    Deliver(Incarnation, Incarnation),
    Finish(Incarnation, StepId),
    /// The fence is complete, and the source hears so.
    Quiet,
    /// The directory takes the source's request.
    Directory,
    Crash(Incarnation),
    /// The dead holder's lease is over.
    Expire,
    Relink(usize, usize),
    Vanish(Incarnation, Incarnation),
    TickSource,
    TickTarget,
    TickSubmitter,
    TickSender,
}

#[derive(Clone, Debug)]
enum Mail {
    Step(Step),
    Reply(Reply),
    Control(Control),
    /// From the directory: who holds the identity now, or nobody.
    Holder(Option<(Incarnation, Epoch)>),
    /// From the directory to the source, in answer.
    Answer(bool),
    Down,
    Relinked,
}

#[derive(Clone, Debug)]
struct Life {
    receiver: Receiver,
    alive: bool,
    running: Vec<StepId>,
    executed: Vec<StepId>,
}

impl Life {
    fn new() -> Self {
        let receiver = Receiver::new(ReceiverConfig::default());
        Life { receiver, alive: true, running: Vec::new(), executed: Vec::new() }
    }
}

/// The whole state; what the search explores.
#[derive(Clone, Debug)]
pub(super) struct World {
    now: Instant,
    budget: Budget,
    sender: Sender<Members>,
    submitter: Submitter,
    source: Source,
    taker: Taker,
    lives: BTreeMap<Incarnation, Life>,
    mail: BTreeMap<(Incarnation, Incarnation), VecDeque<Mail>>,
    /// The directory's registry, and a request that is on its way there.
    holder: Option<(Incarnation, Epoch)>,
    asked: bool,
    /// A fence that completed, of which the source has not heard.
    quiet: Option<u64>,
    fence: u64,
    /// The source has asked the directory to hand the identity over, and has not been told that it keeps it.
    handed: bool,
    parting: bool,
    /// A migration was called off: a step that it gave back comes after one that reached the source later.
    called_off: bool,
    /// A clock ran ahead, or a link was lost with what was on it: an answer may not be heard in time.
    blind: bool,
    next: u64,
    ended: BTreeMap<u64, Result<Bytes, String>>,
}

const DIRECTORY: Incarnation = Incarnation::from_bits(9);

fn id(seq: u64) -> StepId {
    StepId { origin: SUBMITTER, seq }
}

fn body(seq: u64) -> Bytes {
    Bytes::from(seq.to_le_bytes().to_vec())
}

impl World {
    /// The source holds the identity; the target has just registered as its shadow.
    pub(super) fn new(budget: Budget) -> Self {
        let config = SenderConfig { k: Some(2), ..SenderConfig::default() };
        let mut world = World {
            now: Instant::ZERO,
            budget,
            sender: Sender::new(SUBMITTER, config, Members::new(Group::new("m", "pp", 1))),
            submitter: Submitter::default(),
            source: Source::default(),
            taker: Taker::default(),
            lives: BTreeMap::from([(SOURCE, Life::new()), (TARGET, Life::new())]),
            mail: BTreeMap::new(),
            holder: Some((SOURCE, FIRST)),
            asked: false,
            quiet: None,
            fence: 0,
            handed: false,
            parting: false,
            called_off: false,
            blind: false,
            next: 1,
            ended: BTreeMap::new(),
        };
        world.on_holder(SUBMITTER, world.holder);
        for incarnation in [SOURCE, TARGET] {
            world.members(GroupInput::Up { incarnation });
        }
        world.tell_taker(TargetInput::Shadowing { holder: SOURCE, epoch: FIRST });
        world
    }

    fn post(&mut self, from: Incarnation, to: Incarnation, mail: Mail) {
        let alive = |who: Incarnation| self.lives.get(&who).is_none_or(|life| life.alive);
        if alive(from) && alive(to) {
            self.mail.entry((from, to)).or_default().push_back(mail);
        }
    }

    fn alive(&self, who: Incarnation) -> bool {
        self.lives[&who].alive
    }

    pub(super) fn acts(&self) -> Vec<Act> {
        let mut acts = Vec::new();
        if self.budget.submits > 0 {
            acts.push(Act::Submit);
        }
        for ((from, to), mail) in &self.mail {
            if mail.is_empty() {
                continue;
            }
            acts.push(Act::Deliver(*from, *to));
            let between = ![SUBMITTER, DIRECTORY].contains(from) && ![SUBMITTER, DIRECTORY].contains(to);
            if between && self.budget.vanishings > 0 {
                acts.push(Act::Vanish(*from, *to));
            }
        }
        for (at, life) in &self.lives {
            acts.extend(life.running.iter().map(|id| Act::Finish(*at, *id)));
            if life.alive && self.budget.crashes > 0 {
                acts.push(Act::Crash(*at));
            }
        }
        if self.quiet.is_some() && self.alive(SOURCE) {
            acts.push(Act::Quiet);
        }
        if self.asked {
            acts.push(Act::Directory);
        }
        if self.holder.is_some_and(|(holder, _)| !self.alive(holder)) {
            acts.push(Act::Expire);
        }
        if self.budget.relinks > 0 && self.alive(SOURCE) {
            let on = |from, to| self.mail.get(&(from, to)).map_or(0, VecDeque::len);
            for down in 0..=on(SUBMITTER, SOURCE) {
                acts.extend((0..=on(SOURCE, SUBMITTER)).map(|up| Act::Relink(down, up)));
            }
        }
        if self.budget.early_ticks > 0 {
            // Longer than any message takes: what waits half a minute for a holder is not to blame.
            let soon = self.now + Duration::from_secs(5);
            acts.extend(self.ticks().into_iter().filter(|act| self.due(*act).is_some_and(|due| due <= soon)));
        }
        acts
    }

    /// Whose clock may run to its deadline.
    pub(super) fn ticks(&self) -> Vec<Act> {
        let mut acts = Vec::new();
        if self.alive(SOURCE) && self.source.deadline().is_some() {
            acts.push(Act::TickSource);
        }
        if self.alive(TARGET) && self.taker.deadline().is_some() {
            acts.push(Act::TickTarget);
        }
        if self.submitter.deadline().is_some() {
            acts.push(Act::TickSubmitter);
        }
        if self.sender.deadline().is_some() {
            acts.push(Act::TickSender);
        }
        acts
    }

    /// Whether every submitted step has ended and the identity is where it is to be.
    pub(super) fn is_settled(&self) -> bool {
        let done = self.ended.len() as u64 + 1 == self.next;
        let held = !self.alive(TARGET) || self.holder.is_some_and(|(holder, _)| holder == TARGET);
        done && held && self.submitter.deadline().is_none()
    }

    /// The next deadline, whoever's it is.
    pub(super) fn earliest(&self) -> Option<Act> {
        self.ticks().into_iter().min_by_key(|act| self.due(*act))
    }

    fn due(&self, act: Act) -> Option<Instant> {
        match act {
            Act::TickSource => self.source.deadline(),
            Act::TickTarget => self.taker.deadline(),
            Act::TickSubmitter => self.submitter.deadline(),
            _ => self.sender.deadline(),
        }
    }

    pub(super) fn apply(&mut self, act: Act, free: bool) {
        match act {
            Act::Submit => self.submit(),
            Act::Deliver(from, to) => self.deliver(from, to),
            Act::Vanish(from, to) => {
                self.budget.vanishings -= 1;
                self.mail.get_mut(&(from, to)).expect("there is mail").pop_front();
            }
            Act::Finish(at, id) => {
                let life = self.lives.get_mut(&at).expect("it is one of the two");
                life.running.retain(|running| *running != id);
                self.replica(at, ReceiverInput::Done { id, route: vec![0], result: Ok(body(id.seq)) });
            }
            Act::Quiet => {
                let fence = self.quiet.take().expect("a fence is complete");
                self.tell_source(SourceInput::Quiet(fence));
            }
            Act::Directory => {
                self.asked = false;
                let can = self.alive(TARGET) && self.holder.is_some_and(|(holder, _)| holder == SOURCE);
                if can {
                    self.grant(Some(TARGET));
                }
                self.post(DIRECTORY, SOURCE, Mail::Answer(can));
            }
            Act::Crash(who) => {
                self.budget.crashes -= 1;
                let life = self.lives.get_mut(&who).expect("it is one of the two");
                life.alive = false;
                life.running.clear();
                self.mail.retain(|(_, to), _| *to != who);
                self.mail.entry((who, SUBMITTER)).or_default().push_back(Mail::Down);
            }
            Act::Expire => {
                let next = Some(TARGET).filter(|target| self.alive(*target));
                self.grant(next);
            }
            Act::Relink(down, up) => {
                self.budget.relinks -= 1;
                self.blind = true;
                self.mail.entry((SUBMITTER, SOURCE)).or_default().truncate(down);
                let back = self.mail.entry((SOURCE, SUBMITTER)).or_default();
                back.truncate(up);
                back.push_back(Mail::Relinked);
            }
            Act::TickSource | Act::TickTarget | Act::TickSubmitter | Act::TickSender => {
                self.budget.early_ticks -= u32::from(!free);
                self.blind = true;
                self.now = self.now.max(self.due(act).expect("there is a deadline"));
                match act {
                    Act::TickSource => self.tell_source(SourceInput::Tick),
                    Act::TickTarget => self.tell_taker(TargetInput::Tick),
                    Act::TickSubmitter => self.tell_submitter(SubmitterInput::Tick),
                    _ => self.tell(SenderInput::Tick),
                }
            }
        }
        self.mail.retain(|_, mail| !mail.is_empty());
    }

    fn submit(&mut self) {
        self.budget.submits -= 1;
        let seq = self.next;
        self.next += 1;
        self.tell(SenderInput::Submit(Submission {
            id: id(seq),
            route: Vec::new(),
            completed: None,
            deadline: None,
            streaming: false,
            resume: Vec::new(),
            meta: Bytes::new(),
            payload: body(seq),
            when_full: WhenFull::Wait,
        }));
    }

    /// The directory makes somebody, or nobody, the holder, in one step, and tells everybody.
    fn grant(&mut self, next: Option<Incarnation>) {
        let counter = self.holder.map_or(1, |(_, epoch)| epoch.counter) + 1;
        self.holder = next.map(|next| (next, Epoch { boot: 1, counter }));
        for who in [SUBMITTER, TARGET] {
            self.post(DIRECTORY, who, Mail::Holder(self.holder));
        }
    }

    fn deliver(&mut self, from: Incarnation, to: Incarnation) {
        let mail = self.mail.get_mut(&(from, to)).and_then(VecDeque::pop_front).expect("there is mail");
        match (mail, to) {
            (Mail::Step(step), _) => self.replica(to, ReceiverInput::Step { from, step }),
            (Mail::Control(Control::Cutover(message)), _) => self.on_cutover(from, to, message),
            (Mail::Control(control), SUBMITTER) => self.tell(SenderInput::Control { from, control }),
            (Mail::Control(control), _) => self.replica(to, ReceiverInput::Control { from, control }),
            (Mail::Reply(reply), _) => self.tell(SenderInput::Reply { from, reply }),
            (Mail::Holder(holder), _) => self.on_holder(to, holder),
            (Mail::Answer(handed), _) => {
                self.handed = handed;
                self.tell_source(if handed { SourceInput::Handed } else { SourceInput::Kept });
            }
            (Mail::Relinked, _) => self.tell(SenderInput::Relinked(from)),
            (Mail::Down, _) => self.on_down(from, Evidence::ConnectionReset),
        }
    }

    fn on_down(&mut self, who: Incarnation, evidence: Evidence) {
        self.tell_submitter(SubmitterInput::Down(who));
        self.members(GroupInput::Down { incarnation: who, evidence });
        self.tell(SenderInput::Handover { from: Target { replica: 0, incarnation: who }, evidence });
    }

    fn on_cutover(&mut self, from: Incarnation, to: Incarnation, message: Message) {
        match (message, to) {
            (Message::Fence { epoch, to: next }, SOURCE) => {
                let held = self.holder.filter(|(holder, _)| *holder == SOURCE).map(|(_, epoch)| epoch);
                self.tell_source(SourceInput::Asked { from, epoch, to: next, held });
            }
            (Message::Pausing { .. }, SUBMITTER) => {
                let lid = Group::new("m", "pp", 1).replica(0);
                let holder = self.sender.choose().current(&lid).map(|peer| peer.incarnation);
                self.tell_submitter(SubmitterInput::Pausing { from, replica: 0, holder });
            }
            (Message::Abort { .. }, SUBMITTER) => {
                self.tell_submitter(SubmitterInput::Abort { from, replica: 0 })
            }
            (Message::Quiet { epoch }, SUBMITTER) => self.cutover(SUBMITTER, from, Message::Seen { epoch }),
            (Message::Seen { .. }, SOURCE) => self.tell_source(SourceInput::Settled),
            (Message::Abort { .. } | Message::Refused { .. }, TARGET) => {
                self.tell_taker(TargetInput::NotNow { from });
            }
            (Message::Pausing { .. }, TARGET) => {}
            (message, to) => panic!("{message:?} to {to}"),
        }
    }

    /// The directory's word arrives.
    fn on_holder(&mut self, at: Incarnation, holder: Option<(Incarnation, Epoch)>) {
        if at == TARGET {
            if holder.is_some_and(|(holder, _)| holder == TARGET) {
                self.tell_taker(TargetInput::Settled);
            }
            return;
        }
        let lid = Group::new("m", "pp", 1).replica(0);
        let before = self.sender.choose().current(&lid).map(|peer| peer.incarnation);
        let Some((to, epoch)) = holder else {
            if let Some(before) = before {
                let (epoch, evidence) = (FIRST, Evidence::LeaseExpired);
                self.members(GroupInput::Removed { lid, incarnation: before, epoch, evidence });
                self.on_down(before, evidence);
            }
            return;
        };
        let shadow = Some((TARGET, Address::new("mem://t"))).filter(|_| to == SOURCE);
        let (address, ready, draining) = (Address::new("mem://x"), true, false);
        self.members(GroupInput::Route(Route {
            lid,
            incarnation: to,
            address,
            epoch,
            ready,
            draining,
            shadow,
        }));
        if let Some(before) = before.filter(|before| *before != to) {
            let from = Target { replica: 0, incarnation: before };
            self.tell(SenderInput::Handover { from, evidence: Evidence::Superseded });
            self.tell_submitter(SubmitterInput::Moved { replica: 0, to });
            // The link to the old life is ended, and it notices.
            self.mail.remove(&(SUBMITTER, before));
            if std::mem::take(&mut self.parting) && self.alive(SOURCE) {
                self.tell_source(SourceInput::Parted);
            }
        }
        self.tell(SenderInput::Pump);
    }

    fn members(&mut self, input: GroupInput) {
        let now = self.now;
        self.sender.choose_mut().handle(now, input);
        while self.sender.choose_mut().poll().is_some() {}
    }

    fn tell_source(&mut self, input: SourceInput) {
        self.source.handle(self.now, input);
        while let Some(output) = self.source.poll() {
            match output {
                SourceOutput::Refuse { to, epoch } => self.cutover(SOURCE, to, Message::Refused { epoch }),
                SourceOutput::Pause(epoch) => self.tell_all(Message::Pausing { epoch }),
                SourceOutput::Abort(epoch) => {
                    self.called_off = true;
                    self.tell_all(Message::Abort { epoch });
                }
                SourceOutput::Fence(fence) => {
                    self.fence = fence;
                    self.replica(SOURCE, ReceiverInput::Fence);
                }
                SourceOutput::Unfence => {
                    assert!(!self.handed, "a source that gave its identity up serves no more");
                    self.quiet = None;
                    self.replica(SOURCE, ReceiverInput::Unfence);
                }
                SourceOutput::Hand(to) => {
                    assert_eq!((to, self.lives[&SOURCE].running.len()), (TARGET, 0), "it is quiet");
                    (self.asked, self.handed) = (true, true);
                }
                SourceOutput::Settle(epoch) => self.cutover(SOURCE, SUBMITTER, Message::Quiet { epoch }),
                SourceOutput::Part => self.parting = true,
                SourceOutput::Over => {}
            }
        }
    }

    fn tell_all(&mut self, message: Message) {
        self.cutover(SOURCE, SUBMITTER, message.clone());
        self.cutover(SOURCE, TARGET, message);
    }

    fn cutover(&mut self, from: Incarnation, to: Incarnation, message: Message) {
        self.post(from, to, Mail::Control(Control::Cutover(message)));
    }

    fn tell_taker(&mut self, input: TargetInput) {
        self.taker.handle(self.now, input);
        while let Some(TargetOutput::Ask { holder, epoch }) = self.taker.poll() {
            self.cutover(TARGET, holder, Message::Fence { epoch, to: TARGET });
        }
    }

    fn tell_submitter(&mut self, input: SubmitterInput) {
        self.submitter.handle(self.now, input);
        while let Some(output) = self.submitter.poll() {
            match output {
                SubmitterOutput::Pause(replica) => self.tell(SenderInput::Pause(replica)),
                SubmitterOutput::Resume { replica, .. } => self.tell(SenderInput::Resume(replica)),
            }
        }
    }

    fn tell(&mut self, input: SenderInput) {
        self.sender.handle(self.now, input);
        while let Some(output) = self.sender.poll() {
            match output {
                SenderOutput::Send { to, step } => self.post(SUBMITTER, to.incarnation, Mail::Step(step)),
                SenderOutput::Control { to, control } => self.post(SUBMITTER, to, Mail::Control(control)),
                SenderOutput::Done { id, result, .. } => {
                    if let Err(StepError { code, outcome, .. }) = &result {
                        let nobody = self.holder.is_none_or(|(holder, _)| !self.alive(holder));
                        assert!(nobody, "{id} failed: {code:?}, {outcome:?}");
                        assert_ne!(*outcome, Outcome::Ran);
                    }
                    let before = self.ended.insert(id.seq, result.map_err(|error| error.message));
                    assert!(before.is_none(), "{id} ended twice (P-1, P-5)");
                }
                SenderOutput::HandedOver { .. } | SenderOutput::Release { .. } => {}
                output => panic!("nobody asked for {output:?}"),
            }
        }
    }

    fn replica(&mut self, at: Incarnation, input: ReceiverInput) {
        let now = self.now;
        self.lives.get_mut(&at).expect("it is one of the two").receiver.handle(now, input);
        while let Some(output) = self.lives.get_mut(&at).and_then(|life| life.receiver.poll()) {
            match output {
                ReceiverOutput::Execute(job) => self.execute(at, job.id),
                ReceiverOutput::Reply { to, reply } => self.post(at, to, Mail::Reply(reply)),
                ReceiverOutput::Control { to, control } => self.post(at, to, Mail::Control(control)),
                // Its run goes on to its end, and its answer is wanted by nobody.
                ReceiverOutput::Abort { .. } => {}
                ReceiverOutput::Quiet => self.quiet = Some(self.fence),
                output => panic!("nobody asked for {output:?}"),
            }
        }
    }

    fn execute(&mut self, at: Incarnation, id: StepId) {
        let holds = self.holder.is_some_and(|(holder, _)| holder == at);
        assert!(holds, "{id} runs at {at}, which does not hold the identity");
        assert!(at != SOURCE || !self.handed, "{id} runs at the source after it gave the identity up");
        let life = self.lives.get_mut(&at).expect("it is one of the two");
        assert!(!life.executed.contains(&id), "{id} ran twice in one life (P-2)");
        life.executed.push(id);
        life.running.push(id);
        // Nobody died: what has run at the source has run.
        let again = at == TARGET && self.alive(SOURCE) && self.lives[&SOURCE].executed.contains(&id);
        assert!(!again || self.blind, "{id} runs again although its first run ended well");
        if !self.blind && !self.called_off && self.alive(SOURCE) {
            let order = &self.lives[&at].executed;
            assert!(order.is_sorted(), "{order:?} at {at} (P-7)");
        }
    }
}
