/// A Rust file as the rules read it: line by line, code apart from comments, without what stands in literals.
#[derive(Debug)]
pub(crate) struct Source {
    /// From the workspace's root.
    pub(crate) path: String,
    pub(crate) lines: Vec<Line>,
}

#[derive(Debug, Default)]
pub(crate) struct Line {
    /// Its code; literals are empty.
    pub(crate) code: String,
    pub(crate) comment: String,
    /// All of it, as it is written.
    pub(crate) text: String,
    /// Whether it is compiled for tests only.
    pub(crate) test: bool,
}

impl Source {
    pub(crate) fn read(path: impl Into<String>, text: &str) -> Self {
        let mut source = Source { path: path.into(), lines: split(text) };
        source.mark_test_items();
        // The suites that every backend and every engine must pass are tests that live in libraries.
        let path = format!("/{}", source.path);
        let within = ["/tests/", "/conformance/"].iter().any(|folder| path.contains(folder));
        let named = ["/tests.rs", "_tests.rs", "/conformance.rs"].iter().any(|name| path.ends_with(name));
        if within || named {
            source.is_all_test();
        }
        source
    }

    pub(crate) fn is_all_test(&mut self) {
        self.lines.iter_mut().for_each(|line| line.test = true);
    }

    /// Line numbers, from 1, with their lines.
    pub(crate) fn numbered(&self) -> impl Iterator<Item = (usize, &Line)> {
        self.lines.iter().enumerate().map(|(index, line)| (index + 1, line))
    }

    /// A place for a message.
    pub(crate) fn at(&self, number: usize) -> String {
        format!("{}:{number}", self.path)
    }

    /// The modules in files of their own that are declared for tests only, as paths without their ending.
    pub(crate) fn test_modules(&self) -> Vec<String> {
        let (folder, file) = self.path.rsplit_once('/').unwrap_or(("", &self.path));
        let folder = match file {
            "mod.rs" | "lib.rs" | "main.rs" => folder.to_owned(),
            _ => self.path.trim_end_matches(".rs").to_owned(),
        };
        let declared = self.lines.iter().filter(|line| line.test).filter_map(|line| {
            let (before, name) = line.code.trim().strip_suffix(';')?.rsplit_once("mod ")?;
            (before.is_empty() || before.starts_with("pub")).then(|| format!("{folder}/{}", name.trim()))
        });
        declared.collect()
    }

    /// Whether this file is that module's, or lies below it.
    pub(crate) fn belongs_to(&self, module: &str) -> bool {
        self.path.strip_prefix(module).is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
    }

    /// Marks each item behind a `#[cfg(test)]`, from its attribute to its closing brace.
    fn mark_test_items(&mut self) {
        let mut at = 0;
        while at < self.lines.len() {
            let for_tests = self.lines[at].code.split_once("#[cfg(").is_some_and(|(_, condition)| {
                words(condition).any(|word| word == "test") && words(condition).all(|word| word != "not")
            });
            if !for_tests {
                at += 1;
                continue;
            }
            let end = self.end_of_item(at);
            self.lines[at..=end].iter_mut().for_each(|line| line.test = true);
            at = end + 1;
        }
    }

    /// The last line of the item whose first attribute is on this one.
    fn end_of_item(&self, start: usize) -> usize {
        let mut depth = 0usize;
        for (index, line) in self.lines.iter().enumerate().skip(start) {
            for letter in line.code.chars() {
                match letter {
                    '{' => depth += 1,
                    '}' if depth <= 1 => return index,
                    '}' => depth -= 1,
                    ';' if depth == 0 => return index,
                    _ => {}
                }
            }
        }
        self.lines.len() - 1
    }
}

/// The identifiers and keywords of a piece of code.
pub(crate) fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|letter: char| !letter.is_alphanumeric() && letter != '_').filter(|word| !word.is_empty())
}

/// What a position in a file is a part of.
enum Within {
    Code,
    LineComment,
    /// With how many are open.
    BlockComment(usize),
    /// What ends it, and whether a backslash escapes.
    Literal(String, bool),
}

fn split(text: &str) -> Vec<Line> {
    let letters: Vec<char> = text.chars().collect();
    let (mut lines, mut line, mut within) = (Vec::new(), Line::default(), Within::Code);
    let mut at = 0;
    while at < letters.len() {
        let ahead =
            |word: &str| word.chars().enumerate().all(|(n, letter)| letters.get(at + n) == Some(&letter));
        if letters[at] == '\n' {
            lines.push(std::mem::take(&mut line));
            if matches!(within, Within::LineComment) {
                within = Within::Code;
            }
            at += 1;
            continue;
        }
        let mut taken = 1;
        match &mut within {
            Within::Code if ahead("//") => within = Within::LineComment,
            Within::Code if ahead("/*") => (within, taken) = (Within::BlockComment(1), 2),
            Within::Code => match literal(&letters[at..], line.code.chars().last()) {
                Some((length, end, escapes)) => (within, taken) = (Within::Literal(end, escapes), length),
                None => line.code.push(letters[at]),
            },
            Within::LineComment => line.comment.push(letters[at]),
            Within::BlockComment(open) => match () {
                () if ahead("/*") => (*open, taken) = (*open + 1, 2),
                () if ahead("*/") => {
                    (*open, taken) = (*open - 1, 2);
                    if *open == 0 {
                        within = Within::Code;
                    }
                }
                () => line.comment.push(letters[at]),
            },
            // A line that ends in a backslash is still ended.
            Within::Literal(_, true) if letters[at] == '\\' => taken = 1 + usize::from(!ahead("\\\n")),
            Within::Literal(end, _) if ahead(end) => {
                taken = end.len();
                line.code.push_str("\"\"");
                within = Within::Code;
            }
            Within::Literal(..) => {}
        }
        at += taken;
    }
    lines.push(line);
    for (line, text) in lines.iter_mut().zip(text.lines()) {
        line.text = text.to_owned();
    }
    lines
}

/// The literal that begins here, if one does: how long its beginning is, what ends it, and whether it has escapes.
fn literal(here: &[char], before: Option<char>) -> Option<(usize, String, bool)> {
    let is_word = |letter: char| letter.is_alphanumeric() || letter == '_';
    match here {
        ['"', ..] => Some((1, "\"".to_owned(), true)),
        // A lifetime has no closing quote.
        ['\'', '\\', ..] | ['\'', _, '\'', ..] => Some((1, "'".to_owned(), true)),
        // The `b` or `c` in front of it has been taken as code.
        ['r', rest @ ..] if before.is_none_or(|before| !is_word(before) || "bc".contains(before)) => {
            let hashes = rest.iter().take_while(|letter| **letter == '#').count();
            (rest.get(hashes) == Some(&'"')).then(|| (hashes + 2, format!("\"{}", "#".repeat(hashes)), false))
        }
        _ => None,
    }
}

#[test]
fn comments_and_literals_are_no_code() {
    let text = "let a = \"un//safe \\\" {\"; // why {\nlet b = r#\"\" } \"#; /* x /* y */ z\n*/ let c = ('\\'', '{', b'\"');\nfn d<'a>() {}";
    let source = Source::read("a.rs", text);
    let code: Vec<&str> = source.lines.iter().map(|line| line.code.trim()).collect();
    assert_eq!(
        code,
        ["let a = \"\";", "let b = \"\";", "let c = (\"\", \"\", b\"\");", "fn d<'a>() {}"],
        "{source:?}"
    );
    assert_eq!(source.lines[0].comment, "/ why {");
    assert!(source.lines[2].comment.is_empty());
}

#[test]
fn test_code_is_told_from_the_rest() {
    let text = "fn a() {}\n#[cfg(test)]\nmod tests {\n    fn b() { '}' }\n}\nfn c() {}\n#[cfg(test)]\nmod world;\n#[cfg(feature = \"test\")]\nmod d;";
    let source = Source::read("x/src/step.rs", text);
    let tests: Vec<usize> =
        source.numbered().filter(|(_, line)| line.test).map(|(number, _)| number).collect();
    assert_eq!(tests, [2, 3, 4, 5, 7, 8]);
    assert_eq!(source.test_modules(), ["x/src/step/world"]);
    assert!(Source::read("x/src/step/world/deep.rs", "").belongs_to("x/src/step/world"));
    assert!(Source::read("x/tests/a.rs", "fn a() {}").lines[0].test);
    assert!(!Source::read("x/src/latests.rs", "fn a() {}").lines[0].test);
}
