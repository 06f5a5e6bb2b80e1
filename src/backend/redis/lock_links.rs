//! The connections that only locks use.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::connection::pubsub::Source;
use super::connection::runtime::RuntimeHandle;
use super::connection::subscriber::Subscriber;
use super::topology::{CarefulServers, Servers};

/// The connections that only locks use, opened on demand.
pub(crate) struct LockLinks {
    // Renewals, releases and related calls do not wait behind requests.
    pub(super) own: Servers,
    // For replicated leases: when they are granted and renewed.
    pub(super) careful: [CarefulServers; 2],
    // The timeout of a reply.
    patience: Duration,
    source: Source,
    home: Arc<RuntimeHandle>,
    pub(super) subscriber: OnceLock<Subscriber>,
}

impl LockLinks {
    pub(crate) const fn new(
        own: Servers,
        careful: [CarefulServers; 2],
        patience: Duration,
        source: Source,
        home: Arc<RuntimeHandle>,
    ) -> Self {
        Self { own, careful, patience, source, home, subscriber: OnceLock::new() }
    }

    /// The same connections, with a subscriber of their own.
    #[cfg(test)]
    pub(crate) fn again(&self) -> Self {
        Self::new(self.own.clone(), self.careful.clone(), self.patience, self.source.clone(), Arc::clone(&self.home))
    }

    /// Where calls do not wait behind requests.
    pub(crate) const fn apart(&self) -> &Servers {
        &self.own
    }

    /// Where tasks run.
    pub(crate) fn home(&self) -> &RuntimeHandle {
        &self.home
    }

    /// The timeout of a reply.
    pub(crate) const fn patience(&self) -> Duration {
        self.patience
    }

    pub(crate) fn subscriber(&self) -> &Subscriber {
        self.subscriber.get_or_init(|| Subscriber::new(self.source.clone(), Arc::clone(&self.home)))
    }
}
