use alloc::collections::{BTreeMap, VecDeque};
use core::time::Duration;

use super::HOLD_MAX;
use crate::{Incarnation, Instant, Machine, ReplicaNo};

/// What happens to a submitter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubmitterInput {
    /// A source says to hold the steps for its identity.
    Pausing {
        /// Who says so.
        from: Incarnation,
        /// Its replica number.
        replica: ReplicaNo,
        /// Who holds the identity, as far as is known here.
        holder: Option<Incarnation>,
    },
    /// A source says that its epoch goes on.
    Abort {
        /// Who says so.
        from: Incarnation,
        /// Its replica number.
        replica: ReplicaNo,
    },
    /// A replica takes steps, which it did not before: it says so in its heartbeats.
    Ready {
        /// Its life.
        from: Incarnation,
        /// Its number.
        replica: ReplicaNo,
    },
    /// The directory says that another life holds the identity.
    Moved {
        /// The replica.
        replica: ReplicaNo,
        /// The life that holds it now.
        to: Incarnation,
    },
    /// A life is over, or can't be reached.
    Down(Incarnation),
    /// Time passed.
    Tick,
}

/// What a submitter wants done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubmitterOutput {
    /// Hold back what is for this replica.
    Pause(ReplicaNo),
    /// Let it go on.
    Resume {
        /// The replica.
        replica: ReplicaNo,
        /// The life that had asked for the pause, and how long it was, if the identity has moved.
        moved: Option<(Incarnation, Duration)>,
    },
}

/// The side that holds its steps back while an identity moves, and never for longer than [`HOLD_MAX`]. To go on too
/// early costs no step: a source that is fenced gives it back.
///
/// | what it hears | from the holder | from whom it holds for | from anybody else |
/// | --- | --- | --- | --- |
/// | pausing, while it holds nothing | pause | – | – |
/// | pausing, while it holds | – | – | – |
/// | abort, or that it is ready again | resume | resume | ignored while it holds |
/// | down | resume | resume | – |
/// | the identity has moved | – | resume | – |
/// | [`HOLD_MAX`] has passed | resume | resume | – |
#[derive(Clone, Debug, Default)]
pub struct Submitter {
    holds: BTreeMap<ReplicaNo, Hold>,
    outputs: VecDeque<SubmitterOutput>,
}

#[derive(Clone, Copy, Debug)]
struct Hold {
    by: Incarnation,
    since: Instant,
}

impl Submitter {
    fn resume(&mut self, replica: ReplicaNo, moved: Option<(Incarnation, Duration)>) {
        if self.holds.remove(&replica).is_some() {
            self.outputs.push_back(SubmitterOutput::Resume { replica, moved });
        }
    }

    fn held_by(&self, incarnation: Incarnation) -> Option<ReplicaNo> {
        self.holds.iter().find(|(_, hold)| hold.by == incarnation).map(|(replica, _)| *replica)
    }
}

impl Machine for Submitter {
    type Input = SubmitterInput;
    type Output = SubmitterOutput;

    fn handle(&mut self, now: Instant, input: SubmitterInput) {
        match input {
            SubmitterInput::Pausing { from, replica, holder } if holder == Some(from) => {
                let hold = Hold { by: from, since: now };
                match self.holds.get_mut(&replica) {
                    // To say it again holds nothing for longer.
                    Some(held) if held.by == from => {}
                    Some(held) => *held = hold,
                    None => {
                        self.holds.insert(replica, hold);
                        self.outputs.push_back(SubmitterOutput::Pause(replica));
                    }
                }
            }
            SubmitterInput::Pausing { .. } => {}
            SubmitterInput::Abort { from, replica } | SubmitterInput::Ready { from, replica } => {
                // Also if it holds nothing any more: what the source gave back meanwhile may go there again.
                if self.holds.get(&replica).is_none_or(|hold| hold.by == from) {
                    self.holds.remove(&replica);
                    self.outputs.push_back(SubmitterOutput::Resume { replica, moved: None });
                }
            }
            SubmitterInput::Down(from) => {
                if let Some(replica) = self.held_by(from) {
                    self.resume(replica, None);
                }
            }
            SubmitterInput::Moved { replica, to } => {
                if let Some(hold) = self.holds.get(&replica).filter(|hold| hold.by != to) {
                    let moved = Some((hold.by, now.since(hold.since)));
                    self.resume(replica, moved);
                }
            }
            SubmitterInput::Tick => {
                let over = |hold: &Hold| hold.since + HOLD_MAX <= now;
                let due: alloc::vec::Vec<ReplicaNo> =
                    self.holds.iter().filter(|(_, hold)| over(hold)).map(|(replica, _)| *replica).collect();
                for replica in due {
                    self.resume(replica, None);
                }
            }
        }
    }

    fn poll(&mut self) -> Option<SubmitterOutput> {
        self.outputs.pop_front()
    }

    fn deadline(&self) -> Option<Instant> {
        self.holds.values().map(|hold| hold.since + HOLD_MAX).min()
    }
}
