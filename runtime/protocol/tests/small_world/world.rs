//! One origin, one group of replicas, and everything that lies between them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::Bytes;
use connex_protocol::group::{Group as Members, GroupInput};
use connex_protocol::step::{
    Receiver, ReceiverConfig, ReceiverInput, ReceiverOutput, Sender, SenderConfig, SenderInput, SenderOutput,
    Submission, Target, WhenFull,
};
use connex_protocol::wire::directory::Route;
use connex_protocol::wire::{Control, ErrorCode, Outcome, Payload, RegionKey, Reply, Slot, Step, StepError};
use connex_protocol::{Address, Epoch, Evidence, Group, Incarnation, Instant, Machine, ReplicaNo, StepId};

/// What may still happen in a world, beside deliveries and the engines' work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Budget {
    /// Steps to submit.
    pub(super) submits: u64,
    /// Deaths of a replica's process.
    pub(super) crashes: u32,
    /// New lives of a replica that died.
    pub(super) comebacks: u32,
    /// Losses of one of the two links, with what was on it.
    pub(super) relinks: u32,
    /// Payloads that can't be read.
    pub(super) lost_payloads: u32,
    /// Messages to a replica that vanish while their link lives.
    pub(super) vanishings: u32,
    /// Cancels.
    pub(super) cancels: u32,
    /// Times at which the clock jumps to the sender's deadline although something else could happen.
    pub(super) early_ticks: u32,
}

/// One thing that may happen next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    Submit,
    ToReplica(Incarnation),
    Vanish(Incarnation),
    ToOrigin(Incarnation),
    Read {
        at: Incarnation,
        id: StepId,
        whole: bool,
    },
    Finish(Incarnation, StepId),
    /// The process dies; so many of its messages still arrive.
    Crash(Incarnation, usize),
    /// The supervision event of a death arrives.
    HandOver(Incarnation),
    Comeback(ReplicaNo),
    /// A link is lost; so many messages on it still arrive, each way.
    Relink(Incarnation, usize, usize),
    Cancel(StepId),
    Tick,
}

#[derive(Clone, Debug)]
enum Outbound {
    Step(Step),
    Control(Control),
}

#[derive(Clone, Debug)]
enum Inbound {
    Reply(Reply),
    Control(Control),
    Down,
    Relinked,
}

#[derive(Clone, Debug)]
struct Life {
    replica: ReplicaNo,
    receiver: Receiver,
    alive: bool,
    outbound: VecDeque<Outbound>,
    inbound: VecDeque<Inbound>,
    /// What its engine executes, and with what it was told to stop.
    running: BTreeMap<StepId, Option<ErrorCode>>,
    reading: BTreeMap<StepId, u32>,
    executed: Vec<StepId>,
}

#[derive(Clone, Debug, Default)]
struct History {
    results: Vec<Result<Bytes, ErrorCode>>,
    first: Option<Incarnation>,
    at: Option<Incarnation>,
    /// Where it was before.
    left: Option<Incarnation>,
    cancelled: bool,
}

/// The whole state; what the search explores.
#[derive(Clone, Debug)]
pub(super) struct World {
    now: Instant,
    sender: Sender<Members>,
    lives: BTreeMap<Incarnation, Life>,
    handovers: BTreeSet<Incarnation>,
    budget: Budget,
    slots: bool,
    disordered: bool,
    /// Something happened that nobody was told of.
    silent: bool,
    k: usize,
    next: u64,
    lives_made: u64,
    steps: BTreeMap<u64, History>,
}

const ME: Incarnation = Incarnation::from_bits(1);

fn id(seq: u64) -> StepId {
    StepId { origin: ME, seq }
}

fn body(seq: u64) -> Bytes {
    Bytes::from(seq.to_le_bytes().to_vec())
}

impl World {
    /// A group of `replicas`, each with a first life; at most `k` steps in flight; payloads in slots if so asked.
    pub(super) fn new(replicas: ReplicaNo, k: usize, slots: bool, budget: Budget) -> Self {
        let config = SenderConfig { k: Some(k), ..SenderConfig::default() };
        let mut world = World {
            now: Instant::ZERO,
            sender: Sender::new(ME, config, Members::new(Group::new("m", "pp", 1))),
            lives: BTreeMap::new(),
            handovers: BTreeSet::new(),
            budget,
            slots,
            disordered: false,
            silent: false,
            k,
            next: 1,
            lives_made: 0,
            steps: BTreeMap::new(),
        };
        for replica in 0..replicas {
            world.begin_life(replica);
        }
        world
    }

    fn begin_life(&mut self, replica: ReplicaNo) {
        self.lives_made += 1;
        let incarnation = Incarnation::from_bits(100 + self.lives_made);
        let life = Life {
            replica,
            receiver: Receiver::new(ReceiverConfig::default()),
            alive: true,
            outbound: VecDeque::new(),
            inbound: VecDeque::new(),
            running: BTreeMap::new(),
            reading: BTreeMap::new(),
            executed: Vec::new(),
        };
        let before = self.lives.iter().find(|(_, life)| life.replica == replica).map(|(at, _)| *at);
        if let Some(before) = before {
            // The directory's word on the successor is one on its predecessor as well.
            if self.lives.get_mut(&before).is_some_and(|life| std::mem::take(&mut life.alive)) {
                self.handovers.insert(before);
            }
        }
        self.lives.insert(incarnation, life);
        let route = Route {
            lid: Group::new("m", "pp", 1).replica(replica),
            incarnation,
            address: Address::new("mem://x"),
            epoch: Epoch { boot: 1, counter: self.lives_made },
            ready: true,
            draining: false,
            shadow: None,
        };
        self.members(GroupInput::Route(route));
        self.members(GroupInput::Up { incarnation });
        self.tell(SenderInput::Pump);
    }

    fn members(&mut self, input: GroupInput) {
        let now = self.now;
        self.sender.choose_mut().handle(now, input);
        while self.sender.choose_mut().poll().is_some() {}
    }

    /// Everything that may happen next, but the passing of time.
    pub(super) fn acts(&self) -> Vec<Act> {
        let mut acts = Vec::new();
        let budget = self.budget;
        if budget.submits > 0 {
            acts.push(Act::Submit);
        }
        acts.extend(self.handovers.iter().copied().map(Act::HandOver));
        for (at, life) in &self.lives {
            if !life.inbound.is_empty() {
                acts.push(Act::ToOrigin(*at));
            }
            if !life.alive {
                continue;
            }
            if !life.outbound.is_empty() {
                acts.push(Act::ToReplica(*at));
                if budget.vanishings > 0 {
                    acts.push(Act::Vanish(*at));
                }
            }
            for id in life.reading.keys() {
                acts.push(Act::Read { at: *at, id: *id, whole: true });
                if budget.lost_payloads > 0 {
                    acts.push(Act::Read { at: *at, id: *id, whole: false });
                }
            }
            acts.extend(life.running.keys().map(|id| Act::Finish(*at, *id)));
            if budget.crashes > 0 {
                acts.extend((0..=life.inbound.len()).map(|kept| Act::Crash(*at, kept)));
            }
            if budget.relinks > 0 {
                for down in 0..=life.outbound.len() {
                    acts.extend((0..=life.inbound.len()).map(|up| Act::Relink(*at, down, up)));
                }
            }
        }
        if budget.comebacks > 0 {
            let replicas: BTreeSet<ReplicaNo> = self.lives.values().map(|life| life.replica).collect();
            let alive = |replica| self.lives.values().any(|life| life.replica == replica && life.alive);
            acts.extend(replicas.into_iter().filter(|replica| !alive(*replica)).map(Act::Comeback));
        }
        if budget.cancels > 0 {
            let open = self.steps.iter().filter(|(_, step)| step.results.is_empty());
            acts.extend(open.map(|(seq, _)| Act::Cancel(id(*seq))));
        }
        if budget.early_ticks > 0 && !acts.is_empty() && self.sender.deadline().is_some() {
            acts.push(Act::Tick);
        }
        acts
    }

    /// Whether every submitted step has ended.
    pub(super) fn is_done(&self) -> bool {
        self.steps.values().all(|step| !step.results.is_empty())
    }

    pub(super) fn apply(&mut self, act: Act, free: bool) {
        match act {
            Act::Submit => {
                self.budget.submits -= 1;
                let seq = self.next;
                self.next += 1;
                self.steps.insert(seq, History::default());
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
            Act::ToReplica(at) => {
                let message = self.life(at).outbound.pop_front().expect("something is on its way");
                self.replica(
                    at,
                    match message {
                        Outbound::Step(step) => ReceiverInput::Step { from: ME, step },
                        Outbound::Control(control) => ReceiverInput::Control { from: ME, control },
                    },
                );
            }
            Act::Vanish(at) => {
                self.budget.vanishings -= 1;
                (self.disordered, self.silent) = (true, true);
                self.life(at).outbound.pop_front();
            }
            Act::ToOrigin(at) => self.origin_takes(at),
            Act::Read { at, id, whole } => {
                let attempt = self.life(at).reading.remove(&id).expect("it is being read");
                if !whole {
                    self.budget.lost_payloads -= 1;
                    self.disordered = true;
                }
                let payload = whole.then(|| body(id.seq));
                self.replica(at, ReceiverInput::Fetched { id, from: ME, attempt, payload });
            }
            Act::Finish(at, id) => {
                let stopped = self.life(at).running.remove(&id).expect("it executes");
                let result = match stopped {
                    None => Ok(body(id.seq)),
                    Some(code) => Err(StepError::new(code, Outcome::MayHaveRun, "stopped")),
                };
                self.replica(at, ReceiverInput::Done { id, route: vec![0], result });
            }
            Act::Crash(at, kept) => {
                self.budget.crashes -= 1;
                let life = self.life(at);
                life.alive = false;
                life.outbound.clear();
                life.running.clear();
                life.reading.clear();
                life.inbound.truncate(kept);
                life.inbound.push_back(Inbound::Down);
            }
            Act::HandOver(at) => {
                self.handovers.remove(&at);
                let from = Target { replica: self.life(at).replica, incarnation: at };
                self.tell(SenderInput::Handover { from, evidence: Evidence::ConnectionReset });
            }
            Act::Comeback(replica) => {
                self.budget.comebacks -= 1;
                self.begin_life(replica);
            }
            Act::Relink(at, down, up) => {
                self.budget.relinks -= 1;
                // What is sent before the loss is heard of goes over the other link, and may overtake.
                self.disordered = true;
                let life = self.life(at);
                life.outbound.truncate(down);
                life.inbound.truncate(up);
                life.inbound.push_back(Inbound::Relinked);
            }
            Act::Cancel(id) => {
                self.budget.cancels -= 1;
                self.steps.get_mut(&id.seq).expect("it was submitted").cancelled = true;
                self.tell(SenderInput::Cancel(id));
            }
            Act::Tick => {
                self.budget.early_ticks -= u32::from(!free);
                self.now = self.now.max(self.sender.deadline().expect("there is a deadline"));
                self.tell(SenderInput::Tick);
            }
        }
        self.check();
    }

    /// Whether nothing but time can help: nobody was told of what happened, or there is no replica.
    pub(super) fn waits_for_time(&self) -> bool {
        self.silent || self.lives.values().all(|life| !life.alive)
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.sender.deadline()
    }

    fn life(&mut self, at: Incarnation) -> &mut Life {
        self.lives.get_mut(&at).expect("lives are never forgotten")
    }

    fn origin_takes(&mut self, at: Incarnation) {
        let message = self.life(at).inbound.pop_front().expect("something is on its way");
        match message {
            Inbound::Reply(reply) => self.tell(SenderInput::Reply { from: at, reply }),
            Inbound::Control(control) => self.tell(SenderInput::Control { from: at, control }),
            Inbound::Relinked => self.tell(SenderInput::Relinked(at)),
            Inbound::Down => {
                let evidence = Evidence::ConnectionReset;
                self.members(GroupInput::Down { incarnation: at, evidence });
                self.handovers.insert(at);
            }
        }
    }

    fn tell(&mut self, input: SenderInput) {
        self.sender.handle(self.now, input);
        while let Some(output) = self.sender.poll() {
            match output {
                SenderOutput::Send { to, step } => self.on_send(to.incarnation, step),
                SenderOutput::Control { to, control } => {
                    let life = self.life(to);
                    if life.alive {
                        life.outbound.push_back(Outbound::Control(control));
                    }
                }
                SenderOutput::Done { id, result, .. } => {
                    if result.as_ref().is_err_and(|error| error.code == ErrorCode::Unavailable) {
                        assert!(self.lives.values().all(|life| !life.alive), "{id}: a replica was there");
                    }
                    let step = self.steps.get_mut(&id.seq).expect("it was submitted");
                    step.results.push(result.map_err(|error| error.code));
                }
                SenderOutput::HandedOver { from, steps, .. } => {
                    for id in steps {
                        let step = self.steps.get_mut(&id.seq).expect("it was submitted");
                        // It has been sent again, or waits; if it was never sent, it was in that life's mailbox.
                        let was = [step.at, step.left].contains(&Some(from.incarnation));
                        assert!(was || step.at.is_none(), "only what was on the life that ended moves (P-8)");
                    }
                }
                SenderOutput::Release { .. } => {}
                output => panic!("nobody asked for {output:?}"),
            }
        }
    }

    fn on_send(&mut self, to: Incarnation, mut step: Step) {
        let history = self.steps.get_mut(&step.id.seq).expect("it was submitted");
        assert!(history.results.is_empty(), "what has ended is sent no more");
        if let Some(left) = history.at.filter(|at| *at != to) {
            assert!(!self.lives[&left].alive, "{} left a life that goes on (P-8)", step.id);
            history.left = Some(left);
        }
        history.first.get_or_insert(to);
        history.at = Some(to);
        let in_flight =
            self.steps.values().filter(|step| step.at.is_some() && step.results.is_empty()).count();
        assert!(in_flight <= self.k, "K is enforced (P-4)");
        if self.slots {
            step.payload = Payload::Slot(Slot {
                region: RegionKey { owner: ME, id: 0 },
                offset: step.id.seq,
                len: 8,
                generation: step.attempt.into(),
                crc: None,
            });
        }
        let life = self.life(to);
        if life.alive {
            life.outbound.push_back(Outbound::Step(step));
        }
    }

    fn replica(&mut self, at: Incarnation, input: ReceiverInput) {
        let now = self.now;
        let life = self.life(at);
        life.receiver.handle(now, input);
        while let Some(output) = life.receiver.poll() {
            match output {
                ReceiverOutput::Execute(job) => {
                    assert_eq!(job.payload, body(job.id.seq), "a payload is its own step's (P-6)");
                    assert!(!life.executed.contains(&job.id), "{} ran twice in one life (P-2)", job.id);
                    life.executed.push(job.id);
                    life.running.insert(job.id, None);
                }
                ReceiverOutput::Fetch { id, attempt, .. } => {
                    life.reading.insert(id, attempt);
                }
                ReceiverOutput::Abort { id, code } => {
                    *life.running.get_mut(&id).expect("only what executes is stopped") = Some(code);
                }
                ReceiverOutput::Reply { reply, .. } => life.inbound.push_back(Inbound::Reply(reply)),
                ReceiverOutput::Control { control, .. } => life.inbound.push_back(Inbound::Control(control)),
                output => panic!("nobody asked for {output:?}"),
            }
        }
    }

    /// What must hold at every moment.
    fn check(&self) {
        for (seq, step) in &self.steps {
            assert!(step.results.len() <= 1, "step {seq} ended twice: {:?} (P-1, P-5)", step.results);
            match step.results.first() {
                Some(Ok(result)) => assert_eq!(*result, body(*seq)),
                Some(Err(ErrorCode::Cancelled)) => assert!(step.cancelled, "step {seq}"),
                Some(Err(ErrorCode::Unavailable)) => {}
                Some(Err(code)) => panic!("step {seq} failed: {code:?}"),
                None => {}
            }
        }
        if self.disordered {
            return;
        }
        for (at, life) in &self.lives {
            // In order, among those that came here first, and among those of one handover (P-7).
            let mut by_source: BTreeMap<Option<Incarnation>, Vec<u64>> = BTreeMap::new();
            for id in &life.executed {
                let step = &self.steps[&id.seq];
                let source = if step.first == Some(*at) { None } else { step.left };
                by_source.entry(source).or_default().push(id.seq);
            }
            for (source, order) in by_source {
                assert!(order.is_sorted(), "{order:?} from {source:?} at {at} (P-7)");
            }
        }
    }
}
