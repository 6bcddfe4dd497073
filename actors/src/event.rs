use std::time::Duration;

use connex_protocol::{Epoch, Evidence, Incarnation, LogicalId, Peer, StepId};

/// What a node's supervision tells those who watch it. Typed, in the order in which it happened.
#[derive(Clone, Debug)]
pub enum NodeEvent {
    /// A replica may be chosen from now on.
    Joined {
        /// The replica's endpoint and its life.
        peer: Peer,
        /// The epoch under which it serves.
        epoch: Epoch,
    },
    /// A replica is not chosen any more, and what was on it moves.
    Down {
        /// The replica's endpoint and its life.
        peer: Peer,
        /// Why.
        evidence: Evidence,
    },
    /// A replica that the directory names can't be connected to. Said once until it is linked again.
    Unreachable {
        /// The replica's endpoint and its life.
        peer: Peer,
        /// Why, with its address.
        why: String,
    },
    /// A process of another version or another deployment called here, and was refused. Said once a second at most.
    CallerRefused {
        /// Why.
        why: String,
    },
    /// A replica is under suspicion: others are preferred.
    Suspected {
        /// The replica's endpoint and its life.
        peer: Peer,
        /// Why.
        evidence: Evidence,
    },
    /// The suspicion was wrong.
    Cleared {
        /// The replica's endpoint and its life.
        peer: Peer,
    },
    /// Unfinished steps moved from a life that is over to a successor.
    HandedOver {
        /// Where they were.
        from: Peer,
        /// Where they are now; `None` while there is no successor.
        to: Option<Peer>,
        /// Which, in the order in which they were sent again.
        steps: Vec<StepId>,
        /// Why.
        evidence: Evidence,
        /// From the report of the death to the last frame's acceptance by the successor's transport.
        took: Duration,
    },
    /// A step that had moved ended at its submitter.
    Recovered {
        /// The step.
        step: StepId,
        /// From its handover to its end.
        took: Duration,
    },
    /// An identity is served by another process now, by agreement.
    Migrated {
        /// The identity.
        lid: LogicalId,
        /// Who served it.
        from: Incarnation,
        /// Who serves it now.
        to: Incarnation,
        /// How long its mailbox was paused.
        paused: Duration,
    },
    /// A supervisor started an actor again.
    Restarted {
        /// The actor's name in the tree.
        actor: String,
        /// Why it ended.
        why: String,
    },
    /// This node holds its identity under this epoch.
    Registered {
        /// The epoch.
        epoch: Epoch,
    },
    /// This node's identity is held by another life: it must stop, and register anew in a new life.
    IdentityLost,
    /// This node has handed its identity to another process, which serves it now.
    HandedAway,
    /// The directory is out of reach; traffic goes on with the routes known.
    DirectoryAway,
    /// The directory is back.
    DirectoryBack,
}
