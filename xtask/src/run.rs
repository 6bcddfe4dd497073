use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, bail};

/// Says what begins.
pub(crate) fn phase(name: &str) {
    println!("== {name}");
}

/// Runs a command to its end with this process's own output; its failure is an error.
pub(crate) fn run(command: &mut Command) -> anyhow::Result<()> {
    let shown = show(command);
    let start = Instant::now();
    let status = command.status().with_context(|| format!("starting {shown}"))?;
    println!("-- {shown}: {status} after {} s", start.elapsed().as_secs());
    if !status.success() {
        bail!("{shown}: {status}");
    }
    Ok(())
}

/// Runs a command and takes its standard output; its failure is an error.
pub(crate) fn output(command: &mut Command) -> anyhow::Result<String> {
    let shown = show(command);
    let output = command.stderr(Stdio::inherit()).output().with_context(|| format!("starting {shown}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        bail!("{shown}: {}\n{text}", output.status);
    }
    Ok(text)
}

/// Whether a program is there and answers.
pub(crate) fn answers(program: &str, args: &[&str]) -> bool {
    let quiet = Command::new(program).args(args).stdout(Stdio::null()).stderr(Stdio::null()).status();
    quiet.is_ok_and(|status| status.success())
}

/// Cargo, as whoever called this has it.
pub(crate) fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

fn show(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}
