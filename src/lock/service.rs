use std::fmt;
use std::future::IntoFuture;
use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll};

use tower_service::Service;
use tracing::Instrument;

use super::context::Held;
use super::future::{DetachedFuture, ResponseFuture};
use super::layer::{LockLayer, Safe, Settings, Unkeyed};
use super::locks_state::{InFlightGuard, LocksState};
use super::passage::Passage;
use super::rejection::{BindLease, MissingKey, Rejection};
use crate::key::ExtractKey;
use crate::on_failure::OnMissingKey;
use crate::responder::{HttpResponder, Responder};

/// A service behind a lock. See the [module docs](crate::lock#in-front-of-a-service) for examples.
///
/// It is ready when the inner service is, since only the request says what to lock. The request keeps the ready inner service
/// while it waits. If that holds a permit, for instance of a concurrency limit below this layer, a rejected request returns it
/// unused.
#[must_use]
pub struct Lock<S, K = Unkeyed, A = HttpResponder> {
    inner: S,
    shared: Arc<(Settings, Arc<K>, A)>,
}

impl<S, K, A> Lock<S, K, A> {
    /// Wraps `inner` with the lock of `layer`, without a stack of layers.
    pub fn new(inner: S, layer: LockLayer<K, A>) -> Self {
        Self { inner, shared: Arc::new(layer.into_parts()) }
    }

    /// The inner service.
    pub const fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The inner service, mutable.
    pub const fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// Returns the inner service.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, Req, K, A> Service<Req> for Lock<S, K, A>
where
    S: Service<Req> + Clone,
    K: ExtractKey<Req>,
    A: Responder<Rejection, S::Response, S::Error>
        + BindLease<Req, <A as Responder<Rejection, S::Response, S::Error>>::Response>,
{
    type Response = A::Response;
    type Error = A::Error;
    type Future = ResponseFuture<S, Req, K, A>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(|error| self.shared.2.error(error))
    }

    fn call(&mut self, request: Req) -> Self::Future {
        let shared = Arc::clone(&self.shared);
        let (settings, extract, answer) = &*shared;
        let is_safe = settings.safe != Safe::Lock && answer.is_safe(&request);
        if is_safe && settings.safe == Safe::Nothing {
            return self.pass(request);
        }
        let key = match (extract.extract_key(&request).filter(|key| !key.is_empty()), settings.on_missing_key) {
            (Some(key), _) => key,
            (None, OnMissingKey::Pass) => return self.pass(request),
            (None, OnMissingKey::Reject) => {
                drop(self.take_ready());
                return ResponseFuture::rejected(Rejection::MissingKey(MissingKey), shared);
            }
        };
        let permit = match settings.admit() {
            Ok(permit) => permit,
            Err(full) => {
                drop(self.take_ready());
                return ResponseFuture::rejected(Rejection::Full(full), shared);
            }
        };
        let lock = settings.locks.lock(key).heeding_circuit();
        let lease = if is_safe { lock.shared() } else { lock };
        ResponseFuture::acquiring(lease.into_future(), permit, self.take_ready(), request, shared)
    }
}

impl<S, K, A> Lock<S, K, A> {
    /// Calls the inner service with a request that needs no lock.
    fn pass<Req>(&mut self, mut request: Req) -> ResponseFuture<S, Req, K, A>
    where
        S: Service<Req>,
        A: Responder<Rejection, S::Response, S::Error>
            + BindLease<Req, <A as Responder<Rejection, S::Response, S::Error>>::Response>,
    {
        self.shared.2.pass(&mut request);
        let future = Passage::Free.scope(|| self.inner.call(request));
        ResponseFuture::passed_through(future, Arc::clone(&self.shared))
    }
}

impl<S: Clone, K, A> Lock<S, K, A> {
    /// Takes the instance of the inner service that reported ready, with its permit, and leaves a clone for next time.
    fn take_ready(&mut self) -> S {
        let fresh = self.inner.clone();
        mem::replace(&mut self.inner, fresh)
    }
}

// By hand: `derive` would require more than `Clone` of the inner service.
impl<S: Clone, K, A> Clone for Lock<S, K, A> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: Arc::clone(&self.shared) }
    }
}

impl<S: fmt::Debug, K, A> fmt::Debug for Lock<S, K, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.0.describe::<K>(f, "Lock")
    }
}

/// A service whose requests run to their end under their lock, even if no caller waits for the response: see
/// [`LockLayer::detached`](super::LockLayer::detached).
#[derive(Clone)]
pub struct Detach<S> {
    inner: S,
    shared: Arc<LocksState>,
}

impl<S> Detach<S> {
    pub(super) fn new(inner: S, settings: &Settings) -> Self {
        Self { inner, shared: Arc::clone(settings.locks.shared()) }
    }
}

impl<S, Req> Service<Req> for Detach<S>
where
    S: Service<Req>,
    S::Future: Send + 'static,
    S::Response: Send + 'static,
    S::Error: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = DetachedFuture<S::Future, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Req) -> Self::Future {
        let future = self.inner.call(request);
        let held = Held::current();
        DetachedFuture::detached(match Passage::current() {
            Passage::Free => return DetachedFuture::attached(future),
            Passage::Locked(permit) => {
                let handler = held.detached(future);
                let handler = async move {
                    let outcome = handler.await;
                    drop(permit);
                    outcome
                };
                tokio::spawn(handler.in_current_span())
            }
            Passage::Unprotected(permit) => {
                let running = InFlightGuard::new(&self.shared);
                let handler = async move {
                    let outcome = held.within(future).await;
                    drop((running, permit));
                    Some(outcome)
                };
                tokio::spawn(handler.in_current_span())
            }
        })
    }
}

impl<S: fmt::Debug> fmt::Debug for Detach<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Detach").field("inner", &self.inner).finish_non_exhaustive()
    }
}
