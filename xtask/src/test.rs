use anyhow::bail;

use crate::install::{self, Runner};
use crate::results;
use crate::run::{Tree, clock, elapsed, heard, phase, quietly, run};

/// How many of the slowest tests are named.
const SLOWEST: usize = 10;

/// `cargo xtask test`: everything once, with reduced counts unless `full`. What fails does not keep the rest from
/// running; the closing lines are the runner's own summary.
pub(crate) fn all(tree: &Tree, full: bool) -> anyhow::Result<()> {
    let runner = install::all(tree);

    // One build of everything: the tests and the binary share their dependencies, features and all.
    phase("the build");
    run(&mut tree.cargo(&["build", "--release", "--locked", "--workspace", "--all-targets"]))?;
    phase("the model");
    if let Err(error) = run(tree.command(tree.connex()).args(["model", "fetch"])) {
        println!(
            "skipped: the model could not be fetched ({error:#}); tests take a seeded random one, and say so"
        );
    }
    phase("the examples in the documentation");
    let docs = documented(tree);

    phase("the tests");
    let outcome = tests(tree, runner, if full { "full" } else { "reduced" })?;
    let measured = if full { Some(results::measure(tree, &outcome.summary)) } else { None };

    phase("the slowest");
    if outcome.times.is_empty() {
        println!("the runner left no times");
    }
    for (seconds, name) in slowest(&outcome.times) {
        println!("{seconds:8.2} s  {name}");
    }
    println!("== {} min in all", clock(elapsed()));
    println!("{}", outcome.summary);
    docs?;
    if !outcome.passed {
        bail!("some tests failed: see above");
    }
    measured.unwrap_or(Ok(()))
}

/// The examples in the documentation: what each package's say is shown if one fails, else only how many there are.
fn documented(tree: &Tree) -> anyhow::Result<()> {
    let said = quietly(&mut tree.cargo(&["test", "--release", "--locked", "--workspace", "--doc", "-q"]))?;
    let lines: Vec<String> = said.text.lines().map(str::to_owned).collect();
    if !said.succeeded {
        println!("{}", said.text);
        bail!("an example in the documentation fails: see above");
    }
    println!("{}", sum_of_results(&lines));
    Ok(())
}

/// What came of a run.
struct Outcome {
    passed: bool,
    /// The runner's last line, or one of its form.
    summary: String,
    /// Seconds and name of each test, or of each test binary where the runner times nothing smaller.
    times: Vec<(f64, String)>,
}

fn tests(tree: &Tree, runner: Runner, scale: &str) -> anyhow::Result<Outcome> {
    let report = tree.nextest_report();
    // A run that ends before it reports must not be told by the one before it.
    let _ = std::fs::remove_file(&report);
    let mut lines = Vec::new();
    let mut command = match runner {
        Runner::Nextest => tree.cargo(&["nextest", "run", "--profile", "report", "--cargo-quiet"]),
        Runner::Cargo => tree.cargo(&["test", "--lib", "--bins", "--tests", "--examples"]),
    };
    command.args(["--release", "--locked", "--workspace", "--no-fail-fast"]).env("CONNEX_TEST_SCALE", scale);
    let status = heard(&mut command, |line| {
        if is_summary(line) || line.trim_start().starts_with("Running ") {
            lines.push(line.trim().to_owned());
        }
    })?;
    let (summary, times) = match runner {
        Runner::Nextest => {
            let summary = lines.iter().rfind(|line| is_summary(line)).cloned().unwrap_or_default();
            (summary, times_of_report(&std::fs::read_to_string(report).unwrap_or_default()))
        }
        Runner::Cargo => (sum_of_results(&lines), times_of_results(&lines)),
    };
    // A runner that says nothing of its tests has run none: that passes for no success.
    Ok(Outcome { passed: status.success() && !summary.is_empty(), summary, times })
}

fn is_summary(line: &str) -> bool {
    line.contains("tests run:") || line.starts_with("test result: ")
}

fn slowest(times: &[(f64, String)]) -> Vec<&(f64, String)> {
    let mut times: Vec<_> = times.iter().collect();
    times.sort_by(|a, b| b.0.total_cmp(&a.0));
    times.truncate(SLOWEST);
    times
}

/// Times by the report that nextest leaves.
fn times_of_report(report: &str) -> Vec<(f64, String)> {
    report
        .lines()
        .filter(|line| line.trim_start().starts_with("<testcase "))
        .filter_map(|line| {
            let time = attribute(line, "time")?.parse().ok()?;
            Some((time, format!("{} {}", attribute(line, "classname")?, attribute(line, "name")?)))
        })
        .collect()
}

fn attribute<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = line.split_once(&format!(" {name}=\""))?;
    rest.split_once('"').map(|(value, _)| value)
}

/// The number before a word, as in `3 passed`.
fn count(line: &str, word: &str) -> u64 {
    let Some((before, _)) = line.split_once(&format!(" {word}")) else { return 0 };
    before.rsplit(' ').next().and_then(|count| count.parse().ok()).unwrap_or(0)
}

/// The sum of what cargo's runner says of each binary, in its own form.
fn sum_of_results(lines: &[String]) -> String {
    let results: Vec<&String> = lines.iter().filter(|line| is_summary(line)).collect();
    if results.is_empty() {
        return String::new();
    }
    let sum = |word: &str| results.iter().map(|line| count(line, word)).sum::<u64>();
    let (passed, failed) = (sum("passed"), sum("failed"));
    let word = if failed == 0 { "ok" } else { "FAILED" };
    format!("test result: {word}. {passed} passed; {failed} failed; {} ignored", sum("ignored"))
}

fn times_of_results(lines: &[String]) -> Vec<(f64, String)> {
    let mut binary = "";
    let mut times = Vec::new();
    for line in lines {
        if let Some(name) = line.strip_prefix("Running ") {
            binary = name;
        } else if let Some((_, time)) = line.split_once("finished in ") {
            times.push((time.trim_end_matches('s').parse().unwrap_or(0.0), binary.to_owned()));
        }
    }
    times
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attribute_is_found_by_its_whole_name() {
        let line = r#"<testcase name="a::b" classname="c" timestamp="x" time="0.25">"#;
        assert_eq!(attribute(line, "time"), Some("0.25"));
        assert_eq!(attribute(line, "name"), Some("a::b"));
        assert_eq!(attribute(line, "tim"), None);
    }

    #[test]
    fn the_slowest_are_named_from_the_slowest_on_and_no_more_than_ten() {
        let report: String =
            (0..12).map(|n| format!("  <testcase name=\"t{n}\" classname=\"c\" time=\"{n}.5\">\n")).collect();
        let times = times_of_report(&report);
        let slowest = slowest(&times);
        assert_eq!(slowest.len(), SLOWEST);
        assert_eq!(slowest[0], &(11.5, "c t11".to_owned()));
    }

    #[test]
    fn results_of_several_binaries_add_up_and_one_failure_shows() {
        let lines = |second: &str| {
            [
                "Running unittests src/lib.rs (a)",
                "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; finished in 0.50s",
                "Running tests/b.rs (b)",
                second,
            ]
            .map(str::to_owned)
        };
        let good = lines("test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; finished in 1.25s");
        assert_eq!(sum_of_results(&good), "test result: ok. 5 passed; 0 failed; 1 ignored");
        assert_eq!(slowest(&times_of_results(&good))[0], &(1.25, "tests/b.rs (b)".to_owned()));
        let bad = lines("test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; finished in 1.25s");
        assert_eq!(sum_of_results(&bad), "test result: FAILED. 4 passed; 1 failed; 1 ignored");
        assert_eq!(sum_of_results(&[]), "");
    }
}
