use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use candle_core::Device;
use candle_core::quantized::gguf_file::{Content, Value};

use crate::LoadError;

/// What a model file holds, read from its header alone.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelInfo {
    /// The model's own name.
    pub name: String,
    /// Its layers.
    pub layers: u32,
    /// The width of its activations, in numbers.
    pub hidden: usize,
    /// Attention heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Numbers per head.
    pub head: usize,
    /// The width of its feed-forward part.
    pub feed_forward: usize,
    /// Tokens that a request may hold.
    pub context: u32,
    /// Its vocabulary's size.
    pub vocabulary: u32,
    /// Tokens that end a generation.
    pub stop_tokens: Vec<u32>,
    /// The base of its rotary embedding.
    pub rope_base: f32,
    /// The small number in its norms.
    pub epsilon: f32,
    /// Whether it comes with a chat template.
    pub chat_template: bool,
}

/// A model file whose header was read.
pub(crate) struct ModelFile {
    pub(crate) path: PathBuf,
    pub(crate) info: ModelInfo,
    pub(crate) content: Content,
    reader: BufReader<File>,
}

/// Reads a model file's header.
pub fn inspect(path: &Path) -> Result<ModelInfo, LoadError> {
    ModelFile::open(path).map(|file| file.info)
}

impl ModelFile {
    pub(crate) fn open(path: &Path) -> Result<Self, LoadError> {
        let open = |source| LoadError::Open { path: path.to_owned(), source };
        let mut reader = BufReader::new(File::open(path).map_err(open)?);
        let mut magic = [0; 4];
        if reader.read_exact(&mut magic).is_err() || &magic != b"GGUF" {
            return Err(LoadError::NotGguf { path: path.to_owned() });
        }
        reader.seek(SeekFrom::Start(0)).map_err(open)?;
        let content = Content::read(&mut reader).map_err(|error| damaged(path, &error))?;
        let info = read_info(path, &content)?;
        Ok(ModelFile { path: path.to_owned(), info, content, reader })
    }

    /// A tensor as plain numbers, which must be as many as `len`.
    pub(crate) fn tensor(&mut self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        let read = self
            .content
            .tensor(&mut self.reader, name, &Device::Cpu)
            .and_then(|tensor| tensor.dequantize(&Device::Cpu))
            .and_then(|tensor| tensor.flatten_all())
            .and_then(|tensor| tensor.to_vec1::<f32>());
        let numbers = read.map_err(|error| damaged(&self.path, &error))?;
        if numbers.len() != len {
            let why = format!("it has {} numbers instead of {len}", numbers.len());
            return Err(LoadError::Metadata { path: self.path.clone(), key: name.into(), why });
        }
        Ok(numbers)
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.content.tensor_infos.contains_key(name)
    }
}

fn damaged(path: &Path, error: &candle_core::Error) -> LoadError {
    let why = error.to_string().lines().next().unwrap_or_default().to_owned();
    LoadError::Damaged { path: path.to_owned(), why }
}

struct Metadata<'a> {
    path: &'a Path,
    content: &'a Content,
}

impl Metadata<'_> {
    fn wrong(&self, key: &str, why: impl Into<String>) -> LoadError {
        LoadError::Metadata { path: self.path.to_owned(), key: key.into(), why: why.into() }
    }

    fn get(&self, key: &str) -> Option<&Value> {
        self.content.metadata.get(key)
    }

    fn number(&self, key: &str) -> Result<usize, LoadError> {
        let value = self.get(key).ok_or_else(|| self.wrong(key, "it is missing"))?;
        let number = value.to_u32().map(u64::from).or_else(|_| value.to_u64());
        match number {
            Ok(number) if number > 0 && number <= u64::from(u32::MAX) => Ok(number as usize),
            Ok(number) => Err(self.wrong(key, format!("it is {number}"))),
            Err(_) => Err(self.wrong(key, "it is no number")),
        }
    }
}

fn read_info(path: &Path, content: &Content) -> Result<ModelInfo, LoadError> {
    let data = Metadata { path, content };
    let architecture = data.get("general.architecture").and_then(|value| value.to_string().ok());
    if architecture.map(String::as_str) != Some("llama") {
        let found = architecture.cloned().unwrap_or_default();
        return Err(LoadError::Architecture { path: path.to_owned(), found });
    }
    let hidden = data.number("llama.embedding_length")?;
    let heads = data.number("llama.attention.head_count")?;
    let kv_heads = match data.get("llama.attention.head_count_kv") {
        Some(_) => data.number("llama.attention.head_count_kv")?,
        None => heads,
    };
    if hidden % heads != 0 || heads % kv_heads != 0 || !(hidden / heads).is_multiple_of(2) {
        return Err(data.wrong("llama.attention.head_count", "it does not divide the width into even heads"));
    }
    let feed_forward = data.number("llama.feed_forward_length")?;
    if !hidden.is_multiple_of(32) || !feed_forward.is_multiple_of(32) {
        return Err(data.wrong("llama.embedding_length", "widths must be multiples of 32"));
    }
    let tokens = data.get("tokenizer.ggml.tokens").and_then(|value| value.to_vec().ok());
    let vocabulary = tokens.ok_or_else(|| data.wrong("tokenizer.ggml.tokens", "it is missing"))?.len() as u32;
    let stop = data.get("tokenizer.ggml.eos_token_id").and_then(|value| value.to_u32().ok());
    let float = |key: &str| data.get(key).and_then(|value| value.to_f32().ok());
    let name = data.get("general.name").and_then(|value| value.to_string().ok());
    Ok(ModelInfo {
        name: name.cloned().unwrap_or_else(|| "llama".into()),
        layers: data.number("llama.block_count")? as u32,
        hidden,
        heads,
        kv_heads,
        head: hidden / heads,
        feed_forward,
        context: data.number("llama.context_length")? as u32,
        vocabulary,
        stop_tokens: stop.into_iter().collect(),
        rope_base: float("llama.rope.freq_base").unwrap_or(10_000.0),
        epsilon: float("llama.attention.layer_norm_rms_epsilon").unwrap_or(1e-5),
        chat_template: data.get("tokenizer.chat_template").is_some(),
    })
}
