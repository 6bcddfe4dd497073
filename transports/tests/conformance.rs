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
