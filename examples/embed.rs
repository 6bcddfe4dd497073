//! The runtime inside somebody's own tokio program: an engine behind two replicas, and a client that calls it.
//!
//! `cargo run --release -p connex-examples --example embed`

use anyhow::Context;
use connex::directory::{Directory, DirectoryConfig};
use connex::{Bytes, Group, Node, Step, serve_fn};

/// Somebody's own engine: it turns text around.
fn reverse(text: &[u8]) -> Result<Bytes, String> {
    let text = std::str::from_utf8(text).map_err(|error| error.to_string())?;
    Ok(text.chars().rev().collect::<String>().into())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let directory = Directory::start(DirectoryConfig::local()).await?;
    let group = Group::new("my-model", "reverse", 0);

    let mut servers = Vec::new();
    for replica in 0..2 {
        let server = Node::builder(group.replica(replica))
            .listen("127.0.0.1:0")
            .directory(directory.address())
            .serve(serve_fn(|step| reverse(step.payload())))
            .start()
            .await?;
        server.ready().await;
        servers.push(server);
    }

    let client = Node::client().directory(directory.address()).start().await?;
    let handle = client.group(&group);
    handle.ready().await;
    let reply = handle.call(Step::new("").payload("stressed")).await.context("the call")?;
    println!("{} (by replica {})", String::from_utf8_lossy(&reply.body), reply.route[0]);
    Ok(())
}
