//! What users of such systems reported of connections, as tests of live nodes over tcp: a side that forgets its
//! connections (F13), and whatever arrives on a port (F39).

mod forwarder;
mod handshakes;
mod hostile;
mod raw;
mod world;
