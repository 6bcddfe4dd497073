use alloc::collections::VecDeque;

use core::time::Duration;

use super::{ASK_AGAIN, ASK_SELDOM, ASK_SOON};
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
    /// The holder refused: it does not know yet what this life does, and nothing was disturbed.
    Refused {
        /// Who says so.
        from: Incarnation,
    },
    /// The holder had fenced, and called the migration off.
    CalledOff {
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
///
/// | what it hears | asks |
/// | --- | --- |
/// | who holds the identity, and that is news | that one, at once |
/// | nothing | again after [`ASK_AGAIN`] |
/// | refused | again after [`ASK_SOON`] |
/// | called off | again after [`ASK_AGAIN`], and twice as long each time, up to [`ASK_SELDOM`]: each attempt stops the source |
/// | a word of anybody but the holder | – |
/// | that it holds the identity, or never will | never more |
#[derive(Clone, Debug, Default)]
pub struct Target {
    asking: Option<Asking>,
    settled: bool,
    outputs: VecDeque<TargetOutput>,
}

#[derive(Clone, Copy, Debug)]
struct Asking {
    holder: Incarnation,
    epoch: Epoch,
    again: Instant,
    /// How long to wait when it is called off next.
    rest: Duration,
}

impl Target {
    fn ask(&mut self, now: Instant, holder: Incarnation, epoch: Epoch, rest: Duration) {
        self.asking = Some(Asking { holder, epoch, again: now + ASK_AGAIN, rest });
        self.outputs.push_back(TargetOutput::Ask { holder, epoch });
    }

    fn on_shadowing(&mut self, now: Instant, holder: Incarnation, epoch: Epoch) {
        if self.asking.is_none_or(|asking| (asking.holder, asking.epoch) != (holder, epoch)) {
            self.ask(now, holder, epoch, ASK_AGAIN);
        }
    }
}

impl Machine for Target {
    type Input = TargetInput;
    type Output = TargetOutput;

    fn handle(&mut self, now: Instant, input: TargetInput) {
        if self.settled {
            return;
        }
        match (input, &mut self.asking) {
            (TargetInput::Settled, _) => (self.asking, self.settled) = (None, true),
            (TargetInput::Shadowing { holder, epoch }, _) => self.on_shadowing(now, holder, epoch),
            (TargetInput::Refused { from }, Some(asking)) if from == asking.holder => {
                asking.again = now + ASK_SOON;
            }
            (TargetInput::CalledOff { from }, Some(asking)) if from == asking.holder => {
                asking.again = now + asking.rest;
                asking.rest = (asking.rest * 2).min(ASK_SELDOM);
            }
            (TargetInput::Tick, Some(asking)) if asking.again <= now => {
                let Asking { holder, epoch, rest, .. } = *asking;
                self.ask(now, holder, epoch, rest);
            }
            (TargetInput::Refused { .. } | TargetInput::CalledOff { .. } | TargetInput::Tick, _) => {}
        }
    }

    fn poll(&mut self) -> Option<TargetOutput> {
        self.outputs.pop_front()
    }

    fn deadline(&self) -> Option<Instant> {
        self.asking.map(|asking| asking.again)
    }
}
