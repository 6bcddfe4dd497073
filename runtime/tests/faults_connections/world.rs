//! A directory, replicas and a client over tcp, and a load that notices whatever is lost or slow.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use connex::directory::{Directory, DirectoryConfig};
use connex::protocol::directory::RegistryConfig;
use connex::transport::tcp::TcpConfig;
use connex::{Address, EndpointFactory, Group, LogicalId, Node, NodeEvent, Reach, Standing, Step, serve_fn};
use tokio::sync::broadcast;

/// What a condition may take at most, on a machine that is busy with other things.
pub(crate) const SLACK: Duration = Duration::from_secs(20);

pub(crate) fn group() -> Group {
    Group::new("m", "work", 0)
}

pub(crate) fn lid(replica: u32) -> LogicalId {
    group().replica(replica)
}

pub(crate) fn listen(text: &str) -> TcpConfig {
    TcpConfig { listen: text.into(), ..TcpConfig::default() }
}

pub(crate) async fn directory(config: TcpConfig) -> Directory {
    Directory::start(DirectoryConfig {
        reach: Reach::Tcp(config),
        deployment: "test".into(),
        registry: RegistryConfig { first: true, ..RegistryConfig::default() },
        state_file: None,
    })
    .await
    .unwrap()
}

pub(crate) fn echo() -> EndpointFactory {
    serve_fn(|step| Ok(step.payload().clone()))
}

/// A replica that holds its identity.
pub(crate) async fn replica(
    directory: &Address,
    number: u32,
    config: TcpConfig,
    endpoint: EndpointFactory,
) -> Node {
    let node = Node::builder(lid(number))
        .reach(Reach::Tcp(config))
        .directory(directory.clone())
        .deployment("test")
        .serve(endpoint)
        .start()
        .await
        .unwrap();
    let standing = within(node.ready()).await;
    assert!(matches!(standing, Standing::Registered(_)), "{standing:?}");
    node
}

pub(crate) async fn client(directory: &Address, config: TcpConfig) -> Node {
    let builder = Node::client().reach(Reach::Tcp(config)).directory(directory.clone());
    let node = builder.deployment("test").start().await.unwrap();
    within(node.ready()).await;
    node
}

pub(crate) async fn within<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(SLACK, what).await.expect("it ends in time")
}

/// Looks again and again until it holds.
pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < SLACK, "not within {SLACK:?}: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// The next event that is wanted.
pub(crate) async fn expect(
    events: &mut broadcast::Receiver<NodeEvent>,
    wanted: impl Fn(&NodeEvent) -> bool,
) -> NodeEvent {
    within(async {
        loop {
            match events.recv().await {
                Ok(event) if wanted(&event) => return event,
                Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
                Err(broadcast::error::RecvError::Closed) => panic!("the node is gone"),
            }
        }
    })
    .await
}

/// Submits steps one after the other until it is dropped.
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    ended: Arc<AtomicU64>,
    failed: Arc<AtomicU64>,
}

impl Load {
    pub(crate) fn start(node: &Node) -> Load {
        let load = Load { stop: Arc::default(), ended: Arc::default(), failed: Arc::default() };
        let (stop, ended, failed) = (load.stop.clone(), load.ended.clone(), load.failed.clone());
        let group = node.group(&group());
        tokio::spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                match group.call(Step::new("x").payload("load").deadline(SLACK / 4)).await {
                    Ok(reply) if reply.body == "load" => ended.fetch_add(1, Ordering::Relaxed),
                    other => {
                        eprintln!("{other:?}");
                        failed.fetch_add(1, Ordering::Relaxed)
                    }
                };
            }
        });
        load
    }

    /// Steps go on now: another fifty end, and none has failed.
    pub(crate) async fn goes_on(&self) {
        let before = self.ended.load(Ordering::Relaxed);
        until("another fifty steps", || self.ended.load(Ordering::Relaxed) > before + 50).await;
        assert_eq!(self.failed.load(Ordering::Relaxed), 0);
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Bytes of this process in memory.
pub(crate) fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}
