//! An estimate of the clock of Redis.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The clock of Redis, as far as replies report it. It is behind by the time that a reply takes.
///
/// A cluster has one such clock, so the clocks of its nodes must agree.
#[derive(Debug)]
pub(crate) struct ServerClock {
    start: Instant,
    // What to add to the time since `start`, in milliseconds.
    offset: AtomicI64,
    // The time since `start` of the last reply, in milliseconds. 0 if there was none.
    last_reply: AtomicU64,
}

impl ServerClock {
    /// How long an estimate lasts: after a failover, the new primary may have another clock.
    const LASTS: Duration = Duration::from_secs(10);

    pub(crate) fn new() -> Self {
        Self { start: Instant::now(), offset: AtomicI64::new(0), last_reply: AtomicU64::new(0) }
    }

    /// A reply with the clock of Redis has just arrived.
    pub(crate) fn set(&self, server_ms: u64) {
        let elapsed = self.elapsed_ms();
        self.offset.store(server_ms.cast_signed() - elapsed.cast_signed(), Ordering::Relaxed);
        self.last_reply.store(elapsed.max(1), Ordering::Release);
    }

    /// The time of Redis in milliseconds since 1970. `None` if the last reply is too long ago.
    pub(crate) fn now_ms(&self) -> Option<u64> {
        let (last_reply, elapsed) = (self.last_reply.load(Ordering::Acquire), self.elapsed_ms());
        let is_known = last_reply > 0 && elapsed.saturating_sub(last_reply) < Self::LASTS.as_millis() as u64;
        is_known.then(|| self.estimate_ms())
    }

    /// The same, however long ago the last reply was.
    pub(crate) fn estimate_ms(&self) -> u64 {
        self.elapsed_ms().saturating_add_signed(self.offset.load(Ordering::Relaxed))
    }

    fn elapsed_ms(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }
}
