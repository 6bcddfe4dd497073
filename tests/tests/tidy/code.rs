use crate::source::{Line, Source, words};
use crate::tree::{files, none, root, sources, text, texts};

/// The folders whose business is what the compiler can't check.
const UNSAFE: [&str; 6] = [
    "engine-bridge/cuda/",
    "transports/host/",
    "transports/region/",
    "transports/shm/",
    "transports/ucx/",
    "transports/ucx-sys/",
];

/// How many lines a Rust file may have.
const LINES_MAX: usize = 700;

/// Longer files: which, up to where, and why they are one.
const LONG: [(&str, usize, &str); 1] =
    [("runtime/protocol/src/step/sender.rs", 1000, "the whole of a sender's table of steps")];

/// How large a file of the tree may be, in bytes.
const BYTES_MAX: u64 = 1 << 20;

/// Sleeps in tests: where, how many, and which passing of time each is, other than a wait for something.
const SLEEPS: [(&str, usize, &str); 3] = [
    ("runtime/tests/faults_connections/hostile.rs", 1, "the fault itself: a peer that sends a byte a second"),
    ("transports/tests/tcp/hostile.rs", 3, "the fault itself: peers that send slowly"),
    ("transports/tests/tcp/links.rs", 1, "what is shown is that nothing happens meanwhile"),
];

/// The places where code breaks a rule.
fn places(sources: &[Source], breaks: impl Fn(&Source, &Line) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    for source in sources {
        let broken = source.numbered().filter(|(_, line)| breaks(source, line));
        found.extend(broken.map(|(number, line)| format!("{}: {}", source.at(number), line.code.trim())));
    }
    found
}

fn has_word(line: &Line, wanted: &str) -> bool {
    words(&line.code).any(|word| word == wanted)
}

fn unwraps(_: &Source, line: &Line) -> bool {
    !line.test && (line.code.contains(".unwrap()") || line.code.contains(".unwrap_err()"))
}

#[test]
fn unwrap_is_for_tests() {
    none(
        &places(&sources(), unwraps),
        "a panic is a bug: return an error, or say with expect() which invariant makes it impossible",
    );
}

fn ignores_a_test(_: &Source, line: &Line) -> bool {
    line.code.split("#[").skip(1).any(|attribute| words(attribute).any(|word| word == "ignore"))
}

#[test]
fn every_test_runs() {
    none(
        &places(&sources(), ignores_a_test),
        "a test that needs what is absent prints `skipped: …` and why; it is never ignored",
    );
}

/// Words that promise a change instead of making it. They are put together here, so that this file has none.
fn promises() -> [String; 4] {
    [["TO", "DO"], ["FIX", "ME"], ["to", "do!"], ["unimple", "mented!"]].map(|parts| parts.concat())
}

#[test]
fn nothing_is_left_for_later() {
    let mut found = Vec::new();
    for ending in [".rs", ".md", ".toml", ".ci/run"] {
        for (file, text) in texts(ending) {
            let lines = text.lines().enumerate();
            let promising =
                lines.filter(|(_, line)| promises().iter().any(|word| line.contains(word.as_str())));
            found.extend(promising.map(|(index, line)| format!("{file}:{}: {}", index + 1, line.trim())));
        }
    }
    none(&found, "do it now, or leave it out: what falls short is said in README.md or ARCHITECTURE.md");
}

/// The sleeps in a file's tests, but for those between two looks at a condition: whoever waits for one does it in a
/// function `until…`, which has a deadline.
fn sleeps(source: &Source) -> Vec<String> {
    let (mut function, mut found) = ("", Vec::new());
    for (number, line) in source.numbered() {
        let mut words = words(&line.code).skip_while(|word| *word != "fn").skip(1);
        function = words.next().unwrap_or(function);
        let calls_one = ["sleep(", "sleep_until(", "sleep_ms("].iter().any(|call| line.code.contains(call));
        if line.test && calls_one && !function.starts_with("until") {
            found.push(format!("{}: {}", source.at(number), line.code.trim()));
        }
    }
    found
}

#[test]
fn tests_wait_for_conditions_and_not_for_time() {
    let slept: Vec<(String, Vec<String>)> =
        sources().iter().map(|source| (source.path.clone(), sleeps(source))).collect();
    let allowed =
        |path: &str| SLEEPS.iter().find(|(file, ..)| *file == path).map_or(0, |(_, count, _)| *count);
    let found: Vec<String> =
        slept.iter().filter(|(path, at)| at.len() > allowed(path)).flat_map(|(_, at)| at.clone()).collect();
    none(
        &found,
        "wait for the condition in a function `until…` with a deadline, or for an event, and not for time; a sleep \
         that is the fault itself goes into SLEEPS with its reason",
    );
    let has = |file: &str| slept.iter().find(|(path, _)| path == file).map_or(0, |(_, at)| at.len());
    let stale = SLEEPS.iter().filter(|(file, count, _)| has(file) < *count);
    none(
        &stale.map(|(file, ..)| (*file).to_owned()).collect::<Vec<_>>(),
        "lower the counts in SLEEPS for these",
    );
}

#[test]
fn files_are_short() {
    let lines = |file: &str| text(file).lines().count();
    let limit =
        |file: &str| LONG.iter().find(|(long, ..)| *long == file).map_or(LINES_MAX, |(_, most, _)| *most);
    let long: Vec<String> = files()
        .iter()
        .filter(|file| file.ends_with(".rs"))
        .filter_map(|file| {
            let (has, most) = (lines(file), limit(file));
            (has > most).then(|| format!("{file}: {has} lines of at most {most}"))
        })
        .collect();
    none(&long, "give each main type a file of its own, or name the file in LONG with its reason");
    let short = LONG.iter().filter(|(file, ..)| !root().join(file).is_file() || lines(file) <= LINES_MAX);
    none(
        &short.map(|(file, ..)| (*file).to_owned()).collect::<Vec<_>>(),
        "take out of LONG what is short now",
    );
}

#[test]
fn files_are_small() {
    let size = |file: &String| std::fs::metadata(root().join(file)).map_or(0, |data| data.len());
    let large = files().into_iter().filter(|file| size(file) > BYTES_MAX);
    none(
        &large.collect::<Vec<_>>(),
        "nothing over 1 MiB belongs into the tree: fetch it, or make it from a seed",
    );
}

fn has_an_empty_name(_: &Source, line: &Line) -> bool {
    let mut before = "";
    words(&line.code).any(|word| {
        let declares = ["struct", "enum", "trait", "type", "union"].contains(&before);
        before = word;
        declares
            && ["Manager", "Helper", "Helpers", "Util", "Utils"].iter().any(|empty| word.ends_with(empty))
    })
}

#[test]
fn names_say_what_a_thing_is() {
    let mut found = places(&sources(), has_an_empty_name);
    let empty = ["util.rs", "utils.rs", "helper.rs", "helpers.rs", "misc.rs"];
    found.extend(files().into_iter().filter(|file| {
        let name = file.rsplit('/').next();
        name.is_some_and(|name| empty.contains(&name))
    }));
    none(&found, "name it after what it does: the glossary in ARCHITECTURE.md has the field's terms");
}

fn serialises_on_its_own(source: &Source, line: &Line) -> bool {
    source.path != "runtime/protocol/src/wire/codec.rs" && has_word(line, "bincode")
}

#[test]
fn one_file_names_the_serialiser() {
    none(
        &places(&sources(), serialises_on_its_own),
        "go through connex_protocol::wire: only its codec.rs knows how control messages are written",
    );
}

fn is_impure(source: &Source, line: &Line) -> bool {
    let of_protocol = source.path.starts_with("runtime/protocol/src/") && !line.test;
    let foreign = ["std", "rand", "tokio", "SystemTime"].iter().any(|word| has_word(line, word));
    // The protocol's own Instant has no `now`; one that is imported has.
    of_protocol && (foreign || line.code.contains("Instant::now"))
}

#[test]
fn the_protocol_reads_no_clock_and_draws_no_numbers() {
    none(
        &places(&sources(), is_impure),
        "pass `now` and every random number in: a machine's history must be replayable (core and alloc are enough)",
    );
    assert!(
        text("runtime/protocol/src/lib.rs").contains("#![no_std]"),
        "connex-protocol is no_std: put the attribute back"
    );
}

fn is_isolated(path: &str) -> bool {
    UNSAFE.iter().any(|folder| path.starts_with(folder))
}

fn is_unsafe_elsewhere(source: &Source, line: &Line) -> bool {
    has_word(line, "unsafe") && !is_isolated(&source.path)
}

#[test]
fn unsafe_code_is_isolated() {
    none(
        &places(&sources(), is_unsafe_elsewhere),
        &format!("put it behind a safe interface in one of {}", UNSAFE.join(", ")),
    );
    let root_manifest = text("Cargo.toml");
    assert!(
        root_manifest.contains("unsafe_code = \"forbid\""),
        "Cargo.toml: forbid unsafe_code for the workspace"
    );
    let lax = texts("Cargo.toml").into_iter().filter(|(path, text)| {
        path.contains('/') && !is_isolated(path) && !text.contains("[lints]\nworkspace = true")
    });
    none(
        &lax.map(|(path, _)| path).collect::<Vec<_>>(),
        "add `[lints]` with `workspace = true`, so that the workspace's lints hold there",
    );
}

/// Unsafe blocks and impls with no SAFETY line in front of them.
fn unexplained(source: &Source) -> Vec<String> {
    let opens = |line: &Line| {
        let after = line.code.split_once("unsafe").map_or("", |(_, after)| after.trim_start());
        has_word(line, "unsafe") && (after.starts_with('{') || after.starts_with("impl") || after.is_empty())
    };
    let explained = |number: usize| {
        let lines = &source.lines[..number];
        let here = lines.iter().rev().take(1).chain(
            // The comment that stands above it, over attributes and the beginning of a statement.
            lines
                .iter()
                .rev()
                .skip(1)
                .take_while(|line| !line.code.contains(';') && !line.code.contains('}')),
        );
        here.take(12).any(|line| line.comment.contains("SAFETY"))
    };
    let bare = source.numbered().filter(|(number, line)| opens(line) && !explained(*number));
    bare.map(|(number, _)| source.at(number)).collect()
}

#[test]
fn every_unsafe_block_says_why_it_is_sound() {
    let found: Vec<String> = sources().iter().flat_map(unexplained).collect();
    none(&found, "write a SAFETY line above it: which rule it might break, and what keeps it from doing so");
}

#[test]
fn each_rule_finds_what_breaks_it() {
    let finds = |path: &str, text: &str, rule: fn(&Source, &Line) -> bool| {
        places(&[Source::read(path, text)], rule).len()
    };
    assert_eq!(finds("a/src/x.rs", "fn f() { g().unwrap(); }", unwraps), 1);
    assert_eq!(finds("a/src/x.rs", "// .unwrap()\nlet s = \".unwrap()\";", unwraps), 0);
    assert_eq!(finds("a/tests/x.rs", "fn f() { g().unwrap(); }", unwraps), 0);
    assert_eq!(finds("a/src/x.rs", "#[test]\n#[ignore = \"slow\"]\nfn f() {}", ignores_a_test), 1);
    assert_eq!(finds("a/src/x.rs", "let ignore = b[ignore];", ignores_a_test), 0);
    let slept = |path: &str| {
        let text = "fn until() {\n thread::sleep(A);\n}\nfn f() {\n time::sleep(A).await;\n sleep(B);\n}";
        sleeps(&Source::read(path, text)).len()
    };
    assert_eq!((slept("a/tests/x.rs"), slept("a/src/x.rs")), (2, 0));
    assert_eq!(finds("a/src/x.rs", "pub struct LeaseManager;\nlet x: Manager;", has_an_empty_name), 1);
    assert_eq!(finds("a/src/x.rs", "use bincode::config;", serialises_on_its_own), 1);
    assert_eq!(finds("runtime/protocol/src/wire/codec.rs", "use bincode::config;", serialises_on_its_own), 0);
    assert_eq!(finds("runtime/protocol/src/x.rs", "use std::time::Instant;\nInstant::now();", is_impure), 2);
    assert_eq!(finds("runtime/protocol/src/x.rs", "use crate::Instant;", is_impure), 0);
    assert_eq!(finds("actors/src/x.rs", "unsafe { f() }", is_unsafe_elsewhere), 1);
    assert_eq!(finds("transports/shm/src/x.rs", "unsafe { f() }", is_unsafe_elsewhere), 0);
    let explained =
        "// SAFETY: it is valid.\n#[allow(x)]\nlet a =\n    unsafe { f() };\nlet b = unsafe { f() };";
    assert_eq!(unexplained(&Source::read("x.rs", explained)), ["x.rs:5"]);
}
