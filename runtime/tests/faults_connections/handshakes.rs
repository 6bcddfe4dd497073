//! F13: one side drops its connection state, again and again, with steps in flight.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use connex::protocol::step::SenderConfig;
use connex::{
    Address, CoreConfig, EndpointFactory, Node, NodeEvent, Route, Step, StepId, Via, WhenFull, serve_async,
};
use tokio::sync::watch;

use crate::forwarder::{Forwarder, Side};
use crate::world::{expect, group, lid, until, within};

/// Steps that wait until they are let go, and how often each was executed.
#[derive(Clone)]
struct Held {
    let_go: watch::Sender<bool>,
    executed: Arc<Mutex<HashMap<StepId, u32>>>,
}

impl Held {
    fn new() -> Held {
        Held { let_go: watch::Sender::new(false), executed: Arc::default() }
    }

    /// Echoes: what says `wait` once it is let go, the rest at once.
    fn endpoint(&self) -> EndpointFactory {
        let held = self.clone();
        serve_async(move |step| {
            *held.executed.lock().unwrap().entry(step.id()).or_default() += 1;
            let mut let_go = held.let_go.subscribe();
            async move {
                if step.meta() == "wait" {
                    let_go.wait_for(|let_go| *let_go).await.expect("the test holds the sender");
                }
                Ok(step.payload().clone())
            }
        })
    }

    fn assert_once(&self, steps: usize) {
        let executed = self.executed.lock().unwrap();
        assert_eq!(executed.len(), steps);
        assert!(executed.values().all(|times| *times == 1), "each ran once in that life (P-2): {executed:?}");
    }
}

/// A replica, a client that reaches it through a forwarder only, and `k` steps of it in flight at most.
async fn through_a_forwarder(held: &Held, k: usize) -> (Node, Node, Forwarder) {
    let forwarder = Forwarder::start();
    let builder = Node::builder(lid(0)).listen("127.0.0.1:0").deployment("test").serve(held.endpoint());
    let replica = builder.start().await.unwrap();
    forwarder.aim(replica.address().split().1.parse().unwrap());
    let address = Address::new(&format!("tcp://{}", forwarder.host()));
    let route = Route { address, ..replica.route() };
    let sender = SenderConfig { k: Some(k), ..SenderConfig::default() };
    let client = Node::client()
        .listen("127.0.0.1:0")
        .deployment("test")
        .via(Via::Fixed(vec![route]))
        .config(CoreConfig { sender, ..CoreConfig::default() })
        .start()
        .await
        .unwrap();
    within(client.group(&group()).ready()).await;
    (replica, client, forwarder)
}

fn linked(node: &Node, to: &Node) -> bool {
    node.core().peers().iter().any(|peer| peer == to.me())
}

async fn one_link_is_left(replica: &Node, client: &Node, forwarder: &Forwarder) {
    until("both sides have a link", || linked(client, replica) && linked(replica, client)).await;
    until("one link of two connections is left", || forwarder.open() == 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f13_a_client_that_forgets_its_side_a_hundred_times_loses_no_step_in_flight() {
    let held = Held::new();
    let (replica, client, forwarder) = through_a_forwarder(&held, 8).await;
    let group = client.group(&group());
    let mut events = client.events();
    // A step that is sent more than 64 times is given up: each half of the rounds has its own four that wait.
    for half in 0..2u32 {
        let mut waiting = Vec::new();
        for n in 0..4u32 {
            let step = Step::new("wait").payload(format!("waits {half} {n}"));
            waiting.push(group.start(step, WhenFull::Wait).await.unwrap());
        }
        for round in 0..50u32 {
            // In flight when the connections go: with its step or its reply on the way, or before or after that.
            let quick =
                group.start(Step::new("").payload(format!("{half} {round}")), WhenFull::Wait).await.unwrap();
            forwarder.forget(Side::Caller);
            expect(&mut events, |event| matches!(event, NodeEvent::Down { .. })).await;
            assert_eq!(within(quick).await.unwrap().body, format!("{half} {round}"));
            within(group.ready()).await;
        }
        held.let_go.send_replace(true);
        for (n, waiting) in (0..4).zip(waiting) {
            assert_eq!(within(waiting).await.unwrap().body, format!("waits {half} {n}"));
        }
        held.let_go.send_replace(false);
    }
    held.assert_once(108);
    one_link_is_left(&replica, &client, &forwarder).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f13_a_replica_that_forgets_its_side_again_and_again_loses_no_step_in_flight() {
    let held = Held::new();
    let (replica, client, forwarder) = through_a_forwarder(&held, 8).await;
    let group = client.group(&group());
    let mut events = client.events();
    let waiting = group.start(Step::new("wait").payload("waits"), WhenFull::Wait).await.unwrap();
    for round in 0..3u32 {
        // Its replies can't be sent any more, and the client hears nothing but silence.
        let quick = group.start(Step::new("").payload(format!("{round}")), WhenFull::Wait).await.unwrap();
        forwarder.forget(Side::Node);
        until("the replica has noticed", || !linked(&replica, &client)).await;
        expect(&mut events, |event| matches!(event, NodeEvent::Down { .. })).await;
        assert_eq!(within(quick).await.unwrap().body, format!("{round}"));
        within(group.ready()).await;
    }
    held.let_go.send_replace(true);
    assert_eq!(within(waiting).await.unwrap().body, "waits");
    held.assert_once(4);
    one_link_is_left(&replica, &client, &forwarder).await;
}

/// A link that ends as soon as it is up is made again at a bounded rate, and holds once it can.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f13_the_rate_of_handshakes_is_capped_and_it_ends_with_one_link() {
    let held = Held::new();
    let (replica, client, forwarder) = through_a_forwarder(&held, 4).await;
    let group = client.group(&group());
    let call = group.start(Step::new("wait").payload("waits"), WhenFull::Wait).await.unwrap();
    let before = forwarder.accepted().len();
    let began = Instant::now();
    forwarder.flap(true);
    forwarder.forget(Side::Caller);
    until("a while of flapping", || began.elapsed() > Duration::from_secs(2)).await;
    let handshakes = (forwarder.accepted().len() - before) / 2;
    forwarder.flap(false);
    println!("{handshakes} handshakes in 2 s");
    assert!(handshakes >= 3, "it goes on trying: {handshakes}");
    assert!(handshakes <= 100, "{handshakes} handshakes in 2 s");
    held.let_go.send_replace(true);
    assert_eq!(within(call).await.unwrap().body, "waits");
    one_link_is_left(&replica, &client, &forwarder).await;
}
