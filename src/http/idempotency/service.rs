use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use ::http::{Request, Response};
use bytes::Bytes;
use http_body::Body;
use tower_service::Service;

use super::body::IdempotentBody;
use super::fingerprint::{FingerprintedBody, original_uri};
use super::future::ResponseFuture;
use super::handler::{guard, take_ready};
use super::key::key_of;
use super::layer::IdempotencyLayer;
use super::settings::Shared;
use crate::error::BoxError;
use crate::idempotency::store::RecordBound;
use crate::idempotency::{IdempotencyHandle, Operation, Rejection};
use crate::key::{ExtractKey, Key};
use crate::on_failure::OnMissingKey;
use crate::responder::{HttpResponder, Responder};

/// A service that executes a request once, and replays the response to retries. See the [module docs](crate::idempotency) for
/// examples.
///
/// It is ready when the inner service is, because the operation is known only with the request. The ready inner service is
/// reserved during the store call. If the request is not executed, the reserved service is dropped unused.
#[must_use]
pub struct Idempotency<S, K, A = HttpResponder> {
    inner: S,
    shared: Arc<Shared<K, A>>,
}

impl<S, K, A> Idempotency<S, K, A> {
    /// Wraps `inner` without a layer stack.
    pub fn new(inner: S, layer: IdempotencyLayer<K, A>) -> Self {
        let (settings, scope, responder) = layer.into_parts();
        Self { inner, shared: Arc::new(Shared { settings: Arc::new(settings), scope, responder }) }
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

impl<S, K, A, B, R> Service<Request<B>> for Idempotency<S, K, A>
where
    S: Service<Request<FingerprintedBody<B>>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    K: ExtractKey<Request<B>> + Send + Sync + 'static,
    A: Responder<Rejection, Response<R>, S::Error, Response = Response<IdempotentBody<R>>, Error = S::Error>
        + Send
        + Sync
        + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    type Response = Response<IdempotentBody<R>>;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future, R, S::Error, A, K>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let shared = Arc::clone(&self.shared);
        let Shared { settings, scope, responder } = &*shared;
        if !settings.methods.contains(request.method()) {
            settings.passed(&request);
            return ResponseFuture::passed_through(self.inner.call(request.map(FingerprintedBody::passed)), shared);
        }
        let key = key_of(request.headers(), &settings.header).map(|key| key.map(|key| (key, settings.check_times())));
        let rejection = match key {
            Ok(Some((_, Err(error)))) => Rejection::Config(error),
            Ok(Some(_)) if request.body().size_hint().lower() > settings.max_body => {
                Rejection::TooLarge { has_begun: false }
            }
            Ok(Some((key, Ok(())))) => match scope.extract_key(&request).filter(|scope| !scope.is_empty()) {
                Some(scope) => {
                    let operation = Operation::new(of_route(scope, &request), key);
                    if is_executed_by_outer_layer(&operation, &request) {
                        let passed = self.inner.call(request.map(FingerprintedBody::passed));
                        return ResponseFuture::passed_through(passed, shared);
                    }
                    match settings.coordinator.admit(&scope, settings.max_running_attempts()) {
                        Ok(running) => {
                            let bound = RecordBound { scope, max: settings.max_records_per_scope };
                            let guarded = guard(&mut self.inner, request, (operation, bound), running, shared);
                            return ResponseFuture::guarded(guarded);
                        }
                        Err(rejection) => rejection,
                    }
                }
                None => Rejection::MissingScope,
            },
            Ok(None) if settings.on_missing_key == OnMissingKey::Pass => {
                return ResponseFuture::passed_through(self.inner.call(request.map(FingerprintedBody::passed)), shared);
            }
            Ok(None) => Rejection::MissingKey,
            Err(invalid) => Rejection::InvalidKey(invalid),
        };
        drop(take_ready(&mut self.inner));
        ResponseFuture::rejected(settings.reject(responder, rejection))
    }
}

/// Adds method and path to the scope, so that the same key on another route is another operation.
fn of_route<B>(scope: Key, request: &Request<B>) -> Key {
    Key::from((scope, request.method().as_str(), original_uri(request).path()))
}

/// Whether an outer layer executes this operation already. Without this check, this layer would find the record of the outer layer in
/// flight, and reject the request.
fn is_executed_by_outer_layer<B>(operation: &Operation, request: &Request<B>) -> bool {
    request.extensions().get::<IdempotencyHandle>().is_some_and(|handle| handle.operation() == operation)
}

// Hand-written, because `derive` would also require `K: Clone` and `A: Clone`.
impl<S: Clone, K, A> Clone for Idempotency<S, K, A> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: Arc::clone(&self.shared) }
    }
}

impl<S: fmt::Debug, K, A> fmt::Debug for Idempotency<S, K, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.settings.describe::<K>(f, "Idempotency")
    }
}
