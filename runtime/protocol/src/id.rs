use alloc::string::{String, ToString};
use alloc::sync::Arc;
use core::fmt;
use core::str::FromStr;

use serde::{Deserialize, Serialize};

/// The number of a replica within its group.
pub type ReplicaNo = u32;

/// The name of a group of interchangeable replicas: (model, role, stage).
///
/// Text form: `model/role/stage`, model and role percent-encoded.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Group {
    model: Arc<str>,
    role: Arc<str>,
    stage: u16,
}

/// The name of a logical endpoint: (model, role, stage, replica, shard). It outlives every process that serves it.
///
/// Text form: five fields joined by `/`, model and role percent-encoded
/// (`HuggingFaceTB%2FSmolLM2/pp/1/0/0`); printing and parsing round-trip.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LogicalId {
    group: Group,
    replica: ReplicaNo,
    shard: u16,
}

/// One life of a process: 64 random bits, drawn at its start and never zero.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Incarnation(u64);

/// What the directory grants at each registration; it only grows per replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Epoch {
    /// The life of the directory that granted it.
    pub boot: u64,
    /// The count of grants within that life.
    pub counter: u64,
}

/// A step's identity: who made it and its number there. Every hop forwards the step under the same id.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct StepId {
    /// The process that made the step and receives its result.
    pub origin: Incarnation,
    /// Counts that origin's steps from 1.
    pub seq: u64,
}

/// A logical endpoint in one of its lives.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Peer {
    /// The endpoint.
    pub lid: LogicalId,
    /// Its life.
    pub incarnation: Incarnation,
}

/// Where an endpoint can be reached, as `scheme://rest` (`tcp://[::1]:4100`, `mem://a`).
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Address(Arc<str>);

/// Why a text is not a logical id or a group.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    /// The wrong number of `/`-separated fields.
    #[error(
        "{text:?} has {found} fields, expected {expected}: write model/role/stage/replica/shard for an \
         endpoint or model/role/stage for a group, with any `/` inside a field as %2F"
    )]
    Fields {
        /// What was given.
        text: String,
        /// How many fields it has.
        found: usize,
        /// How many it should have.
        expected: usize,
    },
    /// Model or role is empty.
    #[error("{text:?} has an empty {field}: every field needs a value")]
    Empty {
        /// What was given.
        text: String,
        /// The field's name.
        field: &'static str,
    },
    /// Stage, replica or shard is no number in range.
    #[error("{value:?} is not a valid {field}: write a whole number from 0 to {max}")]
    Number {
        /// The field's name.
        field: &'static str,
        /// What stood there.
        value: String,
        /// The largest number allowed.
        max: u64,
    },
    /// A percent sign that does not start a two-digit escape, or an escape that yields no UTF-8.
    #[error("{value:?} has a bad percent escape: write % as %25 and / as %2F")]
    Escape {
        /// The field's text.
        value: String,
    },
}

impl Group {
    /// A group by its parts.
    pub fn new(model: &str, role: &str, stage: u16) -> Self {
        Group { model: model.into(), role: role.into(), stage }
    }

    /// The model's name.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// The role: `pp` for pipeline stages, or any word.
    pub fn role(&self) -> &str {
        &self.role
    }

    /// The stage's number.
    pub fn stage(&self) -> u16 {
        self.stage
    }

    /// The same model and role at another stage.
    pub fn at_stage(&self, stage: u16) -> Group {
        Group { stage, ..self.clone() }
    }

    /// The endpoint of a replica that has one shard.
    pub fn replica(&self, replica: ReplicaNo) -> LogicalId {
        LogicalId { group: self.clone(), replica, shard: 0 }
    }
}

impl LogicalId {
    /// An endpoint by its parts.
    pub fn new(group: Group, replica: ReplicaNo, shard: u16) -> Self {
        LogicalId { group, replica, shard }
    }

    /// The group that the endpoint belongs to.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// The replica's number.
    pub fn replica(&self) -> ReplicaNo {
        self.replica
    }

    /// The shard's number.
    pub fn shard(&self) -> u16 {
        self.shard
    }
}

impl Incarnation {
    /// An incarnation from 64 random bits; 0, which the wire uses for "nobody yet", becomes 1.
    pub const fn from_bits(bits: u64) -> Self {
        Incarnation(if bits == 0 { 1 } else { bits })
    }

    /// Its bits.
    pub fn bits(self) -> u64 {
        self.0
    }
}

impl Address {
    /// An address from its text.
    pub fn new(text: &str) -> Self {
        Address(text.into())
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The part before `://`, and the part after it; an address without a scheme is tcp.
    pub fn split(&self) -> (&str, &str) {
        self.0.split_once("://").unwrap_or(("tcp", &self.0))
    }
}

fn encode(f: &mut fmt::Formatter<'_>, field: &str) -> fmt::Result {
    for byte in field.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'~' | b':') {
            write!(f, "{}", byte as char)?;
        } else {
            write!(f, "%{byte:02X}")?;
        }
    }
    Ok(())
}

fn decode(text: &str, field: &'static str, value: &str) -> Result<Arc<str>, IdError> {
    if value.is_empty() {
        return Err(IdError::Empty { text: text.to_string(), field });
    }
    let bad = || IdError::Escape { value: value.to_string() };
    let mut out = alloc::vec::Vec::with_capacity(value.len());
    let mut bytes = value.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let hex = |b: Option<u8>| b.and_then(|b| (b as char).to_digit(16)).ok_or_else(bad);
        let (high, low) = (hex(bytes.next())?, hex(bytes.next())?);
        out.push((high * 16 + low) as u8);
    }
    String::from_utf8(out).map(Into::into).map_err(|_| bad())
}

fn number<T: TryFrom<u64>>(field: &'static str, value: &str, max: u64) -> Result<T, IdError> {
    let bad = || IdError::Number { field, value: value.to_string(), max };
    if !value.bytes().all(|b| b.is_ascii_digit()) || (value.len() > 1 && value.starts_with('0')) {
        return Err(bad());
    }
    value.parse::<u64>().ok().filter(|n| *n <= max).and_then(|n| T::try_from(n).ok()).ok_or_else(bad)
}

fn fields<const N: usize>(text: &str) -> Result<[&str; N], IdError> {
    let found = text.split('/').count();
    if found != N {
        return Err(IdError::Fields { text: text.to_string(), found, expected: N });
    }
    let mut out = [""; N];
    for (slot, field) in out.iter_mut().zip(text.split('/')) {
        *slot = field;
    }
    Ok(out)
}

fn group_of(text: &str, model: &str, role: &str, stage: &str) -> Result<Group, IdError> {
    Ok(Group {
        model: decode(text, "model", model)?,
        role: decode(text, "role", role)?,
        stage: number("stage", stage, u16::MAX.into())?,
    })
}

impl FromStr for Group {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let [model, role, stage] = fields(text)?;
        group_of(text, model, role, stage)
    }
}

impl FromStr for LogicalId {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let [model, role, stage, replica, shard] = fields(text)?;
        Ok(LogicalId {
            group: group_of(text, model, role, stage)?,
            replica: number("replica", replica, ReplicaNo::MAX.into())?,
            shard: number("shard", shard, u16::MAX.into())?,
        })
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        encode(f, &self.model)?;
        f.write_str("/")?;
        encode(f, &self.role)?;
        write!(f, "/{}", self.stage)
    }
}

impl fmt::Display for LogicalId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.group, self.replica, self.shard)
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Display for StepId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.origin, self.seq)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.boot, self.counter)
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.lid, self.incarnation)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

macro_rules! debug_as_display {
    ($($name:ty),*) => {$(
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    )*};
}
debug_as_display!(Group, LogicalId, Incarnation, StepId, Address);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_logical_id_round_trips(model in "\\PC{1,20}", role in "\\PC{1,8}", stage: u16, replica: u32, shard: u16) {
            let lid = LogicalId::new(Group::new(&model, &role, stage), replica, shard);
            prop_assert_eq!(lid.to_string().parse::<LogicalId>(), Ok(lid));
        }

        #[test]
        fn parsing_any_text_is_total_and_canonical(text in "\\PC{0,40}") {
            if let Ok(lid) = text.parse::<LogicalId>() {
                prop_assert_eq!(lid.to_string().parse::<LogicalId>(), Ok(lid));
            }
        }
    }

    #[test]
    fn a_malformed_logical_id_names_the_fault() {
        let error = |text: &str| text.parse::<LogicalId>().unwrap_err();
        assert!(matches!(error("m/pp/1"), IdError::Fields { found: 3, expected: 5, .. }));
        assert!(matches!(error("/pp/1/0/0"), IdError::Empty { field: "model", .. }));
        assert!(matches!(error("m/pp/65536/0/0"), IdError::Number { field: "stage", .. }));
        assert!(matches!(error("m/pp/1/-1/0"), IdError::Number { field: "replica", .. }));
        assert!(matches!(error("m%2/pp/1/0/0"), IdError::Escape { .. }));
    }
}
