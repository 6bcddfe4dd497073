//! `cargo xtask`: the project's own commands, from the source tree.

mod figures;
mod install;
mod results;
mod run;
mod shown;
mod test;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "cargo xtask")]
struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Install what the tests need, fetch the model, run every test once
    Test {
        /// With the full counts, and every figure of the README measured anew into docs/results.md
        #[arg(long)]
        full: bool,
    },
}

fn main() -> ExitCode {
    let outcome = match Args::parse().verb {
        Verb::Test { full } => run::Tree::find().and_then(|tree| test::all(&tree, full)),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
