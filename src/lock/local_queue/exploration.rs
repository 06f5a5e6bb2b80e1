//! Three callers want one key. Explores every order of their events: enter, poll, drop, reply, timeout, loss and release. The queue and the
//! deliveries are production code. This file simulates the store, the clock, and the channels and tasks between them.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use tokio::time::Instant;

use super::{LeaderState, LocalQueue, ReleaseTarget};
use crate::lock::delivery::{Delivery, Expired, Polled};

const CALLERS: usize = 3;
/// The grace period of a delivery is a third of it, 5 ms. A task takes over an unpolled call after a fifth of that, 1 ms.
const TTL: Duration = Duration::from_millis(15);
const WAITS: [u64; CALLERS] = [0, 2, 6];

/// The number of a lease. Numbers of ended leases are reused.
type Lease = u8;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Outcome {
    Lease(Lease, Instant),
    Busy,
}

/// The state of a caller's call for the lock.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Call {
    None,
    Queued,
    LeaseOffered(Lease, Instant),
    LeadershipOffered,
    /// The store is called, and called again until it grants the lease or the wait is over.
    Leads,
    /// The store has replied, and the call was not polled since.
    Replied(Option<Lease>),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Caller {
    has_entered: bool,
    wait_end: Instant,
    delivery: Option<Delivery<Outcome>>,
    call: Call,
    lease: Option<Lease>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    now: Instant,
    queue: Option<LocalQueue<Lease, usize>>,
    callers: [Caller; CALLERS],
    /// The lease in the store.
    stored: Option<Lease>,
    /// Whether the lease in the store is being released.
    releasing: bool,
    /// Calls that continue after their caller was dropped.
    abandoned: u8,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// The first poll, or another one.
    Poll(usize),
    Drop(usize),
    /// The store replies to the leader, or to a call whose caller was dropped.
    Reply,
    /// The store fails for the leader.
    Failure,
    /// The next timer: the end of a grace period or of a wait.
    Time,
    /// The store has completed a release.
    Returned,
    /// The holder releases the lease. `is_good`: whether the lease meets the terms of the next waiter.
    Release {
        is_good: bool,
    },
    /// The store forgets the lease.
    Loss,
}

impl World {
    fn new(now: Instant) -> Self {
        let caller = |wait| Caller {
            has_entered: false,
            wait_end: now + Duration::from_millis(wait),
            delivery: None,
            call: Call::None,
            lease: None,
        };
        let callers = WAITS.map(caller);
        Self { now, queue: None, callers, stored: None, releasing: false, abandoned: 0 }
    }

    fn is_done(&self, at: usize) -> bool {
        let caller = &self.callers[at];
        caller.has_entered && caller.delivery.is_none()
    }

    fn events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        for at in 0..CALLERS {
            if !self.is_done(at) {
                events.push(Event::Poll(at));
            }
            if self.callers[at].delivery.is_some() {
                events.push(Event::Drop(at));
            }
        }
        if self.abandoned > 0 || self.leader().is_some() {
            events.extend([Event::Reply, Event::Failure]);
        }
        if self.next_instant().is_some() {
            events.push(Event::Time);
        }
        if self.releasing {
            events.push(Event::Returned);
        }
        if self.callers.iter().any(|caller| caller.lease.is_some()) {
            events.extend([Event::Release { is_good: true }, Event::Release { is_good: false }]);
        }
        if self.stored.is_some() && !self.releasing {
            events.push(Event::Loss);
        }
        events
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Poll(at) => self.poll(at),
            Event::Drop(at) => self.drop_caller(at),
            Event::Reply => self.reply(true),
            Event::Failure => self.reply(false),
            Event::Time => self.pass_time(),
            Event::Returned => {
                (self.stored, self.releasing) = (None, false);
                self.advance();
            }
            Event::Release { is_good } => {
                if let Some(lease) = self.callers.iter_mut().find_map(|caller| caller.lease.take()) {
                    self.release_or_hand_off(lease, is_good);
                }
            }
            Event::Loss => {
                if let Some(lease) = self.stored.take()
                    && self.queue.as_mut().is_some_and(|queue| queue.lost(&lease))
                {
                    self.advance();
                }
            }
        }
        self.run_tasks();
        self.check();
    }

    fn leader(&self) -> Option<usize> {
        self.callers.iter().position(|caller| caller.call == Call::Leads)
    }

    fn next_instant(&self) -> Option<Instant> {
        let live = self.callers.iter().filter(|caller| caller.delivery.is_some());
        let times = live.flat_map(|caller| caller.delivery.iter().filter_map(Delivery::due).chain([caller.wait_end]));
        times.filter(|time| *time > self.now).min()
    }

    fn pass_time(&mut self) {
        self.now = self.next_instant().expect("time has something to bring");
        for at in 0..CALLERS {
            let Some(delivery) = &mut self.callers[at].delivery else { continue };
            match delivery.timeout(self.now) {
                Expired::Withdraw(Outcome::Lease(lease, _)) => self.release_or_hand_off(lease, true),
                Expired::Withdraw(Outcome::Busy) => panic!("an error waits for its caller without an end"),
                Expired::Detach | Expired::Nothing => {}
            }
        }
    }

    fn begin(&mut self, at: usize) {
        match &mut self.queue {
            None => {
                self.queue = Some(LocalQueue::new());
                self.callers[at].call = Call::Leads;
            }
            Some(queue) => {
                queue.enter(at as u64, at);
                self.callers[at].call = Call::Queued;
            }
        }
    }

    fn poll(&mut self, at: usize) {
        if !self.callers[at].has_entered {
            self.callers[at].has_entered = true;
            self.callers[at].delivery = Some(Delivery::new(self.now, self.callers[at].wait_end, TTL));
            self.begin(at);
        }
        loop {
            let now = self.now;
            let Some(delivery) = &mut self.callers[at].delivery else { return };
            match delivery.poll(now) {
                Polled::PollCall if !self.drive(at) => return,
                Polled::PollCall => {}
                Polled::Begin => self.begin(at),
                Polled::Pending => return,
                Polled::Ready(Outcome::Lease(lease, _)) => {
                    self.callers[at].delivery = None;
                    self.callers[at].lease = Some(lease);
                    return;
                }
                Polled::Ready(Outcome::Busy) => return self.callers[at].delivery = None,
                Polled::Late(outcome) => {
                    assert!(now >= self.callers[at].wait_end, "busy before the wait is over: {self:#?}");
                    self.callers[at].delivery = None;
                    if let Some(Outcome::Lease(lease, _)) = outcome {
                        self.release_or_hand_off(lease, true);
                    }
                    return;
                }
            }
        }
    }

    /// Polls the call of a caller. If the call ends, completes the delivery and returns true.
    fn drive(&mut self, at: usize) -> bool {
        let now = self.now;
        let outcome = match self.callers[at].call.clone() {
            Call::LeaseOffered(lease, completed) => Outcome::Lease(lease, completed),
            Call::Replied(Some(lease)) => Outcome::Lease(lease, now),
            Call::LeadershipOffered => {
                self.callers[at].call = Call::Leads;
                return false;
            }
            Call::Queued if now >= self.callers[at].wait_end => {
                self.queue.as_mut().expect("the caller waits in it").leave(at as u64);
                Outcome::Busy
            }
            Call::Replied(None) => {
                self.advance();
                Outcome::Busy
            }
            Call::None | Call::Queued | Call::Leads => return false,
        };
        let caller = &mut self.callers[at];
        caller.call = Call::None;
        let granted = if let Outcome::Lease(_, completed) = &outcome { Some(*completed) } else { None };
        caller.delivery.as_mut().expect("its call was driven").complete(outcome, granted, now);
        true
    }

    /// Polls the calls of detached callers, as their tasks would, until no call can progress.
    fn run_tasks(&mut self) {
        for _ in 0..CALLERS * 4 {
            for at in 0..CALLERS {
                let is_detached = |world: &Self| world.callers[at].delivery.as_ref().is_some_and(Delivery::is_detached);
                if is_detached(self)
                    && !self.drive(at)
                    && let Some(delivery) = &mut self.callers[at].delivery
                {
                    delivery.record_pending();
                }
            }
        }
    }

    fn drop_caller(&mut self, at: usize) {
        let caller = &mut self.callers[at];
        let waiter = caller.delivery.take().and_then(|mut delivery| delivery.close());
        let call = std::mem::replace(&mut caller.call, Call::None);
        if let Some(Outcome::Lease(lease, _)) = waiter {
            self.release_or_hand_off(lease, true);
        }
        match call {
            Call::Queued => drop(self.queue.as_mut().expect("the caller waits in it").leave(at as u64)),
            Call::LeaseOffered(lease, _) | Call::Replied(Some(lease)) => self.release_or_hand_off(lease, true),
            Call::LeadershipOffered | Call::Replied(None) => self.advance(),
            Call::Leads => self.abandoned += 1,
            Call::None => {}
        }
    }

    fn reply(&mut self, is_answer: bool) {
        let is_free = self.stored.is_none();
        let lease = (is_answer && is_free).then(|| self.unused());
        if let Some(lease) = lease {
            self.stored = Some(lease);
            self.queue.as_mut().expect("a leader has a queue").granted(lease);
        }
        match self.leader() {
            // The store refuses, because another lease is live: the leader retries while it waits.
            Some(at) if is_answer && lease.is_none() && self.now < self.callers[at].wait_end => {}
            Some(at) => self.callers[at].call = Call::Replied(lease),
            None => {
                self.abandoned -= 1;
                match lease {
                    Some(lease) => self.release_or_hand_off(lease, true),
                    None => self.advance(),
                }
            }
        }
    }

    fn unused(&self) -> Lease {
        let used = self.leases();
        (0..).find(|lease| !used.contains(lease)).expect("few leases are about")
    }

    /// The leases that callers have or are offered, including lost ones.
    fn leases(&self) -> Vec<Lease> {
        let mut leases = Vec::new();
        for caller in &self.callers {
            leases.extend(caller.lease);
            if let Call::LeaseOffered(lease, _) | Call::Replied(Some(lease)) = caller.call {
                leases.push(lease);
            }
            if let Some(Outcome::Lease(lease, _)) = caller.delivery.clone().and_then(|mut delivery| delivery.close()) {
                leases.push(lease);
            }
        }
        leases
    }

    fn release_or_hand_off(&mut self, lease: Lease, is_good: bool) {
        let Some(queue) = &mut self.queue else { return };
        match queue.release_or_hand_off(&lease, |_| is_good.then_some(())) {
            ReleaseTarget::Handoff(to, ()) => self.callers[to].call = Call::LeaseOffered(lease, self.now),
            ReleaseTarget::Release => self.releasing = true,
            ReleaseTarget::Unknown => {}
        }
    }

    fn advance(&mut self) {
        match self.queue.as_mut().and_then(LocalQueue::advance) {
            Some(next) => self.callers[next].call = Call::LeadershipOffered,
            None => self.queue = None,
        }
    }

    fn check(&self) {
        let leases = self.leases();
        let live = leases.iter().filter(|lease| self.stored == Some(**lease)).count();
        assert!(live <= 1, "one holder: {self:#?}");
        let is_leading =
            |caller: &&Caller| matches!(caller.call, Call::LeadershipOffered | Call::Leads | Call::Replied(None));
        let leaders = self.callers.iter().filter(is_leading).count() + usize::from(self.abandoned);
        let queued = self.callers.iter().filter(|caller| caller.call == Call::Queued).count();
        match self.queue.as_ref().map(|queue| (queue.front(), queue.len())) {
            None => {
                assert_eq!((leaders, queued, self.releasing), (0, 0, false), "forgotten: {self:#?}");
                assert_eq!(self.stored, None, "a lease that no caller has: {self:#?}");
            }
            Some((front, len)) => {
                assert_eq!(len, queued, "{self:#?}");
                let has_it = |lease: &Lease| leases.contains(lease) && self.stored == Some(*lease);
                let is_right = match front {
                    LeaderState::Acquiring => leaders == 1 && !self.releasing,
                    LeaderState::Held(lease) => leaders == 0 && has_it(lease) && !self.releasing,
                    LeaderState::Releasing => leaders == 0 && self.releasing,
                };
                assert!(is_right, "the front is not what the callers do: {self:#?}");
            }
        }
    }

    /// Identifies a state when states are compared.
    fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        hasher.finish()
    }

    /// Runs until no step is left, with a store that replies and holders that release. Only the callers in `polled` are polled. `settled`
    /// contains the digests of states that are known to end.
    fn settle(mut self, polled: &[usize], settled: &mut HashSet<u64>) {
        for _ in 0..100 {
            if !settled.insert(self.digest()) {
                return;
            }
            for at in polled {
                if self.callers[*at].delivery.is_some() {
                    self.apply(Event::Poll(*at));
                }
            }
            if self.releasing {
                self.apply(Event::Returned);
            } else if self.callers.iter().any(|caller| caller.lease.is_some()) {
                self.apply(Event::Release { is_good: true });
            } else if self.abandoned > 0 || self.leader().is_some() {
                self.apply(Event::Reply);
            } else if self.next_instant().is_some() {
                self.apply(Event::Time);
            } else {
                assert!(polled.iter().all(|at| self.callers[*at].delivery.is_none()), "a wait without end: {self:#?}");
                assert!(self.stored.is_none() && self.queue.is_none(), "the key is not free: {self:#?}");
                return;
            }
        }
        panic!("it never settles: {self:#?}");
    }
}

#[test]
fn three_callers_are_served_in_every_order() {
    let mut seen = HashSet::new();
    let mut left = vec![World::new(Instant::now())];
    // The callers that are still polled: none, one or all.
    let mut rests = [&[][..], &[0], &[1], &[2], &[0, 1, 2]].map(|polled| (polled, HashSet::new()));
    while let Some(world) = left.pop() {
        if !seen.insert(world.digest()) {
            continue;
        }
        for (polled, settled) in &mut rests {
            world.clone().settle(polled, settled);
        }
        for event in world.events() {
            let mut next = world.clone();
            next.apply(event);
            left.push(next);
        }
    }
    assert!(seen.len() > 10_000, "{} states", seen.len());
}
