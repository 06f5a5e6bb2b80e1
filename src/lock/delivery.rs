//! How the outcome of a call reaches a caller that may have stopped polling, as a state machine: it has no clock, no store and no task.

use std::time::Duration;

use tokio::time::Instant;

/// How long a role waits for a caller that is not polled, if a third of the lease is not shorter.
const GRACE: Duration = Duration::from_millis(250);

/// A call that is driven by its caller, or by a task where the caller does not end it soon. A lease that it brings waits for the caller for a moment.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Delivery<O> {
    // When the caller does not wait for the lock any more.
    give_up: Instant,
    grace: Duration,
    state: State<O>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum State<O> {
    /// The polls of the caller drive the call.
    Attached { since: Instant },
    /// A task drives the call. `since` when the caller drove it, until the task has found that it was not over then.
    Detached { since: Option<Instant> },
    /// The outcome waits for the caller: for ever if it is no lease.
    Ready { outcome: O, made: Instant, until: Option<Instant> },
    /// The caller has missed a lease. It waits again once it is polled.
    Stalled,
    /// The caller has the outcome, or is gone.
    Over,
}

/// What a caller that is polled does.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Polled<O> {
    /// It drives the call, and [completes](Delivery::complete) it.
    Drive,
    /// It begins the call again.
    Begin,
    Pending,
    Ready(O),
    /// Its wait is over. A lease that came meanwhile passes on.
    Late(Option<O>),
}

/// What a caller that is not polled in time loses.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Expired<O> {
    Nothing,
    /// A task drives its call from now on.
    Detach,
    /// Its lease passes on.
    Withdraw(O),
}

impl<O> Delivery<O> {
    /// A call that was not over when its caller polled it first. `ttl` is the time to live of the lease that it may bring.
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
            // The store may answer after the wait is over. Before that the wait bounds how late a lease may be picked up.
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

    /// When the caller loses what it has, unless it is polled.
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

    /// The call is over. `granted` says since when the caller has a lease, if the outcome is one.
    pub(super) fn complete(&mut self, outcome: O, granted: Option<Instant>, now: Instant) {
        // A call that was over when the task came to it has been over since the caller left it, perhaps.
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

    /// The task has polled the call, which goes on.
    pub(super) fn goes_on(&mut self) {
        if let State::Detached { since } = &mut self.state {
            *since = None;
        }
    }

    /// The task is gone, as when its runtime has ended. The caller drives the call again.
    pub(super) fn attach(&mut self, now: Instant) {
        if self.is_detached() {
            self.state = State::Attached { since: now };
        }
    }

    /// The caller is gone. Answers what waited for it.
    pub(super) fn close(&mut self) -> Option<O> {
        match std::mem::replace(&mut self.state, State::Over) {
            State::Ready { outcome, .. } => Some(outcome),
            _ => None,
        }
    }
}
