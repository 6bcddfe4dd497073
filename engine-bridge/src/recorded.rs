//! An engine whose executions are recorded in a file that a harness owns, for any engine.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use connex_protocol::{Incarnation, ReplicaNo, StepId};

use crate::{Batch, Engine, EngineError, EngineInfo, RequestId, Watch};

/// A planted rerun happens at every so many-th step.
const RERUN_EVERY: u64 = 16;

/// A record of executions in a file that a harness owns: one line a request and step.
///
/// All the lines of a step go out in one write to a file opened for appending, so that the lines of different
/// processes never mix, and what a process wrote before it was killed is there.
#[derive(Debug)]
pub struct Ledger {
    file: File,
    replica: ReplicaNo,
    incarnation: Incarnation,
}

/// One line of a ledger: this life of this replica was about to apply this step of this request.
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
    /// Appends to the ledger at `path`, in this replica's name; makes the file if it is not there.
    pub fn open(path: &Path, replica: ReplicaNo, incarnation: Incarnation) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(Ledger { file, replica, incarnation })
    }

    /// Appends a step's lines. A write that the system cut short is an error and is not continued: the rest would
    /// no longer be in one piece.
    fn record(&mut self, first_layer: u32, step: StepId, batch: &Batch) -> io::Result<()> {
        let mut lines = String::new();
        for row in &batch.rows {
            let (replica, incarnation) = (self.replica, self.incarnation);
            let execution = Execution { request: row.request, step, first_layer, replica, incarnation };
            lines.push_str(&execution.to_string());
        }
        let written = self.file.write(lines.as_bytes())?;
        if written == lines.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    /// Reads a ledger back, in the order in which it was written. A line that a kill cut short is left out.
    pub fn read(path: &Path) -> io::Result<Vec<Execution>> {
        Ok(Execution::parse_all(&std::fs::read_to_string(path)?))
    }

    /// How many executions are there a second time: the same request of the same step, applied again by the same
    /// life (P-2 forbids it).
    pub fn duplicated(executions: &[Execution]) -> usize {
        let mut seen = BTreeSet::new();
        executions.iter().filter(|execution| !seen.insert(**execution)).count()
    }
}

impl Execution {
    fn parse_all(text: &str) -> Vec<Execution> {
        // A line that was cut short has no end of its own, so that another process's line may follow it directly:
        // the plus sign tells where that one starts, the full stop that it is whole.
        text.split(['+', '\n']).filter_map(Execution::parse).collect()
    }

    fn parse(piece: &str) -> Option<Execution> {
        let mut fields = piece.strip_suffix('.')?.split(' ');
        let execution = Execution {
            request: step_id(fields.next()?)?,
            step: step_id(fields.next()?)?,
            first_layer: fields.next()?.parse().ok()?,
            replica: fields.next()?.parse().ok()?,
            incarnation: incarnation(fields.next()?)?,
        };
        fields.next().is_none().then_some(execution)
    }
}

impl std::fmt::Display for Execution {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Execution { request, step, first_layer, replica, incarnation } = self;
        writeln!(f, "+{request} {step} {first_layer} {replica} {incarnation}.")
    }
}

fn incarnation(text: &str) -> Option<Incarnation> {
    u64::from_str_radix(text, 16).ok().map(Incarnation::from_bits)
}

fn step_id(text: &str) -> Option<StepId> {
    let (origin, seq) = text.split_once(':')?;
    Some(StepId { origin: incarnation(origin)?, seq: seq.parse().ok()? })
}

/// Called with each step before it is applied.
pub type OnStep = Box<dyn FnMut(StepId) + Send>;

/// Records each step of the engine inside before it is applied.
pub struct Recorded {
    inner: Box<dyn Engine>,
    ledger: Option<Ledger>,
    on_step: OnStep,
    /// A bug put in on purpose, so that a harness can show that it would notice: every 16th step is applied twice.
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
        let runs = if self.reruns && self.steps.is_multiple_of(RERUN_EVERY) { 2 } else { 1 };
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
    use crate::toy::{ToyConfig, ToyEngine, expected};
    use crate::{Row, local};

    const LIFE: Incarnation = Incarnation::from_bits(0xFEED);

    fn id(seq: u64) -> StepId {
        StepId { origin: LIFE, seq }
    }

    fn execution(seq: u64, replica: u32) -> Execution {
        Execution { request: id(77), step: id(seq), first_layer: 4, replica, incarnation: LIFE }
    }

    #[test]
    fn what_several_writers_wrote_is_read_back_and_duplicates_are_counted() {
        let path = std::env::temp_dir().join(format!("connex-recorded-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let batch = Batch { rows: vec![Row { request: id(77), context: 0, tokens: 1, sample: false }] };
        let mut ledgers = [0, 1].map(|replica| Ledger::open(&path, replica, LIFE).unwrap());
        for (seq, replica) in [(1, 0), (2, 0), (1, 1), (2, 0)] {
            ledgers[replica].record(4, id(seq), &batch).unwrap();
        }
        let read = Ledger::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(read, [execution(1, 0), execution(2, 0), execution(1, 1), execution(2, 0)]);
        assert_eq!(Ledger::duplicated(&read), 1);
    }

    #[test]
    fn a_line_cut_short_by_a_kill_spoils_no_other() {
        let whole = execution(1, 0).to_string();
        for cut in 0..whole.len() - 2 {
            let text = format!("{}{}", &whole[..cut], execution(2, 1));
            assert_eq!(Execution::parse_all(&text), [execution(2, 1)], "cut at {cut}");
        }
    }

    #[test]
    fn every_step_is_recorded_once_and_a_planted_rerun_twice() {
        let path = std::env::temp_dir().join(format!("connex-reruns-{}", std::process::id()));
        for (reruns, duplicated) in [(false, 0), (true, 1)] {
            let _ = std::fs::remove_file(&path);
            let toy = Box::new(ToyEngine::new(ToyConfig::stage(0, 1)).unwrap());
            let ledger = Ledger::open(&path, 0, LIFE).unwrap();
            let (sender, seen) = std::sync::mpsc::channel();
            let on_step: OnStep = Box::new(move |step| sender.send(step).unwrap());
            let mut engines: [Box<dyn Engine>; 1] =
                [Box::new(Recorded::new(toy, Some(ledger), on_step, reruns))];
            let output = local::run(&mut engines, &[vec![7]], 20).unwrap();
            // Applied twice from the same context it yields the same: only the ledger can tell.
            assert_eq!(output[0], expected(2, &[7], 20));
            let executions = Ledger::read(&path).unwrap();
            assert_eq!(executions.len(), 20 + duplicated);
            assert_eq!(Ledger::duplicated(&executions), duplicated);
            let steps: Vec<StepId> = executions.iter().map(|execution| execution.step).collect();
            assert_eq!(seen.try_iter().collect::<Vec<_>>(), steps);
        }
        std::fs::remove_file(&path).unwrap();
    }
}
