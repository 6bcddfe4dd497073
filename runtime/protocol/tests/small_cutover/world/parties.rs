//! What each party does with what it hears.

use super::*;

impl World {
    pub(super) fn submit(&mut self) {
        self.budget.submits -= 1;
        let seq = self.next;
        self.next += 1;
        self.tell(SenderInput::Submit(Submission {
            id: id(seq),
            route: Vec::new(),
            completed: None,
            deadline: None,
            streaming: false,
            resume: Vec::new(),
            meta: Bytes::new(),
            payload: body(seq),
            when_full: WhenFull::Wait,
        }));
    }

    /// The directory makes somebody, or nobody, the holder, in one step, and tells everybody.
    pub(super) fn grant(&mut self, next: Option<Incarnation>) {
        self.granted += 1;
        self.holder = next.map(|next| (next, Epoch { boot: 1, counter: self.granted }));
        for who in [SUBMITTER, TARGET] {
            self.post(DIRECTORY, who, Mail::Holder(self.holder));
        }
    }

    /// The source asks that the target be made the holder: one comparison, one change.
    pub(super) fn on_request(&mut self, knows: bool) {
        self.asked = false;
        let word = match self.holder {
            Some((SOURCE, _)) if knows && self.alive(TARGET) => {
                self.grant(Some(TARGET));
                SourceInput::Handed
            }
            Some((SOURCE, _)) => SourceInput::Kept,
            // Its lease has run out meanwhile: it has given it up either way.
            _ => SourceInput::Handed,
        };
        self.post(DIRECTORY, SOURCE, Mail::Word(word));
    }

    /// Ends a life. What it had not sent to each of the other two is not sent, and what was on its way to it is lost.
    pub(super) fn crash(&mut self, who: Incarnation, sent: [usize; 2]) {
        self.budget.crashes -= 1;
        let (_, others) = TRIO.into_iter().find(|(one, _)| *one == who).expect("it is one of the three");
        for (other, sent) in others.into_iter().zip(sent) {
            self.mail.entry((who, other)).or_default().truncate(sent);
        }
        self.mail.retain(|(_, to), _| *to != who);
        for other in others {
            self.post(who, other, Mail::Down);
        }
        match self.lives.get_mut(&who) {
            Some(life) => {
                life.alive = false;
                life.hangs = false;
                life.running.clear();
            }
            None => self.submits = false,
        }
    }

    pub(super) fn lie(&mut self, lie: Lie) {
        let fence = |epoch, to| Message::Fence { epoch, to };
        let before = Epoch { boot: 1, counter: 0 };
        let (from, to, message) = match lie {
            Lie::AskForItself => (STRANGER, SOURCE, fence(FIRST, STRANGER)),
            Lie::AskForTheTarget => (STRANGER, SOURCE, fence(FIRST, TARGET)),
            Lie::AskForAnother => (TARGET, SOURCE, fence(before, TARGET)),
            Lie::AskAgain => (TARGET, SOURCE, fence(FIRST, TARGET)),
            Lie::Pausing => (STRANGER, SUBMITTER, Message::Pausing { epoch: FIRST }),
            Lie::Abort => (STRANGER, SUBMITTER, Message::Abort { epoch: FIRST }),
            Lie::CalledOff => (STRANGER, TARGET, Message::Abort { epoch: FIRST }),
            Lie::SeenByAStranger => (STRANGER, SOURCE, Message::Seen { epoch: FIRST, fence: self.fence }),
            Lie::SeenBefore => {
                (SUBMITTER, SOURCE, Message::Seen { epoch: FIRST, fence: self.fence.saturating_sub(1) })
            }
        };
        if self.acting(to) {
            self.on_cutover(from, to, message);
        }
    }

    pub(super) fn deliver(&mut self, from: Incarnation, to: Incarnation) {
        let mail = self.mail.get_mut(&(from, to)).and_then(VecDeque::pop_front).expect("there is mail");
        match (mail, to) {
            (Mail::Step(step), _) => self.replica(to, ReceiverInput::Step { from, step }),
            (Mail::Control(Control::Cutover(message)), _) => self.on_cutover(from, to, message),
            (Mail::Control(control), SUBMITTER) => self.tell(SenderInput::Control { from, control }),
            (Mail::Control(control), _) => self.replica(to, ReceiverInput::Control { from, control }),
            (Mail::Reply(reply), _) => self.tell(SenderInput::Reply { from, reply }),
            (Mail::Holder(holder), _) => self.on_holder(to, holder),
            (Mail::Word(word), _) => {
                self.handed &= word != SourceInput::Kept;
                self.tell_source(word);
            }
            (Mail::Heartbeat(heartbeat), _) => {
                self.members(GroupInput::Heartbeat { incarnation: from, heartbeat })
            }
            (Mail::Relinked, _) => self.tell(SenderInput::Relinked(from)),
            (Mail::Down, SUBMITTER) => self.on_down(from, Evidence::ConnectionReset),
            (Mail::Down, SOURCE) => self.tell_source(SourceInput::Gone(from)),
            (Mail::Down, _) => {}
        }
    }

    pub(super) fn on_down(&mut self, who: Incarnation, evidence: Evidence) {
        self.down.insert(who);
        self.members(GroupInput::Down { incarnation: who, evidence });
        self.tell(SenderInput::Handover { from: Target { replica: 0, incarnation: who }, evidence });
        self.tell_submitter(SubmitterInput::Down(who));
    }

    pub(super) fn on_cutover(&mut self, from: Incarnation, to: Incarnation, message: Message) {
        match (message, to) {
            (Message::Fence { epoch, to: next }, SOURCE) => {
                let held = self.holder.filter(|(holder, _)| *holder == SOURCE).map(|(_, epoch)| epoch);
                self.tell_source(SourceInput::Asked { from, epoch, to: next, held, shadow: Some(TARGET) });
            }
            (Message::Pausing { .. }, SUBMITTER) => {
                let lid = Group::new("m", "pp", 1).replica(0);
                let holder = self.sender.choose().current(&lid).map(|peer| peer.incarnation);
                self.tell_submitter(SubmitterInput::Pausing { from, replica: 0, holder });
            }
            (Message::Abort { .. }, SUBMITTER) => {
                self.tell_submitter(SubmitterInput::Abort { from, replica: 0 })
            }
            (Message::Quiet { epoch, fence }, SUBMITTER) => {
                self.cutover(SUBMITTER, from, Message::Seen { epoch, fence });
            }
            (Message::Seen { fence, .. }, SOURCE) => self.tell_source(SourceInput::Seen { from, fence }),
            (Message::Refused { .. }, TARGET) => self.tell_taker(TargetInput::Refused { from }),
            (Message::Abort { .. }, TARGET) => self.tell_taker(TargetInput::CalledOff { from }),
            (Message::Pausing { .. }, TARGET) => {}
            (message, to) => panic!("{message:?} to {to}"),
        }
    }

    /// The directory's word arrives.
    pub(super) fn on_holder(&mut self, at: Incarnation, holder: Option<(Incarnation, Epoch)>) {
        if at == TARGET {
            if holder.is_some_and(|(holder, _)| holder == TARGET) {
                self.tell_taker(TargetInput::Settled);
            }
            return;
        }
        let lid = Group::new("m", "pp", 1).replica(0);
        let before = self.sender.choose().current(&lid).map(|peer| peer.incarnation);
        let Some((to, epoch)) = holder else {
            if let Some(before) = before {
                let (epoch, evidence) = (FIRST, Evidence::LeaseExpired);
                self.members(GroupInput::Removed { lid, incarnation: before, epoch, evidence });
                self.on_down(before, evidence);
            }
            return;
        };
        let shadow = Some((TARGET, Address::new("mem://t"))).filter(|_| to == SOURCE);
        let (address, ready, draining) = (Address::new("mem://x"), true, false);
        self.members(GroupInput::Route(Route {
            lid,
            incarnation: to,
            address,
            epoch,
            ready,
            draining,
            shadow,
        }));
        if let Some(before) = before.filter(|before| *before != to) {
            let from = Target { replica: 0, incarnation: before };
            self.tell(SenderInput::Handover { from, evidence: Evidence::Superseded });
            self.tell_submitter(SubmitterInput::Moved { replica: 0, to });
            // The link to the old life is ended, and it notices: nothing of it is heard any more.
            self.fenced.insert(before);
            self.mail.remove(&(SUBMITTER, before));
            self.mail.remove(&(before, SUBMITTER));
            if std::mem::take(&mut self.parting) && self.alive(SOURCE) {
                self.tell_source(SourceInput::Parted);
            }
        }
        self.tell(SenderInput::Pump);
    }

    pub(super) fn members(&mut self, input: GroupInput) {
        let now = self.now;
        self.sender.choose_mut().handle(now, input);
        let mut ready = Vec::new();
        while let Some(output) = self.sender.choose_mut().poll() {
            if let GroupOutput::Routable { peer, .. } = output {
                ready.push(peer.incarnation);
            }
        }
        for from in ready {
            self.tell_submitter(SubmitterInput::Ready { from, replica: 0 });
            self.tell(SenderInput::Pump);
        }
    }

    pub(super) fn tell_source(&mut self, input: SourceInput) {
        self.source.handle(self.now, input);
        while let Some(output) = self.source.poll() {
            match output {
                SourceOutput::Refuse { to, epoch } => self.cutover(SOURCE, to, Message::Refused { epoch }),
                SourceOutput::Pause(epoch) => self.tell_all(Message::Pausing { epoch }),
                SourceOutput::Abort(epoch) => {
                    self.called_off = true;
                    self.tell_all(Message::Abort { epoch });
                }
                SourceOutput::Fence(fence) => {
                    self.fence = fence;
                    self.replica(SOURCE, ReceiverInput::Fence);
                    self.beat(false);
                }
                SourceOutput::Unfence => {
                    assert!(!self.handed, "a source that gave its identity up serves no more");
                    self.quiet = None;
                    self.replica(SOURCE, ReceiverInput::Unfence);
                    self.beat(true);
                }
                SourceOutput::Hand(to) => {
                    assert_eq!((to, self.lives[&SOURCE].running.len()), (TARGET, 0), "it is quiet");
                    (self.asked, self.handed) = (true, true);
                }
                SourceOutput::Settle { to, epoch, fence } => {
                    self.cutover(SOURCE, to, Message::Quiet { epoch, fence });
                }
                SourceOutput::Part => self.parting = true,
                SourceOutput::Over => {}
            }
        }
    }

    /// The source's heartbeats say from now on whether it takes steps.
    pub(super) fn beat(&mut self, ready: bool) {
        self.ready = ready;
        if self.budget.heartbeats {
            let heartbeat =
                Heartbeat { seq: 0, accepted: 0, completed: 0, busy_ms: 0, ready, draining: false };
            self.post(SOURCE, SUBMITTER, Mail::Heartbeat(heartbeat));
        }
    }

    fn tell_all(&mut self, message: Message) {
        self.cutover(SOURCE, SUBMITTER, message.clone());
        self.cutover(SOURCE, TARGET, message);
    }

    fn cutover(&mut self, from: Incarnation, to: Incarnation, message: Message) {
        self.post(from, to, Mail::Control(Control::Cutover(message)));
    }

    pub(super) fn tell_taker(&mut self, input: TargetInput) {
        self.taker.handle(self.now, input);
        while let Some(TargetOutput::Ask { holder, epoch }) = self.taker.poll() {
            self.cutover(TARGET, holder, Message::Fence { epoch, to: TARGET });
        }
    }

    pub(super) fn tell_submitter(&mut self, input: SubmitterInput) {
        self.submitter.handle(self.now, input);
        while let Some(output) = self.submitter.poll() {
            match output {
                SubmitterOutput::Pause(replica) => self.tell(SenderInput::Pause(replica)),
                SubmitterOutput::Resume { replica, .. } => self.tell(SenderInput::Resume(replica)),
            }
        }
    }

    pub(super) fn tell(&mut self, input: SenderInput) {
        self.sender.handle(self.now, input);
        while let Some(output) = self.sender.poll() {
            match output {
                SenderOutput::Send { to, step } => {
                    assert!(
                        !self.down.contains(&to.incarnation),
                        "{} goes to {to:?}, which is down",
                        step.id
                    );
                    self.post(SUBMITTER, to.incarnation, Mail::Step(step));
                }
                SenderOutput::Control { to, control } => self.post(SUBMITTER, to, Mail::Control(control)),
                SenderOutput::Done { id, result, .. } => {
                    if let Err(StepError { code, outcome, .. }) = &result {
                        let nobody = self.holder.is_none_or(|(holder, _)| !self.alive(holder));
                        assert!(nobody, "{id} failed: {code:?}, {outcome:?}");
                        assert_ne!(*outcome, Outcome::Ran);
                    }
                    let before = self.ended.insert(id.seq, result.map_err(|error| error.message));
                    assert!(before.is_none(), "{id} ended twice (P-1, P-5)");
                }
                SenderOutput::HandedOver { .. } | SenderOutput::Release { .. } => {}
                output => panic!("nobody asked for {output:?}"),
            }
        }
    }

    pub(super) fn replica(&mut self, at: Incarnation, input: ReceiverInput) {
        let now = self.now;
        self.lives.get_mut(&at).expect("it is one of the two").receiver.handle(now, input);
        while let Some(output) = self.lives.get_mut(&at).and_then(|life| life.receiver.poll()) {
            match output {
                ReceiverOutput::Execute(job) => self.execute(at, job.id),
                ReceiverOutput::Reply { to, reply } => self.post(at, to, Mail::Reply(reply)),
                ReceiverOutput::Control { to, control } => self.post(at, to, Mail::Control(control)),
                // Its run goes on to its end, and its answer is wanted by nobody.
                ReceiverOutput::Abort { .. } => {}
                ReceiverOutput::Quiet => self.quiet = Some(self.fence),
                output => panic!("nobody asked for {output:?}"),
            }
        }
    }

    fn execute(&mut self, at: Incarnation, id: StepId) {
        // A source that was stopped for longer than its lease does not know, and nobody hears its answers.
        let holds = self.holder.is_some_and(|(holder, _)| holder == at);
        assert!(holds || self.lapsed && at == SOURCE, "{id} runs at {at}, which does not hold the identity");
        assert!(at != SOURCE || !self.handed, "{id} runs at the source after it gave the identity up");
        let life = self.lives.get_mut(&at).expect("it is one of the two");
        assert!(!life.executed.contains(&id), "{id} ran twice in one life (P-2)");
        life.executed.push(id);
        life.running.push(id);
        // Nobody died: what has run at the source has run.
        let again = at == TARGET && self.alive(SOURCE) && self.lives[&SOURCE].executed.contains(&id);
        assert!(!again || self.blind, "{id} runs again although its first run ended well");
        if !self.blind && !self.called_off && self.alive(SOURCE) {
            let order = &self.lives[&at].executed;
            assert!(order.is_sorted(), "{order:?} at {at} (P-7)");
        }
    }
}
