//! The `connex` binary: runs a deployment's processes, and proves what they keep.

mod args;
mod bench;
mod chaos;
mod child;
mod demo;
mod deployment;
mod directory;
mod handovers;
mod ledger;
mod load;
mod migrate;
mod model;
mod report;
mod stage;
mod up;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;

use crate::args::{Args, Verb};

fn main() -> ExitCode {
    let args = Args::parse();
    let filter = tracing_subscriber::EnvFilter::try_from_env("CONNEX_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    let colours = std::io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colours).init();
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: the runtime could not be started: {error}");
            return ExitCode::FAILURE;
        }
    };
    let outcome = runtime.block_on(run(args));
    runtime.shutdown_background();
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs one verb; false if what it was to show does not hold.
async fn run(args: Args) -> anyhow::Result<bool> {
    match args.verb {
        Verb::Demo(args) => demo::run(args).await,
        Verb::Up(args) => up::run(args).await,
        Verb::Directory(args) => directory::run(args).await,
        Verb::Stage(args) => stage::run(args).await,
        Verb::Model(args) => model::run(args),
        Verb::Migrate(args) => migrate::run(args).await,
        Verb::Chaos(args) => chaos::run(args).await,
        Verb::Bench(args) => bench::run(args).await,
    }
}
