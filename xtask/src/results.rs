use std::fmt::Write;
use std::io::Read;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::{Map, Value};

use crate::figures::tables;
use crate::run::{Tree, clock, heard, output, phase, run, show};
use crate::shown::{SHOWN, Shown};

/// How long a command may take: several times of what the longest takes on a slow machine. One that hangs is a result.
const COMMAND_MAX: Duration = Duration::from_secs(20 * 60);

/// How often it is looked whether a command has ended.
const LOOK: Duration = Duration::from_millis(50);

/// Runs every command of the list and writes what it printed to `docs/results.md`, failures too. It fails if one of
/// them does not hold.
pub(crate) fn measure(tree: &Tree, tests: &str) -> anyhow::Result<()> {
    phase("the figures");
    let mut page = head(tree, tests)?;
    let cold = cold_build(tree);
    // Built as its users build it: with the tests' features the figures would be another program's.
    run(&mut tree.cargo(&["build", "--release", "--locked", "-p", "connex-cli"]))?;
    let measured: Vec<(&Shown, Measured)> =
        SHOWN.iter().map(|shown| (shown, Measured::take(tree, shown))).collect();

    page.push_str("| command | what it shows | holds | took |\n| --- | --- | --- | --- |\n");
    for (shown, measured) in &measured {
        let holds = if measured.answer.is_ok() { "yes" } else { "**no**" };
        let took = clock(measured.took);
        writeln!(page, "| `connex {}` | {} | {holds} | {took} min |", shown.args, shown.shows)?;
    }
    writeln!(page, "\n## The first build\n")?;
    match cold {
        Ok((took, crates)) => writeln!(
            page,
            "`cargo build --release` in a fresh clone: {} min, {crates} crates (sources already downloaded).",
            clock(took)
        )?,
        Err(error) => writeln!(page, "skipped: a fresh clone could not be built ({error:#}).")?,
    }
    for (shown, measured) in &measured {
        writeln!(page, "\n## `connex {}`\n", shown.args)?;
        match &measured.answer {
            Ok(answer) => writeln!(page, "{}", tables(answer))?,
            Err(why) => writeln!(page, "It does not hold: {why:#}.\n")?,
        }
        writeln!(page, "```json\n{}\n```", measured.raw.trim())?;
    }
    let path = tree.root.join("docs/results.md");
    std::fs::write(&path, page).with_context(|| format!("writing {}", path.display()))?;
    println!("-- written to docs/results.md");
    let missed: Vec<&str> =
        measured.iter().filter(|(_, m)| m.answer.is_err()).map(|(shown, _)| shown.args).collect();
    if !missed.is_empty() {
        bail!("these do not hold: connex {}", missed.join("; connex "));
    }
    Ok(())
}

/// What a command printed, and whether what it shows holds.
struct Measured {
    raw: String,
    answer: anyhow::Result<Map<String, Value>>,
    took: Duration,
}

impl Measured {
    fn take(tree: &Tree, shown: &Shown) -> Self {
        let mut command = tree.command(tree.connex());
        command.args(shown.args.split(' ')).stderr(Stdio::inherit());
        println!("-- {}", show(&command));
        let start = Instant::now();
        let ended = bounded(&mut command, COMMAND_MAX);
        let took = start.elapsed();
        match ended {
            Ok((raw, status)) => {
                let answer = match status {
                    None => Err(anyhow::anyhow!("it had not ended after {} min", clock(COMMAND_MAX))),
                    Some(status) if status.success() => one_object(&raw),
                    Some(status) => Err(anyhow::anyhow!("it ended with {status}")),
                };
                Measured { raw, answer, took }
            }
            Err(error) => Measured { raw: String::new(), answer: Err(error.into()), took },
        }
    }
}

/// Runs a command and takes its standard output; `None` in place of its status if it had to be killed.
fn bounded(command: &mut Command, limit: Duration) -> std::io::Result<(String, Option<ExitStatus>)> {
    let (mut child, start) = (command.stdout(Stdio::piped()).spawn()?, Instant::now());
    let mut out = child.stdout.take().expect("it is piped");
    let reading = std::thread::spawn(move || {
        let mut text = Vec::new();
        // What was read until then counts.
        let _ = out.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    });
    let status = loop {
        match child.try_wait()? {
            None if start.elapsed() > limit => {
                child.kill()?;
                child.wait()?;
                break None;
            }
            None => std::thread::sleep(LOOK),
            ended => break ended,
        }
    };
    Ok((reading.join().expect("reading does not panic"), status))
}

/// The one JSON object that is all of `text`.
fn one_object(text: &str) -> anyhow::Result<Map<String, Value>> {
    serde_json::from_str(text).context("it did not print exactly one JSON object")
}

fn head(tree: &Tree, tests: &str) -> anyhow::Result<String> {
    let ask = |program: &str, args: &[&str]| {
        let answer = output(tree.command(program).args(args)).unwrap_or_default();
        answer.trim().to_owned()
    };
    let commit = match ask("git", &["rev-parse", "--short", "HEAD"]) {
        none if none.is_empty() => "unknown".to_owned(),
        commit if ask("git", &["status", "--porcelain"]).is_empty() => commit,
        commit => format!("{commit} with changes"),
    };
    let mut page = format!(
        "# Results\n\nMeasured at commit {commit} on {}, by `cargo xtask test --full`, on {}. Absolute figures depend \
         on the machine: compare within one run only.\n\n",
        ask("date", &["-u", "+%Y-%m-%d"]),
        machine()
    );
    writeln!(page, "Tests, with full counts: `{tests}`\n")?;
    Ok(page)
}

/// The machine in words, as far as it tells.
fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let info = |path: &str, name: &str| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let line = text.lines().find(|line| line.starts_with(name))?.to_owned();
        line.split_once(':').map(|(_, value)| value.trim().to_owned())
    };
    let cpu = info("/proc/cpuinfo", "model name").unwrap_or_else(|| std::env::consts::ARCH.to_owned());
    let memory = info("/proc/meminfo", "MemTotal")
        .and_then(|memory| memory.split(' ').next()?.parse::<u64>().ok())
        .map_or_else(String::new, |kib| format!(", {} GiB", kib.div_ceil(1024 * 1024)));
    format!("{cores} cores ({cpu}){memory}, {}", std::env::consts::OS)
}

/// Builds the binary in a fresh clone: how long it took, and how many crates were compiled.
fn cold_build(tree: &Tree) -> anyhow::Result<(Duration, usize)> {
    phase("the first build, in a fresh clone");
    let folder = tree.target.join("fresh-clone");
    let clean = || match std::fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    };
    clean().with_context(|| format!("clearing {}", folder.display()))?;
    run(tree.command("git").args(["clone", "--quiet", "."]).arg(&folder))?;
    let mut build = tree.cargo(&["build", "--release", "--locked"]);
    build.current_dir(&folder).env("CARGO_TARGET_DIR", folder.join("target"));
    let (mut crates, start) = (0, Instant::now());
    let status =
        heard(&mut build, |line| crates += usize::from(line.trim_start().starts_with("Compiling ")))?;
    let took = start.elapsed();
    clean()?;
    if !status.success() {
        bail!("{}: {status}", show(&build));
    }
    Ok((took, crates))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_hangs_is_ended_and_what_it_said_is_kept() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo begun; exec sleep 60"]);
        let (said, status) = bounded(&mut command, Duration::from_secs(1)).expect("sh is there");
        assert_eq!((said.as_str(), status), ("begun\n", None));
        let (said, status) =
            bounded(Command::new("sh").args(["-c", "echo done; exit 3"]), COMMAND_MAX).expect("sh is there");
        assert_eq!((said.as_str(), status.and_then(|status| status.code())), ("done\n", Some(3)));
    }

    #[test]
    fn only_a_single_json_object_counts_as_an_answer() {
        assert_eq!(one_object("{\"a\":1}\n").expect("it is one").len(), 1);
        for bad in ["", "[1]", "{}{}", "progress\n{}", "{\"a\":"] {
            assert!(one_object(bad).is_err(), "{bad:?}");
        }
    }
}
