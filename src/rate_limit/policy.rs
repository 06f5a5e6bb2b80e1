#[cfg(feature = "http")]
use std::any::Any;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::iter;
use std::sync::{Arc, LazyLock, OnceLock};

use super::algorithm::LimitParams;
use super::decision::Decision;
use super::metrics::Metrics;
use super::quota::{Algorithm, Limit, QuotaChange};
use crate::key::Key;

/// A name and one or several limits that are enforced together. A request passes if all limits have room. It is charged to all of them or
/// to none.
///
/// ```
/// use tollgate::{Policy, Quota};
///
/// # fn main() -> Result<(), tollgate::ConfigError> {
/// let policy = Policy::new("api", Quota::per_second(10).burst(20)?.token_bucket())
///     .limit(Quota::per_hour(1_000).fixed_window())
///     .limit(Quota::per_day(20_000).sliding_window());
/// # Ok(())
/// # }
/// ```
///
/// Clients see the name in the `RateLimit` header fields, and stores use it to separate the counts of policies. Two policies with the same
/// name, algorithms and windows on the same backend share their counts, in one process or in several. This is how processes share a quota.
/// [`QuotaChange`] controls what happens to the counts if the numbers change, or differ between clients.
///
/// Cheap to clone.
#[derive(Clone, PartialEq, Eq)]
pub struct Policy {
    inner: Arc<Inner>,
}

struct Inner {
    spec: Spec,
    // Derived from the spec: the limits as numbers for the algorithms, their names for clients, and a digest that separates policies with
    // one name whose counts are incompatible.
    params: Vec<LimitParams>,
    least_capacity: u64,
    names: Vec<String>,
    shape: String,
    counts_hash: u64,
    // Created when first needed.
    share: OnceLock<(u32, Policy)>,
    metrics: OnceLock<Metrics>,
    #[cfg(feature = "redis")]
    encoded: OnceLock<EncodedLimits>,
    #[cfg(feature = "http")]
    announcement: OnceLock<Box<dyn Any + Send + Sync>>,
}

/// The configuration of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Spec {
    name: String,
    limits: Vec<Limit>,
    given_names: Vec<Option<String>>,
    on_change: QuotaChange,
    mode: Mode,
}

/// The limits in the encoding that is sent to a store, and the format in which the store reads them.
#[cfg(feature = "redis")]
#[derive(Debug)]
pub(crate) struct EncodedLimits {
    pub(crate) params: Vec<u8>,
    /// The start of each record of counts made with these limits.
    pub(crate) limits: Vec<u8>,
    /// The format for Lua's `struct.unpack` of a record after its `limits`: the time of the last update, then the counts.
    pub(crate) layout: String,
    /// The same for a whole record, which begins with `limits` as one string.
    pub(crate) format: String,
    /// The size in bytes of the part after `limits`.
    pub(crate) counts_len: usize,
    pub(crate) ttl_ms: u64,
}

/// Whether a policy is enforced. Defaults to [`Enforce`](Self::Enforce).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mode {
    /// Requests over the limit are rejected.
    #[default]
    Enforce,
    /// Requests are counted and evaluated, and pass in any case, also without a key. Metrics and logs show which requests a new limit would
    /// reject. Responses do not mention the policy. A [`Limiter`](super::Limiter) returns allowed decisions.
    Shadow,
    /// Enforced for this percentage of the keys, and shadow for the others. The keys are the same in all processes. The keys for which a
    /// policy is enforced at 10 % are among those at 20 %. Requests without a key count as one key. 100 and above are
    /// [`Enforce`](Self::Enforce).
    Percent(u8),
}

/// A random seed. Tenants may choose the names of policies, and without it could choose names with equal hashes.
static SECRET: LazyLock<RandomState> = LazyLock::new(RandomState::new);

impl PartialEq for Inner {
    fn eq(&self, other: &Self) -> bool {
        self.spec == other.spec
    }
}

impl Eq for Inner {}

impl Policy {
    /// The maximum number of limits in a policy.
    pub const MAX_LIMITS: usize = 16;

    /// Creates a policy called `name` that enforces `limit`.
    ///
    /// Use a short name of letters, digits, `-`, `_` and `.`. Control characters, spaces, non-ASCII bytes and bytes with a meaning in
    /// stored keys, such as `:`, are percent-encoded. A name of more than [`Key::MAX_LEN`] bytes is replaced by its digest, since names
    /// become part of stored keys.
    pub fn new(name: impl AsRef<str>, limit: Limit) -> Self {
        Self::with_spec(Spec {
            name: clean(name.as_ref()),
            limits: vec![limit],
            given_names: vec![None],
            on_change: QuotaChange::default(),
            mode: Mode::default(),
        })
    }

    /// Adds a limit that is enforced as well.
    ///
    /// # Panics
    ///
    /// If the policy has [`MAX_LIMITS`](Self::MAX_LIMITS) already.
    #[must_use]
    pub fn limit(self, limit: Limit) -> Self {
        assert!(self.inner.spec.limits.len() < Self::MAX_LIMITS, "a policy takes at most {} limits", Self::MAX_LIMITS);
        self.change(|spec| {
            spec.limits.push(limit);
            spec.given_names.push(None);
        })
    }

    /// Names the limit that was added last, for clients to read.
    ///
    /// By default, a single limit has the name of the policy, and several limits have their window appended: `api-1s`, `api-1h`, `api-1d`.
    #[must_use]
    pub fn named(self, name: impl AsRef<str>) -> Self {
        self.change(|spec| {
            if let Some(last) = spec.given_names.last_mut() {
                *last = Some(clean(name.as_ref()));
            }
        })
    }

    /// Sets what happens to the counts when limits change. Defaults to [`QuotaChange::Keep`].
    #[must_use]
    pub fn on_quota_change(self, change: QuotaChange) -> Self {
        self.change(|spec| spec.on_change = change)
    }

    /// Sets whether the policy is enforced. Defaults to [`Mode::Enforce`].
    #[must_use]
    pub fn mode(self, mode: Mode) -> Self {
        self.change(|spec| spec.mode = mode)
    }

    /// Counts and evaluates requests without rejecting any: [`Mode::Shadow`].
    #[must_use]
    pub fn shadow(self) -> Self {
        self.mode(Mode::Shadow)
    }

    fn change(self, change: impl FnOnce(&mut Spec)) -> Self {
        let mut spec = self.inner.spec.clone();
        change(&mut spec);
        Self::with_spec(spec)
    }

    fn with_spec(spec: Spec) -> Self {
        let params: Vec<_> = spec.limits.iter().map(|limit| LimitParams::new(*limit)).collect();
        let shape = shape(&spec.limits);
        let inner = Inner {
            least_capacity: params.iter().map(|params| params.capacity).min().unwrap_or(u64::MAX),
            params,
            names: names(&spec),
            counts_hash: SECRET.hash_one((&spec.name, &shape)),
            shape,
            spec,
            share: OnceLock::new(),
            metrics: OnceLock::new(),
            #[cfg(feature = "redis")]
            encoded: OnceLock::new(),
            #[cfg(feature = "http")]
            announcement: OnceLock::new(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Returns the name, as clients and stores see it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner.spec.name
    }

    /// Returns the limits, in the order in which they were added.
    #[must_use]
    pub fn limits(&self) -> &[Limit] {
        &self.inner.spec.limits
    }

    /// Returns the names of the limits, as clients see them, in the same order.
    pub fn limit_names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.inner.names.iter().map(String::as_str)
    }

    /// Returns what happens to the counts when limits change.
    #[must_use]
    pub fn quota_change(&self) -> QuotaChange {
        self.inner.spec.on_change
    }

    /// Returns whether the policy is enforced for this key.
    #[inline]
    #[must_use]
    pub fn is_enforced_for(&self, key: &Key) -> bool {
        match self.inner.spec.mode {
            Mode::Enforce => true,
            Mode::Shadow => false,
            Mode::Percent(percent) => key.percentile() < percent,
        }
    }

    /// Returns whether the policy is enforced for requests without a key. They are sampled as one key.
    pub(crate) fn is_enforced_without_key(&self) -> bool {
        self.is_enforced_for(&Key::GLOBAL)
    }

    /// Returns the decision about a cost that can never be allowed. It needs no store.
    #[inline]
    pub(crate) fn decision_if_never_allowed(&self, cost: u64) -> Option<Decision> {
        self.can_never_allow(cost).then(|| Decision::never(self.inner.params.iter().map(|params| params.capacity)))
    }

    /// Whether the cost can never be allowed.
    #[inline]
    pub(crate) fn can_never_allow(&self, cost: u64) -> bool {
        let least = self.inner.least_capacity;
        least == 0 || cost > least
    }

    /// The limits as numbers for the algorithms.
    #[inline]
    pub(crate) fn params(&self) -> &[LimitParams] {
        &self.inner.params
    }

    /// The sliding logs among the limits.
    #[cfg(feature = "redis")]
    #[inline]
    pub(crate) fn logs(&self) -> impl Iterator<Item = &LimitParams> {
        self.params().iter().filter(|params| params.algorithm == Algorithm::SlidingLog)
    }

    /// The policy for one of `replicas` processes that do not share counts: for each limit its share of the units, rounded up.
    pub(crate) fn share_of(&self, replicas: u32) -> Self {
        let make = || {
            let mut spec = self.inner.spec.clone();
            spec.limits.iter_mut().for_each(|limit| *limit = limit.share_of(replicas));
            Self::with_spec(spec)
        };
        // Caches the share for the first number of replicas, which is nearly always the only one.
        let (kept_for, share) = self.inner.share.get_or_init(|| (replicas, make()));
        if *kept_for == replicas { share.clone() } else { make() }
    }

    /// Returns the limits as encoded by `encode`, cached in the policy.
    #[cfg(feature = "redis")]
    pub(crate) fn encoded_limits(&self, encode: impl FnOnce(&[LimitParams]) -> EncodedLimits) -> &EncodedLimits {
        self.inner.encoded.get_or_init(|| encode(&self.inner.params))
    }

    /// Returns what `make` derives from the policy for clients, cached in the policy. The cache has room for one value of any type, so this
    /// module does not depend on header types. Returns `None` for a second type.
    #[cfg(feature = "http")]
    pub(crate) fn announcement<T: Any + Send + Sync>(&self, make: impl FnOnce() -> T) -> Option<&T> {
        self.inner.announcement.get_or_init(|| Box::new(make())).downcast_ref()
    }

    /// The metrics of the policy.
    #[inline]
    pub(crate) fn metrics(&self) -> &Metrics {
        self.inner.metrics.get_or_init(|| Metrics::new(self.name()))
    }

    /// Whether two policies share their counts.
    #[inline]
    pub(crate) fn shares_counts_with(&self, other: &Policy) -> bool {
        self.is_same_as(other) || self.has_same_counts(other)
    }

    /// A hash for tables of many policies. Equal for policies that [share counts](Self::shares_counts_with).
    #[inline]
    pub(crate) fn counts_hash(&self) -> u64 {
        self.inner.counts_hash
    }

    // Not inlined, to keep callers small: nearly all comparisons are between clones.
    #[inline(never)]
    fn has_same_counts(&self, other: &Policy) -> bool {
        self.inner.spec.name == other.inner.spec.name && self.inner.shape == other.inner.shape
    }

    /// The algorithms and windows of the limits, as a few letters and digits.
    #[cfg(feature = "redis")]
    pub(crate) fn shape(&self) -> &str {
        &self.inner.shape
    }

    /// Whether two policies are clones of one.
    #[inline]
    pub(crate) fn is_same_as(&self, other: &Policy) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl fmt::Debug for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Spec { name, limits, on_change, mode, .. } = &self.inner.spec;
        let mut policy = f.debug_struct("Policy");
        policy.field("name", name).field("limits", limits).field("on_quota_change", on_change).field("mode", mode);
        policy.finish_non_exhaustive()
    }
}

/// Encodes a name for stored keys: short, printable, and without a colon, which separates the name from the key.
fn clean(name: &str) -> String {
    let escaped = Key::new(name).as_str().replace(':', "%3A");
    if escaped.len() <= Key::MAX_LEN { escaped } else { Key::digest(name).as_str().to_owned() }
}

/// Returns the names of the limits for clients. All names differ, since clients distinguish limits by them.
fn names(spec: &Spec) -> Vec<String> {
    let mut names: Vec<String> = Vec::with_capacity(spec.limits.len());
    for (limit, given_name) in spec.limits.iter().zip(&spec.given_names) {
        let base = match given_name {
            Some(name) => name.clone(),
            None if spec.limits.len() == 1 => spec.name.clone(),
            None => format!("{}-{}", spec.name, period(limit)),
        };
        let taken = |name: &String| names.contains(name);
        let numbered = (2..).map(|number| format!("{base}-{number}"));
        let name = iter::once(base.clone()).chain(numbered).find(|name| !taken(name));
        names.push(name.unwrap_or(base));
    }
    names
}

/// A digest of the algorithms and windows in their order. The window of a token bucket is left out: window and quota are its rate, which
/// may change.
fn shape(limits: &[Limit]) -> String {
    let shapes: String = limits
        .iter()
        .map(|limit| match limit.algorithm() {
            Algorithm::TokenBucket => "bucket;".to_owned(),
            Algorithm::FixedWindow => format!("fixed {};", limit.quota().window_us()),
            Algorithm::SlidingWindow => format!("sliding {};", limit.quota().window_us()),
            Algorithm::SlidingLog => format!("log {};", limit.quota().window_us()),
        })
        .collect();
    // Skips the prefix of a digest. Its characters have six bits each, so these are 48 bits.
    Key::digest(shapes).as_str()[1..9].to_owned()
}

/// `1s`, `15m`, `1h`, `1d`, `250ms`.
fn period(limit: &Limit) -> String {
    let period = limit.quota().window();
    let seconds = period.as_secs();
    match (seconds, period.subsec_nanos()) {
        (0, _) => format!("{}ms", period.as_millis()),
        (_, 1..) => format!("{}ms", period.as_millis()),
        _ if seconds.is_multiple_of(86_400) => format!("{}d", seconds / 86_400),
        _ if seconds.is_multiple_of(3_600) => format!("{}h", seconds / 3_600),
        _ if seconds.is_multiple_of(60) => format!("{}m", seconds / 60),
        _ => format!("{seconds}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rate_limit::Quota;

    #[test]
    fn policy_names_are_short_and_have_no_separators() {
        let limit = Quota::per_second(1).fixed_window();
        assert_eq!(Policy::new("api", limit).name(), "api");
        assert_eq!(Policy::new("a:b{c}", limit).name(), "a%3Ab%7Bc%7D");
        for long in ["x".repeat(1 << 20), ":".repeat(40), "{".repeat(20)] {
            let name = Policy::new(&long, limit).name().to_owned();
            assert!(name.len() <= Key::MAX_LEN && !name.contains([':', '{']), "{name}");
        }
    }

    #[test]
    fn limit_names_are_distinct() {
        let names = |policy: Policy| policy.limit_names().map(str::to_owned).collect::<Vec<_>>();
        let one = Policy::new("api", Quota::per_second(10).fixed_window());
        assert_eq!(names(one.clone()), ["api"]);
        let three = one.clone().limit(Quota::per_hour(1_000).fixed_window()).limit(Quota::per_day(5).sliding_window());
        assert_eq!(names(three), ["api-1s", "api-1h", "api-1d"]);
        let twice = one.clone().limit(Quota::per_second(10).token_bucket()).named("burst");
        assert_eq!(names(twice), ["api-1s", "burst"]);
        let same = one.limit(Quota::per_second(10).token_bucket());
        assert_eq!(names(same), ["api-1s", "api-1s-2"]);
    }

    #[test]
    fn policies_share_counts_if_only_numbers_differ() {
        let policy = |limits: &[Limit]| limits[1..].iter().fold(Policy::new("api", limits[0]), |p, l| p.limit(*l));
        let [ten, hundred] = [10, 100].map(Quota::per_minute);
        let same: [[Limit; 2]; 2] = [
            [ten.fixed_window(), Quota::per_second(3).token_bucket()],
            [hundred.fixed_window(), Quota::per_day(7).burst(90).unwrap().token_bucket()],
        ];
        assert!(policy(&same[0]).shares_counts_with(&policy(&same[1])));
        let different: [&[Limit]; 6] = [
            &[ten.fixed_window()],
            &[ten.sliding_window()],
            &[ten.token_bucket()],
            &[ten.sliding_log().unwrap()],
            &[Quota::per_hour(10).fixed_window()],
            &[ten.fixed_window(), ten.fixed_window()],
        ];
        for (i, one) in different.iter().enumerate() {
            for (j, other) in different.iter().enumerate() {
                assert_eq!(policy(one).shares_counts_with(&policy(other)), i == j, "{one:?} {other:?}");
            }
        }
    }

    #[test]
    fn smaller_percentage_is_subset_of_larger() {
        let limit = Quota::per_second(1).fixed_window();
        let enforced = |percent: u8| {
            let policy = Policy::new("api", limit).mode(Mode::Percent(percent));
            (0..10_000_u32).map(|i| policy.is_enforced_for(&Key::from(i))).collect::<Vec<_>>()
        };
        let (none, ten, fifty, all) = (enforced(0), enforced(10), enforced(50), enforced(100));
        assert!(!none.contains(&true) && !all.contains(&false));
        assert!(ten.iter().zip(&fifty).all(|(ten, fifty)| !ten || *fifty));
        for (keys, expected) in [(ten, 1_000), (fifty, 5_000)] {
            let count = keys.iter().filter(|enforced| **enforced).count();
            assert!(count.abs_diff(expected) < 200, "{count} of 10,000 instead of {expected}");
        }
    }
}
