//! The undisturbed reference: one process, one request after another, no transport, no actors, no scheduler.

use connex_protocol::{Incarnation, StepId};

use crate::{Batch, Engine, EngineError, Row};

/// Generates greedily after each prompt, with the stages called one after another.
///
/// `engines` are the stages of one model, in order, without a hole between their layers. Each output ends with a stop
/// token, after `tokens` tokens, or when the context is full. The engines hold nothing of the prompts afterwards.
pub fn run(
    engines: &mut [Box<dyn Engine>],
    prompts: &[Vec<u32>],
    tokens: usize,
) -> Result<Vec<Vec<u32>>, EngineError> {
    check_stages(engines)?;
    let mut outputs = Vec::with_capacity(prompts.len());
    for (number, prompt) in prompts.iter().enumerate() {
        let request = StepId { origin: Incarnation::from_bits(1), seq: number as u64 + 1 };
        let output = generate(engines, request, prompt, tokens);
        engines.iter_mut().for_each(|engine| engine.release(request));
        outputs.push(output?);
    }
    Ok(outputs)
}

fn check_stages(engines: &[Box<dyn Engine>]) -> Result<(), EngineError> {
    let mut next = 0;
    for engine in engines {
        let layers = &engine.info().layers;
        if layers.start != next {
            let text = format!("a stage starts at layer {}, the one before it ends at {next}", layers.start);
            return Err(EngineError::Failed(text));
        }
        next = layers.end;
    }
    match engines.last() {
        Some(last) if last.info().is_last() => Ok(()),
        _ => Err(EngineError::Failed(format!("the stages end at layer {next}, the model does not"))),
    }
}

fn generate(
    engines: &mut [Box<dyn Engine>],
    request: StepId,
    prompt: &[u32],
    tokens: usize,
) -> Result<Vec<u32>, EngineError> {
    let info = engines.first().expect("the stages were checked").info().clone();
    let needed = prompt.len() as u32 + 1;
    if prompt.is_empty() || needed > info.context_max {
        return Err(EngineError::Context { needed, max: info.context_max });
    }
    let mut out = Vec::new();
    let mut input = prompt.to_vec();
    let mut context = 0;
    while out.len() < tokens && context + (input.len() as u32) < info.context_max {
        let row = Row { request, context, tokens: input.len() as u32, sample: true };
        context += row.tokens;
        let token = forward(engines, row, &input)?;
        out.push(token);
        if info.stop_tokens.contains(&token) {
            break;
        }
        input = vec![token];
    }
    Ok(out)
}

fn forward(engines: &mut [Box<dyn Engine>], row: Row, tokens: &[u32]) -> Result<u32, EngineError> {
    let batch = Batch { rows: vec![row] };
    let step = StepId { origin: row.request.origin, seq: u64::from(row.context) + 1 };
    let mut bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    for engine in engines {
        let mut output = Vec::new();
        engine.forward(step, &batch, &bytes, &mut output, &())?;
        bytes = output;
    }
    let token = bytes.as_slice().try_into().map_err(|_| {
        EngineError::Failed(format!("the last stage gave {} bytes for one token", bytes.len()))
    })?;
    Ok(u32::from_le_bytes(token))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::toy::{ToyConfig, ToyEngine, expected};

    fn stages(cuts: &[u32], context_max: u32, stop_tokens: &[u32]) -> Vec<Box<dyn Engine>> {
        let stages = cuts.windows(2).map(|cut| {
            let stop_tokens = stop_tokens.to_vec();
            let config = ToyConfig {
                layers: cut[0]..cut[1],
                layers_total: 8,
                context_max,
                stop_tokens,
                ..ToyConfig::stage(0, 1)
            };
            Box::new(ToyEngine::new(config).unwrap()) as Box<dyn Engine>
        });
        stages.collect()
    }

    #[test]
    fn it_generates_what_the_model_of_the_automaton_says_and_keeps_nothing() {
        let prompts = vec![vec![1, 2, 3], vec![9; 40], vec![500]];
        let wanted: Vec<Vec<u32>> = prompts.iter().map(|prompt| expected(8, prompt, 20)).collect();
        for cuts in [&[0, 8][..], &[0, 3, 8], &[0, 2, 4, 6, 8]] {
            let mut engines = stages(cuts, 100, &[]);
            assert_eq!(run(&mut engines, &prompts, 20).unwrap(), wanted, "stages cut at {cuts:?}");
            assert!(engines.iter().all(|engine| engine.requests() == 0));
        }
    }

    #[test]
    fn it_ends_with_a_stop_token_and_at_the_end_of_the_context() {
        let endless = expected(8, &[5, 6], 20);
        let stopped = run(&mut stages(&[0, 8], 100, &endless[7..8]), &[vec![5, 6]], 20).unwrap();
        assert_eq!(stopped[0], endless[..8]);
        let full = run(&mut stages(&[0, 8], 10, &[]), &[vec![5, 6]], 20).unwrap();
        assert_eq!(full[0], endless[..8], "prompt and output together fill the context");
        let long = run(&mut stages(&[0, 8], 10, &[]), &[vec![5; 10]], 20);
        assert!(matches!(long, Err(EngineError::Context { needed: 11, max: 10 })));
    }

    #[test]
    fn a_hole_between_stages_and_a_missing_end_are_refused() {
        let run_stages = |mut engines: Vec<Box<dyn Engine>>| run(&mut engines, &[vec![1]], 1);
        assert!(run_stages(stages(&[3, 8], 100, &[])).is_err());
        assert!(run_stages(stages(&[0, 3], 100, &[])).is_err());
        assert!(run_stages(Vec::new()).is_err());
    }
}
