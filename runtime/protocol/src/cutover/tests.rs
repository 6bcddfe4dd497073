use super::*;
use crate::{Epoch, Incarnation, Instant, Machine};

const EPOCH: Epoch = Epoch { boot: 1, counter: 5 };
const OTHER: Epoch = Epoch { boot: 1, counter: 4 };
const TARGET: Incarnation = Incarnation::from_bits(2);
const STRANGER: Incarnation = Incarnation::from_bits(3);

fn at(ms: u64) -> Instant {
    Instant::from_nanos(ms * 1_000_000)
}

fn tell<M: Machine>(machine: &mut M, now: Instant, input: M::Input) -> alloc::vec::Vec<M::Output> {
    machine.handle(now, input);
    core::iter::from_fn(|| machine.poll()).collect()
}

fn asked(from: Incarnation, epoch: Epoch, to: Incarnation) -> SourceInput {
    SourceInput::Asked { from, epoch, to, held: Some(EPOCH) }
}

#[test]
fn a_source_pauses_before_it_fences_and_hands_over_only_when_nothing_executes() {
    let mut source = Source::default();
    let outputs = tell(&mut source, at(0), asked(TARGET, EPOCH, TARGET));
    assert_eq!(outputs, [SourceOutput::Pause(EPOCH), SourceOutput::Fence(1)]);
    assert!(tell(&mut source, at(1), asked(TARGET, EPOCH, TARGET)).is_empty(), "it is asked again");
    assert_eq!(tell(&mut source, at(2), SourceInput::Quiet(1)), [SourceOutput::Settle(EPOCH)]);
    assert_eq!(tell(&mut source, at(2), SourceInput::Settled), [SourceOutput::Hand(TARGET)]);
    assert_eq!(tell(&mut source, at(3), SourceInput::Handed), [SourceOutput::Part]);
    assert_eq!(tell(&mut source, at(4), SourceInput::Parted), [SourceOutput::Over]);
}

#[test]
fn strangers_and_other_epochs_are_refused_in_every_state() {
    let mut source = Source::default();
    let refused = |to, epoch| [SourceOutput::Refuse { to, epoch }];
    assert_eq!(tell(&mut source, at(0), asked(TARGET, OTHER, TARGET)), refused(TARGET, OTHER));
    assert_eq!(tell(&mut source, at(0), asked(STRANGER, EPOCH, TARGET)), refused(STRANGER, EPOCH));
    let unsure = SourceInput::Asked { from: TARGET, epoch: EPOCH, to: TARGET, held: None };
    assert_eq!(tell(&mut source, at(0), unsure), refused(TARGET, EPOCH));
    tell(&mut source, at(0), asked(TARGET, EPOCH, TARGET));
    assert_eq!(tell(&mut source, at(0), asked(STRANGER, EPOCH, STRANGER)), refused(STRANGER, EPOCH));
    tell(&mut source, at(0), SourceInput::Lost);
    assert_eq!(tell(&mut source, at(0), asked(TARGET, EPOCH, TARGET)), refused(TARGET, EPOCH));
}

#[test]
fn what_does_not_end_calls_the_migration_off_and_a_late_quiet_of_that_fence_hands_nothing_over() {
    let mut source = Source::default();
    tell(&mut source, at(0), asked(TARGET, EPOCH, TARGET));
    assert!(tell(&mut source, at(1999), SourceInput::Tick).is_empty());
    let outputs = tell(&mut source, at(2000), SourceInput::Tick);
    assert_eq!(outputs, [SourceOutput::Unfence, SourceOutput::Abort(EPOCH)]);
    assert!(tell(&mut source, at(2001), SourceInput::Quiet(1)).is_empty());
    tell(&mut source, at(2002), asked(TARGET, EPOCH, TARGET));
    assert!(tell(&mut source, at(2003), SourceInput::Quiet(1)).is_empty(), "another fence's");
    assert_eq!(tell(&mut source, at(2004), SourceInput::Quiet(2)), [SourceOutput::Settle(EPOCH)]);
    assert_eq!(
        tell(&mut source, at(2254), SourceInput::Tick),
        [SourceOutput::Hand(TARGET)],
        "it waits no longer"
    );
    let outputs = tell(&mut source, at(2255), SourceInput::Kept);
    assert_eq!(outputs, [SourceOutput::Unfence, SourceOutput::Abort(EPOCH)]);
}

#[test]
fn a_source_that_lost_its_identity_is_never_unfenced() {
    for steps in 0..5 {
        let mut source = Source::default();
        let before =
            [asked(TARGET, EPOCH, TARGET), SourceInput::Quiet(1), SourceInput::Settled, SourceInput::Handed];
        for input in &before[..steps] {
            tell(&mut source, at(0), *input);
        }
        tell(&mut source, at(1), SourceInput::Lost);
        for input in [SourceInput::Kept, SourceInput::Tick, SourceInput::Quiet(1), SourceInput::Parted] {
            assert!(tell(&mut source, at(9000), input).is_empty(), "after {steps} steps: {input:?}");
        }
    }
}

#[test]
fn a_target_asks_whoever_holds_the_identity_until_it_holds_it() {
    let mut target = Target::default();
    let shadowing = |holder, epoch| TargetInput::Shadowing { holder, epoch };
    let ask = |holder, epoch| [TargetOutput::Ask { holder, epoch }];
    assert_eq!(tell(&mut target, at(0), shadowing(STRANGER, EPOCH)), ask(STRANGER, EPOCH));
    assert!(tell(&mut target, at(1), shadowing(STRANGER, EPOCH)).is_empty());
    assert!(tell(&mut target, at(400), TargetInput::NotNow { from: STRANGER }).is_empty());
    assert!(tell(&mut target, at(600), TargetInput::Tick).is_empty(), "it gives the holder time");
    assert_eq!(tell(&mut target, at(900), TargetInput::Tick), ask(STRANGER, EPOCH));
    assert_eq!(tell(&mut target, at(901), shadowing(TARGET, OTHER)), ask(TARGET, OTHER));
    tell(&mut target, at(902), TargetInput::Settled);
    assert!(tell(&mut target, at(9000), TargetInput::Tick).is_empty());
    assert_eq!(target.deadline(), None);
}

#[test]
fn a_submitter_holds_for_the_holder_alone_and_never_for_ever() {
    let pausing = |from, holder| SubmitterInput::Pausing { from, replica: 0, holder: Some(holder) };
    let resume = |moved| [SubmitterOutput::Resume { replica: 0, moved }];
    let mut submitter = Submitter::default();
    assert!(tell(&mut submitter, at(0), pausing(STRANGER, TARGET)).is_empty());
    assert_eq!(tell(&mut submitter, at(0), pausing(TARGET, TARGET)), [SubmitterOutput::Pause(0)]);
    let abort = |from| SubmitterInput::Abort { from, replica: 0 };
    assert!(tell(&mut submitter, at(1), abort(STRANGER)).is_empty());
    assert!(tell(&mut submitter, at(1), SubmitterInput::Moved { replica: 0, to: TARGET }).is_empty());
    assert_eq!(tell(&mut submitter, at(4000), SubmitterInput::Tick), resume(None));
    assert_eq!(
        tell(&mut submitter, at(4001), abort(TARGET)),
        resume(None),
        "what was given back goes there again"
    );
    for end in [abort(TARGET), SubmitterInput::Down(TARGET)] {
        tell(&mut submitter, at(5000), pausing(TARGET, TARGET));
        assert_eq!(tell(&mut submitter, at(5001), end), resume(None));
    }
    tell(&mut submitter, at(6000), pausing(TARGET, TARGET));
    let moved = Some((TARGET, at(7).since(at(0))));
    assert_eq!(
        tell(&mut submitter, at(6007), SubmitterInput::Moved { replica: 0, to: STRANGER }),
        resume(moved)
    );
    assert!(tell(&mut submitter, at(19_000), SubmitterInput::Tick).is_empty());
}
