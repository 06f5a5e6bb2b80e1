//! Handles of the `metrics` facade that outlast an exporter's idle timeout.
//!
//! Such an exporter drops a metric that is idle for long, and ignores the handles of that metric from then on. So a handle that is used is looked up
//! anew once a second.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use arc_swap::ArcSwap;
use metrics::{Key, Label, Level, Metadata, with_recorder};
use tokio::time::Instant;

/// Made in the form in which the macros of the facade make handles.
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

/// The second in which handles are used that were looked up in it.
#[inline]
fn second() -> u64 {
    static BEGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
    // Not 0, which is before any look.
    1 + Instant::now().saturating_duration_since(*BEGIN).as_secs()
}

/// A handle, and when it was looked up.
struct Lasting<H> {
    key: Key,
    handle: ArcSwap<H>,
    second: AtomicU64,
}

impl<H> Lasting<H> {
    fn new(name: &'static str, labels: Vec<Label>, look_up: fn(&Key) -> H) -> Self {
        let key = Key::from_parts(name, labels);
        Self { handle: ArcSwap::from_pointee(look_up(&key)), key, second: AtomicU64::new(second()) }
    }

    #[inline]
    fn with(&self, look_up: fn(&Key) -> H, act: impl FnOnce(&H)) {
        let now = second();
        if self.second.load(Ordering::Relaxed) != now {
            self.look_up(look_up, now);
        }
        act(&self.handle.load());
    }

    #[cold]
    fn look_up(&self, look_up: fn(&Key) -> H, now: u64) {
        self.handle.store(Arc::new(look_up(&self.key)));
        self.second.store(now, Ordering::Relaxed);
    }
}

pub(crate) struct Counter(Lasting<metrics::Counter>);

impl Counter {
    pub(crate) fn new(name: &'static str, labels: Vec<Label>) -> Self {
        Self(Lasting::new(name, labels, Self::look_up))
    }

    fn look_up(key: &Key) -> metrics::Counter {
        with_recorder(|recorder| recorder.register_counter(key, &METADATA))
    }

    #[inline]
    pub(crate) fn increment(&self, by: u64) {
        self.0.with(Self::look_up, |counter| counter.increment(by));
    }
}

pub(crate) struct Histogram(Lasting<metrics::Histogram>);

impl Histogram {
    pub(crate) fn new(name: &'static str, labels: Vec<Label>) -> Self {
        Self(Lasting::new(name, labels, Self::look_up))
    }

    fn look_up(key: &Key) -> metrics::Histogram {
        with_recorder(|recorder| recorder.register_histogram(key, &METADATA))
    }

    pub(crate) fn record(&self, value: f64) {
        self.0.with(Self::look_up, |histogram| histogram.record(value));
    }
}

/// Several may add to one gauge, so each knows its own part.
pub(crate) struct Gauge {
    key: Key,
    state: Mutex<Part>,
}

struct Part {
    handle: metrics::Gauge,
    second: u64,
    // The sum of all increments and decrements by this value.
    added: f64,
}

impl Gauge {
    pub(crate) fn new(name: &'static str, labels: Vec<Label>) -> Self {
        let key = Key::from_parts(name, labels);
        let state = Mutex::new(Part { handle: Self::look_up(&key), second: second(), added: 0.0 });
        Self { key, state }
    }

    fn look_up(key: &Key) -> metrics::Gauge {
        with_recorder(|recorder| recorder.register_gauge(key, &METADATA))
    }

    fn with(&self, act: impl FnOnce(&mut Part)) {
        let mut part = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = second();
        if part.second != now {
            let handle = Self::look_up(&self.key);
            // This changes nothing where both are handles of one gauge. Where the gauge was dropped, the new one has the part that is ours.
            if part.added != 0.0 {
                handle.increment(part.added);
                part.handle.decrement(part.added);
            }
            (part.handle, part.second) = (handle, now);
        }
        act(&mut part);
    }

    pub(crate) fn increment(&self, by: f64) {
        self.with(|part| {
            part.added += by;
            part.handle.increment(by);
        });
    }

    pub(crate) fn decrement(&self, by: f64) {
        self.with(|part| {
            part.added -= by;
            part.handle.decrement(by);
        });
    }

    pub(crate) fn set(&self, value: f64) {
        self.with(|part| part.handle.set(value));
    }
}
