//! Counts which units were admitted in which window, by the clock of the server, which is the clock of this machine.
//!
//! The receipt of each charge and the time left at that moment give the end of its window, exact to the microsecond. Each admission was
//! decided between two known instants. A unit is *late* if the first of the two instants is past the end of the window in which it was
//! charged. A window is *overfull* if more than the quota lie in it with both instants.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use tollgate::rate_limit::store::RateLimitStore;
use tollgate::rate_limit::{Decision, LimitStatus, Receipt};
use tollgate::{Key, Policy, StoreError};

/// An event, with times in microseconds of the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The server charged a unit at `at`, in a window that ends at `window_ends`.
    Charge { at: u64, window_ends: u64 },
    /// A unit that was charged at `charged` was admitted between `after` and `before`.
    Admission { charged: u64, after: u64, before: u64 },
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Charge { at, window_ends } => write!(f, "charge {at} {window_ends}"),
            Self::Admission { charged, after, before } => write!(f, "admission {charged} {after} {before}"),
        }
    }
}

impl FromStr for Event {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let (what, numbers) = line.split_once(' ').ok_or(line)?;
        let numbers: Vec<u64> = numbers.split(' ').map_while(|number| number.parse().ok()).collect();
        match (what, numbers.as_slice()) {
            ("charge", &[at, window_ends]) => Ok(Self::Charge { at, window_ends }),
            ("admission", &[charged, after, before]) => Ok(Self::Admission { charged, after, before }),
            _ => Err(line.to_owned()),
        }
    }
}

/// The totals of all windows.
#[derive(Clone, Copy, Debug, Default)]
pub struct Windows {
    pub opened: u64,
    pub admitted: u64,
    /// Units beyond the quota of the window they were admitted in.
    pub over_admitted: u64,
    /// Units beyond the quota of the window they were charged in.
    pub over_charged: u64,
}

impl Windows {
    pub fn of(events: &[Event], quota: u64, window: Duration) -> Self {
        let mut windows = Self::default();
        let window = window.as_micros() as u64;
        // By the end of each window: the units charged in it, and the units that were certainly admitted in it.
        let mut counts: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
        for event in events {
            if let Event::Charge { window_ends, .. } = event {
                counts.entry(*window_ends).or_default();
            }
        }
        for event in events {
            let Event::Admission { charged, after, before } = *event else { continue };
            windows.admitted += 1;
            let (ends, count) = counts.range_mut(charged + 1..).next().expect("each receipt is from a charge");
            assert!(charged + window >= *ends, "the receipt {charged} is from no known window");
            count.0 += 1;
            windows.over_admitted += u64::from(after >= *ends);
            if let Some((ends, count)) = counts.range_mut(before + 1..).next()
                && after + window >= *ends
            {
                count.1 += 1;
            }
        }
        windows.opened = counts.len() as u64;
        windows.over_charged = counts.values().map(|(charged, _)| charged.saturating_sub(quota)).sum();
        windows.over_admitted += counts.values().map(|(_, admitted)| admitted.saturating_sub(quota)).sum::<u64>();
        windows
    }

    /// The admitted share of the units that could have been admitted.
    pub fn used(&self, quota: u64) -> f64 {
        self.admitted as f64 / (self.opened * quota) as f64
    }
}

pub fn now_us() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.expect("the clock is past 1970").as_micros() as u64
}

/// A store that records its charges. It supports policies with one limit.
#[derive(Clone, Debug)]
pub struct Recorder<S> {
    store: S,
    charges: Arc<Mutex<Vec<Event>>>,
}

impl<S> Recorder<S> {
    pub fn new(store: S) -> Self {
        Self { store, charges: Arc::default() }
    }

    pub fn take(&self) -> Vec<Event> {
        std::mem::take(&mut *self.charges.lock().expect("not poisoned"))
    }
}

impl<S: RateLimitStore + Sync> RateLimitStore for Recorder<S> {
    async fn check(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, StoreError> {
        let decision = self.store.check(policy, key, cost).await?;
        if let Some(receipt) = decision.receipt() {
            let at = receipt.as_micros();
            let left = decision.limits().first().map(LimitStatus::reset_after).unwrap_or_default();
            let charge = Event::Charge { at, window_ends: at + left.as_micros() as u64 };
            self.charges.lock().expect("not poisoned").push(charge);
        }
        Ok(decision)
    }

    async fn peek(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, StoreError> {
        self.store.peek(policy, key, cost).await
    }

    async fn settle(&self, policy: &Policy, key: &Key, receipt: Receipt, change: i64) -> Result<(), StoreError> {
        self.store.settle(policy, key, receipt, change).await
    }

    async fn block(&self, policy: &Policy, key: &Key, time: Duration) -> Result<(), StoreError> {
        self.store.block(policy, key, time).await
    }

    async fn reset(&self, policy: &Policy, key: &Key) -> Result<(), StoreError> {
        self.store.reset(policy, key).await
    }
}
