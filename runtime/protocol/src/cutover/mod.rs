//! A migration: the same identity goes on in another process, by agreement of both.
//!
//! The *target* registers as the shadow of an identity and asks its holder, the *source*, to fence. The source tells
//! its *submitters* to hold their steps, gives back what has not begun, lets what executes end, waits until they have
//! heard every answer, and has the directory make the target the holder in one step. The submitters hear of that from
//! the directory, and send what they held back to the new address.
//!
//! | what happens | source | target | submitters |
//! | --- | --- | --- | --- |
//! | the source dies before the directory's change | – | holds the identity when the lease is over | move their steps when they see it die |
//! | the source dies after it | – | holds it | go to the target |
//! | the source hangs | its lease runs out | asks again, and holds it when the lease is over | stop holding after [`HOLD_MAX`]; its silence moves their steps |
//! | what executes does not end | calls it off after [`FENCE_MAX`] and serves on | asks again | go on when told, or after [`HOLD_MAX`] |
//! | the target dies before the change | the directory refuses it: serves on | – | go on when told |
//! | the target dies after it | is over | the lease runs out | move their steps when they see it die |
//! | the directory is away | waits fenced for its word, or until its lease is over | waits | stop holding after [`HOLD_MAX`] |
//! | a stranger asks, or asks for another epoch | refuses | – | – |
//! | it is asked again | goes on | – | – |
//! | a stranger says to hold, or to go on | – | – | ignored |
//! | a submitter dies or hangs | waits for its word no longer than [`SETTLE_MAX`] | – | – |
//! | a message is lost | calls it off, or goes on when asked again | asks again | stop holding after [`HOLD_MAX`] |

mod source;
mod submitter;
mod target;

pub use source::{Source, SourceInput, SourceOutput};
pub use submitter::{Submitter, SubmitterInput, SubmitterOutput};
pub use target::{Target, TargetInput, TargetOutput};

use core::time::Duration;

/// How long a source waits for what it executes; then it calls the migration off.
pub const FENCE_MAX: Duration = Duration::from_secs(2);

/// How long a source waits until its submitters have heard every answer. One that has not by then sends the step to the
/// target as well, which runs it again.
pub const SETTLE_MAX: Duration = Duration::from_millis(250);

/// How long a source that has handed over waits for its submitters to hear of it.
pub const PART_MAX: Duration = Duration::from_secs(1);

/// How often a target asks its source again.
pub const ASK_AGAIN: Duration = Duration::from_millis(500);

/// How long a submitter holds its steps back at most: longer than a source waits for what it executes.
pub const HOLD_MAX: Duration = Duration::from_secs(4);

#[cfg(test)]
mod tests;
