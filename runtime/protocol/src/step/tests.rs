use alloc::vec::Vec;
use core::time::Duration;

use bytes::Bytes;

use super::*;
use crate::wire::{Completed, Control, ErrorCode, Item, Payload, Reply, Step};
use crate::{Incarnation, Instant, Machine, ReplicaNo, StepId};

const HOP: Incarnation = Incarnation::from_bits(7);

fn origin(bits: u64) -> Incarnation {
    Incarnation::from_bits(bits)
}

fn id(of: u64, seq: u64) -> StepId {
    StepId { origin: origin(of), seq }
}

fn step(id: StepId, below: u64, body: &'static [u8]) -> Step {
    Step {
        id,
        attempt: 1,
        route: Vec::new(),
        completed: Completed { below, above: Vec::new() },
        deadline_ms: None,
        streaming: false,
        resume: Vec::new(),
        meta: Bytes::new(),
        payload: Payload::Inline(Bytes::from_static(body)),
    }
}

fn receive(receiver: &mut Receiver, input: ReceiverInput) -> Vec<ReceiverOutput> {
    receiver.handle(Instant::ZERO, input);
    core::iter::from_fn(|| receiver.poll()).collect()
}

fn replies(outputs: &[ReceiverOutput]) -> Vec<&Reply> {
    let mut found = Vec::new();
    for output in outputs {
        if let ReceiverOutput::Reply { reply, .. } = output {
            found.push(reply);
        }
    }
    found
}

fn executes(outputs: &[ReceiverOutput]) -> usize {
    outputs.iter().filter(|output| matches!(output, ReceiverOutput::Execute(_))).count()
}

#[test]
fn an_origin_that_was_only_away_is_served_again_and_its_old_steps_are_not_p3() {
    let mut receiver = Receiver::new(ReceiverConfig::default());
    receive(&mut receiver, ReceiverInput::Step { from: HOP, step: step(id(1, 5), 4, b"a") });
    receive(&mut receiver, ReceiverInput::OriginGone(origin(1)));
    let old = receive(&mut receiver, ReceiverInput::Step { from: HOP, step: step(id(1, 5), 4, b"a") });
    assert_eq!(replies(&old)[0].result.as_ref().unwrap_err().code, ErrorCode::Stale);
    let new = receive(&mut receiver, ReceiverInput::Step { from: HOP, step: step(id(1, 6), 6, b"b") });
    assert_eq!(executes(&new), 1);
}

#[test]
fn the_reply_cache_is_kept_per_origin_p2() {
    let mut receiver = Receiver::new(ReceiverConfig::default());
    for of in [1, 2] {
        let outputs =
            receive(&mut receiver, ReceiverInput::Step { from: HOP, step: step(id(of, 3), 0, b"x") });
        assert_eq!(executes(&outputs), 1, "origin {of}");
        let result = Ok(Bytes::from(of.to_le_bytes().to_vec()));
        receive(&mut receiver, ReceiverInput::Done { id: id(of, 3), route: Vec::new(), result });
    }
    for of in [1u64, 2] {
        let outputs =
            receive(&mut receiver, ReceiverInput::Step { from: HOP, step: step(id(of, 3), 0, b"x") });
        assert_eq!(executes(&outputs), 0);
        assert_eq!(replies(&outputs)[0].result.as_ref().unwrap(), &of.to_le_bytes().to_vec());
    }
}

#[test]
fn two_hops_that_send_the_same_step_get_one_execution_and_a_reply_each_p8() {
    let mut receiver = Receiver::new(ReceiverConfig::default());
    let (first, second) = (Incarnation::from_bits(7), Incarnation::from_bits(8));
    let outputs = receive(&mut receiver, ReceiverInput::Step { from: first, step: step(id(1, 1), 0, b"x") });
    assert_eq!(executes(&outputs), 1);
    let outputs = receive(&mut receiver, ReceiverInput::Step { from: second, step: step(id(1, 1), 0, b"x") });
    assert_eq!(executes(&outputs), 0);
    // The first hop's origin of interest is gone; the second still wants it.
    let cancel = Control::Cancel { id: id(1, 1) };
    assert!(
        receive(&mut receiver, ReceiverInput::Control { from: first, control: cancel.clone() }).is_empty()
    );
    let done = ReceiverInput::Done { id: id(1, 1), route: Vec::new(), result: Ok(Bytes::new()) };
    let outputs = receive(&mut receiver, done);
    assert!(matches!(&outputs[..], [ReceiverOutput::Reply { to, .. }] if *to == second), "{outputs:?}");
    // With nobody left who wants it, an execution is stopped (P-12).
    receive(&mut receiver, ReceiverInput::Step { from: first, step: step(id(1, 2), 0, b"x") });
    let cancel = Control::Cancel { id: id(1, 2) };
    let outputs = receive(&mut receiver, ReceiverInput::Control { from: first, control: cancel });
    assert!(matches!(&outputs[..], [ReceiverOutput::Abort { .. }]), "{outputs:?}");
}

#[test]
fn falling_behind_never_makes_a_step_stale_and_its_origins_word_does_p3() {
    let mut receiver = Receiver::new(ReceiverConfig::default());
    for seq in [900, 1] {
        let outputs =
            receive(&mut receiver, ReceiverInput::Step { from: HOP, step: step(id(1, seq), 1, b"x") });
        assert_eq!(executes(&outputs), 1, "step {seq}");
    }
    let outputs =
        receive(&mut receiver, ReceiverInput::Step { from: HOP, step: step(id(1, 901), 899, b"x") });
    assert!(
        outputs
            .iter()
            .any(|output| matches!(output, ReceiverOutput::Abort { id: over, .. } if over.seq == 1))
    );
    let outputs = receive(&mut receiver, ReceiverInput::Step { from: HOP, step: step(id(1, 2), 0, b"x") });
    assert_eq!(replies(&outputs)[0].result.as_ref().unwrap_err().code, ErrorCode::Stale);
}

/// One replica, always there.
#[derive(Debug)]
struct Only(Target);

impl Choose for Only {
    fn pick(&mut self, _prefer: Option<ReplicaNo>, _avoid: Option<ReplicaNo>) -> Option<Target> {
        Some(self.0)
    }
    fn started(&mut self, _target: Target) {}
    fn finished(&mut self, _target: Target) {}
}

fn sender() -> Sender<Only> {
    let target = Target { replica: 0, incarnation: HOP };
    Sender::new(origin(1), SenderConfig::default(), Only(target))
}

fn submit(seq: u64, streaming: bool, deadline: Option<Instant>) -> SenderInput {
    SenderInput::Submit(Submission {
        id: id(1, seq),
        route: Vec::new(),
        completed: None,
        deadline,
        streaming,
        resume: Vec::new(),
        meta: Bytes::new(),
        payload: Bytes::from_static(b"payload"),
        when_full: WhenFull::Wait,
    })
}

fn send(sender: &mut Sender<Only>, now: Instant, input: SenderInput) -> Vec<SenderOutput> {
    sender.handle(now, input);
    core::iter::from_fn(|| sender.poll()).collect()
}

#[test]
fn items_come_out_once_and_in_order_and_a_reply_behind_a_gap_is_asked_for_again() {
    let mut sender = sender();
    send(&mut sender, Instant::ZERO, submit(1, true, None));
    let item = |index, body: &'static [u8]| SenderInput::Item {
        from: HOP,
        item: Item { id: id(1, 1), index, body: Bytes::from_static(body) },
    };
    let out = |outputs: &[SenderOutput]| -> Vec<Bytes> {
        let body = |output: &SenderOutput| match output {
            SenderOutput::Item { body, .. } => Some(body.clone()),
            _ => None,
        };
        outputs.iter().filter_map(body).collect()
    };
    assert_eq!(out(&send(&mut sender, Instant::ZERO, item(0, b"a"))), ["a"]);
    assert!(out(&send(&mut sender, Instant::ZERO, item(0, b"a"))).is_empty(), "an earlier one again");
    assert!(out(&send(&mut sender, Instant::ZERO, item(2, b"c"))).is_empty(), "one behind a gap");
    let reply = Reply { id: id(1, 1), route: Vec::new(), items: 3, result: Ok(Bytes::new()) };
    let outputs = send(&mut sender, Instant::ZERO, SenderInput::Reply { from: HOP, reply: reply.clone() });
    let [SenderOutput::Send { step, .. }] = &outputs[..] else { panic!("{outputs:?}") };
    assert_eq!(step.resume, ["a"], "it is sent again with what is here");
    send(&mut sender, Instant::ZERO, item(1, b"b"));
    send(&mut sender, Instant::ZERO, item(2, b"c"));
    let outputs = send(&mut sender, Instant::ZERO, SenderInput::Reply { from: HOP, reply });
    assert!(outputs.iter().any(|output| matches!(output, SenderOutput::Done { result: Ok(_), .. })));
}

#[test]
fn at_a_deadline_the_replica_is_asked_and_the_outcome_follows_its_answer_p11() {
    use crate::wire::{Outcome, StepState};
    for (state, outcome) in [
        (Some(StepState::Unseen), Outcome::NotStarted),
        (Some(StepState::Executing), Outcome::MayHaveRun),
        (None, Outcome::MayHaveRun),
    ] {
        let mut sender = sender();
        let deadline = Instant::ZERO + Duration::from_millis(10);
        send(&mut sender, Instant::ZERO, submit(1, false, Some(deadline)));
        let outputs = send(&mut sender, deadline, SenderInput::Tick);
        assert!(matches!(&outputs[..], [SenderOutput::Control { control: Control::Ask { .. }, .. }]));
        let outputs = match state {
            Some(state) => {
                let control = Control::Answer { id: id(1, 1), state };
                send(&mut sender, deadline, SenderInput::Control { from: HOP, control })
            }
            None => {
                let grace = sender.deadline().unwrap();
                send(&mut sender, grace, SenderInput::Tick)
            }
        };
        let ended = outputs.iter().find_map(|output| match output {
            SenderOutput::Done { result: Err(error), .. } => Some((error.code, error.outcome)),
            _ => None,
        });
        assert_eq!(ended, Some((ErrorCode::DeadlineExceeded, outcome)), "{state:?}");
        assert_eq!(sender.unfinished(), 0);
    }
}

#[test]
fn an_identity_that_moved_keeps_its_steps_although_another_replica_is_idle_p7() {
    use crate::group::{Group as Members, GroupInput};
    use crate::wire::directory::Route;
    use crate::{Address, Epoch, Evidence, Group};
    let group = Group::new("m", "pp", 1);
    let mut sender = Sender::new(origin(1), SenderConfig::default(), Members::new(group.clone()));
    let appear = |sender: &mut Sender<Members>, replica: ReplicaNo, life: u64| {
        let incarnation = Incarnation::from_bits(life);
        let route = Route {
            lid: group.replica(replica),
            incarnation,
            address: Address::new("mem://x"),
            epoch: Epoch { boot: 1, counter: life },
            ready: true,
            draining: false,
            shadow: None,
        };
        sender.choose_mut().handle(Instant::ZERO, GroupInput::Route(route));
        sender.choose_mut().handle(Instant::ZERO, GroupInput::Up { incarnation });
    };
    appear(&mut sender, 0, 10);
    appear(&mut sender, 1, 11);
    sender.handle(Instant::ZERO, submit(1, false, None));
    let Some(SenderOutput::Send { to, .. }) = sender.poll() else { panic!("it is sent") };
    appear(&mut sender, to.replica, 20);
    let input = SenderInput::Handover { from: to, evidence: Evidence::Superseded };
    sender.handle(Instant::ZERO, input);
    let sent = core::iter::from_fn(|| sender.poll()).find_map(|output| match output {
        SenderOutput::Send { to, .. } => Some(to),
        _ => None,
    });
    assert_eq!(sent, Some(Target { replica: to.replica, incarnation: Incarnation::from_bits(20) }));
}

fn is_sent(outputs: &[SenderOutput], seq: u64) -> bool {
    outputs.iter().any(|output| matches!(output, SenderOutput::Send { step, .. } if step.id == id(1, seq)))
}

fn reply(seq: u64) -> SenderInput {
    let reply = Reply { id: id(1, seq), route: Vec::new(), items: 0, result: Ok(Bytes::new()) };
    SenderInput::Reply { from: HOP, reply }
}

#[test]
fn steps_of_the_origins_other_groups_hold_nobody_back() {
    let mut sender = sender();
    send(&mut sender, Instant::ZERO, submit(1, false, None));
    // Meanwhile the origin submits as many to another group.
    let far = 2 + SenderConfig::default().window;
    let outputs = send(&mut sender, Instant::ZERO, submit(far, false, None));
    assert!(is_sent(&outputs, far));
}

#[test]
fn a_step_that_runs_too_far_ahead_of_an_unfinished_one_waits_for_it_and_does_not_fail() {
    let mut sender = sender();
    let window = SenderConfig::default().window;
    send(&mut sender, Instant::ZERO, submit(1, false, None));
    for seq in 2..=window {
        assert!(is_sent(&send(&mut sender, Instant::ZERO, submit(seq, false, None)), seq));
        send(&mut sender, Instant::ZERO, reply(seq));
    }
    let ahead = window + 1;
    assert!(!is_sent(&send(&mut sender, Instant::ZERO, submit(ahead, false, None)), ahead));
    let late = Instant::ZERO + SenderConfig::default().unavailable_after;
    let outputs = send(&mut sender, late, SenderInput::Tick);
    assert!(!outputs.iter().any(|output| matches!(output, SenderOutput::Done { .. })), "{outputs:?}");
    assert!(is_sent(&send(&mut sender, late, reply(1)), ahead));
}
