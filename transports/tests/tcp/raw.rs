//! A peer made of plain sockets, that can do what no honest one does.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use connex_protocol::wire::hello::{self, Hello, Lane, Opening};
use connex_protocol::wire::{self, LENGTH_PREFIX};
use connex_protocol::{Address, Epoch, Incarnation};
use connex_transport::conformance::{self, PATIENCE, Recorder};
use connex_transport::{TcpConfig, TcpTransport, Transport};

/// A real node, with short deadlines.
pub(crate) struct Real {
    pub(crate) transport: Arc<TcpTransport>,
    pub(crate) seen: Arc<Recorder>,
    pub(crate) life: Incarnation,
}

impl Real {
    pub(crate) fn start() -> Real {
        Self::with(TcpConfig::default())
    }

    pub(crate) fn with(config: TcpConfig) -> Real {
        let life = conformance::fresh_incarnation();
        let seen = Arc::new(Recorder::default());
        let identity = conformance::identity("real", life);
        let transport = TcpTransport::start(config, identity, seen.clone()).unwrap();
        Real { transport, seen, life }
    }

    pub(crate) fn host(&self) -> String {
        self.transport.local().split().1.to_string()
    }

    /// Shows that it still serves: an honest peer connects and is heard.
    pub(crate) fn still_serves(&self) {
        let other = Real::start();
        let to = self.transport.local();
        conformance::block_on(other.transport.connect(&to, Some(self.life)))
            .expect("an honest peer connects");
        let frame = conformance::frame(other.life, self.life, 1, Bytes::new());
        let op = connex_transport::Op::Message { to: self.life, lane: Lane::Control, frame };
        other.transport.post(op).expect("an honest peer posts");
        self.seen
            .wait_for("an honest peer's frame", |seen| !seen.steps(other.life, Lane::Control).is_empty());
    }
}

/// The connections of a peer that speaks the protocol by hand.
pub(crate) struct Raw {
    pub(crate) life: Incarnation,
    pub(crate) control: TcpStream,
    pub(crate) bulk: TcpStream,
}

impl Raw {
    /// Dials a node and shakes hands on both lanes.
    pub(crate) fn dial(to: &Real, life: Incarnation, link: u64) -> Raw {
        let open = |lane| {
            let mut stream = connect(&to.host());
            stream.write_all(&hello::encode(&Opening::Hello(hello_of(life, lane, link)))).unwrap();
            match read_opening(&mut stream) {
                Opening::Hello(theirs) => assert_eq!((theirs.lane, theirs.link), (lane, link)),
                Opening::Reject(reject) => panic!("{reject}"),
            }
            stream
        };
        let (control, bulk) = (open(Lane::Control), open(Lane::Bulk));
        to.seen.wait_for("the raw peer's Up", |seen| seen.up(life) > 0);
        Raw { life, control, bulk }
    }

    /// Answers the dial of a node on a listener.
    pub(crate) fn answer(listener: &TcpListener, life: Incarnation) -> Raw {
        let accept = || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            let Opening::Hello(theirs) = read_opening(&mut stream) else {
                panic!("a dial begins with a hello")
            };
            let ours = hello_of(life, theirs.lane, theirs.link);
            stream.write_all(&hello::encode(&Opening::Hello(ours))).unwrap();
            (theirs.lane, stream)
        };
        let (one, two) = (accept(), accept());
        let (control, bulk) = if one.0 == Lane::Control { (one.1, two.1) } else { (two.1, one.1) };
        Raw { life, control, bulk }
    }

    /// A step's frame to a node, as bytes.
    pub(crate) fn frame(&self, to: &Real, seq: u64) -> Vec<u8> {
        let encoded = conformance::frame(self.life, to.life, seq, Bytes::new());
        [&encoded.head[..], &encoded.body[..]].concat()
    }
}

pub(crate) fn hello_of(life: Incarnation, lane: Lane, link: u64) -> Hello {
    let peer = conformance::identity("raw", life).peer;
    let (epoch, expects, auth) = (Epoch::default(), None, Vec::new());
    Hello { peer, epoch, lane, link, expects, deployment: "conformance".into(), auth }
}

pub(crate) fn connect(host: &str) -> TcpStream {
    let stream = TcpStream::connect(host).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

/// The next frame, without its length prefix; `None` at the end of the stream.
pub(crate) fn read_frame(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let mut prefix = [0; LENGTH_PREFIX];
    stream.read_exact(&mut prefix).ok()?;
    let mut frame = vec![0; u32::from_le_bytes(prefix) as usize];
    stream.read_exact(&mut frame).ok()?;
    Some(frame)
}

pub(crate) fn read_opening(stream: &mut TcpStream) -> Opening {
    hello::decode(&read_frame(stream).expect("an answer to the hello")).unwrap()
}

/// Waits until the node has ended this connection: an end of the stream, or a reset.
pub(crate) fn assert_ended(stream: &mut TcpStream, what: &str) {
    let until = Instant::now() + PATIENCE;
    let mut drain = [0; 4096];
    loop {
        match stream.read(&mut drain) {
            Ok(0) => return,
            Ok(_) => assert!(Instant::now() < until, "{what}: the node goes on sending"),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return,
            Err(error) => panic!("{what}: the node keeps the connection ({error})"),
        }
    }
}

pub(crate) fn tcp(host: &str) -> Address {
    Address::new(&format!("tcp://{host}"))
}

/// A frame of the control lane that says `control`.
pub(crate) fn control(from: Incarnation, to: Incarnation, control: wire::Control) -> Vec<u8> {
    wire::encode(from, to, &wire::Frame::Control(control)).head.to_vec()
}

/// Deadlines short enough to wait for.
pub(crate) fn impatient() -> TcpConfig {
    TcpConfig {
        handshake_deadline: Duration::from_millis(300),
        stall_deadline: Duration::from_millis(300),
        ..TcpConfig::default()
    }
}
