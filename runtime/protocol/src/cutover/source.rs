use alloc::collections::{BTreeSet, VecDeque};
use alloc::vec::Vec;

use super::{FENCE_MAX, PART_MAX, SETTLE_MAX};
use crate::{Epoch, Incarnation, Instant, Machine};

/// What happens to a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceInput {
    /// A target asks for the identity.
    Asked {
        /// Who sent it.
        from: Incarnation,
        /// The epoch that is to end.
        epoch: Epoch,
        /// Who is to hold the identity.
        to: Incarnation,
        /// The epoch that this life holds for certain, and can give up now.
        held: Option<Epoch>,
        /// Who waits for the identity, by the directory's word.
        shadow: Option<Incarnation>,
    },
    /// Nothing executes any more.
    Quiet {
        /// Since this fence.
        fence: u64,
        /// Whose steps were here and who can be reached: they may have answers on the way.
        submitters: Vec<Incarnation>,
    },
    /// A submitter has heard every answer.
    Seen {
        /// Which submitter.
        from: Incarnation,
        /// Of this fence.
        fence: u64,
    },
    /// The link to this life ended: it hears no more answers.
    Gone(Incarnation),
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
    /// Ask a submitter whether it has heard every answer.
    Settle {
        /// Whom.
        to: Incarnation,
        /// The epoch that ends.
        epoch: Epoch,
        /// The number to answer with.
        fence: u64,
    },
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

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Serving,
    Fencing(Cutover, Instant),
    Settling(Cutover, Instant, BTreeSet<Incarnation>),
    Handing(Cutover),
    Parting(Instant),
    Over,
}

/// One attempt: the epoch that is to end, and who takes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cutover {
    epoch: Epoch,
    to: Incarnation,
}

/// The side that gives an identity up.
///
/// | state | asked by its target | quiet | the last submitter has seen or is gone | handed | kept | lost | time |
/// | --- | --- | --- | --- | --- | --- | --- | --- |
/// | serving | pause, fence: fencing | – | – | – | – | over | – |
/// | fencing | – | settle: settling | – | – | – | over | unfence, abort: serving |
/// | settling | – | – | hand: handing | – | – | over | hand: handing |
/// | handing | – | – | – | part: parting | unfence, abort: serving | over | – |
/// | parting | refuse | – | – | – | – | over | over |
/// | over | refuse | – | – | – | – | – | – |
///
/// It is asked by its target if the one who asks names itself, the epoch that is held, and is whom the directory names
/// as waiting. Whoever else asks, at any moment, is refused and changes nothing. Once the directory has been asked and
/// does not answer, nobody knows who holds the identity: a source that is handing neither serves nor ends until it
/// hears.
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
    fn begin(&mut self, now: Instant, cutover: Cutover) {
        self.fences += 1;
        self.state = State::Fencing(cutover, now + FENCE_MAX);
        self.outputs.extend([SourceOutput::Pause(cutover.epoch), SourceOutput::Fence(self.fences)]);
    }

    /// The attempt that is under way.
    fn cutover(&self) -> Option<Cutover> {
        match &self.state {
            State::Fencing(cutover, _) | State::Settling(cutover, ..) | State::Handing(cutover) => {
                Some(*cutover)
            }
            State::Serving | State::Parting(_) | State::Over => None,
        }
    }

    fn settle(&mut self, now: Instant, cutover: Cutover, submitters: Vec<Incarnation>) {
        let fence = self.fences;
        let waiting: BTreeSet<Incarnation> = submitters.into_iter().collect();
        let ask = |to: &Incarnation| SourceOutput::Settle { to: *to, epoch: cutover.epoch, fence };
        self.outputs.extend(waiting.iter().map(ask));
        self.state = State::Settling(cutover, now + SETTLE_MAX, waiting);
        self.hand_if_settled();
    }

    /// One submitter less to wait for.
    fn settled(&mut self, submitter: Incarnation) {
        if let State::Settling(_, _, waiting) = &mut self.state {
            waiting.remove(&submitter);
            self.hand_if_settled();
        }
    }

    fn hand_if_settled(&mut self) {
        if let State::Settling(cutover, _, waiting) = &self.state
            && waiting.is_empty()
        {
            self.hand(*cutover);
        }
    }

    fn hand(&mut self, cutover: Cutover) {
        self.state = State::Handing(cutover);
        self.outputs.push_back(SourceOutput::Hand(cutover.to));
    }

    fn call_off(&mut self, cutover: Cutover) {
        self.state = State::Serving;
        self.outputs.extend([SourceOutput::Unfence, SourceOutput::Abort(cutover.epoch)]);
    }

    fn end(&mut self) {
        self.state = State::Over;
        self.outputs.push_back(SourceOutput::Over);
    }

    fn on_asked(&mut self, now: Instant, from: Incarnation, asked: Cutover, ours: bool) {
        match (&self.state, self.cutover()) {
            (State::Serving, _) if ours => self.begin(now, asked),
            // It is asked again, and is on its way.
            (_, Some(under_way)) if under_way == asked && from == asked.to => {}
            _ => self.outputs.push_back(SourceOutput::Refuse { to: from, epoch: asked.epoch }),
        }
    }

    fn on_tick(&mut self, now: Instant) {
        match &self.state {
            State::Fencing(cutover, until) if *until <= now => self.call_off(*cutover),
            State::Settling(cutover, until, _) if *until <= now => self.hand(*cutover),
            State::Parting(until) if *until <= now => self.end(),
            _ => {}
        }
    }
}

impl Machine for Source {
    type Input = SourceInput;
    type Output = SourceOutput;

    fn handle(&mut self, now: Instant, input: SourceInput) {
        match (input, &self.state) {
            (SourceInput::Asked { from, epoch, to, held, shadow }, _) => {
                let ours = from == to && held == Some(epoch) && shadow == Some(to);
                self.on_asked(now, from, Cutover { epoch, to }, ours);
            }
            (SourceInput::Quiet { fence, submitters }, State::Fencing(cutover, _))
                if fence == self.fences =>
            {
                self.settle(now, *cutover, submitters);
            }
            (SourceInput::Seen { from, fence }, _) if fence == self.fences => self.settled(from),
            (SourceInput::Gone(submitter), _) => self.settled(submitter),
            (SourceInput::Handed, State::Handing(_)) => {
                self.state = State::Parting(now + PART_MAX);
                self.outputs.push_back(SourceOutput::Part);
            }
            (SourceInput::Kept, State::Handing(cutover)) => self.call_off(*cutover),
            (SourceInput::Parted, State::Parting(_)) => self.end(),
            // It serves no more: a fence that it may have stays.
            (SourceInput::Lost, _) => self.state = State::Over,
            (SourceInput::Tick, _) => self.on_tick(now),
            _ => {}
        }
    }

    fn poll(&mut self) -> Option<SourceOutput> {
        self.outputs.pop_front()
    }

    fn deadline(&self) -> Option<Instant> {
        match &self.state {
            State::Fencing(_, until) | State::Settling(_, until, _) | State::Parting(until) => Some(*until),
            State::Serving | State::Handing(_) | State::Over => None,
        }
    }
}
