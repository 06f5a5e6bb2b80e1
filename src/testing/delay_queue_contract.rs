//! The contract tests of [`DelayQueueStore`]: each function tests one requirement. [`delay_queue_contract!`](crate::delay_queue_contract)
//! runs them on a backend.
//!
//! A test gets a store that no other test uses, and panics if the store violates the requirement. The tests wait on tokio's clock. They
//! take no time if it is paused, and up to some seconds otherwise.
#![allow(clippy::unwrap_used, reason = "a failed requirement panics at its line")]

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::delay_queue::store::{
    Ack, AckKind, Admission, Claim, Claimed, ClaimedJob, DelayQueueStore, Died, Expired, Extended, Finished, MAX_BATCH,
    QueueKey, WorkerId,
};
use crate::delay_queue::{
    Cancelled, Changed, Counts, DeadLimits, Due, JobId, NewJob, Priority, Reason, State, Unique, UniqueFor,
};

/// A lease that does not end during a test, even on a slow machine.
const LONG: Duration = Duration::from_secs(60);
/// A time whose end a test can wait for, with tolerance for a slow machine.
const SHORT: Duration = Duration::from_secs(2);
/// The maximum number of jobs.
const MANY: u64 = 1_000_000;

fn queue() -> QueueKey {
    QueueKey::new("contract")
}

fn job(id: &str) -> NewJob {
    NewJob::new(JobId::from(id), id.as_bytes())
}

fn later(id: &str, delay: Duration) -> NewJob {
    NewJob { due: Due::In(delay), ..job(id) }
}

fn claim(limit: usize, lease: Duration) -> Claim {
    Claim { worker: WorkerId::random().unwrap(), limit, lease, dead: DeadLimits::default() }
}

async fn push<S: DelayQueueStore>(store: &S, jobs: &[NewJob]) {
    for admission in store.push(&queue(), jobs, MANY).await.unwrap() {
        assert_eq!(admission, Admission::New);
    }
}

async fn ask<S: DelayQueueStore>(store: &S, limit: usize) -> Claimed {
    store.claim(&queue(), &[], &claim(limit, LONG)).await.unwrap()
}

/// Claims exactly these jobs, in this order.
async fn take<S: DelayQueueStore>(store: &S, ids: &[&str]) -> Vec<ClaimedJob> {
    let jobs = ask(store, 100).await.jobs;
    assert_eq!(names(&jobs), ids);
    jobs
}

fn names(jobs: &[ClaimedJob]) -> Vec<&str> {
    jobs.iter().map(|claimed| claimed.job.id.as_str()).collect()
}

async fn finish<S: DelayQueueStore>(store: &S, job: &ClaimedJob, kind: AckKind) -> Finished {
    let finish = Ack { lease: job.lease(), kind };
    store.claim(&queue(), &[finish], &claim(0, LONG)).await.unwrap().finished[0]
}

fn retry(delay: Duration) -> AckKind {
    AckKind::Retry { delay, error: "it did not work".into() }
}

fn with_key(id: &str, span: UniqueFor) -> NewJob {
    NewJob { unique: Some(Unique { key: "user".into(), span }), ..job(id) }
}

async fn add<S: DelayQueueStore>(store: &S, job: NewJob) -> Admission {
    store.push(&queue(), &[job], MANY).await.unwrap()[0]
}

async fn counts<S: DelayQueueStore>(store: &S) -> [u64; 4] {
    let Counts { waiting, due, running, dead, .. } = store.counts(&queue()).await.unwrap();
    [waiting, due, running, dead]
}

async fn list<S: DelayQueueStore>(store: &S, state: State) -> Vec<String> {
    let jobs = store.list(&queue(), state, 0, 100).await.unwrap();
    jobs.iter().map(|job| job.id.as_str().to_owned()).collect()
}

async fn state<S: DelayQueueStore>(store: &S, id: &str) -> Option<State> {
    store.get(&queue(), &JobId::from(id)).await.unwrap().map(|job| job.state)
}

/// A pushed job is claimed once, unchanged, and removed when it is done.
pub async fn job_is_claimed_once_and_removed_when_done<S: DelayQueueStore>(store: S) {
    let mut new = job("a");
    new.headers.insert("traceparent", "00-1-2-3");
    push(&store, &[new.clone()]).await;
    assert_eq!(state(&store, "a").await, Some(State::Waiting));
    let jobs = take(&store, &["a"]).await;
    assert_eq!((&jobs[0].job.payload, &jobs[0].job.headers), (&new.payload, &new.headers));
    assert_eq!((jobs[0].job.attempt, jobs[0].job.max_attempts), (1, NewJob::DEFAULT_ATTEMPTS));
    assert_eq!(state(&store, "a").await, Some(State::Running));
    take(&store, &[]).await;
    assert_eq!(finish(&store, &jobs[0], AckKind::Done).await, Finished::Done);
    assert_eq!(state(&store, "a").await, None);
    assert_eq!(finish(&store, &jobs[0], AckKind::Done).await, Finished::Gone);
}

/// A job is claimed after its delay, and not before. The reply to an earlier claim says how long to wait.
pub async fn job_is_not_claimed_before_it_is_due<S: DelayQueueStore>(store: S) {
    let delay = SHORT;
    push(&store, &[later("a", delay)]).await;
    let early = ask(&store, 1).await;
    let next = early.next.expect("a job is waiting");
    assert!(early.jobs.is_empty() && !early.more && next <= delay + Duration::from_millis(1), "{early:?}");
    sleep(next).await;
    let jobs = loop {
        let claimed = ask(&store, 1).await;
        for claimed in &claimed.jobs {
            assert!(claimed.job.due_at >= claimed.job.enqueued_at + delay, "{claimed:?}");
        }
        if !claimed.jobs.is_empty() {
            assert!(claimed.now >= claimed.jobs[0].job.due_at);
            break claimed.jobs;
        }
        sleep(Duration::from_millis(5)).await;
    };
    assert_eq!(names(&jobs), ["a"]);
}

/// An extended lease lasts. Without an extension, the lease ends, and the job is claimed again with a larger token.
pub async fn job_returns_when_its_lease_ends<S: DelayQueueStore>(store: S) {
    push(&store, &[job("a"), job("b")]).await;
    let first = store.claim(&queue(), &[], &claim(2, SHORT)).await.unwrap().jobs;
    let extended = store.extend(&queue(), &[first[0].lease()], LONG).await.unwrap();
    assert_eq!(extended, [Extended::Held]);
    sleep(SHORT + Duration::from_millis(20)).await;
    let second = take(&store, &["b"]).await;
    assert!(second[0].token > first[1].token);
    assert_eq!(second[0].job.attempt, 2);
    assert_eq!(finish(&store, &first[1], AckKind::Done).await, Finished::Lost);
    let extended = store.extend(&queue(), &[first[1].lease(), first[0].lease()], LONG).await.unwrap();
    assert_eq!(extended, [Extended::Lost, Extended::Held]);
    assert_eq!(finish(&store, &second[0], AckKind::Done).await, Finished::Done);
    assert_eq!(finish(&store, &first[0], AckKind::Done).await, Finished::Done);
}

/// A push with the id of a waiting or running job changes nothing. If the job is done or dead, the push adds a new job.
pub async fn id_is_unique<S: DelayQueueStore>(store: S) {
    let exists = Admission::Exists(JobId::from("a"));
    let other = NewJob { payload: [7].into(), ..later("a", LONG) };
    push(&store, &[job("a")]).await;
    assert_eq!(add(&store, other.clone()).await, exists);
    let jobs = take(&store, &["a"]).await;
    assert_eq!(*jobs[0].job.payload, *b"a");
    assert_eq!(add(&store, other.clone()).await, exists);
    assert_eq!(finish(&store, &jobs[0], AckKind::Done).await, Finished::Done);
    // Stores record the time of a push in ms.
    sleep(Duration::from_millis(2)).await;
    push(&store, &[job("a")]).await;
    // The new job is not the finished one.
    assert_eq!(finish(&store, &jobs[0], AckKind::Done).await, Finished::Gone);
    assert_eq!(finish(&store, &jobs[0], AckKind::Release).await, Finished::Lost);
    let jobs = take(&store, &["a"]).await;
    let refused = AckKind::Dead { reason: Reason::Refused, error: "no".into() };
    assert_eq!(finish(&store, &jobs[0], refused).await, Finished::Dead);
    push(&store, &[other]).await;
    assert_eq!(counts(&store).await, [1, 0, 0, 0]);
    assert_eq!(state(&store, "a").await, Some(State::Waiting));
}

/// A batch gets a reply for each job, in order, also if an id occurs twice or the queue has too little space.
pub async fn batch_replies_are_in_order<S: DelayQueueStore>(store: S) {
    let exists = |id: &str| Admission::Exists(JobId::from(id));
    let twins = [job("a"), later("a", Duration::from_secs(60))];
    assert_eq!(store.push(&queue(), &twins, 3).await.unwrap(), [Admission::New, exists("a")]);
    let keys = [job("b"), with_key("c", UniqueFor::WaitingOrRunning), with_key("d", UniqueFor::Waiting)];
    assert_eq!(store.push(&queue(), &keys, MANY).await.unwrap(), [Admission::New, Admission::New, exists("c")]);
    // The first of the two jobs with this id was kept.
    let jobs = take(&store, &["a", "b", "c"]).await;
    for job in &jobs {
        assert_eq!(finish(&store, job, AckKind::Done).await, Finished::Done);
    }

    push(&store, &[job("b")]).await;
    let batch = ["a", "b", "c", "a", "d"].map(job);
    let answers = store.push(&queue(), &batch, 3).await.unwrap();
    assert_eq!(answers, [Admission::New, exists("b"), Admission::New, exists("a"), Admission::Full]);
    assert_eq!(store.push(&queue(), &batch[4..], 3).await.unwrap(), [Admission::Full]);
    assert_eq!(store.push(&queue(), &[], 3).await.unwrap(), []);
    // Running jobs also take space.
    let jobs = ask(&store, 4).await.jobs;
    assert_eq!(jobs.len(), 3);
    assert_eq!(store.push(&queue(), &batch[4..], 3).await.unwrap(), [Admission::Full]);
    finish(&store, &jobs[0], AckKind::Done).await;
    assert_eq!(store.push(&queue(), &batch[4..], 3).await.unwrap(), [Admission::New]);
}

/// A unique key keeps other jobs out until its job is done, until its job is claimed, or for a time.
pub async fn unique_key_excludes_other_jobs<S: DelayQueueStore>(store: S) {
    let exists = |id: &str| Admission::Exists(JobId::from(id));
    let while_there = UniqueFor::WaitingOrRunning;
    assert_eq!(add(&store, with_key("a", while_there)).await, Admission::New);
    assert_eq!(add(&store, with_key("b", while_there)).await, exists("a"));
    let jobs = take(&store, &["a"]).await;
    assert_eq!(add(&store, with_key("b", while_there)).await, exists("a"));
    assert_eq!(finish(&store, &jobs[0], AckKind::Snooze { delay: Duration::ZERO }).await, Finished::Done);
    assert_eq!(add(&store, with_key("b", while_there)).await, exists("a"));
    let jobs = take(&store, &["a"]).await;
    assert_eq!(finish(&store, &jobs[0], AckKind::Done).await, Finished::Done);
    assert_eq!(add(&store, with_key("b", while_there)).await, Admission::New);
    assert_eq!(store.cancel(&queue(), &JobId::from("b"), false).await.unwrap(), Cancelled::Removed);

    assert_eq!(add(&store, with_key("c", UniqueFor::Waiting)).await, Admission::New);
    assert_eq!(add(&store, with_key("d", UniqueFor::Waiting)).await, exists("c"));
    take(&store, &["c"]).await;
    assert_eq!(add(&store, with_key("d", UniqueFor::Waiting)).await, Admission::New);
    assert_eq!(store.purge(&queue(), 10, false).await.unwrap(), 1);

    assert_eq!(add(&store, with_key("e", UniqueFor::Time(SHORT))).await, Admission::New);
    let jobs = take(&store, &["e"]).await;
    assert_eq!(finish(&store, &jobs[0], AckKind::Done).await, Finished::Done);
    assert_eq!(add(&store, with_key("f", while_there)).await, exists("e"));
    sleep(SHORT + Duration::from_millis(20)).await;
    assert_eq!(add(&store, with_key("f", while_there)).await, Admission::New);
    assert_eq!(store.cancel(&queue(), &JobId::from("f"), false).await.unwrap(), Cancelled::Removed);

    // Longer than the maximum time.
    assert_eq!(add(&store, with_key("g", UniqueFor::Time(Duration::MAX))).await, Admission::New);
    assert_eq!(add(&store, with_key("h", while_there)).await, exists("g"));
}

/// The removal of a job releases its unique key, also a key that is held for a time, unless the caller keeps it. A job that is done does
/// not release such a key.
pub async fn removed_job_releases_its_unique_key<S: DelayQueueStore>(store: S) {
    let held = |id| with_key(id, UniqueFor::Time(LONG * 60));
    let (user, [a, b]) = ("user".into(), ["a", "b"].map(JobId::from));
    for keeps in [false, true] {
        assert_eq!(add(&store, held("a")).await, Admission::New);
        assert_eq!(store.cancel(&queue(), &a, keeps).await.unwrap(), Cancelled::Removed);
        let expected = if keeps { Admission::Exists(a) } else { Admission::New };
        assert_eq!(add(&store, held("b")).await, expected);
        assert!(store.release_unique(&queue(), &user).await.unwrap());
        assert!(!store.release_unique(&queue(), &user).await.unwrap());
        store.cancel(&queue(), &b, keeps).await.unwrap();

        assert_eq!(add(&store, held("a")).await, Admission::New);
        assert_eq!(store.purge(&queue(), 10, keeps).await.unwrap(), 1);
        assert_eq!(add(&store, held("b")).await, expected);
        assert!(store.release_unique(&queue(), &user).await.unwrap());
        store.cancel(&queue(), &b, keeps).await.unwrap();

        // The next job waits for the running one.
        assert_eq!(add(&store, held("a")).await, Admission::New);
        let jobs = take(&store, &["a"]).await;
        assert_eq!(store.cancel(&queue(), &a, keeps).await.unwrap(), Cancelled::Notified);
        assert_eq!(add(&store, held("b")).await, expected);
        take(&store, &[]).await;
        assert_eq!(finish(&store, &jobs[0], AckKind::Done).await, Finished::Done);
        for job in take(&store, if keeps { &[] } else { &["b"] }).await {
            assert_eq!(finish(&store, &job, AckKind::Done).await, Finished::Done);
        }
        assert!(store.release_unique(&queue(), &user).await.unwrap());
    }
    // The worker cancels the job, or the job is dead and then removed.
    for kind in [AckKind::Cancelled, AckKind::Dead { reason: Reason::Refused, error: "no".into() }] {
        assert_eq!(add(&store, held("a")).await, Admission::New);
        let jobs = take(&store, &["a"]).await;
        let expected = if kind == AckKind::Cancelled { Finished::Done } else { Finished::Dead };
        assert_eq!(finish(&store, &jobs[0], kind).await, expected);
        if expected == Finished::Dead {
            assert_eq!(add(&store, held("b")).await, Admission::Exists(a));
            assert_eq!(store.forget(&queue(), &[b, a]).await.unwrap(), [false, true]);
        }
        assert_eq!(add(&store, held("b")).await, Admission::New);
        assert!(store.release_unique(&queue(), &user).await.unwrap());
        store.cancel(&queue(), &b, false).await.unwrap();
    }
    // Another job can take the released key of an existing job.
    let while_there = |id| with_key(id, UniqueFor::WaitingOrRunning);
    assert_eq!(add(&store, while_there("c")).await, Admission::New);
    assert!(store.release_unique(&queue(), &user).await.unwrap());
    assert_eq!(add(&store, while_there("d")).await, Admission::New);
    for job in take(&store, &["c", "d"]).await {
        assert_eq!(add(&store, while_there("e")).await, Admission::Exists(JobId::from("d")));
        assert_eq!(finish(&store, &job, AckKind::Done).await, Finished::Done);
    }
    assert_eq!(add(&store, while_there("e")).await, Admission::New);
}

/// A unique key whose time has ended while its job ran does not block the next job, also if the running job is cancelled.
pub async fn expired_unique_key_of_a_cancelled_run_blocks_no_job<S: DelayQueueStore>(store: S) {
    let a = JobId::from("a");
    assert_eq!(add(&store, with_key("a", UniqueFor::Time(Duration::from_millis(20)))).await, Admission::New);
    let jobs = take(&store, &["a"]).await;
    sleep(Duration::from_millis(50)).await;
    assert_eq!(store.cancel(&queue(), &a, false).await.unwrap(), Cancelled::Notified);
    assert_eq!(add(&store, with_key("b", UniqueFor::WaitingOrRunning)).await, Admission::New);
    let next = take(&store, &["b"]).await;
    assert_eq!(finish(&store, &jobs[0], AckKind::Done).await, Finished::Done);
    assert_eq!(finish(&store, &next[0], AckKind::Done).await, Finished::Done);
}

/// The unique key of an occurrence is held until its time is over, even if the job is cancelled or purged.
pub async fn key_of_an_occurrence_outlives_its_cancellation<S: DelayQueueStore>(store: S) {
    let occurrence = |id| with_key(id, UniqueFor::Occurrence(LONG * 60));
    let (user, [a, b]) = ("user".into(), ["a", "b"].map(JobId::from));
    assert_eq!(add(&store, occurrence("a")).await, Admission::New);
    let stored = store.get(&queue(), &a).await.unwrap().unwrap();
    assert_eq!(stored.unique.unwrap().span, UniqueFor::Occurrence(LONG * 60));
    assert_eq!(store.cancel(&queue(), &a, false).await.unwrap(), Cancelled::Removed);
    assert_eq!(add(&store, occurrence("a")).await, Admission::Exists(a));
    assert!(store.release_unique(&queue(), &user).await.unwrap());

    assert_eq!(add(&store, occurrence("a")).await, Admission::New);
    let jobs = take(&store, &["a"]).await;
    assert_eq!(store.cancel(&queue(), &a, false).await.unwrap(), Cancelled::Notified);
    assert_eq!(finish(&store, &jobs[0], retry(Duration::ZERO)).await, Finished::Cancelled);
    assert_eq!(add(&store, occurrence("b")).await, Admission::Exists(a));
    assert!(store.release_unique(&queue(), &user).await.unwrap());

    assert_eq!(add(&store, occurrence("b")).await, Admission::New);
    assert_eq!(store.purge(&queue(), 10, false).await.unwrap(), 1);
    assert_eq!(add(&store, occurrence("b")).await, Admission::Exists(b));
    assert!(store.release_unique(&queue(), &user).await.unwrap());

    for kind in [AckKind::Cancelled, AckKind::Dead { reason: Reason::Refused, error: "no".into() }] {
        assert_eq!(add(&store, occurrence("a")).await, Admission::New);
        let jobs = take(&store, &["a"]).await;
        finish(&store, &jobs[0], kind).await;
        store.forget(&queue(), &[a]).await.unwrap();
        assert_eq!(state(&store, "a").await, None);
        assert_eq!(add(&store, occurrence("b")).await, Admission::Exists(a));
        assert!(store.release_unique(&queue(), &user).await.unwrap());
    }
}

/// A dead job keeps no other job out, with any key. A replayed job takes its key again, or stays dead if another job holds the key.
pub async fn replayed_job_takes_its_unique_key_again<S: DelayQueueStore>(store: S) {
    let refused = || AckKind::Dead { reason: Reason::Refused, error: "no".into() };
    let replay = async |id: &str| store.replay(&queue(), &[JobId::from(id)]).await.unwrap()[0];
    for key in ["user", ""] {
        let unique = |id: &str, span| NewJob { unique: Some(Unique { key: key.into(), span }), ..job(id) };
        for id in ["a", "b"] {
            assert_eq!(add(&store, unique(id, UniqueFor::WaitingOrRunning)).await, Admission::New);
            let jobs = take(&store, &[id]).await;
            assert_eq!(finish(&store, &jobs[0], refused()).await, Finished::Dead);
        }
        // If two jobs are replayed at once, one gets the key.
        assert_eq!(store.replay(&queue(), &["a", "b"].map(JobId::from)).await.unwrap(), [true, false]);
        assert_eq!(state(&store, "b").await, Some(State::Dead));
        let exists = Admission::Exists(JobId::from("a"));
        assert_eq!(add(&store, unique("c", UniqueFor::WaitingOrRunning)).await, exists);
        let jobs = take(&store, &["a"]).await;
        assert!(!replay("b").await);
        assert_eq!(finish(&store, &jobs[0], AckKind::Done).await, Finished::Done);
        assert!(replay("b").await);
        assert_eq!(store.cancel(&queue(), &JobId::from("b"), false).await.unwrap(), Cancelled::Removed);
        // A job that was unique until its claim does not need its key any more.
        assert_eq!(add(&store, unique("d", UniqueFor::Waiting)).await, Admission::New);
        let jobs = take(&store, &["d"]).await;
        assert_eq!(finish(&store, &jobs[0], refused()).await, Finished::Dead);
        assert!(replay("d").await);
        assert_eq!(add(&store, unique("e", UniqueFor::WaitingOrRunning)).await, Admission::New);
        assert_eq!(store.purge(&queue(), 10, false).await.unwrap(), 2);
        assert_eq!(counts(&store).await, [0, 0, 0, 0]);
    }
}

/// Higher priorities come first, then earlier due times, then smaller ids.
pub async fn jobs_are_ordered_by_priority_due_time_and_id<S: DelayQueueStore>(store: S) {
    let of = |id: &str, priority| NewJob { priority, ..job(id) };
    let ago = |id: &str, secs| NewJob { due: Due::At(UNIX_EPOCH + Duration::from_secs(secs)), ..job(id) };
    // A due time in the past means now.
    push(&store, &[ago("e", 2), ago("d", 1)]).await;
    push(&store, &[of("low", Priority::Low), of("b", Priority::High), of("a", Priority::High)]).await;
    sleep(Duration::from_millis(2)).await;
    push(&store, &[job("c")]).await;
    take(&store, &["a", "b", "d", "e", "c", "low"]).await;
}

/// A claim returns no more jobs than its limit, and says whether more jobs are due.
pub async fn claim_returns_at_most_its_limit<S: DelayQueueStore>(store: S) {
    let jobs: Vec<_> = (0..MAX_BATCH + 10).map(|i| job(&format!("{i:04}"))).collect();
    push(&store, &jobs).await;
    let some = ask(&store, 3).await;
    assert_eq!((names(&some.jobs), some.more), (vec!["0000", "0001", "0002"], true));
    sleep(Duration::from_millis(20)).await;
    let none = ask(&store, 0).await;
    assert!(none.jobs.is_empty() && none.more, "{none:?}");
    assert!(none.oldest_due.is_some_and(|since| since >= Duration::from_millis(19)), "{none:?}");
    let many = ask(&store, usize::MAX).await;
    assert_eq!((many.jobs.len(), many.more), (MAX_BATCH, true));
    let finishes = many.jobs.iter().map(|job| Ack { lease: job.lease(), kind: AckKind::Done });
    let finishes: Vec<_> = finishes.collect();
    let rest = store.claim(&queue(), &finishes, &claim(MAX_BATCH, LONG)).await.unwrap();
    assert!(rest.finished.iter().all(|finished| *finished == Finished::Done));
    assert_eq!((rest.finished.len(), rest.jobs.len(), rest.more), (MAX_BATCH, 7, false));
    assert_eq!(rest.oldest_due, None);
    assert_eq!(counts(&store).await, [0, 0, 10, 0]);
}

/// Each failure uses up an attempt. After the last one, the job is dead, with the reason. A snooze or a release uses none.
pub async fn attempts_are_counted_and_released<S: DelayQueueStore>(store: S) {
    push(&store, &[NewJob { max_attempts: 2, ..job("a") }]).await;
    for kind in [AckKind::Snooze { delay: Duration::ZERO }, AckKind::Release, retry(Duration::ZERO)] {
        let jobs = take(&store, &["a"]).await;
        assert_eq!((jobs[0].job.attempt, &jobs[0].job.failure), (1, &None));
        assert_eq!(finish(&store, &jobs[0], kind).await, Finished::Done);
    }
    for kind in [AckKind::Release, retry(Duration::ZERO)] {
        let jobs = take(&store, &["a"]).await;
        assert_eq!(jobs[0].job.attempt, 2);
        let failure = jobs[0].job.failure.clone().unwrap();
        assert_eq!((failure.reason, &*failure.error), (Reason::Failed, "it did not work"));
        let finished = finish(&store, &jobs[0], kind.clone()).await;
        assert_eq!(finished, if kind == AckKind::Release { Finished::Done } else { Finished::Dead });
    }
    take(&store, &[]).await;
    let dead = store.get(&queue(), &JobId::from("a")).await.unwrap().unwrap();
    assert_eq!((dead.state, dead.attempt, dead.failure.unwrap().reason), (State::Dead, 2, Reason::Failed));
}

/// A retried or snoozed job waits for the given delay. A released job keeps its place.
pub async fn retried_or_snoozed_job_waits_for_its_delay<S: DelayQueueStore>(store: S) {
    push(&store, &["a", "b", "c", "d"].map(job)).await;
    let jobs = take(&store, &["a", "b", "c", "d"]).await;
    let endings = [AckKind::Snooze { delay: SHORT }, retry(SHORT), AckKind::Release, retry(Duration::ZERO)];
    for (job, kind) in jobs.iter().zip(endings) {
        assert_eq!(finish(&store, job, kind).await, Finished::Done);
    }
    take(&store, &["c", "d"]).await;
    sleep(SHORT + Duration::from_millis(2)).await;
    take(&store, &["a", "b"]).await;
}

/// A snoozed job keeps its place among the jobs of its priority, by its first due time, after any number of snoozes.
pub async fn snoozed_job_keeps_its_position<S: DelayQueueStore>(store: S) {
    let (a, snooze) = (JobId::from("a"), AckKind::Snooze { delay: SHORT });
    push(&store, &[job("a")]).await;
    let first_due = store.get(&queue(), &a).await.unwrap().unwrap().due_at;
    for _ in 0..2 {
        let jobs = take(&store, &["a"]).await;
        assert_eq!((jobs[0].job.due_at, jobs[0].job.attempt), (first_due, 1));
        assert_eq!(finish(&store, &jobs[0], snooze.clone()).await, Finished::Done);
        take(&store, &[]).await;
        assert_eq!(counts(&store).await, [1, 0, 0, 0]);
        let snoozed = store.get(&queue(), &a).await.unwrap().unwrap();
        assert_eq!(snoozed.state, State::Waiting);
        assert!(snoozed.due_at >= first_due + SHORT, "{snoozed:?}");
        sleep(SHORT + Duration::from_millis(2)).await;
        assert_eq!(counts(&store).await, [1, 1, 0, 0]);
    }
    // The due times of these jobs are later than its first one.
    push(&store, &[job("0"), NewJob { priority: Priority::High, ..job("h") }]).await;
    let jobs = take(&store, &["h", "a", "0"]).await;
    // A failed job gets a new due time.
    assert_eq!(finish(&store, &jobs[2], AckKind::Snooze { delay: Duration::ZERO }).await, Finished::Done);
    sleep(Duration::from_millis(2)).await;
    assert_eq!(finish(&store, &jobs[1], retry(Duration::ZERO)).await, Finished::Done);
    let jobs = take(&store, &["0", "a"]).await;
    // A snoozed job can be rescheduled, and is listed last.
    assert_eq!(finish(&store, &jobs[0], snooze).await, Finished::Done);
    push(&store, &[NewJob { priority: Priority::Low, ..later("l", LONG) }]).await;
    assert_eq!(list(&store, State::Waiting).await, ["l", "0"]);
    assert_eq!(store.reschedule(&queue(), &JobId::from("0"), Due::NOW).await.unwrap(), Changed::Done);
    take(&store, &["0"]).await;
}

/// A claim returns as many jobs with an ended snooze as its limit allows.
pub async fn claim_takes_all_snoozed_jobs_within_its_limit<S: DelayQueueStore>(store: S) {
    let jobs: Vec<_> = (0..100).map(|number| job(&number.to_string())).collect();
    push(&store, &jobs).await;
    // The snooze of the job with the highest priority ends last.
    push(&store, &[NewJob { priority: Priority::High, ..job("h") }]).await;
    let all = async || ask(&store, MAX_BATCH).await.jobs;
    let snooze = |delay| move |job: &ClaimedJob| Ack { lease: job.lease(), kind: AckKind::Snooze { delay } };
    let claimed = all().await;
    assert_eq!(claimed.len(), 101);
    let mut finishes: Vec<_> = claimed[1..].iter().map(snooze(SHORT)).collect();
    finishes.push(snooze(SHORT + Duration::from_millis(1))(&claimed[0]));
    let finished = store.claim(&queue(), &finishes, &claim(0, LONG)).await.unwrap().finished;
    assert_eq!(finished, [Finished::Done; 101]);
    sleep(SHORT + Duration::from_millis(3)).await;
    let claimed = all().await;
    assert_eq!((claimed.len(), names(&claimed)[0]), (101, "h"));
}

/// If the worker of a job dies in each attempt, the job is dead after the last one.
pub async fn crash_loop_ends<S: DelayQueueStore>(store: S) {
    push(&store, &[NewJob { max_attempts: 3, ..job("a") }]).await;
    for attempt in 1..=3 {
        let Claimed { jobs, expired, .. } = store.claim(&queue(), &[], &claim(1, Claim::MIN_LEASE)).await.unwrap();
        assert_eq!(jobs[0].job.attempt, attempt);
        assert_eq!(expired, Expired { jobs: usize::from(attempt > 1), dead: 0 });
        sleep(Claim::MIN_LEASE * 3).await;
    }
    let last = ask(&store, 100).await;
    assert!(last.jobs.is_empty() && last.expired == Expired { jobs: 1, dead: 1 }, "{last:?}");
    assert_eq!(last.died, [Died::new(JobId::from("a"), 3)]);
    assert_eq!(ask(&store, 100).await.expired, Expired::default());
    let dead = store.get(&queue(), &JobId::from("a")).await.unwrap().unwrap();
    assert_eq!((dead.state, dead.attempt, dead.failure.unwrap().reason), (State::Dead, 3, Reason::LeaseExpired));
}

/// A cancellation removes a waiting job. The worker of a running job is notified, and the job is not retried.
pub async fn cancellation_has_one_outcome<S: DelayQueueStore>(store: S) {
    let [a, b, c] = ["a", "b", "c"].map(JobId::from);
    assert_eq!(store.cancel(&queue(), &a, false).await.unwrap(), Cancelled::Missing);
    push(&store, &[job("a"), job("b"), NewJob { max_attempts: 1, ..job("c") }]).await;
    assert_eq!(store.cancel(&queue(), &a, false).await.unwrap(), Cancelled::Removed);
    let jobs = take(&store, &["b", "c"]).await;
    assert_eq!(store.cancel(&queue(), &b, false).await.unwrap(), Cancelled::Notified);
    let leases: Vec<_> = jobs.iter().map(ClaimedJob::lease).collect();
    let extended = store.extend(&queue(), &leases, LONG).await.unwrap();
    assert_eq!(extended, [Extended::Cancelled, Extended::Held]);
    assert_eq!(finish(&store, &jobs[0], retry(Duration::ZERO)).await, Finished::Cancelled);
    assert_eq!(finish(&store, &jobs[1], retry(Duration::ZERO)).await, Finished::Dead);
    assert_eq!(store.cancel(&queue(), &b, false).await.unwrap(), Cancelled::Missing);
    assert_eq!(store.cancel(&queue(), &c, false).await.unwrap(), Cancelled::Dead);
    assert_eq!(counts(&store).await, [0, 0, 0, 1]);
    // The next job with the same id is not affected.
    push(&store, &[job("b")]).await;
    let jobs = take(&store, &["b"]).await;
    assert_eq!(store.extend(&queue(), &[jobs[0].lease()], LONG).await.unwrap(), [Extended::Held]);
}

/// If a job is pushed while a cancelled run with its id or unique key continues, it is kept, and claimed when that run has ended.
pub async fn new_job_waits_for_the_cancelled_run<S: DelayQueueStore>(store: S) {
    let unique = |id| with_key(id, UniqueFor::WaitingOrRunning);
    for (old, new) in [(job("a"), job("a")), (unique("a"), unique("b")), (unique("a"), unique("a"))] {
        for kind in [AckKind::Done, retry(Duration::ZERO), AckKind::Release] {
            let first = cancel_and_push_again(&store, &old, &new).await;
            assert_eq!(store.extend(&queue(), &[first.lease()], LONG).await.unwrap(), [Extended::Cancelled]);
            let is_done = kind == AckKind::Done;
            let finished = if is_done { Finished::Done } else { Finished::Cancelled };
            assert_eq!(finish(&store, &first, kind).await, finished);
            let second = take(&store, &[new.id.as_str()]).await;
            assert_eq!(second[0].job.attempt, 1);
            // The lease of the old run is not valid any more.
            assert_eq!(store.extend(&queue(), &[first.lease()], LONG).await.unwrap(), [Extended::Lost]);
            assert_ne!(finish(&store, &first, retry(LONG)).await, Finished::Done);
            assert_eq!(state(&store, new.id.as_str()).await, Some(State::Running));
            assert_eq!(add(&store, new.clone()).await, Admission::Exists(new.id));
            assert_eq!(finish(&store, &second[0], AckKind::Done).await, Finished::Done);
            assert_eq!(counts(&store).await, [0; 4]);
        }
    }
}

/// A job that waits for a cancelled run is claimed when the worker of that run has died. It can be cancelled separately.
pub async fn new_job_outlives_the_worker_of_the_cancelled_run<S: DelayQueueStore>(store: S) {
    let unique = |id| with_key(id, UniqueFor::WaitingOrRunning);
    let first = cancel_and_push_again(&store, &unique("a"), &unique("b")).await;
    assert_eq!(store.cancel(&queue(), &JobId::from("b"), false).await.unwrap(), Cancelled::Removed);
    push(&store, &[unique("c"), job("a")]).await;
    take(&store, &[]).await;
    assert_eq!(store.extend(&queue(), &[first.lease()], SHORT).await.unwrap(), [Extended::Cancelled]);
    sleep(SHORT + Duration::from_millis(20)).await;
    let claimed = ask(&store, 100).await;
    assert_eq!((names(&claimed.jobs), claimed.expired), (vec!["a", "c"], Expired { jobs: 1, dead: 0 }));
    assert_eq!(finish(&store, &first, AckKind::Done).await, Finished::Gone);
    // The purge of the waiting job does not affect the run.
    let [id] = ["a"].map(JobId::from);
    assert_eq!(store.cancel(&queue(), &id, false).await.unwrap(), Cancelled::Notified);
    push(&store, &[job("a")]).await;
    take(&store, &[]).await;
    assert_eq!(store.purge(&queue(), 10, false).await.unwrap(), 1);
    assert_eq!(counts(&store).await, [0, 0, 2, 0]);
    assert_eq!(store.cancel(&queue(), &id, false).await.unwrap(), Cancelled::Notified);
    assert_eq!(finish(&store, &claimed.jobs[0], retry(Duration::ZERO)).await, Finished::Cancelled);
    assert_eq!(store.cancel(&queue(), &id, false).await.unwrap(), Cancelled::Missing);
}

/// Cancels a running job, and pushes another job in its place, which is not claimed yet. Returns the cancelled run.
async fn cancel_and_push_again<S: DelayQueueStore>(store: &S, old: &NewJob, new: &NewJob) -> ClaimedJob {
    push(store, std::slice::from_ref(old)).await;
    let first = take(store, &[old.id.as_str()]).await.remove(0);
    for _ in 0..2 {
        assert_eq!(store.cancel(&queue(), &old.id, false).await.unwrap(), Cancelled::Notified);
        assert_eq!(state(store, old.id.as_str()).await, Some(State::Running));
        assert_eq!(store.reschedule(&queue(), &old.id, Due::NOW).await.unwrap(), Changed::Running);
    }
    // Stores record the time of a push in ms.
    sleep(Duration::from_millis(2)).await;
    push(store, std::slice::from_ref(new)).await;
    for _ in 0..2 {
        take(store, &[]).await;
        assert_eq!(state(store, new.id.as_str()).await, Some(State::Waiting));
        assert_eq!(list(store, State::Waiting).await, [new.id.as_str()]);
        assert_eq!(list(store, State::Running).await, [old.id.as_str()]);
        let [waiting, _, running, dead] = counts(store).await;
        assert_eq!([waiting, running, dead], [1, 1, 0]);
    }
    first
}

/// Only a waiting job can be rescheduled or replaced. Other jobs stay unchanged, and the reply says so.
pub async fn only_waiting_jobs_can_be_changed<S: DelayQueueStore>(store: S) {
    let id = JobId::from("a");
    let (far, queue) = (Due::In(LONG * 60), queue());
    assert_eq!(store.reschedule(&queue, &id, far).await.unwrap(), Changed::Missing);
    assert_eq!(store.replace(&queue, &id, b"x").await.unwrap(), Changed::Missing);
    let mut new = NewJob { max_attempts: 1, ..job("a") };
    new.headers.insert("kept", "as it was");
    push(&store, &[new.clone()]).await;
    assert_eq!(store.reschedule(&queue, &id, far).await.unwrap(), Changed::Done);
    take(&store, &[]).await;
    assert_eq!(store.replace(&queue, &id, b"another payload").await.unwrap(), Changed::Done);
    assert_eq!(store.reschedule(&queue, &id, Due::NOW).await.unwrap(), Changed::Done);
    let jobs = take(&store, &["a"]).await;
    assert_eq!((&*jobs[0].job.payload, &jobs[0].job.headers), (&b"another payload"[..], &new.headers));
    assert_eq!(store.reschedule(&queue, &id, far).await.unwrap(), Changed::Running);
    assert_eq!(store.replace(&queue, &id, b"x").await.unwrap(), Changed::Running);
    assert_eq!(finish(&store, &jobs[0], retry(Duration::ZERO)).await, Finished::Dead);
    assert_eq!(store.reschedule(&queue, &id, far).await.unwrap(), Changed::Dead);
    assert_eq!(store.replace(&queue, &id, b"x").await.unwrap(), Changed::Dead);
}

/// Counts and lists cover all jobs, and each state has its order.
pub async fn queue_can_be_inspected<S: DelayQueueStore>(store: S) {
    assert_eq!(store.counts(&queue()).await.unwrap(), Counts::default());
    push(&store, &[job("a"), job("b"), NewJob { max_attempts: 1, ..job("c") }]).await;
    sleep(Duration::from_millis(50)).await;
    let oldest = store.counts(&queue()).await.unwrap().oldest_due.unwrap();
    assert!(oldest >= Duration::from_millis(50), "{oldest:?}");
    let jobs = take(&store, &["a", "b", "c"]).await;
    finish(&store, &jobs[2], retry(Duration::ZERO)).await;
    push(&store, &[later("e", LONG), later("d", LONG / 2), job("f")]).await;
    assert_eq!(counts(&store).await, [3, 1, 2, 1]);
    assert_eq!(list(&store, State::Waiting).await, ["f", "d", "e"]);
    assert_eq!(list(&store, State::Running).await, ["a", "b"]);
    assert_eq!(list(&store, State::Dead).await, ["c"]);
    let some = store.list(&queue(), State::Waiting, 1, 1).await.unwrap();
    assert_eq!((some[0].id.as_str(), some[0].state, some.len()), ("d", State::Waiting, 1));
    // At or behind the end of each list.
    for (state, skip) in [(State::Waiting, 3), (State::Running, 1 << 60), (State::Dead, u64::MAX)] {
        assert_eq!(store.list(&queue(), state, skip, 10).await.unwrap(), []);
    }
}

/// A paused queue grants no claims. Running jobs continue.
pub async fn paused_queue_grants_no_jobs<S: DelayQueueStore>(store: S) {
    push(&store, &[job("a")]).await;
    let jobs = take(&store, &["a"]).await;
    store.pause(&queue(), true).await.unwrap();
    push(&store, &[job("b")]).await;
    take(&store, &[]).await;
    assert!(store.counts(&queue()).await.unwrap().is_paused);
    assert_eq!(store.extend(&queue(), &[jobs[0].lease()], LONG).await.unwrap(), [Extended::Held]);
    assert_eq!(finish(&store, &jobs[0], AckKind::Done).await, Finished::Done);
    store.pause(&queue(), false).await.unwrap();
    take(&store, &["b"]).await;
}

/// A purge removes all waiting jobs, and keeps running and dead jobs.
pub async fn queue_is_purged<S: DelayQueueStore>(store: S) {
    push(&store, &[job("a")]).await;
    take(&store, &["a"]).await;
    let jobs: Vec<_> = (0..300).map(|i| later(&i.to_string(), LONG)).collect();
    push(&store, &jobs).await;
    let mut removed = Vec::new();
    while removed.last() != Some(&0) {
        removed.push(store.purge(&queue(), usize::MAX, false).await.unwrap());
    }
    assert_eq!(removed, [MAX_BATCH, 300 - MAX_BATCH, 0]);
    assert_eq!(counts(&store).await, [0, 0, 1, 0]);
}

/// Dead jobs are limited in number and age. They can be replayed with all of their attempts, or removed.
pub async fn dead_jobs_are_bounded_and_can_be_replayed<S: DelayQueueStore>(store: S) {
    for id in ["a", "b", "c", "d"] {
        push(&store, &[NewJob { max_attempts: 1, ..job(id) }]).await;
        let jobs = take(&store, &[id]).await;
        assert_eq!(finish(&store, &jobs[0], retry(Duration::ZERO)).await, Finished::Dead);
        sleep(Duration::from_millis(2)).await;
    }
    let few = Claim { dead: DeadLimits { count: 3, age: LONG }, ..claim(1, LONG) };
    store.claim(&queue(), &[], &few).await.unwrap();
    assert_eq!(list(&store, State::Dead).await, ["b", "c", "d"]);
    let ids = ["a", "b", "c"].map(JobId::from);
    assert_eq!(store.replay(&queue(), &ids[..2]).await.unwrap(), [false, true]);
    assert_eq!(store.forget(&queue(), &ids[1..]).await.unwrap(), [false, true]);
    let jobs = take(&store, &["b"]).await;
    assert_eq!((jobs[0].job.attempt, &jobs[0].job.failure), (1, &None));
    let short = Claim { dead: DeadLimits { count: 3, age: Duration::from_millis(1) }, ..claim(1, LONG) };
    sleep(Duration::from_millis(5)).await;
    store.claim(&queue(), &[], &short).await.unwrap();
    assert_eq!(counts(&store).await, [0, 0, 1, 0]);
}

/// An idle worker is woken by a job that is due earlier than the last reply said.
pub async fn earlier_job_wakes_waiting_worker<S: DelayQueueStore>(store: S) {
    let worker = claim(1, LONG);
    let mut notifications = store.watch(&queue(), worker.worker).await;
    push(&store, &[later("z", LONG)]).await;
    // A worker also polls by itself, so a job that is due much later than that need not wake it.
    for (id, delay) in [("b", SHORT * 2), ("a", Duration::ZERO)] {
        // No job is due until then.
        let claimed = store.claim(&queue(), &[], &worker).await.unwrap();
        assert!(claimed.jobs.is_empty());
        while timeout(Duration::from_millis(50), notifications.next()).await.is_ok() {}
        push(&store, &[later(id, delay)]).await;
        timeout(Duration::from_secs(4), notifications.next()).await.expect("an earlier job wakes the worker");
    }
    let jobs = store.claim(&queue(), &[], &worker).await.unwrap().jobs;
    assert_eq!(names(&jobs), ["a"]);
    // A job that another worker returns also wakes it.
    let waiting = store.claim(&queue(), &[], &Claim { limit: 100, ..worker }).await.unwrap();
    assert!(waiting.jobs.is_empty());
    while timeout(Duration::from_millis(50), notifications.next()).await.is_ok() {}
    assert_eq!(finish(&store, &jobs[0], AckKind::Release).await, Finished::Done);
    timeout(Duration::from_secs(4), notifications.next()).await.expect("a released job wakes the worker");
}

/// Names and ids of any length and bytes are distinct, and payloads of any bytes come back unchanged.
pub async fn any_bytes_are_a_name_id_and_payload<S: DelayQueueStore>(store: S) {
    let long = "}{".repeat(10_000);
    let names = ["", "{", "a:b", "a", "b:a", "#1", "ä\r\n\0", &long];
    let payloads: [&[u8]; 3] = [b"", b"\0\xff\r\n$-1", &[7; 60_000]];
    for (i, name) in names.iter().enumerate() {
        for (j, id) in names.iter().enumerate() {
            let job = NewJob::new(JobId::from(*id), payloads[(i + j) % 3]);
            let admitted = store.push(&QueueKey::new(*name), &[job], MANY).await.unwrap();
            assert_eq!(admitted, [Admission::New]);
        }
    }
    for (i, name) in names.iter().enumerate() {
        let queue = QueueKey::new(*name);
        let mut seen = 0;
        // Large payloads take several claims.
        while seen < names.len() {
            let jobs = store.claim(&queue, &[], &claim(100, LONG)).await.unwrap().jobs;
            assert!(!jobs.is_empty());
            for claimed in jobs {
                let j = names.iter().position(|id| JobId::from(*id) == claimed.job.id).unwrap();
                assert_eq!(*claimed.job.payload, *payloads[(i + j) % 3]);
                seen += 1;
            }
        }
        assert!(store.claim(&queue.with_partition(1), &[], &claim(100, LONG)).await.unwrap().jobs.is_empty());
    }
}

/// The longest delays are kept, and so is a due time in the far future.
pub async fn longest_delays_are_kept<S: DelayQueueStore>(store: S) {
    let far = UNIX_EPOCH + Duration::from_secs(200 * 365 * 86_400);
    push(&store, &[later("a", Due::MAX_DELAY), later("b", Duration::MAX), NewJob { due: Due::At(far), ..job("c") }])
        .await;
    take(&store, &[]).await;
    let get = async |id: &str| store.get(&queue(), &JobId::from(id)).await.unwrap().unwrap();
    assert!(get("a").await.due_at >= SystemTime::now() + Due::MAX_DELAY - LONG);
    assert!(get("b").await.due_at >= SystemTime::now() + Due::MAX_DELAY - LONG);
    assert_eq!(get("c").await.due_at, far);
}

/// Concurrent workers claim different jobs, and no job is left over.
pub async fn racing_workers_share_jobs<S: DelayQueueStore + Send + Sync + 'static>(store: S) {
    const JOBS: usize = 1_000;
    let store = Arc::new(store);
    let jobs: Vec<_> = (0..JOBS).map(|i| job(&format!("{i:04}"))).collect();
    push(&*store, &jobs).await;
    let mut racing = JoinSet::new();
    for worker in 0..8 {
        let store = Arc::clone(&store);
        racing.spawn(async move {
            let claim = claim(worker + 1, LONG);
            let (mut done, mut finishes) = (Vec::new(), Vec::new());
            loop {
                let claimed = store.claim(&queue(), &finishes, &claim).await.unwrap();
                assert!(claimed.finished.iter().all(|finished| *finished == Finished::Done));
                if claimed.jobs.is_empty() {
                    return done;
                }
                let finish = |job: &ClaimedJob| Ack { lease: job.lease(), kind: AckKind::Done };
                finishes = claimed.jobs.iter().map(finish).collect();
                done.extend(claimed.jobs.iter().map(|claimed| claimed.job.id));
            }
        });
    }
    let mut done: Vec<_> = racing.join_all().await.into_iter().flatten().collect();
    done.sort_unstable();
    assert!(done.windows(2).all(|pair| pair[0] != pair[1]));
    assert_eq!(done.len(), JOBS);
    assert_eq!(counts(&*store).await, [0; 4]);
}
