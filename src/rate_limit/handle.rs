use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Waker};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Notify;

use super::decision::{Decision, Receipt};
use super::descriptor::{Descriptor, Subjects};
use super::policy::Policy;
use super::store::RateLimitStore;
use super::wait_queue::{Lines, QueueKey};
use crate::error::StoreError;
use crate::key::Key;
use crate::store::deadline::Deadline;

/// What a request was charged, to be corrected while it is handled, and the [decision](Self::decision) that admitted it: in the extensions
/// of every HTTP request that was counted and admitted.
///
/// One that passes uncounted has none: by a list of those who are let in, or without a key where such requests pass. Where there may be
/// such, ask for an `Option` of it. With the feature `axum` handlers can also take it as an argument by itself, without `Extension`. Of several
/// layers the innermost leaves its own, or none where the request passes uncounted there; [`policies`](Self::policies) says whose it is. (In the
/// extensions of the *response* there is the [`Decision`] itself, and that of the layer which restricts most, without the name of its policy.)
///
/// ```
/// # #[cfg(feature = "http")] {
/// use axum::{Extension, Router, routing::post};
/// use tollgate::rate_limit::RateLimitHandle;
/// use tollgate::{MemoryBackend, Policy, Quota, RateLimitLayer};
///
/// async fn complete(Extension(limit): Extension<RateLimitHandle>) -> &'static str {
///     // 1,000 tokens were reserved. This is what it took:
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
/// When the last clone is dropped: with the request, or later if a handler keeps one in the stream of its answer. Then the store
/// is told once, whatever was said in between, and even if the future of the request was dropped because the client had
/// left. Units that are given back count again for limits in whose window they were charged, and are dropped by others; units that are
/// added are charged even beyond the limit, see [`RateLimitStore::settle`].
///
/// The store is told in the background, for no longer than the deadline of the layer and on any thread; if it fails, or more than
/// [1,024](Self::MAX_PENDING) are waiting, what was charged stays as it was. So it does where the runtime ends before: at the end of a program wait
/// for [`RateLimitLayer::wait_idle`](super::RateLimitLayer::wait_idle). What is lost is [counted](crate::rate_limit#metrics).
#[derive(Clone)]
pub struct RateLimitHandle {
    ledger: Arc<ChargeState>,
}

struct ChargeState {
    subjects: Subjects,
    cost: u32,
    change: AtomicI64,
    settler: Arc<dyn Settle>,
}

impl RateLimitHandle {
    /// How many corrections a layer keeps in the background at once.
    pub const MAX_PENDING: usize = 1_024;

    #[inline]
    pub(super) fn new(subjects: Subjects, cost: u32, settler: Arc<dyn Settle>) -> Self {
        Self { ledger: Arc::new(ChargeState { subjects, cost, change: AtomicI64::new(0), settler }) }
    }

    /// Whom the request was charged to.
    #[inline]
    pub(super) fn subjects(&self) -> &Subjects {
        &self.ledger.subjects
    }

    /// The key of the layer that the request was counted by; `None` if it counted for [others](super::RateLimitLayer::and) alone. With a
    /// [`Limiter`](super::Limiter) for the same policy and store a handler can block it, or look how it stands elsewhere.
    #[must_use]
    pub fn key(&self) -> Option<&Key> {
        self.ledger.subjects.iter().find(|subject| subject.main).map(|subject| &subject.key)
    }

    /// The names of the policies that the request was counted by: those of the layer, and not of another one in front of it or behind it.
    pub fn policies(&self) -> impl Iterator<Item = &str> {
        let layer = self.ledger.settler.policy();
        self.ledger.subjects.iter().map(|subject| subject.policy(layer).name())
    }

    /// The units that the request was charged when it was admitted.
    #[must_use]
    pub fn cost(&self) -> u32 {
        self.ledger.cost
    }

    /// The decision that admitted the request; `None` where none could be made.
    ///
    /// Where a request [counts for several](super::RateLimitLayer::and) it is the one that restricts most, which has least left. That of a
    /// policy that is not [enforced](super::Policy::mode) is told where there is no other.
    #[must_use]
    pub fn decision(&self) -> Option<&Decision> {
        match &self.ledger.subjects {
            Subjects::One(subject) => subject.decision.as_ref(),
            Subjects::Several(subjects) => {
                let decided =
                    subjects.iter().filter_map(|subject| Some((subject.enforced, subject.decision.as_ref()?)));
                let strictest = decided.max_by_key(|(enforced, decision)| (*enforced, decision.strictness()));
                strictest.map(|(_, decision)| decision)
            }
        }
    }

    /// Charges `units` more, also where the request was admitted for nothing. That is so as well if it passed because the store had failed, whatever it
    /// costs: the cost itself stays uncounted then. Where it was a [resolver](super::PolicyResolver) that had failed, they are lost.
    pub fn charge(&self, units: u32) {
        self.ledger.change.fetch_add(units.into(), Ordering::Relaxed);
    }

    /// Gives `units` back.
    pub fn refund(&self, units: u32) {
        self.ledger.change.fetch_sub(units.into(), Ordering::Relaxed);
    }

    /// Makes `total` what the request is charged in the end, instead of its [cost](Self::cost), and of what was added or
    /// given back before. Of a request that passed because the store had failed, what `total` is more than the cost is charged.
    pub fn settle(&self, total: u32) {
        self.ledger.change.store(i64::from(total) - i64::from(self.ledger.cost), Ordering::Relaxed);
    }
}

impl fmt::Debug for RateLimitHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let change = self.ledger.change.load(Ordering::Relaxed);
        f.debug_struct("RateLimitHandle")
            .field("cost", &self.ledger.cost)
            .field("change", &change)
            .finish_non_exhaustive()
    }
}

impl Drop for ChargeState {
    fn drop(&mut self) {
        // No more can be given back than was charged.
        let change = (*self.change.get_mut()).max(-i64::from(self.cost));
        if change != 0 {
            for subject in mem::take(&mut self.subjects) {
                let decision = subject.decision.as_ref();
                // Nothing was charged for a cost of 0, nor where nothing could be decided, so there is no receipt, and none is needed to charge more.
                let is_uncharged = decision.is_none_or(|decision| self.cost == 0 && decision.is_allowed());
                let nothing = (is_uncharged && change > 0).then_some(Receipt::at_micros(0));
                if let Some(receipt) = decision.and_then(Decision::receipt).or(nothing) {
                    self.settler.settle(subject, receipt, change);
                }
            }
        }
    }
}

/// Tells a store of a correction, without anybody waiting for it.
pub(super) trait Settle: Send + Sync {
    /// That of the layer.
    fn policy(&self) -> &Policy;

    fn settle(&self, subject: Descriptor, receipt: Receipt, change: i64);
}

/// Tells this store, and `local` of what was decided there.
pub(super) struct Settler<B, L> {
    /// Of the layer.
    pub(super) policy: Policy,
    pub(super) store: B,
    pub(super) local: L,
    pub(super) deadline: Duration,
    /// Whether it is for a resolver to say by which policy the key of the layer is counted.
    pub(super) is_resolved: bool,
    /// Where others wait for what is given back.
    pub(super) lines: Option<Arc<Lines>>,
    /// For handles that are dropped on a thread without one.
    pub(super) runtime: Arc<OnceLock<Handle>>,
    pub(super) pending: Arc<Pending>,
}

impl<B, L> Settle for Settler<B, L>
where
    B: RateLimitStore + Clone + Send + Sync + 'static,
    L: RateLimitStore + Clone + Send + Sync + 'static,
{
    fn policy(&self) -> &Policy {
        &self.policy
    }

    fn settle(&self, subject: Descriptor, receipt: Receipt, change: i64) {
        if self.is_resolved && subject.main && subject.policy.is_none() {
            // By which policy it counts was never found out.
            drop(Adjustment::new(self.policy.clone(), change, None));
        } else if subject.local {
            in_background(self.local.clone(), subject, receipt, change, self);
        } else {
            in_background(self.store.clone(), subject, receipt, change, self);
        }
    }
}

fn in_background<S, B, L>(
    store: S,
    Descriptor { policy, key, main, .. }: Descriptor,
    receipt: Receipt,
    change: i64,
    settler: &Settler<B, L>,
) where
    S: RateLimitStore + Send + Sync + 'static,
{
    let (policy, deadline) = (policy.unwrap_or_else(|| settler.policy.clone()), settler.deadline);
    let waiting = settler.lines.as_ref().filter(|_| change < 0).map(|lines| {
        let policy = if main { &settler.policy } else { &policy };
        (Arc::clone(lines), QueueKey::new(policy, &key))
    });
    let current = Handle::try_current().ok();
    let is_inside = current.is_some();
    let runtime = current.or_else(|| settler.runtime.get().cloned());
    let place = Place::take(&settler.pending);
    let has_place = place.is_some();
    let correction = Adjustment::new(policy, change, place);
    let Some(runtime) = runtime.filter(|_| has_place) else { return };
    let mut settlement: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(async move {
        let settled = store.settle(&correction.policy, &key, receipt, change);
        let outcome = Deadline::new(settled, deadline).await;
        if let (Some((lines, whose)), Ok(())) = (waiting, &outcome) {
            lines.wake(&whose);
        }
        correction.end(outcome);
    });
    // A store in memory is done at once, and needs no task.
    if !is_inside || settlement.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
        runtime.spawn(settlement);
    }
}

/// A correction that is under way. One that is dropped without an outcome, with its runtime or its caller for instance, is lost.
pub(super) struct Adjustment {
    policy: Policy,
    change: i64,
    outcome: Option<Result<(), StoreError>>,
    _place: Option<Place>,
}

impl Adjustment {
    /// `place` is for one that nobody waits for.
    pub(super) fn new(policy: Policy, change: i64, place: Option<Place>) -> Self {
        Self { policy, change, outcome: None, _place: place }
    }

    pub(super) fn end(mut self, outcome: Result<(), StoreError>) {
        self.outcome = Some(outcome);
    }
}

impl Drop for Adjustment {
    fn drop(&mut self) {
        let Self { policy, change, outcome, .. } = self;
        policy.meters().settled(matches!(outcome, Some(Ok(()))));
        let error = match outcome {
            Some(Ok(())) => return,
            Some(Err(error)) => Some(tracing::field::display(error)),
            None => None,
        };
        tracing::debug!(policy = policy.name(), change, error, "a correction of a charge is lost");
    }
}

/// The corrections of a layer that are under way.
#[derive(Default)]
pub(super) struct Pending {
    count: AtomicUsize,
    idle: Notify,
}

impl Pending {
    /// Waits until there is none.
    pub(super) async fn wait_idle(&self) {
        loop {
            let mut idle = pin!(self.idle.notified());
            idle.as_mut().enable();
            if self.count.load(Ordering::Acquire) == 0 {
                return;
            }
            idle.await;
        }
    }
}

/// One of the places for corrections that are under way.
pub(super) struct Place(Arc<Pending>);

impl Place {
    fn take(pending: &Arc<Pending>) -> Option<Self> {
        let taken = Self(Arc::clone(pending));
        // Given back by the drop if that was one too many.
        (pending.count.fetch_add(1, Ordering::Relaxed) < RateLimitHandle::MAX_PENDING).then_some(taken)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::Release) == 1 {
            self.0.idle.notify_waiters();
        }
    }
}
