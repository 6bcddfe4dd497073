//! A pipeline stage between the bytes of a step and an engine: checks what the engine holds, takes out what it can't
//! compute, and prepares what goes on to the next stage.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};

use bytes::Bytes;
use connex_protocol::wire::{ErrorCode, Outcome, StepError, WireError, codec};
use connex_protocol::{Incarnation, ReplicaNo, StepId};
use serde::{Deserialize, Serialize};

use crate::{Batch, Engine, EngineError, EngineInfo, RequestId, Row, Watch};

/// Requests that a stage holds state for at most, unless it is told otherwise. It is more than the scheduler of one
/// stage 0 admits, so that several can share a stage without pushing each other's state out.
const REQUESTS_MAX: usize = 4096;

/// A row on its way through the pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageRow {
    /// What the engine is to compute.
    pub row: Row,
    /// Grows with each stage 0 that takes the request over; an earlier one's rows are refused once a later one's came.
    pub tenure: u32,
    /// For a recovery: which tokens the stages after the one that lost its state still hold.
    pub trim: Option<Trim>,
}

/// In a recovery, the stages after `stage` hold `keep` tokens of the request; they get only what follows them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trim {
    /// The stage that lost its state.
    pub stage: u16,
    /// How many tokens the later ones hold.
    pub keep: u32,
}

/// The metadata of a pipeline step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageMeta {
    /// The layer that comes next: the payload is what left the one before it.
    pub layer: u32,
    /// The rows, in the order in which their tokens lie in the payload.
    pub rows: Vec<StageRow>,
}

/// What became of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RowResult {
    /// It was computed and asked for no sample.
    Nothing,
    /// The token sampled after it.
    Token(u32),
    /// A stage lacks the state that it needs: nothing was computed from it there or behind (P-9).
    Missing {
        /// The stage.
        stage: u16,
        /// How many tokens it holds.
        held: u32,
        /// It took its identity over by agreement and never held the request: no failure, and the request's budget
        /// of recoveries is not for it.
        planned: bool,
    },
    /// Another stage 0 has taken the request over.
    Superseded,
}

/// Finished requests that a stage is to forget: the body of a notice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Release {
    /// The request.
    pub request: RequestId,
    /// The tenure under which it finished.
    pub tenure: u32,
    /// The replicas that hold it at the later stages.
    pub route: Vec<ReplicaNo>,
}

/// Encodes metadata, results or releases.
pub fn encode<T: Serialize>(value: &T) -> Bytes {
    let mut out = Vec::new();
    codec::write(&mut out, value);
    out.into()
}

/// Decodes metadata, results or releases.
pub fn decode<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T, WireError> {
    codec::read(bytes)
}

/// What a stage made of a step.
#[derive(Debug)]
pub struct Ran {
    /// Per row of the step: its result, or `None` if it goes on to the next stage.
    pub results: Vec<Option<RowResult>>,
    /// What the next stage is to compute, if anything goes on.
    pub next: Option<(StageMeta, Bytes)>,
}

impl Ran {
    /// The results of all rows, once the next stage has answered for those that went on.
    pub fn merge(self, later: Vec<RowResult>) -> Result<Vec<RowResult>, StepError> {
        let mut later = later.into_iter();
        let mut all = Vec::with_capacity(self.results.len());
        for result in self.results {
            let result = result.or_else(|| later.next());
            all.push(result.ok_or_else(|| broken("the next stage answered for too few rows"))?);
        }
        match later.next() {
            None => Ok(all),
            Some(_) => Err(broken("the next stage answered for too many rows")),
        }
    }
}

struct Held {
    tenure: u32,
    origin: Incarnation,
    used: u64,
}

/// An engine as one stage of a pipeline.
///
/// It trusts what the engine holds of a request only if it claimed that request itself: an engine that failed or
/// panicked may still hold anything, and none of it is computed on again (P-9, P-10).
pub struct Stage {
    number: u16,
    engine: Box<dyn Engine>,
    requests_max: usize,
    /// It took over from a life that handed its identity over, and whose state it doesn't have.
    took_over: bool,
    held: HashMap<RequestId, Held>,
    uses: u64,
    computed: u64,
    missing: u64,
}

impl Stage {
    /// The stage with this number.
    pub fn new(number: u16, engine: Box<dyn Engine>) -> Self {
        Stage {
            number,
            engine,
            requests_max: REQUESTS_MAX,
            took_over: false,
            held: HashMap::new(),
            uses: 0,
            computed: 0,
            missing: 0,
        }
    }

    /// Holds state for so many requests at most; the one that was longest unused goes first, and is reported missing
    /// and computed anew if it comes back.
    pub fn with_requests_max(mut self, requests_max: usize) -> Self {
        self.requests_max = requests_max.max(1);
        self
    }

    /// It takes over from another life by agreement: what it lacks of the requests that were there is no failure.
    pub fn taking_over(mut self) -> Self {
        self.took_over = true;
        self
    }

    /// What its engine is.
    pub fn info(&self) -> &EngineInfo {
        self.engine.info()
    }

    /// Tokens computed since the start, recomputed ones counted again.
    pub fn computed(&self) -> u64 {
        self.computed
    }

    /// Rows reported missing since the start.
    pub fn missing(&self) -> u64 {
        self.missing
    }

    /// Requests it holds state for.
    pub fn requests(&self) -> usize {
        self.held.len()
    }

    /// Computes a step. An error is that step's alone: the stage lives on (P-10), and what it held of the step's
    /// requests is released, so that a later step reports it missing instead of computing on it.
    pub fn run(
        &mut self,
        step: StepId,
        meta: &StageMeta,
        payload: &[u8],
        watch: &dyn Watch,
    ) -> Result<Ran, StepError> {
        self.validate(meta, payload.len())?;
        let width = self.input_width();
        let mut results = Vec::with_capacity(meta.rows.len());
        let mut batch = Batch::default();
        let mut kept = Vec::with_capacity(meta.rows.len());
        let mut at = 0;
        for row in &meta.rows {
            let bytes = &payload[at..at + row.row.tokens as usize * width];
            at += bytes.len();
            let refused = self.check(step.origin, row);
            results.push(refused);
            if refused.is_none() {
                self.claim(step.origin, row);
                batch.rows.push(row.row);
                kept.push(bytes);
            }
        }
        let input = if kept.len() == meta.rows.len() { Cow::Borrowed(payload) } else { kept.concat().into() };
        let mut output = Vec::new();
        if !batch.rows.is_empty() {
            self.forward(step, &batch, &input, &mut output, watch)?;
        }
        Ok(match self.engine.info().is_last() {
            true => Self::sampled(meta, results, &output),
            false => self.onward(meta, results, &output),
        })
    }

    /// Refuses a step whose metadata can't be, before anything is touched (P-10).
    fn validate(&self, meta: &StageMeta, payload: usize) -> Result<(), StepError> {
        let layers = &self.engine.info().layers;
        if meta.layer != layers.start {
            // Each stage computes whatever it is given: a hole or an overlap would only show as nonsense.
            let text = format!(
                "stage {} holds layers {layers:?}, and the stage in front of it ends before layer {}: give the \
                 stages ranges that continue each other",
                self.number, meta.layer
            );
            return Err(malformed(text));
        }
        if meta.rows.is_empty() || meta.rows.len() > self.requests_max {
            let (rows, max) = (meta.rows.len(), self.requests_max);
            return Err(malformed(format!("the step has {rows} rows, a stage takes 1 to {max}")));
        }
        let mut requests = HashSet::with_capacity(meta.rows.len());
        let mut expected = 0usize;
        for StageRow { row, .. } in &meta.rows {
            if !requests.insert(row.request) {
                return Err(malformed(format!("request {} appears twice in the step", row.request)));
            }
            if row.tokens == 0 || row.context.checked_add(row.tokens).is_none() {
                let Row { request, context, tokens, .. } = row;
                let text = format!("request {request} has {tokens} new tokens after {context}");
                return Err(malformed(text));
            }
            expected = expected.saturating_add((row.tokens as usize).saturating_mul(self.input_width()));
        }
        if payload != expected {
            let text = format!("the payload has {payload} bytes, the rows ask for {expected}");
            return Err(malformed(text));
        }
        Ok(())
    }

    fn input_width(&self) -> usize {
        let info = self.engine.info();
        if info.is_first() { 4 } else { info.width as usize }
    }

    /// Why a row can't be computed here, if it can't (P-9).
    fn check(&mut self, origin: Incarnation, row: &StageRow) -> Option<RowResult> {
        let claim = self.held.get(&row.row.request);
        if claim.is_some_and(|held| held.tenure > row.tenure) {
            return Some(RowResult::Superseded);
        }
        // Whoever takes a request over starts from context 0: state that another origin built is not there for it.
        let held = match claim.is_some_and(|held| held.origin == origin) {
            true => self.engine_held(row.row.request),
            false => 0,
        };
        let lacking = row.row.context > held;
        self.missing += u64::from(lacking);
        let planned = self.took_over && claim.is_none();
        lacking.then_some(RowResult::Missing { stage: self.number, held, planned })
    }

    fn engine_held(&self, request: RequestId) -> u32 {
        catch_unwind(AssertUnwindSafe(|| self.engine.held(request))).unwrap_or(0)
    }

    fn claim(&mut self, origin: Incarnation, row: &StageRow) {
        self.uses += 1;
        if !self.held.contains_key(&row.row.request) && self.held.len() >= self.requests_max {
            let oldest = self.held.iter().min_by_key(|(_, held)| held.used).map(|(request, _)| *request);
            if let Some(oldest) = oldest {
                self.drop_request(oldest);
            }
        }
        self.held.insert(row.row.request, Held { tenure: row.tenure, origin, used: self.uses });
    }

    fn forward(
        &mut self,
        step: StepId,
        batch: &Batch,
        input: &[u8],
        output: &mut Vec<u8>,
        watch: &dyn Watch,
    ) -> Result<(), StepError> {
        let engine = &mut self.engine;
        let run = AssertUnwindSafe(|| engine.forward(step, batch, input, output, watch));
        let failure = match catch_unwind(run) {
            Ok(Ok(())) => match self.breach(batch, output.len()) {
                None => {
                    self.computed += batch.tokens() as u64;
                    return Ok(());
                }
                Some(breach) => StepError::new(ErrorCode::Internal, Outcome::Ran, breach),
            },
            Ok(Err(EngineError::Cancelled)) => {
                StepError::new(ErrorCode::Cancelled, Outcome::MayHaveRun, "the step was cancelled")
            }
            Ok(Err(error)) => StepError::new(ErrorCode::Application, Outcome::Ran, error.to_string()),
            Err(_) => StepError::new(ErrorCode::Internal, Outcome::Ran, "the engine panicked on this step"),
        };
        for row in &batch.rows {
            self.drop_request(row.request);
        }
        Err(failure)
    }

    /// How an engine that claims success broke its contract, if it did.
    fn breach(&self, batch: &Batch, output: usize) -> Option<String> {
        let info = self.engine.info();
        let expected = match info.is_last() {
            true => batch.samples() * 4,
            false => batch.tokens() * info.width as usize,
        };
        if output != expected {
            return Some(format!("the engine yielded {output} bytes, the batch asks for {expected}"));
        }
        batch.rows.iter().find_map(|row| {
            let (held, expected) = (self.engine_held(row.request), row.context + row.tokens);
            (held != expected).then(|| format!("the engine holds {held} tokens where it computed {expected}"))
        })
    }

    fn sampled(meta: &StageMeta, mut results: Vec<Option<RowResult>>, output: &[u8]) -> Ran {
        let mut tokens = output.chunks_exact(4);
        for (row, result) in meta.rows.iter().zip(&mut results) {
            if result.is_none() {
                let token = row.row.sample.then(|| tokens.next().expect("the samples were counted"));
                *result = Some(token.map_or(RowResult::Nothing, |bytes| {
                    RowResult::Token(u32::from_le_bytes(bytes.try_into().expect("a chunk has four bytes")))
                }));
            }
        }
        Ran { results, next: None }
    }

    /// What goes on to the next stage: the activations of the rows that were computed, less what the later stages
    /// still hold.
    fn onward(&self, meta: &StageMeta, mut results: Vec<Option<RowResult>>, output: &[u8]) -> Ran {
        let width = self.engine.info().width as usize;
        let mut next = StageMeta { layer: self.engine.info().layers.end, rows: Vec::new() };
        let mut payload = Vec::with_capacity(output.len());
        let mut at = 0;
        for (row, result) in meta.rows.iter().zip(&mut results) {
            if result.is_some() {
                continue;
            }
            let bytes = &output[at..at + row.row.tokens as usize * width];
            at += bytes.len();
            let end = row.row.context + row.row.tokens;
            let trimmed = row.trim.filter(|trim| trim.stage == self.number && trim.keep > row.row.context);
            let start = trimmed.map_or(row.row.context, |trim| trim.keep.min(end));
            if start == end {
                *result = Some(RowResult::Nothing);
                continue;
            }
            payload.extend_from_slice(&bytes[(start - row.row.context) as usize * width..]);
            next.rows.push(StageRow { row: Row { context: start, tokens: end - start, ..row.row }, ..*row });
        }
        let next = (!next.rows.is_empty()).then(|| (next, payload.into()));
        Ran { results, next }
    }

    /// Forgets finished requests, unless a later stage 0 has taken them over since.
    pub fn release(&mut self, releases: &[Release]) {
        for release in releases {
            if self.held.get(&release.request).is_some_and(|held| held.tenure <= release.tenure) {
                self.drop_request(release.request);
            }
        }
    }

    /// Forgets what this origin's steps left: it is gone for good, and whoever took its requests over starts anew.
    pub fn origin_gone(&mut self, origin: Incarnation) {
        let gone: Vec<RequestId> =
            self.held.iter().filter(|(_, held)| held.origin == origin).map(|(request, _)| *request).collect();
        for request in gone {
            self.drop_request(request);
        }
    }

    fn drop_request(&mut self, request: RequestId) {
        self.held.remove(&request);
        // What an engine keeps of a request that it can't release is not claimed, so it is never computed on.
        let engine = &mut self.engine;
        let _ = catch_unwind(AssertUnwindSafe(|| engine.release(request)));
    }
}

fn malformed(why: String) -> StepError {
    StepError::new(ErrorCode::Application, Outcome::NotStarted, why)
}

fn broken(why: &str) -> StepError {
    StepError::new(ErrorCode::Internal, Outcome::Ran, why)
}

#[cfg(test)]
mod tests;
