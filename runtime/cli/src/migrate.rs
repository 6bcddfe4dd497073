//! `connex migrate`: a new process under an identity that another serves.

use crate::args::{MigrateArgs, StageArgs};
use crate::report::say;
use crate::stage;

/// Runs the new process in the foreground: it is the stage from the moment of the switch on.
pub(crate) async fn run(args: MigrateArgs) -> anyhow::Result<bool> {
    say!("taking {} over; this process serves it from then on", args.lid);
    stage::run(StageArgs {
        lid: args.lid,
        stages: args.stages,
        layers: None,
        model: args.model,
        directory: args.directory,
        listen: args.listen,
        advertise: None,
        deployment: args.deployment,
        migrate: true,
        k: 4,
        toy_step_us: 0,
        ledger: None,
        plant: None,
        guardian: None,
        parent: None,
    })
    .await
}
