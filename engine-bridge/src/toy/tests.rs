use std::cell::Cell;

use connex_protocol::{Incarnation, StepId};

use super::*;
use crate::{Batch, Engine, EngineError, Row, Watch, conformance, local};

const LAYERS: u32 = 8;

fn config(layers: Range<u32>) -> ToyConfig {
    ToyConfig { layers, layers_total: LAYERS, context_max: 100, ..ToyConfig::stage(0, 1) }
}

fn engine(config: ToyConfig) -> Box<dyn Engine> {
    Box::new(ToyEngine::new(config).unwrap())
}

fn id(seq: u64) -> StepId {
    StepId { origin: Incarnation::from_bits(9), seq }
}

fn row(request: u64, context: u32, tokens: u32) -> Row {
    Row { request: id(request), context, tokens, sample: true }
}

fn bytes(tokens: &[u32]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
}

fn token(engine: &mut dyn Engine, row: Row, tokens: &[u32]) -> u32 {
    let mut output = Vec::new();
    engine.forward(id(1), &Batch { rows: vec![row] }, &bytes(tokens), &mut output, &()).unwrap();
    u32::from_le_bytes(output.try_into().unwrap())
}

#[test]
fn the_toy_keeps_the_contract_at_every_width() {
    for width in [8, 13, 64, 1000] {
        let prompts = [vec![1, 2, 3, 4, 5, 6, 7], vec![7, 6, 5, 4], vec![0, 0, 0, 0, 0, 1]];
        let make = |layers| engine(ToyConfig { width, ..config(layers) });
        conformance::check(&make, &prompts, 16);
    }
}

#[test]
fn state_that_is_missing_doubled_reordered_or_anothers_changes_the_token() {
    let right = expected(LAYERS, &[10, 20, 30, 40], 1)[0];
    let mut toy = engine(config(0..8));
    token(&mut *toy, row(1, 0, 3), &[10, 20, 30]);
    assert_eq!(token(&mut *toy, row(1, 3, 1), &[40]), right);
    assert_ne!(token(&mut *toy, row(2, 3, 1), &[40]), right, "missing");
    assert_ne!(token(&mut *toy, row(1, 2, 1), &[40]), right, "one token lost");
    token(&mut *toy, row(3, 0, 4), &[10, 20, 30, 30]);
    assert_ne!(token(&mut *toy, row(3, 4, 1), &[40]), right, "doubled");
    token(&mut *toy, row(4, 0, 3), &[10, 30, 20]);
    assert_ne!(token(&mut *toy, row(4, 3, 1), &[40]), right, "reordered");
    token(&mut *toy, row(5, 0, 3), &[10, 20, 31]);
    assert_ne!(token(&mut *toy, row(5, 3, 1), &[40]), right, "another's");
}

#[test]
fn layers_in_the_wrong_place_change_the_token() {
    let mut swapped = [engine(config(0..4)), engine(ToyConfig { layers_total: 6, ..config(2..6) })];
    let batch = Batch { rows: vec![row(1, 0, 2)] };
    let mut activations = Vec::new();
    swapped[0].forward(id(1), &batch, &bytes(&[1, 2]), &mut activations, &()).unwrap();
    let mut output = Vec::new();
    swapped[1].forward(id(1), &batch, &activations, &mut output, &()).unwrap();
    assert_ne!(output, bytes(&expected(8, &[1, 2], 1)));
}

#[test]
fn bytes_torn_between_stages_are_refused_and_change_nothing() {
    let (mut first, mut last) = (engine(config(0..4)), engine(config(4..8)));
    let batch = Batch { rows: vec![row(1, 0, 2)] };
    let mut activations = Vec::new();
    first.forward(id(1), &batch, &bytes(&[1, 2]), &mut activations, &()).unwrap();
    let mut torn = activations.clone();
    torn[..40].copy_from_slice(&activations[64..104]);
    let error = last.forward(id(1), &batch, &torn, &mut Vec::new(), &()).unwrap_err();
    assert!(matches!(error, EngineError::Failed(_)));
    assert_eq!(last.held(id(1)), 0);
    let mut output = Vec::new();
    last.forward(id(1), &batch, &activations, &mut output, &()).unwrap();
    assert_eq!(output, bytes(&expected(LAYERS, &[1, 2], 1)));
}

#[test]
fn planted_loss_of_state_shows_in_the_tokens() {
    for loses_state in [false, true] {
        let mut engines = [engine(ToyConfig { loses_state, ..config(0..8) })];
        let output = local::run(&mut engines, &[vec![42]], 20).unwrap();
        assert_eq!(output[0] != expected(LAYERS, &[42], 20), loses_state);
        assert_eq!(output[0][..15], expected(LAYERS, &[42], 20)[..15]);
    }
}

/// Cancels after so many looks.
#[derive(Default)]
struct Impatient {
    looks: Cell<u32>,
    progress: Cell<u32>,
}

impl Watch for Impatient {
    fn progress(&self) {
        self.progress.set(self.progress.get() + 1);
    }

    fn cancelled(&self) -> bool {
        self.looks.set(self.looks.get() + 1);
        self.looks.get() > 3
    }
}

#[test]
fn a_long_step_sees_its_cancel_and_says_that_it_is_alive_unless_it_hangs() {
    for (busy, silent) in [(false, false), (true, false), (false, true), (true, true)] {
        let step_time = Duration::from_secs(3600);
        let mut toy = engine(ToyConfig { step_time, busy, silent, ..config(0..8) });
        let watch = Impatient::default();
        let batch = Batch { rows: vec![row(1, 0, 1)] };
        let error = toy.forward(id(1), &batch, &bytes(&[1]), &mut Vec::new(), &watch).unwrap_err();
        assert!(matches!(error, EngineError::Cancelled));
        assert_eq!(watch.progress.get() > 0, !silent);
        assert_eq!(toy.held(id(1)), 0, "it was cancelled before it applied anything");
    }
}

#[test]
fn a_toy_that_cannot_be_is_refused() {
    assert!(ToyEngine::new(config(0..9)).is_err());
    assert!(ToyEngine::new(config(3..3)).is_err());
    assert!(ToyEngine::new(ToyConfig { width: 7, ..config(0..8) }).is_err());
}
