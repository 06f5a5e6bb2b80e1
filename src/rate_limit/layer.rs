use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tower_layer::Layer;

use super::filter::{AllowList, DenyList, ResolveFrom, WithFilter, WithLimit};
#[cfg(feature = "config")]
use super::layer_config::SharedState;
use super::layer_config::{Circuits, LayerConfig, RateLimitFallback, WaitConfig};
use super::options::LayerOptions;
use super::policy::Policy;
use super::resolver::PolicyResolver;
use super::service::RateLimit;
use super::settings::Settings;
use super::store::RateLimitStore;
use super::wait_queue::WaitQueues;
use crate::error::ConfigError;
use crate::key::GlobalKey;
use crate::on_failure::OnMissingKey;
use crate::reach::Reach;
use crate::store::circuit::CircuitBreaker;

/// Enforces a [`Policy`] in front of any tower service. See the [module docs](crate::rate_limit) for examples.
///
/// Not to be confused with `tower::limit::RateLimitLayer`, which counts for each service that it makes, delays instead of rejecting, and
/// makes services that cannot be cloned. All clones of this layer, and all services made from them, count together.
///
/// With HTTP a rejection is a response. A service that does not speak HTTP needs [`.responder(ErrorResponder)`](Self::responder).
///
/// Type parameters: the backend, the [key](crate::ExtractKey), and the [options](LayerOptions) that are part of the type.
#[must_use]
pub struct RateLimitLayer<B, K = GlobalKey, O = LayerOptions> {
    // Shared with the services, because a router may make a new service for each request.
    settings: Arc<Settings<B, K, O>>,
}

impl<B> RateLimitLayer<B> {
    /// Creates a layer that enforces `policy` with the counts in `backend`. Unless you set a [key](Self::key), all requests share one
    /// quota.
    pub fn new(backend: B, policy: Policy) -> Self {
        Self::of(LayerConfig::new(backend, policy), Arc::new(GlobalKey), LayerOptions::default())
    }
}

impl<B, K, O: Clone> RateLimitLayer<B, K, O> {
    /// Sets the key under which a request is counted: a closure, an extractor from the module `tollgate::http`, or a tuple of them. See
    /// [`ExtractKey`](crate::ExtractKey). Defaults to [`GlobalKey`].
    pub fn key<K2>(self, key: K2) -> RateLimitLayer<B, K2, O> {
        let Settings { core, options, .. } = self.into_settings();
        RateLimitLayer::of(core, Arc::new(key), options)
    }
}

#[expect(clippy::type_complexity, reason = "each option has its parameter")]
impl<B, K, C, A, R, X> RateLimitLayer<B, K, LayerOptions<C, A, R, X>> {
    /// Counts each request under another policy and key as well: for example per user, per address and globally.
    ///
    /// A request passes if all policies have room. It is charged to all of them or to none. If several have no room, the rejection names
    /// the limits of each, and the longest wait. On a single Redis and in memory this is one atomic decision; see
    /// [`RateLimitStore::check_all`] for other stores. `policy` needs a name of its own. A policy that is not [enforced](Policy::mode) does
    /// not affect the decision, and is charged independently of the others.
    ///
    /// A request that lacks this key is treated like one that lacks the key of the layer. By default it is rejected, whatever other keys it
    /// has: see [`on_missing_key`](Self::on_missing_key). For a key that only some requests have, use
    /// [`and_if_present`](Self::and_if_present).
    ///
    /// A [`DenyCache`](super::DenyCache) denies a request with several keys if one of them is known to be over a limit.
    /// [`QuotaPrefetch`](super::QuotaPrefetch) is not used for these requests: the store charges all their policies together.
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
    pub fn and<K2>(self, policy: Policy, key: K2) -> RateLimitLayer<B, K, LayerOptions<C, A, R, WithLimit<X, K2>>> {
        self.with_options(|options| options.filter(|inner| WithLimit { inner, policy, key, if_present: false }))
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
    pub fn and_if_present<K2>(
        self,
        policy: Policy,
        key: K2,
    ) -> RateLimitLayer<B, K, LayerOptions<C, A, R, WithLimit<X, K2>>> {
        self.with_options(|options| options.filter(|inner| WithLimit { inner, policy, key, if_present: true }))
    }

    /// Adds a filter, which decides for each request whether it is counted, and under which further policies and keys. Use this if policies
    /// depend, for example, on what an outer layer has put into the extensions of the request.
    ///
    /// The filter is called before the key is extracted. It is called after all lists, and after the filters that you added before it. If
    /// one of them lets the request pass uncounted or rejects it, this filter is skipped. Policies and keys that the filter adds count as
    /// with [`and`](Self::and).
    /// Create its policies once and clone them: a policy that is created for each request has to be prepared for counting each time.
    ///
    /// ```
    /// # #[cfg(feature = "http")] {
    /// use axum::body::Body;
    /// use axum::extract::Request;
    /// use axum::response::Response;
    /// use tollgate::rate_limit::{FilterAction, Descriptors};
    /// use tollgate::{BoxError, MemoryBackend, Policy, Quota, RateLimitLayer};
    /// use tower::{ServiceBuilder, ServiceExt, service_fn};
    ///
    /// // An outer layer has read the account from the token of the request.
    /// #[derive(Clone)]
    /// struct Account {
    ///     id: u64,
    ///     has_paid: bool,
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), BoxError> {
    /// let total = Policy::new("total", Quota::per_second(5_000).fixed_window());
    /// // Both policies have the same name and algorithm, so an account keeps its counts when it changes from one to the other.
    /// let [free, paid] = [1, 100].map(|quota| Policy::new("account", Quota::per_minute(quota).fixed_window()));
    /// let by_account = move |request: &Request, descriptors: &mut Descriptors| {
    ///     let Some(account) = request.extensions().get::<Account>() else { return FilterAction::Deny };
    ///     let policy = if account.has_paid { &paid } else { &free };
    ///     descriptors.push(policy.clone(), Some(account.id.into()));
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
    pub fn filter<X2>(self, filter: X2) -> RateLimitLayer<B, K, LayerOptions<C, A, R, WithFilter<X, X2>>> {
        self.with_options(|options| options.filter(|inner| WithFilter { inner, filter }))
    }

    /// Lets requests pass uncounted if `listed` returns `true`: health checks, or the addresses of a partner.
    ///
    /// Lists are called before the key is extracted, the last added list first.
    pub fn allow<F>(self, listed: F) -> RateLimitLayer<B, K, LayerOptions<C, A, R, AllowList<X, F>>> {
        self.with_options(|options| options.filter(|inner| AllowList { inner, listed }))
    }

    /// Rejects requests if `listed` returns `true`: with 403 over HTTP, with [`Denied`](super::Denied) otherwise.
    ///
    /// Lists are called before the key is extracted, the last added list first.
    pub fn deny<F>(self, listed: F) -> RateLimitLayer<B, K, LayerOptions<C, A, R, DenyList<X, F>>> {
        self.with_options(|options| options.filter(|inner| DenyList { inner, listed }))
    }

    /// Sets how many units a request costs. Defaults to [`UnitCost`](super::UnitCost).
    pub fn cost<C2>(self, cost: C2) -> RateLimitLayer<B, K, LayerOptions<C2, A, R, X>> {
        self.with_options(|options| options.cost(cost))
    }

    /// Sets the responder, which turns a rejection into a response. Defaults to [`HttpResponder`](crate::responder::HttpResponder). Use
    /// [`ErrorResponder`](crate::responder::ErrorResponder) for services that do not speak HTTP.
    pub fn responder<A2>(self, responder: A2) -> RateLimitLayer<B, K, LayerOptions<C, A2, R, X>> {
        self.with_options(|options| options.responder(responder))
    }

    /// Sets which responses are charged. Defaults to [`ChargeAlways`](super::ChargeAlways).
    pub fn charge_on<R2>(self, charge: R2) -> RateLimitLayer<B, K, LayerOptions<C, A, R2, X>> {
        self.with_options(|options| options.charge(charge))
    }

    /// Sets a resolver that chooses the policy of a key at run time, as [`resolver`](Self::resolver) does, from a value in the request.
    ///
    /// `input` extracts that value from the request: the API key as the client sent it, an account from the extensions, or any other part.
    ///
    /// The resolved policy is cached under the key of the layer, and concurrent requests with one key share one resolver call. So the key
    /// and the input must identify the same client. A request without an input uses the cached policy of its key, or the policy of the
    /// layer if there is none. `resolver_from` replaces a resolver that you set before.
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
    ) -> RateLimitLayer<B, K, LayerOptions<C, A, R, ResolveFrom<X, F, V>>> {
        let (resolve, resolver) = resolver.into_parts();
        self.resolver(resolver).with_options(|options| options.filter(|inner| ResolveFrom { inner, input, resolve }))
    }
}

impl<B, K, O: Clone> RateLimitLayer<B, K, O> {
    /// Sets a resolver, which chooses the policy of a key at run time. By default, all keys have the policy of the layer.
    ///
    /// The resolver applies to the [key](Self::key) of the layer, not to [added](Self::and) keys. The resolver and the store call have the
    /// full [deadline](Self::deadline) each.
    pub fn resolver(self, resolver: PolicyResolver) -> Self {
        self.change(|core| core.resolver = Some(resolver))
    }

    /// Fails unless the backend shares its counts as widely as `needed` requires, so that the memory backend is not mistaken for a
    /// distributed one. The check ignores [`RateLimitFallback`], which applies while the backend fails.
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
    /// the store. It calls when its denial has expired, and when a request of this layer [gives units back](super::RateLimitHandle). It
    /// also calls at least once a second, since other processes may give units back. Each such call that returns counts as a
    /// [decision](super#metrics) in the metrics.
    ///
    /// Each time the first waiter is admitted, the number of waiters that may call at the same time doubles, up to the remaining room.
    /// After a denial, only the first waiter calls again. So the queue empties if the quota has room for all arriving requests, and if the
    /// [burst](super::Quota::burst) is at least
    /// twice what is refilled during one store call. With a smaller burst, the queue may admit only one request per store call. A later
    /// request overtakes a waiter only if both call at the same time and there is room only for the cheaper request. Between processes, the
    /// first call gets the room.
    ///
    /// A request is rejected at once if the denial lasts longer than `wait`, or if its cost exceeds the quota. Otherwise it is rejected
    /// after `wait` at the latest. If the first waiter is rejected since its denial lasts too long, for example after a
    /// [block](super::Limiter::block), the waiters behind it are rejected too, without a store call. This applies to waiters that cost at
    /// least as much and cannot wait that long either.
    ///
    /// If the store or the resolver fails in a call before the denial has expired, the queue keeps waiting. [`RateLimitFallback`] applies
    /// once the last denial from the store has expired.
    ///
    /// A request that [counts under several keys](Self::and) waits in the queue of the key with the longest denial, so it does not delay
    /// waiters for its other keys. If another key has no room when the request's turn comes, the request moves to the end of that key's
    /// queue.
    ///
    /// Up to [`max_waiters_in_total`](Self::max_waiters_in_total) requests wait at the same time; further requests are rejected.
    /// A waiter keeps the inner service that reported ready, with its permit. If you drop its future, it leaves the queue, and nothing is
    /// charged. If a waiter whose turn has come is neither polled nor dropped, the next waiter takes its turn after 250 ms. If the next
    /// waiter is not polled either, this takes up to one second longer. Once the late waiter is polled, it is first again.
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
    /// All queues share this number. If one queue uses all of it, requests of other clients over their limit are rejected at once. If you
    /// do not trust your clients, limit the concurrent requests of each client in front of this layer.
    pub fn max_waiters_in_total(self, waiters: usize) -> Self {
        self.change(|core| {
            core.max_waiters_in_total = waiters;
            if let Some(wait_config) = &mut core.wait_config {
                wait_config.queues = Arc::new(WaitQueues::new(waiters));
            }
        })
    }

    /// Sets how many processes share the quota. With [`RateLimitFallback::Local`] each process enforces its share, rounded up. Defaults to
    /// 1; 0 counts as 1.
    pub fn replicas(self, replicas: u32) -> Self {
        self.change(|core| core.replicas = replicas.max(1))
    }

    /// Sets when the layer stops calling a store that fails. Defaults to [`CircuitBreaker::new`].
    pub fn circuit_breaker(self, breaker: CircuitBreaker) -> Self {
        self.change(|core| core.shared.circuits = Arc::new(Circuits::new(breaker)))
    }

    /// Sets how long the store calls of a decision may take together. After that, the layer treats the decision as a store error. Defaults
    /// to 100 ms.
    ///
    /// With zero, a store that cannot answer immediately is not called. The requests are rejected as with [`RateLimitFallback::Deny`],
    /// whatever fallback you configured. The source of the [`StoreError`](crate::StoreError), also in the log, is a
    /// [`ConfigError::ZeroTimeout`].
    ///
    /// A [resolver](Self::resolver) call before the store calls has a separate deadline of the same length. If the resolver
    /// has answered for the key before, the request waits only half as long for a new answer.
    pub fn deadline(self, deadline: Duration) -> Self {
        self.change(|core| core.deadline = deadline)
    }

    /// Waits until no [correction](super::RateLimitHandle) is in flight. Call it at the end of your program, when no more requests arrive.
    /// It covers all clones of this layer, and layers derived from it with the methods above. It takes no longer than the
    /// [deadline](Self::deadline), unless new corrections begin meanwhile. The [shutdown of the backend](crate::backend#shutdown) waits for
    /// the corrections of all layers.
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
        self.settings.core.shared.wait_idle().await;
    }
}

#[cfg(feature = "config")]
impl<B, K, C, A, R, X> RateLimitLayer<B, K, LayerOptions<C, A, R, X>> {
    /// Uses the shared circuits, fallback counts and corrections instead of its own.
    pub(crate) fn with_shared(self, shared: &SharedState) -> Self {
        self.change(|core| core.shared = shared.clone())
    }

    /// Replaces all filters, lists and added policies with `filter`.
    pub(crate) fn filtered_by<X2>(self, filter: X2) -> RateLimitLayer<B, K, LayerOptions<C, A, R, X2>> {
        self.with_options(|options| options.filter(|_| filter))
    }
}

impl<S, B, K, O> Layer<S> for RateLimitLayer<B, K, O> {
    type Service = RateLimit<S, B, K, O>;

    fn layer(&self, inner: S) -> Self::Service {
        RateLimit::new(inner, self.clone())
    }
}

impl<B, K, O> RateLimitLayer<B, K, O> {
    fn of(core: LayerConfig<B>, key: Arc<K>, options: O) -> Self {
        Self { settings: Arc::new(Settings::new(core, key, options)) }
    }

    pub(super) fn into_shared(self) -> Arc<Settings<B, K, O>> {
        self.settings
    }
}

impl<B, K, O: Clone> RateLimitLayer<B, K, O> {
    /// Returns the settings, cloned if services or other layers share them.
    fn into_settings(self) -> Settings<B, K, O> {
        Arc::unwrap_or_clone(self.settings)
    }

    fn change(self, change: impl FnOnce(&mut LayerConfig<B>)) -> Self {
        let Settings { mut core, key, options, .. } = self.into_settings();
        change(&mut core);
        Self::of(core, key, options)
    }

    fn with_options<O2>(self, change: impl FnOnce(O) -> O2) -> RateLimitLayer<B, K, O2> {
        let Settings { core, key, options, .. } = self.into_settings();
        RateLimitLayer::of(core, key, change(options))
    }
}

// Not derived: `derive` would require `K: Clone` and so on, but closures need not be `Clone`.
impl<B, K, O> Clone for RateLimitLayer<B, K, O> {
    fn clone(&self) -> Self {
        Self { settings: Arc::clone(&self.settings) }
    }
}

impl<B, K, O> fmt::Debug for RateLimitLayer<B, K, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.core.describe::<K>(f, "RateLimitLayer")
    }
}
