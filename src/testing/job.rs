use std::sync::Arc;
use std::time::SystemTime;

use crate::Key;
use crate::delay_queue::{
    Canceller, ClaimedJob, FailureInfo, Headers, Job, JobId, NewJob, Priority, Reason, State, StoredJob,
};

/// Makes a job as a worker hands it to a service, without a queue and a worker: for tests of the service.
///
/// It is the first attempt of [as many as a job has](NewJob::DEFAULT_ATTEMPTS), pushed and due a moment ago.
///
/// ```
/// use tollgate::testing::TestJob;
/// use tollgate::{BoxError, Job};
///
/// async fn send(mail: Job<String>) -> Result<(), BoxError> {
///     if mail.is_last_attempt() { Err("nobody there".into()) } else { Ok(()) }
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
#[must_use = "is a job when it is built"]
pub struct TestJob<T> {
    payload: T,
    stored: StoredJob,
}

impl<T> TestJob<T> {
    /// A job with this payload, as it is after it was decoded.
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
            note: None,
            headers: Headers::new(),
            payload: Arc::default(),
        };
        Self { payload, stored }
    }

    /// What it is called. Defaults to `test`.
    pub fn id(mut self, id: impl Into<Key>) -> Self {
        self.stored.id = JobId::new(id);
        self
    }

    /// Which attempt this is. Defaults to the first.
    pub fn attempt(mut self, attempt: u16) -> Self {
        self.stored.attempt = attempt;
        self
    }

    /// How many attempts it has.
    pub fn max_attempts(mut self, attempts: u16) -> Self {
        self.stored.max_attempts = attempts;
        self
    }

    /// What travels with it.
    pub fn header(mut self, name: impl Into<Box<str>>, value: impl Into<Box<str>>) -> Self {
        self.stored.headers.insert(name, value);
        self
    }

    /// What the service answered to the attempt before this one.
    pub fn last_failure(mut self, error: impl Into<Arc<str>>) -> Self {
        self.stored.note = Some(FailureInfo { reason: Reason::Failed, error: error.into() });
        self
    }

    /// The job. Nobody cancels it. Its attempt is over, so that [`ended`](crate::delay_queue::Cancellation::ended) is ready, once it and its clones are
    /// dropped, also by [`into_payload`](Job::into_payload). One that is [cancellable](Self::cancellable) lasts for as long as a test wants it to.
    pub fn build(self) -> Job<T> {
        let (mut job, canceller) = self.cancellable();
        // With a worker it is there until the attempt is over.
        job.extensions_mut().insert(canceller.0);
        job
    }

    /// The job, and what [cancels](Job::cancellation) it. Keep that for as long as the service is at work: the attempt is over once it is dropped, as when a
    /// worker has the answer of the service, and [`ended`](crate::delay_queue::Cancellation::ended) is ready.
    pub fn cancellable(self) -> (Job<T>, JobCanceller) {
        let token = u64::from(self.stored.attempt);
        let (job, canceller) = Job::new(ClaimedJob { token, job: self.stored }, self.payload);
        (job, JobCanceller(canceller))
    }
}

/// Cancels a [`TestJob`], as a worker does that has lost the lease or was told to.
#[derive(Debug)]
pub struct JobCanceller(Canceller);

impl JobCanceller {
    /// Tells the job that it is to be given up.
    pub fn cancel(&self) {
        self.0.cancel();
    }
}
