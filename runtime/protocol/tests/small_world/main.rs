//! Exhaustive search of small worlds: every interleaving of deliveries, executions, deaths, losses and cancels that
//! a budget allows, from one origin to the replicas of one group. At each state P-1, P-2 and P-4 to P-8 are checked;
//! from each state in which only time can pass, time passes, and every step must end (P-1).

mod world;

use std::collections::HashSet;
use std::collections::hash_map::DefaultHasher;
use std::fmt::Write;
use std::hash::Hasher;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use world::{Act, Budget, World};

/// More rounds of time than any step needs to end.
const ROUNDS: usize = 200;

struct Print(DefaultHasher);

impl Write for Print {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.0.write(text.as_bytes());
        Ok(())
    }
}

fn print(world: &World) -> u64 {
    let mut print = Print(DefaultHasher::new());
    write!(print, "{world:?}").expect("a hasher takes everything");
    print.0.finish()
}

/// Explores everything that can happen from `start`; returns how many states there are.
fn explore(name: &str, start: World) -> usize {
    let mut seen = HashSet::from([print(&start)]);
    let mut open = vec![(start, Vec::new())];
    while let Some((world, story)) = open.pop() {
        let acts = world.acts();
        if acts.is_empty() {
            told(&story, || settle(world));
            continue;
        }
        for act in acts {
            let (mut next, mut story) = (world.clone(), story.clone());
            story.push(act);
            told(&story, || next.apply(act, false));
            if seen.insert(print(&next)) {
                open.push((next, story));
            }
        }
    }
    println!("{name}: {} states", seen.len());
    seen.len()
}

/// Runs `what`, and tells the story that led to it if it fails.
fn told(story: &[Act], what: impl FnOnce()) {
    if let Err(failure) = catch_unwind(AssertUnwindSafe(what)) {
        println!("after {story:#?}");
        resume_unwind(failure);
    }
}

/// Nothing is on its way any more: every step has ended, or ends with time if only time can help (P-1).
fn settle(mut world: World) {
    assert!(world.is_done() || world.waits_for_time(), "a step waits for nothing: {world:#?}");
    for _ in 0..ROUNDS {
        if world.is_done() {
            return;
        }
        while let Some(act) = world.acts().first() {
            world.apply(*act, true);
        }
        if world.deadline().is_some() {
            world.apply(Act::Tick, true);
        }
    }
    assert!(world.is_done(), "a step never ends (P-1): {world:#?}");
}

#[test]
fn a_handover_with_a_comeback_moves_each_step_once_and_ends_each_once() {
    let budget = Budget { submits: 4, crashes: 1, comebacks: 1, ..Budget::default() };
    let states = explore("handover, comeback", World::new(2, 2, false, budget));
    assert!(states > 10_000, "{states}");
}

#[test]
fn two_deaths_leave_what_no_replica_can_take_with_an_error_and_nothing_in_silence() {
    let budget = Budget { submits: 3, crashes: 2, comebacks: 1, ..Budget::default() };
    explore("two deaths", World::new(2, 2, false, budget));
    let budget = Budget { submits: 2, crashes: 2, ..Budget::default() };
    explore("nobody left", World::new(2, 2, false, budget));
}

#[test]
fn a_handover_of_steps_whose_payloads_are_being_read_reads_them_elsewhere() {
    let budget = Budget { submits: 3, crashes: 1, comebacks: 1, lost_payloads: 1, ..Budget::default() };
    explore("payloads in slots", World::new(2, 2, true, budget));
}

#[test]
fn a_link_that_is_lost_with_what_was_on_it_costs_no_step_and_no_second_execution() {
    let budget = Budget { submits: 3, relinks: 2, ..Budget::default() };
    explore("lost links", World::new(1, 2, false, budget));
    let budget = Budget { submits: 3, relinks: 1, crashes: 1, comebacks: 1, ..Budget::default() };
    explore("lost link, death", World::new(2, 2, false, budget));
}

#[test]
fn what_vanishes_in_silence_is_asked_for_and_sent_again() {
    let budget = Budget { submits: 2, vanishings: 2, ..Budget::default() };
    explore("vanishings", World::new(1, 2, false, budget));
    let budget = Budget { submits: 2, vanishings: 1, crashes: 1, ..Budget::default() };
    explore("vanishing, death, payloads in slots", World::new(2, 2, true, budget));
}

#[test]
fn a_cancel_at_any_moment_ends_its_step_once_and_harms_no_other() {
    let budget = Budget { submits: 3, cancels: 1, crashes: 1, ..Budget::default() };
    explore("cancel", World::new(2, 2, false, budget));
    let budget = Budget { submits: 3, cancels: 2, ..Budget::default() };
    explore("two cancels, payloads in slots", World::new(1, 2, true, budget));
    let budget = Budget { submits: 3, cancels: 1, relinks: 1, ..Budget::default() };
    explore("cancel, lost link, payloads in slots", World::new(1, 2, true, budget));
}

#[test]
fn questions_asked_too_early_change_nothing() {
    let budget = Budget { submits: 3, early_ticks: 2, crashes: 1, ..Budget::default() };
    explore("early questions", World::new(2, 1, false, budget));
}

/// Draws numbers; the same from the same seed.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % n
    }
}

#[test]
fn long_random_lives_of_larger_worlds_keep_the_same_promises() {
    for seed in 1..=3000 {
        let mut rng = Rng(seed * 0x9e37_79b9_7f4a_7c15);
        let budget = Budget {
            submits: 40,
            crashes: rng.below(6) as u32,
            comebacks: rng.below(6) as u32,
            relinks: rng.below(4) as u32,
            lost_payloads: rng.below(8) as u32,
            vanishings: rng.below(4) as u32,
            cancels: rng.below(8) as u32,
            early_ticks: rng.below(10) as u32,
        };
        let (replicas, k, slots) = (1 + rng.below(4) as u32, 1 + rng.below(6), rng.below(2) == 0);
        let mut world = World::new(replicas, k, slots, budget);
        loop {
            let acts = world.acts();
            let Some(act) = acts.get(rng.below(acts.len().max(1))) else { break };
            world.apply(*act, false);
        }
        settle(world);
    }
}
