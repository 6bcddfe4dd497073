//! `connex bench`.

mod endpoints;
mod handover;
mod migrate;
mod step;

use crate::args::{BenchArgs, BenchVerb};

pub(crate) async fn run(args: BenchArgs) -> anyhow::Result<bool> {
    match args.verb {
        BenchVerb::Step(args) => step::run(args).await,
        BenchVerb::Handover(args) => handover::run(args).await,
        BenchVerb::Migrate(args) => migrate::run(args).await,
        BenchVerb::Endpoints(args) => endpoints::run(args).await,
    }
}
