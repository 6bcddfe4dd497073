use std::io::Write;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// The host's monotonic clock in nanoseconds: the same for every process on it, so that moments can be compared
/// across processes.
pub(crate) fn host_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// What a child process tells its parent, one JSON object a line on standard output.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Line {
    /// It serves.
    Ready { lid: String, incarnation: String, address: String, pid: u32 },
    /// A step begins to execute; said once after each request for it.
    Executing { step: String, at_ns: u64 },
    /// Steps moved.
    HandedOver {
        from: String,
        from_incarnation: String,
        to: Option<String>,
        steps: usize,
        evidence: String,
        at_ns: u64,
    },
    /// A supervision event worth showing.
    Told { text: String },
    /// An identity moved.
    Migrated { lid: String, paused_us: u64 },
    /// Counts since the start.
    Stats { submitted: u64, completed: u64, failed: u64 },
    /// It lost its identity, or failed, and ends.
    Failed { why: String },
}

/// Writes a line to the parent. A parent that is gone is no fault: the child ends by itself.
pub(crate) fn tell(line: &Line) {
    let text = serde_json::to_string(line).expect("a line is plain data");
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{text}");
    let _ = out.flush();
}

/// Progress for people, on standard error.
macro_rules! say {
    ($($arg:tt)*) => { eprintln!($($arg)*) };
}
pub(crate) use say;

/// Percentiles of measured durations, in milliseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Percentiles {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) max: f64,
}

/// The values at the half and at 99 hundredths, and the greatest.
pub(crate) fn percentiles(mut values: Vec<f64>) -> Percentiles {
    if values.is_empty() {
        return Percentiles::default();
    }
    values.sort_by(f64::total_cmp);
    let at = |share: f64| values[((values.len() - 1) as f64 * share).round() as usize];
    Percentiles { p50: round(at(0.5)), p99: round(at(0.99)), max: round(values[values.len() - 1]) }
}

/// To three decimals.
pub(crate) fn round(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

pub(crate) fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}
