//! The directory with real nodes, over the mem and the tcp transport: it hangs, restarts and stays away while steps
//! go on (F08), a zombie's frames are refused (F09), and neither a failing actor nor a hostile peer costs a lease.

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use connex::directory::{Directory, DirectoryConfig, DirectoryError};
use connex::protocol::directory::RegistryConfig;
use connex::protocol::wire::directory::{Message, Request, Response};
use connex::protocol::wire::hello::Lane;
use connex::protocol::wire::{self, Control, Frame, codec};
use connex::transport::mem::MemHub;
use connex::transport::tcp::TcpConfig;
use connex::transport::{Event, Handler, Identity, Op, Transport};
use connex::{
    Address, Bytes, Epoch, Group, Incarnation, LogicalId, Node, NodeEvent, Peer, Reach, Standing, Step,
    serve_fn,
};
use tokio::sync::broadcast;
use tokio::sync::mpsc;

const TTL: Duration = Duration::from_secs(1);

/// What a condition may take at most, on a machine that is busy with other things.
const SLACK: Duration = Duration::from_secs(10);

#[derive(Clone)]
enum Net {
    Mem(MemHub),
    Tcp,
}

impl Net {
    fn reach(&self, name: &str) -> Reach {
        match self {
            Net::Mem(hub) => Reach::Mem(hub.clone(), name.to_owned()),
            Net::Tcp => Reach::Tcp(TcpConfig::default()),
        }
    }

    /// At the address at which it was before.
    fn again(&self, address: &Address) -> Reach {
        let rest = address.split().1.to_owned();
        match self {
            Net::Mem(hub) => Reach::Mem(hub.clone(), rest),
            Net::Tcp => Reach::Tcp(TcpConfig { listen: rest, ..TcpConfig::default() }),
        }
    }

    fn both() -> [Net; 2] {
        [Net::Mem(MemHub::default()), Net::Tcp]
    }
}

async fn directory(reach: Reach, first: bool) -> Directory {
    let registry = RegistryConfig { ttl: TTL, first, ..RegistryConfig::default() };
    let config = DirectoryConfig { reach, deployment: "test".into(), registry, state_file: None };
    Directory::start(config).await.unwrap()
}

fn lid(replica: u32) -> LogicalId {
    Group::new("m", "pp", 0).replica(replica)
}

/// A replica whose replies name its life.
async fn replica(net: &Net, directory: &Address, replica: u32, name: &str) -> Node {
    Node::builder(lid(replica))
        .reach(net.reach(name))
        .directory(directory.clone())
        .deployment("test")
        .serve(serve_fn(move |_| Ok(Bytes::from_static(b"done"))))
        .start()
        .await
        .unwrap()
}

async fn client(net: &Net, directory: &Address, name: &str) -> Node {
    let node = Node::client()
        .reach(net.reach(name))
        .directory(directory.clone())
        .deployment("test")
        .start()
        .await
        .unwrap();
    node.ready().await;
    node.group(&Group::new("m", "pp", 0)).ready().await;
    node
}

#[track_caller]
fn until(what: &str, mut holds: impl FnMut() -> bool) -> impl Future<Output = Duration> {
    let what = what.to_owned();
    async move {
        let start = Instant::now();
        while !holds() {
            assert!(start.elapsed() < SLACK, "not within {SLACK:?}: {what}");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        start.elapsed()
    }
}

fn held(directory: &Directory, nodes: &[&Node]) -> bool {
    let routes = directory.routes();
    routes.len() == nodes.len()
        && nodes.iter().all(|node| routes.iter().any(|route| route.incarnation == node.me().incarnation))
}

/// Whether any of them was told that its identity is lost.
fn lost(events: &mut [broadcast::Receiver<NodeEvent>]) -> bool {
    events.iter_mut().any(|events| {
        std::iter::from_fn(|| events.try_recv().ok()).any(|event| matches!(event, NodeEvent::IdentityLost))
    })
}

/// Submits steps one after the other until it is dropped.
struct Load {
    stop: Arc<AtomicBool>,
    ended: Arc<AtomicU64>,
    failed: Arc<AtomicU64>,
}

impl Load {
    fn start(node: &Arc<Node>) -> Self {
        let load = Load { stop: Arc::default(), ended: Arc::default(), failed: Arc::default() };
        let (stop, ended, failed) = (load.stop.clone(), load.ended.clone(), load.failed.clone());
        let node = node.clone();
        tokio::spawn(async move {
            let group = node.group(&Group::new("m", "pp", 0));
            while !stop.load(Ordering::Relaxed) {
                match group.call(Step::new("x").deadline(Duration::from_secs(5))).await {
                    Ok(_) => ended.fetch_add(1, Ordering::Relaxed),
                    Err(error) => {
                        eprintln!("{error}");
                        failed.fetch_add(1, Ordering::Relaxed)
                    }
                };
            }
        });
        load
    }

    /// Steps go on now: another hundred end, and none fails.
    async fn goes_on(&self) {
        let before = self.ended.load(Ordering::Relaxed);
        until("another hundred steps", || self.ended.load(Ordering::Relaxed) > before + 100).await;
        assert_eq!(self.failed.load(Ordering::Relaxed), 0);
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_go_on_while_the_directory_is_stopped_and_it_learns_its_registry_again() {
    for tenths in [5, 10, 30] {
        for net in Net::both() {
            let first = directory(net.reach("directory"), true).await;
            let address = first.address();
            let nodes = [replica(&net, &address, 0, "r0").await, replica(&net, &address, 1, "r1").await];
            let client = Arc::new(client(&net, &address, "client").await);
            until("both are registered", || held(&first, &[&nodes[0], &nodes[1]])).await;
            let mut events: Vec<_> = nodes.iter().chain([&*client]).map(Node::events).collect();
            let before = first.routes().iter().map(|route| route.epoch).max().unwrap();
            let load = Load::start(&client);
            load.goes_on().await;
            first.shutdown().await;
            let stopped = Instant::now();
            while stopped.elapsed() < TTL * tenths / 10 {
                load.goes_on().await;
            }
            let second = directory(net.again(&address), false).await;
            assert_eq!(second.address(), address);
            let took = until("it knows both again", || held(&second, &[&nodes[0], &nodes[1]])).await;
            println!("{} after {tenths} tenths of a lease: {took:?}", address.split().0);
            assert!(took < TTL * 5);
            assert!(second.routes().iter().all(|route| route.epoch > before), "epochs only grow");
            load.goes_on().await;
            // A node that joins now is told of as ever.
            let third = replica(&net, &address, 2, "r2").await;
            until("the newcomer is known", || client.core().routes().len() == 3).await;
            assert!(!lost(&mut events));
            drop((load, third));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_that_hangs_for_two_leases_evicts_nobody() {
    let hub = MemHub::default();
    let net = Net::Mem(hub.clone());
    let directory = directory(net.reach("directory"), true).await;
    let address = directory.address();
    let nodes = [replica(&net, &address, 0, "r0").await, replica(&net, &address, 1, "r1").await];
    let client = Arc::new(client(&net, &address, "client").await);
    until("both are registered", || held(&directory, &[&nodes[0], &nodes[1]])).await;
    let epochs =
        |directory: &Directory| directory.routes().iter().map(|route| route.epoch).collect::<Vec<_>>();
    let before = epochs(&directory);
    let mut events: Vec<_> = nodes.iter().chain([&*client]).map(Node::events).collect();
    let load = Load::start(&client);
    hub.freeze("directory");
    let frozen = Instant::now();
    while frozen.elapsed() < TTL * 2 {
        load.goes_on().await;
    }
    hub.thaw("directory");
    let thawed = Instant::now();
    while thawed.elapsed() < TTL * 2 {
        load.goes_on().await;
    }
    assert!(held(&directory, &[&nodes[0], &nodes[1]]));
    assert_eq!(epochs(&directory), before);
    assert!(!lost(&mut events));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_slept_through_its_lease_is_refused_and_told_so() {
    let hub = MemHub::default();
    let net = Net::Mem(hub.clone());
    let directory = directory(net.reach("directory"), true).await;
    let address = directory.address();
    let owner = replica(&net, &address, 0, "owner").await;
    let client = client(&net, &address, "client").await;
    until("the owner is registered", || held(&directory, &[&owner])).await;
    hub.freeze("owner");
    until("its lease has ended", || directory.routes().is_empty()).await;
    let successor = replica(&net, &address, 0, "successor").await;
    until("another has taken over", || held(&directory, &[&successor])).await;
    let epoch = directory.routes()[0].epoch;
    hub.thaw("owner");
    let registration = owner.registration().unwrap();
    tokio::time::timeout(SLACK, registration.wait_for(|standing| *standing == Standing::Lost)).await.unwrap();
    assert_eq!(registration.epoch(), None);
    // Whatever it says on its old link, nobody hears it; and it can make no new one.
    let connected = owner.core().transport().connect(&client.address(), None).await;
    assert!(connected.is_err(), "{connected:?}");
    assert_eq!((directory.routes()[0].epoch, directory.routes()[0].draining), (epoch, false));
    assert!(client.group(&Group::new("m", "pp", 0)).call(Step::new("x")).await.is_ok());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_client_that_fails_again_and_again_loses_neither_its_lease_nor_a_change() {
    for net in Net::both() {
        let directory = directory(net.reach("directory"), true).await;
        let address = directory.address();
        let first = replica(&net, &address, 0, "r0").await;
        first.ready().await;
        let epoch = directory.routes()[0].epoch;
        let mut events = first.events();
        let mut others = Vec::new();
        let start = Instant::now();
        let mut restarts = 0;
        for number in 1..6 {
            first.core().doors().crash_directory_client("planted");
            others.push(replica(&net, &address, number, &format!("r{number}")).await);
            first.core().doors().crash_directory_client("planted");
            until("the others are known", || first.core().routes().len() == number as usize + 1).await;
        }
        while start.elapsed() < TTL * 2 {
            // Faster than it can answer anything: each one starts where the last one failed.
            let restarted = |event: &NodeEvent| matches!(event, NodeEvent::Restarted { actor, .. } if actor == "directory");
            until("it is started again", || {
                // What is said while the next one is being started is not heard.
                first.core().doors().crash_directory_client("planted");
                let seen = std::iter::from_fn(|| events.try_recv().ok()).filter(restarted).count();
                restarts += seen;
                seen > 0
            })
            .await;
        }
        assert!(restarts > 10, "{restarts}");
        let route = directory.routes().into_iter().find(|route| route.lid == lid(0)).unwrap();
        assert_eq!((route.incarnation, route.epoch), (first.me().incarnation, epoch));
        assert_eq!(first.registration().unwrap().standing(), Standing::Registered(epoch));
        assert_eq!(first.registration().unwrap().drain(lid(3)).await, Ok(()));
        assert!(directory.routes().iter().any(|route| route.lid == lid(3) && route.draining));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_leaves_is_gone_at_once_and_one_that_is_dropped_within_its_lease() {
    let net = Net::Tcp;
    let directory = directory(net.reach("directory"), true).await;
    let address = directory.address();
    let leaves = replica(&net, &address, 0, "r0").await;
    let dropped = replica(&net, &address, 1, "r1").await;
    until("both are registered", || held(&directory, &[&leaves, &dropped])).await;
    leaves.drain(Duration::from_secs(1)).await;
    assert!(held(&directory, &[&dropped]), "it waited for the directory's word");
    dropped.shutdown().await;
    until("the lease has run out", || directory.routes().is_empty()).await;
}

/// Collects the directory's answers.
struct Ear(mpsc::UnboundedSender<Message>);

impl Handler for Ear {
    fn handle(&self, event: Event) {
        if let Event::Message { frame, .. } = event
            && let Ok(wire::Envelope { frame: Frame::Control(Control::Directory(message)), .. }) =
                wire::decode(frame)
        {
            // A test that has ended listens no more.
            let _ = self.0.send(message);
        }
    }
}

struct Stranger {
    transport: Arc<dyn Transport>,
    me: Incarnation,
    directory: Incarnation,
    heard: mpsc::UnboundedReceiver<Message>,
}

impl Stranger {
    async fn connect(hub: &MemHub, name: &str, bits: u64, directory: &Address) -> Self {
        let (ear, heard) = mpsc::unbounded_channel();
        let me = Incarnation::from_bits(bits);
        let identity = Identity { peer: Peer { lid: lid(9), incarnation: me }, deployment: "test".into() };
        let transport = hub.start(name, identity, Arc::new(Ear(ear))).unwrap();
        let peer = transport.connect(directory, None).await.unwrap();
        Stranger { transport, me, directory: peer.incarnation, heard }
    }

    fn say(&self, frame: &Frame) -> bool {
        let frame = wire::encode(self.me, self.directory, frame);
        self.transport.post(Op::Message { to: self.directory, lane: Lane::Control, frame }).is_ok()
    }

    fn ask(&self, id: u64, request: Request) -> bool {
        self.say(&Frame::Control(Control::Directory(Message::Request { id, request })))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hostile_client_evicts_nobody_and_a_frame_that_is_none_ends_its_session_alone() {
    let hub = MemHub::default();
    let net = Net::Mem(hub.clone());
    let directory = directory(net.reach("directory"), true).await;
    let address = directory.address();
    let node = replica(&net, &address, 0, "r0").await;
    until("it is registered", || held(&directory, &[&node])).await;
    let epoch = directory.routes()[0].epoch;

    let mut stranger = Stranger::connect(&hub, "stranger", 666, &address).await;
    let evidence = connex::Evidence::ProcessExited;
    let victim = node.me().incarnation;
    assert!(stranger.ask(1, Request::Report { lid: lid(0), incarnation: victim, evidence }));
    assert!(stranger.ask(2, Request::Leave { lid: lid(0), epoch, to: None }));
    assert!(stranger.ask(3, Request::Renew { lid: lid(0), epoch, ready: false }));
    let long = Address::new(&"x".repeat(10_000));
    let register = |incarnation, address: Address| Request::Register {
        lid: lid(0),
        incarnation,
        address,
        last: None,
        ready: true,
        shadow: true,
        guardian: None,
    };
    assert!(stranger.ask(4, register(victim, Address::new("mem://x"))));
    assert!(stranger.ask(5, register(Incarnation::from_bits(666), long)));
    // What only a directory says, said to one.
    let response = Response::Granted { epoch: Epoch::default(), ttl_ms: 0 };
    let (life, boot, revision) = (stranger.directory, u64::MAX, u64::MAX);
    let lie = Message::Response { id: 6, life, boot, revision, response };
    assert!(stranger.say(&Frame::Control(Control::Directory(lie))));
    assert!(stranger.ask(7, Request::Resolve { group: None }));
    let mut answers = Vec::new();
    while answers.len() < 6 {
        let message = tokio::time::timeout(SLACK, stranger.heard.recv()).await.unwrap().unwrap();
        if let Message::Response { id, response, .. } = message {
            answers.push((id, response));
        }
    }
    let routes = answers.iter().find_map(|(id, response)| match response {
        Response::Routes { routes, .. } if *id == 7 => Some(routes.clone()),
        _ => None,
    });
    let routes = routes.unwrap();
    assert_eq!(routes.len(), 1);
    assert_eq!((routes[0].incarnation, routes[0].epoch, routes[0].ready), (victim, epoch, true));
    assert_eq!(routes[0].shadow, None);

    // A frame in somebody else's name.
    let forged = wire::encode(victim, stranger.directory, &Frame::Control(Control::Nudge));
    let to = stranger.directory;
    stranger.transport.post(Op::Message { to, lane: Lane::Control, frame: forged }).unwrap();
    until("its session has ended", || !stranger.say(&Frame::Control(Control::Nudge))).await;
    assert!(held(&directory, &[&node]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_on_the_directorys_port_costs_nobody_a_lease() {
    let net = Net::Tcp;
    let directory = directory(net.reach("directory"), true).await;
    let address = directory.address();
    let node = replica(&net, &address, 0, "r0").await;
    until("it is registered", || held(&directory, &[&node])).await;
    let epoch = directory.routes()[0].epoch;
    let port = address.split().1.to_owned();
    let mut snapshot = Vec::new();
    codec::write(&mut snapshot, &Message::Request { id: 1, request: Request::Watch { after: None } });
    for garbage in
        [vec![0xff; 64], b"GET / HTTP/1.1\r\n\r\n".to_vec(), u64::MAX.to_le_bytes().to_vec(), snapshot]
    {
        let ended = tokio::task::spawn_blocking({
            let port = port.clone();
            move || {
                let mut stream = std::net::TcpStream::connect(port).unwrap();
                stream.set_read_timeout(Some(SLACK)).unwrap();
                // A side that has closed already refuses the rest: that is what is asked of it.
                let _ = stream.write_all(&garbage).and_then(|()| stream.shutdown(std::net::Shutdown::Write));
                let mut rest = Vec::new();
                // Reset or closed, either is an end; a time-out is none.
                match stream.read_to_end(&mut rest) {
                    Ok(_) => true,
                    Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
                }
            }
        });
        assert!(ended.await.unwrap(), "that session ends");
    }
    assert_eq!(directory.routes()[0].epoch, epoch);
    assert_eq!(node.registration().unwrap().standing(), Standing::Registered(epoch));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_state_file_keeps_the_boot_number_growing_and_a_damaged_one_is_refused() {
    let path = std::env::temp_dir().join(format!("connex-boot-{}-{:?}", std::process::id(), Instant::now()));
    let start = |name: &str| {
        Directory::start(DirectoryConfig {
            reach: Reach::Mem(MemHub::default(), name.into()),
            deployment: "test".into(),
            registry: RegistryConfig::default(),
            state_file: Some(path.clone()),
        })
    };
    let first = start("a").await.unwrap();
    let boot = first.boot();
    drop(first);
    // As after a day in which the clock was wrong.
    std::fs::write(&path, (boot + 100_000).to_string()).unwrap();
    let second = start("b").await.unwrap();
    assert_eq!(second.boot(), boot + 100_001);
    drop(second);
    let third = start("c").await.unwrap();
    assert_eq!(third.boot(), boot + 100_002);
    drop(third);
    std::fs::write(&path, "[package]").unwrap();
    match start("d").await {
        Err(DirectoryError::StateFileContent { .. }) => {}
        other => panic!("{:?}", other.map(|directory| directory.boot())),
    }
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "[package]", "somebody else's file is left alone");
    std::fs::remove_file(&path).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_boot_number_that_clients_made_grow_is_kept() {
    let hub = MemHub::default();
    let path = std::env::temp_dir().join(format!("connex-grown-{}-{:?}", std::process::id(), Instant::now()));
    let directory = Directory::start(DirectoryConfig {
        reach: Reach::Mem(hub.clone(), "directory".into()),
        deployment: "test".into(),
        registry: RegistryConfig::default(),
        state_file: Some(path.clone()),
    })
    .await
    .unwrap();
    let boot = directory.boot();
    let stranger = Stranger::connect(&hub, "stranger", 5, &directory.address()).await;
    let life = Incarnation::from_bits(1);
    let seen = wire::directory::Seen { life, boot: boot + 41, revision: 1 };
    assert!(stranger.ask(1, Request::Watch { after: Some(seen) }));
    until("it is on disk", || std::fs::read_to_string(&path).unwrap() == (boot + 42).to_string()).await;
    std::fs::remove_file(&path).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_that_is_dropped_frees_its_address() {
    for net in Net::both() {
        let first = directory(net.reach("directory"), true).await;
        let address = first.address();
        drop(first);
        until("it is free", || {
            let reach = net.again(&address);
            let registry = RegistryConfig::default();
            let config = DirectoryConfig { reach, deployment: "test".into(), registry, state_file: None };
            tokio::task::block_in_place(|| {
                tokio::runtime::Handle::current().block_on(Directory::start(config))
            })
            .is_ok()
        })
        .await;
    }
}
