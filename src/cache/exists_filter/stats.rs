use std::time::Duration;

use super::layout::Layout;
use super::store::Version;

/// The state of a filter that is in use.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct ExistsFilterStats {
    /// The number of different keys, less those that were false positives when they were added.
    pub keys: u64,
    /// The part of the bits that is set, from 0 to 1.
    pub fill_ratio: f64,
    /// The memory of the filter, in bytes.
    pub bytes: u64,
    /// The time since the filter was built.
    pub age: Duration,
    /// Whether a new version is built at the moment.
    pub is_building: bool,
}

impl ExistsFilterStats {
    pub(super) fn new(active: &Version, is_building: bool) -> Self {
        Self {
            keys: active.keys,
            fill_ratio: fill_ratio(active),
            bytes: active.layout.bytes(),
            age: active.age,
            is_building,
        }
    }
}

/// The part of the bits of a version that is set.
pub(super) fn fill_ratio(version: &Version) -> f64 {
    version.bits as f64 / (f64::from(version.layout.blocks) * (8 * Layout::BLOCK_LEN) as f64)
}
