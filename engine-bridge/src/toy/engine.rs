use std::collections::HashMap;
use std::time::{Duration, Instant};

use connex_protocol::StepId;

use super::{ToyConfig, VOCABULARY, automaton};
use crate::{Batch, Engine, EngineError, EngineInfo, RequestId, Watch};

/// A sleeping step looks for a cancel this often.
const NAP: Duration = Duration::from_millis(1);

/// A planted loss happens at every so many-th step.
const LOSS_EVERY: u64 = 16;

/// The automaton's layers of one stage, with what they hold of each request.
pub struct ToyEngine {
    info: EngineInfo,
    config: ToyConfig,
    steps: u64,
    /// The states after each token, one word a layer, token after token: any prefix can be gone back to.
    requests: HashMap<RequestId, Vec<u64>>,
}

impl ToyEngine {
    /// An engine that holds nothing yet. It refuses layers that the automaton does not have, and a width below 8.
    pub fn new(config: ToyConfig) -> Result<ToyEngine, EngineError> {
        let total = config.layers_total;
        if config.layers.is_empty() || config.layers.end > total {
            let (start, end) = (config.layers.start, config.layers.end);
            let text = format!("the toy has layers 0..{total}, there is no range {start}..{end} in it");
            return Err(EngineError::Failed(text));
        }
        if config.width < 8 {
            let text = format!("a toy activation has at least 8 bytes, not {}", config.width);
            return Err(EngineError::Failed(text));
        }
        let info = EngineInfo {
            model: "toy".into(),
            layers: config.layers.clone(),
            layers_total: total,
            width: config.width,
            context_max: config.context_max,
            stop_tokens: config.stop_tokens.clone(),
            vocabulary: VOCABULARY,
        };
        Ok(ToyEngine { info, config, steps: 0, requests: HashMap::new() })
    }

    fn layers(&self) -> usize {
        self.info.layers.len()
    }

    /// The activations in the input, each checked, before anything is changed.
    fn read(&self, batch: &Batch, input: &[u8]) -> Result<Vec<u64>, EngineError> {
        let width = if self.info.is_first() { 4 } else { self.info.width as usize };
        let expected = batch.tokens() * width;
        if input.len() != expected {
            return Err(EngineError::Input { found: input.len(), expected });
        }
        if batch.rows.iter().any(|row| row.tokens == 0) {
            return Err(EngineError::Failed("a row carries no token".into()));
        }
        for row in &batch.rows {
            let needed = row.context.saturating_add(row.tokens);
            if needed > self.info.context_max {
                return Err(EngineError::Context { needed, max: self.info.context_max });
            }
        }
        input.chunks_exact(width).map(|bytes| self.read_one(bytes)).collect()
    }

    fn read_one(&self, bytes: &[u8]) -> Result<u64, EngineError> {
        if !self.info.is_first() {
            return automaton::read_activation(bytes)
                .ok_or_else(|| EngineError::Failed("an activation's bytes are torn".into()));
        }
        let token = u32::from_le_bytes(bytes.try_into().expect("a token has four bytes"));
        if token >= VOCABULARY {
            return Err(EngineError::Token { token, vocabulary: VOCABULARY });
        }
        Ok(automaton::embed(token))
    }

    /// The time that a step takes beyond its arithmetic.
    fn pass_time(&self, tokens: usize, watch: &dyn Watch) -> Result<(), EngineError> {
        let time = self.config.step_time + self.config.token_time * tokens as u32;
        let start = Instant::now();
        loop {
            if watch.cancelled() {
                return Err(EngineError::Cancelled);
            }
            let left = time.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Ok(());
            }
            if !self.config.silent {
                watch.progress();
            }
            if self.config.busy {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(left.min(NAP));
            }
        }
    }

    /// Absorbs the activations and replaces each by what leaves the last layer here.
    fn apply(&mut self, batch: &Batch, activations: &mut [u64], watch: &dyn Watch) {
        let layers = self.layers();
        let mut rest = activations;
        for row in &batch.rows {
            let (mine, others) = rest.split_at_mut(row.tokens as usize);
            rest = others;
            let states = self.requests.entry(row.request).or_default();
            // Absent state reads as zero: an engine that is driven past what it holds computes nonsense, as a real
            // one would, and the tokens show it.
            states.resize(row.context as usize * layers, 0);
            states.reserve(mine.len() * layers);
            for activation in mine {
                for layer in 0..layers {
                    let before = states.len().checked_sub(layers).map_or(0, |at| states[at]);
                    let state = automaton::absorb(before, *activation);
                    states.push(state);
                    *activation = automaton::emit(state, self.info.layers.start + layer as u32);
                }
            }
            watch.progress();
        }
    }

    fn write(&self, batch: &Batch, activations: &[u64], output: &mut Vec<u8>) {
        if !self.info.is_last() {
            output.reserve(activations.len() * self.info.width as usize);
            for activation in activations {
                automaton::write_activation(output, *activation, self.info.width as usize);
            }
            return;
        }
        let mut end = 0;
        for row in &batch.rows {
            end += row.tokens as usize;
            if row.sample {
                let token = automaton::sample(activations[end - 1]);
                output.extend_from_slice(&token.to_le_bytes());
            }
        }
    }

    fn lose(&mut self, batch: &Batch) {
        for row in &batch.rows {
            if let Some(states) = self.requests.get_mut(&row.request) {
                states.fill(0);
            }
        }
    }
}

impl Engine for ToyEngine {
    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn held(&self, request: RequestId) -> u32 {
        self.requests.get(&request).map_or(0, |states| states.len() / self.layers()) as u32
    }

    fn forward(
        &mut self,
        _step: StepId,
        batch: &Batch,
        input: &[u8],
        output: &mut Vec<u8>,
        watch: &dyn Watch,
    ) -> Result<(), EngineError> {
        let mut activations = self.read(batch, input)?;
        self.steps += 1;
        if self.config.loses_state && self.steps.is_multiple_of(LOSS_EVERY) {
            self.lose(batch);
        }
        self.pass_time(batch.tokens(), watch)?;
        self.apply(batch, &mut activations, watch);
        self.write(batch, &activations, output);
        Ok(())
    }

    fn release(&mut self, request: RequestId) {
        self.requests.remove(&request);
    }

    fn requests(&self) -> usize {
        self.requests.len()
    }
}
