//! Equal requests in this process share one call of the inner service. Nothing is stored.
//!
//! While a call is in progress, further requests with its key wait for it and get a clone of its response. A request that arrives
//! after the response starts the next call.
//!
//! ```
//! use tollgate::{BoxError, SingleFlightLayer};
//! use tower::{ServiceBuilder, ServiceExt, service_fn};
//!
//! #[derive(Clone)]
//! struct Lookup { user: u64 }
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), BoxError> {
//! let service = ServiceBuilder::new()
//!     .layer(SingleFlightLayer::new(|request: &Lookup| request.user).public())
//!     .service(service_fn(async |request: Lookup| Ok::<_, BoxError>(format!("user {}", request.user))));
//!
//! let (one, other) = tokio::join!(service.clone().oneshot(Lookup { user: 1 }), service.clone().oneshot(Lookup { user: 1 }));
//! assert_eq!((one?, other?), ("user 1".to_owned(), "user 1".to_owned()));
//! # Ok(())
//! # }
//! ```
//!
//! If the response depends on the caller, each principal has calls of its own:
//!
//! ```
//! use tollgate::SingleFlightLayer;
//!
//! struct Lookup { tenant: Option<String>, user: u64 }
//!
//! let layer = SingleFlightLayer::new(|request: &Lookup| request.user).per(|request: &Lookup| request.tenant.clone());
//! # let _ = layer;
//! ```
//!
//! Without [`public`](SingleFlightLayer::public) or [`per`](SingleFlightLayer::per), the service does not compile:
//!
//! ```compile_fail,E0277
//! use tollgate::{BoxError, SingleFlightLayer};
//! use tower::{ServiceBuilder, ServiceExt, service_fn};
//!
//! # async fn run() -> Result<(), BoxError> {
//! let service = ServiceBuilder::new()
//!     .layer(SingleFlightLayer::new(|request: &u64| *request))
//!     .service(service_fn(async |request: u64| Ok::<_, BoxError>(request)));
//! service.oneshot(1).await?;
//! # Ok(())
//! # }
//! ```
//!
//! # What the key must contain
//!
//! Everything that selects the response must be in the key or in the principal. Otherwise a caller gets the response to a different
//! request. A request without a key or principal calls the inner service directly, and shares nothing.
//!
//! # HTTP
//!
//! The response must be `Clone`, so the layer does not apply to responses with a streaming body, such as those of axum.
//!
//! # Errors
//!
//! All callers of a call get the same error: see [`SingleFlightError`].
//!
//! # Timeouts
//!
//! A call that hangs would be joined by all later requests with its key. So a call is dropped after
//! [`call_timeout`](SingleFlightLayer::call_timeout), 30 seconds by default, and the next request with the key starts another one:
//!
//! ```
//! use std::future::pending;
//! use std::time::Duration;
//! use tollgate::single_flight::SingleFlightError;
//! use tollgate::{BoxError, SingleFlightLayer};
//! use tower::{ServiceBuilder, ServiceExt, service_fn};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() {
//! let service = ServiceBuilder::new()
//!     .layer(SingleFlightLayer::new(|user: &u64| *user).public().call_timeout(Duration::from_millis(10)))
//!     .service(service_fn(async |_: u64| pending::<Result<String, BoxError>>().await));
//!
//! let (one, other) = tokio::join!(service.clone().oneshot(1), service.clone().oneshot(1));
//! assert!(matches!(one, Err(SingleFlightError::TimedOut { .. })));
//! assert!(matches!(other, Err(SingleFlightError::TimedOut { .. })));
//! # }
//! ```
//!
//! The timeout of tower works on both sides of this layer. Outside, it limits the wait of one caller, and the call goes on for the others.
//! Inside, it ends the call for all callers, whose error is [`SingleFlightError::Service`].
//!
//! # Calls that need calls
//!
//! A call may send a request with its own key through this layer. This request calls the inner service directly. Otherwise the call would
//! wait for itself. The layer recognizes this only within the task of the call. Two calls that wait for each other are not recognized. The
//! timeout of one of them ends both.
//!
//! # Cancellation
//!
//! The call runs in a task of its own, so it does not see the task-locals of its caller. If you drop the response future of the request
//! that started the call, the other callers still get the response. If the last caller has gone, the call is cancelled.
//!
//! # Shutdown
//!
//! A server that waits for its open requests also waits for their calls, since a call ends no later than its last caller. A call goes on
//! while a caller waits, also after the last clone of the service was dropped. If the runtime shuts down, callers get
//! [`SingleFlightError::Aborted`]. The `shutdown` of a backend has no effect on calls.

mod error;
mod flights;
mod future;
mod layer;
mod service;

pub use self::error::SingleFlightError;
pub use self::future::ResponseFuture as SingleFlightFuture;
pub use self::layer::SingleFlightLayer;
pub use self::service::SingleFlight;
pub use crate::key::Undecided;

#[cfg(test)]
mod tests;
