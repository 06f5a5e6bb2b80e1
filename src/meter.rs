//! Handles of the `metrics` facade that survive the idle timeout of an exporter.
//!
//! Some exporters drop a metric after an idle timeout, and then ignore its handles. So a handle in use is registered again once per second.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use arc_swap::ArcSwap;
use metrics::{Key, Label, Level, Metadata, with_recorder};
use tokio::time::Instant;

/// These macros have the form of the facade's macros.
macro_rules! counter {
    ($name:literal, $labels:expr) => {
        $crate::meter::Counter::new($name, $labels)
    };
}

macro_rules! histogram {
    ($name:literal, $labels:expr) => {
        $crate::meter::Histogram::new($name, $labels)
    };
}

macro_rules! gauge {
    ($name:literal, $labels:expr) => {
        $crate::meter::Gauge::new($name, $labels)
    };
}

pub(crate) use {counter, gauge, histogram};

static METADATA: Metadata<'static> = Metadata::new("tollgate", Level::INFO, Some("tollgate"));

/// The current second, counted from 1. A handle is valid in the second in which it was registered.
#[inline]
fn second() -> u64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    1 + Instant::now().saturating_duration_since(*START).as_secs()
}

/// A handle, and the second in which it was registered.
struct Renewed<H> {
    key: Key,
    handle: ArcSwap<H>,
    second: AtomicU64,
}

impl<H> Renewed<H> {
    fn new(name: &'static str, labels: Vec<Label>, register: fn(&Key) -> H) -> Self {
        let key = Key::from_parts(name, labels);
        Self { handle: ArcSwap::from_pointee(register(&key)), key, second: AtomicU64::new(second()) }
    }

    #[inline]
    fn with(&self, register: fn(&Key) -> H, update: impl FnOnce(&H)) {
        let now = second();
        if self.second.load(Ordering::Relaxed) != now {
            self.renew(register, now);
        }
        update(&self.handle.load());
    }

    #[cold]
    fn renew(&self, register: fn(&Key) -> H, now: u64) {
        self.handle.store(Arc::new(register(&self.key)));
        self.second.store(now, Ordering::Relaxed);
    }
}

pub(crate) struct Counter(Renewed<metrics::Counter>);

impl Counter {
    pub(crate) fn new(name: &'static str, labels: Vec<Label>) -> Self {
        Self(Renewed::new(name, labels, Self::register))
    }

    fn register(key: &Key) -> metrics::Counter {
        with_recorder(|recorder| recorder.register_counter(key, &METADATA))
    }

    #[inline]
    pub(crate) fn increment(&self, by: u64) {
        self.0.with(Self::register, |counter| counter.increment(by));
    }
}

pub(crate) struct Histogram(Renewed<metrics::Histogram>);

impl Histogram {
    pub(crate) fn new(name: &'static str, labels: Vec<Label>) -> Self {
        Self(Renewed::new(name, labels, Self::register))
    }

    fn register(key: &Key) -> metrics::Histogram {
        with_recorder(|recorder| recorder.register_histogram(key, &METADATA))
    }

    pub(crate) fn record(&self, value: f64) {
        self.0.with(Self::register, |histogram| histogram.record(value));
    }
}

/// Several `Gauge`s may add to one gauge of the recorder, so each keeps the sum that it has added.
pub(crate) struct Gauge {
    key: Key,
    state: Mutex<GaugeState>,
}

struct GaugeState {
    handle: metrics::Gauge,
    second: u64,
    // The sum of all increments and decrements by this `Gauge`.
    added: f64,
}

impl Gauge {
    pub(crate) fn new(name: &'static str, labels: Vec<Label>) -> Self {
        let key = Key::from_parts(name, labels);
        let state = Mutex::new(GaugeState { handle: Self::register(&key), second: second(), added: 0.0 });
        Self { key, state }
    }

    fn register(key: &Key) -> metrics::Gauge {
        with_recorder(|recorder| recorder.register_gauge(key, &METADATA))
    }

    fn with(&self, update: impl FnOnce(&mut GaugeState)) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = second();
        if state.second != now {
            let handle = Self::register(&self.key);
            // If both handles belong to one gauge, the sum stays the same. If the exporter has dropped the gauge, the new one gets our sum.
            if state.added != 0.0 {
                handle.increment(state.added);
                state.handle.decrement(state.added);
            }
            (state.handle, state.second) = (handle, now);
        }
        update(&mut state);
    }

    pub(crate) fn increment(&self, by: f64) {
        self.with(|state| {
            state.added += by;
            state.handle.increment(by);
        });
    }

    pub(crate) fn decrement(&self, by: f64) {
        self.with(|state| {
            state.added -= by;
            state.handle.decrement(by);
        });
    }

    pub(crate) fn set(&self, value: f64) {
        self.with(|state| state.handle.set(value));
    }
}
