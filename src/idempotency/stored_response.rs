use std::iter;
use std::sync::Arc;

/// The first byte of stored responses of [`Idempotent`](super::Idempotent). So a layer does not read these responses, and `Idempotent` does
/// not read those of a layer.
const OF_OPERATIONS: u8 = b'o';

/// Stands for a response that was not stored.
pub(super) const MARK: [u8; 5] = [0; 5];

/// A response with which an operator [completes](super::IdempotencyAdmin::complete) an operation. Its form depends on the user
/// of the operation:
///
/// * [`Idempotent`](super::Idempotent): [`of_operation`](Self::of_operation), or [`not_stored`](Self::not_stored).
/// * `IdempotencyLayer` (feature `http`): from an `http::Response`, which is replayed, or `with_trailers`. With gRPC
///   `of_message` (feature `grpc`), or from the response of a status.
/// * A layer, without the response itself: from an `http::StatusCode`. A retry learns that the operation was completed and that its
///   response was not stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredResponse {
    bytes: Arc<[u8]>,
    is_kept: bool,
}

impl StoredResponse {
    /// For an operation of [`Idempotent`](super::Idempotent): the bytes of [`Done::response`](super::Done::response).
    pub fn of_operation(response: impl AsRef<[u8]>) -> Self {
        Self { bytes: written(response.as_ref()), is_kept: true }
    }

    /// For an operation of [`Idempotent`](super::Idempotent): completed without a stored response, as a retry learns.
    #[must_use]
    pub fn not_stored() -> Self {
        Self { bytes: MARK.as_slice().into(), is_kept: false }
    }

    /// Takes the stored form of a response as `Recorder` writes it.
    #[cfg(feature = "http")]
    pub(crate) const fn of_record(bytes: Arc<[u8]>, is_kept: bool) -> Self {
        Self { bytes, is_kept }
    }

    /// The stored form. Stores do not interpret it.
    #[must_use]
    pub const fn bytes(&self) -> &Arc<[u8]> {
        &self.bytes
    }

    /// Whether the whole response is stored.
    #[must_use]
    pub const fn is_kept(&self) -> bool {
        self.is_kept
    }
}

/// The stored form of a response of `Idempotent`.
pub(super) fn written(response: &[u8]) -> Arc<[u8]> {
    // Allocated once.
    let mut stored: Arc<[u8]> = iter::repeat_n(OF_OPERATIONS, response.len() + 1).collect();
    let rest = Arc::get_mut(&mut stored).expect("the new Arc has one owner");
    rest[1..].copy_from_slice(response);
    stored
}

/// Reads what [`written`] wrote; `None` for other bytes.
pub(super) fn read(stored: &[u8]) -> Option<&[u8]> {
    stored.strip_prefix(&[OF_OPERATIONS])
}
