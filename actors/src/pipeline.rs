//! Pipeline stages as endpoints: stage 0 schedules requests, every stage computes its layers and submits the step,
//! under the same id, to the next; the reply travels back hop by hop.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use connex_engine::schedule::{
    Admission, Finish, ScheduleConfig, ScheduleInput, ScheduleOutput, Scheduler, Ticket,
};
use connex_engine::stage::{self, Ran, Release, RowResult, Stage, StageMeta};
use connex_engine::{Engine, RequestId, Watch};
use connex_protocol::step::{SenderInput, Submission, WhenFull};
use connex_protocol::wire::{ErrorCode, Outcome, StepError};
use connex_protocol::{Group, Incarnation, Machine, ReplicaNo, StepId};
use serde::{Deserialize, Serialize};

use crate::{Core, Endpoint, EndpointFactory, GroupCell, Place, StepContext, StepEnd, StepSink, Wake};

/// Makes the engine of a stage, on the engine's own thread.
pub type EngineFactory = Arc<dyn Fn(&Core) -> Result<Box<dyn Engine>, String> + Send + Sync>;

/// A pipeline stage's place and habits.
#[derive(Clone, Debug)]
pub struct PipelineConfig {
    /// Steps that stage 0 keeps in flight.
    pub k: usize,
    /// Rows of a step at most.
    pub rows: usize,
    /// New tokens of a step at most.
    pub tokens: u32,
    /// Requests that stage 0 admits at once.
    pub requests: usize,
    /// How often one request's state may be recovered.
    pub recovery_budget: u32,
}

impl Default for PipelineConfig {
    fn default() -> Self {
        PipelineConfig { k: 4, rows: 64, tokens: 512, requests: 1024, recovery_budget: 8 }
    }
}

/// The metadata of a request; its payload is the prompt's token ids, four bytes each, little-endian. Each of its items
/// is one token id of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestMeta {
    /// Output tokens at most.
    pub max_tokens: u32,
}

impl RequestMeta {
    /// Its bytes.
    pub fn encode(&self) -> Bytes {
        stage::encode(self)
    }
}

/// The payload of a request, or the body of its items: token ids.
pub fn encode_tokens(tokens: &[u32]) -> Bytes {
    tokens.iter().flat_map(|token| token.to_le_bytes()).collect::<Vec<u8>>().into()
}

/// Reads token ids back; `None` if the length is no multiple of four.
pub fn decode_tokens(bytes: &[u8]) -> Option<Vec<u32>> {
    let chunks = bytes.chunks_exact(4);
    if !chunks.remainder().is_empty() {
        return None;
    }
    Some(chunks.map(|chunk| u32::from_le_bytes(chunk.try_into().expect("a chunk has four bytes"))).collect())
}

/// An endpoint for the stage of `core`'s own logical id: stage 0 schedules, later ones forward.
pub fn endpoint(config: PipelineConfig, engine: EngineFactory) -> EndpointFactory {
    Arc::new(move |place| {
        let number = place.core.me().lid.group().stage();
        let mut stage = Stage::new(number, engine(&place.core)?);
        if place.core.begins_taking_over() {
            stage = stage.taking_over();
        }
        let info = stage.info();
        if info.is_first() != (number == 0) {
            return Err(format!(
                "stage {number} got layers {:?}: stage 0 holds the first layer, and no other stage does",
                info.layers
            ));
        }
        // Stage 0 is the origin of its steps and keeps to K by its scheduler; later stages forward for others.
        let next = (!info.is_last()).then(|| place.core.group(&next_group(&place.core, number), None));
        Ok(match number {
            0 => Box::new(HeadEndpoint::new(place, config.clone(), stage, next)) as Box<dyn Endpoint>,
            _ => Box::new(StageEndpoint { stage, next }),
        })
    })
}

fn next_group(core: &Core, number: u16) -> Group {
    core.me().lid.group().at_stage(number + 1)
}

/// Lets an engine see that its step is no longer wanted, and others that it makes progress.
struct StepWatch<'a>(&'a StepContext);

impl Watch for StepWatch<'_> {
    fn progress(&self) {
        self.0.progress();
    }

    fn cancelled(&self) -> bool {
        self.0.cancelled()
    }
}

/// A stage after the first.
struct StageEndpoint {
    stage: Stage,
    next: Option<Arc<GroupCell>>,
}

/// Takes the next stage's reply back to the hop in front.
struct HopSink {
    step: StepContext,
    ran: Ran,
}

impl StepSink for HopSink {
    fn item(&mut self, _body: Bytes) {}

    fn done(self: Box<Self>, end: StepEnd) {
        let HopSink { step, ran } = *self;
        let result = end.result.and_then(|body| merge(ran, &body)).map(|results| stage::encode(&results));
        step.finish_via(&end.route, result);
    }
}

fn merge(ran: Ran, body: &[u8]) -> Result<Vec<RowResult>, StepError> {
    let later = stage::decode::<Vec<RowResult>>(body).map_err(|error| {
        StepError::new(
            ErrorCode::Internal,
            Outcome::Ran,
            format!("the next stage's reply can't be read: {error}"),
        )
    })?;
    ran.merge(later)
}

impl Endpoint for StageEndpoint {
    fn execute(&mut self, step: StepContext) {
        let meta = match stage::decode::<StageMeta>(step.meta()) {
            Ok(meta) => meta,
            Err(error) => return step.fail(format!("the step's metadata can't be read: {error}")),
        };
        let ran = match self.stage.run(step.id(), &meta, step.payload(), &StepWatch(&step)) {
            Ok(ran) => ran,
            Err(error) => {
                // What a stage would not begin is for its operator too: it may not fit the stage in front of it.
                if error.outcome == Outcome::NotStarted {
                    tracing::warn!(step = %step.id(), %error, "a step was refused");
                }
                return step.finish(Err(error));
            }
        };
        match (ran.next.clone(), &self.next) {
            (Some((meta, payload)), Some(next)) => {
                let job = step.job();
                let deadline = step.remaining().map(|left| step.now() + left);
                let submission = Submission {
                    id: job.id,
                    route: job.route.clone(),
                    completed: Some(job.completed.clone()),
                    deadline,
                    streaming: false,
                    resume: Vec::new(),
                    meta: stage::encode(&meta),
                    payload,
                    when_full: WhenFull::Wait,
                };
                if let Err((_, sink)) = next.submit(submission, Box::new(HopSink { step, ran })) {
                    sink.done(StepEnd { route: Vec::new(), result: Err(overloaded()) });
                }
            }
            _ => step.finish(ran.merge(Vec::new()).map(|results| stage::encode(&results))),
        }
    }

    fn abort(&mut self, id: StepId, _code: ErrorCode) {
        if let Some(next) = &self.next {
            next.drive(SenderInput::Cancel(id));
        }
    }

    fn notice(&mut self, _from: Incarnation, body: Bytes) {
        match stage::decode::<Vec<Release>>(&body) {
            Ok(releases) => {
                self.stage.release(&releases);
                pass_on(self.next.as_deref(), releases);
            }
            Err(error) => tracing::warn!(%error, "a notice can't be read"),
        }
    }

    fn forget(&mut self, origin: Incarnation) {
        self.stage.origin_gone(origin);
    }
}

fn overloaded() -> StepError {
    let text = "the mailbox of the next stage is full";
    StepError::new(ErrorCode::Overloaded, Outcome::MayHaveRun, text)
}

/// Sends releases to the replicas that their routes name first.
fn pass_on(next: Option<&GroupCell>, releases: Vec<Release>) {
    let Some(next) = next else { return };
    let mut by_replica: BTreeMap<ReplicaNo, Vec<Release>> = BTreeMap::new();
    for release in releases {
        if let Some((first, rest)) = release.route.split_first() {
            let onward = Release { route: rest.to_vec(), ..release };
            by_replica.entry(*first).or_default().push(onward);
        }
    }
    for (replica, releases) in by_replica {
        next.notice(replica, stage::encode(&releases));
    }
}

type StepsDone = Arc<Mutex<VecDeque<ScheduleInput>>>;

/// Stage 0: the endpoint of requests.
struct HeadEndpoint {
    core: Arc<Core>,
    stage: Stage,
    next: Option<Arc<GroupCell>>,
    scheduler: Scheduler,
    requests: HashMap<RequestId, StepContext>,
    /// The steps that are on their way through the later stages.
    steps: HashMap<Ticket, StepId>,
    done: StepsDone,
    wake: Wake,
}

/// Takes a step's end back to the scheduler's thread.
struct HeadSink {
    ticket: Ticket,
    ran: Ran,
    done: StepsDone,
    wake: Wake,
}

impl StepSink for HeadSink {
    fn item(&mut self, _body: Bytes) {}

    fn done(self: Box<Self>, end: StepEnd) {
        let HeadSink { ticket, ran, done, wake } = *self;
        let result = end.result.and_then(|body| merge(ran, &body));
        let input = ScheduleInput::StepDone { ticket, route: end.route, result };
        done.lock().expect("no holder panics").push_back(input);
        wake.wake();
    }
}

struct HeadWatch<'a>(&'a Core);

impl Watch for HeadWatch<'_> {
    fn progress(&self) {
        if let Some(served) = self.0.served() {
            served.mark_busy();
        }
    }
}

impl HeadEndpoint {
    fn new(place: Place, config: PipelineConfig, stage: Stage, next: Option<Arc<GroupCell>>) -> Self {
        let info = stage.info();
        let scheduler = Scheduler::new(ScheduleConfig {
            k: config.k,
            rows: config.rows,
            tokens: config.tokens,
            requests: config.requests,
            recovery_budget: config.recovery_budget,
            context_max: info.context_max,
            stop_tokens: info.stop_tokens.clone(),
        });
        HeadEndpoint {
            core: place.core,
            stage,
            next,
            scheduler,
            requests: HashMap::new(),
            steps: HashMap::new(),
            done: Arc::default(),
            wake: place.wake,
        }
    }

    fn drive(&mut self, input: ScheduleInput) {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            if let ScheduleInput::StepDone { ticket, .. } = &input {
                self.steps.remove(ticket);
            }
            self.scheduler.handle(self.core.clock().now(), input);
            while let Some(output) = self.scheduler.poll() {
                inputs.extend(self.perform(output));
            }
        }
    }

    fn perform(&mut self, output: ScheduleOutput) -> Option<ScheduleInput> {
        match output {
            ScheduleOutput::Run { ticket, meta, tokens, route } => self.run(ticket, &meta, &tokens, route),
            ScheduleOutput::Abort(ticket) => {
                if let (Some(id), Some(next)) = (self.steps.get(&ticket), &self.next) {
                    next.drive(SenderInput::Cancel(*id));
                }
                None
            }
            // A step is executed at most once in this life (P-2), so that no request comes twice while it is under way.
            ScheduleOutput::Duplicate(request) => {
                tracing::warn!(%request, "a request that is under way was admitted again");
                None
            }
            ScheduleOutput::Emit { request, token, .. } => {
                if let Some(step) = self.requests.get(&request) {
                    step.item(encode_tokens(&[token]));
                }
                None
            }
            ScheduleOutput::Finish { request, end } => {
                if let Some(step) = self.requests.remove(&request) {
                    step.finish(end.map(|finish| match finish {
                        Finish::Stop => Bytes::from_static(b"stop"),
                        Finish::Length => Bytes::from_static(b"length"),
                    }));
                }
                None
            }
            ScheduleOutput::Release { request, tenure, routes } => {
                self.stage.release(&[Release { request, tenure, route: Vec::new() }]);
                let releases = routes.into_iter().map(|route| Release { request, tenure, route }).collect();
                pass_on(self.next.as_deref(), releases);
                None
            }
        }
    }

    /// Computes stage 0's layers of a step and sends it on.
    fn run(
        &mut self,
        ticket: Ticket,
        meta: &StageMeta,
        tokens: &[u32],
        route: Vec<ReplicaNo>,
    ) -> Option<ScheduleInput> {
        let id = self.core.next_step();
        let ran = match self.stage.run(id, meta, &encode_tokens(tokens), &HeadWatch(&self.core)) {
            Ok(ran) => ran,
            Err(error) => return Some(ScheduleInput::StepDone { ticket, route, result: Err(error) }),
        };
        let (Some((meta, payload)), Some(next)) = (ran.next.clone(), &self.next) else {
            return Some(ScheduleInput::StepDone { ticket, route, result: ran.merge(Vec::new()) });
        };
        let submission = Submission {
            id,
            route,
            completed: None,
            deadline: None,
            streaming: false,
            resume: Vec::new(),
            meta: stage::encode(&meta),
            payload,
            when_full: WhenFull::Wait,
        };
        let sink = HeadSink { ticket, ran, done: self.done.clone(), wake: self.wake.clone() };
        match next.submit(submission, Box::new(sink)) {
            Ok(()) => {
                self.steps.insert(ticket, id);
                None
            }
            Err(_) => Some(ScheduleInput::StepDone { ticket, route: Vec::new(), result: Err(overloaded()) }),
        }
    }
}

impl Endpoint for HeadEndpoint {
    fn execute(&mut self, step: StepContext) {
        let meta = stage::decode::<RequestMeta>(step.meta()).ok();
        let prompt = decode_tokens(step.payload());
        let generated: Option<Vec<u32>> = step
            .resume()
            .iter()
            .map(|item| decode_tokens(item).and_then(|one| one.first().copied()))
            .collect();
        let (Some(meta), Some(prompt), Some(generated)) = (meta, prompt, generated) else {
            return step.fail("the request can't be read: its metadata or its token ids are malformed");
        };
        let vocabulary = self.stage.info().vocabulary;
        if let Some(token) = prompt.iter().find(|token| **token >= vocabulary) {
            return step.fail(format!("token {token} is not in the vocabulary of {vocabulary}"));
        }
        let (request, tenure) = (step.id(), step.job().attempt);
        let (max_tokens, route) = (meta.max_tokens, step.job().route.clone());
        self.requests.insert(request, step);
        let admission = Admission { request, prompt, generated, max_tokens, tenure, route };
        self.drive(ScheduleInput::Admit(admission));
    }

    fn abort(&mut self, id: StepId, code: ErrorCode) {
        if let Some(step) = self.requests.remove(&id) {
            step.finish_aborted(code);
            self.drive(ScheduleInput::Cancel(id));
        }
    }

    fn forget(&mut self, origin: Incarnation) {
        self.stage.origin_gone(origin);
    }

    fn woken(&mut self) {
        loop {
            let input = self.done.lock().expect("no holder panics").pop_front();
            match input {
                Some(input) => self.drive(input),
                None => return,
            }
        }
    }
}
