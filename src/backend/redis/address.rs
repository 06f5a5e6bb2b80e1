//! The addresses of servers.

/// Host and port of a node.
pub(crate) type Address = (String, u16);
