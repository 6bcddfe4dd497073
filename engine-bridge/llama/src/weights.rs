use candle_core::quantized::k_quants::{BlockQ8_0, GgmlType};

use crate::LoadError;
use crate::file::ModelFile;

/// Numbers per Q8_0 block.
pub(crate) const BLOCK: usize = 32;

/// Input rows that are multiplied with four weight rows while these are near; it bears on speed alone.
const TILE: usize = 16;

/// Rows of activations, in plain numbers and in the blocks that quantised weights are multiplied with.
pub(crate) struct Input {
    columns: usize,
    plain: Vec<f32>,
    blocks: Vec<BlockQ8_0>,
}

impl Input {
    /// Takes rows of `columns` numbers each. A block's scale comes from its own 32 numbers and from nothing else.
    pub(crate) fn new(plain: Vec<f32>, columns: usize) -> Self {
        let mut blocks = vec![BlockQ8_0::zeros(); plain.len() / BLOCK];
        BlockQ8_0::from_float(&plain, &mut blocks);
        Input { columns, plain, blocks }
    }

    fn rows(&self) -> usize {
        self.plain.len() / self.columns
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.plain[row * self.columns..(row + 1) * self.columns]
    }

    fn blocks_of(&self, row: usize) -> &[BlockQ8_0] {
        let per_row = self.columns / BLOCK;
        &self.blocks[row * per_row..(row + 1) * per_row]
    }
}

enum Numbers {
    Plain(Vec<f32>),
    Blocks(Vec<BlockQ8_0>),
}

/// A weight matrix of `rows` outputs by `columns` inputs.
///
/// Every quantised kind becomes Q8_0 at load: one kernel for all, several times faster on a CPU than those of the
/// 4-bit kinds. A matrix that already is Q8_0 keeps its bits (quantising what was dequantised gives the same
/// blocks). What is not quantised in the file is not quantised here.
pub(crate) struct Matrix {
    rows: usize,
    columns: usize,
    numbers: Numbers,
}

impl Matrix {
    pub(crate) fn load(
        file: &mut ModelFile,
        name: &str,
        rows: usize,
        columns: usize,
    ) -> Result<Self, LoadError> {
        let quantised = file.is_quantised(name);
        let plain = file.tensor(name, &[rows, columns])?;
        let numbers = if quantised {
            let mut blocks = vec![BlockQ8_0::zeros(); plain.len() / BLOCK];
            BlockQ8_0::from_float(&plain, &mut blocks);
            Numbers::Blocks(blocks)
        } else {
            Numbers::Plain(plain)
        };
        Ok(Matrix { rows, columns, numbers })
    }

    /// The products of the input's rows with the matrix, row after row.
    ///
    /// Every number of the result is one call of the same kernel on one input row and the same weight rows, so it
    /// depends on that input row alone. candle's own `matmul` is left aside: it picks its path by the number of rows.
    pub(crate) fn product(&self, input: &Input) -> Vec<f32> {
        let mut output = vec![0.0; input.rows() * self.rows];
        match &self.numbers {
            Numbers::Plain(weights) => self.plain_product(weights, input, &mut output),
            Numbers::Blocks(weights) => self.block_product(weights, input, &mut output),
        }
        output
    }

    fn plain_product(&self, weights: &[f32], input: &Input, output: &mut [f32]) {
        for (number, weights) in weights.chunks_exact(self.columns).enumerate() {
            for row in 0..input.rows() {
                output[row * self.rows + number] = crate::kernel::dot(input.row(row), weights);
            }
        }
    }

    fn block_product(&self, weights: &[BlockQ8_0], input: &Input, output: &mut [f32]) {
        let per_row = self.columns / BLOCK;
        let weights_of = |row: usize| &weights[row * per_row..(row + 1) * per_row];
        for tile in (0..input.rows()).step_by(TILE) {
            let tile = tile..input.rows().min(tile + TILE);
            let mut at = 0;
            while at + 4 <= self.rows {
                let (a, b, c, d) =
                    (weights_of(at), weights_of(at + 1), weights_of(at + 2), weights_of(at + 3));
                for row in tile.clone() {
                    let sums = BlockQ8_0::vec_dot_4(self.columns, a, b, c, d, input.blocks_of(row));
                    let start = row * self.rows + at;
                    output[start..start + 4].copy_from_slice(&[sums.0, sums.1, sums.2, sums.3]);
                }
                at += 4;
            }
            for at in at..self.rows {
                for row in tile.clone() {
                    output[row * self.rows + at] =
                        BlockQ8_0::vec_dot(self.columns, weights_of(at), input.blocks_of(row));
                }
            }
        }
    }

    /// Appends the numbers of one of the matrix's rows.
    pub(crate) fn row(&self, row: usize, output: &mut Vec<f32>) {
        match &self.numbers {
            Numbers::Plain(plain) => {
                output.extend_from_slice(&plain[row * self.columns..(row + 1) * self.columns])
            }
            Numbers::Blocks(blocks) => {
                let per_row = self.columns / BLOCK;
                let start = output.len();
                output.resize(start + self.columns, 0.0);
                BlockQ8_0::to_float(&blocks[row * per_row..(row + 1) * per_row], &mut output[start..]);
            }
        }
    }
}

/// One layer's weights.
pub(crate) struct Layer {
    pub(crate) attention_norm: Vec<f32>,
    pub(crate) query: Matrix,
    pub(crate) key: Matrix,
    pub(crate) value: Matrix,
    pub(crate) output: Matrix,
    pub(crate) feed_norm: Vec<f32>,
    pub(crate) gate: Matrix,
    pub(crate) up: Matrix,
    pub(crate) down: Matrix,
}

impl Layer {
    pub(crate) fn load(file: &mut ModelFile, number: u32) -> Result<Self, LoadError> {
        let info = &file.info;
        let (hidden, kv, feed) = (info.hidden, info.kv_heads * info.head, info.feed_forward);
        let name = |part: &str| format!("blk.{number}.{part}.weight");
        Ok(Layer {
            attention_norm: file.tensor(&name("attn_norm"), &[hidden])?,
            query: Matrix::load(file, &name("attn_q"), hidden, hidden)?,
            key: Matrix::load(file, &name("attn_k"), kv, hidden)?,
            value: Matrix::load(file, &name("attn_v"), kv, hidden)?,
            output: Matrix::load(file, &name("attn_output"), hidden, hidden)?,
            feed_norm: file.tensor(&name("ffn_norm"), &[hidden])?,
            gate: Matrix::load(file, &name("ffn_gate"), feed, hidden)?,
            up: Matrix::load(file, &name("ffn_up"), feed, hidden)?,
            down: Matrix::load(file, &name("ffn_down"), hidden, feed)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers that no two places share, some of them on the edge between two steps of a block.
    fn numbers(len: usize) -> Vec<f32> {
        (0..len).map(|at| ((at * 7919 % 4099) as f32 - 2049.0) / 511.0).collect()
    }

    fn quantised(rows: usize, columns: usize) -> Matrix {
        let mut blocks = vec![BlockQ8_0::zeros(); rows * columns / BLOCK];
        BlockQ8_0::from_float(&numbers(rows * columns), &mut blocks);
        Matrix { rows, columns, numbers: Numbers::Blocks(blocks) }
    }

    #[test]
    fn a_product_of_many_rows_has_the_bits_of_each_row_alone() {
        let (columns, count) = (96, 37);
        let input = numbers(columns * count);
        for rows in [1, 3, 4, 7, 64] {
            let plain = Matrix { rows, columns, numbers: Numbers::Plain(numbers(rows * columns)) };
            for matrix in [quantised(rows, columns), plain] {
                let together = matrix.product(&Input::new(input.clone(), columns));
                for (at, row) in input.chunks_exact(columns).enumerate() {
                    let alone = matrix.product(&Input::new(row.to_vec(), columns));
                    assert_eq!(alone, together[at * rows..(at + 1) * rows], "row {at} of {rows} outputs");
                }
            }
        }
    }

    #[test]
    fn quantised_products_are_near_the_exact_ones() {
        let (rows, columns) = (7, 96);
        let matrix = quantised(rows, columns);
        let input = numbers(columns);
        let found = matrix.product(&Input::new(input.clone(), columns));
        for (row, found) in found.iter().enumerate() {
            let mut weights = Vec::new();
            matrix.row(row, &mut weights);
            let exact: f64 = weights.iter().zip(&input).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            assert!((f64::from(*found) - exact).abs() < 2.0, "row {row}: {found} instead of {exact}");
        }
    }

    #[test]
    fn what_is_q8_0_already_keeps_its_bits() {
        let (rows, columns) = (5, 64);
        let matrix = quantised(rows, columns);
        let mut once = Vec::new();
        (0..rows).for_each(|row| matrix.row(row, &mut once));
        let mut blocks = vec![BlockQ8_0::zeros(); once.len() / BLOCK];
        BlockQ8_0::from_float(&once, &mut blocks);
        let again = Matrix { rows, columns, numbers: Numbers::Blocks(blocks) };
        let mut twice = Vec::new();
        (0..rows).for_each(|row| again.row(row, &mut twice));
        assert_eq!(once, twice);
    }
}
