//! A whole deployment on one machine as child processes: a directory, and the replicas of each stage. A stage that
//! ends is reported to the directory and started again under the same identity.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, bail};
use connex::{Address, Evidence, Group, Incarnation, LogicalId, Node, Standing};
use rustix::process::Signal;
use tokio::sync::{broadcast, mpsc};

use crate::args::Plant;
use crate::child::{Child, HEARD_MAX, Heard};
use crate::model::Model;
use crate::report::{Line, host_ns};

/// A stage that never got ready is started again after a pause, which doubles up to the last: what ends it would end
/// its successor too.
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_LAST: Duration = Duration::from_secs(5);

/// What a deployment consists of.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) model: Model,
    pub(crate) stages: u16,
    pub(crate) replicas: u32,
    pub(crate) k: usize,
    pub(crate) toy_step: Duration,
    pub(crate) ledger: Option<PathBuf>,
    pub(crate) plant: Option<Plant>,
}

impl Plan {
    pub(crate) fn new(model: Model, stages: u16, replicas: u32) -> Self {
        Plan { model, stages, replicas, k: 4, toy_step: Duration::ZERO, ledger: None, plant: None }
    }
}

/// A stage's place: its number and its replica's.
pub(crate) type Seat = (u16, u32);

/// What is heard of a stage process.
#[derive(Clone, Debug)]
pub(crate) struct News {
    pub(crate) seat: Seat,
    /// Counts the processes of the seat from 0.
    pub(crate) life: u32,
    pub(crate) at_ns: u64,
    pub(crate) what: What,
}

/// A line of a stage process, or its end.
#[derive(Clone, Debug)]
pub(crate) enum What {
    Line(Line),
    Exited(String),
}

/// A process that holds or held a seat.
#[derive(Clone, Debug)]
pub(crate) struct Life {
    pub(crate) lid: LogicalId,
    pub(crate) pid: u32,
    pub(crate) incarnation: Option<Incarnation>,
    pub(crate) killed: bool,
}

struct Seated {
    child: Child,
    /// The source of a migration, which must go on hearing this process until it ends by itself.
    before: Option<Child>,
    lives: Vec<Life>,
    ready: bool,
}

struct Keeper {
    plan: Plan,
    directory: Address,
    client: Node,
    heard: mpsc::Sender<((Seat, u32), u64, Heard)>,
    seats: Mutex<BTreeMap<Seat, Seated>>,
    news: broadcast::Sender<News>,
    closing: std::sync::atomic::AtomicBool,
}

/// A running deployment; its processes end with this one.
pub(crate) struct Deployment {
    keeper: Arc<Keeper>,
    directory: Child,
}

impl Deployment {
    /// Starts everything, and waits until every replica serves.
    pub(crate) async fn start(plan: Plan) -> anyhow::Result<Self> {
        if plan.stages == 0 || plan.replicas == 0 {
            bail!("a deployment has at least one stage and one replica");
        }
        let (heard, mut first_heard) = mpsc::channel(HEARD_MAX);
        let args: Vec<String> =
            ["directory", "--listen", "127.0.0.1:0", "--first"].map(String::from).to_vec();
        let directory_child = Child::start(&args, (), heard)?;
        let directory = loop {
            match first_heard.recv().await {
                Some(((), _, Heard::Line(Line::Ready { address, .. }))) => break Address::new(&address),
                Some(((), _, Heard::Line(_))) => {}
                Some(((), _, Heard::Exited(how))) => bail!("the directory ended at its start: {how}"),
                None => bail!("the directory can't be heard"),
            }
        };
        let client = Node::client().directory(directory.clone()).listen("127.0.0.1:0").start().await?;
        let standing = client.ready().await;
        if standing != Standing::Watching {
            bail!("the directory did not answer: {standing:?}");
        }
        let (heard, hearing) = mpsc::channel(HEARD_MAX);
        let keeper = Arc::new(Keeper {
            plan,
            directory,
            client,
            heard,
            seats: Mutex::default(),
            news: broadcast::Sender::new(65_536),
            closing: std::sync::atomic::AtomicBool::new(false),
        });
        let mut news = keeper.news.subscribe();
        tokio::spawn(listen(keeper.clone(), hearing));
        let seats: Vec<Seat> = (0..keeper.plan.stages)
            .flat_map(|stage| (0..keeper.plan.replicas).map(move |replica| (stage, replica)))
            .collect();
        for seat in &seats {
            keeper.start(*seat)?;
        }
        let deployment = Deployment { keeper, directory: directory_child };
        while !seats.iter().all(|seat| deployment.is_ready(*seat)) {
            let heard = tokio::time::timeout(Duration::from_secs(60), news.recv()).await;
            let News { seat, what, .. } = heard.context("the stages did not get ready within 60 s")??;
            if let What::Exited(how) = what {
                bail!("stage {} replica {} ended at its start: {how}", seat.0, seat.1);
            }
        }
        deployment.meet_all().await?;
        Ok(deployment)
    }

    /// Waits until the client may choose every replica of stage 0: else the first that it meets gets all the work.
    async fn meet_all(&self) -> anyhow::Result<()> {
        let mut events = self.keeper.client.events();
        let group = self.keeper.client.group(&self.group()?);
        let met = || group.replicas().iter().filter(|replica| replica.routable).count();
        while met() < self.keeper.plan.replicas as usize {
            // A missed event is no fault: the state is looked at again.
            let heard = tokio::time::timeout(Duration::from_secs(30), events.recv()).await;
            drop(heard.context("the client did not meet every replica of stage 0 within 30 s")?);
        }
        Ok(())
    }

    /// The client in this process.
    pub(crate) fn client(&self) -> &Node {
        &self.keeper.client
    }

    /// Where the directory is.
    pub(crate) fn directory(&self) -> &Address {
        &self.keeper.directory
    }

    /// The stage-0 group.
    pub(crate) fn group(&self) -> anyhow::Result<Group> {
        Ok(Group::new(&self.keeper.plan.model.name()?, "pp", 0))
    }

    /// Every seat.
    pub(crate) fn seats(&self) -> Vec<Seat> {
        self.keeper.seats.lock().expect("no holder panics").keys().copied().collect()
    }

    /// What is heard of the stages from now on.
    pub(crate) fn news(&self) -> broadcast::Receiver<News> {
        self.keeper.news.subscribe()
    }

    /// Whether a seat's present process serves.
    pub(crate) fn is_ready(&self, seat: Seat) -> bool {
        self.keeper.seats.lock().expect("no holder panics").get(&seat).is_some_and(|seated| seated.ready)
    }

    /// Every process that held a seat, the present one last.
    pub(crate) fn lives(&self, seat: Seat) -> Vec<Life> {
        let seats = self.keeper.seats.lock().expect("no holder panics");
        seats.get(&seat).map(|seated| seated.lives.clone()).unwrap_or_default()
    }

    /// Says something to a seat's present process.
    pub(crate) fn tell(&self, seat: Seat, command: &str) {
        let child = {
            let seats = self.keeper.seats.lock().expect("no holder panics");
            seats.get(&seat).map(|seated| seated.child.clone())
        };
        if let Some(child) = child {
            child.tell(command);
        }
    }

    /// Kills a seat's present process; returns the moment just before.
    pub(crate) fn kill(&self, seat: Seat) -> u64 {
        let mut seats = self.keeper.seats.lock().expect("no holder panics");
        let Some(seated) = seats.get_mut(&seat) else { return host_ns() };
        seated.ready = false;
        if let Some(life) = seated.lives.last_mut() {
            life.killed = true;
        }
        let before = host_ns();
        seated.child.signal(Signal::KILL);
        before
    }

    /// Waits until a seat's process of this life, or a later one, serves.
    pub(crate) async fn wait_ready(&self, seat: Seat, life: u32) -> anyhow::Result<()> {
        let mut news = self.news();
        loop {
            let there = {
                let seats = self.keeper.seats.lock().expect("no holder panics");
                seats.get(&seat).is_some_and(|seated| seated.ready && seated.lives.len() as u32 > life)
            };
            if there {
                return Ok(());
            }
            let heard = tokio::time::timeout(Duration::from_secs(30), news.recv()).await;
            // Missed news is no fault: the state is looked at again.
            drop(heard.context("a stage did not come back within 30 s")?);
        }
    }

    /// Starts a second process under a seat's identity, which takes it over from the first.
    pub(crate) fn migrate(&self, seat: Seat) -> anyhow::Result<()> {
        self.keeper.start_as(seat, true)
    }

    /// Steps submitted, completed and failed, as the client here and the stage-0 processes that live count them.
    pub(crate) async fn step_counts(&self) -> anyhow::Result<(u64, u64, u64)> {
        let mut counts = self.client().core().step_counts();
        let mut news = self.news();
        let heads: Vec<Seat> = self.seats().into_iter().filter(|(stage, _)| *stage == 0).collect();
        for seat in &heads {
            self.tell(*seat, "stats");
        }
        let mut waiting = heads.len();
        while waiting > 0 {
            let heard = tokio::time::timeout(Duration::from_secs(5), news.recv()).await;
            let News { what, .. } = heard.context("a stage did not give its counts")??;
            if let What::Line(Line::Stats { submitted, completed, failed }) = what {
                counts = (counts.0 + submitted, counts.1 + completed, counts.2 + failed);
                waiting -= 1;
            }
        }
        Ok(counts)
    }

    /// Ends every process.
    pub(crate) async fn stop(self) {
        self.keeper.closing.store(true, std::sync::atomic::Ordering::SeqCst);
        for seated in self.keeper.seats.lock().expect("no holder panics").values() {
            seated.child.signal(Signal::KILL);
        }
        self.directory.signal(Signal::KILL);
    }
}

impl Keeper {
    fn lid(&self, (stage, replica): Seat) -> anyhow::Result<LogicalId> {
        Ok(Group::new(&self.plan.model.name()?, "pp", stage).replica(replica))
    }

    fn start(&self, seat: Seat) -> anyhow::Result<()> {
        self.start_as(seat, false)
    }

    fn start_as(&self, seat: Seat, migrate: bool) -> anyhow::Result<()> {
        let lid = self.lid(seat)?;
        let plan = &self.plan;
        let mut args: Vec<String> = vec![
            "stage".into(),
            "--lid".into(),
            lid.to_string(),
            "--stages".into(),
            plan.stages.to_string(),
            "--model".into(),
            plan.model.arg(),
            "--directory".into(),
            self.directory.to_string(),
            "--k".into(),
            plan.k.to_string(),
            "--toy-step-us".into(),
            plan.toy_step.as_micros().to_string(),
            "--guardian".into(),
            self.client.me().incarnation.to_string(),
        ];
        if let Some(ledger) = &plan.ledger {
            args.extend(["--ledger".into(), ledger.display().to_string()]);
        }
        match plan.plant {
            Some(Plant::Rerun) => args.extend(["--plant".into(), "rerun".into()]),
            Some(Plant::LostState) => args.extend(["--plant".into(), "lost-state".into()]),
            None => {}
        }
        if migrate {
            args.push("--migrate".into());
        }
        // The lock is held across the start, so that nothing is heard of a process that has no seat yet.
        let mut seats = self.seats.lock().expect("no holder panics");
        let life = seats.get(&seat).map_or(0, |seated| seated.lives.len() as u32);
        let child = Child::start(&args, (seat, life), self.heard.clone())?;
        let present = Life { lid, pid: child.pid(), incarnation: None, killed: false };
        match seats.get_mut(&seat) {
            Some(seated) => {
                seated.lives.push(present);
                seated.before = Some(std::mem::replace(&mut seated.child, child));
                seated.ready = false;
            }
            None => {
                seats.insert(seat, Seated { child, before: None, lives: vec![present], ready: false });
            }
        }
        Ok(())
    }

    fn on_line(&self, seat: Seat, life: u32, line: &Line) {
        if let Line::Ready { incarnation, .. } = line {
            let mut seats = self.seats.lock().expect("no holder panics");
            let Some(seated) = seats.get_mut(&seat) else { return };
            seated.ready = seated.lives.len() as u32 == life + 1;
            if let Some(life) = seated.lives.get_mut(life as usize) {
                life.incarnation = u64::from_str_radix(incarnation, 16).ok().map(Incarnation::from_bits);
            }
        }
    }

    /// A stage ended: its lease is ended too, on the word of this process, which reaped it; and it is started again.
    fn on_exit(self: &Arc<Self>, seat: Seat, life: u32) {
        let (ended, present, failed) = {
            let mut seats = self.seats.lock().expect("no holder panics");
            let Some(seated) = seats.get_mut(&seat) else { return };
            let present = seated.lives.len() as u32 == life + 1;
            if present {
                seated.ready = false;
            }
            let failed = seated.lives.iter().rev().take_while(|life| life.incarnation.is_none()).count();
            (seated.lives.get(life as usize).cloned(), present, failed)
        };
        if let (Some(ended), Some(registration)) = (ended, self.client.registration())
            && let Some(incarnation) = ended.incarnation
        {
            registration.report(ended.lid, incarnation, Evidence::ProcessExited);
        }
        if !present {
            return;
        }
        match pause_after(failed) {
            Duration::ZERO => self.start_again(seat, life),
            pause => {
                let keeper = self.clone();
                tokio::spawn(async move {
                    tokio::time::sleep(pause).await;
                    keeper.start_again(seat, life);
                });
            }
        }
    }

    /// Starts the successor of this life, unless the seat has one.
    fn start_again(&self, seat: Seat, life: u32) {
        let present = {
            let seats = self.seats.lock().expect("no holder panics");
            seats.get(&seat).is_some_and(|seated| seated.lives.len() as u32 == life + 1)
        };
        if present
            && !self.closing.load(std::sync::atomic::Ordering::SeqCst)
            && let Err(error) = self.start(seat)
        {
            tracing::error!(%error, "a stage could not be started again");
        }
    }
}

/// How long a seat stays empty after so many lives in a row that never got ready.
fn pause_after(failed: usize) -> Duration {
    match failed {
        0 => Duration::ZERO,
        _ => (RETRY_FIRST * (1 << (failed - 1).min(10))).min(RETRY_LAST),
    }
}

async fn listen(keeper: Arc<Keeper>, mut hearing: mpsc::Receiver<((Seat, u32), u64, Heard)>) {
    while let Some(((seat, life), at_ns, heard)) = hearing.recv().await {
        let what = match heard {
            Heard::Line(line) => {
                keeper.on_line(seat, life, &line);
                What::Line(line)
            }
            Heard::Exited(how) => {
                keeper.on_exit(seat, life);
                What::Exited(how)
            }
        };
        // Nobody listening is no fault.
        let _ = keeper.news.send(News { seat, life, at_ns, what });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_that_served_is_replaced_at_once_and_one_that_never_did_ever_later() {
        let pauses = [0, 1, 2, 7, 1000].map(pause_after);
        assert_eq!(pauses.map(|pause| pause.as_millis()), [0, 100, 200, 5000, 5000]);
    }
}
