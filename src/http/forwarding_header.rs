//! The headers in which proxies name the client.

use ::http::HeaderName;
use ::http::header::FORWARDED;

pub(super) static X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// The header that proxies write and [`ClientIp`](super::ClientIp) reads.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForwardingHeader {
    /// `X-Forwarded-For`: a list of addresses.
    XForwardedFor,
    /// `Forwarded` (RFC 7239): a list of elements with the address in `for`.
    Forwarded,
    /// A header that holds one address, such as `CF-Connecting-IP` or `X-Real-IP`: see [`ClientIp::single_header`](super::ClientIp::single_header).
    Single(HeaderName),
    /// A header that holds one address and its port, such as `CloudFront-Viewer-Address`. The port follows the last colon, whether or not an
    /// IPv6 address has brackets: `2001:db8::1:443` is `2001:db8::1` with port 443.
    SingleWithPort(HeaderName),
}

impl ForwardingHeader {
    pub(super) fn name(&self) -> &HeaderName {
        match self {
            Self::XForwardedFor => &X_FORWARDED_FOR,
            Self::Forwarded => &FORWARDED,
            Self::Single(name) | Self::SingleWithPort(name) => name,
        }
    }
}
