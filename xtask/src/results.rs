use std::fmt::Write;
use std::process::Command;

use crate::run::{cargo, output, phase};

/// What the README promises, as commands that anyone can run.
const SHOWN: [&str; 8] = [
    "demo --json",
    "chaos --kills 100 --seed 7 --json",
    "chaos --kills 5 --seed 7 --plant rerun --json",
    "chaos --kills 5 --seed 7 --plant lost-state --json",
    "bench migrate --runs 200 --json",
    "bench handover --runs 300 --json",
    "bench step --transport tcp --sizes 64B,16KiB,1MiB --inflight 1,8,32 --json",
    "bench endpoints --count 10000 --json",
];

/// Runs every command of the list and writes what it printed to `docs/results.md`, failures too.
pub(crate) fn measure() -> anyhow::Result<()> {
    phase("the figures");
    let commit = output(Command::new("git").args(["rev-parse", "--short", "HEAD"]))?;
    let date = output(Command::new("date").args(["-u", "+%Y-%m-%d"]))?;
    let mut page = format!(
        "# Results\n\nMeasured at commit {} on {}, by `cargo xtask test --full`. Absolute figures depend on the \
         machine: compare within one run only.\n",
        commit.trim(),
        date.trim()
    );
    for shown in SHOWN {
        let mut command = cargo();
        command.args(["run", "--release", "--locked", "-q", "-p", "connex-cli", "--"]);
        command.args(shown.split(' '));
        println!("-- connex {shown}");
        let text = output(&mut command).unwrap_or_else(|error| format!("{error:#}"));
        writeln!(page, "\n## `connex {shown}`\n\n```json\n{}\n```", text.trim())?;
    }
    std::fs::write("docs/results.md", page)?;
    Ok(())
}
