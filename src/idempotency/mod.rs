//! The same request twice is done once: for endpoints that charge a card, and clients that try again.
//!
//! A client names what it wants done by a key of its choice, and sends the key again when it tries again. `IdempotencyLayer` (feature
//! `http`) keeps a record for each key in a backend: in this process ([`MemoryBackend`](crate::MemoryBackend)) or in Redis, where all processes see
//! it. The first request is served; whoever comes later with the same key gets the same answer, byte by byte.
//!
//! # What it promises, and what not
//!
//! * With one Redis primary a key's handler runs to its end at most once while its record lives, unless its answer is one that [`ResponsePolicy`] gives
//!   back or you chose [`OnUnknown::Retry`] or [`OnStoreError::Allow`](crate::OnStoreError::Allow), whatever the number of processes and of retries, and whether or not its
//!   client is still there: it goes on in a task of its own when the client has gone.
//! * Two callers never see each other's answers: a key is one within its scope, and a layer without a scope does not compile. Nor do two
//!   routes: the method and the path are part of the scope, and that is the whole path unless a router in front of the layer has taken a prefix
//!   away. What axum has taken away is known with the feature `axum`. **Without it, and with other routers, `/shop/pay` and `/club/pay` are both
//!   `/pay`, and one replays the other**, unless the [scope](crate::http::IdempotencyLayer::scope) says the prefix.
//! * Another request under the same key (query, body, chosen headers) is refused, and learns nothing more.
//! * When a process dies with a handler at work nobody knows what the handler has done. The record then says *outcome unknown*, and
//!   [`OnUnknown`] says whether such requests are refused or served again, which may double what was done before. Effects outside
//!   of Redis are not exactly once by this: give [`IdempotencyHandle::derive`] to those whom the handler asks, refuse a smaller
//!   [`fence`](IdempotencyHandle::fence), or put down what is done with [`IdempotencyHandle::checkpoint`] for the next attempt.
//! * Answers lie in the store in clear, headers and body, for their retention: whoever can read the store can read them, so a secret has no place in
//!   one. Of requests there are fingerprints only: see [`fingerprint_secret`](crate::http::IdempotencyLayer::fingerprint_secret).
//! * A failover to a replica forgets what was not replicated, and so does eviction: use `maxmemory-policy noeviction`. A record that is gone is
//!   a request that is served anew.
//!
//! # Examples
//!
//! As it comes, with the header `Idempotency-Key` of draft-ietf-httpapi-idempotency-key-header-07:
//!
//! ```
//! # #[cfg(feature = "http")] {
//! use axum::{Router, body::Body, http::Request, routing::post};
//! use tollgate::{IdempotencyLayer, MemoryBackend, http::header};
//! use tower::ServiceExt;
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
//! let guard = IdempotencyLayer::new(MemoryBackend::new()).scope(header("x-api-key")); // the same for all tries
//! let app: Router = Router::new().route("/payments", post(async || "charged once")).layer(guard);
//!
//! let pay = || {
//!     Request::post("/payments")
//!         .header("x-api-key", "of alice")
//!         .header("idempotency-key", r#""8e03978e-40d5-43e8-bc93-6894a57f9324""#)
//!         .body(Body::from(r#"{"amount":100}"#))
//! };
//! let first = app.clone().oneshot(pay()?).await?;
//! assert!(first.headers().get("idempotent-replayed").is_none());
//! let again = app.oneshot(pay()?).await?;
//! assert_eq!(again.headers()["idempotent-replayed"], "true");
//! # Ok(())
//! # }
//! # main().unwrap();
//! # }
//! ```
//!
//! With everything said:
//!
//! ```
//! # #[cfg(feature = "http")] {
//! use std::time::Duration;
//! use http::Method;
//! use tollgate::http::header;
//! use tollgate::idempotency::{CircuitBreaker, ResponsePolicy, OnDisconnect, OnUnknown};
//! use tollgate::lock::Reach;
//! use tollgate::{HttpResponder, IdempotencyLayer, MemoryBackend, OnMissingKey, OnStoreError};
//!
//! # fn main() -> Result<(), tollgate::ConfigError> {
//! let guard = IdempotencyLayer::new(MemoryBackend::new())
//!     .name("payments") // in metrics
//!     .require(Reach::Process)? // Reach::Redis would refuse the memory backend
//!     .scope(header("x-api-key"))
//!     .methods([Method::POST, Method::PATCH, Method::PUT])
//!     .header("x-request-key")
//!     .fingerprint_headers(["content-type"])
//!     .fingerprint_secret([7; 32]) // the same in all replicas
//!     .lease(Duration::from_secs(30))
//!     .retention(Duration::from_secs(3 * 86_400))
//!     .wait(Duration::from_secs(2))
//!     .max_waiters_in_total(100)
//!     .max_runtime(Duration::from_secs(60))
//!     .max_running(1_000)
//!     .max_running_per_scope(100)
//!     .max_records_per_scope(10_000)
//!     .max_answer(16 * 1_024)
//!     .max_body(1_024 * 1_024)
//!     .body_timeout(Duration::from_secs(5))
//!     .keep_cookies(false)
//!     .keep(ResponsePolicy::All)
//!     .on_missing_key(OnMissingKey::Pass)
//!     .on_unknown(OnUnknown::Retry)
//!     .on_store_error(OnStoreError::Deny)
//!     .on_disconnect(OnDisconnect::Finish)
//!     .deadline(Duration::from_millis(200))
//!     .circuit_breaker(CircuitBreaker::new().failures(10))
//!     .responder(HttpResponder::new());
//! # drop(guard);
//! # Ok(())
//! # }
//! # main().unwrap();
//! # }
//! ```
//!
//! # What is answered
//!
//! | | with HTTP | problem | with gRPC |
//! | --- | --- | --- | --- |
//! | done before | the answer, `Idempotent-Replayed: true` | | the same |
//! | no key | 400 | `key-missing` | `INVALID_ARGUMENT` |
//! | several keys, an empty one, more than 255 characters, or neither a string nor a token | 400 | `key-invalid` | `INVALID_ARGUMENT` |
//! | no scope, or a body that breaks off while it is compared | 400 | `about:blank` | `INVALID_ARGUMENT` |
//! | the body [stands still](crate::http::IdempotencyLayer::body_timeout) while it is compared | 408 | `about:blank` | `UNAVAILABLE`, `RetryInfo` |
//! | the body is larger than [`max_body`](crate::http::IdempotencyLayer::max_body) | 413 | `about:blank` | `RESOURCE_EXHAUSTED`, "do not retry" |
//! | the key was used for another request | 422 | `key-reused` | `FAILED_PRECONDITION` |
//! | in flight, also after waiting | 409, `Retry-After` | `in-flight` | `ABORTED`, `RetryInfo` |
//! | outcome unknown | 409 | `outcome-unknown` | `FAILED_PRECONDITION` |
//! | done before, and the answer was too large or broke off | 409 | `answer-not-kept` | `FAILED_PRECONDITION` |
//! | cancelled: it took too long, or its lease was lost | 503 | `about:blank` | `ABORTED`, "do not retry" |
//! | too many are being served | 503, `Retry-After` | `about:blank` | `RESOURCE_EXHAUSTED`, `RetryInfo` |
//! | the caller has as many [records](crate::http::IdempotencyLayer::max_records_per_scope) or [running handlers](crate::http::IdempotencyLayer::max_running_per_scope) as one may have | 429, `Retry-After` | `scope-full` | `RESOURCE_EXHAUSTED`, `RetryInfo` |
//! | a setting cannot work | 500 | `about:blank` | `INTERNAL` |
//! | the store fails | 503, `Retry-After` | `about:blank` | `UNAVAILABLE`, `RetryInfo` |
//!
//! "Do not retry" is `grpc-retry-pushback-ms: -1`, since clients send calls that end with these codes again by themselves.
//!
//! The `type` of a problem document is `urn:tollgate:idempotency:` with the name behind it. A key is a string of RFC 9651, `"abc"`, or the bare
//! `abc` that most clients send: both are the same key. POST and PATCH are served once. All other methods pass untouched, **PUT and DELETE with a key too**,
//! unless [`methods`](crate::http::IdempotencyLayer::methods) names them; the log has a line for the first such request. So does a request without a key pass if
//! the layer is told [so](crate::OnMissingKey::Pass).
//!
//! A script in a browser that calls from another origin sees `Idempotent-Replayed` and `Retry-After` only if they are named in
//! `Access-Control-Expose-Headers`, and may send the key only if its header is named in `Access-Control-Allow-Headers`: what answers for CORS, on the
//! outside of this layer, has to be told so.
//!
//! # What is recorded
//!
//! By [default](ResponsePolicy::SafeRetry) these responses are recorded, so that the same request gets them again, and these are not, so that it is served again:
//!
//! | response | recorded | |
//! | --- | --- | --- |
//! | 1xx, 2xx, 3xx | yes | also with `Retry-After` |
//! | 5xx, 408, 425, 429, and any 4xx with `Retry-After` | no | "not now" |
//! | 404, of a handler | yes | a router of axum in front of the layer has found the route, or the body was read |
//! | 404, of a router | no | "not here": nothing has read the body, and no route is known. In a rolling deploy another replica may have it |
//! | 405 | no | unless the body was read |
//! | 401, 403, 406, 407, 412, 415, 417, 421, 428 | no | may be due to a header that is no part of the same request |
//! | a rejection of a layer of this crate | no | by `NotExecuted` in the extensions, or over a connection by the field `Tollgate-Rejected` of locks and idempotency |
//! | any other 4xx, 409 and 423 among them | yes | |
//! | gRPC `OK`, `INVALID_ARGUMENT`, `NOT_FOUND`, `ALREADY_EXISTS`, `FAILED_PRECONDITION`, `OUT_OF_RANGE` | yes | |
//! | gRPC with any other status, or without one | no | |
//!
//! With the feature `axum` and `Router::layer` or `route_layer` the layer knows whether there is a route, but for one with a wildcard and a service that is
//! nested by `nest_service`. Elsewhere, as around a whole router or in front of a plain tower service, all it can see is whether the body was read. There
//! a 404 of a handler that reads no body is given back like that of a router. With [`ResponsePolicy::All`] all 404 and 405 are recorded. A router's own
//! fallback that reads the body says `tollgate::responder::NotExecuted`.
//!
//! # Bodies
//!
//! Nothing is collected before the handler runs. The body of a request is hashed as the handler reads it, and of a duplicate no more is
//! read than that takes. A handler that answers before it has read everything has the fingerprint of what it has read. While the first
//! request is still being served, only what is known before the body can tell another one apart, and what the last renewal said: such a duplicate is
//! told to come back, and refused then.
//!
//! The answer goes to the caller while it is recorded. Its last part is held back until the record is stored, so a client that has seen the end
//! finds it there. (If the handler sets `Content-Length`, a client may believe that it has seen the end before.) If the record cannot be stored, the
//! client gets the answer all the same, storing is tried again in the background for the length of a lease, and
//! after that the outcome is unknown. Of one that is larger than 64 KiB only the status is kept, as soon as that is known and the handler reads no more of the request, which could still break off (with gRPC at
//! its end, since the status comes last, as that to a request that has broken off; of a next attempt once its body is known to be the same): its handler is not run again, and its
//! reader may take the time that it likes, where until then the answer has to come to its end within `max_runtime`. With [`OnUnknown::Retry`] it breaks off if
//! the lease ends before that status is stored: somebody else may begin then.
//!
//! The next attempt has to send the same body, as far as that of the one before is known. If it is another one, the handler is dropped before it
//! sees its end, and the answer is 422, or breaks off if it has begun. The operation is given back as it was then, but for [`ResponsePolicy::All`] with [`OnUnknown::Reject`]: the outcome
//! is unknown, as that of any handler that was dropped half way. Until so much was read a [checkpoint](IdempotencyHandle::checkpoint) is [refused](CheckpointError::Unread): one
//! of another body would take the place of the one before. So read the body before the first checkpoint. Where the handler answers before it has read so much, the rest is compared before
//! its answer is kept, or given whole: if the body stands still for longer than [`body_timeout`](crate::http::IdempotencyLayer::body_timeout), or since the handler has not dropped it, an
//! answer that is no success is given, and not kept, and with [`ResponsePolicy::All`] the outcome is unknown.
//!
//! Not kept are headers of one hop, one moment or one request: `Connection` and what it names, `Content-Length`, `Date`, `Age`, `Set-Cookie` (unless
//! told otherwise), `RateLimit` and its kin, `Server-Timing`, `traceparent`, `X-Request-Id`.
//!
//! A bidirectional stream of gRPC, or any call whose client waits for a part of the answer before it sends more, cannot be repeated. A replay needs the
//! whole body first: the repeat is answered by `UNAVAILABLE`, or 408, after [`body_timeout`](crate::http::IdempotencyLayer::body_timeout).
//!
//! # One caller among many
//!
//! Each caller, which is what the [scope](crate::http::IdempotencyLayer::scope) says, has bounds of its own, so that one of them cannot use up what all of them
//! share: [`max_running_per_scope`](crate::http::IdempotencyLayer::max_running_per_scope) handlers in a process, and
//! [`max_records_per_scope`](crate::http::IdempotencyLayer::max_records_per_scope) records in the store. In memory a caller also has no more records, and
//! no more bytes of answers, than there is room left for other callers: see [`MemoryBackend`](crate::MemoryBackend#memory). These are bounds for
//! what is kept, and no rate limit: put a [`RateLimitLayer`](crate::RateLimitLayer) outside of this layer, by the same caller, to bound how fast keys are used up.
//!
//! # Together with other layers
//!
//! Outside of a [`RateLimitLayer`](crate::RateLimitLayer) a replay is not charged against the quota; put a second limit outside for what the
//! replays themselves cost. Outside of a [`LockLayer`](crate::LockLayer) a replay does not wait for the lock. What either of them turns away with a response is
//! not kept, whatever its status. What they turn away [with an error](crate::ErrorResponder) is a failure as any other, since whoever gets one cannot tell whether a handler
//! has failed with it half way: with [`ResponsePolicy::All`] the outcome is unknown then. So it is, whatever is kept, of a handler that a `LockLayer` has cancelled since its lock was lost, by what that
//! answers: a response with `tollgate::responder::OutcomeUnknown`, which a [`Responder`](crate::responder::Responder) of your own has to put there itself, or a [`BoxError`](crate::BoxError) with
//! [`LockError::Lost`](crate::LockError::Lost) among its causes; and of one whose answer it has cut off for that before the record had it: one that is too large is recorded before its end. Put it
//! inside of what makes gRPC-Web of gRPC, the status of which is not seen here, inside of compression, since the next client may not accept what this one does, and inside of what finds out who is calling.
//!
//! Inside of a `LockLayer` a handler that goes on when its client has gone keeps the lock until its end, and its answer until
//! [that one's](crate::lock::ReleaseAt). If the lease is lost before it has answered, it is dropped half way, unless that is only to be
//! [told](crate::lock::OnLoss::Notify); an answer that has begun then is recorded to its end.
//!
//! Of two layers over each other, one around a router and one at a route for instance, that find the same scope and the same key in a request, the
//! outer one does the operation, on its own terms, and the inner one lets it pass. Of two that find different ones each has a record: the outer one gives back
//! what the inner one refuses, so that it asks that again the next time, and what that has given back since its handler was sent another body than the attempt before. What the inner one has cancelled half way, by its time, its lease or its `max_body`, is of
//! unknown outcome to both, also where its answer had begun and the record did not have it yet, and completed by hand or forgotten in both. It says so as a `LockLayer` does, and so has a `Responder` of your own.
//!
//! A timeout goes outside, where the handler goes on to its end after it and the client finds the answer when it comes back. One that is inside drops
//! the handler half way, and its answer, 408 or 503 or an error, is one that is given back: the next try runs from the start, on top of what the
//! first has done. A handler that has waited in vain for somebody else says so with `tollgate::responder::OutcomeUnknown` in the extensions of its answer,
//! so that this is not done twice. What bounds the handler itself is [`max_runtime`](crate::http::IdempotencyLayer::max_runtime), after which the record says that
//! the outcome is unknown.
//!
//! A handler is polled by whoever polls the answer, as without this layer, until that is dropped. The `tracing` span goes along with it
//! into the task that goes on then; task-locals do not, so a handler should not need any.
//!
//! # Operations
//!
//! [`IdempotencyAdmin`] says how far an operation is, and lists those of unknown outcome, which the log names, too. Once somebody has found out what
//! became of one, it is completed by hand, or forgotten, so that it can be begun anew.
//!
//! # What is no request
//!
//! [`Idempotent`] do anything else once that has a name: a message of a broker, a job, a command. Their records, leases and attempts are those of the
//! layer. Those of one name have nothing to do with those of another.
//!
//! # Metrics
//!
//! With the feature `metrics` the layer counts with the `metrics` facade. A metric that an exporter
//! has dropped after its idle timeout appears [again](crate::rate_limit#metrics) when it is next used. Labels are the [name](crate::http::IdempotencyLayer::name) of the layer and those below, never a key or a scope.
//!
//! | name | labels | counts |
//! | --- | --- | --- |
//! | `tollgate_idempotency_requests_total` | `layer`, `outcome`: `executed`, `replayed`, `in_flight`, `mismatch`, `outcome_unknown`, `not_kept`, `missing_key`, `invalid_key`, `missing_scope`, `unreadable`, `body_timeout`, `too_large`, `full`, `scope_full`, `failed_open`, `failed_closed`; and of those that were executed `cancelled`, or `mismatch` and `too_large` where the body turned out so | requests with a key, or turned away for the lack of one |
//! | `tollgate_idempotency_attempts_total` | `layer`, `outcome`: `kept`, `tombstone` (only the status is), `given_back`, `unknown` | attempts that ended |
//! | `tollgate_idempotency_handler_seconds` | `layer` | from the claim to the end of the answer, or to where the handler was cut off, a histogram; nothing of one that panics, or is dropped with its client |
//! | `tollgate_idempotency_wait_seconds` | `layer` | how long requests waited for the same request, a histogram |
//! | `tollgate_idempotency_store_errors_total` | `layer` | calls that failed or were late |
//! | `tollgate_idempotency_circuit_transitions_total` | `layer`, `state`: `open`, `closed` | circuits that opened and closed |
//!
//! # What is asked of the store
//!
//! Two round trips for the first request, one for a replay or a refusal; one for each third of a lease that a handler takes, and for
//! each checkpoint. A request that [waits](crate::http::IdempotencyLayer::wait) asks once when it has begun to listen, again after each message, once a second in
//! any case, and when the lease would end; all of a process listen over one connection. A store that fails again and again is not asked for each request: see
//! [`circuit_breaker`](crate::http::IdempotencyLayer::circuit_breaker).
//!
//! # Cancellation
//!
//! A request whose client goes away before it is served is given back in the background; after that the handler runs to its end all the same
//! ([`OnDisconnect`]), for no longer than `max_runtime`. `IdempotencyLayer::wait_idle` waits for that at the end of a program. A
//! handler that panics, and the panic of which reaches the caller as it would without this layer, is a failure like any other: see [`ResponsePolicy`].

mod admin;
mod answer;
mod checkpoint;
mod per_scope;
mod policy;
mod rejection;
mod store;

#[cfg_attr(not(feature = "http"), allow(dead_code, reason = "what serves requests comes with that feature"))]
mod attempt;
#[cfg_attr(not(feature = "http"), allow(dead_code, reason = "what serves requests comes with that feature"))]
mod erased;
mod handle;
mod idempotent;
#[cfg_attr(not(feature = "http"), allow(dead_code, reason = "what serves requests comes with that feature"))]
mod metrics;
mod operation_error;
mod waiters;

#[cfg(feature = "http")]
pub(crate) use self::attempt::{
    Attempt, Begin, Coordinator, Granted, MostRunning, OperationContext, Running, Settlement,
};
pub use crate::store::circuit::CircuitBreaker;

pub use self::admin::{IdempotencyAdmin, IdempotencyRegistry, OperationPage, OperationState, OperationStatus};
pub use self::answer::Answer;
pub use self::checkpoint::{Checkpoint, CheckpointError};
#[cfg(feature = "http")]
pub(crate) use self::handle::HasPayload;
pub use self::handle::IdempotencyHandle;
pub use self::idempotent::{Done, Idempotent};
#[cfg(feature = "http")]
pub(crate) use self::metrics::Verdict;
pub use self::operation_error::{Failed, OperationError};
pub use self::policy::{OnDisconnect, OnUnknown, ResponsePolicy};
pub use self::rejection::{InvalidKey, Rejection, ScopeBound};
pub use self::store::{Begun, Claim, Completion, Digest, IdempotencyStore, Operation, Payload, RecordBound};
