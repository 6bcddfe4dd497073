//! The arithmetic between the matrix products. Each function works on one token, in one fixed order, so that nothing
//! around the token can change a bit of its result.

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

/// Appends the root-mean-square norm of `input`, scaled by `weight`.
pub(crate) fn rms_norm(input: &[f32], weight: &[f32], epsilon: f32, output: &mut Vec<f32>) {
    let mean = dot(input, input) / input.len() as f32;
    let scale = 1.0 / (mean + epsilon).sqrt();
    output.extend(input.iter().zip(weight).map(|(x, w)| x * scale * w));
}

/// The rotary embedding's sines and cosines for every position up to a context.
pub(crate) struct Rope {
    half: usize,
    base: f32,
}

impl Rope {
    pub(crate) fn new(head: usize, base: f32) -> Self {
        Rope { half: head / 2, base }
    }

    /// The angles at a position: (cosine, sine) per pair.
    pub(crate) fn at(&self, position: u32) -> Vec<(f32, f32)> {
        (0..self.half)
            .map(|pair| {
                let exponent = pair as f32 / self.half as f32;
                let angle = position as f32 / self.base.powf(exponent);
                (angle.cos(), angle.sin())
            })
            .collect()
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

/// The attention of one token over the first `seen` cached ones, in the order of their positions.
pub(crate) fn attend(
    query: &[f32],
    keys: &[f32],
    values: &[f32],
    seen: usize,
    head: usize,
    kv_heads: usize,
    output: &mut Vec<f32>,
) {
    let kv = kv_heads * head;
    let heads = query.len() / head;
    let share = heads / kv_heads;
    let scale = 1.0 / (head as f32).sqrt();
    let mut scores = vec![0f32; seen];
    for (number, query) in query.chunks_exact(head).enumerate() {
        let offset = number / share * head;
        let mut highest = f32::NEG_INFINITY;
        for (position, score) in scores.iter_mut().enumerate() {
            let at = position * kv + offset;
            *score = dot(query, &keys[at..at + head]) * scale;
            highest = highest.max(*score);
        }
        let mut total = 0f32;
        for score in &mut scores {
            *score = (*score - highest).exp();
            total += *score;
        }
        let start = output.len();
        output.resize(start + head, 0.0);
        let out = &mut output[start..];
        for (position, score) in scores.iter().enumerate() {
            let at = position * kv + offset;
            let share = score / total;
            for (out, value) in out.iter_mut().zip(&values[at..at + head]) {
                *out += share * value;
            }
        }
    }
}

/// The gated activation of the feed-forward part, in place.
pub(crate) fn gate(gates: &mut [f32], ups: &[f32]) {
    for (gate, up) in gates.iter_mut().zip(ups) {
        *gate = *gate / (1.0 + (-*gate).exp()) * up;
    }
}

/// The index of the greatest number; the first of equals.
pub(crate) fn argmax(numbers: &[f32]) -> u32 {
    let mut best = 0;
    for (at, number) in numbers.iter().enumerate() {
        if *number > numbers[best] {
            best = at;
        }
    }
    best as u32
}
