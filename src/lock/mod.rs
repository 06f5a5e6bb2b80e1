//! One at a time: locks that end by themselves, that say when they are lost, and that can be waited for.

mod error;
mod hold;
mod lease;
mod locks;
mod store;

mod acquire;
mod erased;
mod errand;
mod gate;
mod keeper;
mod nested;
mod shared;

pub use self::error::{Busy, Closed, LockError, LossReason, Lost, Nested, QueueFull};
pub use self::lease::{Lease, LeaseState, Release};
pub use self::locks::{LockRequest, Locks};
pub use self::store::{Acquired, Claim, LockKey, LockStore, Released, Renewal, Scope, Token, Wakeups};
