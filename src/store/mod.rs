//! Helpers for calls to a store, which all capabilities use.

pub(crate) mod circuit;
pub(crate) mod deadline;
pub(crate) mod sharded_refs;
