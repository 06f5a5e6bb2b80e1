use std::iter;
use std::sync::Arc;

/// What the answers of [`Idempotent`](super::Idempotent) begin with in a store, so that neither they nor a layer take one for their own that is not.
const OF_OPERATIONS: u8 = b'o';

/// What is kept in the place of such an answer that is not.
pub(super) const MARK: [u8; 5] = [0; 5];

/// What an operation is [completed](super::IdempotencyAdmin::complete) with by hand. It has to be made for those who have begun the operation:
///
/// * for [`Idempotent`](super::Idempotent) by [`of_operation`](Self::of_operation), or [`not_kept`](Self::not_kept);
/// * for an `IdempotencyLayer` (feature `http`) of an `http::Response`, all of which is replayed, or by `with_trailers`; with gRPC by `of_message`
///   (feature `grpc`), or of the response that a status makes;
/// * for a layer, without the answer itself, of an `http::StatusCode`: whoever asks again is told that it was done, and its answer not kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    bytes: Arc<[u8]>,
    is_kept: bool,
}

impl Answer {
    /// For an operation of [`Idempotent`](super::Idempotent): what [`Done::answer`](super::Done::answer) is then.
    pub fn of_operation(answer: impl AsRef<[u8]>) -> Self {
        Self { bytes: written(answer.as_ref()), is_kept: true }
    }

    /// For an operation of [`Idempotent`](super::Idempotent): that it was done, and no more. Whoever asks again is told that the answer was not kept.
    #[must_use]
    pub fn not_kept() -> Self {
        Self { bytes: MARK.as_slice().into(), is_kept: false }
    }

    /// What was written by whoever is going to read it.
    #[cfg(feature = "http")]
    pub(crate) const fn of_record(bytes: Arc<[u8]>, is_kept: bool) -> Self {
        Self { bytes, is_kept }
    }

    /// As it lies in a store, which does not look into it.
    #[must_use]
    pub const fn bytes(&self) -> &Arc<[u8]> {
        &self.bytes
    }

    /// Whether that is all of it, and not only that there was one.
    #[must_use]
    pub const fn is_kept(&self) -> bool {
        self.is_kept
    }
}

/// An answer of `Idempotent`, as it lies in a store.
pub(super) fn written(answer: &[u8]) -> Arc<[u8]> {
    // In one piece of memory from the beginning.
    let mut stored: Arc<[u8]> = iter::repeat_n(OF_OPERATIONS, answer.len() + 1).collect();
    let rest = Arc::get_mut(&mut stored).expect("nobody else has it yet");
    rest[1..].copy_from_slice(answer);
    stored
}

/// What [`written`] has written; `None` if it was not that.
pub(super) fn read(stored: &[u8]) -> Option<&[u8]> {
    stored.strip_prefix(&[OF_OPERATIONS])
}
