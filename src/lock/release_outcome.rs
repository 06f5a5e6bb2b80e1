//! The outcome of a release.

/// The outcome of a release. Later variants are worse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ReleaseOutcome {
    /// The lock is free, or has another holder by now.
    Released,
    /// Other handles of this lease keep the lock.
    Shared,
    /// The lock is free or has another holder, and it is unknown whether the lease was still held. Either a connection broke
    /// before the reply, and over another one the store found no lease; or the reply came so late that the lease may have
    /// expired. Nearly always the first call had released it. This does not count as a loss, and [`run`](super::Locks::run)
    /// returns as if the lease had been held. It was lost if the store had forgotten it, for instance after a failover, or if it
    /// was [force-released](super::LockAdmin::force_release). By the local clock it had not ended. Use the
    /// [fence](super::Lease::fence) where this matters.
    Uncertain,
    /// The lease was lost before, or the store no longer has it: another client may have held the lock already.
    Lost,
}
