use std::error::Error;
use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::deadline::{Deadline, require_nonzero_deadline};
use crate::error::StoreError;

/// When a layer or a client stops calling a failing store, and how often it probes the store.
///
/// After a number of failures in a row the circuit opens. While it is open, store calls fail at once. Once per interval one request is a
/// probe, which does call the store (the circuit is half open). So a store that hangs delays one request per interval by the deadline, and
/// not every request. The first reply closes the circuit. The log has a line whenever the circuit opens or closes.
///
/// Foreign data under a key does not open the circuit, and neither does a failing [resolver](crate::rate_limit::PolicyResolver). A store
/// that is out of memory does not open the circuit either, because it can still read.
///
/// [Shadow policies](crate::rate_limit#trying-a-limit) of a layer have a separate circuit with the same settings. If the store fails only
/// for them, they are not counted, and the enforced policies still are.
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

    /// Never opens: every request calls the store.
    #[must_use]
    pub const fn off() -> Self {
        Self { failures: u32::MAX, ..Self::new() }
    }

    /// Sets how many failures in a row open the circuit, at least one. Defaults to 5.
    #[must_use]
    pub const fn failures(self, failures: u32) -> Self {
        Self { failures: if failures == 0 { 1 } else { failures }, ..self }
    }

    /// Sets the interval between probes while the circuit is open. Defaults to 100 ms.
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

/// Receives the events of a circuit, for metrics and the log.
pub(crate) trait CircuitObserver {
    /// A call has failed.
    fn failed(&self) {}
    fn opened(&self) {}
    fn closed(&self) {}
    /// The first failure after a period without failures.
    fn outage_begins(&self, _: &StoreError) {}
    /// The reply that ends an outage: the store has not failed for a while.
    fn outage_ends(&self) {}
}

/// Ignores all events.
impl CircuitObserver for () {}

/// Implements [`CircuitObserver`] for the client of a capability: it counts the events in the client's metrics, and logs them with the name
/// of the client in a field.
///
/// A macro, since `tracing` needs the name of a field and the message at compile time.
macro_rules! observe_circuit {
    ($capability:literal, $type:ty, |$client:ident| $metrics:expr, $field:ident = $($name:tt)+) => {
        impl $crate::store::circuit::CircuitObserver for $type {
            fn failed(&self) {
                let $client = self;
                $metrics.store_failed();
            }

            fn opened(&self) {
                let $client = self;
                $metrics.circuit(true);
                tracing::warn!($field = $($name)+, concat!($capability, " circuit opens: only probes call the store"));
            }

            fn closed(&self) {
                let $client = self;
                $metrics.circuit(false);
                tracing::info!($field = $($name)+, concat!($capability, " circuit closes: all calls reach the store"));
            }

            fn outage_begins(&self, error: &$crate::error::StoreError) {
                let $client = self;
                let cause = ::std::error::Error::source(error).map(tracing::field::display);
                tracing::warn!($field = $($name)+, %error, cause, concat!($capability, " store fails"));
            }

            fn outage_ends(&self) {
                let $client = self;
                tracing::info!($field = $($name)+, concat!($capability, " store answers again"));
            }
        }
    };
}

pub(crate) use observe_circuit;

/// Whether an outage is in progress and logged.
#[derive(Debug)]
pub(crate) struct OutageTracker {
    // An outage ends after this time without failures. Occasional failures would fill the log otherwise.
    quiet: Duration,
    is_active: AtomicBool,
    // Read only during an outage.
    last_failure: Mutex<Option<Instant>>,
}

impl OutageTracker {
    /// Creates a tracker whose outages end after this time without failures.
    pub(crate) const fn until_quiet_for(quiet: Duration) -> Self {
        Self { quiet, is_active: AtomicBool::new(false), last_failure: Mutex::new(None) }
    }

    /// Creates a tracker for a store.
    pub(crate) const fn for_store() -> Self {
        Self::until_quiet_for(STORE_QUIET)
    }

    /// Records a failure. Returns true if it begins an outage.
    pub(crate) fn record_failure(&self) -> bool {
        *self.last_failure() = Some(Instant::now());
        !self.is_active.swap(true, Ordering::Relaxed)
    }

    /// Records a success. Returns true if it ends an outage.
    pub(crate) fn record_success(&self) -> bool {
        self.is_active.load(Ordering::Relaxed)
            && self.last_failure().is_none_or(|failure| failure.elapsed() >= self.quiet)
            && self.is_active.swap(false, Ordering::Relaxed)
    }

    fn last_failure(&self) -> MutexGuard<'_, Option<Instant>> {
        self.last_failure.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The circuit of a layer or client, with the tracker of its store's outages.
#[derive(Debug)]
pub(crate) struct Circuit {
    settings: CircuitBreaker,
    epoch: Instant,
    // Failures since the last reply.
    failures: AtomicU32,
    // The time of the next probe while the circuit is open, in us since the epoch.
    next_probe: AtomicU64,
    outage: OutageTracker,
}

/// An outage of a store ends after this time without failures.
const STORE_QUIET: Duration = Duration::from_secs(1);

impl Circuit {
    pub(crate) fn new(settings: CircuitBreaker) -> Self {
        Self {
            settings,
            epoch: Instant::now(),
            failures: AtomicU32::new(0),
            next_probe: AtomicU64::new(0),
            outage: OutageTracker::for_store(),
        }
    }

    /// Whether only probes may call the store.
    pub(crate) fn is_open(&self) -> bool {
        self.failures.load(Ordering::Relaxed) >= self.settings.failures
    }

    /// The time of the probe after `now`, both in us since the epoch.
    fn next_probe_after(&self, now: u64) -> u64 {
        let interval = u64::try_from(self.settings.probe_interval.as_micros()).unwrap_or(u64::MAX);
        now.saturating_add(interval)
    }

    /// Whether a request may call the store. While the circuit is open, one request per interval may. If it is cancelled, another one may in
    /// the next interval.
    pub(crate) fn admit(&self) -> Result<(), StoreError> {
        if !self.is_open() {
            return Ok(());
        }
        let now = self.epoch.elapsed().as_micros() as u64;
        let due = self.next_probe.load(Ordering::Relaxed);
        let next = self.next_probe_after(now);
        let is_probe =
            due <= now && self.next_probe.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if is_probe { Ok(()) } else { Err(StoreError::unavailable(CircuitOpen)) }
    }

    /// The time of the next probe while the circuit is open; `None` for never.
    pub(crate) fn next_probe(&self) -> Option<Instant> {
        self.epoch.checked_add(Duration::from_micros(self.next_probe.load(Ordering::Relaxed)))
    }

    /// Like [`admit`](Self::admit), for calls that must not be probes.
    pub(crate) fn admit_no_probe(&self) -> Result<(), StoreError> {
        if self.is_open() { Err(StoreError::unavailable(CircuitOpen)) } else { Ok(()) }
    }

    /// Whether a call failed because the circuit was open.
    pub(crate) fn is_cause_of(error: &StoreError) -> bool {
        error.source().is_some_and(<dyn Error>::is::<CircuitOpen>)
    }

    /// Makes a call within the deadline, unless the circuit is open.
    pub(crate) async fn call<T>(
        &self,
        observer: &impl CircuitObserver,
        deadline: Duration,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        self.admit()?;
        self.call_always(observer, deadline, call).await
    }

    /// Makes a call within the deadline, also while the circuit is open.
    pub(crate) async fn call_always<T>(
        &self,
        observer: &impl CircuitObserver,
        deadline: Duration,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        require_nonzero_deadline(deadline)?;
        let result = Deadline::new(call, deadline).await;
        self.record(observer, &result);
        result
    }

    /// Records the result of a call.
    pub(crate) fn record<T>(&self, observer: &impl CircuitObserver, result: &Result<T, StoreError>) {
        match result {
            Ok(_) => self.answered(observer),
            Err(error) => self.failed(observer, error),
        }
    }

    /// Records a failure of the store. Errors of calls that the open circuit refused do not count.
    pub(crate) fn failed(&self, observer: &impl CircuitObserver, error: &StoreError) {
        if Self::is_cause_of(error) {
            return;
        }
        // Log the failure before the opening that it causes.
        observer.failed();
        if self.outage.record_failure() {
            observer.outage_begins(error);
        }
        if error.is_foreign_data() || error.is_out_of_memory() {
            // The store has replied.
            self.close(observer);
        } else {
            let before = self.failures.fetch_add(1, Ordering::Relaxed);
            // Stay far below the overflow. A threshold above this bound, as of `CircuitBreaker::off`, is never reached.
            if before > u32::MAX / 2 {
                self.failures.store(u32::MAX / 2, Ordering::Relaxed);
            }
            if before.wrapping_add(1) == self.settings.failures {
                let next = self.next_probe_after(self.epoch.elapsed().as_micros() as u64);
                self.next_probe.store(next, Ordering::Relaxed);
                observer.opened();
            }
        }
    }

    /// Records a reply of the store.
    pub(crate) fn answered(&self, observer: &impl CircuitObserver) {
        self.close(observer);
        if self.outage.record_success() {
            observer.outage_ends();
        }
    }

    fn close(&self, observer: &impl CircuitObserver) {
        if self.failures.load(Ordering::Relaxed) > 0 {
            let before = self.failures.swap(0, Ordering::Relaxed);
            if before >= self.settings.failures {
                observer.closed();
            }
        }
    }
}

/// The store was not called, because it has failed too often.
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

    #[tokio::test(start_paused = true)]
    async fn open_circuit_admits_one_probe_per_interval() {
        let circuit = Circuit::new(CircuitBreaker::new().failures(3).probe_interval(Duration::from_millis(50)));
        let fail = || circuit.failed(&(), &StoreError::timeout());
        for _ in 0..3 {
            assert!(circuit.admit().is_ok());
            fail();
        }
        assert!(circuit.admit().is_err());
        for _ in 0..3 {
            tokio::time::advance(Duration::from_millis(51)).await;
            // One probe is admitted, and no other call until the next interval.
            assert!(circuit.admit().is_ok());
            assert!(circuit.admit().is_err());
        }
        circuit.answered(&());
        for _ in 0..10 {
            assert!(circuit.admit().is_ok());
        }
        fail();
        assert!(circuit.admit().is_ok(), "one failure does not open it");
    }

    #[tokio::test(start_paused = true)]
    async fn reply_between_failures_keeps_circuit_closed() {
        let circuit = Circuit::new(CircuitBreaker::new().failures(2));
        for _ in 0..10 {
            circuit.failed(&(), &StoreError::timeout());
            circuit.answered(&());
            assert!(circuit.admit().is_ok());
        }
        let never = Circuit::new(CircuitBreaker::off());
        for _ in 0..10_000 {
            never.failed(&(), &StoreError::timeout());
            assert!(never.admit().is_ok());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn foreign_data_closes_open_circuit() {
        let circuit = Circuit::new(CircuitBreaker::new().failures(1));
        circuit.failed(&(), &StoreError::timeout());
        tokio::time::advance(Duration::from_millis(101)).await;
        assert!(circuit.admit().is_ok());
        circuit.failed(&(), &StoreError::foreign_data("WRONGTYPE"));
        assert!(circuit.admit().is_ok() && circuit.admit().is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn any_probe_interval_is_accepted() {
        tokio::time::advance(Duration::from_secs(1)).await;
        let circuit = Circuit::new(CircuitBreaker::new().failures(1).probe_interval(Duration::MAX));
        tokio::time::advance(Duration::from_secs(1)).await;
        circuit.failed(&(), &StoreError::timeout());
        tokio::time::advance(Duration::from_secs(1_000_000_000)).await;
        assert!(circuit.admit().is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn foreign_data_does_not_open_circuit() {
        let circuit = Circuit::new(CircuitBreaker::new());
        for _ in 0..100 {
            circuit.failed(&(), &StoreError::foreign_data("WRONGTYPE"));
        }
        assert!(circuit.admit().is_ok());
    }
}
