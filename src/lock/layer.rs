use std::error::Error;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tower_layer::Layer;

use super::error::Lost;
use super::lease::Lease;
use super::lock_key::LockKey;
use super::locks::{Locks, Replication};
use super::metrics::Outcome;
use super::rejection::Full;
use super::running::{Place, Places};
use super::rw::RwLocks;
use super::semaphore::Semaphore;
use super::service::{Detach, Lock};
use super::store::{LockStore, Reach};
use crate::error::{ConfigError, StoreError};
use crate::key::{GlobalKey, Key};
use crate::responder::HttpResponder;
use crate::store::circuit::{CircuitBreaker, OutageTracker};

/// Lets one request at a time through, for each key. See the [module docs](crate::lock#in-front-of-a-service) for examples.
///
/// With HTTP a rejection is a response, and the lock is held until the *body* of the answer has ended. A service that does not
/// speak HTTP needs [`.responder(ErrorResponder)`](Self::responder).
///
/// A handler that asks for the lock of its own request is told [`Nested`](super::Nested) by the [`Locks`] that the layer was made
/// [with](Self::with_locks), and by no other: others on the same backend wait, for as long as they are ready to.
///
/// Type parameters: the [key](crate::ExtractKey), what a rejection [becomes](crate::responder::Responder), and whether handlers are
/// [detached](Self::detached) from their clients.
#[must_use]
pub struct LockLayer<K = GlobalKey, A = HttpResponder, D = Attached> {
    settings: Settings,
    key: Arc<K>,
    answer: A,
    handlers: PhantomData<D>,
}

/// Handlers end with their clients: see [`LockLayer::detached`].
#[derive(Debug)]
pub enum Attached {}

/// Handlers go on when their clients have gone: see [`LockLayer::detached`].
#[derive(Debug)]
pub enum Detached {}

/// What has nothing to do with the type of requests and answers. Cheap to clone.
#[derive(Clone)]
pub(super) struct Settings {
    pub(super) locks: Locks,
    pub(super) on_missing_key: OnMissingKey,
    pub(super) on_store_error: OnStoreError,
    pub(super) on_loss: OnLoss,
    pub(super) release_at: ReleaseAt,
    pub(super) safe: Safe,
    is_rw: bool,
    // For requests whose handlers are detached.
    places: Option<Places>,
    // Whether the log has been told that requests pass without a lock.
    unprotected: Arc<OutageTracker>,
}

/// What requests take that change nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Safe {
    Nothing,
    Read,
    Lock,
}

/// What happens to a request that has no key, or an empty one. Defaults to [`Reject`](Self::Reject).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnMissingKey {
    /// It is turned away: 400 with HTTP, [`MissingKey`](super::MissingKey) without.
    #[default]
    Reject,
    /// All such requests share one lock.
    Shared,
    /// It passes without a lock and without a lease in its extensions.
    Pass,
}

/// What happens to a request when the store fails. Defaults to [`Deny`](Self::Deny).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnStoreError {
    /// It is turned away: 503 with HTTP, the [`StoreError`] without.
    #[default]
    Deny,
    /// It passes without a lock and without a lease in its extensions. The log has a line when that begins, and when it ends, and the
    /// [metrics](crate::lock#metrics) count such requests.
    Allow,
}

/// What happens to a request whose lease is lost while it is served. Defaults to [`Cancel`](Self::Cancel).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnLoss {
    /// Its handler is dropped where it stands, and the answer is 503 with HTTP. If the answer has begun, its body fails, or ends with
    /// a status in the trailers with gRPC.
    #[default]
    Cancel,
    /// Nothing is cancelled. The [`LeaseHandle`](super::LeaseHandle) in the extensions of the request says so: [`lost`](super::LeaseHandle::lost) ends and
    /// [`check`](super::LeaseHandle::check) fails. To ignore a loss is the same, and not to look: the answer of a handler that does not is sent as if nothing
    /// had happened. The log and the metrics tell of it in any case.
    Notify,
}

/// When the lock of a request is given back. Defaults to [`BodyEnd`](Self::BodyEnd).
///
/// A connection that is upgraded, to a WebSocket for instance, goes on when its answer has ended: a 101 has no body. The task that serves it keeps the lock
/// by a handle of its own, [`LeaseHandle::reenter`](super::LeaseHandle::reenter): see [`LockLayer::with_semaphore`] for an example.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseAt {
    /// When the body of the answer has ended, has failed or is dropped. A client that reads slowly holds the lock meanwhile, up to
    /// [`max_hold`](LockLayer::max_hold). An answer that has no such body does not keep it, as with [`ErrorResponder`](crate::responder::ErrorResponder), and one
    /// of your own only if it [says so](super::BindLease::occupy).
    #[default]
    BodyEnd,
    /// When the handler has answered. What it streams then is no longer under the lock.
    HandlerDone,
}

impl LockLayer {
    /// Locks by what `store` keeps, which is a backend. Until a [key](Self::key) is named, all requests share one lock.
    ///
    /// All layers on one backend have the same locks where their keys are the same, in other processes, too: `requests` is their
    /// [namespace](Self::namespace) unless each is given its own. A handler that calls another service behind such a layer finds its own lock held there, if
    /// the keys are the same.
    ///
    /// A setting that cannot work (a [ttl](Self::ttl) out of range, a [deadline](Self::deadline) or [`max_hold`](Self::max_hold) of zero) is found
    /// when the first lock is asked for: each request that needs one is answered 500 with HTTP then, [`LockError::Config`](super::LockError::Config) without, and the
    /// log has a line.
    pub fn new(store: impl LockStore + Send + Sync + 'static) -> Self {
        let locks = Locks::new(store).namespace("requests").ttl(Duration::from_secs(15)).wait(Duration::ZERO);
        Self::with_locks(locks.max_hold(Duration::from_secs(300)).max_waiters(64).max_waiters_in_total(1_000))
    }

    /// Locks as `locks` does, and in one line with whoever else uses it. With its settings: what the methods below default to is what [`new`](Self::new)
    /// has, and not what `locks` has, which waits for 10 s and knows no [`max_hold`](Self::max_hold) unless it is told otherwise.
    pub fn with_locks(locks: Locks) -> Self {
        let settings = Settings {
            locks,
            on_missing_key: OnMissingKey::default(),
            on_store_error: OnStoreError::default(),
            on_loss: OnLoss::default(),
            release_at: ReleaseAt::default(),
            safe: Safe::Nothing,
            is_rw: false,
            places: None,
            unprotected: Arc::new(OutageTracker::of_a_store()),
        };
        Self { settings, key: Arc::new(GlobalKey), answer: HttpResponder::default(), handlers: PhantomData }
    }

    /// Lets as many requests at a time through for each key as the semaphore has permits, with its [settings](Self::with_locks): a limit of what runs at the same time, over
    /// all processes that share the store.
    ///
    /// A permit whose process has died is free again when its [time to live](Self::ttl) is over, so the number never drifts. Requests that change nothing need a
    /// permit only if [told so](Self::lock_safe_methods).
    ///
    /// ```
    /// # #[cfg(feature = "http")] {
    /// use std::time::Duration;
    /// use tollgate::http::header;
    /// use tollgate::lock::Semaphore;
    /// use tollgate::responder::BusyStatus;
    /// use tollgate::{HttpResponder, LockLayer, MemoryBackend};
    ///
    /// // Five reports at a time for each tenant; who comes sixth waits for up to two seconds.
    /// let reports = Semaphore::new(MemoryBackend::new(), 5).namespace("reports");
    /// let layer = LockLayer::with_semaphore(reports.wait(Duration::from_secs(2)))
    ///     .lock_safe_methods(true)
    ///     .key(header("x-tenant"))
    ///     .responder(HttpResponder::new().busy(BusyStatus::TooManyRequests));
    /// # let _: axum::Router = axum::Router::new().route("/", axum::routing::get(async || "")).layer(layer);
    /// # }
    /// ```
    ///
    /// An upgraded connection, of a WebSocket for instance, is none of that number by itself: its request is over with the 101. The task that serves it has to
    /// keep the permit, and to end when that is lost, which [`max_hold`](Self::max_hold) sees to:
    ///
    /// ```
    /// # #[cfg(feature = "axum")] {
    /// use axum::{Router, extract::Request, http::StatusCode, response::IntoResponse, routing::get};
    /// use std::time::Duration;
    /// use tollgate::lock::{LeaseHandle, Semaphore};
    /// use tollgate::{LockLayer, MemoryBackend};
    ///
    /// # async fn serve(_: hyper::upgrade::Upgraded) {}
    /// async fn socket(view: LeaseHandle, request: Request) -> impl IntoResponse {
    ///     // Here and not in the task: with the answer the permit would be gone.
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
    /// // Five sockets at a time, for an hour each; GET needs no permit unless told so.
    /// let sockets = Semaphore::new(MemoryBackend::new(), 5).namespace("sockets").wait(Duration::ZERO);
    /// let layer = LockLayer::with_semaphore(sockets.max_hold(Duration::from_secs(3_600))).lock_safe_methods(true);
    /// let app: Router = Router::new().route("/socket", get(socket)).layer(layer);
    /// # }
    /// ```
    pub fn with_semaphore(semaphore: Semaphore) -> Self {
        Self::with_locks(semaphore.locks)
    }

    /// Lets requests that change nothing (GET, HEAD, OPTIONS and TRACE with HTTP) through together, and any other one by itself, for each key: the first take the
    /// read side of its lock, the others the write side. With the [settings](Self::with_locks) of the locks.
    ///
    /// What a reader sees is not changed while its answer is sent. A service that does not speak HTTP has no requests of which that is known, so all of them
    /// write.
    ///
    /// ```
    /// # #[cfg(feature = "http")] {
    /// use axum::{Router, extract::Request, routing::get};
    /// use tollgate::lock::RwLocks;
    /// use tollgate::{LockLayer, MemoryBackend};
    ///
    /// let locks = RwLocks::new(MemoryBackend::new()).namespace("documents");
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
    /// [`ExtractKey`](crate::ExtractKey). Defaults to [`GlobalKey`].
    pub fn key<K2>(self, key: K2) -> LockLayer<K2, A, D> {
        let Self { settings, key: _, answer, handlers } = self;
        LockLayer { settings, key: Arc::new(key), answer, handlers }
    }

    /// What a rejection becomes. Defaults to [`HttpResponder`]; [`ErrorResponder`](crate::responder::ErrorResponder) is for services that do not
    /// speak HTTP.
    ///
    /// With a type of your own it is also up to its [`BindLease`](super::BindLease) which requests are [safe](Self::lock_safe_methods), where a handler finds its
    /// [`LeaseHandle`](super::LeaseHandle), and that the lock is held until the [body has ended](ReleaseAt::BodyEnd): see the
    /// [examples](crate::responder#examples).
    pub fn responder<A2>(self, answer: A2) -> LockLayer<K, A2, D> {
        let Self { settings, key, answer: _, handlers } = self;
        LockLayer { settings, key, answer, handlers }
    }

    /// Lets a handler that has begun come to its end when its client goes away, with its lock, in a task of its own. Defaults to dropping it where it
    /// stands and giving the lock back.
    ///
    /// For handlers that must not be cut off in the middle: of a payment, say. A request that still waits for its lock ends with its client all the
    /// same, a lease that is [lost](OnLoss::Cancel) still cancels the handler, and [`max_hold`](Self::max_hold) bounds how long
    /// one nobody waits for goes on. The answer to nobody is dropped, and what its body would have done does not happen. Requests that need no lock are
    /// not detached; those that pass without theirs since the [store fails](OnStoreError::Allow) are, and nothing bounds how long they go on.
    /// [`max_running`](LockLayer::max_running) bounds how many requests of the layer are at work.
    /// [`shutdown`](Self::shutdown) waits for those that are.
    ///
    /// Inside of another lock, of a layer further out or of [`Locks::run`], a handler that goes on with its own keeps that one, too, until its end, and ends
    /// with it as it would if its client were still there. One that passes without its own keeps no other.
    pub fn detached(self) -> LockLayer<K, A, Detached> {
        let Self { mut settings, key, answer, handlers: _ } = self;
        settings.places.get_or_insert_with(|| Places::new(MAX_RUNNING));
        LockLayer { settings, key, answer, handlers: PhantomData }
    }

    /// Lets no request in any more, and waits until every lock of this layer and its clones has been given back: by handlers that go on without their
    /// client, too. Requests that come then are turned away as when the store fails. See [`Locks::shutdown`], which this is for
    /// [the same locks](LockLayer::with_locks).
    pub async fn shutdown(&self) {
        self.settings.locks.shutdown().await;
    }

    fn with(mut self, change: impl FnOnce(Locks) -> Locks) -> Self {
        self.settings.locks = change(self.settings.locks);
        self
    }

    /// What keeps the locks of these requests apart from others with the same keys. Defaults to `requests`, which all [new](LockLayer::new) layers
    /// on one backend have in common.
    pub fn namespace(self, namespace: impl Into<Key>) -> Self {
        self.with(|locks| locks.namespace(namespace))
    }

    /// How long the lock outlives a process that has died, from 10 ms to a day: see [`Locks::ttl`]. Defaults to 15 s.
    pub fn ttl(self, ttl: Duration) -> Self {
        self.with(|locks| locks.ttl(ttl))
    }

    /// How long a request waits for its lock. Defaults to zero: it is turned away when somebody else holds it, 409 with HTTP.
    ///
    /// A request that waits holds the place in the inner service that was reserved for it.
    pub fn wait(self, wait: Duration) -> Self {
        self.with(|locks| locks.wait(wait))
    }

    /// Asks whoever holds the lock to give it back, while a request [waits](Self::wait) for it. Defaults to waiting in silence. The handler that has it is told
    /// by [`LeaseHandle::asked`](super::LeaseHandle::asked), and goes on or comes to its end, as it likes: see [`Locks::request_release`].
    pub fn request_release(self) -> Self {
        self.with(Locks::request_release)
    }

    /// First come, first served among all processes, for requests that [wait](Self::wait), and those that do not pass none of them: see [`Locks::fair`].
    /// Defaults to whoever asks first when the lock is free. All layers with the same locks have to do the same.
    pub fn fair(self) -> Self {
        self.with(Locks::fair)
    }

    /// What the holders of these locks are called in what [`LockAdmin`](super::LockAdmin) tells: see [`Locks::holder`]. Defaults to no name.
    pub fn holder(self, name: impl AsRef<str>) -> Self {
        self.with(|locks| locks.holder(name))
    }

    /// Who has to know of a lease before a request is let through, and whenever it is renewed: see [`Locks::replication`]. Defaults to
    /// [`Replication::Primary`]. A request whose lease too few know of is turned away, 503 with HTTP, whatever happens when the
    /// [store fails](Self::on_store_error).
    pub fn replication(self, replication: Replication) -> Self {
        self.with(|locks| locks.replication(replication))
    }

    /// How many requests may wait for one lock in this process, behind the one that has it or asks the store for it. Defaults to 64. One more is turned away, 503 with HTTP.
    pub fn max_waiters(self, waiters: usize) -> Self {
        self.with(|locks| locks.max_waiters(waiters))
    }

    /// How many requests may be waiting for their locks in this process in total, those included that ask for theirs at the moment and are ready to
    /// wait. Defaults to 1,000. One more is turned away, 503 with HTTP. Nothing counts that does not [wait](Self::wait).
    pub fn max_waiters_in_total(self, waiters: usize) -> Self {
        self.with(|locks| locks.max_waiters_in_total(waiters))
    }

    /// How long a request has its lock at the most, which is not zero; it is lost then. Defaults to 5 minutes.
    pub fn max_hold(self, max_hold: Duration) -> Self {
        self.with(|locks| locks.max_hold(max_hold))
    }

    /// How long one call of the store may take, which is not zero: see [`Locks::deadline`]. Defaults to 100 ms.
    pub fn deadline(self, deadline: Duration) -> Self {
        self.with(|locks| locks.deadline(deadline))
    }

    /// When the layer stops to ask a store that fails: see [`Locks::circuit_breaker`]. Defaults to [`CircuitBreaker::new`]. Meanwhile requests are
    /// [turned away](Self::on_store_error) at once, and do not take the deadline each; those that [wait](Self::wait) do not wait for the store either.
    pub fn circuit_breaker(self, breaker: CircuitBreaker) -> Self {
        self.with(|locks| locks.circuit_breaker(breaker))
    }

    /// Whether requests that change nothing (GET, HEAD, OPTIONS and TRACE with HTTP) need the lock as well. Defaults to false: they pass without, and find
    /// no [`LeaseHandle`](super::LeaseHandle) in their extensions. Of [read/write locks](LockLayer::with_rw_locks) they take the read side with false, and the write
    /// side with true. With gRPC, and where no HTTP is spoken, no request is known to be one of them, and with an
    /// answer [of your own](Self::responder) those are that it [says so](super::BindLease::is_safe) of.
    pub fn lock_safe_methods(mut self, locks_safe: bool) -> Self {
        self.settings.safe = match (locks_safe, self.settings.is_rw) {
            (true, _) => Safe::Lock,
            (false, true) => Safe::Read,
            (false, false) => Safe::Nothing,
        };
        self
    }

    /// What happens to a request that has no key. Defaults to [`OnMissingKey::Reject`].
    pub fn on_missing_key(mut self, on_missing_key: OnMissingKey) -> Self {
        self.settings.on_missing_key = on_missing_key;
        self
    }

    /// What happens to a request when the store fails. Defaults to [`OnStoreError::Deny`].
    pub fn on_store_error(mut self, on_store_error: OnStoreError) -> Self {
        self.settings.on_store_error = on_store_error;
        self
    }

    /// What happens to a request whose lease is lost while it is served. Defaults to [`OnLoss::Cancel`].
    pub fn on_loss(mut self, on_loss: OnLoss) -> Self {
        self.settings.on_loss = on_loss;
        self
    }

    /// When the lock of a request is given back. Defaults to [`ReleaseAt::BodyEnd`].
    pub fn release_at(mut self, release_at: ReleaseAt) -> Self {
        self.settings.release_at = release_at;
        self
    }

    /// Makes sure that the locks hold as far as they are meant to, so that the memory backend is not taken for a distributed one.
    ///
    /// # Errors
    ///
    /// [`ConfigError::ScopeTooSmall`] if they hold among fewer than `scope` says.
    pub fn require(self, scope: Reach) -> Result<Self, ConfigError> {
        self.settings.locks.scope().require(scope)?;
        Ok(self)
    }

    pub(super) fn into_parts(self) -> (Settings, Arc<K>, A) {
        (self.settings, self.key, self.answer)
    }
}

impl<K, A> LockLayer<K, A, Detached> {
    /// How many requests of this layer and its clones may be at work, those included whose client has gone. Defaults to 10,000. One more is turned
    /// away before its lock is asked for: 503 with HTTP, [`Full`] without.
    ///
    /// A request is at work from when it asks for its lock until its handler has answered, also while it [waits](Self::wait). One that needs
    /// no lock does not count.
    ///
    /// ```
    /// # #[cfg(feature = "http")] {
    /// use tollgate::{LockLayer, MemoryBackend};
    ///
    /// let layer = LockLayer::new(MemoryBackend::new()).detached().max_running(500);
    /// # let _: axum::Router = axum::Router::new().route("/", axum::routing::post(async || "")).layer(layer);
    /// # }
    /// ```
    pub fn max_running(mut self, requests: usize) -> Self {
        if let Some(places) = &mut self.settings.places {
            places.most = requests;
        }
        self
    }
}

/// How many requests of a detached layer are at work unless told otherwise.
const MAX_RUNNING: usize = 10_000;

impl Settings {
    /// The place of a request whose handler is detached, where there is one; `None` for any other.
    pub(super) fn admit(&self, lock: &LockKey) -> Result<Option<Place>, Full> {
        let Some(places) = &self.places else { return Ok(None) };
        let home = self.locks.home();
        let place = places.admit(home, lock);
        if place.is_none() {
            home.meters(lock).asked(Outcome::Full, Duration::ZERO);
        }
        place.map(Some).ok_or(Full)
    }

    /// Whether a request passes without a lock because of this, and if so the log and the metrics are told.
    pub(super) fn passes(&self, error: &StoreError) -> bool {
        if self.on_store_error == OnStoreError::Deny {
            return false;
        }
        self.locks.home().passed_unprotected();
        if self.unprotected.begins() {
            let cause = error.source().map(tracing::field::display);
            tracing::warn!(locks = self.locks.called(), %error, cause, "lock store fails: requests pass without a lock");
        }
        true
    }

    pub(super) fn answered(&self) {
        if self.unprotected.ends() {
            tracing::info!(locks = self.locks.called(), "lock store answers again: requests need their lock");
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

// By hand: `derive` would ask for `K: Clone`.
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

/// The time in which a request has its lock. Ends when it is dropped.
pub struct LeaseGuard {
    // Before the lease, which means nothing to it once it was given back.
    loss: Option<Pin<Box<dyn Future<Output = Lost> + Send>>>,
    lease: Lease,
}

impl LeaseGuard {
    pub(super) fn new(lease: Lease, on_loss: OnLoss) -> Self {
        let loss = (on_loss == OnLoss::Cancel).then(|| Box::pin(lease.loss()) as _);
        Self { loss, lease }
    }

    /// The lease.
    pub const fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Ready when the lease is lost, and the request is to be [cancelled](OnLoss::Cancel) for that. Not to be polled again then.
    pub fn poll_lost(&mut self, cx: &mut Context<'_>) -> Poll<Lost> {
        let Some(loss) = &mut self.loss else { return Poll::Pending };
        loss.as_mut().poll(cx)
    }
}

impl fmt::Debug for LeaseGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseGuard").field("lease", &self.lease).finish_non_exhaustive()
    }
}
