//! The fingerprint of a request body, as its operation stores it.

use super::store::BodyFingerprint;

/// The fingerprint of the part of a request body that was read.
pub(crate) trait HasBodyFingerprint: Send + Sync {
    fn body_fingerprint(&self) -> BodyFingerprint;

    /// Whether the body matches that of the previous attempt, as far as that attempt has read it.
    fn is_confirmed(&self) -> bool;

    /// The fingerprint before any part was read.
    fn restarted(&self) -> Self
    where
        Self: Sized;
}
