use std::time::Duration;

use super::store::{NewEntry, TagGeneration};
use crate::error::ConfigError;
use crate::key::Key;

/// The options of a cache: see the setters of [`Cache`](super::Cache).
#[derive(Clone, Debug)]
pub(super) struct Options {
    pub(super) name: Key,
    pub(super) fresh_for: Duration,
    pub(super) stale_for: Duration,
    pub(super) absent_for: Duration,
    pub(super) jitter: f64,
    pub(super) early_refresh: f64,
    pub(super) soft_timeout: Duration,
    pub(super) error_for: Duration,
    pub(super) load_timeout: Duration,
    pub(super) lease: Duration,
    pub(super) max_len: usize,
    pub(super) tags: Vec<Key>,
}

impl Options {
    pub(super) fn new(name: Key, fresh_for: Duration) -> Self {
        Self {
            name,
            fresh_for: fresh_for.min(NewEntry::MAX_TTL),
            stale_for: Duration::ZERO,
            absent_for: fresh_for.min(Duration::from_secs(10)),
            jitter: 0.1,
            early_refresh: 1.0,
            soft_timeout: Duration::ZERO,
            error_for: Duration::from_secs(1),
            load_timeout: Duration::from_secs(30),
            lease: Duration::from_secs(2),
            max_len: 1 << 20,
            tags: Vec::new(),
        }
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let times = [("fresh_for", self.fresh_for), ("load_timeout", self.load_timeout)];
        if let Some((setting, _)) = times.into_iter().find(|(_, time)| time.is_zero()) {
            return Err(ConfigError::ZeroTimeout { setting });
        }
        if self.tags.len() > TagGeneration::MAX {
            return Err(ConfigError::TooManyTags { tags: self.tags.len(), max: TagGeneration::MAX });
        }
        Ok(())
    }

    /// How long the generation of a tag is kept: longer than most entries with the tag. If the generation expires first, the entries are
    /// loaded again.
    pub(super) fn tag_ttl(&self) -> Duration {
        self.fresh_for.saturating_add(self.stale_for).saturating_add(Duration::from_secs(3_600)).min(NewEntry::MAX_TTL)
    }

    /// The entry for a value, or for its absence. `loaded` has the times that the loader has set: how long the value is fresh, and how long
    /// it is stale after that.
    pub(super) fn entry(
        &self,
        value: Option<Vec<u8>>,
        loaded: (Option<Duration>, Option<Duration>),
        load_time: Duration,
        tags: Vec<TagGeneration>,
    ) -> NewEntry {
        let (fresh_for, stale_for) = loaded;
        let (default, stale_for) = if value.is_some() {
            (self.fresh_for, stale_for.unwrap_or(self.stale_for))
        } else {
            (self.absent_for, Duration::ZERO)
        };
        let fresh_for = fresh_for.unwrap_or(default).min(NewEntry::MAX_TTL);
        let fresh_for = fresh_for.mul_f64(1.0 - self.jitter * random());
        let ttl = fresh_for.saturating_add(stale_for).min(NewEntry::MAX_TTL);
        NewEntry { value: value.map(Into::into), fresh_for, ttl, load_time, tags }
    }

    /// Whether to refresh a fresh entry already: XFetch (Vattani, Chierichetti, Lowenstein: Optimal Probabilistic Cache Stampede Prevention,
    /// VLDB 2015).
    pub(super) fn refreshes_early(&self, fresh_for: Duration, load_time: Duration) -> bool {
        // Not 0, whose logarithm is infinite.
        let draw = || 1.0 - random();
        let scale = load_time.as_secs_f64() * self.early_refresh;
        // The smallest draw is 2^-32, whose negative logarithm is 22.2. So above 32 times the scale no draw refreshes, and none is made.
        fresh_for.as_secs_f64() <= scale * 32.0 && scale * -draw().ln() >= fresh_for.as_secs_f64()
    }
}

/// A number from 0 up to but not including 1.
fn random() -> f64 {
    f64::from(getrandom::u32().unwrap_or_default()) / (f64::from(u32::MAX) + 1.0)
}
