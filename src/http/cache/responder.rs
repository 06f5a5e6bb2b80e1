use ::http::{Response, StatusCode};
use bytes::Bytes;

use super::origin::OriginFailed;
use crate::cache::CacheError;
use crate::http::problem::{Kind, Problem};
use crate::http::responder::{STORE_RETRY, STORE_TEXT};
use crate::responder::HttpResponder;

impl HttpResponder {
    /// The response to a request that the cache can neither serve nor pass on.
    pub(in crate::http) fn cache_rejection(&self, error: &CacheError) -> Response<Bytes> {
        let (status, wait) = match error {
            CacheError::Load(error) if matches!(error.downcast_ref(), Some(OriginFailed::TimedOut)) => {
                (StatusCode::GATEWAY_TIMEOUT, None)
            }
            CacheError::Load(_) | CacheError::OriginLimit { .. } | CacheError::Store(_) | CacheError::Closed => {
                (StatusCode::SERVICE_UNAVAILABLE, Some(STORE_RETRY))
            }
            CacheError::RecentlyFailed { retry_after } => (StatusCode::SERVICE_UNAVAILABLE, Some(*retry_after)),
            CacheError::TimedOut { .. } => (StatusCode::GATEWAY_TIMEOUT, None),
            // A handler that panicked, or an error in the program or its configuration.
            error => {
                tracing::error!(%error, "cannot serve a request through the cache");
                return self.refusal(StatusCode::INTERNAL_SERVER_ERROR, "the request cannot be served");
            }
        };
        let wait = wait.map(|wait| self.retry_after_secs(wait));
        self.answer(wait, Problem { kind: Kind::Blank, status, detail: STORE_TEXT, violated: Vec::new() })
    }
}
