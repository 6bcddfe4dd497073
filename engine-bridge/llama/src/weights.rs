use candle_core::quantized::GgmlType;
use candle_core::quantized::k_quants::{self, BlockQ8_0};
use connex_engine::EngineError;

use crate::LoadError;
use crate::file::ModelFile;

/// Numbers per Q8_0 block.
const BLOCK: usize = 32;

/// A weight matrix of `rows` outputs by `columns` inputs in Q8_0, whatever the file had: one kernel for all, several
/// times faster than the 4-bit ones on a CPU, and blind to the shape of the batch.
pub(crate) struct Matrix {
    rows: usize,
    columns: usize,
    blocks: Vec<BlockQ8_0>,
}

impl Matrix {
    pub(crate) fn load(
        file: &mut ModelFile,
        name: &str,
        rows: usize,
        columns: usize,
    ) -> Result<Self, LoadError> {
        let numbers = file.tensor(name, rows * columns)?;
        let mut blocks = vec![BlockQ8_0::zeros(); numbers.len() / BLOCK];
        BlockQ8_0::from_float(&numbers, &mut blocks);
        Ok(Matrix { rows, columns, blocks })
    }

    /// The products of `input`'s rows with the matrix, row after row. Each depends on its own row alone.
    pub(crate) fn product(&self, input: &[f32]) -> Result<Vec<f32>, EngineError> {
        let count = input.len() / self.columns;
        let mut output = vec![0.0; count * self.rows];
        let shape = (count, self.columns, self.rows);
        k_quants::matmul(shape, input, &self.blocks, &mut output)
            .map_err(|error| EngineError::Failed(error.to_string()))?;
        Ok(output)
    }

    /// Appends the numbers of one of the matrix's rows.
    pub(crate) fn row(&self, row: usize, output: &mut Vec<f32>) {
        let per_row = self.columns / BLOCK;
        let start = output.len();
        output.resize(start + self.columns, 0.0);
        BlockQ8_0::to_float(&self.blocks[row * per_row..(row + 1) * per_row], &mut output[start..]);
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
        let info = file.info.clone();
        let (hidden, kv, feed) = (info.hidden, info.kv_heads * info.head, info.feed_forward);
        let name = |part: &str| format!("blk.{number}.{part}.weight");
        Ok(Layer {
            attention_norm: file.tensor(&name("attn_norm"), hidden)?,
            query: Matrix::load(file, &name("attn_q"), hidden, hidden)?,
            key: Matrix::load(file, &name("attn_k"), kv, hidden)?,
            value: Matrix::load(file, &name("attn_v"), kv, hidden)?,
            output: Matrix::load(file, &name("attn_output"), hidden, hidden)?,
            feed_norm: file.tensor(&name("ffn_norm"), hidden)?,
            gate: Matrix::load(file, &name("ffn_gate"), feed, hidden)?,
            up: Matrix::load(file, &name("ffn_up"), feed, hidden)?,
            down: Matrix::load(file, &name("ffn_down"), hidden, feed)?,
        })
    }
}
