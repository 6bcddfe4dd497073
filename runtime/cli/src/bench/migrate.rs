//! `connex bench migrate`: an identity moves to a new process again and again, under load.

use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Context;
use serde::Serialize;

use crate::args::BenchMigrateArgs;
use crate::deployment::{Deployment, News, Plan, Seat, What};
use crate::ledger::TempLedger;
use crate::load::Load;
use crate::model::Model;
use crate::report::{Line, Percentiles, percentiles, say};

#[derive(Debug, Serialize)]
struct Report {
    runs: u32,
    steps: Steps,
    requests: Requests,
    pause_ms: Percentiles,
}

#[derive(Debug, Serialize)]
struct Steps {
    /// As the client and the stage-0 processes count them; the executions below are the ledger's.
    submitted: u64,
    completed: u64,
    failed: u64,
    duplicated: usize,
    reordered: usize,
    wrong: u64,
}

#[derive(Debug, Serialize)]
struct Requests {
    submitted: u64,
    completed: u64,
    lost: u64,
}

pub(crate) async fn run(args: BenchMigrateArgs) -> anyhow::Result<bool> {
    let ledger = TempLedger::new()?;
    let plan = Plan {
        toy_step: Duration::from_millis(1),
        ledger: Some(ledger.path().to_owned()),
        ..Plan::new(Model::Toy, 2, 2)
    };
    let deployment = Deployment::start(plan).await?;
    let group = deployment.client().group(&deployment.group()?);
    group.ready().await;
    let load = Load::start(&group, 4, 8, 3);
    let mut pauses = Vec::new();
    for run in 0..args.runs {
        load.counts.tokens_more(30).await;
        let seat: Seat = (1, run % 2);
        pauses.extend(migrate(&deployment, seat).await?);
        if (run + 1) % 50 == 0 {
            say!("{} of {} migrations", run + 1, args.runs);
        }
    }
    load.counts.tokens_more(50).await;
    let counts = load.counts.clone();
    let lost = load.finish().await;
    let executions = ledger.summary(&deployment)?;
    let (submitted, completed, failed) = deployment.step_counts().await?;
    deployment.stop().await;
    let report = Report {
        runs: args.runs,
        steps: Steps {
            submitted,
            completed,
            failed,
            duplicated: executions.duplicated,
            reordered: executions.reordered,
            wrong: counts.wrong.load(Ordering::SeqCst),
        },
        requests: Requests {
            submitted: counts.submitted.load(Ordering::SeqCst),
            completed: counts.completed.load(Ordering::SeqCst),
            lost,
        },
        pause_ms: percentiles(pauses),
    };
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        println!("{report:#?}");
    }
    let Report { steps, requests, .. } = &report;
    let clean = steps.failed + steps.wrong + requests.lost == 0 && steps.duplicated + steps.reordered == 0;
    Ok(clean && steps.submitted == steps.completed && requests.submitted == requests.completed)
}

/// Moves one identity; returns how long each submitter held its mailbox back, in milliseconds.
async fn migrate(deployment: &Deployment, wanted: Seat) -> anyhow::Result<Vec<f64>> {
    let mut news = deployment.news();
    let life = deployment.lives(wanted).len() as u32;
    deployment.migrate(wanted)?;
    let mut pauses = Vec::new();
    let (mut ready, mut left) = (false, false);
    while !(ready && left) {
        let heard = tokio::time::timeout(Duration::from_secs(30), news.recv()).await;
        let News { seat, life: of, what, .. } = heard.context("a migration did not end within 30 s")??;
        match what {
            What::Line(Line::Migrated { paused_us, .. }) => pauses.push(paused_us as f64 / 1e3),
            What::Line(Line::Ready { .. }) if seat == wanted && of == life => ready = true,
            What::Exited(_) if seat == wanted && of + 1 == life => left = true,
            _ => {}
        }
    }
    Ok(pauses)
}
