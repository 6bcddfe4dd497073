//! The memory that peers may read and write.

use std::collections::HashMap;
use std::sync::{Arc, RwLock};

use connex_protocol::wire::RegionKey;

use crate::{Region, RegionError};

/// A registered region, for as long as it is registered.
pub(super) struct Registration {
    region: Arc<Region>,
    open: RwLock<bool>,
}

impl Registration {
    /// Works on the region, unless it was deregistered; `close` waits for the end of it.
    pub(super) fn with<T>(&self, work: impl FnOnce(&Region) -> T) -> Option<T> {
        let open = self.open.read().expect("nothing under this lock panics");
        open.then(|| work(&self.region))
    }
}

/// The regions of one transport.
#[derive(Default)]
pub(super) struct Regions {
    table: RwLock<HashMap<u64, Arc<Registration>>>,
}

impl Regions {
    pub(super) fn open(&self, region: Arc<Region>, max: usize) -> Result<(), RegionError> {
        let mut table = self.table.write().expect("nothing under this lock panics");
        if table.len() >= max {
            return Err(RegionError::Full);
        }
        table.insert(region.key().id, Arc::new(Registration { region, open: RwLock::new(true) }));
        Ok(())
    }

    /// Waits for the piece of an operation that is being copied; later pieces fail.
    pub(super) fn close(&self, key: RegionKey) {
        let removed = self.table.write().expect("nothing under this lock panics").remove(&key.id);
        if let Some(registration) = removed {
            *registration.open.write().expect("nothing under this lock panics") = false;
        }
    }

    pub(super) fn find(&self, key: RegionKey) -> Option<Arc<Registration>> {
        let table = self.table.read().expect("nothing under this lock panics");
        table.get(&key.id).filter(|registration| registration.region.key() == key).cloned()
    }
}
