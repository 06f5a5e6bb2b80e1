//! Workers with a store whose clock differs from their own: only the clock of the store counts.

use crate::support;

use std::future::ready;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use support::stores::delegate_queue;
use tokio::time::{Instant, sleep};
use tollgate::delay_queue::store::{Ack, Admission, Claim, Claimed, DelayQueueStore, QueueKey};
use tollgate::delay_queue::{
    Backoff, Changed, DelayQueue, DelayQueueWorker, Due, Event, JobId, NewJob, State, StoredJob,
};
use tollgate::{Job, MemoryBackend, StoreError};
use tower::service_fn;

const HOUR: Duration = Duration::from_secs(3_600);

/// Jobs in memory, by a clock that is an hour off.
#[derive(Clone)]
struct Elsewhere {
    inner: MemoryBackend,
    is_ahead: bool,
}

impl Elsewhere {
    /// Converts an instant of the backend's clock to this store's clock.
    fn seen(&self, instant: SystemTime) -> SystemTime {
        if self.is_ahead { instant + HOUR } else { instant - HOUR }
    }

    fn due(&self, due: Due) -> Due {
        match due {
            Due::At(instant) => Due::At(if self.is_ahead { instant - HOUR } else { instant + HOUR }),
            due => due,
        }
    }

    fn job(&self, mut job: StoredJob) -> StoredJob {
        (job.enqueued_at, job.due_at) = (self.seen(job.enqueued_at), self.seen(job.due_at));
        job
    }
}

impl DelayQueueStore for Elsewhere {
    delegate_queue!(inner: extend, watch, cancel, replace, counts, pause, purge, release_unique, replay, forget, scope);

    async fn push(&self, queue: &QueueKey, jobs: &[NewJob], max_jobs: u64) -> Result<Vec<Admission>, StoreError> {
        let mut jobs = jobs.to_vec();
        jobs.iter_mut().for_each(|job| job.due = self.due(job.due));
        self.inner.push(queue, &jobs, max_jobs).await
    }

    async fn claim(&self, queue: &QueueKey, finished: &[Ack], claim: &Claim) -> Result<Claimed, StoreError> {
        let mut claimed = self.inner.claim(queue, finished, claim).await?;
        claimed.now = self.seen(claimed.now);
        for claimed in &mut claimed.jobs {
            claimed.job = self.job(claimed.job.clone());
        }
        Ok(claimed)
    }

    async fn get(&self, queue: &QueueKey, id: &JobId) -> Result<Option<StoredJob>, StoreError> {
        Ok(self.inner.get(queue, id).await?.map(|job| self.job(job)))
    }

    async fn reschedule(&self, queue: &QueueKey, id: &JobId, due: Due) -> Result<Changed, StoreError> {
        self.inner.reschedule(queue, id, self.due(due)).await
    }

    async fn list(
        &self,
        queue: &QueueKey,
        state: State,
        skip: u64,
        limit: usize,
    ) -> Result<Vec<StoredJob>, StoreError> {
        let jobs = self.inner.list(queue, state, skip, limit).await?;
        Ok(jobs.into_iter().map(|job| self.job(job)).collect())
    }
}

#[tokio::test(start_paused = true)]
async fn clock_an_hour_off_changes_nothing() {
    for is_ahead in [false, true] {
        let store = Elsewhere { inner: MemoryBackend::new(), is_ahead };
        let queue = DelayQueue::<u32>::new(store.clone(), "work");
        let (start, runs) = (Instant::now(), Arc::new(Mutex::new(Vec::new())));
        let noted = Arc::clone(&runs);
        let service = service_fn(move |job: Job<u32>| {
            noted.lock().unwrap().push((*job, job.attempt(), start.elapsed().as_secs()));
            ready(if job.attempt() == 1 { Err("not today") } else { Ok(()) })
        });
        let worker = DelayQueueWorker::new(queue.clone(), service).backoff(Backoff::fixed(Duration::from_secs(100)));
        let mut events = worker.events();
        let shutdown = sleep(2 * HOUR);
        let pushes = async {
            queue.push(1).delay(Duration::from_secs(10)).await.unwrap();
            queue.push(2).id("a").await.unwrap();
            let enqueued_at = queue.get("a").await.unwrap().unwrap().enqueued_at;
            queue.push(3).at(enqueued_at + Duration::from_secs(20)).await.unwrap();
        };
        tokio::join!(worker.run_until(shutdown), pushes).0.unwrap();
        let runs = runs.lock().unwrap().clone();
        let expected = [(2, 1, 0), (1, 1, 10), (3, 1, 20), (2, 2, 100), (1, 2, 110), (3, 2, 120)];
        assert_eq!(runs, expected, "ahead: {is_ahead}");
        while let Some(event) = events.next().await {
            if let Event::Started { late, .. } = event {
                assert!(late < Duration::from_millis(5), "{late:?}");
            }
        }
    }
}
