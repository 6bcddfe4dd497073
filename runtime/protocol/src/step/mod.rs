//! The step delivery contract (P-1…P-12) as two machines: [`Sender`] at every hop's upstream side, one per group that
//! the hop submits to, and [`Receiver`] at every served endpoint.
//!
//! A step's life at a sender: *waiting* (no credit, or no routable replica), *queued* in a replica's mailbox (paused
//! or blocked), *sent* to one life of one replica, and done. A handover takes what was queued for or sent to a life
//! that ended and puts it, in order, to the front of its successors' mailboxes.

mod receiver;
mod sender;

pub use receiver::{Job, Receiver, ReceiverConfig, ReceiverInput, ReceiverOutput};
pub use sender::{Choose, Sender, SenderConfig, SenderInput, SenderOutput, Submission, Target, WhenFull};

#[cfg(test)]
mod tests;
