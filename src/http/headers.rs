//! The `RateLimit` fields of draft-ietf-httpapi-ratelimit-headers-10, written as structured fields (RFC 9651).

use ::http::{HeaderMap, HeaderName, HeaderValue};
use sfv::{Integer, KeyRef, ListSerializer, RefBareItem, StringRef};

use crate::rate_limit::{Decision, Policy, ceil_seconds};

const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// Adds `RateLimit-Policy` and, where the store said something, `RateLimit`.
///
/// Added and not set, so that layers on top of each other all have their say: both fields are lists.
pub(crate) fn write_fields(policy: &Policy, decision: Option<&Decision>, headers: &mut HeaderMap) {
    let quota = policy.limit().quota();
    let window = quota.window();
    // `w` is in whole seconds and must not be 0; a window that is not cannot be told.
    let seconds = (window.subsec_nanos() == 0).then_some(window.as_secs());
    if let Some(value) = member(policy, [("q", Some(quota.limit().into())), ("w", seconds)]) {
        headers.append(RATELIMIT_POLICY, value);
    }
    let known = decision.and_then(|decision| Some((decision, decision.remaining()?)));
    if let Some((decision, remaining)) = known {
        let reset = decision.reset_after();
        let until_more = (!reset.is_zero()).then(|| ceil_seconds(reset));
        if let Some(value) = member(policy, [("r", Some(remaining.into())), ("t", until_more)]) {
            headers.append(RATELIMIT, value);
        }
    }
}

/// `"name";a=1;b=2`. Nothing can fail in here: names are printable ASCII and numbers are small.
fn member(policy: &Policy, parameters: [(&'static str, Option<u64>); 2]) -> Option<HeaderValue> {
    let mut list = ListSerializer::new();
    let mut item = list.bare_item(RefBareItem::String(StringRef::from_str(policy.name()).ok()?));
    for (name, value) in parameters {
        if let Some(value) = value {
            item = item.parameter(KeyRef::from_str(name).ok()?, Integer::try_from(value).ok()?);
        }
    }
    HeaderValue::try_from(list.finish()?).ok()
}
