//! Migrations of an identity whose source, target, submitters or directory die, hang, lie or come back in the middle.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use connex::protocol::cutover::{ASK_AGAIN, HOLD_MAX};
use connex::protocol::wire::cutover::Message;
use connex::protocol::wire::hello::Lane;
use connex::protocol::wire::{self, Control, Frame};
use connex::testkit::Cluster;
use connex::transport::{Event, Handler, Identity, Op, Transport};
use connex::{
    Bytes, CallError, Endpoint, EndpointFactory, Evidence, Group, Incarnation, LogicalId, Node, NodeEvent,
    Peer, Pending, Reach, Reply, Standing, Step, StepContext, StepId, WhenFull,
};
use tokio::runtime::Handle;
use tokio::sync::{broadcast, mpsc, watch};

/// What a condition may take at most, on a machine that is busy with other things.
const SLACK: Duration = Duration::from_secs(30);

/// The payload of a step that waits for the ledger's gate.
const HELD: &str = "held";

fn group() -> Group {
    Group::new("m", "work", 0)
}

fn lid() -> LogicalId {
    group().replica(0)
}

async fn within<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(SLACK, what).await.expect("it ends in time")
}

/// Looks again and again until it holds.
async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < SLACK, "not within {SLACK:?}: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn expect(events: &mut broadcast::Receiver<NodeEvent>, wanted: impl Fn(&NodeEvent) -> bool) {
    within(async {
        loop {
            match events.recv().await {
                Ok(event) if wanted(&event) => return,
                Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
                Err(broadcast::error::RecvError::Closed) => panic!("the node is gone"),
            }
        }
    })
    .await;
}

/// Which life of the identity executed what. It sees to it that one life at a time serves the identity, and none
/// after another has followed it.
#[derive(Clone)]
struct Ledger {
    state: Arc<Mutex<State>>,
    open: watch::Sender<bool>,
}

#[derive(Default)]
struct State {
    executed: Vec<(u32, StepId)>,
    /// What each life executes now, in the order of their first executions.
    running: Vec<(u32, usize)>,
    violations: Vec<String>,
}

impl Ledger {
    fn new() -> Self {
        Ledger { state: Arc::default(), open: watch::Sender::new(false) }
    }

    /// The endpoint of one life. It begins its steps in the order in which it gets them, and ends all at once but those
    /// that wait for the gate.
    fn endpoint(&self, life: u32) -> EndpointFactory {
        let (ledger, runtime) = (self.clone(), Handle::current());
        Arc::new(move |_place| {
            Ok(Box::new(Recorder { ledger: ledger.clone(), life, runtime: runtime.clone() }))
        })
    }

    fn begin(&self, life: u32, step: StepId) {
        let mut state = self.state.lock().unwrap();
        state.executed.push((life, step));
        if !state.running.iter().any(|(known, _)| *known == life) {
            state.running.push((life, 0));
        }
        let last = state.running.len() - 1;
        for (at, (other, count)) in state.running.clone().into_iter().enumerate() {
            if other != life && count > 0 {
                state.violations.push(format!("{step} begins at {life} while {other} executes"));
            }
            if other == life && at < last {
                state.violations.push(format!("{step} begins at {life}, which another has followed"));
            }
        }
        state.running.iter_mut().find(|(known, _)| *known == life).unwrap().1 += 1;
    }

    fn end(&self, life: u32) {
        let mut state = self.state.lock().unwrap();
        let entry = state.running.iter_mut().find(|(known, _)| *known == life).unwrap();
        entry.1 = entry.1.saturating_sub(1);
    }

    /// This life is dead, or thought so: what it executes disturbs nobody.
    fn is_over(&self, life: u32) {
        let mut state = self.state.lock().unwrap();
        state.running.iter_mut().filter(|(known, _)| *known == life).for_each(|(_, count)| *count = 0);
    }

    fn open(&self) {
        self.open.send_replace(true);
    }

    fn executions(&self) -> usize {
        self.state.lock().unwrap().executed.len()
    }

    /// Which lives executed each step, by its number.
    fn lives(&self) -> BTreeMap<u64, Vec<u32>> {
        let mut lives: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
        for (life, step) in &self.state.lock().unwrap().executed {
            lives.entry(step.seq).or_default().push(*life);
        }
        lives
    }

    /// One life at a time served, and each executed a submitter's steps in order (P-7).
    fn check(&self) {
        let state = self.state.lock().unwrap();
        assert!(state.violations.is_empty(), "{:?}", state.violations);
        for (life, _) in &state.running {
            let mut last: BTreeMap<Incarnation, u64> = BTreeMap::new();
            for (_, step) in state.executed.iter().filter(|(at, _)| at == life) {
                let before = last.insert(step.origin, step.seq).unwrap_or(0);
                assert!(before < step.seq, "{life} executes {step} after {before}");
            }
        }
    }
}

struct Recorder {
    ledger: Ledger,
    life: u32,
    runtime: Handle,
}

impl Endpoint for Recorder {
    fn execute(&mut self, step: StepContext) {
        let (ledger, life, body) = (self.ledger.clone(), self.life, step.payload().clone());
        ledger.begin(life, step.id());
        if body != HELD {
            ledger.end(life);
            return step.finish(Ok(body));
        }
        self.runtime.spawn(async move {
            // The sender is the ledger's own, so it can't be gone.
            let _ = ledger.open.subscribe().wait_for(|open| *open).await;
            ledger.end(life);
            step.finish(Ok(body));
        });
    }
}

/// A source, life 1, that a client submits to.
struct World {
    cluster: Cluster,
    ledger: Ledger,
    pending: Vec<(String, Pending)>,
}

impl World {
    async fn new() -> Self {
        let mut cluster = Cluster::start().await;
        let ledger = Ledger::new();
        cluster.serve(lid(), ledger.endpoint(1)).await;
        World { cluster, ledger, pending: Vec::new() }
    }

    /// The source executes a step that ends when the gate opens, and others follow it.
    async fn holding() -> Self {
        let mut world = World::new().await;
        world.submit(HELD).await;
        until("it executes", || world.ledger.executions() == 1).await;
        world
    }

    async fn submit(&mut self, body: &str) {
        let handle = self.cluster.client().group(&group());
        let step = Step::new("").payload(Bytes::copy_from_slice(body.as_bytes()));
        let pending = within(handle.start(step, WhenFull::Wait)).await.unwrap();
        self.pending.push((body.to_owned(), pending));
    }

    async fn submit_ten(&mut self) {
        for n in 0..10 {
            self.submit(&n.to_string()).await;
        }
    }

    async fn call(&self, body: &str) -> Result<Reply, CallError> {
        let step = Step::new("").payload(Bytes::copy_from_slice(body.as_bytes()));
        within(self.cluster.client().group(&group()).call(step)).await
    }

    /// Every step that was submitted ends well.
    async fn all_end(&mut self) {
        for (body, pending) in self.pending.drain(..) {
            let reply = within(pending).await.unwrap_or_else(|error| panic!("{body}: {error}"));
            assert_eq!(reply.body, body);
        }
    }

    fn builder(&self, name: &str) -> connex::NodeBuilder {
        Node::builder(lid())
            .reach(Reach::Mem(self.cluster.hub().clone(), name.to_owned()))
            .directory(self.cluster.directory().address())
            .deployment("test")
            .guardian(self.cluster.client().me().incarnation)
    }

    /// Starts a target, as this life, under the name `target-N`.
    async fn target(&self, life: u32) -> Node {
        let builder = self.builder(&format!("target-{life}"));
        builder.serve(self.ledger.endpoint(life)).migrate().start().await.unwrap()
    }

    fn source(&self) -> &Node {
        self.cluster.node(&lid())
    }

    async fn source_is_fenced(&self, fenced: bool) {
        let served = self.source().core().served().unwrap();
        until("the fence", || served.is_ready() != fenced).await;
    }

    fn holder(&self) -> Option<Incarnation> {
        self.cluster.directory().routes().first().map(|route| route.incarnation)
    }

    fn shadow(&self) -> Option<Incarnation> {
        let routes = self.cluster.directory().routes();
        routes.first().and_then(|route| route.shadow.as_ref()).map(|(incarnation, _)| *incarnation)
    }

    async fn is_held_by(&self, node: &Node) {
        let wanted = node.me().incarnation;
        until("the hand-over", || self.holder() == Some(wanted)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_whose_target_dies_before_the_hand_over_serves_on_and_can_be_migrated_later() {
    let mut world = World::holding().await;
    let target = world.target(2).await;
    world.source_is_fenced(true).await;
    world.submit_ten().await;
    world.cluster.hub().crash("target-2");
    until("the directory knows", || world.shadow().is_none()).await;
    world.ledger.open();
    world.all_end().await;
    assert!(world.ledger.lives().values().all(|lives| *lives == [1]), "{:?}", world.ledger.lives());
    let standing = within(world.source().ready()).await;
    assert!(matches!(standing, Standing::Kept(_)), "{standing:?}");
    drop(target);
    let again = world.target(3).await;
    within(again.ready()).await;
    world.submit_ten().await;
    world.all_end().await;
    assert_eq!(world.ledger.lives().len(), 21);
    assert!(world.ledger.lives().values().skip(11).all(|lives| *lives == [3]), "{:?}", world.ledger.lives());
    world.ledger.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_that_dies_right_after_the_hand_over_is_followed_by_another_life_and_nothing_is_lost() {
    let mut world = World::holding().await;
    let mut events = world.source().events();
    let target = world.target(2).await;
    world.source_is_fenced(true).await;
    world.submit_ten().await;
    // It never hears that it holds the identity.
    world.cluster.hub().freeze("target-2");
    world.ledger.open();
    world.is_held_by(&target).await;
    expect(&mut events, |event| matches!(event, NodeEvent::HandedAway)).await;
    world.cluster.hub().crash("target-2");
    let registration = world.cluster.client().registration().unwrap();
    registration.report(lid(), target.me().incarnation, Evidence::ProcessExited);
    let third = world.ledger.endpoint(3);
    world.cluster.serve(lid(), third).await;
    world.all_end().await;
    let lives = world.ledger.lives();
    assert_eq!(lives.len(), 11);
    assert_eq!(lives[&1], [1]);
    assert!(lives.values().skip(1).all(|lives| *lives == [3]), "{lives:?}");
    world.ledger.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_dies_behind_its_fence_is_followed_by_its_target_at_once() {
    let mut world = World::holding().await;
    let target = world.target(2).await;
    world.source_is_fenced(true).await;
    world.submit_ten().await;
    world.cluster.kill(&lid()).await;
    world.ledger.is_over(1);
    within(target.ready()).await;
    // What had begun may have run, and begins at the target as well; it ends when the gate opens.
    until("the target executes it", || world.ledger.lives()[&1] == [1, 2]).await;
    world.ledger.open();
    world.all_end().await;
    let lives = world.ledger.lives();
    assert!(lives.values().skip(1).all(|lives| *lives == [2]), "what had not begun ran once: {lives:?}");
    world.ledger.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_hangs_behind_its_fence_loses_the_identity_and_serves_nothing_when_it_is_back() {
    let mut world = World::holding().await;
    let mut events = world.source().events();
    let target = world.target(2).await;
    world.source_is_fenced(true).await;
    world.submit_ten().await;
    world.cluster.hang(&lid());
    world.ledger.is_over(1);
    world.is_held_by(&target).await;
    until("the target executes it", || world.ledger.lives()[&1] == [1, 2]).await;
    world.cluster.thaw(&lid());
    expect(&mut events, |event| matches!(event, NodeEvent::IdentityLost)).await;
    world.ledger.open();
    world.all_end().await;
    world.submit_ten().await;
    world.all_end().await;
    let lives = world.ledger.lives();
    assert_eq!(lives.len(), 21);
    assert!(lives.values().skip(1).all(|lives| *lives == [2]), "{lives:?}");
    assert_eq!(world.holder(), Some(target.me().incarnation));
    world.ledger.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_that_outlasts_the_fence_calls_it_off_and_the_target_tries_again_later() {
    let mut world = World::holding().await;
    let source = world.source().me().incarnation;
    let target = world.target(2).await;
    world.source_is_fenced(true).await;
    world.submit_ten().await;
    // It serves on, beside the step that goes on: what was held back is executed by it.
    world.source_is_fenced(false).await;
    let held = world.pending.remove(0);
    world.all_end().await;
    assert!(world.ledger.lives().values().all(|lives| *lives == [1]));
    assert_eq!(world.holder(), Some(source));
    world.source_is_fenced(true).await;
    world.pending.push(held);
    world.ledger.open();
    world.all_end().await;
    within(target.ready()).await;
    assert_eq!(world.call("at the target").await.unwrap().body, "at the target");
    let lives = world.ledger.lives();
    assert_eq!(lives[&12], [2]);
    assert!(lives.values().all(|lives| lives.len() == 1), "{lives:?}");
    world.ledger.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_targets_that_compete_take_the_identity_one_after_the_other() {
    let mut world = World::new().await;
    let (one, other) = tokio::join!(world.target(2), world.target(3));
    let mut moves = [one.events(), other.events()];
    while one.registration().unwrap().epoch().is_none() && other.registration().unwrap().epoch().is_none()
        || world.holder() == Some(world.source().me().incarnation)
    {
        world.submit_ten().await;
        world.all_end().await;
    }
    // The one that was second takes it from the first.
    within(async { tokio::join!(one.ready(), other.ready()) }).await;
    let [first, second] = &mut moves;
    within(async {
        let away = |event: &NodeEvent| matches!(event, NodeEvent::HandedAway);
        tokio::select! {
            () = expect(first, away) => assert_eq!(world.holder(), Some(other.me().incarnation)),
            () = expect(second, away) => assert_eq!(world.holder(), Some(one.me().incarnation)),
        }
    })
    .await;
    world.submit_ten().await;
    world.all_end().await;
    let lives = world.ledger.lives();
    assert!(lives.values().all(|lives| lives.len() == 1), "each step ran once: {lives:?}");
    world.ledger.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_the_directory_is_away_a_source_is_not_fenced_and_the_migration_happens_when_it_is_back() {
    let mut world = World::new().await;
    let hub = world.cluster.hub().clone();
    let source = world.cluster.name_of(&lid()).to_owned();
    let mut events = world.source().events();
    // The target waits for the identity, and what it asks the source vanishes.
    hub.cut("target-2", &source);
    let target = world.target(2).await;
    until("it waits", || world.shadow().is_some()).await;
    hub.freeze("directory");
    expect(&mut events, |event| matches!(event, NodeEvent::DirectoryAway)).await;
    hub.heal("target-2", &source);
    // It asks more than once in this time.
    let start = Instant::now();
    while start.elapsed() < ASK_AGAIN * 3 {
        world.submit_ten().await;
        world.all_end().await;
        assert!(world.source().core().served().unwrap().is_ready(), "it is not fenced");
    }
    hub.thaw("directory");
    while world.holder() != Some(target.me().incarnation) {
        world.submit_ten().await;
        world.all_end().await;
    }
    within(target.ready()).await;
    world.submit_ten().await;
    world.all_end().await;
    let lives = world.ledger.lives();
    assert!(lives.values().all(|lives| lives.len() == 1), "{lives:?}");
    assert_eq!(lives.values().last().unwrap(), &[2]);
    world.ledger.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_that_hangs_in_the_middle_leaves_nobody_serving_twice_and_nobody_waiting_for_ever() {
    let mut world = World::holding().await;
    let hub = world.cluster.hub().clone();
    let mut events = world.source().events();
    let target = world.target(2).await;
    world.source_is_fenced(true).await;
    world.submit_ten().await;
    hub.freeze("directory");
    // The source asks the directory, which does not answer: whose the identity is then, nobody knows.
    world.ledger.open();
    let (_, held) = world.pending.remove(0);
    assert_eq!(within(held).await.unwrap().body, HELD);
    expect(&mut events, |event| matches!(event, NodeEvent::DirectoryAway)).await;
    // Longer than a submitter holds its steps back: they go to the source, which does not take them.
    let hung = Instant::now();
    until("the submitters go on", || hung.elapsed() > HOLD_MAX + HOLD_MAX / 8).await;
    assert_eq!(world.ledger.executions(), 1, "nobody serves");
    hub.thaw("directory");
    world.all_end().await;
    within(target.ready()).await;
    world.submit_ten().await;
    world.all_end().await;
    let lives = world.ledger.lives();
    assert_eq!(lives.len(), 21);
    assert!(lives.values().all(|lives| lives.len() == 1), "{lives:?}");
    world.ledger.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_submitter_that_hangs_delays_a_migration_by_little_and_goes_on_when_it_is_back() {
    let world = World::new().await;
    let builder = Node::client().reach(Reach::Mem(world.cluster.hub().clone(), "other".into()));
    let other =
        builder.directory(world.cluster.directory().address()).deployment("test").start().await.unwrap();
    let handle = other.group(&group());
    within(handle.ready()).await;
    within(handle.call(Step::new("").payload("before"))).await.unwrap();
    world.cluster.hub().freeze("other");
    let target = world.target(2).await;
    within(target.ready()).await;
    world.call("meanwhile").await.unwrap();
    world.cluster.hub().thaw("other");
    let reply = within(handle.call(Step::new("").payload("after"))).await.unwrap();
    assert_eq!(reply.body, "after");
    world.ledger.check();
}

/// Somebody who speaks the protocol, and is not who it says.
struct Stranger {
    transport: Arc<dyn Transport>,
    me: Incarnation,
    heard: mpsc::UnboundedReceiver<Message>,
}

struct Ear(mpsc::UnboundedSender<Message>);

impl Handler for Ear {
    fn handle(&self, event: Event) {
        if let Event::Message { frame, .. } = event
            && let Ok(wire::Envelope { frame: Frame::Control(Control::Cutover(message)), .. }) =
                wire::decode(frame)
        {
            // A test that has ended listens no more.
            let _ = self.0.send(message);
        }
    }
}

impl Stranger {
    async fn new(world: &World, to: &Node) -> Self {
        let (ear, heard) = mpsc::unbounded_channel();
        let me = Incarnation::from_bits(666);
        // It says that it serves the very identity.
        let identity = Identity { peer: Peer { lid: lid(), incarnation: me }, deployment: "test".into() };
        let transport = world.cluster.hub().start("stranger", identity, Arc::new(Ear(ear))).unwrap();
        transport.connect(&to.address(), None).await.unwrap();
        Stranger { transport, me, heard }
    }

    /// Waits until it hears this.
    async fn hears(&mut self, wanted: Message) {
        within(async { while self.heard.recv().await.expect("its transport lives") != wanted {} }).await;
    }

    fn say(&self, to: &Node, message: Message) {
        let to = to.me().incarnation;
        let frame = wire::encode(self.me, to, &Frame::Control(Control::Cutover(message)));
        self.transport.post(Op::Message { to, lane: Lane::Control, frame }).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stranger_can_neither_fence_a_source_nor_hold_a_submitter_back() {
    let mut world = World::holding().await;
    let epoch = world.source().registration().unwrap().epoch().unwrap();
    let mut stranger = Stranger::new(&world, world.source()).await;
    let client = world.cluster.client();
    stranger.transport.connect(&client.address(), None).await.unwrap();
    for to in [stranger.me, client.me().incarnation] {
        stranger.say(world.source(), Message::Fence { epoch, to });
        stranger.hears(Message::Refused { epoch }).await;
        assert!(world.source().core().served().unwrap().is_ready(), "nothing was disturbed");
    }
    stranger.say(client, Message::Pausing { epoch });
    // Its answer tells that what came before was taken.
    stranger.say(client, Message::Quiet { epoch, fence: 7 });
    stranger.hears(Message::Seen { epoch, fence: 7 }).await;
    assert_eq!(world.call("goes on").await.unwrap().body, "goes on");
    // Nor can it end a pause.
    let target = world.target(2).await;
    world.source_is_fenced(true).await;
    stranger.say(world.cluster.client(), Message::Abort { epoch });
    stranger.say(world.cluster.client(), Message::Quiet { epoch, fence: 8 });
    stranger.hears(Message::Seen { epoch, fence: 8 }).await;
    world.submit_ten().await;
    stranger.say(world.source(), Message::Seen { epoch, fence: 1 });
    stranger.say(world.source(), Message::Fence { epoch, to: stranger.me });
    stranger.hears(Message::Refused { epoch }).await;
    world.ledger.open();
    world.all_end().await;
    within(target.ready()).await;
    let lives = world.ledger.lives();
    assert!(lives.values().all(|lives| lives.len() == 1), "{lives:?}");
    world.ledger.check();
}
