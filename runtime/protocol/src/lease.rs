//! Leases: for how long an identity is held, as its holder and as its grantor see it.
//!
//! Their clocks are monotonic and never compared. The holder counts from the *sending* of its request and stops a
//! drift bound early ([`DRIFT_SHARE`]); the grantor counts from its own receipt and grants nobody else before the
//! whole lease is over. So the holder's validity ends before the grantor's, whatever the network's delays, as long as
//! the grantor's clock does not run more than 1/7 faster than the holder's.
//!
//! A clock that stands still while its machine sleeps keeps a lease valid that is over. Nothing here can see that:
//! it is why peers refuse a fenced incarnation, whatever that believes of itself.

use core::time::Duration;

use crate::{Epoch, Incarnation, Instant, Machine};

/// The holder gives up this part of a lease: one in eight, far more than any two monotonic clocks drift apart.
pub const DRIFT_SHARE: u32 = 8;

/// What happens to a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HolderInput {
    /// A grant arrived.
    Granted {
        /// When the request that it answers was sent.
        sent: Instant,
        /// The epoch.
        epoch: Epoch,
        /// For how long.
        ttl: Duration,
    },
    /// The identity was given up, or is known to be another's.
    Lost,
    /// Time passed.
    Tick,
}

/// What a holder tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HolderOutput {
    /// The identity is held under this epoch.
    Valid(Epoch),
    /// The lease ran out without a renewal: somebody else may hold the identity.
    Expired(Epoch),
}

/// A lease as its holder sees it.
///
/// | state | granted, same or later epoch | granted, earlier epoch | lost | the end is reached |
/// | --- | --- | --- | --- | --- |
/// | nothing held | valid | valid | – | – |
/// | valid | valid, for as long as the later of the two | – | nothing held | expired |
/// | expired | valid, unless the grant is over already | – | nothing held | – |
#[derive(Clone, Copy, Debug, Default)]
pub struct Holder {
    granted: Option<(Epoch, Instant)>,
    told_valid: bool,
    output: Option<HolderOutput>,
}

impl Holder {
    /// The epoch, while it is valid at `now`.
    pub fn epoch(&self, now: Instant) -> Option<Epoch> {
        self.granted.filter(|(_, until)| now < *until).map(|(epoch, _)| epoch)
    }

    /// The last epoch held, valid or not.
    pub fn last_epoch(&self) -> Option<Epoch> {
        self.granted.map(|(epoch, _)| epoch)
    }

    /// When its validity ends.
    pub fn valid_until(&self) -> Option<Instant> {
        self.granted.map(|(_, until)| until)
    }

    fn on_granted(&mut self, now: Instant, sent: Instant, epoch: Epoch, ttl: Duration) {
        let until = sent + (ttl - ttl / DRIFT_SHARE);
        let before = self.granted;
        self.granted = match before {
            Some((held, valid)) if held > epoch => Some((held, valid)),
            Some((held, valid)) if held == epoch => Some((epoch, valid.max(until))),
            _ => Some((epoch, until)),
        };
        let news = !self.told_valid || before.map(|(held, _)| held) != self.last_epoch();
        if news && let Some(epoch) = self.epoch(now) {
            self.told_valid = true;
            self.output = Some(HolderOutput::Valid(epoch));
        }
    }

    fn on_tick(&mut self, now: Instant) {
        if self.told_valid
            && self.epoch(now).is_none()
            && let Some(epoch) = self.last_epoch()
        {
            self.told_valid = false;
            self.output = Some(HolderOutput::Expired(epoch));
        }
    }
}

impl Machine for Holder {
    type Input = HolderInput;
    type Output = HolderOutput;

    fn handle(&mut self, now: Instant, input: HolderInput) {
        match input {
            HolderInput::Granted { sent, epoch, ttl } => self.on_granted(now, sent, epoch, ttl),
            HolderInput::Lost => *self = Holder::default(),
            HolderInput::Tick => self.on_tick(now),
        }
    }

    fn poll(&mut self) -> Option<HolderOutput> {
        self.output.take()
    }

    fn deadline(&self) -> Option<Instant> {
        self.valid_until().filter(|_| self.told_valid)
    }
}

/// What happens to a grantor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrantorInput {
    /// Somebody asks for the identity.
    Grant {
        /// Who.
        to: Incarnation,
        /// The epoch that it would hold it under; it must exceed every earlier one.
        epoch: Epoch,
    },
    /// Its holder asks for another lease.
    Renew {
        /// Who asks.
        from: Incarnation,
        /// The epoch that was granted.
        epoch: Epoch,
    },
    /// The lease of this epoch is over at once: its holder gave it up, or is known to be dead.
    End(Epoch),
    /// The grantor was not able to hear anybody until now: its holder gets a whole lease to be heard.
    Excuse,
    /// Time passed.
    Tick,
}

/// What a grantor answers and tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrantorOutput {
    /// Granted or extended, under this epoch.
    Granted(Epoch),
    /// Refused: it is held by somebody else, or the epoch is over.
    Refused,
    /// The lease ran out.
    Expired {
        /// Whose it was.
        holder: Incarnation,
        /// Its epoch.
        epoch: Epoch,
    },
}

/// A lease as its grantor sees it.
///
/// | state | grant | renew by the holder, of its epoch | renew by others, or of another epoch | end, of its epoch | the end is reached |
/// | --- | --- | --- | --- | --- | --- |
/// | free | held, if the epoch exceeds the last | refused | refused | – | – |
/// | held | refused, unless to its holder under a later epoch | extended | refused | free | free, expired |
#[derive(Clone, Copy, Debug)]
pub struct Grantor {
    ttl: Duration,
    held: Option<(Incarnation, Instant)>,
    last: Epoch,
    output: Option<GrantorOutput>,
}

impl Grantor {
    /// Nobody holds it.
    pub fn new(ttl: Duration) -> Self {
        Grantor { ttl, held: None, last: Epoch::default(), output: None }
    }

    /// Who holds it at `now`, under which epoch and until when.
    pub fn holder(&self, now: Instant) -> Option<(Incarnation, Epoch, Instant)> {
        self.held.filter(|(_, until)| now < *until).map(|(holder, until)| (holder, self.last, until))
    }

    /// Grants to `to` under `epoch`; false if somebody else holds it, or the epoch does not exceed every earlier one.
    pub fn grant(&mut self, now: Instant, to: Incarnation, epoch: Epoch) -> bool {
        if self.holder(now).is_some_and(|(holder, ..)| holder != to) || epoch <= self.last {
            return false;
        }
        self.last = epoch;
        self.held = Some((to, now + self.ttl));
        true
    }

    /// Extends the lease; false if `from` does not hold it under `epoch`, or it is over.
    pub fn renew(&mut self, now: Instant, from: Incarnation, epoch: Epoch) -> bool {
        let holds = self.holder(now).is_some_and(|(holder, held, _)| (holder, held) == (from, epoch));
        if holds {
            self.held = Some((from, now + self.ttl));
        }
        holds
    }

    /// Ends the lease of this epoch at once: its holder gave it up, or is known to be dead.
    pub fn end(&mut self, epoch: Epoch) {
        if epoch == self.last {
            self.held = None;
        }
    }

    /// Gives whoever holds it, or did until the grantor stopped hearing, a whole lease to be heard. A grant later
    /// than it had to be is always safe.
    pub fn excuse(&mut self, now: Instant) {
        if let Some((_, until)) = &mut self.held {
            *until = (*until).max(now + self.ttl);
        }
    }

    /// When the lease runs out.
    pub fn until(&self) -> Option<Instant> {
        self.held.map(|(_, until)| until)
    }
}

impl Machine for Grantor {
    type Input = GrantorInput;
    type Output = GrantorOutput;

    fn handle(&mut self, now: Instant, input: GrantorInput) {
        let answer = |granted, epoch| {
            Some(if granted { GrantorOutput::Granted(epoch) } else { GrantorOutput::Refused })
        };
        match input {
            GrantorInput::Grant { to, epoch } => self.output = answer(self.grant(now, to, epoch), epoch),
            GrantorInput::Renew { from, epoch } => self.output = answer(self.renew(now, from, epoch), epoch),
            GrantorInput::End(epoch) => self.end(epoch),
            GrantorInput::Excuse => self.excuse(now),
            GrantorInput::Tick => {
                if let Some((holder, until)) = self.held
                    && until <= now
                {
                    self.held = None;
                    self.output = Some(GrantorOutput::Expired { holder, epoch: self.last });
                }
            }
        }
    }

    fn poll(&mut self) -> Option<GrantorOutput> {
        self.output.take()
    }

    fn deadline(&self) -> Option<Instant> {
        self.until()
    }
}

#[cfg(test)]
mod tests;
