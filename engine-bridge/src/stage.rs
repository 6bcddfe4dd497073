//! A pipeline stage between the bytes of a step and an engine: checks what the engine holds, takes out what it can't
//! compute, and prepares what goes on to the next stage.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use bytes::Bytes;
use connex_protocol::wire::{ErrorCode, Outcome, StepError, WireError, codec};
use connex_protocol::{Incarnation, ReplicaNo, StepId};
use serde::{Deserialize, Serialize};

use crate::{Batch, Engine, EngineError, EngineInfo, RequestId, Row, Watch};

/// Requests that a stage holds state for at most; the one that was longest unused goes first. One that comes back is
/// reported missing and computed anew.
const REQUESTS_MAX: usize = 1024;

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
pub struct Stage {
    number: u16,
    engine: Box<dyn Engine>,
    held: HashMap<RequestId, Held>,
    uses: u64,
    computed: u64,
}

impl Stage {
    /// The stage with this number.
    pub fn new(number: u16, engine: Box<dyn Engine>) -> Self {
        Stage { number, engine, held: HashMap::new(), uses: 0, computed: 0 }
    }

    /// What its engine is.
    pub fn info(&self) -> &EngineInfo {
        self.engine.info()
    }

    /// Tokens computed since the start, recomputed ones counted again.
    pub fn computed(&self) -> u64 {
        self.computed
    }

    /// Requests it holds state for.
    pub fn requests(&self) -> usize {
        self.engine.requests()
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
        let width = self.input_width();
        let expected: usize = meta.rows.iter().map(|row| row.row.tokens as usize * width).sum();
        if payload.len() != expected {
            return Err(broken("the payload's length is not what the rows say"));
        }
        let mut results = Vec::with_capacity(meta.rows.len());
        let mut batch = Batch::default();
        let mut input = Vec::with_capacity(payload.len());
        let mut at = 0;
        for row in &meta.rows {
            let bytes = &payload[at..at + row.row.tokens as usize * width];
            at += bytes.len();
            let refused = self.check(row);
            results.push(refused);
            if refused.is_none() {
                self.claim(step.origin, row);
                batch.rows.push(row.row);
                input.extend_from_slice(bytes);
            }
        }
        let mut output = Vec::new();
        if !batch.rows.is_empty() {
            self.forward(step, &batch, &input, &mut output, watch)?;
        }
        if self.engine.info().is_last() {
            return self.sampled(meta, results, &output);
        }
        Ok(self.onward(meta, results, &output))
    }

    fn input_width(&self) -> usize {
        let info = self.engine.info();
        if info.is_first() { 4 } else { info.width as usize }
    }

    /// Why a row can't be computed here, if it can't (P-9).
    fn check(&self, row: &StageRow) -> Option<RowResult> {
        let request = row.row.request;
        if self.held.get(&request).is_some_and(|held| held.tenure > row.tenure) {
            return Some(RowResult::Superseded);
        }
        let held = self.engine.held(request);
        (row.row.context > held).then_some(RowResult::Missing { stage: self.number, held })
    }

    fn claim(&mut self, origin: Incarnation, row: &StageRow) {
        self.uses += 1;
        if !self.held.contains_key(&row.row.request) && self.held.len() >= REQUESTS_MAX {
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
            Ok(Ok(())) => {
                self.computed += batch.tokens() as u64;
                return Ok(());
            }
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

    fn sampled(
        &self,
        meta: &StageMeta,
        mut results: Vec<Option<RowResult>>,
        output: &[u8],
    ) -> Result<Ran, StepError> {
        let mut tokens = output.chunks_exact(4);
        for (row, result) in meta.rows.iter().zip(&mut results) {
            if result.is_some() {
                continue;
            }
            *result = Some(if row.row.sample {
                let bytes = tokens.next().ok_or_else(|| broken("the engine sampled too few tokens"))?;
                RowResult::Token(u32::from_le_bytes(bytes.try_into().expect("a chunk has four bytes")))
            } else {
                RowResult::Nothing
            });
        }
        Ok(Ran { results, next: None })
    }

    /// What goes on to the next stage: the activations of the rows that were computed, less what the later stages
    /// still hold.
    fn onward(&self, meta: &StageMeta, mut results: Vec<Option<RowResult>>, output: &[u8]) -> Ran {
        let width = self.engine.info().width as usize;
        let mut next = StageMeta::default();
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
        self.engine.release(request);
    }
}

fn broken(why: &str) -> StepError {
    StepError::new(ErrorCode::Internal, Outcome::Ran, why)
}
