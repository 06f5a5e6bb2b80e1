//! Test support for programs that use Tollgate, and contract tests for your own backends. Enable the feature `testing` in
//! `[dev-dependencies]`:
//!
//! ```toml
//! [dev-dependencies]
//! tollgate = { version = "0.1", features = ["testing"] }
//! tokio = { version = "1", features = ["full", "test-util"] }
//! ```
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

pub mod contract;
pub mod delay_queue_contract;
mod exhaust;
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
    ($($told:tt)+) => {
        $crate::__contract! {
            @read [contract:
                exactly_the_quota_is_admitted
                subjects_and_policies_are_counted_apart
                policies_of_one_name_share_their_counts
                a_denial_charges_nothing
                waiting_as_told_is_enough_and_not_too_much
                a_cost_of_nothing_always_passes_and_charges_nothing
                a_peek_tells_what_a_check_would_and_charges_nothing
                a_reset_forgets_one_subject
                an_untouched_quota_has_nothing_to_reset
                a_lower_limit_keeps_what_was_counted
                a_higher_limit_keeps_what_was_counted
                another_window_starts_afresh
                a_fixed_window_ends_all_at_once
                a_sliding_log_never_admits_more_in_any_window
                a_full_sliding_log_works
                the_longest_windows_and_the_largest_costs_are_counted
                racing_callers_get_the_quota_between_them
                any_bytes_are_a_subject
                a_bucket_refills_evenly_up_to_its_burst
                a_sliding_window_fades
                the_largest_numbers_fit_into_every_algorithm
                several_limits_are_charged_together_or_not_at_all
                the_answer_names_every_violated_limit_and_the_longest_wait
                a_yes_without_details_charges_as_a_decision_does
                an_answer_without_waiting_charges_as_a_decision_does
                try_acquire_says_what_a_decision_would
                several_subjects_are_charged_together_or_not_at_all
                one_subject_twice_is_charged_twice
                what_is_given_back_can_be_used_again
                giving_back_makes_no_tokens
                nothing_is_given_back_into_another_window
                more_is_never_given_back_than_was_used
                a_charge_afterwards_is_a_debt
                a_debt_is_never_deeper_than_the_quota
                a_debt_over_two_windows_is_no_deeper
                a_block_denies_and_forgets_nothing
                a_change_of_quota_keeps_resets_or_scales
                a_correction_under_another_quota_forgets_nothing
                what_is_charged_afterwards_counts_under_a_larger_quota
                racing_callers_of_several_limits_get_the_tightest_between_them
            ] [] $($told)+
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
    ($($told:tt)+) => {
        $crate::__contract! {
            @read [lock_contract:
                a_free_lock_is_granted_and_a_held_one_is_not
                keys_and_names_are_separate_locks
                an_acquisition_may_be_asked_again
                fences_rise_with_every_grant
                a_lease_ends_by_itself
                a_renewal_lets_a_lease_last
                a_lease_that_has_ended_does_not_come_back
                many_leases_are_renewed_at_once
                only_the_holder_gives_a_lease_back
                any_bytes_are_a_lock
                one_of_many_racing_gets_the_lock
                many_who_ask_at_the_same_time_are_answered_one_by_one
                a_release_wakes_those_who_watch
                one_at_a_time_with_rising_fences
                who_waits_gets_the_lock_when_it_is_given_back
                waiting_ends_in_time
                who_waits_gets_the_lock_of_the_dead
                those_who_wait_are_served_in_order
                a_line_is_bounded
                a_held_lease_outlives_its_time
                a_handle_more_keeps_the_lock
                nothing_is_held_for_longer_than_it_may_be
                a_body_runs_under_the_lock_and_no_longer
                bad_times_are_refused_by_name
                a_shutdown_waits_for_what_is_held
                any_free_segment_will_do
                a_semaphore_lets_in_so_many_at_a_time
                permits_are_counted_to_the_unit
                several_locks_are_taken_together_or_not_at_all
                leases_are_taken_together_in_one_step
                fair_locks_are_had_in_the_order_in_which_they_were_asked_for
                the_dead_lose_their_place
                readers_share_and_writers_do_not
                readers_do_not_pass_a_writer_who_waits
                a_dead_reader_expires_alone
                a_place_in_line_is_kept_by_asking
                only_who_is_next_is_told
                where_there_is_no_line_all_who_watch_are_told
                readers_and_writers_never_meet
                who_gives_up_leaves_the_line
                a_key_is_held_as_one_kind
                fences_are_larger_than_the_floor
                a_loss_that_the_release_finds_is_told
            ] [] $($told)+
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
    ($($told:tt)+) => {
        $crate::__contract! {
            @read [idempotency_contract:
                an_operation_is_granted_once
                scopes_and_keys_are_apart
                a_beginning_may_be_asked_again
                what_is_said_at_once_is_so
                an_answer_is_kept_as_it_was
                an_answer_that_is_not_kept_leaves_a_mark
                another_request_is_told_nothing_but_that
                a_live_attempt_is_never_taken_over
                a_completed_answer_is_never_taken_over
                who_was_taken_over_changes_nothing
                a_lease_comes_back_unless_somebody_took_over
                what_is_given_back_is_begun_again
                what_is_given_up_on_its_way_claims_nothing
                a_checkpoint_is_found_by_the_next_attempt
                a_checkpoint_that_comes_late_changes_nothing
                a_checkpoint_keeps_the_request
                what_is_known_of_a_body_stays_known
                what_was_taken_over_stays_the_same_request
                who_watches_is_told
                an_answer_is_forgotten_when_its_time_is_over
                one_of_many_racing_begins
                a_scope_has_a_bounded_number_of_records
            ] [] $($told)+
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
    ($($told:tt)+) => {
        $crate::__contract! {
            @read [lock_registry_contract:
                a_holder_can_be_seen
                holders_of_permits_are_told_apart
                a_lock_can_be_taken_away
                who_is_first_in_line_gets_what_is_taken_away
                held_locks_are_listed
            ] [] $($told)+
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
    ($($told:tt)+) => {
        $crate::__contract! {
            @read [idempotency_registry_contract:
                each_state_can_be_seen
                what_was_taken_over_has_no_checkpoint
                what_is_forgotten_is_begun_anew
                what_is_not_as_it_was_found_is_left_alone
                what_is_unknown_is_completed_by_hand
                what_is_not_unknown_is_not_completed_by_hand
                what_was_completed_by_hand_is_completed_anew
                operations_are_listed
                whoever_waits_is_told
            ] [] $($told)+
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
    ($($told:tt)+) => {
        $crate::__contract! {
            @read [delay_queue_contract:
                a_job_is_claimed_once_and_gone_when_it_is_done
                a_job_is_not_claimed_before_it_is_due
                a_job_comes_back_when_its_lease_has_ended
                an_id_is_there_once
                a_batch_is_answered_in_order
                a_unique_key_keeps_others_out
                removed_job_releases_its_unique_key
                expired_unique_key_of_a_cancelled_run_blocks_no_job
                key_of_an_occurrence_outlives_its_cancellation
                a_replayed_job_keeps_others_out_again
                jobs_come_by_priority_then_due_then_id
                no_more_is_claimed_than_was_asked_for
                attempts_are_counted_and_given_back
                what_is_put_back_waits
                snoozed_job_keeps_its_place
                claim_takes_as_many_snoozed_jobs_as_it_may
                a_crash_loop_ends
                a_cancellation_has_one_outcome
                new_job_waits_for_the_cancelled_run
                new_job_outlives_the_worker_of_the_cancelled_run
                changes_are_for_what_waits
                a_queue_can_be_looked_at
                a_paused_queue_lends_nothing
                a_queue_is_drained
                the_dead_are_kept_in_bounds_and_can_be_replayed
                who_waits_is_woken_by_an_earlier_job
                any_bytes_are_a_name_an_id_and_a_payload
                the_longest_delays_are_kept
                racing_workers_share_the_jobs
            ] [] $($told)+
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
