//! Descriptions and units of the metrics.
//!
//! Their labels are listed in the docs of [`rate_limit`](crate::rate_limit#metrics), `http`, `config`, [`lock`](crate::lock#metrics),
//! [`idempotency`](crate::idempotency#metrics), [`delay_queue`](crate::delay_queue#metrics), [`cache`](crate::cache#metrics),
//! [`exists_filter`](crate::cache::exists_filter#metrics) and `backend::redis`.

use ::metrics::{Unit, describe_counter, describe_gauge, describe_histogram};

/// Registers the description and unit of each metric with the recorder. Prometheus shows the descriptions as `HELP` lines.
///
/// Call it once, after you have installed the recorder. Metrics are recorded without it, too.
///
/// ```
/// // PrometheusBuilder::new().install()?; or another recorder
/// tollgate::metrics::describe();
/// ```
pub fn describe() {
    for (name, text) in COUNTERS {
        describe_counter!(name, Unit::Count, text);
    }
    for (name, text) in HISTOGRAMS {
        describe_histogram!(name, Unit::Seconds, text);
    }
    for (name, unit, text) in GAUGES {
        describe_gauge!(name, unit, text);
    }
}

const COUNTERS: [(&str, &str); 33] = [
    ("tollgate_decisions_total", "Decisions of rate limits, one for each policy and key of a request or limiter call"),
    ("tollgate_near_limit_total", "Admitted requests that left less than a fifth of a limit"),
    ("tollgate_store_errors_total", "Store calls of rate limits that failed or were late"),
    ("tollgate_resolver_errors_total", "Requests for which a policy resolver failed or was late"),
    ("tollgate_circuit_transitions_total", "Openings and closings of the circuits of rate limits"),
    ("tollgate_settlements_total", "Corrections of charges"),
    ("tollgate_leased_units_total", "Prefetched units of a quota: drawn, given back and expired"),
    ("tollgate_deny_cache_total", "Lookups in a cache of denials: hits, and misses that called the store"),
    (
        "tollgate_unreadable_client_addresses_total",
        "Requests in which a trusted proxy wrote no readable client address",
    ),
    ("tollgate_rules_unmatched_requests_total", "Requests that match no rule of a file and pass uncounted"),
    ("tollgate_lock_requests_total", "Requests for locks by outcome"),
    ("tollgate_lock_fallback_polls_total", "Polls of a lock without a notification"),
    ("tollgate_lock_failed_renewals_total", "Lock renewals that failed and were retried while the lease lasted"),
    ("tollgate_lock_lost_total", "Lost leases of locks"),
    ("tollgate_lock_unprotected_total", "Requests that passed without their lock because the store failed"),
    ("tollgate_lock_store_errors_total", "Store calls of locks that failed or were late"),
    ("tollgate_lock_circuit_transitions_total", "Openings and closings of the circuits of locks"),
    ("tollgate_idempotency_requests_total", "Requests with an idempotency key, or rejected because they have none"),
    ("tollgate_idempotency_attempts_total", "Finished attempts at operations"),
    ("tollgate_idempotency_store_errors_total", "Store calls of idempotency that failed or were late"),
    ("tollgate_idempotency_circuit_transitions_total", "Openings and closings of the circuits of idempotency"),
    ("tollgate_cache_requests_total", "Calls of `get_or_fill` of a cache by outcome"),
    ("tollgate_cache_loads_total", "Calls of the loaders of caches by outcome"),
    ("tollgate_cache_store_errors_total", "Store calls of caches that failed or were late"),
    ("tollgate_cache_circuit_transitions_total", "Openings and closings of the circuits of caches"),
    ("tollgate_exists_filter_store_errors_total", "Store calls of exists filters that failed or were late"),
    ("tollgate_exists_filter_circuit_transitions_total", "Openings and closings of the circuits of exists filters"),
    ("tollgate_jobs_total", "Finished attempts at jobs"),
    ("tollgate_job_leases_expired_total", "Attempts at jobs whose lease expired without a report of the worker"),
    ("tollgate_job_store_errors_total", "Store calls of delay queues that failed or were late"),
    ("tollgate_job_pushes_total", "Pushed jobs"),
    ("tollgate_job_circuit_transitions_total", "Openings and closings of the circuits of delay queues"),
    (
        "tollgate_redis_subscription_failures_total",
        "Failed subscriptions to messages of Redis, without which waiters and workers poll",
    ),
];

const HISTOGRAMS: [(&str, &str); 10] = [
    ("tollgate_store_seconds", "Duration of store calls of rate limits that did not return at once"),
    ("tollgate_wait_seconds", "How long requests over a limit waited for room"),
    ("tollgate_lock_wait_seconds", "Time until a lock was granted"),
    ("tollgate_lock_hold_seconds", "Time from the grant to the release of a lock"),
    ("tollgate_lock_handover_seconds", "Time from one holder of a lock to the next"),
    (
        "tollgate_idempotency_handler_seconds",
        "Time from the claim of an operation to the end of its response, or until its handler was aborted",
    ),
    ("tollgate_idempotency_wait_seconds", "How long requests waited for another request with the same key"),
    ("tollgate_cache_load_seconds", "Duration of loads of caches"),
    ("tollgate_job_lateness_seconds", "Time from the due time of a job to its claim"),
    ("tollgate_job_seconds", "Duration of attempts at jobs"),
];

const GAUGES: [(&str, Unit, &str); 4] = [
    ("tollgate_exists_filter_fill_ratio", Unit::Count, "Part of the bits of an exists filter that is set, from 0 to 1"),
    ("tollgate_lock_handlers_running", Unit::Count, "Requests of detached layers that run under their locks"),
    ("tollgate_jobs_running", Unit::Count, "Jobs that run in this process"),
    (
        "tollgate_jobs_oldest_due_seconds",
        Unit::Seconds,
        "How long the oldest unclaimed job has been due, as far as workers of this process know; 0 without workers",
    ),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The documentation of metrics, and the code that records them.
    const DOCS_AND_CODE: [(&str, &str); 9] = [
        (include_str!("rate_limit/mod.rs"), include_str!("rate_limit/metrics.rs")),
        (include_str!("http/mod.rs"), include_str!("http/client_ip_log.rs")),
        (include_str!("config/mod.rs"), include_str!("config/rule_matches.rs")),
        (include_str!("lock/mod.rs"), include_str!("lock/metrics.rs")),
        (include_str!("idempotency/mod.rs"), include_str!("idempotency/metrics.rs")),
        (include_str!("cache/mod.rs"), include_str!("cache/metrics.rs")),
        (include_str!("cache/exists_filter/mod.rs"), include_str!("cache/exists_filter/metrics.rs")),
        (include_str!("delay_queue/mod.rs"), include_str!("delay_queue/metrics.rs")),
        (include_str!("backend/redis/mod.rs"), include_str!("backend/redis/metrics.rs")),
    ];

    fn names<'a>(text: &'a str, before: &'static str) -> impl Iterator<Item = &'a str> {
        let starts = text.match_indices(before).map(move |(at, _)| at + before.len());
        starts.filter_map(|at| text[at..].split(['`', '"']).next()).filter(|name| name.starts_with("tollgate_"))
    }

    #[test]
    fn recorded_metrics_are_described_and_documented() {
        let described: Vec<_> = COUNTERS.iter().chain(&HISTOGRAMS).map(|(name, _)| *name).collect();
        let described: BTreeSet<_> = GAUGES.iter().map(|(name, ..)| *name).chain(described).collect();
        let recorded: BTreeSet<_> = DOCS_AND_CODE.iter().flat_map(|(_, code)| names(code, "!(\"")).collect();
        let in_docs: BTreeSet<_> = DOCS_AND_CODE.iter().flat_map(|(docs, _)| names(docs, "//! | `")).collect();
        assert_eq!(described, recorded);
        assert_eq!(described, in_docs);
    }
}
