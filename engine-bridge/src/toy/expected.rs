/// What an automaton of this many layers generates after a prompt, for a harness to compare with.
///
/// It is a model of its own, written from the automaton's definition and sharing no code with the engine: one word a
/// layer, one token after another; no batch, no stage, nothing kept of the past. It knows no stop token and no end
/// of the context.
pub fn expected(layers_total: u32, prompt: &[u32], tokens: usize) -> Vec<u32> {
    let mut layers = vec![0u64; layers_total as usize];
    let mut all = prompt.to_vec();
    let mut read = 0;
    while all.len() < prompt.len() + tokens {
        let mut signal = 0;
        for token in &all[read..] {
            signal = blend(0x0065_6D62_6564, u64::from(*token));
            for (number, layer) in layers.iter_mut().enumerate() {
                *layer = blend(*layer, signal);
                signal = blend(*layer, number as u64);
            }
        }
        read = all.len();
        all.push((signal % 65536) as u32);
    }
    all.split_off(prompt.len())
}

/// Two words into one: the first is stirred, the second added without a carry, and the sum stirred again.
fn blend(first: u64, second: u64) -> u64 {
    let mut x = first.wrapping_add(0x9E37_79B9_7F4A_7C15);
    for addend in [0, second] {
        x ^= addend;
        x ^= x >> 30;
        x = x.wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x ^= x >> 27;
        x = x.wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^= x >> 31;
    }
    x
}
