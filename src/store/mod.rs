//! Helpers for calls to a store, which all capabilities use.

pub(crate) mod circuit;
pub(crate) mod cursor;
pub(crate) mod deadline;
pub(crate) mod notifications;
pub(crate) mod sharded_refs;
pub(crate) mod shutdown;
pub(crate) mod token;
