use alloc::vec::Vec;

use proptest::prelude::*;

use super::*;

const TTL: Duration = Duration::from_millis(2000);

fn life(who: usize) -> Incarnation {
    Incarnation::from_bits(who as u64 + 1)
}

/// A would-be holder, the requests it sent and the grants on their way to it, in real milliseconds.
struct World {
    /// How fast each clock runs, in parts per thousand of real time: two holders, then the grantor.
    rates: [u64; 3],
    real: u64,
    grantor: Grantor,
    holders: [Holder; 2],
    counter: u64,
    requests: Vec<(u64, usize, Instant)>,
    grants: Vec<(u64, usize, Instant, Epoch)>,
}

impl World {
    fn clock(&self, who: usize) -> Instant {
        Instant::from_nanos(self.real * self.rates[who] * 1000)
    }

    /// Goes on by a millisecond: what is due arrives.
    fn step(&mut self) {
        self.real += 1;
        let real = self.real;
        let (due, later) = self.requests.iter().partition(|(at, ..)| *at <= real);
        self.requests = later;
        let due: Vec<(u64, usize, Instant)> = due;
        for (at, who, sent) in due {
            let now = self.clock(2);
            self.grantor.handle(now, GrantorInput::Tick);
            while self.grantor.poll().is_some() {}
            let input = match self.grantor.holder(now) {
                Some((holder, epoch, _)) if holder == life(who) => {
                    GrantorInput::Renew { from: holder, epoch }
                }
                _ => {
                    self.counter += 1;
                    GrantorInput::Grant { to: life(who), epoch: Epoch { boot: 1, counter: self.counter } }
                }
            };
            self.grantor.handle(now, input);
            if let Some(GrantorOutput::Granted(epoch)) = self.grantor.poll() {
                // The answer takes as long as the request did, which is anything.
                self.grants.push((real + at % 1500, who, sent, epoch));
            }
        }
        let (due, later) = self.grants.iter().partition(|(at, ..)| *at <= real);
        self.grants = later;
        let due: Vec<(u64, usize, Instant, Epoch)> = due;
        for (_, who, sent, epoch) in due {
            let now = self.clock(who);
            self.holders[who].handle(now, HolderInput::Granted { sent, epoch, ttl: TTL });
        }
    }

    fn valid(&self) -> usize {
        (0..2).filter(|who| self.holders[*who].epoch(self.clock(*who)).is_some()).count()
    }
}

proptest! {
    /// Two would-be holders and a grantor, each on a clock that runs up to 5 % fast or slow, requests and grants
    /// delayed and reordered at will: at no millisecond do two holders believe that they hold it.
    #[test]
    fn validity_never_overlaps_between_holders(
        rates in prop::array::uniform3(950u64..1050),
        acts in prop::collection::vec((0usize..2, 1u64..3000, 0u64..1500), 1..40),
    ) {
        let mut world = World {
            rates,
            real: 0,
            grantor: Grantor::new(TTL),
            holders: [Holder::default(); 2],
            counter: 0,
            requests: Vec::new(),
            grants: Vec::new(),
        };
        for (who, delay, pause) in acts {
            let sent = world.clock(who);
            world.requests.push((world.real + delay, who, sent));
            for _ in 0..=pause {
                world.step();
                prop_assert!(world.valid() <= 1, "two holders at {} ms", world.real);
            }
        }
    }

    /// Against a list of every grant ever made: who holds it is whoever was granted or renewed it last, for one lease.
    #[test]
    fn a_grantor_agrees_with_a_list_of_grants(
        acts in prop::collection::vec((0u8..4, 0usize..3, 0u64..6, 0u64..1500), 1..80),
    ) {
        let mut grantor = Grantor::new(TTL);
        let mut now = Instant::ZERO;
        let mut grants: Vec<(Incarnation, Epoch, Instant)> = Vec::new();
        for (act, who, counter, pause) in acts {
            now = now + Duration::from_millis(pause);
            let epoch = Epoch { boot: 1, counter };
            let model = grants.last().copied().filter(|(_, _, until)| now < *until);
            let highest = grants.iter().map(|(_, epoch, _)| *epoch).max().unwrap_or_default();
            match act {
                0 => {
                    let may = model.is_none_or(|(holder, ..)| holder == life(who)) && epoch > highest;
                    prop_assert_eq!(grantor.grant(now, life(who), epoch), may);
                    if may {
                        grants.push((life(who), epoch, now + TTL));
                    }
                }
                1 => {
                    let may = model.is_some_and(|(holder, held, _)| (holder, held) == (life(who), epoch));
                    prop_assert_eq!(grantor.renew(now, life(who), epoch), may);
                    if may {
                        grants.push((life(who), epoch, now + TTL));
                    }
                }
                2 => {
                    grantor.end(epoch);
                    if let Some((_, held, until)) = grants.last_mut() && *held == epoch {
                        *until = Instant::ZERO;
                    }
                }
                _ => {
                    grantor.handle(now, GrantorInput::Tick);
                    let expired = matches!(grantor.poll(), Some(GrantorOutput::Expired { .. }));
                    let over = grants.last().is_some_and(|(_, _, until)| *until > Instant::ZERO && *until <= now);
                    prop_assert_eq!(expired, over);
                    if let Some((_, _, until)) = grants.last_mut() && over {
                        *until = Instant::ZERO;
                    }
                }
            }
            let model = grants.last().copied().filter(|(_, _, until)| now < *until);
            prop_assert_eq!(grantor.holder(now), model);
        }
    }
}

#[test]
fn a_zombie_can_neither_renew_nor_end_its_successors_lease() {
    let (a, b) = (life(0), life(1));
    let (first, second) = (Epoch { boot: 1, counter: 1 }, Epoch { boot: 1, counter: 2 });
    let mut grantor = Grantor::new(TTL);
    assert!(grantor.grant(Instant::ZERO, a, first));
    let late = Instant::ZERO + TTL;
    assert!(grantor.grant(late, b, second));
    assert!(!grantor.renew(late, a, first));
    assert!(!grantor.renew(late, a, second), "an epoch alone does not make its bearer the holder");
    grantor.end(first);
    assert_eq!(grantor.holder(late).map(|(holder, ..)| holder), Some(b));
}

#[test]
fn a_grant_that_arrives_after_its_end_is_not_valid_and_a_late_renewal_shortens_nothing() {
    let epoch = Epoch { boot: 1, counter: 1 };
    let at = |ms| Instant::ZERO + Duration::from_millis(ms);
    let mut holder = Holder::default();
    holder.handle(at(1750), HolderInput::Granted { sent: at(0), epoch, ttl: TTL });
    assert_eq!((holder.poll(), holder.epoch(at(1750))), (None, None));
    holder.handle(at(1800), HolderInput::Granted { sent: at(1700), epoch, ttl: TTL });
    assert_eq!(holder.poll(), Some(HolderOutput::Valid(epoch)));
    // The answer to an earlier renewal arrives late.
    holder.handle(at(1900), HolderInput::Granted { sent: at(600), epoch, ttl: TTL });
    assert_eq!(holder.valid_until(), Some(at(1700 + 1750)));
    assert_eq!(holder.deadline(), Some(at(3450)));
    holder.handle(at(3450), HolderInput::Tick);
    assert_eq!(holder.poll(), Some(HolderOutput::Expired(epoch)));
    assert_eq!((holder.deadline(), holder.last_epoch()), (None, Some(epoch)));
}

#[test]
fn a_grantor_that_could_not_hear_gives_its_holder_another_lease() {
    let epoch = Epoch { boot: 1, counter: 1 };
    let mut grantor = Grantor::new(TTL);
    assert!(grantor.grant(Instant::ZERO, life(0), epoch));
    let late = Instant::ZERO + TTL * 3;
    grantor.handle(late, GrantorInput::Excuse);
    assert!(!grantor.grant(late, life(1), Epoch { boot: 1, counter: 2 }));
    assert!(grantor.renew(late + TTL / 2, life(0), epoch));
}
