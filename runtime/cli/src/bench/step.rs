//! `connex bench step`.

use anyhow::bail;

use crate::args::BenchStepArgs;

pub(crate) async fn run(_args: BenchStepArgs) -> anyhow::Result<bool> {
    bail!("not measured yet")
}
