//! `connex demo`: the main job, shown.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use connex::Step;
use connex::engine::{Engine, Text, local};
use connex::pipeline::{self, RequestMeta};
use serde::Serialize;
use tokio::sync::mpsc;

use crate::args::{DemoArgs, Kill};
use crate::deployment::{Deployment, News, Plan, Seat, What};
use crate::ledger;
use crate::model::{Habits, Model, share};
use crate::report::{Line, host_ns, round, say};

const PROMPTS: [&str; 4] = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three colours.",
    "Why is the sky blue?",
];

/// How long one step of the toy takes in a demo: long enough to be killed in.
const TOY_STEP: Duration = Duration::from_millis(4);

/// Tokens that may wait to be shown.
const TOKENS_MAX: usize = 1024;

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    processes: Vec<Process>,
    requests: Vec<Request>,
    tokens: usize,
    text: String,
    text_equals_undisturbed: bool,
    steps: Steps,
    handover: Option<Handover>,
    kill_to_handover_ms: Option<f64>,
    kill_to_next_token_ms: Option<f64>,
    rejoined: bool,
}

#[derive(Debug, Serialize)]
struct Process {
    lid: String,
    pid: u32,
    killed: bool,
}

#[derive(Debug, Serialize)]
struct Request {
    prompt: String,
    text: String,
    equals_undisturbed: bool,
}

#[derive(Debug, Default, Serialize)]
struct Steps {
    submitted: u64,
    completed: u64,
    failed: u64,
    duplicated: usize,
}

#[derive(Clone, Debug, Serialize)]
struct Handover {
    from: String,
    to: String,
    evidence: String,
    steps: usize,
}

/// A request's tokens as they come, or its end.
struct Token {
    request: usize,
    at_ns: u64,
    token: Option<u32>,
}

/// What was seen of the kill.
#[derive(Default)]
struct Seen {
    killed_ns: Option<u64>,
    handover: Option<(Handover, u64)>,
    /// When the slowest request saw its first token after the kill.
    first_after: Option<u64>,
    rejoined: bool,
}

pub(crate) async fn run(args: DemoArgs) -> anyhow::Result<bool> {
    let model = Model::resolve(&args.model)?;
    let prompts: Vec<String> = PROMPTS
        .iter()
        .enumerate()
        .map(|(at, prompt)| args.prompt.clone().filter(|_| at == 0).unwrap_or_else(|| (*prompt).to_owned()))
        .collect();
    let victim = match args.kill {
        Kill::None => None,
        Kill::At { stage, replica } if stage < args.stages && replica < args.replicas => {
            Some((stage, replica))
        }
        Kill::At { stage, replica } => {
            bail!(
                "--kill stage={stage},replica={replica}: there are {} stages of {} replicas",
                args.stages,
                args.replicas
            )
        }
    };
    let text = model.text()?;
    let tokens: Vec<Vec<u32>> = prompts.iter().map(|prompt| text.encode(prompt)).collect::<Result<_, _>>()?;

    say!("the undisturbed run: one process, no transport, no actors");
    let wanted = undisturbed(&model, args.stages, &tokens, args.tokens).await?;

    let ledger = ledger::TempLedger::new()?;
    let plan = Plan {
        toy_step: TOY_STEP,
        ledger: Some(ledger.path().to_owned()),
        ..Plan::new(model.clone(), args.stages, args.replicas)
    };
    say!("starting {} stages of {} replicas", args.stages, args.replicas);
    let deployment = Deployment::start(plan).await?;
    for seat in deployment.seats() {
        for life in deployment.lives(seat) {
            say!("  {} is process {}", life.lid, life.pid);
        }
    }
    let (outputs, seen) = generate(&deployment, &args, &tokens, &*text, victim).await?;
    let steps = steps(&deployment, &ledger).await?;
    let report = report(&deployment, model.name()?, &prompts, &outputs, &wanted, &*text, steps, seen)?;
    deployment.stop().await;

    let holds = report.requests.iter().all(|request| request.equals_undisturbed)
        && report.steps.failed == 0
        && report.steps.duplicated == 0
        && (victim.is_none()
            || report.rejoined && report.handover.as_ref().is_some_and(|handover| handover.steps >= 1));
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        show(&report, holds);
    }
    Ok(holds)
}

/// Generates in this process, on a thread of its own.
async fn undisturbed(
    model: &Model,
    stages: u16,
    prompts: &[Vec<u32>],
    tokens: u32,
) -> anyhow::Result<Vec<Vec<u32>>> {
    let (model, prompts) = (model.clone(), prompts.to_vec());
    let run = move || -> anyhow::Result<Vec<Vec<u32>>> {
        let layers = model.layers(stages)?;
        let mut engines: Vec<Box<dyn Engine>> = Vec::new();
        for stage in 0..stages {
            engines.push(model.engine(stages, share(layers, stage, stages), Habits::default())?);
        }
        Ok(local::run(&mut engines, &prompts, tokens as usize)?)
    };
    tokio::task::spawn_blocking(run).await?
}

/// Generates through the deployment, kills the victim when half of the tokens are out and a step executes on it, and
/// sees it come back and serve.
async fn generate(
    deployment: &Deployment,
    args: &DemoArgs,
    prompts: &[Vec<u32>],
    text: &dyn Text,
    victim: Option<Seat>,
) -> anyhow::Result<(Vec<Vec<u32>>, Seen)> {
    let group = deployment.client().group(&deployment.group()?);
    group.ready().await;
    let mut news = deployment.news();
    if let Some(seat) = victim {
        reach(deployment, seat, args.replicas, &mut news).await?;
    }
    let (tokens, mut incoming) = mpsc::channel(TOKENS_MAX);
    for (request, prompt) in prompts.iter().enumerate() {
        let route = victim.map(|victim| beside(victim, request as u32, args.replicas)).unwrap_or_default();
        let step = request_step(prompt, args.tokens).route(route);
        tokio::spawn(follow(deployment.client().group(&deployment.group()?), step, request, tokens.clone()));
    }
    drop(tokens);
    let mut own = deployment.client().events();
    let mut outputs = vec![Vec::new(); prompts.len()];
    let mut seen = Seen::default();
    let mut first_after: Vec<Option<u64>> = vec![None; prompts.len()];
    let half = prompts.len() * args.tokens as usize / 2;
    let mut asked = false;
    loop {
        tokio::select! {
            token = incoming.recv() => {
                let Some(Token { request, at_ns, token }) = token else { break };
                let Some(token) = token else { bail!("request {request} failed") };
                outputs[request].push(token);
                say!("  [{request}] {}", text.decode(&outputs[request]).lines().last().unwrap_or_default());
                if seen.killed_ns.is_some_and(|killed| killed < at_ns) {
                    first_after[request].get_or_insert(at_ns);
                }
                if let Some(seat) = victim
                    && !asked
                    && outputs.iter().map(Vec::len).sum::<usize>() >= half
                {
                    asked = true;
                    deployment.tell(seat, "executing");
                }
            }
            heard = news.recv() => on_news(deployment, victim, &heard?, &mut seen),
            event = own.recv() => if let Some(line) = crate::stage::line_of(&event?) {
                on_line(victim, &line, host_ns(), &mut seen);
            },
        }
    }
    if let Some(seat) = victim {
        prove_rejoined(deployment, seat, &mut news, &mut seen, args).await?;
    }
    seen.first_after = first_after.into_iter().flatten().max();
    Ok((outputs, seen))
}

fn request_step(prompt: &[u32], tokens: u32) -> Step {
    Step::new(RequestMeta { max_tokens: tokens }.encode()).payload(pipeline::encode_tokens(prompt))
}

async fn follow(group: connex::GroupHandle, step: Step, request: usize, tokens: mpsc::Sender<Token>) {
    let failed = || Token { request, at_ns: host_ns(), token: None };
    let mut stream = match group.stream(step).await {
        Ok(stream) => stream,
        Err(error) => {
            say!("request {request}: {error}");
            // The demo that would hear it has ended.
            let _ = tokens.send(failed()).await;
            return;
        }
    };
    while let Some(item) = stream.next().await {
        for token in pipeline::decode_tokens(&item).unwrap_or_default() {
            let _ = tokens.send(Token { request, at_ns: host_ns(), token: Some(token) }).await;
        }
    }
    if let Err(error) = stream.end().await {
        say!("request {request}: {error}");
        let _ = tokens.send(failed()).await;
    }
}

/// Kills the victim as soon as a step executes on it, and hears of the handover and of the return.
fn on_news(deployment: &Deployment, victim: Option<Seat>, news: &News, seen: &mut Seen) {
    let What::Line(line) = &news.what else {
        if let What::Exited(how) = &news.what {
            say!(
                "supervision: stage {} replica {} ended ({how}); starting it again",
                news.seat.0,
                news.seat.1
            );
        }
        return;
    };
    match line {
        Line::Executing { step, .. } if Some(news.seat) == victim => {
            if news.life > 0 {
                if !std::mem::replace(&mut seen.rejoined, true) {
                    say!("rejoined: the process that came back executes step {step}");
                }
            } else if seen.killed_ns.is_none() {
                seen.killed_ns = Some(deployment.kill(news.seat));
                say!("kill -9: stage {} replica {} while it executes step {step}", news.seat.0, news.seat.1);
            }
        }
        line => on_line(victim, line, news.at_ns, seen),
    }
}

fn on_line(victim: Option<Seat>, line: &Line, heard_ns: u64, seen: &mut Seen) {
    match line {
        Line::HandedOver { from, to: Some(to), steps, evidence, at_ns, .. } => {
            say!("handover: {steps} steps from {from} to {to} ({evidence})");
            let of_victim =
                victim.is_some_and(|(stage, replica)| from.ends_with(&format!("/{stage}/{replica}/0")));
            if of_victim && seen.killed_ns.is_some_and(|killed| killed <= heard_ns) {
                let handover = Handover {
                    from: from.clone(),
                    to: to.clone(),
                    evidence: evidence.clone(),
                    steps: steps + seen.handover.as_ref().map_or(0, |(before, _)| before.steps),
                };
                seen.handover = Some((handover, *at_ns));
            }
        }
        Line::Told { text } => say!("supervision: {text}"),
        _ => {}
    }
}

/// Waits for the process that came back, and asks for tokens through it until it has executed a step.
async fn prove_rejoined(
    deployment: &Deployment,
    seat: Seat,
    news: &mut tokio::sync::broadcast::Receiver<News>,
    seen: &mut Seen,
    args: &DemoArgs,
) -> anyhow::Result<()> {
    if seen.killed_ns.is_none() {
        bail!("no step executed on stage {} replica {} in time to be killed in", seat.0, seat.1);
    }
    deployment.wait_ready(seat, 1).await?;
    deployment.tell(seat, "executing");
    for _ in 0..args.tokens.max(200) {
        one_token(deployment, beside(seat, 0, args.replicas))
            .await
            .context("a request through the process that came back")?;
        while let Ok(heard) = news.try_recv() {
            on_news(deployment, Some(seat), &heard, seen);
        }
        if seen.rejoined {
            return Ok(());
        }
    }
    Ok(())
}

/// Sends short requests towards a seat until one executes there: from then on a request that prefers it gets there. The
/// first processes of a deployment serve before they all know each other.
async fn reach(
    deployment: &Deployment,
    seat: Seat,
    replicas: u32,
    news: &mut tokio::sync::broadcast::Receiver<News>,
) -> anyhow::Result<()> {
    deployment.tell(seat, "executing");
    let deadline = Instant::now() + Duration::from_secs(30);
    while Instant::now() < deadline {
        one_token(deployment, beside(seat, 0, replicas)).await.context("a request before the kill")?;
        while let Ok(heard) = news.try_recv() {
            if heard.seat == seat && matches!(heard.what, What::Line(Line::Executing { .. })) {
                return Ok(());
            }
        }
    }
    bail!("no request got to stage {} replica {} within 30 s", seat.0, seat.1)
}

async fn one_token(deployment: &Deployment, route: Vec<u32>) -> anyhow::Result<()> {
    let group = deployment.client().group(&deployment.group()?);
    let mut stream = group.stream(request_step(&[1], 1).route(route)).await?;
    while stream.next().await.is_some() {}
    stream.end().await?;
    Ok(())
}

/// The route of a request up to a seat's stage: the seat itself for the first one, the replicas beside it in turn for
/// the next.
fn beside((stage, replica): Seat, request: u32, replicas: u32) -> Vec<u32> {
    let mut route = vec![request % replicas; usize::from(stage) + 1];
    route[usize::from(stage)] = (replica + request) % replicas;
    route
}

/// The steps of the client and of the stage-0 processes that live, and executions that the ledger names twice.
async fn steps(deployment: &Deployment, ledger: &ledger::TempLedger) -> anyhow::Result<Steps> {
    let (submitted, completed, failed) = deployment.step_counts().await?;
    Ok(Steps { submitted, completed, failed, duplicated: ledger.summary(deployment)?.duplicated })
}

#[expect(clippy::too_many_arguments, reason = "it only puts together what the demo has found")]
fn report(
    deployment: &Deployment,
    model: String,
    prompts: &[String],
    outputs: &[Vec<u32>],
    wanted: &[Vec<u32>],
    text: &dyn Text,
    steps: Steps,
    seen: Seen,
) -> anyhow::Result<Report> {
    let mut processes = Vec::new();
    for seat in deployment.seats() {
        for life in deployment.lives(seat) {
            processes.push(Process { lid: life.lid.to_string(), pid: life.pid, killed: life.killed });
        }
    }
    let requests: Vec<Request> = prompts
        .iter()
        .zip(outputs.iter().zip(wanted))
        .map(|(prompt, (output, wanted))| Request {
            prompt: prompt.clone(),
            text: text.decode(output),
            equals_undisturbed: output == wanted,
        })
        .collect();
    let since_kill = |at: u64| seen.killed_ns.map(|killed| round(at.saturating_sub(killed) as f64 / 1e6));
    Ok(Report {
        model,
        processes,
        tokens: outputs.iter().map(Vec::len).sum(),
        text: requests.first().map(|request| request.text.clone()).unwrap_or_default(),
        text_equals_undisturbed: requests.iter().all(|request| request.equals_undisturbed),
        requests,
        steps,
        kill_to_handover_ms: seen.handover.as_ref().and_then(|(_, at)| since_kill(*at)),
        kill_to_next_token_ms: seen.first_after.and_then(since_kill),
        handover: seen.handover.map(|(handover, _)| handover),
        rejoined: seen.rejoined,
    })
}

fn show(report: &Report, holds: bool) {
    println!();
    for request in &report.requests {
        let same = if request.equals_undisturbed {
            "equals the undisturbed run"
        } else {
            "DIFFERS from the undisturbed run"
        };
        println!("> {}\n{}\n  ({same})\n", request.prompt, request.text);
    }
    let steps = &report.steps;
    println!(
        "steps: {} submitted, {} completed, {} failed, {} executed twice",
        steps.submitted, steps.completed, steps.failed, steps.duplicated
    );
    if let Some(handover) = &report.handover {
        println!(
            "handover: {} steps from {} to {}, on {}",
            handover.steps, handover.from, handover.to, handover.evidence
        );
    }
    if let (Some(handover), Some(token)) = (report.kill_to_handover_ms, report.kill_to_next_token_ms) {
        println!("kill to handover {handover} ms, kill to next token {token} ms");
    }
    if report.rejoined {
        println!("the process that came back serves again");
    }
    println!("{}", if holds { "nothing was lost" } else { "SOMETHING DOES NOT HOLD: see above" });
}
