//! What every backend must do: one claim a function, written once, run on each backend.

#![allow(unreachable_pub)]

pub mod rate_limit;
