//! What several of this crate's tests need. Not every test uses all of it.
#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use connex_engine::{Batch, Engine, EngineError, RequestId, Row};
use connex_llama::random::{RandomConfig, write_model};
use connex_llama::{LlamaEngine, fetch};
use connex_protocol::{Incarnation, StepId};

/// A file of a test's own, removed with it.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("connex-llama-{}-{number}.gguf", std::process::id());
        Scratch(std::env::temp_dir().join(name))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

pub(crate) fn random_model(seed: u64, config: &RandomConfig) -> Scratch {
    let file = Scratch::new();
    write_model(file.path(), seed, config).unwrap();
    file
}

/// The real model, or `None` after saying why it is not there.
pub(crate) fn real_model() -> Option<PathBuf> {
    match fetch::fetch(&mut |_| ()) {
        Ok(path) => Some(path),
        Err(error) => {
            println!("skipped: SmolLM2-135M-Instruct can't be had: {error}");
            None
        }
    }
}

pub(crate) fn request(number: u64) -> RequestId {
    StepId { origin: Incarnation::from_bits(0xA), seq: number }
}

pub(crate) fn row(number: u64, context: u32, tokens: usize) -> Row {
    Row { request: request(number), context, tokens: tokens as u32, sample: true }
}

pub(crate) fn bytes(tokens: &[u32]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
}

/// Runs a batch of `(request, context, tokens)` through one engine that takes tokens.
pub(crate) fn forward(
    engine: &mut LlamaEngine,
    parts: &[(u64, u32, &[u32])],
) -> Result<Vec<u8>, EngineError> {
    let batch = batch(parts);
    let input: Vec<u8> = parts.iter().flat_map(|(_, _, tokens)| bytes(tokens)).collect();
    let mut output = Vec::new();
    engine.forward(request(0), &batch, &input, &mut output, &())?;
    Ok(output)
}

pub(crate) fn batch(parts: &[(u64, u32, &[u32])]) -> Batch {
    Batch {
        rows: parts.iter().map(|(number, context, tokens)| row(*number, *context, tokens.len())).collect(),
    }
}

/// The logits after each of `parts`, computed by stages cut at these layers.
pub(crate) fn staged_logits(stages: &mut [LlamaEngine], parts: &[(u64, u32, &[u32])]) -> Vec<Vec<f32>> {
    let batch = batch(parts);
    let mut input: Vec<u8> = parts.iter().flat_map(|(_, _, tokens)| bytes(tokens)).collect();
    let (last, earlier) = stages.split_last_mut().unwrap();
    for stage in earlier {
        let mut output = Vec::new();
        stage.forward(request(0), &batch, &input, &mut output, &()).unwrap();
        input = output;
    }
    last.logits(&batch, &input, &()).unwrap()
}

/// The model at `path` as `count` stages.
pub(crate) fn stages(path: &Path, count: u32) -> Vec<LlamaEngine> {
    let layers = connex_llama::inspect(path).unwrap().layers;
    let range = |at: u32| layers * at / count..layers * (at + 1) / count;
    (0..count).map(|at| LlamaEngine::load(path, Some(range(at))).unwrap()).collect()
}

/// The bits of numbers, which `==` on numbers would not compare (`-0.0`).
pub(crate) fn bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    rows.iter().map(|row| row.iter().map(|number| number.to_bits()).collect()).collect()
}
