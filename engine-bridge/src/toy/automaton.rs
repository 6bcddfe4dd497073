//! The automaton itself: how a state takes an activation, and how an activation becomes bytes that can be checked.

use super::VOCABULARY;

/// Mixes two words so that order matters and every bit of both reaches every bit of the result.
pub(super) fn mix(left: u64, right: u64) -> u64 {
    scramble(scramble(left.wrapping_add(0x9E37_79B9_7F4A_7C15)) ^ right)
}

/// The finaliser of splitmix64, a bijection.
fn scramble(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

/// The activation that enters layer 0.
pub(super) fn embed(token: u32) -> u64 {
    mix(0x0065_6D62_6564, u64::from(token))
}

/// The state after one more activation.
pub(super) fn absorb(state: u64, activation: u64) -> u64 {
    mix(state, activation)
}

/// The activation that leaves a layer.
pub(super) fn emit(state: u64, layer: u32) -> u64 {
    mix(state, u64::from(layer))
}

/// The token that the last activation stands for.
pub(super) fn sample(activation: u64) -> u32 {
    (activation % u64::from(VOCABULARY)) as u32
}

/// The bytes behind the activation's own eight: each word depends on the activation and on its place, so that a
/// payload that was torn, shifted or swapped is noticed by the next stage.
fn padding(activation: u64, place: usize) -> u64 {
    activation.rotate_left(place as u32 & 63) ^ (place as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// Appends an activation as `width` bytes (at least 8).
pub(super) fn write_activation(out: &mut Vec<u8>, activation: u64, width: usize) {
    let end = out.len() + width;
    out.extend_from_slice(&activation.to_le_bytes());
    for place in 1..width.div_ceil(8) {
        let word = padding(activation, place).to_le_bytes();
        out.extend_from_slice(&word[..word.len().min(end - out.len())]);
    }
}

/// The activation in `bytes`; `None` if what follows it is not its padding.
pub(super) fn read_activation(bytes: &[u8]) -> Option<u64> {
    let (first, rest) = bytes.split_first_chunk::<8>()?;
    let activation = u64::from_le_bytes(*first);
    let (words, tail) = rest.as_chunks::<8>();
    let whole = words.iter().enumerate().all(|(at, word)| *word == padding(activation, at + 1).to_le_bytes());
    let last = padding(activation, words.len() + 1).to_le_bytes();
    (whole && *tail == last[..tail.len()]).then_some(activation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_activation_of_any_width_is_read_back_and_one_flipped_bit_is_noticed() {
        for width in [8, 9, 15, 16, 17, 64, 1000] {
            let mut bytes = Vec::new();
            write_activation(&mut bytes, 0x0123_4567_89AB_CDEF, width);
            assert_eq!(bytes.len(), width);
            assert_eq!(read_activation(&bytes), Some(0x0123_4567_89AB_CDEF));
            for at in 8..width {
                let mut torn = bytes.clone();
                torn[at] ^= 1;
                assert_eq!(read_activation(&torn), None, "byte {at} of {width}");
            }
        }
    }

    #[test]
    fn mixing_minds_the_order() {
        assert_ne!(mix(1, 2), mix(2, 1));
        assert_ne!(absorb(absorb(0, 5), 6), absorb(absorb(0, 6), 5));
        assert_ne!(absorb(absorb(0, 5), 5), absorb(0, 5));
    }
}
