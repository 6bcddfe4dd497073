//! The only file that names bincode.

use alloc::vec::Vec;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{CONTROL_FRAME_MAX, WireError};

fn config() -> impl bincode::config::Config {
    // The limit bounds what a decoder may claim, so that a lying length allocates nothing.
    bincode::config::standard().with_limit::<CONTROL_FRAME_MAX>()
}

/// Appends the compact encoding of `value` to `out`: what control messages and the metadata of steps are made of.
pub fn write<T: Serialize>(out: &mut Vec<u8>, value: &T) {
    let bytes = bincode::serde::encode_to_vec(value, bincode::config::standard())
        .expect("the wire types hold nothing that bincode refuses");
    out.extend_from_slice(&bytes);
}

/// Reads a value that fills `bytes` exactly; it may claim no more memory than a control frame may hold.
pub fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, WireError> {
    match bincode::serde::decode_from_slice(bytes, config()) {
        Ok((value, used)) if used == bytes.len() => Ok(value),
        Ok(_) => Err(WireError::Length),
        Err(_) => Err(WireError::Unknown),
    }
}
