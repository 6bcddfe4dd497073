//! A pipeline in memory, for the scheduler's tests: real stages with toy engines, and a network that loses, repeats,
//! delays and moves what a seed tells it to.

use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;
use connex_protocol::{Incarnation, StepId};

use super::*;
use crate::stage::{Ran, Release, Stage};
use crate::toy::{ToyConfig, ToyEngine, expected};

/// Lives of stage 0 in one world; each that is left alone goes on working against its successors.
const HEADS_MAX: usize = 5;

pub(super) struct Rng(pub(super) u64);

impl Rng {
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (x ^ (x >> 31)) % end
    }

    fn percent(&mut self, chance: u64) -> bool {
        self.below(100) < chance
    }
}

/// Chances in percent, for each step and hop.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Faults {
    /// A replica dies before it executes the step.
    pub(super) kill_before: u64,
    /// A replica dies after it executed and passed on the step, and before it replied: the hop in front sends it to
    /// a successor, and the stages behind answer from their caches.
    pub(super) kill_after: u64,
    /// The step ends as an error, whatever was done.
    pub(super) error: u64,
    /// The step goes to another replica than the route says.
    pub(super) reroute: u64,
    /// A replica that was taken for dead executes a step, long after its end.
    pub(super) straggle: u64,
    /// Stage 0 is taken for dead, and another takes its requests over.
    pub(super) head: u64,
    /// A client cancels.
    pub(super) cancel: u64,
}

struct Replica {
    stage: Stage,
    /// The reply cache (P-2).
    answered: HashMap<StepId, (Vec<ReplicaNo>, Vec<RowResult>)>,
}

struct Running {
    ticket: Ticket,
    step: StepId,
    ran: Ran,
    route: Vec<ReplicaNo>,
}

/// One life of stage 0.
pub(super) struct Head {
    origin: Incarnation,
    steps: u64,
    pub(super) stage: Stage,
    pub(super) scheduler: Scheduler,
    running: Vec<Running>,
}

pub(super) struct Client {
    pub(super) prompt: Vec<u32>,
    pub(super) max_tokens: u32,
    pub(super) out: Vec<u32>,
    pub(super) end: Option<Result<Finish, StepError>>,
    tenure: u32,
}

pub(super) struct World {
    pub(super) rng: Rng,
    pub(super) faults: Faults,
    pub(super) stages: u16,
    pub(super) replicas: ReplicaNo,
    pub(super) config: ScheduleConfig,
    /// The last one serves; those before it were taken for dead and know nothing of it.
    pub(super) heads: Vec<Head>,
    pool: BTreeMap<(u16, ReplicaNo), Replica>,
    stragglers: Vec<(u16, ReplicaNo, StepId, StageMeta, Bytes)>,
    pub(super) clients: BTreeMap<RequestId, Client>,
}

fn toy(stage: u16, stages: u16) -> Stage {
    Stage::new(stage, Box::new(ToyEngine::new(ToyConfig::stage(stage, stages)).unwrap()))
}

pub(super) fn request(number: u64) -> RequestId {
    StepId { origin: Incarnation::from_bits(0xC11E), seq: number }
}

pub(super) fn config() -> ScheduleConfig {
    ScheduleConfig {
        k: 4,
        rows: 8,
        tokens: 16,
        requests: 64,
        recovery_budget: 8,
        context_max: 1000,
        stop_tokens: Vec::new(),
    }
}

impl World {
    pub(super) fn new(seed: u64, stages: u16, replicas: ReplicaNo, config: ScheduleConfig) -> World {
        let mut world = World {
            rng: Rng(seed),
            faults: Faults::default(),
            stages,
            replicas,
            config,
            heads: Vec::new(),
            pool: BTreeMap::new(),
            stragglers: Vec::new(),
            clients: BTreeMap::new(),
        };
        for stage in 1..stages {
            for replica in 0..replicas {
                world.kill(stage, replica);
            }
        }
        world.new_head();
        world
    }

    /// A replica's process is replaced by a fresh one.
    pub(super) fn kill(&mut self, stage: u16, replica: ReplicaNo) {
        let fresh = Replica { stage: toy(stage, self.stages), answered: HashMap::new() };
        self.pool.insert((stage, replica), fresh);
    }

    pub(super) fn stage(&self, stage: u16, replica: ReplicaNo) -> &Stage {
        &self.pool[&(stage, replica)].stage
    }

    /// The sum over a stage's replicas.
    pub(super) fn sum(&self, stage: u16, of: impl Fn(&Stage) -> u64) -> u64 {
        (0..self.replicas).map(|replica| of(self.stage(stage, replica))).sum()
    }

    pub(super) fn new_head(&mut self) {
        self.heads.push(Head {
            origin: Incarnation::from_bits(1 + self.heads.len() as u64),
            steps: 0,
            stage: toy(0, self.stages),
            scheduler: Scheduler::new(self.config.clone()),
            running: Vec::new(),
        });
    }

    pub(super) fn serving(&self) -> usize {
        self.heads.len() - 1
    }

    pub(super) fn running(&self) -> usize {
        self.heads[self.serving()].running.len()
    }

    pub(super) fn admit(&mut self, number: u64, prompt: &[u32], max_tokens: u32) {
        let client = Client { prompt: prompt.to_vec(), max_tokens, out: Vec::new(), end: None, tenure: 0 };
        self.clients.insert(request(number), client);
        self.submit(request(number));
    }

    /// The client sends its request to the stage 0 that serves, with what it has of the output.
    pub(super) fn submit(&mut self, request: RequestId) {
        let client = self.clients.get_mut(&request).unwrap();
        client.tenure += 1;
        let admission = Admission {
            request,
            prompt: client.prompt.clone(),
            generated: client.out.clone(),
            max_tokens: client.max_tokens,
            tenure: client.tenure,
            route: Vec::new(),
        };
        self.drive(self.serving(), ScheduleInput::Admit(admission));
    }

    pub(super) fn drive(&mut self, head: usize, input: ScheduleInput) {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            self.heads[head].scheduler.handle(Instant::ZERO, input);
            while let Some(output) = self.heads[head].scheduler.poll() {
                inputs.extend(self.perform(head, output));
            }
        }
    }

    fn perform(&mut self, head: usize, output: ScheduleOutput) -> Option<ScheduleInput> {
        match output {
            ScheduleOutput::Run { ticket, meta, tokens, route } => {
                self.check_run(head, &meta, &tokens);
                return self.run(head, ticket, &meta, &tokens, route);
            }
            ScheduleOutput::Emit { request, index, token } => {
                let serves = head == self.serving();
                let client = self.clients.get_mut(&request).unwrap();
                if serves {
                    assert!(client.end.is_none(), "nothing comes after the end");
                    assert_eq!(index as usize, client.out.len(), "tokens come once and in order");
                    client.out.push(token);
                } else {
                    let count = index as usize + 1;
                    let right = expected(u32::from(self.stages) * 2, &client.prompt, count)[count - 1];
                    assert_eq!(token, right, "not even a stage 0 that was replaced emits a wrong token");
                }
            }
            ScheduleOutput::Finish { request, end } => {
                if head == self.serving() {
                    let client = self.clients.get_mut(&request).unwrap();
                    assert!(client.end.is_none(), "a request ends once");
                    client.end = Some(end);
                }
            }
            ScheduleOutput::Release { request, tenure, routes } => {
                self.heads[head].stage.release(&[Release { request, tenure, route: Vec::new() }]);
                for route in routes {
                    for (stage, replica) in (1..self.stages).zip(route) {
                        let release = Release { request, tenure, route: Vec::new() };
                        self.pool.get_mut(&(stage, replica)).unwrap().stage.release(&[release]);
                    }
                }
            }
            ScheduleOutput::Abort(ticket) => {
                let running = &mut self.heads[head].running;
                let at = running.iter().position(|running| running.ticket == ticket).unwrap();
                running.remove(at);
                let error = StepError::new(ErrorCode::Cancelled, Outcome::MayHaveRun, "aborted");
                return Some(ScheduleInput::StepDone { ticket, route: Vec::new(), result: Err(error) });
            }
            ScheduleOutput::Duplicate(request) => panic!("{request} was admitted twice"),
        }
        None
    }

    fn check_run(&self, head: usize, meta: &StageMeta, tokens: &[u32]) {
        let running = &self.heads[head].running;
        assert!(running.len() < self.config.k, "at most K steps are in flight (P-4)");
        assert!(meta.rows.len() <= self.config.rows);
        assert!(tokens.len() <= self.config.tokens as usize);
        let counted: u32 = meta.rows.iter().map(|row| row.row.tokens).sum();
        assert_eq!(counted as usize, tokens.len());
    }

    fn run(
        &mut self,
        head: usize,
        ticket: Ticket,
        meta: &StageMeta,
        tokens: &[u32],
        route: Vec<ReplicaNo>,
    ) -> Option<ScheduleInput> {
        let head = &mut self.heads[head];
        head.steps += 1;
        let step = StepId { origin: head.origin, seq: head.steps };
        let payload: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        match head.stage.run(step, meta, &payload, &()) {
            Ok(ran) if ran.next.is_some() => head.running.push(Running { ticket, step, ran, route }),
            Ok(ran) => {
                return Some(ScheduleInput::StepDone { ticket, route, result: ran.merge(Vec::new()) });
            }
            Err(error) => return Some(ScheduleInput::StepDone { ticket, route, result: Err(error) }),
        }
        None
    }

    /// Lets one of the steps in flight go through the pipeline and come back.
    pub(super) fn complete(&mut self, head: usize, at: usize) {
        let Running { ticket, step, ran, route } = self.heads[head].running.remove(at);
        let (meta, payload) = ran.next.clone().expect("what runs goes on");
        let (route, result) = match self.hop(1, step, &meta, &payload, &route) {
            Ok((route, later)) => (route, ran.merge(later)),
            Err(error) => (Vec::new(), Err(error)),
        };
        self.drive(head, ScheduleInput::StepDone { ticket, route, result });
    }

    fn hop(
        &mut self,
        stage: u16,
        step: StepId,
        meta: &StageMeta,
        payload: &Bytes,
        route: &[ReplicaNo],
    ) -> Result<(Vec<ReplicaNo>, Vec<RowResult>), StepError> {
        let mut prefer = route.first().copied();
        loop {
            if self.rng.percent(self.faults.reroute) {
                prefer = None;
            }
            let any = self.rng.below(self.replicas.into()) as ReplicaNo;
            let replica = prefer.take().unwrap_or(any);
            if self.rng.percent(self.faults.straggle) {
                self.stragglers.push((stage, replica, step, meta.clone(), payload.clone()));
            }
            if self.rng.percent(self.faults.kill_before) {
                self.kill(stage, replica);
                continue;
            }
            let entry = self.pool.get_mut(&(stage, replica)).unwrap();
            if let Some(answer) = entry.answered.get(&step) {
                return Ok(answer.clone());
            }
            let ran = entry.stage.run(step, meta, payload, &())?;
            let mut taken = vec![replica];
            let mut later = Vec::new();
            if let Some((meta, payload)) = &ran.next {
                let rest = route.get(1..).unwrap_or_default();
                let (route, results) = self.hop(stage + 1, step, meta, payload, rest)?;
                taken.extend(route);
                later = results;
            }
            if self.rng.percent(self.faults.kill_after) {
                self.kill(stage, replica);
                continue;
            }
            if self.rng.percent(self.faults.error) {
                let text = "an injected error";
                return Err(StepError::new(ErrorCode::Internal, Outcome::MayHaveRun, text));
            }
            let answer = (taken, ran.merge(later)?);
            self.pool.get_mut(&(stage, replica)).unwrap().answered.insert(step, answer.clone());
            return Ok(answer);
        }
    }

    /// One thing happens somewhere.
    pub(super) fn advance(&mut self) {
        if !self.stragglers.is_empty() && self.rng.percent(30) {
            let at = self.rng.below(self.stragglers.len() as u64) as usize;
            let (stage, replica, step, meta, payload) = self.stragglers.swap_remove(at);
            // Whatever it yields, nobody listens any more.
            let _ = self.pool.get_mut(&(stage, replica)).unwrap().stage.run(step, &meta, &payload, &());
        }
        if self.rng.percent(self.faults.cancel) {
            let at = self.rng.below(self.clients.len() as u64) as usize;
            let request = *self.clients.keys().nth(at).unwrap();
            self.drive(self.serving(), ScheduleInput::Cancel(request));
        }
        if self.heads.len() < HEADS_MAX && self.rng.percent(self.faults.head) {
            self.take_over();
        }
        let head = self.rng.below(self.heads.len() as u64) as usize;
        let running = self.heads[head].running.len() as u64;
        if running > 0 {
            let at = self.rng.below(running) as usize;
            self.complete(head, at);
        }
    }

    /// Another stage 0 takes the unfinished requests over; the old one may or may not be dead.
    pub(super) fn take_over(&mut self) {
        let old = self.serving();
        if self.rng.percent(50) {
            let origin = self.heads[old].origin;
            self.heads[old].running.clear();
            if self.rng.percent(50) {
                self.pool.values_mut().for_each(|replica| replica.stage.origin_gone(origin));
            }
        }
        self.new_head();
        let open: Vec<RequestId> =
            self.clients.iter().filter(|(_, client)| client.end.is_none()).map(|(id, _)| *id).collect();
        for request in open {
            self.submit(request);
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.clients.values().all(|client| client.end.is_some())
    }

    /// Goes on under the faults for a while, then heals, and must then come to an end.
    pub(super) fn finish(&mut self) {
        for _ in 0..500 {
            self.advance();
        }
        self.faults = Faults::default();
        for _ in 0..10_000 {
            if self.is_over() {
                return;
            }
            self.advance();
        }
        panic!("a request never ends");
    }

    /// What a client must have got when nothing ended its request early.
    pub(super) fn right(&self, client: &Client) -> (Vec<u32>, Finish) {
        let all = expected(u32::from(self.stages) * 2, &client.prompt, client.max_tokens as usize);
        match all.iter().position(|token| self.config.stop_tokens.contains(token)) {
            Some(at) => (all[..=at].to_vec(), Finish::Stop),
            None => (all, Finish::Length),
        }
    }

    pub(super) fn assert_right(&self) {
        for (request, client) in &self.clients {
            let (out, finish) = self.right(client);
            assert_eq!(client.end, Some(Ok(finish)), "{request}");
            assert_eq!(client.out, out, "{request}");
        }
    }
}
