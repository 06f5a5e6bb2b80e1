use std::time::Duration;

use ::http::{HeaderMap, Request, Response};
use bytes::Bytes;
use http_body::Body;

use super::details::Any;
use super::status::{Code, GrpcResponder, answer, conclusive, detailed, trailers};
use crate::http::{LockedBody, ResponseBody, STORE_RETRY, STORE_TEXT};
use crate::lock::{BindLease, LeaseGuard, LeaseHandle, LockError, Rejection, fencing};
use crate::responder::{NotExecuted, OutcomeUnknown, Responder};

/// A client is not told to wait for longer than this, however long the lease may last.
const LONGEST_WAIT: Duration = Duration::from_secs(5);
const LOST_TEXT: &str = "the request was cancelled on the way and may have had effects";

impl<B, E> Responder<fencing::Rejection, Response<B>, E> for GrpcResponder {
    type Response = Response<ResponseBody<B>>;
    type Error = E;

    fn reject(&self, rejection: fencing::Rejection) -> Result<Self::Response, E> {
        Ok(match rejection {
            // To be tried again with another lease, and not as it is.
            fencing::Rejection::Stale(_) => {
                conclusive(Code::Aborted, "the lock of this request is somebody else's by now")
            }
            fencing::Rejection::Missing(_) | fencing::Rejection::MissingFence(_) => {
                answer(Code::InvalidArgument, "the request does not say under which lock it was sent")
            }
        })
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
            let wait = self.told(wait);
            detailed(code, text, Some(wait), vec![Any::retry_info(wait)])
        };
        let response = match rejection {
            Rejection::MissingKey(missing) => answer(Code::InvalidArgument, &missing.to_string()),
            Rejection::Lock(LockError::Busy(busy)) => {
                let wait = busy.retry_after().clamp(Duration::from_millis(1), LONGEST_WAIT);
                later(Code::Aborted, "another request is at work on this", wait)
            }
            Rejection::Full(full) => later(Code::ResourceExhausted, &full.to_string(), STORE_RETRY),
            Rejection::Lock(LockError::QueueFull(_)) => {
                later(Code::ResourceExhausted, "too many requests wait for this", STORE_RETRY)
            }
            Rejection::Lock(LockError::Lost(_)) => {
                let mut response = conclusive(Code::Aborted, LOST_TEXT);
                response.extensions_mut().remove::<NotExecuted>();
                response.extensions_mut().insert(OutcomeUnknown);
                response
            }
            Rejection::Lock(LockError::Store(_) | LockError::NotReplicated(_) | LockError::Closed(_)) => {
                later(Code::Unavailable, STORE_TEXT, STORE_RETRY)
            }
            // Mistakes of the program.
            Rejection::Lock(error) => {
                tracing::error!(%error, "a request cannot be locked");
                answer(Code::Internal, "the request cannot be served")
            }
        };
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

    fn occupy(&self, stay: LeaseGuard, response: &mut Response<LockedBody<B>>) {
        LockedBody::occupy(response, stay, Some(lost));
    }
}

/// How a call ends whose lease is lost when its answer has begun.
fn lost() -> HeaderMap {
    trailers(Code::Aborted, LOST_TEXT)
}
