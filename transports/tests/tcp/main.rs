//! What only TCP has: sockets, ports, two connections a link, strangers on the port, and who makes progress.

mod hostile;
mod links;
mod raw;
