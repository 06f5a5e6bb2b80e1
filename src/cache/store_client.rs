//! The store calls of a cache: each with a deadline, and through the circuit breaker.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::metrics::Metrics;
use super::store::{CacheKey, CacheStore, Claim, Claimed, Entry, EntryId, Mark, NewEntry, Notifications, Token};
use crate::error::{ConfigError, StoreError};
use crate::key::Key;
use crate::reach::Reach;
use crate::store::circuit::{Circuit, CircuitBreaker, observe_circuit};
use crate::store::deadline::DEFAULT_DEADLINE;
use crate::store::shutdown::ShutdownTarget;

type Call<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// A store of any type.
pub(super) trait DynStore: Send + Sync {
    fn get<'a>(&'a self, key: &'a CacheKey) -> Call<'a, Option<Entry>>;
    fn claim<'a>(&'a self, key: &'a CacheKey, seen: &'a EntryId, claim: &'a Claim) -> Call<'a, Claimed>;
    fn renew<'a>(&'a self, key: &'a CacheKey, claim: &'a Claim) -> Call<'a, bool>;
    fn put<'a>(&'a self, key: &'a CacheKey, token: &'a Token, entry: &'a NewEntry) -> Call<'a, bool>;
    fn release<'a>(&'a self, key: &'a CacheKey, token: &'a Token, mark: Option<Mark>) -> Call<'a, bool>;
    fn set<'a>(&'a self, key: &'a CacheKey, token: &'a Token, entry: &'a NewEntry) -> Call<'a, ()>;
    fn invalidate<'a>(&'a self, key: &'a CacheKey) -> Call<'a, ()>;
    fn expire<'a>(&'a self, key: &'a CacheKey) -> Call<'a, ()>;
    fn generation<'a>(&'a self, tag: &'a CacheKey) -> Call<'a, Option<Token>>;
    fn ensure_generation<'a>(&'a self, tag: &'a CacheKey, new: &'a Token, ttl: Duration) -> Call<'a, Token>;
    fn invalidate_tag<'a>(&'a self, tag: &'a CacheKey) -> Call<'a, ()>;
    fn watch<'a>(&'a self, key: &'a CacheKey) -> Pin<Box<dyn Future<Output = Notifications> + Send + 'a>>;
    fn reach(&self) -> Reach;
    fn add_to_shutdown(&self, target: &ShutdownTarget);
}

impl<S: CacheStore + Send + Sync> DynStore for S {
    fn get<'a>(&'a self, key: &'a CacheKey) -> Call<'a, Option<Entry>> {
        Box::pin(CacheStore::get(self, key))
    }

    fn claim<'a>(&'a self, key: &'a CacheKey, seen: &'a EntryId, claim: &'a Claim) -> Call<'a, Claimed> {
        Box::pin(CacheStore::claim(self, key, seen, claim))
    }

    fn renew<'a>(&'a self, key: &'a CacheKey, claim: &'a Claim) -> Call<'a, bool> {
        Box::pin(CacheStore::renew(self, key, claim))
    }

    fn put<'a>(&'a self, key: &'a CacheKey, token: &'a Token, entry: &'a NewEntry) -> Call<'a, bool> {
        Box::pin(CacheStore::put(self, key, token, entry))
    }

    fn release<'a>(&'a self, key: &'a CacheKey, token: &'a Token, mark: Option<Mark>) -> Call<'a, bool> {
        Box::pin(CacheStore::release(self, key, token, mark))
    }

    fn set<'a>(&'a self, key: &'a CacheKey, token: &'a Token, entry: &'a NewEntry) -> Call<'a, ()> {
        Box::pin(CacheStore::set(self, key, token, entry))
    }

    fn invalidate<'a>(&'a self, key: &'a CacheKey) -> Call<'a, ()> {
        Box::pin(CacheStore::invalidate(self, key))
    }

    fn expire<'a>(&'a self, key: &'a CacheKey) -> Call<'a, ()> {
        Box::pin(CacheStore::expire(self, key))
    }

    fn generation<'a>(&'a self, tag: &'a CacheKey) -> Call<'a, Option<Token>> {
        Box::pin(CacheStore::generation(self, tag))
    }

    fn ensure_generation<'a>(&'a self, tag: &'a CacheKey, new: &'a Token, ttl: Duration) -> Call<'a, Token> {
        Box::pin(CacheStore::ensure_generation(self, tag, new, ttl))
    }

    fn invalidate_tag<'a>(&'a self, tag: &'a CacheKey) -> Call<'a, ()> {
        Box::pin(CacheStore::invalidate_tag(self, tag))
    }

    fn watch<'a>(&'a self, key: &'a CacheKey) -> Pin<Box<dyn Future<Output = Notifications> + Send + 'a>> {
        Box::pin(CacheStore::watch(self, key))
    }

    fn reach(&self) -> Reach {
        CacheStore::reach(self)
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        CacheStore::add_to_shutdown(self, target);
    }
}

/// A store, with the deadline of its calls and a circuit breaker.
#[derive(Clone)]
pub(super) struct StoreClient {
    pub(super) store: Arc<dyn DynStore>,
    pub(super) deadline: Duration,
    circuit: Arc<Circuit>,
    // Subscriptions may fail while other calls succeed.
    #[cfg(feature = "local-cache")]
    subscriptions: Arc<Circuit>,
    // For the log.
    cache: Key,
    metrics: Arc<OnceLock<Metrics>>,
}

impl StoreClient {
    pub(super) fn new(store: Arc<dyn DynStore>, cache: Key) -> Self {
        Self {
            store,
            deadline: DEFAULT_DEADLINE,
            circuit: Arc::new(Circuit::new(CircuitBreaker::new())),
            #[cfg(feature = "local-cache")]
            subscriptions: Arc::new(Circuit::new(CircuitBreaker::new())),
            cache,
            metrics: Arc::default(),
        }
    }

    pub(super) const fn check(&self) -> Result<(), ConfigError> {
        if self.deadline.is_zero() { Err(ConfigError::ZeroTimeout { setting: "deadline" }) } else { Ok(()) }
    }

    pub(super) fn metrics(&self) -> &Metrics {
        self.metrics.get_or_init(|| Metrics::new(&self.cache))
    }

    pub(super) fn set_circuit_breaker(&mut self, settings: CircuitBreaker) {
        #[cfg(feature = "local-cache")]
        {
            self.subscriptions = Arc::new(Circuit::new(settings));
        }
        self.circuit = Arc::new(Circuit::new(settings));
    }

    /// Makes a call, unless the circuit is open.
    pub(super) async fn call<T>(&self, call: Call<'_, T>) -> Result<T, StoreError> {
        self.circuit.call(self, self.deadline, call).await
    }

    /// Makes a call, also while the circuit is open: for changes that the user requests, since no later call makes up for them.
    pub(super) async fn call_always<T>(&self, call: Call<'_, T>) -> Result<T, StoreError> {
        self.circuit.call_always(self, self.deadline, call).await
    }

    /// Subscribes to the changes of a key. If the store does not confirm the subscription within the deadline, or the circuit of
    /// subscriptions is open, there are no notifications.
    #[cfg(feature = "local-cache")]
    pub(super) async fn watch(&self, key: &CacheKey) -> Notifications {
        let confirmed = async {
            let changes = self.store.watch(key).await;
            if changes.may_have_changed() { Err(StoreError::late("no subscription")) } else { Ok(changes) }
        };
        // The observer `()` writes no metric and no log line: if subscriptions fail, only hits take longer.
        let changes = self.subscriptions.call(&(), self.deadline, confirmed).await;
        changes.unwrap_or_else(|_| Notifications::none())
    }
}

observe_circuit!("cache", StoreClient, |client| client.metrics(), cache = %client.cache);
