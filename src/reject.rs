//! What a layer answers when it turns a request away.
//!
//! Two answers come with the crate, [`AsResponse`] and [`AsError`], and one with the feature `grpc`.
//!
//! # Examples
//!
//! A service that does not speak HTTP gets an error to downcast:
//!
//! ```
//! use tollgate::rate_limit::RateLimited;
//! use tollgate::{AsError, BoxError, MemoryBackend, Policy, Quota, RateLimitLayer};
//! use tower::{ServiceBuilder, ServiceExt, service_fn};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), BoxError> {
//! let policy = Policy::new("jobs", Quota::per_minute(0).fixed_window());
//! let service = ServiceBuilder::new()
//!     .layer(RateLimitLayer::new(MemoryBackend::new(), policy).with_rejection(AsError))
//!     .service(service_fn(async |job: u32| Ok::<_, BoxError>(job)));
//!
//! let error = service.oneshot(7).await.unwrap_err();
//! assert_eq!(error.downcast::<RateLimited>()?.policy(), "jobs");
//! # Ok(())
//! # }
//! ```
//!
//! Any other answer is a type that implements [`Reject`] and, for a rate limit,
//! [`Announce`](crate::rate_limit::Announce). With a body of JSON, for instance, in an axum router:
//!
//! ```
//! # #[cfg(feature = "http")] {
//! use axum::response::{IntoResponse, Response};
//! use http::{StatusCode, header::RETRY_AFTER};
//! use tollgate::rate_limit::{Announce, Policy, Rejection, Standing};
//! use tollgate::reject::{AsResponse, Reject};
//!
//! #[derive(Clone)]
//! struct AsJson;
//!
//! impl<E> Reject<Rejection, Response, E> for AsJson {
//!     type Response = Response;
//!     type Error = E;
//!
//!     fn reject(&self, rejection: Rejection) -> Result<Response, E> {
//!         Ok(match rejection {
//!             Rejection::Limited(limited) => {
//!                 let wait = limited.retry_after_secs().unwrap_or(3_600);
//!                 let body = r#"{"error":"slow down"}"#;
//!                 (StatusCode::TOO_MANY_REQUESTS, [(RETRY_AFTER, wait.to_string())], body).into_response()
//!             }
//!             _ => StatusCode::SERVICE_UNAVAILABLE.into_response(),
//!         })
//!     }
//!
//!     fn response(&self, response: Response) -> Response {
//!         response
//!     }
//!
//!     fn error(&self, error: E) -> E {
//!         error
//!     }
//! }
//!
//! impl<Req> Announce<http::Request<Req>, Response> for AsJson {
//!     fn announce(&self, standing: &Standing<'_>, response: &mut Response) {
//!         Announce::<http::Request<Req>, Response>::announce(&AsResponse, standing, response); // the `RateLimit` fields
//!     }
//! }
//!
//! # use tollgate::{MemoryBackend, Quota, RateLimitLayer};
//! # let policy = Policy::new("api", Quota::per_minute(100).fixed_window());
//! let layer = RateLimitLayer::new(MemoryBackend::new(), policy).with_rejection(AsJson);
//! # let _: axum::Router = axum::Router::new().route("/", axum::routing::get(async || "")).layer(layer);
//! # }
//! ```

use crate::error::BoxError;

/// Turns a rejection into what the caller of the service gets, and passes on what the inner service answered.
///
/// A layer has one of these as its last type parameter. Two come with the crate: [`AsResponse`], which is the default and
/// needs the feature `http`, and [`AsError`].
///
/// `R` is the rejection, `Res` and `E` are the response and the error of the inner service.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot turn `{R}` into an answer of a service that answers `{Res}`",
    note = "the default answers with an HTTP response (feature `http`); for other services call `.with_rejection(AsError)`"
)]
pub trait Reject<R, Res, E> {
    /// What the service answers behind the layer.
    type Response;
    /// What the service fails with behind the layer.
    type Error;

    /// The answer to a request that was turned away.
    fn reject(&self, rejection: R) -> Result<Self::Response, Self::Error>;

    /// What a response of the inner service is passed on as.
    fn response(&self, response: Res) -> Self::Response;

    /// What a failure of the inner service is passed on as.
    fn error(&self, error: E) -> Self::Error;
}

/// A rejection becomes an error: a [`BoxError`] to downcast, beside the errors of the inner service.
#[derive(Clone, Copy, Debug, Default)]
pub struct AsError;

impl<R, Res, E> Reject<R, Res, E> for AsError
where
    R: Into<BoxError>,
    E: Into<BoxError>,
{
    type Response = Res;
    type Error = BoxError;

    fn reject(&self, rejection: R) -> Result<Res, BoxError> {
        Err(rejection.into())
    }

    fn response(&self, response: Res) -> Res {
        response
    }

    fn error(&self, error: E) -> BoxError {
        error.into()
    }
}

/// A rejection becomes an HTTP response, so the service fails only where the inner service does.
///
/// Implemented with the feature `http`; see the module `tollgate::http` for the responses.
#[derive(Clone, Copy, Debug, Default)]
pub struct AsResponse;
