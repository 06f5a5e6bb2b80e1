//! Test support for programs that use Tollgate, and contract tests for your own backends. Enable the feature `testing` in
//! `[dev-dependencies]`:
//!
//! ```toml
//! [dev-dependencies]
//! tollgate = { version = "0.1", features = ["testing"] }
//! tokio = { version = "1", features = ["full", "test-util"] }
//! ```
//!
//! Guide: [testing](crate::guide::testing).
//!
//! # Time
//!
//! [`MemoryBackend`](crate::MemoryBackend) uses tokio's clock. A test that pauses the clock does not have to wait, and windows are exact to
//! the microsecond:
//!
//! ```
//! use std::time::Duration;
//! use tollgate::{Limiter, MemoryBackend, Policy, Quota};
//!
//! #[tokio::main(flavor = "current_thread", start_paused = true)] // in a test: #[tokio::test(start_paused = true)]
//! async fn main() -> Result<(), tollgate::StoreError> {
//!     let mails = Limiter::new(MemoryBackend::new(), Policy::new("mails", Quota::per_day(1).fixed_window()));
//!     assert!(mails.check("alice").await?.is_allowed());
//!     let wait = mails.check("alice").await?.retry_after().expect("one a day");
//!
//!     tokio::time::advance(wait - Duration::from_micros(1)).await;
//!     assert!(!mails.check("alice").await?.is_allowed());
//!     tokio::time::advance(Duration::from_micros(1)).await;
//!     assert!(mails.check("alice").await?.is_allowed());
//!     Ok(())
//! }
//! ```
//!
//! # A client that is over its limit
//!
//! [`exhaust`] uses up the remaining quota, with any algorithm, so a test does not depend on the numbers:
//!
//! ```
//! use tollgate::{Limiter, MemoryBackend, Policy, Quota, testing};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
//! let policy = Policy::new("api", Quota::per_minute(600).token_bucket()).limit(Quota::per_hour(1_000).sliding_log()?);
//! let api = Limiter::new(MemoryBackend::new(), policy);
//!
//! testing::exhaust(&api, "alice").await;
//! assert!(!api.check("alice").await?.is_allowed());
//! assert!(api.check("bob").await?.is_allowed());
//! # Ok(())
//! # }
//! ```
//!
//! # A store that fails
//!
//! [`FaultStore`] wraps any store. A test can switch its faults on and off while the store is in use:
//!
//! ```
//! use tollgate::testing::{FaultStore, Failure, Verb};
//! use tollgate::{ErrorResponder, BoxError, MemoryBackend, RateLimitFallback, Policy, Quota, RateLimitLayer};
//! use tower::{ServiceBuilder, ServiceExt, service_fn};
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> Result<(), BoxError> {
//! let store = FaultStore::new(MemoryBackend::new());
//! let faults = store.faults();
//! let limit = RateLimitLayer::new(store, Policy::new("login", Quota::per_minute(5).fixed_window()))
//!     .on_store_error(RateLimitFallback::Deny)
//!     .responder(ErrorResponder);
//! let login = ServiceBuilder::new().layer(limit).service(service_fn(async |()| Ok::<_, BoxError>("welcome")));
//!
//! faults.fail(Failure::Unavailable);
//! assert!(login.clone().oneshot(()).await.is_err());
//! faults.hang(); // The deadline ends it.
//! assert!(login.clone().oneshot(()).await.is_err());
//! faults.heal();
//! assert_eq!(login.oneshot(()).await?, "welcome");
//! assert_eq!(faults.calls(Verb::Check), 3);
//! # Ok(())
//! # }
//! ```
//!
//! | method of [`Faults`] | effect |
//! | --- | --- |
//! | [`fail`](Faults::fail), [`fail_next`](Faults::fail_next), [`fail_percent`](Faults::fail_percent) | all calls, the next ones, or a share of them fail |
//! | [`seed`](Faults::seed) | selects other calls for `fail_percent` |
//! | [`hang`](Faults::hang) | calls never end |
//! | [`lose_replies`](Faults::lose_replies) | calls take effect, and their replies are lost |
//! | [`delay`](Faults::delay) | calls take this much longer |
//! | [`heal`](Faults::heal) | removes all faults |
//! | [`calls`](Faults::calls), [`total_calls`](Faults::total_calls) | the numbers of calls |
//!
//! # A job without a worker
//!
//! [`TestJob`] builds the [`Job`](crate::Job) that a worker passes to a service, for any attempt.
//!
//! # A backend of your own
//!
//! These macros run the contract tests on your own store, with one test for each requirement. The backends of this crate pass the same
//! tests.
//!
//! * [`rate_limit_contract!`](crate::rate_limit_contract) tests a [`RateLimitStore`](crate::rate_limit::store::RateLimitStore).
//! * [`lock_contract!`](crate::lock_contract) tests a [`LockStore`](crate::lock::store::LockStore).
//! * [`idempotency_contract!`](crate::idempotency_contract) tests an [`IdempotencyStore`](crate::idempotency::store::IdempotencyStore).
//! * [`cache_contract!`](crate::cache_contract) tests a [`CacheStore`](crate::cache::store::CacheStore).
//! * [`exists_filter_contract!`](crate::exists_filter_contract) tests an
//!   [`ExistsFilterStore`](crate::cache::exists_filter::store::ExistsFilterStore).
//! * [`delay_queue_contract!`](crate::delay_queue_contract) tests a [`DelayQueueStore`](crate::delay_queue::store::DelayQueueStore).
//! * [`lock_registry_contract!`](crate::lock_registry_contract) tests a [`LockRegistry`](crate::lock::store::LockRegistry).
//! * [`idempotency_registry_contract!`](crate::idempotency_registry_contract) tests an
//!   [`IdempotencyRegistry`](crate::idempotency::store::IdempotencyRegistry).
//!
//! ```no_run
//! # use tollgate::MemoryBackend as MyBackend;
//! tollgate::rate_limit_contract!(async { MyBackend::new() });
//! # fn main() {}
//! ```

pub mod cache_contract;
pub mod contract;
pub mod delay_queue_contract;
mod exhaust;
pub mod exists_filter_contract;
mod fault;
pub mod idempotency_contract;
pub mod idempotency_registry_contract;
mod job;
pub mod lock_contract;
pub mod lock_registry_contract;
mod observed;

pub use self::exhaust::exhaust;
pub use self::fault::{Failure, FaultStore, Faults, Verb};
pub use self::job::{JobCanceller, TestJob};

/// Creates the tests of [`contract`](crate::testing::contract) for a backend.
///
/// Takes a future that creates a separate store for each test:
///
/// ```no_run
/// # use tollgate::MemoryBackend;
/// tollgate::rate_limit_contract!(async { MemoryBackend::new() });
/// # fn main() {}
/// ```
///
/// The tests are `#[tokio::test]`s by default. If the store uses tokio's clock, pause the clock:
///
/// ```no_run
/// # use tollgate::MemoryBackend;
/// tollgate::rate_limit_contract!(#[tokio::test(start_paused = true)] async { MemoryBackend::new() });
/// # fn main() {}
/// ```
///
/// To run code before and after each test, pass a closure. Its argument is the test, a function that takes the store:
///
/// ```no_run
/// # use tollgate::{MemoryBackend, testing::FaultStore};
/// tollgate::rate_limit_contract!(|claim| {
///     let store = FaultStore::new(MemoryBackend::new());
///     let faults = store.faults();
///     claim(store).await;
///     assert!(faults.total_calls() > 0);
/// });
/// # fn main() {}
/// ```
///
/// Call the macro in a module of its own, so that the names of the tests do not collide with others.
#[macro_export]
macro_rules! rate_limit_contract {
    ($($cases:tt)+) => {
        $crate::__contract! {
            @read [contract:
                quota_is_admitted_exactly
                keys_and_policies_have_separate_counts
                policies_with_one_name_share_counts
                denial_charges_nothing
                retry_after_is_exact
                zero_cost_passes_and_charges_nothing
                peek_predicts_a_check_and_charges_nothing
                reset_clears_one_key
                unused_quota_has_no_reset_time
                lower_limit_keeps_counts
                higher_limit_keeps_counts
                new_window_length_starts_new_counts
                fixed_window_ends_at_once
                sliding_log_is_exact_in_every_window
                full_sliding_log_works
                longest_windows_and_largest_costs_are_counted
                racing_callers_share_the_quota
                any_bytes_are_a_rate_limit_key
                bucket_refills_evenly_up_to_its_burst
                sliding_window_fades
                largest_numbers_fit_every_algorithm
                several_limits_are_charged_all_or_none
                denial_names_violated_limits_and_longest_wait
                charge_without_details_equals_a_decision
                immediate_decision_equals_a_decision
                try_acquire_equals_a_decision
                several_keys_are_charged_all_or_none
                repeated_key_is_charged_twice
                refunded_units_can_be_used_again
                refund_creates_no_tokens
                refund_has_no_effect_on_a_later_window
                refund_is_at_most_the_used_units
                later_charge_becomes_debt
                debt_is_at_most_the_quota
                debt_over_two_windows_is_at_most_the_quota
                block_denies_and_keeps_counts
                quota_change_keeps_resets_or_scales
                correction_under_another_quota_keeps_counts
                later_charge_counts_under_a_larger_quota
                racing_callers_share_the_tightest_limit
            ] [] $($cases)+
        }
    };
}

/// Creates the tests of [`lock_contract`](crate::testing::lock_contract) for a backend. Takes the same arguments as
/// [`rate_limit_contract!`](crate::rate_limit_contract).
///
/// ```no_run
/// # use tollgate::MemoryBackend;
/// tollgate::lock_contract!(#[tokio::test(start_paused = true)] async { MemoryBackend::new() });
/// # fn main() {}
/// ```
#[macro_export]
macro_rules! lock_contract {
    ($($cases:tt)+) => {
        $crate::__contract! {
            @read [lock_contract:
                free_lock_is_granted_and_held_lock_is_not
                keys_and_names_are_separate_locks
                acquisition_can_be_repeated
                fences_rise_with_every_grant
                lease_expires
                renewal_extends_a_lease
                ended_lease_cannot_be_renewed
                many_leases_are_renewed_in_one_call
                only_the_holder_releases_a_lease
                any_bytes_are_a_lock_key
                one_of_many_racing_callers_gets_the_lock
                concurrent_locks_are_independent
                release_wakes_watchers
                one_at_a_time_with_rising_fences
                waiter_gets_the_released_lock
                wait_ends_in_time
                waiter_gets_the_lock_of_a_dead_holder
                waiters_are_served_in_order
                wait_queue_is_bounded
                held_lease_is_renewed
                second_handle_keeps_the_lock
                max_hold_ends_a_lease
                run_drops_its_body_if_the_lease_is_lost
                invalid_times_are_refused_by_name
                shutdown_waits_for_held_leases
                any_free_segment_is_granted
                semaphore_grants_its_permits
                permits_are_exact
                several_locks_are_taken_all_or_none
                several_leases_are_taken_in_one_step
                fair_locks_are_granted_in_order
                dead_waiter_loses_its_position
                readers_share_and_writers_exclude
                readers_wait_behind_a_waiting_writer
                dead_reader_expires_alone
                polling_keeps_a_queue_position
                only_the_next_waiter_is_notified
                without_a_queue_all_watchers_are_notified
                readers_and_writers_never_meet
                abandoned_wait_leaves_the_queue
                key_is_held_as_one_kind
                fences_are_larger_than_the_floor
                release_reports_a_lost_lease
            ] [] $($cases)+
        }
    };
}

/// Creates the tests of [`idempotency_contract`](crate::testing::idempotency_contract) for a backend. Takes the same arguments as
/// [`rate_limit_contract!`](crate::rate_limit_contract).
///
/// ```no_run
/// # use tollgate::MemoryBackend;
/// tollgate::idempotency_contract!(#[tokio::test(start_paused = true)] async { MemoryBackend::new() });
/// # fn main() {}
/// ```
#[macro_export]
macro_rules! idempotency_contract {
    ($($cases:tt)+) => {
        $crate::__contract! {
            @read [idempotency_contract:
                operation_is_granted_once
                scopes_and_keys_are_separate
                begin_can_be_repeated
                immediate_reply_is_correct
                response_is_stored_unchanged
                omitted_response_leaves_a_mark
                different_request_is_a_mismatch_in_every_state
                live_attempt_is_never_taken_over
                completed_operation_is_never_taken_over
                superseded_attempt_changes_nothing
                late_renewal_succeeds_without_a_takeover
                released_operation_begins_again
                early_release_cancels_a_late_claim
                next_attempt_finds_the_checkpoint
                late_checkpoint_changes_nothing
                checkpoint_keeps_the_fingerprint
                known_part_of_a_body_stays_known
                takeover_keeps_the_fingerprint
                watcher_is_notified
                response_expires_after_its_retention
                one_of_many_racing_requests_begins
                records_of_a_scope_are_bounded
            ] [] $($cases)+
        }
    };
}

/// Creates the tests of [`cache_contract`](crate::testing::cache_contract) for a backend. Takes the same arguments as
/// [`rate_limit_contract!`](crate::rate_limit_contract).
///
/// ```no_run
/// # use tollgate::MemoryBackend;
/// tollgate::cache_contract!(#[tokio::test(start_paused = true)] async { MemoryBackend::new() });
/// # fn main() {}
/// ```
#[macro_export]
macro_rules! cache_contract {
    ($($cases:tt)+) => {
        $crate::__contract! {
            @read [cache_contract:
                filled_entry_is_returned
                absence_is_an_entry
                caches_and_keys_are_separate
                entry_becomes_stale_and_expires
                lease_is_granted_once
                one_of_many_racing_claims_is_granted
                claim_needs_the_current_entry
                ended_lease_is_granted_again
                renewed_lease_lasts
                put_can_be_repeated
                release_leaves_its_mark
                uncached_mark_removes_the_entry
                mark_leaves_the_entry
                invalidation_beats_a_running_fill
                expired_entry_is_stale
                set_beats_a_running_fill
                tags_are_returned
                generation_lasts_until_the_tag_is_invalidated
                watcher_is_notified
            ] [] $($cases)+
        }
    };
}

/// Creates the tests of [`exists_filter_contract`](crate::testing::exists_filter_contract) for a backend. Takes the same arguments as
/// [`rate_limit_contract!`](crate::rate_limit_contract).
///
/// ```no_run
/// # use tollgate::MemoryBackend;
/// tollgate::exists_filter_contract!(#[tokio::test(start_paused = true)] async { MemoryBackend::new() });
/// # fn main() {}
/// ```
#[macro_export]
macro_rules! exists_filter_contract {
    ($($rest:tt)+) => {
        $crate::__contract! {
            @read [exists_filter_contract:
                new_filter_has_no_versions
                version_is_active_after_its_build
                bits_are_set_in_both_versions
                set_bits_are_counted
                addition_needs_the_current_versions
                replaced_version_is_gone
                abandoned_version_is_gone
                later_build_replaces_an_earlier_one
                build_steps_can_be_repeated
                large_version_has_all_blocks
                blocks_are_read_together
                addition_finds_out_that_versions_are_missing
                filters_are_separate
                version_expires
            ] [] $($rest)+
        }
    };
}

/// Creates the tests of [`lock_registry_contract`](crate::testing::lock_registry_contract) for a backend. Takes the same arguments as
/// [`rate_limit_contract!`](crate::rate_limit_contract).
///
/// ```no_run
/// # use tollgate::MemoryBackend;
/// tollgate::lock_registry_contract!(#[tokio::test(start_paused = true)] async { MemoryBackend::new() });
/// # fn main() {}
/// ```
#[macro_export]
macro_rules! lock_registry_contract {
    ($($cases:tt)+) => {
        $crate::__contract! {
            @read [lock_registry_contract:
                holder_can_be_inspected
                permit_holders_are_listed_separately
                lock_can_be_force_released
                first_waiter_gets_a_force_released_lock
                held_locks_are_listed
            ] [] $($cases)+
        }
    };
}

/// Creates the tests of [`idempotency_registry_contract`](crate::testing::idempotency_registry_contract) for a backend. Takes the same
/// arguments as [`rate_limit_contract!`](crate::rate_limit_contract).
///
/// ```no_run
/// # use tollgate::MemoryBackend;
/// tollgate::idempotency_registry_contract!(#[tokio::test(start_paused = true)] async { MemoryBackend::new() });
/// # fn main() {}
/// ```
#[macro_export]
macro_rules! idempotency_registry_contract {
    ($($cases:tt)+) => {
        $crate::__contract! {
            @read [idempotency_registry_contract:
                every_state_can_be_inspected
                takeover_mark_is_not_a_checkpoint
                forgotten_operation_begins_again
                changed_operation_is_left_alone
                unknown_operation_can_be_completed
                only_unknown_operations_can_be_completed
                manual_completion_can_be_replaced
                operations_are_listed
                waiter_is_notified_of_a_manual_change
            ] [] $($cases)+
        }
    };
}

/// Creates the tests of [`delay_queue_contract`](crate::testing::delay_queue_contract) for a backend. Takes the same arguments as
/// [`rate_limit_contract!`](crate::rate_limit_contract).
///
/// ```no_run
/// # use tollgate::MemoryBackend;
/// tollgate::delay_queue_contract!(#[tokio::test(start_paused = true)] async { MemoryBackend::new() });
/// # fn main() {}
/// ```
#[macro_export]
macro_rules! delay_queue_contract {
    ($($cases:tt)+) => {
        $crate::__contract! {
            @read [delay_queue_contract:
                job_is_claimed_once_and_removed_when_done
                job_is_not_claimed_before_it_is_due
                job_returns_when_its_lease_ends
                id_is_unique
                batch_replies_are_in_order
                unique_key_excludes_other_jobs
                removed_job_releases_its_unique_key
                expired_unique_key_of_a_cancelled_run_blocks_no_job
                key_of_an_occurrence_outlives_its_cancellation
                replayed_job_takes_its_unique_key_again
                jobs_are_ordered_by_priority_due_time_and_id
                claim_returns_at_most_its_limit
                attempts_are_counted_and_released
                retried_or_snoozed_job_waits_for_its_delay
                snoozed_job_keeps_its_position
                claim_takes_all_snoozed_jobs_within_its_limit
                crash_loop_ends
                cancellation_has_one_outcome
                new_job_waits_for_the_cancelled_run
                new_job_outlives_the_worker_of_the_cancelled_run
                only_waiting_jobs_can_be_changed
                queue_can_be_inspected
                paused_queue_grants_no_jobs
                queue_is_purged
                dead_jobs_are_bounded_and_can_be_replayed
                earlier_job_wakes_waiting_worker
                any_bytes_are_a_name_id_and_payload
                longest_delays_are_kept
                racing_workers_share_jobs
            ] [] $($cases)+
        }
    };
}

/// The common part of the contract macros: creates a test for each function of a list.
#[doc(hidden)]
#[macro_export]
macro_rules! __contract {
    (@read $claims:tt [$($attributes:tt)*] #[$attribute:meta] $($rest:tt)+) => {
        $crate::__contract! { @read $claims [$($attributes)* #[$attribute]] $($rest)+ }
    };
    (@read [$module:ident: $($name:ident)*] $attributes:tt |$claim:ident| $test:expr $(,)?) => {
        $($crate::__contract! { @test $module $attributes $claim [$test] $name })*
    };
    (@read $claims:tt $attributes:tt $store:expr $(,)?) => {
        $crate::__contract! { @read $claims $attributes |claim| claim($store.await).await }
    };
    (@test $module:ident [] $claim:ident $test:tt $name:ident) => {
        $crate::__contract! { @test $module [#[::tokio::test]] $claim $test $name }
    };
    (@test $module:ident [$($attributes:tt)+] $claim:ident [$test:expr] $name:ident) => {
        $($attributes)+
        async fn $name() {
            use $crate::testing::$module::$name as $claim;
            $test
        }
    };
}

#[cfg(test)]
mod tests {
    /// Each public function of a contract is in the list of its macro, so that it runs.
    #[test]
    fn every_contract_function_is_in_its_list() {
        let front = include_str!("mod.rs");
        let contracts = [
            ("contract", include_str!("contract.rs"), 30),
            ("lock_contract", include_str!("lock_contract.rs"), 20),
            ("idempotency_contract", include_str!("idempotency_contract.rs"), 12),
            ("delay_queue_contract", include_str!("delay_queue_contract.rs"), 15),
            ("cache_contract", include_str!("cache_contract.rs"), 15),
            ("exists_filter_contract", include_str!("exists_filter_contract.rs"), 10),
            ("lock_registry_contract", include_str!("lock_registry_contract.rs"), 4),
            ("idempotency_registry_contract", include_str!("idempotency_registry_contract.rs"), 7),
        ];
        for (name, contract, least) in contracts {
            let claims: Vec<_> =
                contract.lines().filter_map(|line| line.strip_prefix("pub async fn ")?.split('<').next()).collect();
            let listed = front
                .split(&format!("@read [{name}:"))
                .nth(1)
                .and_then(|rest| rest.split(']').next())
                .unwrap_or_default();
            for claim in &claims {
                assert!(listed.lines().any(|line| line.trim() == *claim), "{claim} is not in the list");
            }
            assert!(claims.len() > least, "{claims:?}");
        }
    }
}
