//! What happened under a lock, written down, and what must be true of it.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tollgate::Lease;

/// What is under a lock, in Redis: reads and writes of whoever has a smaller fence than it has seen are refused.
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

/// One stay under a lock: from when the lease was there until it was known to be given back or lost.
#[derive(Clone, Copy, Debug)]
pub struct LeaseGuard {
    pub fence: u64,
    pub from: Instant,
    pub until: Instant,
}

/// The stays of all who took part.
#[derive(Clone, Debug, Default)]
pub struct History(Arc<Mutex<Vec<LeaseGuard>>>);

impl History {
    /// Stays under the lock for a while, or until the lease is lost; true if it was not.
    pub async fn stay(&self, lease: &Lease, time: Duration) -> bool {
        let from = Instant::now();
        let mut until = None;
        let is_whole = loop {
            // Whoever is told that the lock is theirs after this instant may have relied on it then.
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
        // Whoever stood still as soon as it had the lock was never told that it has it.
        if let Some(until) = until {
            self.0.lock().expect("nobody panics").push(LeaseGuard { fence: lease.fence(), from, until });
        }
        is_whole
    }

    pub fn len(&self) -> usize {
        self.0.lock().expect("nobody panics").len()
    }

    /// Nobody was there with somebody else, and whoever came later had a larger fence.
    pub fn check(&self) {
        let mut stays = self.0.lock().expect("nobody panics").clone();
        stays.sort_by_key(|stay| stay.fence);
        for pair in stays.windows(2) {
            let [one, next] = pair else { continue };
            assert!(one.fence < next.fence, "one fence twice: {one:?} {next:?}");
            assert!(one.from < next.from, "a larger fence came first: {one:?} {next:?}");
            assert!(one.until <= next.from, "two at a time: {one:?} {next:?}");
        }
    }
}

/// Polls a future so many times and drops it then, unless it is done before.
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
