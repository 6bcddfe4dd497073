//! Who makes progress: the transport's own thread, or a caller that borrows its work.
//!
//! One driver under a lock; whoever holds it leads. The native thread steps aside while there are borrowers, and
//! takes over a millisecond after the last one left, so that a caller that waits for its own reply handles it on its
//! own thread, without a wake-up of another. Callers that come while another borrows are told to wait by other
//! means; the borrower then hands over to the native thread when it leaves, and while several callers wait at once
//! the native thread leads for all of them.

use std::cell::Cell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use super::Shared;
use super::driver::Driver;

/// How long the native thread keeps off after a borrower left.
const ASIDE: Duration = Duration::from_millis(1);

/// How long a borrower waits for the native thread to let go.
const HANDOVER: Duration = Duration::from_micros(300);

/// A borrower that stays this many looks in one wait is not looked after every millisecond any more.
const PATIENT_LOOKS: u32 = 8;

const RUNNING: u8 = 0;
const FAILED: u8 = 1;
const STOPPING: u8 = 2;
const ENDED: u8 = 3;

#[derive(Default)]
pub(super) struct Lead {
    state: AtomicU8,
    /// Counts the native threads; an earlier one ends.
    generation: AtomicU64,
    native: Mutex<Option<Thread>>,
    /// The thread that leads, by its number; 0 for nobody.
    leader: AtomicU64,
    /// Callers that lead, or wait for the native thread to let go.
    borrowers: AtomicU32,
    /// The leader is a borrower.
    borrowed: AtomicBool,
    /// Counts the borrowings.
    turns: AtomicU64,
    /// When the last borrower left, in nanoseconds since the start.
    left_at: AtomicU64,
    /// When and to whom progress was last refused: nanoseconds and thread number.
    refused: Mutex<(u64, u64)>,
    /// The next borrower that leaves wakes the native thread, which parks without a limit.
    asleep: AtomicBool,
    /// The native thread is to take over at once.
    handover: AtomicBool,
    wakeups: AtomicU64,
}

impl Lead {
    pub(super) fn failed(&self) -> bool {
        self.state.load(Ordering::SeqCst) == FAILED
    }

    pub(super) fn ended(&self) -> bool {
        self.state.load(Ordering::SeqCst) == ENDED
    }

    pub(super) fn wakeups(&self) -> u64 {
        self.wakeups.load(Ordering::Relaxed)
    }

    pub(super) fn count_wakeup(&self) {
        self.wakeups.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether a borrower wants the driver that the native thread has.
    pub(super) fn wanted(&self) -> bool {
        !self.borrowed.load(Ordering::SeqCst) && self.borrowers.load(Ordering::SeqCst) > 0
    }

    /// Asks the native thread to end everything.
    pub(super) fn stop(&self) {
        let _ = self.state.fetch_max(STOPPING, Ordering::SeqCst);
        self.unpark();
    }

    fn running(&self) -> bool {
        self.state.load(Ordering::SeqCst) == RUNNING
    }

    fn unpark(&self) {
        if let Some(native) = &*self.native.lock().expect("nothing under this lock panics") {
            native.unpark();
        }
    }

    /// Notes that `me` was refused; whether another thread was within the last while.
    fn contended(&self, now: u64, me: u64) -> bool {
        let mut refused = self.refused.lock().expect("nothing under this lock panics");
        let (at, who) = std::mem::replace(&mut *refused, (now, me));
        who != 0 && who != me && now.saturating_sub(at) < ASIDE.as_nanos() as u64
    }
}

/// This thread's number; never 0.
fn me() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local!(static ME: Cell<u64> = const { Cell::new(0) });
    ME.with(|me| {
        if me.get() == 0 {
            me.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        me.get()
    })
}

/// Starts the native thread.
pub(super) fn spawn(shared: &Arc<Shared>) -> io::Result<()> {
    let generation = shared.lead.generation.fetch_add(1, Ordering::SeqCst) + 1;
    let own = shared.clone();
    let handle = thread::Builder::new().name("connex-tcp".into()).spawn(move || run(&own, generation))?;
    let earlier =
        shared.lead.native.lock().expect("nothing under this lock panics").replace(handle.thread().clone());
    if let Some(earlier) = earlier {
        // It may be parked without a limit; it sees that it is not the one any more, and ends.
        earlier.unpark();
    }
    Ok(())
}

/// Goes on after a panic.
pub(super) fn restart(shared: &Arc<Shared>) {
    let lead = &shared.lead;
    if lead.state.compare_exchange(FAILED, RUNNING, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        && spawn(shared).is_err()
    {
        // No thread to be had: still failed, and the supervisor may try again.
        let _ = lead.state.compare_exchange(RUNNING, FAILED, Ordering::SeqCst, Ordering::SeqCst);
    }
}

/// Stops the progress after a panic, and reports it.
pub(super) fn fail(shared: &Shared, panic: &(dyn std::any::Any + Send)) {
    // A transport that ends has no use for a restart.
    if shared.is_closed() {
        return;
    }
    let stopped = shared.lead.state.compare_exchange(RUNNING, FAILED, Ordering::SeqCst, Ordering::SeqCst);
    if stopped.is_ok() {
        let text = crate::panic_text(panic);
        // A panic in the report itself has nobody left to report to.
        let _ = catch_unwind(AssertUnwindSafe(|| shared.handler.progress_failed(text)));
    }
}

/// The native thread's life.
fn run(shared: &Shared, generation: u64) {
    let lead = &shared.lead;
    let mut looks = (0, 0);
    loop {
        match lead.state.load(Ordering::SeqCst) {
            RUNNING if lead.generation.load(Ordering::SeqCst) == generation => {}
            STOPPING => return end(shared),
            _ => return,
        }
        if !lead.handover.swap(false, Ordering::SeqCst) && aside(shared, &mut looks) {
            continue;
        }
        let mut driver = lock(shared);
        lead.leader.store(me(), Ordering::SeqCst);
        pass(shared, &mut driver, None);
        lead.leader.store(0, Ordering::SeqCst);
    }
}

/// Parks if borrowers make progress, or did a moment ago; false if it is the native thread's turn.
fn aside(shared: &Shared, (turns, looks): &mut (u64, u32)) -> bool {
    let lead = &shared.lead;
    let borrowers = lead.borrowers.load(Ordering::SeqCst);
    let since = shared.nanos(Instant::now()).saturating_sub(lead.left_at.load(Ordering::SeqCst));
    if borrowers == 0 && (lead.turns.load(Ordering::SeqCst) == 0 || since >= ASIDE.as_nanos() as u64) {
        return false;
    }
    let now = lead.turns.load(Ordering::SeqCst);
    *looks = if borrowers > 0 && now == *turns { *looks + 1 } else { 0 };
    *turns = now;
    if *looks < PATIENT_LOOKS {
        thread::park_timeout(ASIDE);
        return true;
    }
    // One borrower sits in one long wait: whoever leaves next wakes this thread.
    lead.asleep.store(true, Ordering::SeqCst);
    if lead.borrowers.load(Ordering::SeqCst) > 0 && lead.running() {
        thread::park();
    }
    lead.asleep.store(false, Ordering::SeqCst);
    *looks = 0;
    true
}

/// Makes progress on the caller's thread; false if another thread does.
pub(super) fn borrow(shared: &Shared, wait: Duration) -> bool {
    let lead = &shared.lead;
    if !lead.running() {
        return false;
    }
    lead.borrowers.fetch_add(1, Ordering::SeqCst);
    let driver = take(shared);
    let led = driver.is_some();
    if let Some(mut driver) = driver {
        lead.borrowed.store(true, Ordering::SeqCst);
        lead.leader.store(me(), Ordering::SeqCst);
        let until = Instant::now() + wait;
        let mut left = wait;
        while lead.running() && !pass(shared, &mut driver, Some(left)) {
            left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
        }
        lead.leader.store(0, Ordering::SeqCst);
        lead.turns.fetch_add(1, Ordering::SeqCst);
        lead.left_at.store(shared.nanos(Instant::now()), Ordering::SeqCst);
        lead.borrowed.store(false, Ordering::SeqCst);
    }
    leave(shared, led);
    led
}

/// A borrower goes. Whoever was refused meanwhile waits by other means: somebody has to go on for them at once.
fn leave(shared: &Shared, led: bool) {
    let lead = &shared.lead;
    lead.borrowers.fetch_sub(1, Ordering::SeqCst);
    if !led {
        // It was counted while it waited for the driver: the native thread may have gone to sleep on its account.
        if lead.asleep.swap(false, Ordering::SeqCst) {
            lead.count_wakeup();
            lead.unpark();
        }
        return;
    }
    let now = shared.nanos(Instant::now());
    let (at, who) = *lead.refused.lock().expect("nothing under this lock panics");
    let followed = who != 0 && who != me() && now.saturating_sub(at) < ASIDE.as_nanos() as u64;
    if followed {
        lead.handover.store(true, Ordering::SeqCst);
    }
    if lead.asleep.swap(false, Ordering::SeqCst) || followed || !lead.running() {
        lead.count_wakeup();
        lead.unpark();
    }
}

/// The borrowers go to other work: the native thread takes over at once.
pub(super) fn let_go(shared: &Shared) {
    let lead = &shared.lead;
    lead.handover.store(true, Ordering::SeqCst);
    lead.count_wakeup();
    lead.unpark();
}

/// The driver, if it is free, or if the native thread lets go of it.
fn take(shared: &Shared) -> Option<MutexGuard<'_, Driver>> {
    let lead = &shared.lead;
    if let Ok(driver) = shared.driver.try_lock() {
        return Some(driver);
    }
    let start = Instant::now();
    if lead.leader.load(Ordering::SeqCst) == me() {
        // The handler called: it is on the leader's own thread.
        return None;
    }
    if lead.borrowed.load(Ordering::SeqCst) {
        lead.contended(shared.nanos(start), me());
        return None;
    }
    if lead.contended(shared.nanos(start), me()) {
        return None;
    }
    if shared.sleeps_until.load(Ordering::SeqCst) > 0 {
        lead.count_wakeup();
        shared.wake();
    }
    while start.elapsed() < HANDOVER {
        if let Ok(driver) = shared.driver.try_lock() {
            return Some(driver);
        }
        thread::yield_now();
    }
    None
}

/// One pass; a panic in it stops the progress.
fn pass(shared: &Shared, driver: &mut Driver, wait: Option<Duration>) -> bool {
    match catch_unwind(AssertUnwindSafe(|| driver.pass(shared, wait))) {
        Ok(handled) => handled,
        Err(panic) => {
            // A handler's panic is caught closer to it: this one is the driver's own, whose state can't be trusted.
            driver.distrust();
            fail(shared, panic.as_ref());
            true
        }
    }
}

fn lock(shared: &Shared) -> MutexGuard<'_, Driver> {
    // A panic is caught before it passes the lock.
    shared.driver.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Closes every socket, and lets go of everybody who waits.
pub(super) fn end(shared: &Shared) {
    let lead = &shared.lead;
    if lead.leader.load(Ordering::SeqCst) == me() {
        // The handler dropped the transport on the leader's thread: the native thread sees the stop.
        return;
    }
    lock(shared).teardown(shared);
    lead.state.store(ENDED, Ordering::SeqCst);
    lead.unpark();
    shared.sweep();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Event, Handler, Identity, TcpConfig, TcpTransport};
    use connex_protocol::{Incarnation, Peer};

    struct Nobody;

    impl Handler for Nobody {
        fn handle(&self, _event: Event) {}
        fn progress_failed(&self, _why: String) {}
    }

    fn wait_for(what: &str, holds: impl Fn() -> bool) {
        let until = Instant::now() + Duration::from_secs(10);
        while !holds() {
            assert!(Instant::now() < until, "not within 10 s: {what}");
            thread::yield_now();
        }
    }

    /// A borrower that is starved of its processor between being counted and finding the driver taken looks, to the
    /// native thread, like one in a long wait.
    #[test]
    fn the_native_thread_goes_on_when_the_borrower_it_sleeps_for_never_led() {
        let peer = Peer { lid: "m/pp/0/0/0".parse().unwrap(), incarnation: Incarnation::from_bits(7) };
        let identity = Identity { peer, deployment: "d".into() };
        let transport = TcpTransport::start(TcpConfig::default(), identity, Arc::new(Nobody)).unwrap();
        let (shared, lead) = (&transport.shared, &transport.shared.lead);
        let waits_for_events = || shared.sleeps_until.load(Ordering::SeqCst) > 0;
        wait_for("the native thread leads", waits_for_events);
        lead.borrowers.fetch_add(1, Ordering::SeqCst);
        shared.wake();
        wait_for("it sleeps on the borrower's account", || lead.asleep.load(Ordering::SeqCst));
        leave(shared, false);
        wait_for("it leads again", waits_for_events);
    }
}
