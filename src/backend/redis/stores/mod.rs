//! `RedisBackend` as the store of each capability.

mod cache;
pub(crate) mod delay_queue;
mod exists_filter;
mod idempotency;
pub(crate) mod lock;
mod lock_registry;
pub(crate) mod rate_limit;
