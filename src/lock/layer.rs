use std::error::Error;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use tower_layer::Layer;

use super::layer_options::{OnLoss, ReleaseAt};
use super::locks::Locks;
use super::metrics::Outcome;
use super::options::Replication;
use super::rejection::Full;
use super::running::{RunningPermit, RunningPermits};
use super::rw::RwLocks;
use super::semaphore::Semaphore;
use super::service::{Detach, Lock};
use super::store::LockStore;
use crate::error::{ConfigError, StoreError};
use crate::key::Key;
use crate::on_failure::{OnMissingKey, OnStoreError};
use crate::reach::Reach;
use crate::responder::HttpResponder;
use crate::store::circuit::{CircuitBreaker, OutageTracker};

/// Admits one request at a time for each key. See the [module docs](crate::lock#in-front-of-a-service) for examples.
///
/// With HTTP, a rejection is a response, and the lock is held until the response *body* has ended. A service without HTTP needs
/// [`.responder(ErrorResponder)`](Self::responder).
///
/// A handler that requests the lock of its own request gets [`Nested`](super::Nested) from the [`Locks`] that the layer was made
/// [with](Self::with_locks). Other `Locks` on the same backend wait.
///
/// Type parameters: the [key](crate::ExtractKey), the [responder](crate::responder::Responder), and whether handlers are
/// [detached](Self::detached) from their clients.
#[must_use]
pub struct LockLayer<K = Unkeyed, A = HttpResponder, D = Attached> {
    settings: Settings,
    key: Arc<K>,
    answer: A,
    handlers: PhantomData<D>,
}

/// The key type of a [`LockLayer`] until you set its [key](LockLayer::key).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Unkeyed;

/// Handlers end with their clients: see [`LockLayer::detached`].
#[derive(Debug)]
pub enum Attached {}

/// Handlers continue without their clients: see [`LockLayer::detached`].
#[derive(Debug)]
pub enum Detached {}

/// The settings that do not depend on request and response types. Cheap to clone.
#[derive(Clone)]
pub(super) struct Settings {
    pub(super) locks: Locks,
    pub(super) on_missing_key: OnMissingKey,
    pub(super) on_store_error: OnStoreError,
    pub(super) on_loss: OnLoss,
    pub(super) release_at: ReleaseAt,
    pub(super) safe: Safe,
    is_rw: bool,
    // The bound on detached requests.
    permits: Option<RunningPermits>,
    // Whether the log has reported that requests pass without a lock.
    unprotected: Arc<OutageTracker>,
}

/// What safe requests acquire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Safe {
    Nothing,
    Read,
    Lock,
}

impl LockLayer {
    /// Locks in `store`, which is a backend. The layer needs a [key](Self::key) before you can use it.
    ///
    /// Layers with the same `name` share locks with equal keys, also across processes. Give each route or service a name of its own, unless
    /// their requests exclude each other.
    ///
    /// ```compile_fail
    /// use axum::{Router, routing::post};
    /// use tollgate::{LockLayer, MemoryBackend};
    ///
    /// // Without a key this does not compile.
    /// let lock = LockLayer::new(MemoryBackend::new(), "payments");
    /// let app: Router = Router::new().route("/payments", post(async || "paid")).layer(lock);
    /// ```
    ///
    /// An invalid setting (a [ttl](Self::ttl) out of range, a [deadline](Self::deadline) or [`max_hold`](Self::max_hold) of
    /// zero) shows at the first lock request. Each request that needs a lock is then answered with 500 over HTTP,
    /// [`LockError::Config`](super::LockError::Config) without, and the log has a line.
    pub fn new(store: impl LockStore + Send + Sync + 'static, name: impl Into<Key>) -> Self {
        let locks = Locks::new(store, name).ttl(Duration::from_secs(15)).wait(Duration::ZERO);
        Self::with_locks(locks.max_hold(Duration::from_secs(300)).max_waiters(64).max_waiters_in_total(1_000))
    }

    /// Uses `locks` with their settings, and shares their local queue. The defaults in the docs of the methods below apply to a layer from
    /// [`new`](Self::new). [`Locks`] have other defaults: for example, they wait for 10 s and have no [`max_hold`](Self::max_hold).
    pub fn with_locks(locks: Locks) -> Self {
        let settings = Settings {
            locks,
            on_missing_key: OnMissingKey::default(),
            on_store_error: OnStoreError::default(),
            on_loss: OnLoss::default(),
            release_at: ReleaseAt::default(),
            safe: Safe::Nothing,
            is_rw: false,
            permits: None,
            unprotected: Arc::new(OutageTracker::for_store()),
        };
        Self { settings, key: Arc::new(Unkeyed), answer: HttpResponder::default(), handlers: PhantomData }
    }

    /// Admits as many requests at a time for each key as the semaphore has permits, with its [settings](Self::with_locks): a
    /// concurrency limit over all processes that share the store.
    ///
    /// The permit of a dead process is free again after its [ttl](Self::ttl), so the count never drifts. Safe requests need a
    /// permit only with [`lock_safe_methods`](Self::lock_safe_methods).
    ///
    /// ```
    /// # #[cfg(feature = "http")] {
    /// use std::time::Duration;
    /// use tollgate::http::header;
    /// use tollgate::lock::Semaphore;
    /// use tollgate::responder::BusyStatus;
    /// use tollgate::{HttpResponder, LockLayer, MemoryBackend};
    ///
    /// // Five reports at a time for each tenant; a sixth waits for up to two seconds.
    /// let reports = Semaphore::new(MemoryBackend::new(), "reports", 5);
    /// let layer = LockLayer::with_semaphore(reports.wait(Duration::from_secs(2)))
    ///     .lock_safe_methods(true)
    ///     .key(header("x-tenant"))
    ///     .responder(HttpResponder::new().busy(BusyStatus::TooManyRequests));
    /// # let _: axum::Router = axum::Router::new().route("/", axum::routing::get(async || "")).layer(layer);
    /// # }
    /// ```
    ///
    /// An upgraded connection, for instance of a WebSocket, does not count by itself: its request ends with the 101. The task
    /// that serves it must keep the permit, and end when the permit is lost. [`max_hold`](Self::max_hold) bounds that:
    ///
    /// ```
    /// # #[cfg(feature = "axum")] {
    /// use axum::{Router, extract::Request, http::StatusCode, response::IntoResponse, routing::get};
    /// use std::time::Duration;
    /// use tollgate::lock::{LeaseHandle, Semaphore};
    /// use tollgate::{GlobalKey, LockLayer, MemoryBackend};
    ///
    /// # async fn serve(_: hyper::upgrade::Upgraded) {}
    /// async fn socket(view: LeaseHandle, request: Request) -> impl IntoResponse {
    ///     // Take the permit here, not in the task: it is released with the response.
    ///     let Some(permit) = view.reenter() else { return Err(StatusCode::SERVICE_UNAVAILABLE) };
    ///     tokio::spawn(async move {
    ///         if let Ok(connection) = hyper::upgrade::on(request).await {
    ///             tokio::select! {
    ///                 () = serve(connection) => {}
    ///                 _ = permit.lost() => {}
    ///             }
    ///         }
    ///     });
    ///     Ok((StatusCode::SWITCHING_PROTOCOLS, [("connection", "upgrade"), ("upgrade", "chat")]))
    /// }
    ///
    /// // Five sockets at a time, for an hour each; GET needs a permit only if configured.
    /// let sockets = Semaphore::new(MemoryBackend::new(), "sockets", 5).wait(Duration::ZERO);
    /// let layer = LockLayer::with_semaphore(sockets.max_hold(Duration::from_secs(3_600)))
    ///     .key(GlobalKey)
    ///     .lock_safe_methods(true);
    /// let app: Router = Router::new().route("/socket", get(socket)).layer(layer);
    /// # }
    /// ```
    pub fn with_semaphore(semaphore: Semaphore) -> Self {
        Self::with_locks(semaphore.locks)
    }

    /// For each key, admits safe requests (GET, HEAD, OPTIONS and TRACE with HTTP) together, and any other request alone. Safe
    /// requests take the read side of the lock, the others the write side. Uses the [settings](Self::with_locks) of the locks.
    ///
    /// The data of a reader does not change while its response is sent. Without HTTP no request is known to be safe, so all of
    /// them write.
    ///
    /// ```
    /// # #[cfg(feature = "http")] {
    /// use axum::{Router, extract::Request, routing::get};
    /// use tollgate::lock::RwLocks;
    /// use tollgate::{LockLayer, MemoryBackend};
    ///
    /// let locks = RwLocks::new(MemoryBackend::new(), "documents");
    /// let layer = LockLayer::with_rw_locks(locks).key(|request: &Request| request.uri().path().to_owned());
    /// let app: Router = Router::new().route("/documents/{id}", get(async || "read").put(async || "written")).layer(layer);
    /// # }
    /// ```
    pub fn with_rw_locks(locks: RwLocks) -> Self {
        let mut layer = Self::with_locks(locks.locks);
        (layer.settings.safe, layer.settings.is_rw) = (Safe::Read, true);
        layer
    }
}

impl<K, A, D> LockLayer<K, A, D> {
    /// What a request locks: a closure, an extractor of the module `tollgate::http`, or a tuple of them; see
    /// [`ExtractKey`](crate::ExtractKey). With [`GlobalKey`](crate::GlobalKey) all requests share one lock.
    pub fn key<K2>(self, key: K2) -> LockLayer<K2, A, D> {
        let Self { settings, key: _, answer, handlers } = self;
        LockLayer { settings, key: Arc::new(key), answer, handlers }
    }

    /// The response to a rejection. Defaults to [`HttpResponder`]; use [`ErrorResponder`](crate::responder::ErrorResponder) for
    /// services without HTTP.
    ///
    /// Through [`BindLease`](super::BindLease), a responder of your own also decides three things: which requests are
    /// [safe](Self::lock_safe_methods), where a handler finds its [`LeaseHandle`](super::LeaseHandle), and that the lock is held
    /// until the [body has ended](ReleaseAt::BodyEnd). See the [examples](crate::responder#examples).
    pub fn responder<A2>(self, answer: A2) -> LockLayer<K, A2, D> {
        let Self { settings, key, answer: _, handlers } = self;
        LockLayer { settings, key, answer, handlers }
    }

    /// Lets a running handler finish in a task of its own, with its lock, when its client disconnects. By default, the handler
    /// is dropped and the lock released.
    ///
    /// Use it for handlers that must not be interrupted, for instance payments. A request that still waits for its lock ends with its
    /// client. A [lost](OnLoss::Cancel) lease still cancels the handler, and [`max_hold`](Self::max_hold) bounds its time. Without a
    /// client, the response of the handler is dropped, and the response body is never polled. Requests that need no lock are not detached.
    /// Requests that pass because the [store fails](OnStoreError::Allow) are detached, without a bound on their time.
    ///
    /// [`max_running`](LockLayer::max_running) bounds the number of running requests, and [`shutdown`](Self::shutdown) waits for
    /// them.
    ///
    /// Within an outer lock, of a layer or of [`Locks::run`], a detached handler with its own lock also keeps the outer lock until its end.
    /// If the outer lock is lost, the handler is cancelled, unless the outer layer has [`OnLoss::Notify`]. A handler without its own lock
    /// keeps no outer one.
    pub fn detached(self) -> LockLayer<K, A, Detached> {
        let Self { mut settings, key, answer, handlers: _ } = self;
        settings.permits.get_or_insert_with(|| RunningPermits::new(MAX_RUNNING));
        LockLayer { settings, key, answer, handlers: PhantomData }
    }

    /// Admits no more requests, and waits until every lock of this layer and its clones is released, also by detached handlers. New
    /// requests are rejected as for a store error. This also closes the locks that the layer shares through
    /// [`with_locks`](LockLayer::with_locks): see [`Locks::shutdown`]. The [shutdown of the backend](crate::backend#shutdown) closes all
    /// layers, and has a deadline.
    pub async fn shutdown(&self) {
        self.settings.locks.shutdown().await;
    }

    fn with(mut self, change: impl FnOnce(Locks) -> Locks) -> Self {
        self.settings.locks = change(self.settings.locks);
        self
    }

    /// How long the lock outlives a dead process, from 10 ms to a day: see [`Locks::ttl`]. Defaults to 15 s.
    pub fn ttl(self, ttl: Duration) -> Self {
        self.with(|locks| locks.ttl(ttl))
    }

    /// How long a request waits for its lock. Defaults to zero: a request for a held lock is rejected, 409 with HTTP.
    ///
    /// A waiting request keeps the inner service that reported ready, with its permit.
    pub fn wait(self, wait: Duration) -> Self {
        self.with(|locks| locks.wait(wait))
    }

    /// Asks the holder to release the lock while a request [waits](Self::wait) for it. Off by default. The handler learns it
    /// from [`LeaseHandle::release_requested`](super::LeaseHandle::release_requested), and may ignore it: see [`Locks::request_release`].
    pub fn request_release(self) -> Self {
        self.with(Locks::request_release)
    }

    /// First come, first served among all processes, for requests that [wait](Self::wait); other requests overtake none of them:
    /// see [`Locks::fair`]. By default, the first request after a release gets the lock. All layers with the same locks must
    /// agree.
    pub fn fair(self) -> Self {
        self.with(Locks::fair)
    }

    /// The name of the holders for [`LockAdmin`](super::LockAdmin): see [`Locks::holder`]. Defaults to no name.
    pub fn holder(self, name: impl AsRef<str>) -> Self {
        self.with(|locks| locks.holder(name))
    }

    /// Where a lease must be stored before a request is admitted, and at each renewal: see [`Locks::replication`]. Defaults to
    /// [`Replication::Primary`]. With too few replicas the request is rejected, 503 with HTTP, whatever you set for [store
    /// errors](Self::on_store_error).
    pub fn replication(self, replication: Replication) -> Self {
        self.with(|locks| locks.replication(replication))
    }

    /// How many requests may wait for one lock in this process, behind the leader that has it or calls the store. Defaults to
    /// 64. One more is rejected, 503 with HTTP.
    pub fn max_waiters(self, waiters: usize) -> Self {
        self.with(|locks| locks.max_waiters(waiters))
    }

    /// How many requests may wait for locks in this process, including requests that call the store. Defaults to 1,000. One more is
    /// rejected, 503 with HTTP. Requests that do not [wait](Self::wait) do not count.
    pub fn max_waiters_in_total(self, waiters: usize) -> Self {
        self.with(|locks| locks.max_waiters_in_total(waiters))
    }

    /// How long a request holds its lock at most; then the lock is lost. Must not be zero. Defaults to 5 minutes.
    pub fn max_hold(self, max_hold: Duration) -> Self {
        self.with(|locks| locks.max_hold(max_hold))
    }

    /// The longest duration of a store call: see [`Locks::deadline`]. Must not be zero. Defaults to 100 ms.
    pub fn deadline(self, deadline: Duration) -> Self {
        self.with(|locks| locks.deadline(deadline))
    }

    /// When the layer stops calling a failing store: see [`Locks::circuit_breaker`]. Defaults to [`CircuitBreaker::new`]. While
    /// the circuit is open, requests are [rejected](Self::on_store_error) at once, also requests that [wait](Self::wait).
    pub fn circuit_breaker(self, breaker: CircuitBreaker) -> Self {
        self.with(|locks| locks.circuit_breaker(breaker))
    }

    /// Whether safe requests (GET, HEAD, OPTIONS and TRACE with HTTP) need the lock as well. Defaults to false: they pass
    /// without a lock, and have no [`LeaseHandle`](super::LeaseHandle) in their extensions. With [read/write
    /// locks](LockLayer::with_rw_locks) they take the read side with false, and the write side with true. Over gRPC and without
    /// HTTP no request is known to be safe. A [responder](Self::responder) of your own decides by
    /// [`is_safe`](super::BindLease::is_safe).
    pub fn lock_safe_methods(mut self, locks_safe: bool) -> Self {
        self.settings.safe = match (locks_safe, self.settings.is_rw) {
            (true, _) => Safe::Lock,
            (false, true) => Safe::Read,
            (false, false) => Safe::Nothing,
        };
        self
    }

    /// What to do with a request without a key. Defaults to [`OnMissingKey::Reject`].
    pub fn on_missing_key(mut self, on_missing_key: OnMissingKey) -> Self {
        self.settings.on_missing_key = on_missing_key;
        self
    }

    /// What to do with a request when the store fails. Defaults to [`OnStoreError::Deny`].
    pub fn on_store_error(mut self, on_store_error: OnStoreError) -> Self {
        self.settings.on_store_error = on_store_error;
        self
    }

    /// What to do when a running request loses its lease. Defaults to [`OnLoss::Cancel`].
    pub fn on_loss(mut self, on_loss: OnLoss) -> Self {
        self.settings.on_loss = on_loss;
        self
    }

    /// When the lock of a request is released. Defaults to [`ReleaseAt::BodyEnd`].
    pub fn release_at(mut self, release_at: ReleaseAt) -> Self {
        self.settings.release_at = release_at;
        self
    }

    /// Checks that the locks reach far enough, for instance that the backend is not the memory backend.
    ///
    /// # Errors
    ///
    /// [`ConfigError::ReachTooSmall`] if they reach less far than `needed`.
    pub fn require(self, needed: Reach) -> Result<Self, ConfigError> {
        self.settings.locks.reach().require(needed)?;
        Ok(self)
    }

    pub(super) fn into_parts(self) -> (Settings, Arc<K>, A) {
        (self.settings, self.key, self.answer)
    }
}

impl<K, A> LockLayer<K, A, Detached> {
    /// How many requests of this layer and its clones may run, including those without a client. Defaults to 10,000. One more is
    /// rejected before its lock is requested: 503 with HTTP, [`Full`] without.
    ///
    /// A request counts from its lock request until the response of its handler, also while it [waits](Self::wait). A request
    /// that needs no lock does not count.
    ///
    /// ```
    /// # #[cfg(feature = "http")] {
    /// use tollgate::{GlobalKey, LockLayer, MemoryBackend};
    ///
    /// let layer = LockLayer::new(MemoryBackend::new(), "payments").key(GlobalKey).detached().max_running(500);
    /// # let _: axum::Router = axum::Router::new().route("/", axum::routing::post(async || "")).layer(layer);
    /// # }
    /// ```
    pub fn max_running(mut self, requests: usize) -> Self {
        if let Some(permits) = &mut self.settings.permits {
            permits.max = requests;
        }
        self
    }
}

/// The default of `max_running`.
const MAX_RUNNING: usize = 10_000;

impl Settings {
    /// The permit of a detached request; `None` for any other.
    pub(super) fn admit(&self) -> Result<Option<RunningPermit>, Full> {
        let Some(permits) = &self.permits else { return Ok(None) };
        let shared = self.locks.shared();
        let permit = permits.admit(shared);
        if permit.is_none() {
            shared.metrics().record_request(Outcome::Full, Duration::ZERO);
        }
        permit.map(Some).ok_or(Full)
    }

    /// Whether a request passes without a lock after this store error. If so, logs the error and counts the request.
    pub(super) fn passes(&self, error: &StoreError) -> bool {
        if self.on_store_error == OnStoreError::Deny {
            return false;
        }
        self.locks.shared().metrics().passed_unprotected();
        if self.unprotected.record_failure() {
            let cause = error.source().map(tracing::field::display);
            tracing::warn!(locks = self.locks.name(), %error, cause, "lock store fails: requests pass without a lock");
        }
        true
    }

    pub(super) fn answered(&self) {
        if self.unprotected.record_success() {
            tracing::info!(locks = self.locks.name(), "lock store answers again: requests need their lock");
        }
    }
}

impl<S, K, A: Clone> Layer<S> for LockLayer<K, A> {
    type Service = Lock<S, K, A>;

    fn layer(&self, inner: S) -> Self::Service {
        Lock::new(inner, self.clone())
    }
}

impl<S, K, A: Clone> Layer<S> for LockLayer<K, A, Detached> {
    type Service = Lock<Detach<S>, K, A>;

    fn layer(&self, inner: S) -> Self::Service {
        let Self { settings, key, answer, handlers: _ } = self.clone();
        let inner = Detach::new(inner, &settings);
        Lock::new(inner, LockLayer { settings, key, answer, handlers: PhantomData })
    }
}

// By hand: `derive` would require `K: Clone`.
impl<K, A: Clone, D> Clone for LockLayer<K, A, D> {
    fn clone(&self) -> Self {
        let (settings, key, answer) = (self.settings.clone(), Arc::clone(&self.key), self.answer.clone());
        Self { settings, key, answer, handlers: PhantomData }
    }
}

impl<K, A, D> fmt::Debug for LockLayer<K, A, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.describe::<K>(f, "LockLayer")
    }
}

impl Settings {
    pub(super) fn describe<K>(&self, f: &mut fmt::Formatter<'_>, name: &str) -> fmt::Result {
        f.debug_struct(name)
            .field("locks", &self.locks)
            .field("key", &std::any::type_name::<K>())
            .field("on_missing_key", &self.on_missing_key)
            .field("on_store_error", &self.on_store_error)
            .field("on_loss", &self.on_loss)
            .field("release_at", &self.release_at)
            .finish_non_exhaustive()
    }
}
