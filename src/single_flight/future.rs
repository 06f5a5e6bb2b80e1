use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use pin_project_lite::pin_project;

use super::error::SingleFlightError;
use crate::error::BoxError;

pin_project! {
    /// The response future of a [`SingleFlight`](super::SingleFlight) service. If you drop it, other callers of the same call still get
    /// its response.
    #[must_use = "futures do nothing unless polled"]
    pub struct ResponseFuture<F, T> {
        #[pin]
        state: State<F, T>,
    }
}

type Waiting<T> = Pin<Box<dyn Future<Output = Result<T, SingleFlightError>> + Send>>;

pin_project! {
    #[project = StateProj]
    enum State<F, T> {
        // The request has no key or principal, or a call has sent the request with the key of that call.
        Passed { #[pin] future: F },
        // The call runs in a task.
        Waiting { response: Waiting<T> },
    }
}

impl<F, T> ResponseFuture<F, T> {
    pub(super) const fn passed_through(future: F) -> Self {
        Self { state: State::Passed { future } }
    }

    pub(super) fn waiting(response: impl Future<Output = Result<T, SingleFlightError>> + Send + 'static) -> Self {
        Self { state: State::Waiting { response: Box::pin(response) } }
    }
}

impl<F, T, E> Future for ResponseFuture<F, T>
where
    F: Future<Output = Result<T, E>>,
    E: Into<BoxError>,
{
    type Output = Result<T, SingleFlightError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().state.project() {
            StateProj::Passed { future } => future.poll(cx).map_err(SingleFlightError::service),
            StateProj::Waiting { response } => response.as_mut().poll(cx),
        }
    }
}

impl<F, T> fmt::Debug for ResponseFuture<F, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
