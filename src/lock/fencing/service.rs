use std::fmt;
use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll};

use tower_service::Service;

use super::fences::FenceTable;
use super::future::FenceFuture;
use super::layer::FenceLayer;
use super::rejection::{MissingFence, Rejection, StaleFence};
use crate::key::ExtractKey;
use crate::lock::MissingKey;
use crate::responder::{HttpResponder, Responder};

/// Fences are microseconds of a clock, and stay below this.
const FENCE_LIMIT: u64 = 1 << 53;

/// A service that refuses small fences. See the [module docs](super) for examples.
///
/// It is ready when the inner service is. If the inner service holds a permit once it is ready, for instance of a concurrency
/// limit below this layer, a rejected request releases the permit.
#[must_use]
pub struct Fence<S, K, F, A = HttpResponder> {
    inner: S,
    shared: Arc<(K, F)>,
    fences: Arc<FenceTable>,
    answer: A,
}

impl<S, K, F, A> Fence<S, K, F, A> {
    /// Wraps `inner` as `layer` does, without a `ServiceBuilder`. The service shares the table of fences with the clones of `layer`.
    pub fn new(inner: S, layer: FenceLayer<K, F, A>) -> Self {
        let (shared, fences, answer) = layer.into_parts();
        Self { inner, shared, fences, answer }
    }

    /// The protected service.
    pub const fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The protected service, mutable.
    pub const fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// Returns the protected service.
    pub fn into_inner(self) -> S {
        self.inner
    }

    fn check_fence<Req>(&self, request: &Req) -> Result<(), Rejection>
    where
        K: ExtractKey<Req>,
        F: Fn(&Req) -> Option<u64>,
    {
        let (key, fence) = &*self.shared;
        let key = key.extract_key(request).filter(|key| !key.is_empty());
        let key = key.ok_or(Rejection::MissingKey(MissingKey))?;
        // No store grants a fence of this limit or more. If the table kept one, it would refuse all later requests for the key.
        let fence = fence(request).filter(|fence| *fence < FENCE_LIMIT);
        let fence = fence.ok_or(Rejection::MissingFence(MissingFence))?;
        self.fences.admit(key, fence).map_err(|min| Rejection::Stale(StaleFence::new(fence, min)))
    }
}

impl<S, Req, K, F, A> Service<Req> for Fence<S, K, F, A>
where
    S: Service<Req> + Clone,
    K: ExtractKey<Req>,
    F: Fn(&Req) -> Option<u64>,
    A: Responder<Rejection, S::Response, S::Error> + Clone,
{
    type Response = A::Response;
    type Error = A::Error;
    type Future = FenceFuture<S::Future, A>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(|error| self.answer.error(error))
    }

    fn call(&mut self, request: Req) -> Self::Future {
        match self.check_fence(&request) {
            Ok(()) => FenceFuture::calling(self.inner.call(request), self.answer.clone()),
            Err(rejection) => {
                drop(self.take_ready());
                FenceFuture::rejected(rejection, self.answer.clone())
            }
        }
    }
}

impl<S: Clone, K, F, A> Fence<S, K, F, A> {
    /// Takes the instance of the inner service that reported ready, with its permit, and leaves a clone for next time.
    fn take_ready(&mut self) -> S {
        let fresh = self.inner.clone();
        mem::replace(&mut self.inner, fresh)
    }
}

// By hand: `derive` would require `K: Clone`.
impl<S: Clone, K, F, A: Clone> Clone for Fence<S, K, F, A> {
    fn clone(&self) -> Self {
        let (shared, fences) = (Arc::clone(&self.shared), Arc::clone(&self.fences));
        Self { inner: self.inner.clone(), shared, fences, answer: self.answer.clone() }
    }
}

impl<S: fmt::Debug, K, F, A> fmt::Debug for Fence<S, K, F, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fence").field("inner", &self.inner).finish_non_exhaustive()
    }
}
