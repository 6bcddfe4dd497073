//! `connex chaos`: kills at random under load; the harness counts, not the product.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering;
use std::time::Duration;

use connex::Incarnation;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::Serialize;

use crate::args::{ChaosArgs, Plant};
use crate::deployment::{Deployment, Plan};
use crate::handovers::Handovers;
use crate::ledger::TempLedger;
use crate::load::Load;
use crate::model::Model;
use crate::report::{Percentiles, percentiles, say};

#[derive(Debug, Serialize)]
struct Report {
    kills: u32,
    kills_by_stage: BTreeMap<u16, u32>,
    steps: Steps,
    requests: Requests,
    handover_ms: Percentiles,
    handovers: usize,
}

#[derive(Debug, Serialize)]
struct Steps {
    submitted: usize,
    completed: usize,
    /// Their origin was killed before the last stage had executed them: nobody waits for them any more.
    died_with_origin: usize,
    failed: u64,
    duplicated: usize,
    wrong: u64,
}

#[derive(Debug, Serialize)]
struct Requests {
    submitted: u64,
    completed: u64,
    lost: u64,
}

pub(crate) async fn run(args: ChaosArgs) -> anyhow::Result<bool> {
    let ledger = TempLedger::new()?;
    let plan = Plan {
        toy_step: Duration::from_micros(500),
        ledger: Some(ledger.path().to_owned()),
        plant: args.plant,
        ..Plan::new(Model::Toy, args.stages, args.replicas)
    };
    say!("starting {} stages of {} replicas", args.stages, args.replicas);
    let deployment = Deployment::start(plan).await?;
    let group = deployment.client().group(&deployment.group()?);
    group.ready().await;
    let handovers = Handovers::watch(&deployment);
    let load = Load::start(&group, u32::from(args.stages) * 2, args.clients, args.seed);

    let (kills_by_stage, killed_at) = kill_at_random(&args, &deployment, &load).await?;
    load.counts.tokens_more(200).await;
    let counts = load.counts.clone();
    let lost = load.finish().await;
    let executions = ledger.summary(&deployment)?;
    let duplicated = executions.duplicated;
    deployment.stop().await;
    handovers.check_complete()?;
    // A life with no step on it when it was killed has no handover.
    let handed: Vec<f64> = killed_at
        .iter()
        .filter_map(|(life, killed)| {
            Some((handovers.from(*life)?.at_ns.saturating_sub(*killed)) as f64 / 1e6)
        })
        .collect();

    let failed = counts.failed.load(Ordering::SeqCst);
    let report = Report {
        kills: args.kills,
        kills_by_stage,
        steps: Steps {
            submitted: executions.steps,
            completed: executions.steps - executions.died_with_origin,
            died_with_origin: executions.died_with_origin,
            failed,
            duplicated,
            wrong: counts.wrong.load(Ordering::SeqCst),
        },
        requests: Requests {
            submitted: counts.submitted.load(Ordering::SeqCst),
            completed: counts.completed.load(Ordering::SeqCst),
            lost,
        },
        handovers: handed.len(),
        handover_ms: percentiles(handed),
    };
    let clean = report.steps.failed == 0
        && report.requests.lost == 0
        && report.requests.submitted == report.requests.completed;
    let holds = match args.plant {
        None => clean && report.steps.duplicated == 0 && report.steps.wrong == 0,
        Some(Plant::Rerun) => report.steps.duplicated > 0,
        Some(Plant::LostState) => report.steps.wrong > 0,
    };
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        println!("{report:#?}");
    }
    Ok(holds)
}

/// When each life was killed, in nanoseconds of the host's clock.
type Killed = HashMap<Incarnation, u64>;

/// Kills drawn processes, each once the one before is back; returns how many of each stage, and when each life ended.
async fn kill_at_random(
    args: &ChaosArgs,
    deployment: &Deployment,
    load: &Load,
) -> anyhow::Result<(BTreeMap<u16, u32>, Killed)> {
    let mut rng = StdRng::seed_from_u64(args.seed);
    let seats = deployment.seats();
    let mut kills_by_stage = BTreeMap::new();
    let mut killed_at: Killed = HashMap::new();
    for kill in 0..args.kills {
        load.counts.tokens_more(rng.random_range(1..200)).await;
        let seat = seats[rng.random_range(0..seats.len())];
        let lives = deployment.lives(seat);
        let at_ns = deployment.kill(seat);
        if let Some(incarnation) = lives.last().and_then(|life| life.incarnation) {
            killed_at.insert(incarnation, at_ns);
        }
        *kills_by_stage.entry(seat.0).or_insert(0) += 1;
        deployment.wait_ready(seat, lives.len() as u32).await?;
        if (kill + 1) % 10 == 0 {
            say!("{} of {} kills", kill + 1, args.kills);
        }
    }
    Ok((kills_by_stage, killed_at))
}
