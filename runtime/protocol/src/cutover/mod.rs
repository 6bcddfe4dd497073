//! A migration: the same identity goes on in another process, by agreement of both.
//!
//! The *target* registers as the shadow of an identity and asks its holder, the *source*, to fence. The source tells
//! its *submitters* to hold their steps, gives back what has not begun, lets what executes end, waits until they have
//! heard every answer, and has the directory make the target the holder in one step. The submitters hear of that from
//! the directory, and send what they held back to the new address.
//!
//! | what happens | source | target | submitters |
//! | --- | --- | --- | --- |
//! | the source dies before the directory's change | – | holds the identity when the lease is over, or its exit is reported | move their steps when they see it die |
//! | the source dies after it | – | holds it | go to the target |
//! | the source hangs | its lease runs out; when it is back it learns that, and nobody hears it | asks again, and holds it when the lease is over | stop holding after [`HOLD_MAX`]; its silence moves their steps |
//! | what executes does not end | calls it off after [`FENCE_MAX`] and serves on | asks again, less and less often | go on when told, when it says that it is ready, or after [`HOLD_MAX`] |
//! | the target dies before the change | the directory refuses it: serves on | – | go on when told, or when it says that it is ready |
//! | the target dies after it | is over | the lease runs out, or its exit is reported | move their steps when they see it die |
//! | a second target comes | is asked by the first alone | waits until the first holds it, and asks that one | – |
//! | the directory is known to be away | refuses; has it begun, it calls it off and serves on | asks again | go on |
//! | the directory falls silent once asked | neither serves nor ends until it hears: nobody knows who holds the identity | waits | stop holding after [`HOLD_MAX`]; the source gives back what they send, which waits for either |
//! | the directory forgot the target | is told that it keeps the identity: serves on | waits anew, and asks again | go on |
//! | a stranger asks, or for another epoch, or before the directory's word on the target has arrived | refuses; nothing is disturbed | asks again after [`ASK_SOON`] | – |
//! | it is asked again, early or late | goes on; one that is over refuses | – | – |
//! | a stranger says to hold, to go on, or that all was heard | ignored | ignored | ignored |
//! | a source says to hold again and again | – | – | hold no longer than for the first time |
//! | a submitter dies or hangs | waits for its word no longer than [`SETTLE_MAX`], and to part from it no longer than [`PART_MAX`] | – | – |
//! | a submitter comes in the middle | gives its steps back | – | its steps wait until either is ready |
//! | a message is lost | calls it off, or goes on when asked again | asks again | stop holding after [`HOLD_MAX`], or when the source says that it is ready |
//! | a word of an earlier attempt comes late | ignored: each attempt has its number | – | – |

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

/// How often a target asks a source that says nothing.
pub const ASK_AGAIN: Duration = Duration::from_millis(500);

/// How soon a target asks a source again that refused: the directory's word may not have reached it yet.
pub const ASK_SOON: Duration = Duration::from_millis(100);

/// How seldom a target asks a source at most that calls it off again and again.
pub const ASK_SELDOM: Duration = Duration::from_secs(8);

/// How long a submitter holds its steps back at most: longer than a source waits for what it executes.
pub const HOLD_MAX: Duration = Duration::from_secs(4);

#[cfg(test)]
mod tests;
