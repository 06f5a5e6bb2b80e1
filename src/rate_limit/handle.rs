use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Waker};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Notify;

use super::decision::{Decision, Receipt};
use super::descriptor::{Descriptor, DescriptorList};
use super::policy::Policy;
use super::store::{RateLimitStore, as_change};
use super::wait_queue::{QueueKey, WaitQueues};
use crate::error::StoreError;
use crate::key::Key;
use crate::store::deadline::Deadline;
use crate::store::shutdown::{ShutdownReport, ShutdownTarget, Work};

/// The charge of a request, with methods to correct it while the request is handled, and the [decision](Self::decision) that admitted it.
/// It is in the extensions of every HTTP request that was counted and admitted.
///
/// A request that passes uncounted has no handle: an allow list lets it pass, or it has no key and such requests pass. If your routes have
/// such requests, extract an `Option` of it. With the feature `axum`, handlers can also take it as an argument, without `Extension`. With
/// several layers, the extensions have the handle of the innermost one, or none if the request passes uncounted there;
/// [`policies`](Self::policies) tells which layer it is. The extensions of the *response* have the [`Decision`] of the most restrictive
/// layer, without the name of its policy.
///
/// ```
/// # #[cfg(feature = "http")] {
/// use axum::{Extension, Router, routing::post};
/// use tollgate::rate_limit::RateLimitHandle;
/// use tollgate::{MemoryBackend, Policy, Quota, RateLimitLayer};
///
/// async fn complete(Extension(limit): Extension<RateLimitHandle>) -> &'static str {
///     // 1,000 tokens were reserved, 420 were used.
///     limit.settle(420);
///     "done"
/// }
///
/// let tokens = Policy::new("tokens", Quota::per_minute(100_000).token_bucket());
/// let app: Router = Router::new()
///     .route("/complete", post(complete))
///     .layer(RateLimitLayer::new(MemoryBackend::new(), tokens).cost(|_: &_| 1_000));
/// # }
/// ```
///
/// # When it takes effect
///
/// When the last clone is dropped: with the request, or later if a handler keeps a clone in its response stream. Then the result of all
/// calls is sent to the store as one correction, even if the response future was dropped because the client disconnected. Units that are
/// given back become available again in each limit whose window at the time of the charge has not ended. Other limits ignore these units.
/// Added units are charged even beyond the limit: see [`RateLimitStore::settle`].
///
/// The correction is sent in the background, on any thread, within the deadline of the layer. If the store fails, or more than
/// [1,024](Self::MAX_PENDING) corrections are in flight, the charge stays as it was. This also happens if the runtime ends first: before
/// your program ends, [shut the backend down](crate::backend#shutdown), or wait for
/// [`RateLimitLayer::wait_idle`](super::RateLimitLayer::wait_idle). Lost corrections are [counted](crate::rate_limit#metrics).
#[derive(Clone)]
pub struct RateLimitHandle {
    state: Arc<ChargeState>,
}

struct ChargeState {
    descriptors: DescriptorList,
    cost: u64,
    change: AtomicI64,
    settler: Arc<dyn Settle>,
}

impl RateLimitHandle {
    /// The maximum number of corrections that a layer has in flight.
    pub const MAX_PENDING: usize = 1_024;

    #[inline]
    pub(super) fn new(descriptors: DescriptorList, cost: u64, settler: Arc<dyn Settle>) -> Self {
        Self { state: Arc::new(ChargeState { descriptors, cost, change: AtomicI64::new(0), settler }) }
    }

    /// The descriptors that were charged.
    #[inline]
    pub(super) fn descriptors(&self) -> &DescriptorList {
        &self.state.descriptors
    }

    /// Returns the key of the layer under which the request was counted. `None` if it counted only under
    /// [added keys](super::RateLimitLayer::and). With this key and a [`Limiter`](super::Limiter) for the same policy and store, a handler
    /// can block or inspect the client.
    #[must_use]
    pub fn key(&self) -> Option<&Key> {
        self.state.descriptors.iter().find(|descriptor| descriptor.primary).map(|descriptor| &descriptor.key)
    }

    /// Returns the names of the policies that counted the request in this layer, without those of outer or inner layers.
    pub fn policies(&self) -> impl Iterator<Item = &str> {
        let layer = self.state.settler.policy();
        self.state.descriptors.iter().map(|descriptor| descriptor.policy(layer).name())
    }

    /// Returns the units that the request was charged when it was admitted.
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.state.cost
    }

    /// Returns the decision that admitted the request; `None` if none could be made.
    ///
    /// If a request [counts under several keys](super::RateLimitLayer::and), this is the most restrictive decision. The decision of a
    /// policy that is not [enforced](super::Policy::mode) is returned only if there is no other.
    #[must_use]
    pub fn decision(&self) -> Option<&Decision> {
        match &self.state.descriptors {
            DescriptorList::One(descriptor) => descriptor.decision.as_ref(),
            DescriptorList::Several(descriptors) => {
                let decided = descriptors
                    .iter()
                    .filter_map(|descriptor| Some((descriptor.enforced, descriptor.decision.as_ref()?)));
                let strictest = decided.max_by_key(|(enforced, decision)| (*enforced, decision.strictness()));
                strictest.map(|(_, decision)| decision)
            }
        }
    }

    /// Charges `units` more, also if the cost of the request was 0. If the request passed because the store had failed, only `units` are
    /// charged: the cost of the request stays uncounted. If it passed because a [resolver](super::PolicyResolver) had failed, `units` are
    /// lost.
    pub fn charge(&self, units: u64) {
        self.change_by(as_change(units));
    }

    /// Gives `units` back.
    pub fn refund(&self, units: u64) {
        self.change_by(-as_change(units));
    }

    /// Sets the final charge of the request to `total`, instead of its [cost](Self::cost) and of earlier corrections. If the request passed
    /// because the store had failed, only the excess over the cost is charged. [`Limiter::settle`](super::Limiter::settle) takes the
    /// change, and not the total.
    pub fn settle(&self, total: u64) {
        self.state.change.store(as_change(total) - as_change(self.state.cost), Ordering::Relaxed);
    }

    fn change_by(&self, units: i64) {
        let changed = |change: i64| Some(change.saturating_add(units));
        let _ = self.state.change.fetch_update(Ordering::Relaxed, Ordering::Relaxed, changed);
    }
}

impl fmt::Debug for RateLimitHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let change = self.state.change.load(Ordering::Relaxed);
        f.debug_struct("RateLimitHandle")
            .field("cost", &self.state.cost)
            .field("change", &change)
            .finish_non_exhaustive()
    }
}

impl Drop for ChargeState {
    fn drop(&mut self) {
        // A refund is at most the charge.
        let change = (*self.change.get_mut()).max(-as_change(self.cost));
        if change != 0 {
            for descriptor in mem::take(&mut self.descriptors) {
                let decision = descriptor.decision.as_ref();
                // For a cost of 0, or without a decision, nothing was charged, so there is no receipt. The instant 0 stands for no receipt.
                let is_uncharged = decision.is_none_or(|decision| self.cost == 0 && decision.is_allowed());
                let new_charge = (is_uncharged && change > 0).then_some(Receipt::at_micros(0));
                if let Some(receipt) = decision.and_then(Decision::receipt).or(new_charge) {
                    self.settler.settle(descriptor, receipt, change);
                }
            }
        }
    }
}

/// Sends corrections to a store in the background.
pub(super) trait Settle: Send + Sync {
    /// The policy of the layer.
    fn policy(&self) -> &Policy;

    fn settle(&self, descriptor: Descriptor, receipt: Receipt, change: i64);
}

/// Sends corrections to the store, or to `fallback` for local decisions.
pub(super) struct Settler<B, L> {
    /// The policy of the layer.
    pub(super) policy: Policy,
    pub(super) store: B,
    pub(super) fallback: L,
    pub(super) deadline: Duration,
    /// Whether a resolver chooses the policy for the key of the layer.
    pub(super) is_resolved: bool,
    /// The queues of requests that wait for room: a refund wakes the first waiter.
    pub(super) queues: Option<Arc<WaitQueues>>,
    /// For handles that are dropped on a thread without a runtime.
    pub(super) runtime: Arc<OnceLock<Handle>>,
    pub(super) in_flight: Arc<InFlight>,
}

impl<B, L> Settle for Settler<B, L>
where
    B: RateLimitStore + Clone + Send + Sync + 'static,
    L: RateLimitStore + Clone + Send + Sync + 'static,
{
    fn policy(&self) -> &Policy {
        &self.policy
    }

    fn settle(&self, descriptor: Descriptor, receipt: Receipt, change: i64) {
        if self.is_resolved && descriptor.primary && descriptor.policy.is_none() {
            // The resolver never returned its policy.
            drop(Correction::new(self.policy.clone(), change, None));
        } else if descriptor.local {
            in_background(self.fallback.clone(), descriptor, receipt, change, self);
        } else {
            in_background(self.store.clone(), descriptor, receipt, change, self);
        }
    }
}

fn in_background<S, B, L>(
    store: S,
    Descriptor { policy, key, primary, .. }: Descriptor,
    receipt: Receipt,
    change: i64,
    settler: &Settler<B, L>,
) where
    S: RateLimitStore + Send + Sync + 'static,
{
    let (policy, deadline) = (policy.unwrap_or_else(|| settler.policy.clone()), settler.deadline);
    let waiting = settler.queues.as_ref().filter(|_| change < 0).map(|queues| {
        let policy = if primary { &settler.policy } else { &policy };
        (Arc::clone(queues), QueueKey::new(policy, &key))
    });
    let current = Handle::try_current().ok();
    let in_runtime = current.is_some();
    let runtime = current.or_else(|| settler.runtime.get().cloned());
    let permit = InFlightPermit::take(&settler.in_flight);
    let has_permit = permit.is_some();
    let correction = Correction::new(policy, change, permit);
    let Some(runtime) = runtime.filter(|_| has_permit) else { return };
    let mut settlement: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(async move {
        let settled = store.settle(&correction.policy, &key, receipt, change);
        let outcome = Deadline::new(settled, deadline).await;
        if let (Some((queues, queue_key)), Ok(())) = (waiting, &outcome) {
            queues.wake(&queue_key);
        }
        correction.end(outcome);
    });
    // The memory backend completes at once, and needs no task.
    if !in_runtime || settlement.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
        runtime.spawn(settlement);
    }
}

/// A correction in flight. If it is dropped without an outcome, for example with its runtime, it is lost.
pub(super) struct Correction {
    policy: Policy,
    change: i64,
    outcome: Option<Result<(), StoreError>>,
    _permit: Option<InFlightPermit>,
}

impl Correction {
    /// Only corrections that are sent in the background have a `permit`.
    pub(super) fn new(policy: Policy, change: i64, permit: Option<InFlightPermit>) -> Self {
        Self { policy, change, outcome: None, _permit: permit }
    }

    pub(super) fn end(mut self, outcome: Result<(), StoreError>) {
        self.outcome = Some(outcome);
    }
}

impl Drop for Correction {
    fn drop(&mut self) {
        let Self { policy, change, outcome, .. } = self;
        policy.metrics().settled(matches!(outcome, Some(Ok(()))));
        let error = match outcome {
            Some(Ok(())) => return,
            Some(Err(error)) => Some(tracing::field::display(error)),
            None => None,
        };
        tracing::debug!(policy = policy.name(), change, error, "a correction of a charge is lost");
    }
}

/// The corrections of a layer in flight.
#[derive(Default)]
pub(super) struct InFlight {
    count: AtomicUsize,
    idle: Notify,
    is_in_shutdown: AtomicBool,
}

impl InFlight {
    /// Adds the corrections to the shutdown of the backend, once.
    pub(super) fn add_to_shutdown(self: &Arc<Self>, store: &impl RateLimitStore) {
        if !self.is_in_shutdown.swap(true, Ordering::Relaxed) {
            store.add_to_shutdown(&ShutdownTarget::new(self));
        }
    }

    /// Waits until no correction is in flight.
    pub(super) async fn wait_idle(&self) {
        loop {
            let mut idle = pin!(self.idle.notified());
            idle.as_mut().enable();
            if self.is_idle() {
                return;
            }
            idle.await;
        }
    }
}

impl Work for InFlight {
    /// Corrections are short, and are still made during the shutdown.
    fn close(&self) {}

    fn is_idle(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    fn wait_idle(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(Self::wait_idle(self))
    }

    fn left(&self) -> ShutdownReport {
        ShutdownReport { corrections: self.count.load(Ordering::Acquire), ..ShutdownReport::default() }
    }
}

/// A permit for one correction in flight.
pub(super) struct InFlightPermit(Arc<InFlight>);

impl InFlightPermit {
    fn take(in_flight: &Arc<InFlight>) -> Option<Self> {
        let taken = Self(Arc::clone(in_flight));
        // If there were too many, the drop of `taken` takes the permit back.
        (in_flight.count.fetch_add(1, Ordering::Relaxed) < RateLimitHandle::MAX_PENDING).then_some(taken)
    }
}

impl Drop for InFlightPermit {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::Release) == 1 {
            self.0.idle.notify_waiters();
        }
    }
}
