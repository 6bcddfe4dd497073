use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use serde_json::Value;

use crate::source::words;
use crate::tree::{none, printed, root, text};

/// The packages from the bottom up: each knows only those on lower levels.
const LEVELS: [(&str, u8); 10] = [
    ("connex-protocol", 0),
    ("connex-transport", 1),
    ("connex-engine", 1),
    ("connex-llama", 2),
    ("connex-actors", 2),
    ("connex-runtime", 3),
    ("connex-cli", 4),
    ("connex-examples", 4),
    ("connex-tests", 5),
    ("xtask", 5),
];

/// The packages with the weight of a model's kernels: whoever embeds the runtime does not get them.
const WEIGHTS: [&str; 1] = ["connex-llama"];

/// What everybody who embeds the runtime builds, in crates, itself included.
const CRATES_MAX: usize = 120;

/// A package of the workspace.
struct Member {
    name: String,
    /// From the workspace's root.
    folder: String,
    manifest: Value,
}

impl Member {
    /// The names of what it depends on, for itself and for its tests.
    fn dependencies(&self) -> impl Iterator<Item = (&str, Kind)> {
        self.manifest["dependencies"].as_array().into_iter().flatten().map(|dependency| {
            let kind = if dependency["kind"] == "dev" { Kind::Tests } else { Kind::Itself };
            (dependency["name"].as_str().expect("a dependency has a name"), kind)
        })
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Itself,
    Tests,
}

static MEMBERS: LazyLock<Vec<Member>> = LazyLock::new(|| {
    let answer = printed(env!("CARGO"), &["metadata", "--no-deps", "--format-version", "1", "--offline"]);
    let metadata: Value = serde_json::from_str(&answer).expect("cargo metadata prints JSON");
    let root = metadata["workspace_root"].as_str().expect("it names the root").to_owned();
    let packages = metadata["packages"].as_array().expect("it names the packages");
    let member = |package: &Value| {
        let path = package["manifest_path"].as_str().expect("a package has a manifest");
        let folder = path.strip_prefix(&root).and_then(|path| path.strip_suffix("Cargo.toml"));
        Member {
            name: package["name"].as_str().expect("a package has a name").to_owned(),
            folder: folder.expect("a member lies below the root").trim_matches('/').to_owned(),
            manifest: package.clone(),
        }
    };
    packages.iter().map(member).collect()
});

/// The folder and the name of every package of the workspace.
pub(crate) fn members() -> Vec<(String, String)> {
    MEMBERS.iter().map(|member| (member.folder.clone(), member.name.clone())).collect()
}

fn level(name: &str) -> Option<u8> {
    LEVELS.iter().find(|(package, _)| *package == name).map(|(_, level)| *level)
}

#[test]
fn every_package_has_its_level() {
    let without = MEMBERS.iter().filter(|member| level(&member.name).is_none());
    none(
        &without.map(|member| member.name.clone()).collect::<Vec<_>>(),
        "say in LEVELS, and in ARCHITECTURE.md's code map, which packages are below",
    );
    let gone = LEVELS.iter().filter(|(name, _)| MEMBERS.iter().all(|member| member.name != *name));
    none(&gone.map(|(name, _)| (*name).to_owned()).collect::<Vec<_>>(), "take out of LEVELS what is gone");
}

#[test]
fn dependencies_point_down() {
    let mut found = Vec::new();
    for member in MEMBERS.iter() {
        for (on, _) in member.dependencies().filter(|(on, _)| *on != member.name) {
            if level(on).is_some_and(|below| Some(below) >= level(&member.name)) {
                found.push(format!("{} depends on {on}", member.name));
            }
        }
    }
    none(
        &found,
        "a package knows only those below it (ARCHITECTURE.md's code map): move the code, or turn the call round",
    );
}

#[test]
fn only_the_binary_links_engines_with_weights() {
    let mut found = Vec::new();
    for member in MEMBERS.iter().filter(|member| member.name != "connex-cli") {
        let heavy = member.dependencies().filter(|(on, _)| WEIGHTS.contains(on));
        found.extend(heavy.map(|(on, _)| format!("{} depends on {on}", member.name)));
    }
    none(&found, "take the engine as a `dyn Engine`: only connex-cli chooses which ones are linked");
}

#[test]
fn the_protocol_knows_no_runtime() {
    let below = crates_below("connex-protocol");
    let forbidden = ["tokio", "ractor", "mio", "futures", "rand", "getrandom", "rustix", "libc", "tracing"];
    let found = forbidden.into_iter().filter(|name| below.contains(*name)).map(str::to_owned);
    none(
        &found.collect::<Vec<_>>(),
        "connex-protocol is pure: tasks, sockets, clocks and chance belong to its drivers",
    );
}

#[test]
fn whoever_embeds_the_runtime_builds_few_crates() {
    let below = crates_below("connex-runtime");
    println!("connex-runtime and what it needs: {} crates", below.len());
    assert!(
        below.len() < CRATES_MAX,
        "connex-runtime needs {} crates, and may need fewer than {CRATES_MAX}: drop a dependency or its features\n{}",
        below.len(),
        below.into_iter().collect::<Vec<_>>().join(" ")
    );
    let other = ["clap", "anyhow", "axum", "hyper", "reqwest", "indicatif"];
    let found = other.into_iter().filter(|name| below.contains(*name)).map(str::to_owned);
    none(
        &found.collect::<Vec<_>>(),
        "the library has no command line and no HTTP: that is connex-cli's business",
    );
}

/// The names of a package and of all that it needs to be built, on this machine, with its default features. Two
/// versions of one crate are two.
fn crates_below(package: &str) -> BTreeSet<String> {
    let tree = printed(
        env!("CARGO"),
        &[
            "tree",
            "--offline",
            "--locked",
            "-p",
            package,
            "-e",
            "normal",
            "--prefix",
            "none",
            "--format",
            "{p}",
        ],
    );
    let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for line in tree.lines() {
        let mut words = line.split(' ');
        if let (Some(name), Some(version)) = (words.next(), words.next()) {
            versions.entry(name).or_default().insert(version);
        }
    }
    let named = versions.into_iter().flat_map(|(name, versions)| {
        let older = versions.iter().skip(1).map(|version| format!("{name} {version}")).collect::<Vec<_>>();
        std::iter::once(name.to_owned()).chain(older)
    });
    named.collect()
}

#[test]
fn no_package_can_be_published() {
    // `publish = false` is an empty list of registries.
    let found = MEMBERS.iter().filter(|member| member.manifest["publish"] != Value::Array(Vec::new()));
    none(
        &found.map(|member| format!("{}/Cargo.toml", member.folder)).collect::<Vec<_>>(),
        "write `publish.workspace = true`: some of these names are other people's at the registry",
    );
}

#[test]
fn every_package_has_the_workspaces_licence_and_says_what_it_is() {
    let lacks = |member: &&Member| {
        member.manifest["license"] != "Apache-2.0" || member.manifest["description"].as_str().is_none()
    };
    let found = MEMBERS.iter().filter(lacks).map(|member| format!("{}/Cargo.toml", member.folder));
    none(&found.collect::<Vec<_>>(), "write `license.workspace = true` and a description");
    let licence = text("LICENSE");
    assert!(
        licence.contains("Apache License") && licence.contains("Version 2.0"),
        "LICENSE has to be the text of the Apache License 2.0"
    );
}

#[test]
fn no_version_is_settled_that_nobody_uses() {
    let manifest = text("Cargo.toml");
    let (_, section) =
        manifest.split_once("[workspace.dependencies]\n").expect("versions are in the root manifest");
    let section = section.split("\n[").next().unwrap_or(section);
    let settled = section.lines().filter_map(|line| Some(line.split_once(" = ")?.0.trim()));
    let manifests: String =
        MEMBERS.iter().map(|member| text(&format!("{}/Cargo.toml", member.folder))).collect();
    let used = |name: &str| {
        let forms = [format!("\n{name}.workspace"), format!("\n{name} = {{ workspace")];
        forms.iter().any(|form| manifests.contains(form.as_str()))
    };
    let unused = settled.filter(|name| !used(name)).map(str::to_owned);
    none(&unused.collect::<Vec<_>>(), "no package uses these: take them out of [workspace.dependencies]");
}

#[test]
fn no_package_declares_what_it_does_not_use() {
    let sources = crate::tree::sources();
    let owner = |path: &str| {
        let owners = MEMBERS.iter().filter(|member| path.starts_with(&format!("{}/", member.folder)));
        owners.max_by_key(|member| member.folder.len()).map(|member| member.name.clone())
    };
    let mut found = Vec::new();
    for member in MEMBERS.iter() {
        let own = sources.iter().filter(|source| owner(&source.path).as_deref() == Some(&member.name));
        let code: Vec<&str> =
            own.flat_map(|source| &source.lines).flat_map(|line| words(&line.text)).collect();
        for dependency in member.manifest["dependencies"].as_array().into_iter().flatten() {
            let name = dependency["rename"].as_str().or(dependency["name"].as_str()).unwrap_or_default();
            // A package that depends on itself turns a feature on for its tests.
            if name != member.name && !code.contains(&name.replace('-', "_").as_str()) {
                found.push(format!("{}/Cargo.toml: {name}", member.folder));
            }
        }
    }
    none(&found, "nothing in these packages names these dependencies: take them out");
}

#[test]
fn every_manifest_belongs_to_the_workspace() {
    let manifests = crate::tree::files();
    let mut found: Vec<String> = manifests.into_iter().filter(|file| file.ends_with("/Cargo.toml")).collect();
    found.retain(|file| MEMBERS.iter().all(|member| format!("{}/Cargo.toml", member.folder) != *file));
    none(&found, &format!("name their folders in {}'s members", root().join("Cargo.toml").display()));
}
