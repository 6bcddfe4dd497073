//! The same bits however the work is cut, on random models: the oracle of every test that kills a stage.

mod common;

use std::cell::Cell;
use std::collections::HashMap;

use common::{Scratch, bits, forward, random_model, request, row, staged_logits, stages};
use connex_engine::{Batch, Engine, EngineError, Watch, conformance};
use connex_llama::LlamaEngine;
use connex_llama::random::RandomConfig;
use proptest::prelude::*;

/// Shapes that take different ways through the kernels: rows that are no multiple of four, shared heads and own
/// ones, a head of its own, plain weights.
fn configs() -> Vec<RandomConfig> {
    let small = RandomConfig::default();
    vec![
        small.clone(),
        RandomConfig { vocabulary: 515, tied: false, ..small.clone() },
        RandomConfig { heads: 2, kv_heads: 2, feed_forward: 96, layers: 5, ..small.clone() },
        RandomConfig { hidden: 96, heads: 3, kv_heads: 1, quantised: false, ..small },
    ]
}

fn prompts() -> Vec<Vec<u32>> {
    let prompt = |len: u32, step: u32| (0..len).map(|at| (at * step + 7) % 500).collect();
    vec![prompt(37, 11), prompt(5, 101), prompt(70, 3)]
}

fn first_half(file: &Scratch) -> LlamaEngine {
    LlamaEngine::load(file.path(), Some(0..2)).unwrap()
}

#[test]
fn the_engine_conforms_to_the_contract_in_every_shape() {
    for (seed, config) in (1..).zip(configs()) {
        let file = random_model(seed, &config);
        let make = |range| Box::new(LlamaEngine::load(file.path(), Some(range)).unwrap()) as Box<dyn Engine>;
        conformance::check(&make, &prompts(), 12);
    }
}

#[test]
fn one_two_and_four_stages_give_the_same_logits() {
    for (seed, config) in (10..).zip(configs()) {
        let file = random_model(seed, &config);
        let prompts = prompts();
        let parts: Vec<(u64, u32, &[u32])> =
            (1..).zip(&prompts).map(|(number, prompt)| (number, 0, prompt.as_slice())).collect();
        let whole = staged_logits(&mut stages(file.path(), 1), &parts);
        assert!(whole[0] != whole[1], "prompts that differ give logits that differ");
        for count in [2, 4] {
            let logits = staged_logits(&mut stages(file.path(), count), &parts);
            assert_eq!(bits(&logits), bits(&whole), "{count} stages");
        }
    }
}

#[test]
fn a_head_of_its_own_is_not_the_embedding() {
    let tied = random_model(5, &RandomConfig::default());
    let own = random_model(5, &RandomConfig { tied: false, ..RandomConfig::default() });
    let logits = |file: &Scratch| staged_logits(&mut stages(file.path(), 1), &[(1, 0, &[1, 2, 3])]);
    assert_ne!(logits(&tied), logits(&own));
}

/// One thing that a stage is asked to do with a request: go back to some of its tokens, then take these.
#[derive(Clone, Debug)]
struct Part {
    request: u64,
    /// How much of what is held is kept, in 255ths.
    keep: u8,
    tokens: Vec<u32>,
    release: bool,
}

fn part() -> impl Strategy<Value = Part> {
    // Mostly a continuation, as in decoding; sometimes a step back or a start anew.
    let keep = prop_oneof![4 => Just(255u8), 1 => Just(0u8), 2 => any::<u8>()];
    let tokens = prop_oneof![
        2 => prop::collection::vec(0u32..512, 1..2),
        1 => prop::collection::vec(0u32..512, 1..40),
    ];
    (1u64..5, keep, tokens, prop::bool::weighted(0.05)).prop_map(|(request, keep, tokens, release)| Part {
        request,
        keep,
        tokens,
        release,
    })
}

/// A fresh engine's activations of these tokens, prefilled at once and alone.
fn alone(file: &Scratch, tokens: &[u32]) -> Vec<u8> {
    forward(&mut first_half(file), &[(1, 0, tokens)]).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn any_history_of_batches_gives_each_request_the_bits_of_a_prefill_alone(
        batches in prop::collection::vec(prop::collection::vec(part(), 1..5), 1..12),
    ) {
        let file = random_model(3, &RandomConfig::default());
        let mut engine = first_half(&file);
        let width = engine.info().width as usize;
        let mut histories: HashMap<u64, Vec<u32>> = HashMap::new();
        for mut parts in batches {
            parts.sort_by_key(|part| part.request);
            parts.dedup_by_key(|part| part.request);
            for part in parts.iter().filter(|part| part.release) {
                engine.release(request(part.request));
                histories.remove(&part.request);
            }
            for part in &parts {
                let history = histories.entry(part.request).or_default();
                history.truncate(history.len() * usize::from(part.keep) / 255);
            }
            let rows: Vec<(u64, u32, &[u32])> = parts
                .iter()
                .map(|part| (part.request, histories[&part.request].len() as u32, part.tokens.as_slice()))
                .collect();
            let output = forward(&mut engine, &rows).unwrap();
            let mut output = output.as_slice();
            for part in &parts {
                let history = histories.get_mut(&part.request).unwrap();
                history.extend_from_slice(&part.tokens);
                let (mine, rest) = output.split_at(part.tokens.len() * width);
                output = rest;
                let whole = alone(&file, history);
                prop_assert!(
                    mine == &whole[whole.len() - mine.len()..],
                    "request {} with {} tokens has other bits", part.request, history.len()
                );
                prop_assert_eq!(engine.held(request(part.request)), history.len() as u32);
            }
        }
    }
}

/// Counts what an engine tells, and cancels after some of it.
struct Counting {
    told: Cell<u32>,
    cancel_at: u32,
}

impl Watch for Counting {
    fn progress(&self) {
        self.told.set(self.told.get() + 1);
    }

    fn cancelled(&self) -> bool {
        self.told.get() >= self.cancel_at
    }
}

#[test]
fn progress_is_told_in_every_layer_and_a_cancelled_step_leaves_exactly_the_context() {
    let file = random_model(4, &RandomConfig::default());
    let mut engine = LlamaEngine::load(file.path(), None).unwrap();
    let prompt = prompts().swap_remove(2);
    let (head, tail) = prompt.split_at(20);
    let undisturbed = forward(&mut engine, &[(2, 0, &prompt)]).unwrap();

    let watch = Counting { told: Cell::new(0), cancel_at: u32::MAX };
    let batch = Batch { rows: vec![row(1, 0, head.len())] };
    engine.forward(request(0), &batch, &common::bytes(head), &mut Vec::new(), &watch).unwrap();
    let steps = watch.told.get();
    assert!(steps >= 4, "{steps} in four layers");

    for cancel_at in 0..steps {
        let watch = Counting { told: Cell::new(0), cancel_at };
        let batch = Batch { rows: vec![row(1, 20, tail.len())] };
        let mut output = Vec::new();
        let ended = engine.forward(request(0), &batch, &common::bytes(tail), &mut output, &watch);
        assert!(matches!(ended, Err(EngineError::Cancelled)), "cancelled after {cancel_at}: {ended:?}");
        assert!(output.is_empty());
        assert_eq!(engine.held(request(1)), 20, "what the step added is not counted");
    }
    assert_eq!(forward(&mut engine, &[(1, 20, tail)]).unwrap(), undisturbed);
}

#[test]
fn rows_that_cannot_be_computed_are_refused_before_anything_is_touched() {
    let file = random_model(6, &RandomConfig::default());
    let mut engine = first_half(&file);
    forward(&mut engine, &[(1, 0, &[1, 2, 3, 4])]).unwrap();
    let before = alone(&file, &[1, 2, 3, 4, 5]);
    let mut refused = |rows: Vec<connex_engine::Row>, input: usize| {
        let ended = engine.forward(request(0), &Batch { rows }, &vec![0; input * 4], &mut Vec::new(), &());
        assert_eq!((engine.held(request(1)), engine.requests()), (4, 1), "{ended:?}");
        ended.unwrap_err()
    };
    let failed = |error| matches!(error, EngineError::Failed(_));
    assert!(failed(refused(vec![row(2, 0, 0)], 0)), "no tokens");
    assert!(failed(refused(vec![row(1, 5, 1)], 1)), "more context than is held");
    assert!(failed(refused(vec![row(2, 1, 1)], 1)), "a context of a request that is not known");
    assert!(failed(refused(vec![row(1, 0, 1), row(1, 1, 1)], 2)), "a request twice");
    let far = refused(vec![row(1, 0, 1), row(2, u32::MAX, 2)], 3);
    assert!(matches!(far, EngineError::Context { max: 512, .. }), "{far:?}");
    let short = refused(vec![row(1, 0, 3)], 2);
    assert!(matches!(short, EngineError::Input { found: 8, expected: 12 }), "{short:?}");
    let output = forward(&mut engine, &[(1, 4, &[5])]).unwrap();
    assert_eq!(output, before[before.len() - output.len()..], "the request goes on as if nothing had been");
}

#[test]
fn activations_that_are_no_numbers_give_an_error_and_no_token() {
    let file = random_model(7, &RandomConfig::default());
    let mut engine = LlamaEngine::load(file.path(), Some(2..4)).unwrap();
    let width = engine.info().width as usize / 4;
    let input: Vec<u8> = (0..width).flat_map(|_| f32::NAN.to_le_bytes()).collect();
    let batch = Batch { rows: vec![row(1, 0, 1)] };
    let ended = engine.forward(request(0), &batch, &input, &mut Vec::new(), &());
    assert!(matches!(&ended, Err(EngineError::Failed(why)) if why.contains("finite")), "{ended:?}");
    engine.release(request(1));
    let good: Vec<u8> = (0..width).flat_map(|at| (at as f32).to_le_bytes()).collect();
    engine.forward(request(0), &batch, &good, &mut Vec::new(), &()).unwrap();
}

#[test]
fn a_lower_context_limit_is_kept_and_a_full_context_can_be_used() {
    let file = random_model(8, &RandomConfig::default());
    let mut engine = first_half(&file).with_context_max(8);
    assert_eq!(engine.info().context_max, 8);
    forward(&mut engine, &[(1, 0, &[9; 8])]).unwrap();
    let over = forward(&mut engine, &[(1, 8, &[9])]);
    assert!(matches!(over, Err(EngineError::Context { needed: 9, max: 8 })), "{over:?}");
    assert_eq!(
        first_half(&file).with_context_max(100_000).info().context_max,
        512,
        "never above the model's"
    );
}
