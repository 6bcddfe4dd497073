use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

use bytes::Bytes;

use crate::wire::{
    Completed, Control, ErrorCode, Item, Outcome, Payload, Reply, Seal, Slot, Step, StepError, StepState,
};
use crate::{Incarnation, Instant, Machine, ReplicaNo, StepId};

/// A step may have this many upstream hops that wait for it; more than a pipeline ever has at once.
const WAITERS_MAX: usize = 8;

/// The limits of a receiver.
#[derive(Clone, Debug)]
pub struct ReceiverConfig {
    /// Origins that are remembered at once.
    pub origins: usize,
    /// Steps of one origin that are remembered at once; at least the senders' window.
    pub steps_per_origin: usize,
    /// Origins that are gone for good and still refused.
    pub gone: usize,
}

impl Default for ReceiverConfig {
    fn default() -> Self {
        ReceiverConfig { origins: 4096, steps_per_origin: 2048, gone: 4096 }
    }
}

/// A step for the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// The step.
    pub id: StepId,
    /// Counts the sends of the hop in front; a later attempt of the same request supersedes an earlier one.
    pub attempt: u32,
    /// The replica to prefer at each later stage.
    pub route: Vec<ReplicaNo>,
    /// What the origin knows to be finished, to be passed on with the step.
    pub completed: Completed,
    /// What was left of its deadline when it was sent, in milliseconds.
    pub deadline_ms: Option<u32>,
    /// It yields items.
    pub streaming: bool,
    /// The items that its submitter already has; the next one's index is their number.
    pub resume: Vec<Bytes>,
    /// The application's metadata.
    pub meta: Bytes,
    /// The payload.
    pub payload: Bytes,
}

/// What happens to a receiver.
#[derive(Clone, Debug)]
pub enum ReceiverInput {
    /// A step arrived.
    Step {
        /// From the hop in front.
        from: Incarnation,
        /// The step.
        step: Step,
    },
    /// A fetch ended.
    Fetched {
        /// The step.
        id: StepId,
        /// Whose slot was read.
        from: Incarnation,
        /// Which attempt's slot.
        attempt: u32,
        /// The payload, verified; `None` if the slot did not hold it or could not be read.
        payload: Option<Bytes>,
    },
    /// The engine, or the pipeline behind it, finished a step.
    Done {
        /// The step.
        id: StepId,
        /// The replicas that served it: this one, then the later stages'.
        route: Vec<ReplicaNo>,
        /// The result.
        result: Result<Bytes, StepError>,
    },
    /// The engine yielded an item.
    Item {
        /// The step.
        id: StepId,
        /// The item.
        body: Bytes,
    },
    /// Cancels, questions and notices; others are ignored.
    Control {
        /// From which life.
        from: Incarnation,
        /// The message.
        control: Control,
    },
    /// An origin is gone for good: it is finished as a whole (P-3). If it was only away for long, what it submits
    /// after all that is new, and is executed.
    OriginGone(Incarnation),
    /// Start nothing more; what has not begun, and what streams, goes back to its submitters. Both for a drain and
    /// for a migration's fence.
    Fence,
    /// Serve again: the migration was called off.
    Unfence,
}

/// What a receiver wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReceiverOutput {
    /// Read the payload; it comes back as [`ReceiverInput::Fetched`].
    Fetch {
        /// The step.
        id: StepId,
        /// Whose memory.
        from: Incarnation,
        /// Which attempt's slot.
        attempt: u32,
        /// Where.
        slot: Slot,
        /// What the slot must hold, before and after the read (P-6).
        seal: Seal,
    },
    /// Execute: at most once per step in this life (P-2), in order of arrival per origin (P-7).
    Execute(Job),
    /// Stop executing this step, and finish it with this error.
    Abort {
        /// The step.
        id: StepId,
        /// [`ErrorCode::Cancelled`], or [`ErrorCode::Draining`] when it is to go on elsewhere.
        code: ErrorCode,
    },
    /// Send this reply.
    Reply {
        /// To whom.
        to: Incarnation,
        /// The reply.
        reply: Reply,
    },
    /// Send this item.
    Item {
        /// To whom.
        to: Incarnation,
        /// The item.
        item: Item,
    },
    /// Send this message.
    Control {
        /// To whom.
        to: Incarnation,
        /// The message.
        control: Control,
    },
    /// A word from a submitter's application, each once and in order.
    Notice {
        /// From which life.
        from: Incarnation,
        /// Its bytes.
        body: Bytes,
    },
    /// Drop what is kept for this origin: it is gone for good.
    Forget(Incarnation),
    /// Nothing executes any more: the fence is complete.
    Quiet,
}

#[derive(Clone, Debug, Default)]
struct Origin {
    completed: Completed,
    /// The highest number seen.
    highest: u64,
    entries: BTreeMap<u64, Entry>,
    /// Steps that have not begun, in order of arrival (P-7).
    queue: VecDeque<u64>,
    /// Below this, finished steps named above `completed.below` are folded in.
    finished: BTreeSet<u64>,
}

#[derive(Clone, Debug)]
struct Entry {
    waiters: Vec<Incarnation>,
    /// Items yielded in this life, and the index of the first of them.
    items: Vec<Bytes>,
    items_base: u32,
    state: State,
}

#[derive(Clone, Debug)]
enum State {
    /// Its payload is being read.
    Fetching {
        step: Step,
        from: Incarnation,
        slot: Slot,
        newer: Option<(Incarnation, u32, Slot)>,
    },
    /// Its turn has not come.
    Ready {
        step: Step,
        payload: Bytes,
    },
    Executing {
        streaming: bool,
        aborted: bool,
    },
    Finished(Reply),
}

/// The downstream side of a hop: what a served endpoint received, executes and has answered.
#[derive(Clone, Debug)]
pub struct Receiver {
    config: ReceiverConfig,
    origins: BTreeMap<Incarnation, Origin>,
    /// Origins that were finished as a whole, and the highest number seen of each: what is above it is new.
    gone: BTreeMap<Incarnation, u64>,
    gone_order: VecDeque<Incarnation>,
    notices: BTreeMap<Incarnation, u64>,
    fenced: bool,
    executing: usize,
    accepted: u64,
    completed: u64,
    outputs: VecDeque<ReceiverOutput>,
}

impl Receiver {
    /// A receiver that serves.
    pub fn new(config: ReceiverConfig) -> Self {
        Receiver {
            config,
            origins: BTreeMap::new(),
            gone: BTreeMap::new(),
            gone_order: VecDeque::new(),
            notices: BTreeMap::new(),
            fenced: false,
            executing: 0,
            accepted: 0,
            completed: 0,
            outputs: VecDeque::new(),
        }
    }

    /// Steps executing, here or further down the pipeline.
    pub fn executing(&self) -> usize {
        self.executing
    }

    /// Steps accepted and completed since the start.
    pub fn progress(&self) -> (u64, u64) {
        (self.accepted, self.completed)
    }

    /// The lives from which something is remembered: origins, and the hops that sent their steps.
    pub fn submitters(&self) -> BTreeSet<Incarnation> {
        let hops = self.origins.values().flat_map(|origin| origin.entries.values());
        hops.flat_map(|entry| entry.waiters.iter().copied()).chain(self.origins.keys().copied()).collect()
    }

    fn on_step(&mut self, from: Incarnation, step: Step) {
        let id = step.id;
        if self.gone.get(&id.origin).is_some_and(|highest| id.seq <= *highest) {
            self.refuse(from, id, ErrorCode::Stale, Outcome::MayHaveRun, "its origin is gone");
            return;
        }
        if !self.origins.contains_key(&id.origin)
            && self.origins.len() >= self.config.origins
            && !self.evict()
        {
            self.refuse(from, id, ErrorCode::Overloaded, Outcome::NotStarted, "too many origins");
            return;
        }
        self.origins.entry(id.origin).or_default();
        self.learn(id.origin, &step.completed);
        let origin = self.origins.get_mut(&id.origin).expect("it was just made");
        origin.highest = origin.highest.max(id.seq).max(step.completed.below.saturating_sub(1));
        if id.seq < origin.completed.below || origin.finished.contains(&id.seq) {
            self.refuse(from, id, ErrorCode::Stale, Outcome::MayHaveRun, "its origin has finished it");
        } else if origin.entries.contains_key(&id.seq) {
            self.on_again(from, step);
        } else if self.fenced {
            self.refuse(from, id, ErrorCode::Draining, Outcome::NotStarted, "the replica is leaving");
        } else if origin.entries.len() >= self.config.steps_per_origin {
            self.refuse(
                from,
                id,
                ErrorCode::Overloaded,
                Outcome::NotStarted,
                "too many steps of this origin",
            );
        } else {
            self.on_new(from, step);
        }
    }

    /// Forgets one origin of which nothing is unfinished, to make room. A duplicate of one of its steps could only
    /// come from a hop that still holds a step that its origin has finished.
    fn evict(&mut self) -> bool {
        let idle = self.origins.iter().find(|(_, origin)| origin.entries.is_empty()).map(|(id, _)| *id);
        idle.is_some_and(|id| self.origins.remove(&id).is_some())
    }

    fn refuse(&mut self, to: Incarnation, id: StepId, code: ErrorCode, outcome: Outcome, why: &str) {
        let error = StepError::new(code, outcome, alloc::format!("step {id} was refused: {why}"));
        let reply = Reply { id, route: Vec::new(), items: 0, result: Err(error) };
        self.outputs.push_back(ReceiverOutput::Reply { to, reply });
    }

    /// Takes the origin's word on what is finished; it only grows (P-3).
    fn learn(&mut self, id: Incarnation, completed: &Completed) {
        let Some(origin) = self.origins.get_mut(&id) else { return };
        if completed.below > origin.completed.below {
            origin.completed.below = completed.below;
            origin.finished = origin.finished.split_off(&completed.below);
        }
        let below = origin.completed.below;
        origin.finished.extend(completed.above.iter().copied().filter(|seq| *seq >= below));
        let over: Vec<u64> = origin
            .entries
            .keys()
            .copied()
            .filter(|seq| *seq < below || origin.finished.contains(seq))
            .collect();
        let dropped = !over.is_empty();
        for seq in over {
            self.drop_step(StepId { origin: id, seq });
        }
        // Numbers that no entry bears are never asked for again; keep the set as small as what it must refuse.
        let origin = self.origins.get_mut(&id).expect("it was there above");
        while origin.finished.len() > self.config.steps_per_origin {
            origin.finished.pop_first();
        }
        if dropped {
            // Those behind what was dropped need not wait for it any more.
            self.advance(id);
        }
    }

    /// Nobody wants this step any more.
    fn drop_step(&mut self, id: StepId) {
        let Some(origin) = self.origins.get_mut(&id.origin) else { return };
        let Some(entry) = origin.entries.get_mut(&id.seq) else { return };
        match &mut entry.state {
            State::Executing { aborted, .. } => {
                // It stays known until the engine lets go of it, so that it can't run twice (P-2).
                entry.waiters.clear();
                if !core::mem::replace(aborted, true) {
                    self.outputs.push_back(ReceiverOutput::Abort { id, code: ErrorCode::Cancelled });
                }
            }
            _ => {
                origin.entries.remove(&id.seq);
                origin.queue.retain(|seq| *seq != id.seq);
            }
        }
    }

    fn on_new(&mut self, from: Incarnation, mut step: Step) {
        let id = step.id;
        self.accepted += 1;
        let items_base = step.resume.len() as u32;
        let state = match core::mem::replace(&mut step.payload, Payload::Inline(Bytes::new())) {
            Payload::Inline(payload) => State::Ready { step, payload },
            Payload::Slot(slot) => {
                self.outputs.push_back(fetch(id, from, step.attempt, slot));
                State::Fetching { step, from, slot, newer: None }
            }
        };
        let origin = self.origins.get_mut(&id.origin).expect("the caller made it");
        origin
            .entries
            .insert(id.seq, Entry { waiters: alloc::vec![from], items: Vec::new(), items_base, state });
        origin.queue.push_back(id.seq);
        self.advance(id.origin);
    }

    /// The step is known: it waits for the execution that is under way, or is answered from the cache (P-2).
    fn on_again(&mut self, from: Incarnation, step: Step) {
        let id = step.id;
        let has = step.resume.len() as u32;
        let origin = self.origins.get_mut(&id.origin).expect("the caller looked it up");
        let entry = origin.entries.get_mut(&id.seq).expect("the caller looked it up");
        if !entry.waiters.contains(&from) {
            if entry.waiters.len() >= WAITERS_MAX {
                entry.waiters.remove(0);
            }
            entry.waiters.push(from);
        }
        match &mut entry.state {
            State::Fetching { newer, step: first, .. } => {
                if let Payload::Slot(slot) = step.payload {
                    *newer = Some((from, step.attempt, slot));
                } else if let Payload::Inline(payload) = step.payload {
                    let mut first = first.clone();
                    first.attempt = step.attempt;
                    entry.state = State::Ready { step: first, payload };
                    self.advance(id.origin);
                }
                return;
            }
            State::Ready { .. } => {
                if let Payload::Slot(_) = step.payload {
                    // The bytes are here already: the sender may reuse its slot.
                    let control = Control::Ack { id, attempt: step.attempt };
                    self.outputs.push_back(ReceiverOutput::Control { to: from, control });
                }
                return;
            }
            State::Executing { .. } | State::Finished(_) => {}
        }
        if let Payload::Slot(_) = step.payload {
            let control = Control::Ack { id, attempt: step.attempt };
            self.outputs.push_back(ReceiverOutput::Control { to: from, control });
        }
        let skip = has.saturating_sub(entry.items_base) as usize;
        let base = entry.items_base;
        for (at, body) in entry.items.iter().enumerate().skip(skip) {
            let item = Item { id, index: base + at as u32, body: body.clone() };
            self.outputs.push_back(ReceiverOutput::Item { to: from, item });
        }
        if let State::Finished(reply) = &entry.state {
            self.outputs.push_back(ReceiverOutput::Reply { to: from, reply: reply.clone() });
        }
    }

    fn on_fetched(&mut self, id: StepId, reader_of: Incarnation, attempt: u32, payload: Option<Bytes>) {
        let Some(origin) = self.origins.get_mut(&id.origin) else { return };
        let Some(entry) = origin.entries.get_mut(&id.seq) else { return };
        let State::Fetching { step, from, slot, newer } = &mut entry.state else { return };
        if (*from, step.attempt) != (reader_of, attempt) {
            return;
        }
        if let Some(payload) = payload {
            let to = *from;
            entry.state = State::Ready { step: step.clone(), payload };
            let control = Control::Ack { id, attempt };
            self.outputs.push_back(ReceiverOutput::Control { to, control });
            self.advance(id.origin);
            return;
        }
        if let Some((newer_from, newer_attempt, newer_slot)) = newer.take() {
            *from = newer_from;
            *slot = newer_slot;
            step.attempt = newer_attempt;
            self.outputs.push_back(fetch(id, newer_from, newer_attempt, newer_slot));
            return;
        }
        // It can't be executed without its bytes. It is forgotten, so that the next attempt starts anew (P-10), and
        // those behind it need not wait for it.
        let waiters = core::mem::take(&mut entry.waiters);
        origin.entries.remove(&id.seq);
        origin.queue.retain(|seq| *seq != id.seq);
        for to in waiters {
            self.outputs.push_back(ReceiverOutput::Control { to, control: Control::Refetch { id, attempt } });
        }
        self.advance(id.origin);
    }

    /// Executes what is at the front of an origin's queue and complete.
    fn advance(&mut self, id: Incarnation) {
        let Some(origin) = self.origins.get_mut(&id) else { return };
        while let Some(seq) = origin.queue.front().copied() {
            let entry = origin.entries.get_mut(&seq).expect("what is queued is known");
            if !matches!(entry.state, State::Ready { .. }) {
                return;
            }
            origin.queue.pop_front();
            let executing = State::Executing { streaming: false, aborted: false };
            let State::Ready { step, payload } = core::mem::replace(&mut entry.state, executing) else {
                unreachable!("the state was just matched");
            };
            entry.state = State::Executing { streaming: step.streaming, aborted: false };
            self.executing += 1;
            let completed = Completed {
                below: origin.completed.below,
                above: origin.finished.iter().copied().take(64).collect(),
            };
            self.outputs.push_back(ReceiverOutput::Execute(Job {
                id: step.id,
                attempt: step.attempt,
                route: step.route,
                completed,
                deadline_ms: step.deadline_ms,
                streaming: step.streaming,
                resume: step.resume,
                meta: step.meta,
                payload,
            }));
        }
    }

    fn on_done(&mut self, id: StepId, route: Vec<ReplicaNo>, result: Result<Bytes, StepError>) {
        let Some(origin) = self.origins.get_mut(&id.origin) else {
            self.let_go();
            return;
        };
        let Some(entry) = origin.entries.get_mut(&id.seq) else {
            self.let_go();
            return;
        };
        let State::Executing { .. } = entry.state else { return };
        let given_back = matches!(&result, Err(error) if error.code == ErrorCode::Draining);
        let items = entry.items_base + entry.items.len() as u32;
        let reply = Reply { id, route, items, result };
        for to in &entry.waiters {
            self.outputs.push_back(ReceiverOutput::Reply { to: *to, reply: reply.clone() });
        }
        let finished = id.seq < origin.completed.below || origin.finished.contains(&id.seq);
        if given_back || finished {
            origin.entries.remove(&id.seq);
        } else {
            entry.state = State::Finished(reply);
        }
        self.let_go();
    }

    fn let_go(&mut self) {
        self.completed += 1;
        self.executing = self.executing.saturating_sub(1);
        if self.fenced && self.executing == 0 {
            self.outputs.push_back(ReceiverOutput::Quiet);
        }
    }

    fn on_item(&mut self, id: StepId, body: Bytes) {
        let Some(entry) = self.origins.get_mut(&id.origin).and_then(|origin| origin.entries.get_mut(&id.seq))
        else {
            return;
        };
        if !matches!(entry.state, State::Executing { .. }) {
            return;
        }
        let index = entry.items_base + entry.items.len() as u32;
        entry.items.push(body.clone());
        for to in &entry.waiters {
            let item = Item { id, index, body: body.clone() };
            self.outputs.push_back(ReceiverOutput::Item { to: *to, item });
        }
    }

    fn on_control(&mut self, from: Incarnation, control: Control) {
        match control {
            Control::Cancel { id } => self.on_cancel(from, id),
            Control::Ask { id } => self.on_ask(from, id),
            Control::Notice { seq, body } => {
                let last = self.notices.entry(from).or_default();
                if seq > *last {
                    *last = seq;
                    self.outputs.push_back(ReceiverOutput::Notice { from, body: body.into() });
                }
                let control = Control::NoticeAck { seq: self.notices[&from] };
                self.outputs.push_back(ReceiverOutput::Control { to: from, control });
            }
            _ => {}
        }
    }

    fn on_cancel(&mut self, from: Incarnation, id: StepId) {
        let Some(origin) = self.origins.get_mut(&id.origin) else { return };
        let Some(entry) = origin.entries.get_mut(&id.seq) else { return };
        // Another hop may have taken the step over and want it: only the last one that wants it stops it.
        entry.waiters.retain(|waiter| *waiter != from);
        if !entry.waiters.is_empty() {
            return;
        }
        match &mut entry.state {
            State::Executing { aborted, .. } => {
                if !core::mem::replace(aborted, true) {
                    self.outputs.push_back(ReceiverOutput::Abort { id, code: ErrorCode::Cancelled });
                }
            }
            State::Finished(_) => {}
            State::Fetching { .. } | State::Ready { .. } => {
                origin.entries.remove(&id.seq);
                origin.queue.retain(|seq| *seq != id.seq);
                self.advance(id.origin);
            }
        }
    }

    fn on_ask(&mut self, from: Incarnation, id: StepId) {
        let entry = self.origins.get(&id.origin).and_then(|origin| origin.entries.get(&id.seq));
        let state = match entry.map(|entry| &entry.state) {
            None => StepState::Unseen,
            Some(State::Fetching { .. } | State::Ready { .. }) => StepState::Queued,
            Some(State::Executing { .. }) => StepState::Executing,
            Some(State::Finished(_)) => StepState::Finished,
        };
        self.outputs.push_back(ReceiverOutput::Control { to: from, control: Control::Answer { id, state } });
        if let Some(State::Finished(reply)) = entry.map(|entry| &entry.state) {
            self.outputs.push_back(ReceiverOutput::Reply { to: from, reply: reply.clone() });
        }
    }

    fn on_origin_gone(&mut self, id: Incarnation) {
        let highest = self.origins.get(&id).map_or(0, |origin| origin.highest);
        let known = self.gone.get(&id).copied();
        self.gone.insert(id, known.unwrap_or(0).max(highest));
        if known.is_none() {
            self.gone_order.push_back(id);
            if self.gone_order.len() > self.config.gone
                && let Some(oldest) = self.gone_order.pop_front()
            {
                self.gone.remove(&oldest);
            }
        }
        self.notices.remove(&id);
        if let Some(origin) = self.origins.remove(&id) {
            for (seq, entry) in origin.entries {
                if let State::Executing { aborted: false, .. } = entry.state {
                    let id = StepId { origin: id, seq };
                    self.outputs.push_back(ReceiverOutput::Abort { id, code: ErrorCode::Cancelled });
                }
            }
        }
        self.outputs.push_back(ReceiverOutput::Forget(id));
    }

    /// Gives back what has not begun, and stops what streams: it goes on elsewhere from the items it has.
    fn on_fence(&mut self) {
        self.fenced = true;
        let mut refused = Vec::new();
        for (incarnation, origin) in &mut self.origins {
            let waiting = core::mem::take(&mut origin.queue);
            for seq in waiting {
                let entry = origin.entries.remove(&seq).expect("what is queued is known");
                let id = StepId { origin: *incarnation, seq };
                refused.extend(entry.waiters.into_iter().map(|to| (to, id)));
            }
            for (seq, entry) in &mut origin.entries {
                if let State::Executing { streaming: true, aborted } = &mut entry.state
                    && !core::mem::replace(aborted, true)
                {
                    let id = StepId { origin: *incarnation, seq: *seq };
                    self.outputs.push_back(ReceiverOutput::Abort { id, code: ErrorCode::Draining });
                }
            }
        }
        for (to, id) in refused {
            self.refuse(to, id, ErrorCode::Draining, Outcome::NotStarted, "the replica is leaving");
        }
        if self.executing == 0 {
            self.outputs.push_back(ReceiverOutput::Quiet);
        }
    }
}

fn fetch(id: StepId, from: Incarnation, attempt: u32, slot: Slot) -> ReceiverOutput {
    let seal = Seal { step: id, generation: slot.generation, len: slot.len };
    ReceiverOutput::Fetch { id, from, attempt, slot, seal }
}

impl Machine for Receiver {
    type Input = ReceiverInput;
    type Output = ReceiverOutput;

    fn handle(&mut self, _now: Instant, input: ReceiverInput) {
        match input {
            ReceiverInput::Step { from, step } => self.on_step(from, step),
            ReceiverInput::Fetched { id, from, attempt, payload } => {
                self.on_fetched(id, from, attempt, payload);
            }
            ReceiverInput::Done { id, route, result } => self.on_done(id, route, result),
            ReceiverInput::Item { id, body } => self.on_item(id, body),
            ReceiverInput::Control { from, control } => self.on_control(from, control),
            ReceiverInput::OriginGone(origin) => self.on_origin_gone(origin),
            ReceiverInput::Fence => self.on_fence(),
            ReceiverInput::Unfence => self.fenced = false,
        }
        assert!(self.origins.len() <= self.config.origins, "the origins are bounded");
    }

    fn poll(&mut self) -> Option<ReceiverOutput> {
        self.outputs.pop_front()
    }

    fn deadline(&self) -> Option<Instant> {
        None
    }
}
