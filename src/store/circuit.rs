use std::error::Error;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::error::StoreError;

/// When a layer or a client stops to ask a store that fails, and how soon it tries again.
///
/// After a number of failures in a row the circuit is open: for requests that come then the store counts as failed without
/// being asked, so a store that hangs does not cost each of them its deadline. Once in an interval one request is a probe
/// and does ask (the circuit is half open); the first answer closes it. The log has a line for each time that it opens or closes.
///
/// A value of somebody else under one key is no failure of the store, and neither is a
/// [resolver](crate::rate_limit::PolicyResolver) that fails. One that is full goes on to be asked, since it still knows what it has.
///
/// Policies [on trial](crate::rate_limit#trying-a-limit) have a circuit of their own in a layer, with the same settings: where the store fails about these while it
/// decides about those that are enforced, they alone are left uncounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CircuitBreaker {
    failures: u32,
    probe_interval: Duration,
}

impl CircuitBreaker {
    /// Opens after 5 failures in a row and probes every 100 ms.
    #[must_use]
    pub const fn new() -> Self {
        Self { failures: 5, probe_interval: Duration::from_millis(100) }
    }

    /// Never opens: the store is asked for every request.
    #[must_use]
    pub const fn off() -> Self {
        Self { failures: u32::MAX, ..Self::new() }
    }

    /// How many failures in a row open the circuit, at least one. Defaults to 5.
    #[must_use]
    pub const fn failures(self, failures: u32) -> Self {
        Self { failures: if failures == 0 { 1 } else { failures }, ..self }
    }

    /// How often a request may find out whether the store answers again. Defaults to 100 ms.
    #[must_use]
    pub const fn probe_interval(self, probe_interval: Duration) -> Self {
        Self { probe_interval, ..self }
    }
}

impl Default for CircuitBreaker {
    fn default() -> Self {
        Self::new()
    }
}

/// What is told of a store that fails, for counters and the log.
pub(crate) trait CircuitObserver {
    /// A call has failed.
    fn failed(&self);
    fn opened(&self);
    fn closed(&self);
    /// It has answered before.
    fn outage_begins(&self, error: &StoreError);
    /// It has answered for a while.
    fn outage_ends(&self);
}

/// Whether the log has been told that something fails.
#[derive(Debug)]
pub(crate) struct OutageTracker {
    // For how long nothing may fail for it to be over: what fails now and then would fill the log otherwise.
    quiet: Duration,
    lasts: AtomicBool,
    // Looked at only while it lasts.
    last_failure: Mutex<Option<Instant>>,
}

impl OutageTracker {
    /// One that is over when nothing has failed for so long.
    pub(crate) const fn until_quiet_for(quiet: Duration) -> Self {
        Self { quiet, lasts: AtomicBool::new(false), last_failure: Mutex::new(None) }
    }

    /// One of a store.
    pub(crate) const fn of_a_store() -> Self {
        Self::until_quiet_for(RECOVERED)
    }

    /// Notes a failure, and answers whether it is the first.
    pub(crate) fn begins(&self) -> bool {
        *self.last_failure() = Some(Instant::now());
        !self.lasts.swap(true, Ordering::Relaxed)
    }

    /// Notes an answer, and says whether it is the first after the outage.
    pub(crate) fn ends(&self) -> bool {
        self.lasts.load(Ordering::Relaxed)
            && self.last_failure().is_none_or(|failure| failure.elapsed() >= self.quiet)
            && self.lasts.swap(false, Ordering::Relaxed)
    }

    fn last_failure(&self) -> MutexGuard<'_, Option<Instant>> {
        self.last_failure.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The circuit of one layer, and whether the log has been told that the store fails.
#[derive(Debug)]
pub(crate) struct Circuit {
    settings: CircuitBreaker,
    epoch: Instant,
    // Failures since the last answer.
    failures: AtomicU32,
    // While the circuit is open: when the next probe may be sent, in us since the epoch.
    next_probe: AtomicU64,
    outage: OutageTracker,
}

/// How long nothing may fail for an outage of a store to be over.
const RECOVERED: Duration = Duration::from_secs(1);

impl Circuit {
    pub(crate) fn new(settings: CircuitBreaker) -> Self {
        Self {
            settings,
            epoch: Instant::now(),
            failures: AtomicU32::new(0),
            next_probe: AtomicU64::new(0),
            outage: OutageTracker::of_a_store(),
        }
    }

    /// Whether the store has failed too often to be asked but by probes.
    pub(crate) fn is_open(&self) -> bool {
        self.failures.load(Ordering::Relaxed) >= self.settings.failures
    }

    /// In us since the epoch, as `now` is.
    fn next_probe_after(&self, now: u64) -> u64 {
        let interval = u64::try_from(self.settings.probe_interval.as_micros()).unwrap_or(u64::MAX);
        now.saturating_add(interval)
    }

    /// Whether the store may be asked. While the circuit is open this is granted to one request per interval; if that one
    /// is dropped half way, the next interval has another.
    pub(crate) fn admit(&self) -> Result<(), StoreError> {
        if !self.is_open() {
            return Ok(());
        }
        let now = self.epoch.elapsed().as_micros() as u64;
        let due = self.next_probe.load(Ordering::Relaxed);
        let next = self.next_probe_after(now);
        let granted =
            due <= now && self.next_probe.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if granted { Ok(()) } else { Err(StoreError::unavailable(CircuitOpen)) }
    }

    /// When the next probe may be sent, if the circuit is open; `None` is never.
    pub(crate) fn next_probe(&self) -> Option<Instant> {
        self.epoch.checked_add(Duration::from_micros(self.next_probe.load(Ordering::Relaxed)))
    }

    /// Whether the store may be asked something that is no reason to find out whether it answers again.
    pub(crate) fn admit_no_probe(&self) -> Result<(), StoreError> {
        if self.is_open() { Err(StoreError::unavailable(CircuitOpen)) } else { Ok(()) }
    }

    /// Whether the store was not even asked.
    pub(crate) fn is_cause_of(error: &StoreError) -> bool {
        error.source().is_some_and(<dyn Error>::is::<CircuitOpen>)
    }

    /// Notes a failure of the store, but for those that only say that the circuit is open.
    pub(crate) fn failed(&self, watch: &impl CircuitObserver, error: &StoreError) {
        if Self::is_cause_of(error) {
            return;
        }
        // First, so that the log tells why a circuit opens before it tells that it does.
        watch.failed();
        if self.outage.begins() {
            watch.outage_begins(error);
        }
        if error.is_foreign_data() || error.is_out_of_memory() {
            // That is an answer.
            self.close(watch);
        } else {
            let before = self.failures.fetch_add(1, Ordering::Relaxed);
            // Far above any number of failures that opens it, and far below where it would wrap around.
            if before > u32::MAX / 2 {
                self.failures.store(u32::MAX / 2, Ordering::Relaxed);
            }
            if before.wrapping_add(1) == self.settings.failures {
                let next = self.next_probe_after(self.epoch.elapsed().as_micros() as u64);
                self.next_probe.store(next, Ordering::Relaxed);
                watch.opened();
            }
        }
    }

    /// Notes an answer.
    pub(crate) fn answered(&self, watch: &impl CircuitObserver) {
        self.close(watch);
        if self.outage.ends() {
            watch.outage_ends();
        }
    }

    fn close(&self, watch: &impl CircuitObserver) {
        if self.failures.load(Ordering::Relaxed) > 0 {
            let before = self.failures.swap(0, Ordering::Relaxed);
            if before >= self.settings.failures {
                watch.closed();
            }
        }
    }
}

/// The store was not asked, because it has failed too often.
#[derive(Debug)]
struct CircuitOpen;

impl fmt::Display for CircuitOpen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the circuit is open after repeated failures")
    }
}

impl Error for CircuitOpen {}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nobody;

    impl CircuitObserver for Nobody {
        fn failed(&self) {}
        fn opened(&self) {}
        fn closed(&self) {}
        fn outage_begins(&self, _: &StoreError) {}
        fn outage_ends(&self) {}
    }

    #[tokio::test(start_paused = true)]
    async fn an_open_circuit_lets_one_probe_through_in_an_interval() {
        let circuit = Circuit::new(CircuitBreaker::new().failures(3).probe_interval(Duration::from_millis(50)));
        let fail = || circuit.failed(&Nobody, &StoreError::timeout());
        for _ in 0..3 {
            assert!(circuit.admit().is_ok());
            fail();
        }
        assert!(circuit.admit().is_err());
        for _ in 0..3 {
            tokio::time::advance(Duration::from_millis(51)).await;
            // The probe, and everybody else while it is under way.
            assert!(circuit.admit().is_ok());
            assert!(circuit.admit().is_err());
        }
        circuit.answered(&Nobody);
        for _ in 0..10 {
            assert!(circuit.admit().is_ok());
        }
        fail();
        assert!(circuit.admit().is_ok(), "one failure does not open it");
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_in_between_keeps_it_closed() {
        let circuit = Circuit::new(CircuitBreaker::new().failures(2));
        for _ in 0..10 {
            circuit.failed(&Nobody, &StoreError::timeout());
            circuit.answered(&Nobody);
            assert!(circuit.admit().is_ok());
        }
        let never = Circuit::new(CircuitBreaker::off());
        for _ in 0..10_000 {
            never.failed(&Nobody, &StoreError::timeout());
            assert!(never.admit().is_ok());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_that_meets_what_somebody_wrote_has_an_answer() {
        let circuit = Circuit::new(CircuitBreaker::new().failures(1));
        circuit.failed(&Nobody, &StoreError::timeout());
        tokio::time::advance(Duration::from_millis(101)).await;
        assert!(circuit.admit().is_ok());
        circuit.failed(&Nobody, &StoreError::foreign_data("WRONGTYPE"));
        assert!(circuit.admit().is_ok() && circuit.admit().is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_interval_of_any_length_will_do() {
        tokio::time::advance(Duration::from_secs(1)).await;
        let circuit = Circuit::new(CircuitBreaker::new().failures(1).probe_interval(Duration::MAX));
        tokio::time::advance(Duration::from_secs(1)).await;
        circuit.failed(&Nobody, &StoreError::timeout());
        tokio::time::advance(Duration::from_secs(1_000_000_000)).await;
        assert!(circuit.admit().is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn what_somebody_wrote_under_one_key_opens_nothing() {
        let circuit = Circuit::new(CircuitBreaker::new());
        for _ in 0..100 {
            circuit.failed(&Nobody, &StoreError::foreign_data("WRONGTYPE"));
        }
        assert!(circuit.admit().is_ok());
    }
}
