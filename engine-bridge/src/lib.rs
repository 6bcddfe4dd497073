//! What computes: the contract between a pipeline stage and the engine that runs its layers.
//!
//! An engine holds per-request state (a KV cache) and forwards *batches*: rows of different requests, prefill and
//! decode mixed. It knows nothing of replicas, steps on other machines or transports; the stage that drives it
//! checks contexts before it calls (P-9), so that an engine never computes on state that it does not hold.

pub mod conformance;
mod contract;
pub mod local;
pub mod recorded;
pub mod schedule;
pub mod stage;
pub mod toy;

pub use contract::{Batch, Engine, EngineError, EngineInfo, RequestId, Row, Text, Watch};
