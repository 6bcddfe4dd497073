use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use candle_core::Device;
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::{Content, TensorInfo};

use crate::LoadError;
use crate::metadata::Metadata;
use crate::weights::BLOCK;

/// What a model file holds, read from its header alone.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelInfo {
    /// The model's own name.
    pub name: String,
    /// Its architecture, in the file's own word.
    pub architecture: String,
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

impl ModelInfo {
    /// Bytes that one token of one request occupies in a stage of so many layers: keys and values in `f32`.
    pub fn cache_bytes_per_token(&self, layers: u32) -> usize {
        layers as usize * self.kv_heads * self.head * 2 * size_of::<f32>()
    }
}

/// A model file whose header was read and found to fit the file.
pub(crate) struct ModelFile {
    pub(crate) path: PathBuf,
    pub(crate) info: ModelInfo,
    pub(crate) content: Content,
    reader: BufReader<File>,
}

/// Reads a model file's header, and checks that every weight it needs is there, whole and of the right shape.
pub fn inspect(path: &Path) -> Result<ModelInfo, LoadError> {
    ModelFile::open(path).map(|file| file.info)
}

impl ModelFile {
    pub(crate) fn open(path: &Path) -> Result<Self, LoadError> {
        let open = |source| LoadError::Open { path: path.to_owned(), source };
        let file = File::open(path).map_err(open)?;
        let len = file.metadata().map_err(open)?.len();
        let mut reader = BufReader::new(file);
        let mut magic = [0; 4];
        match reader.read_exact(&mut magic) {
            Ok(()) if &magic == b"GGUF" => {}
            Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => return Err(open(error)),
            _ => return Err(LoadError::NotGguf { path: path.to_owned() }),
        }
        reader.seek(SeekFrom::Start(0)).map_err(open)?;
        // The reader divides by an alignment that the file states, so a damaged one can make it panic.
        let content = catch_unwind(AssertUnwindSafe(|| Content::read(&mut reader)))
            .map_err(|_| damaged(path, "its header makes no sense"))?
            .map_err(|error| failed(path, error))?;
        let info = Metadata { path, content: &content }.info()?;
        let mut file = ModelFile { path: path.to_owned(), info, content, reader };
        file.check_extents(len)?;
        file.check_shapes()?;
        Ok(file)
    }

    /// Checks that no tensor, needed here or not, reaches past the file's end: a stage that loads only the first
    /// layers should notice a cut-off file too.
    fn check_extents(&self, len: u64) -> Result<(), LoadError> {
        let mut needed = 0;
        for (name, info) in &self.content.tensor_infos {
            let end = extent(info)
                .and_then(|bytes| {
                    self.content.tensor_data_offset.checked_add(info.offset)?.checked_add(bytes)
                })
                .ok_or_else(|| damaged(&self.path, &format!("tensor {name} has an impossible size")))?;
            needed = needed.max(end);
        }
        if needed > len {
            let why = format!("its tensors end at byte {needed}, the file at byte {len}");
            return Err(damaged(&self.path, &why));
        }
        Ok(())
    }

    /// Checks that every weight of every layer is there and has the shape that the description asks for.
    fn check_shapes(&mut self) -> Result<(), LoadError> {
        let info = &self.info;
        let (vocabulary, hidden, feed) = (info.vocabulary as usize, info.hidden, info.feed_forward);
        let kv = info.kv_heads * info.head;
        self.check_shape("token_embd.weight", &[vocabulary, hidden])?;
        self.check_shape("output_norm.weight", &[hidden])?;
        if self.has("output.weight") {
            self.check_shape("output.weight", &[vocabulary, hidden])?;
        }
        let parts: [(&str, &[usize]); 9] = [
            ("attn_norm", &[hidden]),
            ("attn_q", &[hidden, hidden]),
            ("attn_k", &[kv, hidden]),
            ("attn_v", &[kv, hidden]),
            ("attn_output", &[hidden, hidden]),
            ("ffn_norm", &[hidden]),
            ("ffn_gate", &[feed, hidden]),
            ("ffn_up", &[feed, hidden]),
            ("ffn_down", &[hidden, feed]),
        ];
        for layer in 0..info.layers {
            for (part, shape) in parts {
                self.check_shape(&format!("blk.{layer}.{part}.weight"), shape)?;
                if self.has(&format!("blk.{layer}.{part}.bias")) {
                    let (path, what) = (self.path.clone(), format!("a bias on {part}"));
                    return Err(LoadError::Unsupported { path, what });
                }
            }
        }
        Ok(())
    }

    fn check_shape(&self, name: &str, expected: &[usize]) -> Result<(), LoadError> {
        let (path, name) = (self.path.clone(), name.to_owned());
        let Some(info) = self.content.tensor_infos.get(&name) else {
            return Err(LoadError::MissingTensor { path, name });
        };
        let found = info.shape.dims();
        if found != expected {
            let (found, expected) = (found.to_vec(), expected.to_vec());
            return Err(LoadError::TensorShape { path, name, found, expected });
        }
        Ok(())
    }

    /// A tensor of this shape as plain numbers, row after row.
    pub(crate) fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        self.check_shape(name, shape)?;
        self.content
            .tensor(&mut self.reader, name, &Device::Cpu)
            .and_then(|tensor| tensor.dequantize(&Device::Cpu))
            .and_then(|tensor| tensor.flatten_all())
            .and_then(|tensor| tensor.to_vec1::<f32>())
            .map_err(|error| failed(&self.path, error))
    }

    /// Whether the file holds a tensor in a quantised kind.
    pub(crate) fn is_quantised(&self, name: &str) -> bool {
        let kind = self.content.tensor_infos.get(name).map(|info| info.ggml_dtype);
        !matches!(kind, Some(GgmlDType::F32 | GgmlDType::F16 | GgmlDType::BF16) | None)
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.content.tensor_infos.contains_key(name)
    }

    pub(crate) fn metadata(&self) -> Metadata<'_> {
        Metadata { path: &self.path, content: &self.content }
    }
}

/// Bytes of a tensor, or nothing if its shape is impossible.
fn extent(info: &TensorInfo) -> Option<u64> {
    let numbers = info.shape.dims().iter().try_fold(1usize, |product, dim| product.checked_mul(*dim))?;
    let block = info.ggml_dtype.block_size();
    if !numbers.is_multiple_of(block) {
        return None;
    }
    (numbers / block).checked_mul(info.ggml_dtype.type_size()).map(|bytes| bytes as u64)
}

fn damaged(path: &Path, why: &str) -> LoadError {
    LoadError::Damaged { path: path.to_owned(), why: why.to_owned() }
}

/// What the reader's error means: the file system's refusal, or a file that is not as it says.
fn failed(path: &Path, error: candle_core::Error) -> LoadError {
    match error {
        candle_core::Error::Io(source) if source.kind() == io::ErrorKind::UnexpectedEof => {
            damaged(path, "it ends within its header")
        }
        candle_core::Error::Io(source) => LoadError::Open { path: path.to_owned(), source },
        candle_core::Error::WithBacktrace { inner, .. } => failed(path, *inner),
        error => damaged(path, error.to_string().lines().next().unwrap_or("no reason given")),
    }
}

/// Whether a width can be cut into the blocks that weights are quantised in.
pub(crate) fn is_blocked(width: usize) -> bool {
    width > 0 && width.is_multiple_of(BLOCK)
}
