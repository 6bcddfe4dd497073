//! `connex bench step`: a step against the same connection without actors, and against a plain echo; all interleaved,
//! between two processes.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use bytes::{Bytes, BytesMut};
use connex::protocol::ring::Ring;
use connex::protocol::step::SenderConfig;
use connex::protocol::wire::hello::Lane;
use connex::protocol::wire::{self, Completed, Frame, Payload, RegionKey, Seal, Slot};
use connex::transport::tcp::{TcpConfig, TcpTransport};
use connex::transport::{Event, Handler, Identity, Op, OpId, Region, RegionSlice, Transport};
use connex::{
    Address, CoreConfig, Epoch, Group, GroupHandle, Incarnation, Node, Peer, Step, StepId, Via, serve_fn,
};
use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use crate::args::BenchStepArgs;
use crate::child::{Child, HEARD_MAX, Heard, die_with_parent, listen_to_parent};
use crate::report::{Line, Percentiles, percentiles, round, say, tell};

/// Replies echo payloads up to this size; larger ones are answered with eight bytes.
const ECHO_MAX: usize = 16 << 10;

/// Payloads up to this size travel in the raw transport's own frame; larger ones are read.
const INLINE_MAX: usize = 8 << 10;

#[derive(Debug, Serialize)]
struct Report {
    transport: &'static str,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    bytes: usize,
    inflight: usize,
    wait: &'static str,
    raw_us: Option<Percentiles>,
    step_us: Percentiles,
    ratio_p50: Option<f64>,
    echo_us: Percentiles,
    step_to_echo_p50: f64,
    steps_per_s: f64,
    echo_per_s: f64,
    wakeups_per_step: f64,
}

fn group() -> Group {
    Group::new("bench", "echo", 0)
}

fn reply_of(payload: &Bytes) -> Bytes {
    if payload.len() <= ECHO_MAX { payload.clone() } else { Bytes::from_static(&[0; 8]) }
}

pub(crate) async fn run(args: BenchStepArgs) -> anyhow::Result<bool> {
    if args.transport != "tcp" {
        bail!("--transport {}: only tcp is measured", args.transport);
    }
    if args.serve { serve(args.parent).await } else { measure(args).await }
}

/// The other process: a served endpoint, a bare transport and a plain echo.
async fn serve(parent: Option<u32>) -> anyhow::Result<bool> {
    die_with_parent(parent);
    listen_to_parent(parent, |_| {});
    let node = Node::builder(group().replica(0))
        .listen("127.0.0.1:0")
        .serve(serve_fn(|step| Ok(reply_of(step.payload()))))
        .start()
        .await?;
    let raw = Raw::start(2, true)?;
    let echo = TcpListener::bind("127.0.0.1:0").await?;
    let echo_address = echo.local_addr()?;
    tokio::spawn(async move {
        while let Ok((stream, _)) = echo.accept().await {
            tokio::spawn(echo_one(stream));
        }
    });
    tell(&Line::Ready {
        lid: echo_address.to_string(),
        incarnation: node.me().incarnation.to_string(),
        address: format!("{} {}", node.address(), raw.transport.local()),
        pid: std::process::id(),
    });
    std::future::pending::<()>().await;
    Ok(true)
}

/// Sends each frame (a length and so many bytes) back.
async fn echo_one(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut frame = Vec::new();
    loop {
        let len = stream.read_u32_le().await? as usize;
        frame.resize(4 + len, 0);
        frame[..4].copy_from_slice(&(len as u32).to_le_bytes());
        stream.read_exact(&mut frame[4..]).await?;
        stream.write_all(&frame).await?;
    }
}

/// A transport with no actors: signal, one read, reply (which acknowledges), on the same connection and in the same
/// frames as a step.
struct Raw {
    transport: Arc<TcpTransport>,
    me: Incarnation,
    state: Arc<RawState>,
    ring: Mutex<Ring>,
    region: Arc<Region>,
}

struct RawState {
    me: Incarnation,
    serves: bool,
    transport: OnceLock<Arc<TcpTransport>>,
    reading: Mutex<std::collections::HashMap<u64, (Incarnation, StepId)>>,
    replied: Mutex<u64>,
}

impl RawState {
    fn reply(&self, to: Incarnation, id: StepId, body: Bytes) {
        let Some(transport) = self.transport.get() else { return };
        let reply = wire::Reply { id, route: Vec::new(), items: 0, result: Ok(body) };
        let frame = wire::encode(self.me, to, &Frame::Reply(reply));
        // A refused reply would show as a hang, not as a figure.
        let _ = transport.post(Op::Message { to, lane: Lane::Control, frame });
    }
}

impl Handler for RawState {
    fn handle(&self, event: Event) {
        match event {
            Event::Message { from, frame, .. } => match wire::decode(frame) {
                Ok(wire::Envelope { frame: Frame::Step(step), .. }) if self.serves => match step.payload {
                    Payload::Inline(payload) => self.reply(from, step.id, reply_of(&payload)),
                    Payload::Slot(slot) => {
                        self.reading.lock().expect("no holder panics").insert(step.id.seq, (from, step.id));
                        let seal = Seal { step: step.id, generation: slot.generation, len: slot.len };
                        let read = Op::Read {
                            id: OpId(step.id.seq),
                            to: from,
                            from: RegionSlice { key: slot.region, offset: slot.offset, len: slot.len },
                            seal: Some(seal),
                            crc: slot.crc,
                            into: BytesMut::with_capacity(slot.len as usize),
                            deadline: Duration::from_secs(10),
                        };
                        if let Some(transport) = self.transport.get() {
                            let _ = transport.post(read);
                        }
                    }
                },
                Ok(wire::Envelope { frame: Frame::Reply(reply), .. }) => {
                    *self.replied.lock().expect("no holder panics") = reply.id.seq;
                }
                _ => {}
            },
            Event::Completed(completion) => {
                let reading = self.reading.lock().expect("no holder panics").remove(&completion.id.0);
                if let (Some((from, id)), Ok(payload)) = (reading, completion.result) {
                    self.reply(from, id, reply_of(&payload.freeze()));
                }
            }
            _ => {}
        }
    }
}

impl Raw {
    fn start(number: u32, serves: bool) -> anyhow::Result<Self> {
        let me = Incarnation::from_bits(rand::random());
        let state = Arc::new(RawState {
            me,
            serves,
            transport: OnceLock::new(),
            reading: Mutex::default(),
            replied: Mutex::new(0),
        });
        let peer = Peer { lid: Group::new("bench", "raw", 0).replica(number), incarnation: me };
        let identity = Identity { peer, deployment: "bench".into() };
        let transport = TcpTransport::start(TcpConfig::default(), identity, state.clone())
            .map_err(|error| anyhow::anyhow!("{error}"))?;
        if state.transport.set(transport.clone()).is_err() {
            unreachable!("it is started once");
        }
        let region = Arc::new(Region::slots(RegionKey { owner: me, id: 0 }, 64 << 20));
        Ok(Raw { transport, me, state, ring: Mutex::new(Ring::new(64 << 20)), region })
    }

    /// One exchange.
    fn call(&self, to: Incarnation, seq: u64, payload: &Bytes, spin: bool) -> anyhow::Result<()> {
        let id = StepId { origin: self.me, seq };
        let mut taken = None;
        let sent = if payload.len() <= INLINE_MAX {
            Payload::Inline(payload.clone())
        } else {
            let slot = self.ring.lock().expect("no holder panics").alloc(payload.len() as u64, to)?;
            let seal = Seal { step: id, generation: slot.generation, len: slot.len };
            self.region.publish(slot.offset, seal, payload.clone())?;
            taken = Some(slot);
            Payload::Slot(Slot {
                region: self.region.key(),
                offset: slot.offset,
                len: slot.len,
                generation: slot.generation,
                crc: Some(crc32c::crc32c(payload)),
            })
        };
        let step = wire::Step {
            id,
            attempt: 1,
            route: Vec::new(),
            completed: Completed::default(),
            deadline_ms: None,
            streaming: false,
            resume: Vec::new(),
            meta: Bytes::new(),
            payload: sent,
        };
        let frame = wire::encode(self.me, to, &Frame::Step(step));
        if self.transport.post(Op::Message { to, lane: Lane::Control, frame }).is_err() {
            bail!("the raw transport takes no message");
        }
        let wait = if spin { Duration::ZERO } else { Duration::from_millis(1) };
        while *self.state.replied.lock().expect("no holder panics") != seq {
            self.transport.progress(wait);
        }
        if let Some(slot) = taken {
            self.region.retract(slot.offset, slot.generation);
            self.ring.lock().expect("no holder panics").ack(slot.offset, slot.generation);
        }
        Ok(())
    }
}

/// The serving process, as the measuring one sees it.
struct Other {
    _child: Child,
    pid: u32,
    node: (Address, Incarnation),
    raw: Address,
    echo: String,
}

async fn start_other() -> anyhow::Result<Other> {
    let (heard, mut hearing) = mpsc::channel(HEARD_MAX);
    let args: Vec<String> = ["bench", "step", "--serve"].map(String::from).to_vec();
    let child = Child::start(&args, (), heard)?;
    match hearing.recv().await {
        Some(((), _, Heard::Line(Line::Ready { lid, incarnation, address, pid }))) => {
            let (node, raw) = address.split_once(' ').context("two addresses")?;
            let incarnation = Incarnation::from_bits(u64::from_str_radix(&incarnation, 16)?);
            let node = (Address::new(node), incarnation);
            Ok(Other { _child: child, pid, node, raw: Address::new(raw), echo: lid })
        }
        other => bail!("the serving process did not start: {other:?}"),
    }
}

async fn measure(args: BenchStepArgs) -> anyhow::Result<bool> {
    let other = start_other().await?;
    let sender = SenderConfig { k: Some(64), ..SenderConfig::default() };
    let config = CoreConfig { sender, ..CoreConfig::default() };
    let node = Node::client().listen("127.0.0.1:0").config(config).start().await?;
    let route = connex::protocol::wire::directory::Route {
        lid: group().replica(0),
        incarnation: other.node.1,
        address: other.node.0.clone(),
        epoch: Epoch { boot: 1, counter: 1 },
        ready: true,
        draining: false,
        shadow: None,
    };
    Via::Fixed(vec![route]).tell(node.core());
    let handle = node.group(&group());
    handle.ready().await;
    let raw = Arc::new(Raw::start(3, false)?);
    raw.transport.register(raw.region.clone()).await?;
    let raw_peer = raw.transport.connect(&other.raw, None).await?;

    let mut rows = Vec::new();
    for bytes in &args.sizes {
        for inflight in &args.inflight {
            let waits: &[&str] = if *inflight == 1 { &["blocking", "spinning"] } else { &["blocking"] };
            for wait in waits {
                let row = row(&args, &other, &handle, &raw, raw_peer.incarnation, (*bytes, *inflight, wait))
                    .await?;
                say!("{row:?}");
                rows.push(row);
            }
        }
    }
    node.shutdown().await;
    let report = Report { transport: "tcp", rows };
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        println!("{report:#?}");
    }
    Ok(true)
}

async fn row(
    args: &BenchStepArgs,
    other: &Other,
    handle: &GroupHandle,
    raw: &Arc<Raw>,
    raw_peer: Incarnation,
    (bytes, inflight, wait): (usize, usize, &'static str),
) -> anyhow::Result<Row> {
    let payload = Bytes::from(vec![7u8; bytes]);
    let count = if bytes >= 1 << 20 { 100 } else { 1000 };
    let spin = wait == "spinning";
    let (mut raw_us, mut step_us, mut echo_us) = (Vec::new(), Vec::new(), Vec::new());
    let (mut step_rate, mut echo_rate, mut wakeups) = (0f64, 0f64, Vec::new());
    for round in 0..args.rounds as u64 {
        if inflight == 1 {
            let (raw, payload) = (raw.clone(), payload.clone());
            let first = (bytes as u64) << 32 | (u64::from(spin) << 31) | (round * count + 1);
            raw_us.extend(
                tokio::task::spawn_blocking(move || {
                    timed(count, |n| raw.call(raw_peer, first + n, &payload, spin))
                })
                .await??,
            );
        }
        let before = switches(other.pid);
        let start = Instant::now();
        step_us.extend(steps(handle, &payload, count, inflight, spin).await?);
        step_rate = step_rate.max(count as f64 / start.elapsed().as_secs_f64());
        wakeups.push(switches(other.pid).saturating_sub(before) as f64 / count as f64);
        let start = Instant::now();
        echo_us.extend(echoes(&other.echo, &payload, count, inflight).await?);
        echo_rate = echo_rate.max(count as f64 / start.elapsed().as_secs_f64());
    }
    let (step_us, echo_us) = (percentiles(step_us), percentiles(echo_us));
    let raw_us = (!raw_us.is_empty()).then(|| percentiles(raw_us));
    Ok(Row {
        bytes,
        inflight,
        wait,
        ratio_p50: raw_us.map(|raw| round_ratio(step_us.p50, raw.p50)),
        raw_us,
        step_to_echo_p50: round_ratio(step_us.p50, echo_us.p50),
        step_us,
        echo_us,
        steps_per_s: step_rate.round(),
        echo_per_s: echo_rate.round(),
        wakeups_per_step: percentiles(wakeups).p50,
    })
}

fn round_ratio(a: f64, b: f64) -> f64 {
    round(a / b.max(0.001))
}

/// Times each call, in microseconds.
fn timed(count: u64, mut call: impl FnMut(u64) -> anyhow::Result<()>) -> anyhow::Result<Vec<f64>> {
    let mut times = Vec::new();
    for n in 0..count {
        let start = Instant::now();
        call(n)?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok(times)
}

async fn steps(
    handle: &GroupHandle,
    payload: &Bytes,
    count: u64,
    inflight: usize,
    spin: bool,
) -> anyhow::Result<Vec<f64>> {
    if inflight == 1 {
        let (handle, payload) = (handle.clone(), payload.clone());
        let run = move || {
            timed(count, |_| {
                handle.call_blocking(Step::new("").payload(payload.clone()), spin)?;
                Ok(())
            })
        };
        return tokio::task::spawn_blocking(run).await?;
    }
    let mut tasks = Vec::new();
    for _ in 0..inflight {
        let (handle, payload, share) = (handle.clone(), payload.clone(), count / inflight as u64);
        tasks.push(tokio::spawn(async move {
            let mut times = Vec::new();
            for _ in 0..share {
                let start = Instant::now();
                handle.call(Step::new("").payload(payload.clone())).await?;
                times.push(start.elapsed().as_secs_f64() * 1e6);
            }
            anyhow::Ok(times)
        }));
    }
    let mut times = Vec::new();
    for task in tasks {
        times.extend(task.await??);
    }
    Ok(times)
}

/// One connection for each in flight.
async fn echoes(address: &str, payload: &Bytes, count: u64, inflight: usize) -> anyhow::Result<Vec<f64>> {
    let mut tasks = Vec::new();
    for _ in 0..inflight {
        let (address, payload, share) = (address.to_owned(), payload.clone(), count / inflight as u64);
        tasks.push(tokio::spawn(async move {
            let mut stream = TcpStream::connect(&address).await?;
            stream.set_nodelay(true)?;
            let mut frame = (payload.len() as u32).to_le_bytes().to_vec();
            frame.extend_from_slice(&payload);
            let mut back = vec![0; frame.len()];
            let mut times = Vec::new();
            for _ in 0..share {
                let start = Instant::now();
                let (mut read, mut write) = stream.split();
                let (sent, got) = tokio::join!(write.write_all(&frame), read.read_exact(&mut back));
                sent?;
                got?;
                times.push(start.elapsed().as_secs_f64() * 1e6);
            }
            anyhow::Ok(times)
        }));
    }
    let mut times = Vec::new();
    for task in tasks {
        times.extend(task.await??);
    }
    Ok(times)
}

/// How often threads of this process and of the other have gone to sleep of their own accord: each is woken for it.
fn switches(other: u32) -> u64 {
    [std::process::id(), other].into_iter().map(switches_of).sum()
}

fn switches_of(pid: u32) -> u64 {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return 0 };
    tasks
        .flatten()
        .filter_map(|task| std::fs::read_to_string(task.path().join("status")).ok())
        .filter_map(|status| {
            let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches:"))?;
            line.split_whitespace().nth(1)?.parse::<u64>().ok()
        })
        .sum()
}
