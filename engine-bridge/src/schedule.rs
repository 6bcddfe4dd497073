//! Stage 0's scheduler: which rows of which requests go into which step.

use std::collections::{HashMap, HashSet, VecDeque};

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
    /// New tokens of a step at most: a longer prefill goes in chunks, beside decodes.
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
    /// A request arrives.
    Admit(Admission),
    /// It is no longer wanted.
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
    /// A token is out: the request's `index`th output token.
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
    /// The later stages are to forget it.
    Release {
        /// The request.
        request: RequestId,
        /// Under this tenure.
        tenure: u32,
        /// The routes it was ever on.
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
    routes: HashSet<Vec<ReplicaNo>>,
    recoveries: u32,
    in_flight: bool,
    cancelled: bool,
}

struct Flight {
    rows: Vec<StageRow>,
}

/// Continuous batching: requests are admitted between steps, prefill in chunks beside decode; at most K steps are in
/// flight and each request is in at most one of them, so that recovering its state never races with its steps.
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
    /// A scheduler with nothing to do.
    pub fn new(config: ScheduleConfig) -> Self {
        Scheduler {
            config,
            requests: HashMap::new(),
            waiting: VecDeque::new(),
            flights: HashMap::new(),
            next_ticket: 1,
            outputs: VecDeque::new(),
        }
    }

    /// Requests that have not ended.
    pub fn requests(&self) -> usize {
        self.requests.len()
    }

    /// Steps in flight.
    pub fn in_flight(&self) -> usize {
        self.flights.len()
    }

    fn on_admit(&mut self, admission: Admission) {
        let Admission { request, prompt, generated, max_tokens, tenure, route } = admission;
        let refuse = |code, why: String| ScheduleOutput::Finish {
            request,
            end: Err(StepError::new(code, Outcome::NotStarted, why)),
        };
        if self.requests.contains_key(&request) {
            return;
        }
        if self.requests.len() >= self.config.requests {
            let why = format!("{} requests are admitted already: try again later", self.config.requests);
            self.outputs.push_back(refuse(ErrorCode::Overloaded, why));
            return;
        }
        if prompt.is_empty() {
            self.outputs.push_back(refuse(ErrorCode::Application, "the prompt is empty".into()));
            return;
        }
        if prompt.len() as u64 >= u64::from(self.config.context_max) {
            let (have, max) = (prompt.len(), self.config.context_max);
            let why = format!("the prompt has {have} tokens, the model's context holds {max}: shorten it");
            self.outputs.push_back(refuse(ErrorCode::Application, why));
            return;
        }
        let mut tokens = prompt;
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
            routes: HashSet::new(),
            recoveries: 0,
            in_flight: false,
            cancelled: false,
        };
        // A successor may get a request whose last token is out, and only its end is not.
        let over = self.end_of(&entry);
        self.requests.insert(request, entry);
        match over {
            Some(finish) => self.finish(request, Ok(finish)),
            None => self.waiting.push_back(request),
        }
        self.pump();
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
        entry.cancelled = true;
        if !entry.in_flight {
            self.finish_cancelled(request);
        }
    }

    fn finish_cancelled(&mut self, request: RequestId) {
        let error = StepError::new(ErrorCode::Cancelled, Outcome::MayHaveRun, "the request was cancelled");
        self.finish(request, Err(error));
    }

    fn finish(&mut self, request: RequestId, end: Result<Finish, StepError>) {
        let Some(entry) = self.requests.remove(&request) else { return };
        self.waiting.retain(|waiting| *waiting != request);
        let mut routes: Vec<Vec<ReplicaNo>> = entry.routes.into_iter().collect();
        routes.sort();
        self.outputs.push_back(ScheduleOutput::Release { request, tenure: entry.tenure, routes });
        self.outputs.push_back(ScheduleOutput::Finish { request, end });
    }

    /// Fills steps while there is room for them.
    fn pump(&mut self) {
        while self.flights.len() < self.config.k {
            let Some(first) = self.waiting.front() else { return };
            let route = self.requests[first].route.clone();
            let mut meta = StageMeta::default();
            let mut tokens = Vec::new();
            let mut later = VecDeque::new();
            while let Some(request) = self.waiting.pop_front() {
                let room = self.config.tokens.saturating_sub(tokens.len() as u32);
                let entry = self.requests.get_mut(&request).expect("what waits is known");
                if entry.route != route || meta.rows.len() >= self.config.rows || room == 0 {
                    later.push_back(request);
                    continue;
                }
                let left = entry.tokens.len() as u32 - entry.done;
                let count = left.min(room);
                let row = Row { request, context: entry.done, tokens: count, sample: count == left };
                meta.rows.push(StageRow { row, tenure: entry.tenure, trim: entry.trim });
                let from = entry.done as usize;
                tokens.extend_from_slice(&entry.tokens[from..from + count as usize]);
                entry.in_flight = true;
            }
            self.waiting = later;
            let ticket = Ticket(self.next_ticket);
            self.next_ticket += 1;
            self.flights.insert(ticket, Flight { rows: meta.rows.clone() });
            self.outputs.push_back(ScheduleOutput::Run { ticket, meta, tokens, route });
        }
    }

    fn on_step_done(
        &mut self,
        ticket: Ticket,
        route: Vec<ReplicaNo>,
        result: Result<Vec<RowResult>, StepError>,
    ) {
        let Some(flight) = self.flights.remove(&ticket) else { return };
        match result {
            Ok(results) if results.len() == flight.rows.len() => {
                for (row, result) in flight.rows.iter().zip(results) {
                    self.on_row(row, &route, result);
                }
            }
            Ok(_) => {
                let error = StepError::new(
                    ErrorCode::Internal,
                    Outcome::Ran,
                    "the pipeline answered for another number of rows",
                );
                self.on_step_failed(&flight, &error);
            }
            Err(error) => self.on_step_failed(&flight, &error),
        }
        self.pump();
    }

    fn on_step_failed(&mut self, flight: &Flight, error: &StepError) {
        let hopeless =
            matches!(error.code, ErrorCode::Unavailable | ErrorCode::TooLarge | ErrorCode::Application);
        for row in &flight.rows {
            let request = row.row.request;
            let Some(entry) = self.requests.get_mut(&request) else { continue };
            entry.in_flight = false;
            if entry.cancelled {
                self.finish_cancelled(request);
            } else if hopeless {
                self.finish(request, Err(error.clone()));
            } else {
                self.recover(request, None);
            }
        }
    }

    fn on_row(&mut self, row: &StageRow, route: &[ReplicaNo], result: RowResult) {
        let request = row.row.request;
        let Some(entry) = self.requests.get_mut(&request) else { return };
        entry.in_flight = false;
        entry.route = route.to_vec();
        entry.routes.insert(route.to_vec());
        if entry.cancelled {
            self.finish_cancelled(request);
            return;
        }
        match result {
            RowResult::Nothing | RowResult::Token(_) => {
                entry.done = row.row.context + row.row.tokens;
                if entry.trim.is_some_and(|trim| trim.keep <= entry.done) {
                    entry.trim = None;
                }
            }
            RowResult::Missing { stage, .. } => {
                self.recover(request, Some(stage));
                return;
            }
            RowResult::Superseded => {
                let text = "another stage 0 has taken the request over";
                let error = StepError::new(ErrorCode::Stale, Outcome::MayHaveRun, text);
                self.finish(request, Err(error));
                return;
            }
        }
        if let RowResult::Token(token) = result {
            let index = (entry.tokens.len() - entry.prompt) as u32;
            entry.tokens.push(token);
            self.outputs.push_back(ScheduleOutput::Emit { request, index, token });
        }
        match self.end_of(&self.requests[&request]) {
            Some(finish) => self.finish(request, Ok(finish)),
            None => self.waiting.push_back(request),
        }
    }

    /// Computes a request's state anew from its tokens (`Reprefill`). If one stage reported that it lost it, and the
    /// request was not in a recovery already, the stages behind that one keep what they hold.
    fn recover(&mut self, request: RequestId, lost_by: Option<u16>) {
        let budget = self.config.recovery_budget;
        let entry = self.requests.get_mut(&request).expect("the caller looked it up");
        entry.recoveries += 1;
        if entry.recoveries > budget {
            let text = format!("its state was lost {} times, {budget} are allowed", entry.recoveries);
            let error = StepError::new(ErrorCode::RecoveryExhausted, Outcome::MayHaveRun, text);
            self.finish(request, Err(error));
            return;
        }
        entry.trim = match (lost_by, entry.trim) {
            (Some(stage), None) if entry.done > 0 => Some(Trim { stage, keep: entry.done }),
            _ => None,
        };
        entry.done = 0;
        // It goes to the front: its client has waited already.
        self.waiting.push_front(request);
    }
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
        assert!(self.flights.len() <= self.config.k, "at most K steps are in flight (P-4)");
    }

    fn poll(&mut self) -> Option<ScheduleOutput> {
        self.outputs.pop_front()
    }

    fn deadline(&self) -> Option<Instant> {
        None
    }
}
