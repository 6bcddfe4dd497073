//! A deterministic automaton in place of a model: microseconds a token, and an output that is right only if every
//! layer really saw every token of its request, once and in order.

use std::collections::HashMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use connex_protocol::StepId;

use crate::{Batch, Engine, EngineError, EngineInfo, RequestId, Text, Watch};

/// What a toy engine is.
#[derive(Debug)]
pub struct ToyConfig {
    /// The layers of this stage.
    pub layers: Range<u32>,
    /// The layers of the whole automaton.
    pub layers_total: u32,
    /// Bytes per token between stages; at least 8.
    pub width: u32,
    /// How long each step takes beyond its arithmetic.
    pub step_time: Duration,
    /// A bug put in on purpose, so that a harness can show that it would notice: every 50th step first loses a layer's
    /// state, without saying so.
    pub loses_state: bool,
}

impl ToyConfig {
    /// The layers of one of several stages that share two layers each.
    pub fn stage(stage: u16, stages: u16) -> Self {
        let stage = u32::from(stage);
        ToyConfig {
            layers: stage * 2..stage * 2 + 2,
            layers_total: u32::from(stages) * 2,
            width: 64,
            step_time: Duration::ZERO,
            loses_state: false,
        }
    }
}

/// The automaton's vocabulary.
pub const VOCABULARY: u32 = 1 << 16;

/// The automaton's layers of one stage.
pub struct ToyEngine {
    info: EngineInfo,
    config: ToyConfig,
    /// Per request, per token held: the layers' states after it.
    states: HashMap<RequestId, Vec<Vec<u64>>>,
    steps: u64,
}

impl ToyEngine {
    /// An engine with no requests.
    pub fn new(config: ToyConfig) -> Self {
        let info = EngineInfo {
            model: "toy".into(),
            layers: config.layers.clone(),
            layers_total: config.layers_total,
            width: config.width.max(8),
            context_max: 1 << 20,
            stop_tokens: Vec::new(),
            vocabulary: VOCABULARY,
        };
        ToyEngine { info, config, states: HashMap::new(), steps: 0 }
    }

    fn apply(&mut self, batch: &Batch, inputs: &[u64], output: &mut Vec<u8>) {
        let mut inputs = inputs.iter();
        for row in &batch.rows {
            let states = self.states.entry(row.request).or_default();
            states.truncate(row.context as usize);
            let mut x = 0;
            for _ in 0..row.tokens {
                let mut layers = states.last().cloned().unwrap_or_else(|| vec![0; self.config.layers.len()]);
                x = *inputs.next().expect("the inputs were counted");
                for (state, layer) in layers.iter_mut().zip(self.config.layers.clone()) {
                    *state = mix(*state ^ mix(x.wrapping_add(u64::from(layer) << 32)));
                    x = mix(state.wrapping_add(x));
                }
                states.push(layers);
                if !self.info.is_last() {
                    write_activation(output, x, self.info.width as usize);
                }
            }
            if self.info.is_last() && row.sample {
                let token = (x % u64::from(VOCABULARY)) as u32;
                output.extend_from_slice(&token.to_le_bytes());
            }
        }
    }

    fn read_inputs(&self, batch: &Batch, input: &[u8]) -> Result<Vec<u64>, EngineError> {
        let width = if self.info.is_first() { 4 } else { self.info.width as usize };
        let expected = batch.tokens() * width;
        if input.len() != expected {
            return Err(EngineError::Input { found: input.len(), expected });
        }
        input
            .chunks_exact(width)
            .map(|chunk| {
                if self.info.is_first() {
                    let token = u32::from_le_bytes(chunk.try_into().expect("a chunk has four bytes"));
                    if token >= VOCABULARY {
                        return Err(EngineError::Token { token, vocabulary: VOCABULARY });
                    }
                    return Ok(u64::from(token));
                }
                let x = u64::from_le_bytes(chunk[..8].try_into().expect("a width is at least eight bytes"));
                let filler = x.to_le_bytes()[0];
                match chunk[8..].iter().all(|byte| *byte == filler) {
                    true => Ok(x),
                    false => Err(EngineError::Failed("an activation is torn".into())),
                }
            })
            .collect()
    }

    /// The time that a step takes beyond its arithmetic.
    fn pass_time(&self, watch: &dyn Watch) -> Result<(), EngineError> {
        let start = Instant::now();
        while start.elapsed() < self.config.step_time {
            if watch.cancelled() {
                return Err(EngineError::Cancelled);
            }
            watch.progress();
            let left = self.config.step_time.saturating_sub(start.elapsed());
            std::thread::park_timeout(left.min(Duration::from_millis(1)));
        }
        Ok(())
    }
}

impl Engine for ToyEngine {
    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn held(&self, request: RequestId) -> u32 {
        self.states.get(&request).map_or(0, |states| states.len() as u32)
    }

    fn forward(
        &mut self,
        _step: StepId,
        batch: &Batch,
        input: &[u8],
        output: &mut Vec<u8>,
        watch: &dyn Watch,
    ) -> Result<(), EngineError> {
        let inputs = self.read_inputs(batch, input)?;
        for row in &batch.rows {
            let held = self.held(row.request);
            assert!(row.context <= held, "the stage checks contexts before it calls (P-9)");
        }
        self.steps += 1;
        if self.config.loses_state && self.steps.is_multiple_of(50) {
            for row in &batch.rows {
                if let Some(last) = self.states.get_mut(&row.request).and_then(|states| states.last_mut()) {
                    last[0] = 0;
                }
            }
        }
        self.pass_time(watch)?;
        self.apply(batch, &inputs, output);
        Ok(())
    }

    fn release(&mut self, request: RequestId) {
        self.states.remove(&request);
    }

    fn requests(&self) -> usize {
        self.states.len()
    }
}

/// What the whole automaton generates from a prompt: a model of its own, in other words than the engine's, for a
/// harness to compare with.
pub fn expected(layers_total: u32, prompt: &[u32], tokens: usize) -> Vec<u32> {
    let mut memory = vec![0u64; layers_total as usize];
    let mut generated = Vec::new();
    let mut feed: Vec<u32> = prompt.to_vec();
    while generated.len() < tokens {
        let mut signal = 0u64;
        for token in feed.drain(..) {
            signal = u64::from(token);
            for layer in 0..layers_total as usize {
                let salted = signal.wrapping_add((layer as u64) << 32);
                memory[layer] = mix(memory[layer] ^ mix(salted));
                signal = mix(memory[layer].wrapping_add(signal));
            }
        }
        let next = (signal % u64::from(VOCABULARY)) as u32;
        generated.push(next);
        feed.push(next);
    }
    generated
}

fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn write_activation(output: &mut Vec<u8>, x: u64, width: usize) {
    let bytes = x.to_le_bytes();
    output.extend_from_slice(&bytes);
    output.resize(output.len() + width - 8, bytes[0]);
}

/// The toy's text: a token a byte of the prompt, and a made-up word a generated token.
pub struct ToyText;

impl Text for ToyText {
    fn encode(&self, prompt: &str) -> Result<Vec<u32>, EngineError> {
        Ok(prompt.bytes().map(u32::from).collect())
    }

    fn decode(&self, tokens: &[u32]) -> String {
        const ONSETS: [&str; 8] = ["b", "d", "f", "k", "l", "m", "s", "t"];
        const VOWELS: [&str; 4] = ["a", "e", "i", "o"];
        let syllable = |bits: u32| [ONSETS[(bits & 7) as usize], VOWELS[(bits >> 3 & 3) as usize]].concat();
        let word = |token: &u32| [syllable(*token), syllable(token >> 5), syllable(token >> 10)].concat();
        tokens.iter().map(word).collect::<Vec<_>>().join(" ")
    }
}

#[cfg(test)]
mod tests {
    use connex_protocol::Incarnation;

    use super::*;
    use crate::Row;
    use crate::local;

    fn request(seq: u64) -> RequestId {
        StepId { origin: Incarnation::from_bits(7), seq }
    }

    fn stages(count: u16, total: u16) -> Vec<Box<dyn Engine>> {
        let per = u32::from(total / count) * 2;
        (0..u32::from(count))
            .map(|stage| {
                let layers = stage * per..(stage + 1) * per;
                let config = ToyConfig { layers, ..ToyConfig::stage(0, total) };
                Box::new(ToyEngine::new(config)) as Box<dyn Engine>
            })
            .collect()
    }

    #[test]
    fn one_two_and_four_stages_generate_what_the_model_says() {
        let prompts = [vec![1, 2, 3], vec![9; 40], vec![500]];
        let wanted: Vec<Vec<u32>> = prompts.iter().map(|prompt| expected(8, prompt, 12)).collect();
        for count in [1, 2, 4] {
            let mut engines = stages(count, 4);
            assert_eq!(local::run(&mut engines, &prompts, 12).unwrap(), wanted, "{count} stages");
        }
    }

    #[test]
    fn a_prompt_split_over_calls_and_recomputed_gives_the_same() {
        let mut engine =
            ToyEngine::new(ToyConfig { layers: 0..4, layers_total: 4, ..ToyConfig::stage(0, 2) });
        let step = request(99);
        let mut forward = |context: u32, tokens: &[u32]| {
            let rows = vec![Row { request: request(1), context, tokens: tokens.len() as u32, sample: true }];
            let input: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
            let mut output = Vec::new();
            engine.forward(step, &Batch { rows }, &input, &mut output, &()).unwrap();
            u32::from_le_bytes(output.try_into().unwrap())
        };
        let whole = forward(0, &[5, 6, 7, 8]);
        assert_eq!(whole, expected(4, &[5, 6, 7, 8], 1)[0]);
        forward(0, &[5, 6]);
        assert_eq!(forward(2, &[7, 8]), whole);
        // A smaller context drops what is held beyond it.
        assert_eq!(forward(3, &[8]), whole);
        assert_ne!(forward(4, &[8]), whole);
    }

    #[test]
    fn lost_and_reordered_state_changes_the_output() {
        assert_ne!(expected(4, &[1, 2, 3], 1), expected(4, &[2, 1, 3], 1));
        assert_ne!(expected(4, &[1, 2, 3], 1), expected(4, &[2, 3], 1));
        assert_ne!(expected(4, &[1, 2, 3], 1), expected(4, &[1, 2, 2, 3], 1));
    }
}
