//! Limits of calls and records.

/// The largest number of jobs, or leases, in one call.
pub const MAX_BATCH: usize = 256;

/// How many bytes of an error text are stored.
pub const MAX_ERROR_LEN: usize = 1_024;
