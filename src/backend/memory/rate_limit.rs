//! The algorithms in plain Rust: what the scripts in `lua/` must do, decision for decision.

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::time::Duration;

use super::MemoryBackend;
use crate::error::StoreError;
use crate::key::Key;
use crate::rate_limit::{Algorithm, Decision, Policy, Quota, RateLimitStore};

/// What was counted for one subject.
pub(super) enum Count {
    FixedWindow(FixedWindow),
    // Boxed, so that the small and frequent counts stay small.
    SlidingLog(Box<SlidingLog>),
}

/// Counted in ticks of a millisecond, as the expiry of a key is in Redis.
pub(super) struct FixedWindow {
    // The first tick that is not part of it.
    ends_ms: u64,
    used: u32,
}

/// Requests in the order they came, the oldest first.
pub(super) struct SlidingLog {
    requests: VecDeque<(u64, u32)>,
    used: u64,
    window_us: u64,
}

/// One request against one quota, at one instant.
#[derive(Clone, Copy)]
struct Ask {
    quota: Quota,
    cost: u32,
    peek: bool,
    now_us: u64,
}

impl Ask {
    /// What an admitted request is charged.
    fn charge(self) -> u32 {
        if self.peek { 0 } else { self.cost }
    }
}

impl Count {
    fn new(policy: &Policy, ask: Ask) -> Self {
        match policy.limit().algorithm() {
            Algorithm::FixedWindow => {
                Self::FixedWindow(FixedWindow { ends_ms: ask.now_us / 1_000 + ask.quota.window_ms(), used: 0 })
            }
            Algorithm::SlidingLog => {
                let window_us = ask.quota.window_us();
                Self::SlidingLog(Box::new(SlidingLog { requests: VecDeque::new(), used: 0, window_us }))
            }
        }
    }

    pub(super) fn expires_us(&self) -> u64 {
        match self {
            Self::FixedWindow(window) => window.ends_ms * 1_000,
            Self::SlidingLog(log) => log.requests.back().map_or(0, |(time, _)| time + log.window_us),
        }
    }

    /// The used share of the quota, in 1/65,536: what would be lost by forgetting it. At least one.
    pub(super) fn value(&self, policy: &Policy) -> u64 {
        let used = match self {
            Self::FixedWindow(window) => u64::from(window.used),
            Self::SlidingLog(log) => log.used,
        };
        (used << 16) / u64::from(policy.limit().quota().limit()).max(1) + 1
    }

    /// How much room the count takes, in units of a small one.
    pub(super) fn weight(&self) -> usize {
        match self {
            Self::FixedWindow(_) => 1,
            Self::SlidingLog(log) => 1 + log.requests.capacity() / 8,
        }
    }

    fn decide(&mut self, ask: Ask) -> Decision {
        match self {
            Self::FixedWindow(window) => window.decide(ask),
            Self::SlidingLog(log) => log.decide(ask),
        }
    }
}

impl FixedWindow {
    fn decide(&mut self, ask: Ask) -> Decision {
        let limit = ask.quota.limit();
        let until_end = Duration::from_millis(self.ends_ms - ask.now_us / 1_000);
        let left = limit.saturating_sub(self.used);
        if ask.cost > left {
            return Decision::limited(limit, left, until_end, until_end);
        }
        self.used += ask.charge();
        let reset = if self.used > 0 { until_end } else { Duration::ZERO };
        Decision::allowed(limit, left - ask.charge(), reset)
    }
}

impl SlidingLog {
    fn decide(&mut self, ask: Ask) -> Decision {
        while let Some(&(time, cost)) = self.requests.front()
            && time + self.window_us <= ask.now_us
        {
            self.requests.pop_front();
            self.used -= u64::from(cost);
        }
        let limit = ask.quota.limit();
        let left = u64::from(limit).saturating_sub(self.used) as u32;
        let window_us = self.window_us;
        let until_gone = |time: u64| Duration::from_micros(time + window_us - ask.now_us);

        if ask.cost > left {
            // Wait for as many of the oldest to go as make room.
            let mut still_used = self.used;
            let mut retry = Duration::ZERO;
            for &(time, cost) in &self.requests {
                if still_used + u64::from(ask.cost) <= u64::from(limit) {
                    break;
                }
                still_used -= u64::from(cost);
                retry = until_gone(time);
            }
            return Decision::limited(limit, left, retry, self.reset(until_gone));
        }

        if ask.charge() > 0 {
            self.make_room(limit);
            self.requests.push_back((ask.now_us, ask.cost));
            self.used += u64::from(ask.cost);
        }
        Decision::allowed(limit, left - ask.charge(), self.reset(until_gone))
    }

    /// Room for one more, but never for more than the quota can fill, and not for ever for what was a burst long ago.
    fn make_room(&mut self, limit: u32) {
        let (len, capacity) = (self.requests.len(), self.requests.capacity());
        if len == capacity {
            self.requests.reserve_exact(len.max(4).min(limit as usize - len));
        } else if len < capacity / 4 && capacity > 64 {
            self.requests.shrink_to(capacity / 2);
        }
    }

    fn reset(&self, until_gone: impl Fn(u64) -> Duration) -> Duration {
        self.requests.front().map_or(Duration::ZERO, |&(time, _)| until_gone(time))
    }
}

impl MemoryBackend {
    fn decide(&self, policy: &Policy, key: &Key, cost: u32, peek: bool) -> Decision {
        let (hash, home, mut shard) = self.locate(key);
        let now_us = self.now_us();
        let ask = Ask { quota: policy.limit().quota(), cost, peek, now_us };
        let decision;
        if let Some(index) = shard.find(hash, policy, key, now_us) {
            let count = shard.count_mut(index);
            let before = count.weight();
            decision = count.decide(ask);
            let after = count.weight();
            match after.cmp(&before) {
                Ordering::Equal => return decision,
                Ordering::Less => self.shrank(before - after),
                Ordering::Greater => self.grew(&mut shard, index, after - before, now_us),
            }
        } else {
            let mut count = Count::new(policy, ask);
            decision = count.decide(ask);
            if !decision.is_allowed() || ask.charge() == 0 {
                return decision;
            }
            let added = count.weight();
            let (index, removed) = shard.put(hash, policy, key, count, now_us);
            self.shrank(removed);
            self.grew(&mut shard, index, added, now_us);
        }
        drop(shard);
        if self.overweight() > 0 {
            self.make_room(home, now_us);
        }
        decision
    }
}

// `async` although nothing waits: a call that is never polled must not charge.
impl RateLimitStore for MemoryBackend {
    async fn check(&self, policy: &Policy, key: &Key, cost: u32) -> Result<Decision, StoreError> {
        Ok(self.decide(policy, key, cost, false))
    }

    async fn peek(&self, policy: &Policy, key: &Key, cost: u32) -> Result<Decision, StoreError> {
        Ok(self.decide(policy, key, cost, true))
    }

    async fn reset(&self, policy: &Policy, key: &Key) -> Result<(), StoreError> {
        let (hash, _, mut shard) = self.locate(key);
        self.shrank(shard.remove(hash, policy, key));
        Ok(())
    }
}
