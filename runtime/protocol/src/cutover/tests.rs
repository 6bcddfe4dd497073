use alloc::{format, vec};

use super::*;
use crate::{Epoch, Incarnation, Instant, Machine};

const EPOCH: Epoch = Epoch { boot: 1, counter: 5 };
const OTHER: Epoch = Epoch { boot: 1, counter: 4 };
const TARGET: Incarnation = Incarnation::from_bits(2);
const STRANGER: Incarnation = Incarnation::from_bits(3);
const ONE: Incarnation = Incarnation::from_bits(11);
const TWO: Incarnation = Incarnation::from_bits(12);

fn at(ms: u64) -> Instant {
    Instant::from_nanos(ms * 1_000_000)
}

fn tell<M: Machine>(machine: &mut M, now: Instant, input: M::Input) -> alloc::vec::Vec<M::Output> {
    machine.handle(now, input);
    core::iter::from_fn(|| machine.poll()).collect()
}

fn asked(from: Incarnation, epoch: Epoch, to: Incarnation) -> SourceInput {
    SourceInput::Asked { from, epoch, to, held: Some(EPOCH), shadow: Some(TARGET) }
}

fn quiet(fence: u64, submitters: &[Incarnation]) -> SourceInput {
    SourceInput::Quiet { fence, submitters: submitters.to_vec() }
}

fn settle(to: Incarnation, fence: u64) -> SourceOutput {
    SourceOutput::Settle { to, epoch: EPOCH, fence }
}

fn seen(from: Incarnation, fence: u64) -> SourceInput {
    SourceInput::Seen { from, fence }
}

const CALLED_OFF: [SourceOutput; 2] = [SourceOutput::Unfence, SourceOutput::Abort(EPOCH)];

#[test]
fn a_source_pauses_before_it_fences_and_hands_over_only_when_every_answer_was_heard() {
    let mut source = Source::default();
    let outputs = tell(&mut source, at(0), asked(TARGET, EPOCH, TARGET));
    assert_eq!(outputs, [SourceOutput::Pause(EPOCH), SourceOutput::Fence(1)]);
    assert!(tell(&mut source, at(1), seen(ONE, 1)).is_empty(), "it still executes");
    assert_eq!(tell(&mut source, at(2), quiet(1, &[ONE, TWO])), [settle(ONE, 1), settle(TWO, 1)]);
    assert!(tell(&mut source, at(2), seen(ONE, 1)).is_empty());
    assert!(tell(&mut source, at(2), seen(ONE, 1)).is_empty(), "one says it twice");
    assert_eq!(tell(&mut source, at(2), seen(TWO, 1)), [SourceOutput::Hand(TARGET)]);
    assert_eq!(tell(&mut source, at(3), SourceInput::Handed), [SourceOutput::Part]);
    assert_eq!(tell(&mut source, at(4), SourceInput::Parted), [SourceOutput::Over]);
}

/// A source in each of its states, under the number of inputs that led there.
fn sources() -> impl Iterator<Item = (usize, Source)> {
    let story = [
        asked(TARGET, EPOCH, TARGET),
        quiet(1, &[ONE]),
        seen(ONE, 1),
        SourceInput::Handed,
        SourceInput::Parted,
    ];
    (0..=story.len()).map(move |len| {
        let mut source = Source::default();
        for input in &story[..len] {
            tell(&mut source, at(0), input.clone());
        }
        (len, source)
    })
}

#[test]
fn strangers_other_epochs_and_unsure_holders_are_refused_in_every_state_and_change_nothing() {
    let unsure =
        SourceInput::Asked { from: TARGET, epoch: EPOCH, to: TARGET, held: None, shadow: Some(TARGET) };
    let early =
        SourceInput::Asked { from: TARGET, epoch: EPOCH, to: TARGET, held: Some(EPOCH), shadow: None };
    let asks = [
        (asked(TARGET, OTHER, TARGET), TARGET, OTHER),
        (asked(STRANGER, EPOCH, TARGET), STRANGER, EPOCH),
        (asked(STRANGER, EPOCH, STRANGER), STRANGER, EPOCH),
        (asked(TARGET, EPOCH, STRANGER), TARGET, EPOCH),
        (unsure, TARGET, EPOCH),
        (early, TARGET, EPOCH),
    ];
    for (state, source) in sources() {
        for (ask, to, epoch) in asks.clone() {
            let sure = to == TARGET && ask_is_plain(&ask);
            let mut source = source.clone();
            let before = (source.clone(), source.deadline());
            let outputs = tell(&mut source, at(1), ask.clone());
            // Its own target may ask again while the directory's word on it has changed: it is on its way.
            let goes_on = sure && (1..=3).contains(&state);
            let expected = if goes_on { vec![] } else { vec![SourceOutput::Refuse { to, epoch }] };
            assert_eq!(outputs, expected, "after {state} inputs: {ask:?}");
            assert_eq!(format!("{source:?}"), format!("{:?}", before.0));
            assert_eq!(source.deadline(), before.1, "it waits no longer for being asked again");
        }
    }
}

fn ask_is_plain(ask: &SourceInput) -> bool {
    matches!(ask, SourceInput::Asked { from: TARGET, epoch: EPOCH, to: TARGET, .. })
}

#[test]
fn a_source_is_asked_again_and_goes_on() {
    for (state, mut source) in sources() {
        let deadline = source.deadline();
        let outputs = tell(&mut source, at(1), asked(TARGET, EPOCH, TARGET));
        match state {
            0 => assert_eq!(outputs, [SourceOutput::Pause(EPOCH), SourceOutput::Fence(1)]),
            1..=3 => {
                assert!(outputs.is_empty() && source.deadline() == deadline, "after {state}: {outputs:?}")
            }
            _ => assert_eq!(outputs, [SourceOutput::Refuse { to: TARGET, epoch: EPOCH }]),
        }
    }
}

#[test]
fn what_executes_for_too_long_calls_it_off_and_the_source_is_asked_anew() {
    let mut source = Source::default();
    tell(&mut source, at(0), asked(TARGET, EPOCH, TARGET));
    assert!(tell(&mut source, at(1999), SourceInput::Tick).is_empty());
    assert_eq!(tell(&mut source, at(2000), SourceInput::Tick), CALLED_OFF);
    assert!(tell(&mut source, at(2001), quiet(1, &[])).is_empty());
    tell(&mut source, at(2002), asked(TARGET, EPOCH, TARGET));
    assert!(tell(&mut source, at(2003), quiet(1, &[])).is_empty(), "another fence's");
    assert_eq!(tell(&mut source, at(2004), quiet(2, &[ONE])), [settle(ONE, 2)]);
    assert!(tell(&mut source, at(2005), seen(ONE, 1)).is_empty(), "another fence's");
    assert_eq!(tell(&mut source, at(2254), SourceInput::Tick), [SourceOutput::Hand(TARGET)], "no longer");
    assert_eq!(tell(&mut source, at(2255), SourceInput::Kept), CALLED_OFF);
}

#[test]
fn a_source_waits_for_no_submitter_that_is_gone_or_silent() {
    let settling = || {
        let mut source = Source::default();
        tell(&mut source, at(0), asked(TARGET, EPOCH, TARGET));
        tell(&mut source, at(0), quiet(1, &[ONE, TWO]));
        source
    };
    let mut source = settling();
    assert!(tell(&mut source, at(1), SourceInput::Gone(STRANGER)).is_empty());
    assert!(tell(&mut source, at(1), seen(STRANGER, 1)).is_empty());
    assert!(tell(&mut source, at(1), SourceInput::Gone(ONE)).is_empty());
    assert_eq!(tell(&mut source, at(1), SourceInput::Gone(TWO)), [SourceOutput::Hand(TARGET)]);
    let mut source = settling();
    assert!(tell(&mut source, at(249), SourceInput::Tick).is_empty());
    assert_eq!(tell(&mut source, at(250), SourceInput::Tick), [SourceOutput::Hand(TARGET)]);
    let mut source = Source::default();
    tell(&mut source, at(0), asked(TARGET, EPOCH, TARGET));
    assert_eq!(tell(&mut source, at(0), quiet(1, &[])), [SourceOutput::Hand(TARGET)], "it has none");
}

#[test]
fn a_source_ends_although_its_submitters_do_not_part() {
    let (_, mut source) = sources().nth(4).unwrap();
    assert!(tell(&mut source, at(999), SourceInput::Tick).is_empty());
    assert_eq!(tell(&mut source, at(1000), SourceInput::Tick), [SourceOutput::Over]);
    assert!(tell(&mut source, at(2000), SourceInput::Parted).is_empty(), "it is over once");
}

#[test]
fn while_the_directory_is_silent_a_source_neither_serves_nor_ends() {
    let (_, mut source) = sources().nth(3).unwrap();
    assert_eq!(source.deadline(), None);
    for input in
        [SourceInput::Tick, quiet(1, &[]), seen(ONE, 1), SourceInput::Gone(TARGET), SourceInput::Parted]
    {
        assert!(tell(&mut source, at(1_000_000), input).is_empty());
    }
    assert_eq!(tell(&mut source, at(1_000_001), SourceInput::Kept), CALLED_OFF);
}

#[test]
fn a_source_that_lost_its_identity_is_never_unfenced() {
    for (state, mut source) in sources() {
        tell(&mut source, at(1), SourceInput::Lost);
        let later = [SourceInput::Kept, SourceInput::Tick, quiet(1, &[]), seen(ONE, 1), SourceInput::Parted];
        for input in later {
            assert!(tell(&mut source, at(9000), input.clone()).is_empty(), "after {state} inputs: {input:?}");
        }
        assert_eq!(source.deadline(), None);
    }
}

fn shadowing(holder: Incarnation, epoch: Epoch) -> TargetInput {
    TargetInput::Shadowing { holder, epoch }
}

fn ask(holder: Incarnation, epoch: Epoch) -> [TargetOutput; 1] {
    [TargetOutput::Ask { holder, epoch }]
}

#[test]
fn a_target_asks_whoever_holds_the_identity_until_it_holds_it() {
    let mut target = Target::default();
    assert!(tell(&mut target, at(0), TargetInput::Tick).is_empty());
    assert_eq!(tell(&mut target, at(0), shadowing(STRANGER, EPOCH)), ask(STRANGER, EPOCH));
    assert!(tell(&mut target, at(1), shadowing(STRANGER, EPOCH)).is_empty());
    assert!(tell(&mut target, at(499), TargetInput::Tick).is_empty());
    assert_eq!(tell(&mut target, at(500), TargetInput::Tick), ask(STRANGER, EPOCH), "nothing was heard");
    tell(&mut target, at(500), TargetInput::Refused { from: STRANGER });
    assert_eq!(tell(&mut target, at(600), TargetInput::Tick), ask(STRANGER, EPOCH), "it was refused");
    assert_eq!(tell(&mut target, at(601), shadowing(ONE, OTHER)), ask(ONE, OTHER), "another holds it now");
    tell(&mut target, at(602), TargetInput::Refused { from: STRANGER });
    assert!(tell(&mut target, at(702), TargetInput::Tick).is_empty(), "that was the one before");
    tell(&mut target, at(902), TargetInput::Settled);
    assert!(tell(&mut target, at(9000), TargetInput::Tick).is_empty());
    assert!(tell(&mut target, at(9000), shadowing(ONE, EPOCH)).is_empty());
    assert_eq!(target.deadline(), None);
}

#[test]
fn a_target_that_is_called_off_asks_less_and_less_often() {
    let mut target = Target::default();
    tell(&mut target, at(0), shadowing(ONE, EPOCH));
    let mut now = 0;
    for rest in [500, 1000, 2000, 4000, 8000, 8000] {
        tell(&mut target, at(now), TargetInput::CalledOff { from: ONE });
        tell(&mut target, at(now), TargetInput::CalledOff { from: STRANGER });
        assert!(tell(&mut target, at(now + rest - 1), TargetInput::Tick).is_empty(), "{rest}");
        now += rest;
        assert_eq!(tell(&mut target, at(now), TargetInput::Tick), ask(ONE, EPOCH), "{rest}");
    }
    assert_eq!(tell(&mut target, at(now), shadowing(TWO, EPOCH)), ask(TWO, EPOCH));
    tell(&mut target, at(now), TargetInput::CalledOff { from: TWO });
    assert_eq!(tell(&mut target, at(now + 500), TargetInput::Tick), ask(TWO, EPOCH), "another one, anew");
}

#[test]
fn a_submitter_holds_for_the_holder_alone_and_never_for_ever() {
    let pausing = |from, holder| SubmitterInput::Pausing { from, replica: 0, holder: Some(holder) };
    let resume = |moved| [SubmitterOutput::Resume { replica: 0, moved }];
    let abort = |from| SubmitterInput::Abort { from, replica: 0 };
    let ready = |from| SubmitterInput::Ready { from, replica: 0 };
    let moved = |to| SubmitterInput::Moved { replica: 0, to };
    let mut submitter = Submitter::default();
    assert!(tell(&mut submitter, at(0), pausing(STRANGER, TARGET)).is_empty());
    let unknown = SubmitterInput::Pausing { from: STRANGER, replica: 0, holder: None };
    assert!(tell(&mut submitter, at(0), unknown).is_empty());
    assert_eq!(tell(&mut submitter, at(0), pausing(TARGET, TARGET)), [SubmitterOutput::Pause(0)]);
    for input in [abort(STRANGER), ready(STRANGER), SubmitterInput::Down(STRANGER), moved(TARGET)] {
        assert!(tell(&mut submitter, at(1), input).is_empty(), "{input:?}");
    }
    assert!(tell(&mut submitter, at(3999), pausing(TARGET, TARGET)).is_empty());
    assert!(tell(&mut submitter, at(3999), SubmitterInput::Tick).is_empty());
    assert_eq!(
        tell(&mut submitter, at(4000), SubmitterInput::Tick),
        resume(None),
        "however often it is told"
    );
    for again in [abort(TARGET), ready(TARGET)] {
        assert_eq!(
            tell(&mut submitter, at(4001), again),
            resume(None),
            "what was given back goes there again"
        );
    }
    for end in [abort(TARGET), ready(TARGET), SubmitterInput::Down(TARGET)] {
        tell(&mut submitter, at(5000), pausing(TARGET, TARGET));
        assert_eq!(tell(&mut submitter, at(5001), end), resume(None));
        assert_eq!(submitter.deadline(), None);
    }
    tell(&mut submitter, at(6000), pausing(TARGET, TARGET));
    let paused = Some((TARGET, at(7).since(at(0))));
    assert_eq!(tell(&mut submitter, at(6007), moved(STRANGER)), resume(paused));
    assert!(tell(&mut submitter, at(19_000), SubmitterInput::Tick).is_empty());
}

#[test]
fn a_submitter_holds_for_each_replica_apart() {
    let pausing = |from, replica| SubmitterInput::Pausing { from, replica, holder: Some(from) };
    let mut submitter = Submitter::default();
    tell(&mut submitter, at(0), pausing(ONE, 0));
    tell(&mut submitter, at(1), pausing(TWO, 1));
    let outputs = tell(&mut submitter, at(2), SubmitterInput::Down(ONE));
    assert_eq!(outputs, [SubmitterOutput::Resume { replica: 0, moved: None }]);
    assert_eq!(submitter.deadline(), Some(at(4001)));
    let outputs = tell(&mut submitter, at(4001), SubmitterInput::Tick);
    assert_eq!(outputs, [SubmitterOutput::Resume { replica: 1, moved: None }]);
}
