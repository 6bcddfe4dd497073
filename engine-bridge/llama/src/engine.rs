use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use connex_engine::{Batch, Engine, EngineError, EngineInfo, RequestId, Row, Watch};
use connex_protocol::StepId;

use crate::LoadError;
use crate::file::{ModelFile, ModelInfo};
use crate::kernel::{Rope, argmax, attend, gate, rms_norm, rotate};
use crate::weights::{Layer, Matrix};

/// The keys and values of one request, per layer: `kv_heads * head` numbers a token.
#[derive(Default)]
struct Cache {
    tokens: u32,
    layers: Vec<(Vec<f32>, Vec<f32>)>,
}

/// A range of a llama's layers, with the cache of every request that it serves.
pub struct LlamaEngine {
    model: ModelInfo,
    info: EngineInfo,
    embedding: Option<Matrix>,
    layers: Vec<Layer>,
    head: Option<(Vec<f32>, Matrix)>,
    rope: Rope,
    caches: HashMap<RequestId, Cache>,
}

impl LlamaEngine {
    /// Loads these layers of a model; all of them without a range.
    pub fn load(path: &Path, layers: Option<Range<u32>>) -> Result<Self, LoadError> {
        let mut file = ModelFile::open(path)?;
        let model = file.info.clone();
        let asked = layers.unwrap_or(0..model.layers);
        if asked.is_empty() || asked.end > model.layers {
            return Err(LoadError::Layers { asked, layers: model.layers });
        }
        let (vocabulary, hidden) = (model.vocabulary as usize, model.hidden);
        let embedding = match asked.start {
            0 => Some(Matrix::load(&mut file, "token_embd.weight", vocabulary, hidden)?),
            _ => None,
        };
        let mut loaded = Vec::new();
        for number in asked.clone() {
            loaded.push(Layer::load(&mut file, number)?);
        }
        let head = if asked.end == model.layers {
            let norm = file.tensor("output_norm.weight", hidden)?;
            // A model without a head of its own shares the embedding's numbers.
            let name = if file.has("output.weight") { "output.weight" } else { "token_embd.weight" };
            Some((norm, Matrix::load(&mut file, name, vocabulary, hidden)?))
        } else {
            None
        };
        let info = EngineInfo {
            model: model.name.clone(),
            layers: asked,
            layers_total: model.layers,
            width: hidden as u32 * 4,
            context_max: model.context,
            stop_tokens: model.stop_tokens.clone(),
            vocabulary: model.vocabulary,
        };
        let rope = Rope::new(model.head, model.rope_base);
        Ok(LlamaEngine { model, info, embedding, layers: loaded, head, rope, caches: HashMap::new() })
    }

    /// The logits after each sampled row of a batch, for comparisons; only the last stage has them.
    pub fn logits(
        &mut self,
        batch: &Batch,
        input: &[u8],
        watch: &dyn Watch,
    ) -> Result<Vec<Vec<f32>>, EngineError> {
        let hidden = self.compute(batch, input, watch)?;
        self.sampled(batch, &hidden)
    }

    fn read_input(&self, batch: &Batch, input: &[u8]) -> Result<Vec<f32>, EngineError> {
        let width = if self.info.is_first() { 4 } else { self.info.width as usize };
        let expected = batch.tokens() * width;
        if input.len() != expected {
            return Err(EngineError::Input { found: input.len(), expected });
        }
        let words = input
            .chunks_exact(4)
            .map(|chunk| u32::from_le_bytes(chunk.try_into().expect("a chunk has four bytes")));
        let Some(embedding) = &self.embedding else {
            return Ok(words.map(f32::from_bits).collect());
        };
        let vocabulary = self.info.vocabulary;
        let mut hidden = Vec::with_capacity(batch.tokens() * self.model.hidden);
        for token in words {
            if token >= vocabulary {
                return Err(EngineError::Token { token, vocabulary });
            }
            embedding.row(token as usize, &mut hidden);
        }
        Ok(hidden)
    }

    /// Runs the layers; returns the activations of every token of the batch.
    fn compute(&mut self, batch: &Batch, input: &[u8], watch: &dyn Watch) -> Result<Vec<f32>, EngineError> {
        let mut hidden = self.read_input(batch, input)?;
        for row in &batch.rows {
            let needed = row.context + row.tokens;
            if needed > self.info.context_max {
                return Err(EngineError::Context { needed, max: self.info.context_max });
            }
            self.cut(row);
        }
        let angles: Vec<Vec<(f32, f32)>> = batch
            .rows
            .iter()
            .flat_map(|row| row.context..row.context + row.tokens)
            .map(|position| self.rope.at(position))
            .collect();
        for number in 0..self.layers.len() {
            if watch.cancelled() {
                return Err(EngineError::Cancelled);
            }
            self.layer(number, batch, &angles, &mut hidden)?;
            watch.progress();
        }
        for row in &batch.rows {
            if let Some(cache) = self.caches.get_mut(&row.request) {
                cache.tokens = row.context + row.tokens;
            }
        }
        Ok(hidden)
    }

    /// Drops what is cached beyond a row's context.
    fn cut(&mut self, row: &Row) {
        let kv = self.model.kv_heads * self.model.head;
        let layers = self.layers.len();
        let cache = self.caches.entry(row.request).or_default();
        cache.layers.resize_with(layers, Default::default);
        for (keys, values) in &mut cache.layers {
            keys.truncate(row.context as usize * kv);
            values.truncate(row.context as usize * kv);
        }
        cache.tokens = row.context;
    }

    fn layer(
        &mut self,
        number: usize,
        batch: &Batch,
        angles: &[Vec<(f32, f32)>],
        hidden: &mut [f32],
    ) -> Result<(), EngineError> {
        let layer = &self.layers[number];
        let (width, head, kv_heads) = (self.model.hidden, self.model.head, self.model.kv_heads);
        let (kv, epsilon) = (kv_heads * head, self.model.epsilon);
        let mut normed = Vec::with_capacity(hidden.len());
        for token in hidden.chunks_exact(width) {
            rms_norm(token, &layer.attention_norm, epsilon, &mut normed);
        }
        let mut queries = layer.query.product(&normed)?;
        let mut keys = layer.key.product(&normed)?;
        let values = layer.value.product(&normed)?;
        for (token, angles) in angles.iter().enumerate() {
            rotate(&mut queries[token * width..(token + 1) * width], angles);
            rotate(&mut keys[token * kv..(token + 1) * kv], angles);
        }
        let mut attended = Vec::with_capacity(hidden.len());
        let mut token = 0;
        for row in &batch.rows {
            let cache = self.caches.get_mut(&row.request).expect("every row's cache was cut to its context");
            let (cached_keys, cached_values) = &mut cache.layers[number];
            for at in 0..row.tokens as usize {
                cached_keys.extend_from_slice(&keys[token * kv..(token + 1) * kv]);
                cached_values.extend_from_slice(&values[token * kv..(token + 1) * kv]);
                let seen = row.context as usize + at + 1;
                let query = &queries[token * width..(token + 1) * width];
                attend(query, cached_keys, cached_values, seen, head, kv_heads, &mut attended);
                token += 1;
            }
        }
        add(hidden, &layer.output.product(&attended)?);
        normed.clear();
        for token in hidden.chunks_exact(width) {
            rms_norm(token, &layer.feed_norm, epsilon, &mut normed);
        }
        let mut gates = layer.gate.product(&normed)?;
        gate(&mut gates, &layer.up.product(&normed)?);
        add(hidden, &layer.down.product(&gates)?);
        Ok(())
    }

    /// The logits after the last token of each sampled row.
    fn sampled(&self, batch: &Batch, hidden: &[f32]) -> Result<Vec<Vec<f32>>, EngineError> {
        let Some((norm, head)) = &self.head else { return Ok(Vec::new()) };
        let width = self.model.hidden;
        let mut normed = Vec::new();
        let mut end = 0;
        for row in &batch.rows {
            end += row.tokens as usize;
            if row.sample {
                rms_norm(&hidden[(end - 1) * width..end * width], norm, self.model.epsilon, &mut normed);
            }
        }
        let logits = head.product(&normed)?;
        Ok(logits.chunks_exact(self.model.vocabulary as usize).map(<[f32]>::to_vec).collect())
    }
}

fn add(hidden: &mut [f32], more: &[f32]) {
    for (hidden, more) in hidden.iter_mut().zip(more) {
        *hidden += more;
    }
}

impl Engine for LlamaEngine {
    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn held(&self, request: RequestId) -> u32 {
        self.caches.get(&request).map_or(0, |cache| cache.tokens)
    }

    fn forward(
        &mut self,
        _step: StepId,
        batch: &Batch,
        input: &[u8],
        output: &mut Vec<u8>,
        watch: &dyn Watch,
    ) -> Result<(), EngineError> {
        let hidden = self.compute(batch, input, watch)?;
        if self.info.is_last() {
            for logits in self.sampled(batch, &hidden)? {
                output.extend_from_slice(&argmax(&logits).to_le_bytes());
            }
        } else {
            output.extend(hidden.iter().flat_map(|number| number.to_le_bytes()));
        }
        Ok(())
    }

    fn release(&mut self, request: RequestId) {
        self.caches.remove(&request);
    }

    fn requests(&self) -> usize {
        self.caches.len()
    }
}

#[cfg(test)]
mod tests {
    use crate::kernel;

    #[test]
    fn a_dot_product_sums_every_length() {
        for len in [1, 15, 16, 17, 64, 100] {
            let numbers: Vec<f32> = (0..len).map(|n| n as f32).collect();
            let wanted: f32 = (0..len).map(|n| (n * n) as f32).sum();
            assert_eq!(kernel::dot(&numbers, &numbers), wanted);
        }
    }
}
