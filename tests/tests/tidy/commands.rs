use std::collections::{BTreeMap, BTreeSet};

use crate::documents::quoted;
use crate::source::{Source, words};
use crate::tree::{files, none, text, texts};

/// Where the binary's command line is written down.
const ARGS: &str = "runtime/cli/src/args.rs";

/// A part of the command line: one enum of verbs, or one verb's flags.
#[derive(Debug, Default)]
struct Part {
    /// What follows it as a word, and the part that this leads to.
    verbs: BTreeMap<String, Option<String>>,
    flags: BTreeSet<String>,
    /// The part whose verbs follow these flags.
    next: Option<String>,
}

/// The command line as it is declared: its parts by their types' names, from `Verb` on.
struct CommandLine(BTreeMap<String, Part>);

impl CommandLine {
    fn read(text: &str) -> Self {
        let (mut parts, mut name, mut attribute) =
            (BTreeMap::<String, Part>::new(), String::new(), String::new());
        for line in Source::read(ARGS, text).lines {
            let code = line.code.trim();
            let mut at = words(code).skip_while(|word| *word == "pub" || *word == "crate");
            match at.next() {
                _ if code.starts_with("#[") => attribute = code.to_owned(),
                Some("enum" | "struct") => name = at.next().unwrap_or_default().to_owned(),
                Some("impl" | "fn") => name.clear(),
                Some(first) if !name.is_empty() && line.code.starts_with("    ") => {
                    let part = parts.entry(name.clone()).or_default();
                    if first.starts_with(char::is_uppercase) {
                        part.verbs.insert(kebab(first), at.next().map(str::to_owned));
                    } else if attribute.contains("subcommand") {
                        part.next = at.next().map(str::to_owned);
                    } else if words(&attribute).any(|word| word == "long") {
                        part.flags.insert(kebab(first));
                    }
                    attribute.clear();
                }
                _ => {}
            }
        }
        CommandLine(parts)
    }

    /// Every verb, the second words too: `bench step`.
    fn verbs(&self) -> BTreeSet<String> {
        let mut verbs = BTreeSet::new();
        for (verb, arguments) in self.0.get("Verb").into_iter().flat_map(|part| &part.verbs) {
            match self.second(arguments.as_deref()) {
                Some(second) => verbs.extend(second.verbs.keys().map(|second| format!("{verb} {second}"))),
                None => drop(verbs.insert(verb.clone())),
            }
        }
        verbs
    }

    fn second(&self, arguments: Option<&str>) -> Option<&Part> {
        self.0.get(self.0.get(arguments?)?.next.as_deref()?)
    }

    /// What is wrong with a command's words, those after `connex`.
    fn fault(&self, command: &str) -> Option<String> {
        let mut given = command.split(' ').filter(|word| !word.is_empty()).peekable();
        let verb = given.next().filter(|word| !word.starts_with('-'))?;
        let Some(mut arguments) = self.0.get("Verb").and_then(|part| part.verbs.get(verb)) else {
            return Some(format!("there is no verb {verb:?}"));
        };
        if let Some(second) = self.second(arguments.as_deref()) {
            // `connex bench` alone speaks of all of them.
            let named = given.next()?;
            let Some(found) = second.verbs.get(named) else {
                return Some(format!("{verb} has no {named:?}"));
            };
            arguments = found;
        }
        let part = self.0.get(arguments.as_deref()?)?;
        let flags = given.filter_map(|word| word.strip_prefix("--"));
        let mut unknown = flags
            .map(|flag| flag.split(['=', ']', '|']).next().unwrap_or(flag))
            .filter(|flag| !part.flags.contains(*flag) && *flag != "help" && !flag.is_empty());
        unknown.next().map(|flag| format!("{verb} has no --{flag}"))
    }
}

/// `LostState` and `lost_state` as `lost-state`.
fn kebab(name: &str) -> String {
    let mut word = String::new();
    for letter in name.chars() {
        if letter.is_uppercase() && !word.is_empty() {
            word.push('-');
        }
        word.extend(letter.to_lowercase());
    }
    word.replace('_', "-")
}

/// The commands that a page shows, without the program's name: in its prose, in blocks and in tables.
fn shown(page: &str) -> Vec<String> {
    let in_blocks = page.lines().map(|line| line.split(" # ").next().unwrap_or(line));
    let all = page.lines().flat_map(quoted).chain(in_blocks);
    let programs = ["connex ", "cargo run --release -- "];
    all.filter_map(|text| programs.iter().find_map(|program| text.trim().strip_prefix(program)))
        .map(|command| command.trim().to_owned())
        .collect()
}

/// The verbs of README.md's table, with `a b|c` as two.
fn tabled(page: &str) -> BTreeSet<String> {
    let rows = page.lines().skip_while(|line| !line.starts_with("| verb |")).skip(2);
    let cells = rows.take_while(|line| line.starts_with('|')).map(|row| row.replace("\\|", "/"));
    let mut verbs = BTreeSet::new();
    for cell in cells.filter_map(|row| Some(row.trim_start_matches('|').split_once('|')?.0.to_owned())) {
        for verb in quoted(&cell) {
            let (first, rest) = verb.split_once(' ').unwrap_or((verb, ""));
            // What is written large is an argument.
            match rest.split('/').filter(|second| second.starts_with(char::is_lowercase)).collect::<Vec<_>>()
            {
                none if none.is_empty() => drop(verbs.insert(first.to_owned())),
                seconds => verbs.extend(seconds.iter().map(|second| format!("{first} {second}"))),
            }
        }
    }
    verbs
}

#[test]
fn readme_names_every_verb_and_no_other() {
    let (declared, tabled) = (CommandLine::read(&text(ARGS)).verbs(), tabled(&text("README.md")));
    assert!(!declared.is_empty(), "{ARGS} declares no `enum Verb`: tell this test where the verbs are");
    let unknown: Vec<String> = tabled.difference(&declared).cloned().collect();
    none(&unknown, "README.md's table of verbs names what the binary does not have");
    let unnamed: Vec<String> = declared.difference(&tabled).cloned().collect();
    none(&unnamed, "give these a row in README.md's table of verbs");
}

#[test]
fn commands_that_are_shown_exist() {
    let line = CommandLine::read(&text(ARGS));
    let mut commands: Vec<(String, String)> = Vec::new();
    for (file, page) in texts(".md") {
        commands.extend(shown(&page).into_iter().map(|command| (file.clone(), command)));
    }
    for file in files().into_iter().filter(|file| file.starts_with("xtask/src/")) {
        let text = text(&file);
        let measured = text.lines().filter_map(|line| line.split_once("args: \"")?.1.split_once('"'));
        commands.extend(measured.map(|(command, _)| (file.clone(), command.to_owned())));
    }
    assert!(commands.len() > 8, "README.md and xtask show few commands: {commands:?}");
    let faults = commands
        .iter()
        .filter_map(|(file, command)| Some(format!("{file}: `connex {command}`: {}", line.fault(command)?)));
    none(&faults.collect::<Vec<_>>(), &format!("the binary would refuse these ({ARGS})"));
}

#[test]
fn the_command_line_is_read_as_it_is_written() {
    let args = "pub(crate) enum Verb {\n    /// Shows it\n    Demo(DemoArgs),\n    BenchAll(BenchArgs),\n}\npub(crate) struct DemoArgs {\n    #[arg(long, default_value = \"a\")]\n    pub(crate) lease_ttl_ms: u64,\n    #[arg(value_parser = p)]\n    pub(crate) lid: L,\n}\nstruct BenchArgs {\n    #[command(subcommand)]\n    pub(crate) verb: BenchVerb,\n}\nenum BenchVerb {\n    Step(StepArgs),\n}\nstruct StepArgs {\n    #[arg(long)]\n    json: bool,\n}\nfn f() {\n    let json = 1;\n}\n";
    let line = CommandLine::read(args);
    assert_eq!(line.verbs(), ["bench-all step", "demo"].map(str::to_owned).into());
    let fault = |command: &str| line.fault(command).unwrap_or_default();
    assert_eq!(fault("demo --lease-ttl-ms 3"), "");
    assert_eq!(fault("demo --lid x"), "demo has no --lid");
    assert_eq!(fault("bench-all step --json"), "");
    assert_eq!(fault("bench-all leap"), "bench-all has no \"leap\"");
    assert_eq!(fault("stop"), "there is no verb \"stop\"");
    assert_eq!(shown("`connex a --b` x\n    cargo run --release -- demo     # y"), ["a --b", "demo"]);
    let table = "| verb | does |\n| --- | --- |\n| `a`, `b ID` | x |\n| `c d\\|e` | y |\n";
    assert_eq!(tabled(table), ["a", "b", "c d", "c e"].map(str::to_owned).into());
}
