use std::fmt;
use std::mem;
use std::task::{Context, Poll};

use tokio::time::timeout;
use tower_service::Service;

use super::error::SingleFlightError;
use super::flights::{CallId, Flights};
use super::future::ResponseFuture;
use super::layer::SingleFlightLayer;
use crate::error::BoxError;
use crate::key::ExtractKey;

/// A service whose equal requests share one call: see [`SingleFlightLayer`](super::SingleFlightLayer).
///
/// Ready when the inner service is ready. A request that joins a call drops this ready inner service unused. If it holds a permit, for example of
/// a concurrency limit below this layer, the permit is free again at once.
#[must_use]
pub struct SingleFlight<S, K, P> {
    inner: S,
    layer: SingleFlightLayer<K, P>,
    flights: Flights,
}

impl<S, K, P> SingleFlight<S, K, P> {
    /// Puts `inner` behind `layer`, without a `ServiceBuilder`.
    pub fn new(inner: S, layer: SingleFlightLayer<K, P>) -> Self {
        Self { inner, layer, flights: Flights::default() }
    }
}

impl<S, K, P, Req> Service<Req> for SingleFlight<S, K, P>
where
    S: Service<Req> + Clone + Send + 'static,
    S::Response: Clone + Send + 'static,
    S::Error: Into<BoxError>,
    S::Future: Send + 'static,
    Req: Send + 'static,
    K: ExtractKey<Req>,
    P: ExtractKey<Req>,
{
    type Response = S::Response;
    type Error = SingleFlightError;
    type Future = ResponseFuture<S::Future, S::Response>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), SingleFlightError>> {
        self.inner.poll_ready(cx).map_err(SingleFlightError::service)
    }

    fn call(&mut self, request: Req) -> Self::Future {
        // `self.inner` is the instance that reported ready. Use it here and leave a clone for next time.
        let fresh = self.inner.clone();
        let mut ready = mem::replace(&mut self.inner, fresh);
        let Some(key) = self.layer.key(&request) else {
            return ResponseFuture::passed_through(ready.call(request));
        };
        let after = self.layer.call_timeout;
        let mut call = Some((ready, request));
        let start = || {
            let taken = call.take();
            // Called in the task, so that a panic of `call` itself is an error of all callers.
            async move {
                let Some((mut ready, request)) = taken else { return Err(SingleFlightError::Aborted) };
                match timeout(after, ready.call(request)).await {
                    Ok(response) => response.map_err(SingleFlightError::service),
                    Err(_) => Err(SingleFlightError::TimedOut { after }),
                }
            }
        };
        let waiter = self.flights.join_or_start(CallId::new::<Req>(key), start);
        match (waiter, call) {
            (None, Some((mut ready, request))) => ResponseFuture::passed_through(ready.call(request)),
            (None, None) => ResponseFuture::waiting(async { Err(SingleFlightError::Aborted) }),
            (Some(waiter), _) => ResponseFuture::waiting(waiter.response()),
        }
    }
}

// Not derived, which would require the extractors to be `Clone`.
impl<S: Clone, K, P> Clone for SingleFlight<S, K, P> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), layer: self.layer.clone(), flights: self.flights.clone() }
    }
}

impl<S: fmt::Debug, K, P> fmt::Debug for SingleFlight<S, K, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SingleFlight").field("inner", &self.inner).finish_non_exhaustive()
    }
}
