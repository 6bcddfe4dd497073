//! A llama-family GGUF as a Connex engine, on the CPU.
//!
//! Any contiguous range of the model's layers is one engine: the embedding belongs to the first, the final norm and
//! the head to the last, which samples greedily and so sends a token instead of a row of logits.
//!
//! Every output is bit-equal however its work is cut: whatever else is in the batch, prefilled at once or token by
//! token, in one stage or in many, at first or after a recompute. That rests on three choices. Each number of a
//! matrix product is one call of one kernel (candle's scalar product of Q8_0 blocks) on one row. Attention is our
//! own, and sums each row in one fixed order. Everything else works on one token at a time.
//!
//! The bits also depend on the processor: candle's kernel differs between those with and without AVX2. Replicas that
//! are to stand in for each other without a trace therefore run on processors of one kind.

mod engine;
mod error;
pub mod fetch;
mod file;
mod kernel;
mod metadata;
pub mod random;
mod text;
mod weights;

pub use engine::LlamaEngine;
pub use error::LoadError;
pub use file::{ModelInfo, inspect};
pub use text::GgufText;

/// The environment that a process which runs an engine should set before it starts: one thread for candle. The
/// engine computes on its caller's thread and needs no other, and stages that share a machine's processors only get
/// into each other's way with more.
pub const ENVIRONMENT: [(&str, &str); 1] = [("RAYON_NUM_THREADS", "1")];
