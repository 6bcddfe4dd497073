//! Each example runs to its end and says what it is to show.

use std::process::Command;

fn output(example: &str) -> String {
    // The examples are built beside the tests, in the folder above theirs.
    let mut path = std::env::current_exe().unwrap();
    path.pop();
    path.pop();
    let program = path.join("examples").join(example);
    let output =
        Command::new(&program).output().unwrap_or_else(|error| panic!("{}: {error}", program.display()));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{example}: {}\n{text}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

#[test]
fn embed_calls_its_own_engine() {
    assert!(output("embed").contains("desserts"));
}

#[test]
fn mobile_endpoints_loses_no_step() {
    let text = output("mobile_endpoints");
    for line in [
        "handover: 1 step",
        "reply: hello from replica 1",
        "rejoined: welcome back",
        "migrated:",
        "scaled down:",
    ] {
        assert!(text.contains(line), "{line:?} is missing in\n{text}");
    }
}

#[test]
fn two_stage_pipeline_sends_a_tensor_across() {
    let text = output("two_stage_pipeline");
    assert!(text.contains("discovered: m/pp/1/0/0 at tcp://"), "{text}");
    assert!(text.contains("squared and summed: 1048576"), "{text}");
}

#[test]
fn supervisor_tree_restarts_every_level() {
    let text = output("supervisor_tree");
    for actor in [
        "started again: endpoint m/tree/0/0/0",
        "started again: group m/tree/0",
        "started again: groups",
        "started again: served endpoint",
    ] {
        assert!(text.contains(actor), "{actor:?} is missing in\n{text}");
    }
    assert_eq!(text.matches("a call goes through").count(), 4, "{text}");
}
