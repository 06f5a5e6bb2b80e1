use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use indexmap::IndexMap;
use tokio::sync::OnceCell;
use tokio::time::{Instant, timeout};

use super::policy::Policy;
use crate::error::BoxError;
use crate::key::Key;

/// Finds out at run time by which policy a key is counted: the plan that a customer has booked, for instance.
///
/// ```
/// use std::time::Duration;
/// use tollgate::rate_limit::PolicyResolver;
/// use tollgate::{BoxError, Key, MemoryBackend, Policy, Quota, RateLimitLayer};
///
/// async fn has_paid(customer: Key) -> Result<bool, BoxError> {
///     Ok(customer.as_str() == "alice") // or what the database says
/// }
///
/// let free = Policy::new("api", Quota::per_hour(100).fixed_window());
/// let pro = Policy::new("api", Quota::per_hour(1_000).fixed_window());
///
/// let plans = PolicyResolver::new({
///     let free = free.clone();
///     move |customer| {
///         let (free, pro) = (free.clone(), pro.clone());
///         async move { Ok::<_, BoxError>(if has_paid(customer).await? { pro } else { free }) }
///     }
/// })
/// .time_to_live(Duration::from_secs(30));
/// let layer = RateLimitLayer::new(MemoryBackend::new(), free).resolver(plans);
/// ```
///
/// Policies of the same name share their counts: who changes plans in the middle of a window keeps what was used, or
/// whatever else the new policy says in [`Policy::on_quota_change`].
///
/// Make a few policies and clone them, rather than one for each answer: what is derived from a policy, handles for metrics
/// included, is kept with it.
///
/// # Caching
///
/// An answer is kept for a [time](Self::time_to_live), by default a minute, and for at most a [number](Self::capacity) of
/// keys, by default 10,000. Requests for one key ask once between them. If the resolver fails when an answer has become
/// old, or takes longer than half of the deadline, the old answer is used for as long again.
///
/// # Errors
///
/// A resolver that fails, or takes longer than the deadline of the layer, is a failure of the store:
/// [`OnStoreError`](super::OnStoreError) says what happens to the request. With `Local` that is the policy of the layer.
#[derive(Clone)]
pub struct PolicyResolver {
    resolve: Arc<Resolve>,
    time_to_live: Duration,
    capacity: usize,
    known: Arc<Mutex<Known>>,
}

#[derive(Default)]
struct Known {
    entries: IndexMap<Key, Entry>,
    // Where to look next for answers that can go.
    hand: usize,
}

/// How many answers are looked at to find an old one.
const SAMPLE: usize = 8;

type Resolve = dyn Fn(Key) -> Pin<Box<dyn Future<Output = Result<Policy, BoxError>> + Send>> + Send + Sync;

#[derive(Clone)]
struct Entry {
    answer: Arc<OnceCell<Policy>>,
    before: Option<Policy>,
    asked: Instant,
}

impl PolicyResolver {
    /// Asks `resolve` for the policy of a key.
    pub fn new<F, Fut, E>(resolve: F) -> Self
    where
        F: Fn(Key) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Policy, E>> + Send + 'static,
        E: Into<BoxError>,
    {
        let boxed = move |key| -> Pin<Box<dyn Future<Output = Result<Policy, BoxError>> + Send>> {
            let answer = resolve(key);
            Box::pin(async move { answer.await.map_err(Into::into) })
        };
        Self {
            resolve: Arc::new(boxed),
            time_to_live: Duration::from_secs(60),
            capacity: 10_000,
            known: Arc::default(),
        }
    }

    /// How long an answer is used before the resolver is asked again. Defaults to a minute.
    #[must_use]
    pub fn time_to_live(self, time_to_live: Duration) -> Self {
        Self { time_to_live, ..self }
    }

    /// For how many keys answers are kept, at least one. Defaults to 10,000.
    #[must_use]
    pub fn capacity(self, keys: usize) -> Self {
        Self { capacity: keys.max(1), ..self }
    }

    /// Forgets the answer for `key`, so that the next request asks anew: for when somebody has just changed plans.
    pub fn forget(&self, key: &Key) {
        self.lock().entries.swap_remove(key);
    }

    /// The policy, if it is known without asking.
    pub(super) fn known(&self, key: &Key) -> Option<Policy> {
        let known = self.lock();
        let entry = known.entries.get(key)?;
        if entry.asked.elapsed() < self.time_to_live { entry.answer.get().cloned() } else { None }
    }

    /// The policy of the key. Where there is an old answer, a new one is waited for no longer than `patience`.
    pub(super) async fn resolve(&self, key: &Key, patience: Duration) -> Result<Policy, BoxError> {
        let entry = self.entry(key);
        let ask = || async {
            let answer = (self.resolve)(*key);
            let answer = match entry.before {
                Some(_) => timeout(patience, answer).await.unwrap_or_else(|late| Err(late.into())),
                None => answer.await,
            };
            // Here, so that it is the answer for all who wait for one, and for as long again.
            answer.or_else(|error| match &entry.before {
                Some(policy) => {
                    tracing::debug!(%error, "a policy cannot be resolved, so the one before is used");
                    Ok(policy.clone())
                }
                None => Err(error),
            })
        };
        entry.answer.get_or_try_init(ask).await.cloned()
    }

    /// What is known of the key or being asked, or a place for what will be.
    fn entry(&self, key: &Key) -> Entry {
        let mut known = self.lock();
        let Known { entries, hand } = &mut *known;
        let (now, fresh) = (Instant::now(), Arc::new(OnceCell::new()));
        if let Some(entry) = entries.get_mut(key) {
            if now - entry.asked >= self.time_to_live {
                let before = entry.answer.get().cloned().or(entry.before.take());
                *entry = Entry { answer: fresh, before, asked: now };
            }
            return entry.clone();
        }
        while entries.len() >= self.capacity {
            // The oldest of a few, each time of others: the newest takes the place of the one that goes.
            let len = entries.len();
            let sample = (0..SAMPLE.min(len)).map(|step| (*hand + step) % len);
            let oldest = sample.min_by_key(|index| entries.get_index(*index).map(|(_, entry)| entry.asked));
            entries.swap_remove_index(oldest.unwrap_or(0));
            *hand = (*hand + SAMPLE) % len;
        }
        let entry = Entry { answer: fresh, before: None, asked: now };
        entries.insert(*key, entry.clone());
        entry
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for PolicyResolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PolicyResolver").field("time_to_live", &self.time_to_live).finish_non_exhaustive()
    }
}
