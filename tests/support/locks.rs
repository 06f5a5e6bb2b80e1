//! Records the holds of a lock, and checks mutual exclusion and fencing.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tollgate::Lease;

/// A resource in Redis that is guarded by a lock. It refuses reads and writes with a smaller fence than it has seen.
pub const GUARDED: &str = r"
local seen = tonumber(redis.call('HGET', KEYS[1], 'fence') or 0)
if tonumber(ARGV[1]) < seen then
  redis.call('HINCRBY', KEYS[1], 'refused', 1)
  return -1
end
redis.call('HSET', KEYS[1], 'fence', ARGV[1])
if ARGV[2] ~= '' then
  redis.call('HSET', KEYS[1], 'value', ARGV[2])
  redis.call('HINCRBY', KEYS[1], 'writes', 1)
end
return tonumber(redis.call('HGET', KEYS[1], 'value') or 0)";

/// One hold of a lock, from its grant to the last instant at which the lease was known to be valid.
#[derive(Clone, Copy, Debug)]
pub struct LeaseGuard {
    pub fence: u64,
    pub from: Instant,
    pub until: Instant,
}

/// The holds of all participants.
#[derive(Clone, Debug, Default)]
pub struct History(Arc<Mutex<Vec<LeaseGuard>>>);

impl History {
    /// Holds the lock for `time`, or until the lease is lost. Returns whether the lease lasted.
    pub async fn stay(&self, lease: &Lease, time: Duration) -> bool {
        let from = Instant::now();
        let mut until = None;
        let is_whole = loop {
            // Taken before the check: if the check succeeds, the holder may have relied on the lock at this instant.
            let now = Instant::now();
            if lease.check().is_err() {
                break false;
            }
            until = Some(now);
            if from.elapsed() >= time {
                break true;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        };
        // If the process stood still right after the grant, the holder never learned that it had the lock.
        if let Some(until) = until {
            self.0.lock().expect("not poisoned").push(LeaseGuard { fence: lease.fence(), from, until });
        }
        is_whole
    }

    pub fn len(&self) -> usize {
        self.0.lock().expect("not poisoned").len()
    }

    /// Checks that no two holds overlap, and that later holds have larger fences.
    pub fn check(&self) {
        let mut stays = self.0.lock().expect("not poisoned").clone();
        stays.sort_by_key(|stay| stay.fence);
        for pair in stays.windows(2) {
            let [one, next] = pair else { continue };
            assert!(one.fence < next.fence, "the same fence twice: {one:?} {next:?}");
            assert!(one.from < next.from, "a larger fence came first: {one:?} {next:?}");
            assert!(one.until <= next.from, "two holders at a time: {one:?} {next:?}");
        }
    }
}

/// Polls a future up to `polls` times, and drops it then.
pub struct DropAt<F> {
    future: Option<Pin<Box<F>>>,
    polls_left: u32,
}

impl<F: Future> DropAt<F> {
    pub fn new(polls: u32, future: F) -> Self {
        Self { future: Some(Box::pin(future)), polls_left: polls }
    }
}

impl<F: Future> Future for DropAt<F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.polls_left == 0 {
            self.future = None;
            return Poll::Ready(None);
        }
        self.polls_left -= 1;
        let Some(future) = &mut self.future else { return Poll::Ready(None) };
        if let Poll::Ready(output) = future.as_mut().poll(cx) {
            return Poll::Ready(Some(output));
        }
        if self.polls_left == 0 {
            self.future = None;
            return Poll::Ready(None);
        }
        Poll::Pending
    }
}
