use std::future::Future;
use std::sync::Arc;

use bytes::Bytes;
use connex_actors::{Endpoint, EndpointFactory, StepContext};
use tokio::runtime::Handle;

/// An endpoint from a function that runs each step on the endpoint's own thread, one after the other. An `Err` is the
/// application's failure of that step alone.
pub fn serve_fn<F>(run: F) -> EndpointFactory
where
    F: Fn(&StepContext) -> Result<Bytes, String> + Send + Sync + 'static,
{
    let run = Arc::new(run);
    Arc::new(move |_place| Ok(Box::new(FnEndpoint { run: run.clone() }) as Box<dyn Endpoint>))
}

/// An endpoint from an async function: each step runs as a task of the caller's tokio runtime, concurrently.
///
/// Must be called inside a tokio runtime.
pub fn serve_async<F, R>(run: F) -> EndpointFactory
where
    F: Fn(Arc<StepContext>) -> R + Send + Sync + 'static,
    R: Future<Output = Result<Bytes, String>> + Send + 'static,
{
    let runtime = Handle::current();
    let run = Arc::new(run);
    Arc::new(move |_place| {
        let (runtime, run) = (runtime.clone(), run.clone());
        Ok(Box::new(AsyncEndpoint { runtime, run: Box::new(move |step| Box::pin(run(step))) })
            as Box<dyn Endpoint>)
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

type BoxedRun = Box<
    dyn Fn(Arc<StepContext>) -> std::pin::Pin<Box<dyn Future<Output = Result<Bytes, String>> + Send>> + Send,
>;

struct AsyncEndpoint {
    runtime: Handle,
    run: BoxedRun,
}

impl Endpoint for AsyncEndpoint {
    fn execute(&mut self, step: StepContext) {
        let step = Arc::new(step);
        let running = (self.run)(step.clone());
        self.runtime.spawn(async move {
            let result = running.await;
            // A function that kept a clone of the context fails its own step: nobody could end it otherwise.
            if let Some(step) = Arc::into_inner(step) {
                match result {
                    Ok(body) => step.finish(Ok(body)),
                    Err(why) => step.fail(why),
                }
            }
        });
    }
}
