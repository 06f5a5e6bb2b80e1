use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Waker};
use std::thread;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::Instant;
use tracing::Instrument;

use super::policy::Policy;
use super::probationary_cache::{Bounds, ProbationaryCache};
use crate::error::{BoxError, StoreError};
use crate::key::Key;
use crate::panics::discard;
use crate::store::circuit::OutageTracker;
use crate::store::deadline::Deadline;

/// Chooses the policy of a key at run time: by the plan of a customer, for example.
///
/// ```
/// use std::time::Duration;
/// use tollgate::rate_limit::PolicyResolver;
/// use tollgate::{BoxError, Key, MemoryBackend, Policy, Quota, RateLimitLayer};
///
/// async fn has_paid(customer: Key) -> Result<bool, BoxError> {
///     Ok(customer.as_str() == "alice") // or a database query
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
/// Policies with the same name, and with limits of the same algorithms and windows in the same order, share their counts. A client that
/// changes plans in the middle of a window keeps its used units, unless the new policy sets another [`Policy::on_quota_change`].
///
/// Create a few policies and clone them, instead of one for each answer: derived data, including metric handles, is cached in the policy.
/// (If the new answer for a key equals the cached policy, the cached one is kept.)
///
/// # Caching
///
/// An answer is cached for a [time](Self::time_to_live), by default one minute, and for a maximum [number](Self::capacity) of keys, by
/// default 10,000. Concurrent requests with one key share one resolver call. If an answer has expired and the resolver fails, or takes
/// longer than half of the deadline, the stale answer is used. It stays in use for another time to live, or until the new answer arrives.
///
/// An error is cached for one second, for at most [1,024](Self::MAX_FAILURES) keys. So invented keys neither cause a call per request nor
/// displace an answer. If the resolver answers for such keys too, with a default policy for example, answers that were used only once are
/// evicted before fresh answers that were used again. A fifth of the cache is reserved for new answers.
///
/// # Keys
///
/// The resolver gets the key as the layer extracted it, which may differ from the value that the client sent. `tollgate::http::header`
/// makes a [digest](Key::digest) of the value, so that no secret is kept. A key from a fallback is [marked](Key::as_fallback). So use the
/// extracted keys in your table of plans:
///
/// ```
/// # #[cfg(feature = "http")] {
/// # use std::collections::HashMap;
/// # use std::future::ready;
/// # use tollgate::http::header;
/// # use tollgate::rate_limit::PolicyResolver;
/// # use tollgate::{BoxError, Key, MemoryBackend, Policy, Quota, RateLimitLayer};
/// let free = Policy::new("api", Quota::per_hour(100).fixed_window());
/// let pro = Policy::new("api", Quota::per_hour(1_000).fixed_window());
/// let paid = HashMap::from([(Key::digest("the-api-key-of-alice"), pro)]);
///
/// let plans = PolicyResolver::new({
///     let free = free.clone();
///     move |key| ready(Ok::<_, BoxError>(paid.get(&key).unwrap_or(&free).clone()))
/// });
/// let layer = RateLimitLayer::new(MemoryBackend::new(), free).key(header("x-api-key")).resolver(plans);
/// # let _ = layer.responder(tollgate::ErrorResponder);
/// # }
/// ```
///
/// If plans are stored under something else than the key, such as the API key itself, create the resolver [for that input](Self::of_input),
/// and pass it to [`RateLimitLayer::resolver_from`](super::RateLimitLayer::resolver_from).
///
/// # Errors
///
/// If a resolver fails, or takes longer than the deadline of the layer, [`RateLimitFallback`](super::RateLimitFallback) applies to the
/// request, as if the store had failed. With `Local`, the policy of the layer is enforced, in its own [mode](super::Mode). With `Deny`, the
/// request is rejected, whatever that mode is, even if the resolver would return only shadow policies. The store call has its own deadline,
/// which begins after the resolver call. Failures of a resolver affect neither the metrics of the store nor its
/// [circuit](super::CircuitBreaker).
///
/// The log has one line with the error when a resolver begins to fail. It has one more when the resolver answers and has not failed for one
/// minute. Neither names a key. If unknown keys are normal in your service, return a policy for them instead of an error.
///
/// # Cancellation
///
/// A resolver call continues when its request is late or dropped, until its [timeout](Self::timeout), and the next request gets the answer.
/// It runs in a task of the runtime of that request. If this runtime ends, requests that wait in another runtime call the resolver again.
/// At most [1,024](Self::MAX_RUNNING) calls run at the same time, and further calls wait for a permit.
pub struct PolicyResolver<V = Key> {
    // `None` if each request brings its own `ResolverCall`.
    resolve: Option<Arc<Resolve<V>>>,
    time_to_live: Duration,
    timeout: Duration,
    capacity: usize,
    shared: Arc<Shared>,
}

type Answer = Pin<Box<dyn Future<Output = Result<Policy, StoreError>> + Send>>;
pub(super) type Resolve<V> = dyn Fn(V) -> Answer + Send + Sync;

/// A resolver call for one request. Its input may be a secret of the client, so it is dropped after the evaluation, and `Debug` does not
/// show it.
#[derive(Clone)]
pub struct ResolverCall(Arc<dyn Fn() -> Answer + Send + Sync>);

impl ResolverCall {
    pub(super) fn new<V: Clone + Send + Sync + 'static>(resolve: &Arc<Resolve<V>>, input: V) -> Self {
        let resolve = Arc::clone(resolve);
        Self(Arc::new(move || resolve(input.clone())))
    }

    fn call(&self) -> Answer {
        (self.0)()
    }
}

impl fmt::Debug for ResolverCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ResolverCall(..)")
    }
}

/// State that the clones of a resolver share.
struct Shared {
    cache: Mutex<Cached>,
    // Each running call holds one.
    permits: Arc<Semaphore>,
    outage: OutageTracker,
}

#[derive(Default)]
struct Cached {
    answers: ProbationaryCache<Policy>,
    // Separate from the answers, so that keys without an answer do not displace one.
    failures: ProbationaryCache<StoreError>,
    running: HashMap<Key, Running>,
    // How many attempts were started.
    started: u64,
}

type Outcome = Result<Policy, StoreError>;

/// A running attempt, as seen by requests that wait for it.
struct Running {
    number: u64,
    began: Instant,
    outcome: watch::Receiver<Option<Outcome>>,
}

/// The next step of a request that needs an answer.
enum Next {
    /// Return this outcome.
    Done(Outcome),
    /// Wait for a running attempt.
    Wait(watch::Receiver<Option<Outcome>>),
    /// Run this attempt.
    Begin(Attempt),
    /// Wait for a permit.
    Full,
}

/// A policy, and where it came from.
pub(super) enum Resolved {
    /// From the cache.
    Cached(Policy),
    /// From a call just now.
    Fresh(Policy),
    /// An expired answer, since the resolver fails or is late.
    Stale(Policy, StoreError),
}

/// An outage ends after this time without a failed call. Longer than for a store: an unknown key may come at any time, and must not fill
/// the log.
const RECOVERED: Duration = Duration::from_secs(60);
/// How many errors are cached, and for how long.
const FAILURES: Bounds = Bounds { capacity: PolicyResolver::MAX_FAILURES, time_to_live: Duration::from_secs(1) };
/// If an attempt has not reported its timeout after this time, its runtime has probably stopped. The next request starts another attempt.
const LATE: Duration = Duration::from_secs(1);

impl PolicyResolver {
    /// The maximum number of concurrent resolver calls.
    pub const MAX_RUNNING: usize = 1_024;

    /// The maximum number of keys for which errors are cached.
    pub const MAX_FAILURES: usize = 1_024;

    /// Creates a resolver that calls `resolve` with a key to get its policy.
    pub fn new<F, Fut, E>(resolve: F) -> Self
    where
        F: Fn(Key) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Policy, E>> + Send + 'static,
        E: Into<BoxError>,
    {
        Self::of_input(resolve)
    }
}

impl<V> PolicyResolver<V> {
    /// Creates a resolver that calls `resolve` with a value that [`resolver_from`](super::RateLimitLayer::resolver_from) extracts from the
    /// request.
    ///
    /// ```
    /// use tollgate::rate_limit::PolicyResolver;
    /// use tollgate::{BoxError, Policy, Quota};
    ///
    /// #[derive(Clone)]
    /// struct ApiKey(String);
    ///
    /// async fn quota_of(ApiKey(key): &ApiKey) -> Result<u64, BoxError> {
    ///     Ok(if key == "the-api-key-of-alice" { 1_000 } else { 100 }) // or a database query
    /// }
    ///
    /// let plans = PolicyResolver::of_input(async |api_key: ApiKey| {
    ///     let quota = quota_of(&api_key).await?;
    ///     Ok::<_, BoxError>(Policy::new("api", Quota::per_hour(quota).fixed_window()))
    /// });
    /// ```
    pub fn of_input<F, Fut, E>(resolve: F) -> Self
    where
        F: Fn(V) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Policy, E>> + Send + 'static,
        E: Into<BoxError>,
    {
        let boxed = move |input| -> Answer {
            let answer = resolve(input);
            Box::pin(async move { answer.await.map_err(StoreError::other) })
        };
        let permits = Arc::new(Semaphore::new(PolicyResolver::MAX_RUNNING));
        Self {
            resolve: Some(Arc::new(boxed)),
            time_to_live: Duration::from_secs(60),
            timeout: Duration::from_secs(5),
            capacity: 10_000,
            shared: Arc::new(Shared {
                cache: Mutex::default(),
                permits,
                outage: OutageTracker::until_quiet_for(RECOVERED),
            }),
        }
    }

    /// Sets how long an answer is used before the resolver is called again. Defaults to 1 minute.
    #[must_use]
    pub fn time_to_live(self, time_to_live: Duration) -> Self {
        Self { time_to_live, ..self }
    }

    /// Sets how long a resolver call may take, whether or not requests still wait for it. Defaults to 5 s.
    ///
    /// Requests wait no longer than the [deadline](super::RateLimitLayer::deadline) of their layer.
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Sets for how many keys answers are cached, at least one. Defaults to 10,000.
    #[must_use]
    pub fn capacity(self, keys: usize) -> Self {
        Self { capacity: keys.max(1), ..self }
    }

    /// Removes the cached answer or error of `key`, so that the next request calls the resolver. Call it after a client has changed plans.
    ///
    /// The answer of a call that runs at this moment is not cached.
    pub fn forget(&self, key: &Key) {
        let mut cache = self.shared.lock();
        cache.answers.remove(key);
        cache.failures.remove(key);
        cache.running.remove(key);
    }

    /// Splits off the function, since the settings and the cache do not depend on its input type.
    pub(super) fn into_parts(self) -> (Option<Arc<Resolve<V>>>, PolicyResolver) {
        let Self { resolve, time_to_live, timeout, capacity, shared } = self;
        (resolve, PolicyResolver { resolve: None, time_to_live, timeout, capacity, shared })
    }
}

impl PolicyResolver {
    /// Whether each request brings its own input.
    pub(super) const fn needs_input(&self) -> bool {
        self.resolve.is_none()
    }

    /// The resolver call for a request: made from its key, or `question` if each request brings its own input.
    pub(super) fn question(&self, key: &Key, question: Option<&ResolverCall>) -> Option<ResolverCall> {
        match &self.resolve {
            Some(resolve) => Some(ResolverCall::new(resolve, *key)),
            None => question.cloned(),
        }
    }

    /// The bounds of the answers.
    fn bounds(&self) -> Bounds {
        Bounds { capacity: self.capacity, time_to_live: self.time_to_live }
    }

    /// The cached policy, if it is fresh.
    pub(super) fn cached_policy(&self, key: &Key) -> Option<Policy> {
        self.fresh(&mut self.shared.lock(), key)
    }

    fn fresh(&self, cache: &mut Cached, key: &Key) -> Option<Policy> {
        cache.answers.use_fresh(key, self.bounds()).cloned()
    }

    /// The policy of the key. If there is a stale answer, a new one is awaited for `stale_timeout` at most.
    pub(super) async fn resolve(
        &self,
        key: &Key,
        question: &ResolverCall,
        stale_timeout: Duration,
    ) -> Result<Resolved, StoreError> {
        let Some((stale, stale_timeout)) = self.stale(key, stale_timeout) else {
            return self.fetch(key, question).await;
        };
        Deadline::new(self.fetch(key, question), stale_timeout).await.or_else(|error| {
            self.extend_stale(key);
            Ok(Resolved::Stale(stale, error))
        })
    }

    /// Tracks whether the log has reported an outage.
    pub(super) fn outage(&self) -> &OutageTracker {
        &self.shared.outage
    }

    /// The stale answer, and the rest of the time for which a new one is awaited.
    fn stale(&self, key: &Key, stale_timeout: Duration) -> Option<(Policy, Duration)> {
        let cache = self.shared.lock();
        let (_, stale) = cache.answers.get(key)?;
        // Counted from the start of the running call, so that not every request waits the full time for a slow call.
        let elapsed = cache.running.get(key).map_or(Duration::ZERO, |running| running.began.elapsed());
        Some((stale.clone(), stale_timeout.saturating_sub(elapsed)))
    }

    /// Uses a stale answer for the same time again, unless it was replaced or removed.
    fn extend_stale(&self, key: &Key) {
        if let Some((since, _)) = self.shared.lock().answers.get_mut(key)
            && since.elapsed() >= self.time_to_live
        {
            *since = Instant::now();
        }
    }

    /// Calls the resolver, or waits for a running call.
    async fn fetch(&self, key: &Key, question: &ResolverCall) -> Result<Resolved, StoreError> {
        let mut permit = None;
        loop {
            match self.next(key, &mut permit) {
                Next::Done(outcome) => return outcome.map(Resolved::Cached),
                Next::Wait(outcome) => {
                    // Another request may need the permit.
                    permit = None;
                    if let Some(outcome) = wait_for_outcome(outcome).await {
                        return outcome.map(Resolved::Fresh);
                    }
                    // The attempt has ended with its runtime.
                }
                Next::Begin(attempt) => {
                    let outcome = attempt.outcome.subscribe();
                    self.begin(attempt, question.clone()).await;
                    // No retry in this runtime, which is about to end.
                    let ended = || Err(StoreError::unavailable("the runtime of the policy resolver has ended"));
                    return wait_for_outcome(outcome).await.unwrap_or_else(ended).map(Resolved::Fresh);
                }
                Next::Full => permit = Arc::clone(&self.shared.permits).acquire_owned().await.ok(),
            }
        }
    }

    fn next(&self, key: &Key, permit: &mut Option<OwnedSemaphorePermit>) -> Next {
        let mut cache = self.shared.lock();
        if let Some(policy) = self.fresh(&mut cache, key) {
            return Next::Done(Ok(policy));
        }
        if let Some((since, error)) = cache.failures.get(key)
            && since.elapsed() < FAILURES.time_to_live
        {
            return Next::Done(Err(error.clone()));
        }
        if let Some(running) = cache.running.get(key)
            && running.began.elapsed() <= self.timeout.saturating_add(LATE)
        {
            return Next::Wait(running.outcome.clone());
        }
        let permit = permit.take().or_else(|| Arc::clone(&self.shared.permits).try_acquire_owned().ok());
        let Some(permit) = permit else { return Next::Full };
        let (sender, outcome) = watch::channel(None);
        cache.started += 1;
        let number = cache.started;
        cache.running.insert(*key, Running { number, began: Instant::now(), outcome });
        let (shared, bounds) = (Arc::clone(&self.shared), self.bounds());
        Next::Begin(Attempt { shared, key: *key, number, bounds, outcome: sender, _permit: permit })
    }

    /// Runs an attempt, in the background if it is not complete at once.
    async fn begin(&self, attempt: Attempt, question: ResolverCall) {
        let timeout = self.timeout;
        let Ok(runtime) = Handle::try_current() else {
            // Without a runtime, only the request itself can run it.
            return attempt.end(question.call().await);
        };
        let mut task = Box::pin(
            async move {
                let outcome = Deadline::new(question.call(), timeout).await;
                attempt.end(outcome);
            }
            .in_current_span(),
        );
        // A resolver that completes at once needs no task. A panic does not reach the request, just like a panic in a task.
        let started = catch_unwind(AssertUnwindSafe(|| {
            let first = task.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            if first.is_pending() {
                drop(runtime.spawn(task));
            }
        }));
        started.unwrap_or_else(discard);
    }
}

/// Waits for the outcome of an attempt; `None` if the attempt was dropped.
async fn wait_for_outcome(mut outcome: watch::Receiver<Option<Outcome>>) -> Option<Outcome> {
    outcome.wait_for(Option::is_some).await.ok().and_then(|outcome| outcome.clone())
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Cached> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An attempt to get the policy of a key, as seen by its task.
struct Attempt {
    shared: Arc<Shared>,
    key: Key,
    number: u64,
    bounds: Bounds,
    outcome: watch::Sender<Option<Outcome>>,
    _permit: OwnedSemaphorePermit,
}

impl Attempt {
    /// Caches the outcome, unless the key was removed meanwhile, and sends it to all waiting requests.
    fn end(&self, mut outcome: Outcome) {
        let mut cache = self.shared.lock();
        if self.unregister(&mut cache) {
            // Keeps an equal cached policy, which has derived data.
            if let (Ok(policy), Some((_, before))) = (&mut outcome, cache.answers.get(&self.key))
                && policy == before
            {
                policy.clone_from(before);
            }
            match &outcome {
                Ok(policy) => {
                    cache.failures.remove(&self.key);
                    cache.answers.insert(self.key, policy.clone(), self.bounds);
                }
                Err(error) => cache.failures.insert(self.key, error.clone(), FAILURES),
            }
        }
        drop(cache);
        self.outcome.send_replace(Some(outcome));
    }

    /// Removes the attempt from the running ones. Returns whether it was still registered.
    fn unregister(&self, cache: &mut Cached) -> bool {
        let is_known = cache.running.get(&self.key).is_some_and(|running| running.number == self.number);
        if is_known {
            cache.running.remove(&self.key);
        }
        is_known
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if self.outcome.borrow().is_some() {
            return;
        }
        if thread::panicking() {
            // So that waiting requests do not repeat the panic one after the other.
            self.end(Err(StoreError::other("the policy resolver has panicked")));
        } else {
            // Before waiting requests notice the drop, so that the next one starts a new attempt.
            self.unregister(&mut self.shared.lock());
        }
    }
}

// Not derived: `derive` would require `V: Clone`.
impl<V> Clone for PolicyResolver<V> {
    fn clone(&self) -> Self {
        Self { resolve: self.resolve.clone(), shared: Arc::clone(&self.shared), ..*self }
    }
}

impl<V> fmt::Debug for PolicyResolver<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PolicyResolver")
            .field("time_to_live", &self.time_to_live)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rate_limit::Quota;

    /// With a new policy for each answer, the memory backend would take its slow path for the key.
    #[tokio::test(start_paused = true)]
    async fn equal_answer_keeps_cached_policy() {
        let quota = Arc::new(Mutex::new(5));
        let resolver = PolicyResolver::new({
            let quota = Arc::clone(&quota);
            move |_| {
                let policy = Policy::new("plan", Quota::per_hour(*quota.lock().unwrap()).fixed_window());
                std::future::ready(Ok::<_, BoxError>(policy))
            }
        });
        let question = resolver.question(&Key::GLOBAL, None).unwrap();
        let resolve = async || match resolver.resolve(&Key::GLOBAL, &question, Duration::from_secs(1)).await.unwrap() {
            Resolved::Fresh(policy) => policy,
            Resolved::Cached(_) | Resolved::Stale(..) => panic!("expected a fresh answer"),
        };
        let first = resolve().await;
        tokio::time::advance(Duration::from_secs(61)).await;
        assert!(resolve().await.is_same_as(&first));
        assert!(resolver.cached_policy(&Key::GLOBAL).unwrap().is_same_as(&first));
        *quota.lock().unwrap() = 6;
        tokio::time::advance(Duration::from_secs(61)).await;
        assert_eq!(resolve().await.limits()[0].capacity(), 6);
        assert_eq!(resolver.cached_policy(&Key::GLOBAL).unwrap().limits()[0].capacity(), 6);
    }
}
