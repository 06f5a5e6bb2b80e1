pub(crate) mod attempt_results;
pub(crate) mod claims;
mod error;
pub(crate) mod event_loop;
pub(crate) mod events;
pub(crate) mod job_timers;
pub(crate) mod partition;
pub(crate) mod pending_ack;
pub(crate) mod plan;
pub(crate) mod ready;
pub(crate) mod replies;
pub(crate) mod reporter;
pub(crate) mod retry_stagger;
pub(crate) mod running_job;
pub(crate) mod running_jobs;
pub(crate) mod settings;
pub(crate) mod stage;
pub(crate) mod store_calls;
pub(crate) mod store_client;

use std::fmt;
use std::future::{Future, pending};
use std::sync::Arc;
use std::time::Duration;

use tower_service::Service;
use tracing::Span;

use self::event_loop::WorkerLoop;
use self::events::{EventSender, Events};
use self::ready::ReadyServices;
use self::settings::Settings;
use super::backoff::Backoff;
use super::job::Job;
use super::queue::DelayQueue;
use super::store::Claim;
use crate::codec::{Codec, Json};
use crate::error::{BoxError, ConfigError};

pub use self::error::WorkerError;
pub use self::settings::OnUndecodable;

/// Runs the due jobs of a [`DelayQueue`] with a tower service.
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
/// | the service returns | the job |
/// | --- | --- |
/// | `Ok` | is done, and removed |
/// | an error | waits for its next attempt, after the [backoff](Self::backoff); dead after the last attempt |
/// | [`Outcome`](super::Outcome), as the error or one of its sources | as the outcome says |
/// | [`RateLimited`](crate::rate_limit::RateLimited), from a `RateLimitLayer` | is snoozed until the limit has capacity, and the attempt does not count; dead if the limit can never allow it. See [rate limits](crate::delay_queue#rate-limits) |
/// | [`Busy`](crate::lock::Busy), [`LockError::QueueFull`](crate::LockError::QueueFull) or [`LockError::Closed`](crate::LockError::Closed), from a `LockLayer` | waits for up to a second, or up to eleven if many jobs wait, and the attempt does not count. One job of a key runs at a time, in no particular order |
/// | [`OperationError::InFlight`](crate::idempotency::OperationError::InFlight), from [`Idempotent`](crate::idempotency::Idempotent) | as with `Busy`, until the outcome of the operation is known |
/// | [`OperationError::NotStored`](crate::idempotency::OperationError::NotStored), from `Idempotent` | as with any error, although the operation was done. If the job needs no further attempt, let the service [return `Ok`](crate::idempotency::OperationError::NotStored) |
/// | a store error of a layer | as with any error, so the attempt counts; you can configure a layer to let jobs pass instead |
/// | nothing, since it panics; or an error whose `Display` panics | as with an error; a service that [cannot be cloned](Self::one_by_one) is used again |
///
/// These errors are also found as a source of the error, and inside `anyhow`, `#[error(transparent)]` or
/// [`io::Error::other`](std::io::Error::other). The outermost one counts.
///
/// The worker records the result in the store, outside the service. A layer that retries in the process (`tower::retry`) is therefore
/// within one attempt.
///
/// # Concurrency
///
/// The worker claims as many jobs as instances of the service are [ready](Service::poll_ready), up to [`concurrency`](Self::concurrency).
/// Each job runs in a task of its own. If `poll_ready` fails or panics, the worker [ends](WorkerError::Service). While no job is due,
/// the worker keeps no instance ready, so that it does not hold permits that others need.
///
/// # Leases
///
/// A worker holds a job for the duration of a [lease](Self::lease), and renews it after a third of that for as long as the job runs. If the
/// worker dies or stalls, other workers take over its jobs, and its late results have no effect. If the lease is lost, the job is
/// cancelled, or the attempt exceeds the [maximum runtime](Self::max_runtime), the worker [tells](Job::cancellation) the service to give up
/// the job. If the service does not end [in time](Self::abort_after), the worker drops it.
///
/// Run blocking work in [`spawn_blocking`](tokio::task::spawn_blocking). It goes on there when its service is dropped, unless it checks
/// [`is_cancelled`](super::Cancellation::is_cancelled). Blocking work elsewhere delays the other tasks of its thread, and a service that
/// never yields cannot be dropped. A second after the drop was due, the worker abandons such a job: it logs a warning, and the attempt
/// has failed. The next attempt comes after the [backoff](Self::backoff), in another worker, or in this one when the thread is free again.
/// Until the thread is free, the abandoned job counts for the [concurrency](Self::concurrency). If this worker claims the same job
/// meanwhile, it snoozes the job, and that attempt does not count.
///
/// # Logs
///
/// The log has a WARN for each job that dies, and for each job that a shutdown cuts off after its [grace](Self::grace) period. These lines
/// have the fields `queue`, `job` (the id), `attempts` and `reason`; that of a dead job also has its `error`. A worker logs up to 100 such
/// lines a second, and then the number of further ones.
///
/// # When the store fails
///
/// The worker retries its calls until the store works: first after 25 to 50 ms, and in the end every 0.5 to 1 s. It keeps the results of
/// jobs, and records them when the store works again. Meanwhile it keeps at most one instance of the service ready, and none between two
/// calls, since others may need the permits.
///
/// # Cancellation
///
/// If you drop the future of [`run`](Self::run), the running services are dropped at once. Their jobs return when their leases have ended,
/// and the attempt counts. [`run_until`](Self::run_until) and the [shutdown of the backend](crate::backend#shutdown) shut down gracefully.
#[must_use = "a worker does nothing until it runs"]
pub struct DelayQueueWorker<T, S, C = Json> {
    queue: DelayQueue<T, C>,
    services: ReadyServices<S>,
    settings: Settings<T>,
}

impl<T, S: Clone, C> DelayQueueWorker<T, S, C> {
    /// Runs the jobs of `queue` with clones of `service`.
    pub fn new(queue: DelayQueue<T, C>, service: S) -> Self {
        Self::with_services(queue, ReadyServices::many(service, S::clone))
    }
}

impl<T, S, C> DelayQueueWorker<T, S, C> {
    /// A worker for a service that cannot be cloned. It claims jobs one at a time, each when the service is ready for another one. Several
    /// jobs run concurrently if the service is ready while it runs one.
    pub fn one_by_one(queue: DelayQueue<T, C>, service: S) -> Self {
        Self::with_services(queue, ReadyServices::single(service))
    }

    fn with_services(queue: DelayQueue<T, C>, services: ReadyServices<S>) -> Self {
        let settings = Settings {
            concurrency: 64,
            lease: Duration::from_secs(30),
            max_runtime: Some(Duration::from_secs(3_600)),
            abort_after: Duration::from_secs(5),
            grace: Duration::from_secs(13),
            backoff: Backoff::default(),
            on_undecodable: OnUndecodable::default(),
            span: None,
            events: EventSender::new(),
        };
        Self { queue, services, settings }
    }

    /// The largest number of concurrent jobs. The service may be ready for fewer. Defaults to 64; 0 counts as 1. The calls in flight claim
    /// at most 512 jobs for each partition of the queue. So the worker keeps at most 512 instances of the service ready for each partition.
    pub fn concurrency(mut self, jobs: usize) -> Self {
        self.settings.concurrency = jobs.max(1);
        self
    }

    /// How long a job is reserved for the worker without a renewal: from 10 ms to a day. Defaults to 30 s. If the worker dies, an idle worker
    /// takes the job within half a second after that, for leases of at least 5 s.
    ///
    /// Choose a lease longer than a store call takes. If the lease of a job has ended when the claim returns, the job is not started, and the
    /// worker releases it; that attempt does not count.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.settings.lease = lease;
        self
    }

    /// The maximum runtime of one attempt. After that the service is told to [give up](Job::cancellation) the job, and the attempt has failed
    /// unless the service returns `Ok`. Defaults to an hour. With `None` a job that hangs runs for as long as the worker does.
    pub fn max_runtime(mut self, time: impl Into<Option<Duration>>) -> Self {
        self.settings.max_runtime = time.into();
        self
    }

    /// How long a service may take to give up its job before its future is dropped. Defaults to 5 s.
    pub fn abort_after(mut self, timeout: Duration) -> Self {
        self.settings.abort_after = timeout;
        self
    }

    /// How long [`run_until`](Self::run_until) waits for running jobs before it tells them to give up. Defaults to 13 s.
    ///
    /// With the defaults, the whole shutdown of a worker fits into 25 s. It takes at most this time, [`abort_after`](Self::abort_after), a
    /// second for services that do not yield, and five seconds for the results: 24 s in total.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.settings.grace = grace;
        self
    }

    /// How long a failed job waits for its next attempt. Defaults to [`Backoff::default`].
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.settings.backoff = backoff;
        self
    }

    /// How to handle a job whose payload cannot be decoded. Defaults to [`OnUndecodable::Dead`].
    pub fn on_undecodable(mut self, action: OnUndecodable) -> Self {
        self.settings.on_undecodable = action;
        self
    }

    /// The span of each attempt. Defaults to one named `job` with the fields `queue`, `id` and `attempt`. If the job has a
    /// [`traceparent`](https://www.w3.org/TR/trace-context/) header, the span also has `link.trace_id` and `link.span_id`.
    ///
    /// With the feature `otel`, the default span and the span that `make` returns both link to the span of the push: see
    /// [traces](crate::delay_queue#traces). If `make` panics, the attempt has failed, as it has if the service panics.
    pub fn span(mut self, make: impl Fn(&Job<T>) -> Span + Send + Sync + 'static) -> Self {
        self.settings.span = Some(Arc::new(make));
        self
    }

    /// The events of this worker from now on.
    #[must_use]
    pub fn events(&self) -> Events {
        self.settings.events.subscribe()
    }
}

impl<T, S, C> DelayQueueWorker<T, S, C>
where
    S: Service<Job<T>, Error: Into<BoxError>, Future: Send + 'static>,
    C: Codec<T> + Send + Sync + 'static,
    T: Send + 'static,
{
    /// Runs until the service fails to become ready, or the [backend is shut down](crate::backend#shutdown).
    ///
    /// # Errors
    ///
    /// [`WorkerError`].
    pub async fn run(self) -> Result<(), WorkerError> {
        self.run_until(pending()).await
    }

    /// Runs until `shutdown` completes, or the [backend is shut down](crate::backend#shutdown). The worker then claims no more jobs, and
    /// waits for running jobs for the [`grace`](Self::grace) period. After that, it tells the services of the remaining jobs to give up,
    /// and releases these jobs: they become waiting jobs again, and the attempt does not count. A service that still
    /// returns `Ok`, or an error that [determines the outcome](Self#what-becomes-of-a-job), such as an [`Outcome`](super::Outcome), sets the
    /// result as usual.
    ///
    /// Returns when the store has recorded all results. If the store fails, returns five seconds after the last job has ended or was
    /// abandoned. A service that never yields, since it blocks its thread, cannot be dropped. It is abandoned a second after the drop was
    /// due, and its job returns when the lease has ended.
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
        let guard = self.queue.start_activity();
        let activity = guard.activity();
        if activity.is_closed() {
            return Ok(());
        }
        let shutdown = async {
            tokio::select! {
                () = shutdown => {}
                () = activity.closed() => {}
            }
        };
        let worker = WorkerLoop::new(self.queue, self.services, self.settings).map_err(WorkerError::Store)?;
        worker.run(shutdown, activity).await
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
