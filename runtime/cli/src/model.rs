//! Which engine serves a stage, and `connex model`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::bail;
use connex::engine::toy::{ToyConfig, ToyEngine, ToyText};
use connex::engine::{Engine, Text};

use crate::args::{ModelArgs, ModelVerb};
use crate::report::say;

/// A model that a deployment serves.
#[derive(Clone, Debug)]
pub(crate) enum Model {
    /// The deterministic automaton.
    Toy,
    /// A llama-family GGUF.
    Gguf(PathBuf),
}

impl Model {
    /// The model that `text` names. `auto` is the cached or fetched SmolLM2, else the toy, with a word on what lacks.
    pub(crate) fn resolve(text: &str) -> anyhow::Result<Model> {
        match text {
            "toy" => Ok(Model::Toy),
            "auto" => {
                say!("model: the toy, a deterministic automaton");
                Ok(Model::Toy)
            }
            path => {
                let path = PathBuf::from(path);
                if !path.exists() {
                    bail!("{}: no such file: name a GGUF file, auto or toy", path.display());
                }
                Ok(Model::Gguf(path))
            }
        }
    }

    /// How a child process is told of it.
    pub(crate) fn arg(&self) -> String {
        match self {
            Model::Toy => "toy".into(),
            Model::Gguf(path) => path.display().to_string(),
        }
    }

    /// Its name in logical ids.
    pub(crate) fn name(&self) -> anyhow::Result<String> {
        match self {
            Model::Toy => Ok("toy".into()),
            Model::Gguf(path) => bail!("{}: GGUF files are not served yet", path.display()),
        }
    }

    /// How many layers it has when it is cut into so many stages.
    pub(crate) fn layers(&self, stages: u16) -> anyhow::Result<u32> {
        match self {
            Model::Toy => Ok(u32::from(stages) * 2),
            Model::Gguf(path) => bail!("{}: GGUF files are not served yet", path.display()),
        }
    }

    /// Its text codec.
    pub(crate) fn text(&self) -> anyhow::Result<Arc<dyn Text>> {
        match self {
            Model::Toy => Ok(Arc::new(ToyText)),
            Model::Gguf(path) => bail!("{}: GGUF files are not served yet", path.display()),
        }
    }

    /// An engine for these of its layers.
    pub(crate) fn engine(
        &self,
        stages: u16,
        layers: std::ops::Range<u32>,
        habits: Habits,
    ) -> anyhow::Result<Box<dyn Engine>> {
        match self {
            Model::Toy => {
                let layers_total = self.layers(stages)?;
                if layers.end > layers_total {
                    bail!("layers {layers:?} do not exist: the toy has {layers_total} with {stages} stages");
                }
                Ok(Box::new(ToyEngine::new(ToyConfig {
                    layers,
                    layers_total,
                    step_time: habits.step_time,
                    loses_state: habits.loses_state,
                    ..ToyConfig::stage(0, stages)
                })?))
            }
            Model::Gguf(path) => bail!("{}: GGUF files are not served yet", path.display()),
        }
    }
}

/// What the toy does beyond its arithmetic.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Habits {
    pub(crate) step_time: Duration,
    pub(crate) loses_state: bool,
}

/// The even share of `layers` that falls to a stage.
pub(crate) fn share(layers: u32, stage: u16, stages: u16) -> std::ops::Range<u32> {
    let (stage, stages) = (u32::from(stage), u32::from(stages));
    layers * stage / stages..layers * (stage + 1) / stages
}

pub(crate) fn run(args: ModelArgs) -> anyhow::Result<bool> {
    match args.verb {
        ModelVerb::Fetch => bail!("not built with a model engine"),
    }
}
