//! The configuration of a layer that does not depend on the types of requests and responses.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;

use super::descriptor::Descriptor;
use super::handle::InFlight;
use super::policy::Policy;
use super::resolver::PolicyResolver;
use super::wait_queue::WaitQueues;
// The memory backend is always compiled in, so it serves as the fallback for a failing store.
use crate::MemoryBackend;
use crate::on_failure::OnMissingKey;
use crate::store::circuit::{Circuit, CircuitBreaker};
use crate::store::deadline::DEFAULT_DEADLINE;

/// The configuration that does not depend on the types of requests and responses. Cheap to clone.
pub(super) struct LayerConfig<B> {
    // Behind a pointer, so that clones share the store even if its own clone is expensive.
    pub(super) store: Arc<B>,
    pub(super) policy: Policy,
    pub(super) deadline: Duration,
    pub(super) resolver: Option<PolicyResolver>,
    pub(super) wait_config: Option<WaitConfig>,
    pub(super) max_waiters_in_total: usize,
    pub(super) on_missing_key: OnMissingKey,
    pub(super) on_store_error: RateLimitFallback,
    pub(super) replicas: u32,
    pub(super) shared: SharedState,
    /// The first tokio runtime in which a request ran. Corrections from a thread without a runtime are sent in it.
    pub(super) runtime: Arc<OnceLock<Handle>>,
}

/// The default of `max_waiters_in_total`.
const DEFAULT_MAX_WAITERS: usize = 1_000;

impl<B> LayerConfig<B> {
    pub(super) fn new(backend: B, policy: Policy) -> Self {
        Self {
            store: Arc::new(backend),
            policy,
            deadline: DEFAULT_DEADLINE,
            resolver: None,
            wait_config: None,
            max_waiters_in_total: DEFAULT_MAX_WAITERS,
            on_missing_key: OnMissingKey::default(),
            on_store_error: RateLimitFallback::default(),
            replicas: 1,
            shared: SharedState::new(CircuitBreaker::new()),
            runtime: Arc::default(),
        }
    }

    /// The fallback for a failing store. With a deadline of zero it is always `Deny`: calls then fail although the store works, and with
    /// `Local` each process would admit a whole quota.
    pub(super) fn effective_fallback(&self) -> RateLimitFallback {
        if self.deadline.is_zero() { RateLimitFallback::Deny } else { self.on_store_error }
    }

    /// Whether the resolver chooses the policy of this descriptor and has not done so yet.
    pub(super) fn is_unresolved(&self, descriptor: &Descriptor) -> bool {
        self.resolver.is_some() && descriptor.primary && descriptor.policy.is_none()
    }

    pub(super) fn describe<K>(&self, f: &mut fmt::Formatter<'_>, name: &str) -> fmt::Result {
        f.debug_struct(name)
            .field("policy", &self.policy)
            .field("key", &std::any::type_name::<K>())
            .field("on_missing_key", &self.on_missing_key)
            .field("on_store_error", &self.on_store_error)
            .finish_non_exhaustive()
    }
}

// Not derived: `derive` would require `B: Clone`.
impl<B> Clone for LayerConfig<B> {
    fn clone(&self) -> Self {
        Self {
            store: Arc::clone(&self.store),
            policy: self.policy.clone(),
            deadline: self.deadline,
            resolver: self.resolver.clone(),
            wait_config: self.wait_config.clone(),
            max_waiters_in_total: self.max_waiters_in_total,
            on_missing_key: self.on_missing_key,
            on_store_error: self.on_store_error,
            replicas: self.replicas,
            shared: self.shared.clone(),
            runtime: Arc::clone(&self.runtime),
        }
    }
}

/// How long requests may wait for room, and the queues in which they wait.
#[derive(Clone, Debug)]
pub(super) struct WaitConfig {
    pub(super) wait: Duration,
    pub(super) queues: Arc<WaitQueues>,
}

/// State that layers on the same backend can share: the circuits, the counts that this process uses while the backend fails, and the
/// corrections in flight.
#[derive(Clone)]
pub(crate) struct SharedState {
    pub(super) circuits: Arc<Circuits>,
    fallback: Arc<OnceLock<MemoryBackend>>,
    pub(super) in_flight: Arc<InFlight>,
}

impl SharedState {
    pub(crate) fn new(breaker: CircuitBreaker) -> Self {
        Self { circuits: Arc::new(Circuits::new(breaker)), fallback: Arc::default(), in_flight: Arc::default() }
    }

    /// The backend that decides while the store fails. Created when it is first needed.
    pub(super) fn fallback(&self) -> &MemoryBackend {
        self.fallback.get_or_init(MemoryBackend::fallback)
    }

    /// Waits until no correction is in flight.
    pub(crate) async fn wait_idle(&self) {
        self.in_flight.wait_idle().await;
    }
}

/// The circuits of a layer.
pub(super) struct Circuits {
    pub(super) store: Circuit,
    /// For shadow policies that are checked beside enforced ones.
    pub(super) shadow: Circuit,
    // The policy of the layer that opened `store`, since layers can share it. The close is recorded under the same policy.
    tripped_by: Mutex<Option<Policy>>,
}

impl Circuits {
    pub(super) fn new(breaker: CircuitBreaker) -> Self {
        Self { store: Circuit::new(breaker), shadow: Circuit::new(breaker), tripped_by: Mutex::default() }
    }

    pub(super) fn tripped_by(&self) -> MutexGuard<'_, Option<Policy>> {
        self.tripped_by.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What happens to a request when the store fails or is late, or when the [circuit](CircuitBreaker) is open. Defaults to
/// [`Local`](Self::Local).
///
/// The layer logs one line when a store begins to fail, and one at the first reply after a second without failures. It also logs one line
/// whenever the [circuit](CircuitBreaker) opens or closes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum RateLimitFallback {
    /// This process enforces the policy with its own counts in memory, which start at zero. The layer and its clones share these counts. A
    /// key that was [blocked](crate::Limiter::block) in the store is not blocked here. If you run several processes, set their number with
    /// [`RateLimitLayer::replicas`](super::RateLimitLayer::replicas), so that each enforces its share. A request that costs more than the
    /// share, but not more than the quota, is rejected as with [`Deny`](Self::Deny).
    #[default]
    Local,
    /// The request passes uncounted. Use this if a broken store must not take your service down.
    Allow,
    /// The request is rejected: 503 with HTTP, the [`StoreError`](crate::StoreError) without. Use this for limits that protect something
    /// critical, such as a login. A request with a [cost](super::RequestCost) of 0 passes, since only a block could deny it.
    Deny,
}
