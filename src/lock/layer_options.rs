//! How long a request holds its lock.

/// What to do when a running request loses its lease. Defaults to [`Cancel`](Self::Cancel).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnLoss {
    /// Drop its handler and respond with 503 over HTTP. If the response has begun, its body fails, or ends with a status in the
    /// trailers over gRPC.
    #[default]
    Cancel,
    /// Cancel nothing. The [`LeaseHandle`](super::LeaseHandle) in the extensions of the request reports the loss:
    /// [`lost`](super::LeaseHandle::lost) resolves and [`check`](super::LeaseHandle::check) fails. If the handler does not look,
    /// its response is sent as usual. The log and the metrics report each loss.
    Notify,
}

/// When the lock of a request is released. Defaults to [`BodyEnd`](Self::BodyEnd).
///
/// An upgraded connection, such as a WebSocket, outlives its response: a 101 has no body. The task that serves it keeps the lock
/// with a handle of its own, [`LeaseHandle::reenter`](super::LeaseHandle::reenter): see
/// [`LockLayer::with_semaphore`](super::LockLayer::with_semaphore) for an example.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseAt {
    /// When the response body has ended, failed or been dropped. A slow client holds the lock meanwhile, up to
    /// [`max_hold`](super::LockLayer::max_hold). [`ErrorResponder`](crate::responder::ErrorResponder) knows no body, so the lock is
    /// released when the handler has returned. A responder of your own keeps it only by
    /// [`BindLease`](super::BindLease::bind).
    #[default]
    BodyEnd,
    /// When the handler has returned its response. The body is then sent without the lock.
    HandlerDone,
}
