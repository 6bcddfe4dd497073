//! The handovers of a deployment, heard from its processes and from the client in this one.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::ensure;
use connex::Incarnation;
use tokio::sync::broadcast::error::RecvError;

use crate::deployment::{Deployment, News, What};
use crate::report::{Line, host_ns};
use crate::stage::line_of;

/// What is known of the handovers from one life.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HandedOver {
    /// When the last hop had sent its last step again.
    pub(crate) at_ns: u64,
    /// Steps that moved, over all hops.
    pub(crate) steps: usize,
}

/// Listens from its start on.
#[derive(Clone, Default)]
pub(crate) struct Handovers {
    known: Arc<Mutex<HashMap<Incarnation, HandedOver>>>,
    /// Events that came too fast to be heard.
    missed: Arc<AtomicU64>,
}

impl Handovers {
    pub(crate) fn watch(deployment: &Deployment) -> Self {
        let handovers = Handovers::default();
        let (mut news, mut own) = (deployment.news(), deployment.client().events());
        let listening = handovers.clone();
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    heard = news.recv() => match heard {
                        Ok(News { what: What::Line(line), .. }) => listening.take(&line),
                        Ok(_) => {}
                        Err(RecvError::Lagged(missed)) => listening.miss(missed),
                        Err(RecvError::Closed) => return,
                    },
                    event = own.recv() => match event {
                        Ok(event) => {
                            if let Some(line) = line_of(&event) {
                                listening.take(&line);
                            }
                        }
                        Err(RecvError::Lagged(missed)) => listening.miss(missed),
                        Err(RecvError::Closed) => return,
                    },
                }
            }
        });
        handovers
    }

    fn take(&self, line: &Line) {
        let Line::HandedOver { from_incarnation, to: Some(_), steps, at_ns, .. } = line else { return };
        let Ok(bits) = u64::from_str_radix(from_incarnation, 16) else { return };
        let mut known = self.known.lock().expect("no holder panics");
        let entry = known.entry(Incarnation::from_bits(bits)).or_default();
        entry.at_ns = entry.at_ns.max((*at_ns).min(host_ns()));
        entry.steps += steps;
    }

    fn miss(&self, events: u64) {
        self.missed.fetch_add(events, Ordering::SeqCst);
    }

    /// Fails if events were missed: figures drawn from the rest would be wrong without a sign of it.
    pub(crate) fn check_complete(&self) -> anyhow::Result<()> {
        let missed = self.missed.load(Ordering::SeqCst);
        ensure!(
            missed == 0,
            "{missed} events were missed, so the handovers can't be told: is the machine overloaded?"
        );
        Ok(())
    }

    /// What is known of the handovers from this life.
    pub(crate) fn from(&self, incarnation: Incarnation) -> Option<HandedOver> {
        self.known.lock().expect("no holder panics").get(&incarnation).copied()
    }
}
