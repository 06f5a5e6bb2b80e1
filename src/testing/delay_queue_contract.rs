//! What every [`DelayQueueStore`] must do: one claim a function, written once, run on each backend by
//! [`delay_queue_contract!`](crate::delay_queue_contract).
//!
//! A claim is told a store that nobody else uses, and panics if what it says is not so. The claims wait on tokio's clock, so
//! they take no time where it is paused and up to some seconds where it is not.
#![allow(clippy::unwrap_used, reason = "a claim that does not hold says where")]

use std::time::Duration;

use tokio::time::sleep;

use crate::delay_queue::{
    Admission, Claim, Claimed, ClaimedJob, DeadLimits, DelayQueueStore, Due, Ending, Extended, Finish, Finished, JobId,
    NewJob, QueueKey, State, WorkerId,
};

/// A lease that no test sees the end of, however slow the machine.
const LONG: Duration = Duration::from_secs(60);
/// How many jobs there may be.
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

/// Claims exactly these, in this order.
async fn take<S: DelayQueueStore>(store: &S, ids: &[&str]) -> Vec<ClaimedJob> {
    let jobs = ask(store, 100).await.jobs;
    assert_eq!(names(&jobs), ids);
    jobs
}

fn names(jobs: &[ClaimedJob]) -> Vec<&str> {
    jobs.iter().map(|claimed| claimed.job.id.as_str()).collect()
}

async fn finish<S: DelayQueueStore>(store: &S, job: &ClaimedJob, ending: Ending) -> Finished {
    let finish = Finish { ticket: job.ticket(), ending };
    store.claim(&queue(), &[finish], &claim(0, LONG)).await.unwrap().finished[0]
}

async fn state<S: DelayQueueStore>(store: &S, id: &str) -> Option<State> {
    store.get(&queue(), &JobId::from(id)).await.unwrap().map(|job| job.state)
}

/// What is pushed is claimed once, as it was, and is gone when it is done.
pub async fn a_job_is_claimed_once_and_gone_when_it_is_done<S: DelayQueueStore>(store: S) {
    let mut new = job("a");
    new.headers.insert("traceparent", "00-1-2-3");
    push(&store, &[new.clone()]).await;
    assert_eq!(state(&store, "a").await, Some(State::Waiting));
    let jobs = take(&store, &["a"]).await;
    assert_eq!((&jobs[0].job.payload, &jobs[0].job.headers), (&new.payload, &new.headers));
    assert_eq!((jobs[0].job.attempt, jobs[0].job.max_attempts), (1, NewJob::DEFAULT_ATTEMPTS));
    assert_eq!(state(&store, "a").await, Some(State::Running));
    take(&store, &[]).await;
    assert_eq!(finish(&store, &jobs[0], Ending::Done).await, Finished::Done);
    assert_eq!(state(&store, "a").await, None);
    assert_eq!(finish(&store, &jobs[0], Ending::Done).await, Finished::Gone);
}

/// A job is claimed when its delay is over, and not before; who waits is told how long.
pub async fn a_job_is_not_claimed_before_it_is_due<S: DelayQueueStore>(store: S) {
    let delay = Duration::from_millis(500);
    push(&store, &[later("a", delay)]).await;
    let early = ask(&store, 1).await;
    assert!(early.jobs.is_empty() && !early.more && early.next <= delay + Duration::from_millis(1), "{early:?}");
    sleep(early.next).await;
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

/// A lease that is extended lasts; one that is not ends, and the job is claimed anew with a larger token.
pub async fn a_job_comes_back_when_its_lease_has_ended<S: DelayQueueStore>(store: S) {
    push(&store, &[job("a"), job("b")]).await;
    let brief = Duration::from_millis(300);
    let first = store.claim(&queue(), &[], &claim(2, brief)).await.unwrap().jobs;
    let extended = store.extend(&queue(), &[first[0].ticket()], LONG).await.unwrap();
    assert_eq!(extended, [Extended::Held]);
    sleep(brief * 2).await;
    let second = take(&store, &["b"]).await;
    assert!(second[0].token > first[1].token);
    assert_eq!(second[0].job.attempt, 2);
    assert_eq!(finish(&store, &first[1], Ending::Done).await, Finished::Lost);
    let extended = store.extend(&queue(), &[first[1].ticket(), first[0].ticket()], LONG).await.unwrap();
    assert_eq!(extended, [Extended::Lost, Extended::Held]);
    assert_eq!(finish(&store, &second[0], Ending::Done).await, Finished::Done);
    assert_eq!(finish(&store, &first[0], Ending::Done).await, Finished::Done);
}
