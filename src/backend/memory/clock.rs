//! What time it is for counts.
//!
//! Time is tokio's clock. With the feature `tsc` the counter of the processor says how much of a millisecond has gone by since that was read last,
//! which takes a third of the time that reading it does. It is believed for no more than a millisecond, so it need not be exact, nor tick
//! through a suspension, nor agree between processors.

use std::time::Duration;

use tokio::time::Instant;

/// Says what time it is in microseconds since just before it was made, so that it never says 0, which stands for no time at all.
pub(super) struct Clock {
    epoch: Instant,
    #[cfg(feature = "tsc")]
    counter: Option<tsc::Counter>,
}

/// How far the counter of the processor was when the clock was read for the last time, for those under one lock.
#[derive(Default)]
pub(super) struct Anchor {
    #[cfg(feature = "tsc")]
    counter: u64,
    #[cfg(feature = "tsc")]
    us: u64,
    // What was answered last: nobody who comes later is told less.
    #[cfg(feature = "tsc")]
    latest: u64,
}

/// What was read before the lock: the processor can do what comes next while it reads.
#[derive(Clone, Copy)]
pub(super) struct Reading(u64);

impl Clock {
    /// The first one of a process calibrates the counter, if there is to be one: for 0.6 ms, and up to 200 ms on a busy machine.
    pub(super) fn new() -> Self {
        Self {
            #[cfg(feature = "tsc")]
            counter: (!tsc::CAN_BE_PAUSED).then(|| tsc::Counter::new(quanta::Clock::new())),
            ..Self::without_counter()
        }
    }

    pub(super) fn without_counter() -> Self {
        Self {
            epoch: Instant::now().checked_sub(Duration::from_micros(1)).unwrap_or_else(Instant::now),
            #[cfg(feature = "tsc")]
            counter: None,
        }
    }

    /// With a counter although the tests of this crate can pause tokio's clock.
    #[cfg(all(test, feature = "tsc"))]
    pub(super) fn with_counter(counter: quanta::Clock) -> Self {
        Self { counter: Some(tsc::Counter::new(counter)), ..Self::without_counter() }
    }

    #[inline]
    pub(super) fn read(&self) -> Reading {
        #[cfg(feature = "tsc")]
        if let Some(counter) = &self.counter {
            return Reading(counter.ticks());
        }
        Reading(self.elapsed_us())
    }

    #[inline]
    fn elapsed_us(&self) -> u64 {
        let elapsed = self.epoch.elapsed();
        elapsed.as_secs() * 1_000_000 + u64::from(elapsed.subsec_micros())
    }
}

impl Anchor {
    /// What time it was at a reading. Without a counter that may be earlier than what was answered last, if it was read before the lock.
    #[inline]
    pub(super) fn us(&mut self, clock: &Clock, Reading(reading): Reading) -> u64 {
        #[cfg(feature = "tsc")]
        if let Some(counter) = &clock.counter {
            return self.us_by(counter, reading, || clock.elapsed_us());
        }
        let _ = clock;
        reading
    }

    /// With a counter, nobody who comes later is told less than this, which is what somebody else was told.
    pub(super) fn is_past(&mut self, us: u64) {
        #[cfg(feature = "tsc")]
        {
            self.latest = self.latest.max(us);
        }
        let _ = us;
    }
}

#[cfg(feature = "tsc")]
mod tsc {
    use super::Anchor;

    /// For how long the counter is believed.
    const BELIEVED_US: u64 = 1_000;
    /// A number of ticks that takes long enough to say how fast they are.
    const MANY: u32 = 40;

    /// The counter of the processor, and how fast it is.
    pub(super) struct Counter {
        clock: quanta::Clock,
        us_of_many: u64,
        believed: u64,
    }

    impl Counter {
        pub(super) fn new(clock: quanta::Clock) -> Self {
            let us_of_many = clock.delta_as_nanos(0, 1 << MANY).div_ceil(1_000).max(1);
            Self { clock, us_of_many, believed: (BELIEVED_US << MANY).div_ceil(us_of_many) }
        }

        #[inline]
        pub(super) fn ticks(&self) -> u64 {
            self.clock.raw()
        }

        /// How long so many ticks take, if that is not too long for them to be believed.
        // One multiplication of few bits, while a shard is locked.
        #[inline]
        fn us(&self, ticks: u64) -> Option<u64> {
            (ticks < self.believed).then(|| (ticks * self.us_of_many) >> MANY)
        }
    }

    /// Whether a test could pause tokio's clock in this build, which nothing but that clock would notice. Somewhere in the program the feature
    /// `test-util` of tokio is on then: `pause` is tokio's function if there is one, and the one below otherwise.
    pub(super) const CAN_BE_PAUSED: bool = {
        #[allow(unused_imports, clippy::wildcard_imports, reason = "by name it would have to be there")]
        use tokio::time::*;
        is_found(pause)
    };

    #[allow(dead_code, reason = "where tokio has the function")]
    struct NotFound;

    #[allow(dead_code, reason = "where tokio has it")]
    fn pause() -> NotFound {
        NotFound
    }

    trait Found {
        const IS_FOUND: bool;
    }

    impl Found for () {
        const IS_FOUND: bool = true;
    }

    impl Found for NotFound {
        const IS_FOUND: bool = false;
    }

    const fn is_found<T: Found>(_: fn() -> T) -> bool {
        T::IS_FOUND
    }

    impl Anchor {
        #[inline]
        pub(super) fn us_by(&mut self, counter: &Counter, reading: u64, elapsed_us: impl FnOnce() -> u64) -> u64 {
            // More than can be believed if it was read before the anchor was, or set back.
            let us = match counter.us(reading.wrapping_sub(self.counter)) {
                Some(since) if self.us > 0 => self.us + since,
                _ => {
                    // Read again, since to wait for the lock may have taken a while.
                    self.counter = counter.ticks();
                    self.us = elapsed_us();
                    self.us
                }
            };
            self.latest = self.latest.max(us);
            self.latest
        }
    }

    #[cfg(test)]
    mod tests {
        use std::time::{Duration, Instant};

        use super::super::Clock;
        use super::*;

        #[test]
        fn a_clock_that_a_test_can_pause_is_the_one_that_is_used() {
            // The tests of this crate have `test-util`.
            const { assert!(CAN_BE_PAUSED) };
            assert!(Clock::new().counter.is_none());
        }

        #[test]
        fn the_counter_says_what_part_of_a_millisecond_has_gone_by_and_no_more() {
            let (counter, ticks) = quanta::Clock::mock();
            ticks.increment(5_000_000_u64);
            let (mut anchor, counter) = (Anchor::default(), Counter::new(counter));
            let mut at = |elapsed_us: u64| anchor.us_by(&counter, counter.ticks(), || elapsed_us);
            assert_eq!(at(70), 70);
            ticks.increment(1_500_u64);
            assert_eq!(at(9_000), 71);
            ticks.increment(998_499_u64);
            assert_eq!(at(9_000), 1_069);
            // A millisecond is over.
            ticks.increment(1_u64);
            assert_eq!(at(9_000), 9_000);
            ticks.increment(2_000_u64);
            assert_eq!(at(50_000), 9_002);
            // A counter that is set back is not believed, and nobody is told less than somebody before.
            ticks.decrement(4_000_000_u64);
            assert_eq!(at(9_001), 9_002);
            ticks.increment(1_999_u64);
            assert_eq!(at(50_000), 9_002);
            ticks.increment(1_u64);
            assert_eq!(at(50_000), 9_003);
        }

        #[test]
        fn nobody_is_told_less_than_what_was_told_in_another_shard() {
            let (counter, ticks) = quanta::Clock::mock();
            ticks.increment(9_000_u64);
            let clock = Clock::with_counter(counter);
            let (mut anchor, early) = (Anchor::default(), clock.read());
            ticks.increment(500_u64);
            let late = anchor.us(&clock, clock.read());
            assert!(anchor.us(&clock, early) >= late);
            anchor.is_past(7_000_000_000);
            assert_eq!(anchor.us(&clock, early), 7_000_000_000);
        }

        #[test]
        fn the_counter_of_this_processor_agrees_with_the_clock() {
            let (counter, epoch) = (Counter::new(quanta::Clock::new()), Instant::now());
            let elapsed_us = || epoch.elapsed().as_micros() as u64;
            // How long it may have taken at the most to read the clock after the counter.
            let (mut anchor, mut last, mut late) = (Anchor::default(), 0, 0);
            while epoch.elapsed() < Duration::from_millis(50) {
                let before = elapsed_us();
                let us = anchor.us_by(&counter, counter.ticks(), || {
                    let us = elapsed_us();
                    late = late.max(us - before);
                    us
                });
                let after = elapsed_us();
                // A tenth of a millisecond would be a counter that is off by a tenth.
                assert!(
                    (before.saturating_sub(100)..=after + 100 + late).contains(&us),
                    "{us} between {before} and {after}"
                );
                assert!(us >= last);
                last = us;
            }
        }
    }
}
