use bytes::Bytes;
use connex_protocol::ReplicaNo;
use connex_protocol::wire::StepError;

/// How a step ended at its submitter.
#[derive(Clone, Debug)]
pub struct StepEnd {
    /// The replicas that served it, from the group it was submitted to on; empty if none did.
    pub route: Vec<ReplicaNo>,
    /// Its result.
    pub result: Result<Bytes, StepError>,
}

/// Where a step's items and end go. Called under the group's lock, on whichever thread made progress: it must be
/// quick, must not block, and must not submit to the same group.
pub trait StepSink: Send {
    /// The next item of a streaming step.
    fn item(&mut self, body: Bytes);

    /// The step's end.
    fn done(self: Box<Self>, end: StepEnd);
}
