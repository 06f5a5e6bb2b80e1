use std::error::Error as _;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ::http::{HeaderName, Method, Request};
use tower_layer::Layer;

use super::execution::FOREVER;
use super::fingerprint::{Fingerprints, Pace};
use super::service::Idempotency;
use crate::error::{ConfigError, StoreError};
use crate::http::key::header_name;
use crate::idempotency::{
    Claim, Coordinator, IdempotencyHandle, IdempotencyStore, MostRunning, OnDisconnect, OnUnknown, Rejection,
    ResponsePolicy, Verdict,
};
use crate::lock::Reach;
use crate::on_failure::{OnMissingKey, OnStoreError};
use crate::responder::{HttpResponder, Responder};
use crate::store::circuit::{CircuitBreaker, OutageTracker};

/// Serves the same request once, and answers it as often as it comes. See the [module docs](crate::idempotency) for examples.
///
/// POST and PATCH that is, unless [`methods`](Self::methods) says otherwise: a PUT or a DELETE is served as often as it comes, also with a key.
///
/// It has to be told [who is calling](Self::scope), since two callers may choose the same key:
///
/// ```compile_fail
/// use axum::{Router, routing::post};
/// use tollgate::{IdempotencyLayer, MemoryBackend};
///
/// let app: Router = Router::new()
///     .route("/payments", post(async || "paid"))
///     .layer(IdempotencyLayer::new(MemoryBackend::new()));
/// ```
///
/// Type parameters: the scope, which is a [key](crate::ExtractKey), and what a rejection [becomes](crate::responder::Responder).
#[must_use]
pub struct IdempotencyLayer<K = Unscoped, A = HttpResponder> {
    settings: Settings,
    scope: Arc<K>,
    answer: A,
}

/// The scope of a layer that was not told one: of no use until it is.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Unscoped;

/// What has nothing to do with the type of requests and answers.
#[derive(Clone)]
pub(super) struct Settings {
    pub(super) home: Arc<Coordinator>,
    pub(super) fingerprints: Fingerprints,
    pub(super) header: HeaderName,
    pub(super) headers: Arc<[HeaderName]>,
    pub(super) methods: Arc<[Method]>,
    pub(super) lease: Duration,
    pub(super) retention: Duration,
    pub(super) wait: Duration,
    pub(super) max_waiting: usize,
    pub(super) max_runtime: Duration,
    pub(super) max_running: usize,
    // `None` is half of them.
    pub(super) max_running_per_scope: Option<usize>,
    pub(super) max_records_per_scope: u64,
    pub(super) max_answer: usize,
    pub(super) max_body: u64,
    pub(super) body_timeout: Duration,
    pub(super) keeps_cookies: bool,
    pub(super) keep: ResponsePolicy,
    pub(super) on_missing_key: OnMissingKey,
    pub(super) on_unknown: OnUnknown,
    pub(super) on_store_error: OnStoreError,
    pub(super) on_disconnect: OnDisconnect,
    // Whether the log has been told that requests pass without a record.
    unprotected: Arc<OutageTracker>,
    // Whether it is known which methods are served once: by `methods`, or since the log has been told.
    methods_are_known: Arc<AtomicBool>,
}

impl IdempotencyLayer {
    /// Keeps records in `store`, which is a backend. It needs a [scope](Self::scope) before it can be used.
    ///
    /// A setting that cannot work (a [deadline](Self::deadline) or [`max_runtime`](Self::max_runtime) of zero) is found with the first request that has a key: each is
    /// answered 500 with HTTP then, and the log has a line.
    pub fn new(store: impl IdempotencyStore + Send + Sync + 'static) -> Self {
        let settings = Settings {
            home: Arc::new(Coordinator::new(store)),
            fingerprints: Fingerprints::new(b""),
            header: HeaderName::from_static("idempotency-key"),
            headers: Arc::new([]),
            methods: Arc::new([Method::POST, Method::PATCH]),
            lease: Duration::from_secs(15),
            retention: Duration::from_secs(86_400),
            wait: Duration::ZERO,
            max_waiting: 1_000,
            max_runtime: Duration::from_secs(300),
            max_running: 10_000,
            max_running_per_scope: None,
            max_records_per_scope: 1_000_000,
            max_answer: 64 * 1_024,
            max_body: 64 * 1_024 * 1_024,
            body_timeout: Duration::from_secs(10),
            keeps_cookies: false,
            keep: ResponsePolicy::default(),
            on_missing_key: OnMissingKey::default(),
            on_unknown: OnUnknown::default(),
            on_store_error: OnStoreError::default(),
            on_disconnect: OnDisconnect::default(),
            unprotected: Arc::new(OutageTracker::of_a_store()),
            methods_are_known: Arc::default(),
        };
        Self { settings, scope: Arc::new(Unscoped), answer: HttpResponder::default() }
    }
}

impl<K, A> IdempotencyLayer<K, A> {
    /// Who is calling: a closure, an extractor of the module `tollgate::http`, or a tuple of them; see
    /// [`ExtractKey`](crate::ExtractKey). The same key of another caller is another operation. A request without a scope is turned away,
    /// 400 with HTTP.
    ///
    /// What distinguishes callers has to be something that they cannot choose, or that is checked before this layer: credentials, or a
    /// user that was found by them. It has to be the same when the client tries again, too: an access token that is refreshed in between is
    /// not, and the handler would run a second time. Take the user or the account that it stands for then, which whatever checks it
    /// can leave in the extensions. [`GlobalKey`](crate::GlobalKey) is for services with one caller.
    ///
    /// Services that share a store and a path share operations, so give each a prefix of its own in the store, or say in the scope which one it is; and
    /// the host, where one layer serves several.
    ///
    /// The route is part of it without being said: the method, and the path without its query. A path of which a router in front of this layer
    /// has taken a prefix away is known as a whole with axum (feature `axum`). Without that feature, and with other routers, the prefix has to be said, or two
    /// nested routes are one operation: by a layer of its own scope for each, or one that finds what the request was for.
    ///
    /// ```
    /// use tollgate::{IdempotencyLayer, IntoKey, MemoryBackend};
    ///
    /// /// In the extensions of a request, by whatever takes the prefix away.
    /// #[derive(Clone)]
    /// struct Prefix(&'static str);
    ///
    /// # fn guard<B>() -> IdempotencyLayer<impl tollgate::ExtractKey<http::Request<B>>> {
    /// IdempotencyLayer::new(MemoryBackend::new()).scope(|request: &http::Request<B>| {
    ///     let caller = request.headers().get("x-api-key")?.to_str().ok()?;
    ///     (caller, request.extensions().get::<Prefix>()?.0).into_key()
    /// })
    /// # }
    /// ```
    pub fn scope<K2>(self, scope: K2) -> IdempotencyLayer<K2, A> {
        let Self { settings, scope: _, answer } = self;
        IdempotencyLayer { settings, scope: Arc::new(scope), answer }
    }

    /// What a rejection becomes. Defaults to [`HttpResponder`]; `GrpcResponder` of the module `tollgate::grpc` is for gRPC. An answer of one's own is a
    /// type that implements [`Responder`] with responses that have an [`IdempotentBody`](crate::http::IdempotentBody), which is made of
    /// `Bytes`; what it has nothing to say about it may pass on to `HttpResponder`.
    pub fn responder<A2>(self, answer: A2) -> IdempotencyLayer<K, A2> {
        let Self { settings, scope, answer: _ } = self;
        IdempotencyLayer { settings, scope, answer }
    }

    fn with(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(&mut self.settings);
        self
    }

    /// Which methods are served once. Defaults to POST and PATCH. All others pass without a record, also with a key: unless this is said, the log has a
    /// line for the first of them that has one and is not [safe](Method::is_safe), unless a layer further outside has a record of it.
    ///
    /// ```
    /// use axum::{Router, body::Body, http::Request, routing::put};
    /// use http::Method;
    /// use tollgate::{IdempotencyLayer, MemoryBackend, http::header};
    /// use tower::ServiceExt;
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
    /// let guard = IdempotencyLayer::new(MemoryBackend::new())
    ///     .scope(header("x-api-key"))
    ///     .methods([Method::POST, Method::PATCH, Method::PUT, Method::DELETE]);
    /// let app: Router = Router::new().route("/balance", put(async || "moved once")).layer(guard);
    ///
    /// let transfer = || Request::put("/balance").header("x-api-key", "of alice").header("idempotency-key", "7");
    /// app.clone().oneshot(transfer().body(Body::empty())?).await?;
    /// let again = app.oneshot(transfer().body(Body::empty())?).await?;
    /// assert_eq!(again.headers()["idempotent-replayed"], "true");
    /// # Ok(())
    /// # }
    /// ```
    pub fn methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.with(|settings| {
            settings.methods = methods.into_iter().collect();
            settings.methods_are_known = Arc::new(AtomicBool::new(true));
        })
    }

    /// The header that the key is in. Defaults to `Idempotency-Key`.
    ///
    /// # Panics
    ///
    /// If `name` cannot be that of a header.
    pub fn header(self, name: impl TryInto<HeaderName>) -> Self {
        self.with(|settings| settings.header = header_name(name))
    }

    /// Which headers make another request if they differ, beside the method, the path with its query, and the body. Defaults to none.
    ///
    /// Other headers make other fingerprints: to a layer that was told so every request before is another one, so its duplicates are refused, 422 with
    /// HTTP, for as long as its record is kept. While processes of both kinds run, so are those of requests in flight in the other kind.
    ///
    /// # Panics
    ///
    /// If one of them cannot be that of a header.
    pub fn fingerprint_headers(self, names: impl IntoIterator<Item: TryInto<HeaderName>>) -> Self {
        self.with(|settings| settings.headers = names.into_iter().map(header_name).collect())
    }

    /// What fingerprints are made with, the same in all replicas, so that nobody who reads the store can guess requests. Defaults to
    /// no secret.
    ///
    /// Another secret makes other fingerprints, with what that means for records that there are: see
    /// [`fingerprint_headers`](Self::fingerprint_headers). So it is one to keep, and to change together with where records are, for instance the prefix
    /// of the backend, if clients may be served anew.
    pub fn fingerprint_secret(self, secret: impl AsRef<[u8]>) -> Self {
        self.with(|settings| settings.fingerprints = Fingerprints::new(secret.as_ref()))
    }

    /// How long an answer is kept. Defaults to a day; from [`Claim::MIN_RETENTION`] to [`Claim::MAX_RETENTION`], and what is beyond is cut.
    pub fn retention(self, retention: Duration) -> Self {
        self.with(|settings| settings.retention = retention.clamp(Claim::MIN_RETENTION, Claim::MAX_RETENTION))
    }

    /// How long a process may be silent before what it does is of unknown outcome. Defaults to 15 s, renewed after a third of that; from
    /// [`Claim::MIN_LEASE`] to [`Claim::MAX_LEASE`], and what is beyond is cut.
    pub fn lease(self, lease: Duration) -> Self {
        self.with(|settings| settings.lease = lease.clamp(Claim::MIN_LEASE, Claim::MAX_LEASE))
    }

    /// How long a request waits for the answer of the same request that is being served. Defaults to zero: it is turned away, 409 with HTTP.
    ///
    /// It is told by the store when the other one is done, and looks once a second in any case, and when the other one's lease would end. A request that waits holds the place in the
    /// inner service that was reserved for it, and counts as one that is [running](Self::max_running). At most a day.
    pub fn wait(self, wait: Duration) -> Self {
        self.with(|settings| settings.wait = wait.min(Duration::from_secs(86_400)))
    }

    /// How many requests may [wait](Self::wait) at a time. Defaults to 1,000. One caller, which is what the [scope](Self::scope) says, takes half of
    /// that at most. One more request is rejected as if it did not wait.
    pub fn max_waiters_in_total(self, requests: usize) -> Self {
        self.with(|settings| settings.max_waiting = requests)
    }

    /// How long a handler may take, its body included. Defaults to 5 minutes. It is dropped then, and what came of it is unknown.
    ///
    /// Once an answer is too large to be kept, and no more of its request is read, which the record says then, it may take as long as it does not stand
    /// still for that time: a client that reads it slowly is no reason to cut it off.
    pub fn max_runtime(self, max_runtime: Duration) -> Self {
        self.with(|settings| settings.max_runtime = max_runtime)
    }

    /// How many handlers may be at work, those included whose client has gone. Defaults to 10,000. One more is turned away, 503 with HTTP.
    /// One caller may have [half of them](Self::max_running_per_scope).
    pub fn max_running(self, handlers: usize) -> Self {
        self.with(|settings| settings.max_running = handlers)
    }

    /// How many handlers of one caller, which is what the [scope](Self::scope) says, may be at work in this process, including those whose client has
    /// gone. Defaults to half of [`max_running`](Self::max_running), and at least one. One more is turned away, 429 with HTTP.
    ///
    /// Set it to `max_running` where all requests come from one caller, as with [`GlobalKey`](crate::GlobalKey).
    pub fn max_running_per_scope(self, handlers: usize) -> Self {
        self.with(|settings| settings.max_running_per_scope = Some(handlers))
    }

    /// How many records one caller, which is what the [scope](Self::scope) says, may have in the store, on all routes and in all processes. Defaults to
    /// 1,000,000. A request under one more key is turned away, 429 with HTTP. A key that has a record is answered as ever.
    ///
    /// A record is kept for the [retention](Self::retention), so at a day the default is 11 new keys a second. Raise it where one caller sends more.
    ///
    /// * In memory the count is exact. The backend may refuse sooner, where a caller has its [share](crate::MemoryBackend#memory) of the room.
    /// * With one Redis server a record counts from its beginning for the lease and the retention, or for ten minutes where it is given
    ///   back: by up to a lease longer than it lives, and less for a handler that outlives its lease. A record that an operator forgets counts until it
    ///   would have ended.
    /// * On a cluster the records of a caller are counted in 64 parts, by their keys. Each part has a 64th of the bound, and room for chance, so a caller
    ///   may have up to `most + 32 * sqrt(most) + 400` records. While the slot of a part moves between nodes, new keys of that part can fail as if Redis
    ///   did not answer.
    pub fn max_records_per_scope(self, most: u64) -> Self {
        self.with(|settings| settings.max_records_per_scope = most)
    }

    /// How many bytes of an answer are kept at the most, headers and trailers included. Defaults to 64 KiB. Of a larger one the status is
    /// kept; who asks for it again is turned away, 409 with HTTP, and the handler is not run again.
    pub fn max_answer(self, bytes: usize) -> Self {
        self.with(|settings| settings.max_answer = bytes)
    }

    /// How many bytes the body of a request may have. Defaults to 64 MiB. A request that says it has more is turned away, 413 with HTTP; the
    /// handler of one that turns out to have more is dropped there, its caller is answered the same, and what came of it is unknown.
    ///
    /// Nothing of a body is collected, so this is for those that never end; what a handler collects has a limit of its own. A task that a
    /// handler has started to read the body waits for more of it until somebody aborts the task.
    pub fn max_body(self, bytes: u64) -> Self {
        self.with(|settings| settings.max_body = bytes)
    }

    /// How long the body of a repeat may stand still while it is compared with the one before, and what the handler of a next attempt has left of
    /// its body. Defaults to 10 s.
    ///
    /// Each part of the body that is not empty starts the time again. As a whole the comparison may take as long as [`max_runtime`](Self::max_runtime). A repeat
    /// that is too slow is answered by 408 with HTTP and `UNAVAILABLE` with gRPC: the client may send it again.
    ///
    /// A call whose client sends the next part of the body only after a part of the answer, as with bidirectional streams of gRPC, cannot be repeated:
    /// the answer of the first call is replayed once the whole body is known to be the same. Each repeat ends with this timeout.
    pub fn body_timeout(self, timeout: Duration) -> Self {
        self.with(|settings| settings.body_timeout = timeout)
    }

    /// Whether `Set-Cookie` is kept with the answer. Defaults to false: a cookie is for the one who asked first.
    pub fn keep_cookies(self, keeps: bool) -> Self {
        self.with(|settings| settings.keeps_cookies = keeps)
    }

    /// Which answers are kept. Defaults to [`ResponsePolicy::SafeRetry`].
    pub fn keep(self, keep: ResponsePolicy) -> Self {
        self.with(|settings| settings.keep = keep)
    }

    /// What the layer is called in metrics and logs. Defaults to `idempotency`.
    pub fn name(self, name: impl AsRef<str>) -> Self {
        self.with(|settings| settings.home = Arc::new(settings.home.with(|terms| terms.name = name.as_ref().into())))
    }

    /// How long one call of the store may take. Defaults to 100 ms.
    pub fn deadline(self, deadline: Duration) -> Self {
        self.with(|settings| settings.home = Arc::new(settings.home.with(|terms| terms.limit = deadline)))
    }

    /// When the layer stops to ask a store that fails before it serves a request. Defaults to [`CircuitBreaker::new`]. Meanwhile requests
    /// are [turned away](OnStoreError::Deny) or [pass](OnStoreError::Allow) at once; what is at work is still renewed and completed.
    pub fn circuit_breaker(self, breaker: CircuitBreaker) -> Self {
        self.with(|settings| settings.home = Arc::new(settings.home.with(|terms| terms.breaker = breaker)))
    }

    /// What happens to a request that has no key. Defaults to [`OnMissingKey::Reject`].
    pub fn on_missing_key(self, on_missing_key: OnMissingKey) -> Self {
        self.with(|settings| settings.on_missing_key = on_missing_key)
    }

    /// What happens to a request that was begun before, with unknown outcome. Defaults to [`OnUnknown::Reject`].
    pub fn on_unknown(self, on_unknown: OnUnknown) -> Self {
        self.with(|settings| settings.on_unknown = on_unknown)
    }

    /// What happens to a request when the store fails before it is served. Defaults to [`OnStoreError::Deny`].
    pub fn on_store_error(self, on_store_error: OnStoreError) -> Self {
        self.with(|settings| settings.on_store_error = on_store_error)
    }

    /// What happens to a handler whose client goes away. Defaults to [`OnDisconnect::Finish`].
    pub fn on_disconnect(self, on_disconnect: OnDisconnect) -> Self {
        self.with(|settings| settings.on_disconnect = on_disconnect)
    }

    /// Makes sure that requests are served once among as many as they are meant to, so that the memory backend is not taken for a
    /// distributed one.
    ///
    /// # Errors
    ///
    /// [`ConfigError::ScopeTooSmall`] if that is fewer than `scope` says.
    pub fn require(self, scope: Reach) -> Result<Self, ConfigError> {
        self.settings.home.scope().require(scope)?;
        Ok(self)
    }

    /// Waits until no handler is at work any more, and the store knows what came of them: for the end of a program, once it takes no more
    /// requests. For all clones of this layer that were made after its
    /// [`name`](Self::name), [`deadline`](Self::deadline) and [`circuit_breaker`](Self::circuit_breaker) were said.
    pub async fn wait_idle(&self) {
        self.settings.home.wait_idle().await;
    }

    pub(super) fn into_parts(self) -> (Settings, Arc<K>, A) {
        (self.settings, self.scope, self.answer)
    }
}

impl Settings {
    pub(super) fn most_running(&self) -> MostRunning {
        let half = (self.max_running / 2).max(1);
        MostRunning { in_total: self.max_running, per_scope: self.max_running_per_scope.unwrap_or(half) }
    }

    /// How long a body may take that is compared: as a whole no longer than the handler may, its body included.
    pub(super) fn pace(&self) -> Pace {
        Pace { stall: self.body_timeout.min(FOREVER), total: self.max_runtime.min(FOREVER) }
    }

    /// Whether there is time for the store, and for the handler.
    pub(super) fn check_times(&self) -> Result<(), ConfigError> {
        self.home.check_times(Some(self.max_runtime))
    }

    /// Whether a request passes without a record because of this, and if so the log is told.
    pub(super) fn passes(&self, error: &StoreError) -> bool {
        if self.on_store_error == OnStoreError::Deny {
            return false;
        }
        if self.unprotected.begins() {
            let cause = error.source().map(tracing::field::display);
            tracing::warn!(layer = &*self.home.terms().name, %error, cause, "idempotency store fails: requests are served without a record");
        }
        true
    }

    /// Tells the log of a request that passes without a record, if it is the first with a key for which that may not be meant.
    pub(super) fn passed<B>(&self, request: &Request<B>) {
        let (method, headers) = (request.method(), request.headers());
        if method.is_safe() || self.methods_are_known.load(Ordering::Relaxed) || !headers.contains_key(&self.header) {
            return;
        }
        // A layer further outside has one.
        if request.extensions().get::<IdempotencyHandle>().is_some() {
            return;
        }
        if !self.methods_are_known.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                layer = &*self.home.terms().name, %method,
                "a request with an idempotency key is served without a record: only POST and PATCH are served once unless \
                 `IdempotencyLayer::methods` names others, which also keeps this line away"
            );
        }
    }

    pub(super) fn answered(&self) {
        if self.unprotected.ends() {
            let layer = &*self.home.terms().name;
            tracing::info!(layer, "idempotency store answers again: requests are served once");
        }
    }

    /// Turns a request away, and counts it.
    pub(super) fn reject<A: Responder<Rejection, Res, E>, Res, E>(
        &self,
        answer: &A,
        rejection: Rejection,
    ) -> Result<A::Response, A::Error> {
        self.home.meters().decided(Verdict::of(&rejection));
        answer.reject(rejection)
    }

    pub(super) fn describe<K>(&self, f: &mut fmt::Formatter<'_>, name: &str) -> fmt::Result {
        f.debug_struct(name)
            .field("scope", &std::any::type_name::<K>())
            .field("lease", &self.lease)
            .field("retention", &self.retention)
            .field("deadline", &self.home.terms().limit)
            .field("keep", &self.keep)
            .field("on_missing_key", &self.on_missing_key)
            .field("on_unknown", &self.on_unknown)
            .field("on_store_error", &self.on_store_error)
            .field("on_disconnect", &self.on_disconnect)
            .finish_non_exhaustive()
    }
}

impl<S, K, A: Clone> Layer<S> for IdempotencyLayer<K, A> {
    type Service = Idempotency<S, K, A>;

    fn layer(&self, inner: S) -> Self::Service {
        Idempotency::new(inner, self.clone())
    }
}

// By hand: `derive` would ask for `K: Clone`.
impl<K, A: Clone> Clone for IdempotencyLayer<K, A> {
    fn clone(&self) -> Self {
        Self { settings: self.settings.clone(), scope: Arc::clone(&self.scope), answer: self.answer.clone() }
    }
}

impl<K, A> fmt::Debug for IdempotencyLayer<K, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.describe::<K>(f, "IdempotencyLayer")
    }
}
