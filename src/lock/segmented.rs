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
use super::lease::{Lease, ReleaseOutcome};
use super::lock_key::LockKey;
use super::locks::{LockRequest, Locks, Terms, unless_lost};
use super::locks_state::Shared;
use super::metrics::{Meters, Outcome};
use super::pickup::{Acquire, Request};
use super::renewal::jittered;
use super::run_error::{RunError, ended};
use crate::error::StoreError;
use crate::key::Key;

/// A lock in several segments, for what would otherwise be one hot key: whoever comes takes any segment that is free.
///
/// One lock lets through one piece of work after the other: 50 a second if each takes 20 ms. A stock of 1,000 in 20 segments of 50
/// lets through 20 at a time. Each segment is a lock of its own, and lies in a slot of its own on a cluster.
///
/// ```
/// use tollgate::{Locks, MemoryBackend, lock::Segmented};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
/// let stock = Segmented::new(&Locks::new(MemoryBackend::new()), "sku:1", 20);
/// let mut left = [50; 20];
///
/// // Whatever segment is free, of those that are not sold out.
/// let segment = stock.any().among(|index| left[usize::from(index)] > 0).await?;
/// left[usize::from(segment.index())] -= 1;
/// segment.release().await?;
/// # Ok(())
/// # }
/// ```
///
/// If all there is to do is to count down, one atomic script needs no lock at all, and is faster.
#[derive(Clone, Debug)]
pub struct Segmented {
    locks: Locks,
    key: Key,
    segments: u16,
}

impl Segmented {
    /// `segments` locks in the place of the one of `key`. At least one: zero counts as one.
    pub fn new(locks: &Locks, key: impl Into<Key>, segments: u16) -> Self {
        Self { locks: locks.clone(), key: key.into(), segments: segments.max(1) }
    }

    /// How many segments there are.
    #[must_use]
    pub const fn segments(&self) -> u16 {
        self.segments
    }

    /// Takes any segment that is free, and waits if none is, for as long as [`Locks::wait`] says.
    ///
    /// One after the other is tried, beginning anywhere: a command for each that is not known to be held in this process. If none is free
    /// one of them is waited for, and after 100 ms all are tried again.
    ///
    /// One for which the store fails, or that too few replicas know of, is passed over like one that is held: another one may lie on a server
    /// that works. What it said first is the error only where none is granted in time.
    pub fn any(&self) -> SegmentRequest<fn(u16) -> bool> {
        SegmentRequest { segmented: self.clone(), wait: self.locks.waits(), among: |_| true }
    }

    /// Takes one certain segment, to move what is left in it to another one for instance. Numbers beyond the last begin again
    /// with the first.
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

/// A segment that is about to be taken: `.await` it, or [`run`](Self::run) something.
#[must_use = "nothing is asked for until this is awaited"]
pub struct SegmentRequest<F> {
    segmented: Segmented,
    wait: Duration,
    among: F,
}

/// For how long one segment is waited for before all are tried again.
const PATIENCE: Duration = Duration::from_millis(100);
/// The pause after the store has failed for all that are to be waited for.
const PAUSE: Duration = Duration::from_millis(50);

impl<F> SegmentRequest<F> {
    /// How long the segment outlives a holder that has died: see [`Locks::ttl`].
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.segmented.locks = self.segmented.locks.ttl(ttl);
        self
    }

    /// How long its lease is renewed at the most: see [`Locks::max_hold`].
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.segmented.locks = self.segmented.locks.max_hold(max_hold);
        self
    }

    /// How long to wait while no segment is free; with zero all of them are tried once. Where the store does not answer for some of
    /// them, the others are tried for as long as twice the [deadline](Locks::deadline) after that.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// Takes only segments for which `among` is true. If that is none, the request is [`LockError::Busy`].
    pub fn among<F2: Fn(u16) -> bool>(self, among: F2) -> SegmentRequest<F2> {
        SegmentRequest { segmented: self.segmented, wait: self.wait, among }
    }
}

impl<F: Fn(u16) -> bool> SegmentRequest<F> {
    /// Runs `body` with the segment, and gives that back when it is done. If its lease is lost before, `body` is dropped where it stands,
    /// and the error says so: see [`LockRequest::run`].
    ///
    /// # Errors
    ///
    /// See [`RunError`]. That the segment could not be given back in time is none: it is tried again in the background.
    ///
    /// # Cancellation
    ///
    /// Dropping the future drops `body` and gives the segment back.
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
            let hold = Arc::clone(lease.hold());
            ended(output, lease.release().await, [&*hold])
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

/// The segments of which a caller asks for one.
struct AnySegment {
    segmented: Segmented,
    wait: Duration,
    candidates: Vec<u16>,
}

impl AnySegment {
    fn meters(&self) -> &Meters {
        self.home().meters(&self.segmented.lock_key(0))
    }
}

impl Request for AnySegment {
    type Grant = Segment;

    fn home(&self) -> &Arc<Shared> {
        self.segmented.locks.home()
    }

    fn times(&self) -> (Duration, Duration) {
        let (_, terms) = self.segmented.locks.parts();
        (self.wait, terms.ttl)
    }

    fn begin(&mut self, begun: Instant, _: bool) -> Call<Result<Segment, LockError>> {
        // Before anything can fail that they count. What becomes of each try does not count by itself.
        self.meters();
        let (segmented, wait, candidates) = (self.segmented.clone(), self.wait, self.candidates.clone());
        Box::pin(async move { take_any(&segmented, begun, wait, candidates).await })
    }

    fn since(segment: &Segment) -> Instant {
        segment.lease.since()
    }

    fn busy(&self) -> LockError {
        Busy::new(self.segmented.lock_key(0), Duration::ZERO).into()
    }

    fn count(&self, outcome: &Result<Segment, LockError>, begun: Instant) {
        let ended = outcome.as_ref().map_or_else(|_| Instant::now(), |segment| segment.lease.since());
        self.meters().asked(Outcome::of(outcome), ended - begun);
    }
}

async fn take_any(
    segmented: &Segmented,
    begun: Instant,
    wait: Duration,
    candidates: Vec<u16>,
) -> Result<Segment, LockError> {
    let (home, terms) = segmented.locks.parts();
    let give_up = after(begun, wait);
    // Once the time is up, and the store has failed for one, each may take half of what is left: one for which it hangs leaves some of that to
    // the others.
    let limit = terms.limit();
    let answer_by = after(give_up, limit.saturating_mul(2));
    let left = || give_up.saturating_duration_since(Instant::now());
    let take = async |index: u16, wait, has_failed| {
        let lock = segmented.lock_key(index);
        let terms = Terms { wait, ..terms };
        let request = acquire::take(home, &lock, &terms, Instant::now(), home.gate.place());
        let share = answer_by.saturating_duration_since(Instant::now()) / 2;
        let late = |_| StoreError::late("no answer for a segment in its share of the time that was left");
        let is_short = has_failed && share < limit;
        let lease = if is_short { timeout(share, request).await.map_err(late)?? } else { request.await? };
        Ok::<_, LockError>(Segment { index, lease })
    };
    // Notes what may be otherwise with another segment, or in a moment. What came first was said by the store; after that there may have been
    // no time left for it to say anything.
    let pass_over = |failed: Option<LockError>, error| {
        let first = failed.unwrap_or(error);
        if Instant::now() < answer_by { Ok(Some(first)) } else { Err(first) }
    };
    loop {
        // Begins anywhere, so that those who come at the same time do not all try the same.
        let start = getrandom::u32().unwrap_or_default() as usize % candidates.len().max(1);
        let (before, behind) = candidates.split_at(start);
        let candidates = || behind.iter().chain(before);
        let mut refused = LockError::Busy(Busy::new(segmented.lock_key(0), Duration::ZERO));
        let mut failed = None;
        for index in candidates() {
            match take(*index, Duration::ZERO, failed.is_some()).await {
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
            match take(*index, left().min(PATIENCE), failed.is_some()).await {
                Err(error @ (LockError::QueueFull(_) | LockError::Nested(_))) => refused = error,
                // Another one may have become free.
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
            // None of them is to be waited for.
            None => return Err(refused),
        }
    }
}

/// Whether that is no reason not to take another segment.
const fn is_taken(error: &LockError) -> bool {
    matches!(error, LockError::Busy(_) | LockError::QueueFull(_) | LockError::Nested(_))
}

/// Whether the store may have another answer for another segment, or for the same one later.
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

/// A segment that is held.
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

    /// Gives the segment back: see [`Lease::release`].
    ///
    /// # Errors
    ///
    /// If the store does not answer.
    pub fn release(self) -> impl Future<Output = Result<ReleaseOutcome, StoreError>> + Send + use<> {
        self.lease.release()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryBackend;

    const LONG: Duration = Duration::from_secs(60);

    /// Four were tried, and then one of them was waited for.
    #[tokio::test(start_paused = true)]
    async fn one_that_is_free_is_found_at_once_among_many_that_are_not() {
        let backend = MemoryBackend::new();
        let (here, there) = (Locks::new(backend.clone()), Locks::new(backend));
        let (ours, theirs) = (Segmented::new(&here, "sku:1", 50), Segmented::new(&there, "sku:1", 50));
        let mut held = Vec::new();
        for index in (0..50).filter(|index| *index != 17) {
            held.push(theirs.one(index).await.unwrap());
        }
        let begun = Instant::now();
        for _ in 0..20 {
            let segment = ours.any().wait(LONG).await.unwrap();
            assert_eq!((segment.index(), begun.elapsed()), (17, Duration::ZERO));
            segment.release().await.unwrap();
        }
        // Whichever is given back, it is found soon.
        let _rest = ours.one(17).await.unwrap();
        let (segment, ()) = tokio::join!(ours.any().wait(LONG).into_future(), async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            drop(held.swap_remove(30));
        });
        drop(segment.unwrap());
        assert!(begun.elapsed() <= Duration::from_secs(1) + PATIENCE, "{:?}", begun.elapsed());
        assert!(ours.any().among(|_| false).wait(LONG).await.is_err_and(|error| error.is_busy()));
    }

    /// What one segment refuses, another may grant.
    #[tokio::test(start_paused = true)]
    async fn one_that_the_caller_has_or_that_too_many_wait_for_is_passed_over() {
        let locks = Locks::new(MemoryBackend::new()).wait(LONG).max_waiters(1);
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
