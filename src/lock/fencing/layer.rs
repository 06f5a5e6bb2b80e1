use std::fmt;
use std::sync::Arc;

use tower_layer::Layer;

use super::fences::FenceTable;
use super::service::Fence;
use crate::responder::HttpResponder;

/// Turns away requests whose fence is smaller than one that was seen before. See the [module docs](super) for examples.
///
/// All clones of this layer, and all services that they make, have one memory.
///
/// Type parameters: the [key](crate::ExtractKey), what finds the fence, and what a rejection [becomes](crate::responder::Responder).
#[must_use]
pub struct FenceLayer<K, F, A = HttpResponder> {
    shared: Arc<(K, F)>,
    fences: Arc<FenceTable>,
    answer: A,
}

impl<K, F> FenceLayer<K, F> {
    /// `key` says what a request changes, as for [`LockLayer::key`](crate::LockLayer::key), and `fence` is a closure that finds the fence of it:
    /// with HTTP `tollgate::http::lock_fence`. Whoever has none of either, or a fence of 2^53 or more, is turned away: 400 with HTTP.
    pub fn new(key: K, fence: F) -> Self {
        Self {
            shared: Arc::new((key, fence)),
            fences: Arc::new(FenceTable::new(100_000)),
            answer: HttpResponder::default(),
        }
    }
}

impl<K, F, A> FenceLayer<K, F, A> {
    /// How many keys are remembered, at least one. Defaults to 100,000, which takes some ten megabytes.
    pub fn capacity(self, keys: usize) -> Self {
        Self { fences: Arc::new(FenceTable::new(keys)), ..self }
    }

    /// What a rejection becomes. Defaults to [`HttpResponder`], 412 for a fence that is too small; [`ErrorResponder`](crate::responder::ErrorResponder) is for services
    /// that do not speak HTTP.
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

// By hand: `derive` would ask for `K: Clone`.
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
