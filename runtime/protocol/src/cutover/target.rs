use alloc::collections::VecDeque;

use super::ASK_AGAIN;
use crate::{Epoch, Incarnation, Instant, Machine};

/// What happens to a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetInput {
    /// The directory says who holds the identity that this life waits for.
    Shadowing {
        /// The holder.
        holder: Incarnation,
        /// Under which epoch.
        epoch: Epoch,
    },
    /// This life holds the identity, or never will.
    Settled,
    /// The holder refused, or called the migration off.
    NotNow {
        /// Who says so.
        from: Incarnation,
    },
    /// Time passed.
    Tick,
}

/// What a target wants done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetOutput {
    /// Ask the holder to fence this epoch.
    Ask {
        /// Whom.
        holder: Incarnation,
        /// Which epoch is to end.
        epoch: Epoch,
    },
}

/// The side that takes an identity over: it asks whoever holds it, again and again, until it holds it itself. A
/// holder that can't be reached, or does not answer, loses its lease in the end, and the directory grants it then.
#[derive(Clone, Debug, Default)]
pub struct Target {
    asking: Option<(Incarnation, Epoch, Instant)>,
    settled: bool,
    outputs: VecDeque<TargetOutput>,
}

impl Target {
    fn ask(&mut self, now: Instant, holder: Incarnation, epoch: Epoch) {
        self.asking = Some((holder, epoch, now + ASK_AGAIN));
        self.outputs.push_back(TargetOutput::Ask { holder, epoch });
    }
}

impl Machine for Target {
    type Input = TargetInput;
    type Output = TargetOutput;

    fn handle(&mut self, now: Instant, input: TargetInput) {
        match (input, self.asking) {
            _ if self.settled => {}
            (TargetInput::Settled, _) => (self.asking, self.settled) = (None, true),
            (TargetInput::Shadowing { holder, epoch }, Some((known, at, _)))
                if (known, at) == (holder, epoch) => {}
            (TargetInput::Shadowing { holder, epoch }, _) => self.ask(now, holder, epoch),
            (TargetInput::NotNow { from }, Some((holder, epoch, _))) if from == holder => {
                self.asking = Some((holder, epoch, now + ASK_AGAIN));
            }
            (TargetInput::Tick, Some((holder, epoch, again))) if again <= now => self.ask(now, holder, epoch),
            (TargetInput::NotNow { .. } | TargetInput::Tick, _) => {}
        }
    }

    fn poll(&mut self) -> Option<TargetOutput> {
        self.outputs.pop_front()
    }

    fn deadline(&self) -> Option<Instant> {
        self.asking.map(|(_, _, again)| again)
    }
}
