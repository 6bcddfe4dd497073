use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use connex_actors::{Endpoint, EndpointFactory, StepContext};
use connex_protocol::StepId;
use connex_protocol::wire::ErrorCode;
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::{self, JoinSet};

/// An endpoint from a function that runs each step on the endpoint's own thread, one after the other. An `Err` is the
/// application's failure of that step alone.
pub fn serve_fn<F>(run: F) -> EndpointFactory
where
    F: Fn(&StepContext) -> Result<Bytes, String> + Send + Sync + 'static,
{
    let run = Arc::new(run);
    Arc::new(move |_place| Ok(Box::new(FnEndpoint { run: run.clone() }) as Box<dyn Endpoint>))
}

/// An endpoint from an async function: each step runs as a task of the caller's tokio runtime, concurrently. A step that
/// is no longer wanted here (cancelled, or to go on elsewhere) has its future dropped, and so has every step when the
/// node ends (P-12). A panic fails that step alone.
///
/// Must be called inside a tokio runtime.
pub fn serve_async<F, R>(run: F) -> EndpointFactory
where
    F: Fn(Arc<StepContext>) -> R + Send + Sync + 'static,
    R: Future<Output = Result<Bytes, String>> + Send + 'static,
{
    let runtime = Handle::current();
    let run: Arc<BoxedRun> = Arc::new(move |step| run(step).boxed());
    Arc::new(move |_place| {
        Ok(Box::new(AsyncEndpoint {
            runtime: runtime.clone(),
            run: run.clone(),
            tasks: JoinSet::new(),
            steps: HashMap::new(),
            aborts: HashMap::new(),
        }) as Box<dyn Endpoint>)
    })
}

struct FnEndpoint<F> {
    run: Arc<F>,
}

impl<F> Endpoint for FnEndpoint<F>
where
    F: Fn(&StepContext) -> Result<Bytes, String> + Send + Sync + 'static,
{
    fn execute(&mut self, step: StepContext) {
        match (self.run)(&step) {
            Ok(body) => step.finish(Ok(body)),
            Err(why) => step.fail(why),
        }
    }
}

type BoxedRun = dyn Fn(Arc<StepContext>) -> BoxFuture<'static, Result<Bytes, String>> + Send + Sync;

struct AsyncEndpoint {
    runtime: Handle,
    run: Arc<BoxedRun>,
    /// The steps that run; they end with the endpoint. The receiver bounds their number.
    tasks: JoinSet<()>,
    steps: HashMap<task::Id, StepId>,
    aborts: HashMap<StepId, oneshot::Sender<ErrorCode>>,
}

impl AsyncEndpoint {
    /// Forgets the steps that have ended.
    fn reap(&mut self) {
        while let Some(ended) = self.tasks.try_join_next_with_id() {
            // A panic has failed its step already, by dropping its context.
            let task = ended.map_or_else(|error| error.id(), |(task, ())| task);
            if let Some(step) = self.steps.remove(&task) {
                self.aborts.remove(&step);
            }
        }
    }
}

impl Endpoint for AsyncEndpoint {
    fn execute(&mut self, step: StepContext) {
        self.reap();
        let (id, run) = (step.id(), self.run.clone());
        let (abort, aborted) = oneshot::channel();
        let task = self.tasks.spawn_on(run_step(run, Arc::new(step), aborted), &self.runtime);
        self.steps.insert(task.id(), id);
        self.aborts.insert(id, abort);
    }

    fn abort(&mut self, id: StepId, code: ErrorCode) {
        self.reap();
        if let Some(abort) = self.aborts.remove(&id) {
            // A step that ends at this moment needs no word.
            let _ = abort.send(code);
        }
    }
}

async fn run_step(run: Arc<BoxedRun>, step: Arc<StepContext>, aborted: oneshot::Receiver<ErrorCode>) {
    let end = tokio::select! {
        result = run(step.clone()) => Ok(result),
        Ok(code) = aborted => Err(code),
    };
    // A function that kept a clone of the context fails its own step: nobody could end it otherwise.
    if let Some(step) = Arc::into_inner(step) {
        match end {
            Ok(Ok(body)) => step.finish(Ok(body)),
            Ok(Err(why)) => step.fail(why),
            Err(code) => step.finish_aborted(code),
        }
    }
}
