//! Positions in a list of stored entries.

/// Where a list continues. Valid only for the backend that returned it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Cursor {
    /// The part of the backend, for instance a node of a cluster.
    pub part: u32,
    /// The position within the part.
    pub position: u64,
}
