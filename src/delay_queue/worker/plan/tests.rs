use super::super::pending_ack::PendingAck;
use super::*;
use crate::delay_queue::id::JobId;
use crate::delay_queue::store::{AckKind, Claim, JobLease, QueueKey};

const CONCURRENCY: usize = 8;

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// A worker that decides at `now`.
struct Worker {
    now: Instant,
    partitions: Vec<Partition>,
    // Its `partitions` are empty: `plan` sets them.
    state: State<'static>,
}

impl Worker {
    /// A worker of a queue with this many partitions, before its first claim. It polled its service, and `ready` instances are ready.
    fn polled(partitions: u16, ready: usize) -> Self {
        let now = Instant::now();
        let state = State {
            stage: Stage::Working,
            progress: Progress::Polled { wanted: CONCURRENCY, is_pending: ready < CONCURRENCY },
            partitions: &[],
            next_partition: 0,
            concurrency: CONCURRENCY,
            abort_after: secs(5),
            running: 0,
            ready,
            calls: 0,
            reserved: 0,
            acks_in_flight: 0,
            check_at: None,
            summary_at: None,
        };
        let partitions = (0..partitions)
            .map(|partition| Partition::new(QueueKey::new("jobs").with_partition(partition), now))
            .collect();
        Self { now, partitions, state }
    }

    /// A worker after the store replied that no job is due.
    fn idle() -> Self {
        let mut worker = Self::polled(1, 0);
        worker.state.progress = Progress::Polled { wanted: 0, is_pending: false };
        worker.partition().claim_at = None;
        worker
    }

    fn partition(&mut self) -> &mut Partition {
        &mut self.partitions[0]
    }

    /// Adds this many unrecorded results to the first partition.
    fn add_acks(&mut self, acks: u64) {
        for token in 0..acks {
            let lease = JobLease { id: JobId::new("job"), token, unique: None };
            self.partitions[0].add_ack(self.now + secs(30), PendingAck::new(lease, AckKind::Done));
        }
    }

    fn plan(&self) -> Action {
        plan(self.now, &State { partitions: &self.partitions, ..self.state })
    }

    /// Starts the calls that the worker plans, and returns them. None of them gets a reply.
    fn calls(&mut self) -> Vec<Call> {
        let mut calls = Vec::new();
        while let Action::Call(call) = self.plan() {
            let sent = self.partitions[call.partition].start_call(call, self.now);
            self.state.calls += 1;
            self.state.reserved += call.max_jobs;
            self.state.acks_in_flight += sent.acks.len();
            calls.push(call);
        }
        calls
    }

    /// What the worker waits for when it has nothing else to do.
    fn waits(&mut self) -> (Option<Instant>, IdleServices) {
        self.calls();
        match self.plan() {
            Action::Wait { until, services } => (until, services),
            action => panic!("{action:?}"),
        }
    }

    fn wakes_at(&mut self) -> Option<Instant> {
        self.waits().0
    }
}

const fn call(partition: usize, acks: usize, max_jobs: usize) -> Call {
    Call { partition, acks, max_jobs }
}

// The order of actions in a round.

#[test]
fn round_begins_with_the_check_of_running_jobs() {
    let mut worker = Worker::polled(1, 8);
    (worker.state.progress, worker.state.check_at, worker.state.summary_at) =
        (Progress::Start, Some(worker.now), Some(worker.now));
    assert_eq!(worker.plan(), Action::CheckJobs);
    worker.state.check_at = Some(worker.now + secs(1));
    assert_eq!(worker.plan(), Action::LogSummary);
    worker.state.summary_at = None;
    assert_eq!(worker.plan(), Action::PollServices { wanted: 8 });
}

#[test]
fn jobs_are_checked_once_in_a_round() {
    let mut worker = Worker::idle();
    (worker.state.progress, worker.state.check_at) = (Progress::Checked, Some(worker.now));
    assert_eq!(worker.plan(), Action::PollServices { wanted: 0 });
    worker.state.progress = Progress::Polled { wanted: 0, is_pending: false };
    assert_eq!(worker.wakes_at(), Some(worker.now), "the next round comes at once");
}

// How many instances of the service are wanted.

fn wanted(worker: &mut Worker) -> usize {
    worker.state.progress = Progress::Checked;
    match worker.plan() {
        Action::PollServices { wanted } => wanted,
        action => panic!("{action:?}"),
    }
}

#[test]
fn service_is_polled_for_each_job_that_may_be_claimed() {
    let mut worker = Worker::polled(1, 0);
    (worker.state.running, worker.state.reserved) = (3, 1);
    assert_eq!(wanted(&mut worker), 5, "four more jobs, and the reserved one");
}

#[test]
fn no_service_is_wanted_while_no_job_is_due() {
    let mut worker = Worker::idle();
    assert_eq!(wanted(&mut worker), 0);
    worker.partition().claim_at = Some(worker.now + secs(1));
    assert_eq!(wanted(&mut worker), 0);
    worker.partition().has_more_due = true;
    assert_eq!(wanted(&mut worker), 8, "a claim is in flight, and more jobs are due");
}

#[test]
fn failed_store_is_tested_with_one_service() {
    let mut worker = Worker::polled(1, 0);
    worker.partition().failures = 1;
    assert_eq!(wanted(&mut worker), 1);
    worker.partition().backoff_until = worker.now + secs(1);
    assert_eq!(wanted(&mut worker), 0, "no call is due");
}

#[test]
fn failed_part_does_not_limit_the_services_of_others() {
    let mut worker = Worker::polled(2, 0);
    worker.partition().failures = 1;
    assert_eq!(wanted(&mut worker), 8);
}

#[test]
fn no_service_is_wanted_during_a_shutdown() {
    let mut worker = Worker::polled(1, 0);
    (worker.state.stage, worker.state.running) = (Stage::Draining(worker.now + secs(20)), 1);
    assert_eq!(wanted(&mut worker), 0);
}

// Claims.

#[test]
fn due_jobs_are_claimed_for_ready_services() {
    assert_eq!(Worker::polled(1, 3).calls(), [call(0, 0, 3)]);
}

#[test]
fn nothing_is_claimed_without_a_ready_service() {
    let mut worker = Worker::polled(1, 0);
    assert_eq!(worker.waits(), (Some(worker.now + Claim::MAX_WAIT), IdleServices::Await(1)));
}

#[test]
fn reserved_services_are_not_claimed_for_again() {
    let mut worker = Worker::polled(1, 3);
    worker.state.reserved = 2;
    assert_eq!(worker.calls(), [call(0, 0, 1)]);
}

#[test]
fn claims_stay_within_the_concurrency() {
    let mut worker = Worker::polled(1, 8);
    worker.state.running = 6;
    assert_eq!(worker.calls(), [call(0, 0, 2)]);
    worker.state.running = 8;
    assert_eq!(worker.calls(), []);
}

#[test]
fn due_parts_share_the_ready_services() {
    assert_eq!(Worker::polled(3, 8).calls(), [call(0, 0, 3), call(1, 0, 3), call(2, 0, 2)]);
}

#[test]
fn half_of_the_jobs_is_claimed_while_more_are_due() {
    let mut worker = Worker::polled(1, 8);
    worker.partition().has_more_due = true;
    assert_eq!(worker.calls(), [call(0, 0, 4)]);
}

#[test]
fn job_in_the_future_is_not_claimed() {
    let mut worker = Worker::polled(1, 8);
    worker.partition().claim_at = Some(worker.now + secs(1));
    assert_eq!(worker.wakes_at(), Some(worker.now + secs(1)));
}

#[test]
fn part_of_an_abandoned_job_skips_a_claim() {
    let mut worker = Worker::polled(1, 8);
    worker.add_acks(1);
    worker.partition().next_call_skips_claim = true;
    assert_eq!(worker.calls(), [call(0, 1, 0)]);
}

// Acknowledgements.

#[test]
fn results_are_recorded_although_no_service_is_ready() {
    let mut worker = Worker::polled(1, 0);
    worker.add_acks(3);
    assert_eq!(worker.calls(), [call(0, 3, 0)]);
}

#[test]
fn results_and_claims_share_a_call() {
    let mut worker = Worker::polled(1, 8);
    worker.add_acks(3);
    assert_eq!(worker.calls(), [call(0, 3, 8)]);
}

#[test]
fn call_records_no_more_results_than_a_batch() {
    let mut worker = Worker::polled(1, 8);
    worker.add_acks(MAX_BATCH as u64 + 3);
    assert_eq!(worker.calls(), [call(0, MAX_BATCH, 5)], "three unrecorded results count as running jobs");
}

#[test]
fn second_call_needs_many_results_and_due_jobs() {
    let mut worker = Worker::idle();
    (worker.partition().calls, worker.state.running) = (1, 4);
    worker.add_acks(2);
    assert_eq!(worker.calls(), []);
    worker.partition().has_more_due = true;
    assert_eq!(worker.calls(), [call(0, 2, 0)]);
    worker.add_acks(4);
    assert_eq!(worker.calls(), [], "two calls are in flight");
}

#[test]
fn results_are_recorded_during_a_shutdown() {
    let mut worker = Worker::polled(1, 8);
    (worker.state.stage, worker.state.running) = (Stage::Draining(worker.now + secs(20)), 1);
    worker.add_acks(2);
    assert_eq!(worker.calls(), [call(0, 2, 0)], "and nothing is claimed");
}

// Failures of the store.

#[test]
fn failed_part_waits_until_its_pause_is_over() {
    let mut worker = Worker::polled(1, 1);
    worker.add_acks(1);
    (worker.partition().failures, worker.partition().backoff_until) = (1, worker.now + secs(1));
    assert_eq!(worker.wakes_at(), Some(worker.now + secs(1)));
    worker.now += secs(1);
    assert_eq!(worker.calls(), [call(0, 1, 1)], "one job tests the store");
}

#[test]
fn probe_of_one_of_several_parts_claims_nothing() {
    let mut worker = Worker::polled(2, 8);
    worker.partition().failures = 1;
    assert_eq!(worker.calls(), [call(0, 0, 0), call(1, 0, 8)]);
}

// Calls that record and claim nothing: they hand the timekeeper role over, or refresh the age of due jobs.

#[test]
fn timekeeper_without_a_ready_service_hands_over() {
    let mut worker = Worker::polled(1, 0);
    worker.partition().is_timekeeper = true;
    assert_eq!(worker.calls(), [call(0, 0, 0)]);
    assert!(!worker.partition().is_timekeeper);
}

#[test]
fn timekeeper_without_a_due_job_stays() {
    let mut worker = Worker::idle();
    worker.partition().is_timekeeper = true;
    assert_eq!(worker.wakes_at(), None);
}

#[test]
fn timekeeper_hands_over_at_a_shutdown() {
    let mut worker = Worker::idle();
    (worker.state.stage, worker.state.running) = (Stage::Draining(worker.now + secs(20)), 1);
    worker.partition().is_timekeeper = true;
    assert_eq!(worker.calls(), [call(0, 0, 0)]);
}

#[test]
fn age_of_due_jobs_is_refreshed_without_capacity() {
    let mut worker = Worker::polled(1, 8);
    worker.state.running = CONCURRENCY;
    let refresh_at = worker.now + Claim::MAX_WAIT;
    assert_eq!(worker.wakes_at(), Some(refresh_at));
    worker.now = refresh_at;
    assert_eq!(worker.calls(), [call(0, 0, 0)]);
}

// Waits.

#[test]
fn idle_worker_sleeps_until_it_is_woken() {
    assert_eq!(Worker::idle().waits(), (None, IdleServices::Release));
}

#[test]
fn worker_wakes_for_whatever_comes_first() {
    let mut worker = Worker::idle();
    let now = worker.now;
    worker.partition().claim_at = Some(now + secs(4));
    assert_eq!(worker.wakes_at(), Some(now + secs(4)));
    worker.state.check_at = Some(now + secs(3));
    assert_eq!(worker.wakes_at(), Some(now + secs(3)));
    worker.state.summary_at = Some(now + secs(2));
    assert_eq!(worker.wakes_at(), Some(now + secs(2)));
    (worker.state.stage, worker.state.running) = (Stage::Draining(now + secs(1)), 1);
    assert_eq!(worker.wakes_at(), Some(now + secs(1)));
}

#[test]
fn services_are_kept_while_a_claim_is_in_flight() {
    let mut worker = Worker::idle();
    (worker.state.ready, worker.state.reserved, worker.state.calls) = (2, 2, 1);
    assert_eq!(worker.waits().1, IdleServices::Keep);
}

#[test]
fn worker_waits_for_one_more_service() {
    let mut worker = Worker::polled(1, 3);
    assert_eq!(worker.waits().1, IdleServices::Await(4));
}

// The shutdown.

/// The current instant, and the next action of a worker in this stage while this many jobs run.
fn next_stage(stage: impl Fn(Instant) -> Stage, running: usize) -> (Instant, Action) {
    let mut worker = Worker::idle();
    (worker.state.stage, worker.state.running) = (stage(worker.now), running);
    (worker.now, worker.plan())
}

#[test]
fn jobs_are_told_to_give_up_after_the_grace_period() {
    let (now, action) = next_stage(Stage::Draining, 1);
    assert_eq!(action, Action::Enter(Stage::Releasing(now + secs(6))), "dropped after 5 s, abandoned a second later");
}

#[test]
fn grace_period_ends_with_the_last_job() {
    let (now, action) = next_stage(|now| Stage::Draining(now + secs(20)), 0);
    assert_eq!(action, Action::Enter(Stage::Flushing(now + secs(5))));
}

#[test]
fn grace_period_waits_for_claims_in_flight() {
    let mut worker = Worker::idle();
    (worker.state.stage, worker.state.reserved, worker.state.calls) = (Stage::Draining(worker.now + secs(20)), 1, 1);
    assert_eq!(worker.waits(), (Some(worker.now + secs(20)), IdleServices::Keep));
}

#[test]
fn jobs_that_do_not_yield_are_abandoned() {
    let (now, action) = next_stage(|now| Stage::Releasing(now + secs(1)), 1);
    assert_eq!(action, Action::Wait { until: Some(now + secs(1)), services: IdleServices::Release });
    let (now, action) = next_stage(Stage::Releasing, 1);
    assert_eq!(action, Action::Enter(Stage::Flushing(now + secs(5))));
}

#[test]
fn worker_stops_when_all_results_are_recorded() {
    let (_, action) = next_stage(|now| Stage::Flushing(now + secs(5)), 0);
    assert_eq!(action, Action::Stop { unrecorded: 0 });
}

#[test]
fn worker_stops_after_all_replies() {
    let mut worker = Worker::idle();
    worker.state.stage = Stage::Flushing(worker.now + secs(5));
    worker.add_acks(2);
    assert_eq!(worker.calls(), [call(0, 2, 0)]);
    assert_eq!(worker.wakes_at(), Some(worker.now + secs(5)));
    worker.state.acks_in_flight = 0;
    assert_eq!(worker.wakes_at(), Some(worker.now + secs(5)), "a call is in flight");
    worker.state.calls = 0;
    assert_eq!(worker.plan(), Action::Stop { unrecorded: 0 });
}

#[test]
fn worker_stops_after_a_time_without_a_working_store() {
    let mut worker = Worker::idle();
    worker.state.stage = Stage::Flushing(worker.now + secs(5));
    worker.add_acks(2);
    worker.partition().backoff_until = worker.now + secs(6);
    worker.state.acks_in_flight = 1;
    assert_eq!(worker.wakes_at(), Some(worker.now + secs(5)));
    worker.now += secs(5);
    assert_eq!(worker.plan(), Action::Stop { unrecorded: 3 });
}

#[test]
fn idle_worker_shuts_down_at_once_if_its_service_fails() {
    let mut worker = Worker::polled(1, 0);
    (worker.state.stage, worker.state.progress) =
        (Stage::draining(worker.now, secs(20)), Progress::Polled { wanted: 8, is_pending: false });
    assert_eq!(worker.plan(), Action::Enter(Stage::Flushing(worker.now + secs(5))));
}
