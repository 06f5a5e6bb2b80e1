pub(crate) mod event_loop;
pub(crate) mod events;
pub(crate) mod ready;
pub(crate) mod running_job;
pub(crate) mod store_client;

use std::error::Error;
use std::fmt;
use std::future::{Future, pending};
use std::sync::Arc;
use std::time::Duration;

use tower_service::Service;
use tracing::Span;

use self::event_loop::WorkerLoop;
use self::events::{EventSender, Events};
use self::ready::ReadyServices;
use super::backoff::Backoff;
use super::codec::{Codec, Json};
use super::job::Job;
use super::queue::DelayQueue;
use super::store::Claim;
use super::trace;
use crate::error::{BoxError, ConfigError, StoreError};

/// Gives the jobs of a [`DelayQueue`] to a tower service when they are due.
///
/// ```
/// use std::time::Duration;
/// use tollgate::delay_queue::{DelayQueue, DelayQueueWorker, Job};
/// use tollgate::{BoxError, MemoryBackend};
/// use tower::{ServiceBuilder, service_fn};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> Result<(), BoxError> {
/// let queue = DelayQueue::<String>::new(MemoryBackend::new(), "mail");
/// queue.push("alice@example.org".to_owned()).delay(Duration::from_secs(60)).await?;
///
/// let service = ServiceBuilder::new()
///     .concurrency_limit(16) // decides how many jobs are claimed
///     .timeout(Duration::from_secs(30))
///     .service(service_fn(async |job: Job<String>| {
///         println!("attempt {} for {}", job.attempt(), *job);
///         Ok::<_, BoxError>(())
///     }));
/// let shutdown = tokio::time::sleep(Duration::from_secs(61)); // Ctrl-C, for instance
/// DelayQueueWorker::new(queue, service).run_until(shutdown).await?;
/// # Ok(())
/// # }
/// ```
///
/// # What becomes of a job
///
/// | the service answers | the job |
/// | --- | --- |
/// | `Ok` | is done, and forgotten |
/// | an error | waits for its next attempt, after the [backoff](Self::backoff); dead after the last one |
/// | [`Outcome`](super::Outcome), as the error or one of its sources | what it says |
/// | [`RateLimited`](crate::rate_limit::RateLimited), of a `RateLimitLayer` | is snoozed until there is room, and the attempt does not count; dead if there never is. See [rate limits](crate::delay_queue#rate-limits) |
/// | [`Busy`](crate::lock::Busy) or [`LockError::QueueFull`](crate::LockError::QueueFull), of a `LockLayer` | waits for up to a second, or up to eleven where many wait, and the attempt does not count: one job of a key at a time, in no order |
/// | [`OperationError::InFlight`](crate::idempotency::OperationError::InFlight), of [`Idempotent`](crate::idempotency::Idempotent) | likewise, until it is known what came of it |
/// | [`OperationError::NotKept`](crate::idempotency::OperationError::NotKept), of `Idempotent` | as with any error, although the operation was done: only the service knows whether the job is done with that, and [answers `Ok`](crate::idempotency::OperationError::NotKept) then |
/// | an error of the store that a layer asks | as with any error, so the attempt counts; a layer may be told to let jobs pass then |
/// | by panicking, or with an error whose text panics | as with an error; where the service [cannot be cloned](Self::one_by_one) it goes on with the same one |
///
/// What is named there is heard as one of the sources of the error, too, and where `anyhow`, `#[error(transparent)]` or [`io::Error::other`](std::io::Error::other)
/// is around it. The outermost one counts.
///
/// That is noted by the store outside of the service: a layer that tries again in the process (`tower::retry`) is within one attempt.
///
/// # How many
///
/// As many jobs are claimed as instances of the service are [ready](Service::poll_ready), up to [`concurrency`](Self::concurrency). Each job
/// runs in a task of its own. A service that fails or panics when it is asked whether it is ready [ends](WorkerError::Service) the worker. While nothing is due no instance is kept ready, so that a worker does not keep permits from others.
///
/// # Leases
///
/// A job is the worker's for the time of a [lease](Self::lease), which is extended after a third of it for as long as the job runs. A worker that dies or
/// stands still leaves its jobs to others then, and what it answers later changes nothing. A service is [told](Job::cancellation) when its
/// job is to be given up, and dropped when it does not end [soon](Self::abort_after): the lease is lost, somebody has cancelled the job, or it
/// runs for [too long](Self::max_runtime).
///
/// Work that blocks its thread belongs into [`spawn_blocking`](tokio::task::spawn_blocking), where it goes on when its service is dropped, unless it looks whether
/// the job is to be [given up](super::Cancellation::is_cancelled). Elsewhere it holds up what else its thread has to do, and a service that never yields cannot be
/// dropped: a second after it should have been the attempt is over all the same, with a line in the log, and the next one comes after the
/// [backoff](Self::backoff), in another worker, or in this one when the thread is back. Until then it counts as one that
/// [runs](Self::concurrency), and if this worker gets the job again it is put off, which is no attempt.
///
/// # Logs
///
/// The log has a WARN for each job that dies, and for each that a shutdown cuts off when its [grace](Self::grace) is over. They have the fields
/// `queue`, `job` (the id), `attempts` and `reason`; a dead job has its `error`, too. A worker logs up to 100 of them a second, and then how many more there were.
///
/// # When the store fails
///
/// The worker asks again, first after 50 ms and then up to once a second, until it works; what jobs have come to is kept and noted then. Meanwhile
/// it keeps no more than one instance of the service ready, and none between two calls: others may have a use for its permits.
///
/// # Cancellation
///
/// Dropping the future of [`run`](Self::run) drops what the service is at, at once. Those jobs come back when their leases have ended,
/// and the attempt counts. [`run_until`](Self::run_until) ends without that.
#[must_use = "a worker does nothing until it runs"]
pub struct DelayQueueWorker<T, S, C = Json> {
    queue: DelayQueue<T, C>,
    slots: ReadyServices<S>,
    settings: Settings<T>,
}

pub(crate) struct Settings<T> {
    pub(crate) concurrency: usize,
    pub(crate) lease: Duration,
    pub(crate) max_runtime: Option<Duration>,
    pub(crate) abort_after: Duration,
    pub(crate) grace: Duration,
    pub(crate) backoff: Backoff,
    pub(crate) on_undecodable: OnUndecodable,
    pub(crate) span: Option<Arc<MakeSpan<T>>>,
    pub(crate) teller: EventSender,
}

type MakeSpan<T> = dyn Fn(&Job<T>) -> Span + Send + Sync;

impl<T> Settings<T> {
    /// The span of an attempt.
    pub(crate) fn span(&self, queue: &str, job: &Job<T>) -> Span {
        let span = self.span.as_ref().map_or_else(|| trace::span(queue, job), |make| make(job));
        #[cfg(feature = "otel")]
        trace::link(&span, job.headers());
        span
    }
}

impl<T, S: Clone, C> DelayQueueWorker<T, S, C> {
    /// Gives the jobs of `queue` to clones of `service`.
    pub fn new(queue: DelayQueue<T, C>, service: S) -> Self {
        Self::with_slots(queue, ReadyServices::many(service, S::clone))
    }
}

impl<T, S, C> DelayQueueWorker<T, S, C> {
    /// The same for a service that cannot be cloned: jobs are claimed one by one, each when the service is ready for another one. Several of
    /// them run at a time, if the service is ready while it is at one.
    pub fn one_by_one(queue: DelayQueue<T, C>, service: S) -> Self {
        Self::with_slots(queue, ReadyServices::single(service))
    }

    fn with_slots(queue: DelayQueue<T, C>, slots: ReadyServices<S>) -> Self {
        let settings = Settings {
            concurrency: 64,
            lease: Duration::from_secs(30),
            max_runtime: Some(Duration::from_secs(3_600)),
            abort_after: Duration::from_secs(5),
            grace: Duration::from_secs(20),
            backoff: Backoff::default(),
            on_undecodable: OnUndecodable::default(),
            span: None,
            teller: EventSender::new(),
        };
        Self { queue, slots, settings }
    }

    /// How many jobs run at a time at the most; fewer if the service is ready for fewer. Defaults to 64; 0 counts as 1. However many it is, no
    /// more than 512 for each part of the queue are claimed at a time, and the service is not cloned more often than that for them.
    pub fn concurrency(mut self, jobs: usize) -> Self {
        self.settings.concurrency = jobs.max(1);
        self
    }

    /// How long a job stays the worker's when nothing is heard of it: from 10 ms to a day. If the worker dies, an idle worker takes the job within half
    /// a second after that for leases of at least 5 s. It has to
    /// be longer than the store takes to answer: a job whose lease has ended by then is not begun, and given back with its attempt. Defaults to 30 s.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.settings.lease = lease;
        self
    }

    /// For how long one attempt may run. After that the job is told to [give up](Job::cancellation), and the attempt has failed unless the
    /// service answers that it is done. Defaults to an hour; `None` lets a job that hangs run for as long as the worker does.
    pub fn max_runtime(mut self, time: impl Into<Option<Duration>>) -> Self {
        self.settings.max_runtime = time.into();
        self
    }

    /// How long a service that is told to give up its job may take before its future is dropped. Defaults to 5 s.
    pub fn abort_after(mut self, patience: Duration) -> Self {
        self.settings.abort_after = patience;
        self
    }

    /// How long [`run_until`](Self::run_until) waits for jobs that run before they are told to give up. Defaults to 20 s.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.settings.grace = grace;
        self
    }

    /// How long a job that has failed waits. Defaults to [`Backoff::default`].
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.settings.backoff = backoff;
        self
    }

    /// What becomes of a job whose payload cannot be read. Defaults to [`OnUndecodable::Dead`].
    pub fn on_undecodable(mut self, then: OnUndecodable) -> Self {
        self.settings.on_undecodable = then;
        self
    }

    /// The span in which a job runs. Defaults to one called `job` with the fields `queue`, `id` and `attempt`, and `link.trace_id` and
    /// `link.span_id` of a [`traceparent`](https://www.w3.org/TR/trace-context/) header. With the feature `otel` either has a link to
    /// who pushed the job: see [traces](crate::delay_queue#traces). Where `make` panics the attempt has failed, as it has where the service does.
    pub fn span(mut self, make: impl Fn(&Job<T>) -> Span + Send + Sync + 'static) -> Self {
        self.settings.span = Some(Arc::new(make));
        self
    }

    /// What happens from now on, for whoever picks it up.
    #[must_use]
    pub fn events(&self) -> Events {
        self.settings.teller.listen()
    }
}

impl<T, S, C> DelayQueueWorker<T, S, C>
where
    S: Service<Job<T>, Error: Into<BoxError>, Future: Send + 'static>,
    C: Codec<T> + Send + Sync + 'static,
    T: Send + 'static,
{
    /// Works until the service says that it will never be ready again.
    ///
    /// # Errors
    ///
    /// [`WorkerError`].
    pub async fn run(self) -> Result<(), WorkerError> {
        self.run_until(pending()).await
    }

    /// Works until `shutdown` is ready. Nothing is claimed after that; jobs that run have the time of [`grace`](Self::grace) to come to
    /// their end. The others are told to give up, and wait as before: the attempt does not count. Only where the service still answers that
    /// its job is done, or with an error that [says](Self#what-becomes-of-a-job) what becomes of it, such as an [`Outcome`](super::Outcome), that counts.
    ///
    /// Ends when the store has noted all of that, or five seconds later when it fails. A service that never yields, since it blocks its thread, cannot
    /// be dropped: a second after it should have been it is left behind, and its job comes back when the lease has ended.
    ///
    /// # Errors
    ///
    /// [`WorkerError`].
    pub async fn run_until(self, shutdown: impl Future<Output = ()>) -> Result<(), WorkerError> {
        let lease = self.settings.lease;
        if !(Claim::MIN_LEASE..=Claim::MAX_LEASE).contains(&lease) {
            let (ttl, min, max) = (lease, Claim::MIN_LEASE, Claim::MAX_LEASE);
            return Err(WorkerError::Config(ConfigError::TtlOutOfRange { ttl, min, max }));
        }
        WorkerLoop::new(self.queue, self.slots, self.settings).map_err(WorkerError::Store)?.run(shutdown).await
    }
}

impl<T, S, C> fmt::Debug for DelayQueueWorker<T, S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DelayQueueWorker")
            .field("queue", &self.queue)
            .field("concurrency", &self.settings.concurrency)
            .field("lease", &self.settings.lease)
            .finish_non_exhaustive()
    }
}

/// What becomes of a job whose payload a worker cannot read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnUndecodable {
    /// It is dead at once, [undecodable](super::Reason::Undecodable).
    #[default]
    Dead,
    /// As after an error of the service: it is tried again after the [backoff](DelayQueueWorker::backoff), and dead after the last attempt,
    /// [undecodable](super::Reason::Undecodable) if that one could not read it either. For jobs of a new release that workers of the old one may meet.
    Retry,
}

/// A worker cannot go on.
#[derive(Debug)]
#[non_exhaustive]
pub enum WorkerError {
    /// The service will never be ready again: it has failed when it was asked, or panicked. What ran has been given the time that a
    /// shutdown gives.
    Service(BoxError),
    /// A setting cannot work; nothing was asked of the store.
    Config(ConfigError),
    /// The system has no random numbers for the name of the worker.
    Store(StoreError),
}

impl fmt::Display for WorkerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Service(_) => f.write_str("the service will never be ready again"),
            Self::Config(error) => fmt::Display::fmt(error, f),
            Self::Store(error) => fmt::Display::fmt(error, f),
        }
    }
}

impl Error for WorkerError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Service(error) => Some(&**error),
            Self::Config(error) => error.source(),
            Self::Store(error) => error.source(),
        }
    }
}
