//! One identity that moves from a source to a target, one submitter with steps for it, and a directory between them.

mod parties;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use connex_protocol::cutover::{
    Source, SourceInput, SourceOutput, Submitter, SubmitterInput, SubmitterOutput, Target as Taker,
    TargetInput, TargetOutput,
};
use connex_protocol::group::{Group as Members, GroupInput, GroupOutput};
use connex_protocol::step::{
    Receiver, ReceiverConfig, ReceiverInput, ReceiverOutput, Sender, SenderConfig, SenderInput, SenderOutput,
    Submission, Target, WhenFull,
};
use connex_protocol::wire::cutover::Message;
use connex_protocol::wire::directory::Route;
use connex_protocol::wire::{Control, Heartbeat, Outcome, Reply, Step, StepError};
use connex_protocol::{Address, Epoch, Evidence, Group, Incarnation, Instant, Machine, StepId};

const SUBMITTER: Incarnation = Incarnation::from_bits(1);
const SOURCE: Incarnation = Incarnation::from_bits(2);
const TARGET: Incarnation = Incarnation::from_bits(3);
const STRANGER: Incarnation = Incarnation::from_bits(4);
/// Each of the three, and the other two.
const TRIO: [(Incarnation, [Incarnation; 2]); 3] =
    [(SUBMITTER, [SOURCE, TARGET]), (SOURCE, [SUBMITTER, TARGET]), (TARGET, [SUBMITTER, SOURCE])];
const FIRST: Epoch = Epoch { boot: 1, counter: 1 };

/// What may still happen, beside deliveries, executions and the migration itself.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Budget {
    pub(super) submits: u64,
    /// The source's heartbeats tell of its fence before the fence is over.
    pub(super) heartbeats: bool,
    /// Deaths of the source, the target or the submitter, each with what it had not yet brought to its peers.
    pub(super) crashes: u32,
    /// Stops of the source, which comes back later.
    pub(super) hangs: u32,
    /// Times at which the directory has forgotten who waits for the identity.
    pub(super) forgets: u32,
    /// Messages that are not what they seem: a stranger's, another epoch's, or said twice.
    pub(super) lies: u32,
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
    /// The directory takes the source's request; it knows of the target or has forgotten it.
    Directory {
        knows: bool,
    },
    /// A death, and how many of the messages to each of the other two were sent before.
    Crash(Incarnation, [usize; 2]),
    /// The source stops, or goes on.
    Hang,
    Thaw,
    /// The lease of a holder that is dead or hangs is over.
    Expire,
    Lie(Lie),
    Relink(usize, usize),
    Vanish(Incarnation, Incarnation),
    TickSource,
    TickTarget,
    TickSubmitter,
    TickSender,
}

/// A message that is not what it seems.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lie {
    /// A stranger asks for the identity, for itself or for the target.
    AskForItself,
    AskForTheTarget,
    /// The target asks for an epoch that is over, or once more.
    AskForAnother,
    AskAgain,
    /// A stranger says to hold, or to go on.
    Pausing,
    Abort,
    /// A stranger tells the target that it is off.
    CalledOff,
    /// A stranger has heard every answer; so has the submitter, of an earlier fence.
    SeenByAStranger,
    SeenBefore,
}

const LIES: [Lie; 9] = [
    Lie::AskForItself,
    Lie::AskForTheTarget,
    Lie::AskForAnother,
    Lie::AskAgain,
    Lie::Pausing,
    Lie::Abort,
    Lie::CalledOff,
    Lie::SeenByAStranger,
    Lie::SeenBefore,
];

#[derive(Clone, Debug)]
enum Mail {
    Step(Step),
    Reply(Reply),
    Control(Control),
    /// From the directory: who holds the identity now, or nobody.
    Holder(Option<(Incarnation, Epoch)>),
    /// From the directory to the source: in answer, or because its identity is another's.
    Word(SourceInput),
    Heartbeat(Heartbeat),
    Down,
    Relinked,
}

#[derive(Clone, Debug)]
struct Life {
    receiver: Receiver,
    alive: bool,
    /// It is stopped.
    hangs: bool,
    running: Vec<StepId>,
    executed: Vec<StepId>,
}

impl Life {
    fn new() -> Self {
        let receiver = Receiver::new(ReceiverConfig::default());
        Life { receiver, alive: true, hangs: false, running: Vec::new(), executed: Vec::new() }
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
    submits: bool,
    /// Lives that the submitter hears no more.
    fenced: BTreeSet<Incarnation>,
    /// Lives that the submitter has seen die.
    down: BTreeSet<Incarnation>,
    mail: BTreeMap<(Incarnation, Incarnation), VecDeque<Mail>>,
    /// The directory's registry, and a request that is on its way there.
    holder: Option<(Incarnation, Epoch)>,
    granted: u64,
    asked: bool,
    /// A fence that completed, of which the source has not heard.
    quiet: Option<u64>,
    /// The source takes steps, as its heartbeats say.
    ready: bool,
    fence: u64,
    /// The source has asked the directory to hand the identity over, and has not been told that it keeps it.
    handed: bool,
    parting: bool,
    /// The lease of a source that only hangs has run out.
    lapsed: bool,
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
            submits: true,
            fenced: BTreeSet::new(),
            down: BTreeSet::new(),
            mail: BTreeMap::new(),
            holder: Some((SOURCE, FIRST)),
            granted: FIRST.counter,
            asked: false,
            quiet: None,
            ready: true,
            fence: 0,
            handed: false,
            parting: false,
            lapsed: false,
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
        let cut = [(from, to), (to, from)].iter().any(|(a, b)| *b == SUBMITTER && self.fenced.contains(a));
        if self.alive(from) && self.alive(to) && !cut && to != STRANGER {
            self.mail.entry((from, to)).or_default().push_back(mail);
        }
    }

    fn alive(&self, who: Incarnation) -> bool {
        match self.lives.get(&who) {
            Some(life) => life.alive,
            None => who != SUBMITTER || self.submits,
        }
    }

    /// Lives, and is not stopped.
    fn acting(&self, who: Incarnation) -> bool {
        self.alive(who) && !self.lives.get(&who).is_some_and(|life| life.hangs)
    }

    fn waiting(&self, from: Incarnation, to: Incarnation) -> usize {
        self.mail.get(&(from, to)).map_or(0, VecDeque::len)
    }

    pub(super) fn acts(&self) -> Vec<Act> {
        let mut acts = Vec::new();
        if self.budget.submits > 0 && self.submits {
            acts.push(Act::Submit);
        }
        for (from, to) in self.mail.keys().copied() {
            if self.acting(to) {
                acts.push(Act::Deliver(from, to));
            }
            let between = [from, to].iter().all(|who| [SOURCE, TARGET].contains(who));
            if between && self.budget.vanishings > 0 {
                acts.push(Act::Vanish(from, to));
            }
        }
        for (at, life) in self.lives.iter().filter(|(at, _)| self.acting(**at)) {
            acts.extend(life.running.iter().map(|id| Act::Finish(*at, *id)));
        }
        if self.quiet.is_some() && self.acting(SOURCE) {
            acts.push(Act::Quiet);
        }
        if self.asked {
            acts.push(Act::Directory { knows: true });
            if self.budget.forgets > 0 {
                acts.push(Act::Directory { knows: false });
            }
        }
        if self.holder.is_some_and(|(holder, _)| !self.acting(holder)) {
            acts.push(Act::Expire);
        }
        if self.lives[&SOURCE].hangs {
            acts.push(Act::Thaw);
        }
        self.faults(&mut acts);
        acts
    }

    fn faults(&self, acts: &mut Vec<Act>) {
        if self.budget.crashes > 0 {
            for (who, others) in TRIO.into_iter().filter(|(who, _)| self.alive(*who)) {
                for first in 0..=self.waiting(who, others[0]) {
                    let rest = 0..=self.waiting(who, others[1]);
                    acts.extend(rest.map(|second| Act::Crash(who, [first, second])));
                }
            }
        }
        if self.budget.hangs > 0 && self.acting(SOURCE) {
            acts.push(Act::Hang);
        }
        if self.budget.lies > 0 {
            acts.extend(LIES.into_iter().map(Act::Lie));
        }
        if self.budget.relinks > 0 && self.alive(SOURCE) && self.submits && !self.fenced.contains(&SOURCE) {
            for down in 0..=self.waiting(SUBMITTER, SOURCE) {
                acts.extend((0..=self.waiting(SOURCE, SUBMITTER)).map(|up| Act::Relink(down, up)));
            }
        }
        if self.budget.early_ticks > 0 {
            // Longer than any message takes: what waits half a minute for a holder is not to blame.
            let soon = self.now + Duration::from_secs(5);
            acts.extend(self.ticks().into_iter().filter(|act| self.due(*act).is_some_and(|due| due <= soon)));
        }
    }

    /// Whose clock may run to its deadline.
    pub(super) fn ticks(&self) -> Vec<Act> {
        let mut acts = Vec::new();
        if self.acting(SOURCE) && self.source.deadline().is_some() {
            acts.push(Act::TickSource);
        }
        if self.alive(TARGET) && self.taker.deadline().is_some() {
            acts.push(Act::TickTarget);
        }
        if self.submits && self.submitter.deadline().is_some() {
            acts.push(Act::TickSubmitter);
        }
        if self.submits && self.sender.deadline().is_some() {
            acts.push(Act::TickSender);
        }
        acts
    }

    /// Whether every submitted step has ended and the identity is where it is to be.
    pub(super) fn is_settled(&self) -> bool {
        let done = self.ended.len() as u64 + 1 == self.next;
        let held = !self.alive(TARGET) || self.holder.is_some_and(|(holder, _)| holder == TARGET);
        held && (!self.submits || (done && self.submitter.deadline().is_none()))
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
                let submitters = if self.submits { vec![SUBMITTER] } else { Vec::new() };
                self.tell_source(SourceInput::Quiet { fence, submitters });
            }
            Act::Directory { knows } => {
                self.budget.forgets -= u32::from(!knows);
                self.on_request(knows);
            }
            Act::Crash(who, sent) => self.crash(who, sent),
            Act::Hang => {
                self.budget.hangs -= 1;
                self.blind = true;
                self.lives.get_mut(&SOURCE).expect("it is one of the two").hangs = true;
            }
            Act::Thaw => self.lives.get_mut(&SOURCE).expect("it is one of the two").hangs = false,
            Act::Expire => {
                self.lapsed |= self.lives[&SOURCE].hangs;
                let next = Some(TARGET).filter(|target| self.acting(*target));
                self.grant(next);
                self.post(DIRECTORY, SOURCE, Mail::Word(SourceInput::Lost));
            }
            Act::Lie(lie) => {
                self.budget.lies -= 1;
                self.lie(lie);
            }
            Act::Relink(down, up) => {
                self.budget.relinks -= 1;
                self.blind = true;
                self.mail.entry((SUBMITTER, SOURCE)).or_default().truncate(down);
                self.mail.entry((SOURCE, SUBMITTER)).or_default().truncate(up);
                self.post(SOURCE, SUBMITTER, Mail::Relinked);
                self.beat(self.ready);
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
}
