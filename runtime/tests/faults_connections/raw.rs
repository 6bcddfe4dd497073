//! A peer made of plain sockets, that can do what no honest one does.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use connex::protocol::wire::LENGTH_PREFIX;
use connex::protocol::wire::hello::{self, Hello, Lane, Opening};
use connex::{Address, Epoch, Group, Incarnation, Peer};

use crate::world::SLACK;

/// The connections of a link that is up on its peer's side.
pub(crate) struct Raw {
    pub(crate) control: TcpStream,
    pub(crate) bulk: TcpStream,
}

/// A life that no node has.
pub(crate) fn stranger() -> Incarnation {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    Incarnation::from_bits(NEXT.fetch_add(1, Ordering::Relaxed) << 8)
}

pub(crate) fn hello_of(life: Incarnation, lane: Lane) -> Vec<u8> {
    hello::encode(&Opening::Hello(Hello {
        peer: Peer { lid: Group::new("raw", "raw", 0).replica(0), incarnation: life },
        epoch: Epoch::default(),
        lane,
        link: 1,
        expects: None,
        deployment: "test".into(),
        auth: Vec::new(),
    }))
}

pub(crate) fn connect(to: &Address) -> TcpStream {
    let stream = TcpStream::connect(to.split().1).unwrap();
    stream.set_read_timeout(Some(SLACK)).unwrap();
    stream.set_write_timeout(Some(SLACK)).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

impl Raw {
    /// Dials a node and shakes hands on both lanes.
    pub(crate) fn dial(to: &Address) -> Raw {
        let life = stranger();
        let open = |lane| {
            let mut stream = connect(to);
            stream.write_all(&hello_of(life, lane)).unwrap();
            let answer = read_opening(&mut stream);
            assert!(matches!(answer, Opening::Hello(_)), "{answer:?}");
            stream
        };
        Raw { control: open(Lane::Control), bulk: open(Lane::Bulk) }
    }
}

pub(crate) fn read_opening(stream: &mut TcpStream) -> Opening {
    let mut prefix = [0; LENGTH_PREFIX];
    stream.read_exact(&mut prefix).unwrap();
    let mut frame = vec![0; u32::from_le_bytes(prefix) as usize];
    stream.read_exact(&mut frame).unwrap();
    hello::decode(&frame).unwrap()
}

/// Waits until the node has ended this connection: an end of the stream, or a reset.
pub(crate) fn assert_ended(stream: &mut TcpStream, what: &str) {
    let until = Instant::now() + SLACK;
    let mut drain = [0; 4096];
    loop {
        match stream.read(&mut drain) {
            Ok(0) => return,
            Ok(_) => assert!(Instant::now() < until, "{what}: the node goes on sending"),
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return,
            Err(error) => panic!("{what}: the node keeps the connection ({error})"),
        }
    }
}
