//! The executions of a deployment, as its harness counts them.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use connex::engine::recorded::{Execution, Ledger};
use connex::{Incarnation, StepId};

use crate::deployment::Deployment;
use crate::report::say;

/// A ledger in a temporary file that goes with it.
pub(crate) struct TempLedger {
    path: PathBuf,
}

impl TempLedger {
    pub(crate) fn new() -> anyhow::Result<Self> {
        let name = format!("connex-ledger-{}-{:x}", std::process::id(), rand::random::<u64>());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, b"")?;
        Ok(TempLedger { path })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Counts what the ledger says.
    pub(crate) fn summary(&self, deployment: &Deployment) -> anyhow::Result<Summary> {
        let mut killed = HashSet::new();
        for seat in deployment.seats() {
            let lives = deployment.lives(seat);
            killed.extend(lives.iter().filter(|life| life.killed).filter_map(|life| life.incarnation));
        }
        let executions = Ledger::read(&self.path)?;
        let steps: HashSet<StepId> = executions.iter().map(|execution| execution.step).collect();
        Ok(Summary {
            died_with_origin: died_with_origin(&executions, &killed),
            steps: steps.len(),
            duplicated: duplicated(&executions, &killed),
            reordered: reordered(&executions),
        })
    }
}

/// What a ledger says of a deployment's steps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Summary {
    /// Different steps.
    pub(crate) steps: usize,
    /// Those whose origin was killed before the last stage had executed them: nobody waits for them any more.
    pub(crate) died_with_origin: usize,
    /// Executions too many: by one life twice, or by a second life although the first was never killed.
    pub(crate) duplicated: usize,
    /// Steps that a life executed after a later one of the same origin.
    pub(crate) reordered: usize,
}

impl Drop for TempLedger {
    fn drop(&mut self) {
        // A file left in the temporary folder is all that can come of it.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn died_with_origin(executions: &[Execution], killed: &HashSet<Incarnation>) -> usize {
    let last_stage = executions.iter().map(|execution| execution.first_layer).max();
    let (mut begun, mut done) = (HashSet::new(), HashSet::new());
    for execution in executions.iter().filter(|execution| killed.contains(&execution.step.origin)) {
        begun.insert(execution.step);
        if Some(execution.first_layer) == last_stage {
            done.insert(execution.step);
        }
    }
    begun.difference(&done).count()
}

fn duplicated(executions: &[Execution], killed: &HashSet<Incarnation>) -> usize {
    let mut by_step: HashMap<(StepId, StepId, u32), HashMap<Incarnation, usize>> = HashMap::new();
    for execution in executions {
        let key = (execution.step, execution.request, execution.first_layer);
        *by_step.entry(key).or_default().entry(execution.incarnation).or_default() += 1;
    }
    by_step
        .values()
        .map(|lives| {
            let twice: usize = lives.values().map(|times| times - 1).sum();
            let alive = lives.keys().filter(|life| !killed.contains(life)).count();
            twice + alive.saturating_sub(1)
        })
        .sum()
}

fn reordered(executions: &[Execution]) -> usize {
    let mut last: HashMap<(Incarnation, Incarnation), u64> = HashMap::new();
    let mut count = 0;
    for execution in executions {
        let highest = last.entry((execution.step.origin, execution.incarnation)).or_default();
        if execution.step.seq < *highest {
            let Execution { step, replica, first_layer, .. } = execution;
            say!(
                "step {step} ran on replica {replica} (layer {first_layer}) after step {highest} of its origin"
            );
            count += 1;
        }
        *highest = execution.step.seq.max(*highest);
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    fn execution(step: u64, life: u64) -> Execution {
        let id = |seq| StepId { origin: Incarnation::from_bits(9), seq };
        let incarnation = Incarnation::from_bits(life);
        Execution { request: id(1), step: id(step), first_layer: 0, replica: 0, incarnation }
    }

    #[test]
    fn a_step_died_with_its_origin_only_if_the_last_stage_never_ran_it() {
        let at = |step, first_layer| Execution { first_layer, ..execution(step, 2) };
        let executions = [at(1, 0), at(1, 4), at(2, 0)];
        assert_eq!(died_with_origin(&executions, &HashSet::from([Incarnation::from_bits(9)])), 1);
        assert_eq!(died_with_origin(&executions, &HashSet::from([Incarnation::from_bits(2)])), 0);
    }

    #[test]
    fn a_step_behind_a_later_one_of_its_origin_counts_as_reordered() {
        assert_eq!(reordered(&[execution(1, 2), execution(2, 3), execution(2, 2), execution(2, 2)]), 0);
        assert_eq!(reordered(&[execution(2, 2), execution(1, 2), execution(3, 2)]), 1);
    }

    #[test]
    fn a_step_counts_as_duplicated_only_if_a_living_process_ran_it_again() {
        let killed = HashSet::from([Incarnation::from_bits(1)]);
        assert_eq!(duplicated(&[execution(1, 2), execution(2, 2)], &killed), 0);
        assert_eq!(duplicated(&[execution(1, 1), execution(1, 2)], &killed), 0);
        assert_eq!(duplicated(&[execution(1, 2), execution(1, 2)], &killed), 1);
        assert_eq!(duplicated(&[execution(1, 2), execution(1, 3)], &killed), 1);
    }
}
