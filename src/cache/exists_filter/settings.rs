use std::time::Duration;

use crate::store::deadline::DEFAULT_DEADLINE;

/// The settings of a filter: see the setters of [`ExistsFilter`](super::ExistsFilter).
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    pub(super) capacity: u64,
    pub(super) error_rate: f64,
    pub(super) ttl: Duration,
    pub(super) visible_within: Duration,
    pub(super) deadline: Duration,
}

impl Settings {
    pub(super) const fn new(capacity: u64) -> Self {
        Self {
            capacity,
            error_rate: 0.01,
            ttl: Duration::from_secs(30 * 86_400),
            visible_within: Duration::from_secs(10),
            deadline: DEFAULT_DEADLINE,
        }
    }
}
