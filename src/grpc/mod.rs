//! Rejections for services that speak gRPC, tonic's for instance.
//!
//! A gRPC client does not look at the HTTP status, so a plain 429 reaches it as "unknown". [`AsStatus`] answers with a gRPC
//! status instead, in a response without a body ("trailers-only"):
//!
//! | case | status |
//! | --- | --- |
//! | over the limit | 8 `RESOURCE_EXHAUSTED` |
//! | on the deny list | 7 `PERMISSION_DENIED` |
//! | no key | 3 `INVALID_ARGUMENT` |
//! | store failed and the layer denies then | 14 `UNAVAILABLE` |
//!
//! The `RateLimit` fields are there as metadata, as with [`http`](crate::http).
//!
//! # Examples
//!
//! In front of all services of a tonic server, per tenant:
//!
//! ```
//! use tollgate::{MemoryBackend, Policy, Quota, RateLimitLayer, grpc::AsStatus, http::header};
//!
//! let policy = Policy::new("rpc", Quota::per_second(100).fixed_window());
//! let layer = RateLimitLayer::new(MemoryBackend::new(), policy).key(header("x-tenant")).with_rejection(AsStatus);
//! let server = tonic::transport::Server::builder().layer(layer); // .add_service(..)
//! ```
//!
//! What a client gets to see that has used up its quota:
//!
//! ```
//! use http::{Request, Response};
//! use tollgate::{MemoryBackend, Policy, Quota, RateLimitLayer, grpc::AsStatus};
//! use tower::{ServiceBuilder, ServiceExt, service_fn};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
//! let policy = Policy::new("rpc", Quota::per_minute(0).fixed_window());
//! let service = ServiceBuilder::new()
//!     .layer(RateLimitLayer::new(MemoryBackend::new(), policy).with_rejection(AsStatus))
//!     .service(service_fn(async |_: Request<String>| Ok::<_, tollgate::BoxError>(Response::new(String::new()))));
//!
//! let response = service.oneshot(Request::new(String::new())).await?;
//! assert_eq!(response.headers()["grpc-status"], "8");
//! # Ok(())
//! # }
//! ```

use std::fmt::Display;

use ::http::header::CONTENT_TYPE;
use ::http::{HeaderName, HeaderValue, Request, Response};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use crate::http::ResponseBody;
use crate::rate_limit::{Announce, RateLimitHandle, Rejection, Standing};
use crate::reject::Reject;

/// A rejection becomes a gRPC status. See the [module docs](self).
#[derive(Clone, Copy, Debug, Default)]
pub struct AsStatus;

#[derive(Clone, Copy)]
enum Code {
    PermissionDenied = 7,
    InvalidArgument = 3,
    ResourceExhausted = 8,
    Unavailable = 14,
}

const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");

/// What `grpc-message` has to escape besides what is not ASCII.
const ESCAPED: &AsciiSet = &CONTROLS.add(b'%');

impl<B, E> Reject<Rejection, Response<B>, E> for AsStatus {
    type Response = Response<ResponseBody<B>>;
    type Error = E;

    fn reject(&self, rejection: Rejection) -> Result<Self::Response, E> {
        Ok(match rejection {
            Rejection::Limited(limited) => status(Code::ResourceExhausted, &limited),
            Rejection::Denied(denied) => status(Code::PermissionDenied, &denied),
            Rejection::MissingKey(missing) => status(Code::InvalidArgument, &missing),
            // What exactly is wrong with the store is no business of the client.
            Rejection::Store(_) => status(Code::Unavailable, &"temporarily unavailable"),
        })
    }

    fn response(&self, response: Response<B>) -> Self::Response {
        response.map(ResponseBody::inner)
    }

    fn error(&self, error: E) -> E {
        error
    }
}

impl<ReqBody, B> Announce<Request<ReqBody>, Response<B>> for AsStatus {
    const ATTACHES: bool = true;

    fn attach(&self, handle: RateLimitHandle, request: &mut Request<ReqBody>) {
        request.extensions_mut().insert(handle);
    }

    fn announce(&self, standing: &Standing<'_>, response: &mut Response<B>) {
        if let Some(decision) = standing.decision {
            response.extensions_mut().insert(decision.clone());
        }
        crate::http::write_fields(standing, response.headers_mut());
    }
}

fn status<B>(code: Code, message: &dyn Display) -> Response<ResponseBody<B>> {
    let mut response = Response::new(ResponseBody::rejection(""));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert(GRPC_STATUS, HeaderValue::from(code as u16));
    // Percent-encoded text is ASCII, so this always is a value.
    if let Ok(message) = HeaderValue::try_from(utf8_percent_encode(&message.to_string(), ESCAPED).to_string()) {
        headers.insert(GRPC_MESSAGE, message);
    }
    response
}
