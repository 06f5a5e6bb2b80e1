//! The counts of one key. Each decision must equal that of the scripts in `lua/`.

use std::collections::VecDeque;
use std::time::Duration;

use smallvec::SmallVec;

use crate::rate_limit::algorithm::{Count, LimitParams, carry_over, receipt};
use crate::rate_limit::{Algorithm, Decision, LimitStatus, Policy, QuotaChange, Receipt};

/// The counts of one key.
#[derive(Clone)]
pub(super) struct Counts {
    // The policy that the counts were made under. The next request may have other limits.
    policy: Policy,
    // The time of the last update.
    last: u64,
    blocked_until: u64,
    limits: SmallVec<[LimitCount; 1]>,
}

#[derive(Clone)]
enum LimitCount {
    Plain(Count),
    // Boxed to keep the small and frequent counts small.
    Log(Box<SlidingLog>),
}

/// Requests in order of arrival, the oldest first. Each has a cost above 0.
#[derive(Clone, Default)]
pub(super) struct SlidingLog {
    requests: VecDeque<(u64, u32)>,
    used: u64,
}

impl Counts {
    pub(super) fn new(policy: &Policy, now: u64) -> Self {
        let limits = policy.params().iter().map(|params| LimitCount::new(params.algorithm, now)).collect();
        Self { policy: policy.clone(), last: now, blocked_until: 0, limits }
    }

    /// The counts of a policy with a single limit.
    pub(super) fn of_one(policy: &Policy, last: u64, count: Count) -> Self {
        let limits = SmallVec::from_buf([LimitCount::Plain(count)]);
        Self { policy: policy.clone(), last, blocked_until: 0, limits }
    }

    /// The last update and the count of the only limit. `None` if there are more limits, a log, or a block that lasts beyond `now`.
    pub(super) fn as_one(&self, now: u64) -> Option<(u64, Count)> {
        match self.limits.as_slice() {
            [LimitCount::Plain(count)] if self.blocked_until <= now => Some((self.last, *count)),
            _ => None,
        }
    }

    pub(super) const fn policy(&self) -> &Policy {
        &self.policy
    }

    /// When the counts expire.
    pub(super) fn expires_us(&self) -> u64 {
        let expires = |(limit, params): (&LimitCount, &LimitParams)| match limit {
            LimitCount::Plain(count) => count.expires(params, self.last),
            LimitCount::Log(log) => log.requests.back().map_or(0, |(time, _)| time + params.span),
        };
        let limits = self.limits.iter().zip(self.policy.params()).map(expires);
        limits.max().unwrap_or(0).max(self.blocked_until)
    }

    /// What an eviction of the counts would lose: the used share of the fullest limit, in units of 1/65,536, plus one. Much more for a
    /// blocked key.
    pub(super) fn value(&self, now: u64) -> u64 {
        let now = now.max(self.last);
        let share = |(limit, params): (&LimitCount, &LimitParams)| {
            let used = match limit {
                LimitCount::Plain(count) => count.used_at(params, self.last, now),
                LimitCount::Log(log) => log.used,
            };
            share_of(used, params)
        };
        let fullest = self.limits.iter().zip(self.policy.params()).map(share).max().unwrap_or(0);
        fullest + 1 + (u64::from(self.blocked_until > now) << 20)
    }

    /// The approximate memory use, in units of a single small count.
    pub(super) fn weight(&self) -> usize {
        let logs = self.limits.iter().map(|limit| match limit {
            LimitCount::Plain(_) => 0,
            LimitCount::Log(log) => log.requests.capacity() / 8,
        });
        1 + self.limits.len() / 2 + logs.sum::<usize>()
    }

    /// Advances all limits to `now`.
    fn bring_up_to(&mut self, now: u64) {
        // `now` may be earlier if tests with different clocks share a backend.
        let now = now.max(self.last);
        for (limit, params) in self.limits.iter_mut().zip(self.policy.params()) {
            match limit {
                LimitCount::Plain(count) => count.advance(params, self.last, now),
                LimitCount::Log(log) => log.advance(params, now),
            }
        }
        self.last = now;
    }

    fn carry_over_to(&mut self, policy: &Policy, now: u64) {
        let now = now.max(self.last);
        let (old, new, change) = (self.policy.clone(), policy.params(), policy.quota_change());
        // Until now, the old rates apply.
        for (limit, params) in self.limits.iter_mut().zip(old.params()) {
            if let LimitCount::Plain(count) = limit {
                count.advance(params, self.last, now);
            }
        }
        self.last = now;
        let counts = |index: usize| match self.limits.get(index) {
            Some(LimitCount::Plain(count)) => Some(*count),
            Some(LimitCount::Log(_)) | None => None,
        };
        let carried: SmallVec<[Option<Count>; 4]> = carry_over(old.params(), counts, new, change).collect();
        let mut logs: Vec<_> = std::mem::take(&mut self.limits).into_iter().zip(old.params()).collect();
        let mut take_log = |params: &LimitParams| {
            let same = |(limit, old): &(LimitCount, &LimitParams)| {
                matches!(limit, LimitCount::Log(_)) && old.span == params.span
            };
            match logs.iter().position(same).map(|index| logs.remove(index)) {
                Some((LimitCount::Log(log), old))
                    if old.capacity == params.capacity || change != QuotaChange::Reset =>
                {
                    log
                }
                _ => Box::default(),
            }
        };
        let limits = new.iter().zip(carried).map(|(params, carried)| match (params.algorithm, carried) {
            (Algorithm::SlidingLog, _) => LimitCount::Log(take_log(params)),
            (_, Some(count)) => LimitCount::Plain(count),
            (algorithm, None) => LimitCount::new(algorithm, now),
        });
        self.limits = limits.collect();
        self.policy = policy.clone();
    }

    /// The state of all limits, and how long a request of `cost` has to wait.
    fn decide(&self, cost: u64) -> Decision {
        let status = |(limit, params): (&LimitCount, &LimitParams)| match limit {
            LimitCount::Plain(count) => count.status(params, self.last, cost),
            LimitCount::Log(log) => log.status(params, self.last, cost),
        };
        let decision = match (self.limits.as_slice(), self.policy.params()) {
            ([limit], [params]) => Decision::of_one(status((limit, params)), None),
            (limits, params) => Decision::new(limits.iter().zip(params).map(status)),
        };
        match self.blocked_until.checked_sub(self.last) {
            None | Some(0) => decision,
            Some(left) => decision.blocked(Duration::from_micros(left)),
        }
    }

    fn charge(&mut self, units: u64) {
        for (limit, params) in self.limits.iter_mut().zip(self.policy.params()) {
            match limit {
                LimitCount::Plain(count) => count.charge(params, self.last, units),
                LimitCount::Log(log) => log.charge(params, self.last, units),
            }
        }
    }

    fn refund(&mut self, receipt: Receipt, units: u64) {
        let (at, mut buckets) = (receipt.as_micros(), receipt.missing());
        for (limit, params) in self.limits.iter_mut().zip(self.policy.params()) {
            match limit {
                LimitCount::Plain(count) => {
                    let is_bucket = params.algorithm == Algorithm::TokenBucket;
                    let missing = if is_bucket { buckets.next().unwrap_or(0) } else { 0 };
                    count.refund(params, self.last, at, missing, units);
                }
                LimitCount::Log(log) => log.refund(at, units),
            }
        }
    }
}

/// The used share of a limit, in 1/65,536.
pub(super) fn share_of(used: u64, params: &LimitParams) -> u64 {
    let share = (u128::from(used) << 16) / u128::from(params.capacity.max(1));
    u64::try_from(share).unwrap_or(u64::MAX)
}

impl LimitCount {
    fn new(algorithm: Algorithm, now: u64) -> Self {
        Count::new(algorithm, now).map_or_else(|| Self::Log(Box::default()), Self::Plain)
    }
}

impl SlidingLog {
    fn advance(&mut self, params: &LimitParams, now: u64) {
        while let Some(&(time, cost)) = self.requests.front()
            && time + params.span <= now
        {
            self.requests.pop_front();
            self.used -= u64::from(cost);
        }
    }

    fn status(&self, params: &LimitParams, now: u64, cost: u64) -> LimitStatus {
        let capacity = params.capacity;
        let until_gone = |time: u64| Duration::from_micros(time + params.span - now);
        let mut retry = Duration::ZERO;
        if cost > 0 && self.used.saturating_add(cost) > capacity {
            // Wait until enough of the oldest requests have left the window.
            let mut still_used = self.used;
            for &(time, units) in &self.requests {
                if still_used.saturating_add(cost) <= capacity {
                    break;
                }
                still_used -= u64::from(units);
                retry = until_gone(time);
            }
        }
        // With a debt, units become available only after the usage has fallen below the capacity.
        let mut still_used = self.used;
        let mut reset = Duration::ZERO;
        for &(time, units) in &self.requests {
            still_used -= u64::from(units);
            reset = until_gone(time);
            if still_used < capacity {
                break;
            }
        }
        LimitStatus::new(capacity, capacity.saturating_sub(self.used), retry, reset)
    }

    fn charge(&mut self, params: &LimitParams, now: u64, units: u64) {
        let max = (2 * params.capacity).saturating_sub(self.used);
        // It fits into a `u32`: see `Quota::MAX_SLIDING_LOG`.
        let units = units.min(max) as u32;
        if units > 0 {
            self.make_room(params.capacity);
            self.requests.push_back((now, units));
            self.used += u64::from(units);
        }
    }

    /// Reserves space for at least one more request: doubles the space up to the quota, and adds one request at a time beyond the quota.
    /// Shrinks the log when less than a quarter of a large space is used.
    fn make_room(&mut self, limit: u64) {
        let (len, capacity) = (self.requests.len(), self.requests.capacity());
        if len == capacity {
            self.requests.reserve_exact(len.max(4).min((limit as usize).saturating_sub(len).max(1)));
        } else if len < capacity / 4 && capacity > 64 {
            self.requests.shrink_to(capacity / 2);
        }
    }

    fn refund(&mut self, at: u64, units: u64) {
        let mut left = units;
        let mut index = self.requests.partition_point(|(time, _)| *time < at);
        while left > 0
            && let Some((time, cost)) = self.requests.get_mut(index)
            && *time == at
        {
            let given_back = left.min((*cost).into());
            *cost -= given_back as u32;
            left -= given_back;
            self.used -= given_back;
            if *cost == 0 {
                self.requests.remove(index);
            } else {
                index += 1;
            }
        }
    }
}

/// What to do with the counts of one key.
#[derive(Clone, Copy)]
pub(super) enum Verb {
    Check,
    Peek,
    Settle(Receipt, i64),
    BlockUntil(u64),
}

impl Counts {
    /// Executes `verb`. Returns the decision, and whether the counts changed.
    pub(super) fn act(&mut self, policy: &Policy, cost: u64, verb: Verb, now: u64) -> (Decision, bool) {
        if let Verb::BlockUntil(until) = verb {
            self.blocked_until = until;
            return (self.decide(0), true);
        }
        if !self.are_under(policy) && self.is_carried_over_to(policy, verb, now) {
            self.carry_over_to(policy, now);
        }
        self.bring_up_to(now);
        let changed = match verb {
            Verb::Settle(receipt, change) => {
                let units = change.unsigned_abs();
                if change < 0 {
                    self.refund(receipt, units);
                } else {
                    self.charge(units);
                }
                change != 0
            }
            Verb::Check | Verb::Peek | Verb::BlockUntil(_) => false,
        };
        if !matches!(verb, Verb::Check) || cost == 0 || !self.fits(cost) {
            return (self.decide(cost), changed);
        }
        self.charge(cost);
        // The state after the charge. A cost of 0 violates no limit.
        let decision = self.decide(0);
        let receipt = receipt(self.last, self.policy.params(), decision.limits());
        (decision.with_receipt(receipt), true)
    }

    /// Whether `verb` counts under the limits of `policy`, and not under the existing ones.
    // Separate and cold, since limits hardly ever change.
    #[cold]
    fn is_carried_over_to(&self, policy: &Policy, verb: Verb, now: u64) -> bool {
        let Verb::Settle(receipt, change) = verb else { return true };
        if change <= 0 {
            return false;
        }
        // Without a receipt, this is a new charge and not a correction.
        if receipt.as_micros() == 0 {
            return true;
        }
        // The correction may come from an older policy with a smaller quota. Do not cut the counts to that quota.
        let mut capacities =
            self.policy.params().iter().zip(policy.params()).map(|(old, new)| (old.capacity, new.capacity));
        if policy.quota_change() != QuotaChange::Reset && capacities.all(|(old, new)| new >= old) {
            return true;
        }
        let now = now.max(self.last);
        self.limits.iter().zip(self.policy.params()).all(|(limit, params)| match limit {
            LimitCount::Plain(count) => count.used_at(params, self.last, now) == 0,
            LimitCount::Log(log) => log.requests.back().is_none_or(|(time, _)| time + params.span <= now),
        })
    }

    fn fits(&self, cost: u64) -> bool {
        let fits = |(limit, params): (&LimitCount, &LimitParams)| match limit {
            LimitCount::Plain(count) => count.fits(params, self.last, cost),
            LimitCount::Log(log) => log.used.saturating_add(cost) <= params.capacity,
        };
        self.blocked_until <= self.last && self.limits.iter().zip(self.policy.params()).all(fits)
    }

    /// Switches to an equal policy that was created later, so that the next check takes the fast path.
    pub(super) fn adopt(&mut self, policy: &Policy) {
        if !self.policy.is_same_as(policy) {
            self.policy = policy.clone();
        }
    }

    /// Whether the counts were made under the limits of `policy`.
    pub(super) fn are_under(&self, policy: &Policy) -> bool {
        self.policy.is_same_as(policy) || self.policy.params() == policy.params()
    }
}
