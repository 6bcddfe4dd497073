//! What users of such systems reported of pipelines, as tests of stages that run in one process: a stage that dies
//! costs its neighbours nothing, and bad input fails its own request alone.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use connex::engine::recorded::{Execution, Ledger, Recorded};
use connex::engine::toy::{self, ToyConfig, ToyEngine};
use connex::engine::{Batch, Engine, EngineError, EngineInfo, RequestId, Watch};
use connex::pipeline::{self, PipelineConfig, RequestMeta};
use connex::testkit::Cluster;
use connex::{
    CallError, Core, EndpointFactory, ErrorCode, Group, GroupHandle, LogicalId, Outcome, Step, StepId,
};
use tokio::sync::watch;

fn lid(stage: u16, replica: u32) -> LogicalId {
    Group::new("toy", "pp", stage).replica(replica)
}

async fn within<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(30), what).await.expect("it ends in time")
}

/// The ranges of each request's tokens that an engine computed, in order.
type Spans = Arc<Mutex<BTreeMap<RequestId, Vec<(u32, u32)>>>>;

/// Notes which tokens the engine inside computes.
struct Spanned {
    inner: Box<dyn Engine>,
    spans: Spans,
}

impl Engine for Spanned {
    fn info(&self) -> &EngineInfo {
        self.inner.info()
    }

    fn held(&self, request: RequestId) -> u32 {
        self.inner.held(request)
    }

    fn forward(
        &mut self,
        step: StepId,
        batch: &Batch,
        input: &[u8],
        output: &mut Vec<u8>,
        watch: &dyn Watch,
    ) -> Result<(), EngineError> {
        self.inner.forward(step, batch, input, output, watch)?;
        let mut spans = self.spans.lock().unwrap();
        for row in &batch.rows {
            spans.entry(row.request).or_default().push((row.context, row.context + row.tokens));
        }
        Ok(())
    }

    fn release(&mut self, request: RequestId) {
        self.inner.release(request);
    }

    fn requests(&self) -> usize {
        self.inner.requests()
    }
}

/// A stage of toy layers, whose executions go to the ledger and its tokens to `spans`; `begun` counts its steps.
fn recorded(
    stages: u16,
    number: u16,
    ledger: &Path,
    spans: &Spans,
    begun: &watch::Sender<u64>,
) -> EndpointFactory {
    let (ledger, spans, begun) = (ledger.to_owned(), spans.clone(), begun.clone());
    let engine = Arc::new(move |core: &Core| {
        let config = ToyConfig { step_time: Duration::from_millis(1), ..ToyConfig::stage(number, stages) };
        let toy = ToyEngine::new(config).map_err(|error| error.to_string())?;
        let (me, begun) = (core.me(), begun.clone());
        let ledger =
            Ledger::open(&ledger, me.lid.replica(), me.incarnation).map_err(|error| error.to_string())?;
        let on_step = Box::new(move |_| begun.send_modify(|steps| *steps += 1));
        let inner = Box::new(Recorded::new(Box::new(toy), Some(ledger), on_step, false));
        Ok(Box::new(Spanned { inner, spans: spans.clone() }) as Box<dyn Engine>)
    });
    pipeline::endpoint(PipelineConfig::default(), engine)
}

/// A stage of toy layers.
fn toy(config: impl Fn() -> ToyConfig + Send + Sync + 'static) -> EndpointFactory {
    let engine = Arc::new(move |_: &Core| {
        let toy = ToyEngine::new(config()).map_err(|error| error.to_string())?;
        Ok(Box::new(toy) as Box<dyn Engine>)
    });
    pipeline::endpoint(PipelineConfig::default(), engine)
}

/// Generates, and tells `shown` how many tokens are out.
async fn generate(
    group: GroupHandle,
    prompt: Vec<u32>,
    tokens: u32,
    shown: watch::Sender<usize>,
) -> Result<Vec<u32>, CallError> {
    let step =
        Step::new(RequestMeta { max_tokens: tokens }.encode()).payload(pipeline::encode_tokens(&prompt));
    let mut stream = group.stream(step).await?;
    let mut out = Vec::new();
    while let Some(item) = stream.next().await {
        out.extend(pipeline::decode_tokens(&item).unwrap());
        shown.send_replace(out.len());
    }
    stream.end().await.map(|_| out)
}

/// Every (request, step) that a stage executed, by its first layer.
fn steps_of(executions: &[Execution], first_layer: u32) -> BTreeSet<(RequestId, StepId)> {
    let here = executions.iter().filter(|execution| execution.first_layer == first_layer);
    here.map(|execution| (execution.request, execution.step)).collect()
}

struct LedgerFile(PathBuf);

impl Drop for LedgerFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// P-8 and P-9: the hop that sent to the dead replica repairs the loss, and the state behind it stays in use.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_of_stage_1_of_4_recomputes_nothing_and_misses_nothing_in_stages_2_and_3() {
    const STAGES: u16 = 4;
    const TOKENS: u32 = 60;
    let ledger = LedgerFile(std::env::temp_dir().join(format!("connex-stage-1-of-4-{}", std::process::id())));
    let _ = std::fs::remove_file(&ledger.0);
    let mut cluster = Cluster::start().await;
    let spans: Vec<Spans> = (0..STAGES).map(|_| Spans::default()).collect();
    let victim = watch::Sender::new(0);
    for (stage, replicas) in [(3, 2), (2, 2), (1, 2), (0, 1)] {
        for replica in 0..replicas {
            let begun = if (stage, replica) == (1, 0) { &victim } else { &watch::Sender::new(0) };
            let endpoint = recorded(STAGES, stage, &ledger.0, &spans[usize::from(stage)], begun);
            cluster.serve(lid(stage, replica), endpoint).await;
        }
    }
    let prompts: Vec<Vec<u32>> = (0..4).map(|n| vec![n, n + 1, n + 2]).collect();
    let counts: Vec<watch::Sender<usize>> = prompts.iter().map(|_| watch::Sender::new(0)).collect();
    let group = cluster.client().group(&Group::new("toy", "pp", 0));
    let begin = |(prompt, shown): (&Vec<u32>, &watch::Sender<usize>)| {
        tokio::spawn(generate(group.clone(), prompt.clone(), TOKENS, shown.clone()))
    };
    let running: Vec<_> = prompts.iter().zip(&counts).map(begin).collect();
    // Each is in mid-generation, and the victim is about to execute another step.
    for count in &counts {
        within(count.subscribe().wait_for(|count| *count >= 10)).await.unwrap();
    }
    let mut executing = victim.subscribe();
    executing.mark_unchanged();
    within(executing.changed()).await.unwrap();
    cluster.kill(&lid(1, 0)).await;
    for (running, prompt) in running.into_iter().zip(&prompts) {
        let out = within(running).await.unwrap().unwrap();
        assert_eq!(out, toy::expected(u32::from(STAGES) * 2, prompt, TOKENS as usize));
    }
    let executions = Ledger::read(&ledger.0).unwrap();
    assert_eq!(Ledger::duplicated(&executions), 0, "no life applies a step twice (P-2)");
    // Stages 2 and 3 computed every token of every request once and in order, whichever replica did. Only the token
    // whose result was on its way back through the victim is asked for again, as its result is lost with the victim.
    for stage in [2, 3] {
        let spans = spans[stage].lock().unwrap();
        assert_eq!(spans.len(), prompts.len());
        for (request, spans) in &*spans {
            let again = spans.windows(2).filter(|pair| pair[0] == pair[1]).count();
            assert!(again <= 1, "stage {stage} computed {request} anew: {spans:?}");
            let mut once = spans.clone();
            once.dedup();
            let mut next = 0;
            for (from, to) in once {
                assert_eq!(from, next, "stage {stage} computed {request} anew: {spans:?}");
                next = to;
            }
            assert_eq!(next, 3 + TOKENS - 1, "the last token is not fed back");
        }
    }
    // What a stage reports missing it does not execute: nothing that stage 2 passed on was missing in stage 3.
    assert_eq!(steps_of(&executions, 4), steps_of(&executions, 6));
    // And there was something to repair: the successor of the dead replica began requests from their start again.
    let anew = |spans: &Spans| {
        let spans = spans.lock().unwrap();
        spans.values().map(|spans| spans.iter().filter(|(from, _)| *from == 0).count() - 1).sum::<usize>()
    };
    assert!(anew(&spans[1]) >= 1 && anew(&spans[0]) >= 1, "no request was on the victim");
}

/// Starts a request, and waits for how it ends.
async fn ask(cluster: &Cluster, prompt: Vec<u32>, tokens: u32) -> Result<Vec<u32>, CallError> {
    let group = cluster.client().group(&Group::new("toy", "pp", 0));
    within(generate(group, prompt, tokens, watch::Sender::new(0))).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_longer_than_the_context_fails_that_request_alone() {
    const CONTEXT: u32 = 64;
    let mut cluster = Cluster::start().await;
    for stage in [1, 0] {
        let small = move || ToyConfig {
            context_max: CONTEXT,
            step_time: Duration::from_millis(1),
            ..ToyConfig::stage(stage, 2)
        };
        cluster.serve(lid(stage, 0), toy(small)).await;
    }
    let group = cluster.client().group(&Group::new("toy", "pp", 0));
    let shown = watch::Sender::new(0);
    let mut count = shown.subscribe();
    let other = tokio::spawn(generate(group, vec![1, 2, 3], 50, shown));
    within(count.wait_for(|count| *count >= 5)).await.unwrap();
    for len in [CONTEXT, CONTEXT + 1, 100_000] {
        let error = ask(&cluster, vec![7; len as usize], 5).await.unwrap_err();
        assert_eq!((error.code(), error.outcome()), (ErrorCode::Application, Outcome::NotStarted));
        let text = error.to_string();
        assert!(text.contains(&format!("the prompt has {len} tokens")) && text.contains("64"), "{text}");
        assert!(text.contains("shorten it"), "{text}");
    }
    // The last token that fits is generated, and then the context is full.
    let full = ask(&cluster, vec![7; CONTEXT as usize - 1], 5).await.unwrap();
    assert_eq!(full, toy::expected(4, &[7; CONTEXT as usize - 1], 1));
    assert_eq!(within(other).await.unwrap().unwrap(), toy::expected(4, &[1, 2, 3], 50));
}

/// Two stages whose layers leave a hole, or overlap, say so instead of computing nonsense; a replica that fits serves
/// on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layer_ranges_that_do_not_continue_each_other_are_named_to_the_client() {
    for (wrong, text) in [(3..4, "stage 1 holds layers 3..4"), (1..4, "stage 1 holds layers 1..4")] {
        let mut cluster = Cluster::start().await;
        let misfit = move || ToyConfig { layers: wrong.clone(), ..ToyConfig::stage(1, 2) };
        cluster.serve(lid(1, 0), toy(misfit)).await;
        cluster.serve(lid(0, 0), toy(|| ToyConfig::stage(0, 2))).await;
        let both = tokio::join!(ask(&cluster, vec![1, 2], 5), ask(&cluster, vec![3], 5));
        for error in [both.0.unwrap_err(), both.1.unwrap_err()] {
            assert_eq!((error.code(), error.outcome()), (ErrorCode::Application, Outcome::NotStarted));
            let said = error.to_string();
            assert!(said.contains(text) && said.contains("ends before layer 2"), "{said}");
        }
        // With the right range under the same identity everything is served.
        cluster.kill(&lid(1, 0)).await;
        cluster.serve(lid(1, 0), toy(|| ToyConfig::stage(1, 2))).await;
        assert_eq!(ask(&cluster, vec![1, 2], 5).await.unwrap(), toy::expected(4, &[1, 2], 5));
    }
}
