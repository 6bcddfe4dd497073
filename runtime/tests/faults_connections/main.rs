//! What users of such systems reported of connections, as tests of live nodes over tcp: a side that forgets its
//! connections (F13), whatever arrives on a port (F39), every form of address (F44), and peers of another version.

mod addresses;
mod forwarder;
mod handshakes;
mod hostile;
mod raw;
mod versions;
mod world;
