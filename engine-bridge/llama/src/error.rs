use std::io;
use std::ops::Range;
use std::path::PathBuf;

/// Why a model can't be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file can't be opened or read.
    #[error("{path}: {source}: name a GGUF file that can be read")]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file does not begin like a GGUF.
    #[error("{path} is not a GGUF file: download it again, or convert the model to GGUF")]
    NotGguf {
        /// The file.
        path: PathBuf,
    },
    /// The file ends before what its header announces, or the header lies.
    #[error("{path} is cut off or damaged ({why}): download it again")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What was found.
        why: String,
    },
    /// The model is of another family.
    #[error("{path} holds a model of architecture {found:?}, only llama is served")]
    Architecture {
        /// The file.
        path: PathBuf,
        /// Its architecture.
        found: String,
    },
    /// The model needs something that this engine does not compute; wrong text would be worse than none.
    #[error("{path}: {what} is not served: use another model, or another conversion of this one")]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// What it needs.
        what: String,
    },
    /// The model's description lacks something or has an impossible value.
    #[error("{path}: {key} is missing or wrong ({why})")]
    Metadata {
        /// The file.
        path: PathBuf,
        /// The entry.
        key: String,
        /// What is wrong.
        why: String,
    },
    /// A weight that the model needs is not in the file.
    #[error("{path} has no tensor {name}: the conversion is incomplete, convert the model again")]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// The tensor's name.
        name: String,
    },
    /// A weight has another shape than the model's description asks for.
    #[error("{path}: tensor {name} has shape {found:?} instead of {expected:?}: convert the model again")]
    TensorShape {
        /// The file.
        path: PathBuf,
        /// The tensor's name.
        name: String,
        /// Its shape, rows first.
        found: Vec<usize>,
        /// What the description asks for.
        expected: Vec<usize>,
    },
    /// The asked range of layers does not exist.
    #[error(
        "layers {asked:?} do not exist: the model has layers 0..{layers}, and a stage needs at least one"
    )]
    Layers {
        /// What was asked for.
        asked: Range<u32>,
        /// How many there are.
        layers: u32,
    },
}
