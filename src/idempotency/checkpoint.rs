use std::error::Error;
use std::fmt;

use crate::error::{BoxError, StoreError};

/// The progress of an attempt: see `IdempotencyHandle::checkpoint`.
#[derive(Clone, PartialEq, Eq)]
pub struct Checkpoint {
    number: u32,
    step: Box<str>,
    data: Box<[u8]>,
}

impl Checkpoint {
    /// Maximum length of a step's name, in bytes.
    pub const MAX_STEP: usize = 64;
    /// Maximum length of a step's data, in bytes.
    pub const MAX_DATA: usize = 4_096;
    // The number, and the length of the step.
    const HEAD: usize = 5;
    /// Maximum length of the stored form, in bytes.
    #[cfg_attr(not(feature = "redis"), allow(dead_code, reason = "other stores do not keep bytes"))]
    pub(crate) const MAX_LEN: usize = Self::HEAD + Self::MAX_STEP + Self::MAX_DATA;

    /// `None` if the step or its data is too long.
    #[must_use]
    pub fn new(number: u32, step: &str, data: &[u8]) -> Option<Self> {
        let fits = step.len() <= Self::MAX_STEP && data.len() <= Self::MAX_DATA;
        fits.then(|| Self { number, step: step.into(), data: data.into() })
    }

    /// The number within its operation, from 1.
    #[must_use]
    pub const fn number(&self) -> u32 {
        self.number
    }

    /// The step, as the handler names it.
    #[must_use]
    pub fn step(&self) -> &str {
        &self.step
    }

    /// The handler's data.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        &self.data
    }

    /// Length of the stored form, in bytes.
    pub(crate) fn len(&self) -> usize {
        Self::HEAD + self.step.len() + self.data.len()
    }

    /// The stored form: see `lua/idempotency_renew.lua`.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.len());
        bytes.extend(self.number.to_le_bytes());
        bytes.push(self.step.len() as u8);
        bytes.extend_from_slice(self.step.as_bytes());
        bytes.extend_from_slice(&self.data);
        bytes
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote; `None` for other bytes.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (head, rest) = bytes.split_first_chunk::<{ Self::HEAD }>()?;
        let [number @ .., step] = *head;
        let (step, data) = rest.split_at_checked(step.into())?;
        Self::new(u32::from_le_bytes(number), std::str::from_utf8(step).ok()?, data)
    }
}

// The handler's data may be private.
impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, step, .. } = self;
        f.debug_struct("Checkpoint").field("number", number).field("step", step).finish_non_exhaustive()
    }
}

/// Why a checkpoint was not stored, or why it is unknown whether it was. Except after [`Unread`](Self::Unread), the handler should stop:
/// the next attempt would not know of further steps.
#[derive(Debug)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The name is longer than [`Checkpoint::MAX_STEP`], or the data longer than [`Checkpoint::MAX_DATA`].
    TooLarge,
    /// The handler has read less of the body than earlier attempts, so the body may be another one. Nothing was stored.
    Unread,
    /// The attempt no longer holds the operation: it is completed, released, or has another attempt.
    Lost,
    /// The store failed. The checkpoint may be stored or not.
    Store(StoreError),
}

impl fmt::Display for CheckpointError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TooLarge => "the checkpoint is too large",
            Self::Unread => "the handler has read less of the body than earlier attempts",
            Self::Lost => "the attempt no longer holds the operation",
            Self::Store(_) => "the idempotency store failed",
        })
    }
}

impl Error for CheckpointError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Store(error) => Some(error),
            Self::TooLarge | Self::Unread | Self::Lost => None,
        }
    }
}

impl From<StoreError> for CheckpointError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

const _: () = {
    const fn fits<T: Into<BoxError>>() {}
    fits::<CheckpointError>();
};

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn too_long_step_or_data_is_refused() {
        let step = "x".repeat(Checkpoint::MAX_STEP);
        assert!(Checkpoint::new(1, &step, &[0; Checkpoint::MAX_DATA]).is_some());
        assert!(Checkpoint::new(1, &(step + "x"), b"").is_none());
        assert!(Checkpoint::new(1, "", &[0; Checkpoint::MAX_DATA + 1]).is_none());
    }

    proptest! {
        #[test]
        fn checkpoint_survives_round_trip(number: u32, step in ".{0,20}", data: Vec<u8>) {
            let written = Checkpoint::new(number, step.get(..).filter(|step| step.len() <= 64).unwrap_or("x"), &data);
            let written = written.unwrap();
            prop_assert_eq!(written.to_bytes().len(), written.len());
            prop_assert_eq!(Checkpoint::from_bytes(&written.to_bytes()), Some(written));
        }

        #[test]
        fn any_bytes_parse_to_checkpoint_or_none(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            if let Some(read) = Checkpoint::from_bytes(&bytes) {
                prop_assert_eq!(read.to_bytes(), bytes);
            }
        }
    }
}
