//! Idempotency: a request that a client retries is executed once, for instance a payment.
//!
//! A client chooses a key for an operation, and sends the same key with each retry. `IdempotencyLayer` (feature `http`) stores a
//! record for each key in a backend: in this process ([`MemoryBackend`](crate::MemoryBackend)), or in Redis, which all processes
//! share. The first request is executed. Later requests with the same key get the same response, byte for byte.
//!
//! With the defaults, and the header `Idempotency-Key` of draft-ietf-httpapi-idempotency-key-header-07:
//!
//! ```
//! # #[cfg(feature = "http")] {
//! use axum::{Router, body::Body, http::Request, routing::post};
//! use tollgate::{IdempotencyLayer, MemoryBackend, http::header};
//! use tower::ServiceExt;
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
//! let guard = IdempotencyLayer::new(MemoryBackend::new()).scope(header("x-api-key")); // the same in all retries
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
//! Guides: [idempotency](crate::guide::idempotency), [order of layers](crate::guide::order), [Redis](crate::guide::redis),
//! [troubleshooting](crate::guide::troubleshooting).
//!
//! # Guarantees and limits
//!
//! * **One execution.** With one Redis primary, the handler of a key runs to its end at most once while its record is stored. The
//!   number of processes and retries does not matter. If the client disconnects, the handler continues in a task of its own. The exceptions
//!   are a response that [`ResponsePolicy`] does not store, [`OnUnknown::Retry`], [`OnStoreError::Allow`](crate::OnStoreError::Allow), and
//!   an operation that an operator [forgets](IdempotencyAdmin::forget).
//! * **Separate callers.** Callers never get each other's responses: a key is unique within its
//!   [scope](crate::http::IdempotencyLayer::scope), and a layer without a scope does not compile.
//! * **Separate routes.** The scope includes the method and the path. If a router in front of the layer removes a prefix from the
//!   path, the layer knows the whole path only with axum and the feature `axum`. **Otherwise `/shop/pay` and `/club/pay` are both
//!   `/pay`, and a request to one gets the response of the other.** Include the prefix in the scope then.
//! * **Different requests.** A different request under the same key is rejected, and learns nothing about the first one. Requests
//!   differ by their query, their body, or the [headers you choose](crate::http::IdempotencyLayer::fingerprint_headers).
//! * **Crashes.** If a process dies while a handler runs, the effects of the handler are not known. The record then says *outcome
//!   unknown*. [`OnUnknown`] sets whether retries are rejected, or executed again, which may repeat effects.
//! * **Effects in other systems** are not exactly once. To protect them, pass keys from [`IdempotencyHandle::derive`] to the
//!   services that the handler calls, or let them refuse a smaller [`fence`](IdempotencyHandle::fence) than the last. To continue
//!   after a crash, store progress for the next attempt with [`IdempotencyHandle::checkpoint`].
//! * **Secrets.** Responses are stored unencrypted, headers and body, for the retention. Any client with read access to the store
//!   can read them, so a response must not contain secrets. Of requests only fingerprints are stored: see
//!   [`fingerprint_secret`](crate::http::IdempotencyLayer::fingerprint_secret).
//! * **Lost records.** A failover to a replica loses records that were not replicated. Eviction loses records too, so set
//!   `maxmemory-policy noeviction`. A request without a record is executed again.
//!
//! # Options
//!
//! | setter of [`IdempotencyLayer`](crate::http::IdempotencyLayer) | default | meaning |
//! | --- | --- | --- |
//! | [`scope`](crate::http::IdempotencyLayer::scope) | required | identifies the caller |
//! | [`methods`](crate::http::IdempotencyLayer::methods) | POST and PATCH | the methods that the layer handles |
//! | [`header`](crate::http::IdempotencyLayer::header) | `Idempotency-Key` | the header with the key |
//! | [`fingerprint_headers`](crate::http::IdempotencyLayer::fingerprint_headers) | none | further headers in the fingerprint of a request |
//! | [`fingerprint_secret`](crate::http::IdempotencyLayer::fingerprint_secret) | none | keeps readers of the store from guessing requests |
//! | [`retention`](crate::http::IdempotencyLayer::retention) | a day | how long a response is stored |
//! | [`lease`](crate::http::IdempotencyLayer::lease) | 15 s | how long a process may fail to renew before the outcome is unknown |
//! | [`wait`](crate::http::IdempotencyLayer::wait) | zero | how long a request waits for the same request in flight |
//! | [`max_waiters_in_total`](crate::http::IdempotencyLayer::max_waiters_in_total) | 1,000 | how many requests wait at a time |
//! | [`max_runtime`](crate::http::IdempotencyLayer::max_runtime) | 5 minutes | how long a handler may run |
//! | [`max_running`](crate::http::IdempotencyLayer::max_running) | 10,000 | handlers in this process |
//! | [`max_running_per_scope`](crate::http::IdempotencyLayer::max_running_per_scope) | half of `max_running` | handlers of one caller in this process |
//! | [`max_records_per_scope`](crate::http::IdempotencyLayer::max_records_per_scope) | 1,000,000 | records of one caller |
//! | [`max_response`](crate::http::IdempotencyLayer::max_response) | 64 KiB | the size of a stored response |
//! | [`max_body`](crate::http::IdempotencyLayer::max_body) | 64 MiB | the size of a request body |
//! | [`body_timeout`](crate::http::IdempotencyLayer::body_timeout) | 10 s | how long the body of a retry may stall |
//! | [`response_policy`](crate::http::IdempotencyLayer::response_policy) | [`ResponsePolicy::SafeRetry`] | which responses are stored |
//! | [`keep_cookies`](crate::http::IdempotencyLayer::keep_cookies) | `false` | whether `Set-Cookie` is stored |
//! | [`on_missing_key`](crate::http::IdempotencyLayer::on_missing_key) | [`OnMissingKey::Reject`](crate::OnMissingKey::Reject) | what happens without a key |
//! | [`on_unknown`](crate::http::IdempotencyLayer::on_unknown) | [`OnUnknown::Reject`] | what happens to a request whose outcome is unknown |
//! | [`on_store_error`](crate::http::IdempotencyLayer::on_store_error) | [`OnStoreError::Deny`](crate::OnStoreError::Deny) | what happens if the store fails |
//! | [`on_disconnect`](crate::http::IdempotencyLayer::on_disconnect) | [`OnDisconnect::Finish`] | what happens to a handler whose client disconnects |
//! | [`deadline`](crate::http::IdempotencyLayer::deadline) | 100 ms | the longest time of a store call |
//! | [`circuit_breaker`](crate::http::IdempotencyLayer::circuit_breaker) | [`CircuitBreaker::new`] | when to stop calling a failing store |
//! | [`name`](crate::http::IdempotencyLayer::name) | `idempotency` | the name in metrics and logs |
//! | [`responder`](crate::http::IdempotencyLayer::responder) | [`HttpResponder`](crate::HttpResponder) | the response to a rejected request |
//! | [`require`](crate::http::IdempotencyLayer::require) | none | the [`Reach`](crate::Reach) that a backend must have |
//!
//! [`Idempotent`] has the setters that do not depend on HTTP. Its [`max_runtime`](Idempotent::max_runtime) has no limit by default.
//!
//! All settings of the layer:
//!
//! ```
//! # #[cfg(feature = "http")] {
//! use std::time::Duration;
//! use http::Method;
//! use tollgate::http::header;
//! use tollgate::idempotency::{CircuitBreaker, ResponsePolicy, OnDisconnect, OnUnknown};
//! use tollgate::Reach;
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
//!     .fingerprint_secret([7; 32]) // the same in all processes
//!     .lease(Duration::from_secs(30))
//!     .retention(Duration::from_secs(3 * 86_400))
//!     .wait(Duration::from_secs(2))
//!     .max_waiters_in_total(100)
//!     .max_runtime(Duration::from_secs(60))
//!     .max_running(1_000)
//!     .max_running_per_scope(100)
//!     .max_records_per_scope(10_000)
//!     .max_response(16 * 1_024)
//!     .max_body(1_024 * 1_024)
//!     .body_timeout(Duration::from_secs(5))
//!     .keep_cookies(false)
//!     .response_policy(ResponsePolicy::All)
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
//! # Responses
//!
//! | result | HTTP | problem | gRPC |
//! | --- | --- | --- | --- |
//! | completed before | the stored response, `Idempotent-Replayed: true` | | the same |
//! | no key | 400 | `key-missing` | `INVALID_ARGUMENT` |
//! | several keys, an empty key, more than 255 characters, or neither a string nor a token | 400 | `key-invalid` | `INVALID_ARGUMENT` |
//! | no scope, or the body breaks off during its comparison | 400 | `about:blank` | `INVALID_ARGUMENT` |
//! | the body [stalls](crate::http::IdempotencyLayer::body_timeout) during its comparison | 408 | `about:blank` | `UNAVAILABLE`, `RetryInfo` |
//! | the body is larger than [`max_body`](crate::http::IdempotencyLayer::max_body) | 413 | `about:blank` | `RESOURCE_EXHAUSTED`, "do not retry" |
//! | the key was used for another request | 422 | `key-reused` | `FAILED_PRECONDITION` |
//! | in flight, also after the wait | 409, `Retry-After` | `in-flight` | `ABORTED`, `RetryInfo` |
//! | outcome unknown | 409 | `outcome-unknown` | `FAILED_PRECONDITION` |
//! | completed before, but the response was too large, broke off, or found no room in the store | 409 | `response-not-stored` | `FAILED_PRECONDITION` |
//! | cancelled: the handler took too long, or lost its lease | 503 | `about:blank` | `ABORTED`, "do not retry" |
//! | [`max_running`](crate::http::IdempotencyLayer::max_running) requests are running | 503, `Retry-After` | `about:blank` | `RESOURCE_EXHAUSTED`, `RetryInfo` |
//! | the caller has reached its limit of [records](crate::http::IdempotencyLayer::max_records_per_scope) or [running handlers](crate::http::IdempotencyLayer::max_running_per_scope) | 429, `Retry-After` | `scope-full` | `RESOURCE_EXHAUSTED`, `RetryInfo` |
//! | a setting is invalid | 500 | `about:blank` | `INTERNAL` |
//! | the store failed | 503, `Retry-After` | `about:blank` | `UNAVAILABLE`, `RetryInfo` |
//!
//! "Do not retry" is `grpc-retry-pushback-ms: -1`, because gRPC clients retry calls with these codes automatically.
//!
//! The `type` of a problem document is `urn:tollgate:idempotency:` followed by the name in the table. A key is a string of RFC
//! 9651 (`"abc"`), or the bare `abc` that most clients send: both are the same key.
//!
//! By default, the layer handles POST and PATCH requests. All other methods pass without a record, **also PUT and DELETE with a
//! key**, unless [`methods`](crate::http::IdempotencyLayer::methods) names them. The layer logs the first such request with a
//! key, unless its method is safe or you called `methods`. A request without a key is rejected, unless you set
//! [`OnMissingKey::Pass`](crate::OnMissingKey::Pass).
//!
//! A page in a browser that calls another origin can read `Idempotent-Replayed` and `Retry-After` only if
//! `Access-Control-Expose-Headers` names them. It can send the key only if `Access-Control-Allow-Headers` names its header. Set
//! both in the CORS layer, which goes outside this layer: see [Browsers](crate::http#browsers).
//!
//! # Stored responses
//!
//! By [default](ResponsePolicy::SafeRetry), these responses are stored and replayed. The others release the operation, so the
//! next request is executed again:
//!
//! | response | stored | reason or condition |
//! | --- | --- | --- |
//! | 1xx, 2xx, 3xx | yes | also with `Retry-After` |
//! | 5xx, 408, 425, 429, and any 4xx with `Retry-After` | no | temporary |
//! | 404 from a handler | yes | an axum router in front of the layer has found the route, or the body was read |
//! | 404 from a router | no | no route is known and the body was not read. In a rolling deployment, another process may have the route |
//! | 405 | no | unless the body was read |
//! | 401, 403, 406, 407, 412, 415, 417, 421, 428 | no | may depend on a header outside the fingerprint |
//! | a rejection by a layer of this crate | no | has the extension `NotExecuted` or, from locks and idempotency of another server, the header `Tollgate-Rejected` |
//! | any other 4xx, including 409 and 423 | yes | |
//! | gRPC `OK`, `INVALID_ARGUMENT`, `NOT_FOUND`, `ALREADY_EXISTS`, `FAILED_PRECONDITION`, `OUT_OF_RANGE` | yes | |
//! | gRPC with any other status, or without one | no | |
//!
//! With the feature `axum` and `Router::layer` or `route_layer`, the layer knows whether a route exists. The exceptions are
//! routes with a wildcard and services nested with `nest_service`. Elsewhere, for instance around a whole router or in front of a
//! plain tower service, the layer sees only whether the body was read. There, a 404 of a handler that does not read its body is
//! not stored.
//!
//! With [`ResponsePolicy::All`], all 404 and 405 responses are stored. If the fallback of a router reads the body, let it insert
//! `tollgate::responder::NotExecuted` into the extensions of its response.
//!
//! # Bodies
//!
//! The layer does not buffer request bodies. It hashes a body while the handler reads it, so the fingerprint covers only the part
//! that the handler read before it responded. Of the body of a retry, the layer reads no more than the comparison needs.
//!
//! While the first request is in flight, its fingerprint is incomplete. It covers the request without the body, and the part of
//! the body that the last renewal or checkpoint reported. A different request that matches this part gets 409 (in flight), and
//! 422 after the first request is complete.
//!
//! The layer records the response while it sends it to the client. It holds back the last part until the record is stored, so a
//! client that has the whole response finds it stored. The exception is a handler that sets `Content-Length`: its client may
//! count the bytes and have the whole response before the record is stored.
//!
//! If the response cannot be stored, the client gets it anyway. The layer retries in the background for the length of a lease.
//! After that the outcome is unknown.
//!
//! A bidirectional gRPC stream cannot be retried, nor can any call whose client waits for a part of the response before it sends
//! more. A replay needs the whole body first, so the retry ends with `UNAVAILABLE`, or 408, after
//! [`body_timeout`](crate::http::IdempotencyLayer::body_timeout).
//!
//! ## Large responses
//!
//! Of a response larger than [`max_response`](crate::http::IdempotencyLayer::max_response), 64 KiB by default, only the status is
//! stored. A retry gets 409, and the handler does not run again. The layer stores the status before the end of the response, as
//! soon as these conditions hold:
//!
//! * The status is final. With gRPC it usually comes at the end of the response.
//! * The handler reads no more of the request body. A body that is still being read could break off. After a body that has broken
//!   off, the layer stores the status at the end of the response.
//! * If this is not the first attempt, the body is known to be the same as before.
//!
//! Until then, the response must end within `max_runtime`. Afterwards `max_runtime` limits only the time without progress, so a
//! slow client is not cut off. With [`OnUnknown::Retry`], the response breaks off if the lease ends before the status is stored,
//! because another attempt may start then.
//!
//! ## Further attempts
//!
//! An attempt can follow one that was released, or one whose outcome is unknown. It must have the same body, as far as the body
//! of the earlier attempt is known. If it differs, the layer drops the handler before the handler reads the end of the body. The
//! client gets 422, or a response that breaks off if it has begun. The operation is released, and keeps the fingerprint and the
//! checkpoint of the earlier attempt.
//! The exception is [`ResponsePolicy::All`] with [`OnUnknown::Reject`]: there the outcome is unknown, as for any handler that is
//! dropped while it runs.
//!
//! Until the handler has read as much as the earlier attempt, a [checkpoint](IdempotencyHandle::checkpoint) fails with
//! [`CheckpointError::Unread`]. Otherwise a different request could replace the earlier checkpoint. So read the body before the
//! first checkpoint.
//!
//! If the handler responds before it has read that much, the layer compares the rest of the body before it stores the response or sends its
//! end. The comparison is not possible if the body breaks off, if it stalls for longer than
//! [`body_timeout`](crate::http::IdempotencyLayer::body_timeout), or if the handler has not dropped the body. Then a success is
//! stored. Any other response is sent and not stored, and with [`ResponsePolicy::All`] the outcome is unknown.
//!
//! ## Response headers
//!
//! Headers that belong to one hop, one moment or one request are not stored. These are `Connection` and the headers it names, `Keep-Alive`,
//! `TE`, `Transfer-Encoding`, `Upgrade`, `Proxy-Authenticate`, `Proxy-Authorization`, `Proxy-Connection`, `Content-Length`, `Date`, `Age`,
//! `RateLimit` and related fields, `Server-Timing`, `traceparent`, `tracestate`, `X-Request-Id`. `Set-Cookie` is stored only with
//! [`keep_cookies`](crate::http::IdempotencyLayer::keep_cookies).
//!
//! # Limits for each caller
//!
//! The [scope](crate::http::IdempotencyLayer::scope) identifies the caller. Each caller has limits of its own, so that one caller
//! cannot use up shared capacity:
//!
//! * [`max_running_per_scope`](crate::http::IdempotencyLayer::max_running_per_scope): handlers in a process
//! * [`max_records_per_scope`](crate::http::IdempotencyLayer::max_records_per_scope): records in the store
//!
//! In the memory backend, one caller may use no more room than is left for all other callers, in records and in bytes of responses: see
//! [`MemoryBackend`](crate::MemoryBackend#memory).
//!
//! These limits bound stored data, and are no rate limit. To bound how fast a caller uses new keys, put a
//! [`RateLimitLayer`](crate::RateLimitLayer) outside of this layer, with the same caller as its key.
//!
//! # Together with other layers
//!
//! Put this layer outside of:
//!
//! * a [`RateLimitLayer`](crate::RateLimitLayer), so that a replay is not charged against the quota. A second limit, outside of
//!   this layer, can bound the replays.
//! * a [`LockLayer`](crate::LockLayer), so that a replay does not wait for the lock.
//!
//! Put this layer inside of:
//!
//! * the authentication, which identifies the caller.
//! * compression, because the next client may not accept the same encoding.
//! * a translation from gRPC to gRPC-Web, because the layer cannot see the status of gRPC-Web.
//! * a timeout, so that the handler runs to its end after the timeout, and the client finds the response when it retries.
//!
//! ## Rejections by inner layers
//!
//! A response by which an inner rate limit or lock rejects a request is not stored, whatever its status. A rejection [as an
//! error](crate::ErrorResponder) counts as a failure of the handler, because this layer cannot tell the two apart. With
//! [`ResponsePolicy::All`] the outcome is then unknown.
//!
//! If an inner `LockLayer` cancels a handler because its lock was lost, the outcome is unknown with any policy. This layer
//! recognizes:
//!
//! * a response with `tollgate::responder::OutcomeUnknown` in its extensions. A [`Responder`](crate::responder::Responder) of
//!   your own must insert it.
//! * a [`BoxError`](crate::BoxError) with [`LockError::Lost`](crate::LockError::Lost) among its causes.
//! * a response that the `LockLayer` cut off before it was recorded. A response that is too large is recorded before its end.
//!
//! ## Inside of a lock
//!
//! Inside of a `LockLayer`, a handler that continues after its client has disconnected keeps the lock until it responds, or until
//! its response ends: see [`ReleaseAt`](crate::lock::ReleaseAt). If the lock is lost before the handler responds, the handler is
//! dropped, unless [`OnLoss::Notify`](crate::lock::OnLoss::Notify) is set. A response that has begun by then is recorded to its
//! end.
//!
//! ## Timeouts
//!
//! A timeout inside of this layer drops the handler while it runs. By default, its response (408, 503 or an error) is not stored, so the
//! next request starts from the beginning and may repeat effects. To limit the handler itself, use
//! [`max_runtime`](crate::http::IdempotencyLayer::max_runtime), after which the outcome is unknown.
//!
//! If a handler calls another service and gets no reply in time, let it respond with `tollgate::responder::OutcomeUnknown` in the
//! extensions. Then the call is not repeated.
//!
//! ## Nested idempotency layers
//!
//! Idempotency layers can be nested, for instance one around a router and one at a route. If both find the same scope and the
//! same key in a request, the outer layer executes the operation with its settings, and the inner layer passes the request. If
//! they find different ones, each layer has a record:
//!
//! * If the inner layer rejects a request, the outer layer releases its operation, and calls the inner layer again for the next
//!   request. It does the same if the inner layer released its operation because the body differs from that of the attempt
//!   before.
//! * If the inner layer cancels a handler, because of `max_runtime`, its lease or `max_body`, the outcome is unknown in both
//!   layers. This includes a response that has begun and is not stored yet. Complete or forget the operation in both layers. The
//!   inner layer reports the cancellation like a `LockLayer`, so here too a `Responder` of your own must insert `OutcomeUnknown`.
//!
//! ## Tasks
//!
//! The task that polls the response future also polls the handler, as without this layer. If the future is dropped, the handler continues
//! in a new task with its `tracing` span. A response body that is not ready at once is always read in a new task. Task-locals are not
//! passed on, so a handler should not need any.
//!
//! # Administration
//!
//! [`IdempotencyAdmin`] inspects an operation, and lists the operations with unknown outcome, which the log names, too. Find out
//! whether the operation was executed. Then complete it by hand, or forget it so that the next request executes it.
//!
//! # Operations that are not requests
//!
//! [`Idempotent`] executes any other named operation once: a message of a broker, a job, a command. Its records, leases and
//! attempts work like those of the layer. Two `Idempotent` with different names share no operations.
//!
//! # Metrics
//!
//! With the feature `metrics`, the layer reports to the `metrics` facade. A metric that an exporter has dropped after its
//! idle timeout appears [again](crate::rate_limit#metrics) at its next use. The label `layer` is the
//! [name](crate::http::IdempotencyLayer::name) of the layer; a key or a scope is never a label.
//!
//! | name | labels | counts |
//! | --- | --- | --- |
//! | `tollgate_idempotency_requests_total` | `layer`, `outcome`: `executed`, `replayed`, `in_flight`, `mismatch`, `outcome_unknown`, `not_stored`, `missing_key`, `invalid_key`, `missing_scope`, `unreadable`, `body_timeout`, `too_large`, `full`, `scope_full`, `failed_open`, `failed_closed`. An executed request counts again as `cancelled`, `mismatch` or `too_large` if it ends so | requests with a key, and requests that were rejected because they have none |
//! | `tollgate_idempotency_attempts_total` | `layer`, `outcome`: `stored`, `not_stored` (only the status was stored), `released`, `unknown` | attempts that ended |
//! | `tollgate_idempotency_handler_seconds` | `layer` | the time from the claim until the response ended or the handler was cancelled, a histogram; without handlers that panicked, or were dropped with their client |
//! | `tollgate_idempotency_wait_seconds` | `layer` | the time that requests waited for the same request, a histogram |
//! | `tollgate_idempotency_store_errors_total` | `layer` | calls that failed or were late |
//! | `tollgate_idempotency_circuit_transitions_total` | `layer`, `state`: `open`, `closed` | circuits that opened and closed |
//!
//! # Store calls
//!
//! The first request takes two round trips, and a replay or a rejection takes one. A running handler takes one more for each
//! third of a lease, and one for each checkpoint.
//!
//! A request that [waits](crate::http::IdempotencyLayer::wait) calls the store after it has subscribed, after each notification,
//! when the lease of the running request would end, and at least once a second. All waiters of a process share one connection for
//! notifications. If the store fails repeatedly, only probes reach it: see
//! [`circuit_breaker`](crate::http::IdempotencyLayer::circuit_breaker).
//!
//! # Cancellation
//!
//! If the client disconnects before its handler starts, the operation is released in the background. If it disconnects later, the
//! handler still runs to its end ([`OnDisconnect`]), for at most `max_runtime`. At the end of a program,
//! `IdempotencyLayer::wait_idle` and the [shutdown of the backend](crate::backend#shutdown) wait for these releases and handlers.
//!
//! A panic of a handler reaches the caller as without this layer, and counts as a failure: see [`ResponsePolicy`]. If the response has
//! begun, the panic breaks the response off, and the outcome is unknown.

mod admin;
mod checkpoint;
mod operation;
mod per_scope;
mod policy;
mod rejection;
mod status;
pub mod store;
mod stored_response;

#[cfg_attr(not(feature = "http"), allow(dead_code, reason = "parts are used by the feature `http` only"))]
mod attempt;
mod background;
#[cfg_attr(not(feature = "http"), allow(dead_code, reason = "parts are used by the feature `http` only"))]
mod context;
#[cfg_attr(not(feature = "http"), allow(dead_code, reason = "parts are used by the feature `http` only"))]
mod coordinator;
#[cfg_attr(not(feature = "http"), allow(dead_code, reason = "parts are used by the feature `http` only"))]
mod erased;
mod handle;
mod has_body_fingerprint;
mod idempotent;
#[cfg_attr(not(feature = "http"), allow(dead_code, reason = "parts are used by the feature `http` only"))]
mod metrics;
mod operation_error;
mod waiters;

#[cfg(feature = "http")]
pub(crate) use self::attempt::{Attempt, ClaimResult, Granted};
#[cfg(feature = "http")]
pub(crate) use self::context::{OperationContext, Settlement};
#[cfg(feature = "http")]
pub(crate) use self::coordinator::{Coordinator, CountGuard, MaxRunning};
pub use crate::store::circuit::CircuitBreaker;
pub use crate::store::cursor::Cursor;

pub use self::admin::IdempotencyAdmin;
pub use self::checkpoint::{Checkpoint, CheckpointError};
pub use self::handle::IdempotencyHandle;
#[cfg(feature = "http")]
pub(crate) use self::has_body_fingerprint::HasBodyFingerprint;
pub use self::idempotent::{Done, Idempotent};
#[cfg(feature = "http")]
pub(crate) use self::metrics::Verdict;
pub use self::operation::Operation;
pub use self::operation_error::{Failed, OperationError};
pub use self::policy::{OnDisconnect, OnUnknown, ResponsePolicy};
pub use self::rejection::{InvalidKey, Rejection, ScopeBound};
pub use self::status::{OperationPage, OperationState, OperationStatus};
pub use self::stored_response::StoredResponse;
