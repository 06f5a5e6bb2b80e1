use ::http::Response;

use super::details::Any;
use super::status::{AsStatus, Code, answer, detailed};
use crate::http::{IdempotentBody, ResponseBody, STORE_RETRY, STORE_TEXT};
use crate::idempotency::Rejection;
use crate::reject::{NothingDone, Reject};

impl<B, E> Reject<Rejection, Response<B>, E> for AsStatus {
    type Response = Response<IdempotentBody<B>>;
    type Error = E;

    fn reject(&self, rejection: Rejection) -> Result<Self::Response, E> {
        let (text, may_have_effects) = (rejection.to_string(), rejection.may_have_effects());
        let later = |code: Code, text: &str, wait| {
            let wait = self.told(wait);
            detailed(code, text, Some(wait), vec![Any::retry_info(wait)])
        };
        let mut response = match rejection {
            Rejection::MissingKey | Rejection::InvalidKey(_) | Rejection::MissingScope | Rejection::Unreadable => {
                answer(Code::InvalidArgument, &text)
            }
            Rejection::Mismatch | Rejection::OutcomeUnknown { .. } | Rejection::NotKept { .. } => {
                answer(Code::FailedPrecondition, &text)
            }
            Rejection::InFlight { retry_after } => later(Code::Aborted, &text, retry_after),
            Rejection::Cancelled => answer(Code::Aborted, &text),
            Rejection::Full => later(Code::ResourceExhausted, &text, STORE_RETRY),
            Rejection::Store(_) => later(Code::Unavailable, STORE_TEXT, STORE_RETRY),
        };
        if may_have_effects {
            response.extensions_mut().remove::<NothingDone>();
        }
        Ok(response.map(IdempotentBody::other))
    }

    fn response(&self, response: Response<B>) -> Self::Response {
        response.map(|body| IdempotentBody::other(ResponseBody::inner(body)))
    }

    fn error(&self, error: E) -> E {
        error
    }
}
