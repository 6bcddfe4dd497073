use std::collections::BTreeMap;
use std::sync::{Mutex, RwLock};

use bytes::Bytes;
use connex_protocol::wire::{RegionKey, Seal};

/// A range of a registered region, on the owner's side or a peer's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionSlice {
    /// The region.
    pub key: RegionKey,
    /// Where the range starts.
    pub offset: u64,
    /// Its length in bytes.
    pub len: u64,
}

/// Why a region can't be used so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegionError {
    /// The range lies outside the region, or the region does not take this kind of access.
    #[error("the range lies outside the region, or the region does not allow the access")]
    OutOfBounds,
    /// The slot holds something else.
    #[error("the slot holds another payload")]
    SealMismatch,
    /// The backend can't register this memory.
    #[error("this transport can't register this memory")]
    Unsupported,
    /// Too much memory is registered.
    #[error("no more memory may be registered")]
    Full,
}

/// Memory that peers read or write one-sidedly once it is registered.
///
/// On backends that copy through the kernel, a slot holds its payload by reference: publishing copies nothing, and
/// what a reader gets can't change under it.
pub struct Region {
    key: RegionKey,
    len: u64,
    memory: Memory,
}

enum Memory {
    /// A ring of sealed, immutable payloads, by offset.
    Slots(Mutex<BTreeMap<u64, (Seal, Bytes)>>),
    /// Plain bytes that peers may write.
    Plain(RwLock<Box<[u8]>>),
}

impl Region {
    /// A region of slots, `len` bytes long in all.
    pub fn slots(key: RegionKey, len: u64) -> Self {
        Region { key, len, memory: Memory::Slots(Mutex::default()) }
    }

    /// A region of plain zeroed bytes.
    pub fn plain(key: RegionKey, len: usize) -> Self {
        Region { key, len: len as u64, memory: Memory::Plain(RwLock::new(vec![0; len].into())) }
    }

    /// Its name on the wire.
    pub fn key(&self) -> RegionKey {
        self.key
    }

    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it holds no bytes at all.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Puts a sealed payload into the slot at `offset`, in place of what it held.
    pub fn publish(&self, offset: u64, seal: Seal, payload: Bytes) -> Result<(), RegionError> {
        let Memory::Slots(slots) = &self.memory else { return Err(RegionError::OutOfBounds) };
        self.check(offset, payload.len() as u64)?;
        slots.lock().expect("no holder panics").insert(offset, (seal, payload));
        Ok(())
    }

    /// Empties the slot at `offset`, if it still holds that generation.
    pub fn retract(&self, offset: u64, generation: u64) {
        if let Memory::Slots(slots) = &self.memory {
            let mut slots = slots.lock().expect("no holder panics");
            if slots.get(&offset).is_some_and(|(seal, _)| seal.generation == generation) {
                slots.remove(&offset);
            }
        }
    }

    /// The bytes of a range. `seal` names what a slot must hold (P-6); a slot is read from its start.
    pub fn read(&self, offset: u64, len: u64, seal: Option<Seal>) -> Result<Bytes, RegionError> {
        self.check(offset, len)?;
        match &self.memory {
            Memory::Slots(slots) => {
                let slots = slots.lock().expect("no holder panics");
                let (held, payload) = slots.get(&offset).ok_or(RegionError::SealMismatch)?;
                if seal.is_none_or(|seal| seal != *held) || payload.len() as u64 != len {
                    return Err(RegionError::SealMismatch);
                }
                Ok(payload.clone())
            }
            Memory::Plain(bytes) => {
                let bytes = bytes.read().expect("no holder panics");
                Ok(Bytes::copy_from_slice(&bytes[offset as usize..(offset + len) as usize]))
            }
        }
    }

    /// Replaces the bytes of a range of plain memory.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), RegionError> {
        self.check(offset, data.len() as u64)?;
        let Memory::Plain(bytes) = &self.memory else { return Err(RegionError::OutOfBounds) };
        let mut bytes = bytes.write().expect("no holder panics");
        bytes[offset as usize..offset as usize + data.len()].copy_from_slice(data);
        Ok(())
    }

    /// Looks a read up without copying: the payload of a slot, or `None` for plain memory, which is read later.
    pub(crate) fn find(
        &self,
        offset: u64,
        len: u64,
        seal: Option<Seal>,
    ) -> Result<Option<Bytes>, RegionError> {
        match &self.memory {
            Memory::Slots(_) => self.read(offset, len, seal).map(Some),
            Memory::Plain(_) => self.check(offset, len).map(|()| None),
        }
    }

    /// Whether a write to this range would be taken.
    pub(crate) fn takes(&self, offset: u64, len: u64) -> Result<(), RegionError> {
        match &self.memory {
            Memory::Slots(_) => Err(RegionError::OutOfBounds),
            Memory::Plain(_) => self.check(offset, len),
        }
    }

    fn check(&self, offset: u64, len: u64) -> Result<(), RegionError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(RegionError::OutOfBounds),
        }
    }
}
