use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use connex_protocol::step::Job;
use connex_protocol::wire::{ErrorCode, Outcome, StepError};
use connex_protocol::{Incarnation, ReplicaNo, StepId};

use crate::{Core, ServedCell};

/// What a served endpoint does with its steps. One thread of its own drives it.
pub trait Endpoint: Send {
    /// Executes a step, or keeps its context and finishes it later, from any thread. Each step comes at most once.
    fn execute(&mut self, step: StepContext);

    /// The step is no longer wanted, or is to go on elsewhere; it still has to be finished, with this code.
    fn abort(&mut self, _id: StepId, _code: ErrorCode) {}

    /// A word from a submitter's application.
    fn notice(&mut self, _from: Incarnation, _body: Bytes) {}

    /// An origin is gone for good: drop what is kept for it.
    fn forget(&mut self, _origin: Incarnation) {}

    /// [`Wake::wake`] was called.
    fn woken(&mut self) {}
}

/// What an endpoint is made with.
pub struct Place {
    /// The node that it is served by.
    pub core: Arc<Core>,
    /// Wakes the endpoint's thread.
    pub wake: Wake,
}

/// Makes the endpoint, on its own thread: at the start, and again after a panic.
pub type EndpointFactory = Arc<dyn Fn(Place) -> Result<Box<dyn Endpoint>, String> + Send + Sync>;

/// Wakes an endpoint's thread: [`Endpoint::woken`] is called soon after, once for any number of calls.
#[derive(Clone)]
pub struct Wake {
    inbox: Arc<Inbox>,
}

impl Wake {
    pub(crate) fn new(inbox: Arc<Inbox>) -> Self {
        Wake { inbox }
    }

    /// Wakes it.
    pub fn wake(&self) {
        self.inbox.push(Work::Woken);
    }
}

/// Work for an endpoint's thread.
pub(crate) enum Work {
    Execute(StepContext),
    Abort(StepId, ErrorCode),
    Notice(Incarnation, Bytes),
    Forget(Incarnation),
    Woken,
    Stop,
}

/// Notices that may wait for an endpoint's thread. Further ones are not acknowledged, so their sender, which keeps a
/// bounded number itself, sends them again.
const NOTICES_MAX: usize = 1024;

/// The queue in front of an endpoint's thread. The receiver bounds the steps in it.
#[derive(Default)]
pub(crate) struct Inbox {
    queue: Mutex<Queue>,
    filled: Condvar,
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    woken: bool,
    waiting: bool,
    closed: bool,
    notices: usize,
}

impl Inbox {
    pub(crate) fn push(&self, work: Work) {
        let mut queue = self.queue.lock().expect("no holder panics");
        if queue.closed || matches!(work, Work::Woken) && std::mem::replace(&mut queue.woken, true) {
            // Dropped without the lock: a step that is dropped tells its cell.
            drop(queue);
            drop(work);
            return;
        }
        queue.notices += usize::from(matches!(work, Work::Notice(..)));
        queue.work.push_back(work);
        if queue.waiting {
            self.filled.notify_one();
        }
    }

    /// Whether another notice may wait.
    pub(crate) fn takes_notices(&self) -> bool {
        self.queue.lock().expect("no holder panics").notices < NOTICES_MAX
    }

    /// Ends the queue for good: what waits in it is dropped, and whoever takes work from it is told to stop.
    pub(crate) fn close(&self) {
        let mut queue = self.queue.lock().expect("no holder panics");
        queue.closed = true;
        let dropped = std::mem::take(&mut queue.work);
        drop(queue);
        self.filled.notify_all();
        drop(dropped);
    }

    /// Takes the steps that wait.
    pub(crate) fn steps(&self) -> Vec<StepContext> {
        let mut queue = self.queue.lock().expect("no holder panics");
        let (mut steps, mut rest) = (Vec::new(), VecDeque::new());
        for work in queue.work.drain(..) {
            match work {
                Work::Execute(step) => steps.push(step),
                other => rest.push_back(other),
            }
        }
        queue.work = rest;
        steps
    }

    pub(crate) fn try_pop(&self) -> Option<Work> {
        let mut queue = self.queue.lock().expect("no holder panics");
        Self::take(&mut queue)
    }

    /// Waits for work.
    pub(crate) fn pop(&self) -> Work {
        let mut queue = self.queue.lock().expect("no holder panics");
        loop {
            if let Some(work) = Self::take(&mut queue) {
                return work;
            }
            queue.waiting = true;
            queue = self.filled.wait(queue).expect("no holder panics");
            queue.waiting = false;
        }
    }

    fn take(queue: &mut Queue) -> Option<Work> {
        if queue.closed {
            return Some(Work::Stop);
        }
        let work = queue.work.pop_front()?;
        match work {
            Work::Woken => queue.woken = false,
            Work::Notice(..) => queue.notices -= 1,
            _ => {}
        }
        Some(work)
    }
}

/// What others may see of a step while it executes.
#[derive(Default)]
pub(crate) struct StepFlag {
    cancelled: AtomicBool,
}

impl StepFlag {
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }
}

/// Shows how an endpoint's engine gets on; heartbeats carry it.
#[derive(Default)]
pub(crate) struct Busy {
    /// Nanoseconds on the node's clock at which the present step began or last made progress; 0 when idle.
    since: AtomicU64,
}

impl Busy {
    pub(crate) fn set(&self, nanos: u64) {
        self.since.store(nanos, Ordering::Relaxed);
    }

    pub(crate) fn since(&self) -> u64 {
        self.since.load(Ordering::Relaxed)
    }
}

/// A step in the hands of an endpoint. Dropping it unfinished is a typed error at its submitter.
pub struct StepContext {
    job: Job,
    served: Arc<ServedCell>,
    flag: Arc<StepFlag>,
    received: Instant,
    finished: bool,
}

impl StepContext {
    pub(crate) fn new(job: Job, served: Arc<ServedCell>, flag: Arc<StepFlag>) -> Self {
        StepContext { job, served, flag, received: Instant::now(), finished: false }
    }

    /// The step's identity.
    pub fn id(&self) -> StepId {
        self.job.id
    }

    /// The step as it arrived.
    pub fn job(&self) -> &Job {
        &self.job
    }

    /// The application's metadata.
    pub fn meta(&self) -> &Bytes {
        &self.job.meta
    }

    /// The payload.
    pub fn payload(&self) -> &Bytes {
        &self.job.payload
    }

    /// The items that the submitter already has: a streaming step goes on after them.
    pub fn resume(&self) -> &[Bytes] {
        &self.job.resume
    }

    /// Whether the step is no longer wanted here.
    pub fn cancelled(&self) -> bool {
        self.flag.cancelled.load(Ordering::Relaxed)
    }

    /// What is left of the step's deadline; `None` without one.
    pub fn remaining(&self) -> Option<Duration> {
        let deadline = Duration::from_millis(self.job.deadline_ms?.into());
        Some(deadline.saturating_sub(self.received.elapsed()))
    }

    /// Now, on the node's clock.
    pub fn now(&self) -> connex_protocol::Instant {
        self.served.now()
    }

    /// Says that the engine makes progress; a long step calls it now and then.
    pub fn progress(&self) {
        self.served.mark_busy();
    }

    /// Yields the next item of a streaming step.
    pub fn item(&self, body: Bytes) {
        self.served.item(self.job.id, body);
    }

    /// Ends the step, served by this replica alone.
    pub fn finish(self, result: Result<Bytes, StepError>) {
        self.finish_via(&[], result);
    }

    /// Ends the step, served by this replica and then by these of the later stages.
    pub fn finish_via(mut self, later: &[ReplicaNo], result: Result<Bytes, StepError>) {
        self.finished = true;
        self.served.done(self.job.id, later, result);
    }

    /// Fails the step in the application's name, after it ran.
    pub fn fail(self, why: impl Into<String>) {
        self.finish(Err(StepError::new(ErrorCode::Application, Outcome::Ran, why)));
    }

    /// Gives the step back before anything was done with it: it goes to another replica, or waits for one.
    pub(crate) fn give_back(self) {
        let text = "the replica has no engine for it";
        self.finish(Err(StepError::new(ErrorCode::Draining, Outcome::NotStarted, text)));
    }

    /// Ends the step as aborted with this code.
    pub fn finish_aborted(self, code: ErrorCode) {
        let text = match code {
            ErrorCode::Draining => "the replica is leaving and gives the step back",
            _ => "the step was cancelled while it executed",
        };
        self.finish(Err(StepError::new(code, Outcome::MayHaveRun, text)));
    }
}

impl Drop for StepContext {
    fn drop(&mut self) {
        if !self.finished {
            let text = "the endpoint dropped the step without finishing it";
            let error = StepError::new(ErrorCode::Internal, Outcome::MayHaveRun, text);
            self.served.done(self.job.id, &[], Err(error));
        }
    }
}
