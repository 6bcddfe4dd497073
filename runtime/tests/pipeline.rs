//! The whole stack in one process on the mem transport: directory, stages, a client.

use std::sync::Arc;
use std::time::Duration;

use connex::directory::{Directory, DirectoryConfig};
use connex::engine::Engine;
use connex::engine::toy::{self, ToyConfig, ToyEngine};
use connex::pipeline::{self, PipelineConfig, RequestMeta};
use connex::protocol::directory::RegistryConfig;
use connex::transport::mem::MemHub;
use connex::{Core, Group, Node, NodeEvent, Reach, Step};
use tokio::sync::watch;

const STAGES: u16 = 2;

fn reach(hub: &MemHub, name: &str) -> Reach {
    Reach::Mem(hub.clone(), name.to_owned())
}

async fn directory(hub: &MemHub) -> Directory {
    Directory::start(DirectoryConfig {
        reach: reach(hub, "directory"),
        deployment: "test".into(),
        registry: RegistryConfig { first: true, ..RegistryConfig::default() },
        state_file: None,
    })
    .await
    .unwrap()
}

async fn stage(
    hub: &MemHub,
    directory: &Directory,
    stage: u16,
    replica: u32,
    name: &str,
    step_time: Duration,
) -> Node {
    let engine = Arc::new(move |_: &Core| {
        let config = ToyConfig { step_time, ..ToyConfig::stage(stage, STAGES) };
        let engine = ToyEngine::new(config).map_err(|error| error.to_string())?;
        Ok(Box::new(engine) as Box<dyn Engine>)
    });
    let node = Node::builder(Group::new("toy", "pp", stage).replica(replica))
        .reach(reach(hub, name))
        .directory(directory.address())
        .deployment("test")
        .serve(pipeline::endpoint(PipelineConfig::default(), engine))
        .start()
        .await
        .unwrap();
    node.ready().await;
    node
}

async fn client(hub: &MemHub, directory: &Directory) -> Node {
    let node = Node::client()
        .reach(reach(hub, "client"))
        .directory(directory.address())
        .deployment("test")
        .start()
        .await
        .unwrap();
    node.ready().await;
    node
}

async fn generate(node: &Node, prompt: &[u32], tokens: u32) -> Vec<u32> {
    generate_shown(node, prompt, tokens, &watch::Sender::new(0)).await
}

/// The same; `out` counts the tokens as they come.
async fn generate_shown(node: &Node, prompt: &[u32], tokens: u32, shown: &watch::Sender<usize>) -> Vec<u32> {
    let group = node.group(&Group::new("toy", "pp", 0));
    let step =
        Step::new(RequestMeta { max_tokens: tokens }.encode()).payload(pipeline::encode_tokens(prompt));
    let mut stream = group.stream(step).await.unwrap();
    let mut out = Vec::new();
    while let Some(item) = stream.next().await {
        out.extend(pipeline::decode_tokens(&item).unwrap());
        shown.send_replace(out.len());
    }
    stream.end().await.unwrap();
    out
}

fn expected(prompt: &[u32], tokens: u32) -> Vec<u32> {
    toy::expected(u32::from(STAGES) * 2, prompt, tokens as usize)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_goes_through_both_stages_and_back() {
    let hub = MemHub::default();
    let directory = directory(&hub).await;
    let _first = stage(&hub, &directory, 0, 0, "s0r0", Duration::ZERO).await;
    let _second = stage(&hub, &directory, 1, 0, "s1r0", Duration::ZERO).await;
    let client = client(&hub, &directory).await;
    assert_eq!(generate(&client, &[1, 2, 3], 20).await, expected(&[1, 2, 3], 20));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_of_either_stage_in_mid_generation_changes_nothing_that_the_client_sees() {
    for victim in ["s0r0", "s1r0", "s0r1", "s1r1"] {
        let hub = MemHub::default();
        let directory = directory(&hub).await;
        let mut stages = Vec::new();
        for (number, replica, name) in [(0, 0, "s0r0"), (0, 1, "s0r1"), (1, 0, "s1r0"), (1, 1, "s1r1")] {
            stages.push(stage(&hub, &directory, number, replica, name, Duration::from_millis(1)).await);
        }
        let client = Arc::new(client(&hub, &directory).await);
        let prompts: Vec<Vec<u32>> = (0..4).map(|n| vec![n, n + 1, n + 2]).collect();
        let mut counts = Vec::new();
        let running: Vec<_> = prompts
            .iter()
            .cloned()
            .map(|prompt| {
                let client = client.clone();
                let shown = watch::Sender::new(0);
                counts.push(shown.subscribe());
                tokio::spawn(async move { generate_shown(&client, &prompt, 40, &shown).await })
            })
            .collect();
        let mut events: Vec<_> = stages.iter().map(Node::events).collect();
        events.push(client.events());
        // Every request is in the middle of its generation.
        for count in &mut counts {
            count.wait_for(|count| *count >= 5).await.unwrap();
        }
        hub.crash(victim);
        for (running, prompt) in running.into_iter().zip(&prompts) {
            let out = tokio::time::timeout(Duration::from_secs(20), running).await.expect("it ends").unwrap();
            assert_eq!(out, expected(prompt, 40), "victim {victim}");
        }
        let mut moved = 0;
        for events in &mut events {
            while let Ok(event) = events.try_recv() {
                if let NodeEvent::HandedOver { steps, to: Some(_), .. } = event {
                    moved += steps.len();
                }
            }
        }
        println!("{victim}: {moved} steps moved");
    }
}
