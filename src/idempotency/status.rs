//! What operators see of operations.

use std::time::Duration;

use super::checkpoint::Checkpoint;
use super::operation::Operation;
use crate::store::cursor::Cursor;

/// The state of an operation, for operators.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OperationStatus {
    /// The operation.
    pub operation: Operation,
    /// Its state.
    pub state: OperationState,
    /// The fence of the last attempt. 0 if there was none.
    pub fence: u64,
    /// Number of attempts, as far as they are remembered.
    pub attempts: u32,
    /// The last checkpoint. `None` also after the operation was completed.
    pub checkpoint: Option<Checkpoint>,
    /// How long the record is still stored, unless the operation changes.
    pub kept_for: Duration,
}

impl OperationStatus {
    /// For stores: an operation without attempts and checkpoint, whose record expires now. Set the fields as needed.
    #[must_use]
    pub const fn new(operation: Operation, state: OperationState) -> Self {
        Self { operation, state, fence: 0, attempts: 0, checkpoint: None, kept_for: Duration::ZERO }
    }
}

/// The state of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OperationState {
    /// Free: the next request executes it.
    Free,
    /// An attempt is running.
    InFlight {
        /// Until the lease ends, unless it is renewed.
        remaining: Duration,
    },
    /// The operation was begun, and its lease ended without a result.
    Unknown {
        /// How long ago the lease ended, by the clock of the store.
        since: Duration,
    },
    /// The operation is completed.
    Completed {
        /// Whether the whole response is stored.
        is_kept: bool,
    },
}

impl OperationState {
    /// Whether both are the same state, whatever their times are.
    pub(crate) fn is_like(self, other: Self) -> bool {
        match (self, other) {
            (Self::Free, Self::Free)
            | (Self::InFlight { .. }, Self::InFlight { .. })
            | (Self::Unknown { .. }, Self::Unknown { .. }) => true,
            (Self::Completed { is_kept }, Self::Completed { is_kept: other }) => is_kept == other,
            _ => false,
        }
    }
}

/// A page of a [list](super::IdempotencyAdmin::list).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OperationPage {
    /// The operations. A page may be empty although more pages follow.
    pub operations: Vec<OperationStatus>,
    /// The cursor of the next page. `None` after the last page.
    pub next: Option<Cursor>,
}

impl OperationPage {
    /// For stores: a page with these fields.
    #[must_use]
    pub const fn new(operations: Vec<OperationStatus>, next: Option<Cursor>) -> Self {
        Self { operations, next }
    }
}
