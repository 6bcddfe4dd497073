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
use std::rc::Rc;

use world::{Act, Budget, World};

/// More rounds of time than anything needs to end.
const ROUNDS: usize = 400;

/// How a world came about: the last act, and those before it.
type Story = Option<Rc<(Act, Told)>>;

/// The same, as a field of itself.
#[derive(Clone)]
struct Told(Story);

/// Tells worlds apart by what they print.
#[derive(Default)]
struct Seen {
    prints: HashSet<u64>,
    text: String,
}

impl Seen {
    /// Whether nothing like it was seen before.
    fn is_new(&mut self, world: &World) -> bool {
        self.text.clear();
        write!(self.text, "{world:?}").expect("a string takes everything");
        let mut hasher = DefaultHasher::new();
        hasher.write(self.text.as_bytes());
        self.prints.insert(hasher.finish())
    }
}

/// Explores everything that can happen; returns how many states there are.
fn explore(name: &str, budget: Budget) -> usize {
    let start = World::new(budget);
    let mut seen = Seen::default();
    seen.is_new(&start);
    let mut open = vec![(start, None)];
    while let Some((world, story)) = open.pop() {
        let acts = world.acts();
        if acts.is_empty() {
            told(&story, || settle(world));
            continue;
        }
        for act in acts {
            let mut next = world.clone();
            let story = Some(Rc::new((act, Told(story.clone()))));
            told(&story, || next.apply(act, false));
            if seen.is_new(&next) {
                open.push((next, story));
            }
        }
    }
    println!("{name}: {} states", seen.prints.len());
    seen.prints.len()
}

/// Runs `what`, and tells the story that led to it if it fails.
fn told(story: &Story, what: impl FnOnce()) {
    if let Err(failure) = catch_unwind(AssertUnwindSafe(what)) {
        let mut acts = Vec::new();
        let mut at = story;
        while let Some(told) = at {
            acts.push(told.0);
            at = &told.1.0;
        }
        acts.reverse();
        println!("after {acts:#?}");
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
    explore("migration, heartbeats", Budget { submits: 3, heartbeats: true, ..Budget::default() });
}

#[test]
fn a_death_at_any_output_of_anybody_loses_nothing() {
    explore("one death", Budget { submits: 2, crashes: 1, ..Budget::default() });
    explore("two deaths", Budget { submits: 1, crashes: 2, ..Budget::default() });
}

#[test]
fn a_source_that_stops_and_comes_back_is_heard_by_nobody_once_another_holds_the_identity() {
    explore("hang", Budget { submits: 2, hangs: 1, ..Budget::default() });
    explore("hang, death", Budget { submits: 1, hangs: 1, crashes: 1, ..Budget::default() });
    explore("hang, early clock", Budget { submits: 1, hangs: 1, early_ticks: 1, ..Budget::default() });
}

#[test]
fn strangers_repeated_and_late_messages_change_nothing() {
    explore("lie", Budget { submits: 2, lies: 1, ..Budget::default() });
    explore("two lies", Budget { submits: 1, lies: 2, ..Budget::default() });
}

#[test]
fn a_directory_that_forgot_the_target_has_the_source_serve_on() {
    explore("forgets", Budget { submits: 2, forgets: 1, ..Budget::default() });
    explore("forgets, heartbeats", Budget { submits: 1, forgets: 2, heartbeats: true, ..Budget::default() });
    explore("forgets, death", Budget { submits: 1, forgets: 1, crashes: 1, ..Budget::default() });
}

#[test]
fn lost_messages_and_lost_links_leave_nobody_waiting_for_ever() {
    explore("lost messages", Budget { submits: 2, vanishings: 2, ..Budget::default() });
    explore("lost link", Budget { submits: 1, relinks: 1, ..Budget::default() });
    let budget = Budget { submits: 1, relinks: 1, crashes: 1, ..Budget::default() };
    explore("lost link, death", budget);
    let budget = Budget { submits: 1, relinks: 1, forgets: 1, heartbeats: true, ..Budget::default() };
    explore("lost link, forgets", budget);
}

#[test]
fn clocks_that_run_ahead_call_it_off_or_resume_too_early_and_harm_nothing() {
    explore("early clock", Budget { submits: 2, early_ticks: 1, ..Budget::default() });
    explore("early clock, death", Budget { submits: 1, early_ticks: 1, crashes: 1, ..Budget::default() });
}
