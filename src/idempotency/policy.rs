/// Which responses are stored and replayed, and what happens to an operation that failed. Defaults to
/// [`SafeRetry`](Self::SafeRetry).
///
/// If the policy does not store a response, the operation is released, and the next request with the key is executed again. Never stored
/// are responses by which an inner layer of this crate rejected the request, and responses with `tollgate::responder::NotExecuted` in their
/// extensions. (An error of [`ErrorResponder`](crate::ErrorResponder) is a failure like any other, except for a lock that was lost during
/// execution.) A response with `tollgate::responder::OutcomeUnknown` in its extensions is neither stored nor released: the outcome is
/// unknown when the lease ends.
///
/// If the request body breaks off while the handler reads the body, only a response that is complete and a success is stored. In a further
/// attempt, the handler must also have read as much of the body as the attempt before. Otherwise the response counts as a failure without a
/// response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ResponsePolicy {
    /// Stores all responses with these exceptions. "Not now": 5xx, 408, 425, 429, and any 4xx with `Retry-After`. "Not here":
    /// 404 and 405 if no handler is known to have run (see [the table](super#stored-responses)). And 401, 403, 406, 407, 412,
    /// 415, 417, 421 and 428, which may depend on a header outside of the fingerprint: a client can correct missing credentials,
    /// a wrong `Content-Type` or a wrong `If-Match`. With gRPC the corresponding statuses, and `UNIMPLEMENTED`, which another
    /// replica may not return. Handlers that fail or panic count as 5xx. So does a gRPC response with an undefined status, or
    /// without a status.
    #[default]
    SafeRetry,
    /// Stores all responses once the handler has started, server errors included, as Stripe does. If a handler fails without a
    /// response, or panics, the outcome is unknown.
    All,
    /// Stores only 2xx, and with gRPC `OK`.
    Success,
}

impl ResponsePolicy {
    /// Whether a failed operation is released.
    pub(crate) fn releases_failures(self) -> bool {
        self != Self::All
    }
}

/// What to do with a request whose operation was begun by an attempt that did not report in time. Defaults to
/// [`Reject`](Self::Reject).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnUnknown {
    /// Reject it while the record is stored: 409 with HTTP. An operator has to determine the outcome.
    #[default]
    Reject,
    /// Execute it again, as the next [attempt](super::IdempotencyHandle::attempt). With this setting, a handler that loses its lease is
    /// cancelled.
    ///
    /// The record holds the fingerprint of the request without its body from the start, and that of the body from the first renewal or
    /// checkpoint. The first renewal is a third of a lease after the start. Before that, a request with another body cannot be told apart,
    /// and becomes the next attempt. The fingerprint is kept for the retention, even if the next attempt is released.
    ///
    /// This may repeat effects of the earlier attempt. A handler with effects elsewhere should use
    /// [checkpoints](super::IdempotencyHandle::checkpoint), or pass on [keys of its own](super::IdempotencyHandle::derive).
    Retry,
}

/// What to do with a handler whose client disconnects. Defaults to [`Finish`](Self::Finish).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnDisconnect {
    /// Finish it, so that the client finds the response when it retries.
    #[default]
    Finish,
    /// Drop it. The outcome is unknown when its lease ends. A client that goes away after it has received all announced bytes does not
    /// count as disconnected.
    Cancel,
}
