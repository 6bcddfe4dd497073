use std::path::Path;
use std::process::Command;

use crate::run::{Tree, answers, phase, run};

/// A program that tests use, how to see that it is there, and the Debian package that brings it.
struct Needed {
    program: &'static str,
    answers_to: &'static [&'static str],
    debian: &'static str,
    without: &'static str,
}

const NEEDED: [Needed; 2] = [
    Needed {
        program: "ip",
        answers_to: &["-V"],
        debian: "iproute2",
        without: "tests in network namespaces are skipped",
    },
    Needed {
        program: "python3",
        answers_to: &["-m", "pip", "--version"],
        debian: "python3-pip",
        without: "the model can't be fetched",
    },
];

/// Which runner the tests have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Runner {
    Nextest,
    /// Cargo's own, where nextest can't be had.
    Cargo,
}

/// Installs what the tests need where it may, else says what to install. A test that lacks something says so itself.
pub(crate) fn all(tree: &Tree) -> Runner {
    phase("what the tests need");
    let there = |needed: &Needed| answers(Command::new(needed.program).args(needed.answers_to));
    let missing: Vec<&str> =
        NEEDED.iter().filter(|needed| !there(needed)).map(|needed| needed.debian).collect();
    if !missing.is_empty() {
        debian(&missing);
    }
    for needed in NEEDED.iter().filter(|needed| !there(needed)) {
        println!("skipped: {} is not installed, so {}", needed.program, needed.without);
    }
    runner(tree)
}

fn runner(tree: &Tree) -> Runner {
    if nextest_answers(tree) {
        return Runner::Nextest;
    }
    phase("cargo-nextest");
    let mut install = tree.cargo(&["install", "--locked", "cargo-nextest"]);
    // It only starts programs and reads what they print: built for speed, it would take three times as long to build.
    install.env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0").env("CARGO_PROFILE_RELEASE_LTO", "off");
    install.env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "64").env("CARGO_PROFILE_RELEASE_DEBUG", "0");
    // Its build is no part of this workspace's.
    install.env("CARGO_TARGET_DIR", tree.target.join("nextest-build"));
    match run(&mut install) {
        Ok(()) if nextest_answers(tree) => Runner::Nextest,
        Ok(()) => {
            println!("cargo-nextest is installed, but cargo does not find it: cargo test takes its place");
            Runner::Cargo
        }
        Err(error) => {
            println!("cargo-nextest could not be installed ({error:#}): cargo test takes its place");
            println!("please run: cargo install --locked cargo-nextest");
            Runner::Cargo
        }
    }
}

fn nextest_answers(tree: &Tree) -> bool {
    answers(&mut tree.cargo(&["nextest", "--version"]))
}

fn debian(packages: &[&str]) {
    let root = Command::new("id").arg("-u").output().is_ok_and(|id| id.stdout == b"0\n");
    if !root || !Path::new("/etc/debian_version").exists() {
        println!("please install: {}", packages.join(" "));
        return;
    }
    let apt = || {
        let mut apt = Command::new("apt-get");
        apt.env("DEBIAN_FRONTEND", "noninteractive").stdin(std::process::Stdio::null()).arg("-qq");
        apt
    };
    let installed = run(apt().arg("update"))
        .and_then(|()| run(apt().args(["install", "-y", "--no-install-recommends"]).args(packages)));
    if let Err(error) = installed {
        println!("{} could not be installed: {error:#}", packages.join(" "));
    }
}
