use crate::{EngineError, Text};

const SYLLABLES: [&str; 32] = [
    "ba", "be", "bi", "bo", "da", "de", "di", "do", "ka", "ke", "ki", "ko", "la", "le", "li", "lo", "ma",
    "me", "mi", "mo", "na", "ne", "ni", "no", "ra", "re", "ri", "ro", "ta", "te", "ti", "to",
];

/// The toy's text: a prompt's bytes are its tokens, and each generated token is a word of its own.
#[derive(Clone, Copy, Debug, Default)]
pub struct ToyText;

impl Text for ToyText {
    fn encode(&self, prompt: &str) -> Result<Vec<u32>, EngineError> {
        Ok(prompt.bytes().map(u32::from).collect())
    }

    fn decode(&self, tokens: &[u32]) -> String {
        let words: Vec<String> = tokens.iter().map(|token| word(*token)).collect();
        words.join(" ")
    }
}

/// The token's digits to base 32, at least two, as syllables.
fn word(token: u32) -> String {
    let mut syllables = Vec::new();
    let mut rest = token as usize;
    while rest > 0 || syllables.len() < 2 {
        syllables.push(SYLLABLES[rest % SYLLABLES.len()]);
        rest /= SYLLABLES.len();
    }
    syllables.reverse();
    syllables.concat()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::VOCABULARY;
    use super::*;

    #[test]
    fn every_token_is_a_word_of_its_own_and_text_grows_with_its_tokens() {
        let words: BTreeSet<String> = (0..VOCABULARY).map(word).collect();
        assert_eq!(words.len(), VOCABULARY as usize);
        let tokens = [3, 999, 0, 17];
        let whole = ToyText.decode(&tokens);
        for n in 0..tokens.len() {
            assert!(whole.starts_with(&ToyText.decode(&tokens[..n])));
        }
        assert_eq!(ToyText.encode("né").unwrap(), [110, 195, 169]);
    }
}
