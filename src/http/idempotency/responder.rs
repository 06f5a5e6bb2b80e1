use ::http::{Response, StatusCode};
use bytes::Bytes;

use crate::http::not_executed::declare_rejection;
use crate::http::problem::{Kind, Problem};
use crate::http::responder::{STORE_RETRY, STORE_TEXT};
use crate::idempotency::Rejection;
use crate::responder::HttpResponder;

impl HttpResponder {
    pub(in crate::http) fn idempotency_rejection(&self, rejection: &Rejection) -> Response<Bytes> {
        let (kind, status, wait) = match rejection {
            Rejection::MissingKey => (Kind::MissingIdempotencyKey, StatusCode::BAD_REQUEST, None),
            Rejection::InvalidKey(_) => (Kind::InvalidIdempotencyKey, StatusCode::BAD_REQUEST, None),
            Rejection::MissingScope | Rejection::Unreadable => (Kind::Blank, StatusCode::BAD_REQUEST, None),
            Rejection::BodyTimeout => (Kind::Blank, StatusCode::REQUEST_TIMEOUT, None),
            Rejection::TooLarge { .. } => (Kind::Blank, StatusCode::PAYLOAD_TOO_LARGE, None),
            Rejection::Mismatch => (Kind::IdempotencyKeyReused, StatusCode::UNPROCESSABLE_ENTITY, None),
            Rejection::InFlight { retry_after } => (Kind::InFlight, StatusCode::CONFLICT, Some(*retry_after)),
            Rejection::OutcomeUnknown { .. } => (Kind::OutcomeUnknown, StatusCode::CONFLICT, None),
            Rejection::NotStored { .. } => (Kind::ResponseNotStored, StatusCode::CONFLICT, None),
            Rejection::ScopeFull { retry_after, .. } => {
                (Kind::IdempotencyScopeFull, StatusCode::TOO_MANY_REQUESTS, Some(*retry_after))
            }
            // The request may have had effects, so the response has no `Retry-After`.
            Rejection::Cancelled => (Kind::Blank, StatusCode::SERVICE_UNAVAILABLE, None),
            // An error in the program or its configuration.
            Rejection::Config(error) => {
                tracing::error!(%error, "cannot make a request idempotent");
                (Kind::Blank, StatusCode::INTERNAL_SERVER_ERROR, None)
            }
            Rejection::Full | Rejection::Store(_) => (Kind::Blank, StatusCode::SERVICE_UNAVAILABLE, Some(STORE_RETRY)),
        };
        let detail = match rejection {
            Rejection::Store(_) => STORE_TEXT.to_owned(),
            Rejection::Config(_) => "the request cannot be served".to_owned(),
            Rejection::NotStored { status } => format!("{rejection}: it had status {status}"),
            _ => rejection.to_string(),
        };
        let wait = wait.map(|wait| self.retry_after_secs(wait));
        let mut response = self.answer(wait, Problem { kind, status, detail: &detail, violated: Vec::new() });
        declare_rejection(&mut response, rejection.may_have_run());
        response
    }
}
