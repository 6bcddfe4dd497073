//! The engine against a second, plain implementation: every formula written out once more in `f64`, one token after
//! another, with nothing shared but the file.

mod common;

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

use candle_core::Device;
use candle_core::quantized::gguf_file::Content;
use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use common::{Scratch, random_model, real_model, staged_logits, stages};
use connex_llama::inspect;
use connex_llama::random::RandomConfig;

struct Reference {
    info: connex_llama::ModelInfo,
    tensors: HashMap<String, Vec<f32>>,
}

type Numbers = Vec<f64>;

impl Reference {
    fn load(path: &Path) -> Self {
        let mut file = File::open(path).unwrap();
        let content = Content::read(&mut file).unwrap();
        let mut plain = |name: &String| {
            let tensor = content.tensor(&mut file, name, &Device::Cpu).unwrap();
            tensor.dequantize(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        let tensors = content.tensor_infos.keys().map(|name| (name.clone(), plain(name))).collect();
        Reference { info: inspect(path).unwrap(), tensors }
    }

    fn product(&self, name: &str, input: &[f64]) -> Numbers {
        let rows = self.tensors[name].chunks_exact(input.len());
        rows.map(|row| row.iter().zip(input).map(|(w, x)| f64::from(*w) * x).sum()).collect()
    }

    fn norm(&self, name: &str, input: &[f64]) -> Numbers {
        let mean = input.iter().map(|x| x * x).sum::<f64>() / input.len() as f64;
        let root = (mean + f64::from(self.info.epsilon)).sqrt();
        input.iter().zip(&self.tensors[name]).map(|(x, w)| x / root * f64::from(*w)).collect()
    }

    /// Turns pair `i` of each head by `position / base^(2 i / head)`.
    fn turn(&self, position: usize, numbers: &mut [f64]) {
        let head = self.info.head;
        for at in (0..numbers.len()).step_by(2) {
            let power = (at % head) as f64 / head as f64;
            let (sin, cos) = (position as f64 / f64::from(self.info.rope_base).powf(power)).sin_cos();
            let (a, b) = (numbers[at], numbers[at + 1]);
            (numbers[at], numbers[at + 1]) = (a * cos - b * sin, a * sin + b * cos);
        }
    }

    /// The logits after the last of these tokens.
    fn logits(&self, tokens: &[u32]) -> Numbers {
        let info = &self.info;
        let mut caches: Vec<Vec<(Numbers, Numbers)>> = vec![Vec::new(); info.layers as usize];
        let mut hidden = Vec::new();
        for (position, token) in tokens.iter().enumerate() {
            let start = *token as usize * info.hidden;
            let row = &self.tensors["token_embd.weight"][start..start + info.hidden];
            hidden = row.iter().map(|number| f64::from(*number)).collect();
            for (number, cache) in caches.iter_mut().enumerate() {
                let name = |part: &str| format!("blk.{number}.{part}.weight");
                let normed = self.norm(&name("attn_norm"), &hidden);
                let mut query = self.product(&name("attn_q"), &normed);
                let mut key = self.product(&name("attn_k"), &normed);
                self.turn(position, &mut query);
                self.turn(position, &mut key);
                cache.push((key, self.product(&name("attn_v"), &normed)));
                let attended = self.attention(&query, cache);
                add(&mut hidden, &self.product(&name("attn_output"), &attended));
                let normed = self.norm(&name("ffn_norm"), &hidden);
                let up = self.product(&name("ffn_up"), &normed);
                let gate = self.product(&name("ffn_gate"), &normed);
                let gated: Numbers = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
                add(&mut hidden, &self.product(&name("ffn_down"), &gated));
            }
        }
        let own = self.tensors.contains_key("output.weight");
        let head = if own { "output.weight" } else { "token_embd.weight" };
        self.product(head, &self.norm("output_norm.weight", &hidden))
    }

    fn attention(&self, query: &[f64], cache: &[(Numbers, Numbers)]) -> Numbers {
        let (head, share) = (self.info.head, self.info.heads / self.info.kv_heads);
        let mut output = Vec::new();
        for (number, query) in query.chunks_exact(head).enumerate() {
            let of = |numbers: &Numbers| numbers[number / share * head..][..head].to_vec();
            let weights = cache.iter().map(|(key, _)| {
                let product: f64 = of(key).iter().zip(query).map(|(k, q)| k * q).sum();
                (product / (head as f64).sqrt()).exp()
            });
            let weights: Numbers = weights.collect();
            let total: f64 = weights.iter().sum();
            for at in 0..head {
                let sum: f64 = cache.iter().zip(&weights).map(|((_, value), w)| of(value)[at] * w).sum();
                output.push(sum / total);
            }
        }
        output
    }
}

fn add(numbers: &mut [f64], more: &[f64]) {
    numbers.iter_mut().zip(more).for_each(|(number, more)| *number += more);
}

/// The greatest difference, as a part of the logits' size (the root of their mean square).
fn difference(found: &[f32], wanted: &[f64]) -> f64 {
    assert_eq!(found.len(), wanted.len());
    let size = (wanted.iter().map(|x| x * x).sum::<f64>() / wanted.len() as f64).sqrt();
    let differences = found.iter().zip(wanted).map(|(found, wanted)| (f64::from(*found) - wanted).abs());
    differences.fold(0.0, f64::max) / size
}

fn compare(path: &Path, tokens: &[u32]) -> f64 {
    let found = staged_logits(&mut stages(path, 1), &[(1, 0, tokens)]);
    difference(&found[0], &Reference::load(path).logits(tokens))
}

fn tokens() -> Vec<u32> {
    (0..40).map(|at| (at * at * 7 + 3) % 500).collect()
}

#[test]
fn plain_weights_give_the_logits_of_a_second_implementation() {
    let plain = RandomConfig { quantised: false, ..RandomConfig::default() };
    for (seed, config) in [
        (21, plain.clone()),
        (22, RandomConfig { tied: false, heads: 2, kv_heads: 2, ..plain.clone() }),
        (23, RandomConfig { hidden: 96, heads: 3, kv_heads: 1, layers: 6, ..plain }),
    ] {
        let file = random_model(seed, &config);
        let found = compare(file.path(), &tokens());
        assert!(found < 1e-5, "{config:?} differs by {found}");
    }
}

#[test]
fn quantised_weights_give_about_its_logits() {
    let file = random_model(24, &RandomConfig::default());
    let found = compare(file.path(), &tokens());
    // Q8_0 leaves 1/254 of a block's greatest number; the layers add some of it up.
    assert!((1e-6..0.1).contains(&found), "it differs by {found}");
}

/// Writes the first layers of a model as a model of its own, with plain weights.
fn first_layers(path: &Path, layers: u32) -> Scratch {
    let mut file = File::open(path).unwrap();
    let mut content = Content::read(&mut file).unwrap();
    content.metadata.insert("llama.block_count".into(), gguf_file::Value::U32(layers));
    let kept = content.tensor_infos.keys().filter(|name| {
        let layer = name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
        layer.is_none_or(|layer| layer < layers)
    });
    let plain = |name: &String| {
        let tensor = content.tensor(&mut file, name, &Device::Cpu).unwrap();
        let tensor = tensor.dequantize(&Device::Cpu).unwrap();
        (name.clone(), QTensor::quantize(&tensor, GgmlDType::F32).unwrap())
    };
    let tensors: Vec<(String, QTensor)> = kept.map(plain).collect();
    let metadata: Vec<_> = content.metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let written = Scratch::new();
    gguf_file::write(&mut File::create(written.path()).unwrap(), &metadata, &tensors).unwrap();
    written
}

#[test]
fn smollm2s_first_layers_give_the_logits_of_a_second_implementation() {
    let Some(path) = real_model() else { return };
    let file = first_layers(&path, 4);
    let tokens = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198];
    let found = compare(file.path(), &tokens);
    assert!(found < 1e-4, "it differs by {found}");
}
