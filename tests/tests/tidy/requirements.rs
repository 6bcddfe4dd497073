use std::collections::BTreeSet;

use crate::source::Source;
use crate::tree::{none, sources, text, texts};

/// Numbers after these letters in a test's name are percentiles.
const PERCENTILES: [u32; 5] = [50, 90, 95, 99, 999];

/// The numbers that a text cites as `P-7`. A span such as `P-1…P-12` cites nothing in particular.
fn cited(text: &str) -> BTreeSet<u32> {
    let mut numbers = BTreeSet::new();
    for (at, _) in text.match_indices("P-") {
        let (before, after) = (&text[..at], &text[at + 2..]);
        let digits: String = after.chars().take_while(char::is_ascii_digit).collect();
        let spans = before.ends_with('…') || after[digits.len()..].starts_with('…');
        if let (Ok(number), false, false) = (digits.parse(), before.ends_with(char::is_alphanumeric), spans) {
            numbers.insert(number);
        }
    }
    numbers
}

/// The numbers in the names of a line's functions, as in `fn a_bad_frame_ends_one_link_p10()`.
fn named(code: &str) -> BTreeSet<u32> {
    let Some((_, name)) = code.split_once("fn ") else { return BTreeSet::new() };
    let name = name.split(['(', '<']).next().unwrap_or(name);
    let numbers = name.split('_').filter_map(|word| word.strip_prefix('p')?.parse().ok());
    numbers.filter(|number| !PERCENTILES.contains(number)).collect()
}

/// What PROTOCOL.md promises, by number.
fn promised() -> BTreeSet<u32> {
    let page = text("PROTOCOL.md");
    let promises =
        page.lines().filter_map(|line| line.strip_prefix("- **P-")?.split_once("**")?.0.parse().ok());
    promises.collect()
}

/// The numbers that code cites, or that tests do.
fn cited_by(sources: &[Source], tests: bool) -> BTreeSet<u32> {
    let lines = sources.iter().flat_map(|source| &source.lines).filter(|line| line.test == tests);
    lines.flat_map(|line| cited(&line.text).into_iter().chain(named(&line.code))).collect()
}

fn as_text(numbers: impl Iterator<Item = u32>) -> Vec<String> {
    numbers.map(|number| format!("P-{number}")).collect()
}

#[test]
fn the_promises_are_numbered_without_a_gap() {
    let promised = promised();
    assert!(promised.len() >= 12, "PROTOCOL.md lost promises: it has only {promised:?}");
    assert_eq!(
        promised,
        (1..=promised.len() as u32).collect(),
        "PROTOCOL.md: number the promises from 1, with no gap"
    );
}

#[test]
fn every_promise_is_kept_by_code_that_cites_it() {
    let cited = cited_by(&sources(), false);
    let missing = promised().into_iter().filter(|number| !cited.contains(number));
    none(&as_text(missing), "cite these requirements where code keeps them, in a comment such as `(P-7)`");
}

#[test]
fn every_promise_is_shown_by_a_test_that_cites_it() {
    let cited = cited_by(&sources(), true);
    let missing = promised().into_iter().filter(|number| !cited.contains(number));
    none(
        &as_text(missing),
        "write a test that shows it, and cite the requirement there: in a comment (`P-7: …`) or in its name (`…_p7`)",
    );
}

#[test]
fn no_citation_is_of_a_promise_that_does_not_exist() {
    let promised = promised();
    let mut found = Vec::new();
    for source in sources() {
        for (number, line) in source.numbered() {
            let unknown = cited(&line.text).into_iter().chain(named(&line.code));
            found.extend(
                unknown.filter(|p| !promised.contains(p)).map(|p| format!("{}: P-{p}", source.at(number))),
            );
        }
    }
    for (file, page) in texts(".md") {
        found.extend(cited(&page).difference(&promised).map(|p| format!("{file}: P-{p}")));
    }
    none(&found, "PROTOCOL.md has no such requirement: correct the number, or write the requirement down");
}

#[test]
fn citations_are_read_as_they_are_written() {
    assert_eq!(cited("keeps P-2 and (P-12), not HTTP-3, nor P-1…P-9"), BTreeSet::from([2, 12]));
    assert_eq!(named("    async fn a_step_ends_once_p1() {"), BTreeSet::from([1]));
    assert_eq!(named("fn the_p99_of_a_p2p_link("), BTreeSet::new());
    let source = Source::read("a/src/x.rs", "// P-3\nfn f() {}\n#[cfg(test)]\nmod tests {\n    // P-4\n}");
    let sources = [source];
    assert_eq!((cited_by(&sources, false), cited_by(&sources, true)), ([3].into(), [4].into()));
}
