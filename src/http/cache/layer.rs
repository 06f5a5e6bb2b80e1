use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tower_layer::Layer;

use super::service::CacheService;
use super::settings::{Settings, Shared};
use super::stored::{Stored, StoredCodec};
use crate::cache::store::{CacheStore, NewEntry};
use crate::cache::{Cache, CircuitBreaker};
use crate::error::ConfigError;
use crate::key::{GlobalKey, Key, Undecided};
use crate::reach::Reach;
use crate::responder::HttpResponder;

/// Stores responses to GET requests, and serves them to further requests of all processes.
///
/// While a response is loaded, other requests for it wait, so the inner service is called once. The rules are a strict subset of RFC 9111
/// for a shared cache.
///
/// ```
/// # #[cfg(feature = "axum")] {
/// use axum::{Router, body::Body, http::Request, http::header::CACHE_CONTROL, routing::get};
/// use tollgate::{CacheLayer, MemoryBackend};
/// use tower::ServiceExt;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
/// let app: Router = Router::new()
///     .route("/", get(async || ([(CACHE_CONTROL, "max-age=60")], "hello")))
///     .layer(CacheLayer::new(MemoryBackend::new(), "pages").public());
///
/// app.clone().oneshot(Request::get("/").body(Body::empty())?).await?;
/// let response = app.oneshot(Request::get("/").body(Body::empty())?).await?;
/// assert!(response.headers()["cache-status"].to_str()?.starts_with("Tollgate; hit; ttl="));
/// # Ok(())
/// # }
/// # main().unwrap();
/// # }
/// ```
///
/// Say who shares the responses: [`public`](Self::public) or [`per`](Self::per). Without one of the two, the layer does not compile:
///
/// ```compile_fail,E0277
/// use axum::{Router, routing::get};
/// use tollgate::{CacheLayer, MemoryBackend};
///
/// let app: Router = Router::new()
///     .route("/", get(async || "hello"))
///     .layer(CacheLayer::new(MemoryBackend::new(), "pages"));
/// ```
///
/// Here each API key has responses of its own, and a response without `Cache-Control` and `Expires` is fresh for ten seconds:
///
/// ```
/// use std::time::Duration;
/// use tollgate::{CacheLayer, MemoryBackend, http::header};
///
/// let layer = CacheLayer::new(MemoryBackend::new(), "reports").per(header("x-api-key")).fresh_for(Duration::from_secs(10));
/// ```
///
/// # The key
///
/// The key of a response is the principal, the scheme, the host, and the path with its query, as the client has sent them. HTTP/1 requests
/// name no scheme. With axum, enable the feature `axum`: it keeps the path of a nested router. Otherwise, two nested routers with layers of
/// the same name share responses.
///
/// **If any other header field selects the response, name it in `Vary`.** Examples are `X-Forwarded-Host`, `X-Forwarded-Proto`,
/// `X-HTTP-Method-Override` and `Accept-Language`. Otherwise a client can have its response stored for all others, which is cache poisoning.
///
/// # What is stored
///
/// | condition | rule |
/// | --- | --- |
/// | method | GET. A HEAD request is served from the response to a GET, and its own response is never stored. |
/// | status | 200, 203, 204, 301, 308, 404 and 410; 302 and 307 only with `s-maxage`, `max-age` or `Expires` |
/// | time | `s-maxage`, `max-age` or `Expires`, otherwise [`fresh_for`](Self::fresh_for), in each case less the age at arrival. The result must not be zero. |
/// | for one client | A response with `Set-Cookie`, `private`, `no-store`, `no-cache` or `Vary: *` is neither stored nor shared with a waiter. |
/// | credentials | With [`public`](Self::public), requests with `Authorization` or `Cookie` bypass the cache. |
/// | size | at most [`max_response`](Self::max_response) |
/// | body | A body that breaks off, or whose length differs from `Content-Length`, is not stored. |
/// | stale | `stale-while-revalidate` and `stale-if-error` (RFC 5861), unless there is also `must-revalidate`, `proxy-revalidate` or `s-maxage` |
///
/// Requests with a body, `Range`, `If-Match`, `If-Unmodified-Since`, `If-Range` or `Upgrade` bypass the cache. Streams of events are not
/// stored.
///
/// Each combination of values of the fields in `Vary` has a response of its own, like each query. A client can invent both, so give the
/// store a limit of its memory and an eviction policy.
///
/// After a response that must not be stored, each request for its key calls the inner service without waiting for another request. This
/// usually lasts ten seconds.
///
/// # What clients can do
///
/// A client whose request makes the inner service fail causes 503 for others, if there is no stored response: see [responses](#responses).
/// So reject invalid requests with a status of 4xx, which others do not get, and allow stale responses with `stale-if-error`.
///
/// `If-None-Match` and `If-Modified-Since` get a 304 if the stored response fits. The inner service does not see these two fields if its
/// response may be stored. `no-store` prevents that the response is stored. All other directives of a request are ignored: RFC 9111,
/// section 5.2.1, calls them advisory, and with `no-cache` or `max-age=0` each client could force a load.
///
/// A request with an unsafe method, such as POST, whose response has a status of 2xx or 3xx, removes the responses of its URI (section
/// 4.4). With [`per`](Self::per), these are the responses of its principal only. The response of a load that began before is not stored.
///
/// # Responses
///
/// Each response has a `Cache-Status` (RFC 9211), except a rejection of this layer. The field says `hit` with the remaining seconds, or
/// `fwd` with the reason why no stored response was served. A stored response has an `Age`. It has no header fields that apply only to one
/// connection, time or request, such as `Connection`, `Date` and `RateLimit`.
///
/// These count as failures of the inner service: an error, a status of 500, 502, 503 or 504 (RFC 5861, section 4), and a body that breaks
/// off. A response with any other status that is not stored, such as 501, goes only to its own client. Such a response removes the stale
/// response of its key.
///
/// | case | response |
/// | --- | --- |
/// | the inner service fails | The client of the request gets the failure. For [`error_for`](Self::error_for), others get 503 with `Retry-After`. |
/// | the same, within the time of `stale-if-error` | the stale response |
/// | the inner service takes longer than [`load_timeout`](Self::load_timeout) | 504 |
/// | the inner service panics | 500, for all |
/// | the store fails | at most [`origin_limit`](Self::origin_limit) loads at a time; for others, 503 with `Retry-After` |
///
/// The layer itself sends the 503 to others, the 504 and the 500 of this table, as problem documents: see [`responder`](Self::responder).
///
/// # Other layers
///
/// Put the layer inside of compression and CORS. A layer that decides who may see the response, such as authentication, must be outside of
/// this layer. A load runs in a task of its own, so task-locals of outer layers are not set in the handler.
///
/// # Cancellation
///
/// If a client disconnects, its load goes on while other requests wait for it, or if the body is complete. Otherwise the load is cancelled.
/// If a client goes while its unsafe request runs, the stored responses of the URI may stay.
#[must_use]
pub struct CacheLayer<K = Undecided, A = HttpResponder> {
    cache: Cache<Stored, StoredCodec>,
    settings: Settings,
    principal: Arc<K>,
    responder: A,
}

impl CacheLayer {
    /// Stores responses in `store`, which is a [backend](crate::backend). The name is part of every key: services whose responses differ
    /// need different names. Call [`public`](Self::public) or [`per`](Self::per) before you use the layer.
    pub fn new(store: impl CacheStore + Send + Sync + 'static, name: impl Into<Key>) -> Self {
        let settings = Settings {
            is_public: false,
            ignores_cookies: false,
            fresh_for: None,
            load_timeout: Duration::ZERO,
            max_response: 1 << 20,
            uncached: Arc::default(),
        };
        // Each response sets its times itself, and `max_response` limits its size.
        let cache = Cache::with_codec(store, name, Duration::from_secs(1), StoredCodec).max_len(usize::MAX);
        Self { cache, settings, principal: Arc::new(Undecided), responder: HttpResponder::default() }
            .load_timeout(Duration::from_secs(30))
    }
}

impl<K, A> CacheLayer<K, A> {
    /// All clients share the responses. A request with `Authorization` or `Cookie` bypasses the cache, since its response may be for one
    /// client only: see [`ignore_cookies`](Self::ignore_cookies).
    ///
    /// **The layer knows no other credentials.** If the response depends on `X-Api-Key` or on the address of the client, all clients get the
    /// response to the first one. Use [`per`](Self::per) then, or let the handler set `Vary` or `private`.
    pub fn public(mut self) -> CacheLayer<GlobalKey, A> {
        self.settings.is_public = true;
        self.with_principal(GlobalKey)
    }

    /// Each principal has responses of its own: a user, a tenant, or whatever else decides about the response. Pass a closure, an extractor
    /// of the module `tollgate::http`, or a tuple of them: see [`ExtractKey`](crate::ExtractKey). A request without a principal bypasses
    /// the cache.
    ///
    /// The principal must be checked before this layer. If clients can choose it, a client gets the responses of another one.
    pub fn per<P>(mut self, principal: P) -> CacheLayer<P, A> {
        self.settings.is_public = false;
        self.with_principal(principal)
    }

    fn with_principal<P>(self, principal: P) -> CacheLayer<P, A> {
        let Self { cache, settings, responder, .. } = self;
        CacheLayer { cache, settings, principal: Arc::new(principal), responder }
    }

    /// Sets the [responder](crate::responder::Responder) for requests that can be neither served nor passed on. Defaults to
    /// [`HttpResponder::new`].
    pub fn responder<A2>(self, responder: A2) -> CacheLayer<K, A2> {
        let Self { cache, settings, principal, .. } = self;
        CacheLayer { cache, settings, principal, responder }
    }

    fn with(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(&mut self.settings);
        self
    }

    fn with_cache(mut self, change: impl FnOnce(Cache<Stored, StoredCodec>) -> Cache<Stored, StoredCodec>) -> Self {
        self.cache = change(self.cache);
        self
    }

    /// How long a response without `s-maxage`, `max-age` and `Expires` is fresh. By default such a response is not stored.
    pub fn fresh_for(self, time: Duration) -> Self {
        self.with(|settings| settings.fresh_for = Some(time))
    }

    /// Treats requests with `Cookie` like others. Only for services whose responses do not depend on cookies, or say so by `Vary: Cookie` or
    /// `private`. By default, requests with `Cookie` bypass a [public](Self::public) cache.
    pub fn ignore_cookies(self) -> Self {
        self.with(|settings| settings.ignores_cookies = true)
    }

    /// The maximum size of a stored response in bytes. Defaults to 1 MiB. A larger one is streamed to its own client.
    ///
    /// The size is that of the status, the header fields, the body and its trailers. Each part in which the body arrives counts 256 bytes
    /// more, so tiny parts do not need more memory than this either. Until a load ends, its parts are kept, also for a client that reads
    /// slowly. Then they are copied, which needs the same memory once more.
    pub fn max_response(self, bytes: usize) -> Self {
        self.with(|settings| settings.max_response = bytes)
    }

    /// The largest part of its fresh time by which a response expires early, at random: see [`Cache::jitter`]. Defaults to 0.1.
    pub fn jitter(self, part: f64) -> Self {
        self.with_cache(|cache| cache.jitter(part))
    }

    /// How early a fresh response may be loaded again: see [`Cache::early_refresh`]. Defaults to 1.
    pub fn early_refresh(self, factor: f64) -> Self {
        self.with_cache(|cache| cache.early_refresh(factor))
    }

    /// How long the inner service is not called for a key after it has [failed](#responses). Meanwhile, requests get a stale response if
    /// `stale-if-error` allows it, and otherwise 503. Defaults to one second.
    pub fn error_for(self, time: Duration) -> Self {
        self.with_cache(|cache| cache.error_for(time))
    }

    /// The timeout of a load until its response is complete, and of the requests that wait for the load. Defaults to 30 seconds. After that
    /// a request without a response gets 504. A response that has begun is streamed to its end, and is not stored.
    pub fn load_timeout(self, time: Duration) -> Self {
        let time = time.min(NewEntry::MAX_TTL);
        // A load ends by itself after `time`. The timeout of the cache is one second longer, for the store calls of the load.
        let with_calls = if time.is_zero() { time } else { time.saturating_add(Duration::from_secs(1)) };
        self.with(|settings| settings.load_timeout = time).with_cache(|cache| cache.load_timeout(with_calls))
    }

    /// How long the lease of a load lasts without a renewal: see [`Cache::lease`]. Defaults to two seconds.
    pub fn lease(self, time: Duration) -> Self {
        self.with_cache(|cache| cache.lease(time))
    }

    /// The largest number of loads at a time in this process while the store fails. Further requests get 503 with `Retry-After`. Defaults
    /// to 16.
    ///
    /// The limit replaces the protection that the cache gives while the store works. Some requests always reach the inner service: those
    /// that bypass the cache, that forbid storing, or whose response must not be stored. The limit counts neither them nor HEAD requests.
    /// To limit all requests, put a `ConcurrencyLimitLayer` inside of this layer.
    pub fn origin_limit(self, loads: usize) -> Self {
        self.with_cache(|cache| cache.origin_limit(loads))
    }

    /// Keeps at most this number of responses in this process too: see [`Cache::local_tier`]. By default it keeps none.
    #[cfg(feature = "local-cache")]
    #[cfg_attr(docsrs, doc(cfg(feature = "local-cache")))]
    pub fn local_tier(self, responses: u64, max_age: Duration) -> Self {
        self.with_cache(|cache| cache.local_tier(responses, max_age))
    }

    /// The deadline of a store call. Defaults to 100 ms.
    pub fn deadline(self, deadline: Duration) -> Self {
        self.with_cache(|cache| cache.deadline(deadline))
    }

    /// When to stop calling a failing store. Defaults to [`CircuitBreaker::new`].
    pub fn circuit_breaker(self, settings: CircuitBreaker) -> Self {
        self.with_cache(|cache| cache.circuit_breaker(settings))
    }

    /// Checks that responses are shared as widely as you need, so that the memory backend is not used by mistake.
    ///
    /// # Errors
    ///
    /// [`ConfigError::ReachTooSmall`] if the store's reach is less than `needed`.
    pub fn require(mut self, needed: Reach) -> Result<Self, ConfigError> {
        self.cache = self.cache.require(needed)?;
        Ok(self)
    }

    pub(super) fn into_shared(self) -> Shared<K, A> {
        let Self { cache, settings, principal, responder } = self;
        Shared { cache: Arc::new(cache), settings: Arc::new(settings), principal, responder }
    }
}

impl<S, K, A: Clone> Layer<S> for CacheLayer<K, A> {
    type Service = CacheService<S, K, A>;

    fn layer(&self, inner: S) -> Self::Service {
        CacheService::new(inner, self.clone())
    }
}

// Hand-written, because `derive` would require `K: Clone`.
impl<K, A: Clone> Clone for CacheLayer<K, A> {
    fn clone(&self) -> Self {
        let Self { cache, settings, principal, responder } = self;
        Self {
            cache: cache.clone(),
            settings: settings.clone(),
            principal: Arc::clone(principal),
            responder: responder.clone(),
        }
    }
}

impl<K, A> fmt::Debug for CacheLayer<K, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CacheLayer")
            .field("cache", &self.cache)
            .field("principal", &std::any::type_name::<K>())
            .finish_non_exhaustive()
    }
}
