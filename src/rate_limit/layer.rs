use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tower_layer::Layer;

use super::limiter::Limiter;
use super::policy::Policy;
use super::service::RateLimit;
use crate::error::StoreError;
use crate::key::Everyone;
use crate::reject::AsResponse;

/// Enforces a [`Policy`] in front of any tower service. See the [module docs](crate::rate_limit) for examples.
///
/// Not to be confused with `tower::limit::RateLimitLayer`, which counts per connection, delays instead of rejecting, and
/// cannot be cloned. All clones of this layer, and all services that they make, count together.
///
/// With HTTP a rejection is a response. A service that does not speak HTTP needs
/// [`.with_rejection(AsError)`](Self::with_rejection).
///
/// Type parameters: the backend, the [key](crate::ExtractKey), the [cost](RequestCost), and what a rejection
/// [becomes](crate::reject::Reject).
#[must_use]
pub struct RateLimitLayer<B, K = Everyone, C = UnitCost, A = AsResponse> {
    settings: Settings<B, K, C, A>,
}

/// What the layer and its services share. Cheap to clone, and free of bounds on `K` and `C`.
pub(super) struct Settings<B, K, C, A> {
    pub(super) limiter: Limiter<B>,
    pub(super) key: Arc<K>,
    pub(super) cost: Arc<C>,
    pub(super) answer: A,
    pub(super) on_missing_key: OnMissingKey,
    pub(super) on_store_error: OnStoreError,
    pub(super) outage: Arc<Outage>,
}

/// What happens to a request that has no key, or an empty one. Defaults to [`Reject`](Self::Reject).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnMissingKey {
    /// It is turned away: 400 with HTTP, [`MissingKey`](super::MissingKey) without.
    #[default]
    Reject,
    /// It is counted under one key that all such requests share.
    Shared,
    /// It passes, uncounted.
    Pass,
}

/// What happens to a request when the store fails or is late. Defaults to [`Allow`](Self::Allow).
///
/// Either way the store is asked again for every request. The log has one line when it begins to fail and one when nothing
/// has failed for a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnStoreError {
    /// It passes, uncounted: a broken store must not take the service down.
    #[default]
    Allow,
    /// It is turned away: 503 with HTTP, the [`StoreError`](crate::StoreError) without. For limits that guard something
    /// precious, a login for instance.
    Deny,
}

/// How many units a request costs.
///
/// Closures `Fn(&Req) -> u32` are costs. A cost of 0 passes without being charged.
pub trait RequestCost<Req> {
    /// The cost of this request.
    fn cost(&self, request: &Req) -> u32;
}

impl<Req, F: Fn(&Req) -> u32> RequestCost<Req> for F {
    fn cost(&self, request: &Req) -> u32 {
        self(request)
    }
}

/// Every request costs one unit: what a layer does until it is told another cost.
#[derive(Clone, Copy, Debug, Default)]
pub struct UnitCost;

impl<Req> RequestCost<Req> for UnitCost {
    fn cost(&self, _: &Req) -> u32 {
        1
    }
}

impl<B> RateLimitLayer<B> {
    /// Enforces `policy` on what `backend` counts. Until a [key](Self::key) is named, all requests share one quota.
    pub fn new(backend: B, policy: Policy) -> Self {
        Self {
            settings: Settings {
                limiter: Limiter::new(backend, policy),
                key: Arc::new(Everyone),
                cost: Arc::new(UnitCost),
                answer: AsResponse,
                on_missing_key: OnMissingKey::default(),
                on_store_error: OnStoreError::default(),
                outage: Arc::default(),
            },
        }
    }
}

impl<B, K, C, A> RateLimitLayer<B, K, C, A> {
    /// Whom a request counts for: a closure, an extractor of the module `tollgate::http`, or a tuple of them; see
    /// [`ExtractKey`](crate::ExtractKey). Defaults to [`Everyone`].
    pub fn key<K2>(self, key: K2) -> RateLimitLayer<B, K2, C, A> {
        let Settings { limiter, key: _, cost, answer, on_missing_key, on_store_error, outage } = self.settings;
        let settings = Settings { limiter, key: Arc::new(key), cost, answer, on_missing_key, on_store_error, outage };
        RateLimitLayer { settings }
    }

    /// How many units a request costs. Defaults to [`UnitCost`].
    pub fn cost<C2>(self, cost: C2) -> RateLimitLayer<B, K, C2, A> {
        let Settings { limiter, key, cost: _, answer, on_missing_key, on_store_error, outage } = self.settings;
        let settings = Settings { limiter, key, cost: Arc::new(cost), answer, on_missing_key, on_store_error, outage };
        RateLimitLayer { settings }
    }

    /// What a rejection becomes. Defaults to [`AsResponse`]; [`AsError`](crate::reject::AsError) is for services that do
    /// not speak HTTP.
    pub fn with_rejection<A2>(self, answer: A2) -> RateLimitLayer<B, K, C, A2> {
        let Settings { limiter, key, cost, answer: _, on_missing_key, on_store_error, outage } = self.settings;
        let settings = Settings { limiter, key, cost, answer, on_missing_key, on_store_error, outage };
        RateLimitLayer { settings }
    }

    /// What happens to a request without a key. Defaults to [`OnMissingKey::Reject`].
    pub fn on_missing_key(mut self, policy: OnMissingKey) -> Self {
        self.settings.on_missing_key = policy;
        self
    }

    /// What happens when the store fails or is late. Defaults to [`OnStoreError::Allow`].
    pub fn on_store_error(mut self, policy: OnStoreError) -> Self {
        self.settings.on_store_error = policy;
        self
    }

    /// How long a decision may take in total; after that it counts as a store error. Defaults to 100 ms.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.settings.limiter = self.settings.limiter.deadline(deadline);
        self
    }
}

impl<S, B: Clone, K, C, A: Clone> Layer<S> for RateLimitLayer<B, K, C, A> {
    type Service = RateLimit<S, B, K, C, A>;

    fn layer(&self, inner: S) -> Self::Service {
        RateLimit::with_settings(inner, self.settings.clone())
    }
}

impl<B, K, C, A> RateLimitLayer<B, K, C, A> {
    pub(super) fn into_settings(self) -> Settings<B, K, C, A> {
        self.settings
    }
}

// By hand: `derive` would ask for `K: Clone` and `C: Clone`, which closures need not be.
impl<B: Clone, K, C, A: Clone> Clone for RateLimitLayer<B, K, C, A> {
    fn clone(&self) -> Self {
        Self { settings: self.settings.clone() }
    }
}

impl<B: Clone, K, C, A: Clone> Clone for Settings<B, K, C, A> {
    fn clone(&self) -> Self {
        Self {
            limiter: self.limiter.clone(),
            key: Arc::clone(&self.key),
            cost: Arc::clone(&self.cost),
            answer: self.answer.clone(),
            on_missing_key: self.on_missing_key,
            on_store_error: self.on_store_error,
            outage: Arc::clone(&self.outage),
        }
    }
}

impl<B, K, C, A> fmt::Debug for RateLimitLayer<B, K, C, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.describe(f, "RateLimitLayer")
    }
}

impl<B, K, C, A> Settings<B, K, C, A> {
    pub(super) fn describe(&self, f: &mut fmt::Formatter<'_>, name: &str) -> fmt::Result {
        f.debug_struct(name)
            .field("policy", self.limiter.policy())
            .field("key", &std::any::type_name::<K>())
            .field("on_missing_key", &self.on_missing_key)
            .field("on_store_error", &self.on_store_error)
            .finish_non_exhaustive()
    }
}

/// Whether the store is failing at the moment, so that the log has a line per change and not one per request.
#[derive(Debug, Default)]
pub(super) struct Outage {
    ongoing: AtomicBool,
    // Looked at only while there is an outage.
    last_failure: Mutex<Option<Instant>>,
}

/// How long nothing may fail for an outage to be over. A store that fails now and then would fill the log otherwise.
const RECOVERED: Duration = Duration::from_secs(1);

impl Outage {
    pub(super) fn failed(&self, policy: &Policy, error: &StoreError, then: OnStoreError) {
        *self.last_failure() = Some(Instant::now());
        if !self.ongoing.swap(true, Ordering::Relaxed) {
            let cause = std::error::Error::source(error).map(tracing::field::display);
            tracing::warn!(policy = policy.name(), %error, cause, ?then, "rate limit store fails");
        }
    }

    pub(super) fn answered(&self, policy: &Policy) {
        if self.ongoing.load(Ordering::Relaxed) {
            let lately = self.last_failure().is_some_and(|failure| failure.elapsed() < RECOVERED);
            if !lately && self.ongoing.swap(false, Ordering::Relaxed) {
                tracing::info!(policy = policy.name(), "rate limit store answers again");
            }
        }
    }

    fn last_failure(&self) -> MutexGuard<'_, Option<Instant>> {
        self.last_failure.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
