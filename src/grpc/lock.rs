use std::time::Duration;

use ::http::{HeaderMap, Request, Response};
use bytes::Bytes;
use http_body::Body;

use super::details::Any;
use super::status::{Code, GrpcResponder, detailed, status_response, trailers, without_retry};
use crate::http::{LockedBody, ResponseBody, STORE_RETRY, STORE_TEXT, declare_rejection};
use crate::lock::{BindLease, LeaseGuard, LeaseHandle, LockError, Rejection, fencing};
use crate::responder::Responder;

/// The maximum retry delay of a busy lock, however long the lease may last.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(5);
const LOST_TEXT: &str = "the request was cancelled while it ran and may have had effects";

impl<B, E> Responder<fencing::Rejection, Response<B>, E> for GrpcResponder {
    type Response = Response<ResponseBody<B>>;
    type Error = E;

    fn reject(&self, rejection: fencing::Rejection) -> Result<Self::Response, E> {
        let mut response = match rejection {
            // The client needs a new lease before it can retry.
            fencing::Rejection::Stale(_) => {
                without_retry(Code::Aborted, "another client holds the lock of this request now")
            }
            fencing::Rejection::MissingKey(_) | fencing::Rejection::MissingFence(_) => {
                status_response(Code::InvalidArgument, "the request names no lock or fence")
            }
        };
        declare_rejection(&mut response, false);
        Ok(response)
    }

    fn response(&self, response: Response<B>) -> Self::Response {
        response.map(ResponseBody::inner)
    }

    fn error(&self, error: E) -> E {
        error
    }
}

impl<B, E> Responder<Rejection, Response<B>, E> for GrpcResponder {
    type Response = Response<LockedBody<B>>;
    type Error = E;

    fn reject(&self, rejection: Rejection) -> Result<Self::Response, E> {
        let later = |code: Code, text: &str, wait: Duration| {
            let wait = self.with_jitter(wait);
            detailed(code, text, Some(wait), vec![Any::retry_info(wait)])
        };
        let may_have_run = matches!(rejection, Rejection::Lock(LockError::Lost(_)));
        let mut response = match rejection {
            Rejection::MissingKey(missing) => status_response(Code::InvalidArgument, &missing.to_string()),
            Rejection::Lock(LockError::Busy(busy)) => {
                let wait = busy.retry_after().clamp(Duration::from_millis(1), MAX_RETRY_DELAY);
                later(Code::Aborted, "another request holds the lock", wait)
            }
            Rejection::Full(full) => later(Code::ResourceExhausted, &full.to_string(), STORE_RETRY),
            Rejection::Lock(LockError::QueueFull(_)) => {
                later(Code::ResourceExhausted, "too many requests wait for the lock", STORE_RETRY)
            }
            Rejection::Lock(LockError::Lost(_)) => without_retry(Code::Aborted, LOST_TEXT),
            Rejection::Lock(LockError::Store(_) | LockError::NotReplicated(_) | LockError::Closed(_)) => {
                later(Code::Unavailable, STORE_TEXT, STORE_RETRY)
            }
            // Errors in the program or its configuration.
            Rejection::Lock(error) => {
                tracing::error!(%error, "cannot acquire the lock of a request");
                status_response(Code::Internal, "the request cannot be served")
            }
        };
        declare_rejection(&mut response, may_have_run);
        Ok(response.map(LockedBody::new))
    }

    fn response(&self, response: Response<B>) -> Self::Response {
        response.map(|body| LockedBody::new(ResponseBody::inner(body)))
    }

    fn error(&self, error: E) -> E {
        error
    }
}

impl<ReqBody, B> BindLease<Request<ReqBody>, Response<LockedBody<B>>> for GrpcResponder
where
    B: Body<Data = Bytes>,
{
    fn attach(&self, lease: LeaseHandle, request: &mut Request<ReqBody>) {
        if !self.fields.no_extensions {
            request.extensions_mut().insert(lease);
        }
    }

    fn pass(&self, request: &mut Request<ReqBody>) {
        if !self.fields.no_extensions {
            request.extensions_mut().remove::<LeaseHandle>();
        }
    }

    fn bind(&self, guard: LeaseGuard, response: &mut Response<LockedBody<B>>) {
        LockedBody::bind(response, guard, Some(lost_trailers));
    }
}

/// The trailers of a call that loses its lease after the response has begun.
fn lost_trailers() -> HeaderMap {
    trailers(Code::Aborted, LOST_TEXT)
}
