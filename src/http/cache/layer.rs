use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tower_layer::Layer;

use super::service::CacheService;
use super::settings::{Settings, Shared};
use super::stored::{Stored, StoredCodec};
use crate::cache::store::CacheStore;
use crate::cache::{Cache, CircuitBreaker};
use crate::error::ConfigError;
use crate::key::{GlobalKey, Key};
use crate::reach::Reach;
use crate::responder::HttpResponder;

/// Stores responses to GET requests, and serves them to further requests of all processes. While a response is loaded, other requests for it
/// wait, so the inner service is called once.
#[must_use]
pub struct CacheLayer<K = Undecided, A = HttpResponder> {
    cache: Cache<Stored, StoredCodec>,
    settings: Settings,
    principal: Arc<K>,
    answer: A,
}

/// The missing audience of a new layer, which is not usable yet.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Undecided;

impl CacheLayer {
    /// Stores responses in `store`, which is a [backend](crate::backend). The name is part of every key: services whose responses differ need
    /// different names. Call [`public`](Self::public) or [`per`](Self::per) before you use the layer.
    pub fn new(store: impl CacheStore + Send + Sync + 'static, name: impl Into<Key>) -> Self {
        let settings = Settings {
            is_public: false,
            ignores_cookies: false,
            fresh_for: None,
            max_body: 1 << 20,
            max_variants: 64,
            uncached: Arc::default(),
        };
        // Each response sets its times itself, and `max_body` limits its size.
        let cache = Cache::with_codec(store, name, Duration::from_secs(1), StoredCodec).max_len(usize::MAX);
        Self { cache, settings, principal: Arc::new(Undecided), answer: HttpResponder::default() }
    }
}

impl<K, A> CacheLayer<K, A> {
    /// All clients share the responses. A request with `Authorization` or `Cookie` bypasses the cache, since its response may be for one client
    /// only: see [`ignore_cookies`](Self::ignore_cookies).
    pub fn public(mut self) -> CacheLayer<GlobalKey, A> {
        self.settings.is_public = true;
        self.with_principal(GlobalKey)
    }

    /// Each principal has responses of its own: a user, a tenant, or whatever else decides about the response. Pass a closure, an extractor of
    /// the module `tollgate::http`, or a tuple of them: see [`ExtractKey`](crate::ExtractKey). A request without a principal bypasses the cache.
    ///
    /// The principal must be checked before this layer. If clients can choose it, a client gets the responses of another one.
    pub fn per<P>(mut self, principal: P) -> CacheLayer<P, A> {
        self.settings.is_public = false;
        self.with_principal(principal)
    }

    fn with_principal<P>(self, principal: P) -> CacheLayer<P, A> {
        let Self { cache, settings, answer, .. } = self;
        CacheLayer { cache, settings, principal: Arc::new(principal), answer }
    }

    /// Sets the [responder](crate::responder::Responder) for requests that can be neither served nor passed on. Defaults to
    /// [`HttpResponder::new`].
    pub fn responder<A2>(self, responder: A2) -> CacheLayer<K, A2> {
        let Self { cache, settings, principal, .. } = self;
        CacheLayer { cache, settings, principal, answer: responder }
    }

    fn with(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(&mut self.settings);
        self
    }

    fn with_cache(mut self, change: impl FnOnce(Cache<Stored, StoredCodec>) -> Cache<Stored, StoredCodec>) -> Self {
        self.cache = change(self.cache);
        self
    }

    /// How long a response is fresh that does not say it, by `Cache-Control` or `Expires`. By default such a response is not stored.
    pub fn fresh_for(self, time: Duration) -> Self {
        self.with(|settings| settings.fresh_for = Some(time))
    }

    /// Treats requests with `Cookie` like others. Only for services whose responses do not depend on cookies, or say so by `Vary: Cookie` or
    /// `private`. By default they bypass a [public](Self::public) cache.
    pub fn ignore_cookies(self) -> Self {
        self.with(|settings| settings.ignores_cookies = true)
    }

    /// The largest stored response in bytes, including its header fields. Defaults to 1 MiB. A larger one is streamed to its own client.
    pub fn max_body(self, bytes: usize) -> Self {
        self.with(|settings| settings.max_body = bytes)
    }

    /// How many responses of one URI may be stored that differ by header fields in `Vary`. Defaults to 64. Each response has a random slot, so
    /// two may displace each other before all are used.
    pub fn max_variants(self, variants: u32) -> Self {
        self.with(|settings| settings.max_variants = variants.into())
    }

    /// By which part, at most, the time for which a response is fresh is shortened at random: see [`Cache::jitter`]. Defaults to 0.1.
    pub fn jitter(self, part: f64) -> Self {
        self.with_cache(|cache| cache.jitter(part))
    }

    /// How early a fresh response may be loaded again: see [`Cache::early_refresh`]. Defaults to 1.
    pub fn early_refresh(self, factor: f64) -> Self {
        self.with_cache(|cache| cache.early_refresh(factor))
    }

    /// How long the inner service is not called for a key after it has failed: with an error, a status of 500, 502, 503 or 504, or a body that
    /// breaks off. Meanwhile, requests get a stale response if `stale-if-error` allows it, and otherwise 503. Defaults to one second.
    pub fn error_for(self, time: Duration) -> Self {
        self.with_cache(|cache| cache.error_for(time))
    }

    /// How long a request that may be stored may take until its response is complete, and how long others wait for it. Defaults to 30 seconds.
    /// After that a request without a response gets 504. A response that has begun is streamed to its end, and is not stored.
    pub fn load_timeout(self, time: Duration) -> Self {
        self.with_cache(|cache| cache.load_timeout(time))
    }

    /// How long a load is protected without a sign of life of its process: see [`Cache::lease`]. Defaults to two seconds.
    pub fn lease(self, time: Duration) -> Self {
        self.with_cache(|cache| cache.lease(time))
    }

    /// The largest number of loads at a time in this process while the store fails. Further requests get 503 with `Retry-After`. Defaults to 16.
    ///
    /// Requests that bypass the cache, or whose response must not be stored, are not limited.
    pub fn origin_limit(self, loads: usize) -> Self {
        self.with_cache(|cache| cache.origin_limit(loads))
    }

    /// Keeps at most this number of responses in this process too: see [`Cache::local_tier`]. By default there are none.
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
        let Self { cache, settings, principal, answer } = self;
        Shared { cache: Arc::new(cache), settings: Arc::new(settings), principal, answer }
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
        let Self { cache, settings, principal, answer } = self;
        Self {
            cache: cache.clone(),
            settings: settings.clone(),
            principal: Arc::clone(principal),
            answer: answer.clone(),
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
