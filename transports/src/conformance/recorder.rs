use std::future::Future;
use std::sync::{Condvar, Mutex};
use std::thread::{self, ThreadId};
use std::time::Instant;

use bytes::Bytes;
use connex_protocol::wire::hello::Lane;
use connex_protocol::wire::{self, Frame, Payload};
use connex_protocol::{Evidence, Incarnation};

use super::PATIENCE;
use crate::{Completion, Event, Handler, OpId};

/// A handler that keeps what it is given.
#[derive(Default)]
pub struct Recorder {
    seen: Mutex<Seen>,
    changed: Condvar,
    /// Panic at the frame with this number.
    panic_at: Mutex<Option<u64>>,
}

/// What a [`Recorder`] has seen.
#[derive(Default)]
pub struct Seen {
    /// Every event, in order.
    pub events: Vec<Event>,
    /// On which thread each came.
    pub threads: Vec<ThreadId>,
    /// The panics that the transport reported.
    pub panics: Vec<String>,
}

impl Seen {
    /// How often a life came up.
    pub fn up(&self, life: Incarnation) -> usize {
        self.count(|event| matches!(event, Event::Up { peer, .. } if peer.incarnation == life))
    }

    /// With what evidence a life went down, each time.
    pub fn down(&self, life: Incarnation) -> Vec<Evidence> {
        let evidence = |event: &Event| match event {
            Event::Down { peer, evidence } if peer.incarnation == life => Some(*evidence),
            _ => None,
        };
        self.events.iter().filter_map(evidence).collect()
    }

    /// How often a life lost one of its two links.
    pub fn relinked(&self, life: Incarnation) -> usize {
        self.count(|event| matches!(event, Event::Relinked { peer } if peer.incarnation == life))
    }

    /// The completions of an operation.
    pub fn completions(&self, id: OpId) -> Vec<&Completion> {
        let mut out = Vec::new();
        for event in &self.events {
            match event {
                Event::Completed(completion) if completion.id == id => out.push(completion),
                _ => {}
            }
        }
        out
    }

    /// The steps' numbers and payloads from a life, on a lane, in order of arrival.
    pub fn steps(&self, from: Incarnation, on: Lane) -> Vec<(u64, Bytes)> {
        let step = |event: &Event| match event {
            Event::Message { from: sender, lane, frame } if *sender == from && *lane == on => {
                match wire::decode(frame.clone()).expect("a frame arrives as it was sent").frame {
                    Frame::Step(step) => match step.payload {
                        Payload::Inline(body) => Some((step.id.seq, body)),
                        Payload::Slot(_) => None,
                    },
                    _ => None,
                }
            }
            _ => None,
        };
        self.events.iter().filter_map(step).collect()
    }

    fn count(&self, is: impl Fn(&Event) -> bool) -> usize {
        self.events.iter().filter(|event| is(event)).count()
    }
}

impl Recorder {
    /// Looks at what was seen so far.
    pub fn look<T>(&self, look: impl FnOnce(&Seen) -> T) -> T {
        look(&self.seen.lock().expect("the recorder panics outside its lock"))
    }

    /// Forgets what was seen so far.
    pub fn clear(&self) {
        *self.seen.lock().expect("the recorder panics outside its lock") = Seen::default();
    }

    /// Waits until `until` holds; panics with `what` when patience ends.
    pub fn wait_for(&self, what: &str, until: impl Fn(&Seen) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        let mut seen = self.seen.lock().expect("the recorder panics outside its lock");
        while !until(&seen) {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "waited in vain for {what}; the last events: {:?}", last(&seen));
            seen = self.changed.wait_timeout(seen, left).expect("the recorder panics outside its lock").0;
        }
    }

    /// Waits for an operation's end, and returns its result.
    pub fn result(&self, id: OpId) -> Result<Bytes, crate::OpError> {
        self.wait_for("the operation's completion", |seen| !seen.completions(id).is_empty());
        self.look(|seen| {
            let all = seen.completions(id);
            assert_eq!(all.len(), 1, "an operation completes once");
            all[0].result.as_ref().map(|bytes| Bytes::copy_from_slice(bytes)).map_err(Clone::clone)
        })
    }

    /// Panics, from now on, at the step with this number.
    pub fn panic_at(&self, seq: u64) {
        *self.panic_at.lock().expect("nothing panics under this lock") = Some(seq);
    }
}

impl Handler for Recorder {
    fn handle(&self, event: Event) {
        let panic_at = *self.panic_at.lock().expect("nothing panics under this lock");
        if let (Some(at), Event::Message { frame, .. }) = (panic_at, &event)
            && let Ok(envelope) = wire::decode(frame.clone())
            && matches!(envelope.frame, Frame::Step(step) if step.id.seq == at)
        {
            panic!("step {at} was to panic");
        }
        let mut seen = self.seen.lock().expect("the recorder panics outside its lock");
        seen.events.push(event);
        seen.threads.push(thread::current().id());
        drop(seen);
        self.changed.notify_all();
    }

    fn progress_failed(&self, panic: String) {
        self.seen.lock().expect("the recorder panics outside its lock").panics.push(panic);
        self.changed.notify_all();
    }
}

fn last(seen: &Seen) -> Vec<String> {
    let from = seen.events.len().saturating_sub(5);
    let shorten = |event: &Event| format!("{event:?}").chars().take(200).collect();
    seen.events[from..].iter().map(shorten).collect()
}

/// Runs a future on this thread.
pub fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime starts")
        .block_on(async { tokio::time::timeout(PATIENCE, future).await.expect("the call ends in time") })
}
