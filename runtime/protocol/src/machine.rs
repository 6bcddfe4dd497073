use crate::Instant;

/// A synchronous state machine that a driver drives.
///
/// Every protocol decision has this shape. I/O that takes time is an output with an id; it comes back as a
/// completion input.
pub trait Machine {
    /// A closed enum of what can happen: frames, commands, completions, already parsed.
    type Input;
    /// A closed enum of what the driver is to do.
    type Output;

    /// Takes one input. Total and never blocking: a rejection is an output.
    fn handle(&mut self, now: Instant, input: Self::Input);

    /// Takes the next output; the driver drains it to `None` after every [`handle`](Machine::handle).
    fn poll(&mut self) -> Option<Self::Output>;

    /// When the machine next wants a tick, at or after this moment; `None` while nothing is timed.
    fn deadline(&self) -> Option<Instant>;
}
