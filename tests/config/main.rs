//! Rules in files.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod rules;
