use std::ops::Range;

use connex_protocol::StepId;
use serde::{Deserialize, Serialize};

/// A request: the id of the client's step that asked for it.
pub type RequestId = StepId;

/// What an engine is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineInfo {
    /// The model's name, as in a logical id.
    pub model: String,
    /// The layers of this stage.
    pub layers: Range<u32>,
    /// How many layers the whole model has.
    pub layers_total: u32,
    /// Bytes per token between stages.
    pub width: u32,
    /// The most tokens that a request may hold, prompt and output together.
    pub context_max: u32,
    /// Tokens that end a generation.
    pub stop_tokens: Vec<u32>,
    /// Tokens are below this number.
    pub vocabulary: u32,
}

impl EngineInfo {
    /// Takes token ids (four bytes each, little-endian) instead of activations.
    pub fn is_first(&self) -> bool {
        self.layers.start == 0
    }

    /// Yields one token id per sampled row instead of activations.
    pub fn is_last(&self) -> bool {
        self.layers.end == self.layers_total
    }
}

/// One request's part of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// The request.
    pub request: RequestId,
    /// How many tokens of it the stage must hold already. What it holds beyond is dropped; 0 replaces everything.
    pub context: u32,
    /// How many new tokens the batch carries for it; at least 1.
    pub tokens: u32,
    /// The last stage samples a token after the row's last one.
    pub sample: bool,
}

/// Rows that are computed together. No request appears twice.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Batch {
    /// The rows, in the order in which their tokens lie in the input.
    pub rows: Vec<Row>,
}

impl Batch {
    /// How many new tokens the batch carries.
    pub fn tokens(&self) -> usize {
        self.rows.iter().map(|row| row.tokens as usize).sum()
    }

    /// How many tokens the last stage samples for it.
    pub fn samples(&self) -> usize {
        self.rows.iter().filter(|row| row.sample).count()
    }
}

/// Why an engine failed a batch. The state of the batch's requests is then undefined and is released.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The input's length is not what the batch says.
    #[error("the input has {found} bytes, the batch asks for {expected}")]
    Input {
        /// What came.
        found: usize,
        /// What was expected.
        expected: usize,
    },
    /// A token id is not in the vocabulary.
    #[error("token {token} is not in the vocabulary of {vocabulary}")]
    Token {
        /// The token.
        token: u32,
        /// The vocabulary's size.
        vocabulary: u32,
    },
    /// A row would grow past the engine's context.
    #[error("the request would hold {needed} tokens, the model's context is {max}: shorten the prompt")]
    Context {
        /// How many it would hold.
        needed: u32,
        /// How many it may.
        max: u32,
    },
    /// The caller's watch said that the step is cancelled.
    #[error("the step was cancelled")]
    Cancelled,
    /// A fault of the engine's own.
    #[error("{0}")]
    Failed(String),
}

/// What an engine tells its stage while it works, and asks of it.
pub trait Watch {
    /// Called once per layer or more often; it shows that the engine is alive.
    fn progress(&self) {}

    /// Whether the step is no longer wanted; the engine may then stop with [`EngineError::Cancelled`].
    fn cancelled(&self) -> bool {
        false
    }
}

impl Watch for () {}

/// A range of a model's layers, with the state of the requests that it serves. One thread drives it.
pub trait Engine: Send {
    /// What it is.
    fn info(&self) -> &EngineInfo;

    /// How many tokens of a request it holds; 0 for one that it does not know.
    fn held(&self, request: RequestId) -> u32;

    /// Computes a batch. `input` is the token ids (first stage) or the activations (`width` bytes a token), row after
    /// row; appended to `output` are the activations of the same tokens, or from the last stage one token id
    /// (four bytes, little-endian) for each row with `sample`.
    ///
    /// A row's `context` never exceeds what is held: the caller has checked. What is held beyond it is dropped
    /// first. The result of a row depends on that row alone, bit for bit, whatever else is in the batch and however
    /// its tokens were split over calls.
    fn forward(
        &mut self,
        step: StepId,
        batch: &Batch,
        input: &[u8],
        output: &mut Vec<u8>,
        watch: &dyn Watch,
    ) -> Result<(), EngineError>;

    /// Forgets a request; nothing happens if it is unknown.
    fn release(&mut self, request: RequestId);

    /// How many requests it holds state for.
    fn requests(&self) -> usize;
}

/// Turns text into a model's tokens and back.
pub trait Text: Send + Sync {
    /// The prompt's tokens, with the model's own template around them where it has one.
    fn encode(&self, prompt: &str) -> Result<Vec<u32>, EngineError>;

    /// The text of generated tokens; a character that is not complete yet is left out.
    fn decode(&self, tokens: &[u32]) -> String;
}
