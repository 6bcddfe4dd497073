//! F37: a panic in a handler, a panic in a stop hook, and a death during the start. In all of them what the process
//! held is released, and the supervisor decides what follows: it does not die of it.

use std::collections::HashSet;
use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use connex::directory::{Directory, DirectoryConfig};
use connex::protocol::directory::RegistryConfig;
use connex::testkit::Cluster;
use connex::transport::mem::MemHub;
use connex::transport::tcp::TcpConfig;
use connex::transport::{Event, Handler, Identity};
use connex::{
    Bytes, CallError, Core, Endpoint, EndpointFactory, ErrorCode, Group, Incarnation, LogicalId, Node,
    NodeEvent, Outcome, Peer, Reach, Standing, Step, StepContext, WhenFull, serve_fn,
};

/// What a condition may take at most, on a machine that is busy with other things.
const SLACK: Duration = Duration::from_secs(20);

/// Larger than what travels in a step's own frame: it lies in a slot of registered memory.
const IN_A_SLOT: usize = 1 << 20;

fn group() -> Group {
    Group::new("m", "work", 0)
}

fn lid() -> LogicalId {
    group().replica(0)
}

async fn within<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(SLACK, what).await.expect("it ends in time")
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < SLACK, "not within {SLACK:?}: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// A payload that shows when nobody holds it any more.
struct Held {
    _alive: Arc<()>,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &[7; IN_A_SLOT]
    }
}

fn held() -> (Bytes, Weak<()>) {
    let alive = Arc::new(());
    let released = Arc::downgrade(&alive);
    (Bytes::from_owner(Held { _alive: alive }), released)
}

/// An endpoint with a bad end: it panics when it is dropped, and on every step that says so.
struct Spiteful {
    alive: Arc<AtomicU32>,
    /// Notes that no thread holds the engine any more.
    _core: Arc<Core>,
}

impl Endpoint for Spiteful {
    fn execute(&mut self, step: StepContext) {
        assert!(step.meta() != "panic", "planted in the handler");
        let body = step.payload().slice(..1);
        step.finish(Ok(body));
    }
}

impl Drop for Spiteful {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::SeqCst);
        panic!("planted in the stop hook");
    }
}

/// Spiteful endpoints; how many of them there are, and the cores that they were given.
#[derive(Clone, Default)]
struct Made {
    alive: Arc<AtomicU32>,
    cores: Arc<Mutex<Vec<Weak<Core>>>>,
}

impl Made {
    fn endpoint(&self) -> EndpointFactory {
        let made = self.clone();
        Arc::new(move |place| {
            made.alive.fetch_add(1, Ordering::SeqCst);
            made.cores.lock().unwrap().push(Arc::downgrade(&place.core));
            Ok(Box::new(Spiteful { alive: made.alive.clone(), _core: place.core }) as Box<dyn Endpoint>)
        })
    }

    /// No engine is left, and with it no thread; no core, and with it no registered memory and no socket.
    async fn all_released(&self) {
        until("every engine is gone", || self.alive.load(Ordering::SeqCst) == 0).await;
        let gone = || self.cores.lock().unwrap().iter().all(|core| core.strong_count() == 0);
        until("every core is gone", gone).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f37_a_panic_in_the_handler_and_one_in_the_stop_hook_cost_their_step_and_nothing_else() {
    let made = Made::default();
    let mut cluster = Cluster::start().await;
    cluster.serve(lid(), made.endpoint()).await;
    let before = cluster.directory().routes();
    let mut events = cluster.node(&lid()).events();
    let handle = cluster.client().group(&group());
    let mut released = Vec::new();
    for _ in 0..5 {
        let (payload, weak) = held();
        released.push(weak);
        let error = within(handle.call(Step::new("panic").payload(payload))).await.unwrap_err();
        assert_eq!((error.code(), error.outcome()), (ErrorCode::Internal, Outcome::MayHaveRun));
        let restarted = async {
            loop {
                if let Ok(NodeEvent::Restarted { actor, why }) = events.recv().await {
                    break (actor, why);
                }
            }
        };
        let (actor, why) = within(restarted).await;
        assert!(actor.starts_with("served endpoint") && why.contains("planted"), "{actor}: {why}");
        // The engine that came after it serves.
        let (payload, weak) = held();
        released.push(weak);
        assert_eq!(within(handle.call(Step::new("").payload(payload))).await.unwrap().body, [7][..]);
    }
    until("every slot is free", || released.iter().all(|payload| payload.strong_count() == 0)).await;
    assert_eq!(cluster.directory().routes(), before, "the same life holds the same lease");
    assert_eq!(made.alive.load(Ordering::SeqCst), 1);
    let node = cluster.take(&lid());
    node.drain(SLACK).await;
    assert!(cluster.directory().routes().is_empty());
    node.shutdown().await;
    made.all_released().await;
}

async fn directory(reach: Reach) -> Directory {
    let registry =
        RegistryConfig { ttl: Duration::from_millis(500), first: true, ..RegistryConfig::default() };
    let config = DirectoryConfig { reach, deployment: "test".into(), registry, state_file: None };
    Directory::start(config).await.unwrap()
}

#[derive(Clone)]
enum Net {
    Mem(MemHub),
    Tcp,
}

/// Hears nothing.
struct Deaf;

impl Handler for Deaf {
    fn handle(&self, _event: Event) {}
}

impl Net {
    /// Whether somebody could listen at the place.
    fn is_free(&self, port: u16) -> bool {
        match self {
            Net::Mem(hub) => {
                let peer = Peer { lid: lid(), incarnation: Incarnation::from_bits(1) };
                let identity = Identity { peer, deployment: "test".into() };
                hub.start("node", identity, Arc::new(Deaf)).is_ok()
            }
            Net::Tcp => TcpListener::bind(("127.0.0.1", port)).is_ok(),
        }
    }

    fn directory(&self) -> Reach {
        match self {
            Net::Mem(hub) => Reach::Mem(hub.clone(), "directory".into()),
            Net::Tcp => Reach::Tcp(TcpConfig::default()),
        }
    }

    /// The same place every time.
    fn place(&self, port: u16) -> Reach {
        match self {
            Net::Mem(hub) => Reach::Mem(hub.clone(), "node".into()),
            Net::Tcp => Reach::Tcp(TcpConfig { listen: format!("127.0.0.1:{port}"), ..TcpConfig::default() }),
        }
    }

    fn both() -> [Net; 2] {
        [Net::Mem(MemHub::default()), Net::Tcp]
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A start that is given up at any moment leaves nothing: not the address, not a thread, not the identity.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f37_a_start_that_is_aborted_half_way_releases_the_address_the_engine_and_the_identity() {
    for net in Net::both() {
        let directory = directory(net.directory()).await;
        let (made, port) = (Made::default(), free_port());
        let mut finished = 0;
        for polls in 0..40 {
            let builder = Node::builder(lid())
                .reach(net.place(port))
                .directory(directory.address())
                .deployment("test")
                .serve(made.endpoint());
            let mut starting = Box::pin(builder.start());
            let mut ended = None;
            for _ in 0..polls {
                if let std::task::Poll::Ready(node) = futures::poll!(starting.as_mut()) {
                    ended = Some(node.unwrap());
                    break;
                }
                tokio::task::yield_now().await;
            }
            finished += u32::from(ended.is_some());
            drop(starting);
            drop(ended);
            made.all_released().await;
            until("the address is free", || net.is_free(port)).await;
        }
        println!("{finished} of 40 had started");
        // Whatever registered is forgotten within a lease, and a successor holds the identity at the same place.
        let node = Node::builder(lid())
            .reach(net.place(port))
            .directory(directory.address())
            .deployment("test")
            .serve(made.endpoint())
            .start()
            .await
            .unwrap();
        let standing =
            within(node.registration().unwrap().wait_for(|now| matches!(now, Standing::Registered(_))));
        standing.await;
        assert_eq!(directory.routes().len(), 1);
        node.shutdown().await;
        made.all_released().await;
    }
}

/// A node that only watches and submits.
async fn watcher(hub: &MemHub, directory: &Directory) -> Node {
    Node::client()
        .reach(Reach::Mem(hub.clone(), "watcher".into()))
        .directory(directory.address())
        .deployment("test")
        .start()
        .await
        .unwrap()
}

/// A process that dies between its registration and its readiness is forgotten within its lease, each time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f37_a_node_that_dies_while_its_engine_is_being_made_is_forgotten_within_its_lease() {
    let hub = MemHub::default();
    let directory = directory(Reach::Mem(hub.clone(), "directory".into())).await;
    // A directory that hears from nobody at all takes itself for deaf, and evicts nobody.
    let _watcher = watcher(&hub, &directory).await;
    let mut lives = HashSet::new();
    for round in 0..3 {
        let name = format!("life {round}");
        // An engine that takes longer than anybody here waits for.
        let (begun, loading) = tokio::sync::oneshot::channel::<()>();
        let (let_go, held) = std::sync::mpsc::channel::<()>();
        let once = Mutex::new(Some((begun, held)));
        let slow: EndpointFactory = Arc::new(move |_| {
            if let Some((begun, held)) = once.lock().unwrap().take() {
                let _ = begun.send(());
                let _ = held.recv();
            }
            Err("it was never to be".into())
        });
        let node = Node::builder(lid())
            .reach(Reach::Mem(hub.clone(), name.clone()))
            .directory(directory.address())
            .deployment("test")
            .serve(slow)
            .start()
            .await
            .unwrap();
        within(loading).await.unwrap();
        let held = |now: &Standing| matches!(now, Standing::Registered(_));
        within(node.registration().unwrap().wait_for(held)).await;
        assert!(lives.insert(directory.routes()[0].incarnation), "each round is another life");
        hub.crash(&name);
        until("its lease has run out", || directory.routes().is_empty()).await;
        drop(let_go);
    }
}

/// P-1 holds to the end of the submitter's own node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_node_had_submitted_ends_as_an_error_when_the_node_does() {
    let mut cluster = Cluster::start().await;
    cluster
        .serve(
            lid(),
            serve_fn(|step| {
                if step.meta() == "hang" {
                    loop {
                        std::thread::park()
                    }
                } else {
                    Ok(Bytes::new())
                }
            }),
        )
        .await;
    let node = watcher(cluster.hub(), cluster.directory()).await;
    let handle = node.group(&group());
    within(handle.ready()).await;
    let (payload, released) = held();
    let hangs = handle.start(Step::new("hang").payload(payload), WhenFull::Wait).await.unwrap();
    let waits = handle.start(Step::new("").payload("w"), WhenFull::Wait).await.unwrap();
    node.shutdown().await;
    for pending in [hangs, waits] {
        let error = within(pending).await.unwrap_err();
        assert_eq!((error.code(), error.outcome()), (ErrorCode::Internal, Outcome::MayHaveRun));
        assert!(error.to_string().contains("the node was shut down"), "{error}");
    }
    let error = within(handle.call(Step::new("").payload("late"))).await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::NotStarted);
    until("the slot is free", || released.strong_count() == 0).await;
}

/// An engine that can't be made is tried again at a bounded rate, and its steps go where there is one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_can_not_be_made_is_tried_again_now_and_then_and_its_steps_go_elsewhere() {
    let mut cluster = Cluster::start().await;
    let broken = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let (tries, flag) = (Arc::new(AtomicU32::new(0)), broken.clone());
    let counted = tries.clone();
    let works = serve_fn(|step| Ok(step.payload().clone()));
    let inner = works.clone();
    let factory: EndpointFactory = Arc::new(move |place| {
        counted.fetch_add(1, Ordering::SeqCst);
        if flag.load(Ordering::SeqCst) { Err("no such model".into()) } else { inner(place) }
    });
    cluster.serve(lid(), factory).await;
    let handle = cluster.client().group(&group());
    let step = Step::new("").payload("moves").route(vec![0]);
    let pending = handle.start(step, WhenFull::Wait).await.unwrap();
    let began = Instant::now();
    let before = tries.load(Ordering::SeqCst);
    until("a second of failing", || began.elapsed() > Duration::from_secs(1)).await;
    let tried = tries.load(Ordering::SeqCst) - before;
    assert!((1..=10).contains(&tried), "{tried} tries in a second");
    assert_eq!(handle.unfinished(), 1);
    cluster.serve(group().replica(1), works).await;
    let reply = within(pending).await.unwrap();
    assert_eq!((reply.body, reply.route), (Bytes::from("moves"), vec![1]));
    // Once it can be made it serves like any other.
    broken.store(false, Ordering::SeqCst);
    cluster.kill(&group().replica(1)).await;
    assert_eq!(within(handle.call(Step::new("").payload("back"))).await.unwrap().route, [0]);
}

/// P-1: what no frame holds is an error of its step, not a step that waits for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metadata_a_reply_or_an_item_that_no_frame_holds_ends_its_step_with_that() {
    let mut cluster = Cluster::start().await;
    let large = Bytes::from(vec![7; 2 << 20]);
    let body = large.clone();
    let endpoint = serve_fn(move |step| {
        if step.meta() == "item" {
            step.item(body.clone());
        }
        Ok(if step.meta() == "reply" { body.clone() } else { Bytes::new() })
    });
    cluster.serve(lid(), endpoint).await;
    let handle = cluster.client().group(&group());
    let ended = |error: CallError| (error.code(), error.outcome());
    let error = within(handle.call(Step::new(large))).await.unwrap_err();
    assert_eq!(ended(error), (ErrorCode::TooLarge, Outcome::NotStarted));
    let error = within(handle.call(Step::new("reply"))).await.unwrap_err();
    assert_eq!(ended(error), (ErrorCode::TooLarge, Outcome::Ran));
    let stream = handle.stream(Step::new("item")).await.unwrap();
    let error = within(stream.end()).await.unwrap_err();
    assert_eq!(ended(error), (ErrorCode::TooLarge, Outcome::Ran));
    assert!(within(handle.call(Step::new(""))).await.is_ok());
}
