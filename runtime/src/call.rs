use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use connex_actors::{Core, GroupCell, ReplicaStatus, StepEnd, StepSink};
use connex_protocol::step::{SenderInput, Submission, WhenFull};
use connex_protocol::wire::{ErrorCode, Outcome, StepError};
use connex_protocol::{Group, ReplicaNo, StepId};
use futures::Stream;
use tokio::sync::{mpsc, oneshot};

/// A step that is to be submitted: metadata, a payload, and how it is to be treated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    meta: Bytes,
    payload: Bytes,
    deadline: Option<Duration>,
    route: Vec<ReplicaNo>,
}

impl Step {
    /// A step with this metadata, which travels in the control frame: with all else it fits into 1 MiB.
    pub fn new(meta: impl Into<Bytes>) -> Self {
        Step { meta: meta.into(), ..Step::default() }
    }

    /// With this payload. It is immutable until the step's end, and comes back with an error.
    pub fn payload(mut self, payload: impl Into<Bytes>) -> Self {
        self.payload = payload.into();
        self
    }

    /// With this deadline, counted from the submission.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Preferring these replicas, at the group and then at each later stage.
    pub fn route(mut self, route: impl Into<Vec<ReplicaNo>>) -> Self {
        self.route = route.into();
        self
    }
}

/// The reply to a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The application's bytes.
    pub body: Bytes,
    /// The replicas that served it, at the group and then at each later stage.
    pub route: Vec<ReplicaNo>,
}

/// A step that did not end in a reply. Says whether its work was done, and hands the step back.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{error} ({})", outcome_text(error.outcome))]
pub struct CallError {
    /// What kind of failure it is, whether the step ran, and a text for people.
    pub error: StepError,
    /// The step, with its payload.
    pub step: Step,
}

impl CallError {
    /// Whether the step ran.
    pub fn outcome(&self) -> Outcome {
        self.error.outcome
    }

    /// The kind of failure.
    pub fn code(&self) -> ErrorCode {
        self.error.code
    }
}

fn outcome_text(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::NotStarted => "not started",
        Outcome::MayHaveRun => "may have run",
        Outcome::Ran => "ran",
    }
}

/// A group of replicas, as a place to submit steps to. Cheap to clone.
#[derive(Clone)]
pub struct GroupHandle {
    core: Arc<Core>,
    cell: Arc<GroupCell>,
}

impl GroupHandle {
    pub(crate) fn new(core: Arc<Core>, group: &Group) -> Self {
        let k = core.config().sender.k;
        let cell = core.group(group, k);
        GroupHandle { core, cell }
    }

    /// The group's name.
    pub fn name(&self) -> &Group {
        self.cell.group()
    }

    /// The group's cell, for those who drive it themselves.
    pub fn cell(&self) -> &Arc<GroupCell> {
        &self.cell
    }

    /// Waits until a replica can take a step, or the node has ended: a step that is submitted then ends at once, as
    /// not started.
    pub async fn ready(&self) {
        self.cell.ready().await;
    }

    /// The replicas, as this node sees them.
    pub fn replicas(&self) -> Vec<ReplicaStatus> {
        self.cell.replicas()
    }

    /// Accepted steps that have not ended.
    pub fn unfinished(&self) -> usize {
        self.cell.unfinished()
    }

    /// Submits a step and waits for its end; beyond K steps in flight it waits its turn. Dropping the future cancels
    /// the step, here and at the replica.
    pub async fn call(&self, step: Step) -> Result<Reply, CallError> {
        let pending = self.start(step, WhenFull::Wait).await?;
        pending.await
    }

    /// Submits a step, or hands it back at once if K steps are in flight. The reply is awaited separately.
    pub fn try_call(&self, step: Step) -> Result<Pending, CallError> {
        self.submit(step, WhenFull::Refuse)
    }

    /// Submits a step without waiting for its reply; waits only for room in the mailbox.
    pub async fn start(&self, step: Step, when_full: WhenFull) -> Result<Pending, CallError> {
        let mut step = step;
        loop {
            match self.submit(step, when_full) {
                Err(refused)
                    if refused.error.code == ErrorCode::Overloaded && when_full == WhenFull::Wait =>
                {
                    step = refused.step;
                    self.cell.room().await;
                }
                other => return other,
            }
        }
    }

    /// Submits a step from a thread outside any async runtime, and makes the transport's progress itself until the
    /// reply is there: no other thread has to be woken for it. With `spin` it never sleeps in between. Beyond K steps
    /// in flight it waits its turn; a full mailbox hands the step back as [`ErrorCode::Overloaded`].
    pub fn call_blocking(&self, step: Step, spin: bool) -> Result<Reply, CallError> {
        let ended = Arc::new(Ended::default());
        let sink = Box::new(BlockingSink { ended: ended.clone() });
        self.submit_to(step.clone(), false, WhenFull::Wait, sink)?;
        let wait = if spin { Duration::ZERO } else { Duration::from_millis(1) };
        loop {
            if let Some(end) = ended.end.lock().expect("no holder panics").take() {
                return match end.result {
                    Ok(body) => Ok(Reply { body, route: end.route }),
                    Err(error) => Err(CallError { error, step }),
                };
            }
            if !self.core.transport().progress(wait) && !spin {
                // Somebody else makes progress, and wakes this thread when the end is there.
                let end = ended.end.lock().expect("no holder panics");
                if end.is_none() {
                    let waited = ended.there.wait_timeout(end, Duration::from_millis(1));
                    drop(waited.expect("no holder panics"));
                }
            }
        }
    }

    /// Submits a streaming step: its items arrive one by one, each once and in order, across handovers.
    pub async fn stream(&self, step: Step) -> Result<Streaming, CallError> {
        let mut step = step;
        loop {
            match self.submit_stream(step) {
                Err(refused) if refused.error.code == ErrorCode::Overloaded => {
                    step = refused.step;
                    self.cell.room().await;
                }
                other => return other,
            }
        }
    }

    fn submit(&self, step: Step, when_full: WhenFull) -> Result<Pending, CallError> {
        let (done, reply) = oneshot::channel();
        let sink = Box::new(ReplySink { done });
        let id = self.submit_to(step.clone(), false, when_full, sink)?;
        Ok(Pending { step, reply, cancel: Cancel { cell: self.cell.clone(), id, ended: false } })
    }

    fn submit_stream(&self, step: Step) -> Result<Streaming, CallError> {
        // Bounded by the sender, which keeps every item until the step's end and takes `items_bytes` of them at most.
        let (items, stream) = mpsc::unbounded_channel();
        let (done, reply) = oneshot::channel();
        let sink = Box::new(StreamSink { items, done });
        let id = self.submit_to(step.clone(), true, WhenFull::Wait, sink)?;
        let cancel = Cancel { cell: self.cell.clone(), id, ended: false };
        Ok(Streaming { items: stream, end: Pending { step, reply, cancel } })
    }

    fn submit_to(
        &self,
        step: Step,
        streaming: bool,
        when_full: WhenFull,
        sink: Box<dyn StepSink>,
    ) -> Result<StepId, CallError> {
        if step.payload.len() > self.core.config().payload_max {
            let text = format!(
                "the payload has {} bytes, this node sends at most {}: split it, or raise payload_max",
                step.payload.len(),
                self.core.config().payload_max
            );
            return Err(CallError {
                error: StepError::new(ErrorCode::TooLarge, Outcome::NotStarted, text),
                step,
            });
        }
        let deadline = step.deadline.map(|deadline| self.core.clock().now() + deadline);
        let make = |id| Submission {
            id,
            route: step.route.clone(),
            completed: None,
            deadline,
            streaming,
            resume: Vec::new(),
            meta: step.meta.clone(),
            payload: step.payload.clone(),
            when_full,
        };
        self.cell.submit_own(make, sink).map_err(|_| {
            let text = "no room: K steps are in flight, or the mailbox is full; wait for replies";
            CallError {
                error: StepError::new(ErrorCode::Overloaded, Outcome::NotStarted, text),
                step: step.clone(),
            }
        })
    }
}

struct ReplySink {
    done: oneshot::Sender<StepEnd>,
}

impl StepSink for ReplySink {
    fn item(&mut self, _body: Bytes) {}

    fn done(self: Box<Self>, end: StepEnd) {
        // Nobody waiting any more is the caller's choice.
        let _ = self.done.send(end);
    }
}

/// The end of a step that a thread waits for.
#[derive(Default)]
struct Ended {
    end: Mutex<Option<StepEnd>>,
    there: Condvar,
}

struct BlockingSink {
    ended: Arc<Ended>,
}

impl StepSink for BlockingSink {
    fn item(&mut self, _body: Bytes) {}

    fn done(self: Box<Self>, end: StepEnd) {
        *self.ended.end.lock().expect("no holder panics") = Some(end);
        self.ended.there.notify_one();
    }
}

struct StreamSink {
    items: mpsc::UnboundedSender<Bytes>,
    done: oneshot::Sender<StepEnd>,
}

impl StepSink for StreamSink {
    fn item(&mut self, body: Bytes) {
        let _ = self.items.send(body);
    }

    fn done(self: Box<Self>, end: StepEnd) {
        let _ = self.done.send(end);
    }
}

/// Cancels its step when dropped before the step's end (P-12).
struct Cancel {
    cell: Arc<GroupCell>,
    id: StepId,
    ended: bool,
}

impl Drop for Cancel {
    fn drop(&mut self) {
        if !self.ended {
            self.cell.drive(SenderInput::Cancel(self.id));
        }
    }
}

/// A submitted step; await it for its end, drop it to cancel it.
pub struct Pending {
    step: Step,
    reply: oneshot::Receiver<StepEnd>,
    cancel: Cancel,
}

impl Pending {
    /// The step's identity.
    pub fn id(&self) -> StepId {
        self.cancel.id
    }
}

impl Future for Pending {
    type Output = Result<Reply, CallError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let end = match Pin::new(&mut self.reply).poll(cx) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(end) => end,
        };
        self.cancel.ended = true;
        let step = std::mem::take(&mut self.step);
        Poll::Ready(match end {
            Ok(StepEnd { route, result: Ok(body) }) => Ok(Reply { body, route }),
            Ok(StepEnd { result: Err(error), .. }) => Err(CallError { error, step }),
            Err(_) => {
                let text = "the node was shut down before the step's end";
                Err(CallError { error: StepError::new(ErrorCode::Internal, Outcome::MayHaveRun, text), step })
            }
        })
    }
}

/// A submitted streaming step: a stream of its items; then [`Streaming::end`] for its end.
pub struct Streaming {
    items: mpsc::UnboundedReceiver<Bytes>,
    end: Pending,
}

impl Streaming {
    /// The step's identity.
    pub fn id(&self) -> StepId {
        self.end.id()
    }

    /// The next item; `None` once there are no more, and [`Streaming::end`] says why.
    pub async fn next(&mut self) -> Option<Bytes> {
        self.items.recv().await
    }

    /// Waits for the step's end. Items that were not taken are dropped.
    pub async fn end(self) -> Result<Reply, CallError> {
        self.end.await
    }
}

impl Stream for Streaming {
    type Item = Bytes;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        self.items.poll_recv(cx)
    }
}
