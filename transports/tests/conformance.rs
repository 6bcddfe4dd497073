//! The conformance suite, on every backend of this crate.

mod mem {
    use std::sync::Arc;

    use connex_transport::conformance::Backend;
    use connex_transport::{Handler, Identity, MemHub, Transport};

    #[derive(Default)]
    struct Mem {
        hub: MemHub,
    }

    impl Backend for Mem {
        fn start(&self, name: &str, identity: Identity, handler: Arc<dyn Handler>) -> Arc<dyn Transport> {
            self.hub.start(name, identity, handler).expect("the name is free")
        }

        fn kill(&self, name: &str, _transport: Arc<dyn Transport>) {
            self.hub.crash(name);
        }
    }

    connex_transport::conformance!(Mem::default());
}

mod tcp {
    use std::collections::HashMap;
    use std::sync::{Arc, Mutex};

    use connex_transport::conformance::Backend;
    use connex_transport::{Handler, Identity, TcpConfig, TcpTransport, Transport};

    /// A name keeps the port that it got first, as a restarted process does.
    struct Tcp {
        host: &'static str,
        listens: Mutex<HashMap<String, String>>,
    }

    impl Tcp {
        fn at(host: &'static str) -> Self {
            Tcp { host, listens: Mutex::default() }
        }
    }

    impl Backend for Tcp {
        fn start(&self, name: &str, identity: Identity, handler: Arc<dyn Handler>) -> Arc<dyn Transport> {
            let mut listens = self.listens.lock().unwrap();
            let listen = listens.get(name).cloned().unwrap_or(format!("{}:0", self.host));
            let config = TcpConfig { listen, ..TcpConfig::default() };
            let transport = TcpTransport::start(config, identity, handler).expect("it binds");
            listens.insert(name.into(), transport.local().split().1.into());
            transport
        }
    }

    connex_transport::conformance!(Tcp::at("127.0.0.1"));

    /// F44: the same over IPv6.
    mod v6 {
        connex_transport::conformance!(super::Tcp::at("[::1]"));
    }
}
