//! `connex stage`.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use connex::directory::Registration;
use connex::engine::Engine;
use connex::engine::recorded::{Ledger, Recorded};
use connex::pipeline::{self, EngineFactory, PipelineConfig};
use connex::transport::tcp::TcpConfig;
use connex::{Core, Node, NodeEvent, Reach, Standing};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;

use crate::args::{Plant, StageArgs};
use crate::child::{asked_to_end, die_with_parent, listen_to_parent};
use crate::model::{Habits, Model, share};
use crate::report::{Line, host_ns, say, tell};

/// Commands of the parent that may wait.
const COMMANDS_MAX: usize = 64;

pub(crate) async fn run(args: StageArgs) -> anyhow::Result<bool> {
    die_with_parent(args.parent);
    let announce = Arc::new(AtomicBool::new(false));
    let (commands, mut commanded) = mpsc::channel::<String>(COMMANDS_MAX);
    let flag = announce.clone();
    listen_to_parent(args.parent, move |command| match command {
        "executing" => flag.store(true, Ordering::SeqCst),
        // A parent that asks faster than it is answered waits. The receiver lives as long as the process.
        other => drop(commands.blocking_send(other.to_owned())),
    });

    let number = args.lid.group().stage();
    if number >= args.stages {
        bail!(
            "{}: the pipeline has {} stages, so the last is number {}",
            args.lid,
            args.stages,
            args.stages - 1
        );
    }
    let model = Model::resolve(&args.model)?;
    let layers_total = model.layers(args.stages)?;
    let layers =
        args.layers.clone().map_or_else(|| share(layers_total, number, args.stages), |layers| layers.0);
    fits(&layers, layers_total, number, args.stages)?;
    // A model that can't be loaded is said before anybody is told of this stage.
    let engine = engine_factory(&args, model, layers, announce);
    let mut migrate = args.migrate;
    loop {
        match live(&args, engine.clone(), migrate, &mut commanded).await? {
            // The engine is loaded anew, and holds nothing of the life that is over.
            End::Evicted => say!("{}: its lease ran out; it begins another life", args.lid),
            End::Replaced => {
                fail(&args, "another process holds this identity now");
                return Ok(false);
            }
            End::Asked => return Ok(true),
        }
        migrate = false;
    }
}

/// How a life of the stage ended.
enum End {
    /// Its identity was taken from it: whatever it says now is refused everywhere.
    Evicted,
    /// Its identity was taken from it, and somebody else has it.
    Replaced,
    /// It was to end, or has handed its identity over.
    Asked,
}

/// One life of the stage, under one incarnation.
async fn live(
    args: &StageArgs,
    engine: EngineFactory,
    migrate: bool,
    commanded: &mut mpsc::Receiver<String>,
) -> anyhow::Result<End> {
    let mut builder = Node::builder(args.lid.clone())
        .reach(Reach::Tcp(TcpConfig {
            listen: args.listen.clone(),
            advertise: args.advertise.clone(),
            ..TcpConfig::default()
        }))
        .directory(args.directory.clone())
        .deployment(&args.deployment)
        .serve(pipeline::endpoint(PipelineConfig { k: args.k, ..PipelineConfig::default() }, engine));
    if let Some(guardian) = args.guardian {
        builder = builder.guardian(guardian);
    }
    if migrate {
        builder = builder.migrate();
    }
    let node = builder.start().await.with_context(|| format!("stage {} can't be started", args.lid))?;
    let mut events = node.events();
    serving(args, &node).await?;
    let mut asked = std::pin::pin!(asked_to_end());
    let end = loop {
        tokio::select! {
            event = events.recv() => match event {
                Ok(NodeEvent::IdentityLost) => break lost(&node),
                Ok(NodeEvent::HandedAway) => break End::Asked,
                Ok(event) => show(args, &event),
                Err(RecvError::Lagged(missed)) => {
                    tracing::warn!(missed, "events were missed");
                    // Its own end may be among them.
                    match node.registration().map(Registration::standing) {
                        Some(Standing::Lost) => break lost(&node),
                        Some(Standing::Left) => break End::Asked,
                        _ => {}
                    }
                }
                Err(RecvError::Closed) => bail!("{}: the node ended", args.lid),
            },
            command = commanded.recv(), if args.parent.is_some() => match command.as_deref() {
                Some("stats") => tell_stats(&node),
                Some("leave") => {
                    node.drain(Duration::from_secs(10)).await;
                    break End::Asked;
                }
                _ => {}
            },
            () = &mut asked => {
                node.drain(Duration::from_secs(10)).await;
                break End::Asked;
            }
        }
    };
    node.shutdown().await;
    Ok(end)
}

/// The end of a life that lost its identity: to another, if the directory's last word names one under it.
fn lost(node: &Node) -> End {
    let me = node.me();
    let held =
        node.core().routes().iter().any(|route| route.lid == me.lid && route.incarnation != me.incarnation);
    if held { End::Replaced } else { End::Evicted }
}

/// Refuses a range that can't be this stage's. Whether it continues the neighbours' the first step tells.
fn fits(layers: &Range<u32>, total: u32, number: u16, stages: u16) -> anyhow::Result<()> {
    if layers.end > total {
        bail!("there are no layers {layers:?}: the model has 0..{total}");
    }
    if (layers.start == 0) != (number == 0) {
        bail!(
            "stage {number} can't have layers {layers:?}: stage 0 begins with layer 0, and no other stage does"
        );
    }
    if (layers.end == total) != (number + 1 == stages) {
        bail!(
            "stage {number} of {stages} can't have layers {layers:?}: the last stage ends with layer {total}, and no \
             other stage does"
        );
    }
    Ok(())
}

/// Waits until the stage holds its identity, and says so.
async fn serving(args: &StageArgs, node: &Node) -> anyhow::Result<()> {
    let waiting = async {
        let Some(registration) = node.registration() else { return };
        let mut said = None;
        loop {
            let before = said.clone();
            let standing = registration.wait_for(|standing| Some(standing) != before.as_ref()).await;
            if let Standing::Refused(refusal) = &standing {
                say!("{}: {refusal}", args.lid);
            }
            said = Some(standing);
        }
    };
    let standing = tokio::select! {
        standing = node.ready() => standing,
        () = waiting => unreachable!("it waits for ever"),
    };
    if !matches!(standing, Standing::Registered(_)) {
        bail!("{}: not registered: {standing:?}", args.lid);
    }
    if args.parent.is_some() {
        tell(&Line::Ready {
            lid: args.lid.to_string(),
            incarnation: node.me().incarnation.to_string(),
            address: node.address().to_string(),
            pid: std::process::id(),
        });
    } else {
        say!("{} serves at {}", args.lid, node.address());
    }
    Ok(())
}

fn engine_factory(
    args: &StageArgs,
    model: Model,
    layers: std::ops::Range<u32>,
    announce: Arc<AtomicBool>,
) -> EngineFactory {
    let habits = Habits {
        step_time: Duration::from_micros(args.toy_step_us),
        loses_state: args.plant == Some(Plant::LostState),
    };
    let (stages, ledger, plant) = (args.stages, args.ledger.clone(), args.plant);
    Arc::new(move |core: &Core| {
        let inner = model.engine(stages, layers.clone(), habits).map_err(|error| format!("{error:#}"))?;
        let me = core.me();
        let ledger = match &ledger {
            None => None,
            Some(path) => Some(
                Ledger::open(path, me.lid.replica(), me.incarnation)
                    .map_err(|error| format!("the ledger {}: {error}", path.display()))?,
            ),
        };
        let announce = announce.clone();
        let on_step = Box::new(move |step: connex::StepId| {
            if announce.swap(false, Ordering::SeqCst) {
                tell(&Line::Executing { step: step.to_string(), at_ns: host_ns() });
            }
        });
        Ok(Box::new(Recorded::new(inner, ledger, on_step, plant == Some(Plant::Rerun))) as Box<dyn Engine>)
    })
}

fn fail(args: &StageArgs, why: &str) {
    if args.parent.is_some() {
        tell(&Line::Failed { why: why.to_owned() });
    }
    say!("{}: {why}", args.lid);
}

fn tell_stats(node: &Node) {
    let (submitted, completed, failed) = node.core().step_counts();
    tell(&Line::Stats { submitted, completed, failed });
}

/// Tells the parent what happened, or a person.
fn show(args: &StageArgs, event: &NodeEvent) {
    let line = line_of(event);
    match (line, args.parent) {
        (Some(line), Some(_)) => tell(&line),
        (Some(Line::Told { text }), None) => say!("{}: {text}", args.lid),
        (Some(line), None) => say!("{}: {line:?}", args.lid),
        (None, _) => {}
    }
}

/// What a supervision event says to a parent.
pub(crate) fn line_of(event: &NodeEvent) -> Option<Line> {
    let told = |text: String| Some(Line::Told { text });
    match event {
        NodeEvent::HandedOver { from, to, steps, evidence, .. } => Some(Line::HandedOver {
            from: from.lid.to_string(),
            from_incarnation: from.incarnation.to_string(),
            to: to.as_ref().map(|to| to.lid.to_string()),
            steps: steps.len(),
            evidence: evidence.name().to_owned(),
            at_ns: host_ns(),
        }),
        NodeEvent::Migrated { lid, paused, .. } => {
            Some(Line::Migrated { lid: lid.to_string(), paused_us: paused.as_micros() as u64 })
        }
        NodeEvent::Joined { peer, epoch } => told(format!("{} joined under epoch {epoch}", peer.lid)),
        NodeEvent::Down { peer, evidence } => told(format!("{} is down: {evidence}", peer.lid)),
        NodeEvent::Unreachable { peer, why } => told(format!("{} can't be reached: {why}", peer.lid)),
        NodeEvent::CallerRefused { why } => told(format!("a caller was refused: {why}")),
        NodeEvent::Suspected { peer, evidence } => told(format!("{} is suspected: {evidence}", peer.lid)),
        NodeEvent::Cleared { peer } => told(format!("{} is trusted again", peer.lid)),
        NodeEvent::Restarted { actor, why } => told(format!("{actor} was started again: {why}")),
        NodeEvent::DirectoryAway => told("the directory is out of reach; going on with known routes".into()),
        NodeEvent::DirectoryBack => told("the directory is back".into()),
        NodeEvent::Recovered { .. }
        | NodeEvent::Registered { .. }
        | NodeEvent::IdentityLost
        | NodeEvent::HandedAway => None,
    }
}
