//! `connex bench endpoints`: what an idle endpoint costs, with its actor and its mailbox.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use async_trait::async_trait;
use connex::protocol::wire::directory::Route;
use connex::transport::{ConnectError, Op, Refused, RefusedWhy, Region, RegionError, Transport};
use connex::{Address, Epoch, Group, Incarnation, Node, Reach, Via};
use serde::Serialize;

use crate::args::BenchEndpointsArgs;
use crate::report::{ms, round};

#[derive(Debug, Serialize)]
struct Report {
    count: u32,
    started_ms: f64,
    bytes_each: u64,
}

/// Reaches nobody: an endpoint's connection stays under way, which is what an idle endpoint costs least in.
struct Nowhere;

#[async_trait]
impl Transport for Nowhere {
    fn name(&self) -> &'static str {
        "nowhere"
    }

    fn local(&self) -> Address {
        Address::new("nowhere://")
    }

    fn set_epoch(&self, _epoch: Epoch) {}

    async fn connect(
        &self,
        _to: &Address,
        _expects: Option<Incarnation>,
    ) -> Result<connex::Peer, ConnectError> {
        std::future::pending().await
    }

    fn disconnect(&self, _peer: Incarnation) {}

    fn fence(&self, _peer: Incarnation) {}

    async fn register(&self, _region: Arc<Region>) -> Result<(), RegionError> {
        Ok(())
    }

    async fn deregister(&self, _region: &Region) {}

    fn post(&self, op: Op) -> Result<(), Refused> {
        Err(Refused { op, why: RefusedWhy::NotConnected })
    }

    fn progress(&self, _wait: Duration) -> bool {
        false
    }

    fn backlog(&self, _peer: Incarnation) -> usize {
        0
    }

    fn failed(&self) -> bool {
        false
    }

    fn restart_progress(&self) {}

    async fn shutdown(&self) {}
}

pub(crate) async fn run(args: BenchEndpointsArgs) -> anyhow::Result<bool> {
    let node = Node::client().reach(Reach::Given(Arc::new(Nowhere))).start().await?;
    let group = Group::new("idle", "pp", 0);
    let handle = node.group(&group);
    let before = resident()?;
    let start = Instant::now();
    let routes = (0..args.count).map(|replica| Route {
        lid: group.replica(replica),
        incarnation: Incarnation::from_bits(u64::from(replica) + 1),
        address: Address::new("nowhere://"),
        epoch: Epoch { boot: 1, counter: u64::from(replica) + 1 },
        ready: true,
        draining: false,
        shadow: None,
    });
    Via::Fixed(routes.collect()).tell(node.core());
    while handle.cell().endpoints() < args.count as usize {
        tokio::task::yield_now().await;
    }
    let started = start.elapsed();
    let bytes = resident()?.saturating_sub(before);
    let report = Report {
        count: args.count,
        started_ms: round(ms(started)),
        bytes_each: bytes / u64::from(args.count.max(1)),
    };
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        println!("{report:#?}");
    }
    Ok(true)
}

/// Resident bytes of this process.
fn resident() -> anyhow::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line =
        status.lines().find(|line| line.starts_with("VmRSS:")).context("no VmRSS in /proc/self/status")?;
    let kib = line.split_whitespace().nth(1).and_then(|text| text.parse::<u64>().ok());
    Ok(kib.context("VmRSS is a number")? * 1024)
}
