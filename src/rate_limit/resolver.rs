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
/// Policies of the same name, with limits of the same algorithms and windows in the same order, share their counts: who changes plans in the
/// middle of a window keeps what was used, or whatever else the new policy says in [`Policy::on_quota_change`].
///
/// Make a few policies and clone them, rather than one for each answer: what is derived from a policy, handles for metrics
/// included, is kept with it. (Where the answer for a key is equal to the one before, that one stays.)
///
/// # Caching
///
/// An answer is kept for a [time](Self::time_to_live), by default a minute, and for at most a [number](Self::capacity) of
/// keys, by default 10,000. Requests for one key ask once between them. If the resolver fails when an answer has become
/// old, or takes longer than half of the deadline, the old answer is used for as long again, or until the new one comes.
///
/// An error is remembered for a second, for at most [1,024](Self::MAX_FAILURES) keys: who makes up keys neither asks anew with each
/// request nor takes the place of an answer. Where such keys are answered, with a policy for everybody perhaps, the answers that were of no use
/// for a second request make room before those that were and are not old yet. A fifth of the room is for newcomers alone.
///
/// # Keys
///
/// The resolver is given the key as the layer has extracted it, which need not be what the client has sent: `tollgate::http::header` makes a
/// [digest](Key::digest) of the value, so that no secret is kept, and what was found by a fallback is [marked](Key::as_fallback). So let the table of
/// plans have such keys:
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
/// A plan may be known by something else than the key, by the API key itself for instance. Make the resolver [of that input](Self::of_input), and
/// pass it to [`RateLimitLayer::resolver_from`](super::RateLimitLayer::resolver_from).
///
/// # Errors
///
/// Where a resolver fails, or takes longer than the deadline of the layer, [`OnStoreError`](super::OnStoreError) says what happens to the
/// request, as if the store had failed. With `Local` the policy of the layer is enforced, in its own [mode](super::Mode). With `Deny` the request
/// is turned away, whatever that mode is: also where the resolver answers with nothing but shadows when it works. The store gets its own deadline afterwards, and is
/// not held to have failed: neither its metrics nor its [circuit](super::CircuitBreaker) are concerned.
///
/// The log has one line with the error when a resolver begins to fail, and one when it answers and nothing has failed for a minute, with no
/// key in either. So if a key that nobody knows is nothing unusual, do not fail, but answer with a policy for such keys.
///
/// # Cancellation
///
/// A question that has been asked goes on when the request that asked it is late or dropped, for no longer than a
/// [timeout](Self::timeout), and the next request finds the answer. It runs in a task of the runtime of that request; if this ends, whoever
/// waits in another one asks anew. At most [1,024](Self::MAX_RUNNING) are under way at a time, and further ones wait for a place.
pub struct PolicyResolver<V = Key> {
    // `None` where each request brings a question of its own.
    resolve: Option<Arc<Resolve<V>>>,
    time_to_live: Duration,
    timeout: Duration,
    capacity: usize,
    shared: Arc<Shared>,
}

type Answer = Pin<Box<dyn Future<Output = Result<Policy, StoreError>> + Send>>;
pub(super) type Resolve<V> = dyn Fn(V) -> Answer + Send + Sync;

/// Asks a resolver about one request. May hold a secret of the client, so it is dropped when the request is judged, and nothing of it is shown.
#[derive(Clone)]
pub struct Question(Arc<dyn Fn() -> Answer + Send + Sync>);

impl Question {
    pub(super) fn new<V: Clone + Send + Sync + 'static>(resolve: &Arc<Resolve<V>>, input: V) -> Self {
        let resolve = Arc::clone(resolve);
        Self(Arc::new(move || resolve(input.clone())))
    }

    fn ask(&self) -> Answer {
        (self.0)()
    }
}

impl fmt::Debug for Question {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Question(..)")
    }
}

/// What the clones of a resolver have in common.
struct Shared {
    known: Mutex<Cached>,
    // For what is under way.
    places: Arc<Semaphore>,
    outage: OutageTracker,
}

#[derive(Default)]
struct Cached {
    answers: ProbationaryCache<Policy>,
    // Apart, so that keys without an answer take the place of none that has one. So are those of which nothing is known yet.
    failures: ProbationaryCache<StoreError>,
    running: HashMap<Key, Running>,
    // How many attempts were begun.
    begun: u64,
}

type Outcome = Result<Policy, StoreError>;

/// An attempt as others see it.
struct Running {
    number: u64,
    began: Instant,
    outcome: watch::Receiver<Option<Outcome>>,
}

/// What there is to do for somebody who wants an answer.
enum Next {
    /// Nothing: here it is.
    Done(Outcome),
    /// Wait for an attempt that is under way.
    Wait(watch::Receiver<Option<Outcome>>),
    /// Carry out this one.
    Begin(Attempt),
    /// Wait for a place.
    Full,
}

/// A policy that was found, and how.
pub(super) enum Resolved {
    /// It was known.
    Cached(Policy),
    /// The resolver has just answered.
    Fresh(Policy),
    /// It is the one before, since the resolver fails or is late.
    Stale(Policy, StoreError),
}

/// How long nothing may fail for an outage to be over. Longer than with a store: a key that nobody knows may come at any time, and must
/// not fill the log.
const RECOVERED: Duration = Duration::from_secs(60);
/// How many errors are remembered, and how long.
const FAILURES: Bounds = Bounds { capacity: PolicyResolver::MAX_FAILURES, time_to_live: Duration::from_secs(1) };
/// How late an attempt may tell that its time is over. Later than that its runtime has stopped to run it.
const LATE: Duration = Duration::from_secs(1);

impl PolicyResolver {
    /// How many keys are asked about at a time.
    pub const MAX_RUNNING: usize = 1_024;

    /// For how many keys errors are remembered.
    pub const MAX_FAILURES: usize = 1_024;

    /// Asks `resolve` for the policy of a key.
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
    /// Asks `resolve` for the policy by a value that [`resolver_from`](super::RateLimitLayer::resolver_from) finds in the request.
    ///
    /// ```
    /// use tollgate::rate_limit::PolicyResolver;
    /// use tollgate::{BoxError, Policy, Quota};
    ///
    /// #[derive(Clone)]
    /// struct ApiKey(String);
    ///
    /// async fn quota_of(ApiKey(key): &ApiKey) -> Result<u32, BoxError> {
    ///     Ok(if key == "the-api-key-of-alice" { 1_000 } else { 100 }) // or what the database says
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
        let places = Arc::new(Semaphore::new(PolicyResolver::MAX_RUNNING));
        Self {
            resolve: Some(Arc::new(boxed)),
            time_to_live: Duration::from_secs(60),
            timeout: Duration::from_secs(5),
            capacity: 10_000,
            shared: Arc::new(Shared {
                known: Mutex::default(),
                places,
                outage: OutageTracker::until_quiet_for(RECOVERED),
            }),
        }
    }

    /// How long an answer is used before the resolver is asked again. Defaults to a minute.
    #[must_use]
    pub fn time_to_live(self, time_to_live: Duration) -> Self {
        Self { time_to_live, ..self }
    }

    /// How long the resolver may take for one key before it is given up, whoever still waits for it. Defaults to 5 s.
    ///
    /// Requests wait no longer than the [deadline](super::RateLimitLayer::deadline) of their layer.
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// For how many keys answers are kept, at least one. Defaults to 10,000.
    #[must_use]
    pub fn capacity(self, keys: usize) -> Self {
        Self { capacity: keys.max(1), ..self }
    }

    /// Forgets the answer for `key`, or the error, so that the next request asks anew: for when somebody has just changed plans.
    ///
    /// What was asked before is not kept when it is answered afterwards.
    pub fn forget(&self, key: &Key) {
        let mut known = self.shared.lock();
        known.answers.remove(key);
        known.failures.remove(key);
        known.running.remove(key);
    }

    /// The question by an input, and the settings and the cache, which do not depend on its type.
    pub(super) fn into_parts(self) -> (Option<Arc<Resolve<V>>>, PolicyResolver) {
        let Self { resolve, time_to_live, timeout, capacity, shared } = self;
        (resolve, PolicyResolver { resolve: None, time_to_live, timeout, capacity, shared })
    }
}

impl PolicyResolver {
    /// Whether it is for each request to say by what the policy is found.
    pub(super) const fn needs_input(&self) -> bool {
        self.resolve.is_none()
    }

    /// The question about a request: by its key, or the one that the request has brought, if any.
    pub(super) fn question(&self, key: &Key, question: Option<&Question>) -> Option<Question> {
        match &self.resolve {
            Some(resolve) => Some(Question::new(resolve, *key)),
            None => question.cloned(),
        }
    }

    /// Those of the answers.
    fn bounds(&self) -> Bounds {
        Bounds { capacity: self.capacity, time_to_live: self.time_to_live }
    }

    /// The policy, if it is known without asking.
    pub(super) fn known(&self, key: &Key) -> Option<Policy> {
        self.fresh(&mut self.shared.lock(), key)
    }

    fn fresh(&self, known: &mut Cached, key: &Key) -> Option<Policy> {
        known.answers.use_fresh(key, self.bounds()).cloned()
    }

    /// The policy of the key. Where there is an old answer, a new one is waited for no longer than `patience`.
    pub(super) async fn resolve(
        &self,
        key: &Key,
        question: &Question,
        patience: Duration,
    ) -> Result<Resolved, StoreError> {
        let Some((old, patience)) = self.old(key, patience) else { return self.ask(key, question).await };
        Deadline::new(self.ask(key, question), patience).await.or_else(|error| {
            self.use_on(key);
            Ok(Resolved::Stale(old, error))
        })
    }

    /// Whether the log has been told that the resolver fails.
    pub(super) fn outage(&self) -> &OutageTracker {
        &self.shared.outage
    }

    /// The answer that there was before, and how long a new one is waited for.
    fn old(&self, key: &Key, patience: Duration) -> Option<(Policy, Duration)> {
        let known = self.shared.lock();
        let (_, old) = known.answers.get(key)?;
        // From when it was asked for, so that not each request waits anew for one that is late.
        let gone = known.running.get(key).map_or(Duration::ZERO, |running| running.began.elapsed());
        Some((old.clone(), patience.saturating_sub(gone)))
    }

    /// Makes an old answer do for as long again, unless there is another one by now, or it was forgotten.
    fn use_on(&self, key: &Key) {
        if let Some((since, _)) = self.shared.lock().answers.get_mut(key)
            && since.elapsed() >= self.time_to_live
        {
            *since = Instant::now();
        }
    }

    /// Asks, or waits for the answer if somebody has asked.
    async fn ask(&self, key: &Key, question: &Question) -> Result<Resolved, StoreError> {
        let mut place = None;
        loop {
            match self.next(key, &mut place) {
                Next::Done(outcome) => return outcome.map(Resolved::Cached),
                Next::Wait(outcome) => {
                    // For those who need it.
                    place = None;
                    if let Some(outcome) = told(outcome).await {
                        return outcome.map(Resolved::Fresh);
                    }
                    // It has ended with its runtime.
                }
                Next::Begin(attempt) => {
                    let outcome = attempt.outcome.subscribe();
                    self.begin(attempt, question.clone()).await;
                    // Not once more here: this runtime is about to end.
                    let ended = || Err(StoreError::unavailable("the runtime of the policy resolver has ended"));
                    return told(outcome).await.unwrap_or_else(ended).map(Resolved::Fresh);
                }
                Next::Full => place = Arc::clone(&self.shared.places).acquire_owned().await.ok(),
            }
        }
    }

    fn next(&self, key: &Key, place: &mut Option<OwnedSemaphorePermit>) -> Next {
        let mut known = self.shared.lock();
        if let Some(policy) = self.fresh(&mut known, key) {
            return Next::Done(Ok(policy));
        }
        if let Some((since, error)) = known.failures.get(key)
            && since.elapsed() < FAILURES.time_to_live
        {
            return Next::Done(Err(error.clone()));
        }
        if let Some(running) = known.running.get(key)
            && running.began.elapsed() <= self.timeout.saturating_add(LATE)
        {
            return Next::Wait(running.outcome.clone());
        }
        let place = place.take().or_else(|| Arc::clone(&self.shared.places).try_acquire_owned().ok());
        let Some(place) = place else { return Next::Full };
        let (sender, outcome) = watch::channel(None);
        known.begun += 1;
        let number = known.begun;
        known.running.insert(*key, Running { number, began: Instant::now(), outcome });
        let (shared, bounds) = (Arc::clone(&self.shared), self.bounds());
        Next::Begin(Attempt { shared, key: *key, number, bounds, outcome: sender, _place: place })
    }

    /// Carries out an attempt, in the background if it has to wait for something.
    async fn begin(&self, attempt: Attempt, question: Question) {
        let timeout = self.timeout;
        let Ok(runtime) = Handle::try_current() else {
            // There is nothing to run it but the request itself.
            return attempt.end(question.ask().await);
        };
        let mut course = Box::pin(
            async move {
                let outcome = Deadline::new(question.ask(), timeout).await;
                attempt.end(outcome);
            }
            .in_current_span(),
        );
        // A resolver that need not ask anybody needs no task. If it panics, that is no more the request's than in a task.
        let begun = catch_unwind(AssertUnwindSafe(|| {
            let first = course.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            if first.is_pending() {
                drop(runtime.spawn(course));
            }
        }));
        begun.unwrap_or_else(discard);
    }
}

/// What became of an attempt; nothing if it was dropped.
async fn told(mut outcome: watch::Receiver<Option<Outcome>>) -> Option<Outcome> {
    outcome.wait_for(Option::is_some).await.ok().and_then(|outcome| outcome.clone())
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Cached> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An attempt to find out the policy of a key, as whoever carries it out sees it.
struct Attempt {
    shared: Arc<Shared>,
    key: Key,
    number: u64,
    bounds: Bounds,
    outcome: watch::Sender<Option<Outcome>>,
    _place: OwnedSemaphorePermit,
}

impl Attempt {
    /// Remembers what has come of it, unless it was forgotten in between, and tells all who wait.
    fn end(&self, mut outcome: Outcome) {
        let mut known = self.shared.lock();
        if self.leave(&mut known) {
            // The one that is known already, if that says the same: what is derived from a policy is kept with it.
            if let (Ok(policy), Some((_, before))) = (&mut outcome, known.answers.get(&self.key))
                && policy == before
            {
                policy.clone_from(before);
            }
            match &outcome {
                Ok(policy) => {
                    known.failures.remove(&self.key);
                    known.answers.insert(self.key, policy.clone(), self.bounds);
                }
                Err(error) => known.failures.insert(self.key, error.clone(), FAILURES),
            }
        }
        drop(known);
        self.outcome.send_replace(Some(outcome));
    }

    /// Is not under way any more. Answers whether it was what is known to be.
    fn leave(&self, known: &mut Cached) -> bool {
        let is_known = known.running.get(&self.key).is_some_and(|running| running.number == self.number);
        if is_known {
            known.running.remove(&self.key);
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
            // So that those who wait do not try the same one after the other.
            self.end(Err(StoreError::other("the policy resolver has panicked")));
        } else {
            // Before they find out that nobody will tell them, so that the next one begins anew.
            self.leave(&mut self.shared.lock());
        }
    }
}

// By hand: `derive` would ask for `V: Clone`.
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

    /// With each new answer the memory backend would find that the key was counted by another policy, and go the long way from then on.
    #[tokio::test(start_paused = true)]
    async fn an_answer_that_says_the_same_is_the_same_policy() {
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
            Resolved::Cached(_) | Resolved::Stale(..) => panic!("the answer has become old"),
        };
        let first = resolve().await;
        tokio::time::advance(Duration::from_secs(61)).await;
        assert!(resolve().await.is_same_as(&first));
        assert!(resolver.known(&Key::GLOBAL).unwrap().is_same_as(&first));
        *quota.lock().unwrap() = 6;
        tokio::time::advance(Duration::from_secs(61)).await;
        assert_eq!(resolve().await.limits()[0].capacity(), 6);
        assert_eq!(resolver.known(&Key::GLOBAL).unwrap().limits()[0].capacity(), 6);
    }
}
