//! Clients that keep a deployment busy, and check each answer against the harness's own model of the automaton.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use connex::engine::toy;
use connex::pipeline::{self, RequestMeta};
use connex::{GroupHandle, Step};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::report::say;

/// What came of the requests so far.
#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) submitted: AtomicU64,
    pub(crate) completed: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) wrong: AtomicU64,
    pub(crate) tokens: AtomicU64,
    /// Rung at each token.
    progress: Notify,
}

impl Counts {
    /// Waits until this many more tokens are out.
    pub(crate) async fn tokens_more(&self, more: u64) {
        let target = self.tokens.load(Ordering::SeqCst) + more;
        loop {
            let progress = self.progress.notified();
            if self.tokens.load(Ordering::SeqCst) >= target {
                return;
            }
            progress.await;
        }
    }
}

/// Clients at work.
pub(crate) struct Load {
    pub(crate) counts: Arc<Counts>,
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<()>>,
}

impl Load {
    /// Starts this many clients, each with one request at a time.
    pub(crate) fn start(group: &GroupHandle, layers: u32, clients: u32, seed: u64) -> Self {
        let (counts, stop) = (Arc::<Counts>::default(), Arc::new(AtomicBool::new(false)));
        let clients = (0..clients)
            .map(|number| {
                let rng = StdRng::seed_from_u64(seed.wrapping_mul(1000).wrapping_add(number.into()));
                let (group, counts, stop) = (group.clone(), counts.clone(), stop.clone());
                tokio::spawn(async move {
                    let mut rng = rng;
                    while !stop.load(Ordering::SeqCst) {
                        request(&group, layers, &mut rng, &counts).await;
                    }
                })
            })
            .collect();
        Load { counts, stop, clients }
    }

    /// Lets every client finish its request. One that does not end in a minute is lost: the count of lost ones.
    pub(crate) async fn finish(self) -> u64 {
        self.stop.store(true, Ordering::SeqCst);
        let mut lost = 0;
        for client in self.clients {
            match tokio::time::timeout(std::time::Duration::from_secs(60), client).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) | Err(_) => lost += 1,
            }
        }
        lost
    }
}

async fn request(group: &GroupHandle, layers: u32, rng: &mut StdRng, counts: &Counts) {
    let length = rng.random_range(1..24);
    let prompt: Vec<u32> = (0..length).map(|_| rng.random_range(0..50_000)).collect();
    let tokens = rng.random_range(8..64);
    let step =
        Step::new(RequestMeta { max_tokens: tokens }.encode()).payload(pipeline::encode_tokens(&prompt));
    counts.submitted.fetch_add(1, Ordering::SeqCst);
    let failed = |error: &dyn std::fmt::Display| {
        say!("a request failed: {error}");
        counts.failed.fetch_add(1, Ordering::SeqCst);
    };
    let mut stream = match group.stream(step).await {
        Ok(stream) => stream,
        Err(error) => return failed(&error),
    };
    let mut output = Vec::new();
    while let Some(item) = stream.next().await {
        output.extend(pipeline::decode_tokens(&item).unwrap_or_default());
        counts.tokens.fetch_add(1, Ordering::SeqCst);
        counts.progress.notify_waiters();
    }
    match stream.end().await {
        Ok(_) => {
            counts.completed.fetch_add(1, Ordering::SeqCst);
        }
        Err(error) => failed(&error),
    }
    let wanted = toy::expected(layers, &prompt, tokens as usize);
    let wrong = output.iter().zip(&wanted).filter(|(got, wanted)| got != wanted).count()
        + output.len().abs_diff(wanted.len());
    counts.wrong.fetch_add(wrong as u64, Ordering::SeqCst);
}
