//! Rules in files.

#![allow(clippy::unwrap_used, reason = "the panic shows where a test failed")]

mod rules;
