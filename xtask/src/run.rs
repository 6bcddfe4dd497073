use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::Value;

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// How long this program has run.
pub(crate) fn elapsed() -> Duration {
    START.elapsed()
}

/// Minutes and seconds, as `3:07`.
pub(crate) fn clock(time: Duration) -> String {
    format!("{}:{:02}", time.as_secs() / 60, time.as_secs() % 60)
}

/// Says what begins, and when.
pub(crate) fn phase(name: &str) {
    println!("== [{}] {name}", clock(elapsed()));
}

/// The source tree that this was started from.
#[derive(Debug)]
pub(crate) struct Tree {
    /// The workspace's root.
    pub(crate) root: PathBuf,
    /// Where cargo builds.
    pub(crate) target: PathBuf,
    cargo: PathBuf,
}

impl Tree {
    /// Asks cargo where the tree is, so that this works in any clone, from any folder of it, with any target folder.
    pub(crate) fn find() -> anyhow::Result<Self> {
        LazyLock::force(&START);
        let cargo = PathBuf::from(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        let mut asked = Command::new(&cargo);
        asked.args(["metadata", "--no-deps", "--format-version", "1"]);
        let answer: Value = serde_json::from_str(&output(&mut asked)?).context("cargo metadata's answer")?;
        let path =
            |name: &str| answer[name].as_str().map(PathBuf::from).context("cargo metadata names no folder");
        Ok(Tree { root: path("workspace_root")?, target: path("target_directory")?, cargo })
    }

    /// A command that runs at the root.
    pub(crate) fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new(program.as_ref());
        // A relative target folder means another one in another working folder: it is passed on resolved.
        command.current_dir(&self.root).env("CARGO_TARGET_DIR", &self.target).stdin(Stdio::null());
        command
    }

    /// Cargo, as whoever called this has it.
    pub(crate) fn cargo(&self, args: &[&str]) -> Command {
        let mut command = self.command(&self.cargo);
        command.args(args);
        command
    }

    /// Where nextest leaves its report of the profile `report`: below the root, wherever cargo builds.
    pub(crate) fn nextest_report(&self) -> PathBuf {
        self.root.join("target/nextest/report/junit.xml")
    }

    /// The `connex` binary, once it is built.
    pub(crate) fn connex(&self) -> PathBuf {
        self.target.join("release").join(format!("connex{}", std::env::consts::EXE_SUFFIX))
    }
}

/// Runs a command to its end with this process's own output; its failure is an error.
pub(crate) fn run(command: &mut Command) -> anyhow::Result<()> {
    let status = timed(command, Command::status)?;
    check(command, status)
}

/// Runs a command and takes its standard output; its failure is an error.
pub(crate) fn output(command: &mut Command) -> anyhow::Result<String> {
    let shown = show(command);
    let output = command.stderr(Stdio::inherit()).output().with_context(|| format!("starting {shown}"))?;
    check(command, output.status)?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// What a command said, on both its streams.
pub(crate) struct Said {
    pub(crate) succeeded: bool,
    pub(crate) text: String,
}

/// Runs a command to its end and shows nothing of what it says.
pub(crate) fn quietly(command: &mut Command) -> anyhow::Result<Said> {
    let output = timed(command, Command::output)?;
    let text =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    Ok(Said { succeeded: output.status.success(), text })
}

/// Runs a command with its output shown as it comes, and calls `on_line` with each line of what it prints.
pub(crate) fn heard(command: &mut Command, on_line: impl FnMut(&str) + Send) -> anyhow::Result<ExitStatus> {
    let on_line = std::sync::Mutex::new(on_line);
    timed(command, |command| {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let (out, err) = (child.stdout.take(), child.stderr.take());
        std::thread::scope(|scope| {
            scope.spawn(|| out.map(|out| pass_on(out, std::io::stdout(), &on_line)));
            scope.spawn(|| err.map(|err| pass_on(err, std::io::stderr(), &on_line)));
        });
        child.wait()
    })
}

fn pass_on(from: impl std::io::Read, mut to: impl Write, on_line: &std::sync::Mutex<impl FnMut(&str)>) {
    for line in BufReader::new(from).split(b'\n') {
        let Ok(line) = line else { return };
        let line = String::from_utf8_lossy(&line);
        // Whoever reads this may have gone; the command goes on all the same.
        let _ = writeln!(to, "{line}");
        on_line.lock().expect("no listener panics")(&line);
    }
}

fn timed<T>(
    command: &mut Command,
    run: impl FnOnce(&mut Command) -> std::io::Result<T>,
) -> anyhow::Result<T> {
    let (shown, start) = (show(command), Instant::now());
    let outcome = run(command).with_context(|| format!("starting {shown}"))?;
    println!("-- {shown}: {} s", start.elapsed().as_secs());
    Ok(outcome)
}

fn check(command: &Command, status: ExitStatus) -> anyhow::Result<()> {
    if !status.success() {
        bail!("{}: {status}", show(command));
    }
    Ok(())
}

/// Whether a command is there and succeeds.
pub(crate) fn answers(command: &mut Command) -> bool {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    quiet.is_ok_and(|status| status.success())
}

/// A command as a person would type it, with the program's bare name.
pub(crate) fn show(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    let words = std::iter::once(program).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_streams_of_a_command_are_heard_line_by_line_and_its_status_comes_back() {
        let mut lines = Vec::new();
        let mut command = Command::new("sh");
        command.args(["-c", "echo one; echo two >&2; exit 3"]);
        let status = heard(&mut command, |line| lines.push(line.to_owned()));
        lines.sort();
        assert_eq!(lines, ["one", "two"]);
        assert_eq!(status.expect("sh is there").code(), Some(3));
    }

    #[test]
    fn a_failing_command_is_an_error_that_names_it() {
        let error = run(Command::new("sh").args(["-c", "exit 4"])).expect_err("it failed");
        assert!(error.to_string().starts_with("sh -c exit 4: "), "{error}");
        assert!(!answers(&mut Command::new("no-such-program-anywhere")));
    }

    #[test]
    fn times_read_as_minutes_and_seconds() {
        assert_eq!(clock(Duration::from_secs(187)), "3:07");
    }
}
