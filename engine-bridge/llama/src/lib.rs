//! A llama-family GGUF as a Connex engine, on the CPU.
//!
//! Any contiguous range of the model's layers is one engine: the embedding belongs to the first, the final norm and
//! the head to the last, which samples greedily and so sends a token instead of a row of logits.
//!
//! Every output is bit-equal however its work is cut: whatever else is in the batch, prefilled at once or token by
//! token, in one stage or in many, at first or after a recompute. That rests on three choices. Each row of a
//! quantised product depends on that row alone (candle's kernels, called on Q8_0 blocks for every shape). Attention
//! is our own, and sums each row in one fixed order. Everything else works on one token at a time.

mod engine;
mod error;
pub mod fetch;
mod file;
mod kernel;
pub mod random;
mod text;
mod weights;

pub use engine::LlamaEngine;
pub use error::LoadError;
pub use file::{ModelInfo, inspect};
pub use text::GgufText;
