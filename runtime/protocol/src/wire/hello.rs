//! The first frame of each side of a connection.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::{LENGTH_PREFIX, VERSION, WireError};
use crate::{Epoch, Incarnation, LogicalId, Peer};

/// The largest hello or rejection: a peer that announces more is no peer.
pub const HELLO_MAX: usize = 2048;

const MAGIC: [u8; 4] = *b"CNXH";

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// Small frames: steps' headers, replies, heartbeats.
    Control,
    /// Payloads.
    Bulk,
}

/// Who is calling, and in which life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The caller.
    pub peer: Peer,
    /// The epoch that the directory granted it; zero before it has one.
    pub epoch: Epoch,
    /// What this connection is for.
    pub lane: Lane,
    /// Pairs the two connections of one link; drawn by the side that dials.
    pub link: u64,
    /// Whom the dialling side expects to reach; `None` for whoever answers at that address.
    pub expects: Option<Incarnation>,
    /// The deployment's name; connections between deployments are refused.
    pub deployment: String,
    /// Reserved for authentication; empty until then.
    pub auth: Vec<u8>,
}

/// Why a hello was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Reject {
    /// The peer speaks another version of the protocol.
    #[error(
        "the peer speaks protocol version {theirs}, this build version {ours}: run the same release on both sides"
    )]
    Version {
        /// What this side speaks.
        ours: u16,
        /// What the other side speaks.
        theirs: u16,
    },
    /// The peer belongs to another deployment.
    #[error("the peer belongs to deployment {theirs:?}: check the address and the deployment's name")]
    Deployment {
        /// The peer's deployment.
        theirs: String,
    },
    /// Another life than the expected one answers at this address.
    #[error("another process ({found}) answers at this address: the one expected there has been replaced")]
    Unexpected {
        /// Who answers.
        found: Incarnation,
    },
    /// The caller's incarnation is fenced here: it must register under a new epoch.
    #[error("this incarnation is fenced: register again to serve under a new epoch")]
    Fenced,
    /// The other side has as many connections as it may.
    #[error("the peer has no room for another connection: try again later")]
    Full,
}

/// The first frame from the other side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opening {
    /// It agrees.
    Hello(Hello),
    /// It refuses, and closes the connection.
    Reject(Reject),
}

/// The frame (length prefix included) that opens a connection.
pub fn encode(opening: &Opening) -> Vec<u8> {
    let mut out = alloc::vec![0; LENGTH_PREFIX];
    out.extend_from_slice(&MAGIC);
    match opening {
        Opening::Hello(hello) => {
            out.extend_from_slice(&VERSION.to_le_bytes());
            out.push(0);
            out.push(match hello.lane {
                Lane::Control => 0,
                Lane::Bulk => 1,
            });
            for word in [
                hello.peer.incarnation.bits(),
                hello.epoch.boot,
                hello.epoch.counter,
                hello.link,
                hello.expects.map_or(0, Incarnation::bits),
            ] {
                out.extend_from_slice(&word.to_le_bytes());
            }
            for text in [hello.peer.lid.to_string().as_bytes(), hello.deployment.as_bytes(), &hello.auth] {
                let len = u16::try_from(text.len()).expect("names in a hello are short");
                out.extend_from_slice(&len.to_le_bytes());
                out.extend_from_slice(text);
            }
        }
        Opening::Reject(reject) => {
            out.extend_from_slice(&VERSION.to_le_bytes());
            let (code, word, text) = match reject {
                Reject::Version { .. } => (1, 0, ""),
                Reject::Deployment { theirs } => (2, 0, theirs.as_str()),
                Reject::Unexpected { found } => (3, found.bits(), ""),
                Reject::Fenced => (4, 0, ""),
                Reject::Full => (5, 0, ""),
            };
            out.push(code);
            out.push(0);
            out.extend_from_slice(&word.to_le_bytes());
            out.extend_from_slice(text.as_bytes());
        }
    }
    let len = u32::try_from(out.len() - LENGTH_PREFIX).expect("a hello is short");
    out[..LENGTH_PREFIX].copy_from_slice(&len.to_le_bytes());
    out
}

/// Parses an opening (without its length prefix). A hello of another version decodes to [`Reject::Version`], which
/// is what to answer it with.
pub fn decode(frame: &[u8]) -> Result<Opening, WireError> {
    let mut reader = Reader(frame);
    if reader.take(4)? != MAGIC {
        return Err(WireError::Unknown);
    }
    let version = u16::from_le_bytes(reader.array()?);
    let code = reader.array::<1>()?[0];
    let lane = reader.array::<1>()?[0];
    if version != VERSION {
        return Ok(Opening::Reject(Reject::Version { ours: VERSION, theirs: version }));
    }
    if code != 0 {
        let word = u64::from_le_bytes(reader.array()?);
        return Ok(Opening::Reject(match code {
            1 => Reject::Version { ours: VERSION, theirs: version },
            2 => Reject::Deployment { theirs: text(reader.0)? },
            3 => Reject::Unexpected { found: Incarnation::from_bits(word) },
            4 => Reject::Fenced,
            5 => Reject::Full,
            _ => return Err(WireError::Unknown),
        }));
    }
    let mut words = [0u64; 5];
    for word in &mut words {
        *word = u64::from_le_bytes(reader.array()?);
    }
    let lid = text(reader.sized()?)?.parse::<LogicalId>().map_err(|_| WireError::Unknown)?;
    let deployment = text(reader.sized()?)?;
    let auth = reader.sized()?.to_vec();
    if !reader.0.is_empty() {
        return Err(WireError::Length);
    }
    Ok(Opening::Hello(Hello {
        peer: Peer { lid, incarnation: Incarnation::from_bits(words[0]) },
        epoch: Epoch { boot: words[1], counter: words[2] },
        lane: match lane {
            0 => Lane::Control,
            1 => Lane::Bulk,
            _ => return Err(WireError::Unknown),
        },
        link: words[3],
        expects: (words[4] != 0).then(|| Incarnation::from_bits(words[4])),
        deployment,
        auth,
    }))
}

fn text(bytes: &[u8]) -> Result<String, WireError> {
    core::str::from_utf8(bytes).map(ToString::to_string).map_err(|_| WireError::Unknown)
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], WireError> {
        let (head, tail) = self.0.split_at_checked(len).ok_or(WireError::Length)?;
        self.0 = tail;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        Ok(self.take(N)?.try_into().expect("take returns N bytes"))
    }

    fn sized(&mut self) -> Result<&'a [u8], WireError> {
        let len = u16::from_le_bytes(self.array()?);
        self.take(len.into())
    }
}
