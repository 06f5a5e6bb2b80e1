//! What the metrics are: texts and units for whoever shows them.
//!
//! Which labels they have is in the docs of [`rate_limit`](crate::rate_limit#metrics), `http`, `config`, [`lock`](crate::lock#metrics),
//! [`idempotency`](crate::idempotency#metrics), [`delay_queue`](crate::delay_queue#metrics) and `backend::redis`.

use ::metrics::{Unit, describe_counter, describe_gauge, describe_histogram};

/// Tells the recorder what each metric of this crate says, and in which unit: the `HELP` lines of Prometheus, say.
///
/// Once, after the recorder was installed, which goes by what it was told last. Without it everything is counted all the same.
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

const COUNTERS: [(&str, &str); 27] = [
    (
        "tollgate_decisions_total",
        "Decisions of rate limits, one for each subject of a request or question of a limiter",
    ),
    ("tollgate_near_limit_total", "Admitted requests that left less than a fifth of a limit"),
    ("tollgate_store_errors_total", "Calls about rate limits that failed or were late"),
    ("tollgate_resolver_errors_total", "Requests that a resolver of policies failed or was too late for"),
    ("tollgate_circuit_transitions_total", "Circuits of rate limits that opened and closed"),
    ("tollgate_settlements_total", "Corrections of charges"),
    ("tollgate_leased_units_total", "Units of a quota that were drawn ahead, given back or lost"),
    ("tollgate_deny_cache_total", "What a cache of denials has answered itself, and what it has asked its store"),
    (
        "tollgate_unreadable_client_addresses_total",
        "Requests in which a trusted proxy wrote no readable address of the client",
    ),
    ("tollgate_rules_unmatched_requests_total", "Requests that no rule of a file matches, which pass uncounted"),
    ("tollgate_lock_requests_total", "What became of asking for locks"),
    ("tollgate_lock_fallback_polls_total", "Looks at a lock without having been told that it is free"),
    (
        "tollgate_lock_failed_renewals_total",
        "Renewals of locks that failed, and were tried again while the lease lasted",
    ),
    ("tollgate_lock_lost_total", "Leases of locks that were lost"),
    ("tollgate_lock_unprotected_total", "Requests that passed without their lock because the store failed"),
    ("tollgate_lock_store_errors_total", "Calls for locks that failed or were late"),
    ("tollgate_lock_circuit_transitions_total", "Circuits of locks that opened and closed"),
    ("tollgate_idempotency_requests_total", "Requests with an idempotency key, or turned away for the lack of one"),
    ("tollgate_idempotency_attempts_total", "Attempts at operations that ended"),
    ("tollgate_idempotency_store_errors_total", "Calls about operations that failed or were late"),
    ("tollgate_idempotency_circuit_transitions_total", "Circuits of idempotency that opened and closed"),
    ("tollgate_jobs_total", "Attempts at jobs that are over"),
    ("tollgate_job_leases_expired_total", "Attempts at jobs that ended without a word of their worker"),
    ("tollgate_job_store_errors_total", "Calls about jobs that failed or were late"),
    ("tollgate_job_pushes_total", "Jobs that were pushed"),
    ("tollgate_job_circuit_transitions_total", "Circuits of delay queues that opened and closed"),
    (
        "tollgate_redis_subscription_failures_total",
        "Attempts to subscribe to messages of Redis that failed, so that waiters and workers poll",
    ),
];

const HISTOGRAMS: [(&str, &str); 9] = [
    ("tollgate_store_seconds", "The time of each call about rate limits that has to be waited for"),
    ("tollgate_wait_seconds", "How long requests over a limit waited for room"),
    ("tollgate_lock_wait_seconds", "The time until a lock was granted"),
    ("tollgate_lock_hold_seconds", "The time until a lock was given back"),
    ("tollgate_lock_handover_seconds", "The time from one holder of a lock to the next"),
    (
        "tollgate_idempotency_handler_seconds",
        "The time from the claim of an operation to the end of its answer, or to where its handler was cut off",
    ),
    ("tollgate_idempotency_wait_seconds", "How long requests waited for the same request"),
    ("tollgate_job_lateness_seconds", "How long after it was due a job was claimed"),
    ("tollgate_job_seconds", "How long attempts at jobs ran"),
];

const GAUGES: [(&str, Unit, &str); 3] = [
    ("tollgate_lock_handlers_running", Unit::Count, "Requests of detached layers that are at work under their locks"),
    ("tollgate_jobs_running", Unit::Count, "Jobs that run in this process"),
    (
        "tollgate_jobs_oldest_due_seconds",
        Unit::Seconds,
        "For how long the oldest job that nobody has claimed is due, as workers of this process know; 0 without them",
    ),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// What is said of the metrics, and what records them.
    const DOCS_AND_CODE: [(&str, &str); 7] = [
        (include_str!("rate_limit/mod.rs"), include_str!("rate_limit/metrics.rs")),
        (include_str!("http/mod.rs"), include_str!("http/client_ip_log.rs")),
        (include_str!("config/mod.rs"), include_str!("config/usage.rs")),
        (include_str!("lock/mod.rs"), include_str!("lock/metrics.rs")),
        (include_str!("idempotency/mod.rs"), include_str!("idempotency/metrics.rs")),
        (include_str!("delay_queue/mod.rs"), include_str!("delay_queue/metrics.rs")),
        (include_str!("backend/redis/mod.rs"), include_str!("backend/redis/metrics.rs")),
    ];

    fn names<'a>(text: &'a str, before: &'static str) -> impl Iterator<Item = &'a str> {
        let begins = text.match_indices(before).map(move |(at, _)| at + before.len());
        begins.filter_map(|at| text[at..].split(['`', '"']).next()).filter(|name| name.starts_with("tollgate_"))
    }

    #[test]
    fn what_is_recorded_is_described_and_in_the_docs() {
        let described: Vec<_> = COUNTERS.iter().chain(&HISTOGRAMS).map(|(name, _)| *name).collect();
        let described: BTreeSet<_> = GAUGES.iter().map(|(name, ..)| *name).chain(described).collect();
        let recorded: BTreeSet<_> = DOCS_AND_CODE.iter().flat_map(|(_, code)| names(code, "!(\"")).collect();
        let in_docs: BTreeSet<_> = DOCS_AND_CODE.iter().flat_map(|(docs, _)| names(docs, "//! | `")).collect();
        assert_eq!(described, recorded);
        assert_eq!(described, in_docs);
    }
}
