//! `connex bench handover`: from just before `kill()` of a process that executes a step until its successor's
//! transport has accepted the last step that was sent again.

use std::time::Duration;

use anyhow::Context;
use serde::Serialize;

use crate::args::BenchHandoverArgs;
use crate::deployment::{Deployment, News, Plan, Seat, What};
use crate::handovers::Handovers;
use crate::load::Load;
use crate::model::Model;
use crate::report::{Line, Percentiles, percentiles, say};

#[derive(Debug, Serialize)]
struct Report {
    runs: usize,
    kill_to_handover_ms: Percentiles,
}

pub(crate) async fn run(args: BenchHandoverArgs) -> anyhow::Result<bool> {
    let plan = Plan { toy_step: Duration::from_millis(2), ..Plan::new(Model::Toy, 2, 2) };
    let deployment = Deployment::start(plan).await?;
    let group = deployment.client().group(&deployment.group()?);
    group.ready().await;
    let handovers = Handovers::watch(&deployment);
    let load = Load::start(&group, 4, 4, 1);
    let mut values = Vec::new();
    // A step that ended between its announcement and the kill leaves nothing to hand over: such a kill is not a run.
    for kill in 0..2 * args.runs {
        let run = values.len() as u32;
        if run == args.runs {
            break;
        }
        let seat: Seat = (1, kill % 2);
        // A request lives through a few kills at most: its recovery budget is not what is measured here.
        load.counts.tokens_more(50).await;
        let life = deployment.lives(seat).len() as u32;
        executing(&deployment, seat).await?;
        let incarnation = deployment.lives(seat).last().and_then(|life| life.incarnation);
        let incarnation = incarnation.context("a process that executes has said who it is")?;
        let killed_ns = deployment.kill(seat);
        deployment.wait_ready(seat, life).await?;
        // By now every hop has moved its steps; the last of them counts.
        let Some(handover) = handovers.from(incarnation) else { continue };
        values.push(handover.at_ns.saturating_sub(killed_ns) as f64 / 1e6);
        if (run + 1).is_multiple_of(50) {
            say!("{} of {} runs", run + 1, args.runs);
        }
    }
    load.finish().await;
    handovers.check_complete()?;
    deployment.stop().await;
    let report = Report { runs: values.len(), kill_to_handover_ms: percentiles(values) };
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        println!("{report:#?}");
    }
    Ok(report.runs == args.runs as usize)
}

/// Waits until a step begins to execute on the seat.
async fn executing(deployment: &Deployment, wanted: Seat) -> anyhow::Result<()> {
    let mut news = deployment.news();
    deployment.tell(wanted, "executing");
    loop {
        let heard = tokio::time::timeout(Duration::from_secs(30), news.recv()).await;
        let News { seat, what, .. } = heard.context("no step came to the victim within 30 s")??;
        if seat == wanted && matches!(what, What::Line(Line::Executing { .. })) {
            return Ok(());
        }
    }
}
