use ::http::Response;

use super::details::Any;
use super::status::{Code, GrpcResponder, detailed, status_response};
use crate::http::{IdempotentBody, ResponseBody, STORE_RETRY, STORE_TEXT, declare_rejection};
use crate::idempotency::Rejection;
use crate::responder::Responder;

impl<B, E> Responder<Rejection, Response<B>, E> for GrpcResponder {
    type Response = Response<IdempotentBody<B>>;
    type Error = E;

    fn reject(&self, rejection: Rejection) -> Result<Self::Response, E> {
        let (text, may_have_run) = (rejection.to_string(), rejection.may_have_run());
        let later = |code: Code, text: &str, wait| {
            let wait = self.with_jitter(wait);
            detailed(code, text, Some(wait), vec![Any::retry_info(wait)])
        };
        // Clients retry calls with these codes automatically unless the pushback forbids it.
        let never = |code: Code| detailed(code, &text, None, Vec::new());
        let mut response = match rejection {
            Rejection::MissingKey | Rejection::InvalidKey(_) | Rejection::MissingScope | Rejection::Unreadable => {
                status_response(Code::InvalidArgument, &text)
            }
            Rejection::Mismatch | Rejection::OutcomeUnknown { .. } | Rejection::NotStored { .. } => {
                status_response(Code::FailedPrecondition, &text)
            }
            // Clients usually retry `UNAVAILABLE`. They do not retry `DEADLINE_EXCEEDED`, which is for the client's own deadline.
            Rejection::BodyTimeout => later(Code::Unavailable, &text, STORE_RETRY),
            Rejection::InFlight { retry_after } => later(Code::Aborted, &text, retry_after),
            Rejection::Cancelled => never(Code::Aborted),
            Rejection::TooLarge { .. } => never(Code::ResourceExhausted),
            Rejection::Full => later(Code::ResourceExhausted, &text, STORE_RETRY),
            Rejection::ScopeFull { retry_after, .. } => later(Code::ResourceExhausted, &text, retry_after),
            // An error in the program or its configuration.
            Rejection::Config(error) => {
                tracing::error!(%error, "cannot make a request idempotent");
                status_response(Code::Internal, "the request cannot be served")
            }
            Rejection::Store(_) => later(Code::Unavailable, STORE_TEXT, STORE_RETRY),
        };
        declare_rejection(&mut response, may_have_run);
        Ok(response.map(IdempotentBody::other))
    }

    fn response(&self, response: Response<B>) -> Self::Response {
        response.map(|body| IdempotentBody::other(ResponseBody::inner(body)))
    }

    fn error(&self, error: E) -> E {
        error
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::time::Duration;

    use super::*;
    use crate::error::{ConfigError, StoreError};
    use crate::idempotency::{InvalidKey, ScopeBound};
    use crate::responder::{NotExecuted, OutcomeUnknown};

    #[test]
    fn rejections_map_to_status_and_pushback() {
        let cases = [
            (Rejection::MissingKey, "3", None, true),
            (Rejection::InvalidKey(InvalidKey::Empty), "3", None, true),
            (Rejection::MissingScope, "3", None, true),
            (Rejection::Unreadable, "3", None, true),
            (Rejection::BodyTimeout, "14", Some("1000"), true),
            (
                Rejection::ScopeFull { bound: ScopeBound::Running, retry_after: Duration::from_secs(2) },
                "8",
                Some("2000"),
                true,
            ),
            (Rejection::TooLarge { has_begun: false }, "8", Some("-1"), true),
            (Rejection::TooLarge { has_begun: true }, "8", Some("-1"), false),
            (Rejection::Mismatch, "9", None, true),
            // This request was not executed. Only the outcome of an earlier attempt is unknown.
            (Rejection::OutcomeUnknown { attempt: 1 }, "9", None, true),
            (Rejection::NotStored { status: 200 }, "9", None, true),
            (Rejection::InFlight { retry_after: Duration::from_secs(2) }, "10", Some("2000"), true),
            (Rejection::Cancelled, "10", Some("-1"), false),
            (Rejection::Full, "8", Some("1000"), true),
            (Rejection::Config(ConfigError::ZeroTimeout { setting: "deadline" }), "13", None, true),
            (Rejection::Store(StoreError::timeout()), "14", Some("1000"), true),
        ];
        for (rejection, code, pushback, not_executed) in cases {
            let name = format!("{rejection:?}");
            let rejected: Result<Response<IdempotentBody<()>>, Infallible> =
                Responder::<_, Response<()>, _>::reject(&GrpcResponder::new(), rejection);
            let Ok(response) = rejected;
            let header = |name: &str| response.headers().get(name).map(|value| value.to_str().unwrap());
            assert_eq!(header("grpc-status"), Some(code), "{name}");
            assert_eq!(header("grpc-retry-pushback-ms"), pushback, "{name}");
            assert_eq!(header("grpc-status-details-bin").is_some(), pushback.is_some(), "{name}");
            assert_eq!(response.extensions().get::<NotExecuted>().is_some(), not_executed, "{name}");
            assert_eq!(header("tollgate-rejected").is_some(), not_executed, "{name}");
            assert_eq!(response.extensions().get::<OutcomeUnknown>().is_some(), !not_executed, "{name}");
        }
    }
}
