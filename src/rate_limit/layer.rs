use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use tokio::runtime::Handle;
use tower_layer::Layer;

use super::filter::{AllowList, DenyList, ResolveFrom, WithFilter, WithLimit};
use super::handle::{Pending, RateLimitHandle, Settle, Settler};
use super::limiter::DEFAULT_DEADLINE;
use super::policy::Policy;
use super::resolver::PolicyResolver;
use super::service::RateLimit;
use super::store::RateLimitStore;
use super::wait_queue::Lines;
// The one backend that is always there, for when the other one is not.
use crate::MemoryBackend;
use crate::error::ConfigError;
use crate::key::GlobalKey;
use crate::lock::Reach;
use crate::responder::HttpResponder;
use crate::store::circuit::{Circuit, CircuitBreaker};
use crate::store::sharded_refs::{ShardedRefs, thread_slot};

/// Enforces a [`Policy`] in front of any tower service. See the [module docs](crate::rate_limit) for examples.
///
/// Not to be confused with `tower::limit::RateLimitLayer`, which counts per connection, delays instead of rejecting, and
/// cannot be cloned. All clones of this layer, and all services that they make, count together.
///
/// With HTTP a rejection is a response. A service that does not speak HTTP needs
/// [`.responder(ErrorResponder)`](Self::responder).
///
/// Type parameters: the backend, the [key](crate::ExtractKey), the [cost](RequestCost), what a rejection
/// [becomes](crate::responder::Responder), which answers are [charged](ChargeOn), and [lists](super::RequestFilter).
#[must_use]
pub struct RateLimitLayer<B, K = GlobalKey, C = UnitCost, A = HttpResponder, R = ChargeAlways, X = ()> {
    // Shared with the services from the start: a router that is called as it was built makes one for each request.
    settings: Arc<Settings<B, K, C, A, R, X>>,
}

/// What has nothing to do with the type of requests and answers. Cheap to clone.
pub(super) struct LayerConfig<B> {
    // Behind a pointer, so that whatever it is can be shared.
    pub(super) store: Arc<B>,
    pub(super) policy: Policy,
    pub(super) deadline: Duration,
    pub(super) resolver: Option<PolicyResolver>,
    pub(super) patience: Option<WaitConfig>,
    pub(super) max_waiters_in_total: usize,
    pub(super) on_missing_key: OnMissingKey,
    pub(super) on_store_error: OnStoreError,
    pub(super) replicas: u32,
    pub(super) circuit: Arc<Circuit>,
    /// Of what the store is asked about policies that have no say, beside those that have one.
    pub(super) aside: Arc<Circuit>,
    /// Of layers that have a circuit in common the policy of the one that has opened it, under which it is to close.
    pub(super) tripped_by: Arc<Mutex<Option<Policy>>>,
    pub(super) local: Local,
    pub(super) pending: Arc<Pending>,
    /// Of the first request that found one, for what comes to its end on a thread without.
    pub(super) runtime: Arc<OnceLock<Handle>>,
}

/// How long requests may wait for room, and where.
#[derive(Clone, Debug)]
pub(super) struct WaitConfig {
    pub(super) wait: Duration,
    pub(super) lines: Arc<Lines>,
}

/// How many requests may wait unless told otherwise.
const MOST_WAITING: usize = 1_000;

/// The backend that decides while the store fails. Made when it is first needed.
#[derive(Clone, Default)]
pub(super) struct Local(Arc<OnceLock<MemoryBackend>>);

impl Local {
    pub(super) fn backend(&self) -> &MemoryBackend {
        self.0.get_or_init(MemoryBackend::fallback)
    }
}

/// What layers on the same backend may have in common: the circuits to it, the counts of the time in which it fails, and the corrections
/// that are under way.
#[cfg(feature = "config")]
#[derive(Clone)]
pub(crate) struct SharedState {
    circuit: Arc<Circuit>,
    aside: Arc<Circuit>,
    tripped_by: Arc<Mutex<Option<Policy>>>,
    local: Local,
    pending: Arc<Pending>,
}

#[cfg(feature = "config")]
impl SharedState {
    pub(crate) fn new(breaker: CircuitBreaker) -> Self {
        let [circuit, aside] = [Circuit::new(breaker), Circuit::new(breaker)].map(Arc::new);
        Self { circuit, aside, tripped_by: Arc::default(), local: Local::default(), pending: Arc::default() }
    }

    /// Waits until no correction is under way.
    pub(crate) async fn wait_idle(&self) {
        self.pending.wait_idle().await;
    }
}

/// What happens to a request that has no key, or an empty one. Defaults to [`Reject`](Self::Reject).
///
/// Where a request [counts for several](RateLimitLayer::and) this holds for each of the keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnMissingKey {
    /// It is turned away: 400 with HTTP, [`MissingKey`](super::MissingKey) without.
    #[default]
    Reject,
    /// It is counted under one key that all such requests share.
    Shared,
    /// It passes, uncounted, but for the keys that it has.
    Pass,
}

/// What happens to a request when the store fails, is late, or has failed so often that it is not
/// [asked](CircuitBreaker). Defaults to [`Local`](Self::Local).
///
/// The log has one line when a store begins to fail and one when nothing has failed for a second, and one for each time that the
/// [circuit](CircuitBreaker) opens or closes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnStoreError {
    /// This process enforces the policy by itself, with counts of its own in memory that begin at zero: those of this layer and its
    /// clones, which know of no key that was [blocked](crate::Limiter::block). With several
    /// replicas say how many there are ([`RateLimitLayer::replicas`]); each then enforces its share. A request that costs
    /// more than the share, though not more than the quota, is turned away as with [`Deny`](Self::Deny).
    #[default]
    Local,
    /// It passes, uncounted: a broken store must not take the service down.
    Allow,
    /// It is turned away: 503 with HTTP, the [`StoreError`](crate::StoreError) without. For limits that guard something
    /// precious, a login for instance. A request that [costs](RequestCost) nothing passes, as nothing could be known of it but a block.
    Deny,
}

/// How many units a request costs.
///
/// Closures `Fn(&Req) -> u32` are costs. A cost of 0 passes without being charged, does not [wait](RateLimitLayer::wait) for room, and passes also while
/// the store fails. It is turned away where the quota is 0, and while its key is known to be [blocked](crate::Limiter::block).
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

/// Which answers are charged.
///
/// Every request is charged when it is admitted, so that requests in flight count; this is asked when the answer is there, and
/// may give units back through the [handle](RateLimitHandle) of the request. A request whose future is dropped before
/// stays charged.
///
/// Closures `Fn(Result<&Res, &E>) -> bool` say whether an answer is charged. With HTTP there are presets:
/// `tollgate::http::failures()` and `tollgate::http::successes()`.
pub trait ChargeOn<Res, E> {
    /// Whether this does anything at all.
    const ASKED: bool = true;

    /// Corrects what the request was charged, now or, with a clone of `handle`, later.
    fn settle(&self, handle: &RateLimitHandle, answer: Result<&mut Res, &E>);
}

impl<Res, E, F: Fn(Result<&Res, &E>) -> bool> ChargeOn<Res, E> for F {
    fn settle(&self, handle: &RateLimitHandle, answer: Result<&mut Res, &E>) {
        if !self(answer.map(|response| &*response)) {
            handle.settle(0);
        }
    }
}

/// Every admitted request stays charged, whatever the answer: what a layer does until it is told otherwise.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChargeAlways;

impl<Res, E> ChargeOn<Res, E> for ChargeAlways {
    const ASKED: bool = false;

    fn settle(&self, _: &RateLimitHandle, _: Result<&mut Res, &E>) {}
}

impl<B> RateLimitLayer<B> {
    /// Enforces `policy` on what `backend` counts. Until a [key](Self::key) is named, all requests share one quota.
    pub fn new(backend: B, policy: Policy) -> Self {
        let core = LayerConfig {
            store: Arc::new(backend),
            policy,
            deadline: DEFAULT_DEADLINE,
            resolver: None,
            patience: None,
            max_waiters_in_total: MOST_WAITING,
            on_missing_key: OnMissingKey::default(),
            on_store_error: OnStoreError::default(),
            replicas: 1,
            circuit: Arc::new(Circuit::new(CircuitBreaker::new())),
            aside: Arc::new(Circuit::new(CircuitBreaker::new())),
            tripped_by: Arc::default(),
            local: Local::default(),
            pending: Arc::default(),
            runtime: Arc::default(),
        };
        let (key, cost, answer) = (Arc::new(GlobalKey), Arc::new(UnitCost), Arc::new(HttpResponder::default()));
        Self::of(core, key, cost, answer, Arc::new(ChargeAlways), Arc::new(()))
    }
}

impl<B, K, C, A, R, X> RateLimitLayer<B, K, C, A, R, X> {
    /// Whom a request counts for: a closure, an extractor of the module `tollgate::http`, or a tuple of them; see
    /// [`ExtractKey`](crate::ExtractKey). Defaults to [`GlobalKey`].
    pub fn key<K2>(self, key: K2) -> RateLimitLayer<B, K2, C, A, R, X> {
        let Settings { core, key: _, cost, answer, charge, filter, .. } = self.into_settings();
        RateLimitLayer::of(core, Arc::new(key), cost, answer, charge, filter)
    }

    fn with_filter<X2>(self, make: impl FnOnce(Arc<X>) -> X2) -> RateLimitLayer<B, K, C, A, R, X2> {
        let Settings { core, key, cost, answer, charge, filter, .. } = self.into_settings();
        RateLimitLayer::of(core, key, cost, answer, charge, Arc::new(make(filter)))
    }

    /// Counts each request by another policy and key as well: by user *and* by address *and* for everybody together.
    ///
    /// A request passes if all of them have room, and is charged to all of them or to none. Where several have none, the rejection names
    /// the limits of each, and the longest wait. On a single Redis and in memory
    /// this is one atomic decision; see [`RateLimitStore::check_all`] for stores that cannot do it.
    /// Takes a policy with a name of its own. Policies that are not [enforced](Policy::mode) have no say in it, and are counted by themselves.
    ///
    /// A request that lacks this key is one without a key, as it is without that of the layer: unless [told otherwise](Self::on_missing_key) it is turned
    /// away, whatever other keys it has. What only some requests have is for [`and_if_present`](Self::and_if_present).
    ///
    /// A [`DenyCache`](super::DenyCache) turns such requests away as well, where one of those whom they count for is known to be over a limit.
    /// [`QuotaPrefetch`](super::QuotaPrefetch) have nothing for them: they are charged in the store, to all of them together.
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

    /// Counts each request that has this key by another policy as well, as [`and`](Self::and) does, and leaves those alone that lack it, or have
    /// an empty one: they count for the other subjects.
    ///
    /// Whoever can leave the key out is not limited by this policy, so let another one count what nobody can.
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

    /// Has `filter` say of each request whether it is counted, and for whom besides its key: by policies, for instance, that depend on
    /// what a layer further out has put into its extensions.
    ///
    /// It is asked before the key is looked for, and after the lists and screens that were named before, if these have not decided. A list that is named
    /// later comes before it. Whom it adds counts as with [`and`](Self::and). Policies are made once and cloned: one that is made for
    /// each request has to be made ready to count by each time.
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

    /// Lets requests for which `listed` is true pass uncounted: health checks, or the addresses of a partner.
    ///
    /// Lists are asked before the key is looked for, the one named last first.
    pub fn allow<F>(self, listed: F) -> RateLimitLayer<B, K, C, A, R, AllowList<X, F>> {
        self.with_filter(|inner| AllowList { inner, listed })
    }

    /// Turns away requests for which `listed` is true: 403 with HTTP, [`Denied`](super::Denied) without.
    ///
    /// Lists are asked before the key is looked for, the one named last first.
    pub fn deny<F>(self, listed: F) -> RateLimitLayer<B, K, C, A, R, DenyList<X, F>> {
        self.with_filter(|inner| DenyList { inner, listed })
    }

    /// How many units a request costs. Defaults to [`UnitCost`].
    pub fn cost<C2>(self, cost: C2) -> RateLimitLayer<B, K, C2, A, R, X> {
        let Settings { core, key, cost: _, answer, charge, filter, .. } = self.into_settings();
        RateLimitLayer::of(core, key, Arc::new(cost), answer, charge, filter)
    }

    /// What a rejection becomes. Defaults to [`HttpResponder`]; [`ErrorResponder`](crate::responder::ErrorResponder) is for services that do
    /// not speak HTTP.
    pub fn responder<A2>(self, answer: A2) -> RateLimitLayer<B, K, C, A2, R, X> {
        let Settings { core, key, cost, answer: _, charge, filter, .. } = self.into_settings();
        RateLimitLayer::of(core, key, cost, Arc::new(answer), charge, filter)
    }

    /// Which answers are charged. Defaults to [`ChargeAlways`].
    pub fn charge_on<R2>(self, charge: R2) -> RateLimitLayer<B, K, C, A, R2, X> {
        let Settings { core, key, cost, answer, charge: _, filter, .. } = self.into_settings();
        RateLimitLayer::of(core, key, cost, answer, Arc::new(charge), filter)
    }

    /// Finds out at run time by which policy a key is counted. Defaults to the policy of the layer for all.
    ///
    /// Applies to the [key](Self::key) of the layer, not to those that were [added](Self::and). What it may take comes on top of what the
    /// store may: the [deadline](Self::deadline) for each.
    pub fn resolver(self, resolver: PolicyResolver) -> Self {
        self.change(|core| core.resolver = Some(resolver))
    }

    /// Finds out at run time by which policy a key is counted, as [`resolver`](Self::resolver) does, by a value from the request.
    ///
    /// `input` takes that value out of the request: the API key as the client has sent it, an account from the extensions, or any other part.
    ///
    /// An answer is kept for the key of the layer, and requests of one key ask once between them. So let the key and the input say the same
    /// client. A request without an input is counted by the policy of the layer, unless an answer for its key is known. Replaces a resolver that was
    /// named before.
    ///
    /// `input` is called only where no fresh answer is known, or where the request [waits](Self::wait) for room. The value is dropped when
    /// the resolver has answered, and never logged.
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
    ///     Ok(api_key == "the-api-key-of-alice") // or what the database says
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
    /// // The store keeps a digest of the API key, and the resolver is asked by the API key itself.
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

    /// Makes sure that quotas hold as far as they are meant to, so that the memory backend is not taken for a distributed one. This is
    /// about the backend as it is: while it fails, [`OnStoreError`] says what holds.
    ///
    /// # Errors
    ///
    /// [`ConfigError::ScopeTooSmall`] if they hold among fewer than `scope` says.
    pub fn require(self, scope: Reach) -> Result<Self, ConfigError>
    where
        B: RateLimitStore,
    {
        self.settings.core.store.scope().require(scope)?;
        Ok(self)
    }

    /// What happens to a request without a key. Defaults to [`OnMissingKey::Reject`].
    pub fn on_missing_key(self, policy: OnMissingKey) -> Self {
        self.change(|core| core.on_missing_key = policy)
    }

    /// What happens when the store fails or is late. Defaults to [`OnStoreError::Local`].
    pub fn on_store_error(self, policy: OnStoreError) -> Self {
        self.change(|core| core.on_store_error = policy)
    }

    /// Has a request that is over its limit wait for room, instead of turning it away, if that takes no longer than `wait`: for calls to somebody else's
    /// service, say, which should come later and not fail. Defaults to zero: it is turned away at once.
    ///
    /// Who waits stands in a line, one for each [key](Self::key) in this process, whose first alone asks the store again: when it was told to, when something
    /// is [given back](RateLimitHandle) by a request of this layer, and once a second in any case, since room may be made elsewhere. Each time that the first
    /// is admitted, twice as many of those in front may ask at once, as far as there is room for them, until one of them is denied: so a line ends where the
    /// quota has room for all who come, if at least twice as much can be had at once as is added while an answer takes its time: of a smaller
    /// [burst](super::Quota::burst) it may let no more than one through in the time of each answer. Nobody who comes later passes those who wait, but for one
    /// who was asked about at the same time and needs less. Between processes whoever asks first gets the room. A request is turned away at once if what it is
    /// told to wait is more than `wait`, or what it costs can never be had, and otherwise at the latest when that is over. Where the first of a line is told
    /// so, as after a [block](super::Limiter::block), those behind who cost as much and cannot wait that long either are turned away with it, and nobody asks
    /// for them. Each question that is answered counts as a [decision](super#metrics) in the metrics.
    ///
    /// Where the store or the resolver fails when the first of a line looks before it was told to, nothing changes: all of the line go on to wait, and what
    /// [`OnStoreError`] says is done once the time is over that the store has told at last.
    ///
    /// A request that counts for [several](Self::and) stands in the line of the one that has no room for longest, so it holds up nobody who does not count
    /// for that one too. Where it comes to its turn and another one has no room, it goes to the end of the line of that one.
    ///
    /// Up to 1,000 requests wait at the same time, or [`max_waiters_in_total`](Self::max_waiters_in_total); one more is turned away. A request that waits holds the place in
    /// the inner service that was reserved for it, and dropping it leaves the line; nothing was charged. One that is neither polled nor dropped when its turn
    /// has come holds up those behind it until it is a quarter of a second late, and for up to a second more where the next one is not polled either; once it
    /// is polled it is in front of them again.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::{ErrorResponder, BoxError, MemoryBackend, Policy, Quota, RateLimitLayer};
    /// use tower::{ServiceBuilder, ServiceExt, service_fn};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> Result<(), BoxError> {
    /// // What they allow us: ten calls a second, one after the other.
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
            core.patience = match core.patience.take() {
                _ if wait.is_zero() => None,
                Some(patience) => Some(WaitConfig { wait, ..patience }),
                None => Some(WaitConfig { wait, lines: Arc::new(Lines::new(core.max_waiters_in_total)) }),
            };
        })
    }

    /// How many requests may [wait](Self::wait) for room at the same time, in this process and for all clones of the layer that are made after this was said.
    /// Defaults to 1,000.
    ///
    /// All lines share this room, and one may take all of it: while many requests of one client wait, those of others that are over a limit are turned away at
    /// once. Where clients are not to be trusted with that, bound how many requests each may have under way, in front of this layer.
    pub fn max_waiters_in_total(self, waiters: usize) -> Self {
        self.change(|core| {
            core.max_waiters_in_total = waiters;
            if let Some(patience) = &mut core.patience {
                patience.lines = Arc::new(Lines::new(waiters));
            }
        })
    }

    /// How many processes share the quota: the part of it that each enforces with [`OnStoreError::Local`] is rounded up. Defaults to 1, and 0
    /// counts as that.
    pub fn replicas(self, replicas: u32) -> Self {
        self.change(|core| core.replicas = replicas.max(1))
    }

    /// When the layer stops to ask a store that fails. Defaults to [`CircuitBreaker::new`].
    pub fn circuit_breaker(self, breaker: CircuitBreaker) -> Self {
        self.change(|core| {
            core.circuit = Arc::new(Circuit::new(breaker));
            core.aside = Arc::new(Circuit::new(breaker));
            core.tripped_by = Arc::default();
        })
    }

    /// How long a decision may take in total; after that it counts as a store error. Defaults to 100 ms.
    ///
    /// With zero a store that does not answer at once is not asked, and the requests are turned away as with [`OnStoreError::Deny`], whatever was said:
    /// the [`StoreError`](crate::StoreError), and the log, have a [`ConfigError::ZeroTimeout`] as its source.
    ///
    /// A [resolver](Self::resolver) that has to be asked may take as long before, so the two may take twice as long in total. One that has
    /// answered before is waited for half as long.
    pub fn deadline(self, deadline: Duration) -> Self {
        self.change(|core| core.deadline = deadline)
    }

    /// Waits until no [correction](RateLimitHandle) is under way any more: for the end of a program, once it takes no more requests. For all clones of
    /// this layer, and those that were made of it by the methods above. It takes no longer than the [deadline](Self::deadline), unless
    /// others begin meanwhile.
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
        self.settings.core.pending.wait_idle().await;
    }
}

#[cfg(feature = "config")]
impl<B, K, C, A, R, X> RateLimitLayer<B, K, C, A, R, X> {
    /// Does without the store when others do, counts together with them then, and keeps its corrections where they do.
    pub(crate) fn having(self, common: &SharedState) -> Self {
        self.change(|core| {
            core.circuit = Arc::clone(&common.circuit);
            core.aside = Arc::clone(&common.aside);
            core.tripped_by = Arc::clone(&common.tripped_by);
            core.local = common.local.clone();
            core.pending = Arc::clone(&common.pending);
        })
    }

    /// Puts a screen in the place of the lists and further policies.
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
    fn of(core: LayerConfig<B>, key: Arc<K>, cost: Arc<C>, answer: Arc<A>, charge: Arc<R>, filter: Arc<X>) -> Self {
        let (settler, copies) = (OnceLock::new(), ShardedRefs::default());
        let settings =
            Settings { core, key, cost, answer, charge, filter, settler, copies, thread_slot: None, depth: 0 };
        Self { settings: Arc::new(settings) }
    }

    /// The settings to make others of: a copy, if there are services or clones that go on with these.
    fn into_settings(self) -> Settings<B, K, C, A, R, X> {
        Arc::unwrap_or_clone(self.settings)
    }

    fn change(self, change: impl FnOnce(&mut LayerConfig<B>)) -> Self {
        let Settings { mut core, key, cost, answer, charge, filter, .. } = self.into_settings();
        change(&mut core);
        Self::of(core, key, cost, answer, charge, filter)
    }

    pub(super) fn into_shared(self) -> Arc<Settings<B, K, C, A, R, X>> {
        self.settings
    }
}

// By hand: `derive` would ask for `K: Clone` and so on, which closures need not be.
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

// By hand: `derive` would ask for `B: Clone`.
impl<B> Clone for LayerConfig<B> {
    fn clone(&self) -> Self {
        Self {
            store: Arc::clone(&self.store),
            policy: self.policy.clone(),
            deadline: self.deadline,
            resolver: self.resolver.clone(),
            patience: self.patience.clone(),
            max_waiters_in_total: self.max_waiters_in_total,
            on_missing_key: self.on_missing_key,
            on_store_error: self.on_store_error,
            replicas: self.replicas,
            circuit: Arc::clone(&self.circuit),
            aside: Arc::clone(&self.aside),
            tripped_by: Arc::clone(&self.tripped_by),
            local: self.local.clone(),
            pending: Arc::clone(&self.pending),
            runtime: Arc::clone(&self.runtime),
        }
    }
}

/// What the clones of a layer share, and the services that it makes. A copy is the same settings: all that changes is behind pointers.
// Away from the count of references to it, which is written to with every request.
#[repr(align(64))]
pub(super) struct Settings<B, K, C, A, R, X> {
    pub(super) core: LayerConfig<B>,
    pub(super) key: Arc<K>,
    pub(super) cost: Arc<C>,
    pub(super) answer: Arc<A>,
    pub(super) charge: Arc<R>,
    pub(super) filter: Arc<X>,
    // Made by the first request that needs it here, out of what is above.
    settler: OnceLock<Arc<dyn Settle>>,
    // The same once more, each with a count of references of its own for the threads of a lane; and if these are such: of which, and of
    // how many copies in a row they are the last.
    copies: ShardedRefs<Arc<Self>>,
    thread_slot: Option<usize>,
    depth: u8,
}

// By hand: `derive` would ask for `K: Clone` and so on.
impl<B, K, C, A, R, X> Clone for Settings<B, K, C, A, R, X> {
    fn clone(&self) -> Self {
        Self {
            core: self.core.clone(),
            key: Arc::clone(&self.key),
            cost: Arc::clone(&self.cost),
            answer: Arc::clone(&self.answer),
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
    /// A thread that accepts connections clones a service for each, and the threads that serve these clone it once more. One step more
    /// would multiply the copies by the number of threads again, so whoever clones beyond that shares a count.
    const MAX_DEPTH: u8 = 2;

    /// The settings that this thread counts its references to: processors that count in the same place wait for each other.
    #[inline]
    pub(super) fn here(self: &Arc<Self>) -> &Arc<Self> {
        let (thread_slot, depth) = (Some(thread_slot()), self.depth + 1);
        if self.thread_slot == thread_slot || self.depth == Self::MAX_DEPTH {
            return self;
        }
        self.copies.get(|| Arc::new(Self { thread_slot, depth, ..Self::clone(self) }))
    }
}

impl<B: RateLimitStore + Clone + Send + Sync + 'static, K, C, A, R, X> Settings<B, K, C, A, R, X> {
    /// Who tells the store of corrections.
    pub(super) fn settler(&self) -> Arc<dyn Settle> {
        let make = || -> Arc<dyn Settle> {
            if let Ok(runtime) = Handle::try_current() {
                // Some request may have found one before.
                let _ = self.core.runtime.set(runtime);
            }
            Arc::new(Settler {
                policy: self.core.policy.clone(),
                store: B::clone(&self.core.store),
                local: self.core.local.backend().clone(),
                deadline: self.core.deadline,
                is_resolved: self.core.resolver.is_some(),
                lines: self.core.patience.as_ref().map(|patience| Arc::clone(&patience.lines)),
                runtime: Arc::clone(&self.core.runtime),
                pending: Arc::clone(&self.core.pending),
            })
        };
        Arc::clone(self.settler.get_or_init(make))
    }
}
