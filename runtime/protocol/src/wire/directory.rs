//! The messages between the directory and its clients.

use alloc::string::String;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::{Address, Epoch, Evidence, Group, Incarnation, LogicalId};

/// A request, the response that names it, or a watched change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// From a client.
    Request {
        /// Chosen by the client; the response carries it.
        id: u64,
        /// What is asked.
        request: Request,
    },
    /// From the directory.
    Response {
        /// The request's id.
        id: u64,
        /// The directory's life; another than last time means that it restarted and forgot.
        boot: u64,
        /// The revision after the request.
        revision: u64,
        /// The answer.
        response: Response,
    },
    /// From the directory to a watcher, in order of revisions and with none left out.
    Event {
        /// The directory's life.
        boot: u64,
        /// The revision of this change.
        revision: u64,
        /// What changed.
        change: Change,
    },
}

/// What a client asks of the directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Hold this identity under a lease.
    Register {
        /// The identity.
        lid: LogicalId,
        /// The life that registers.
        incarnation: Incarnation,
        /// Where it can be reached.
        address: Address,
        /// The last epoch this client held, which a restarted directory must exceed.
        last: Option<Epoch>,
        /// Wait beside the present holder instead of being refused: the target of a migration.
        shadow: bool,
        /// The process that started this one; its word on this one's exit ends the lease.
        guardian: Option<Incarnation>,
    },
    /// Extend the lease.
    Renew {
        /// The identity.
        lid: LogicalId,
        /// The epoch that was granted.
        epoch: Epoch,
        /// Takes new work.
        ready: bool,
    },
    /// Give the identity up, to the named shadow if there is one.
    Leave {
        /// The identity.
        lid: LogicalId,
        /// The epoch that was granted.
        epoch: Epoch,
        /// The shadow that is to hold it next.
        to: Option<Incarnation>,
    },
    /// No new work for this endpoint.
    Drain {
        /// The endpoint.
        lid: LogicalId,
    },
    /// What the client saw of an endpoint. Only [`Evidence::ProcessExited`] from the endpoint's guardian ends a lease;
    /// the rest is advice.
    Report {
        /// The endpoint.
        lid: LogicalId,
        /// Its life.
        incarnation: Incarnation,
        /// What was seen.
        evidence: Evidence,
    },
    /// The present routes, of one group or of all.
    Resolve {
        /// The group; `None` for all.
        group: Option<Group>,
    },
    /// The present routes and then every later change; from `after` on if the directory still has it.
    Watch {
        /// The (boot, revision) last seen.
        after: Option<(u64, u64)>,
    },
}

/// What the directory answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Response {
    /// The identity is held under this epoch for this long.
    Granted {
        /// The epoch.
        epoch: Epoch,
        /// The lease, in milliseconds from the sending of the request.
        ttl_ms: u64,
    },
    /// Registered beside the present holder.
    Shadowing {
        /// The present holder.
        holder: Route,
    },
    /// Done.
    Done,
    /// The routes at the response's revision.
    Routes {
        /// All of them.
        routes: Vec<Route>,
        /// For a watch: these replace everything that the watcher knew.
        reset: bool,
    },
    /// Refused, and why.
    Refused(Refusal),
}

/// Why the directory refuses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// Somebody else holds the identity.
    #[error(
        "{lid} is held by incarnation {holder} for another {remaining_ms} ms: stop that process, or migrate it"
    )]
    Held {
        /// The identity.
        lid: LogicalId,
        /// Who holds it.
        holder: Incarnation,
        /// How long at most, unless renewed.
        remaining_ms: u64,
    },
    /// The directory has just started and waits for the holders of before.
    #[error(
        "the directory restarted and grants {lid} to nobody new for another {remaining_ms} ms: try again then"
    )]
    Settling {
        /// The identity.
        lid: LogicalId,
        /// How long.
        remaining_ms: u64,
    },
    /// The epoch is not the one that holds the identity: register anew.
    #[error("epoch {epoch} of {lid} is over: register again to serve under a new one")]
    Fenced {
        /// The identity.
        lid: LogicalId,
        /// The epoch of the request.
        epoch: Epoch,
    },
    /// Nobody of this name is registered.
    #[error("{lid} is not registered")]
    Unknown {
        /// The identity.
        lid: LogicalId,
    },
    /// The life that was to take the identity over does not wait for it.
    #[error("{to} does not wait to take {lid} over")]
    NotShadow {
        /// The identity.
        lid: LogicalId,
        /// Who was to hold it next.
        to: Incarnation,
    },
    /// A life can be registered by itself only.
    #[error("a process registers itself: the request names another incarnation than its connection")]
    NotYours,
    /// The directory holds as many identities or watchers as it may.
    #[error("the directory is full: {what}")]
    Full {
        /// Of what.
        what: String,
    },
}

/// Where an identity is served, by which life, under which epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// The identity.
    pub lid: LogicalId,
    /// The life that holds it.
    pub incarnation: Incarnation,
    /// Where it can be reached.
    pub address: Address,
    /// The epoch under which it serves.
    pub epoch: Epoch,
    /// Takes new work.
    pub ready: bool,
    /// Is leaving.
    pub draining: bool,
    /// The target of a migration that has begun: connect to it now, send to it only once it holds the identity.
    pub shadow: Option<(Incarnation, Address)>,
}

/// One change of the registry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change {
    /// The route is now this (new, renewed under another epoch, ready, draining, shadowed).
    Put(Route),
    /// Nobody serves the identity; its last life is fenced.
    Remove {
        /// The identity.
        lid: LogicalId,
        /// The life that is over.
        incarnation: Incarnation,
        /// The epoch that is over.
        epoch: Epoch,
        /// Why.
        evidence: Evidence,
    },
}
