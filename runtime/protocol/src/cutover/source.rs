use alloc::collections::VecDeque;

use super::{FENCE_MAX, PART_MAX, SETTLE_MAX};
use crate::{Epoch, Incarnation, Instant, Machine};

/// What happens to a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceInput {
    /// A target asks for the identity.
    Asked {
        /// Who sent it.
        from: Incarnation,
        /// The epoch that is to end.
        epoch: Epoch,
        /// Who is to hold the identity.
        to: Incarnation,
        /// The epoch that this life holds for certain.
        held: Option<Epoch>,
    },
    /// Nothing executes any more, since this fence.
    Quiet(u64),
    /// Every submitter has heard every answer.
    Settled,
    /// The directory has made the target the holder.
    Handed,
    /// The directory has not, and will not.
    Kept,
    /// The identity is not this life's any more, and not by this migration.
    Lost,
    /// Every submitter has parted.
    Parted,
    /// Time passed.
    Tick,
}

/// What a source wants done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceOutput {
    /// Tell this target: not now.
    Refuse {
        /// Whom.
        to: Incarnation,
        /// The epoch that it named.
        epoch: Epoch,
    },
    /// Tell every submitter to hold its steps: in front of everything that the fence gives back.
    Pause(Epoch),
    /// Begin nothing more and give back what has not begun; [`SourceInput::Quiet`] with this number is the end.
    Fence(u64),
    /// Ask the submitters whether they have heard every answer.
    Settle(Epoch),
    /// Have the directory make this life the holder.
    Hand(Incarnation),
    /// Serve again.
    Unfence,
    /// Tell every submitter and the target that the epoch goes on.
    Abort(Epoch),
    /// Wait until the submitters have parted: the end of this process would look like a death to them.
    Part,
    /// This life has nothing to do any more.
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Serving,
    Fencing { epoch: Epoch, to: Incarnation, until: Instant },
    Settling { epoch: Epoch, to: Incarnation, until: Instant },
    Handing { epoch: Epoch, to: Incarnation },
    Parting { until: Instant },
    Over,
}

/// The side that gives an identity up.
///
/// | state | asked by its target | quiet | settled | handed | kept | lost | time |
/// | --- | --- | --- | --- | --- | --- | --- | --- |
/// | serving | pause, fence: fencing | – | – | – | – | over | – |
/// | fencing | – | settle: settling | – | – | – | over | unfence, abort: serving |
/// | settling | – | – | hand: handing | – | – | over | hand: handing |
/// | handing | – | – | – | part: parting | unfence, abort: serving | over | – |
/// | parting | – | – | – | – | – | over | over |
/// | over | refuse | – | – | – | – | – | – |
///
/// Whoever else asks, or for another epoch than the one held, is refused. While the directory is away nobody knows
/// who holds the identity, so a source that is handing neither serves nor ends until it hears.
#[derive(Clone, Debug)]
pub struct Source {
    state: State,
    fences: u64,
    outputs: VecDeque<SourceOutput>,
}

impl Default for Source {
    fn default() -> Self {
        Source { state: State::Serving, fences: 0, outputs: VecDeque::new() }
    }
}

impl Source {
    fn on_asked(
        &mut self,
        now: Instant,
        from: Incarnation,
        epoch: Epoch,
        to: Incarnation,
        held: Option<Epoch>,
    ) {
        match self.state {
            State::Serving if from == to && held == Some(epoch) => {
                self.fences += 1;
                self.state = State::Fencing { epoch, to, until: now + FENCE_MAX };
                self.outputs.extend([SourceOutput::Pause(epoch), SourceOutput::Fence(self.fences)]);
            }
            State::Fencing { epoch: ends, to: next, .. }
            | State::Settling { epoch: ends, to: next, .. }
            | State::Handing { epoch: ends, to: next }
                if (ends, next, from) == (epoch, to, to) => {}
            _ => self.outputs.push_back(SourceOutput::Refuse { to: from, epoch }),
        }
    }

    fn hand(&mut self, epoch: Epoch, to: Incarnation) {
        self.state = State::Handing { epoch, to };
        self.outputs.push_back(SourceOutput::Hand(to));
    }

    fn call_off(&mut self, epoch: Epoch) {
        self.state = State::Serving;
        self.outputs.extend([SourceOutput::Unfence, SourceOutput::Abort(epoch)]);
    }

    fn end(&mut self) {
        self.state = State::Over;
        self.outputs.push_back(SourceOutput::Over);
    }
}

impl Machine for Source {
    type Input = SourceInput;
    type Output = SourceOutput;

    fn handle(&mut self, now: Instant, input: SourceInput) {
        match (input, self.state) {
            (SourceInput::Asked { from, epoch, to, held }, _) => self.on_asked(now, from, epoch, to, held),
            (SourceInput::Quiet(fence), State::Fencing { epoch, to, .. }) if fence == self.fences => {
                self.state = State::Settling { epoch, to, until: now + SETTLE_MAX };
                self.outputs.push_back(SourceOutput::Settle(epoch));
            }
            (SourceInput::Settled, State::Settling { epoch, to, .. }) => self.hand(epoch, to),
            (SourceInput::Tick, State::Settling { epoch, to, until }) if until <= now => self.hand(epoch, to),
            (SourceInput::Handed, State::Handing { .. }) => {
                self.state = State::Parting { until: now + PART_MAX };
                self.outputs.push_back(SourceOutput::Part);
            }
            (SourceInput::Kept, State::Handing { epoch, .. }) => self.call_off(epoch),
            (SourceInput::Tick, State::Fencing { epoch, until, .. }) if until <= now => self.call_off(epoch),
            (SourceInput::Tick, State::Parting { until }) if until <= now => self.end(),
            (SourceInput::Parted, State::Parting { .. }) => self.end(),
            // It serves no more: a fence that it may have stays.
            (SourceInput::Lost, _) => self.state = State::Over,
            _ => {}
        }
    }

    fn poll(&mut self) -> Option<SourceOutput> {
        self.outputs.pop_front()
    }

    fn deadline(&self) -> Option<Instant> {
        match self.state {
            State::Fencing { until, .. } | State::Settling { until, .. } | State::Parting { until } => {
                Some(until)
            }
            State::Serving | State::Handing { .. } | State::Over => None,
        }
    }
}
