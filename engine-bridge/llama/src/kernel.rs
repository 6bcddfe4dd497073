//! The arithmetic between the matrix products. Each function works on one token, in one fixed order, so that nothing
//! around the token can change a bit of its result. Only additions, products, divisions and roots are used where a
//! step is computed: the same on every processor, and independent of the system's mathematical library.

/// Lanes that are summed side by side and then added in order: what a compiler turns into vector instructions, fixed
/// in the source so that every build and every length sums alike.
const LANES: usize = 16;

/// The scalar product.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let tail: f32 = a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a_chunks.zip(b_chunks) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    lanes.iter().sum::<f32>() + tail
}

/// `e` to the power of `x`, to about 1e-7 of the result; the result stays a normal number, so below -87 it no longer
/// shrinks. It is written out so that a compiler can compute several at once.
fn exp(x: f32) -> f32 {
    /// Adding it to a number of moderate size leaves the nearest integer in the lowest bits.
    const TO_INTEGER: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let x = x.clamp(-87.0, 88.0);
    let shifted = x * std::f32::consts::LOG2_E + TO_INTEGER;
    let power = shifted - TO_INTEGER;
    let rest = x - power * LN_2_HIGH - power * LN_2_LOW;
    let mut sum = 1.0 / 5040.0;
    for term in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        sum = sum * rest + term;
    }
    // The integer goes where the number's exponent is: a multiplication by that power of two.
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    sum * scale
}

/// Appends the root-mean-square norm of `input`, scaled by `weight`.
pub(crate) fn rms_norm(input: &[f32], weight: &[f32], epsilon: f32, output: &mut Vec<f32>) {
    let mean = dot(input, input) / input.len() as f32;
    let scale = 1.0 / (mean + epsilon).sqrt();
    output.extend(input.iter().zip(weight).map(|(x, w)| x * scale * w));
}

/// The rotary embedding: how fast each pair of a head's numbers turns.
pub(crate) struct Rope {
    speeds: Vec<f64>,
}

impl Rope {
    pub(crate) fn new(head: usize, base: f32) -> Self {
        let half = head / 2;
        let speed = |pair: usize| f64::from(base).powf(-(pair as f64) / half as f64);
        Rope { speeds: (0..half).map(speed).collect() }
    }

    /// Appends the (cosine, sine) of each pair at a position. They are computed in `f64`, whose last bits, the only
    /// ones in which libraries differ, are rounded away.
    pub(crate) fn at(&self, position: u32, angles: &mut Vec<(f32, f32)>) {
        angles.extend(self.speeds.iter().map(|speed| {
            let angle = f64::from(position) * speed;
            (angle.cos() as f32, angle.sin() as f32)
        }));
    }
}

/// Turns each head's neighbouring pairs by the position's angles.
pub(crate) fn rotate(heads: &mut [f32], angles: &[(f32, f32)]) {
    for head in heads.chunks_exact_mut(angles.len() * 2) {
        for (pair, (cos, sin)) in head.chunks_exact_mut(2).zip(angles) {
            let (a, b) = (pair[0], pair[1]);
            pair[0] = a * cos - b * sin;
            pair[1] = a * sin + b * cos;
        }
    }
}

/// The heads of an attention.
#[derive(Clone, Copy)]
pub(crate) struct Heads {
    /// Numbers per head.
    pub(crate) width: usize,
    /// Query heads that share one key and value head.
    pub(crate) share: usize,
    /// Numbers that all key heads have together: what is cached a token, for keys and for values.
    pub(crate) cached: usize,
}

/// The attention of one token over all cached ones, itself the last, in the order of their positions.
pub(crate) fn attend(
    heads: Heads,
    query: &[f32],
    keys: &[f32],
    values: &[f32],
    scores: &mut Vec<f32>,
    output: &mut Vec<f32>,
) {
    let width = heads.width;
    let scale = 1.0 / (width as f32).sqrt();
    for (number, query) in query.chunks_exact(width).enumerate() {
        let offset = number / heads.share * width;
        let of_head = |token: &'_ [f32]| -> [usize; 2] {
            debug_assert_eq!(token.len(), heads.cached);
            [offset, offset + width]
        };
        scores.clear();
        scores.extend(keys.chunks_exact(heads.cached).map(|token| {
            let [from, to] = of_head(token);
            dot(query, &token[from..to]) * scale
        }));
        let highest = scores.iter().fold(f32::NEG_INFINITY, |highest, score| highest.max(*score));
        scores.iter_mut().for_each(|score| *score = exp(*score - highest));
        let total: f32 = scores.iter().sum();
        let start = output.len();
        output.resize(start + width, 0.0);
        let out = &mut output[start..];
        for (score, token) in scores.iter().zip(values.chunks_exact(heads.cached)) {
            let [from, to] = of_head(token);
            for (out, value) in out.iter_mut().zip(&token[from..to]) {
                *out += score * value;
            }
        }
        out.iter_mut().for_each(|out| *out /= total);
    }
}

/// The gated activation of the feed-forward part, in place.
pub(crate) fn gate(gates: &mut [f32], ups: &[f32]) {
    for (gate, up) in gates.iter_mut().zip(ups) {
        *gate = *gate / (1.0 + exp(-*gate)) * up;
    }
}

/// The index of the greatest number, the first of equals; nothing if a number is not finite or there is none.
pub(crate) fn argmax(numbers: &[f32]) -> Option<u32> {
    let mut best = None;
    let mut highest = f32::NEG_INFINITY;
    for (at, number) in (0..).zip(numbers) {
        if !number.is_finite() {
            return None;
        }
        if *number > highest {
            (best, highest) = (Some(at), *number);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scalar_product_sums_every_length() {
        for len in [1, 15, 16, 17, 64, 100] {
            let numbers: Vec<f32> = (0..len).map(|n| n as f32).collect();
            let wanted: f32 = (0..len).map(|n| (n * n) as f32).sum();
            assert_eq!(dot(&numbers, &numbers), wanted);
        }
    }

    #[test]
    fn the_exponential_is_the_libraries_to_seven_digits() {
        for step in -86_000..=87_000 {
            let x = step as f32 / 1000.0;
            let (found, exact) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((found / exact - 1.0).abs() < 4e-7, "exp({x}) is {exact}, not {found}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(-1e30) < 1e-37 && exp(1e30).is_finite() && exp(f32::NAN).is_nan());
    }

    #[test]
    fn attention_weighs_the_values_by_how_well_the_keys_fit() {
        // Two query heads share one key head of width 2. The first fits the second token, the second fits neither.
        let heads = Heads { width: 2, share: 2, cached: 2 };
        let keys = [0.0, 0.0, 90.0, 0.0];
        let values = [1.0, 2.0, 3.0, 4.0];
        let mut output = Vec::new();
        attend(heads, &[9.0, 0.0, 0.0, 9.0], &keys, &values, &mut Vec::new(), &mut output);
        assert_eq!(output, [3.0, 4.0, 2.0, 3.0]);
    }

    #[test]
    fn the_greatest_logit_wins_and_no_token_comes_of_numbers_that_are_none() {
        assert_eq!(argmax(&[1.0, 3.0, 3.0, -1.0]), Some(1));
        assert_eq!(argmax(&[1.0, f32::NAN]), None);
        assert_eq!(argmax(&[f32::INFINITY, 0.0]), None);
        assert_eq!(argmax(&[]), None);
    }
}
