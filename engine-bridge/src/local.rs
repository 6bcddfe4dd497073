//! The undisturbed reference: the same engines in one process, with no transport, no actors and no scheduler.

use connex_protocol::{Incarnation, StepId};

use crate::{Batch, Engine, EngineError, Row};

/// Generates up to `tokens` tokens for each prompt, one prompt after the other, through the stages in order. A stop
/// token ends a generation and is part of it.
pub fn run(
    engines: &mut [Box<dyn Engine>],
    prompts: &[Vec<u32>],
    tokens: usize,
) -> Result<Vec<Vec<u32>>, EngineError> {
    let origin = Incarnation::from_bits(u64::MAX);
    let mut outputs = Vec::new();
    for (at, prompt) in prompts.iter().enumerate() {
        let request = StepId { origin, seq: at as u64 + 1 };
        let mut generated = Vec::new();
        let mut context = 0;
        let mut feed = prompt.clone();
        while generated.len() < tokens {
            let row = Row { request, context, tokens: feed.len() as u32, sample: true };
            let batch = Batch { rows: vec![row] };
            let mut data: Vec<u8> = feed.iter().flat_map(|token| token.to_le_bytes()).collect();
            for engine in engines.iter_mut() {
                let mut next = Vec::new();
                engine.forward(request, &batch, &data, &mut next, &())?;
                data = next;
            }
            context += row.tokens;
            let token = data.try_into().map(u32::from_le_bytes).map_err(|data: Vec<u8>| {
                EngineError::Failed(format!("the last stage yielded {} bytes instead of a token", data.len()))
            })?;
            generated.push(token);
            if engines.first().is_some_and(|engine| engine.info().stop_tokens.contains(&token)) {
                break;
            }
            feed = vec![token];
        }
        for engine in engines.iter_mut() {
            engine.release(request);
        }
        outputs.push(generated);
    }
    Ok(outputs)
}
