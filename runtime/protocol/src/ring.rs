//! The send ring: which parts of the registered memory hold a payload that somebody may still read.

use alloc::collections::BTreeMap;

use crate::Incarnation;

/// Slots start at multiples of this many bytes.
pub const SLOT_ALIGN: u64 = 256;

/// A part of the ring that holds one payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Where it starts.
    pub offset: u64,
    /// The payload's length in bytes.
    pub len: u64,
    /// Counts the ring's allocations; no two slots ever share one (P-6).
    pub generation: u64,
}

/// Why there is no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// No free stretch is long enough now; it will be once slots are acknowledged.
    #[error("no {needed} free bytes in a row: wait for acknowledgements")]
    Full {
        /// The stretch that is needed, in bytes.
        needed: u64,
    },
    /// The ring will never hold it.
    #[error("{len} bytes do not fit into a ring of {ring} bytes")]
    TooLarge {
        /// The payload's length in bytes.
        len: u64,
        /// The ring's length in bytes.
        ring: u64,
    },
}

/// Allocates slots of a ring. A slot is reused only after its acknowledgement, or after its reader is gone:
/// its connection torn down and its incarnation fenced.
///
/// Slots are freed in any order, and a free stretch anywhere serves a request: one payload that nobody acknowledges
/// never makes a nearly empty ring refuse.
#[derive(Debug)]
pub struct Ring {
    len: u64,
    /// By offset: the taken stretch's length, its generation and its reader.
    taken: BTreeMap<u64, Taken>,
    /// Free stretches: offset to length. Neighbours are merged.
    free: BTreeMap<u64, u64>,
    next_generation: u64,
    /// Where the last allocation ended: the next one is sought from here, so that a slot rests before its reuse.
    cursor: u64,
}

#[derive(Clone, Copy, Debug)]
struct Taken {
    stretch: u64,
    generation: u64,
    reader: Incarnation,
}

impl Ring {
    /// A ring of `len` bytes, rounded down to whole slots.
    pub fn new(len: u64) -> Self {
        let len = len / SLOT_ALIGN * SLOT_ALIGN;
        let mut free = BTreeMap::new();
        if len > 0 {
            free.insert(0, len);
        }
        Ring { len, taken: BTreeMap::new(), free, next_generation: 1, cursor: 0 }
    }

    /// A slot for `len` bytes that `reader` will read.
    pub fn alloc(&mut self, len: u64, reader: Incarnation) -> Result<Slot, RingError> {
        let stretch = len.max(1).checked_next_multiple_of(SLOT_ALIGN).filter(|n| *n <= self.len);
        let Some(stretch) = stretch else { return Err(RingError::TooLarge { len, ring: self.len }) };
        let fits = |(at, free): (&u64, &u64)| (*free >= stretch).then_some(*at);
        let found = self
            .free
            .range(self.cursor..)
            .find_map(fits)
            .or_else(|| self.free.range(..self.cursor).find_map(fits));
        let Some(offset) = found else { return Err(RingError::Full { needed: stretch }) };
        let free = self.free.remove(&offset).expect("it was just found");
        if free > stretch {
            self.free.insert(offset + stretch, free - stretch);
        }
        let generation = self.next_generation;
        self.next_generation += 1;
        self.cursor = offset + stretch;
        let clash = self.taken.insert(offset, Taken { stretch, generation, reader });
        assert!(clash.is_none(), "no slot is handed out while it can be read");
        Ok(Slot { offset, len, generation })
    }

    /// The reader has the payload. False if the slot is not taken under that generation: a late or repeated word.
    pub fn ack(&mut self, offset: u64, generation: u64) -> bool {
        match self.taken.get(&offset) {
            Some(taken) if taken.generation == generation => {
                let stretch = taken.stretch;
                self.taken.remove(&offset);
                self.give_back(offset, stretch);
                true
            }
            _ => false,
        }
    }

    /// The reader's connection is torn down and its incarnation fenced: it can read nothing any more. Returns how
    /// many slots that freed.
    pub fn reader_gone(&mut self, reader: Incarnation) -> usize {
        let gone: alloc::vec::Vec<(u64, u64)> = self
            .taken
            .iter()
            .filter(|(_, taken)| taken.reader == reader)
            .map(|(offset, taken)| (*offset, taken.generation))
            .collect();
        for (offset, generation) in &gone {
            self.ack(*offset, *generation);
        }
        gone.len()
    }

    /// Bytes that are taken.
    pub fn in_use(&self) -> u64 {
        self.taken.values().map(|taken| taken.stretch).sum()
    }

    fn give_back(&mut self, mut offset: u64, mut len: u64) {
        if let Some((before, before_len)) = self.free.range(..offset).next_back().map(|(a, b)| (*a, *b))
            && before + before_len == offset
        {
            self.free.remove(&before);
            offset = before;
            len += before_len;
        }
        if let Some(after_len) = self.free.remove(&(offset + len)) {
            len += after_len;
        }
        self.free.insert(offset, len);
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    fn reader(n: u64) -> Incarnation {
        Incarnation::from_bits(n + 1)
    }

    #[test]
    fn an_unacknowledged_slot_does_not_block_a_free_ring() {
        let mut ring = Ring::new(1 << 20);
        let _stuck = ring.alloc(100, reader(0)).unwrap();
        for _ in 0..100_000 {
            let slot = ring.alloc(100, reader(1)).unwrap();
            assert!(ring.ack(slot.offset, slot.generation));
        }
    }

    #[test]
    fn what_can_never_fit_is_told_from_what_does_not_fit_now() {
        let mut ring = Ring::new(1024);
        assert_eq!(ring.alloc(2000, reader(0)), Err(RingError::TooLarge { len: 2000, ring: 1024 }));
        assert_eq!(ring.alloc(u64::MAX, reader(0)), Err(RingError::TooLarge { len: u64::MAX, ring: 1024 }));
        ring.alloc(1024, reader(0)).unwrap();
        assert_eq!(ring.alloc(1, reader(0)), Err(RingError::Full { needed: SLOT_ALIGN }));
    }

    #[derive(Clone, Debug)]
    enum Act {
        Alloc(u64, u64),
        Ack(usize),
        LateAck(usize),
        Gone(u64),
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            4 => (0u64..3000, 0u64..3).prop_map(|(len, reader)| Act::Alloc(len, reader)),
            3 => any::<usize>().prop_map(Act::Ack),
            1 => any::<usize>().prop_map(Act::LateAck),
            1 => (0u64..3).prop_map(Act::Gone),
        ]
    }

    proptest! {
        /// Against a list of live slots: none overlap, none is freed by another's word, generations only grow, and
        /// a request is refused only if no free stretch is long enough.
        #[test]
        fn slots_never_overlap_and_only_their_own_ack_frees_them(acts in prop::collection::vec(act(), 1..200)) {
            const LEN: u64 = 16 * SLOT_ALIGN;
            let mut ring = Ring::new(LEN);
            let mut live: Vec<(Slot, u64)> = Vec::new();
            let mut past: Vec<Slot> = Vec::new();
            let mut last = 0;
            let stretch = |slot: &Slot| slot.len.max(1).next_multiple_of(SLOT_ALIGN);
            for act in acts {
                match act {
                    Act::Alloc(len, who) => match ring.alloc(len, reader(who)) {
                        Ok(slot) => {
                            prop_assert!(slot.generation > last);
                            last = slot.generation;
                            let end = slot.offset + stretch(&slot);
                            prop_assert!(end <= LEN);
                            for (other, _) in &live {
                                prop_assert!(end <= other.offset || other.offset + stretch(other) <= slot.offset);
                            }
                            live.push((slot, who));
                        }
                        Err(_) => {
                            let mut used = [false; 16];
                            for (slot, _) in &live {
                                for unit in 0..stretch(slot) / SLOT_ALIGN {
                                    used[(slot.offset / SLOT_ALIGN + unit) as usize] = true;
                                }
                            }
                            let longest = used.split(|used| *used).map(<[bool]>::len).max().unwrap_or(0) as u64;
                            prop_assert!(len.max(1).next_multiple_of(SLOT_ALIGN) > longest * SLOT_ALIGN);
                        }
                    },
                    Act::Ack(at) if !live.is_empty() => {
                        let (slot, _) = live.swap_remove(at % live.len());
                        prop_assert!(ring.ack(slot.offset, slot.generation));
                        past.push(slot);
                    }
                    Act::LateAck(at) if !past.is_empty() => {
                        let slot = past[at % past.len()];
                        prop_assert!(!ring.ack(slot.offset, slot.generation));
                    }
                    Act::Gone(who) => {
                        let before = live.len();
                        past.extend(live.iter().filter(|(_, at)| *at == who).map(|(slot, _)| *slot));
                        live.retain(|(_, at)| *at != who);
                        prop_assert_eq!(ring.reader_gone(reader(who)), before - live.len());
                    }
                    Act::Ack(_) | Act::LateAck(_) => {}
                }
                prop_assert_eq!(ring.in_use(), live.iter().map(|(slot, _)| stretch(slot)).sum::<u64>());
            }
        }
    }
}
