//! What an operation needs of the reader of its request body.

use super::store::Payload;

/// The reader of a request body, which knows the fingerprint of the part that was read.
pub(crate) trait HasPayload: Send + Sync {
    fn payload(&self) -> Payload;

    /// Whether the body is known to match that of the previous attempt, as far as that attempt has read it.
    fn is_known(&self) -> bool;

    /// The same reader, before any part was read.
    fn anew(&self) -> Self
    where
        Self: Sized;
}
