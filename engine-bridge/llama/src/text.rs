use std::path::Path;

use candle_core::quantized::gguf_file::{Content, Value};
use connex_engine::{EngineError, Text};
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::{AddedToken, PreTokenizerWrapper, Tokenizer};

use crate::LoadError;
use crate::file::ModelFile;

/// Token types of a GGUF vocabulary that text never yields by itself.
const CONTROL: [i32; 2] = [3, 4];

/// A GGUF's byte-level BPE, built from its own vocabulary and merges, and its chat template.
pub struct GgufText {
    tokenizer: Tokenizer,
    chat: bool,
}

impl GgufText {
    /// Reads a model file's tokenizer.
    pub fn load(path: &Path) -> Result<Self, LoadError> {
        let file = ModelFile::open(path)?;
        let wrong =
            |key: &str, why: String| LoadError::Metadata { path: path.to_owned(), key: key.into(), why };
        let strings = |key: &str| -> Result<Vec<String>, LoadError> {
            strings(&file.content, key).ok_or_else(|| wrong(key, "it is missing or holds no texts".into()))
        };
        let kind = file.content.metadata.get("tokenizer.ggml.model").and_then(|value| value.to_string().ok());
        if kind.map(String::as_str) != Some("gpt2") {
            return Err(wrong(
                "tokenizer.ggml.model",
                format!("{kind:?}: only byte-level BPE (gpt2) is served"),
            ));
        }
        let tokens = strings("tokenizer.ggml.tokens")?;
        let merges: Option<Vec<(String, String)>> = strings("tokenizer.ggml.merges")?
            .iter()
            .map(|merge| merge.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned())))
            .collect();
        let merges = merges.ok_or_else(|| wrong("tokenizer.ggml.merges", "a merge is no pair".into()))?;
        let special = special(&file.content, &tokens);
        let vocabulary: tokenizers::models::bpe::Vocab = tokens.into_iter().zip(0u32..).collect();
        let bpe = BPE::builder()
            .vocab_and_merges(vocabulary, merges)
            .build()
            .map_err(|error| wrong("tokenizer.ggml.merges", error.to_string()))?;
        let mut tokenizer = Tokenizer::new(bpe);
        let bytes = ByteLevel::default().add_prefix_space(false);
        let pre = file.content.metadata.get("tokenizer.ggml.pre").and_then(|value| value.to_string().ok());
        // SmolLM's vocabulary has every digit by itself; others take GPT-2's own splits.
        if pre.is_some_and(|pre| pre == "smollm") {
            let parts: Vec<PreTokenizerWrapper> = vec![Digits::new(true).into(), bytes.into()];
            tokenizer.with_pre_tokenizer(Some(Sequence::new(parts)));
        } else {
            tokenizer.with_pre_tokenizer(Some(bytes));
        }
        tokenizer.with_decoder(Some(ByteLevel::default()));
        tokenizer.add_special_tokens(&special);
        Ok(GgufText { tokenizer, chat: file.info.chat_template })
    }

    /// The tokens of a text as it stands, with no template around it.
    pub fn encode_raw(&self, text: &str) -> Result<Vec<u32>, EngineError> {
        let encoding = self.tokenizer.encode_fast(text, false);
        let encoding = encoding.map_err(|error| EngineError::Failed(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }
}

fn strings(content: &Content, key: &str) -> Option<Vec<String>> {
    let values = content.metadata.get(key)?.to_vec().ok()?;
    values.iter().map(|value| value.to_string().ok().cloned()).collect()
}

fn special(content: &Content, tokens: &[String]) -> Vec<AddedToken> {
    let kinds = content.metadata.get("tokenizer.ggml.token_type").and_then(|value| value.to_vec().ok());
    let Some(kinds) = kinds else { return Vec::new() };
    let is_control = |value: &Value| value.to_i32().is_ok_and(|kind| CONTROL.contains(&kind));
    tokens
        .iter()
        .zip(kinds)
        .filter(|(_, kind)| is_control(kind))
        .map(|(token, _)| AddedToken::from(token.clone(), true))
        .collect()
}

impl Text for GgufText {
    fn encode(&self, prompt: &str) -> Result<Vec<u32>, EngineError> {
        if !self.chat {
            return self.encode_raw(prompt);
        }
        // The words that SmolLM2-Instruct's own template puts around a user's turn.
        self.encode_raw(&format!(
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
             <|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        ))
    }

    fn decode(&self, tokens: &[u32]) -> String {
        let text = self.tokenizer.decode(tokens, true).unwrap_or_default();
        // A character whose last bytes are not there yet shows as a replacement at the end.
        text.trim_end_matches('\u{fffd}').to_owned()
    }
}
