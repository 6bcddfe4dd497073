use std::sync::Arc;
use std::time::Duration;

use connex_actors::{Core, Membership, Standing};
use connex_protocol::cutover::SourceInput;
use connex_protocol::directory::{ClientInput, Registrant};
use connex_protocol::wire::directory::{Change, Refusal, Route};
use connex_protocol::{Address, Epoch, Evidence, Incarnation, LogicalId};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::watch;

/// How a node learns who serves what: the one switch.
#[derive(Clone, Debug, Default)]
pub enum Via {
    /// From nobody; the embedder tells the node's core.
    #[default]
    Nobody,
    /// From a fixed list; no daemon.
    Fixed(Vec<Route>),
    /// From the directory at this address, where the node registers what it serves.
    Directory(Address),
}

impl Via {
    /// Tells a core of the fixed routes, if these are such.
    pub fn tell(self, core: &Core) {
        if let Via::Fixed(routes) = self {
            for route in routes {
                core.on_change(Change::Put(route));
            }
        }
    }
}

/// A node's membership at its directory.
#[derive(Clone)]
pub struct Registration {
    core: Arc<Core>,
    membership: Arc<Membership>,
}

impl Registration {
    /// The membership that a node of this kind needs; `None` without a directory.
    pub(crate) fn membership(
        core: &Core,
        via: &Via,
        serves: bool,
        shadow: bool,
        guardian: Option<Incarnation>,
    ) -> Option<Arc<Membership>> {
        let Via::Directory(address) = via else { return None };
        let registrant = serves.then(|| Registrant {
            lid: core.me().lid.clone(),
            incarnation: core.me().incarnation,
            address: core.transport().local(),
            shadow,
            guardian,
        });
        Some(Membership::new(address.clone(), registrant, core.me().incarnation.bits()))
    }

    pub(crate) fn new(core: Arc<Core>, membership: Arc<Membership>) -> Self {
        Registration { core, membership }
    }

    /// How the node stands with the directory.
    pub fn standing(&self) -> Standing {
        self.membership.standing().borrow().clone()
    }

    /// Waits until the node's standing is one that `wanted` accepts.
    pub async fn wait_for(&self, wanted: impl FnMut(&Standing) -> bool) -> Standing {
        let mut standing = self.membership.standing();
        // The sender lives in the membership, which this holds.
        standing.wait_for(wanted).await.map(|standing| standing.clone()).unwrap_or(Standing::Unknown)
    }

    /// Gives the identity up; waits for the directory's word for `patience` at most, after which the lease runs out
    /// by itself.
    pub async fn leave(&self, patience: Duration) {
        self.membership.tell(&self.core, ClientInput::Leave(None));
        let left = self.wait_for(|standing| matches!(standing, Standing::Left | Standing::Lost));
        // Whatever has become of it by then, the lease does the rest.
        let _ = tokio::time::timeout(patience, left).await;
    }

    /// How the node stands, now and later.
    pub(crate) fn watch(&self) -> watch::Receiver<Standing> {
        self.membership.standing()
    }

    /// The epoch, while the identity can be handed over: it is certain, and the directory can be asked.
    pub(crate) fn can_hand(&self) -> Option<Epoch> {
        self.epoch().filter(|_| !self.membership.is_away())
    }

    /// Hands the identity to the shadow that waits for it, and says what came of it. While the directory is away
    /// nobody knows which of the two holds it, and this waits.
    pub(crate) async fn hand_to(&self, shadow: Incarnation) -> SourceInput {
        let mut standing = self.membership.standing();
        standing.mark_unchanged();
        self.membership.tell(&self.core, ClientInput::Leave(Some(shadow)));
        while standing.changed().await.is_ok() {
            match &*standing.borrow_and_update() {
                Standing::Left => return SourceInput::Handed,
                Standing::Kept(_) => return SourceInput::Kept,
                Standing::Lost => return SourceInput::Lost,
                _ => {}
            }
        }
        SourceInput::Lost
    }

    /// Tells the directory what was seen of an endpoint.
    pub fn report(&self, lid: LogicalId, incarnation: Incarnation, evidence: Evidence) {
        self.membership.tell(&self.core, ClientInput::Report { lid, incarnation, evidence });
    }

    /// Asks that an endpoint gets no new work. Waits while the directory is away.
    pub async fn drain(&self, lid: LogicalId) -> Result<(), Refusal> {
        let mut answers = self.membership.drained();
        self.membership.tell(&self.core, ClientInput::Drain(lid.clone()));
        loop {
            match answers.recv().await {
                Ok((of, result)) if of == lid => return result,
                Ok(_) => {}
                // Its answer may be among those that were missed: asking again does no harm.
                Err(RecvError::Lagged(_)) => {
                    self.membership.tell(&self.core, ClientInput::Drain(lid.clone()))
                }
                Err(RecvError::Closed) => return Err(Refusal::Unknown { lid }),
            }
        }
    }

    /// The epoch, while the node's lease is certain: nobody else can hold its identity now.
    pub fn epoch(&self) -> Option<Epoch> {
        self.membership.epoch(&self.core)
    }
}
