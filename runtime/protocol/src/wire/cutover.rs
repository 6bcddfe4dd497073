//! The messages of a migration.

use serde::{Deserialize, Serialize};

use crate::{Epoch, Incarnation};

/// Between source, target and submitters while an identity moves to another process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// Target to source: stop serving at this epoch and hand the identity to me.
    Fence {
        /// The epoch that the source holds.
        epoch: Epoch,
        /// Who takes over.
        to: Incarnation,
    },
    /// Source to target: nothing of the epoch is delivered after this.
    Fenced {
        /// The epoch that ended.
        epoch: Epoch,
    },
    /// Either side: the migration is off, the source serves on.
    Abort {
        /// The epoch that goes on.
        epoch: Epoch,
    },
    /// The source no longer serves and the step was not executed here: send it to the successor.
    Moved {
        /// Who serves now.
        to: Incarnation,
    },
}
