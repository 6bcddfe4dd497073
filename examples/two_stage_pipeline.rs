//! Discovery through a directory, and a tensor from one stage to the next over TCP.
//!
//! `cargo run --release -p connex-examples --example two_stage_pipeline`

use std::sync::Arc;

use connex::directory::{Directory, DirectoryConfig};
use connex::{Bytes, Group, Node, Step, serve_async, serve_fn};

/// A row of numbers, as bytes.
fn to_bytes(numbers: &[f32]) -> Bytes {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>().into()
}

fn to_numbers(bytes: &[u8]) -> Vec<f32> {
    let chunks = bytes.chunks_exact(4);
    chunks.map(|chunk| f32::from_le_bytes(chunk.try_into().expect("a chunk has four bytes"))).collect()
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let directory = Directory::start(DirectoryConfig::local()).await?;
    let stage = |number| Group::new("m", "pp", number);

    // The last stage adds the numbers up.
    let last = Node::builder(stage(1).replica(0))
        .directory(directory.address())
        .serve(serve_fn(|step| Ok(to_bytes(&[to_numbers(step.payload()).iter().sum()]))))
        .start()
        .await?;
    last.ready().await;

    // The first one squares them and sends the whole tensor on; a megabyte travels by a one-sided read.
    let sender = Node::client().directory(directory.address()).start().await?;
    let next = sender.group(&stage(1));
    next.ready().await;
    println!("discovered: {} at {}", next.replicas()[0].peer.lid, next.replicas()[0].address);
    let forward = serve_async(move |step: Arc<connex::StepContext>| {
        let next = next.clone();
        async move {
            let squares: Vec<f32> = to_numbers(step.payload()).iter().map(|x| x * x).collect();
            let reply = next.call(Step::new("").payload(to_bytes(&squares))).await;
            reply.map(|reply| reply.body).map_err(|error| error.to_string())
        }
    });
    let first =
        Node::builder(stage(0).replica(0)).directory(directory.address()).serve(forward).start().await?;
    first.ready().await;

    let client = Node::client().directory(directory.address()).start().await?;
    let pipeline = client.group(&stage(0));
    pipeline.ready().await;
    let numbers = vec![2.0; 1 << 18];
    let reply = pipeline.call(Step::new("").payload(to_bytes(&numbers))).await?;
    println!("{} numbers, squared and summed: {}", numbers.len(), to_numbers(&reply.body)[0]);
    Ok(())
}
