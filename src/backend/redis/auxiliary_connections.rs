//! The connections that do not serve ordinary requests: dedicated, replicated and subscribing ones.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::connection::pubsub::Source;
use super::connection::runtime::RuntimeHandle;
use super::connection::subscriber::Subscriber;
use super::topology::{ReplicatedServers, Servers};

/// The connections that do not serve ordinary requests, opened on demand.
pub(crate) struct AuxiliaryConnections {
    // Renewals, releases and related calls do not wait behind requests.
    pub(super) dedicated: Servers,
    // For replicated leases: the first for grants, the second for renewals.
    pub(super) replicated: [ReplicatedServers; 2],
    // The timeout of a reply.
    response_timeout: Duration,
    source: Source,
    runtime: Arc<RuntimeHandle>,
    pub(super) subscriber: OnceLock<Subscriber>,
}

impl AuxiliaryConnections {
    pub(crate) const fn new(
        dedicated: Servers,
        replicated: [ReplicatedServers; 2],
        response_timeout: Duration,
        source: Source,
        runtime: Arc<RuntimeHandle>,
    ) -> Self {
        Self { dedicated, replicated, response_timeout, source, runtime, subscriber: OnceLock::new() }
    }

    /// The same connections, with a subscriber of their own.
    #[cfg(test)]
    pub(crate) fn again(&self) -> Self {
        Self::new(
            self.dedicated.clone(),
            self.replicated.clone(),
            self.response_timeout,
            self.source.clone(),
            Arc::clone(&self.runtime),
        )
    }

    /// Where calls do not wait behind requests.
    pub(crate) const fn dedicated(&self) -> &Servers {
        &self.dedicated
    }

    /// Where tasks run.
    pub(crate) fn runtime(&self) -> &RuntimeHandle {
        &self.runtime
    }

    /// The timeout of a reply.
    pub(crate) const fn response_timeout(&self) -> Duration {
        self.response_timeout
    }

    pub(crate) fn subscriber(&self) -> &Subscriber {
        self.subscriber.get_or_init(|| Subscriber::new(self.source.clone(), Arc::clone(&self.runtime)))
    }
}
