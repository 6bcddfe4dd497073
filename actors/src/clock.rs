use std::time;

use connex_protocol::Instant;

/// The node's monotonic clock, as the machines see it.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: time::Instant,
}

impl Clock {
    /// A clock that starts now.
    pub fn start() -> Self {
        Clock { origin: time::Instant::now() }
    }

    /// Now.
    pub fn now(&self) -> Instant {
        Instant::from_nanos(u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// The standard library's name for a moment of this clock.
    pub fn to_std(&self, at: Instant) -> time::Instant {
        self.origin + at.since(Instant::ZERO)
    }
}
