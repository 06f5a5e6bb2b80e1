use std::fmt;
use std::sync::Arc;

use tower_layer::Layer;

use super::fences::FenceTable;
use super::service::Fence;
use crate::responder::HttpResponder;

/// Rejects requests whose fence is smaller than an earlier one of the same key. See the [module docs](super) for examples.
///
/// All clones of this layer and all of their services share one table of fences.
///
/// Type parameters: the [key](crate::ExtractKey), the closure that reads the fence, and the
/// [responder](crate::responder::Responder).
#[must_use]
pub struct FenceLayer<K, F, A = HttpResponder> {
    shared: Arc<(K, F)>,
    fences: Arc<FenceTable>,
    answer: A,
}

impl<K, F> FenceLayer<K, F> {
    /// `key` names what a request changes, as for [`LockLayer::key`](crate::LockLayer::key). `fence` reads the fence of a
    /// request: with HTTP, use `tollgate::http::lock_fence`. A request without a key, without a fence, or with a fence of 2^53
    /// or more is rejected: 400 with HTTP.
    pub fn new(key: K, fence: F) -> Self {
        Self {
            shared: Arc::new((key, fence)),
            fences: Arc::new(FenceTable::new(100_000)),
            answer: HttpResponder::default(),
        }
    }
}

impl<K, F, A> FenceLayer<K, F, A> {
    /// The number of remembered keys, at least one. Defaults to 100,000, which takes about ten megabytes.
    pub fn capacity(self, keys: usize) -> Self {
        Self { fences: Arc::new(FenceTable::new(keys)), ..self }
    }

    /// The response to a rejection. Defaults to [`HttpResponder`]: 412 for a fence that is too small. Use
    /// [`ErrorResponder`](crate::responder::ErrorResponder) for services without HTTP.
    pub fn responder<A2>(self, answer: A2) -> FenceLayer<K, F, A2> {
        let Self { shared, fences, answer: _ } = self;
        FenceLayer { shared, fences, answer }
    }

    pub(super) fn into_parts(self) -> (Arc<(K, F)>, Arc<FenceTable>, A) {
        (self.shared, self.fences, self.answer)
    }
}

impl<S, K, F, A: Clone> Layer<S> for FenceLayer<K, F, A> {
    type Service = Fence<S, K, F, A>;

    fn layer(&self, inner: S) -> Self::Service {
        Fence::new(inner, self.clone())
    }
}

// By hand: `derive` would require `K: Clone`.
impl<K, F, A: Clone> Clone for FenceLayer<K, F, A> {
    fn clone(&self) -> Self {
        let (shared, fences) = (Arc::clone(&self.shared), Arc::clone(&self.fences));
        Self { shared, fences, answer: self.answer.clone() }
    }
}

impl<K, F, A> fmt::Debug for FenceLayer<K, F, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FenceLayer").field("key", &std::any::type_name::<K>()).finish_non_exhaustive()
    }
}
