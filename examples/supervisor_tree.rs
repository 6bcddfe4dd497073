//! A panic at each level of the sending side, and in the engine: who starts what again, and what is lost (nothing but
//! the step that panicked).
//!
//! `cargo run --release -p connex-examples --example supervisor_tree`

use connex::testkit::Cluster;
use connex::{CrashAt, Group, NodeEvent, Step, serve_fn};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    // The panics are on purpose; their traces would only hide the story.
    std::panic::set_hook(Box::new(|_| {}));
    let mut cluster = Cluster::start().await;
    let group = Group::new("m", "tree", 0);
    let lid = group.replica(0);
    let endpoint = serve_fn(|step| {
        assert!(&step.payload()[..] != b"panic", "this step panics");
        Ok(step.payload().clone())
    });
    cluster.serve(lid.clone(), endpoint).await;
    let handle = cluster.client().group(&group);

    let peer = cluster.node(&lid).me().clone();
    for at in [CrashAt::Endpoint(peer), CrashAt::Group(group.clone()), CrashAt::Groups] {
        println!("panic in {at:?}");
        cluster.client().core().doors().crash(at, "a fault on purpose");
        let event = cluster.expect(|event| matches!(event, NodeEvent::Restarted { .. })).await;
        if let NodeEvent::Restarted { actor, why } = event {
            println!("  started again: {actor} ({why})");
        }
        handle.call(Step::new("").payload("still here")).await?;
        println!("  a call goes through");
    }

    println!("panic in the engine");
    let mut events = cluster.node(&lid).events();
    if let Err(error) = handle.call(Step::new("").payload("panic")).await {
        println!("  the step: {error}");
    }
    while let Ok(event) = events.recv().await {
        if let NodeEvent::Restarted { actor, why } = event {
            println!("  started again: {actor} ({why})");
            break;
        }
    }
    handle.call(Step::new("").payload("still here")).await?;
    println!("  a call goes through");
    Ok(())
}
