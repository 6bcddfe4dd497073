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
    /// Source to target: not now.
    Refused {
        /// The epoch that the request named.
        epoch: Epoch,
    },
    /// Source to its submitters, in front of everything that it gives back: hold your steps for this identity.
    Pausing {
        /// The epoch that ends.
        epoch: Epoch,
    },
    /// Source to its submitters and its target: the migration is off, the epoch goes on.
    Abort {
        /// The epoch that goes on.
        epoch: Epoch,
    },
    /// Source to its submitters, behind every answer: nothing of the epoch executes any more.
    Quiet {
        /// The epoch that ends.
        epoch: Epoch,
        /// Which attempt of the source's this is.
        fence: u64,
    },
    /// Submitter to source: everything in front of the [`Message::Quiet`] has arrived.
    Seen {
        /// The epoch that ends.
        epoch: Epoch,
        /// The number in that [`Message::Quiet`].
        fence: u64,
    },
}
