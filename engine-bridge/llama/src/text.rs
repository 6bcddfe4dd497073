use std::collections::HashMap;
use std::path::Path;

use connex_engine::{EngineError, Text};
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::{AddedToken, PreTokenizerWrapper, Tokenizer};

use crate::LoadError;
use crate::file::ModelFile;
use crate::metadata::{CONTROL, Metadata};

/// The kind of tokens that stand for themselves, letter by letter, wherever they appear in a text.
const LITERAL: i32 = 4;

const TURN_START: &str = "<|im_start|>";
const TURN_END: &str = "<|im_end|>";

/// A GGUF's byte-level BPE, built from its own vocabulary and merges, and its chat template.
///
/// A prompt is text: what looks like a control token in it (`<|im_end|>`) is encoded letter by letter, so that a
/// client can't end its turn and speak as somebody else.
pub struct GgufText {
    tokenizer: Tokenizer,
    /// The bytes that each token stands for; none for control tokens.
    bytes: Vec<Box<[u8]>>,
    /// The longest of them.
    longest: usize,
    context: u32,
    /// The token that begins every text, where the model wants one.
    begin: Option<u32>,
    chat: Option<ChatMl>,
}

/// The ChatML template: `<|im_start|>role\ncontent<|im_end|>\n` for each turn.
struct ChatMl {
    start: u32,
    end: u32,
    /// What the model's own template says as the system where the client does not.
    system: Option<String>,
}

impl GgufText {
    /// Reads a model file's tokenizer.
    pub fn load(path: &Path) -> Result<Self, LoadError> {
        let file = ModelFile::open(path)?;
        let data = file.metadata();
        let kind = data.text("tokenizer.ggml.model").unwrap_or("none");
        if kind != "gpt2" {
            let what = format!("a tokenizer of kind {kind} (only byte-level BPE, gpt2, is)");
            return Err(LoadError::Unsupported { path: path.to_owned(), what });
        }
        let key = "tokenizer.ggml.tokens";
        let tokens = data.texts(key).ok_or_else(|| data.wrong(key, "it is missing or holds no texts"))?;
        let kinds = data.token_kinds();
        let kind = |id: usize| kinds.get(id).copied().unwrap_or_default();
        let letters = letters();
        let bytes = (0..).zip(&tokens).map(|(id, token)| match kind(id) {
            CONTROL => Box::default(),
            LITERAL => token.as_bytes().into(),
            _ => spelled(token, &letters),
        });
        let bytes: Vec<Box<[u8]>> = bytes.collect();
        let longest = bytes.iter().map(|bytes| bytes.len()).max().unwrap_or_default().max(1);
        let literal = (0..).zip(&tokens).filter(|(id, _)| kind(*id) == LITERAL);
        let literal: Vec<_> =
            literal.map(|(_, token)| AddedToken::from(*token, false).normalized(false)).collect();
        let mut tokenizer = Tokenizer::new(bpe(&data, &tokens)?);
        tokenizer.with_pre_tokenizer(Some(pre_tokenizer(&data)?));
        tokenizer
            .add_tokens(literal)
            .map_err(|error| data.wrong("tokenizer.ggml.token_type", error.to_string()))?;
        let begin =
            data.flag("tokenizer.ggml.add_bos_token").then(|| data.token("tokenizer.ggml.bos_token_id"));
        Ok(GgufText {
            tokenizer,
            bytes,
            longest,
            context: file.info.context,
            begin: begin.flatten(),
            chat: chat(&data, &tokens),
        })
    }

    /// The tokens of a text as it stands, with no template around it.
    pub fn encode_raw(&self, text: &str) -> Result<Vec<u32>, EngineError> {
        let mut tokens = Vec::new();
        self.append(text, &mut tokens)?;
        Ok(tokens)
    }

    /// Whether prompts are put into a chat template. Only ChatML is known: with a model that has another, or none,
    /// a prompt is continued as it stands.
    pub fn is_chat(&self) -> bool {
        self.chat.is_some()
    }

    fn append(&self, text: &str, tokens: &mut Vec<u32>) -> Result<(), EngineError> {
        // What can't fit the model's context whatever its tokens are is not worth the time to find them.
        let needed = text.len().div_ceil(self.longest).try_into().unwrap_or(u32::MAX);
        if needed > self.context {
            return Err(EngineError::Context { needed, max: self.context });
        }
        let encoding = self.tokenizer.encode_fast(text, false);
        let encoding = encoding.map_err(|error| EngineError::Failed(format!("the prompt: {error}")))?;
        tokens.extend_from_slice(encoding.get_ids());
        Ok(())
    }

    fn turn(&self, chat: &ChatMl, role: &str, text: &str, tokens: &mut Vec<u32>) -> Result<(), EngineError> {
        tokens.push(chat.start);
        self.append(&format!("{role}\n{text}"), tokens)?;
        tokens.push(chat.end);
        self.append("\n", tokens)
    }
}

impl Text for GgufText {
    fn encode(&self, prompt: &str) -> Result<Vec<u32>, EngineError> {
        let mut tokens = Vec::from_iter(self.begin);
        let Some(chat) = &self.chat else {
            self.append(prompt, &mut tokens)?;
            return Ok(tokens);
        };
        if let Some(system) = &chat.system {
            self.turn(chat, "system", system, &mut tokens)?;
        }
        self.turn(chat, "user", prompt, &mut tokens)?;
        tokens.push(chat.start);
        self.append("assistant\n", &mut tokens)?;
        Ok(tokens)
    }

    fn decode(&self, tokens: &[u32]) -> String {
        let bytes = tokens.iter().filter_map(|token| self.bytes.get(*token as usize));
        let mut bytes: Vec<u8> = bytes.flat_map(|bytes| bytes.iter().copied()).collect();
        bytes.truncate(bytes.len() - incomplete(&bytes));
        String::from_utf8(bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
    }
}

/// How many bytes at the end begin a character that is not complete yet.
fn incomplete(bytes: &[u8]) -> usize {
    // The last character starts at most four bytes before the end; what is wrong further up stays wrong.
    let from = bytes.len().saturating_sub(4);
    let start = (from..bytes.len()).rev().find(|at| bytes[*at] & 0b1100_0000 != 0b1000_0000);
    let Some(start) = start else { return 0 };
    match std::str::from_utf8(&bytes[start..]) {
        Err(error) if error.valid_up_to() == 0 && error.error_len().is_none() => bytes.len() - start,
        _ => 0,
    }
}

fn bpe(data: &Metadata<'_>, tokens: &[&str]) -> Result<BPE, LoadError> {
    let key = "tokenizer.ggml.merges";
    let merges = data.texts(key).ok_or_else(|| data.wrong(key, "it is missing or holds no texts"))?;
    let pairs = merges.iter().map(|merge| merge.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned())));
    let pairs: Option<Vec<(String, String)>> = pairs.collect();
    let pairs = pairs.ok_or_else(|| data.wrong(key, "a merge is no pair"))?;
    let vocabulary: Vocab = tokens.iter().map(|token| (*token).to_owned()).zip(0..).collect();
    BPE::builder()
        .vocab_and_merges(vocabulary, pairs)
        .build()
        .map_err(|error| data.wrong(key, error.to_string()))
}

/// How a text is cut into words before the merges. The wrong cuts give wrong tokens, and text that is only a little
/// worse, so a kind that is not known is refused.
fn pre_tokenizer(data: &Metadata<'_>) -> Result<PreTokenizerWrapper, LoadError> {
    let bytes = ByteLevel::default().add_prefix_space(false);
    match data.text("tokenizer.ggml.pre") {
        // Every digit by itself, and then GPT-2's words.
        Some("smollm") => Ok(Sequence::new(vec![Digits::new(true).into(), bytes.into()]).into()),
        Some("gpt-2" | "default") | None => Ok(bytes.into()),
        Some(kind) => {
            let what = format!("the pre-tokenizer {kind}");
            Err(LoadError::Unsupported { path: data.path.to_owned(), what })
        }
    }
}

fn chat(data: &Metadata<'_>, tokens: &[&str]) -> Option<ChatMl> {
    let template = data.text("tokenizer.chat_template")?;
    let id = |wanted: &str| tokens.iter().position(|token| *token == wanted).map(|id| id as u32);
    let (start, end) = (id(TURN_START)?, id(TURN_END)?);
    if !template.contains(TURN_START) {
        return None;
    }
    // The template is a program; its only text for a missing system turn stands in it as one literal.
    let turn = template.split_once("<|im_start|>system").map(|(_, rest)| rest);
    let turn = turn.and_then(|rest| rest.strip_prefix('\n').or_else(|| rest.strip_prefix("\\n")));
    let system = turn.and_then(|rest| rest.split_once(TURN_END)).map(|(system, _)| system);
    // Anything computed in between is no literal.
    let system = system.filter(|system| !system.contains(['\'', '{', '}'])).map(str::to_owned);
    Some(ChatMl { start, end, system })
}

/// The letters that byte-level BPE writes bytes with: printable ones stand for themselves, the others for the letters
/// from 256 on, in order.
fn letters() -> HashMap<char, u8> {
    let mut next = 256;
    let letter = |byte: u8| {
        let code = if matches!(byte, 33..=126 | 161..=172 | 174..=255) {
            u32::from(byte)
        } else {
            next += 1;
            next - 1
        };
        (char::from_u32(code).expect("a number below 512 is a character"), byte)
    };
    (0..=255).map(letter).collect()
}

fn spelled(token: &str, letters: &HashMap<char, u8>) -> Box<[u8]> {
    let mut bytes = Vec::with_capacity(token.len());
    for letter in token.chars() {
        match letters.get(&letter) {
            Some(byte) => bytes.push(*byte),
            None => bytes.extend_from_slice(letter.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    bytes.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_character_that_may_still_be_completed_is_left_out() {
        let text = "aé€🦀".as_bytes();
        let lengths: Vec<usize> = (0..=text.len()).map(|len| incomplete(&text[..len])).collect();
        assert_eq!(lengths, [0, 0, 1, 0, 1, 2, 0, 1, 2, 3, 0]);
        assert_eq!(incomplete(&[0x80, 0x80, 0x80, 0x80, 0x80]), 0, "there is nothing to complete");
        assert_eq!(incomplete(b"\xff"), 0, "no character starts like this");
        assert_eq!(incomplete(b"\xf0\x41"), 0, "it was broken off");
    }

    #[test]
    fn the_letters_are_one_for_each_byte() {
        let letters = letters();
        assert_eq!(letters.len(), 256);
        for (letter, byte) in [('a', b'a'), ('Ġ', b' '), ('Ċ', b'\n'), ('ÿ', 255), ('Ń', 173)] {
            assert_eq!(letters[&letter], byte);
        }
    }
}
