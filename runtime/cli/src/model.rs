//! Which engine serves a stage, and `connex model`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::bail;
use connex::engine::toy::{ToyConfig, ToyEngine, ToyText};
use connex::engine::{Engine, Text};
use connex_llama::fetch::{self, FetchProgress};
use connex_llama::{GgufText, LlamaEngine};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

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
            "auto" => match fetch_shown() {
                Ok(path) => Ok(Model::Gguf(path)),
                Err(error) => {
                    say!("SmolLM2 can't be had: {error}");
                    say!("going on with the toy, a deterministic automaton");
                    Ok(Model::Toy)
                }
            },
            path => {
                let path = PathBuf::from(path);
                connex_llama::inspect(&path)?;
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
            // What the file is called up to its first dot: a quantisation is no other model.
            Model::Gguf(path) => {
                let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or("model");
                Ok(stem.split('.').next().unwrap_or(stem).to_owned())
            }
        }
    }

    /// How many layers it has when it is cut into so many stages.
    pub(crate) fn layers(&self, stages: u16) -> anyhow::Result<u32> {
        match self {
            Model::Toy => Ok(u32::from(stages) * 2),
            Model::Gguf(path) => {
                let layers = connex_llama::inspect(path)?.layers;
                if layers < u32::from(stages) {
                    bail!("{} layers can't be cut into {stages} stages: a stage has at least one", layers);
                }
                Ok(layers)
            }
        }
    }

    /// Its text codec.
    pub(crate) fn text(&self) -> anyhow::Result<Arc<dyn Text>> {
        match self {
            Model::Toy => Ok(Arc::new(ToyText)),
            Model::Gguf(path) => Ok(Arc::new(GgufText::load(path)?)),
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
                if layers.is_empty() || layers.end > layers_total {
                    bail!(
                        "layers {layers:?} do not exist: the toy has 0..{layers_total} with {stages} stages"
                    );
                }
                Ok(Box::new(ToyEngine::new(ToyConfig {
                    layers,
                    layers_total,
                    step_time: habits.step_time,
                    loses_state: habits.loses_state,
                    ..ToyConfig::stage(0, stages)
                })?))
            }
            Model::Gguf(path) => Ok(Box::new(LlamaEngine::load(path, Some(layers))?)),
        }
    }
}

/// Fetches SmolLM2 unless it is there, with a bar.
fn fetch_shown() -> Result<PathBuf, fetch::FetchError> {
    let bar = ProgressBar::hidden();
    bar.set_style(
        ProgressStyle::with_template("{msg} {bar:40} {bytes}/{total_bytes}")
            .unwrap_or_else(|_| ProgressStyle::default_bar()),
    );
    let mut shown = false;
    let fetched = fetch::fetch(&mut |progress| {
        if !std::mem::replace(&mut shown, true) {
            bar.set_draw_target(ProgressDrawTarget::stderr());
            bar.set_message("fetching SmolLM2-135M-Instruct");
        }
        match progress {
            FetchProgress::Downloading { bytes, total } => {
                bar.set_length(total);
                bar.set_position(bytes);
            }
            FetchProgress::Unpacking => bar.set_message("unpacking"),
            FetchProgress::Checking => bar.set_message("checking"),
        }
    });
    bar.finish_and_clear();
    fetched
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
        ModelVerb::Fetch => {
            let path = fetch_shown()?;
            println!("{}", path.display());
            Ok(true)
        }
    }
}
