use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use super::{cutover, directory};
use crate::StepId;

/// A small message of the control lane.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Control {
    /// The step's payload was read and verified: its slot may be reused.
    Ack {
        /// The step.
        id: StepId,
        /// The attempt whose slot was read.
        attempt: u32,
    },
    /// The step's slot did not hold its payload (another seal, a bad checksum, a failed read): send it again.
    Refetch {
        /// The step.
        id: StepId,
        /// The attempt whose slot was tried.
        attempt: u32,
    },
    /// The submitter no longer wants the step; it frees slots, replies and engine state along the way (P-12).
    Cancel {
        /// The step.
        id: StepId,
    },
    /// What became of the step? Sent when its deadline passed (P-11).
    Ask {
        /// The step.
        id: StepId,
    },
    /// The answer to [`Control::Ask`].
    Answer {
        /// The step.
        id: StepId,
        /// Its state at the answering replica. A finished step is answered by its reply as well.
        state: StepState,
    },
    /// A word from the submitter's application to the replica's, sent again until acknowledged; for what must not
    /// be lost but is no step, such as the release of finished requests.
    Notice {
        /// Counts the sender's notices to this replica from 1.
        seq: u64,
        /// The application's bytes.
        body: Vec<u8>,
    },
    /// Every notice up to this one has arrived.
    NoticeAck {
        /// The last notice that arrived.
        seq: u64,
    },
    /// The sender is alive, and how its work goes.
    Heartbeat(Heartbeat),
    /// Answer with a heartbeat from the engine's own thread.
    Nudge,
    /// The sender leaves on purpose; what it has not answered is to be moved now.
    Goodbye,
    /// The receiver's incarnation is fenced at the sender: nothing it sends is heard until it registers anew.
    Fenced,
    /// To or from the directory.
    Directory(directory::Message),
    /// Between the two sides of a migration, and to its submitters.
    Cutover(cutover::Message),
}

/// What a replica knows of a step that it is asked about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StepState {
    /// Never seen by this incarnation: it has not run here.
    Unseen,
    /// Received, its payload not yet read or its turn not yet come.
    Queued,
    /// Executing, here or further down the pipeline.
    Executing,
    /// Finished; the reply follows.
    Finished,
}

/// A replica's progress, as its heartbeats carry it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Counts this incarnation's heartbeats from 1.
    pub seq: u64,
    /// Steps accepted since the start.
    pub accepted: u64,
    /// Steps completed since the start.
    pub completed: u64,
    /// How long the engine has been on its current step, in milliseconds; 0 when idle.
    pub busy_ms: u32,
    /// Takes new work.
    pub ready: bool,
    /// Is leaving: finishes what it has.
    pub draining: bool,
}
