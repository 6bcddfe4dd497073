use std::time::Instant;

use anyhow::bail;

use crate::run::{answers, cargo, phase, run};
use crate::{install, results};

/// How many of the slowest tests are named.
const SLOWEST: usize = 10;

/// `cargo xtask test`: everything once, with reduced counts unless `full`.
pub(crate) fn all(full: bool) -> anyhow::Result<()> {
    let start = Instant::now();
    install::all();

    phase("the binary");
    run(cargo().args(["build", "--release", "--locked", "-p", "connex-cli"]))?;
    phase("the model");
    let fetched =
        run(cargo().args(["run", "--release", "--locked", "-q", "-p", "connex-cli", "--", "model", "fetch"]));
    if let Err(error) = fetched {
        println!("the model could not be fetched ({error:#}): tests take a seeded random one, and say so");
    }

    phase("the tests");
    let scale = if full { "full" } else { "reduced" };
    let mut tests = cargo();
    if answers("cargo", &["nextest", "--version"]) {
        tests.args(["nextest", "run", "--release", "--locked", "--workspace", "--no-fail-fast"]);
        tests.args(["--profile", "report"]);
    } else {
        tests.args(["test", "--release", "--locked", "--workspace", "--no-fail-fast"]);
    }
    let outcome = run(tests.env("CONNEX_TEST_SCALE", scale));
    show_slowest();
    phase("the examples in the documentation");
    let docs = run(cargo().args(["test", "--release", "--locked", "--workspace", "--doc", "-q"]));
    if full && outcome.is_ok() {
        results::measure()?;
    }
    println!("== {} s in all", start.elapsed().as_secs());
    if outcome.is_err() || docs.is_err() {
        bail!("some tests failed: see above");
    }
    Ok(())
}

/// The slowest tests, by the report that the runner left.
fn show_slowest() {
    let target = std::env::var("CARGO_TARGET_DIR").unwrap_or_else(|_| "target".into());
    let Ok(report) = std::fs::read_to_string(format!("{target}/nextest/report/junit.xml")) else { return };
    let mut times: Vec<(f64, String)> = report
        .lines()
        .filter(|line| line.trim_start().starts_with("<testcase "))
        .filter_map(|line| {
            let time = attribute(line, "time")?.parse().ok()?;
            Some((time, format!("{} {}", attribute(line, "classname")?, attribute(line, "name")?)))
        })
        .collect();
    times.sort_by(|a, b| b.0.total_cmp(&a.0));
    println!("== the slowest tests");
    for (seconds, name) in times.iter().take(SLOWEST) {
        println!("{seconds:8.2} s  {name}");
    }
}

fn attribute<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = line.split_once(&format!(" {name}=\""))?;
    rest.split_once('"').map(|(value, _)| value)
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
}
