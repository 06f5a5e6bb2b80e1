//! The rate-limit header fields of responses.
//!
//! They are written for every response. So the text of a policy is formatted once, and the rest is written byte by byte. The tests parse all
//! fields as structured fields (RFC 9651) with another crate, and compare them with the output of that crate.

use std::cmp::Reverse;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ::http::header::RETRY_AFTER;
use ::http::{HeaderMap, HeaderName, HeaderValue};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;

use super::not_executed::REJECTED;
use crate::key::Key;
use crate::rate_limit::{Decision, Limit, LimitInfo, LimitStatus, Outcome, Policy, ceil_seconds};
use crate::responder::{HeaderConfig, HeaderVersion, PartitionKeyMac};
use crate::store::sharded_refs::ShardedRefs;

pub(super) const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
pub(super) const DRAFT_6: Triple = Triple {
    limit: HeaderName::from_static("ratelimit-limit"),
    remaining: HeaderName::from_static("ratelimit-remaining"),
    reset: HeaderName::from_static("ratelimit-reset"),
};
pub(super) const LEGACY: Triple = Triple {
    limit: HeaderName::from_static("x-ratelimit-limit"),
    remaining: HeaderName::from_static("x-ratelimit-remaining"),
    reset: HeaderName::from_static("x-ratelimit-reset"),
};

/// The response fields that clients read, for `Access-Control-Expose-Headers`: see [Browsers](super#browsers).
///
/// The fields of older [versions](HeaderVersion) have other names and are not included.
pub const EXPOSED_HEADERS: [HeaderName; 5] =
    [RATELIMIT, RATELIMIT_POLICY, RETRY_AFTER, HeaderName::from_static("idempotent-replayed"), REJECTED];

/// Writes the fields for the policy and, after a decision, for the state of its limits.
///
/// Nested layers each append to fields that are lists. A field with a single value keeps the value of the tightest limit.
pub(crate) fn write_fields(fields: &HeaderConfig, info: &LimitInfo<'_>, headers: &mut HeaderMap) {
    use HeaderVersion::{Draft6, Draft7, Draft10, LegacyDelta, LegacyEpoch};

    let (policy, versions) = (info.policy, fields.versions);
    let Some(text) = policy.announcement(|| PolicyText::new(policy)) else { return };
    let decision = info.decision.filter(|decision| decision.outcome() != Outcome::Never);
    let [draft_10, draft_7, draft_6] = [Draft10, Draft7, Draft6].map(|version| versions.contains(version));

    if draft_10 {
        let partition = fields.secret.as_ref().zip(info.key).map(|(secret, key)| partition(secret, key));
        text.write(decision, partition, headers);
    } else if draft_7 || draft_6 {
        headers.append(RATELIMIT_POLICY, text.unnamed.value());
    }
    let (epoch, delta) = (versions.contains(LegacyEpoch), versions.contains(LegacyDelta));
    if !(draft_7 || draft_6 || epoch || delta) {
        return;
    }
    let Some(tightest) = decision.and_then(Tightest::of) else { return };
    if draft_7 && !draft_10 {
        tightest.write_dictionary(headers);
    }
    if draft_6 {
        tightest.write(DRAFT_6, tightest.reset_seconds(), headers);
    }
    if epoch {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        tightest.write(LEGACY, ceil_seconds(now.saturating_add(tightest.reset)), headers);
    } else if delta {
        tightest.write(LEGACY, tightest.reset_seconds(), headers);
    }
}

/// The remaining units of the tightest limit and the seconds until more become available, if there is a decision.
pub(super) fn tightest(info: &LimitInfo<'_>) -> Option<(u64, u64)> {
    let decision = info.decision.filter(|decision| decision.outcome() != Outcome::Never)?;
    let tightest = Tightest::of(decision)?;
    Some((tightest.remaining, tightest.reset_seconds()))
}

/// The text of a policy, which is the same in every response.
struct PolicyText {
    /// All limits, for draft 10.
    named: SharedValue,
    /// All limits, for older drafts.
    unnamed: SharedValue,
    limits: Vec<LimitText>,
}

/// A field value that many responses share.
struct SharedValue {
    text: String,
    copies: ShardedRefs<HeaderValue>,
}

impl SharedValue {
    fn list(members: Vec<String>) -> Self {
        Self { text: members.join(", "), copies: ShardedRefs::default() }
    }

    fn value(&self) -> HeaderValue {
        self.copies.get(|| value(self.text.as_bytes())).clone()
    }
}

/// The text of one limit that is the same in every response.
struct LimitText {
    /// `"api";q=100;w=60`
    policy: String,
    /// `"api";r=`
    remaining_prefix: String,
}

impl PolicyText {
    fn new(policy: &Policy) -> Self {
        let text = |(name, limit): (&str, &Limit)| {
            let name = string(name);
            LimitText {
                policy: format!("{name};q={}{}", units(limit.capacity()), window(limit)),
                remaining_prefix: format!("{name};r="),
            }
        };
        let limits: Vec<LimitText> = policy.limit_names().zip(policy.limits()).map(text).collect();
        let named = limits.iter().map(|limit| limit.policy.clone()).collect();
        let unnamed =
            policy.limits().iter().map(|limit| format!("{}{}", units(limit.capacity()), window(limit))).collect();
        Self { named: SharedValue::list(named), unnamed: SharedValue::list(unnamed), limits }
    }

    /// Both fields of draft 10.
    fn write(&self, decision: Option<&Decision>, partition: Option<Partition>, headers: &mut HeaderMap) {
        let policy = match &partition {
            None => self.named.value(),
            Some(partition) => build_value(self.named.text.len() + self.limits.len() * partition.len(), |value| {
                for limit in &self.limits {
                    value.begin_member();
                    value.push(limit.policy.as_bytes());
                    value.push(partition);
                }
            }),
        };
        headers.append(RATELIMIT_POLICY, policy);

        let Some(decision) = decision.filter(|decision| !decision.limits().is_empty()) else { return };
        let partition = partition.as_ref().map_or(&[][..], |partition| partition);
        let members = || self.limits.iter().zip(decision.limits());
        let len = members().map(|(text, limit)| {
            let reset = seconds_until_more(limit).map_or(0, |seconds| 3 + digits(seconds));
            2 + text.remaining_prefix.len() + digits(units(limit.remaining())) + reset + partition.len()
        });
        let remaining = build_value(len.sum::<usize>().saturating_sub(2), |value| {
            for (text, limit) in members() {
                value.begin_member();
                value.push(text.remaining_prefix.as_bytes());
                value.push_number(units(limit.remaining()));
                if let Some(seconds) = seconds_until_more(limit) {
                    value.push(b";t=");
                    value.push_number(seconds);
                }
                value.push(partition);
            }
        });
        headers.append(RATELIMIT, remaining);
    }
}

/// The seconds until more units of a limit become available; `None` if all of them are available.
fn seconds_until_more(limit: &LimitStatus) -> Option<u64> {
    limit.seconds_until_more().map(|seconds| seconds.min(MAX_INTEGER))
}

/// `;w=60`. Empty if the window is not a whole number of seconds above 0, because `w` cannot express it.
fn window(limit: &Limit) -> String {
    let period = limit.period();
    if period.subsec_nanos() == 0 && !period.is_zero() { format!(";w={}", period.as_secs()) } else { String::new() }
}

/// Formats text as a String of structured fields. Names are printable ASCII.
fn string(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', r"\\").replace('"', r#"\""#))
}

/// The largest integer of structured fields.
const MAX_INTEGER: u64 = 999_999_999_999_999;

/// Limits units to the largest number that is valid in a header field.
fn units(units: u64) -> u64 {
    units.min(MAX_INTEGER)
}

fn whole_seconds(wait: Duration) -> u64 {
    ceil_seconds(wait).min(MAX_INTEGER)
}

struct ValueBuilder(Vec<u8>);

/// Builds a value with `write`. If `len` is its exact length, this allocates only once.
fn build_value(len: usize, write: impl FnOnce(&mut ValueBuilder)) -> HeaderValue {
    let mut value = ValueBuilder(Vec::with_capacity(len));
    write(&mut value);
    // See `value`.
    HeaderValue::try_from(value.0).unwrap_or(HeaderValue::from_static(""))
}

fn digits(number: u64) -> usize {
    number.checked_ilog10().unwrap_or(0) as usize + 1
}

impl ValueBuilder {
    fn begin_member(&mut self) {
        if !self.0.is_empty() {
            self.push(b", ");
        }
    }

    fn push(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    fn push_number(&mut self, number: u64) {
        self.push(itoa::Buffer::new().format(number).as_bytes());
    }
}

fn number(number: u64) -> HeaderValue {
    value(itoa::Buffer::new().format(number).as_bytes())
}

/// Names, numbers and base64 are printable ASCII, so the conversion always succeeds.
fn value(text: &[u8]) -> HeaderValue {
    HeaderValue::from_bytes(text).unwrap_or(HeaderValue::from_static(""))
}

/// `;pk=:`, 16 bytes in base64, and `:`.
type Partition = [u8; 30];

fn partition(secret: &PartitionKeyMac, key: &Key) -> Partition {
    let mut parameter = *b";pk=:                        :";
    let written = BASE64.encode_slice(secret.mac(key.as_str().as_bytes()), &mut parameter[5..29]);
    debug_assert_eq!(written, Ok(24));
    parameter
}

/// The limit with the fewest remaining units. Older fields have room for only one limit.
struct Tightest {
    limit: u64,
    remaining: u64,
    reset: Duration,
}

/// The names of three fields that each hold a number.
pub(super) struct Triple {
    pub(super) limit: HeaderName,
    pub(super) remaining: HeaderName,
    pub(super) reset: HeaderName,
}

impl Tightest {
    fn of(decision: &Decision) -> Option<Self> {
        let reset = decision.reset_after();
        // No reset after `Retry-After`: see `LimitStatus::seconds_until_more`. If a limit is violated, so is the tightest one.
        let reset = match decision.outcome() {
            Outcome::Limited => decision.retry_after().map_or(reset, |wait| wait.min(reset)),
            _ => reset,
        };
        Some(Self { limit: units(decision.capacity()), remaining: units(decision.remaining()?), reset })
    }

    /// These fields are not optional, so the reset is 0 if the whole quota is left.
    fn reset_seconds(&self) -> u64 {
        if self.reset.is_zero() { 0 } else { whole_seconds(self.reset) }
    }

    fn write(&self, fields: Triple, reset: u64, headers: &mut HeaderMap) {
        let existing = |field| headers.get(field)?.to_str().ok()?.parse().ok();
        if self.is_tighter_than(reset, || Some((existing(&fields.remaining)?, existing(&fields.reset)))) {
            headers.insert(fields.limit, number(self.limit));
            headers.insert(fields.remaining, number(self.remaining));
            headers.insert(fields.reset, number(reset));
        }
    }

    /// `RateLimit: limit=100, remaining=42, reset=18`
    fn write_dictionary(&self, headers: &mut HeaderMap) {
        let reset = self.reset_seconds();
        let existing = |key: &str| {
            let mut members = headers.get(RATELIMIT)?.to_str().ok()?.split(", ");
            members.find_map(|member| member.strip_prefix(key)?.parse().ok())
        };
        if self.is_tighter_than(reset, || Some((existing("remaining=")?, existing("reset=")))) {
            let value = build_value(64, |value| {
                value.push(b"limit=");
                value.push_number(self.limit);
                value.push(b", remaining=");
                value.push_number(self.remaining);
                value.push(b", reset=");
                value.push_number(reset);
            });
            headers.insert(RATELIMIT, value);
        }
    }

    /// Whether this limit is tighter than the remaining units and the reset that an inner layer has written.
    fn is_tighter_than(&self, reset: u64, existing: impl FnOnce() -> Option<(u64, Option<u64>)>) -> bool {
        existing().is_none_or(|(remaining, existing_reset)| {
            (self.remaining, Reverse(Some(reset))) < (remaining, Reverse(existing_reset))
        })
    }
}
