use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use connex_engine::{Batch, Engine, EngineError, EngineInfo, RequestId, Row, Watch};
use connex_protocol::StepId;

use crate::LoadError;
use crate::file::{ModelFile, ModelInfo};
use crate::kernel::{self, Heads, Rope, rms_norm};
use crate::weights::{Input, Layer, Matrix};

/// Tokens of a long prefill after whose attention the watch is called again.
const WATCH_TOKENS: usize = 32;

/// The keys and values of one request in one layer, token after token.
#[derive(Default)]
struct LayerCache {
    keys: Vec<f32>,
    values: Vec<f32>,
}

/// What is cached of one request.
#[derive(Default)]
struct Cache {
    tokens: u32,
    layers: Vec<LayerCache>,
}

/// A range of a llama's layers, with the cache of every request that it serves.
///
/// It computes on the thread that calls it and starts none.
pub struct LlamaEngine {
    model: ModelInfo,
    info: EngineInfo,
    embedding: Option<Arc<Matrix>>,
    layers: Vec<Layer>,
    head: Option<(Vec<f32>, Arc<Matrix>)>,
    rope: Rope,
    caches: HashMap<RequestId, Cache>,
}

impl LlamaEngine {
    /// Loads these layers of a model; all of them without a range. Only their weights are read and kept, with the
    /// embedding for the first layer and the norm and head for the last.
    pub fn load(path: &Path, layers: Option<Range<u32>>) -> Result<Self, LoadError> {
        let mut file = ModelFile::open(path)?;
        let model = file.info.clone();
        let asked = layers.unwrap_or(0..model.layers);
        if asked.is_empty() || asked.end > model.layers {
            return Err(LoadError::Layers { asked, layers: model.layers });
        }
        let info = EngineInfo {
            model: model.name.clone(),
            layers: asked.clone(),
            layers_total: model.layers,
            width: model.hidden as u32 * 4,
            context_max: model.context,
            stop_tokens: model.stop_tokens.clone(),
            vocabulary: model.vocabulary,
        };
        let mut embeddings =
            |name: &str| Matrix::load(&mut file, name, model.vocabulary as usize, model.hidden).map(Arc::new);
        let embedding = info.is_first().then(|| embeddings("token_embd.weight")).transpose()?;
        let head = match (info.is_last(), file.has("output.weight")) {
            (false, _) => None,
            (true, true) => Some(load_head(&mut file, "output.weight")?),
            // A model without a head of its own uses the embedding's numbers, which a single stage has already.
            (true, false) => match &embedding {
                Some(embedding) => {
                    Some((file.tensor("output_norm.weight", &[model.hidden])?, embedding.clone()))
                }
                None => Some(load_head(&mut file, "token_embd.weight")?),
            },
        };
        let layers = asked.map(|number| Layer::load(&mut file, number)).collect::<Result<_, _>>()?;
        let rope = Rope::new(model.head, model.rope_base);
        Ok(LlamaEngine { model, info, embedding, layers, head, rope, caches: HashMap::new() })
    }

    /// Lets a request hold fewer tokens than the model could: the cache of a full context is large, see
    /// [`ModelInfo::cache_bytes_per_token`]. All stages of a deployment need the same limit.
    pub fn with_context_max(mut self, tokens: u32) -> Self {
        self.info.context_max = self.info.context_max.min(tokens.max(1));
        self
    }

    /// The logits after each sampled row of a batch, for comparisons; only the last stage has them.
    pub fn logits(
        &mut self,
        batch: &Batch,
        input: &[u8],
        watch: &dyn Watch,
    ) -> Result<Vec<Vec<f32>>, EngineError> {
        let hidden = self.compute(batch, input, watch)?;
        Ok(self.sampled(batch, &hidden))
    }

    /// Refuses a batch that can't be computed, before it has touched any state.
    fn check(&self, batch: &Batch) -> Result<(), EngineError> {
        let mut requests = HashSet::with_capacity(batch.rows.len());
        for row in &batch.rows {
            let needed = row.context.saturating_add(row.tokens);
            if needed > self.info.context_max {
                return Err(EngineError::Context { needed, max: self.info.context_max });
            }
            let wrong = if row.tokens == 0 {
                "a row has no tokens"
            } else if row.context > self.held(row.request) {
                "a row's context is longer than what is held"
            } else if !requests.insert(row.request) {
                "a request appears twice in a batch"
            } else {
                continue;
            };
            return Err(EngineError::Failed(wrong.into()));
        }
        Ok(())
    }

    fn read_input(&self, batch: &Batch, input: &[u8]) -> Result<Vec<f32>, EngineError> {
        let width = if self.info.is_first() { 4 } else { self.info.width as usize };
        let expected = batch.tokens().saturating_mul(width);
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

    /// Runs the layers; returns the activations of every token of the batch. If it is cancelled, each row's request
    /// holds exactly its context, as before.
    fn compute(&mut self, batch: &Batch, input: &[u8], watch: &dyn Watch) -> Result<Vec<f32>, EngineError> {
        let mut hidden = self.read_input(batch, input)?;
        self.check(batch)?;
        batch.rows.iter().for_each(|row| self.cut(row));
        let mut angles = Vec::with_capacity(batch.tokens() * self.model.head / 2);
        for position in batch.rows.iter().flat_map(|row| row.context..row.context + row.tokens) {
            self.rope.at(position, &mut angles);
        }
        for number in 0..self.layers.len() {
            self.attention(number, batch, &angles, &mut hidden, watch)?;
            self.feed_forward(number, &mut hidden);
            watch.progress();
        }
        // The products take what is no number for 0, so only the sums along the layers tell that it was there.
        if hidden.iter().any(|number| !number.is_finite()) {
            let why = "the activations are not finite: they or the weights are damaged";
            return Err(EngineError::Failed(why.into()));
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
        let keep = row.context as usize * self.model.kv_heads * self.model.head;
        let cache = self.caches.entry(row.request).or_default();
        cache.layers.resize_with(self.layers.len(), Default::default);
        for layer in &mut cache.layers {
            layer.keys.truncate(keep);
            layer.values.truncate(keep);
        }
        cache.tokens = row.context;
    }

    fn norm(&self, hidden: &[f32], weight: &[f32]) -> Input {
        let mut normed = Vec::with_capacity(hidden.len());
        for token in hidden.chunks_exact(self.model.hidden) {
            rms_norm(token, weight, self.model.epsilon, &mut normed);
        }
        Input::new(normed, self.model.hidden)
    }

    fn attention(
        &mut self,
        number: usize,
        batch: &Batch,
        angles: &[(f32, f32)],
        hidden: &mut [f32],
        watch: &dyn Watch,
    ) -> Result<(), EngineError> {
        let layer = &self.layers[number];
        let (width, head) = (self.model.hidden, self.model.head);
        let kv = self.model.kv_heads * head;
        let heads = Heads { width: head, share: self.model.heads / self.model.kv_heads, cached: kv };
        let normed = self.norm(hidden, &layer.attention_norm);
        let (mut queries, mut keys) = (layer.query.product(&normed), layer.key.product(&normed));
        let values = layer.value.product(&normed);
        let mut attended = Vec::with_capacity(hidden.len());
        let mut scores = Vec::new();
        let mut token = 0;
        for row in &batch.rows {
            let cache = self.caches.get_mut(&row.request).expect("every row's cache was cut to its context");
            let cached = &mut cache.layers[number];
            for _ in 0..row.tokens {
                if token % WATCH_TOKENS == 0 {
                    if watch.cancelled() {
                        return Err(EngineError::Cancelled);
                    }
                    watch.progress();
                }
                let angles = &angles[token * head / 2..(token + 1) * head / 2];
                let query = &mut queries[token * width..(token + 1) * width];
                let key = &mut keys[token * kv..(token + 1) * kv];
                kernel::rotate(query, angles);
                kernel::rotate(key, angles);
                cached.keys.extend_from_slice(key);
                cached.values.extend_from_slice(&values[token * kv..(token + 1) * kv]);
                kernel::attend(heads, query, &cached.keys, &cached.values, &mut scores, &mut attended);
                token += 1;
            }
        }
        add(hidden, &layer.output.product(&Input::new(attended, width)));
        Ok(())
    }

    fn feed_forward(&self, number: usize, hidden: &mut [f32]) {
        let layer = &self.layers[number];
        let normed = self.norm(hidden, &layer.feed_norm);
        let mut gates = layer.gate.product(&normed);
        kernel::gate(&mut gates, &layer.up.product(&normed));
        add(hidden, &layer.down.product(&Input::new(gates, self.model.feed_forward)));
    }

    /// The logits after the last token of each sampled row.
    fn sampled(&self, batch: &Batch, hidden: &[f32]) -> Vec<Vec<f32>> {
        let Some((norm, head)) = &self.head else { return Vec::new() };
        let width = self.model.hidden;
        let mut last = Vec::with_capacity(batch.samples() * width);
        let mut end = 0;
        for row in &batch.rows {
            end += row.tokens as usize * width;
            if row.sample {
                last.extend_from_slice(&hidden[end - width..end]);
            }
        }
        let logits = head.product(&self.norm(&last, norm));
        logits.chunks_exact(self.model.vocabulary as usize).map(<[f32]>::to_vec).collect()
    }
}

fn load_head(file: &mut ModelFile, name: &str) -> Result<(Vec<f32>, Arc<Matrix>), LoadError> {
    let (vocabulary, hidden) = (file.info.vocabulary as usize, file.info.hidden);
    let norm = file.tensor("output_norm.weight", &[hidden])?;
    Ok((norm, Arc::new(Matrix::load(file, name, vocabulary, hidden)?)))
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
        if !self.info.is_last() {
            output.reserve(hidden.len() * 4);
            output.extend(hidden.iter().flat_map(|number| number.to_le_bytes()));
            return Ok(());
        }
        for logits in self.sampled(batch, &hidden) {
            // A token drawn from numbers that are none would look like any other.
            let token = kernel::argmax(&logits).ok_or_else(|| {
                EngineError::Failed(
                    "the logits are not finite: the activations or weights are damaged".into(),
                )
            })?;
            output.extend_from_slice(&token.to_le_bytes());
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
