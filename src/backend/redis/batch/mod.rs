//! Calls that are made at the same time share one command.

pub(crate) mod batcher;
pub(crate) mod check;
pub(crate) mod deferred;
pub(crate) mod lock;
pub(crate) mod push;
