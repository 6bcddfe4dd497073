use std::path::Path;
use std::process::Command;

use crate::run::{answers, cargo, phase, run};

/// Programs that the tests use, how to see that they are there, and the Debian packages that bring them.
const NEEDED: [(&str, &[&str], &str); 2] =
    [("ip", &["-V"], "iproute2"), ("python3", &["-m", "pip", "--version"], "python3-pip")];

/// Installs what the tests need, where it may; else says what to install. Tests that lack something say so.
pub(crate) fn all() {
    phase("what the tests need");
    let missing: Vec<&str> = NEEDED
        .iter()
        .filter(|(program, args, _)| !answers(program, args))
        .map(|(_, _, package)| *package)
        .collect();
    if !missing.is_empty() {
        debian(&missing);
    }
    if !answers("cargo", &["nextest", "--version"]) {
        let mut install = cargo();
        install.args(["install", "--locked", "cargo-nextest"]);
        if let Err(error) = run(&mut install) {
            println!("cargo-nextest could not be installed ({error:#}): cargo test takes its place");
        }
    }
}

fn debian(packages: &[&str]) {
    let root = Command::new("id").arg("-u").output().is_ok_and(|id| id.stdout == b"0\n");
    if !root || !Path::new("/etc/debian_version").exists() {
        println!("please install: {}", packages.join(" "));
        return;
    }
    let installed = run(Command::new("apt-get").args(["update", "-qq"])).and_then(|()| {
        run(Command::new("apt-get").args(["install", "-y", "-qq", "--no-install-recommends"]).args(packages))
    });
    if let Err(error) = installed {
        println!("{} could not be installed: {error:#}", packages.join(" "));
    }
}
