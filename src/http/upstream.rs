//! Rate-limit fields of an upstream, on a response that a proxy returns through a layer.
//!
//! Fields of two sources must not be mixed. A field whose members have different syntaxes cannot be parsed, and a client cannot tell which
//! `X-RateLimit-Reset` belongs to which `X-RateLimit-Remaining`.

use std::cmp::Reverse;

use ::http::{HeaderMap, HeaderName, Response};

use super::headers::{DRAFT_6, LEGACY, RATELIMIT, Triple, tightest, write_fields};
use crate::rate_limit::LimitInfo;
use crate::responder::{HeaderConfig, UpstreamFields};

/// The source of a response's fields. It is kept in the extensions, because nested layers each add fields.
#[derive(Clone, Debug)]
enum Source {
    Layers,
    Upstream(Box<Withheld>),
}

/// The fields of the layers, withheld while the response keeps the fields of the upstream.
#[derive(Clone, Debug, Default)]
struct Withheld {
    fields: HeaderMap,
    // The tightest of all limits of these layers.
    tightest: Option<Tightness>,
}

/// The remaining units, and the seconds until more become available. The smaller value is the tighter: fewer units, then a later reset.
type Tightness = (u64, Reverse<u64>);

/// Adds the fields of a layer to those of other layers. Keeps or removes the fields of an upstream, as `fields.upstream` says.
pub(crate) fn annotate<B>(fields: &HeaderConfig, info: &LimitInfo<'_>, response: &mut Response<B>) {
    if !fields.writes_headers() {
        return;
    }
    // `Layers` is nearly always the result, so insert it first.
    let before = response.extensions_mut().insert(Source::Layers);
    let mut withheld = match before {
        Some(Source::Upstream(withheld)) => withheld,
        None if response.headers().keys().any(is_rate_limit_field) => Box::default(),
        Some(Source::Layers) | None => return write_fields(fields, info, response.headers_mut()),
    };
    write_fields(fields, info, &mut withheld.fields);
    let tightness = tightest(info).map(|(remaining, seconds)| (remaining, Reverse(seconds)));
    withheld.tightest = withheld.tightest.into_iter().chain(tightness).min();
    let headers = response.headers_mut();
    let source = if fields.upstream.is_replaced(withheld.tightest, headers) {
        let upstream: Vec<HeaderName> = headers.keys().filter(|name| is_rate_limit_field(name)).cloned().collect();
        for name in upstream {
            headers.remove(name);
        }
        headers.extend(withheld.fields);
        Source::Layers
    } else {
        Source::Upstream(withheld)
    };
    response.extensions_mut().insert(source);
}

/// Whether this is a field of any draft, or an older one such as `X-RateLimit-Used` or `X-Rate-Limit-Limit`.
pub(super) fn is_rate_limit_field(name: &HeaderName) -> bool {
    let name = name.as_str();
    // Most names fail the first checks.
    name.starts_with("ratelimit")
        || name.starts_with("x-rate") && ["x-ratelimit", "x-rate-limit"].iter().any(|field| name.starts_with(field))
}

impl UpstreamFields {
    fn is_replaced(self, layers: Option<Tightness>, headers: &HeaderMap) -> bool {
        match self {
            Self::Replace => true,
            Self::Keep => false,
            Self::KeepTighter => match (layers, upstream_tightness(headers)) {
                (Some(layers), Some(upstream)) => layers <= upstream,
                _ => true,
            },
        }
    }
}

/// The tightest limit in the fields of an upstream. `None` if any of the fields cannot be parsed.
fn upstream_tightness(headers: &HeaderMap) -> Option<Tightness> {
    const LEGACY_WITH_HYPHEN: Triple = Triple {
        limit: HeaderName::from_static("x-rate-limit-limit"),
        remaining: HeaderName::from_static("x-rate-limit-remaining"),
        reset: HeaderName::from_static("x-rate-limit-reset"),
    };
    let mut tightest: Option<Tightness> = None;
    let mut record = |limit: Tightness| tightest = tightest.into_iter().chain([limit]).min();
    for line in headers.get_all(RATELIMIT) {
        let line = line.to_str().ok()?;
        if let Some(limit) = parse_dictionary(line) {
            record(limit);
        } else {
            for member in split(line, ',') {
                record(parse_item(member)?);
            }
        }
    }
    for Triple { remaining, reset, .. } in [DRAFT_6, LEGACY, LEGACY_WITH_HYPHEN] {
        let mut values = [&remaining, &reset].map(|name| headers.get_all(name).iter());
        match values.each_mut().map(Iterator::next) {
            [None, None] => {}
            [Some(remaining), reset] if values.into_iter().all(|mut rest| rest.next().is_none()) => {
                let remaining = remaining.to_str().ok()?.trim().parse().ok()?;
                let reset = reset.map_or(Some(0), |reset| parse_reset(reset.to_str().ok()?))?;
                record((remaining, Reverse(reset)));
            }
            _ => return None,
        }
    }
    tightest
}

/// Parses `limit=100, remaining=42, reset=18` (draft 7).
fn parse_dictionary(line: &str) -> Option<Tightness> {
    let find = |key: &str| line.split(',').find_map(|member| member.trim().strip_prefix(key)?.parse().ok());
    Some((find("remaining=")?, Reverse(find("reset=")?)))
}

/// Parses `"api";r=42;t=18` (draft 8 and later).
fn parse_item(member: &str) -> Option<Tightness> {
    let mut parameters = split(member, ';').map(str::trim);
    let name = parameters.next()?;
    // A name is a string, or a token in older drafts.
    let is_name = name.len() > 1 && name.starts_with('"') && name.ends_with('"')
        || name.starts_with(|first: char| first.is_ascii_alphabetic() || first == '*');
    let (mut remaining, mut seconds) = (None, 0);
    for parameter in parameters {
        match parameter.split_once('=') {
            Some(("r", value)) => remaining = Some(value.parse().ok()?),
            Some(("t", value)) => seconds = value.parse().ok()?,
            _ => {}
        }
    }
    Some((remaining.filter(|_| is_name)?, Reverse(seconds)))
}

/// Splits a text at separators outside quotes.
fn split(text: &str, separator: char) -> impl Iterator<Item = &str> {
    let (mut is_quoted, mut is_escaped) = (false, false);
    text.split(move |character| {
        let is_plain = !std::mem::take(&mut is_escaped);
        match character {
            '\\' if is_quoted && is_plain => is_escaped = true,
            '"' if is_plain => is_quoted = !is_quoted,
            _ => {}
        }
        character == separator && !is_quoted
    })
}

/// The seconds until the reset. Some servers send seconds or milliseconds since 1970.
fn parse_reset(reset: &str) -> Option<u64> {
    const FIRST_EPOCH: u64 = 1_000_000_000;
    const FIRST_EPOCH_MS: u64 = 100 * FIRST_EPOCH;
    let reset: u64 = reset.trim().parse().ok()?;
    let epoch = match reset {
        ..FIRST_EPOCH => return Some(reset),
        FIRST_EPOCH..FIRST_EPOCH_MS => reset,
        FIRST_EPOCH_MS.. => reset.div_ceil(1_000),
    };
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    Some(epoch.saturating_sub(now.as_secs()))
}

#[cfg(test)]
mod tests {
    use std::time::{SystemTime, UNIX_EPOCH};

    use super::*;

    fn tightness(fields: &[(&str, &str)]) -> Option<(u64, u64)> {
        let fields = fields.iter().map(|(name, value)| (name.parse::<HeaderName>().unwrap(), value.parse().unwrap()));
        upstream_tightness(&fields.collect()).map(|(remaining, Reverse(seconds))| (remaining, seconds))
    }

    #[test]
    fn fields_of_all_drafts_are_parsed() {
        assert_eq!(tightness(&[("ratelimit", r#""a";r=7;t=30, "b, \"c";pk=:cA==:;r=5"#)]), Some((5, 0)));
        assert_eq!(tightness(&[("ratelimit", "default;r=7;t=30")]), Some((7, 30)));
        assert_eq!(tightness(&[("ratelimit", "limit=100, remaining=7, reset=30")]), Some((7, 30)));
        assert_eq!(tightness(&[("ratelimit-remaining", "7"), ("ratelimit-reset", "30")]), Some((7, 30)));
        assert_eq!(tightness(&[("x-ratelimit-remaining", " 7 "), ("x-ratelimit-reset", "30")]), Some((7, 30)));
        assert_eq!(tightness(&[("x-rate-limit-remaining", "7")]), Some((7, 0)));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        for epoch in [(now + 30).to_string(), ((now + 30) * 1_000).to_string()] {
            let (remaining, seconds) =
                tightness(&[("x-ratelimit-remaining", "7"), ("x-ratelimit-reset", &epoch)]).unwrap();
            assert!(remaining == 7 && (25..=30).contains(&seconds), "{seconds}");
        }
        // The tightest of several limits is returned.
        let both = [("ratelimit", r#""a";r=7;t=30"#), ("x-ratelimit-remaining", "3"), ("x-ratelimit-reset", "9")];
        assert_eq!(tightness(&both), Some((3, 9)));
    }

    #[test]
    fn unreadable_fields_yield_none() {
        for fields in [
            &[][..],
            &[("ratelimit-policy", r#""a";q=100"#)],
            &[("ratelimit", "100;w=60")],
            &[("ratelimit", r#""a";t=30"#)],
            &[("ratelimit", r#""a";r=7, ?"#)],
            &[("x-ratelimit-reset", "30")],
            &[("x-ratelimit-remaining", "some"), ("x-ratelimit-reset", "30")],
            &[("x-ratelimit-remaining", "7"), ("x-ratelimit-reset", "Wed, 21 Oct 2026 07:28:00 GMT")],
            &[("x-ratelimit-remaining", "7"), ("x-ratelimit-remaining", "8"), ("x-ratelimit-reset", "30")],
            &[("ratelimit", r#""a";r=7;t=30"#), ("x-ratelimit-remaining", "-1")],
        ] {
            assert_eq!(tightness(fields), None, "{fields:?}");
        }
    }
}
