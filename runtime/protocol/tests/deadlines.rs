//! P-11: a deadline's outcome is not guessed. The replica is asked, and what it answers, or that it does not answer,
//! is what the submitter is told.

use std::time::Duration;

use bytes::Bytes;
use connex_protocol::step::{
    Choose, Sender, SenderConfig, SenderInput, SenderOutput, Submission, Target, WhenFull,
};
use connex_protocol::wire::{Control, ErrorCode, Outcome, Reply, StepError, StepState};
use connex_protocol::{Incarnation, Instant, Machine, ReplicaNo, StepId};

const STEP: StepId = StepId { origin: Incarnation::from_bits(1), seq: 1 };
const THERE: Target = Target { replica: 0, incarnation: Incarnation::from_bits(2) };
const DEADLINE: Instant = Instant::from_nanos(50_000_000);

/// A group of one replica, or of none.
struct Only(Option<Target>);

impl Choose for Only {
    fn pick(&mut self, _prefer: Option<ReplicaNo>, _avoid: Option<ReplicaNo>) -> Option<Target> {
        self.0
    }

    fn started(&mut self, _target: Target) {}

    fn finished(&mut self, _target: Target) {}
}

/// A submitter with one step under way, and what it did last.
struct Submitter {
    sender: Sender<Only>,
    now: Instant,
}

impl Submitter {
    fn new(replica: Option<Target>) -> Self {
        let mut submitter = Submitter {
            sender: Sender::new(STEP.origin, SenderConfig::default(), Only(replica)),
            now: Instant::ZERO,
        };
        submitter.hears(SenderInput::Submit(Submission {
            id: STEP,
            route: Vec::new(),
            completed: None,
            deadline: Some(DEADLINE),
            streaming: false,
            resume: Vec::new(),
            meta: Bytes::new(),
            payload: Bytes::from_static(b"payload"),
            when_full: WhenFull::Wait,
        }));
        submitter
    }

    fn hears(&mut self, input: SenderInput) -> Vec<SenderOutput> {
        self.sender.handle(self.now, input);
        std::iter::from_fn(|| self.sender.poll()).collect()
    }

    /// Time passes up to what the machine waits for.
    fn waits(&mut self) -> Vec<SenderOutput> {
        self.now = self.sender.deadline().expect("something is waited for");
        self.hears(SenderInput::Tick)
    }

    /// The deadline passes with the step at the replica: nothing but a question to it follows.
    fn asks(&mut self) {
        let outputs = self.waits();
        assert_eq!(self.now, DEADLINE);
        assert!(
            matches!(&outputs[..], [SenderOutput::Control { to, control: Control::Ask { id: STEP } }]
                if *to == THERE.incarnation),
            "{outputs:?}"
        );
    }

    fn answered(&mut self, state: StepState) -> Vec<SenderOutput> {
        self.hears(SenderInput::Control {
            from: THERE.incarnation,
            control: Control::Answer { id: STEP, state },
        })
    }

    fn replied(&mut self, body: &'static [u8]) -> Vec<SenderOutput> {
        let reply = Reply { id: STEP, route: vec![0], items: 0, result: Ok(Bytes::from_static(body)) };
        self.hears(SenderInput::Reply { from: THERE.incarnation, reply })
    }
}

/// How the step ended, if it did.
fn end(outputs: &[SenderOutput]) -> Option<Result<Bytes, StepError>> {
    let mut ends = outputs.iter().filter_map(|output| match output {
        SenderOutput::Done { id: STEP, result, .. } => Some(result.clone()),
        _ => None,
    });
    let end = ends.next();
    assert!(ends.next().is_none(), "a step ends once (P-1): {outputs:?}");
    end
}

/// The outcome of a step that ended at its deadline.
fn outcome(outputs: &[SenderOutput]) -> Outcome {
    let error = end(outputs).expect("it ended").expect_err("it ended without its reply");
    assert_eq!(error.code, ErrorCode::DeadlineExceeded);
    error.outcome
}

fn cancels(outputs: &[SenderOutput]) -> bool {
    outputs.iter().any(|output| {
        matches!(output, SenderOutput::Control { to, control: Control::Cancel { id: STEP } }
            if *to == THERE.incarnation)
    })
}

#[test]
fn a_step_that_never_left_did_not_start() {
    let mut submitter = Submitter::new(None);
    assert_eq!(outcome(&submitter.waits()), Outcome::NotStarted);
    assert_eq!(submitter.now, DEADLINE);
}

#[test]
fn a_step_that_the_replica_has_not_seen_did_not_start() {
    let mut submitter = Submitter::new(Some(THERE));
    submitter.asks();
    let outputs = submitter.answered(StepState::Unseen);
    assert_eq!(outcome(&outputs), Outcome::NotStarted);
    assert!(cancels(&outputs), "it may still be on its way: {outputs:?}");
}

#[test]
fn a_step_that_executes_may_have_run_and_is_stopped() {
    let mut submitter = Submitter::new(Some(THERE));
    submitter.asks();
    let outputs = submitter.answered(StepState::Executing);
    assert_eq!(outcome(&outputs), Outcome::MayHaveRun);
    assert!(cancels(&outputs), "{outputs:?}");
}

#[test]
fn a_replica_that_does_not_answer_leaves_it_open_for_a_short_while_only() {
    let mut submitter = Submitter::new(Some(THERE));
    submitter.asks();
    let outputs = submitter.waits();
    assert_eq!(submitter.now.since(DEADLINE), SenderConfig::default().ask_grace);
    assert_eq!(outcome(&outputs), Outcome::MayHaveRun);
    assert!(submitter.now.since(DEADLINE) < Duration::from_secs(1));
}

/// P-5 as well: the first reply is the step's end, and whatever comes after it is dropped.
#[test]
fn a_step_that_finished_in_time_has_its_reply_and_no_other() {
    let mut submitter = Submitter::new(Some(THERE));
    submitter.asks();
    assert_eq!(end(&submitter.answered(StepState::Finished)), None, "its reply follows");
    assert_eq!(end(&submitter.replied(b"first")), Some(Ok(Bytes::from_static(b"first"))));
    assert_eq!(end(&submitter.replied(b"second")), None);
    assert_eq!(end(&submitter.answered(StepState::Unseen)), None);
}
