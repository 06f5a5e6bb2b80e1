use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::time::Instant;

use super::rules::{CompiledRules, Matches, Rules};

/// Which rules have matched a request since they were loaded.
pub(super) struct Usage {
    matched: Box<[AtomicBool]>,
    first_request: OnceLock<Instant>,
    reported: AtomicBool,
}

/// One of how many requests of a thread looks at the clock.
const ONE_OF: u8 = 64;

impl Usage {
    pub(super) fn of(rules: usize) -> Self {
        let matched = (0..rules).map(|_| AtomicBool::new(false)).collect();
        Self { matched, first_request: OnceLock::new(), reported: AtomicBool::new(false) }
    }

    /// The numbers of the rules that have matched nothing.
    pub(super) fn unmatched(&self) -> impl Iterator<Item = usize> {
        let matched = self.matched.iter().enumerate();
        matched.filter(|(_, matched)| !matched.load(Ordering::Relaxed)).map(|(index, _)| index)
    }

    /// Whether it is time for the report, which is so once.
    fn is_due(&self) -> bool {
        let first = *self.first_request.get_or_init(Instant::now);
        first.elapsed() >= Rules::UNMATCHED_AFTER && !self.reported.swap(true, Ordering::Relaxed)
    }
}

impl CompiledRules {
    /// Notes what a request has found. Rules that match nothing are reported by a request, since no task outlives the rules this way.
    pub(super) fn note(&self, matches: &Matches) {
        for index in matches.matching.into_iter().flatten() {
            let matched = &self.usage.matched[index];
            // Written once: processors that write to the same place wait for each other.
            if !matched.load(Ordering::Relaxed) {
                matched.store(true, Ordering::Relaxed);
            }
        }
        if !self.usage.reported.load(Ordering::Relaxed) && looks_at_the_clock() && self.usage.is_due() {
            self.report_unmatched();
        }
    }
}

/// The first request of a thread does, and one of some after that: to read the clock takes as long as to find the rule.
fn looks_at_the_clock() -> bool {
    thread_local! {
        static SEEN: Cell<u8> = const { Cell::new(0) };
    }
    let number = SEEN.get();
    SEEN.set(number.wrapping_add(1));
    number.is_multiple_of(ONE_OF)
}

/// Counts a request that no rule matches.
pub(super) fn count_unmatched() {
    #[cfg(feature = "metrics")]
    ::metrics::counter!("tollgate_rules_unmatched_requests_total").increment(1);
}
