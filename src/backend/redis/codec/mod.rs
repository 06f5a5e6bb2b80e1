//! The binary formats that scripts and Rust share.

pub(crate) mod job;
pub(crate) mod millis;
pub(crate) mod rate_limit;
