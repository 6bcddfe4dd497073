//! SmolLM2-135M-Instruct: what it says, and the same bits however its work is cut.

mod common;

use common::{bits, real_model, staged_logits, stages};
use connex_engine::{Engine, Text, conformance, local};
use connex_llama::{GgufText, LlamaEngine, inspect};

/// A prompt at each of whose tokens an independent implementation in `f32` finds the first choice at least 0.9 ahead
/// of the second, and its answer.
const PROMPT: &str = "Count from 1 to 5.";
const ANSWER: [u32; 24] =
    [33, 30, 216, 33, 198, 34, 30, 216, 34, 198, 35, 30, 216, 35, 198, 36, 30, 216, 36, 198, 37, 30, 216, 37];

#[test]
fn its_header_says_what_it_is() {
    let Some(path) = real_model() else { return };
    let info = inspect(&path).unwrap();
    assert_eq!((info.architecture.as_str(), info.layers, info.hidden), ("llama", 30, 576));
    assert_eq!((info.heads, info.kv_heads, info.head), (9, 3, 64));
    assert_eq!((info.context, info.vocabulary), (8192, 49152));
    assert_eq!(info.stop_tokens, [0, 2], "the end of a text and of a turn");
    assert!(info.chat_template);
    assert_eq!(info.cache_bytes_per_token(30), 30 * 3 * 64 * 2 * 4);
}

#[test]
fn it_counts_to_five() {
    let Some(path) = real_model() else { return };
    let text = GgufText::load(&path).unwrap();
    let prompt = text.encode(PROMPT).unwrap();
    let mut engines: Vec<Box<dyn Engine>> = vec![Box::new(LlamaEngine::load(&path, None).unwrap())];
    let output = local::run(&mut engines, &[prompt], ANSWER.len()).unwrap();
    assert_eq!(output[0], ANSWER);
    assert_eq!(text.decode(&output[0]), "1. 1\n2. 2\n3. 3\n4. 4\n5. 5");
}

#[test]
fn its_logits_are_the_same_in_one_two_and_four_stages_and_in_any_batch() {
    let Some(path) = real_model() else { return };
    let text = GgufText::load(&path).unwrap();
    let first = text.encode_raw("The harbour was quiet in 1853.").unwrap();
    let second = text.encode_raw("日本").unwrap();
    let whole = staged_logits(&mut stages(&path, 1), &[(1, 0, &first)]);
    for count in [2, 4] {
        let mut stages = stages(&path, count);
        let beside = staged_logits(&mut stages, &[(2, 0, &second), (1, 0, &first)]);
        assert_eq!(bits(&beside[1..]), bits(&whole), "{count} stages, beside another");
        // Recomputed in pieces, as after a kill.
        stages.iter_mut().for_each(|stage| stage.release(common::request(1)));
        let (head, tail) = first.split_at(5);
        staged_logits(&mut stages, &[(1, 0, head)]);
        let again = staged_logits(&mut stages, &[(1, 5, tail)]);
        assert_eq!(bits(&again), bits(&whole), "{count} stages, recomputed");
    }
}

#[test]
fn it_conforms_to_the_contract() {
    let Some(path) = real_model() else { return };
    let text = GgufText::load(&path).unwrap();
    let prompts = ["The harbour was quiet in 1853.", "日本 🦀 fn main() {}"];
    let prompts: Vec<_> = prompts.iter().map(|prompt| text.encode_raw(prompt).unwrap()).collect();
    let make = |range| Box::new(LlamaEngine::load(&path, Some(range)).unwrap()) as Box<dyn Engine>;
    conformance::check(&make, &prompts, 6);
}
