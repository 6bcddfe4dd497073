use crate::dependencies::members;
use crate::tree::{files, none, root, text, texts};

/// How many lines an example may have: one idea fits.
const EXAMPLE_LINES_MAX: usize = 149;

/// A page's lines outside of its code blocks, numbered from 1.
fn prose(page: &str) -> Vec<(usize, &str)> {
    let mut in_block = false;
    let lines = page.lines().enumerate().filter(|(_, line)| {
        let fence = line.trim_start().starts_with("```");
        in_block ^= fence;
        !fence && !in_block
    });
    lines.map(|(index, line)| (index + 1, line)).collect()
}

/// Where a line's links lead.
fn links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target)
}

/// What stands between backticks.
pub(crate) fn quoted(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// A heading's anchor, as the usual renderers make it.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|letter| letter.is_alphanumeric() || " -_".contains(*letter));
    kept.collect::<String>().trim().to_lowercase().replace(' ', "-")
}

fn has_anchor(page: &str, wanted: &str) -> bool {
    let headings = prose(page).into_iter().filter(|(_, line)| line.starts_with('#'));
    headings.into_iter().any(|(_, line)| anchor(line.trim_start_matches('#')) == wanted)
}

#[test]
fn links_lead_somewhere() {
    let mut found = Vec::new();
    for (file, page) in texts(".md") {
        let folder = file.rsplit_once('/').map_or("", |(folder, _)| folder);
        for (number, line) in prose(&page) {
            for target in
                links(line).filter(|target| !target.contains("://") && !target.starts_with("mailto:"))
            {
                let (path, wanted) = target.split_once('#').unwrap_or((target, ""));
                let there = if path.is_empty() { root().join(&file) } else { root().join(folder).join(path) };
                let whole = wanted.is_empty()
                    || std::fs::read_to_string(&there).is_ok_and(|page| has_anchor(&page, wanted));
                if !there.exists() || !whole {
                    found.push(format!("{file}:{number}: {target}"));
                }
            }
        }
    }
    none(&found, "these links lead nowhere: they are relative to their own page");
}

#[test]
fn files_that_are_named_exist() {
    let files = files();
    let top: Vec<&str> = files.iter().filter_map(|file| Some(file.split_once('/')?.0)).collect();
    let mut found = Vec::new();
    for (page, text) in texts(".md") {
        for (number, line) in prose(&text) {
            for name in quoted(line) {
                let path = name.trim_end_matches('/');
                let is_plain = path.chars().all(|letter| letter.is_alphanumeric() || "/._-".contains(letter));
                let below_a_folder = path.split_once('/').is_some_and(|(first, _)| top.contains(&first));
                let is_path = below_a_folder || path.ends_with(".rs") || path.ends_with(".md");
                // A page on one package names its files from there.
                let ending = format!("/{path}");
                let exists = root().join(path).exists() || files.iter().any(|file| file.ends_with(&ending));
                if is_plain && is_path && !exists {
                    found.push(format!("{page}:{number}: {name}"));
                }
            }
        }
    }
    none(&found, "there is no such file: correct the name, or tell what took its place");
}

/// The rows of ARCHITECTURE.md's code map: folder and package.
fn code_map(page: &str) -> Vec<(String, String)> {
    let rows = page.lines().skip_while(|line| !line.starts_with("| folder | package |")).skip(2);
    rows.take_while(|line| line.starts_with('|'))
        .filter_map(|row| {
            let mut cells = row.trim_matches('|').split('|');
            let folder = cells.next()?.trim().trim_matches('`').to_owned();
            let package = cells.next()?.trim().split(',').next()?.to_owned();
            Some((folder, package))
        })
        .collect()
}

#[test]
fn the_code_map_is_the_workspace() {
    let map = code_map(&text("ARCHITECTURE.md"));
    assert!(!map.is_empty(), "ARCHITECTURE.md has no table that begins with `| folder | package |`");
    let members = members();
    let unnamed = members.iter().filter(|member| !map.contains(member));
    none(
        &unnamed.map(|(folder, name)| format!("{folder} ({name})")).collect::<Vec<_>>(),
        "give these a row in ARCHITECTURE.md's code map: what it is, and what it knows nothing about",
    );
    let gone = map.iter().filter(|(folder, package)| {
        // A folder with no package holds documents.
        let is_other = package.is_empty() && root().join(folder).is_dir();
        !is_other && !members.contains(&(folder.clone(), package.clone()))
    });
    none(
        &gone.map(|(folder, package)| format!("{folder} ({package})")).collect::<Vec<_>>(),
        "ARCHITECTURE.md's code map names what is no member of the workspace",
    );
}

#[test]
fn each_example_is_short_and_run_by_a_test() {
    let examples = files().into_iter().filter(|file| {
        let name = file.strip_prefix("examples/").and_then(|file| file.strip_suffix(".rs"));
        name.is_some_and(|name| !name.contains('/') && name != "lib")
    });
    let (manifest, runs) = (text("examples/Cargo.toml"), text("examples/tests/run.rs"));
    let mut found = Vec::new();
    for file in examples {
        let path = file.trim_start_matches("examples/");
        let name = path.trim_end_matches(".rs");
        if !manifest.contains(&format!("[[example]]\nname = \"{name}\"\npath = \"{path}\"")) {
            found.push(format!(
                "{file}: declare it in examples/Cargo.toml, as [[example]] with name and path"
            ));
        }
        if !runs.contains(&format!("output(\"{name}\")")) {
            found.push(format!("{file}: run it in examples/tests/run.rs, and look at what it prints"));
        }
        let lines = text(&file).lines().count();
        if lines > EXAMPLE_LINES_MAX {
            found.push(format!("{file}: {lines} lines: show one idea in at most {EXAMPLE_LINES_MAX}"));
        }
    }
    none(&found, "an example shows one idea, and a test shows that it works");
}

/// An issue's number, such as a hash and a 1, standing alone.
fn names_an_issue(line: &str) -> bool {
    line.match_indices('#').any(|(at, _)| {
        let (before, after) = (&line[..at], &line[at + 1..]);
        let digits = after.chars().take_while(char::is_ascii_digit).count();
        let ends = after[digits..].chars().next().is_none_or(|next| !next.is_alphanumeric() && next != '"');
        let stands_alone =
            before.chars().next_back().is_none_or(|last| last.is_whitespace() || "([".contains(last));
        (1..=5).contains(&digits) && ends && stands_alone
    })
}

#[test]
fn the_tree_speaks_of_itself_alone() {
    // Put together here, so that this file has none of them.
    let foreign = [["/wor", "k/"], [".libr", "ary"]].map(|parts| parts.concat());
    let mut found = Vec::new();
    for file in files().iter().filter(|file| *file != "Cargo.lock") {
        // What is no text has no words.
        let Ok(text) = std::fs::read_to_string(root().join(file)) else { continue };
        for (index, line) in text.lines().enumerate() {
            if foreign.iter().any(|word| line.contains(word.as_str())) || names_an_issue(line) {
                found.push(format!("{file}:{}: {}", index + 1, line.trim()));
            }
        }
    }
    none(&found, "paths of one machine and numbers of issues mean nothing to a reader: say the thing itself");
}

#[test]
fn pages_are_read_as_they_are_written() {
    let page = "a [b](c.md#d) `e.rs`\n```sh\n[x](y)\n```\n## Who makes: progress\n";
    assert_eq!(prose(page).iter().map(|(number, _)| *number).collect::<Vec<_>>(), [1, 5]);
    assert_eq!(links("a [b](c.md#d), [e](f)").collect::<Vec<_>>(), ["c.md#d", "f"]);
    assert_eq!(quoted("a `b` c `d`").collect::<Vec<_>>(), ["b", "d"]);
    assert!(has_anchor(page, "who-makes-progress") && !has_anchor(page, "who"));
    let map = code_map(
        "| folder | package | x |\n| --- | --- | --- |\n| `a/b` | c, library `d` | e |\n| `docs` | | f |\n\n",
    );
    assert_eq!(map, [("a/b".to_owned(), "c".to_owned()), ("docs".to_owned(), String::new())]);
    let number = |n: u32| format!("see {}{n}", '#');
    assert!(names_an_issue(&number(1)) && names_an_issue(&format!("({}12)", '#')));
    assert!(!names_an_issue("#[test]") && !names_an_issue("r#\"1\"#") && !names_an_issue("a.md#1"));
}
