use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use tokio::runtime::Handle;
use tower_layer::Layer;

use super::filter::{AllowList, DenyList, ResolveFrom, WithFilter, WithLimit};
use super::handle::{InFlight, RateLimitHandle, Settle, Settler};
use super::limiter::DEFAULT_DEADLINE;
use super::policy::Policy;
use super::resolver::PolicyResolver;
use super::service::RateLimit;
use super::store::RateLimitStore;
use super::wait_queue::WaitQueues;
// The memory backend is always compiled in, so it serves as the fallback for a failing store.
use crate::MemoryBackend;
use crate::error::ConfigError;
use crate::key::GlobalKey;
use crate::on_failure::OnMissingKey;
use crate::reach::Reach;
use crate::responder::HttpResponder;
use crate::store::circuit::{Circuit, CircuitBreaker};
use crate::store::sharded_refs::{ShardedRefs, thread_slot};

/// Enforces a [`Policy`] in front of any tower service. See the [module docs](crate::rate_limit) for examples.
///
/// Not to be confused with `tower::limit::RateLimitLayer`, which counts per connection, delays instead of rejecting, and cannot be cloned.
/// All clones of this layer, and all services made from them, count together.
///
/// With HTTP a rejection is a response. A service that does not speak HTTP needs [`.responder(ErrorResponder)`](Self::responder).
///
/// Type parameters: the backend, the [key](crate::ExtractKey), the [cost](RequestCost), the [responder](crate::responder::Responder), the
/// rule for which responses are [charged](ChargeOn), and the [filters](super::RequestFilter).
#[must_use]
pub struct RateLimitLayer<B, K = GlobalKey, C = UnitCost, A = HttpResponder, R = ChargeAlways, X = ()> {
    // Shared with the services: a router that is called as it was built makes a service for each request.
    settings: Arc<Settings<B, K, C, A, R, X>>,
}

/// The configuration that does not depend on the types of requests and responses. Cheap to clone.
pub(super) struct LayerConfig<B> {
    // Behind a pointer, so that clones share the store even if its own clone is expensive.
    pub(super) store: Arc<B>,
    pub(super) policy: Policy,
    pub(super) deadline: Duration,
    pub(super) resolver: Option<PolicyResolver>,
    pub(super) wait_config: Option<WaitConfig>,
    pub(super) max_waiters_in_total: usize,
    pub(super) on_missing_key: OnMissingKey,
    pub(super) on_store_error: RateLimitFallback,
    pub(super) replicas: u32,
    pub(super) circuit: Arc<Circuit>,
    /// The circuit for shadow policies that are checked beside enforced ones.
    pub(super) shadow_circuit: Arc<Circuit>,
    /// If layers share a circuit: the policy of the layer that opened it. The close is recorded under the same policy.
    pub(super) tripped_by: Arc<Mutex<Option<Policy>>>,
    pub(super) fallback: FallbackStore,
    pub(super) in_flight: Arc<InFlight>,
    /// The runtime of the first request that ran in one, for corrections that are sent from a thread without a runtime.
    pub(super) runtime: Arc<OnceLock<Handle>>,
}

/// How long requests may wait for room, and the queues in which they wait.
#[derive(Clone, Debug)]
pub(super) struct WaitConfig {
    pub(super) wait: Duration,
    pub(super) queues: Arc<WaitQueues>,
}

/// The default of `max_waiters_in_total`.
const DEFAULT_MAX_WAITERS: usize = 1_000;

/// The backend that decides while the store fails. Created when it is first needed.
#[derive(Clone, Default)]
pub(super) struct FallbackStore(Arc<OnceLock<MemoryBackend>>);

impl FallbackStore {
    pub(super) fn backend(&self) -> &MemoryBackend {
        self.0.get_or_init(MemoryBackend::fallback)
    }
}

/// State that layers on the same backend share: the circuits, the fallback counts for while the backend fails, and the corrections in
/// flight.
#[cfg(feature = "config")]
#[derive(Clone)]
pub(crate) struct SharedState {
    circuit: Arc<Circuit>,
    shadow_circuit: Arc<Circuit>,
    tripped_by: Arc<Mutex<Option<Policy>>>,
    fallback: FallbackStore,
    in_flight: Arc<InFlight>,
}

#[cfg(feature = "config")]
impl SharedState {
    pub(crate) fn new(breaker: CircuitBreaker) -> Self {
        let [circuit, shadow_circuit] = [Circuit::new(breaker), Circuit::new(breaker)].map(Arc::new);
        Self {
            circuit,
            shadow_circuit,
            tripped_by: Arc::default(),
            fallback: FallbackStore::default(),
            in_flight: Arc::default(),
        }
    }

    /// Waits until no correction is in flight.
    pub(crate) async fn wait_idle(&self) {
        self.in_flight.wait_idle().await;
    }
}

/// What happens to a request when the store fails or is late, or when the [circuit](CircuitBreaker) is open. Defaults to
/// [`Local`](Self::Local).
///
/// The log has one line when a store begins to fail, and one when no call has failed for a second. It also has one for each time that the
/// [circuit](CircuitBreaker) opens or closes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum RateLimitFallback {
    /// This process enforces the policy with its own counts in memory, which start at zero. The layer and its clones share these counts. A
    /// key that was [blocked](crate::Limiter::block) in the store is not blocked here. If you run several replicas, set their number with
    /// [`RateLimitLayer::replicas`], so that each enforces its share. A request that costs more than the share, but not more than the
    /// quota, is rejected as with [`Deny`](Self::Deny).
    #[default]
    Local,
    /// The request passes uncounted. Use this if a broken store must not take your service down.
    Allow,
    /// The request is rejected: 503 with HTTP, the [`StoreError`](crate::StoreError) without. Use this for limits that protect something
    /// critical, such as a login. A request with a [cost](RequestCost) of 0 passes, since only a block could deny it.
    Deny,
}

/// How many units a request costs.
///
/// Closures `Fn(&Req) -> u64` are costs. A request with a cost of 0 passes without a charge and does not [wait](RateLimitLayer::wait) for
/// room. It also passes while the store fails. It is rejected if the quota is 0, and while its key is known to be
/// [blocked](crate::Limiter::block).
pub trait RequestCost<Req> {
    /// Returns the cost of this request.
    fn cost(&self, request: &Req) -> u64;
}

impl<Req, F: Fn(&Req) -> u64> RequestCost<Req> for F {
    fn cost(&self, request: &Req) -> u64 {
        self(request)
    }
}

/// Every request costs one unit. The default of a layer.
#[derive(Clone, Copy, Debug, Default)]
pub struct UnitCost;

impl<Req> RequestCost<Req> for UnitCost {
    fn cost(&self, _: &Req) -> u64 {
        1
    }
}

/// Which responses are charged.
///
/// Every request is charged when it is admitted, so that requests in flight count. This trait is called with the response, and can give
/// units back through the [handle](RateLimitHandle) of the request. If the response future is dropped before, the request stays charged.
///
/// Closures `Fn(Result<&Res, &E>) -> bool` return whether a response is charged. With HTTP there are presets: `tollgate::http::failures()`
/// and `tollgate::http::successes()`.
pub trait ChargeOn<Res, E> {
    /// Whether [`settle`](Self::settle) has to be called. Defaults to `true`.
    const ASKED: bool = true;

    /// Corrects the charge of the request, now or, with a clone of `handle`, later.
    fn settle(&self, handle: &RateLimitHandle, result: Result<&mut Res, &E>);
}

impl<Res, E, F: Fn(Result<&Res, &E>) -> bool> ChargeOn<Res, E> for F {
    fn settle(&self, handle: &RateLimitHandle, result: Result<&mut Res, &E>) {
        if !self(result.map(|response| &*response)) {
            handle.settle(0);
        }
    }
}

/// Every admitted request stays charged, whatever the response. The default of a layer.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChargeAlways;

impl<Res, E> ChargeOn<Res, E> for ChargeAlways {
    const ASKED: bool = false;

    fn settle(&self, _: &RateLimitHandle, _: Result<&mut Res, &E>) {}
}

impl<B> RateLimitLayer<B> {
    /// Creates a layer that enforces `policy` with the counts in `backend`. Unless you set a [key](Self::key), all requests share one
    /// quota.
    pub fn new(backend: B, policy: Policy) -> Self {
        let core = LayerConfig {
            store: Arc::new(backend),
            policy,
            deadline: DEFAULT_DEADLINE,
            resolver: None,
            wait_config: None,
            max_waiters_in_total: DEFAULT_MAX_WAITERS,
            on_missing_key: OnMissingKey::default(),
            on_store_error: RateLimitFallback::default(),
            replicas: 1,
            circuit: Arc::new(Circuit::new(CircuitBreaker::new())),
            shadow_circuit: Arc::new(Circuit::new(CircuitBreaker::new())),
            tripped_by: Arc::default(),
            fallback: FallbackStore::default(),
            in_flight: Arc::default(),
            runtime: Arc::default(),
        };
        let (key, cost, responder) = (Arc::new(GlobalKey), Arc::new(UnitCost), Arc::new(HttpResponder::default()));
        Self::of(core, key, cost, responder, Arc::new(ChargeAlways), Arc::new(()))
    }
}

impl<B, K, C, A, R, X> RateLimitLayer<B, K, C, A, R, X> {
    /// Sets the key under which a request is counted: a closure, an extractor from the module `tollgate::http`, or a tuple of them. See
    /// [`ExtractKey`](crate::ExtractKey). Defaults to [`GlobalKey`].
    pub fn key<K2>(self, key: K2) -> RateLimitLayer<B, K2, C, A, R, X> {
        let Settings { core, key: _, cost, responder, charge, filter, .. } = self.into_settings();
        RateLimitLayer::of(core, Arc::new(key), cost, responder, charge, filter)
    }

    fn with_filter<X2>(self, make: impl FnOnce(Arc<X>) -> X2) -> RateLimitLayer<B, K, C, A, R, X2> {
        let Settings { core, key, cost, responder, charge, filter, .. } = self.into_settings();
        RateLimitLayer::of(core, key, cost, responder, charge, Arc::new(make(filter)))
    }

    /// Counts each request under another policy and key as well: for example per user, per address and globally.
    ///
    /// A request passes if all policies have room. It is charged to all of them or to none. If several have no room, the rejection names
    /// the limits of each, and the longest wait. On a single Redis and in memory this is one atomic decision; see
    /// [`RateLimitStore::check_all`] for other stores. `policy` needs a name of its own. Policies that are not [enforced](Policy::mode) do
    /// not affect the decision, and are counted separately.
    ///
    /// A request without this key is a request without a key, as for the key of the layer. By default it is rejected, whatever other keys
    /// it has: see [`on_missing_key`](Self::on_missing_key). For a key that only some requests have, use
    /// [`and_if_present`](Self::and_if_present).
    ///
    /// A [`DenyCache`](super::DenyCache) also denies such a request if one of its keys is known to be over a limit.
    /// [`QuotaPrefetch`](super::QuotaPrefetch) is not used for such requests: the store charges all their policies together.
    ///
    /// ```
    /// # #[cfg(feature = "http")] {
    /// use tollgate::http::{header, peer_ip};
    /// use tollgate::{GlobalKey, MemoryBackend, Policy, Quota, RateLimitLayer};
    ///
    /// let user = Policy::new("user", Quota::per_minute(60).token_bucket());
    /// let address = Policy::new("address", Quota::per_minute(300).fixed_window());
    /// let total = Policy::new("total", Quota::per_second(5_000).fixed_window());
    /// let layer = RateLimitLayer::new(MemoryBackend::new(), user)
    ///     .key(header("x-user"))
    ///     .and(address, peer_ip())
    ///     .and(total, GlobalKey);
    /// # }
    /// ```
    pub fn and<K2>(self, policy: Policy, key: K2) -> RateLimitLayer<B, K, C, A, R, WithLimit<X, K2>> {
        self.with_filter(|inner| WithLimit { inner, policy, key, if_present: false })
    }

    /// Counts each request that has this key under another policy as well, as [`and`](Self::and) does. Requests without the key, or with an
    /// empty one, are counted only under their other keys.
    ///
    /// A client that can leave the key out is not limited by this policy. Add a policy with a key that no client can leave out.
    ///
    /// ```
    /// # #[cfg(feature = "http")] {
    /// use tollgate::http::{header, peer_ip};
    /// use tollgate::{MemoryBackend, Policy, Quota, RateLimitLayer};
    ///
    /// let address = Policy::new("address", Quota::per_minute(300).fixed_window());
    /// let tenant = Policy::new("tenant", Quota::per_minute(3_000).token_bucket());
    /// let layer = RateLimitLayer::new(MemoryBackend::new(), address)
    ///     .key(peer_ip())
    ///     .and_if_present(tenant, header("x-tenant"));
    /// # }
    /// ```
    pub fn and_if_present<K2>(self, policy: Policy, key: K2) -> RateLimitLayer<B, K, C, A, R, WithLimit<X, K2>> {
        self.with_filter(|inner| WithLimit { inner, policy, key, if_present: true })
    }

    /// Adds a filter, which decides for each request whether it is counted, and under which further policies and keys. Use this if policies
    /// depend, for example, on what an outer layer has put into the extensions of the request.
    ///
    /// The filter is called before the key is extracted. Lists and filters that you added before it are called first, and it is skipped if
    /// they have decided. A list that you add later is called before it. Policies and keys that it adds count as with [`and`](Self::and).
    /// Create its policies once and clone them: a policy that is created for each request has to be prepared for counting each time.
    ///
    /// ```
    /// # #[cfg(feature = "http")] {
    /// use axum::body::Body;
    /// use axum::extract::Request;
    /// use axum::response::Response;
    /// use tollgate::rate_limit::{FilterAction, Subjects};
    /// use tollgate::{BoxError, MemoryBackend, Policy, Quota, RateLimitLayer};
    /// use tower::{ServiceBuilder, ServiceExt, service_fn};
    ///
    /// // What a layer further out has found in the token of a request.
    /// #[derive(Clone)]
    /// struct Account {
    ///     id: u64,
    ///     has_paid: bool,
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), BoxError> {
    /// let total = Policy::new("total", Quota::per_second(5_000).fixed_window());
    /// // One name and algorithm, so that what was counted stays when an account changes from one to the other.
    /// let [free, paid] = [1, 100].map(|quota| Policy::new("account", Quota::per_minute(quota).fixed_window()));
    /// let by_account = move |request: &Request, subjects: &mut Subjects| {
    ///     let Some(account) = request.extensions().get::<Account>() else { return FilterAction::Deny };
    ///     let policy = if account.has_paid { &paid } else { &free };
    ///     subjects.push(policy.clone(), Some(account.id.into()));
    ///     FilterAction::Limit
    /// };
    /// let service = ServiceBuilder::new()
    ///     .layer(RateLimitLayer::new(MemoryBackend::new(), total).filter(by_account))
    ///     .service(service_fn(async |_: Request| Ok::<_, BoxError>(Response::new(Body::empty()))));
    ///
    /// let status = async |account: Option<Account>| {
    ///     let mut request = Request::new(Body::empty());
    ///     account.map(|account| request.extensions_mut().insert(account));
    ///     Ok::<_, BoxError>(service.clone().oneshot(request).await?.status().as_u16())
    /// };
    /// assert_eq!(status(None).await?, 403);
    /// assert_eq!(status(Some(Account { id: 7, has_paid: false })).await?, 200);
    /// assert_eq!(status(Some(Account { id: 7, has_paid: false })).await?, 429);
    /// assert_eq!(status(Some(Account { id: 7, has_paid: true })).await?, 200);
    /// # Ok(())
    /// # }
    /// # main().unwrap();
    /// # }
    /// ```
    pub fn filter<X2>(self, filter: X2) -> RateLimitLayer<B, K, C, A, R, WithFilter<X, X2>> {
        self.with_filter(|inner| WithFilter { inner, filter })
    }

    /// Lets requests pass uncounted if `listed` returns `true`: health checks, or the addresses of a partner.
    ///
    /// Lists are called before the key is extracted, the last added list first.
    pub fn allow<F>(self, listed: F) -> RateLimitLayer<B, K, C, A, R, AllowList<X, F>> {
        self.with_filter(|inner| AllowList { inner, listed })
    }

    /// Rejects requests if `listed` returns `true`: with 403 over HTTP, with [`Denied`](super::Denied) otherwise.
    ///
    /// Lists are called before the key is extracted, the last added list first.
    pub fn deny<F>(self, listed: F) -> RateLimitLayer<B, K, C, A, R, DenyList<X, F>> {
        self.with_filter(|inner| DenyList { inner, listed })
    }

    /// Sets how many units a request costs. Defaults to [`UnitCost`].
    pub fn cost<C2>(self, cost: C2) -> RateLimitLayer<B, K, C2, A, R, X> {
        let Settings { core, key, cost: _, responder, charge, filter, .. } = self.into_settings();
        RateLimitLayer::of(core, key, Arc::new(cost), responder, charge, filter)
    }

    /// Sets the responder, which turns a rejection into a response. Defaults to [`HttpResponder`]. Use
    /// [`ErrorResponder`](crate::responder::ErrorResponder) for services that do not speak HTTP.
    pub fn responder<A2>(self, responder: A2) -> RateLimitLayer<B, K, C, A2, R, X> {
        let Settings { core, key, cost, responder: _, charge, filter, .. } = self.into_settings();
        RateLimitLayer::of(core, key, cost, Arc::new(responder), charge, filter)
    }

    /// Sets which responses are charged. Defaults to [`ChargeAlways`].
    pub fn charge_on<R2>(self, charge: R2) -> RateLimitLayer<B, K, C, A, R2, X> {
        let Settings { core, key, cost, responder, charge: _, filter, .. } = self.into_settings();
        RateLimitLayer::of(core, key, cost, responder, Arc::new(charge), filter)
    }

    /// Sets a resolver, which chooses the policy of a key at run time. By default, all keys have the policy of the layer.
    ///
    /// The resolver applies to the [key](Self::key) of the layer, not to [added](Self::and) keys. The resolver and the store call have the
    /// full [deadline](Self::deadline) each.
    pub fn resolver(self, resolver: PolicyResolver) -> Self {
        self.change(|core| core.resolver = Some(resolver))
    }

    /// Sets a resolver that chooses the policy of a key at run time, as [`resolver`](Self::resolver) does, from a value in the request.
    ///
    /// `input` extracts that value from the request: the API key as the client sent it, an account from the extensions, or any other part.
    ///
    /// The resolved policy is cached under the key of the layer, and concurrent requests with one key share one resolver call. So the key
    /// and the input must identify the same client. A request without an input uses the cached policy of its key, or the policy of the
    /// layer if there is none. This replaces a resolver that you set before.
    ///
    /// `input` is called only if no fresh policy is cached, or if requests may [wait](Self::wait) for room. The value is dropped when the
    /// resolver has answered, and is never logged.
    ///
    /// ```
    /// # #[cfg(feature = "http")] {
    /// use axum::body::Body;
    /// use axum::extract::Request;
    /// use tollgate::http::header;
    /// use tollgate::rate_limit::PolicyResolver;
    /// use tollgate::{BoxError, MemoryBackend, Policy, Quota, RateLimitLayer};
    ///
    /// async fn has_paid(api_key: &str) -> Result<bool, BoxError> {
    ///     Ok(api_key == "the-api-key-of-alice") // or a database query
    /// }
    ///
    /// let [free, pro] = [100, 1_000].map(|quota| Policy::new("api", Quota::per_hour(quota).fixed_window()));
    /// let plans = PolicyResolver::of_input({
    ///     let free = free.clone();
    ///     move |api_key: String| {
    ///         let (free, pro) = (free.clone(), pro.clone());
    ///         async move { Ok::<_, BoxError>(if has_paid(&api_key).await? { pro } else { free }) }
    ///     }
    /// });
    /// // The store keeps a digest of the API key. The resolver gets the API key itself.
    /// let layer = RateLimitLayer::new(MemoryBackend::new(), free).key(header("x-api-key")).resolver_from(
    ///     |request: &Request| Some(request.headers().get("x-api-key")?.to_str().ok()?.to_owned()),
    ///     plans,
    /// );
    /// # let _: axum::Router = axum::Router::new().route("/", axum::routing::get(async || "")).layer(layer);
    /// # let _ = Body::empty();
    /// # }
    /// ```
    pub fn resolver_from<F, V>(
        self,
        input: F,
        resolver: PolicyResolver<V>,
    ) -> RateLimitLayer<B, K, C, A, R, ResolveFrom<X, F, V>> {
        let (resolve, resolver) = resolver.into_parts();
        self.resolver(resolver).with_filter(|inner| ResolveFrom { inner, input, resolve })
    }

    /// Fails unless the backend shares its counts as widely as `scope` requires, so that the memory backend is not mistaken for a
    /// distributed one. While the backend fails, [`RateLimitFallback`] applies instead.
    ///
    /// # Errors
    ///
    /// [`ConfigError::ReachTooSmall`] if the counts are shared less widely than `needed`.
    pub fn require(self, needed: Reach) -> Result<Self, ConfigError>
    where
        B: RateLimitStore,
    {
        self.settings.core.store.reach().require(needed)?;
        Ok(self)
    }

    /// Sets what happens to a request without a key. Defaults to [`OnMissingKey::Reject`]. If a request [counts under several
    /// keys](Self::and), this applies to each of them.
    pub fn on_missing_key(self, policy: OnMissingKey) -> Self {
        self.change(|core| core.on_missing_key = policy)
    }

    /// Sets what happens when the store fails or is late. Defaults to [`RateLimitFallback::Local`].
    pub fn on_store_error(self, policy: RateLimitFallback) -> Self {
        self.change(|core| core.on_store_error = policy)
    }

    /// Makes requests over a limit wait for room for up to `wait`, instead of rejecting them at once. Use this for calls to a third-party
    /// service, which should be late rather than fail. Defaults to zero: requests do not wait.
    ///
    /// Waiters queue in their order of arrival, in one queue for each [key](Self::key) and process. Only the first waiter of a queue calls
    /// the store. It calls when its denial has expired, and when a request of this layer [gives units back](RateLimitHandle). It also calls
    /// at least once a second, since other processes may give units back. Each such call that returns counts as a
    /// [decision](super#metrics) in the metrics.
    ///
    /// Each time the first waiter is admitted, twice as many waiters may call at the same time, as far as there is room, until one of them
    /// is denied. So the queue empties if the quota has room for all arriving requests, and if the [burst](super::Quota::burst) is at least
    /// twice what is refilled during one store call. With a smaller burst, the queue may admit only one request per store call. A later
    /// request never overtakes a waiter, except that of two calls at the same time the cheaper one may be admitted. Between processes, the
    /// first call gets the room.
    ///
    /// A request is rejected at once if the denial lasts longer than `wait`, or if its cost exceeds the quota. Otherwise it is rejected
    /// after `wait` at the latest. If the first waiter is rejected since its denial lasts too long, for example after a
    /// [block](super::Limiter::block), the waiters behind it are rejected too, without a store call. This applies to waiters that cost at
    /// least as much and cannot wait that long either.
    ///
    /// If the store or the resolver fails in a call before the denial has expired, the queue keeps waiting. [`RateLimitFallback`] applies once
    /// the last denial from the store has expired.
    ///
    /// A request that [counts under several keys](Self::and) waits in the queue of the key with the longest denial, so it does not delay
    /// waiters for its other keys. If another key has no room when its turn comes, it moves to the end of the queue of that key.
    ///
    /// Up to 1,000 requests wait at the same time, or [`max_waiters_in_total`](Self::max_waiters_in_total); further requests are rejected.
    /// A waiter keeps the inner service that reported ready, with its permit. If you drop its future, it leaves the queue, and nothing is
    /// charged. If a waiter whose turn has come is neither polled nor dropped, it delays the waiters behind it until it is 250 ms late. If
    /// the next waiter is not polled either, the delay is up to one second longer. Once it is polled, the late
    /// waiter is first again.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::{ErrorResponder, BoxError, MemoryBackend, Policy, Quota, RateLimitLayer};
    /// use tower::{ServiceBuilder, ServiceExt, service_fn};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> Result<(), BoxError> {
    /// // The quota of the API: ten calls per second, evenly spaced.
    /// let allowed = Policy::new("their-api", Quota::per_second(10).burst(1)?.token_bucket());
    /// let client = ServiceBuilder::new()
    ///     .layer(RateLimitLayer::new(MemoryBackend::new(), allowed).wait(Duration::from_secs(5)).responder(ErrorResponder))
    ///     .service(service_fn(async |call: u32| Ok::<_, BoxError>(call)));
    ///
    /// let begun = tokio::time::Instant::now();
    /// for call in 0..30 {
    ///     client.clone().oneshot(call).await?;
    /// }
    /// assert!(begun.elapsed() >= Duration::from_millis(2_900));
    /// # Ok(())
    /// # }
    /// ```
    pub fn wait(self, wait: Duration) -> Self {
        self.change(|core| {
            core.wait_config = match core.wait_config.take() {
                _ if wait.is_zero() => None,
                Some(wait_config) => Some(WaitConfig { wait, ..wait_config }),
                None => Some(WaitConfig { wait, queues: Arc::new(WaitQueues::new(core.max_waiters_in_total)) }),
            };
        })
    }

    /// Sets how many requests may [wait](Self::wait) for room at the same time in this process. Applies to all clones of the layer that you
    /// make afterwards. Defaults to 1,000.
    ///
    /// All queues share this number, and one queue may use all of it. Requests of other clients over their limit are rejected at once then.
    /// If you do not trust your clients with that, limit the concurrent requests of each client in front of this layer.
    pub fn max_waiters_in_total(self, waiters: usize) -> Self {
        self.change(|core| {
            core.max_waiters_in_total = waiters;
            if let Some(wait_config) = &mut core.wait_config {
                wait_config.queues = Arc::new(WaitQueues::new(waiters));
            }
        })
    }

    /// Sets how many processes share the quota. With [`RateLimitFallback::Local`] each process enforces its share, rounded up. Defaults to 1; 0
    /// counts as 1.
    pub fn replicas(self, replicas: u32) -> Self {
        self.change(|core| core.replicas = replicas.max(1))
    }

    /// Sets when the layer stops calling a store that fails. Defaults to [`CircuitBreaker::new`].
    pub fn circuit_breaker(self, breaker: CircuitBreaker) -> Self {
        self.change(|core| {
            core.circuit = Arc::new(Circuit::new(breaker));
            core.shadow_circuit = Arc::new(Circuit::new(breaker));
            core.tripped_by = Arc::default();
        })
    }

    /// Sets how long a decision may take in total. After that it counts as a store error. Defaults to 100 ms.
    ///
    /// With zero, a store that cannot answer immediately is not called. Its requests are rejected as with [`RateLimitFallback::Deny`], whatever
    /// you configured. The source of the [`StoreError`](crate::StoreError), also in the log, is a [`ConfigError::ZeroTimeout`].
    ///
    /// A [resolver](Self::resolver) call has the same time before the store call, so both can take twice as long in total. If the resolver
    /// has answered for the key before, the request waits only half as long for a new answer.
    pub fn deadline(self, deadline: Duration) -> Self {
        self.change(|core| core.deadline = deadline)
    }

    /// Waits until no [correction](RateLimitHandle) is in flight. Call it at the end of your program, when no more requests arrive. It
    /// covers all clones of this layer, and layers derived from it with the methods above. It takes no longer than the
    /// [deadline](Self::deadline), unless new corrections begin meanwhile. The [shutdown of the backend](crate::backend#shutdown) waits for the
    /// corrections of all layers.
    ///
    /// ```no_run
    /// # #[cfg(feature = "http")] {
    /// use axum::{Router, routing::get};
    /// use tollgate::{BoxError, MemoryBackend, Policy, Quota, RateLimitLayer};
    ///
    /// # async fn serve(stopped: impl Future<Output = ()> + Send + 'static) -> Result<(), BoxError> {
    /// let failures = Policy::new("failures", Quota::per_minute(5).fixed_window());
    /// let limit = RateLimitLayer::new(MemoryBackend::new(), failures).charge_on(tollgate::http::failures());
    /// let app: Router = Router::new().route("/login", get(async || "welcome")).layer(limit.clone());
    ///
    /// let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    /// axum::serve(listener, app).with_graceful_shutdown(stopped).await?;
    /// limit.wait_idle().await;
    /// # Ok(())
    /// # }
    /// # }
    /// ```
    pub async fn wait_idle(&self) {
        self.settings.core.in_flight.wait_idle().await;
    }
}

#[cfg(feature = "config")]
impl<B, K, C, A, R, X> RateLimitLayer<B, K, C, A, R, X> {
    /// Uses the shared circuits, fallback counts and corrections instead of its own.
    pub(crate) fn having(self, shared: &SharedState) -> Self {
        self.change(|core| {
            core.circuit = Arc::clone(&shared.circuit);
            core.shadow_circuit = Arc::clone(&shared.shadow_circuit);
            core.tripped_by = Arc::clone(&shared.tripped_by);
            core.fallback = shared.fallback.clone();
            core.in_flight = Arc::clone(&shared.in_flight);
        })
    }

    /// Replaces all filters, lists and added policies with `filter`.
    pub(crate) fn filtered_by<X2>(self, filter: X2) -> RateLimitLayer<B, K, C, A, R, X2> {
        self.with_filter(|_| filter)
    }
}

impl<S, B, K, C, A, R, X> Layer<S> for RateLimitLayer<B, K, C, A, R, X> {
    type Service = RateLimit<S, B, K, C, A, R, X>;

    fn layer(&self, inner: S) -> Self::Service {
        RateLimit::new(inner, self.clone())
    }
}

impl<B, K, C, A, R, X> RateLimitLayer<B, K, C, A, R, X> {
    fn of(core: LayerConfig<B>, key: Arc<K>, cost: Arc<C>, responder: Arc<A>, charge: Arc<R>, filter: Arc<X>) -> Self {
        let (settler, copies) = (OnceLock::new(), ShardedRefs::default());
        let settings =
            Settings { core, key, cost, responder, charge, filter, settler, copies, thread_slot: None, depth: 0 };
        Self { settings: Arc::new(settings) }
    }

    /// Returns the settings, cloned if services or other layers share them.
    fn into_settings(self) -> Settings<B, K, C, A, R, X> {
        Arc::unwrap_or_clone(self.settings)
    }

    fn change(self, change: impl FnOnce(&mut LayerConfig<B>)) -> Self {
        let Settings { mut core, key, cost, responder, charge, filter, .. } = self.into_settings();
        change(&mut core);
        Self::of(core, key, cost, responder, charge, filter)
    }

    pub(super) fn into_shared(self) -> Arc<Settings<B, K, C, A, R, X>> {
        self.settings
    }
}

// Not derived: `derive` would require `K: Clone` and so on, but closures need not be `Clone`.
impl<B, K, C, A, R, X> Clone for RateLimitLayer<B, K, C, A, R, X> {
    fn clone(&self) -> Self {
        Self { settings: Arc::clone(&self.settings) }
    }
}

impl<B, K, C, A, R, X> fmt::Debug for RateLimitLayer<B, K, C, A, R, X> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.core.describe::<K>(f, "RateLimitLayer")
    }
}

impl<B> LayerConfig<B> {
    pub(super) fn describe<K>(&self, f: &mut fmt::Formatter<'_>, name: &str) -> fmt::Result {
        f.debug_struct(name)
            .field("policy", &self.policy)
            .field("key", &std::any::type_name::<K>())
            .field("on_missing_key", &self.on_missing_key)
            .field("on_store_error", &self.on_store_error)
            .finish_non_exhaustive()
    }
}

// Not derived: `derive` would require `B: Clone`.
impl<B> Clone for LayerConfig<B> {
    fn clone(&self) -> Self {
        Self {
            store: Arc::clone(&self.store),
            policy: self.policy.clone(),
            deadline: self.deadline,
            resolver: self.resolver.clone(),
            wait_config: self.wait_config.clone(),
            max_waiters_in_total: self.max_waiters_in_total,
            on_missing_key: self.on_missing_key,
            on_store_error: self.on_store_error,
            replicas: self.replicas,
            circuit: Arc::clone(&self.circuit),
            shadow_circuit: Arc::clone(&self.shadow_circuit),
            tripped_by: Arc::clone(&self.tripped_by),
            fallback: self.fallback.clone(),
            in_flight: Arc::clone(&self.in_flight),
            runtime: Arc::clone(&self.runtime),
        }
    }
}

/// Settings that the clones of a layer share with their services. Mutable state is behind pointers, so a copy is equivalent.
// Aligned to its own cache line, away from the reference count, which every request writes.
#[repr(align(64))]
pub(super) struct Settings<B, K, C, A, R, X> {
    pub(super) core: LayerConfig<B>,
    pub(super) key: Arc<K>,
    pub(super) cost: Arc<C>,
    pub(super) responder: Arc<A>,
    pub(super) charge: Arc<R>,
    pub(super) filter: Arc<X>,
    // Created by the first request that needs it, from the fields above.
    settler: OnceLock<Arc<dyn Settle>>,
    // Copies of these settings, one for each thread slot, so that each slot counts references separately. A copy stores its slot and how
    // many copies it is away from the original.
    copies: ShardedRefs<Arc<Self>>,
    thread_slot: Option<usize>,
    depth: u8,
}

// Not derived: `derive` would require `K: Clone` and so on.
impl<B, K, C, A, R, X> Clone for Settings<B, K, C, A, R, X> {
    fn clone(&self) -> Self {
        Self {
            core: self.core.clone(),
            key: Arc::clone(&self.key),
            cost: Arc::clone(&self.cost),
            responder: Arc::clone(&self.responder),
            charge: Arc::clone(&self.charge),
            filter: Arc::clone(&self.filter),
            settler: OnceLock::new(),
            copies: ShardedRefs::default(),
            thread_slot: None,
            depth: 0,
        }
    }
}

impl<B, K, C, A, R, X> Settings<B, K, C, A, R, X> {
    /// A thread that accepts connections clones a service for each connection, and the threads that serve them clone it again. A further
    /// level would multiply the copies by the number of threads, so deeper clones share a reference count.
    const MAX_DEPTH: u8 = 2;

    /// Returns the copy whose reference count this thread uses: processors that update the same count wait for each other.
    #[inline]
    pub(super) fn for_this_thread(self: &Arc<Self>) -> &Arc<Self> {
        let (thread_slot, depth) = (Some(thread_slot()), self.depth + 1);
        if self.thread_slot == thread_slot || self.depth == Self::MAX_DEPTH {
            return self;
        }
        self.copies.get(|| Arc::new(Self { thread_slot, depth, ..Self::clone(self) }))
    }
}

impl<B: RateLimitStore + Clone + Send + Sync + 'static, K, C, A, R, X> Settings<B, K, C, A, R, X> {
    /// Returns the settler, which sends corrections to the store.
    pub(super) fn settler(&self) -> Arc<dyn Settle> {
        let make = || -> Arc<dyn Settle> {
            if let Ok(runtime) = Handle::try_current() {
                // Another request may have set it before.
                let _ = self.core.runtime.set(runtime);
            }
            self.core.in_flight.add_to_shutdown(&*self.core.store);
            Arc::new(Settler {
                policy: self.core.policy.clone(),
                store: B::clone(&self.core.store),
                fallback: self.core.fallback.backend().clone(),
                deadline: self.core.deadline,
                is_resolved: self.core.resolver.is_some(),
                queues: self.core.wait_config.as_ref().map(|wait_config| Arc::clone(&wait_config.queues)),
                runtime: Arc::clone(&self.core.runtime),
                in_flight: Arc::clone(&self.core.in_flight),
            })
        };
        Arc::clone(self.settler.get_or_init(make))
    }
}
