//! The `RateLimit` fields of draft-ietf-httpapi-ratelimit-headers-10, written as structured fields (RFC 9651).

use ::http::{HeaderMap, HeaderName, HeaderValue};
use sfv::{Integer, KeyRef, ListSerializer, RefBareItem, StringRef};

use crate::rate_limit::{Policy, Standing, ceil_seconds};

const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// Adds `RateLimit-Policy` and, where the store said something, `RateLimit`.
///
/// Added and not set, so that layers on top of each other all have their say: both fields are lists.
pub(crate) fn write_fields(standing: &Standing<'_>, headers: &mut HeaderMap) {
    let (policy, decision) = (standing.policy, standing.decision);
    let announcement = policy.announcement(0, || {
        let quota = policy.limits()[0].quota();
        let window = quota.window();
        // `w` is in whole seconds and must not be 0; a window that is not cannot be told.
        let seconds = (window.subsec_nanos() == 0).then_some(window.as_secs());
        member(policy, [("q", Some(quota.limit().into())), ("w", seconds)])
    });
    append(headers, RATELIMIT_POLICY, announcement.unwrap_or_default());
    let known = decision.and_then(|decision| Some((decision, decision.remaining()?)));
    if let Some((decision, remaining)) = known {
        let reset = decision.reset_after();
        let until_more = (!reset.is_zero()).then(|| ceil_seconds(reset));
        append(headers, RATELIMIT, &member(policy, [("r", Some(remaining.into())), ("t", until_more)]));
    }
}

/// `"name";a=1;b=2`. Nothing can fail in here: names are printable ASCII and numbers are small.
fn member(policy: &Policy, parameters: [(&'static str, Option<u64>); 2]) -> String {
    let mut list = ListSerializer::new();
    if let Ok(name) = StringRef::from_str(policy.name()) {
        let mut item = list.bare_item(RefBareItem::String(name));
        for (name, value) in parameters {
            if let (Ok(name), Some(Ok(value))) = (KeyRef::from_str(name), value.map(Integer::try_from)) {
                item = item.parameter(name, value);
            }
        }
    }
    list.finish().unwrap_or_default()
}

fn append(headers: &mut HeaderMap, name: HeaderName, text: &str) {
    if let Ok(value) = HeaderValue::from_str(text) {
        headers.append(name, value);
    }
}
