//! A small model with random weights in the same format, for tests that find no registry.

use std::fs::File;
use std::io::{self, BufWriter};
use std::path::Path;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};

/// How large the random model is. Widths must be multiples of 32, and the heads divide them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RandomConfig {
    /// Layers.
    pub layers: u32,
    /// The width of the activations, in numbers.
    pub hidden: usize,
    /// Attention heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// The width of the feed-forward part.
    pub feed_forward: usize,
    /// Tokens that a request may hold.
    pub context: u32,
    /// Tokens in the vocabulary, at least [`VOCABULARY_MIN`].
    pub vocabulary: usize,
    /// Whether the head uses the embedding's numbers instead of its own.
    pub tied: bool,
    /// Whether the weights are quantised (Q4_1) or plain numbers.
    pub quantised: bool,
}

impl Default for RandomConfig {
    fn default() -> Self {
        RandomConfig {
            layers: 4,
            hidden: 64,
            heads: 4,
            kv_heads: 2,
            feed_forward: 128,
            context: 512,
            vocabulary: 512,
            tied: true,
            quantised: true,
        }
    }
}

/// The smallest vocabulary: one token for each byte, the merges' and the control tokens.
pub const VOCABULARY_MIN: usize = 256 + MERGES.len() + CONTROLS.len();

const CONTROLS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// Pairs that are merged, the most frequent first, as byte-level BPE writes them.
const MERGES: [(&str, &str); 12] = [
    ("Ġ", "t"),
    ("h", "e"),
    ("Ġt", "he"),
    ("i", "n"),
    ("Ġ", "a"),
    ("r", "e"),
    ("o", "n"),
    ("e", "r"),
    ("Ġ", "Ġ"),
    ("1", "2"),
    ("Ã", "©"),
    ("u", "s"),
];

const TEMPLATE: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\nYou draw at random<|im_end|>\n' }}{% endif %}\
{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Writes the model that `seed` draws: the same bytes for the same seed and configuration.
pub fn write_model(path: &Path, seed: u64, config: &RandomConfig) -> io::Result<()> {
    let vocabulary = vocabulary(config)?;
    let tensors = tensors(seed, config).map_err(io::Error::other)?;
    let metadata = metadata(config, &vocabulary);
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(key, value)| (*key, value)).collect();
    let tensors: Vec<(&str, &QTensor)> =
        tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let mut file = BufWriter::new(File::create(path)?);
    gguf_file::write(&mut file, &metadata, &tensors).map_err(io::Error::other)?;
    file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
}

fn tensors(seed: u64, config: &RandomConfig) -> candle_core::Result<Vec<(String, QTensor)>> {
    let mut random = Random(seed);
    let kind = if config.quantised { GgmlDType::Q4_1 } else { GgmlDType::F32 };
    let (hidden, feed) = (config.hidden, config.feed_forward);
    let kv = hidden / config.heads.max(1) * config.kv_heads;
    let mut tensors = Vec::new();
    let mut matrix = |name: String, rows: usize, columns: usize| -> candle_core::Result<()> {
        // Sums of so many products keep about the size of what goes in, as in a trained model.
        let scale = 1.7 / (columns as f32).sqrt();
        let numbers: Vec<f32> = (0..rows * columns).map(|_| random.next() * scale).collect();
        let tensor = Tensor::from_vec(numbers, (rows, columns), &Device::Cpu)?;
        tensors.push((name, QTensor::quantize(&tensor, kind)?));
        Ok(())
    };
    matrix("token_embd.weight".into(), config.vocabulary, hidden)?;
    if !config.tied {
        matrix("output.weight".into(), config.vocabulary, hidden)?;
    }
    for layer in 0..config.layers {
        for (part, rows, columns) in [
            ("attn_q", hidden, hidden),
            ("attn_k", kv, hidden),
            ("attn_v", kv, hidden),
            ("attn_output", hidden, hidden),
            ("ffn_gate", feed, hidden),
            ("ffn_up", feed, hidden),
            ("ffn_down", hidden, feed),
        ] {
            matrix(format!("blk.{layer}.{part}.weight"), rows, columns)?;
        }
    }
    let norms = (0..config.layers)
        .flat_map(|layer| [format!("blk.{layer}.attn_norm.weight"), format!("blk.{layer}.ffn_norm.weight")]);
    for name in norms.chain(["output_norm.weight".to_owned()]) {
        let numbers: Vec<f32> = (0..hidden).map(|_| 1.0 + random.next() * 0.3).collect();
        let tensor = Tensor::from_vec(numbers, hidden, &Device::Cpu)?;
        tensors.push((name, QTensor::quantize(&tensor, GgmlDType::F32)?));
    }
    Ok(tensors)
}

fn metadata(config: &RandomConfig, vocabulary: &[String]) -> Vec<(&'static str, Value)> {
    let text = |text: &str| Value::String(text.to_owned());
    let kind = |id: usize| Value::I32(if id < CONTROLS.len() { 3 } else { 1 });
    let merges = MERGES.iter().map(|(a, b)| Value::String(format!("{a} {b}")));
    vec![
        ("general.architecture", text("llama")),
        ("general.name", text("random")),
        ("llama.block_count", Value::U32(config.layers)),
        ("llama.embedding_length", Value::U32(config.hidden as u32)),
        ("llama.attention.head_count", Value::U32(config.heads as u32)),
        ("llama.attention.head_count_kv", Value::U32(config.kv_heads as u32)),
        ("llama.feed_forward_length", Value::U32(config.feed_forward as u32)),
        ("llama.context_length", Value::U32(config.context)),
        ("llama.rope.freq_base", Value::F32(10_000.0)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ("tokenizer.ggml.model", text("gpt2")),
        ("tokenizer.ggml.pre", text("smollm")),
        ("tokenizer.ggml.tokens", Value::Array(vocabulary.iter().map(|token| text(token)).collect())),
        ("tokenizer.ggml.token_type", Value::Array((0..vocabulary.len()).map(kind).collect())),
        ("tokenizer.ggml.merges", Value::Array(merges.collect())),
        ("tokenizer.ggml.eos_token_id", Value::U32(2)),
        ("tokenizer.chat_template", text(TEMPLATE)),
    ]
}

/// The control tokens, the 256 letters that byte-level BPE writes bytes with, the merged pairs, and words that no text
/// yields and that the model may still generate.
fn vocabulary(config: &RandomConfig) -> io::Result<Vec<String>> {
    if config.vocabulary < VOCABULARY_MIN {
        let why = format!("a vocabulary of {} is below {VOCABULARY_MIN}", config.vocabulary);
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    let plain = |code: &u32| matches!(code, 33..=126 | 161..=172 | 174..=255);
    let bytes = (0..256).filter(plain).chain(256..).take(256).filter_map(char::from_u32);
    let mut tokens: Vec<String> = CONTROLS.iter().map(|token| (*token).to_owned()).collect();
    tokens.extend(bytes.map(String::from));
    tokens.extend(MERGES.iter().map(|(a, b)| format!("{a}{b}")));
    tokens.extend((tokens.len()..config.vocabulary).map(|number| format!("Ġw{number}")));
    Ok(tokens)
}

struct Random(u64);

impl Random {
    /// The next number between -1 and 1.
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}
