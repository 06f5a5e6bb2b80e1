//! A model of the algorithms, as simple as possible. Read it beside the docs of `Quota`.
//!
//! It shares no code with the crate, and packs and scales nothing. A count is a list of charges. Time moves from charge to charge. A share
//! is a fraction of integers. Waits are found by trying. Instants are microseconds.
//!
//! Where the docs allow rounding, a count is a range. It is at least the exact count by the most generous reading of the docs, and at most
//! the exact count by the least generous one. Everywhere else both ends are equal.

#![allow(unreachable_pub)]

use std::ops::RangeInclusive;
use std::time::Duration;

use tollgate::rate_limit::{Algorithm, Decision, Limit, Outcome};
use tollgate::{Policy, Quota};

/// All limits of a policy for one key, by the docs of the policy.
#[derive(Clone, Debug)]
pub struct Model {
    counts: Vec<Count>,
    blocked_until: u64,
}

/// The expected decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    pub outcome: Outcome,
    /// The outcome of the decision as a whole.
    pub retry_after: Option<Duration>,
    pub limits: Vec<ExpectedLimit>,
}

/// The expected status of one limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpectedLimit {
    pub remaining: u64,
    pub retry_after: Option<Duration>,
    pub reset_after: Duration,
}

impl From<&Decision> for Expected {
    fn from(decision: &Decision) -> Self {
        let limits = decision.limits().iter().map(|limit| ExpectedLimit {
            remaining: limit.remaining(),
            retry_after: limit.retry_after(),
            reset_after: limit.reset_after(),
        });
        Self { outcome: decision.outcome(), retry_after: decision.retry_after(), limits: limits.collect() }
    }
}

impl Model {
    pub fn new(policy: &Policy) -> Self {
        Self { counts: policy.limits().iter().map(|limit| Count::new(*limit)).collect(), blocked_until: 0 }
    }

    /// A request passes if all limits have room, and is charged to all of them or to none.
    pub fn check(&mut self, now: u64, cost: u64) -> Expected {
        let asked = self.peek(now, cost);
        if asked.outcome != Outcome::Allowed || cost == 0 {
            return asked;
        }
        self.counts.iter_mut().for_each(|count| count.charge(now, cost));
        // The status after the charge. A cost of zero fits always.
        self.peek(now, 0)
    }

    /// The same without the charge.
    pub fn peek(&mut self, now: u64, cost: u64) -> Expected {
        let limits: Vec<ExpectedLimit> = self.counts.iter_mut().map(|count| count.expected(now, cost)).collect();
        let longest = limits.iter().filter_map(|limit| limit.retry_after).max();
        let (outcome, retry_after) = if now < self.blocked_until {
            (Outcome::Blocked, Some(Duration::from_micros(self.blocked_until - now)))
        } else if longest.is_some() {
            (Outcome::Limited, longest)
        } else {
            (Outcome::Allowed, None)
        };
        Expected { outcome, retry_after, limits }
    }

    /// A later charge counts even if it does not fit, up to a debt of a whole quota.
    pub fn charge_anyway(&mut self, now: u64, units: u64) {
        self.counts.iter_mut().for_each(|count| count.charge_anyway(now, units));
    }

    /// Gives back units that were charged at the instant `at`, as far as they still count.
    /// Gives back units of the charge with this number, which was made at the instant `at`.
    pub fn give_back(&mut self, now: u64, charge: usize, at: u64, units: u64) {
        let mut buckets = 0;
        for count in &mut self.counts {
            buckets += usize::from(matches!(count.kind, Kind::TokenBucket { .. }));
            // A receipt has the missing tokens of two buckets at most.
            count.give_back(now, (buckets <= 2).then_some(charge), at, units);
        }
    }

    pub fn block(&mut self, until: u64) {
        self.blocked_until = until;
    }
}

/// The count of one limit.
#[derive(Clone, Debug)]
pub struct Count {
    limit: Limit,
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    /// A bucket that holds the capacity and is refilled with `limit` tokens per window, continuously. It stores the missing tokens at
    /// `updated`, by the fastest and by the slowest rate that the docs allow. The bucket was last full at `full_at`. `charges` has the
    /// tokens, or parts of one, that were missing after each charge.
    TokenBucket { missing: [u128; 2], updated: u64, full_at: u64, charges: Vec<[u64; 2]> },
    /// A window that opens with its first charge, and closes together with all charges in it.
    FixedWindow { opened: u64, charges: Vec<Charge> },
    /// Windows that follow each other, the first of which opens with a charge.
    SlidingWindow { opened: u64, before: Vec<Charge>, charges: Vec<Charge> },
    /// All charges that are not yet a window old.
    SlidingLog { charges: Vec<Charge> },
}

#[derive(Clone, Copy, Debug)]
struct Charge {
    at: u64,
    units: u64,
}

/// Into how many parts tokens are cut, so that rates which differ by a millionth can be told apart.
const PARTS: u128 = 10_000_000;
/// How many of these parts a bucket may be short of, where rounding is allowed: a ten-millionth.
const SLOWER: u128 = 1;
/// How many steps of a sliding window there are at least, where rounding is allowed.
const STEPS: u64 = 67_000_000;
/// Products above this are too large to be counted exactly.
const EXACT: u128 = 1 << 51;

fn window(limit: Limit) -> u64 {
    limit.quota().window().as_micros() as u64
}

/// The worth of one token: the parts that flow in within a window, divided by the quota.
fn token(limit: Limit) -> u128 {
    u128::from(window(limit)) * PARTS
}

/// Whether the numbers of this limit are so large that the docs allow rounding. A window that does not fade is never rounded.
fn may_be_rounded(limit: Limit) -> bool {
    let fades = matches!(limit.algorithm(), Algorithm::TokenBucket | Algorithm::SlidingWindow);
    fades && u128::from(limit.capacity()) * u128::from(window(limit)) > EXACT
}

fn sum(charges: &[Charge]) -> u64 {
    charges.iter().map(|charge| charge.units).sum()
}

impl Count {
    pub fn new(limit: Limit) -> Self {
        let kind = match limit.algorithm() {
            Algorithm::TokenBucket => {
                Kind::TokenBucket { missing: [0; 2], updated: 0, full_at: 0, charges: Vec::new() }
            }
            Algorithm::FixedWindow => Kind::FixedWindow { opened: 0, charges: Vec::new() },
            Algorithm::SlidingWindow => Kind::SlidingWindow { opened: 0, before: Vec::new(), charges: Vec::new() },
            Algorithm::SlidingLog => Kind::SlidingLog { charges: Vec::new() },
            other => panic!("{other:?} has no definition here"),
        };
        Self { limit, kind }
    }

    pub fn pass_time(&mut self, now: u64) {
        let window = window(self.limit);
        match &mut self.kind {
            Kind::TokenBucket { missing, updated, full_at, .. } => {
                let elapsed = u128::from(now - *updated);
                let rate = u128::from(self.limit.quota().limit());
                let slowest = if may_be_rounded(self.limit) { PARTS - SLOWER } else { PARTS };
                missing[0] = missing[0].saturating_sub(elapsed * rate * PARTS);
                missing[1] = missing[1].saturating_sub(elapsed * rate * slowest);
                *updated = now;
                if missing[0] == 0 {
                    *full_at = now;
                }
            }
            Kind::FixedWindow { opened, charges } => {
                if sum(charges) == 0 || now >= *opened + window {
                    charges.clear();
                    *opened = now;
                }
            }
            Kind::SlidingWindow { opened, before, charges } => {
                while sum(before) + sum(charges) > 0 && now >= *opened + window {
                    *before = std::mem::take(charges);
                    *opened += window;
                }
                if sum(before) + sum(charges) == 0 {
                    *opened = now;
                }
            }
            Kind::SlidingLog { charges } => charges.retain(|charge| charge.at + window > now),
        }
    }

    /// The units in use at the instant `now`, without further charges. A part of a unit counts as a unit.
    pub fn used_at(&self, now: u64) -> RangeInclusive<u64> {
        let mut then = self.clone();
        then.pass_time(now);
        match &then.kind {
            Kind::TokenBucket { missing, .. } => {
                let [least, most] = missing.map(|missing| missing.div_ceil(token(self.limit)) as u64);
                least..=most
            }
            Kind::FixedWindow { charges, .. } | Kind::SlidingLog { charges } => sum(charges)..=sum(charges),
            Kind::SlidingWindow { opened, before, charges } => {
                let window = u128::from(window(self.limit));
                let elapsed = u128::from(now - opened);
                // The share of the previous window within the last window length, rounded up.
                let faded = |elapsed: u128| (u128::from(sum(before)) * (window - elapsed)).div_ceil(window) as u64;
                let step = if may_be_rounded(self.limit) { window.div_ceil(STEPS.into()) } else { 0 };
                let least = faded((elapsed + step).min(window));
                let most = faded(elapsed.saturating_sub(step));
                sum(charges) + least..=sum(charges) + most
            }
        }
    }

    /// The time from `now` until `enough` is true of the units in use, found by trying. Without charges, they only decrease.
    pub fn wait(&self, now: u64, enough: impl Fn(RangeInclusive<u64>) -> bool) -> u64 {
        // Within three periods a debt of a whole quota is paid, and a closed window has faded.
        let (mut not_enough, mut long_enough) =
            (0, 3 * self.limit.period().as_micros() as u64 + 3 * window(self.limit));
        if enough(self.used_at(now)) {
            return 0;
        }
        assert!(enough(self.used_at(now + long_enough)), "{self:?} never gives enough");
        while long_enough - not_enough > 1 {
            let middle = (not_enough + long_enough) / 2;
            if enough(self.used_at(now + middle)) {
                long_enough = middle;
            } else {
                not_enough = middle;
            }
        }
        long_enough
    }

    /// The status of the limit, and the wait for a request of `cost`. Only where the docs allow no rounding.
    fn expected(&mut self, now: u64, cost: u64) -> ExpectedLimit {
        self.pass_time(now);
        assert!(!may_be_rounded(self.limit), "{:?} may be rounded", self.limit);
        let (used, capacity) = (*self.used_at(now).end(), self.limit.capacity());
        let fits = |used: RangeInclusive<u64>| used.end() + cost <= capacity;
        let retry_after = (cost > 0 && !fits(used..=used)).then(|| Duration::from_micros(self.wait(now, fits)));
        // Until more is left than now. A debt has to be paid before that.
        let left = |used: u64| capacity.saturating_sub(used);
        let reset = if used == 0 { 0 } else { self.wait(now, |then| left(*then.end()) > left(used)) };
        ExpectedLimit { remaining: left(used), retry_after, reset_after: Duration::from_micros(reset) }
    }

    pub fn charge(&mut self, now: u64, units: u64) {
        self.pass_time(now);
        match &mut self.kind {
            Kind::TokenBucket { missing, charges, .. } => {
                *missing = missing.map(|missing| missing + u128::from(units) * token(self.limit));
                charges.push(missing.map(|missing| missing.div_ceil(token(self.limit)) as u64));
            }
            Kind::FixedWindow { charges, .. } | Kind::SlidingWindow { charges, .. } | Kind::SlidingLog { charges } => {
                charges.push(Charge { at: now, units });
            }
        }
    }

    fn charge_anyway(&mut self, now: u64, units: u64) {
        self.pass_time(now);
        let most = (2 * self.limit.capacity()).min(Quota::MAX_UNITS);
        if let Kind::TokenBucket { missing, .. } = &mut self.kind {
            // A bucket can also lack a part of a token.
            let (token, most) = (token(self.limit), u128::from(most) * token(self.limit));
            *missing = missing.map(|missing| missing.max((missing + u128::from(units) * token).min(most)));
        } else {
            let room = most.saturating_sub(*self.used_at(now).end());
            self.charge(now, units.min(room));
        }
    }

    fn give_back(&mut self, now: u64, charge: Option<usize>, at: u64, units: u64) {
        self.pass_time(now);
        let rates = [PARTS, if may_be_rounded(self.limit) { PARTS - SLOWER } else { PARTS }];
        match &mut self.kind {
            // Charges from before the bucket was full do not count. Of the others, at most the tokens that cannot have flowed in since are
            // refunded.
            Kind::TokenBucket { missing, full_at, charges, .. } => {
                if at >= *full_at {
                    let noted = charge.map_or([0; 2], |charge| charges[charge]);
                    let inflow = u128::from(now - at) * u128::from(self.limit.quota().limit());
                    for (i, missing) in missing.iter_mut().enumerate() {
                        let still = u128::from(noted[i].saturating_sub(1).max(units)) * token(self.limit);
                        let still = still.saturating_sub(inflow * rates[i]);
                        *missing = missing.saturating_sub(still.min(u128::from(units) * token(self.limit)));
                    }
                }
            }
            Kind::FixedWindow { charges, .. } | Kind::SlidingLog { charges } => take(charges, at, units),
            Kind::SlidingWindow { before, charges, .. } => {
                take(charges, at, units);
                take(before, at, units);
            }
        }
    }
}

/// Removes units from the charge at the instant `at`.
fn take(charges: &mut [Charge], at: u64, mut units: u64) {
    for charge in charges.iter_mut().filter(|charge| charge.at == at) {
        let taken = units.min(charge.units);
        charge.units -= taken;
        units -= taken;
    }
}
