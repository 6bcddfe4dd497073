//! The failure detector: what a peer's silence and its progress say. It advises; every verdict names its evidence.

use alloc::collections::{BTreeMap, VecDeque};
use core::time::Duration;

use crate::wire::Heartbeat;
use crate::{Evidence, Incarnation, Instant, Machine};

/// A silence this many standard deviations beyond the mean is suspicious. Under a normal distribution it is as rare
/// as phi 8 of the phi-accrual detector (Hayashibara et al., 2004): one in a hundred million.
const DEVIATIONS: u64 = 6;

/// The share of a new interval in the running mean and variance.
const WEIGHT: u64 = 16;

/// A detector's habits.
#[derive(Clone, Debug)]
pub struct DetectConfig {
    /// How often peers send heartbeats.
    pub interval: Duration,
    /// Intervals are taken to vary at least this much, however regular they were.
    pub deviation_min: Duration,
    /// A silence of this length is the end, even without a second source.
    pub silence_max: Duration,
    /// An engine that spends this long on a step without progress is under suspicion.
    pub busy_max: Duration,
}

impl Default for DetectConfig {
    fn default() -> Self {
        DetectConfig {
            interval: Duration::from_millis(50),
            deviation_min: Duration::from_millis(40),
            silence_max: Duration::from_secs(2),
            busy_max: Duration::from_secs(60),
        }
    }
}

/// What happens to a detector.
#[derive(Clone, Debug)]
pub enum DetectInput {
    /// A link to this peer is up.
    Up(Incarnation),
    /// The last link to it ended: the transport's own evidence is harder than anything here.
    Down(Incarnation),
    /// A heartbeat came. Only this counts as hearing of a peer: sending to it proves nothing.
    Heard(Incarnation, Heartbeat),
    /// A second source says that this peer is silent for it as well.
    Confirmed(Incarnation),
    /// Time passed, and everything that had arrived by now has been taken in.
    Tick,
}

/// What a detector tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DetectOutput {
    /// Prefer others.
    Suspect {
        /// The peer.
        peer: Incarnation,
        /// Why.
        evidence: Evidence,
    },
    /// The suspicion was wrong.
    Cleared {
        /// The peer.
        peer: Incarnation,
    },
    /// Move what is on it.
    Down {
        /// The peer.
        peer: Incarnation,
        /// Why.
        evidence: Evidence,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Trusted,
    Suspect,
    Down,
}

#[derive(Debug)]
struct Watched {
    heard: Instant,
    /// Of the intervals between heartbeats, in microseconds.
    mean: u64,
    /// Of the same, squared.
    variance: u64,
    state: State,
    hung: bool,
}

/// Watches the peers that a node is linked to.
#[derive(Debug)]
pub struct Detector {
    config: DetectConfig,
    peers: BTreeMap<Incarnation, Watched>,
    last_tick: Option<Instant>,
    outputs: VecDeque<DetectOutput>,
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

impl Detector {
    /// A detector that watches nobody yet.
    pub fn new(config: DetectConfig) -> Self {
        Detector { config, peers: BTreeMap::new(), last_tick: None, outputs: VecDeque::new() }
    }

    fn on_heard(&mut self, now: Instant, peer: Incarnation, heartbeat: Heartbeat) {
        let busy_max = micros(self.config.busy_max) / 1000;
        let Some(watched) = self.peers.get_mut(&peer) else { return };
        let interval = micros(now.since(watched.heard)).min(micros(self.config.silence_max));
        watched.heard = now;
        let distance = interval.abs_diff(watched.mean);
        watched.mean = (watched.mean * (WEIGHT - 1) + interval) / WEIGHT;
        watched.variance = (watched.variance * (WEIGHT - 1) + distance * distance) / WEIGHT;
        let stuck = heartbeat.accepted > heartbeat.completed && u64::from(heartbeat.busy_ms) > busy_max;
        if stuck && !watched.hung {
            watched.hung = true;
            let evidence = Evidence::Hung { busy_ms: heartbeat.busy_ms.into() };
            watched.state = State::Suspect;
            self.outputs.push_back(DetectOutput::Suspect { peer, evidence });
        } else if !stuck && watched.state != State::Trusted {
            watched.hung = false;
            watched.state = State::Trusted;
            self.outputs.push_back(DetectOutput::Cleared { peer });
        }
    }

    fn on_tick(&mut self, now: Instant) {
        // A detector that woke late was deaf, not its peers silent: its delay is no part of their silence, and
        // nobody is judged before what arrived meanwhile has been heard.
        let interval = self.config.interval;
        let late = self.last_tick.map_or(Duration::ZERO, |last| now.since(last).saturating_sub(interval * 2));
        self.last_tick = Some(now);
        if late > Duration::ZERO {
            for watched in self.peers.values_mut() {
                watched.heard = watched.heard + late;
            }
            return;
        }
        let deviation_min = micros(self.config.deviation_min);
        for (peer, watched) in &mut self.peers {
            let silent = now.since(watched.heard);
            let beyond = micros(silent).saturating_sub(watched.mean);
            let variance = watched.variance.max(deviation_min * deviation_min);
            let evidence = Evidence::Silence { silent_ms: micros(silent) / 1000 };
            if silent >= self.config.silence_max && watched.state != State::Down {
                watched.state = State::Down;
                self.outputs.push_back(DetectOutput::Down { peer: *peer, evidence });
            } else if watched.state == State::Trusted
                && beyond.saturating_mul(beyond) > (DEVIATIONS * DEVIATIONS).saturating_mul(variance)
            {
                watched.state = State::Suspect;
                self.outputs.push_back(DetectOutput::Suspect { peer: *peer, evidence });
            }
        }
    }
}

impl Machine for Detector {
    type Input = DetectInput;
    type Output = DetectOutput;

    fn handle(&mut self, now: Instant, input: DetectInput) {
        match input {
            DetectInput::Up(peer) => {
                let watched = Watched {
                    heard: now,
                    mean: micros(self.config.interval),
                    variance: 0,
                    state: State::Trusted,
                    hung: false,
                };
                self.peers.insert(peer, watched);
            }
            DetectInput::Down(peer) => {
                self.peers.remove(&peer);
            }
            DetectInput::Heard(peer, heartbeat) => self.on_heard(now, peer, heartbeat),
            DetectInput::Confirmed(peer) => {
                if let Some(watched) = self.peers.get_mut(&peer)
                    && watched.state == State::Suspect
                    && !watched.hung
                {
                    watched.state = State::Down;
                    let evidence = Evidence::Silence { silent_ms: micros(now.since(watched.heard)) / 1000 };
                    self.outputs.push_back(DetectOutput::Down { peer, evidence });
                }
            }
            DetectInput::Tick => self.on_tick(now),
        }
    }

    fn poll(&mut self) -> Option<DetectOutput> {
        self.outputs.pop_front()
    }

    fn deadline(&self) -> Option<Instant> {
        (!self.peers.is_empty())
            .then(|| self.last_tick.map_or(Instant::ZERO, |last| last + self.config.interval))
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    const STEP: Duration = Duration::from_millis(50);

    fn peer() -> Incarnation {
        Incarnation::from_bits(7)
    }

    struct World {
        detector: Detector,
        now: Instant,
    }

    impl World {
        fn new() -> Self {
            let mut world = World { detector: Detector::new(DetectConfig::default()), now: Instant::ZERO };
            world.tell(DetectInput::Up(peer()));
            world
        }

        fn tell(&mut self, input: DetectInput) -> Vec<DetectOutput> {
            self.detector.handle(self.now, input);
            core::iter::from_fn(|| self.detector.poll()).collect()
        }

        fn heard(&mut self) -> Vec<DetectOutput> {
            self.tell(DetectInput::Heard(peer(), Heartbeat::default()))
        }

        fn pass(&mut self, time: Duration) -> Vec<DetectOutput> {
            self.now = self.now + time;
            self.tell(DetectInput::Tick)
        }
    }

    #[test]
    fn a_silent_peer_is_suspected_within_a_third_of_a_second_and_down_after_the_cap() {
        let mut world = World::new();
        for _ in 0..100 {
            world.pass(STEP);
            assert_eq!(world.heard(), []);
        }
        let silent_since = world.now;
        let mut suspected = None;
        let down = loop {
            match world.pass(STEP).first() {
                Some(DetectOutput::Suspect { .. }) => suspected = Some(world.now.since(silent_since)),
                Some(DetectOutput::Down { evidence, .. }) => break *evidence,
                _ => {}
            }
        };
        assert!(suspected.is_some_and(|after| after <= Duration::from_millis(350)), "{suspected:?}");
        assert_eq!(down, Evidence::Silence { silent_ms: 2000 });
    }

    #[test]
    fn sending_to_a_peer_never_makes_it_look_alive() {
        // There is no input that a sender could give in its peer's name: only a heartbeat is heard (the peer sends
        // nothing here, however much is sent to it).
        let mut world = World::new();
        let verdicts: Vec<_> = (0..60).flat_map(|_| world.pass(STEP)).collect();
        assert!(matches!(verdicts.last(), Some(DetectOutput::Down { .. })));
    }

    #[test]
    fn an_observer_that_slept_suspects_nobody() {
        let mut world = World::new();
        for _ in 0..20 {
            world.pass(STEP);
            world.heard();
        }
        assert_eq!(world.pass(Duration::from_secs(2)), []);
        // What arrived meanwhile is heard, and the peer goes on as before.
        assert_eq!(world.heard(), []);
        for _ in 0..20 {
            assert_eq!(world.pass(STEP), []);
            assert_eq!(world.heard(), []);
        }
    }

    #[test]
    fn a_suspected_peer_that_is_heard_is_trusted_again_and_a_second_source_confirms_a_silence() {
        let mut world = World::new();
        while world.pass(STEP).is_empty() {}
        assert_eq!(world.heard(), [DetectOutput::Cleared { peer: peer() }]);
        while world.pass(STEP).is_empty() {}
        assert!(matches!(world.tell(DetectInput::Confirmed(peer()))[..], [DetectOutput::Down { .. }]));
        assert_eq!(world.heard(), [DetectOutput::Cleared { peer: peer() }]);
    }

    #[test]
    fn a_process_that_answers_while_its_engine_stands_is_suspected_as_hung() {
        let mut world = World::new();
        world.pass(STEP);
        let heartbeat = Heartbeat { accepted: 5, completed: 4, busy_ms: 61_000, ..Heartbeat::default() };
        let suspect = world.tell(DetectInput::Heard(peer(), heartbeat));
        let evidence = Evidence::Hung { busy_ms: 61_000 };
        assert_eq!(suspect, [DetectOutput::Suspect { peer: peer(), evidence }]);
        assert_eq!(world.heard(), [DetectOutput::Cleared { peer: peer() }]);
    }

    proptest! {
        /// Heartbeats that come at least once in three intervals never lead to a `Down`, and every verdict has its
        /// evidence: a silence that really was that long.
        #[test]
        fn jitter_alone_is_never_a_death(gaps in prop::collection::vec(1u64..150, 1..300)) {
            let mut world = World::new();
            for gap in gaps {
                let mut left = gap;
                while left > 0 {
                    let step = left.min(50);
                    left -= step;
                    for verdict in world.pass(Duration::from_millis(step)) {
                        let down = matches!(verdict, DetectOutput::Down { .. });
                        prop_assert!(!down);
                    }
                }
                world.heard();
            }
        }
    }
}
