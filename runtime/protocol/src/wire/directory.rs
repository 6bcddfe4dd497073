//! The messages between the directory and its clients.

use alloc::string::String;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::{Address, Epoch, Evidence, Group, Incarnation, LogicalId};

/// A request, the response that names it, or what a watcher is told.
///
/// Every message from the directory names its *life*, which is drawn at its start: another life than last time means
/// that the directory restarted and forgot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// From a client.
    Request {
        /// Chosen by the client and never used again by it; the response carries it.
        id: u64,
        /// What is asked.
        request: Request,
    },
    /// From the directory.
    Response {
        /// The request's id.
        id: u64,
        /// The directory's life.
        life: Incarnation,
        /// The boot number that it grants epochs under.
        boot: u64,
        /// The revision after the request; a watcher has been sent every change up to it.
        revision: u64,
        /// The answer.
        response: Response,
    },
    /// From the directory to a watcher, in order of revisions and with none left out.
    Event {
        /// The directory's life.
        life: Incarnation,
        /// The revision of this change.
        revision: u64,
        /// What changed.
        change: Change,
    },
    /// A part of a whole picture, to a watcher that can't be told of each change it missed. It replaces everything
    /// that the watcher knew, once its last part is there.
    Snapshot {
        /// The directory's life.
        life: Incarnation,
        /// The revision of the picture.
        revision: u64,
        /// The routes of this part.
        routes: Vec<Route>,
        /// No part follows.
        last: bool,
    },
}

/// What a client held before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Last {
    /// The life of the directory that granted it.
    pub life: Incarnation,
    /// The epoch, which a restarted directory must exceed.
    pub epoch: Epoch,
    /// Whether its lease had not run out when the request was sent: then nobody else can hold the identity.
    pub valid: bool,
}

/// What a watcher has seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// The directory's life.
    pub life: Incarnation,
    /// The greatest boot number, which a restarted directory must exceed.
    pub boot: u64,
    /// The last revision.
    pub revision: u64,
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
        /// What this client held last.
        last: Option<Last>,
        /// Takes new work.
        ready: bool,
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
        /// Only if this life holds it; `None` for whoever does.
        of: Option<Incarnation>,
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
    /// Every change from `after` on, or a whole picture first if the directory has not kept so much.
    Watch {
        /// What was seen last.
        after: Option<Seen>,
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
    /// A part of the routes at the response's revision.
    Routes {
        /// The routes of this part.
        routes: Vec<Route>,
        /// No part follows.
        last: bool,
    },
    /// The watch has begun; what was missed was sent before this.
    Watching {
        /// The directory's lease, in milliseconds: it wants to hear from each client more than twice in it.
        ttl_ms: u64,
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
    /// A name or an address is longer than the directory keeps.
    #[error("{what} is {len} bytes long, and the directory keeps {max} at most")]
    TooLong {
        /// What is too long.
        what: String,
        /// Its length, in bytes.
        len: u64,
        /// The longest allowed, in bytes.
        max: u64,
    },
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
