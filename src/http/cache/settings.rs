//! The settings of a layer, which its services share.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::stored::{Stored, StoredCodec};
use crate::cache::Cache;
use crate::key::Key;

/// The settings that do not depend on the types of requests and responses. A load has them too.
#[derive(Clone)]
pub(super) struct Settings {
    pub(super) is_public: bool,
    pub(super) ignores_cookies: bool,
    pub(super) fresh_for: Option<Duration>,
    pub(super) load_timeout: Duration,
    pub(super) max_body: usize,
    pub(super) max_variants: u64,
    pub(super) uncached: Arc<Uncached>,
}

/// The shared state of all clones of a service.
pub(super) struct Shared<K, A> {
    pub(super) cache: Arc<Cache<Stored, StoredCodec>>,
    pub(super) settings: Arc<Settings>,
    pub(super) principal: Arc<K>,
    pub(super) answer: A,
}

/// The keys whose responses must not be stored, as far as this process knows. Their requests neither wait nor call the store.
#[derive(Default)]
pub(super) struct Uncached(Mutex<Marks>);

#[derive(Default)]
struct Marks {
    until: HashMap<Key, Instant>,
    // When marks that have ended were removed.
    swept: Option<Instant>,
}

impl Uncached {
    /// The largest number of keys. The store has the marks of further ones.
    const CAPACITY: usize = 10_000;
    const SWEEP_EVERY: Duration = Duration::from_secs(1);

    pub(super) fn has(&self, key: &Key) -> bool {
        self.lock().until.get(key).is_some_and(|until| Instant::now() < *until)
    }

    pub(super) fn insert(&self, key: Key, time: Duration) {
        let now = Instant::now();
        let mut marks = self.lock();
        if marks.until.len() >= Self::CAPACITY && marks.swept.is_none_or(|swept| now - swept > Self::SWEEP_EVERY) {
            marks.until.retain(|_, until| now < *until);
            marks.swept = Some(now);
        }
        if marks.until.len() < Self::CAPACITY {
            marks.until.insert(key, now + time);
        }
    }

    pub(super) fn remove(&self, key: &Key) {
        self.lock().until.remove(key);
    }

    fn lock(&self) -> MutexGuard<'_, Marks> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
