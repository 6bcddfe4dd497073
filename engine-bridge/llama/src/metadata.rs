use std::path::Path;

use candle_core::quantized::gguf_file::{Content, Value};

use crate::file::is_blocked;
use crate::{LoadError, ModelInfo};

/// Names of tokens that end a turn or a text, in the vocabularies of this family; a file names only one of its own.
const ENDS: [&str; 4] = ["<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>"];

/// The kind that a GGUF gives to tokens that steer and are no text.
pub(crate) const CONTROL: i32 = 3;

/// The description in a file's header.
pub(crate) struct Metadata<'a> {
    pub(crate) path: &'a Path,
    pub(crate) content: &'a Content,
}

impl<'a> Metadata<'a> {
    pub(crate) fn wrong(&self, key: &str, why: impl Into<String>) -> LoadError {
        LoadError::Metadata { path: self.path.to_owned(), key: key.into(), why: why.into() }
    }

    fn unsupported(&self, what: impl Into<String>) -> LoadError {
        LoadError::Unsupported { path: self.path.to_owned(), what: what.into() }
    }

    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.content.metadata.get(key)
    }

    pub(crate) fn text(&self, key: &str) -> Option<&'a str> {
        self.get(key)?.to_string().ok().map(String::as_str)
    }

    pub(crate) fn flag(&self, key: &str) -> bool {
        self.get(key).is_some_and(|value| value.to_bool().unwrap_or(false))
    }

    /// The texts of a list, or `None` if it is missing or holds something else.
    pub(crate) fn texts(&self, key: &str) -> Option<Vec<&'a str>> {
        let values = self.get(key)?.to_vec().ok()?;
        values.iter().map(|value| value.to_string().ok().map(String::as_str)).collect()
    }

    /// Each token's kind; nothing if the file does not tell.
    pub(crate) fn token_kinds(&self) -> Vec<i32> {
        let values = self.get("tokenizer.ggml.token_type").and_then(|value| value.to_vec().ok());
        let kind = |value: &Value| value.to_i32().or_else(|_| value.to_u32().map(|kind| kind as i32));
        values.into_iter().flatten().map(|value| kind(value).unwrap_or_default()).collect()
    }

    /// A token id that the file may name.
    pub(crate) fn token(&self, key: &str) -> Option<u32> {
        self.get(key)?.to_u64().ok()?.try_into().ok()
    }

    fn number(&self, key: &str) -> Result<usize, LoadError> {
        let value = self.get(key).ok_or_else(|| self.wrong(key, "it is missing"))?;
        let signed = value.to_i32().ok().and_then(|number| u64::try_from(number).ok());
        match signed.or_else(|| value.to_u64().ok()) {
            Some(number) if (1..=u64::from(u32::MAX)).contains(&number) => Ok(number as usize),
            Some(number) => Err(self.wrong(key, format!("it is {number}"))),
            None => Err(self.wrong(key, "it is no positive number")),
        }
    }

    fn float(&self, key: &str, default: f32) -> Result<f32, LoadError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let number = value.to_f32().or_else(|_| value.to_f64().map(|number| number as f32));
        match number {
            Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
            _ => Err(self.wrong(key, "it is no positive number")),
        }
    }

    /// What the header says of the model.
    pub(crate) fn info(&self) -> Result<ModelInfo, LoadError> {
        let architecture = self.text("general.architecture").unwrap_or_default();
        if architecture != "llama" {
            return Err(LoadError::Architecture { path: self.path.to_owned(), found: architecture.into() });
        }
        let hidden = self.number("llama.embedding_length")?;
        let heads = self.number("llama.attention.head_count")?;
        let kv_heads = match self.get("llama.attention.head_count_kv") {
            Some(_) => self.number("llama.attention.head_count_kv")?,
            None => heads,
        };
        if !hidden.is_multiple_of(heads) || !heads.is_multiple_of(kv_heads) {
            return Err(self.wrong("llama.attention.head_count", "it does not divide the model's width"));
        }
        let head = hidden / heads;
        if !head.is_multiple_of(2) {
            return Err(self.wrong("llama.attention.head_count", "it gives heads of an odd width"));
        }
        let feed_forward = self.number("llama.feed_forward_length")?;
        if !is_blocked(hidden) || !is_blocked(feed_forward) {
            return Err(self.unsupported("a width that is no multiple of 32"));
        }
        self.refuse_what_is_not_computed(head)?;
        let tokens = self.texts("tokenizer.ggml.tokens");
        let tokens = tokens.ok_or_else(|| self.wrong("tokenizer.ggml.tokens", "it is missing"))?;
        Ok(ModelInfo {
            name: self.text("general.name").unwrap_or("llama").to_owned(),
            architecture: architecture.to_owned(),
            layers: self.number("llama.block_count")? as u32,
            hidden,
            heads,
            kv_heads,
            head,
            feed_forward,
            context: self.number("llama.context_length")? as u32,
            vocabulary: tokens.len() as u32,
            stop_tokens: self.stop_tokens(&tokens),
            rope_base: self.float("llama.rope.freq_base", 10_000.0)?,
            epsilon: self.float("llama.attention.layer_norm_rms_epsilon", 1e-5)?,
            chat_template: self.text("tokenizer.chat_template").is_some(),
        })
    }

    /// Refuses what other models of the family use and this engine does not compute: it would give wrong text.
    fn refuse_what_is_not_computed(&self, head: usize) -> Result<(), LoadError> {
        if self.get("llama.expert_count").is_some_and(|count| count.to_u64().is_ok_and(|count| count > 0)) {
            return Err(self.unsupported("a mixture of experts"));
        }
        for key in
            ["llama.rope.dimension_count", "llama.attention.key_length", "llama.attention.value_length"]
        {
            if self.get(key).is_some() && self.number(key)? != head {
                return Err(self.unsupported(format!("{key} other than the width of a head, {head}")));
            }
        }
        let scaled = self.text("llama.rope.scaling.type").is_some_and(|kind| kind != "none");
        if scaled || self.content.tensor_infos.contains_key("rope_freqs.weight") {
            return Err(self.unsupported("a scaled rotary embedding"));
        }
        Ok(())
    }

    fn stop_tokens(&self, tokens: &[&str]) -> Vec<u32> {
        let keys = ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"];
        let mut stop: Vec<u32> = keys.iter().filter_map(|key| self.token(key)).collect();
        for (id, kind) in (0..).zip(self.token_kinds()) {
            if kind == CONTROL && tokens.get(id as usize).is_some_and(|token| ENDS.contains(token)) {
                stop.push(id);
            }
        }
        stop.retain(|id| (*id as usize) < tokens.len());
        stop.sort_unstable();
        stop.dedup();
        stop
    }
}
