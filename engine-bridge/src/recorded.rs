//! An engine whose executions are recorded in a file that a harness owns, for any engine.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use connex_protocol::{Incarnation, ReplicaNo, StepId};

use crate::{Batch, Engine, EngineError, EngineInfo, RequestId, Watch};

/// A record of executions: one line a request and step, each step's in a single append, so that processes that share
/// the file don't tear each other's lines and a killed one leaves whole ones.
#[derive(Debug)]
pub struct Ledger {
    file: File,
    replica: ReplicaNo,
    incarnation: Incarnation,
}

/// One line of a ledger: this life of this replica applied this step of this request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Execution {
    /// The request.
    pub request: RequestId,
    /// The step.
    pub step: StepId,
    /// The stage, by its first layer.
    pub first_layer: u32,
    /// The replica.
    pub replica: ReplicaNo,
    /// Its life.
    pub incarnation: Incarnation,
}

impl Ledger {
    /// Appends to the ledger at `path`, in this replica's name.
    pub fn open(path: &Path, replica: ReplicaNo, incarnation: Incarnation) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(Ledger { file, replica, incarnation })
    }

    fn record(&mut self, first_layer: u32, step: StepId, batch: &Batch) -> io::Result<()> {
        let mut lines = String::new();
        for row in &batch.rows {
            let (replica, incarnation) = (self.replica, self.incarnation);
            lines.push_str(&format!("{} {step} {first_layer} {replica} {incarnation}\n", row.request));
        }
        self.file.write_all(lines.as_bytes())
    }

    /// Reads a ledger back; a last line that a kill cut short is left out.
    pub fn read(path: &Path) -> io::Result<Vec<Execution>> {
        let text = std::fs::read_to_string(path)?;
        Ok(text.split_inclusive('\n').filter(|line| line.ends_with('\n')).filter_map(parse).collect())
    }
}

fn parse(line: &str) -> Option<Execution> {
    let hex = |text: &str| u64::from_str_radix(text, 16).ok().map(Incarnation::from_bits);
    let id = |text: &str| {
        let (origin, seq) = text.split_once(':')?;
        Some(StepId { origin: hex(origin)?, seq: seq.parse().ok()? })
    };
    let mut fields = line.split_whitespace();
    Some(Execution {
        request: id(fields.next()?)?,
        step: id(fields.next()?)?,
        first_layer: fields.next()?.parse().ok()?,
        replica: fields.next()?.parse().ok()?,
        incarnation: hex(fields.next()?)?,
    })
}

/// Called with each step before it is applied.
pub type OnStep = Box<dyn FnMut(StepId) + Send>;

/// Records each step of the engine inside before it is applied.
pub struct Recorded {
    inner: Box<dyn Engine>,
    ledger: Option<Ledger>,
    on_step: OnStep,
    /// A bug put in on purpose, so that a harness can show that it would notice: every 50th step is applied twice.
    reruns: bool,
    steps: u64,
}

impl Recorded {
    /// Records into `ledger`, if there is one, and calls `on_step`.
    pub fn new(inner: Box<dyn Engine>, ledger: Option<Ledger>, on_step: OnStep, reruns: bool) -> Self {
        Recorded { inner, ledger, on_step, reruns, steps: 0 }
    }
}

impl Engine for Recorded {
    fn info(&self) -> &EngineInfo {
        self.inner.info()
    }

    fn held(&self, request: RequestId) -> u32 {
        self.inner.held(request)
    }

    fn forward(
        &mut self,
        step: StepId,
        batch: &Batch,
        input: &[u8],
        output: &mut Vec<u8>,
        watch: &dyn Watch,
    ) -> Result<(), EngineError> {
        self.steps += 1;
        let runs = if self.reruns && self.steps.is_multiple_of(50) { 2 } else { 1 };
        let start = output.len();
        for _ in 0..runs {
            output.truncate(start);
            if let Some(ledger) = &mut self.ledger {
                let first_layer = self.inner.info().layers.start;
                ledger
                    .record(first_layer, step, batch)
                    .map_err(|error| EngineError::Failed(format!("the ledger can't be written: {error}")))?;
            }
            (self.on_step)(step);
            self.inner.forward(step, batch, input, output, watch)?;
        }
        Ok(())
    }

    fn release(&mut self, request: RequestId) {
        self.inner.release(request);
    }

    fn requests(&self) -> usize {
        self.inner.requests()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_a_kill_cut_short_is_left_out() {
        let path = std::env::temp_dir().join(format!("connex-ledger-{}", std::process::id()));
        let id = |seq| StepId { origin: Incarnation::from_bits(0xabc), seq };
        let batch = Batch { rows: vec![crate::Row { request: id(1), context: 0, tokens: 1, sample: true }] };
        let mut ledger = Ledger::open(&path, 3, Incarnation::from_bits(5)).unwrap();
        ledger.record(2, id(9), &batch).unwrap();
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(b"0000000000000abc:1 00000").unwrap();
        let read = Ledger::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let incarnation = Incarnation::from_bits(5);
        assert_eq!(
            read,
            [Execution { request: id(1), step: id(9), first_layer: 2, replica: 3, incarnation }]
        );
    }
}
