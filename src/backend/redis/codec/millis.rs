//! Durations as Redis counts them.

use std::time::Duration;

/// Milliseconds, rounded up, so that a lease is never shorter than requested.
pub(crate) fn millis(ttl: Duration) -> u64 {
    ttl.as_nanos().div_ceil(1_000_000) as u64
}
