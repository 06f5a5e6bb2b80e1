//! Delivers the outcome of a call to a caller that may have stopped polling. A pure state machine, without clock, store or task.

use std::time::Duration;

use tokio::time::Instant;

/// How long a role waits for an unpolled caller, or a third of the lease if that is shorter.
const GRACE: Duration = Duration::from_millis(250);

/// A call that its caller drives, or a task if the caller stops. A granted lease waits for the caller for a moment.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Delivery<O> {
    // When the caller's wait for the lock ends.
    give_up: Instant,
    grace: Duration,
    state: State<O>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum State<O> {
    /// Polls of the caller drive the call.
    Attached { since: Instant },
    /// A task drives the call. `since`: when the caller last drove it, until the task has found it unfinished.
    Detached { since: Option<Instant> },
    /// The outcome waits for the caller: without limit if it is no lease.
    Ready { outcome: O, made: Instant, until: Option<Instant> },
    /// The caller missed a lease. It waits again once it is polled.
    Stalled,
    /// The caller has the outcome, or is gone.
    Over,
}

/// What a polled caller does.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Polled<O> {
    /// Drives the call, and [completes](Delivery::complete) it.
    Drive,
    /// Begins the call again.
    Begin,
    Pending,
    Ready(O),
    /// Its wait is over. A lease that arrived meanwhile passes on.
    Late(Option<O>),
}

/// What an unpolled caller loses.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Expired<O> {
    Nothing,
    /// A task drives its call from now on.
    Detach,
    /// Its lease passes on.
    Withdraw(O),
}

impl<O> Delivery<O> {
    /// A call that was not over at its first poll. `ttl` is that of the lease that it may bring.
    pub(super) fn new(now: Instant, give_up: Instant, ttl: Duration) -> Self {
        Self { give_up, grace: GRACE.min(ttl / 3), state: State::Attached { since: now } }
    }

    pub(super) fn poll(&mut self, now: Instant) -> Polled<O> {
        match std::mem::replace(&mut self.state, State::Over) {
            state @ State::Attached { .. } => {
                self.state = state;
                Polled::Drive
            }
            state @ State::Detached { .. } => {
                self.state = state;
                Polled::Pending
            }
            // The store may answer after the wait. Before that, the wait bounds how late a lease is picked up.
            State::Ready { outcome, made, until: Some(_) } if made < self.give_up && self.give_up <= now => {
                Polled::Late(Some(outcome))
            }
            State::Ready { outcome, .. } => Polled::Ready(outcome),
            State::Stalled if now < self.give_up => {
                self.state = State::Attached { since: now };
                Polled::Begin
            }
            State::Stalled => Polled::Late(None),
            State::Over => Polled::Pending,
        }
    }

    /// When the caller loses its role or lease, unless it is polled.
    pub(super) fn due(&self) -> Option<Instant> {
        match &self.state {
            State::Attached { since } => Some(*since + self.grace / 5),
            State::Ready { until, .. } => *until,
            State::Detached { .. } | State::Stalled | State::Over => None,
        }
    }

    pub(super) fn timeout(&mut self, now: Instant) -> Expired<O> {
        if self.due().is_none_or(|due| now < due) {
            return Expired::Nothing;
        }
        match std::mem::replace(&mut self.state, State::Stalled) {
            State::Attached { since } => {
                self.state = State::Detached { since: Some(since) };
                Expired::Detach
            }
            State::Ready { outcome, .. } => Expired::Withdraw(outcome),
            state => {
                self.state = state;
                Expired::Nothing
            }
        }
    }

    /// The call is over. `granted`: since when the caller has a lease, if the outcome is one.
    pub(super) fn complete(&mut self, outcome: O, granted: Option<Instant>, now: Instant) {
        // A call that was over at the first poll of the task may have been over since the caller left it.
        let since = match self.state {
            State::Detached { since: Some(since) } => since,
            _ => now,
        };
        let (made, until) = (granted.unwrap_or(now), granted.map(|_| since + self.grace));
        self.state = State::Ready { outcome, made, until };
    }

    pub(super) const fn is_detached(&self) -> bool {
        matches!(self.state, State::Detached { .. })
    }

    /// The task has polled the call, which is not over.
    pub(super) fn goes_on(&mut self) {
        if let State::Detached { since } = &mut self.state {
            *since = None;
        }
    }

    /// The task is gone, for instance with its runtime. The caller drives the call again.
    pub(super) fn attach(&mut self, now: Instant) {
        if self.is_detached() {
            self.state = State::Attached { since: now };
        }
    }

    /// The caller is gone. Returns the outcome that waited for it.
    pub(super) fn close(&mut self) -> Option<O> {
        match std::mem::replace(&mut self.state, State::Over) {
            State::Ready { outcome, .. } => Some(outcome),
            _ => None,
        }
    }
}
