//! Child processes: started from this same binary, heard line by line, and never left behind.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use anyhow::Context;
use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};
use tokio::signal::ctrl_c;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::report::{Line, host_ns};

/// Lines of children that may wait to be heard.
pub(crate) const HEARD_MAX: usize = 1024;

/// What is heard of a child.
#[derive(Debug)]
pub(crate) enum Heard {
    /// It said this.
    Line(Line),
    /// It ended, with this description of how.
    Exited(String),
}

/// A running child process.
#[derive(Clone)]
pub(crate) struct Child {
    pid: u32,
    stdin: Arc<Mutex<Option<std::process::ChildStdin>>>,
}

impl Child {
    /// Starts this binary with these arguments. What it says, and its end, go to `heard` with `tag`; its end is the
    /// last thing heard, and by then it has been reaped. A child that says more than is heard waits.
    pub(crate) fn start<T: Clone + Send + 'static>(
        args: &[String],
        tag: T,
        heard: mpsc::Sender<(T, u64, Heard)>,
    ) -> anyhow::Result<Child> {
        let program = std::env::current_exe().context("this program's own path")?;
        let mut process = Command::new(&program)
            .args(args)
            .args(["--parent", &std::process::id().to_string()])
            // Several stages share the cores: more threads of one would only wait for each other.
            .env("RAYON_NUM_THREADS", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {} {}", program.display(), args.join(" ")))?;
        let stdout = process.stdout.take().expect("it was piped");
        let stdin = process.stdin.take();
        let child = Child { pid: process.id(), stdin: Arc::new(Mutex::new(stdin)) };
        std::thread::Builder::new().name("connex-child".into()).spawn(move || {
            for line in BufReader::new(stdout).lines() {
                let Ok(line) = line else { break };
                // A line that is none of ours is shown as it is.
                match serde_json::from_str::<Line>(&line) {
                    Ok(line) => drop(heard.blocking_send((tag.clone(), host_ns(), Heard::Line(line)))),
                    Err(_) => eprintln!("{line}"),
                }
            }
            let how = match process.wait() {
                Ok(status) => status.to_string(),
                Err(error) => error.to_string(),
            };
            drop(heard.blocking_send((tag, host_ns(), Heard::Exited(how))));
        })?;
        Ok(child)
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Says something to it. A child that is gone hears nothing.
    pub(crate) fn tell(&self, command: &str) {
        if let Some(stdin) = self.stdin.lock().expect("no holder panics").as_mut() {
            let _ = writeln!(stdin, "{command}");
            let _ = stdin.flush();
        }
    }

    /// Sends it a signal. One that is gone takes none.
    pub(crate) fn signal(&self, signal: Signal) {
        if let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, signal);
        }
    }
}

/// Makes this process end with its parent: by the kernel's word, and at once if the parent was gone before that word
/// could be given.
pub(crate) fn die_with_parent(parent: Option<u32>) {
    let Some(parent) = parent else { return };
    // The kernel may lack it; then the end of standard input does the same a little later.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    let alive = getppid().is_some_and(|pid| pid.as_raw_nonzero().get() as u32 == parent);
    if !alive {
        std::process::exit(1);
    }
}

/// Calls `on_command` with each line of standard input, and ends the process with its parent when the input ends.
pub(crate) fn listen_to_parent(parent: Option<u32>, on_command: impl Fn(&str) + Send + 'static) {
    if parent.is_none() {
        return;
    }
    let listening = std::thread::Builder::new().name("connex-parent".into()).spawn(move || {
        for line in std::io::stdin().lock().lines() {
            match line {
                Ok(line) => on_command(line.trim()),
                Err(_) => break,
            }
        }
        std::process::exit(0);
    });
    if let Err(error) = listening {
        eprintln!("warning: the parent can't be heard: {error}");
    }
}

/// Waits for SIGTERM or Ctrl-C.
pub(crate) async fn asked_to_end() {
    let Ok(mut terminated) = signal(SignalKind::terminate()) else {
        return drop(ctrl_c().await);
    };
    tokio::select! {
        _ = terminated.recv() => {}
        _ = ctrl_c() => {}
    }
}
