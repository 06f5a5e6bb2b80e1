//! Delivers the outcome of a call to a caller that may have stopped polling. A pure state machine, without clock, store or task.

use std::time::Duration;

use tokio::time::Instant;

/// How long a granted lease waits for an unpolled caller, or a third of the TTL if that is shorter. A task takes over a call that is still
/// pending after a fifth of this time.
const GRACE: Duration = Duration::from_millis(250);

/// Delivers the outcome of a call. First the caller polls the call. A task takes over if the call takes longer. A granted lease waits for
/// the caller for a limited time.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Delivery<O> {
    // When the caller's wait for the lock ends.
    wait_end: Instant,
    grace: Duration,
    state: State<O>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum State<O> {
    /// The caller polls the call.
    Attached { since: Instant },
    /// A task polls the call. `since` is when the caller began to poll the call; `None` once the task has found the call pending.
    Detached { since: Option<Instant> },
    /// The outcome waits for the caller: a lease at most until `until`. `until` is `None` if the outcome is not a lease.
    Ready { outcome: O, completed: Instant, until: Option<Instant> },
    /// The caller missed a lease. It acquires again once it is polled.
    Stalled,
    /// The caller has the outcome, or is gone.
    Over,
}

/// What a polled caller does.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Polled<O> {
    /// Polls the call, and [completes](Delivery::complete) the delivery if the call is ready.
    PollCall,
    /// Begins the call again.
    Begin,
    Pending,
    Ready(O),
    /// Its wait has ended. A lease that arrived meanwhile goes to the next waiter.
    Late(Option<O>),
}

/// What to do at the time [`due`](Delivery::due).
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Expired<O> {
    Nothing,
    /// A task polls the call from now on.
    Detach,
    /// The caller was not polled in time: its lease goes to the next waiter.
    Withdraw(O),
}

impl<O> Delivery<O> {
    /// A call that was pending after its first poll. `ttl` is the TTL of the requested lease.
    pub(super) fn new(now: Instant, wait_end: Instant, ttl: Duration) -> Self {
        Self { wait_end, grace: GRACE.min(ttl / 3), state: State::Attached { since: now } }
    }

    pub(super) fn poll(&mut self, now: Instant) -> Polled<O> {
        match std::mem::replace(&mut self.state, State::Over) {
            state @ State::Attached { .. } => {
                self.state = state;
                Polled::PollCall
            }
            state @ State::Detached { .. } => {
                self.state = state;
                Polled::Pending
            }
            // If a lease was granted before the wait ends, the caller must also pick it up before the wait ends. A lease that was granted
            // later may still be picked up.
            State::Ready { outcome, completed, until: Some(_) }
                if completed < self.wait_end && self.wait_end <= now =>
            {
                Polled::Late(Some(outcome))
            }
            State::Ready { outcome, .. } => Polled::Ready(outcome),
            State::Stalled if now < self.wait_end => {
                self.state = State::Attached { since: now };
                Polled::Begin
            }
            State::Stalled => Polled::Late(None),
            State::Over => Polled::Pending,
        }
    }

    /// When a task takes over the pending call, or when an unpolled caller loses its lease.
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

    /// The call is complete. `granted` is the time of the grant; `None` if the outcome is not a lease.
    pub(super) fn complete(&mut self, outcome: O, granted: Option<Instant>, now: Instant) {
        // If the task finds the call complete at its first poll, the lease may have waited for the caller already. So the grace period
        // starts when the caller began to poll the call.
        let since = match self.state {
            State::Detached { since: Some(since) } => since,
            _ => now,
        };
        let (completed, until) = (granted.unwrap_or(now), granted.map(|_| since + self.grace));
        self.state = State::Ready { outcome, completed, until };
    }

    pub(super) const fn is_detached(&self) -> bool {
        matches!(self.state, State::Detached { .. })
    }

    /// The task has polled the call, which is pending.
    pub(super) fn record_pending(&mut self) {
        if let State::Detached { since } = &mut self.state {
            *since = None;
        }
    }

    /// The task is gone, for instance with its runtime. The caller polls the call again.
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
