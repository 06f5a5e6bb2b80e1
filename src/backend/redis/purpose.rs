//! What connections are for.

/// What connections are for.
#[derive(Clone, Copy)]
pub(crate) enum Purpose {
    /// Calls of requests.
    Requests,
    /// Calls that must not queue behind those of requests.
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
