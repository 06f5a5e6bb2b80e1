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

/// An acquisition that can begin again, after its lease went to another waiter because the caller was not polled.
pub(super) trait RepeatableAcquisition: Unpin + Send + 'static {
    type Grant: Send + 'static;

    fn shared(&self) -> &Arc<LocksState>;
    /// The caller's wait, and the `ttl` of its lease.
    fn wait_and_ttl(&self) -> (Duration, Duration);
    /// Begins the acquisition, for the first time or again. The wait counts from `start`.
    fn begin(&mut self, start: Instant, is_requeued: bool) -> Call<Result<Self::Grant, LockError>>;
    /// When the lease was granted to the caller; of several leases, the last one.
    fn granted_at(grant: &Self::Grant) -> Instant;
    /// The error of a caller whose wait has ended.
    fn busy(&self) -> LockError;
    /// Counts the outcome.
    fn count(&self, outcome: &Result<Self::Grant, LockError>, start: Instant);
}

/// Waits for the outcome of an acquisition. A call of more than 50 ms continues in a task, so that an unpolled caller delays no other. A
/// lease that the caller does not pick up goes to the next waiter.
pub(super) struct Acquire<R: RepeatableAcquisition> {
    request: R,
    start: Option<Instant>,
    // Set once the first poll of the call has returned `Pending`.
    shared_call: Option<Arc<SharedCall<Outcome<R>>>>,
    is_done: bool,
}

type Outcome<R> = Result<<R as RepeatableAcquisition>::Grant, LockError>;

impl<R: RepeatableAcquisition> Acquire<R> {
    pub(super) const fn new(request: R) -> Self {
        Self { request, start: None, shared_call: None, is_done: false }
    }

    fn poll_outcome(&mut self, start: Instant, cx: &mut Context<'_>) -> Poll<Outcome<R>> {
        if self.shared_call.is_none() {
            let mut call = self.request.begin(start, false);
            if let Poll::Ready(outcome) = call.as_mut().poll(cx) {
                return Poll::Ready(outcome);
            }
            let (wait, ttl) = self.request.wait_and_ttl();
            let granted_at = |outcome: &Outcome<R>| outcome.as_ref().ok().map(R::granted_at);
            let delivery = Delivery::new(Instant::now(), after(start, wait), ttl);
            self.shared_call = Some(SharedCall::new(self.request.shared(), delivery, call, granted_at, cx.waker()));
            return Poll::Pending;
        }
        let Self { request, shared_call: Some(shared_call), .. } = self else { return Poll::Pending };
        let outcome = ready!(shared_call.poll(cx, || request.begin(start, true)));
        Poll::Ready(outcome.unwrap_or_else(|| Err(request.busy())))
    }
}

impl<R: RepeatableAcquisition> Future for Acquire<R> {
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

impl<R: RepeatableAcquisition> Acquire<R> {
    fn close(&mut self) {
        if let Some(shared_call) = self.shared_call.take() {
            shared_call.close();
        }
    }
}

impl<R: RepeatableAcquisition> Drop for Acquire<R> {
    fn drop(&mut self) {
        if self.shared_call.is_some() {
            self.close();
            // `close` may have woken the next waiter or the task of the call. Free the LIFO slot of this thread, so that another worker
            // thread can run the woken task.
            free_lifo_slot();
        }
    }
}

/// Waits for a call whose outcome is no lease. A call of more than 50 ms continues in a task, whether or not this future is polled.
pub(super) struct DetachableCall<O: Send + 'static> {
    shared: Arc<LocksState>,
    ttl: Duration,
    call: Option<Call<O>>,
    // Set once the first poll of the call has returned `Pending`.
    shared_call: Option<Arc<SharedCall<O>>>,
}

impl<O: Send + 'static> DetachableCall<O> {
    /// A call that concerns a lease with this `ttl`.
    pub(super) fn new(shared: Arc<LocksState>, ttl: Duration, call: Call<O>) -> Self {
        Self { shared, ttl, call: Some(call), shared_call: None }
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
            self.shared_call = Some(SharedCall::new(&self.shared, delivery, call, |_| None, cx.waker()));
            return Poll::Pending;
        }
        let Some(shared_call) = &self.shared_call else { return Poll::Pending };
        // The result is never `None`: only an outcome with a lease can be late.
        ready!(shared_call.poll(cx, || Box::pin(pending()))).map_or(Poll::Pending, Poll::Ready)
    }
}

impl<O: Send + 'static> Drop for DetachableCall<O> {
    fn drop(&mut self) {
        if let Some(shared_call) = self.shared_call.take() {
            shared_call.close();
        }
    }
}

/// A call that its caller and a task share.
pub(super) struct SharedCall<O> {
    shared: Arc<LocksState>,
    granted_at: fn(&O) -> Option<Instant>,
    state: Mutex<State<O>>,
}

struct State<O> {
    delivery: Delivery<O>,
    // `None` once it is complete.
    call: Option<Call<O>>,
    caller_waker: Waker,
    task_waker: Option<Waker>,
    // The locks that the caller holds. The task polls the call in their scope, so that nested acquisitions are detected.
    held: Held,
    watchdog: Option<WatchdogKey>,
}

impl<O: Send + 'static> SharedCall<O> {
    /// Takes over a pending call from its caller, which has polled it.
    pub(super) fn new(
        shared: &Arc<LocksState>,
        delivery: Delivery<O>,
        call: Call<O>,
        granted_at: fn(&O) -> Option<Instant>,
        caller: &Waker,
    ) -> Arc<Self> {
        let (call, caller_waker) = (Some(call), caller.clone());
        let state = State { delivery, call, caller_waker, task_waker: None, held: Held::current(), watchdog: None };
        let shared_call = Arc::new(Self { shared: Arc::clone(shared), granted_at, state: Mutex::new(state) });
        shared_call.set_watchdog(&mut shared_call.state());
        shared_call
    }

    /// Only a panic of the polled call can poison the mutex. It leaves the state intact.
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
                    // Unlock the mutex before the drop, which passes the lease to the next waiter.
                    drop(state);
                    drop(outcome);
                    return Poll::Ready(None);
                }
            }
            state.caller_waker.clone_from(cx.waker());
            return Poll::Pending;
        }
    }

    fn complete(&self, state: &mut State<O>, outcome: O) {
        state.call = None;
        let granted_at = (self.granted_at)(&outcome);
        state.delivery.complete(outcome, granted_at, Instant::now());
    }

    /// Replaces the watchdog. Sets none unless the caller polls the call or has a lease to pick up.
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

    /// Ends the delivery once the caller is gone or has the outcome. A lease left here goes to the next waiter.
    pub(super) fn close(&self) {
        let mut state = self.state();
        self.remove_watchdog(&mut state);
        let left = (state.delivery.close(), state.call.take());
        let task_waker = state.task_waker.take();
        drop(state);
        // Unlock the mutex before the drop. A dropped lease goes to the next waiter; a dropped call continues in a task.
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
                let caller = state.caller_waker.clone();
                drop(state);
                caller.wake();
                Poll::Ready(())
            }
        }
    }
}

impl<O: Send + 'static> Watchdog for SharedCall<O> {
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

/// Polls a call in place of its caller.
struct CallTask<O: Send + 'static>(Arc<SharedCall<O>>);

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
            // The runtime dropped the task before the call was complete. The caller polls the call again.
            state.delivery.attach(Instant::now());
            self.0.set_watchdog(&mut state);
            let caller = state.caller_waker.clone();
            drop(state);
            caller.wake();
        }
    }
}
