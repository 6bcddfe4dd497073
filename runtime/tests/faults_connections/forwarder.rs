//! Stands between a node and its peers, and lets one side lose its connections while the other keeps them.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

/// Which side of a forwarded connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// Whoever dialled.
    Caller,
    /// The node behind the forwarder.
    Node,
}

/// A forwarder in front of one address.
pub(crate) struct Forwarder {
    host: String,
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    target: Mutex<Option<SocketAddr>>,
    pairs: Mutex<Vec<Arc<Pair>>>,
    accepted: Mutex<Vec<Instant>>,
    /// Ends each caller's connection as soon as the node has said something on it.
    flapping: AtomicBool,
    open: AtomicUsize,
}

struct Pair {
    caller: TcpStream,
    node: TcpStream,
    /// One side was told that it is over; the other hears nothing of it.
    split: AtomicBool,
}

impl Forwarder {
    /// Listens on a free port; it forwards once it has a target.
    pub(crate) fn start() -> Forwarder {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let inner = Arc::new(Inner::default());
        let accepting = inner.clone();
        thread::spawn(move || {
            for caller in listener.incoming() {
                let target = *accepting.target.lock().unwrap();
                let (Ok(caller), Some(target)) = (caller, target) else { continue };
                accepting.accepted.lock().unwrap().push(Instant::now());
                let Ok(node) = TcpStream::connect(target) else { continue };
                accepting.forward(caller, node);
            }
        });
        Forwarder { host, inner }
    }

    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    pub(crate) fn aim(&self, at: SocketAddr) {
        *self.inner.target.lock().unwrap() = Some(at);
    }

    /// Ends every connection on one side; the other side's stay open, and nothing passes over them any more.
    pub(crate) fn forget(&self, side: Side) {
        for pair in self.inner.pairs.lock().unwrap().drain(..) {
            pair.split.store(true, Ordering::SeqCst);
            let _ = pair.stream(side).shutdown(Shutdown::Both);
            // The other side's socket stays open for as long as its owner wants it: its copying thread holds it.
        }
    }

    pub(crate) fn flap(&self, on: bool) {
        self.inner.flapping.store(on, Ordering::SeqCst);
    }

    /// When connections came in.
    pub(crate) fn accepted(&self) -> Vec<Instant> {
        self.inner.accepted.lock().unwrap().clone()
    }

    /// Connections that the node behind has open.
    pub(crate) fn open(&self) -> usize {
        self.inner.open.load(Ordering::SeqCst)
    }
}

impl Pair {
    fn stream(&self, side: Side) -> &TcpStream {
        match side {
            Side::Caller => &self.caller,
            Side::Node => &self.node,
        }
    }
}

impl Inner {
    fn forward(self: &Arc<Self>, caller: TcpStream, node: TcpStream) {
        let _ = (caller.set_nodelay(true), node.set_nodelay(true));
        let pair = Arc::new(Pair { caller, node, split: AtomicBool::new(false) });
        self.open.fetch_add(1, Ordering::SeqCst);
        self.pairs.lock().unwrap().push(pair.clone());
        let (inner, other) = (self.clone(), pair.clone());
        thread::spawn(move || inner.copy(&other, Side::Caller, Side::Node));
        let inner = self.clone();
        thread::spawn(move || {
            inner.copy(&pair, Side::Node, Side::Caller);
            inner.open.fetch_sub(1, Ordering::SeqCst);
        });
    }

    fn copy(&self, pair: &Pair, from: Side, to: Side) {
        let mut bytes = [0; 16 << 10];
        while let Ok(count @ 1..) = pair.stream(from).read(&mut bytes) {
            if !pair.split.load(Ordering::SeqCst) {
                let _ = pair.stream(to).write_all(&bytes[..count]);
            }
            if from == Side::Node && self.flapping.load(Ordering::SeqCst) {
                let _ = pair.caller.shutdown(Shutdown::Both);
            }
        }
        if !pair.split.load(Ordering::SeqCst) {
            let _ = pair.stream(to).shutdown(Shutdown::Both);
        }
    }
}
