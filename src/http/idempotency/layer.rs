use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use ::http::{HeaderName, Method};
use tower_layer::Layer;

use super::fingerprint::Fingerprints;
use super::service::Idempotency;
use super::settings::Settings;
use crate::error::ConfigError;
use crate::http::key::header_name;
use crate::idempotency::store::{Claim, IdempotencyStore};
use crate::idempotency::{Coordinator, OnDisconnect, OnUnknown, ResponsePolicy};
use crate::on_failure::{OnMissingKey, OnStoreError};
use crate::reach::Reach;
use crate::responder::HttpResponder;
use crate::store::circuit::{CircuitBreaker, OutageTracker};

/// Executes a request once, and replays the response to retries with the same key. See the [module docs](crate::idempotency) for
/// examples.
///
/// By default this applies to POST and PATCH. Set [`methods`](Self::methods) for others: a PUT or a DELETE is executed each time,
/// also with a key.
///
/// The layer needs the [scope](Self::scope) of the caller, because two callers may choose the same key:
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
/// Type parameters: the scope, which is a [key](crate::ExtractKey), and the [responder](crate::responder::Responder) for
/// rejections.
#[must_use]
pub struct IdempotencyLayer<K = Unscoped, A = HttpResponder> {
    settings: Settings,
    scope: Arc<K>,
    responder: A,
}

/// The missing scope of a new layer, which is not usable yet.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Unscoped;

impl IdempotencyLayer {
    /// Stores records in `store`, which is a backend. Set a [scope](Self::scope) before you use the layer.
    ///
    /// A [deadline](Self::deadline) or [`max_runtime`](Self::max_runtime) of zero is invalid. The layer finds it with the first
    /// request that has a key. Each such request is rejected, 500 with HTTP, and logged.
    pub fn new(store: impl IdempotencyStore + Send + Sync + 'static) -> Self {
        let settings = Settings {
            coordinator: Coordinator::new(store),
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
            max_response: 64 * 1_024,
            max_body: 64 * 1_024 * 1_024,
            body_timeout: Duration::from_secs(10),
            keeps_cookies: false,
            policy: ResponsePolicy::default(),
            on_missing_key: OnMissingKey::default(),
            on_unknown: OnUnknown::default(),
            on_store_error: OnStoreError::default(),
            on_disconnect: OnDisconnect::default(),
            unprotected: Arc::new(OutageTracker::for_store()),
            methods_are_known: Arc::default(),
        };
        Self { settings, scope: Arc::new(Unscoped), responder: HttpResponder::default() }
    }
}

impl<K, A> IdempotencyLayer<K, A> {
    /// Identifies the caller: a closure, an extractor of the module `tollgate::http`, or a tuple of them; see
    /// [`ExtractKey`](crate::ExtractKey). The same key of another caller is another operation. A request without a scope is
    /// rejected, 400 with HTTP.
    ///
    /// Use a scope that callers cannot choose, or that is checked before this layer: credentials, or the user that an
    /// authentication layer found. It must also stay the same in retries. An access token that the client refreshes in between
    /// changes, so the handler would run again. Use the user or the account of the token then: the authentication layer can
    /// insert it into the extensions. Use [`GlobalKey`](crate::GlobalKey) for a service with one caller.
    ///
    /// Services that share a store and a path also share operations. Give each service its own prefix in the store, or include
    /// the service in the scope. If one layer serves several hosts, include the host.
    ///
    /// The method, and the path without its query, are always part of the scope. With axum and the feature `axum`, the layer also
    /// knows the prefixes that outer routers have removed from the path. Otherwise include the prefix in the scope, or two nested
    /// routes share operations. Either give each route a layer with its own scope, or use a scope that reads the prefix from the
    /// request:
    ///
    /// ```
    /// use tollgate::{IdempotencyLayer, IntoKey, MemoryBackend};
    ///
    /// /// The outer router inserts it into the extensions of the request.
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
        let Self { settings, scope: _, responder } = self;
        IdempotencyLayer { settings, scope: Arc::new(scope), responder }
    }

    /// Creates the responses to rejected requests. Defaults to [`HttpResponder`]. For gRPC use `GrpcResponder` of the module
    /// `tollgate::grpc`. A responder of your own implements [`Responder`](crate::responder::Responder) with responses that have an
    /// [`IdempotentBody`](crate::http::IdempotentBody), which you can create from `Bytes`. It may pass other rejections on to
    /// `HttpResponder`.
    pub fn responder<A2>(self, responder: A2) -> IdempotencyLayer<K, A2> {
        let Self { settings, scope, responder: _ } = self;
        IdempotencyLayer { settings, scope, responder }
    }

    fn with(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(&mut self.settings);
        self
    }

    /// The methods that the layer handles. Defaults to POST and PATCH. All other requests pass without a record, also with a key.
    /// Unless you call this, the layer logs the first such request that has a key and whose method is not
    /// [safe](Method::is_safe). Requests that an outer layer has recorded are not logged.
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

    /// The header with the key. Defaults to `Idempotency-Key`.
    ///
    /// # Panics
    ///
    /// If `name` is not a valid header name.
    pub fn header(self, name: impl TryInto<HeaderName>) -> Self {
        self.with(|settings| settings.header = header_name(name))
    }

    /// The headers in the fingerprint, in addition to the method, the path with its query, and the body. Requests under one key
    /// that differ in them are different requests. Defaults to none.
    ///
    /// A change of this setting changes all fingerprints. Retries of earlier requests are then rejected as different requests,
    /// 422 with HTTP, while their records are stored. While processes with the old and the new setting run, a retry is also
    /// rejected if the first request is in flight in a process with the other setting.
    ///
    /// # Panics
    ///
    /// If a name is not a valid header name.
    pub fn fingerprint_headers(self, names: impl IntoIterator<Item: TryInto<HeaderName>>) -> Self {
        self.with(|settings| settings.headers = names.into_iter().map(header_name).collect())
    }

    /// The secret of the fingerprints, the same in all replicas. With it, a reader of the store cannot guess requests from their
    /// fingerprints. Defaults to no secret.
    ///
    /// A change of the secret changes all fingerprints, with the effects of [`fingerprint_headers`](Self::fingerprint_headers).
    /// So do not rotate it. If you must, also change the location of the records, such as the prefix of the backend. Retries of
    /// earlier requests are then executed again.
    pub fn fingerprint_secret(self, secret: impl AsRef<[u8]>) -> Self {
        self.with(|settings| settings.fingerprints = Fingerprints::new(secret.as_ref()))
    }

    /// How long a response is stored. Defaults to a day. Clamped to [`Claim::MIN_RETENTION`] and [`Claim::MAX_RETENTION`].
    pub fn retention(self, retention: Duration) -> Self {
        self.with(|settings| settings.retention = retention.clamp(Claim::MIN_RETENTION, Claim::MAX_RETENTION))
    }

    /// The lease of a running request. If its process does not renew the lease in time, the outcome of the request is unknown.
    /// Defaults to 15 s. The process renews it after each third of that. Clamped to [`Claim::MIN_LEASE`] and [`Claim::MAX_LEASE`].
    pub fn lease(self, lease: Duration) -> Self {
        self.with(|settings| settings.lease = lease.clamp(Claim::MIN_LEASE, Claim::MAX_LEASE))
    }

    /// How long a request waits for the same request in flight. Defaults to zero: it is rejected at once, 409 with HTTP. At most
    /// a day.
    ///
    /// The waiting request asks the store after each notification, once a second, and when the other lease ends. Meanwhile it keeps its
    /// reserved inner service, and counts as a [running](Self::max_running) request.
    pub fn wait(self, wait: Duration) -> Self {
        self.with(|settings| settings.wait = wait.min(Duration::from_secs(86_400)))
    }

    /// How many requests may [wait](Self::wait) at a time. Defaults to 1,000, of which one caller may use half. The
    /// [scope](Self::scope) identifies the caller. One more request does not wait, and is rejected.
    pub fn max_waiters_in_total(self, requests: usize) -> Self {
        self.with(|settings| settings.max_waiting = requests)
    }

    /// How long a handler may run, until its response has ended. Defaults to 5 minutes. It is dropped then, and its outcome is
    /// unknown.
    ///
    /// For a response that is too large to be stored, the layer stores the status early, once the handler has stopped reading the
    /// request. From then on, this limits only the time without progress, so a client that reads slowly is not cut off.
    pub fn max_runtime(self, max_runtime: Duration) -> Self {
        self.with(|settings| settings.max_runtime = max_runtime)
    }

    /// How many handlers may run in this process, including those whose client has disconnected. Defaults to 10,000. One more
    /// request is rejected, 503 with HTTP. One caller may use [half of them](Self::max_running_per_scope).
    pub fn max_running(self, handlers: usize) -> Self {
        self.with(|settings| settings.max_running = handlers)
    }

    /// How many handlers of one caller may run in this process, including those whose client has disconnected. The
    /// [scope](Self::scope) identifies the caller. Defaults to half of [`max_running`](Self::max_running), and at least one. One
    /// more request is rejected, 429 with HTTP.
    ///
    /// If all requests come from one caller, as with [`GlobalKey`](crate::GlobalKey), set it to the value of `max_running`.
    pub fn max_running_per_scope(self, handlers: usize) -> Self {
        self.with(|settings| settings.max_running_per_scope = Some(handlers))
    }

    /// How many records one caller may have in the store, over all routes and processes. The [scope](Self::scope) identifies the
    /// caller. Defaults to 1,000,000. A request with one more key is rejected, 429 with HTTP. Keys with a record are not
    /// affected.
    ///
    /// A record is stored for the [retention](Self::retention). With a day, the default allows 11 new keys per second. Raise it
    /// for callers that send more.
    ///
    /// * In memory the count is exact. The backend may reject earlier, if the caller has used its
    ///   [share](crate::MemoryBackend#memory) of the backend's memory.
    /// * With one Redis server, a record counts from its start for the lease and the retention, or for ten minutes after a
    ///   release. So it may count for up to a lease longer than it is stored, or for less time if its handler runs longer than
    ///   the lease. A record that an operator [forgets](crate::idempotency::IdempotencyAdmin::forget) counts until it would have expired.
    /// * On a cluster, the records of a caller are counted in 64 parts, selected by key. Each part has a 64th of the limit, and a
    ///   margin for uneven parts. So a caller may have up to `max + 32 * sqrt(max) + 400` records. While the slot of a part
    ///   moves between nodes, new keys of that part can fail as if Redis did not reply.
    pub fn max_records_per_scope(self, max: u64) -> Self {
        self.with(|settings| settings.max_records_per_scope = max)
    }

    /// The maximum size of a stored response in bytes, including headers and trailers. Defaults to 64 KiB. Of a larger response
    /// only the status is stored. A retry is then rejected, 409 with HTTP, and the handler does not run again.
    pub fn max_response(self, bytes: usize) -> Self {
        self.with(|settings| settings.max_response = bytes)
    }

    /// The maximum size of a request body in bytes. Defaults to 64 MiB. A request that announces more is rejected, 413 with HTTP.
    /// If a body turns out to be larger, its handler is dropped, the client gets the same response, and the outcome is unknown.
    ///
    /// The layer does not buffer bodies, so this limit is for endless ones. What a handler buffers needs a limit of its own. If a
    /// handler has spawned a task that reads the body, that task waits for more of it until it is aborted.
    pub fn max_body(self, bytes: u64) -> Self {
        self.with(|settings| settings.max_body = bytes)
    }

    /// How long the body of a retry may stall while the layer compares it with the first request. If a retry executes the handler
    /// again, this applies to the part of the body that the layer compares after the handler has responded. Defaults to 10 s.
    ///
    /// The time restarts with each part of the body that is not empty. The whole comparison may take up to
    /// [`max_runtime`](Self::max_runtime). A retry that is too slow is rejected, 408 with HTTP and `UNAVAILABLE` with gRPC. The
    /// client may send it again.
    ///
    /// Some clients send the next part of the body only after a part of the response, as with bidirectional gRPC streams. Such a
    /// call cannot be retried: a replay needs the whole body first, so each retry ends with this timeout.
    pub fn body_timeout(self, timeout: Duration) -> Self {
        self.with(|settings| settings.body_timeout = timeout)
    }

    /// Whether `Set-Cookie` is stored. Defaults to false, because a cookie belongs to the client that sent the first request.
    pub fn keep_cookies(self, keeps: bool) -> Self {
        self.with(|settings| settings.keeps_cookies = keeps)
    }

    /// Which responses are stored. Defaults to [`ResponsePolicy::SafeRetry`].
    pub fn response_policy(self, policy: ResponsePolicy) -> Self {
        self.with(|settings| settings.policy = policy)
    }

    /// The name of the layer in metrics and logs. Defaults to `idempotency`.
    pub fn name(self, name: impl AsRef<str>) -> Self {
        self.with(|settings| {
            settings.coordinator = settings.coordinator.with(|options| options.name = name.as_ref().into());
        })
    }

    /// The longest duration of a store call. Defaults to 100 ms.
    pub fn deadline(self, deadline: Duration) -> Self {
        self.with(|settings| settings.coordinator = settings.coordinator.with(|options| options.deadline = deadline))
    }

    /// When to stop calling a failing store for new requests. Defaults to [`CircuitBreaker::new`]. Meanwhile, requests are
    /// [rejected](OnStoreError::Deny) or [pass](OnStoreError::Allow) at once. Running requests are still renewed and completed.
    pub fn circuit_breaker(self, breaker: CircuitBreaker) -> Self {
        self.with(|settings| settings.coordinator = settings.coordinator.with(|options| options.breaker = breaker))
    }

    /// What to do with a request without a key. Defaults to [`OnMissingKey::Reject`].
    pub fn on_missing_key(self, on_missing_key: OnMissingKey) -> Self {
        self.with(|settings| settings.on_missing_key = on_missing_key)
    }

    /// What to do with a request whose outcome is unknown. Defaults to [`OnUnknown::Reject`].
    pub fn on_unknown(self, on_unknown: OnUnknown) -> Self {
        self.with(|settings| settings.on_unknown = on_unknown)
    }

    /// What to do with a request if the store fails before its execution. Defaults to [`OnStoreError::Deny`].
    pub fn on_store_error(self, on_store_error: OnStoreError) -> Self {
        self.with(|settings| settings.on_store_error = on_store_error)
    }

    /// What to do with a handler whose client disconnects. Defaults to [`OnDisconnect::Finish`].
    pub fn on_disconnect(self, on_disconnect: OnDisconnect) -> Self {
        self.with(|settings| settings.on_disconnect = on_disconnect)
    }

    /// Checks that the reach of the backend is at least `needed`. For instance, [`Reach::Redis`] refuses the memory backend.
    ///
    /// # Errors
    ///
    /// [`ConfigError::ReachTooSmall`] if the reach of the backend is smaller than `needed`.
    pub fn require(self, needed: Reach) -> Result<Self, ConfigError> {
        self.settings.coordinator.reach().require(needed)?;
        Ok(self)
    }

    /// Waits until no handler runs and no background store call is left. Call it at the end of a program, after the last request.
    ///
    /// It covers all clones of this layer that were made after the last call of [`name`](Self::name),
    /// [`deadline`](Self::deadline) and [`circuit_breaker`](Self::circuit_breaker). The [shutdown of the
    /// backend](crate::backend#shutdown) covers all layers, and has a deadline.
    pub async fn wait_idle(&self) {
        self.settings.coordinator.wait_idle().await;
    }

    pub(super) fn into_parts(self) -> (Settings, Arc<K>, A) {
        (self.settings, self.scope, self.responder)
    }
}

impl<S, K, A: Clone> Layer<S> for IdempotencyLayer<K, A> {
    type Service = Idempotency<S, K, A>;

    fn layer(&self, inner: S) -> Self::Service {
        Idempotency::new(inner, self.clone())
    }
}

// Hand-written, because `derive` would require `K: Clone`.
impl<K, A: Clone> Clone for IdempotencyLayer<K, A> {
    fn clone(&self) -> Self {
        Self { settings: self.settings.clone(), scope: Arc::clone(&self.scope), responder: self.responder.clone() }
    }
}

impl<K, A> fmt::Debug for IdempotencyLayer<K, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.describe::<K>(f, "IdempotencyLayer")
    }
}
