//! A deterministic automaton in place of a model: microseconds a token, and an output that is right only if every
//! layer really saw every token of its request, once and in order.
//!
//! Each layer holds a word per request and absorbs into it, one after another, the activations that it is given; what
//! leaves the layer is a mix of that word. State that is missing, doubled, reordered or another request's changes
//! every token from there on. Between stages a token is [`ToyConfig::width`] bytes, and all of them are checked.

mod automaton;
mod engine;
mod expected;
mod text;

use std::ops::Range;
use std::time::Duration;

pub use engine::ToyEngine;
pub use expected::expected;
pub use text::ToyText;

/// The automaton's vocabulary.
pub const VOCABULARY: u32 = 1 << 16;

/// What a toy engine is.
#[derive(Debug)]
pub struct ToyConfig {
    /// The layers of this stage.
    pub layers: Range<u32>,
    /// The layers of the whole automaton.
    pub layers_total: u32,
    /// Bytes per token between stages; at least 8.
    pub width: u32,
    /// The most tokens that a request may hold.
    pub context_max: u32,
    /// Tokens that end a generation.
    pub stop_tokens: Vec<u32>,
    /// How long each step takes beyond its arithmetic, so that a kill or a cancel finds it executing.
    pub step_time: Duration,
    /// How much longer it takes for each new token in it.
    pub token_time: Duration,
    /// Keeps the core busy for that time instead of sleeping.
    pub busy: bool,
    /// Reports no progress for that time, like an engine that hangs.
    pub silent: bool,
    /// A bug put in on purpose, so that a harness can show that it would notice: every 16th step first loses what its
    /// requests held, without saying so.
    pub loses_state: bool,
}

impl ToyConfig {
    /// The layers of one of several stages that have two layers each.
    pub fn stage(stage: u16, stages: u16) -> Self {
        let stage = u32::from(stage);
        ToyConfig {
            layers: stage * 2..stage * 2 + 2,
            layers_total: u32::from(stages) * 2,
            width: 64,
            context_max: 1 << 16,
            stop_tokens: Vec::new(),
            step_time: Duration::ZERO,
            token_time: Duration::ZERO,
            busy: false,
            silent: false,
            loses_state: false,
        }
    }
}

#[cfg(test)]
mod tests;
