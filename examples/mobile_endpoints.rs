//! An endpoint that dies with a step in flight, comes back, moves to a new address under the same identity, and leaves.
//!
//! `cargo run --release -p connex-examples --example mobile_endpoints`

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use connex::testkit::Cluster;
use connex::{Bytes, EndpointFactory, Group, NodeEvent, Step, serve_fn};

/// Holds steps back until it is opened, so that there is one in flight when it matters.
#[derive(Clone, Default)]
struct Gate(Arc<(Mutex<(bool, usize)>, Condvar)>);

impl Gate {
    fn set(&self, open: bool) {
        self.0.0.lock().expect("no holder panics").0 = open;
        self.0.1.notify_all();
    }

    fn pass(&self) {
        let mut state = self.0.0.lock().expect("no holder panics");
        state.1 += 1;
        self.0.1.notify_all();
        while !state.0 {
            state = self.0.1.wait(state).expect("no holder panics");
        }
    }

    async fn reached(&self, times: usize) {
        while self.0.0.lock().expect("no holder panics").1 < times {
            tokio::task::yield_now().await;
        }
    }

    fn endpoint(&self, replica: u32) -> EndpointFactory {
        let gate = self.clone();
        serve_fn(move |step| {
            gate.pass();
            Ok(Bytes::from(format!("{} from replica {replica}", String::from_utf8_lossy(step.payload()))))
        })
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut cluster = Cluster::start().await;
    let group = Group::new("m", "mobile", 0);
    let (lid, other) = (group.replica(0), group.replica(1));
    let (gate, open) = (Gate::default(), Gate::default());
    open.set(true);
    cluster.serve(lid.clone(), gate.endpoint(0)).await;
    let handle = cluster.client().group(&group);

    let pending = handle.start(Step::new("").payload("hello").route(vec![0]), connex::WhenFull::Wait).await?;
    gate.reached(1).await;
    println!("sent: step {} executes on {lid}", pending.id());
    cluster.serve(other.clone(), open.endpoint(1)).await;

    let endpoint = cluster.kill(&lid).await;
    println!("killed: {lid}");
    let event = cluster.expect(|event| matches!(event, NodeEvent::HandedOver { .. })).await;
    if let NodeEvent::HandedOver { from, to: Some(to), steps, evidence, .. } = event {
        println!("handover: {} step from {} to {} ({evidence})", steps.len(), from.lid, to.lid);
    }
    println!("reply: {}", String::from_utf8_lossy(&pending.await?.body));

    gate.set(true);
    cluster.serve(lid.clone(), endpoint).await;
    let reply = handle.call(Step::new("").payload("welcome back").route(vec![0])).await?;
    println!("rejoined: {}", String::from_utf8_lossy(&reply.body));

    let before = cluster.name_of(&lid).to_owned();
    cluster.migrate(&lid).await;
    let reply = handle.call(Step::new("").payload("moved").route(vec![0])).await?;
    println!("migrated: {before} to {}: {}", cluster.name_of(&lid), String::from_utf8_lossy(&reply.body));

    cluster.node(&other).drain(Duration::from_secs(5)).await;
    cluster.expect(|event| matches!(event, NodeEvent::Down { peer, .. } if peer.lid == other)).await;
    let reply = handle.call(Step::new("").payload("one left").route(vec![1])).await?;
    println!("scaled down: {other} left; {}", String::from_utf8_lossy(&reply.body));
    Ok(())
}
