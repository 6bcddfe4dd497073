use std::sync::{Arc, Mutex};

use super::*;
use crate::toy::{ToyConfig, ToyEngine, expected};

const STAGES: u16 = 2;

fn life(bits: u64) -> Incarnation {
    Incarnation::from_bits(bits)
}

fn id(seq: u64) -> StepId {
    StepId { origin: life(1), seq }
}

fn toy(stage: u16) -> Box<dyn Engine> {
    Box::new(ToyEngine::new(ToyConfig::stage(stage, STAGES)).unwrap())
}

fn stage(number: u16) -> Stage {
    Stage::new(number, toy(number))
}

fn row(request: u64, context: u32, tokens: u32) -> StageRow {
    let row = Row { request: id(1000 + request), context, tokens, sample: true };
    StageRow { row, tenure: 1, trim: None }
}

fn meta(rows: &[StageRow]) -> StageMeta {
    StageMeta { layer: 0, rows: rows.to_vec() }
}

fn bytes(tokens: &[u32]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
}

/// Runs a step through both stages, as the hops would.
fn through(
    first: &mut Stage,
    last: &mut Stage,
    step: StepId,
    rows: &[StageRow],
    tokens: &[u32],
) -> Vec<RowResult> {
    let ran = first.run(step, &meta(rows), &bytes(tokens), &()).unwrap();
    let later = match &ran.next {
        Some((meta, payload)) => {
            // What goes on survives the wire.
            let meta = decode::<StageMeta>(&encode(meta)).unwrap();
            last.run(step, &meta, payload, &()).unwrap().merge(Vec::new()).unwrap()
        }
        None => Vec::new(),
    };
    ran.merge(later).unwrap()
}

fn next_token(prompt: &[u32]) -> RowResult {
    RowResult::Token(expected(4, prompt, 1)[0])
}

#[test]
fn rows_without_state_are_taken_out_and_the_others_go_on_p9() {
    let (mut first, mut last) = (stage(0), stage(1));
    through(&mut first, &mut last, id(1), &[row(1, 0, 2)], &[5, 6]);
    // Request 2 is unknown everywhere, request 3 is new, and request 1 continues.
    let rows = [row(2, 3, 1), row(1, 2, 1), row(3, 0, 2)];
    let results = through(&mut first, &mut last, id(2), &rows, &[9, 7, 1, 2]);
    let missing = RowResult::Missing { stage: 0, held: 0, planned: false };
    assert_eq!(results, [missing, next_token(&[5, 6, 7]), next_token(&[1, 2])]);
    assert_eq!((first.requests(), last.requests()), (2, 2), "nothing is stored for what is missing");
    assert_eq!((first.computed(), last.computed()), (5, 5));
    assert_eq!((first.missing(), last.missing()), (1, 0), "nothing is passed on for what is missing");
}

#[test]
fn what_a_later_stage_lacks_comes_back_in_its_own_place_p9() {
    let (mut first, mut last) = (stage(0), stage(1));
    through(&mut first, &mut last, id(1), &[row(1, 0, 2), row(2, 0, 2)], &[5, 6, 7, 8]);
    let mut successor = stage(1);
    let rows = [row(9, 4, 1), row(1, 2, 1), row(3, 0, 1), row(2, 1, 1)];
    let results = through(&mut first, &mut successor, id(2), &rows, &[0, 7, 1, 3]);
    let missing = |stage| RowResult::Missing { stage, held: 0, planned: false };
    assert_eq!(results, [missing(0), missing(1), next_token(&[1]), missing(1)]);
    assert_eq!(successor.computed(), 1);
}

#[test]
fn a_stage_that_took_over_lacks_by_plan_what_it_never_held_and_only_that() {
    let mut successor = stage(0).with_requests_max(2).taking_over();
    let mut missing = |request, context, planned| {
        let ran = successor.run(id(1), &meta(&[row(request, context, 1)]), &bytes(&[5]), &()).unwrap();
        assert_eq!(ran.results, [Some(RowResult::Missing { stage: 0, held: context - 1, planned })]);
        successor
            .run(id(2), &meta(&[row(request, 0, context)]), &bytes(&vec![5; context as usize]), &())
            .unwrap();
    };
    missing(1, 1, true);
    missing(1, 2, false);
}

#[test]
fn a_next_stage_that_answers_for_other_rows_is_an_error_of_that_step_p10() {
    let mut first = stage(0);
    for later in [vec![], vec![RowResult::Nothing; 2]] {
        let ran = first.run(id(1), &meta(&[row(1, 0, 1)]), &bytes(&[5]), &()).unwrap();
        assert_eq!(ran.merge(later).unwrap_err().code, ErrorCode::Internal);
    }
}

/// A stage computes whatever it is given: only the layer's number tells that the one in front does not reach it.
#[test]
fn a_hole_or_an_overlap_between_two_stages_is_refused_before_anything_is_touched() {
    let mut first = stage(0);
    let ran = first.run(id(1), &meta(&[row(1, 0, 1)]), &bytes(&[5]), &()).unwrap();
    let (next, payload) = ran.next.unwrap();
    for layers in [3..4, 1..4] {
        let config = ToyConfig { layers: layers.clone(), layers_total: 4, ..ToyConfig::stage(1, STAGES) };
        let mut misfit = Stage::new(1, Box::new(ToyEngine::new(config).unwrap()));
        let error = misfit.run(id(1), &next, &payload, &()).unwrap_err();
        assert_eq!((error.code, error.outcome), (ErrorCode::Application, Outcome::NotStarted));
        let text =
            format!("stage 1 holds layers {layers:?}, and the stage in front of it ends before layer 2");
        assert!(error.message.contains(&text), "{}", error.message);
        assert_eq!((misfit.requests(), misfit.computed()), (0, 0));
    }
    assert!(stage(1).run(id(1), &next, &payload, &()).is_ok());
}

#[test]
fn malformed_steps_are_refused_before_anything_is_touched_p10() {
    let mut stage = stage(0).with_requests_max(2);
    stage.run(id(1), &meta(&[row(1, 0, 2)]), &bytes(&[5, 6]), &()).unwrap();
    let bad: [(&[StageRow], usize); 7] = [
        (&[], 0),
        (&[row(1, 2, 1)], 3),
        (&[row(1, 2, 1)], 8),
        (&[row(1, 2, 0)], 0),
        (&[row(1, u32::MAX, 1)], 4),
        (&[row(1, 2, 1), row(1, 2, 1)], 8),
        (&[row(1, 2, 1), row(2, 0, 1), row(3, 0, 1)], 12),
    ];
    for (rows, len) in bad {
        let error = stage.run(id(2), &meta(rows), &vec![0; len], &()).unwrap_err();
        assert_eq!((error.code, error.outcome), (ErrorCode::Application, Outcome::NotStarted), "{rows:?}");
    }
    let huge = [row(1, 0, u32::MAX - 1), row(2, 0, u32::MAX - 1)];
    assert!(stage.run(id(2), &meta(&huge), &bytes(&[1]), &()).is_err());
    assert_eq!((stage.requests(), stage.computed()), (1, 2));
    stage.run(id(3), &meta(&[row(1, 2, 1)]), &bytes(&[7]), &()).unwrap();
    assert_eq!(stage.computed(), 3);
}

#[test]
fn any_bytes_as_metadata_are_decoded_or_refused_and_never_kill_the_stage_p10() {
    let mut stage = stage(0);
    let good = encode(&meta(&[row(1, 0, 2), row(2, 3, 1)]));
    let mut seed = 1u64;
    for _ in 0..20_000 {
        let mut bytes = good.to_vec();
        for _ in 0..3 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let at = (seed >> 33) as usize % bytes.len();
            bytes[at] = (seed >> 56) as u8;
        }
        bytes.truncate(bytes.len() - (seed >> 20) as usize % 2);
        if let Ok(meta) = decode::<StageMeta>(&bytes) {
            let _ = stage.run(id(1), &meta, &[0; 12], &());
        }
    }
}

/// An engine that misbehaves as it is told, from the next step on.
struct Rogue {
    inner: Box<dyn Engine>,
    mood: Arc<Mutex<Mood>>,
    /// It has seen a step in its present mood.
    begun: bool,
}

impl Rogue {
    fn acts(&self, mood: Mood) -> bool {
        self.begun && *self.mood.lock().unwrap() == mood
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mood {
    Good,
    Fails,
    Panics,
    PanicsAlways,
    Short,
    Long,
    Forgets,
}

impl Engine for Rogue {
    fn info(&self) -> &EngineInfo {
        self.inner.info()
    }

    fn held(&self, request: RequestId) -> u32 {
        assert!(!self.acts(Mood::PanicsAlways), "as told");
        self.inner.held(request) - u32::from(self.acts(Mood::Forgets))
    }

    fn forward(
        &mut self,
        step: StepId,
        batch: &Batch,
        input: &[u8],
        output: &mut Vec<u8>,
        watch: &dyn Watch,
    ) -> Result<(), EngineError> {
        self.inner.forward(step, batch, input, output, watch)?;
        let mood = *self.mood.lock().unwrap();
        self.begun = mood != Mood::Good;
        match mood {
            Mood::Good | Mood::Forgets => {}
            Mood::Fails => return Err(EngineError::Failed("as told".into())),
            Mood::Panics | Mood::PanicsAlways => panic!("as told"),
            Mood::Short => output.truncate(output.len() - 1),
            Mood::Long => output.push(0),
        }
        Ok(())
    }

    fn release(&mut self, request: RequestId) {
        assert!(!self.acts(Mood::PanicsAlways), "as told");
        self.inner.release(request);
    }

    fn requests(&self) -> usize {
        self.inner.requests()
    }
}

#[test]
fn an_engine_that_fails_panics_or_lies_fails_that_step_and_the_stage_lives_p10() {
    for number in [0, 1] {
        for bad in [Mood::Fails, Mood::Panics, Mood::Short, Mood::Long, Mood::Forgets] {
            failure_is_contained(number, bad);
        }
    }
}

#[test]
fn state_that_a_panicking_engine_could_not_release_is_never_computed_on_p10() {
    failure_is_contained(0, Mood::PanicsAlways);
}

fn failure_is_contained(number: u16, bad: Mood) {
    let meta = |rows: &[StageRow]| StageMeta { layer: u32::from(number) * 2, ..meta(rows) };
    let mood = Arc::new(Mutex::new(Mood::Good));
    let mut stage =
        Stage::new(number, Box::new(Rogue { inner: toy(number), mood: mood.clone(), begun: false }));
    let payload = |tokens: u32| match number {
        0 => bytes(&vec![7; tokens as usize]),
        // Any activations do, if they are whole.
        _ => {
            let row = StageMeta { layer: 0, ..meta(&[row(1, 0, tokens)]) };
            let input = bytes(&vec![7; tokens as usize]);
            let mut first = Stage::new(0, toy(0));
            first.run(id(1), &row, &input, &()).unwrap().next.unwrap().1.to_vec()
        }
    };
    stage.run(id(1), &meta(&[row(1, 0, 2), row(2, 0, 2)]), &payload(4), &()).unwrap();
    *mood.lock().unwrap() = bad;
    let error = stage.run(id(2), &meta(&[row(1, 2, 1)]), &payload(1), &()).unwrap_err();
    let code = if bad == Mood::Fails { ErrorCode::Application } else { ErrorCode::Internal };
    assert_eq!((error.code, error.outcome), (code, Outcome::Ran), "{bad:?}");
    *mood.lock().unwrap() = Mood::Good;
    let rows = [row(1, 2, 1), row(2, 2, 1), row(3, 0, 1)];
    let ran = stage.run(id(3), &meta(&rows), &payload(3), &()).unwrap();
    let missing = RowResult::Missing { stage: number, held: 0, planned: false };
    assert_eq!(ran.results[0], Some(missing), "the failed step's request was released: {bad:?}");
    assert_ne!(ran.results[1], Some(missing), "the other request's state is still there: {bad:?}");
    assert_eq!(stage.requests(), 2);
}

#[test]
fn an_earlier_stage_0_is_superseded_and_cannot_release_its_successors_state() {
    let (mut first, mut last) = (stage(0), stage(1));
    through(&mut first, &mut last, id(1), &[row(1, 0, 1)], &[5]);
    let later = StepId { origin: life(2), seq: 1 };
    let taken_over = StageRow { tenure: 2, ..row(1, 0, 2) };
    assert_eq!(through(&mut first, &mut last, later, &[taken_over], &[5, 6]), [next_token(&[5, 6])]);
    let late = through(&mut first, &mut last, id(2), &[row(1, 1, 1), row(2, 0, 1)], &[6, 3]);
    assert_eq!(late, [RowResult::Superseded, next_token(&[3])]);
    let late = through(&mut first, &mut last, id(3), &[row(1, 0, 1)], &[6]);
    assert_eq!(late, [RowResult::Superseded], "not even from context 0");
    let request = row(1, 0, 1).row.request;
    last.release(&[Release { request, tenure: 1, route: Vec::new() }]);
    last.origin_gone(life(1));
    assert_eq!(last.requests(), 1, "what is left is the successor's");
    last.release(&[Release { request, tenure: 2, route: Vec::new() }]);
    assert_eq!(last.requests(), 0);
}

#[test]
fn state_that_another_origin_built_is_missing_for_this_one_p9() {
    let mut stage = stage(0);
    stage.run(id(1), &meta(&[row(1, 0, 2)]), &bytes(&[5, 6]), &()).unwrap();
    let other = StepId { origin: life(2), seq: 1 };
    let ran = stage.run(other, &meta(&[row(1, 2, 1)]), &bytes(&[7]), &()).unwrap();
    assert_eq!(ran.results, [Some(RowResult::Missing { stage: 0, held: 0, planned: false })]);
    assert!(ran.next.is_none());
}

#[test]
fn an_origin_that_is_gone_takes_only_its_own_requests_along() {
    let mut stage = stage(0);
    stage.run(id(1), &meta(&[row(1, 0, 1), row(2, 0, 1)]), &bytes(&[5, 6]), &()).unwrap();
    let other = StepId { origin: life(2), seq: 1 };
    stage.run(other, &meta(&[StageRow { tenure: 2, ..row(2, 0, 1) }]), &bytes(&[6]), &()).unwrap();
    stage.origin_gone(life(1));
    assert_eq!(stage.requests(), 1);
    let ran = stage.run(other, &meta(&[StageRow { tenure: 2, ..row(2, 1, 1) }]), &bytes(&[7]), &()).unwrap();
    assert!(ran.next.is_some(), "request 2 had moved on to the other origin");
}

#[test]
fn the_request_that_was_longest_unused_makes_room_and_is_reported_missing() {
    let mut stage = stage(0).with_requests_max(2);
    stage.run(id(1), &meta(&[row(1, 0, 1), row(2, 0, 1)]), &bytes(&[5, 6]), &()).unwrap();
    stage.run(id(2), &meta(&[row(1, 1, 1)]), &bytes(&[7]), &()).unwrap();
    stage.run(id(3), &meta(&[row(3, 0, 1)]), &bytes(&[8]), &()).unwrap();
    assert_eq!((stage.requests(), stage.engine.requests()), (2, 2));
    let ran = stage.run(id(4), &meta(&[row(2, 1, 1), row(1, 2, 1)]), &bytes(&[9, 9]), &()).unwrap();
    assert_eq!(ran.results, [Some(RowResult::Missing { stage: 0, held: 0, planned: false }), None]);
}

#[test]
fn in_a_recovery_the_later_stages_get_only_what_they_do_not_hold() {
    let (mut first, mut last) = (stage(0), stage(1));
    let prompt = [5, 6, 7, 8, 9];
    through(&mut first, &mut last, id(1), &[row(1, 0, 3)], &prompt[..3]);
    let mut successor = stage(0);
    let lost = through(&mut successor, &mut last, id(2), &[row(1, 3, 1)], &prompt[3..4]);
    assert_eq!(lost, [RowResult::Missing { stage: 0, held: 0, planned: false }]);
    // Computed anew in two chunks: the first ends before what the last stage lacks.
    let trim = Some(Trim { stage: 0, keep: 3 });
    let mut chunk = StageRow { trim, ..row(1, 0, 2) };
    chunk.row.sample = false;
    let results = through(&mut successor, &mut last, id(3), &[chunk], &prompt[..2]);
    assert_eq!((results, last.computed()), (vec![RowResult::Nothing], 3));
    let rest = StageRow { trim, ..row(1, 2, 3) };
    let results = through(&mut successor, &mut last, id(4), &[rest], &prompt[2..]);
    assert_eq!((results, last.computed()), (vec![next_token(&prompt)], 5));
    assert_eq!((successor.computed(), last.missing()), (5, 0));
}
