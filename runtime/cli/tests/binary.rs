//! The binary as a user runs it: real processes, real kills, reduced counts unless CONNEX_TEST_SCALE is full.

use std::io::Write;
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

fn full() -> bool {
    std::env::var("CONNEX_TEST_SCALE").is_ok_and(|scale| scale == "full")
}

fn connex(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_connex")).args(args).stdin(Stdio::null()).output().unwrap()
}

/// Runs a verb that must succeed, and reads its one JSON object.
fn json(args: &[&str]) -> Value {
    let output = connex(args);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{args:?}: {}\n{text}\n{}", output.status, errors(&output));
    assert_eq!(text.lines().count(), 1, "exactly one object on standard output");
    serde_json::from_str(&text).unwrap()
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs a verb that must fail, and returns what it says.
fn refused(args: &[&str]) -> String {
    let output = connex(args);
    assert!(!output.status.success(), "{args:?} succeeded");
    errors(&output)
}

#[test]
fn a_demo_loses_nothing_whichever_stage_is_killed() {
    for victim in ["stage=0,replica=0", "stage=1,replica=0", "stage=0,replica=1", "stage=1,replica=1"] {
        let report = json(&["demo", "--model", "toy", "--kill", victim, "--json"]);
        assert_eq!(report["text_equals_undisturbed"], true, "{report}");
        assert_eq!(report["rejoined"], true, "{report}");
        assert_eq!(report["steps"]["failed"], 0, "{report}");
        assert_eq!(report["steps"]["duplicated"], 0, "{report}");
        assert!(report["handover"]["steps"].as_u64().unwrap() >= 1, "{report}");
        assert_eq!(report["requests"].as_array().unwrap().len(), 4);
        let killed =
            report["processes"].as_array().unwrap().iter().filter(|process| process["killed"] == true);
        assert_eq!(killed.count(), 1, "{report}");
    }
}

#[test]
fn a_demo_in_four_stages_and_one_with_no_kill_hold_too() {
    let report = json(&["demo", "--model", "toy", "--stages", "4", "--kill", "stage=2,replica=0", "--json"]);
    assert_eq!(report["text_equals_undisturbed"], true, "{report}");
    let report = json(&["demo", "--model", "toy", "--kill", "none", "--json"]);
    assert_eq!(report["handover"], Value::Null, "{report}");
}

#[test]
fn chaos_counts_nothing_lost_and_notices_both_planted_bugs() {
    let kills = if full() { "100" } else { "20" };
    let report = json(&["chaos", "--kills", kills, "--seed", "7", "--json"]);
    for count in ["failed", "duplicated", "wrong"] {
        assert_eq!(report["steps"][count], 0, "{report}");
    }
    assert_eq!(report["requests"]["lost"], 0, "{report}");
    assert_eq!(report["requests"]["submitted"], report["requests"]["completed"], "{report}");
    let rerun = json(&["chaos", "--kills", "3", "--plant", "rerun", "--json"]);
    assert!(rerun["steps"]["duplicated"].as_u64().unwrap() > 0, "{rerun}");
    let lost = json(&["chaos", "--kills", "3", "--plant", "lost-state", "--json"]);
    assert!(lost["steps"]["wrong"].as_u64().unwrap() > 0, "{lost}");
}

#[test]
fn migrations_under_load_lose_and_reorder_nothing() {
    let runs = if full() { "200" } else { "20" };
    let report = json(&["bench", "migrate", "--runs", runs, "--json"]);
    for count in ["failed", "duplicated", "reordered", "wrong"] {
        assert_eq!(report["steps"][count], 0, "{report}");
    }
    assert!(report["pause_ms"]["p50"].as_f64().unwrap() > 0.0, "the mailboxes were held back: {report}");
}

#[test]
fn handovers_after_a_kill_are_measured() {
    let runs = if full() { "300" } else { "20" };
    let report = json(&["bench", "handover", "--runs", runs, "--json"]);
    assert!(report["runs"].as_u64().unwrap() > 0, "{report}");
    assert!(report["kill_to_handover_ms"]["p50"].as_f64().unwrap() > 0.0, "{report}");
}

#[test]
fn bad_input_is_refused_with_what_to_do() {
    let text = refused(&["stage", "--lid", "m/pp/1", "--stages", "2"]);
    assert!(text.contains("has 3 fields, expected 5"), "{text}");
    let text = refused(&["stage", "--lid", "toy/pp/2/0/0", "--stages", "2"]);
    assert!(text.contains("the pipeline has 2 stages"), "{text}");
    let text = refused(&["demo", "--kill", "stage=9,replica=0", "--model", "toy"]);
    assert!(text.contains("there are 2 stages of 2 replicas"), "{text}");
    let text = refused(&["stage", "--lid", "m/pp/0/0/0", "--stages", "1", "--model", "/nowhere.gguf"]);
    assert!(text.contains("name a GGUF file that can be read"), "{text}");

    let path = std::env::temp_dir().join(format!("connex-no-gguf-{}", std::process::id()));
    std::fs::File::create(&path).unwrap().write_all(b"this is no model").unwrap();
    let text = refused(&["stage", "--lid", "m/pp/0/0/0", "--stages", "1", "--model", path.to_str().unwrap()]);
    assert!(text.contains("is not a GGUF file"), "{text}");
    std::fs::File::create(&path).unwrap().write_all(b"GGUF\x03\0\0\0\xff\xff\0\0\0\0\0\0").unwrap();
    let text = refused(&["stage", "--lid", "m/pp/0/0/0", "--stages", "1", "--model", path.to_str().unwrap()]);
    assert!(text.contains("cut off or damaged"), "{text}");
    std::fs::remove_file(&path).unwrap();
}

/// F17: an occupied port is named.
#[test]
fn f17_an_occupied_port_is_named() {
    let occupied = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = occupied.local_addr().unwrap().to_string();
    let text = refused(&["directory", "--listen", &address]);
    assert!(text.contains(&address), "{text}");
}

/// A directory that is not there is waited for, with a word on it.
#[test]
fn a_stage_without_its_directory_says_so_and_waits() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let mut stage = Command::new(env!("CARGO_BIN_EXE_connex"))
        .args(["stage", "--lid", "toy/pp/0/0/0", "--stages", "1", "--directory", &free])
        .stderr(Stdio::piped())
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let mut stderr = std::io::BufReader::new(stage.stderr.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut stderr, &mut line).unwrap();
    assert!(line.contains("the directory can't be reached; trying again"), "{line}");
    assert!(stage.try_wait().unwrap().is_none(), "it goes on trying");
    stage.kill().unwrap();
    stage.wait().unwrap();
}

/// Children die with their parent, even one that is killed.
#[test]
fn children_end_with_a_killed_parent() {
    let mut up = Command::new(env!("CARGO_BIN_EXE_connex"))
        .args(["up", "--model", "toy", "--stages", "1", "--replicas", "1"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stderr = std::io::BufReader::new(up.stderr.take().unwrap());
    let mut pids = Vec::new();
    loop {
        let mut line = String::new();
        assert!(std::io::BufRead::read_line(&mut stderr, &mut line).unwrap() > 0, "it got ready");
        if let Some((_, pid)) = line.trim().split_once(" is process ") {
            pids.push(pid.to_owned());
        }
        if line.starts_with("ready") {
            break;
        }
    }
    assert_eq!(pids.len(), 1);
    up.kill().unwrap();
    up.wait().unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    for pid in pids {
        // A zombie that init has not reaped yet is as dead.
        let alive =
            || std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "));
        while alive() {
            assert!(Instant::now() < deadline, "process {pid} outlived its parent");
            std::thread::yield_now();
        }
    }
}
