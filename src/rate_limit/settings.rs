//! The settings that the clones of a layer share with their services.

use std::sync::{Arc, OnceLock};

use tokio::runtime::Handle;

use super::handle::{Settle, Settler};
use super::layer_config::LayerConfig;
use super::store::RateLimitStore;
use crate::store::sharded_refs::{ShardedRefs, thread_slot};

/// Settings that the clones of a layer share with their services. Mutable state is behind pointers, so a copy is equivalent.
// Aligned to its own cache line, away from the reference count, which every request writes.
#[repr(align(64))]
pub(super) struct Settings<B, K, O> {
    pub(super) core: LayerConfig<B>,
    pub(super) key: Arc<K>,
    pub(super) options: O,
    // Created by the first request that needs it, from the fields above.
    settler: OnceLock<Arc<dyn Settle>>,
    // Copies of these settings, one for each thread slot, so that each slot counts references separately. A copy stores its slot and how
    // many copies it is away from the original.
    copies: ShardedRefs<Arc<Self>>,
    thread_slot: Option<usize>,
    depth: u8,
}

// Not derived: `derive` would require `K: Clone`, but closures need not be `Clone`.
impl<B, K, O: Clone> Clone for Settings<B, K, O> {
    fn clone(&self) -> Self {
        Self::new(self.core.clone(), Arc::clone(&self.key), self.options.clone())
    }
}

impl<B, K, O> Settings<B, K, O> {
    pub(super) fn new(core: LayerConfig<B>, key: Arc<K>, options: O) -> Self {
        let (settler, copies) = (OnceLock::new(), ShardedRefs::default());
        Self { core, key, options, settler, copies, thread_slot: None, depth: 0 }
    }
}

impl<B, K, O: Clone> Settings<B, K, O> {
    /// A thread that accepts connections clones a service for each connection, and the threads that serve them clone it again. A further
    /// level would multiply the copies by the number of threads, so deeper clones share a reference count.
    const MAX_DEPTH: u8 = 2;

    /// Returns the copy whose reference count this thread uses: processors that update the same count wait for each other.
    #[inline]
    pub(super) fn for_this_thread(self: &Arc<Self>) -> &Arc<Self> {
        let (thread_slot, depth) = (Some(thread_slot()), self.depth + 1);
        if self.thread_slot == thread_slot || self.depth == Self::MAX_DEPTH {
            return self;
        }
        self.copies.get(|| Arc::new(Self { thread_slot, depth, ..Self::clone(self) }))
    }
}

impl<B: RateLimitStore + Clone + Send + Sync + 'static, K, O> Settings<B, K, O> {
    /// Returns the settler, which sends corrections to the store.
    pub(super) fn settler(&self) -> Arc<dyn Settle> {
        let make = || -> Arc<dyn Settle> {
            if let Ok(runtime) = Handle::try_current() {
                // Another request may have set it before.
                let _ = self.core.runtime.set(runtime);
            }
            self.core.shared.in_flight.add_to_shutdown(&*self.core.store);
            Arc::new(Settler {
                policy: self.core.policy.clone(),
                store: B::clone(&self.core.store),
                fallback: self.core.shared.fallback().clone(),
                deadline: self.core.deadline,
                is_resolved: self.core.resolver.is_some(),
                queues: self.core.wait_config.as_ref().map(|wait_config| Arc::clone(&wait_config.queues)),
                runtime: Arc::clone(&self.core.runtime),
                in_flight: Arc::clone(&self.core.shared.in_flight),
            })
        };
        Arc::clone(self.settler.get_or_init(make))
    }
}
