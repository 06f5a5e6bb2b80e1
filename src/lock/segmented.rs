use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::acquire;
use super::context::Held;
use super::erased::Call;
use super::error::{Busy, LockError};
use super::grant::after;
use super::jitter::jittered;
use super::lease::Lease;
use super::lock_key::LockKey;
use super::locks::{LockRequest, Locks, unless_lost};
use super::locks_state::LocksState;
use super::metrics::{Metrics, Outcome};
use super::options::AcquireOptions;
use super::release_outcome::ReleaseOutcome;
use super::run_error::{RunError, run_result};
use super::shared_call::{Acquire, RepeatableAcquisition};
use crate::error::StoreError;
use crate::key::Key;

/// A lock in several segments, for a hot key: each caller takes any free segment.
///
/// One lock admits one piece of work after the other: 50 a second if each takes 20 ms. A stock of 1,000 in 20 segments of 50
/// admits 20 at a time. Each segment is a lock of its own, in a slot of its own on a cluster.
///
/// ```
/// use tollgate::{Locks, MemoryBackend, lock::Segmented};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
/// let stock = Segmented::new(&Locks::new(MemoryBackend::new(), "stock"), "sku:1", 20);
/// let mut left = [50; 20];
///
/// // Any free segment that is not sold out.
/// let segment = stock.any().among(|index| left[usize::from(index)] > 0).await?;
/// left[usize::from(segment.index())] -= 1;
/// segment.release().await?;
/// # Ok(())
/// # }
/// ```
///
/// If you only count down, one atomic script needs no lock and is faster.
#[derive(Clone, Debug)]
pub struct Segmented {
    locks: Locks,
    key: Key,
    segments: u16,
}

impl Segmented {
    /// `segments` locks instead of one for `key`. Zero counts as one.
    pub fn new(locks: &Locks, key: impl Into<Key>, segments: u16) -> Self {
        Self { locks: locks.clone(), key: key.into(), segments: segments.max(1) }
    }

    /// The number of segments.
    #[must_use]
    pub const fn segments(&self) -> u16 {
        self.segments
    }

    /// Acquires any free segment, and waits if none is free, as long as [`Locks::wait`].
    ///
    /// It tries one segment after the other from a random start. A try sends one command, or none if this process holds the
    /// segment. If no segment is free, it waits for one of them for up to 100 ms, and then tries all again.
    ///
    /// A segment with a store error or too few replicas is skipped like a held one, since another segment may be on a working
    /// server. Such an error is returned only if no segment is granted in time.
    pub fn any(&self) -> SegmentRequest<fn(u16) -> bool> {
        SegmentRequest { segmented: self.clone(), wait: self.locks.default_wait(), among: |_| true }
    }

    /// Acquires one given segment, for instance to move its remaining stock. Numbers beyond the last one wrap around.
    pub fn one(&self, index: u16) -> LockRequest {
        self.locks.lock(self.name(index))
    }

    fn name(&self, index: u16) -> Key {
        (self.key, index % self.segments).into()
    }

    fn lock_key(&self, index: u16) -> LockKey {
        self.locks.lock_key(self.name(index))
    }
}

/// An acquisition of a segment: `.await` it, or [`run`](Self::run) a body under it.
#[must_use = "nothing is asked for until this is awaited"]
pub struct SegmentRequest<F> {
    segmented: Segmented,
    wait: Duration,
    among: F,
}

/// How long to wait for one segment before all are tried again.
const SEGMENT_WAIT: Duration = Duration::from_millis(100);
/// The pause after the store failed for all segments.
const PAUSE: Duration = Duration::from_millis(50);

impl<F> SegmentRequest<F> {
    /// How long the segment outlives a dead holder: see [`Locks::ttl`].
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.segmented.locks = self.segmented.locks.ttl(ttl);
        self
    }

    /// How long the lease of the segment is renewed at most: see [`Locks::max_hold`].
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.segmented.locks = self.segmented.locks.max_hold(max_hold);
        self
    }

    /// How long to wait while no segment is free. With zero, each segment is tried once. If the store does not reply for some
    /// segments, the others are tried for up to twice the [deadline](Locks::deadline) after the end of the wait.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// Acquires only segments for which `among` is true. If it is true for none, the result is [`LockError::Busy`].
    pub fn among<F2: Fn(u16) -> bool>(self, among: F2) -> SegmentRequest<F2> {
        SegmentRequest { segmented: self.segmented, wait: self.wait, among }
    }
}

impl<F: Fn(u16) -> bool> SegmentRequest<F> {
    /// Runs `body` with the segment, and releases the segment afterwards. If the lease is lost while `body` runs, `body` is dropped,
    /// and the error says so: see [`LockRequest::run`].
    ///
    /// # Errors
    ///
    /// See [`RunError`]. A late release is no error: it is retried in the background.
    ///
    /// # Cancellation
    ///
    /// Dropping the future drops `body` and releases the segment.
    pub fn run<B, R, T>(self, body: B) -> impl Future<Output = Result<T, RunError<T>>> + Send + use<F, B, R, T>
    where
        B: FnOnce(Segment) -> R + Send,
        R: Future<Output = T> + Send,
        T: Send,
    {
        let request = self.into_future();
        async move {
            let Segment { index, lease } = request.await?;
            let outcome = {
                let segment = Segment { index, lease: lease.reenter() };
                let body = pin!(Held::with(&lease).within(body(segment)));
                unless_lost(body, lease.lost()).await
            };
            let output = outcome?;
            let grant = Arc::clone(lease.grant());
            let _ = lease.release().await;
            run_result(output, [&*grant])
        }
    }
}

impl<F: Fn(u16) -> bool> IntoFuture for SegmentRequest<F> {
    type Output = Result<Segment, LockError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        let Self { segmented, wait, among } = self;
        let candidates = (0..segmented.segments).filter(|index| among(*index)).collect();
        Box::pin(Acquire::new(AnySegment { segmented, wait, candidates }))
    }
}

/// The candidate segments of one acquisition.
struct AnySegment {
    segmented: Segmented,
    wait: Duration,
    candidates: Vec<u16>,
}

impl AnySegment {
    fn metrics(&self) -> &Metrics {
        self.shared().metrics()
    }
}

impl RepeatableAcquisition for AnySegment {
    type Grant = Segment;

    fn shared(&self) -> &Arc<LocksState> {
        self.segmented.locks.shared()
    }

    fn wait_and_ttl(&self) -> (Duration, Duration) {
        let (_, options) = self.segmented.locks.parts();
        (self.wait, options.ttl)
    }

    fn begin(&mut self, start: Instant, _: bool) -> Call<Result<Segment, LockError>> {
        // Create the metrics before the first failure that they count. They count the whole request, not the tries of single segments.
        self.metrics();
        let (segmented, wait, candidates) = (self.segmented.clone(), self.wait, self.candidates.clone());
        Box::pin(async move { take_any(&segmented, start, wait, candidates).await })
    }

    fn granted_at(segment: &Segment) -> Instant {
        segment.lease.since()
    }

    fn busy(&self) -> LockError {
        Busy::new(self.segmented.lock_key(0), Duration::ZERO).into()
    }

    fn count(&self, outcome: &Result<Segment, LockError>, start: Instant) {
        let end = outcome.as_ref().map_or_else(|_| Instant::now(), |segment| segment.lease.since());
        self.metrics().record_request(Outcome::of(outcome), end - start);
    }
}

async fn take_any(
    segmented: &Segmented,
    start: Instant,
    wait: Duration,
    candidates: Vec<u16>,
) -> Result<Segment, LockError> {
    let (shared, options) = segmented.locks.parts();
    let wait_end = after(start, wait);
    // If the store has failed for a segment, each try after `wait_end` may use half of the time until `answer_deadline`. So a segment on a
    // hanging server leaves time for the others.
    let call_timeout = options.call_timeout();
    let answer_deadline = after(wait_end, call_timeout.saturating_mul(2));
    let left = || wait_end.saturating_duration_since(Instant::now());
    let acquire = async |index: u16, wait, has_failed| {
        let lock = segmented.lock_key(index);
        let options = AcquireOptions { wait, ..options };
        let request = acquire::acquire_one(shared, &lock, &options, Instant::now(), shared.queues.new_position());
        let share = answer_deadline.saturating_duration_since(Instant::now()) / 2;
        let late = |_| StoreError::late("the store did not answer for a segment in its share of the remaining time");
        let is_short = has_failed && share < call_timeout;
        let lease = if is_short { timeout(share, request).await.map_err(late)?? } else { request.await? };
        Ok::<_, LockError>(Segment { index, lease })
    };
    // Skips a segment after a passing failure. Keeps the first failure, and returns it once `answer_deadline` has passed. The first one
    // came from the store. Later ones may be due to lack of time.
    let pass_over = |failed: Option<LockError>, error| {
        let first = failed.unwrap_or(error);
        if Instant::now() < answer_deadline { Ok(Some(first)) } else { Err(first) }
    };
    loop {
        // A random start, so that concurrent callers do not all try the same segment.
        let start = getrandom::u32().unwrap_or_default() as usize % candidates.len().max(1);
        let (before, behind) = candidates.split_at(start);
        let candidates = || behind.iter().chain(before);
        let mut refused = LockError::Busy(Busy::new(segmented.lock_key(0), Duration::ZERO));
        let mut failed = None;
        for index in candidates() {
            match acquire(*index, Duration::ZERO, failed.is_some()).await {
                Err(error) if is_taken(&error) => refused = error,
                Err(error) if is_passing(&error) => failed = pass_over(failed, error)?,
                answer => return answer,
            }
        }
        if left().is_zero() || candidates().next().is_none() {
            return Err(failed.unwrap_or(refused));
        }
        let mut has_waited = false;
        for index in candidates() {
            match acquire(*index, left().min(SEGMENT_WAIT), failed.is_some()).await {
                Err(error @ (LockError::QueueFull(_) | LockError::Nested(_))) => refused = error,
                // Another segment may have become free.
                Err(LockError::Busy(_)) => {
                    has_waited = true;
                    break;
                }
                Err(error) if is_passing(&error) => failed = pass_over(failed, error)?,
                answer => return answer,
            }
        }
        match failed {
            _ if has_waited => {}
            Some(_) => sleep(jittered(PAUSE).min(left())).await,
            // No segment can be waited for: each has a full wait queue, or is held by this caller.
            None => return Err(refused),
        }
    }
}

/// Whether this segment was refused, while another one may still be granted.
const fn is_taken(error: &LockError) -> bool {
    matches!(error, LockError::Busy(_) | LockError::QueueFull(_) | LockError::Nested(_))
}

/// Whether the store may answer differently for another segment, or later.
fn is_passing(error: &LockError) -> bool {
    match error {
        LockError::NotReplicated(_) => true,
        LockError::Store(error) => error.is_timeout() || error.is_unavailable(),
        _ => false,
    }
}

impl<F> fmt::Debug for SegmentRequest<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SegmentRequest").field("segmented", &self.segmented).finish_non_exhaustive()
    }
}

/// A held segment.
#[derive(Debug)]
#[must_use = "the segment is given back when this is dropped"]
pub struct Segment {
    index: u16,
    lease: Lease,
}

impl Segment {
    /// Its number, from 0.
    #[must_use]
    pub const fn index(&self) -> u16 {
        self.index
    }

    /// Its lease, with a fence that rises with each grant of this segment.
    pub const fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Releases the segment: see [`Lease::release`].
    ///
    /// # Errors
    ///
    /// If the store does not reply.
    pub fn release(self) -> impl Future<Output = Result<ReleaseOutcome, StoreError>> + Send + use<> {
        self.lease.release()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryBackend;

    const LONG: Duration = Duration::from_secs(60);

    /// An earlier version tried only four segments before it waited for one of them.
    #[tokio::test(start_paused = true)]
    async fn one_that_is_free_is_found_at_once_among_many_that_are_not() {
        let backend = MemoryBackend::new();
        let (here, there) = (Locks::new(backend.clone(), "stock"), Locks::new(backend, "stock"));
        let (ours, theirs) = (Segmented::new(&here, "sku:1", 50), Segmented::new(&there, "sku:1", 50));
        let mut held = Vec::new();
        for index in (0..50).filter(|index| *index != 17) {
            held.push(theirs.one(index).await.unwrap());
        }
        let start = Instant::now();
        for _ in 0..20 {
            let segment = ours.any().wait(LONG).await.unwrap();
            assert_eq!((segment.index(), start.elapsed()), (17, Duration::ZERO));
            segment.release().await.unwrap();
        }
        // The release of any segment is noticed soon.
        let _rest = ours.one(17).await.unwrap();
        let (segment, ()) = tokio::join!(ours.any().wait(LONG).into_future(), async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            drop(held.swap_remove(30));
        });
        drop(segment.unwrap());
        assert!(start.elapsed() <= Duration::from_secs(1) + SEGMENT_WAIT, "{:?}", start.elapsed());
        assert!(ours.any().among(|_| false).wait(LONG).await.is_err_and(|error| error.is_busy()));
    }

    /// A segment may be granted although another one was refused.
    #[tokio::test(start_paused = true)]
    async fn own_and_crowded_segments_are_skipped() {
        let locks = Locks::new(MemoryBackend::new(), "stock").wait(LONG).max_waiters(1);
        let segments = Segmented::new(&locks, "sku:1", 2);
        for _ in 0..20 {
            let inner = segments.one(0).run(async |_| segments.any().await.unwrap().index()).await;
            assert_eq!(inner.unwrap(), 1);
            let only = segments.one(0).run(async |_| segments.any().among(|index| index == 0).await).await;
            assert!(matches!(only.unwrap(), Err(LockError::Nested(_))));

            let (first, second) = (segments.one(0).await.unwrap(), segments.one(1).await.unwrap());
            let waiter = tokio::spawn(segments.one(0).into_future());
            tokio::task::yield_now().await;
            let (segment, ()) = tokio::join!(segments.any().into_future(), async {
                tokio::time::sleep(Duration::from_millis(50)).await;
                drop(second);
            });
            assert_eq!(segment.unwrap().index(), 1);
            drop(first);
            drop(waiter.await.unwrap().unwrap());
        }
    }
}
