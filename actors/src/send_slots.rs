use std::collections::HashMap;

use bytes::Bytes;
use connex_protocol::ring;
use connex_protocol::wire::{Seal, Slot};
use connex_protocol::{Incarnation, StepId};

use crate::Core;

/// The slots of the send ring that hold the payloads of one group's attempts on their way.
#[derive(Default)]
pub(crate) struct SendSlots {
    taken: HashMap<StepId, Vec<(u32, ring::Slot)>>,
}

impl SendSlots {
    /// Puts a payload into a sealed slot for this attempt (P-6); `None` if the ring is full.
    pub(crate) fn publish(
        &mut self,
        core: &Core,
        reader: Incarnation,
        (id, attempt): (StepId, u32),
        payload: &Bytes,
    ) -> Option<Slot> {
        let taken = core.ring().lock().expect("no holder panics").alloc(payload.len() as u64, reader).ok()?;
        let seal = Seal { step: id, generation: taken.generation, len: taken.len };
        core.region()
            .publish(taken.offset, seal, payload.clone())
            .expect("the ring hands out only what lies inside the region");
        let crc = core.config().payload_crc.then(|| crc32c::crc32c(payload));
        let slot = Slot {
            region: core.region().key(),
            offset: taken.offset,
            len: taken.len,
            generation: taken.generation,
            crc,
        };
        self.taken.entry(id).or_default().push((attempt, taken));
        Some(slot)
    }

    /// Frees the slots of every attempt up to this one.
    pub(crate) fn release(&mut self, core: &Core, id: StepId, attempt: u32) {
        let Some(slots) = self.taken.get_mut(&id) else { return };
        slots.retain(|(at, slot)| {
            let over = *at <= attempt;
            if over {
                core.region().retract(slot.offset, slot.generation);
                core.ring().lock().expect("no holder panics").ack(slot.offset, slot.generation);
            }
            !over
        });
        if slots.is_empty() {
            self.taken.remove(&id);
        }
    }
}
