use std::sync::Arc;
use std::time::SystemTime;

use crate::Key;
use crate::delay_queue::store::ClaimedJob;
use crate::delay_queue::{Canceller, FailureInfo, Headers, Job, JobId, NewJob, Priority, Reason, State, StoredJob};

/// Builds a job as a worker passes it to a service, without a queue or a worker. Use it in tests of the service.
///
/// By default, it is the first attempt of [the usual number](NewJob::DEFAULT_ATTEMPTS), pushed and due a moment ago.
///
/// ```
/// use tollgate::testing::TestJob;
/// use tollgate::{BoxError, Job};
///
/// async fn send(mail: Job<String>) -> Result<(), BoxError> {
///     if mail.is_last_attempt() { Err("no such mailbox".into()) } else { Ok(()) }
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), BoxError> {
/// let mail = || TestJob::new("Dear Alice".to_owned()).max_attempts(3);
/// send(mail().build()).await?;
/// assert!(send(mail().attempt(3).last_failure("out of office").build()).await.is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "call `build` or `cancellable` to get the job"]
pub struct TestJob<T> {
    payload: T,
    stored: StoredJob,
}

impl<T> TestJob<T> {
    /// A job with this decoded payload.
    pub fn new(payload: T) -> Self {
        let now = SystemTime::now();
        let stored = StoredJob {
            id: JobId::new("test"),
            state: State::Running,
            attempt: 1,
            max_attempts: NewJob::DEFAULT_ATTEMPTS,
            priority: Priority::default(),
            enqueued_at: now,
            due_at: now,
            unique: None,
            failure: None,
            headers: Headers::new(),
            payload: Arc::default(),
        };
        Self { payload, stored }
    }

    /// Sets the id. Defaults to `test`.
    pub fn id(mut self, id: impl Into<Key>) -> Self {
        self.stored.id = JobId::new(id);
        self
    }

    /// Sets the number of this attempt. Defaults to the first.
    pub fn attempt(mut self, attempt: u16) -> Self {
        self.stored.attempt = attempt;
        self
    }

    /// Sets the maximum number of attempts.
    pub fn max_attempts(mut self, attempts: u16) -> Self {
        self.stored.max_attempts = attempts;
        self
    }

    /// Adds a header.
    pub fn header(mut self, name: impl Into<Box<str>>, value: impl Into<Box<str>>) -> Self {
        self.stored.headers.insert(name, value);
        self
    }

    /// Sets the error of the previous attempt.
    pub fn last_failure(mut self, error: impl Into<Arc<str>>) -> Self {
        self.stored.failure = Some(FailureInfo { reason: Reason::Failed, error: error.into() });
        self
    }

    /// Builds a job that is never cancelled. Its attempt ends when the job and its clones are dropped, also by
    /// [`into_payload`](Job::into_payload). Then [`ended`](crate::delay_queue::Cancellation::ended) is ready. To end the attempt at another
    /// time, use [`cancellable`](Self::cancellable).
    pub fn build(self) -> Job<T> {
        let (mut job, canceller) = self.cancellable();
        // With a worker, the canceller exists until the attempt has ended.
        job.extensions_mut().insert(canceller.0);
        job
    }

    /// Builds a job and a handle that [cancels](Job::cancellation) it. Keep the handle while the service works. When you drop it, the
    /// attempt ends and [`ended`](crate::delay_queue::Cancellation::ended) is ready, as when a worker has the result of the service.
    pub fn cancellable(self) -> (Job<T>, JobCanceller) {
        let token = u64::from(self.stored.attempt);
        let (job, canceller) = Job::new(ClaimedJob { token, job: self.stored }, self.payload);
        (job, JobCanceller(canceller))
    }
}

/// Cancels a [`TestJob`], like a worker that has lost the lease or received a cancellation.
#[derive(Debug)]
pub struct JobCanceller(Canceller);

impl JobCanceller {
    /// Cancels the job.
    pub fn cancel(&self) {
        self.0.cancel();
    }
}
