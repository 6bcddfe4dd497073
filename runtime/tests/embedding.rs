//! What those who embed the runtime rely on, beyond what survives a fault.

use std::sync::Arc;
use std::time::Duration;

use connex::testkit::Cluster;
use connex::{Bytes, Group, Node, Outcome, Step, StepContext, Via, WhenFull, serve_async, serve_fn};
use tokio::sync::mpsc;

fn group() -> Group {
    Group::new("m", "work", 0)
}

async fn within<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(30), what).await.expect("it ends in time")
}

/// Says when it is dropped.
struct Dropped(mpsc::UnboundedSender<&'static str>);

impl Drop for Dropped {
    fn drop(&mut self) {
        let _ = self.0.send("dropped");
    }
}

/// An endpoint whose steps never end by themselves, and what is heard of them.
fn endless() -> (connex::EndpointFactory, mpsc::UnboundedReceiver<&'static str>) {
    let (say, heard) = mpsc::unbounded_channel();
    let endpoint = serve_async(move |_step: Arc<StepContext>| {
        let say = say.clone();
        async move {
            let _dropped = Dropped(say.clone());
            let _ = say.send("begun");
            std::future::pending::<Result<Bytes, String>>().await
        }
    });
    (endpoint, heard)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_async_step_has_its_future_dropped_at_the_replica() {
    let mut cluster = Cluster::start().await;
    let (endpoint, mut heard) = endless();
    cluster.serve(group().replica(0), endpoint).await;
    let handle = cluster.client().group(&group());
    let pending = handle.start(Step::new(""), WhenFull::Wait).await.unwrap();
    assert_eq!(within(heard.recv()).await, Some("begun"));
    drop(pending);
    assert_eq!(within(heard.recv()).await, Some("dropped"), "the cancel crosses the wire (P-12)");
    // Nothing executes any more, so the replica can leave at once.
    within(cluster.node(&group().replica(0)).drain(Duration::MAX)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn async_steps_end_with_their_node() {
    let (endpoint, mut heard) = endless();
    let server = Node::builder(group().replica(0)).serve(endpoint).start().await.unwrap();
    let client = Node::client().via(Via::Fixed(vec![server.route()])).start().await.unwrap();
    let handle = client.group(&group());
    within(handle.ready()).await;
    let _pending = handle.start(Step::new(""), WhenFull::Wait).await.unwrap();
    assert_eq!(within(heard.recv()).await, Some("begun"));
    server.shutdown().await;
    assert_eq!(within(heard.recv()).await, Some("dropped"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_in_an_async_step_fails_that_step_alone() {
    let mut cluster = Cluster::start().await;
    let endpoint = serve_async(|step: Arc<StepContext>| {
        assert!(!step.payload().is_empty(), "an empty payload panics, before the future is made");
        async move { Ok(step.payload().clone()) }
    });
    cluster.serve(group().replica(0), endpoint).await;
    let handle = cluster.client().group(&group());
    let error = within(handle.call(Step::new(""))).await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::MayHaveRun);
    let reply = within(handle.call(Step::new("").payload("on"))).await.unwrap();
    assert_eq!(reply.body, "on");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pending_step_is_still_named_after_its_end() {
    let mut cluster = Cluster::start().await;
    cluster.serve(group().replica(0), serve_fn(|step| Ok(step.payload().clone()))).await;
    let handle = cluster.client().group(&group());
    let mut pending = handle.start(Step::new(""), WhenFull::Wait).await.unwrap();
    let id = pending.id();
    within(&mut pending).await.unwrap();
    assert_eq!(pending.id(), id);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_waits_for_a_replica_is_let_go_when_the_node_ends() {
    let client = Node::client().start().await.unwrap();
    let handle = client.group(&group());
    let waiting = tokio::spawn({
        let handle = handle.clone();
        async move { handle.ready().await }
    });
    tokio::task::yield_now().await;
    client.shutdown().await;
    within(waiting).await.unwrap();
    within(handle.ready()).await;
    let error = within(handle.call(Step::new("").payload("back"))).await.unwrap_err();
    assert_eq!((error.outcome(), error.step), (Outcome::NotStarted, Step::new("").payload("back")));
}
