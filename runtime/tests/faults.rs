//! What users of such systems reported, as tests of the whole runtime in one process.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use connex::testkit::Cluster;
use connex::{
    Bytes, CallError, CoreConfig, CrashAt, EndpointFactory, Evidence, Group, LogicalId, NodeEvent, Outcome,
    Reply, Step, StepId, serve_fn,
};

fn group() -> Group {
    Group::new("m", "work", 0)
}

/// A gate that an endpoint's steps wait at, and the record of what was executed.
#[derive(Clone, Default)]
struct Gate {
    inner: Arc<(Mutex<GateState>, Condvar)>,
}

#[derive(Default)]
struct GateState {
    open: bool,
    waiting: usize,
    executed: HashMap<StepId, Vec<u32>>,
    order: Vec<Bytes>,
}

impl Gate {
    fn open(&self) {
        self.inner.0.lock().unwrap().open = true;
        self.inner.1.notify_all();
    }

    /// An endpoint that records each step and then waits at the gate.
    fn endpoint(&self, replica: u32) -> EndpointFactory {
        let gate = self.clone();
        serve_fn(move |step| {
            let (state, changed) = &*gate.inner;
            let mut state = state.lock().unwrap();
            state.executed.entry(step.id()).or_default().push(replica);
            state.order.push(step.payload().clone());
            state.waiting += 1;
            changed.notify_all();
            while !state.open && !step.cancelled() {
                state = changed.wait_timeout(state, Duration::from_millis(20)).unwrap().0;
            }
            state.waiting -= 1;
            Ok(step.payload().clone())
        })
    }

    /// Waits until a step waits at the gate.
    async fn somebody_waits(&self) {
        let gate = self.clone();
        tokio::task::spawn_blocking(move || {
            let (state, changed) = &*gate.inner;
            let mut state = state.lock().unwrap();
            while state.waiting == 0 {
                state = changed.wait(state).unwrap();
            }
        })
        .await
        .unwrap();
    }

    fn executed(&self) -> HashMap<StepId, Vec<u32>> {
        self.inner.0.lock().unwrap().executed.clone()
    }

    fn order(&self) -> Vec<Bytes> {
        self.inner.0.lock().unwrap().order.clone()
    }
}

fn echo() -> EndpointFactory {
    serve_fn(|step| Ok(step.payload().clone()))
}

fn body(n: u32) -> Bytes {
    Bytes::copy_from_slice(&n.to_le_bytes())
}

async fn within<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(30), what).await.expect("it ends in time")
}

fn call(cluster: &Cluster, n: u32, route: Vec<u32>) -> tokio::task::JoinHandle<Result<Reply, CallError>> {
    let handle = cluster.client().group(&group());
    tokio::spawn(async move { handle.call(Step::new("").payload(body(n)).route(route)).await })
}

/// F03: a replica with a one-slot engine has five steps and departs before it starts the second.
async fn the_other_four_finish_elsewhere(depart: impl AsyncFn(&mut Cluster, &LogicalId)) {
    let config = CoreConfig {
        sender: connex::protocol::step::SenderConfig { k: Some(8), ..Default::default() },
        ..CoreConfig::default()
    };
    let mut cluster = Cluster::with(config).await;
    let (first, second) = (Gate::default(), Gate::default());
    second.open();
    cluster.serve(group().replica(0), first.endpoint(0)).await;
    let calls: Vec<_> = (0..5).map(|n| call(&cluster, n, vec![0])).collect();
    first.somebody_waits().await;
    while cluster.client().group(&group()).unfinished() < 5 {
        tokio::task::yield_now().await;
    }
    cluster.serve(group().replica(1), second.endpoint(1)).await;
    depart(&mut cluster, &group().replica(0)).await;
    for (n, call) in calls.into_iter().enumerate() {
        let reply = within(call).await.unwrap().unwrap();
        assert_eq!(reply.body, body(n as u32));
        assert_eq!(reply.route, [1]);
    }
    let executed = second.executed();
    assert_eq!(executed.len(), 5);
    assert!(executed.values().all(|times| times.len() == 1), "{executed:?}");
    assert_eq!(first.executed().len(), 1, "the departed replica had started one");
    first.open();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f03_steps_of_a_killed_replica_finish_on_the_other_each_once() {
    the_other_four_finish_elsewhere(async |cluster, lid| {
        cluster.kill(lid).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f03_steps_of_a_hung_replica_finish_on_the_other_each_once() {
    the_other_four_finish_elsewhere(async |cluster, lid| {
        cluster.hang(lid);
        let evidence = |event: &NodeEvent| matches!(event, NodeEvent::Down { .. });
        cluster.expect(evidence).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f03_steps_of_a_drained_replica_finish_on_the_other_each_once() {
    let mut cluster = Cluster::start().await;
    let (first, second) = (Gate::default(), Gate::default());
    second.open();
    cluster.serve(group().replica(0), first.endpoint(0)).await;
    let calls: Vec<_> = (0..4).map(|n| call(&cluster, n, vec![0])).collect();
    first.somebody_waits().await;
    cluster.serve(group().replica(1), second.endpoint(1)).await;
    let draining = cluster.node(&group().replica(0)).drain(Duration::from_secs(20));
    let opened = async {
        // What had not begun goes to the other at once; what executes ends where it is.
        let mut replies = Vec::new();
        for call in calls {
            replies.push(call);
            if replies.len() == 4 {
                first.open();
            }
        }
        let mut routes = Vec::new();
        for reply in replies {
            routes.push(within(reply).await.unwrap().unwrap().route);
        }
        routes
    };
    let ((), routes) = tokio::join!(draining, opened);
    assert_eq!(routes.iter().filter(|route| **route == [0]).count(), first.executed().len());
    let (first, second) = (first.executed(), second.executed());
    assert!(first.keys().all(|step| !second.contains_key(step)), "no step ran on both");
    assert_eq!(first.len() + second.len(), 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f06_a_silent_receiver_is_found_down_although_messages_are_sent_to_it() {
    let mut cluster = Cluster::start().await;
    cluster.serve(group().replica(0), echo()).await;
    let lid = group().replica(0);
    cluster.hang(&lid);
    let handle = cluster.client().group(&group());
    let sending = tokio::spawn(async move {
        for n in 0.. {
            // Refused or unanswered: only that something is sent all the time matters here.
            let _ =
                tokio::time::timeout(Duration::from_millis(5), handle.call(Step::new("").payload(body(n))))
                    .await;
        }
    });
    let down = cluster.expect(|event| matches!(event, NodeEvent::Down { .. })).await;
    sending.abort();
    let NodeEvent::Down { evidence, .. } = down else { unreachable!("it was just matched") };
    assert!(matches!(evidence, Evidence::Silence { .. } | Evidence::LeaseExpired), "{evidence}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f09_a_zombie_is_refused_by_its_incarnation_everywhere() {
    let mut cluster = Cluster::start().await;
    let lid = group().replica(0);
    let zombie = Gate::default();
    cluster.serve(lid.clone(), zombie.endpoint(0)).await;
    let pending = call(&cluster, 1, vec![]);
    zombie.somebody_waits().await;
    let old = cluster.node(&lid).me().clone();
    let old_name = cluster.name_of(&lid).to_owned();
    let mut old_events = cluster.node(&lid).events();
    // Its lease runs out while it is stopped, and another process takes the identity over.
    cluster.hub().freeze(&old_name);
    cluster.expect(|event| matches!(event, NodeEvent::Down { .. })).await;
    let successor = Gate::default();
    successor.open();
    let frozen = cluster.take(&lid);
    cluster.serve(lid.clone(), successor.endpoint(1)).await;
    assert_eq!(within(pending).await.unwrap().unwrap().body, body(1));
    // It wakes, finishes its step and sends the reply: nobody hears it, and it learns that it is over.
    cluster.hub().thaw(&old_name);
    zombie.open();
    let lost = async { while !matches!(old_events.recv().await, Ok(NodeEvent::IdentityLost)) {} };
    within(lost).await;
    let routes = cluster.directory().routes();
    assert!(routes.iter().all(|route| route.incarnation != old.incarnation), "{routes:?}");
    assert_eq!(within(call(&cluster, 2, vec![])).await.unwrap().unwrap().body, body(2));
    assert_eq!(successor.executed().len(), 2);
    drop(frozen);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f35_steps_around_a_panic_are_each_handled_once_or_reported() {
    let mut cluster = Cluster::start().await;
    let seen = Arc::new(Mutex::new(HashMap::<Bytes, u32>::new()));
    let record = seen.clone();
    let endpoint = serve_fn(move |step| {
        *record.lock().unwrap().entry(step.payload().clone()).or_default() += 1;
        assert!(step.payload() != &body(3), "the third step panics");
        Ok(step.payload().clone())
    });
    cluster.serve(group().replica(0), endpoint).await;
    let calls: Vec<_> = (1..=100).map(|n| call(&cluster, n, vec![])).collect();
    let mut failed = Vec::new();
    for (n, call) in (1..=100).zip(calls) {
        match within(call).await.unwrap() {
            Ok(reply) => assert_eq!(reply.body, body(n)),
            Err(error) => {
                assert_ne!(error.outcome(), Outcome::NotStarted);
                failed.push(n);
            }
        }
    }
    assert_eq!(failed, [3], "only the step that panicked failed");
    assert!(seen.lock().unwrap().values().all(|times| *times == 1));
}

/// F37, and the durable mailbox: a panic of any actor of the sending side, and a migration, with a hundred entries
/// waiting, lose nothing and change no order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_waiting_entries_survive_panics_and_a_migration_in_order() {
    let mut cluster = Cluster::start().await;
    let lid = group().replica(0);
    let gate = Gate::default();
    cluster.serve(lid.clone(), gate.endpoint(0)).await;
    let handle = cluster.client().group(&group());
    let mut pending = Vec::new();
    for n in 0..104 {
        let step = Step::new("").payload(body(n));
        pending.push(handle.start(step, connex::WhenFull::Wait).await.unwrap());
    }
    gate.somebody_waits().await;
    let peer = cluster.node(&lid).me().clone();
    for at in [CrashAt::Endpoint(peer), CrashAt::Group(group()), CrashAt::Groups] {
        cluster.client().core().doors().crash(at.clone(), "a fault on purpose");
        cluster.expect(|event| matches!(event, NodeEvent::Restarted { .. })).await;
        assert_eq!(handle.unfinished(), 104, "{at:?}");
    }
    let opening = gate.clone();
    let migrating = cluster.migrate(&lid);
    let open = async {
        // The migration waits for the step that executes.
        opening.open();
    };
    tokio::join!(within(migrating), open);
    for (n, pending) in (0..).zip(pending) {
        assert_eq!(within(pending).await.unwrap().body, body(n));
    }
    let order = gate.order();
    let mut first = Vec::new();
    for payload in order {
        if !first.contains(&payload) {
            first.push(payload);
        }
    }
    assert_eq!(first, (0..104).map(body).collect::<Vec<_>>());
    let executed = gate.executed();
    assert_eq!(executed.len(), 104);
    assert!(executed.values().all(|times| times.len() == 1), "each step ran once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_that_blips_loses_nothing_and_the_peer_is_used_again() {
    let mut cluster = Cluster::start().await;
    let lid = group().replica(0);
    let gate = Gate::default();
    cluster.serve(lid.clone(), gate.endpoint(0)).await;
    let pending = call(&cluster, 7, vec![]);
    gate.somebody_waits().await;
    cluster.sever(&lid);
    cluster.expect(|event| matches!(event, NodeEvent::Down { .. })).await;
    cluster.expect(|event| matches!(event, NodeEvent::Joined { .. })).await;
    gate.open();
    assert_eq!(within(pending).await.unwrap().unwrap().body, body(7));
    assert!(gate.executed().values().all(|times| times.len() == 1), "the same life executes it once (P-2)");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropping_a_call_cancels_it_at_the_replica() {
    let mut cluster = Cluster::start().await;
    let gate = Gate::default();
    cluster.serve(group().replica(0), gate.endpoint(0)).await;
    let pending = call(&cluster, 1, vec![]);
    gate.somebody_waits().await;
    pending.abort();
    // The endpoint leaves its gate only because its step is cancelled (P-12), and serves the next one.
    let next = call(&cluster, 2, vec![]);
    gate.open();
    assert_eq!(within(next).await.unwrap().unwrap().body, body(2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadline_ends_a_step_with_an_outcome_and_hands_the_payload_back() {
    let mut cluster = Cluster::start().await;
    let gate = Gate::default();
    cluster.serve(group().replica(0), gate.endpoint(0)).await;
    let handle = cluster.client().group(&group());
    let step = Step::new("").payload(body(1)).deadline(Duration::from_millis(50));
    let error = within(handle.call(step)).await.unwrap_err();
    assert_eq!(error.code(), connex::ErrorCode::DeadlineExceeded);
    assert_eq!(error.outcome(), Outcome::MayHaveRun);
    gate.open();
}
