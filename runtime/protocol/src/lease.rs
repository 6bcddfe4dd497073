//! Leases: for how long an identity is held, as its holder and as its grantor see it.
//!
//! Their clocks are monotonic and never compared. The holder counts from the *sending* of its request and stops a
//! drift bound early; the grantor counts from its own receipt and grants nobody else before the whole lease is over.
//! So the holder's validity ends before the grantor's, whatever the network's delays, as long as no clock runs
//! faster than the other by more than the bound.

use core::time::Duration;

use crate::{Epoch, Incarnation, Instant};

/// The holder gives up this part of a lease: one in eight, far more than any two monotonic clocks drift apart.
const DRIFT_SHARE: u32 = 8;

/// A lease as its holder sees it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Holder {
    granted: Option<(Epoch, Instant)>,
}

impl Holder {
    /// A grant arrived for a request that was sent at `sent`. Ignored if it is of an earlier epoch.
    pub fn on_granted(&mut self, sent: Instant, epoch: Epoch, ttl: Duration) {
        let until = sent + (ttl - ttl / DRIFT_SHARE);
        match self.granted {
            Some((held, _)) if held > epoch => {}
            Some((held, valid)) if held == epoch => self.granted = Some((epoch, valid.max(until))),
            _ => self.granted = Some((epoch, until)),
        }
    }

    /// The identity was given up, or is known to be another's.
    pub fn on_lost(&mut self) {
        self.granted = None;
    }

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
}

/// A lease as its grantor sees it.
#[derive(Clone, Copy, Debug)]
pub struct Grantor {
    ttl: Duration,
    held: Option<(Incarnation, Epoch, Instant)>,
}

impl Grantor {
    /// Nobody holds it.
    pub fn new(ttl: Duration) -> Self {
        Grantor { ttl, held: None }
    }

    /// Who holds it at `now`, under which epoch and until when.
    pub fn holder(&self, now: Instant) -> Option<(Incarnation, Epoch, Instant)> {
        self.held.filter(|(_, _, until)| now < *until)
    }

    /// Grants to `incarnation` under `epoch`, which must exceed every earlier one; false if somebody else holds it.
    pub fn grant(&mut self, now: Instant, incarnation: Incarnation, epoch: Epoch) -> bool {
        if self.holder(now).is_some_and(|(holder, ..)| holder != incarnation) {
            return false;
        }
        if let Some((_, last, _)) = self.held {
            assert!(epoch > last, "epochs only grow");
        }
        self.held = Some((incarnation, epoch, now + self.ttl));
        true
    }

    /// Extends the lease of the epoch that holds it; false if that is not `epoch`, or is over.
    pub fn renew(&mut self, now: Instant, epoch: Epoch) -> bool {
        match &mut self.held {
            Some((_, held, until)) if *held == epoch && now < *until => {
                *until = now + self.ttl;
                true
            }
            _ => false,
        }
    }

    /// Ends the lease of this epoch at once: its holder gave it up, or is known to be dead.
    pub fn end(&mut self, epoch: Epoch) {
        if let Some((_, held, until)) = &mut self.held
            && *held == epoch
        {
            *until = Instant::ZERO;
        }
    }

    /// When the lease runs out.
    pub fn until(&self) -> Option<Instant> {
        self.held.map(|(_, _, until)| until)
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    const TTL: Duration = Duration::from_millis(2000);

    proptest! {
        /// Two would-be holders and a grantor, each on a clock that runs up to 5 % fast or slow, requests and grants
        /// delayed at will: at no moment do two holders believe that they hold it, and epochs only grow.
        #[test]
        fn validity_never_overlaps_between_holders(
            rates in prop::array::uniform3(950u64..1050),
            acts in prop::collection::vec((0usize..2, 0u64..900, 0u64..900, any::<bool>()), 1..60),
        ) {
            let clock = |who: usize, real: u64| Instant::from_nanos(real * rates[who] * 1000);
            let mut grantor = Grantor::new(TTL);
            let mut holders = [Holder::default(); 2];
            let mut counter = 0;
            let mut last = Epoch::default();
            let mut real = 0u64;
            let mut in_flight: Vec<(u64, usize, Instant, Epoch)> = Vec::new();
            for (who, request_delay, reply_delay, pause) in acts {
                let sent = clock(who, real);
                real += request_delay;
                let now = clock(2, real);
                let incarnation = Incarnation::from_bits(who as u64 + 1);
                let granted = match grantor.holder(now) {
                    Some((holder, epoch, _)) if holder == incarnation => grantor.renew(now, epoch).then_some(epoch),
                    Some(_) => None,
                    None => {
                        counter += 1;
                        let epoch = Epoch { boot: 1, counter };
                        grantor.grant(now, incarnation, epoch).then_some(epoch)
                    }
                };
                if let Some(epoch) = granted {
                    prop_assert!(epoch >= last);
                    last = epoch;
                    in_flight.push((real + reply_delay, who, sent, epoch));
                }
                real += if pause { 700 } else { 10 };
                let arrived: Vec<_> = in_flight.iter().copied().filter(|(at, ..)| *at <= real).collect();
                in_flight.retain(|(at, ..)| *at > real);
                for (_, who, sent, epoch) in arrived {
                    holders[who].on_granted(sent, epoch, TTL);
                }
                let valid = (0..2).filter(|who| holders[*who].epoch(clock(*who, real)).is_some()).count();
                prop_assert!(valid <= 1, "two holders at {}", real);
            }
        }
    }

    #[test]
    fn a_zombie_can_neither_renew_nor_end_its_successors_lease() {
        let (a, b) = (Incarnation::from_bits(1), Incarnation::from_bits(2));
        let (first, second) = (Epoch { boot: 1, counter: 1 }, Epoch { boot: 1, counter: 2 });
        let mut grantor = Grantor::new(TTL);
        assert!(grantor.grant(Instant::ZERO, a, first));
        let late = Instant::ZERO + TTL;
        assert!(grantor.grant(late, b, second));
        assert!(!grantor.renew(late, first));
        grantor.end(first);
        assert_eq!(grantor.holder(late).map(|(holder, ..)| holder), Some(b));
    }
}
