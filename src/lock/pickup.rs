//! Calls that continue while their caller is not polled, and leases that pass on if their caller does not pick them up.

use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use tokio::time::Instant;

use super::context::Held;
use super::delivery::{Delivery, Expired, Polled};
use super::erased::Call;
use super::error::LockError;
use super::grant::after;
use super::locks_state::LocksState;
use super::make_way::make_way;
use super::renewal_schedule::{Role, Watched};

/// An acquisition that can begin again after its caller missed a grant.
pub(super) trait Request: Unpin + Send + 'static {
    type Grant: Send + 'static;

    fn shared(&self) -> &Arc<LocksState>;
    /// The caller's wait, and the `ttl` of its lease.
    fn times(&self) -> (Duration, Duration);
    /// Begins an attempt, the first one or another. The wait counts from `begun`.
    fn begin(&mut self, begun: Instant, is_back: bool) -> Call<Result<Self::Grant, LockError>>;
    /// Since when the caller has the lease; of several, the last one.
    fn since(grant: &Self::Grant) -> Instant;
    /// The error of a caller whose wait is over.
    fn busy(&self) -> LockError;
    /// Counts the outcome.
    fn count(&self, outcome: &Result<Self::Grant, LockError>, begun: Instant);
}

/// Waits for the outcome of an acquisition. The store call, the leader role and the lease do not depend on polls of this future.
pub(super) struct Acquire<R: Request> {
    request: R,
    begun: Option<Instant>,
    // Set once the call had to wait.
    pickup: Option<Arc<Pickup<Outcome<R>>>>,
    is_over: bool,
}

type Outcome<R> = Result<<R as Request>::Grant, LockError>;

impl<R: Request> Acquire<R> {
    pub(super) const fn new(request: R) -> Self {
        Self { request, begun: None, pickup: None, is_over: false }
    }

    fn poll_outcome(&mut self, begun: Instant, cx: &mut Context<'_>) -> Poll<Outcome<R>> {
        if self.pickup.is_none() {
            let mut call = self.request.begin(begun, false);
            if let Poll::Ready(outcome) = call.as_mut().poll(cx) {
                return Poll::Ready(outcome);
            }
            let (wait, ttl) = self.request.times();
            let granted = |outcome: &Outcome<R>| outcome.as_ref().ok().map(R::since);
            let delivery = Delivery::new(Instant::now(), after(begun, wait), ttl);
            self.pickup = Some(Pickup::new(self.request.shared(), delivery, call, granted, cx.waker()));
            return Poll::Pending;
        }
        let Self { request, pickup: Some(pickup), .. } = self else { return Poll::Pending };
        let outcome = ready!(pickup.poll(cx, || request.begin(begun, true)));
        Poll::Ready(outcome.unwrap_or_else(|| Err(request.busy())))
    }
}

impl<R: Request> Future for Acquire<R> {
    type Output = Result<R::Grant, LockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        assert!(!self.is_over, "the future of a lock was polled after completion");
        let begun = *self.begun.get_or_insert_with(Instant::now);
        let outcome = ready!(self.poll_outcome(begun, cx));
        self.is_over = true;
        self.close();
        self.request.count(&outcome, begun);
        Poll::Ready(outcome)
    }
}

impl<R: Request> Acquire<R> {
    fn close(&mut self) {
        if let Some(pickup) = self.pickup.take() {
            pickup.close();
        }
    }
}

impl<R: Request> Drop for Acquire<R> {
    fn drop(&mut self) {
        if self.pickup.is_some() {
            self.close();
            // For the next waiter, and for the call that continues.
            make_way();
        }
    }
}

/// Waits for a call without a lease as outcome. The call continues without polls of this future.
pub(super) struct Attended<O: Send + 'static> {
    shared: Arc<LocksState>,
    ttl: Duration,
    call: Option<Call<O>>,
    // Set once the call had to wait.
    pickup: Option<Arc<Pickup<O>>>,
}

impl<O: Send + 'static> Attended<O> {
    /// A call that concerns a lease with this `ttl`.
    pub(super) fn new(shared: Arc<LocksState>, ttl: Duration, call: Call<O>) -> Self {
        Self { shared, ttl, call: Some(call), pickup: None }
    }
}

impl<O: Send + 'static> Future for Attended<O> {
    type Output = O;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<O> {
        if let Some(mut call) = self.call.take() {
            if let Poll::Ready(outcome) = call.as_mut().poll(cx) {
                return Poll::Ready(outcome);
            }
            let now = Instant::now();
            let delivery = Delivery::new(now, now, self.ttl);
            self.pickup = Some(Pickup::new(&self.shared, delivery, call, |_| None, cx.waker()));
            return Poll::Pending;
        }
        let Some(pickup) = &self.pickup else { return Poll::Pending };
        // An outcome without a lease is never late.
        ready!(pickup.poll(cx, || Box::pin(pending()))).map_or(Poll::Pending, Poll::Ready)
    }
}

impl<O: Send + 'static> Drop for Attended<O> {
    fn drop(&mut self) {
        if let Some(pickup) = self.pickup.take() {
            pickup.close();
        }
    }
}

/// A call that its caller and a task share.
pub(super) struct Pickup<O> {
    shared: Arc<LocksState>,
    granted: fn(&O) -> Option<Instant>,
    state: Mutex<State<O>>,
}

struct State<O> {
    delivery: Delivery<O>,
    // `None` once it is over.
    call: Option<Call<O>>,
    caller: Waker,
    driver: Option<Waker>,
    // The locks around the caller, for the task.
    held: Held,
    watched: Option<Watched>,
}

impl<O: Send + 'static> Pickup<O> {
    /// Takes over a call that its caller has polled and that is not over.
    pub(super) fn new(
        shared: &Arc<LocksState>,
        delivery: Delivery<O>,
        call: Call<O>,
        granted: fn(&O) -> Option<Instant>,
        caller: &Waker,
    ) -> Arc<Self> {
        let (call, caller) = (Some(call), caller.clone());
        let state = State { delivery, call, caller, driver: None, held: Held::present(), watched: None };
        let pickup = Arc::new(Self { shared: Arc::clone(shared), granted, state: Mutex::new(state) });
        pickup.watch(&mut pickup.state());
        pickup
    }

    /// No code panics while it holds the lock, so a poisoned lock is intact.
    fn state(&self) -> MutexGuard<'_, State<O>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The outcome for the caller. `None` if its wait is over. Calls `begin` if it has to start again.
    pub(super) fn poll(self: &Arc<Self>, cx: &mut Context<'_>, mut begin: impl FnMut() -> Call<O>) -> Poll<Option<O>> {
        let mut state = self.state();
        loop {
            let now = Instant::now();
            match state.delivery.poll(now) {
                Polled::Drive => {
                    let call = state.call.as_mut().map(|call| call.as_mut().poll(cx));
                    if let Some(Poll::Ready(outcome)) = call {
                        self.complete(&mut state, outcome);
                        continue;
                    }
                }
                Polled::Begin => {
                    state.call = Some(begin());
                    self.watch(&mut state);
                    continue;
                }
                Polled::Pending => {}
                Polled::Ready(outcome) => return Poll::Ready(Some(outcome)),
                Polled::Late(outcome) => {
                    // Outside of the lock: the lease goes to the next waiter.
                    drop(state);
                    drop(outcome);
                    return Poll::Ready(None);
                }
            }
            state.caller.clone_from(cx.waker());
            return Poll::Pending;
        }
    }

    fn complete(&self, state: &mut State<O>, outcome: O) {
        state.call = None;
        let granted = (self.granted)(&outcome);
        state.delivery.complete(outcome, granted, Instant::now());
    }

    /// Watches the caller while it can lose its role or lease.
    fn watch(self: &Arc<Self>, state: &mut State<O>) {
        self.unwatch(state);
        let role = Arc::downgrade(self);
        state.watched = state.delivery.due().and_then(|due| self.shared.watch(due, role as Weak<dyn Role>));
    }

    fn unwatch(&self, state: &mut State<O>) {
        if let Some(watched) = state.watched.take() {
            self.shared.unwatch(&watched);
        }
    }

    /// The caller is gone, or has the outcome.
    pub(super) fn close(&self) {
        let mut state = self.state();
        self.unwatch(&mut state);
        let left = (state.delivery.close(), state.call.take());
        let driver = state.driver.take();
        drop(state);
        // Outside of the lock: a lease goes to the next waiter, and a pending call continues.
        drop(left);
        if let Some(driver) = driver {
            driver.wake();
        }
    }

    fn drive(self: &Arc<Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.state();
        let State { delivery, call: Some(call), held, driver, .. } = &mut *state else { return Poll::Ready(()) };
        if !delivery.is_detached() {
            return Poll::Ready(());
        }
        match held.scope(|| call.as_mut().poll(cx)) {
            Poll::Pending => {
                delivery.goes_on();
                *driver = Some(cx.waker().clone());
                Poll::Pending
            }
            Poll::Ready(outcome) => {
                self.complete(&mut state, outcome);
                self.watch(&mut state);
                let caller = state.caller.clone();
                drop(state);
                caller.wake();
                Poll::Ready(())
            }
        }
    }
}

impl<O: Send + 'static> Role for Pickup<O> {
    fn expire(self: Arc<Self>, now: Instant) {
        let mut state = self.state();
        state.watched = None;
        let expired = state.delivery.timeout(now);
        if matches!(expired, Expired::Nothing) {
            self.watch(&mut state);
        }
        drop(state);
        match expired {
            Expired::Nothing => {}
            Expired::Detach => {
                let shared = Arc::clone(&self.shared);
                shared.spawn(Driver(self));
            }
            Expired::Withdraw(outcome) => {
                tracing::debug!("a waiter was not polled in time: its lease goes to the next waiter");
                drop(outcome);
            }
        }
    }
}

/// Polls a call in the place of its caller.
struct Driver<O: Send + 'static>(Arc<Pickup<O>>);

impl<O: Send + 'static> Future for Driver<O> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.0.drive(cx)
    }
}

impl<O: Send + 'static> Drop for Driver<O> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        if state.delivery.is_detached() {
            // Its runtime has ended.
            state.delivery.attach(Instant::now());
            self.0.watch(&mut state);
            let caller = state.caller.clone();
            drop(state);
            caller.wake();
        }
    }
}
