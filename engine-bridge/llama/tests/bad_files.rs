//! Files that are no model, or not whole, give an error that says so; nothing panics and nothing is served.

mod common;

use std::fs;
use std::ops::Range;
use std::path::Path;

use candle_core::Device;
use candle_core::quantized::QTensor;
use candle_core::quantized::gguf_file::{self, Content, Value};
use common::{Scratch, random_model};
use connex_llama::random::RandomConfig;
use connex_llama::{GgufText, LlamaEngine, LoadError, inspect};

fn model() -> Scratch {
    random_model(1, &RandomConfig { layers: 2, ..RandomConfig::default() })
}

fn load(path: &Path, layers: Range<u32>) -> Result<LlamaEngine, LoadError> {
    LlamaEngine::load(path, Some(layers))
}

fn error(path: &Path) -> LoadError {
    let found = inspect(path).expect_err("the file is bad");
    let loaded = load(path, 0..1).err().expect("a bad file is not loaded");
    assert_eq!(loaded.to_string(), found.to_string(), "whoever reads the file finds the same");
    assert_eq!(GgufText::load(path).err().expect("nor is its text").to_string(), found.to_string());
    found
}

/// Writes the model again with its description and tensors changed.
fn changed(
    metadata: impl FnOnce(&mut Vec<(String, Value)>),
    tensors: impl FnOnce(&mut Vec<(String, QTensor)>),
) -> Scratch {
    let original = model();
    let mut file = fs::File::open(original.path()).unwrap();
    let content = Content::read(&mut file).unwrap();
    let names = content.tensor_infos.keys();
    let mut all: Vec<(String, QTensor)> =
        names.map(|name| (name.clone(), content.tensor(&mut file, name, &Device::Cpu).unwrap())).collect();
    let mut described: Vec<(String, Value)> = content.metadata.into_iter().collect();
    metadata(&mut described);
    tensors(&mut all);
    let described: Vec<(&str, &Value)> = described.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let all: Vec<(&str, &QTensor)> = all.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let changed = Scratch::new();
    gguf_file::write(&mut fs::File::create(changed.path()).unwrap(), &described, &all).unwrap();
    changed
}

fn described(key: &'static str, value: Value) -> LoadError {
    let file = changed(
        |metadata| {
            metadata.retain(|(name, _)| name != key);
            metadata.push((key.to_owned(), value));
        },
        |_| (),
    );
    error(file.path())
}

#[test]
fn a_file_that_is_not_there_or_no_gguf_is_named() {
    let missing = error(Path::new("/nonexistent/model.gguf"));
    assert!(matches!(missing, LoadError::Open { .. }), "{missing}");
    assert!(missing.to_string().contains("/nonexistent/model.gguf"), "{missing}");
    assert!(matches!(error(&std::env::temp_dir()), LoadError::Open { .. }), "a folder");
    let file = Scratch::new();
    for bytes in [&b""[..], b"GG", b"PK\x03\x04 a package", &[0; 4096]] {
        fs::write(file.path(), bytes).unwrap();
        assert!(matches!(error(file.path()), LoadError::NotGguf { .. }), "{bytes:?}");
    }
}

#[test]
fn a_file_that_is_cut_off_anywhere_is_refused_whatever_layers_are_asked_for() {
    let file = model();
    let whole = fs::read(file.path()).unwrap();
    let cut = Scratch::new();
    let steps = (4..whole.len()).step_by(997).chain([5, 8, 12, 24, whole.len() - 33]);
    for len in steps {
        fs::write(cut.path(), &whole[..len]).unwrap();
        let found = error(cut.path());
        assert!(matches!(found, LoadError::Damaged { .. }), "cut off at {len}: {found}");
    }
}

#[test]
fn no_changed_byte_of_the_header_makes_it_panic() {
    let file = model();
    let mut bytes = fs::read(file.path()).unwrap();
    let header = bytes.windows(4).rposition(|window| window == b"norm").unwrap() + 64;
    let damaged = Scratch::new();
    let (mut refused, mut served) = (0, 0);
    for at in (0..400).chain((400..header).step_by(37)) {
        for value in [0, 0xff, bytes[at] ^ 0x01] {
            let kept = std::mem::replace(&mut bytes[at], value);
            fs::write(damaged.path(), &bytes).unwrap();
            bytes[at] = kept;
            // A changed name or number may still be a model; then it loads, and its text does or is refused.
            match load(damaged.path(), 1..2) {
                Ok(_) => served += 1,
                Err(_) => refused += 1,
            }
            let _ = GgufText::load(damaged.path());
        }
    }
    assert!(refused > 100 && served > 100, "both happen: {refused} refused, {served} served");
}

#[test]
fn a_header_that_lies_is_refused() {
    let zero = described("general.alignment", Value::U32(0));
    assert!(matches!(zero, LoadError::Damaged { .. }), "{zero}");
    let layers = described("llama.block_count", Value::U32(u32::MAX));
    assert!(
        matches!(&layers, LoadError::MissingTensor { name, .. } if name == "blk.2.attn_norm.weight"),
        "{layers}"
    );
    let heads = described("llama.attention.head_count_kv", Value::U32(4));
    assert!(matches!(&heads, LoadError::TensorShape { found, .. } if found == &[32, 64]), "{heads}");
    for (key, value) in [
        ("llama.embedding_length", Value::U32(0)),
        ("llama.embedding_length", Value::String("wide".into())),
        ("llama.attention.head_count", Value::U32(3)),
        ("llama.context_length", Value::I32(-1)),
        ("llama.rope.freq_base", Value::F32(f32::NAN)),
        ("tokenizer.ggml.tokens", Value::U32(7)),
    ] {
        let found = described(key, value);
        assert!(matches!(&found, LoadError::Metadata { key: named, .. } if named == key), "{found}");
    }
}

#[test]
fn a_model_that_would_give_wrong_text_is_refused() {
    let other = described("general.architecture", Value::String("gemma".into()));
    assert!(matches!(&other, LoadError::Architecture { found, .. } if found == "gemma"), "{other}");
    for (key, value) in [
        ("llama.expert_count", Value::U32(8)),
        ("llama.rope.dimension_count", Value::U32(8)),
        ("llama.rope.scaling.type", Value::String("yarn".into())),
        ("llama.attention.key_length", Value::U32(32)),
        ("llama.feed_forward_length", Value::U32(100)),
    ] {
        let found = described(key, value);
        assert!(matches!(found, LoadError::Unsupported { .. }), "{key}: {found}");
    }
    for (key, value) in [("tokenizer.ggml.model", "llama"), ("tokenizer.ggml.pre", "another")] {
        let file = changed(
            |metadata| {
                metadata.retain(|(name, _)| name != key);
                metadata.push((key.into(), Value::String(value.into())));
            },
            |_| (),
        );
        inspect(file.path()).expect("the engine does not need the text");
        let found = GgufText::load(file.path()).err().expect("the text is refused");
        assert!(matches!(&found, LoadError::Unsupported { what, .. } if what.contains(value)), "{found}");
    }
}

#[test]
fn a_missing_tensor_is_named() {
    for name in ["token_embd.weight", "output_norm.weight", "blk.1.ffn_down.weight"] {
        let file = changed(|_| (), |tensors| tensors.retain(|(tensor, _)| tensor != name));
        let found = error(file.path());
        assert!(matches!(&found, LoadError::MissingTensor { name: named, .. } if named == name), "{found}");
    }
}

#[test]
fn a_layer_range_that_does_not_exist_names_those_that_do() {
    let file = model();
    let backwards = Range { start: 2, end: 1 };
    for asked in [0..3, 2..3, 0..0, 1..1, backwards, 5..u32::MAX] {
        let found = load(file.path(), asked.clone()).err().expect("the range does not exist");
        assert!(matches!(&found, LoadError::Layers { layers: 2, .. }), "{found}");
        assert!(found.to_string().contains("0..2"), "{found}");
        assert!(found.to_string().contains(&format!("{asked:?}")), "{found}");
    }
    for asked in [0..1, 1..2, 0..2] {
        load(file.path(), asked).expect("the range exists");
    }
}
