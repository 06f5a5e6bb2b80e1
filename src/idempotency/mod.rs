//! The same request twice is done once: one record for each operation that a client names, kept in a backend.
//!
//! [`IdempotencyStore`] is what that needs of a backend.

mod store;

pub use self::store::{Begun, Claim, Completion, Digest, IdempotencyStore, Operation, Payload};
