//! The clock of rate limits in memory.

use std::time::Duration;

use tokio::time::Instant;

/// Microseconds by tokio's clock. It starts at 1, since a receipt with a time of 0 means that nothing was charged.
pub(super) struct Clock {
    epoch: Instant,
}

impl Clock {
    pub(super) fn new() -> Self {
        Self { epoch: Instant::now().checked_sub(Duration::from_micros(1)).unwrap_or_else(Instant::now) }
    }

    #[inline]
    pub(super) fn now_us(&self) -> u64 {
        let elapsed = self.epoch.elapsed();
        elapsed.as_secs() * 1_000_000 + u64::from(elapsed.subsec_micros())
    }
}
