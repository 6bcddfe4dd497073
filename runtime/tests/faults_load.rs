//! F36: small messages at a high rate to an endpoint that waits for a stalled peer. Memory stays bounded, submitters
//! are held back, and what keeps a deployment together still passes: death notices and lease renewals.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use connex::testkit::Cluster;
use connex::{
    Bytes, CoreConfig, Endpoint, EndpointFactory, ErrorCode, Evidence, Group, GroupHandle, Incarnation,
    LogicalId, NodeEvent, Step, StepContext, WhenFull, serve_async, serve_fn,
};
use tokio::runtime::Handle;
use tokio::sync::watch;

/// What a condition may take at most, on a machine that is busy with other things.
const SLACK: Duration = Duration::from_secs(30);

const KIB: usize = 1 << 10;

/// How long the flood lasts.
fn flood_time() -> Duration {
    let full = std::env::var("CONNEX_TEST_SCALE").is_ok_and(|scale| scale == "full");
    Duration::from_secs(if full { 60 } else { 5 })
}

fn lid(group: &str, replica: u32) -> LogicalId {
    Group::new("m", group, 0).replica(replica)
}

async fn within<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(SLACK, what).await.expect("it ends in time")
}

/// Bytes of this process in memory.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

/// What became of a flood.
#[derive(Default)]
struct Counts {
    offered: AtomicU64,
    refused: AtomicU64,
    accepted: AtomicU64,
    completed: AtomicU64,
}

/// Offers steps as fast as that goes until `stop`; those that are accepted are waited for.
async fn flood(handle: GroupHandle, when_full: WhenFull, counts: Arc<Counts>, stop: Arc<AtomicBool>) {
    let body = Bytes::from(vec![7; KIB]);
    let mut accepted = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        counts.offered.fetch_add(1, Ordering::Relaxed);
        let step = Step::new("").payload(body.clone());
        let offered = match when_full {
            WhenFull::Refuse => handle.try_call(step),
            WhenFull::Wait => {
                // A full mailbox holds the submitter back; it looks up now and then whether the flood is over.
                match tokio::time::timeout(Duration::from_millis(20), handle.start(step, when_full)).await {
                    Ok(started) => started,
                    Err(_) => continue,
                }
            }
        };
        match offered {
            Ok(pending) => accepted.push(pending),
            Err(error) => {
                assert_eq!(error.code(), ErrorCode::Overloaded, "{error}");
                counts.refused.fetch_add(1, Ordering::Relaxed);
                tokio::task::yield_now().await;
            }
        }
    }
    counts.accepted.fetch_add(accepted.len() as u64, Ordering::Relaxed);
    for pending in accepted {
        assert_eq!(within(pending).await.unwrap().body.len(), KIB);
        counts.completed.fetch_add(1, Ordering::Relaxed);
    }
}

/// An endpoint that hangs until it is let go, and then echoes.
fn stalled(let_go: &watch::Sender<bool>) -> EndpointFactory {
    let (let_go, runtime) = (let_go.subscribe(), Handle::current());
    serve_fn(move |step| {
        let mut let_go = let_go.clone();
        // An error means that the test is over.
        let _ = runtime.block_on(let_go.wait_for(|let_go| *let_go));
        Ok(step.payload().clone())
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f36_a_flood_to_an_endpoint_behind_a_stalled_one_is_held_back_in_bounded_memory() {
    let config = CoreConfig::default();
    let mailbox = config.sender.mailbox;
    let mut cluster = Cluster::with(config).await;
    let let_go = watch::Sender::new(false);
    cluster.serve(lid("stalled", 0), stalled(&let_go)).await;
    // The flooded endpoint hands each step on, and waits for it.
    let onward = cluster.client().group(&Group::new("m", "stalled", 0));
    let waits = serve_async(move |step| {
        let onward = onward.clone();
        async move {
            let step = Step::new("").payload(step.payload().clone());
            onward.call(step).await.map(|reply| reply.body).map_err(|error| error.to_string())
        }
    });
    cluster.serve(lid("front", 0), waits).await;
    for bystander in 0..2 {
        cluster.serve(lid("bystander", bystander), serve_fn(|_| Ok(Bytes::new()))).await;
    }
    let before = cluster.directory().routes();
    let handle = cluster.client().group(&Group::new("m", "front", 0));
    let (counts, stop) = (Arc::new(Counts::default()), Arc::new(AtomicBool::new(false)));
    let began = Instant::now();
    let floods: Vec<_> = [WhenFull::Refuse, WhenFull::Wait, WhenFull::Refuse, WhenFull::Wait]
        .map(|when_full| tokio::spawn(flood(handle.clone(), when_full, counts.clone(), stop.clone())))
        .into();
    within(async {
        // The mailbox fills up; from then on whoever can wait does, and whoever can't is told.
        while handle.unfinished() < mailbox || counts.refused.load(Ordering::Relaxed) < 10_000 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    let full = resident();
    // In the middle of it one peer dies, and another falls silent: both are noticed.
    let mut events = cluster.client().events();
    cluster.kill(&lid("bystander", 0)).await;
    cluster.hang(&lid("bystander", 1));
    let mut downs = Vec::new();
    while downs.len() < 2 {
        if let Ok(NodeEvent::Down { peer, evidence }) = within(events.recv()).await {
            assert_eq!(peer.lid.group().role(), "bystander", "{evidence}");
            downs.push((peer.lid.replica(), evidence));
        }
    }
    assert_eq!(downs[0].0, 0, "a closed connection is noticed before a silence: {downs:?}");
    assert!(matches!(downs[1], (1, Evidence::Silence { .. } | Evidence::LeaseExpired)), "{downs:?}");
    let mut most = 0;
    while began.elapsed() < flood_time() {
        most = most.max(handle.unfinished());
        tokio::task::yield_now().await;
    }
    let grown = resident().saturating_sub(full);
    // The leases of those that are flooded and stalled were renewed all along.
    let after = cluster.directory().routes();
    for route in before.iter().filter(|route| route.lid.group().role() != "bystander") {
        let now = after.iter().find(|now| now.lid == route.lid);
        assert_eq!(now.map(|now| (now.incarnation, now.epoch)), Some((route.incarnation, route.epoch)));
    }
    assert!(most <= mailbox, "{most} steps in a mailbox of {mailbox}");
    assert!(grown < 32 << 20, "{grown} bytes more are resident");
    stop.store(true, Ordering::Relaxed);
    let_go.send_replace(true);
    for flood in floods {
        flood.await.unwrap();
    }
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    println!(
        "{} steps offered in {:?}, {} refused, {} accepted; grown by {} KiB",
        count(&counts.offered),
        began.elapsed(),
        count(&counts.refused),
        count(&counts.accepted),
        grown >> 10
    );
    assert!(count(&counts.offered) > 100_000);
    assert!(count(&counts.accepted) >= mailbox as u64);
    assert_eq!(count(&counts.completed), count(&counts.accepted), "each that was accepted was served (P-1)");
}

/// An endpoint that hangs in its first step, and counts the words that it gets.
struct Listener {
    runtime: Handle,
    let_go: watch::Receiver<bool>,
    heard: Arc<AtomicU64>,
}

impl Endpoint for Listener {
    fn execute(&mut self, step: StepContext) {
        let _ = self.runtime.block_on(self.let_go.wait_for(|let_go| *let_go));
        step.finish(Ok(Bytes::new()));
    }

    fn notice(&mut self, _from: Incarnation, _body: Bytes) {
        self.heard.fetch_add(1, Ordering::Relaxed);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f36_words_to_an_endpoint_whose_engine_hangs_wait_in_bounded_memory() {
    let mut cluster = Cluster::start().await;
    let let_go = watch::Sender::new(false);
    let heard = Arc::new(AtomicU64::new(0));
    let (receiver, counter, runtime) = (let_go.subscribe(), heard.clone(), Handle::current());
    let endpoint: EndpointFactory = Arc::new(move |_| {
        let (runtime, let_go, heard) = (runtime.clone(), receiver.clone(), counter.clone());
        Ok(Box::new(Listener { runtime, let_go, heard }) as Box<dyn Endpoint>)
    });
    cluster.serve(lid("stalled", 0), endpoint).await;
    let handle = cluster.client().group(&Group::new("m", "stalled", 0));
    let hangs = handle.start(Step::new(""), WhenFull::Wait).await.unwrap();
    let word = Bytes::from(vec![7; KIB]);
    let say = |count: u32| {
        for _ in 0..count {
            handle.cell().notice(0, word.clone());
        }
    };
    say(5_000);
    let full = resident();
    say(100_000);
    let grown = resident().saturating_sub(full);
    println!("grown by {} KiB", grown >> 10);
    assert!(grown < 32 << 20, "{grown} bytes more are resident");
    let_go.send_replace(true);
    within(hangs).await.unwrap();
    // What could not wait there was kept by its sender as far as that goes, and is said again.
    within(async {
        while heard.load(Ordering::Relaxed) < 1024 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert!(within(handle.call(Step::new(""))).await.is_ok());
}
