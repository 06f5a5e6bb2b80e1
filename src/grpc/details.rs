//! The error details of `google.rpc` that this crate sends.

use std::time::Duration;

use prost::Message;

/// `google.rpc.Status`
#[derive(Clone, PartialEq, Message)]
pub(super) struct Status {
    #[prost(int32, tag = "1")]
    pub(super) code: i32,
    #[prost(string, tag = "2")]
    pub(super) message: String,
    #[prost(message, repeated, tag = "3")]
    pub(super) details: Vec<Any>,
}

/// `google.protobuf.Any`
#[derive(Clone, PartialEq, Message)]
pub(super) struct Any {
    #[prost(string, tag = "1")]
    type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

/// `google.rpc.RetryInfo`
#[derive(Clone, PartialEq, Message)]
struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    retry_delay: Option<Span>,
}

/// `google.protobuf.Duration`
#[derive(Clone, Copy, PartialEq, Message)]
struct Span {
    #[prost(int64, tag = "1")]
    seconds: i64,
    #[prost(int32, tag = "2")]
    nanos: i32,
}

/// `google.rpc.QuotaFailure`
#[derive(Clone, PartialEq, Message)]
struct QuotaFailure {
    #[prost(message, repeated, tag = "1")]
    violations: Vec<Violation>,
}

/// `google.rpc.QuotaFailure.Violation`
#[derive(Clone, PartialEq, Message)]
pub(super) struct Violation {
    #[prost(string, tag = "1")]
    pub(super) subject: String,
    #[prost(string, tag = "2")]
    pub(super) description: String,
}

impl Any {
    pub(super) fn retry_info(delay: Duration) -> Self {
        let span = Span {
            seconds: i64::try_from(delay.as_secs()).unwrap_or(i64::MAX).min(MAX_SECONDS),
            nanos: delay.subsec_nanos().cast_signed(),
        };
        Self::of("google.rpc.RetryInfo", &RetryInfo { retry_delay: Some(span) })
    }

    pub(super) fn quota_failure(violations: Vec<Violation>) -> Self {
        Self::of("google.rpc.QuotaFailure", &QuotaFailure { violations })
    }

    fn of(name: &str, message: &impl Message) -> Self {
        Self { type_url: format!("type.googleapis.com/{name}"), value: message.encode_to_vec() }
    }
}

/// The longest `google.protobuf.Duration`: ten thousand years.
const MAX_SECONDS: i64 = 315_576_000_000;
