//! Stages as processes of their own around a directory of the test's: their ports (F17), deaths at their start (F37),
//! and input that fits nowhere.

use std::collections::HashSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use connex::directory::{Directory, DirectoryConfig};
use connex::pipeline::{self, RequestMeta};
use connex::protocol::directory::RegistryConfig;
use connex::protocol::wire::directory::Route;
use connex::{Address, CallError, ErrorCode, Group, LogicalId, Node, Reply, Step};
use rustix::process::{Pid, Signal, kill_process};

/// What a condition may take at most, on a machine that is busy with other things.
const SLACK: Duration = Duration::from_secs(30);

async fn directory() -> Directory {
    let registry =
        RegistryConfig { ttl: Duration::from_millis(500), first: true, ..RegistryConfig::default() };
    Directory::start(DirectoryConfig { registry, ..DirectoryConfig::local() }).await.unwrap()
}

/// A client; the directory hears it even when nobody else is left.
async fn client(directory: &Directory) -> Node {
    let node = Node::client().listen("127.0.0.1:0").directory(directory.address()).start().await.unwrap();
    node.ready().await;
    node
}

fn lid(stage: u16, replica: u32) -> LogicalId {
    Group::new("toy", "pp", stage).replica(replica)
}

/// A stage's process; it ends with the test, whichever way that ends.
struct Stage(Child);

impl Stage {
    fn command(directory: &Directory, lid: &LogicalId, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_connex"));
        command.args(["stage", "--lid", &lid.to_string(), "--directory", directory.address().split().1]);
        command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command
    }

    fn start(directory: &Directory, lid: &LogicalId, args: &[&str]) -> Stage {
        Stage(Self::command(directory, lid, args).spawn().unwrap())
    }

    /// SIGKILL, and reaped.
    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // One that has ended takes no signal.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn within<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(SLACK, what).await.expect("it ends in time")
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < SLACK, "not within {SLACK:?}: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    start.elapsed()
}

fn route(directory: &Directory, of: &LogicalId) -> Option<Route> {
    directory.routes().into_iter().find(|route| route.lid == *of)
}

async fn ask(client: &Node, prompt: &[u32]) -> Result<Reply, CallError> {
    let step = Step::new(RequestMeta { max_tokens: 4 }.encode()).payload(pipeline::encode_tokens(prompt));
    within(async { client.group(&Group::new("toy", "pp", 0)).stream(step).await?.end().await }).await
}

/// Somebody listens at an address, and it is the life that advertises it.
async fn answers(client: &Node, route: &Route) {
    let peer =
        within(client.core().transport().connect(&route.address, Some(route.incarnation))).await.unwrap();
    assert_eq!((&peer.lid, peer.incarnation), (&route.lid, route.incarnation));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f17_fourteen_stages_that_start_at_once_advertise_what_they_bound_and_a_restart_binds_at_once() {
    const COUNT: u32 = 14;
    let directory = directory().await;
    let client = client(&directory).await;
    let mut group = 0;
    let mut stages = Vec::new();
    for replica in 0..COUNT {
        let mut command = Stage::command(&directory, &lid(0, replica), &["--stages", "1"]);
        // All of them in the process group of the first.
        let stage = Stage(command.process_group(group).spawn().unwrap());
        if group == 0 {
            group = i32::try_from(stage.0.id()).unwrap();
        }
        stages.push(stage);
    }
    until("all are registered", || directory.routes().len() == COUNT as usize).await;
    let routes = directory.routes();
    let addresses: HashSet<&Address> = routes.iter().map(|route| &route.address).collect();
    assert_eq!(addresses.len(), COUNT as usize);
    for route in &routes {
        answers(&client, route).await;
    }
    for round in 0..3u32 {
        let (victim, before) = (lid(0, round), route(&directory, &lid(0, round)).unwrap());
        let host = before.address.split().1.to_owned();
        stages[round as usize].kill();
        let killed = Instant::now();
        stages[round as usize] = Stage::start(&directory, &victim, &["--stages", "1", "--listen", &host]);
        until("it listens again", || TcpStream::connect(&host).is_ok()).await;
        // One second, with slack for a machine that is busy with fourteen processes.
        assert!(killed.elapsed() < Duration::from_secs(5), "it took {:?}", killed.elapsed());
        let is_back = |now: &Route| now.incarnation != before.incarnation;
        until("it holds its identity again", || route(&directory, &victim).as_ref().is_some_and(is_back))
            .await;
        let now = route(&directory, &victim).unwrap();
        assert_eq!(now.address, before.address);
        assert!(now.epoch > before.epoch);
        answers(&client, &now).await;
    }
    assert_eq!(directory.routes().len(), COUNT as usize);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f17_a_stage_whose_port_is_taken_says_so_and_ends_and_port_0_is_the_way_out() {
    let directory = directory().await;
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let host = taken.local_addr().unwrap().to_string();
    let output =
        Stage::command(&directory, &lid(0, 0), &["--stages", "1", "--listen", &host]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(text.contains(&host) && text.contains("in use") && text.contains("port 0"), "{text}");
    assert!(directory.routes().is_empty(), "what could not listen is advertised nowhere");
    let _stage = Stage::start(&directory, &lid(0, 0), &["--stages", "1", "--listen", "127.0.0.1:0"]);
    until("another port is found", || directory.routes().len() == 1).await;
    assert_ne!(directory.routes()[0].address.split().1, host);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f37_a_stage_that_is_killed_as_soon_as_it_is_registered_is_forgotten_and_its_successor_serves() {
    let directory = directory().await;
    let client = client(&directory).await;
    let mut lives = HashSet::new();
    for _ in 0..5 {
        let mut stage = Stage::start(&directory, &lid(0, 0), &["--stages", "1"]);
        until("the directory has granted it", || route(&directory, &lid(0, 0)).is_some()).await;
        assert!(lives.insert(route(&directory, &lid(0, 0)).unwrap().incarnation));
        // Its own answer is still on the way.
        stage.kill();
        until("its lease has run out", || directory.routes().is_empty()).await;
    }
    let _stage = Stage::start(&directory, &lid(0, 0), &["--stages", "1"]);
    let reply = ask(&client, &[1, 2, 3]).await.unwrap();
    assert_eq!(reply.body, "length");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stages_whose_layers_do_not_continue_each_other_are_named_to_the_client_and_to_the_operator() {
    let directory = directory().await;
    let client = client(&directory).await;
    let mut second = Stage::start(&directory, &lid(1, 0), &["--stages", "2", "--layers", "2..4"]);
    let mut stderr = BufReader::new(second.0.stderr.take().unwrap());
    let _first = Stage::start(&directory, &lid(0, 0), &["--stages", "2", "--layers", "0..1"]);
    let error = ask(&client, &[1, 2, 3]).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::Application);
    let text = error.to_string();
    assert!(text.contains("stage 1 holds layers 2..4") && text.contains("ends before layer 1"), "{text}");
    let said = tokio::task::spawn_blocking(move || {
        let mut line = String::new();
        while !line.contains("holds layers") {
            line.clear();
            assert!(stderr.read_line(&mut line).unwrap() > 0, "it said nothing of it");
        }
        line
    });
    assert!(within(said).await.unwrap().contains("ends before layer 1"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_range_that_can_not_be_that_stages_is_refused_before_anybody_is_told_of_it() {
    let directory = directory().await;
    for (stage, layers, said) in [
        (1, "2..9", "the model has 0..4"),
        (1, "2..3", "the last stage ends with layer 4"),
        (0, "0..4", "the last stage ends with layer 4"),
        (0, "1..2", "stage 0 begins with layer 0"),
        (1, "0..4", "stage 0 begins with layer 0"),
        (1, "3..3", "with A below B"),
    ] {
        let args = ["--stages", "2", "--layers", layers];
        let output = Stage::command(&directory, &lid(stage, 0), &args).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(said) && text.contains(layers), "{layers}: {text}");
    }
    assert!(directory.routes().is_empty());
}

/// The toy's context is 65,536 tokens, and each byte of a prompt is one.
#[test]
fn a_prompt_longer_than_the_context_is_refused_with_what_to_do_and_the_next_one_is_answered() {
    let (up, mut stdin, mut stdout, stderr) = up("3");
    let mut said = stderr.lines().map(|line| line.unwrap());
    assert!(said.any(|line| line.starts_with("ready")));
    let mut answer = |prompt: &str| {
        writeln!(stdin, "{prompt}").unwrap();
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        line
    };
    let first = answer("hello");
    assert_eq!(first.split_whitespace().count(), 3, "{first}");
    assert_eq!(answer(&"x".repeat(70_000)).trim(), "");
    let refused = said.find(|line| line.contains("the request ended")).unwrap();
    assert!(refused.contains("the prompt has 70000 tokens") && refused.contains("shorten it"), "{refused}");
    assert_eq!(answer("hello"), first);
    drop(up);
}

/// A deployment that answers with so many tokens: it, its prompts, its answers, and what it says.
fn up(tokens: &str) -> (Stage, ChildStdin, BufReader<ChildStdout>, BufReader<ChildStderr>) {
    let mut up = Command::new(env!("CARGO_BIN_EXE_connex"))
        .args(["up", "--model", "toy", "--stages", "2", "--replicas", "1", "--tokens", tokens])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let stdin = up.stdin.take().unwrap();
    let stdout = BufReader::new(up.stdout.take().unwrap());
    let stderr = BufReader::new(up.stderr.take().unwrap());
    (Stage(up), stdin, stdout, stderr)
}

#[test]
fn ctrl_c_ends_a_deployment_in_the_middle_of_an_answer() {
    const TOKENS: usize = 20_000;
    let (mut up, mut stdin, mut stdout, stderr) = up(&TOKENS.to_string());
    assert!(stderr.lines().any(|line| line.unwrap().starts_with("ready")));
    writeln!(stdin, "hello").unwrap();
    let mut answer = vec![0];
    stdout.read_exact(&mut answer).unwrap();
    let pid = Pid::from_raw(up.0.id() as i32).unwrap();
    kill_process(pid, Signal::INT).unwrap();
    // It ends although its prompts go on.
    stdout.read_to_end(&mut answer).unwrap();
    assert!(up.0.wait().unwrap().success());
    assert!(String::from_utf8(answer).unwrap().split_whitespace().count() < TOKENS);
}
