use ::http::Response;

use super::model::ChargeName;
use crate::http;
use crate::rate_limit::{ChargeOn, RateLimitHandle};

/// The responses that a rule charges. For gRPC responses the status of the call decides, which may be in the trailers.
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
    fn settle(&self, handle: &RateLimitHandle, result: Result<&mut Response<B>, &E>) {
        #[cfg(feature = "grpc")]
        if result.as_ref().is_ok_and(|response| is_grpc(response)) {
            let charge = match self {
                Self::Failures => crate::grpc::failures(),
                Self::Successes => crate::grpc::successes(),
            };
            return charge.settle(handle, result);
        }
        let charge = match self {
            Self::Failures => http::failures(),
            Self::Successes => http::successes(),
        };
        charge.settle(handle, result);
    }
}

/// Whether the content type is `application/grpc`, with or without a codec, or one of gRPC-Web.
#[cfg(feature = "grpc")]
fn is_grpc<B>(response: &Response<B>) -> bool {
    let content_type = response.headers().get(::http::header::CONTENT_TYPE).map(::http::HeaderValue::as_bytes);
    let codec = content_type.and_then(|content_type| content_type.strip_prefix(b"application/grpc"));
    codec.is_some_and(|codec| matches!(codec.first(), None | Some(b'+' | b';')) || codec.starts_with(b"-web"))
}
