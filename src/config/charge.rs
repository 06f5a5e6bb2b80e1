use ::http::Response;

use super::model::ChargeName;
use crate::http;
use crate::rate_limit::{ChargeOn, RateLimitHandle};

/// Which answers a rule charges that does not charge all of them: with gRPC by the status of the call, which may be in its trailers.
#[derive(Clone, Copy, Debug)]
pub(super) enum RuleCharge {
    Failures,
    Successes,
}

impl RuleCharge {
    pub(super) const fn new(name: ChargeName) -> Option<Self> {
        match name {
            ChargeName::Always => None,
            ChargeName::Failures => Some(Self::Failures),
            ChargeName::Successes => Some(Self::Successes),
        }
    }
}

impl<B, E> ChargeOn<Response<B>, E> for RuleCharge {
    fn settle(&self, handle: &RateLimitHandle, answer: Result<&mut Response<B>, &E>) {
        #[cfg(feature = "grpc")]
        if answer.as_ref().is_ok_and(|response| is_grpc(response)) {
            let charge = match self {
                Self::Failures => crate::grpc::failures(),
                Self::Successes => crate::grpc::successes(),
            };
            return charge.settle(handle, answer);
        }
        let charge = match self {
            Self::Failures => http::failures(),
            Self::Successes => http::successes(),
        };
        charge.settle(handle, answer);
    }
}

/// `application/grpc`, or that with a codec behind it, or one of gRPC-Web.
#[cfg(feature = "grpc")]
fn is_grpc<B>(response: &Response<B>) -> bool {
    let content_type = response.headers().get(::http::header::CONTENT_TYPE).map(::http::HeaderValue::as_bytes);
    let codec = content_type.and_then(|content_type| content_type.strip_prefix(b"application/grpc"));
    codec.is_some_and(|codec| matches!(codec.first(), None | Some(b'+' | b';')) || codec.starts_with(b"-web"))
}
