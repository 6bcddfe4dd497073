//! A small model with random weights in the same format, for tests that find no registry.

use std::fs::File;
use std::io;
use std::path::Path;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};

/// The random model's layers.
pub const LAYERS: u32 = 4;

const HIDDEN: usize = 64;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const FEED_FORWARD: usize = 128;
const VOCABULARY: usize = 512;

/// Writes the model that `seed` draws.
pub fn write_model(path: &Path, seed: u64) -> io::Result<()> {
    let mut random = Random(seed);
    let kv = HIDDEN / HEADS * KV_HEADS;
    let mut tensors: Vec<(String, QTensor)> = Vec::new();
    let mut matrix = |name: String, rows: usize, columns: usize| -> io::Result<()> {
        let numbers: Vec<f32> = (0..rows * columns).map(|_| random.next() * 0.2).collect();
        tensors.push((name, quantized(numbers, (rows, columns), GgmlDType::Q4_1)?));
        Ok(())
    };
    matrix("token_embd.weight".into(), VOCABULARY, HIDDEN)?;
    for layer in 0..LAYERS {
        for (part, rows, columns) in [
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", kv, HIDDEN),
            ("attn_v", kv, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_gate", FEED_FORWARD, HIDDEN),
            ("ffn_up", FEED_FORWARD, HIDDEN),
            ("ffn_down", HIDDEN, FEED_FORWARD),
        ] {
            matrix(format!("blk.{layer}.{part}.weight"), rows, columns)?;
        }
    }
    let norms = (0..LAYERS)
        .flat_map(|layer| [format!("blk.{layer}.attn_norm.weight"), format!("blk.{layer}.ffn_norm.weight")]);
    for name in norms.chain(["output_norm.weight".to_owned()]) {
        let numbers = vec![1.0; HIDDEN];
        let tensor = Tensor::from_vec(numbers, HIDDEN, &Device::Cpu).map_err(io::Error::other)?;
        tensors.push((name, QTensor::quantize(&tensor, GgmlDType::F32).map_err(io::Error::other)?));
    }
    let metadata = metadata();
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(key, value)| (*key, value)).collect();
    let tensors: Vec<(&str, &QTensor)> =
        tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    gguf_file::write(&mut File::create(path)?, &metadata, &tensors).map_err(io::Error::other)
}

fn quantized(numbers: Vec<f32>, shape: (usize, usize), kind: GgmlDType) -> io::Result<QTensor> {
    let tensor = Tensor::from_vec(numbers, shape, &Device::Cpu).map_err(io::Error::other)?;
    QTensor::quantize(&tensor, kind).map_err(io::Error::other)
}

fn metadata() -> Vec<(&'static str, Value)> {
    let text = |text: &str| Value::String(text.to_owned());
    vec![
        ("general.architecture", text("llama")),
        ("general.name", text("random")),
        ("llama.block_count", Value::U32(LAYERS)),
        ("llama.embedding_length", Value::U32(HIDDEN as u32)),
        ("llama.attention.head_count", Value::U32(HEADS as u32)),
        ("llama.attention.head_count_kv", Value::U32(KV_HEADS as u32)),
        ("llama.feed_forward_length", Value::U32(FEED_FORWARD as u32)),
        ("llama.context_length", Value::U32(512)),
        ("llama.rope.freq_base", Value::F32(10_000.0)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ("tokenizer.ggml.model", text("gpt2")),
        ("tokenizer.ggml.tokens", Value::Array(vocabulary().iter().map(|token| text(token)).collect())),
        ("tokenizer.ggml.merges", Value::Array(vec![text("t h"), text("th e")])),
    ]
}

/// The 256 letters that byte-level BPE writes bytes with, two merges, and words that no text yields.
fn vocabulary() -> Vec<String> {
    let plain = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut shifted = 256;
    let mut tokens: Vec<String> = (0..256)
        .map(|byte| {
            let letter = if plain(byte) {
                byte
            } else {
                shifted += 1;
                shifted - 1
            };
            char::from_u32(letter).map(String::from).unwrap_or_default()
        })
        .collect();
    tokens.extend(["th".to_owned(), "the".to_owned()]);
    tokens.extend((tokens.len()..VOCABULARY).map(|number| format!("word{number}")));
    tokens
}

struct Random(u64);

impl Random {
    /// The next number between -1 and 1.
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}
