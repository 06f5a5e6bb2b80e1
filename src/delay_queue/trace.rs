#[cfg(feature = "otel")]
use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId};
use tracing::Span;
use tracing::field::Empty;
#[cfg(feature = "otel")]
use tracing_opentelemetry::OpenTelemetrySpanExt;

use super::job::Job;
#[cfg(feature = "otel")]
use super::record::Headers;

/// The header with the trace context of the push, in the W3C
/// [trace context](https://www.w3.org/TR/trace-context/) format.
pub(crate) const TRACEPARENT: &str = "traceparent";
/// The header with the vendors' part of the trace context.
#[cfg(feature = "otel")]
const TRACESTATE: &str = "tracestate";

/// A span around an attempt. It begins a new trace, whatever span the worker runs in, since the client that pushed the job did not wait.
pub(crate) fn span<T>(queue: &str, job: &Job<T>) -> Span {
    let span = tracing::info_span!(
        parent: None,
        "job",
        queue,
        id = %job.id(),
        attempt = job.attempt(),
        link.trace_id = Empty,
        link.span_id = Empty,
    );
    if !span.is_disabled()
        && let Some((trace, parent, _)) = job.headers().get(TRACEPARENT).and_then(ids)
    {
        span.record("link.trace_id", trace).record("link.span_id", parent);
    }
    span
}

/// Links the span of an attempt to the span in which the job was pushed, for an OpenTelemetry exporter.
#[cfg(feature = "otel")]
pub(crate) fn link(span: &Span, headers: &Headers) {
    let context = || {
        let (trace, parent, flags) = ids(headers.get(TRACEPARENT)?)?;
        let state = headers.get(TRACESTATE).and_then(|state| state.parse().ok()).unwrap_or_default();
        let flags = TraceFlags::new(u8::from_str_radix(flags, 16).ok()?);
        Some(SpanContext::new(TraceId::from_hex(trace).ok()?, SpanId::from_hex(parent).ok()?, flags, true, state))
    };
    if !span.is_disabled()
        && let Some(context) = context()
    {
        span.add_link(context);
    }
}

/// Adds the trace context of the current span to `headers`, if OpenTelemetry knows it.
#[cfg(feature = "otel")]
pub(crate) fn insert_current(headers: &mut Headers) {
    let context = Span::current().context();
    let span = context.span();
    let context = span.span_context();
    if context.is_valid() {
        let (trace, parent, flags) = (context.trace_id(), context.span_id(), context.trace_flags());
        headers.insert(TRACEPARENT, format!("00-{trace}-{parent}-{flags:02x}"));
        let state = context.trace_state().header();
        if !state.is_empty() {
            headers.insert(TRACESTATE, state);
        }
    }
}

/// The trace id, the span id and the flags; `None` if the header is invalid.
fn ids(traceparent: &str) -> Option<(&str, &str, &str)> {
    let mut fields = traceparent.split('-');
    let (version, trace, parent, flags) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
    let is_hex = |text: &str, len: usize| {
        text.len() == len && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
    };
    let is_nonzero = |id: &str| id.bytes().any(|byte| byte != b'0');
    let is_supported = is_hex(version, 2) && version != "ff" && (version != "00" || fields.next().is_none());
    let is_valid = is_supported && is_hex(trace, 32) && is_hex(parent, 16) && is_hex(flags, 2);
    (is_valid && is_nonzero(trace) && is_nonzero(parent)).then_some((trace, parent, flags))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traceparent_is_parsed_as_specified() {
        let (trace, parent) = ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7");
        assert_eq!(ids(&format!("00-{trace}-{parent}-01")), Some((trace, parent, "01")));
        // A later version may add fields.
        assert_eq!(ids(&format!("01-{trace}-{parent}-01-what")), Some((trace, parent, "01")));
        for wrong in [
            String::new(),
            format!("00-{trace}-{parent}"),
            format!("00-{trace}-{parent}-01-what"),
            format!("ff-{trace}-{parent}-01"),
            format!("00-{}-{parent}-01", trace.to_uppercase()),
            format!("00-{}-{parent}-01", "0".repeat(32)),
            format!("00-{trace}-{}-01", "0".repeat(16)),
            format!("00-{trace}\n-{parent}-01"),
        ] {
            assert_eq!(ids(&wrong), None, "{wrong}");
        }
    }
}
