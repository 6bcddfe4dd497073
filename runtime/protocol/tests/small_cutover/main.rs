//! Exhaustive search of small worlds: every interleaving of a migration's messages with the steps under way, deaths
//! of the source and of the target, losses, and clocks that run ahead. In each state one life at most serves, under
//! the epoch that it holds; nothing runs twice in one life, nothing runs at the source after it gave the identity up,
//! and from each state in which only time can pass every step ends and the identity reaches its target.

mod world;

use std::collections::HashSet;
use std::collections::hash_map::DefaultHasher;
use std::fmt::Write;
use std::hash::Hasher;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use world::{Act, Budget, World};

/// More rounds of time than anything needs to end.
const ROUNDS: usize = 400;

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

/// Explores everything that can happen; returns how many states there are.
fn explore(name: &str, budget: Budget) -> usize {
    let start = World::new(budget);
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

/// Nothing is on its way any more: time passes, and all ends well.
fn settle(mut world: World) {
    for _ in 0..ROUNDS {
        if world.is_settled() {
            return;
        }
        let next = world.acts().first().copied().or_else(|| world.earliest());
        match next {
            Some(act) => world.apply(act, true),
            None => break,
        }
    }
    assert!(world.is_settled(), "it never ends: {world:#?}");
}

#[test]
fn a_migration_under_load_loses_repeats_and_reorders_nothing() {
    let states = explore("migration", Budget { submits: 4, ..Budget::default() });
    assert!(states > 10_000, "{states}");
}

#[test]
fn a_death_of_the_source_or_the_target_at_any_moment_loses_nothing() {
    explore("one death", Budget { submits: 2, crashes: 1, ..Budget::default() });
    explore("two deaths", Budget { submits: 1, crashes: 2, ..Budget::default() });
}

#[test]
fn lost_messages_and_lost_links_leave_nobody_waiting_for_ever() {
    explore("lost messages", Budget { submits: 2, vanishings: 2, ..Budget::default() });
    explore("lost link", Budget { submits: 1, relinks: 1, ..Budget::default() });
    let budget = Budget { submits: 1, relinks: 1, crashes: 1, ..Budget::default() };
    explore("lost link, death", budget);
}

#[test]
fn clocks_that_run_ahead_call_it_off_or_resume_too_early_and_harm_nothing() {
    explore("early clock", Budget { submits: 2, early_ticks: 1, ..Budget::default() });
    explore("early clock, death", Budget { submits: 1, early_ticks: 1, crashes: 1, ..Budget::default() });
}
