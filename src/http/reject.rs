use std::fmt::Display;

use ::http::header::{CONTENT_TYPE, RETRY_AFTER};
use ::http::{HeaderValue, Request, Response, StatusCode};

use super::body::ResponseBody;
use super::headers::write_fields;
use crate::rate_limit::{Announce, RateLimitHandle, Rejection, Standing};
use crate::reject::{AsResponse, Reject};

/// What a client is told to wait when it is not known when the store will answer again.
const STORE_RETRY_SECONDS: u64 = 1;

impl<B, E> Reject<Rejection, Response<B>, E> for AsResponse {
    type Response = Response<ResponseBody<B>>;
    type Error = E;

    fn reject(&self, rejection: Rejection) -> Result<Self::Response, E> {
        Ok(match rejection {
            Rejection::Limited(limited) => {
                response(StatusCode::TOO_MANY_REQUESTS, limited.retry_after_secs(), &limited)
            }
            Rejection::Denied(denied) => response(StatusCode::FORBIDDEN, None, &denied),
            Rejection::MissingKey(missing) => response(StatusCode::BAD_REQUEST, None, &missing),
            // What exactly is wrong with the store is no business of the client.
            Rejection::Store(_) => {
                response(StatusCode::SERVICE_UNAVAILABLE, Some(STORE_RETRY_SECONDS), &"temporarily unavailable")
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

impl<ReqBody, B> Announce<Request<ReqBody>, Response<B>> for AsResponse {
    const ATTACHES: bool = true;

    fn attach(&self, handle: RateLimitHandle, request: &mut Request<ReqBody>) {
        request.extensions_mut().insert(handle);
    }

    fn announce(&self, standing: &Standing<'_>, response: &mut Response<B>) {
        if let Some(decision) = standing.decision {
            response.extensions_mut().insert(decision.clone());
        }
        write_fields(standing, response.headers_mut());
    }
}

fn response<B>(status: StatusCode, retry_after: Option<u64>, text: &dyn Display) -> Response<ResponseBody<B>> {
    let mut response = Response::new(ResponseBody::rejection(format!("{text}\n")));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    if let Some(seconds) = retry_after {
        headers.insert(RETRY_AFTER, seconds.into());
    }
    response
}
