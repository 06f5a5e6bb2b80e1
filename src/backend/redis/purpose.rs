//! What connections are for.

/// What connections are for.
#[derive(Clone, Copy)]
pub(crate) enum Purpose {
    /// Ordinary calls, such as checks and reads of caches.
    Requests,
    /// Renewals, releases and other calls that must not queue behind ordinary calls.
    Dedicated,
}

/// What connections for writes with replication are for.
#[derive(Clone, Copy)]
pub(crate) enum ReplicatedPurpose {
    /// Granting leases.
    Grants,
    /// Renewing leases, which must always have room.
    Renewals,
}

/// Whether a connection must exist at startup.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConnectMode {
    Connected,
    Disconnected,
}
