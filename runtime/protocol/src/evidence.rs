use core::fmt;

use serde::{Deserialize, Serialize};

/// Why an endpoint is believed to be down. Every `Down` carries one; it is classified by code, never by text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Evidence {
    /// The peer's side of its connection was closed without a goodbye: its process ended.
    ConnectionClosed,
    /// The connection was reset.
    ConnectionReset,
    /// No connection could be made to the endpoint's address.
    ConnectFailed,
    /// The peer sent bytes that break the protocol; that session ended.
    ProtocolViolation,
    /// The process that started the endpoint's process saw it end.
    ProcessExited,
    /// Nothing was heard for this long, in milliseconds.
    Silence {
        /// The length of the silence.
        silent_ms: u64,
    },
    /// The endpoint's process answers while its engine makes no progress.
    Hung {
        /// How long the engine has been on its current step, in milliseconds.
        busy_ms: u64,
    },
    /// The endpoint's lease ran out at the directory.
    LeaseExpired,
    /// A later incarnation holds the same logical id.
    Superseded,
    /// The endpoint said goodbye.
    Left,
}

impl Evidence {
    /// Hard evidence needs no second source before the peer's work is moved.
    pub fn is_hard(self) -> bool {
        !matches!(self, Evidence::Silence { .. } | Evidence::Hung { .. } | Evidence::ConnectFailed)
    }

    /// The name that logs, events and reports use.
    pub fn name(self) -> &'static str {
        match self {
            Evidence::ConnectionClosed => "connection-closed",
            Evidence::ConnectionReset => "connection-reset",
            Evidence::ConnectFailed => "connect-failed",
            Evidence::ProtocolViolation => "protocol-violation",
            Evidence::ProcessExited => "process-exited",
            Evidence::Silence { .. } => "silence",
            Evidence::Hung { .. } => "hung",
            Evidence::LeaseExpired => "lease-expired",
            Evidence::Superseded => "superseded",
            Evidence::Left => "left",
        }
    }
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Evidence::Silence { silent_ms } => write!(f, "silence of {silent_ms} ms"),
            Evidence::Hung { busy_ms } => write!(f, "hung for {busy_ms} ms"),
            other => f.write_str(other.name()),
        }
    }
}
