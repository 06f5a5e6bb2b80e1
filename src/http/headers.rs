//! The fields that tell a client how its limits stand.
//!
//! They are written for every response, so what a policy says is written once and the rest put together by hand. The tests
//! read all of it with a parser for structured fields (RFC 9651) and compare it with what that parser's crate would write.

use std::cmp::Reverse;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ::http::header::RETRY_AFTER;
use ::http::{HeaderMap, HeaderName, HeaderValue};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;

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

/// The fields of answers that are there for clients to read, for `Access-Control-Expose-Headers`: see [Browsers](super#browsers).
///
/// Older [versions](HeaderVersion) of the fields have other names, which are not among them.
pub const EXPOSED_HEADERS: [HeaderName; 4] =
    [RATELIMIT, RATELIMIT_POLICY, RETRY_AFTER, HeaderName::from_static("idempotent-replayed")];

/// Tells the policy and, where something is known, how its limits stand.
///
/// Lists are added to, so that layers on top of each other all have their say. Of fields that hold a single value the one
/// of the tightest limit stays.
pub(crate) fn write_fields(fields: &HeaderConfig, standing: &LimitInfo<'_>, headers: &mut HeaderMap) {
    use HeaderVersion::{Draft6, Draft7, Draft10, LegacyDelta, LegacyEpoch};

    let (policy, versions) = (standing.policy, fields.versions);
    let Some(announcement) = policy.announcement(|| Announcement::of(policy)) else { return };
    let known = standing.decision.filter(|decision| decision.outcome() != Outcome::Never);
    let [draft_10, draft_7, draft_6] = [Draft10, Draft7, Draft6].map(|version| versions.contains(version));

    if draft_10 {
        let partition = fields.secret.as_ref().zip(standing.key).map(|(secret, key)| partition(secret, key));
        announcement.write(known, partition, headers);
    } else if draft_7 || draft_6 {
        headers.append(RATELIMIT_POLICY, announcement.unnamed.value());
    }
    let (epoch, delta) = (versions.contains(LegacyEpoch), versions.contains(LegacyDelta));
    if !(draft_7 || draft_6 || epoch || delta) {
        return;
    }
    let Some(tightest) = known.and_then(Tightest::of) else { return };
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

/// The units left of the tightest limit and the seconds until more become available, if a decision was made.
pub(super) fn tightest(standing: &LimitInfo<'_>) -> Option<(u64, u64)> {
    let known = standing.decision.filter(|decision| decision.outcome() != Outcome::Never)?;
    let tightest = Tightest::of(known)?;
    Some((tightest.remaining.into(), tightest.reset_seconds()))
}

/// What is said of a policy in every response.
struct Announcement {
    /// All limits, for draft 10.
    named: Text,
    /// All limits, for older drafts.
    unnamed: Text,
    limits: Vec<LimitTexts>,
}

/// The value of a field in many responses.
struct Text {
    text: String,
    copies: ShardedRefs<HeaderValue>,
}

impl Text {
    fn list(members: Vec<String>) -> Self {
        Self { text: members.join(", "), copies: ShardedRefs::default() }
    }

    fn value(&self) -> HeaderValue {
        self.copies.get(|| value(self.text.as_bytes())).clone()
    }
}

/// What is said of one limit, up to where it differs from response to response.
struct LimitTexts {
    /// `"api";q=100;w=60`
    policy: String,
    /// `"api";r=`
    standing: String,
}

impl Announcement {
    fn of(policy: &Policy) -> Self {
        let texts = |(name, limit): (&str, &Limit)| {
            let name = string(name);
            LimitTexts {
                policy: format!("{name};q={}{}", limit.capacity(), window(limit)),
                standing: format!("{name};r="),
            }
        };
        let limits: Vec<LimitTexts> = policy.limit_names().zip(policy.limits()).map(texts).collect();
        let named = limits.iter().map(|limit| limit.policy.clone()).collect();
        let unnamed = policy.limits().iter().map(|limit| format!("{}{}", limit.capacity(), window(limit))).collect();
        Self { named: Text::list(named), unnamed: Text::list(unnamed), limits }
    }

    /// Both fields of draft 10.
    fn write(&self, known: Option<&Decision>, partition: Option<Partition>, headers: &mut HeaderMap) {
        let policy = match &partition {
            None => self.named.value(),
            Some(partition) => line(self.named.text.len() + self.limits.len() * partition.len(), |line| {
                for limit in &self.limits {
                    line.begin_member();
                    line.push(limit.policy.as_bytes());
                    line.push(partition);
                }
            }),
        };
        headers.append(RATELIMIT_POLICY, policy);

        let Some(known) = known.filter(|decision| !decision.limits().is_empty()) else { return };
        let partition = partition.as_ref().map_or(&[][..], |partition| partition);
        let members = || self.limits.iter().zip(known.limits());
        let len = members().map(|(texts, limit)| {
            let more = seconds_until_more(limit).map_or(0, |seconds| 3 + digits(seconds));
            2 + texts.standing.len() + digits(limit.remaining().into()) + more + partition.len()
        });
        let standing = line(len.sum::<usize>().saturating_sub(2), |line| {
            for (texts, limit) in members() {
                line.begin_member();
                line.push(texts.standing.as_bytes());
                line.push_number(limit.remaining().into());
                if let Some(seconds) = seconds_until_more(limit) {
                    line.push(b";t=");
                    line.push_number(seconds);
                }
                line.push(partition);
            }
        });
        headers.append(RATELIMIT, standing);
    }
}

/// How long until more of a limit becomes available, as it is told; `None` where all of it is.
fn seconds_until_more(limit: &LimitStatus) -> Option<u64> {
    limit.seconds_until_more().map(|seconds| seconds.min(MAX_INTEGER))
}

/// `;w=60`, or nothing: `w` is in whole seconds and must not be 0, so a window that is not cannot be told.
fn window(limit: &Limit) -> String {
    let period = limit.period();
    if period.subsec_nanos() == 0 && !period.is_zero() { format!(";w={}", period.as_secs()) } else { String::new() }
}

/// Text as a String of structured fields. Names are printable ASCII.
fn string(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', r"\\").replace('"', r#"\""#))
}

/// The largest integer that structured fields have.
const MAX_INTEGER: u64 = 999_999_999_999_999;

fn whole_seconds(wait: Duration) -> u64 {
    ceil_seconds(wait).min(MAX_INTEGER)
}

/// A field value being put together.
struct Line(Vec<u8>);

/// The value of so many bytes that `write` makes. If there are as many in the end, this is the only memory that is asked for.
fn line(len: usize, write: impl FnOnce(&mut Line)) -> HeaderValue {
    let mut line = Line(Vec::with_capacity(len));
    write(&mut line);
    // See `value`.
    HeaderValue::try_from(line.0).unwrap_or(HeaderValue::from_static(""))
}

/// How many digits a number has.
fn digits(number: u64) -> usize {
    number.checked_ilog10().unwrap_or(0) as usize + 1
}

impl Line {
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

/// Names, numbers and base64 are printable ASCII, so they always make a value.
fn value(text: &[u8]) -> HeaderValue {
    HeaderValue::from_bytes(text).unwrap_or(HeaderValue::from_static(""))
}

/// `;pk=:` and 16 bytes in base64 and `:`.
type Partition = [u8; 30];

fn partition(secret: &PartitionKeyMac, key: &Key) -> Partition {
    let mut parameter = *b";pk=:                        :";
    let written = BASE64.encode_slice(secret.mac(key.as_str().as_bytes()), &mut parameter[5..29]);
    debug_assert_eq!(written, Ok(24));
    parameter
}

/// The limit that has least left: all that older fields have room for.
struct Tightest {
    limit: u32,
    remaining: u32,
    reset: Duration,
}

/// Three fields of one number each.
pub(super) struct Triple {
    pub(super) limit: HeaderName,
    pub(super) remaining: HeaderName,
    pub(super) reset: HeaderName,
}

impl Tightest {
    fn of(decision: &Decision) -> Option<Self> {
        let reset = decision.reset_after();
        // The tightest limit is one of the violated ones, if there are any. See `LimitStatus::seconds_until_more`.
        let reset = match decision.outcome() {
            Outcome::Limited => decision.retry_after().map_or(reset, |wait| wait.min(reset)),
            _ => reset,
        };
        Some(Self { limit: decision.limit(), remaining: decision.remaining()?, reset })
    }

    /// These fields have no way to say nothing, so the reset is 0 where the whole quota is left.
    fn reset_seconds(&self) -> u64 {
        if self.reset.is_zero() { 0 } else { whole_seconds(self.reset) }
    }

    fn write(&self, fields: Triple, reset: u64, headers: &mut HeaderMap) {
        let told = |field| headers.get(field)?.to_str().ok()?.parse().ok();
        if self.is_tighter_than(reset, || Some((told(&fields.remaining)?, told(&fields.reset)))) {
            headers.insert(fields.limit, number(self.limit.into()));
            headers.insert(fields.remaining, number(self.remaining.into()));
            headers.insert(fields.reset, number(reset));
        }
    }

    /// `RateLimit: limit=100, remaining=42, reset=18`
    fn write_dictionary(&self, headers: &mut HeaderMap) {
        let reset = self.reset_seconds();
        let told = |key: &str| {
            let mut members = headers.get(RATELIMIT)?.to_str().ok()?.split(", ");
            members.find_map(|member| member.strip_prefix(key)?.parse().ok())
        };
        if self.is_tighter_than(reset, || Some((told("remaining=")?, told("reset=")))) {
            let value = line(64, |line| {
                line.push(b"limit=");
                line.push_number(self.limit.into());
                line.push(b", remaining=");
                line.push_number(self.remaining.into());
                line.push(b", reset=");
                line.push_number(reset);
            });
            headers.insert(RATELIMIT, value);
        }
    }

    /// Whether this says more than what a layer below has told already: what remained, and until when.
    fn is_tighter_than(&self, reset: u64, told: impl FnOnce() -> Option<(u64, Option<u64>)>) -> bool {
        told().is_none_or(|(remaining, told_reset)| {
            (u64::from(self.remaining), Reverse(Some(reset))) < (remaining, Reverse(told_reset))
        })
    }
}
