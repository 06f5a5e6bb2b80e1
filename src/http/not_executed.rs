//! How a rejection says that nothing was executed, also to another process.

use ::http::{HeaderName, HeaderValue, Response};

use crate::responder::{NotExecuted, OutcomeUnknown};

/// The header form of [`NotExecuted`], for rejections by locks and idempotency.
///
/// Their status alone does not tell a client in another process that nothing was executed.
pub(crate) const REJECTED: HeaderName = HeaderName::from_static("tollgate-rejected");
pub(crate) const IS_REJECTED: HeaderValue = HeaderValue::from_static("true");

/// Tells outer layers that a lock or an idempotency layer has rejected a request. `may_have_run`: the handler had begun, so the outcome is
/// unknown.
pub(crate) fn declare_rejection<B>(response: &mut Response<B>, may_have_run: bool) {
    if may_have_run {
        response.extensions_mut().remove::<NotExecuted>();
        response.extensions_mut().insert(OutcomeUnknown);
    } else {
        // Extensions are not sent over a connection, but this field is.
        response.headers_mut().insert(REJECTED, IS_REJECTED);
    }
}
