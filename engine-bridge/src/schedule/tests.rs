use super::world::{Faults, Rng, World, config, request};
use super::*;
use crate::stage;
use crate::toy::expected;

/// A world whose size and requests a seed drew.
fn drawn(seed: u64, recovery_budget: u32) -> World {
    let mut rng = Rng(seed);
    let stages = 2 + rng.below(3) as u16;
    let replicas = 1 + rng.below(3) as ReplicaNo;
    let clients = 1 + rng.below(8);
    let prompts: Vec<Vec<u32>> =
        (0..clients).map(|_| (0..1 + rng.below(30)).map(|_| rng.below(1000) as u32).collect()).collect();
    // One request ends by a stop token, unless it is cancelled.
    let stop = expected(u32::from(stages) * 2, &prompts[0], 6)[5];
    let config = ScheduleConfig {
        k: 1 + rng.below(4) as usize,
        rows: 1 + rng.below(8) as usize,
        tokens: 1 + rng.below(16) as u32,
        recovery_budget,
        stop_tokens: vec![stop],
        ..config()
    };
    let mut world = World::new(seed, stages, replicas, config);
    for (number, prompt) in prompts.iter().enumerate() {
        world.admit(number as u64, prompt, rng.below(20) as u32);
    }
    world
}

#[test]
fn undisturbed_every_token_is_computed_once_and_nothing_is_left_behind() {
    for seed in 0..200 {
        let mut world = drawn(seed, 0);
        world.finish();
        world.assert_right();
        let held = |client: &world::Client| match client.out.len() {
            0 => 0,
            out => client.prompt.len() + out - 1,
        };
        let wanted: usize = world.clients.values().map(held).sum();
        assert_eq!(world.heads[0].stage.computed(), wanted as u64, "seed {seed}");
        assert_eq!(world.heads[0].stage.requests(), 0, "seed {seed}");
        for stage in 1..world.stages {
            assert_eq!(world.sum(stage, stage::Stage::computed), wanted as u64, "seed {seed} stage {stage}");
            assert_eq!(world.sum(stage, |stage| stage.requests() as u64), 0, "seed {seed} stage {stage}");
        }
    }
}

#[test]
fn whatever_is_killed_lost_rerouted_or_late_every_output_is_right() {
    let mut recovered = 0;
    for seed in 0..400 {
        let mut world = drawn(seed, 100_000);
        world.faults = Faults {
            kill_before: world.rng.below(10),
            kill_after: world.rng.below(10),
            error: world.rng.below(5),
            reroute: world.rng.below(10),
            straggle: world.rng.below(20),
            head: world.rng.below(3),
            cancel: 0,
        };
        let faults = world.faults;
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            world.finish();
            world.assert_right();
        }));
        assert!(result.is_ok(), "seed {seed} {faults:?}");
        recovered += (1..world.stages).map(|stage| world.sum(stage, stage::Stage::missing)).sum::<u64>();
    }
    assert!(recovered > 100, "the faults did hit: {recovered}");
}

#[test]
fn a_cancelled_request_has_a_prefix_of_its_output_and_the_others_all_of_theirs() {
    let mut cancelled = 0;
    for seed in 0..200 {
        let mut world = drawn(seed, 100_000);
        world.faults = Faults { cancel: 10, kill_before: 3, kill_after: 3, error: 2, ..Faults::default() };
        world.finish();
        for client in world.clients.values() {
            let (out, finish) = world.right(client);
            match client.end.as_ref().unwrap() {
                Ok(end) => assert_eq!((end, &client.out), (&finish, &out), "seed {seed}"),
                Err(error) => {
                    cancelled += 1;
                    assert_eq!(error.code, ErrorCode::Cancelled, "seed {seed}");
                    assert!(out.starts_with(&client.out), "seed {seed}");
                }
            }
        }
        // Steps that nobody wanted any more are over as well.
        while world.running() > 0 {
            world.complete(world.serving(), 0);
        }
        assert_eq!(world.heads[0].scheduler.requests(), 0, "seed {seed}");
        assert_eq!(world.heads[0].stage.requests(), 0, "seed {seed}");
    }
    assert!(cancelled > 100, "{cancelled}");
}

/// Four stages, two replicas each, four requests half way, and no step in flight past stage 0.
fn half_way(tokens: u32) -> World {
    let mut world = World::new(7, 4, 2, ScheduleConfig { tokens, ..config() });
    for number in 0..4 {
        world.admit(number, &[number as u32, 11, 12, 13, 14], 20);
    }
    while world.clients.values().any(|client| client.out.len() < 10) {
        world.complete(0, 0);
    }
    world
}

fn behind_stage_1(world: &World) -> [(u64, u64); 2] {
    [2, 3].map(|stage| (world.sum(stage, stage::Stage::computed), world.sum(stage, stage::Stage::missing)))
}

#[test]
fn when_stage_1_of_4_is_killed_the_stages_behind_it_recompute_nothing() {
    // With chunks of 3 tokens a recovery takes several steps; with 64 it takes one.
    for tokens in [3, 64] {
        let mut world = half_way(tokens);
        world.kill(1, 0);
        world.kill(1, 1);
        world.finish();
        world.assert_right();
        let total = 4 * (5 + 20 - 1);
        assert_eq!(behind_stage_1(&world), [(total, 0); 2], "in chunks of {tokens}");
        assert_eq!(world.sum(1, stage::Stage::missing), 4);
    }
}

#[test]
fn when_it_is_killed_again_while_it_recovers_they_still_recompute_nothing() {
    let mut world = half_way(3);
    for _ in 0..3 {
        world.kill(1, 0);
        world.kill(1, 1);
        (0..9).for_each(|_| world.complete(0, 0));
    }
    world.finish();
    world.assert_right();
    assert_eq!(behind_stage_1(&world), [(4 * (5 + 20 - 1), 0); 2]);
}

#[test]
fn when_a_stage_behind_is_lost_in_a_recovery_only_the_one_after_it_is_spared() {
    let mut world = half_way(64);
    for replica in [0, 1] {
        world.kill(1, replica);
        world.kill(2, replica);
    }
    world.finish();
    world.assert_right();
    assert_eq!(world.sum(3, stage::Stage::computed), 4 * (5 + 20 - 1));
    assert_eq!(world.sum(2, stage::Stage::missing), 4);
}

#[test]
fn a_second_loss_in_front_does_not_ask_more_of_the_stage_that_was_lost_first() {
    let mut world = half_way(3);
    let kill = |world: &mut World, stage| (0..2).for_each(|replica| world.kill(stage, replica));
    kill(&mut world, 2);
    // Every request has its loss reported and its first chunk behind it.
    (0..8).for_each(|_| world.complete(0, 0));
    assert_eq!(world.sum(2, stage::Stage::missing), 4);
    kill(&mut world, 1);
    world.finish();
    world.assert_right();
    assert_eq!(world.sum(1, stage::Stage::missing), 4);
    assert_eq!(world.sum(2, stage::Stage::missing), 4, "it was not asked to go on from what it had lost");
}

/// A scheduler alone, driven by hand.
struct Bench {
    scheduler: Scheduler,
    outputs: Vec<ScheduleOutput>,
}

type Run = (Ticket, StageMeta, Vec<u32>, Vec<ReplicaNo>);

impl Bench {
    fn new(config: ScheduleConfig) -> Bench {
        Bench { scheduler: Scheduler::new(config), outputs: Vec::new() }
    }

    fn handle(&mut self, input: ScheduleInput) {
        self.scheduler.handle(Instant::ZERO, input);
        while let Some(output) = self.scheduler.poll() {
            self.outputs.push(output);
        }
    }

    fn admit(&mut self, number: u64, prompt: &[u32], generated: &[u32], max_tokens: u32) {
        self.admit_on(number, prompt, generated, max_tokens, &[]);
    }

    fn admit_on(
        &mut self,
        number: u64,
        prompt: &[u32],
        generated: &[u32],
        max_tokens: u32,
        route: &[ReplicaNo],
    ) {
        self.handle(ScheduleInput::Admit(Admission {
            request: request(number),
            prompt: prompt.to_vec(),
            generated: generated.to_vec(),
            max_tokens,
            tenure: 1,
            route: route.to_vec(),
        }));
    }

    fn done(&mut self, ticket: Ticket, route: &[ReplicaNo], results: &[RowResult]) {
        let result = Ok(results.to_vec());
        self.handle(ScheduleInput::StepDone { ticket, route: route.to_vec(), result });
    }

    fn failed(&mut self, ticket: Ticket, code: ErrorCode) {
        let result = Err(StepError::new(code, Outcome::MayHaveRun, "as told"));
        self.handle(ScheduleInput::StepDone { ticket, route: Vec::new(), result });
    }

    /// Takes the only step that was asked for.
    fn run(&mut self) -> Run {
        let runs = self.runs();
        let [run] = runs.try_into().expect("one step was to run");
        run
    }

    fn runs(&mut self) -> Vec<Run> {
        let mut runs = Vec::new();
        self.outputs.retain(|output| match output {
            ScheduleOutput::Run { ticket, meta, tokens, route } => {
                runs.push((*ticket, meta.clone(), tokens.clone(), route.clone()));
                false
            }
            _ => true,
        });
        runs
    }

    /// Takes how a request ended.
    fn end(&mut self, number: u64) -> Option<Result<Finish, StepError>> {
        let at = self.outputs.iter().position(
            |output| matches!(output, ScheduleOutput::Finish { request: id, .. } if *id == request(number)),
        )?;
        match self.outputs.remove(at) {
            ScheduleOutput::Finish { end, .. } => Some(end),
            _ => unreachable!("it was just matched"),
        }
    }

    fn code(&mut self, number: u64) -> ErrorCode {
        self.end(number).expect("it ended").expect_err("it failed").code
    }
}

const MISSING: RowResult = RowResult::Missing { stage: 1, held: 0, planned: false };

#[test]
fn what_can_never_be_served_is_refused_before_anything_runs() {
    let mut bench = Bench::new(ScheduleConfig { requests: 2, context_max: 10, k: 1, ..config() });
    bench.admit(1, &[], &[], 5);
    assert_eq!(bench.code(1), ErrorCode::Application);
    bench.admit(2, &[1; 10], &[], 5);
    let error = bench.end(2).unwrap().unwrap_err();
    assert_eq!((error.code, error.outcome), (ErrorCode::Application, Outcome::NotStarted));
    assert!(error.message.contains("10 tokens") && error.message.contains("shorten"), "{}", error.message);
    assert!(bench.runs().is_empty());
    bench.admit(3, &[1; 9], &[], 5);
    bench.admit(4, &[1], &[], 5);
    bench.admit(5, &[1], &[], 5);
    assert_eq!(bench.code(5), ErrorCode::Overloaded);
    assert_eq!(bench.scheduler.requests(), 2);
}

#[test]
fn a_request_ends_with_its_length_its_context_or_a_stop_token() {
    let limits = ScheduleConfig { context_max: 4, stop_tokens: vec![99], ..config() };
    for (max_tokens, samples, end) in
        [(2, &[7, 8][..], Finish::Length), (9, &[7, 8, 9], Finish::Length), (9, &[7, 99], Finish::Stop)]
    {
        let mut bench = Bench::new(limits.clone());
        bench.admit(1, &[5], &[], max_tokens);
        for sample in samples {
            let (ticket, ..) = bench.run();
            assert_eq!(bench.end(1), None);
            bench.done(ticket, &[0], &[RowResult::Token(*sample)]);
        }
        assert_eq!(bench.end(1), Some(Ok(end)));
        assert!(bench.runs().is_empty());
    }
}

#[test]
fn a_successor_goes_on_after_the_tokens_that_are_out() {
    let mut bench = Bench::new(ScheduleConfig { stop_tokens: vec![99], ..config() });
    bench.admit(1, &[5, 6], &[7, 8], 3);
    let (ticket, meta, tokens, _) = bench.run();
    assert_eq!((tokens, meta.rows[0].row.context), (vec![5, 6, 7, 8], 0));
    bench.done(ticket, &[0], &[RowResult::Token(9)]);
    let emitted = bench.outputs.iter().find_map(|output| match output {
        ScheduleOutput::Emit { index, token, .. } => Some((*index, *token)),
        _ => None,
    });
    assert_eq!(emitted, Some((2, 9)));
    assert_eq!(bench.end(1), Some(Ok(Finish::Length)));
    // Only the end is missing: nothing runs.
    bench.admit(2, &[5], &[7, 99], 9);
    bench.admit(3, &[5], &[7, 8], 2);
    assert_eq!((bench.end(2), bench.end(3)), (Some(Ok(Finish::Stop)), Some(Ok(Finish::Length))));
    assert!(bench.runs().is_empty());
}

#[test]
fn a_long_prefill_goes_in_chunks_and_holds_up_no_decode_beside_it() {
    let mut bench = Bench::new(ScheduleConfig { k: 1, tokens: 4, ..config() });
    bench.admit(1, &[1; 9], &[], 5);
    bench.admit(2, &[2], &[], 5);
    let rows = |meta: &StageMeta| -> Vec<(u64, u32, u32, bool)> {
        let row = |row: &StageRow| (row.row.request.seq, row.row.context, row.row.tokens, row.row.sample);
        meta.rows.iter().map(row).collect()
    };
    let (ticket, meta, ..) = bench.run();
    assert_eq!(rows(&meta), [(1, 0, 4, false)]);
    bench.done(ticket, &[], &[RowResult::Nothing]);
    let (ticket, meta, ..) = bench.run();
    assert_eq!(rows(&meta), [(2, 0, 1, true), (1, 4, 3, false)], "both, and the decode has its token");
    bench.done(ticket, &[], &[RowResult::Token(3), RowResult::Nothing]);
    let (_, meta, ..) = bench.run();
    assert_eq!(rows(&meta), [(2, 1, 1, true), (1, 7, 2, true)]);
}

#[test]
fn requests_are_dealt_over_the_steps_in_flight() {
    let mut bench = Bench::new(config());
    (0..8).for_each(|number| bench.admit(number, &[1], &[], 9));
    let first = bench.runs();
    assert_eq!(first.len(), 4);
    for (ticket, meta, ..) in first {
        bench.done(ticket, &[0], &vec![RowResult::Token(1); meta.rows.len()]);
    }
    let sizes: Vec<usize> = bench.runs().iter().map(|(_, meta, ..)| meta.rows.len()).collect();
    assert_eq!(sizes, [2; 4]);
}

#[test]
fn no_route_starves_behind_a_busier_one() {
    let mut bench = Bench::new(ScheduleConfig { k: 1, rows: 4, ..config() });
    (0..20).for_each(|number| bench.admit_on(number, &[1], &[], 900, &[0, 0]));
    bench.admit_on(50, &[1], &[], 900, &[1, 1]);
    let mut since = 0;
    for _ in 0..200 {
        let (ticket, meta, _, route) = bench.run();
        let mine = meta.rows.iter().any(|row| row.row.request == request(50));
        assert!(!mine || (meta.rows.len() == 1 && route == [1, 1]), "rows of one step share its route");
        since = if mine { 0 } else { since + 1 };
        assert!(since <= 6, "20 requests in steps of 4 take 5 steps, then it is the other's turn");
        bench.done(ticket, &route, &vec![RowResult::Token(1); meta.rows.len()]);
    }
}

#[test]
fn the_route_really_taken_is_kept_and_an_early_answer_keeps_its_later_part() {
    let mut bench = Bench::new(config());
    bench.admit(1, &[1], &[], 9);
    let (ticket, _, _, route) = bench.run();
    assert!(route.is_empty());
    bench.done(ticket, &[0, 5, 6], &[RowResult::Token(2)]);
    let (ticket, _, _, route) = bench.run();
    assert_eq!(route, [0, 5, 6]);
    // Replica 1 took the place of the dead one, and answered by itself that it lacks the state.
    bench.done(ticket, &[1], &[MISSING]);
    let (ticket, meta, tokens, route) = bench.run();
    assert_eq!((route, tokens), (vec![1, 5, 6], vec![1, 2]));
    assert_eq!((meta.rows[0].row.context, meta.rows[0].trim), (0, Some(Trim { stage: 1, keep: 1 })));
    bench.failed(ticket, ErrorCode::Internal);
    let (_, meta, _, route) = bench.run();
    assert_eq!((route, meta.rows[0].trim), (vec![1, 5, 6], None), "after a failure nothing is taken as held");
    bench.handle(ScheduleInput::Cancel(request(1)));
    bench.failed(Ticket(4), ErrorCode::Cancelled);
    let routes = bench.outputs.iter().find_map(|output| match output {
        ScheduleOutput::Release { routes, .. } => Some(routes.clone()),
        _ => None,
    });
    assert_eq!(routes, Some(vec![vec![0, 5, 6], vec![1, 5, 6]]), "it is released wherever it was");
}

#[test]
fn what_is_lost_by_plan_takes_nothing_from_the_recovery_budget() {
    let mut bench = Bench::new(ScheduleConfig { recovery_budget: 1, ..config() });
    bench.admit(1, &[1], &[], 9);
    for _ in 0..20 {
        let (ticket, ..) = bench.run();
        bench.done(ticket, &[0], &[RowResult::Missing { stage: 1, held: 0, planned: true }]);
    }
    let (ticket, ..) = bench.run();
    bench.done(ticket, &[0], &[MISSING]);
    assert_eq!(bench.end(1), None);
    let (ticket, ..) = bench.run();
    bench.done(ticket, &[0], &[MISSING]);
    assert_eq!(bench.code(1), ErrorCode::RecoveryExhausted);
}

#[test]
fn beyond_its_recovery_budget_a_request_ends_with_a_clear_error() {
    let mut bench = Bench::new(config());
    bench.admit(1, &[1], &[], 9);
    let (ticket, ..) = bench.run();
    bench.done(ticket, &[0], &[RowResult::Token(2)]);
    for round in 0..8 {
        let (ticket, ..) = bench.run();
        match round % 2 {
            0 => bench.done(ticket, &[0], &[MISSING]),
            _ => bench.failed(ticket, ErrorCode::Application),
        }
        assert_eq!(bench.end(1), None, "round {round}");
    }
    let (ticket, ..) = bench.run();
    bench.done(ticket, &[0], &[MISSING]);
    let error = bench.end(1).unwrap().unwrap_err();
    assert_eq!(error.code, ErrorCode::RecoveryExhausted);
    assert!(error.message.contains("8 times") && error.message.contains("stage 1"), "{}", error.message);
    assert_eq!(bench.scheduler.requests(), 0);
}

/// Stages that do not fit each other refuse every step: computing the state anew would not help.
#[test]
fn what_no_stage_would_begin_ends_at_once_when_it_is_alone() {
    let mut bench = Bench::new(ScheduleConfig { k: 1, ..config() });
    let refused = || StepError::new(ErrorCode::Application, Outcome::NotStarted, "stage 1 holds layers 3..4");
    (1..=2).for_each(|number| bench.admit(number, &[1], &[], 9));
    let mut steps = 0;
    while bench.scheduler.requests() > 0 {
        let (ticket, ..) = bench.run();
        bench.handle(ScheduleInput::StepDone { ticket, route: Vec::new(), result: Err(refused()) });
        steps += 1;
    }
    // Each alone at the latest in its second step, in case it was the other that was refused.
    assert!(steps <= 3, "{steps}");
    for number in 1..=2 {
        let error = bench.end(number).unwrap().unwrap_err();
        assert_eq!((error.code, error.outcome), (ErrorCode::Application, Outcome::NotStarted));
        assert!(error.message.contains("layers 3..4"), "{}", error.message);
    }
}

#[test]
fn a_request_that_always_fails_the_engine_takes_no_other_along() {
    let mut bench = Bench::new(ScheduleConfig { k: 1, ..config() });
    (0..4).for_each(|number| bench.admit(number, &[number as u32], &[], 30));
    let mut steps = 0;
    while bench.scheduler.requests() > 0 {
        steps += 1;
        assert!(steps < 1000, "every request ends");
        let (ticket, meta, tokens, _) = bench.run();
        // Request 3 is poison.
        if meta.rows.iter().any(|row| row.row.request == request(3)) {
            bench.failed(ticket, ErrorCode::Internal);
        } else {
            let results: Vec<RowResult> = tokens.iter().map(|_| RowResult::Token(100)).collect();
            bench.done(ticket, &[], &results[..meta.rows.len()]);
        }
    }
    assert_eq!(bench.code(3), ErrorCode::RecoveryExhausted);
    (0..3).for_each(|number| assert_eq!(bench.end(number), Some(Ok(Finish::Length)), "request {number}"));
}

#[test]
fn a_recovery_goes_first_and_a_suspect_shares_no_step_meanwhile() {
    let mut bench = Bench::new(ScheduleConfig { k: 2, ..config() });
    (0..4).for_each(|number| bench.admit(number, &[1], &[], 9));
    let [(first, ..), (second, ..)] = bench.runs().try_into().unwrap();
    bench.done(first, &[], &[RowResult::Token(1)]);
    let (shared, meta, ..) = bench.run();
    assert_eq!(meta.rows.len(), 2);
    bench.failed(shared, ErrorCode::Internal);
    let (_, meta, ..) = bench.run();
    assert_eq!(meta.rows.len(), 1, "one of the two suspects, alone; the other waits");
    bench.done(second, &[], &[MISSING]);
    let (_, meta, ..) = bench.run();
    let requests: Vec<_> = meta.rows.iter().map(|row| row.row.request).collect();
    assert_eq!(requests, [request(1), request(0)], "not with the other suspect between them");
}

#[test]
fn a_step_that_no_replica_takes_or_no_lane_carries_ends_its_requests() {
    let mut bench = Bench::new(ScheduleConfig { k: 1, ..config() });
    (0..3).for_each(|number| bench.admit(number, &[1], &[], 9));
    let (ticket, ..) = bench.run();
    bench.failed(ticket, ErrorCode::Unavailable);
    assert_eq!(bench.code(0), ErrorCode::Unavailable);
    let (ticket, meta, ..) = bench.run();
    assert_eq!(meta.rows.len(), 2);
    // Together they may be too large: each is tried alone.
    bench.failed(ticket, ErrorCode::TooLarge);
    for _ in 0..2 {
        let (ticket, meta, ..) = bench.run();
        assert_eq!(meta.rows.len(), 1);
        bench.failed(ticket, ErrorCode::TooLarge);
    }
    assert_eq!((bench.code(1), bench.code(2)), (ErrorCode::TooLarge, ErrorCode::TooLarge));
}

#[test]
fn an_answer_that_fits_no_row_is_a_failure_and_never_a_token() {
    let answers: [&[RowResult]; 4] =
        [&[], &[RowResult::Token(1); 2], &[RowResult::Nothing], &[RowResult::Token(1)]];
    for (at, answer) in answers.into_iter().enumerate() {
        // The last one is a token for a chunk that asked for none.
        let mut bench = Bench::new(ScheduleConfig { tokens: if at == 3 { 1 } else { 16 }, ..config() });
        bench.admit(1, &[5, 6], &[], 9);
        let (ticket, ..) = bench.run();
        bench.done(ticket, &[], answer);
        assert!(!bench.outputs.iter().any(|output| matches!(output, ScheduleOutput::Emit { .. })));
        let (_, meta, ..) = bench.run();
        assert_eq!(meta.rows[0].row.context, 0);
    }
}

#[test]
fn a_request_that_another_stage_0_took_over_ends_here_without_ending_there() {
    let mut bench = Bench::new(config());
    bench.admit(1, &[1], &[], 9);
    let (ticket, ..) = bench.run();
    bench.done(ticket, &[0], &[RowResult::Superseded]);
    // The code with which a submitter goes on, instead of taking it for the request's end.
    assert_eq!(bench.code(1), ErrorCode::Draining);
    assert!(bench.runs().is_empty());
}

#[test]
fn a_cancel_ends_the_request_at_once_and_stops_a_step_that_nobody_wants_p12() {
    let mut bench = Bench::new(ScheduleConfig { k: 1, ..config() });
    (0..4).for_each(|number| bench.admit(number, &[1], &[], 9));
    let (first, ..) = bench.run();
    bench.done(first, &[0], &[RowResult::Token(1)]);
    let (ticket, meta, ..) = bench.run();
    assert_eq!(meta.rows.len(), 3);
    let aborts = |bench: &Bench| {
        let abort = |output: &&ScheduleOutput| matches!(output, ScheduleOutput::Abort(_));
        bench.outputs.iter().filter(abort).count()
    };
    for (number, aborted) in [(0, 0), (1, 0), (2, 0), (3, 1)] {
        bench.handle(ScheduleInput::Cancel(request(number)));
        assert_eq!(bench.code(number), ErrorCode::Cancelled);
        assert_eq!(aborts(&bench), aborted, "after request {number}");
        bench.handle(ScheduleInput::Cancel(request(number)));
        assert_eq!(bench.end(number), None, "it ends once");
    }
    assert_eq!(bench.scheduler.requests(), 3, "their state is kept until the step is over");
    bench.done(ticket, &[0], &[RowResult::Token(2); 3]);
    assert_eq!(bench.scheduler.requests(), 0);
    assert!(bench.runs().is_empty());
    let released = |output: &&ScheduleOutput| matches!(output, ScheduleOutput::Release { .. });
    assert_eq!(bench.outputs.iter().filter(released).count(), 4);
}

#[test]
fn a_request_that_comes_back_after_its_cancel_waits_for_its_old_step() {
    let mut bench = Bench::new(config());
    bench.admit(1, &[1], &[], 9);
    let (ticket, ..) = bench.run();
    bench.admit(1, &[1], &[], 9);
    assert!(matches!(bench.outputs.pop(), Some(ScheduleOutput::Duplicate(id)) if id == request(1)));
    bench.handle(ScheduleInput::Cancel(request(1)));
    assert_eq!(bench.code(1), ErrorCode::Cancelled);
    bench.admit(1, &[1], &[4], 9);
    assert!(bench.runs().is_empty(), "it would be in two unfinished steps");
    bench.done(ticket, &[0], &[RowResult::Token(3)]);
    let (_, _, tokens, _) = bench.run();
    assert_eq!(tokens, [1, 4]);
    assert_eq!(bench.end(1), None);
    bench.handle(ScheduleInput::Cancel(request(1)));
    bench.admit(1, &[1], &[4], 9);
    assert_eq!(bench.code(1), ErrorCode::Cancelled);
    bench.handle(ScheduleInput::Cancel(request(1)));
    assert_eq!(bench.code(1), ErrorCode::Cancelled, "each admission ends once");
}
