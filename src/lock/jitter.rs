//! Random pauses.

use std::time::Duration;

/// Between half of a time and all of it, so that failed callers do not retry at the same time.
pub(super) fn jittered(time: Duration) -> Duration {
    // Without random numbers, wait for the whole time.
    let share = getrandom::u32().unwrap_or(u32::MAX);
    time / 2 + time.mul_f64(f64::from(share) / f64::from(u32::MAX) / 2.0)
}
