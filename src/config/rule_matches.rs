use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// Which rules have matched a request since they were loaded.
pub(super) struct RuleMatches {
    matched: Box<[AtomicBool]>,
    first_request: OnceLock<Instant>,
    reported: AtomicBool,
}

/// Each thread checks the clock on one request of this many.
const CHECK_EVERY: u8 = 64;

impl RuleMatches {
    pub(super) fn new(rules: usize) -> Self {
        let matched = (0..rules).map(|_| AtomicBool::new(false)).collect();
        Self { matched, first_request: OnceLock::new(), reported: AtomicBool::new(false) }
    }

    /// The indices of rules that have matched no request.
    pub(super) fn unmatched(&self) -> impl Iterator<Item = usize> {
        let matched = self.matched.iter().enumerate();
        matched.filter(|(_, matched)| !matched.load(Ordering::Relaxed)).map(|(index, _)| index)
    }

    /// Records that rules have matched a request. Returns true once: when the time `after` has passed since the first request, and the
    /// unmatched rules are to be reported.
    pub(super) fn record(&self, matching: [Option<usize>; 2], after: Duration) -> bool {
        for index in matching.into_iter().flatten() {
            let matched = &self.matched[index];
            // Store only once, to avoid contention on the cache line.
            if !matched.load(Ordering::Relaxed) {
                matched.store(true, Ordering::Relaxed);
            }
        }
        !self.reported.load(Ordering::Relaxed) && checks_clock() && self.is_due(after)
    }

    fn is_due(&self, after: Duration) -> bool {
        let first = *self.first_request.get_or_init(Instant::now);
        first.elapsed() >= after && !self.reported.swap(true, Ordering::Relaxed)
    }
}

/// Whether this request checks the clock. Reading the clock takes as long as finding the rule, so most requests skip it.
fn checks_clock() -> bool {
    thread_local! {
        static REQUESTS: Cell<u8> = const { Cell::new(0) };
    }
    let number = REQUESTS.get();
    REQUESTS.set(number.wrapping_add(1));
    number.is_multiple_of(CHECK_EVERY)
}

/// Counts a request that no rule matches.
pub(super) fn count_unmatched() {
    #[cfg(feature = "metrics")]
    ::metrics::counter!("tollgate_rules_unmatched_requests_total").increment(1);
}
