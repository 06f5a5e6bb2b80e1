//! What every capability needs around its calls of a store.

pub(crate) mod circuit;
pub(crate) mod deadline;
pub(crate) mod sharded_refs;
