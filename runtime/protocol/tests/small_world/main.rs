//! Exhaustive search of small worlds: every interleaving of deliveries, executions, deaths, losses and cancels that
//! a budget allows, from one origin to the replicas of one group. At each state P-1, P-2 and P-4 to P-8 are checked;
//! from each state in which only time can pass, time passes, and every step must end (P-1).

mod world;

use std::collections::HashSet;
use std::collections::hash_map::DefaultHasher;
use std::fmt::Write;
use std::hash::Hasher;

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
    let mut open = vec![start];
    while let Some(world) = open.pop() {
        let acts = world.acts();
        if acts.is_empty() {
            settle(world);
            continue;
        }
        for act in acts {
            let mut next = world.clone();
            next.apply(act, false);
            if seen.insert(print(&next)) {
                open.push(next);
            }
        }
    }
    println!("{name}: {} states", seen.len());
    seen.len()
}

/// Nothing is on its way any more: with time, every step ends (P-1).
fn settle(mut world: World) {
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
fn a_cancel_at_any_moment_ends_its_step_once_and_harms_no_other() {
    let budget = Budget { submits: 3, cancels: 1, crashes: 1, ..Budget::default() };
    explore("cancel", World::new(2, 2, false, budget));
    let budget = Budget { submits: 3, cancels: 2, ..Budget::default() };
    explore("two cancels, payloads in slots", World::new(1, 2, true, budget));
}

#[test]
fn questions_asked_too_early_change_nothing() {
    let budget = Budget { submits: 3, early_ticks: 2, crashes: 1, ..Budget::default() };
    explore("early questions", World::new(2, 1, false, budget));
}
