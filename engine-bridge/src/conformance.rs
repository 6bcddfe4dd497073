//! What every engine must show before a pipeline may rely on it: bit-equality, whatever else is in the batch and
//! however the tokens were split over calls and stages, and honest counts of what is held.
//!
//! An engine's own tests call [`check`]; it panics at the first rule that does not hold and names it.

use std::ops::Range;

use connex_protocol::{Incarnation, StepId};

use crate::{Batch, Engine, EngineError, RequestId, Row, Watch, local};

/// Makes a fresh engine of the same model for a range of its layers.
pub type Make<'a> = dyn Fn(Range<u32>) -> Box<dyn Engine> + 'a;

/// Checks every rule of the contract with these prompts: at least two, each of at least four tokens, and different
/// from each other. `generate` is how many tokens the comparison of whole chains generates.
pub fn check(make: &Make<'_>, prompts: &[Vec<u32>], generate: usize) {
    assert!(
        prompts.len() >= 2 && prompts.iter().all(|prompt| prompt.len() >= 4),
        "the suite needs more to go on"
    );
    let layers_total = make(0..1).info().layers_total;
    let mut suite = Suite::new(make, layers_total.div_ceil(2), prompts);
    suite.splitting_a_prefill_changes_nothing();
    suite.the_rest_of_the_batch_changes_nothing();
    suite.going_back_to_a_prefix_changes_nothing();
    suite.a_recompute_changes_nothing();
    suite.bad_input_is_refused_and_disturbs_nobody();
    suite.a_cancelled_request_can_be_computed_again();
    the_number_of_stages_changes_nothing(make, layers_total, prompts, generate);
}

struct Suite<'a> {
    engine: Box<dyn Engine>,
    prompts: &'a [Vec<u32>],
    /// For each prompt, its activations when it is prefilled at once and alone.
    alone: Vec<Vec<u8>>,
    steps: u64,
}

fn request(number: usize) -> RequestId {
    StepId { origin: Incarnation::from_bits(0xC0), seq: number as u64 + 1 }
}

struct Cancelled;

impl Watch for Cancelled {
    fn cancelled(&self) -> bool {
        true
    }
}

impl<'a> Suite<'a> {
    /// The rules are checked on the first half of the layers, whose output is activations: tokens alone would hide
    /// a difference that is too small to change an argmax here and large enough to change one later.
    fn new(make: &Make<'_>, layers: u32, prompts: &'a [Vec<u32>]) -> Self {
        let engine = make(0..layers);
        assert!(!engine.info().is_last(), "the model needs at least two layers");
        let mut suite = Suite { engine, prompts, alone: Vec::new(), steps: 0 };
        for (number, prompt) in prompts.iter().enumerate() {
            let output = suite.forward(&[(number, 0, prompt)]);
            suite.alone.push(output);
            assert_eq!(suite.engine.held(request(number)), prompt.len() as u32, "held counts the tokens");
        }
        assert_eq!(suite.engine.requests(), prompts.len(), "every prompt left state behind");
        suite.clear();
        suite
    }

    fn clear(&mut self) {
        for number in 0..self.prompts.len() {
            self.engine.release(request(number));
            assert_eq!(self.engine.held(request(number)), 0, "nothing is held after a release");
        }
        assert_eq!(self.engine.requests(), 0, "released requests are forgotten");
    }

    fn width(&self) -> usize {
        self.engine.info().width as usize
    }

    fn step(&mut self) -> StepId {
        self.steps += 1;
        StepId { origin: Incarnation::from_bits(0xC0), seq: self.steps }
    }

    fn try_forward(
        &mut self,
        parts: &[(usize, u32, &[u32])],
        watch: &dyn Watch,
    ) -> Result<Vec<u8>, EngineError> {
        let rows = parts.iter().map(|(number, context, tokens)| Row {
            request: request(*number),
            context: *context,
            tokens: tokens.len() as u32,
            sample: false,
        });
        let batch = Batch { rows: rows.collect() };
        let tokens = parts.iter().flat_map(|(_, _, tokens)| tokens.iter());
        let input: Vec<u8> = tokens.flat_map(|token| token.to_le_bytes()).collect();
        let mut output = Vec::new();
        let step = self.step();
        self.engine.forward(step, &batch, &input, &mut output, watch)?;
        assert_eq!(output.len(), batch.tokens() * self.width(), "width bytes a token");
        Ok(output)
    }

    fn forward(&mut self, parts: &[(usize, u32, &[u32])]) -> Vec<u8> {
        self.try_forward(parts, &()).expect("a good batch is computed")
    }

    fn splitting_a_prefill_changes_nothing(&mut self) {
        for size in [1, 2, 3] {
            for (number, prompt) in self.prompts.iter().enumerate() {
                let mut output = Vec::new();
                for chunk in prompt.chunks(size) {
                    let context = (output.len() / self.width()) as u32;
                    output.extend(self.forward(&[(number, context, chunk)]));
                    assert_eq!(self.engine.held(request(number)), context + chunk.len() as u32);
                }
                assert!(output == self.alone[number], "prompt {number} in chunks of {size} gives other bits");
            }
            self.clear();
        }
    }

    fn the_rest_of_the_batch_changes_nothing(&mut self) {
        // Prompt 0 is decoded token by token while each of the others is prefilled beside it, in either order.
        for reverse in [false, true] {
            let prompts = self.prompts;
            let mut first = Vec::new();
            for (at, token) in prompts[0].iter().enumerate() {
                let mut parts: Vec<(usize, u32, &[u32])> = vec![(0, at as u32, std::slice::from_ref(token))];
                let other = 1 + at % (prompts.len() - 1);
                parts.push((other, 0, &prompts[other]));
                if reverse {
                    parts.reverse();
                }
                let output = self.forward(&parts);
                let cut = if reverse { prompts[other].len() } else { 1 } * self.width();
                let (left, right) = output.split_at(cut);
                let (mine, others) = if reverse { (right, left) } else { (left, right) };
                first.extend_from_slice(mine);
                assert!(others == self.alone[other], "a neighbour changes the bits of prompt {other}");
            }
            assert!(first == self.alone[0], "a neighbour changes the bits of prompt 0");
            self.clear();
        }
    }

    fn going_back_to_a_prefix_changes_nothing(&mut self) {
        for (number, prompt) in self.prompts.iter().enumerate() {
            let other = &self.prompts[(number + 1) % self.prompts.len()];
            for keep in [1, prompt.len() / 2, prompt.len() - 1] {
                self.forward(&[(number, 0, &prompt[..keep])]);
                self.forward(&[(number, keep as u32, other)]);
                let output = self.forward(&[(number, keep as u32, &prompt[keep..])]);
                let expected = &self.alone[number][keep * self.width()..];
                assert!(output == expected, "what was dropped beyond {keep} tokens left a trace");
                assert_eq!(self.engine.held(request(number)), prompt.len() as u32);
            }
        }
        self.clear();
    }

    fn a_recompute_changes_nothing(&mut self) {
        for (number, prompt) in self.prompts.iter().enumerate() {
            let other = &self.prompts[(number + 1) % self.prompts.len()];
            self.forward(&[(number, 0, other)]);
            let replaced = self.forward(&[(number, 0, prompt)]);
            assert!(replaced == self.alone[number], "context 0 replaces everything");
            self.engine.release(request(number));
            let again = self.forward(&[(number, 0, prompt)]);
            assert!(again == self.alone[number], "a recompute after a release gives other bits");
        }
        self.clear();
    }

    fn bad_input_is_refused_and_disturbs_nobody(&mut self) {
        let prompt = &self.prompts[0];
        let (head, tail) = prompt.split_at(prompt.len() / 2);
        self.forward(&[(0, 0, head)]);
        let row = Row { request: request(1), context: 0, tokens: 2, sample: false };
        let step = self.step();
        let short = self.engine.forward(step, &Batch { rows: vec![row] }, &[0; 4], &mut Vec::new(), &());
        assert!(matches!(short, Err(EngineError::Input { found: 4, expected: 8 })), "{short:?}");
        let vocabulary = self.engine.info().vocabulary;
        let foreign = self.try_forward(&[(1, 0, &[vocabulary])], &());
        assert!(matches!(foreign, Err(EngineError::Token { .. })), "{foreign:?}");
        let long = vec![prompt[0]; self.engine.info().context_max as usize + 1];
        let long = self.try_forward(&[(1, 0, &long)], &());
        assert!(matches!(long, Err(EngineError::Context { .. })), "{long:?}");
        self.engine.release(request(1));
        let rest = self.forward(&[(0, head.len() as u32, tail)]);
        assert!(rest == self.alone[0][head.len() * self.width()..], "a neighbour's bad input left a trace");
        self.clear();
    }

    fn a_cancelled_request_can_be_computed_again(&mut self) {
        let prompt = &self.prompts[0];
        self.forward(&[(0, 0, prompt)]);
        // An engine may finish a short batch before it looks; if it gives up, it says why.
        let cancelled = self.try_forward(&[(0, prompt.len() as u32, &prompt[..1])], &Cancelled);
        assert!(matches!(cancelled, Ok(_) | Err(EngineError::Cancelled)), "{cancelled:?}");
        self.engine.release(request(0));
        let again = self.forward(&[(0, 0, prompt)]);
        assert!(again == self.alone[0], "a cancelled step left a trace");
        self.clear();
    }
}

fn the_number_of_stages_changes_nothing(make: &Make<'_>, layers: u32, prompts: &[Vec<u32>], generate: usize) {
    let whole = local::run(&mut [make(0..layers)], prompts, generate).expect("one stage generates");
    for stages in [2, 4] {
        if stages > layers {
            continue;
        }
        let mut engines: Vec<_> =
            (0..stages).map(|at| make(layers * at / stages..layers * (at + 1) / stages)).collect();
        let outputs = local::run(&mut engines, prompts, generate).expect("several stages generate");
        assert_eq!(outputs, whole, "{stages} stages give other tokens than one");
    }
}
