//! Calls that continue if their caller stops polling. A lease that the caller does not pick up goes to the next waiter.

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
use super::lifo_slot::free_lifo_slot;
use super::locks_state::LocksState;
use super::renewal_schedule::{Watchdog, WatchdogKey};

/// An acquisition that can begin again after its caller missed a grant.
pub(super) trait Request: Unpin + Send + 'static {
    type Grant: Send + 'static;

    fn shared(&self) -> &Arc<LocksState>;
    /// The caller's wait, and the `ttl` of its lease.
    fn times(&self) -> (Duration, Duration);
    /// Begins the acquisition, for the first time or again. The wait counts from `start`.
    fn begin(&mut self, start: Instant, is_requeued: bool) -> Call<Result<Self::Grant, LockError>>;
    /// When the lease was granted to the caller; of several leases, the last one.
    fn since(grant: &Self::Grant) -> Instant;
    /// The error of a caller whose wait has ended.
    fn busy(&self) -> LockError;
    /// Counts the outcome.
    fn count(&self, outcome: &Result<Self::Grant, LockError>, start: Instant);
}

/// Waits for the outcome of an acquisition. If this future is not polled, the store call continues in a task, and other callers get the
/// leader permit and the lease.
pub(super) struct Acquire<R: Request> {
    request: R,
    start: Option<Instant>,
    // Set once the call had to wait.
    pickup: Option<Arc<Pickup<Outcome<R>>>>,
    is_done: bool,
}

type Outcome<R> = Result<<R as Request>::Grant, LockError>;

impl<R: Request> Acquire<R> {
    pub(super) const fn new(request: R) -> Self {
        Self { request, start: None, pickup: None, is_done: false }
    }

    fn poll_outcome(&mut self, start: Instant, cx: &mut Context<'_>) -> Poll<Outcome<R>> {
        if self.pickup.is_none() {
            let mut call = self.request.begin(start, false);
            if let Poll::Ready(outcome) = call.as_mut().poll(cx) {
                return Poll::Ready(outcome);
            }
            let (wait, ttl) = self.request.times();
            let granted = |outcome: &Outcome<R>| outcome.as_ref().ok().map(R::since);
            let delivery = Delivery::new(Instant::now(), after(start, wait), ttl);
            self.pickup = Some(Pickup::new(self.request.shared(), delivery, call, granted, cx.waker()));
            return Poll::Pending;
        }
        let Self { request, pickup: Some(pickup), .. } = self else { return Poll::Pending };
        let outcome = ready!(pickup.poll(cx, || request.begin(start, true)));
        Poll::Ready(outcome.unwrap_or_else(|| Err(request.busy())))
    }
}

impl<R: Request> Future for Acquire<R> {
    type Output = Result<R::Grant, LockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        assert!(!self.is_done, "the future of a lock was polled after completion");
        let start = *self.start.get_or_insert_with(Instant::now);
        let outcome = ready!(self.poll_outcome(start, cx));
        self.is_done = true;
        self.close();
        self.request.count(&outcome, start);
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
            free_lifo_slot();
        }
    }
}

/// Waits for a call whose outcome is no lease. If this future is not polled, the call continues in a task.
pub(super) struct DetachableCall<O: Send + 'static> {
    shared: Arc<LocksState>,
    ttl: Duration,
    call: Option<Call<O>>,
    // Set once the call had to wait.
    pickup: Option<Arc<Pickup<O>>>,
}

impl<O: Send + 'static> DetachableCall<O> {
    /// A call that concerns a lease with this `ttl`.
    pub(super) fn new(shared: Arc<LocksState>, ttl: Duration, call: Call<O>) -> Self {
        Self { shared, ttl, call: Some(call), pickup: None }
    }
}

impl<O: Send + 'static> Future for DetachableCall<O> {
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

impl<O: Send + 'static> Drop for DetachableCall<O> {
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
    // `None` once it is complete.
    call: Option<Call<O>>,
    caller: Waker,
    task_waker: Option<Waker>,
    // The locks around the caller, for the task.
    held: Held,
    watchdog: Option<WatchdogKey>,
}

impl<O: Send + 'static> Pickup<O> {
    /// Takes over a pending call from its caller, which has polled it.
    pub(super) fn new(
        shared: &Arc<LocksState>,
        delivery: Delivery<O>,
        call: Call<O>,
        granted: fn(&O) -> Option<Instant>,
        caller: &Waker,
    ) -> Arc<Self> {
        let (call, caller) = (Some(call), caller.clone());
        let state = State { delivery, call, caller, task_waker: None, held: Held::current(), watchdog: None };
        let pickup = Arc::new(Self { shared: Arc::clone(shared), granted, state: Mutex::new(state) });
        pickup.set_watchdog(&mut pickup.state());
        pickup
    }

    /// No code panics while it holds the lock, so a poisoned lock is intact.
    fn state(&self) -> MutexGuard<'_, State<O>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The outcome for the caller. `None` if its wait has ended. Calls `begin` to acquire again after a missed grant.
    pub(super) fn poll(self: &Arc<Self>, cx: &mut Context<'_>, mut begin: impl FnMut() -> Call<O>) -> Poll<Option<O>> {
        let mut state = self.state();
        loop {
            let now = Instant::now();
            match state.delivery.poll(now) {
                Polled::PollCall => {
                    let call = state.call.as_mut().map(|call| call.as_mut().poll(cx));
                    if let Some(Poll::Ready(outcome)) = call {
                        self.complete(&mut state, outcome);
                        continue;
                    }
                }
                Polled::Begin => {
                    state.call = Some(begin());
                    self.set_watchdog(&mut state);
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

    /// Sets the watchdog while the caller can lose its leader permit or lease.
    fn set_watchdog(self: &Arc<Self>, state: &mut State<O>) {
        self.remove_watchdog(state);
        let watchdog = Arc::downgrade(self);
        state.watchdog =
            state.delivery.due().and_then(|due| self.shared.add_watchdog(due, watchdog as Weak<dyn Watchdog>));
    }

    fn remove_watchdog(&self, state: &mut State<O>) {
        if let Some(watchdog) = state.watchdog.take() {
            self.shared.remove_watchdog(&watchdog);
        }
    }

    /// The caller is gone, or has the outcome.
    pub(super) fn close(&self) {
        let mut state = self.state();
        self.remove_watchdog(&mut state);
        let left = (state.delivery.close(), state.call.take());
        let task_waker = state.task_waker.take();
        drop(state);
        // Outside of the lock: a lease goes to the next waiter, and a pending call continues.
        drop(left);
        if let Some(task_waker) = task_waker {
            task_waker.wake();
        }
    }

    fn poll_call(self: &Arc<Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.state();
        let State { delivery, call: Some(call), held, task_waker, .. } = &mut *state else { return Poll::Ready(()) };
        if !delivery.is_detached() {
            return Poll::Ready(());
        }
        match held.scope(|| call.as_mut().poll(cx)) {
            Poll::Pending => {
                delivery.record_pending();
                *task_waker = Some(cx.waker().clone());
                Poll::Pending
            }
            Poll::Ready(outcome) => {
                self.complete(&mut state, outcome);
                self.set_watchdog(&mut state);
                let caller = state.caller.clone();
                drop(state);
                caller.wake();
                Poll::Ready(())
            }
        }
    }
}

impl<O: Send + 'static> Watchdog for Pickup<O> {
    fn expire(self: Arc<Self>, now: Instant) {
        let mut state = self.state();
        state.watchdog = None;
        let expired = state.delivery.timeout(now);
        if matches!(expired, Expired::Nothing) {
            self.set_watchdog(&mut state);
        }
        drop(state);
        match expired {
            Expired::Nothing => {}
            Expired::Detach => {
                let shared = Arc::clone(&self.shared);
                shared.spawn(CallTask(self));
            }
            Expired::Withdraw(outcome) => {
                tracing::debug!("a waiter was not polled in time: its lease goes to the next waiter");
                drop(outcome);
            }
        }
    }
}

/// Polls a call instead of its caller.
struct CallTask<O: Send + 'static>(Arc<Pickup<O>>);

impl<O: Send + 'static> Future for CallTask<O> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.0.poll_call(cx)
    }
}

impl<O: Send + 'static> Drop for CallTask<O> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        if state.delivery.is_detached() {
            // Its runtime has ended.
            state.delivery.attach(Instant::now());
            self.0.set_watchdog(&mut state);
            let caller = state.caller.clone();
            drop(state);
            caller.wake();
        }
    }
}
