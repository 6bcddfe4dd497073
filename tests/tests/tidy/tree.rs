use std::path::{Path, PathBuf};
use std::process::Command;

use crate::source::Source;

/// The root of the workspace.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("this package is a folder of the workspace")
        .to_owned()
}

/// What a command at the root prints.
pub(crate) fn printed(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).current_dir(root()).output();
    let output = output.unwrap_or_else(|error| panic!("{program} can't be started ({error}): install it"));
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {}: {}\n{complaint}", args.join(" "), output.status);
    String::from_utf8(output.stdout).expect("it prints UTF-8")
}

/// The files of the tree, by their paths from the root: what git tracks, and what it would take up if it were asked.
pub(crate) fn files() -> Vec<String> {
    let list = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    // A tree that another user unpacked is read all the same.
    let listed = printed("git", &[&["-c", "safe.directory=*"], &list[..]].concat());
    let mut files: Vec<String> = listed.split_terminator('\0').map(str::to_owned).collect();
    files.retain(|file| root().join(file).is_file());
    files.sort();
    files.dedup();
    files
}

/// The files whose names end so, with their text.
pub(crate) fn texts(ending: &str) -> Vec<(String, String)> {
    files()
        .into_iter()
        .filter(|file| file.ends_with(ending))
        .map(|file| (file.clone(), text(&file)))
        .collect()
}

/// The text of one file.
pub(crate) fn text(file: &str) -> String {
    std::fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// Every Rust file, with its test code told from the rest.
pub(crate) fn sources() -> Vec<Source> {
    let mut sources: Vec<Source> =
        texts(".rs").iter().map(|(path, text)| Source::read(path.as_str(), text)).collect();
    let modules: Vec<String> = sources.iter().flat_map(Source::test_modules).collect();
    for source in &mut sources {
        if modules.iter().any(|module| source.belongs_to(module)) {
            source.is_all_test();
        }
    }
    sources
}

/// Fails with all that a rule found, and with what to do about it.
#[track_caller]
pub(crate) fn none(found: &[String], what_to_do: &str) {
    assert!(found.is_empty(), "{what_to_do}\n  {}", found.join("\n  "));
}
