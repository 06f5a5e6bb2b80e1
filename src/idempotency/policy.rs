/// Which answers are kept, so that the same request gets them again, and what becomes of an operation that has failed. Defaults to [`SafeRetry`](Self::SafeRetry).
///
/// An answer that is not kept is as if nothing had happened: the next request with the key is served again. None of them keeps what a layer of
/// this crate on the inside has turned away with a response (an error of [`ErrorResponder`](crate::ErrorResponder) is a failure as any other, but for that of a lock that was lost half way), nor an answer with `tollgate::responder::NotExecuted` in its extensions. One with
/// `tollgate::responder::OutcomeUnknown` in them is neither kept nor given back: the outcome is unknown when the lease has ended.
///
/// What a handler answers to a request that has broken off while it was read is kept if it is a success and comes to its end; of a next attempt, which may have been
/// sent another body, if as much was read as by the one before, too. Otherwise that is a failure without an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ResponsePolicy {
    /// All but those that say "not now": 5xx, 408, 425, 429, and any 4xx with `Retry-After`; those that say "not here": 404 and 405 where no handler is known to
    /// have run (see [the table](super#what-is-recorded)); and but for those that may have been answered because of a header that is no part
    /// of what makes the same request: 401, 403, 406, 407, 412, 415, 417, 421 and 428, so that a client that forgot its credentials, or has sent a wrong
    /// `Content-Type` or `If-Match`, can mend that. With gRPC the statuses that correspond, also `UNIMPLEMENTED`, which another replica may not answer. Handlers that fail or panic count as
    /// 5xx, and so does an answer of gRPC that ends without a status.
    #[default]
    SafeRetry,
    /// All, once the handler has begun, as Stripe does it: also errors of the server. When a handler fails without an answer, or panics, the
    /// outcome is unknown.
    All,
    /// Only 2xx, and with gRPC `OK`.
    Success,
}

impl ResponsePolicy {
    /// Whether what has failed is given back.
    pub(crate) fn gives_failures_back(self) -> bool {
        self != Self::All
    }
}

/// What happens to a request that has no key. Defaults to [`Reject`](Self::Reject).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnMissingKey {
    /// It is turned away: 400 with HTTP.
    #[default]
    Reject,
    /// It is served, as often as it comes.
    Pass,
}

/// What happens to a request whose operation was begun by somebody who was not heard of in time. Defaults to [`Reject`](Self::Reject).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnUnknown {
    /// It is turned away for as long as the record is kept: 409 with HTTP. Somebody has to look what became of it.
    #[default]
    Reject,
    /// It is served again, as the next [attempt](super::IdempotencyHandle::attempt). A handler whose own lease is lost is cancelled then.
    ///
    /// What that one was sent is in the record as of its first renewal, a third of a lease after it has begun, or its first checkpoint. Before
    /// that a request with another body cannot be told from the same one, and is the next attempt. What is known is known for the
    /// retention, also when the next attempt is given back.
    ///
    /// What the attempt before has done may be done twice by this. A handler that does things elsewhere should find out by its
    /// [checkpoints](super::IdempotencyHandle::checkpoint), or pass on [keys of its own](super::IdempotencyHandle::derive).
    Retry,
}

/// What happens to a request when the store fails before it is served. Defaults to [`Deny`](Self::Deny).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnStoreError {
    /// It is turned away: 503 with HTTP.
    #[default]
    Deny,
    /// It is served without a record. The log has a line when that begins, and when it ends. A request that
    /// [waits](crate::http::IdempotencyLayer::wait) for one in flight does not pass: it waits on, and is turned away in the end.
    Allow,
}

/// What happens to a handler whose client goes away. Defaults to [`Finish`](Self::Finish).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnDisconnect {
    /// It is done all the same, so that the client finds the answer when it comes back.
    #[default]
    Finish,
    /// It is dropped where it stands, and what came of it is unknown when its lease has ended. A client that has got as many bytes of the answer as it was told to
    /// expect has not gone away.
    Cancel,
}
