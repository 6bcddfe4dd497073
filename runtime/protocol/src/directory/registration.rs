use core::time::Duration;

use crate::lease::{Holder, HolderInput};
use crate::wire::directory::{Change, Last, Refusal, Request, Route};
use crate::{Address, Epoch, Incarnation, Instant, LogicalId, Machine};

/// Leases outside these bounds are a directory's mistake; they are taken as the nearer bound.
pub(super) const TTL_MIN: Duration = Duration::from_millis(20);
pub(super) const TTL_MAX: Duration = Duration::from_secs(3600);

/// The identity that a client registers.
#[derive(Clone, Debug)]
pub struct Registrant {
    /// The identity.
    pub lid: LogicalId,
    /// The life that registers.
    pub incarnation: Incarnation,
    /// Where it is reached.
    pub address: Address,
    /// Wait beside the present holder.
    pub shadow: bool,
    /// Whose word on this process's exit is taken.
    pub guardian: Option<Incarnation>,
}

/// Where a registration stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Not granted yet, or waiting beside the holder.
    Waiting,
    /// Granted; the lease may have run out while the directory was away.
    Held,
    /// Asked to give it up, to this shadow if one is named.
    Leaving(Option<Incarnation>),
    /// It is another's, or the directory gave it up for this life.
    Lost,
    /// Given up.
    Left,
}

/// A lease that was granted.
pub(super) struct Grant {
    /// When the request was sent.
    pub(super) sent: Instant,
    /// The directory's life.
    pub(super) life: Incarnation,
    pub(super) epoch: Epoch,
    pub(super) ttl: Duration,
    /// In answer to a registration, not a renewal.
    pub(super) registered: bool,
}

/// What an answer or a change came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Told {
    Nothing,
    Registered(Epoch),
    Shadowing(Route),
    Refused(Refusal),
    Lost,
    Left,
    Kept(Epoch),
}

/// One's own identity at the directory.
///
/// | stage | granted | shadowing, held, settling | fenced, or another life holds it | left | not the shadow |
/// | --- | --- | --- | --- | --- | --- |
/// | waiting | held | waiting | lost | – | – |
/// | held | held | held; lost if another holds it | lost | – | – |
/// | leaving | leaving: it is given up now | left; leaving while the directory settles | left | left | held |
/// | lost, left | – | – | – | – | – |
pub(super) struct Registration {
    who: Registrant,
    stage: Stage,
    holder: Holder,
    /// The directory's life that granted last.
    life: Option<Incarnation>,
    /// It did so over the present link: it knows this life, and a renewal is enough.
    granted_here: bool,
    ttl: Duration,
    /// When to register or to renew next; `None` while an answer is awaited.
    pub(super) due: Option<Instant>,
    ready: bool,
    told_ready: bool,
    /// The directory was asked to give this life no new work; a restarted one has forgotten it.
    draining: bool,
}

impl Registration {
    pub(super) fn new(who: Registrant) -> Self {
        Registration {
            who,
            stage: Stage::Waiting,
            holder: Holder::default(),
            life: None,
            granted_here: false,
            ttl: Duration::from_secs(2),
            due: None,
            ready: true,
            told_ready: true,
            draining: false,
        }
    }

    pub(super) fn who(&self) -> &Registrant {
        &self.who
    }

    /// What was asked on an earlier link is asked anew: whether it arrived is unknown, and asking again does no harm.
    pub(super) fn on_link(&mut self, now: Instant) {
        self.due = match self.stage {
            Stage::Waiting | Stage::Held | Stage::Leaving(_) => Some(now),
            Stage::Lost | Stage::Left => None,
        };
        // The directory may be another one, that knows nobody.
        self.granted_here = false;
    }

    /// The request that is due, if one is.
    pub(super) fn request(&mut self, now: Instant) -> Option<Request> {
        if self.due.is_none_or(|due| now < due) {
            return None;
        }
        self.due = None;
        let lid = self.who.lid.clone();
        match (self.stage, self.holder.last_epoch()) {
            (Stage::Lost | Stage::Left, _) => None,
            (Stage::Leaving(None), Some(epoch)) => Some(Request::Leave { lid, epoch, to: None }),
            (Stage::Leaving(to), Some(epoch)) if self.granted_here => Some(Request::Leave { lid, epoch, to }),
            (Stage::Held, Some(epoch)) if self.granted_here => {
                self.told_ready = self.ready;
                Some(Request::Renew { lid, epoch, ready: self.ready })
            }
            _ => {
                self.told_ready = self.ready;
                Some(Request::Register {
                    lid,
                    incarnation: self.who.incarnation,
                    address: self.who.address.clone(),
                    last: self.last(now),
                    ready: self.ready,
                    shadow: self.who.shadow && self.stage == Stage::Waiting,
                    guardian: self.who.guardian,
                })
            }
        }
    }

    fn last(&self, now: Instant) -> Option<Last> {
        let (life, epoch) = (self.life?, self.holder.last_epoch()?);
        Some(Last { life, epoch, valid: self.epoch(now).is_some() })
    }

    /// The epoch, while nobody else can hold the identity. Whoever asked for another to have it can't know that: the
    /// answer may be on its way, or lost.
    pub(super) fn epoch(&self, now: Instant) -> Option<Epoch> {
        self.holder.epoch(now).filter(|_| self.stage == Stage::Held)
    }

    /// Granted, in answer to a request sent at `sent`; `pause` draws how long to wait from how long to wait at most.
    pub(super) fn on_granted(
        &mut self,
        now: Instant,
        grant: Grant,
        pause: impl FnOnce(Duration) -> Duration,
    ) -> Told {
        if matches!(self.stage, Stage::Lost | Stage::Left) {
            return Told::Nothing;
        }
        let Grant { sent, life, epoch, ttl, registered } = grant;
        self.ttl = ttl.clamp(TTL_MIN, TTL_MAX);
        let news = self.holder.last_epoch() != Some(epoch);
        self.holder.handle(now, HolderInput::Granted { sent, epoch, ttl: ttl.min(TTL_MAX) });
        while self.holder.poll().is_some() {}
        self.life = Some(life);
        self.granted_here = true;
        if let Stage::Leaving(_) = self.stage {
            if registered {
                self.due = Some(now);
            }
            return Told::Nothing;
        }
        self.stage = Stage::Held;
        let at_once = self.told_ready != self.ready;
        self.due = Some(if at_once { now } else { now + pause(self.ttl / 3) });
        if news { Told::Registered(epoch) } else { Told::Nothing }
    }

    pub(super) fn on_refused(
        &mut self,
        now: Instant,
        refusal: Refusal,
        pause: impl FnOnce(Duration) -> Duration,
    ) -> Told {
        let another_holds =
            matches!(&refusal, Refusal::Fenced { .. } | Refusal::Held { .. } | Refusal::Unknown { .. });
        match self.stage {
            Stage::Lost | Stage::Left => Told::Nothing,
            // Whoever holds it now, it is not this life.
            Stage::Leaving(None) => self.on_left(),
            Stage::Leaving(Some(_)) if another_holds => self.on_left(),
            Stage::Leaving(Some(_)) if matches!(refusal, Refusal::NotShadow { .. }) => {
                self.stage = Stage::Held;
                self.due = Some(now + pause(self.ttl / 20));
                self.holder.last_epoch().map_or(Told::Nothing, Told::Kept)
            }
            Stage::Held if another_holds => self.lose(),
            Stage::Waiting if matches!(refusal, Refusal::Fenced { .. }) => self.lose(),
            Stage::Held | Stage::Waiting | Stage::Leaving(Some(_)) => {
                let jitter = pause(self.ttl / 20);
                let wait = match &refusal {
                    Refusal::Settling { remaining_ms, .. } => {
                        Duration::from_millis(*remaining_ms).min(self.ttl)
                    }
                    Refusal::Held { remaining_ms, .. } => {
                        Duration::from_millis(*remaining_ms).min(self.ttl / 4)
                    }
                    _ => self.ttl / 2,
                };
                self.due = Some(now + wait + jitter);
                self.tell_if_waiting(refusal)
            }
        }
    }

    /// A holder whose directory restarted serves on meanwhile: that it waits is nobody's concern.
    fn tell_if_waiting(&self, refusal: Refusal) -> Told {
        if self.stage == Stage::Waiting { Told::Refused(refusal) } else { Told::Nothing }
    }

    pub(super) fn on_shadowing(
        &mut self,
        now: Instant,
        holder: Route,
        pause: impl FnOnce(Duration) -> Duration,
    ) -> Told {
        match self.stage {
            Stage::Waiting => {}
            Stage::Leaving(None) => return self.on_left(),
            _ => return Told::Nothing,
        }
        // Asked again: a shadow that is not heard of is taken for dead.
        self.due = Some(now + pause(self.ttl / 3));
        Told::Shadowing(holder)
    }

    pub(super) fn on_left(&mut self) -> Told {
        self.stage = Stage::Left;
        self.give_up();
        Told::Left
    }

    /// The identity is not this life's any more.
    fn lose(&mut self) -> Told {
        self.stage = Stage::Lost;
        self.give_up();
        Told::Lost
    }

    fn give_up(&mut self) {
        self.holder.handle(Instant::ZERO, HolderInput::Lost);
        self.due = None;
    }

    /// Somebody asked that it be given up; `linked` says whether the directory can be told now.
    pub(super) fn leave(&mut self, now: Instant, to: Option<Incarnation>, linked: bool) -> Told {
        match self.stage {
            Stage::Held if linked => {
                self.stage = Stage::Leaving(to);
                self.due = Some(now);
                Told::Nothing
            }
            // The directory can't be asked now, so it has given the identity to nobody.
            Stage::Held if to.is_some() => self.holder.last_epoch().map_or(Told::Nothing, Told::Kept),
            // It has been asked for, and may be granted already: the answer decides whether there is something to give up.
            Stage::Waiting if linked && self.due.is_none() => {
                self.stage = Stage::Leaving(None);
                Told::Nothing
            }
            // The directory is away: the lease runs out by itself.
            Stage::Held | Stage::Waiting | Stage::Lost | Stage::Left => self.on_left(),
            Stage::Leaving(_) => Told::Nothing,
        }
    }

    /// Takes new work or not.
    pub(super) fn set_ready(&mut self, now: Instant, ready: bool) {
        self.ready = ready;
        if ready != self.told_ready && self.due.is_some() && self.stage == Stage::Held {
            self.due = Some(now);
        }
    }

    /// Whether a directory that has just granted the identity must be told that it is draining.
    pub(super) fn is_draining(&self) -> bool {
        self.draining
    }

    /// What a change of the registry says of one's own identity.
    pub(super) fn on_change(
        &mut self,
        now: Instant,
        change: &Change,
        pause: impl FnOnce(Duration) -> Duration,
    ) -> Told {
        match change {
            Change::Put(route) if route.lid == self.who.lid => {
                if route.incarnation == self.who.incarnation {
                    self.draining |= route.draining;
                    if self.stage == Stage::Waiting && self.due.is_some() {
                        // It was handed over: the lease counts from a request of one's own.
                        self.due = Some(now);
                    }
                    return Told::Nothing;
                }
                match self.stage {
                    Stage::Held if self.holder.last_epoch().is_some_and(|held| held < route.epoch) => {
                        self.lose()
                    }
                    _ => Told::Nothing,
                }
            }
            Change::Remove { lid, incarnation, epoch, .. } if *lid == self.who.lid => {
                let own = *incarnation == self.who.incarnation;
                match self.stage {
                    Stage::Held if own && self.holder.last_epoch().is_some_and(|held| held <= *epoch) => {
                        self.lose()
                    }
                    Stage::Waiting if !own && self.due.is_some() => {
                        self.due = Some(now + pause(self.ttl / 100));
                        Told::Nothing
                    }
                    _ => Told::Nothing,
                }
            }
            _ => Told::Nothing,
        }
    }
}
