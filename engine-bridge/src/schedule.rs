//! Stage 0's scheduler: which rows of which requests go into which step.

use std::collections::{BTreeSet, HashMap, VecDeque};

use connex_protocol::wire::{ErrorCode, Outcome, StepError};
use connex_protocol::{Instant, Machine, ReplicaNo};

use crate::stage::{RowResult, StageMeta, StageRow, Trim};
use crate::{RequestId, Row};

/// A scheduler's limits.
#[derive(Clone, Debug)]
pub struct ScheduleConfig {
    /// Steps in flight at most.
    pub k: usize,
    /// Rows of a step at most.
    pub rows: usize,
    /// New tokens of a step at most: a longer prefill goes in chunks, beside decodes. No step has more rows than this.
    pub tokens: u32,
    /// Requests admitted at once at most.
    pub requests: usize,
    /// How often the state of one request may be recovered before it ends.
    pub recovery_budget: u32,
    /// Tokens that a request may hold, prompt and output together.
    pub context_max: u32,
    /// Tokens that end a generation.
    pub stop_tokens: Vec<u32>,
}

/// A request, as its client asked for it or as a successor takes it over.
#[derive(Clone, Debug)]
pub struct Admission {
    /// The request.
    pub request: RequestId,
    /// Its prompt.
    pub prompt: Vec<u32>,
    /// The tokens that are out already.
    pub generated: Vec<u32>,
    /// Output tokens at most, those that are out included.
    pub max_tokens: u32,
    /// Grows with each stage 0 that takes the request over.
    pub tenure: u32,
    /// The replicas that its client prefers at the later stages; empty without a wish.
    pub route: Vec<ReplicaNo>,
}

/// Names a step of the scheduler's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(pub u64);

/// What happens to a scheduler.
#[derive(Clone, Debug)]
pub enum ScheduleInput {
    /// A request arrives. It ends with exactly one [`ScheduleOutput::Finish`].
    Admit(Admission),
    /// It is no longer wanted: it finishes at once, and its state is released when no step has it any more.
    Cancel(RequestId),
    /// A step ended.
    StepDone {
        /// Which.
        ticket: Ticket,
        /// The replicas of the later stages that really served it.
        route: Vec<ReplicaNo>,
        /// What became of its rows, in order.
        result: Result<Vec<RowResult>, StepError>,
    },
}

/// What a scheduler wants done.
#[derive(Clone, Debug)]
pub enum ScheduleOutput {
    /// Run this step.
    Run {
        /// Comes back with its end.
        ticket: Ticket,
        /// Its rows.
        meta: StageMeta,
        /// Their tokens, row after row.
        tokens: Vec<u32>,
        /// The replicas to prefer at the later stages.
        route: Vec<ReplicaNo>,
    },
    /// Nobody wants this step any more (P-12): stop it along its way. It still comes back with its end.
    Abort(Ticket),
    /// A token is out: the request's `index`th output token, each once and in order.
    Emit {
        /// The request.
        request: RequestId,
        /// Counts its output tokens from 0.
        index: u32,
        /// The token.
        token: u32,
    },
    /// The request ended.
    Finish {
        /// The request.
        request: RequestId,
        /// How.
        end: Result<Finish, StepError>,
    },
    /// A request was admitted that is under way already: this admission is void, the one before goes on.
    Duplicate(RequestId),
    /// All stages are to forget it.
    Release {
        /// The request.
        request: RequestId,
        /// Under this tenure.
        tenure: u32,
        /// The routes it was ever on: the replicas of the later stages.
        routes: Vec<Vec<ReplicaNo>>,
    },
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A stop token.
    Stop,
    /// As many tokens as were asked for, or as the context holds.
    Length,
}

struct Request {
    /// Prompt and output.
    tokens: Vec<u32>,
    prompt: usize,
    max_tokens: u32,
    tenure: u32,
    /// Tokens that all stages hold.
    done: u32,
    trim: Option<Trim>,
    route: Vec<ReplicaNo>,
    routes: BTreeSet<Vec<ReplicaNo>>,
    recoveries: u32,
    /// The step that it is in.
    flight: Option<Ticket>,
    /// A step that it was in failed: until one of its own succeeds it goes without company, so that a request that
    /// always fails the engine takes no other along.
    alone: bool,
    /// It has finished; what is left of it waits for its step.
    over: bool,
    /// It came again after it was cancelled, and before its step ended.
    again: Option<Admission>,
}

struct Flight {
    rows: Vec<StageRow>,
    route: Vec<ReplicaNo>,
}

/// Why a request's state must be computed anew.
enum Loss {
    /// A stage reported it missing; by plan, if it took over by agreement from the one that had it.
    Missing { stage: u16, planned: bool },
    /// Its step failed, or came back wrong: what the stages hold is unknown.
    Failed(String),
}

/// Continuous batching: requests are admitted between steps, prefill in chunks beside decode; at most K steps are in
/// flight (P-4), and each request is in at most one of them, so that recovering its state never races with its steps.
///
/// Requests wait in one queue and each step takes the one that waited longest, so that none starves; those that share
/// its route go along. The requests are dealt over the K steps, so that all stages of a pipeline have work.
pub struct Scheduler {
    config: ScheduleConfig,
    requests: HashMap<RequestId, Request>,
    /// Those that wait for a step, longest first.
    waiting: VecDeque<RequestId>,
    flights: HashMap<Ticket, Flight>,
    next_ticket: u64,
    outputs: VecDeque<ScheduleOutput>,
}

impl Scheduler {
    /// A scheduler with nothing to do. A limit of 0 is taken as 1.
    pub fn new(config: ScheduleConfig) -> Self {
        let config = ScheduleConfig {
            k: config.k.max(1),
            rows: config.rows.max(1),
            tokens: config.tokens.max(1),
            requests: config.requests.max(1),
            ..config
        };
        Scheduler {
            config,
            requests: HashMap::new(),
            waiting: VecDeque::new(),
            flights: HashMap::new(),
            next_ticket: 1,
            outputs: VecDeque::new(),
        }
    }

    /// Requests that are under way, or whose last step is.
    pub fn requests(&self) -> usize {
        self.requests.len()
    }

    /// Steps in flight.
    pub fn in_flight(&self) -> usize {
        self.flights.len()
    }

    fn on_admit(&mut self, admission: Admission) {
        let request = admission.request;
        if let Some(entry) = self.requests.get_mut(&request) {
            if entry.over && entry.again.is_none() {
                entry.again = Some(admission);
            } else {
                self.outputs.push_back(ScheduleOutput::Duplicate(request));
            }
            return;
        }
        if let Err(refusal) = self.admissible(&admission) {
            self.outputs.push_back(ScheduleOutput::Finish { request, end: Err(refusal) });
            return;
        }
        let Admission { prompt: mut tokens, generated, max_tokens, tenure, route, .. } = admission;
        let prompt = tokens.len();
        tokens.extend(generated);
        let entry = Request {
            tokens,
            prompt,
            max_tokens,
            tenure,
            done: 0,
            trim: None,
            route,
            routes: BTreeSet::new(),
            recoveries: 0,
            flight: None,
            alone: false,
            over: false,
            again: None,
        };
        // A successor may get a request whose last token is out, and only its end is not.
        let end = self.end_of(&entry);
        self.requests.insert(request, entry);
        match end {
            Some(finish) => self.finish(request, Ok(finish)),
            None => self.waiting.push_back(request),
        }
    }

    /// Whether a request can be served at all, before anything runs.
    fn admissible(&self, admission: &Admission) -> Result<(), StepError> {
        let refuse = |code, why: String| Err(StepError::new(code, Outcome::NotStarted, why));
        if self.requests.len() >= self.config.requests {
            let why = format!("{} requests are admitted already: try again later", self.config.requests);
            return refuse(ErrorCode::Overloaded, why);
        }
        if admission.prompt.is_empty() {
            return refuse(ErrorCode::Application, "the prompt is empty".into());
        }
        let (have, max) = (admission.prompt.len(), self.config.context_max);
        if have as u64 >= u64::from(max) {
            let why = format!("the prompt has {have} tokens, the model's context holds {max}: shorten it");
            return refuse(ErrorCode::Application, why);
        }
        Ok(())
    }

    fn end_of(&self, entry: &Request) -> Option<Finish> {
        let generated = entry.tokens.len() - entry.prompt;
        let last = entry.tokens.last().filter(|_| generated > 0);
        if last.is_some_and(|token| self.config.stop_tokens.contains(token)) {
            return Some(Finish::Stop);
        }
        let full = entry.tokens.len() as u64 >= u64::from(self.config.context_max);
        (generated as u64 >= u64::from(entry.max_tokens) || full).then_some(Finish::Length)
    }

    fn on_cancel(&mut self, request: RequestId) {
        let Some(entry) = self.requests.get_mut(&request) else { return };
        if entry.over {
            if entry.again.take().is_some() {
                self.outputs.push_back(ScheduleOutput::Finish { request, end: Err(cancelled()) });
            }
            return;
        }
        let ticket = entry.flight;
        self.finish(request, Err(cancelled()));
        let Some(flight) = ticket.and_then(|ticket| self.flights.get(&ticket)) else { return };
        let wanted = |row: &StageRow| self.requests.get(&row.row.request).is_some_and(|entry| !entry.over);
        if !flight.rows.iter().any(wanted) {
            self.outputs.extend(ticket.map(ScheduleOutput::Abort));
        }
    }

    fn finish(&mut self, request: RequestId, end: Result<Finish, StepError>) {
        let Some(entry) = self.requests.get_mut(&request) else { return };
        entry.over = true;
        self.outputs.push_back(ScheduleOutput::Finish { request, end });
        if entry.flight.is_none() {
            self.forget(request);
        }
    }

    /// Drops a request that is over and in no step, and has its state released.
    fn forget(&mut self, request: RequestId) {
        let Some(entry) = self.requests.remove(&request) else { return };
        self.waiting.retain(|waiting| *waiting != request);
        let routes = entry.routes.into_iter().collect();
        self.outputs.push_back(ScheduleOutput::Release { request, tenure: entry.tenure, routes });
        if let Some(again) = entry.again {
            self.on_admit(again);
        }
    }

    /// Fills steps while there is room for them.
    fn pump(&mut self) {
        while self.flights.len() < self.config.k && !self.waiting.is_empty() {
            let picked = self.pick();
            self.launch(&picked);
        }
    }

    /// Takes the request that waited longest and those that may share a step with it.
    fn pick(&mut self) -> Vec<RequestId> {
        let first = &self.requests[&self.waiting[0]];
        let (alone, route) = (first.alone, first.route.clone());
        let share = self.requests.len().div_ceil(self.config.k);
        let rows = if alone { 1 } else { share.min(self.config.rows).min(self.config.tokens as usize) };
        let mut picked = Vec::new();
        let requests = &self.requests;
        self.waiting.retain(|request| {
            let entry = &requests[request];
            let fits = picked.is_empty() || (!entry.alone && entry.route == route);
            let take = fits && picked.len() < rows;
            if take {
                picked.push(*request);
            }
            !take
        });
        picked
    }

    fn launch(&mut self, picked: &[RequestId]) {
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        let mut meta = StageMeta::default();
        let mut tokens = Vec::new();
        let mut route = Vec::new();
        // Every row gets a token, so that a long prefill holds up no decode beside it; what is left goes to the
        // prefills in the order in which they waited.
        let mut spare = self.config.tokens - picked.len() as u32;
        for request in picked {
            let entry = self.requests.get_mut(request).expect("what waits is known");
            let left = entry.tokens.len() as u32 - entry.done;
            let count = left.min(1 + spare);
            spare -= count - 1;
            let row = Row { request: *request, context: entry.done, tokens: count, sample: count == left };
            meta.rows.push(StageRow { row, tenure: entry.tenure, trim: entry.trim });
            let from = entry.done as usize;
            tokens.extend_from_slice(&entry.tokens[from..from + count as usize]);
            entry.flight = Some(ticket);
            // A step that fails may have left state on the way that it was to take.
            if !entry.route.is_empty() {
                entry.routes.insert(entry.route.clone());
            }
            route.clone_from(&entry.route);
        }
        self.flights.insert(ticket, Flight { rows: meta.rows.clone(), route: route.clone() });
        self.outputs.push_back(ScheduleOutput::Run { ticket, meta, tokens, route });
    }

    fn on_step_done(
        &mut self,
        ticket: Ticket,
        taken: Vec<ReplicaNo>,
        result: Result<Vec<RowResult>, StepError>,
    ) {
        let Some(flight) = self.flights.remove(&ticket) else { return };
        let result = result.and_then(|results| match results.len() == flight.rows.len() {
            true => Ok(results),
            false => Err(StepError::new(
                ErrorCode::Internal,
                Outcome::Ran,
                "the pipeline answered for another number of rows",
            )),
        });
        // A step that was answered early names only the stages that it reached; the others keep their replicas, and
        // with them the state there.
        let mut route = taken;
        route.extend(flight.route.iter().skip(route.len()));
        for (at, row) in flight.rows.iter().enumerate() {
            let request = row.row.request;
            let Some(entry) = self.requests.get_mut(&request) else { continue };
            entry.flight = None;
            if !route.is_empty() {
                entry.routes.insert(route.clone());
            }
            if entry.over {
                self.forget(request);
                continue;
            }
            match &result {
                Ok(results) => {
                    entry.route.clone_from(&route);
                    self.on_row(row, results[at]);
                }
                Err(error) => self.on_row_failed(row, flight.rows.len(), error),
            }
        }
    }

    fn on_row_failed(&mut self, row: &StageRow, company: usize, error: &StepError) {
        let request = row.row.request;
        let hopeless = match error.code {
            // The hop waited for a replica as long as it may.
            ErrorCode::Unavailable => true,
            ErrorCode::TooLarge => company == 1,
            // A stage that would not begin it says the same the next time: the stages do not fit each other.
            ErrorCode::Application => company == 1 && error.outcome == Outcome::NotStarted,
            _ => false,
        };
        if hopeless {
            self.finish(request, Err(error.clone()));
            return;
        }
        if matches!(error.code, ErrorCode::Application | ErrorCode::Internal | ErrorCode::TooLarge) {
            let entry = self.requests.get_mut(&request).expect("the caller looked it up");
            entry.alone = true;
        }
        self.recover(request, Loss::Failed(error.message.clone()));
    }

    fn on_row(&mut self, row: &StageRow, result: RowResult) {
        let request = row.row.request;
        let entry = self.requests.get_mut(&request).expect("the caller looked it up");
        match (result, row.row.sample) {
            (RowResult::Missing { stage, planned, .. }, _) => {
                return self.recover(request, Loss::Missing { stage, planned });
            }
            (RowResult::Superseded, _) => {
                // Not an end of the request: a submitter that hears it from an old replica goes on waiting for the
                // new one, and one that hears it from the replica it is on moves on.
                let text = "another stage 0 has taken the request over";
                let error = StepError::new(ErrorCode::Draining, Outcome::MayHaveRun, text);
                return self.finish(request, Err(error));
            }
            (RowResult::Nothing, false) => {}
            (RowResult::Token(token), true) => {
                let index = (entry.tokens.len() - entry.prompt) as u32;
                entry.tokens.push(token);
                self.outputs.push_back(ScheduleOutput::Emit { request, index, token });
            }
            (RowResult::Nothing | RowResult::Token(_), sample) => {
                let why = format!("the pipeline answered {result:?} to a row with sample {sample}");
                return self.recover(request, Loss::Failed(why));
            }
        }
        entry.done = row.row.context + row.row.tokens;
        entry.alone = false;
        if entry.trim.is_some_and(|trim| trim.keep <= entry.done) {
            entry.trim = None;
        }
        match self.end_of(&self.requests[&request]) {
            Some(finish) => self.finish(request, Ok(finish)),
            None => self.waiting.push_back(request),
        }
    }

    /// Computes a request's state anew from its tokens (`Reprefill`). The stages behind the last one that reported a
    /// loss keep what they hold, and get only what follows it; after a failure nothing is taken to be held.
    fn recover(&mut self, request: RequestId, loss: Loss) {
        let budget = self.config.recovery_budget;
        let entry = self.requests.get_mut(&request).expect("the caller looked it up");
        entry.recoveries += u32::from(!matches!(loss, Loss::Missing { planned: true, .. }));
        if entry.recoveries > budget {
            let why = match loss {
                Loss::Missing { stage, .. } => format!("stage {stage} has lost its state"),
                Loss::Failed(why) => why,
            };
            let text = format!("the request was recovered {budget} times and no more is allowed: {why}");
            let error = StepError::new(ErrorCode::RecoveryExhausted, Outcome::MayHaveRun, text);
            self.finish(request, Err(error));
            return;
        }
        entry.trim = match loss {
            Loss::Missing { stage, .. } => {
                // In a recovery that is under way, `done` counts the new beginning and the trim what is behind it.
                let (lost, keep) =
                    entry.trim.map_or((stage, entry.done), |trim| (stage.max(trim.stage), trim.keep));
                (keep > 0).then_some(Trim { stage: lost, keep })
            }
            Loss::Failed(_) => None,
        };
        entry.done = 0;
        // It goes to the front: its client has waited already.
        self.waiting.push_front(request);
    }
}

fn cancelled() -> StepError {
    StepError::new(ErrorCode::Cancelled, Outcome::MayHaveRun, "the request was cancelled")
}

impl Machine for Scheduler {
    type Input = ScheduleInput;
    type Output = ScheduleOutput;

    fn handle(&mut self, _now: Instant, input: ScheduleInput) {
        match input {
            ScheduleInput::Admit(admission) => self.on_admit(admission),
            ScheduleInput::Cancel(request) => self.on_cancel(request),
            ScheduleInput::StepDone { ticket, route, result } => self.on_step_done(ticket, route, result),
        }
        self.pump();
        assert!(self.flights.len() <= self.config.k, "at most K steps are in flight (P-4)");
    }

    fn poll(&mut self) -> Option<ScheduleOutput> {
        self.outputs.pop_front()
    }

    fn deadline(&self) -> Option<Instant> {
        None
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod world;
