//! Delayed jobs: stored until they are done, never early, and run at least once.
//!
//! A [`DelayQueue`] keeps jobs in a backend until they are due: in this process ([`MemoryBackend`](crate::MemoryBackend)) or in Redis,
//! where any number of processes push and claim. You run only workers: the queue needs no scheduler, no leader and no process that cleans
//! up.
//!
//! ```
//! # #[cfg(feature = "json")] {
//! use std::time::Duration;
//! use serde::{Deserialize, Serialize};
//! use tollgate::{DelayQueue, MemoryBackend};
//!
//! #[derive(Serialize, Deserialize)]
//! struct SendEmail { to: String }
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
//! let queue = DelayQueue::<SendEmail>::new(MemoryBackend::new(), "mail");
//!
//! let welcome = queue.push(SendEmail { to: "alice".into() }).delay(Duration::from_secs(60)).id("welcome:42").await?;
//! assert!(welcome.is_new());
//!
//! queue.reschedule("welcome:42", Duration::from_secs(5)).await?;
//! queue.cancel("welcome:42").await?;
//! # Ok(())
//! # }
//! # main().unwrap();
//! # }
//! ```
//!
//! Guides: [queues](crate::guide::queues), [Redis](crate::guide::redis), [Kubernetes](crate::guide::kubernetes),
//! [troubleshooting](crate::guide::troubleshooting).
//!
//! # Guarantees
//!
//! * At least once, on one Redis primary: a pushed job stays until it is done, cancelled or dead, even if processes die.
//!   Data that Redis itself loses is lost: see [durability](#durability).
//! * Never early: a delay counts by the store's clock, to the millisecond. The clocks of clients and workers do not matter.
//! * A job is in one state, and every transition is one atomic step. Only the holder of the latest lease can finish a job, and each claim
//!   of a job has a larger [fencing token](Job::fence) than all earlier ones.
//! * A job that kills its worker each time ends up dead when its attempts are used up. An attempt counts as soon as it is claimed.
//! * Not exactly once: if a worker dies or stalls, its job runs again. Use the [fence](Job::fence) or the id to reject effects that
//!   happened already.
//! * Not on time if the store's clock is set back. Due jobs, and the jobs of dead workers, are then late by that amount.
//! * No order of execution. Workers claim due jobs by priority, then by due time, then by id, but claimed jobs run concurrently.
//!
//! # Options
//!
//! | setter of [`DelayQueue`] | default | meaning |
//! | --- | --- | --- |
//! | [`max_jobs`](DelayQueue::max_jobs) | 1,000,000 | jobs in the queue: waiting, running and dead ones |
//! | [`max_size`](DelayQueue::max_size) | 64 KiB | payload and headers of a job |
//! | [`max_attempts`](DelayQueue::max_attempts) | 20 | attempts before a job is dead |
//! | [`keep_dead`](DelayQueue::keep_dead) | 10,000 for 90 days | how many dead jobs are kept, and for how long |
//! | [`deadline`](DelayQueue::deadline) | 100 ms | the longest time of a store call |
//! | [`circuit_breaker`](DelayQueue::circuit_breaker) | [`CircuitBreaker::new`] | when to stop calling a failing store; workers ignore it |
//! | [`split`](DelayQueue::split) | 1 | partitions of a queue that is too much for one node of a cluster |
//! | [`require`](DelayQueue::require) | none | the [`Reach`](crate::Reach) that a backend must have |
//!
//! | setter of [`Push`] | default | meaning |
//! | --- | --- | --- |
//! | [`delay`](Push::delay), [`at`](Push::at), [`due`](Push::due) | at once | when the job is due |
//! | [`id`](Push::id) | a generated one | while a job with this id waits or runs, a push changes nothing |
//! | [`unique`](Push::unique), [`unique_for`](Push::unique_for) | none | while the key is held, a push changes nothing |
//! | [`priority`](Push::priority) | [`Priority::Normal`] | due jobs of a higher priority are claimed first |
//! | [`max_attempts`](Push::max_attempts) | that of the queue | attempts before the job is dead |
//! | [`header`](Push::header) | none | metadata, such as `traceparent` |
//!
//! | setter of [`DelayQueueWorker`] | default | meaning |
//! | --- | --- | --- |
//! | [`concurrency`](DelayQueueWorker::concurrency) | 64 | jobs that run at a time |
//! | [`lease`](DelayQueueWorker::lease) | 30 s | how long a job of a dead worker stays reserved |
//! | [`max_runtime`](DelayQueueWorker::max_runtime) | an hour | how long an attempt may run |
//! | [`abort_after`](DelayQueueWorker::abort_after) | 5 s | how long a service may take to give up its job |
//! | [`grace`](DelayQueueWorker::grace) | 13 s | how long a shutdown waits for running jobs |
//! | [`backoff`](DelayQueueWorker::backoff) | from 1 s to an hour, with full jitter | how long a failed job waits |
//! | [`on_undecodable`](DelayQueueWorker::on_undecodable) | [`OnUndecodable::Dead`] | what happens to a job whose payload cannot be decoded |
//! | [`span`](DelayQueueWorker::span) | `job` | the span of each attempt |
//!
//! All options of a queue and a push:
//!
//! ```
//! # #[cfg(feature = "json")] {
//! use std::time::Duration;
//! use tollgate::delay_queue::{Cancelled, Changed, CircuitBreaker, Priority, QueueError, UniqueFor};
//! use tollgate::{DelayQueue, MemoryBackend};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
//! let queue = DelayQueue::<String>::new(MemoryBackend::new(), "orders")
//!     .max_jobs(100_000)
//!     .max_size(4_096)
//!     .max_attempts(8)
//!     .keep_dead(1_000, Duration::from_secs(7 * 86_400))
//!     .deadline(Duration::from_millis(200))
//!     .circuit_breaker(CircuitBreaker::new().failures(10));
//!
//! let push = queue
//!     .push("order 42".to_owned())
//!     .delay(Duration::from_secs(900)) // or .at(SystemTime)
//!     .id("order:42")
//!     .unique_for("customer:7", UniqueFor::WaitingOrRunning)
//!     .priority(Priority::High)
//!     .max_attempts(3)
//!     .header("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
//! match push.await {
//!     Ok(pushed) => assert!(pushed.is_new()),
//!     Err(QueueError::Full { .. }) => println!("come back later"),
//!     Err(error) => return Err(error.into()),
//! }
//!
//! assert_eq!(queue.replace("order:42", "order 42, two pieces".to_owned()).await?, Changed::Done);
//! assert_eq!(queue.promote("order:42").await?, Changed::Done);
//! assert_eq!(queue.counts().await?.due, 1);
//! assert_eq!(queue.cancel("order:42").await?, Cancelled::Removed);
//! # Ok(())
//! # }
//! # main().unwrap();
//! # }
//! ```
//!
//! [`push_all`](DelayQueue::push_all) pushes many jobs in one call.
//!
//! # A job and its states
//!
//! A job waits until it is due. It then runs under a lease, which the worker extends, and it is removed when it is done. After a failure
//! the job waits again, for the worker's backoff. After its last attempt it is dead. You can [list](DelayQueue::dead) dead jobs,
//! [replay](DelayQueue::replay) them or [forget](DelayQueue::forget) them, by a filter or by id. If a worker releases a job, for instance
//! at its shutdown, the attempt does not count.
//!
//! | | waiting | running | dead | done, or unknown id |
//! | --- | --- | --- | --- | --- |
//! | push with its id | `Exists` | `Exists`; after `cancel`: new, and claimed when the cancelled attempt has ended | new again | new |
//! | [`cancel`](DelayQueue::cancel) | removed | its worker is notified; not tried again | `Dead` | `Missing` |
//! | [`reschedule`](DelayQueue::reschedule), [`promote`](DelayQueue::promote), [`replace`](DelayQueue::replace) | done | `Running` | `Dead` | `Missing` |
//! | [`replay_ids`](DelayQueue::replay_ids) | `false` | `false` | waits again, unless its unique key is taken | `false` |
//! | [`forget_ids`](DelayQueue::forget_ids) | `false` | `false` | removed | `false` |
//!
//! # Workers
//!
//! A [`DelayQueueWorker`] gives jobs to any tower service. Run workers in as many processes as you like:
//!
//! ```
//! # #[cfg(feature = "json")] {
//! use std::time::Duration;
//! use tollgate::delay_queue::{JobResponder, Backoff, DelayQueueWorker, Outcome};
//! use tollgate::{BoxError, DelayQueue, Job, LockLayer, MemoryBackend, Policy, Quota, RateLimitLayer};
//! use tower::{ServiceBuilder, service_fn};
//!
//! async fn send(job: Job<String>) -> Result<(), BoxError> {
//!     match job.split_once('@') {
//!         Some(_) => Ok(()),
//!         None => Err(Outcome::dead("invalid address").into()),
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> Result<(), BoxError> {
//! let backend = MemoryBackend::new();
//! let queue = DelayQueue::<String>::new(backend.clone(), "mail");
//! queue.push("alice@example.org".to_owned()).delay(Duration::from_secs(60)).await?;
//!
//! let mails = Policy::new("mails", Quota::per_second(100).token_bucket());
//! let limit = RateLimitLayer::new(backend.clone(), mails).wait(Duration::from_secs(10)); // jobs wait for capacity, in order
//! let service = ServiceBuilder::new()
//!     .layer(limit.responder(JobResponder)) // no capacity within 10 s: snoozed, and the attempt does not count
//!     .layer(LockLayer::new(backend, "mail").key(|job: &Job<String>| job.to_string()).responder(JobResponder)) // one at a time for each address
//!     .concurrency_limit(16) // decides how many jobs are claimed
//!     .timeout(Duration::from_secs(30)) // a timeout is a failure: the job is tried again
//!     .service(service_fn(send));
//! let worker = DelayQueueWorker::new(queue.clone(), service)
//!     .lease(Duration::from_secs(30))
//!     .max_runtime(Duration::from_secs(600))
//!     .backoff(Backoff::exponential(Duration::from_secs(1), Duration::from_secs(3_600)).full_jitter());
//! worker.run_until(tokio::time::sleep(Duration::from_secs(61))).await?;
//! assert_eq!(queue.counts().await?.waiting, 0);
//! # Ok(())
//! # }
//! # main().unwrap();
//! # }
//! ```
//!
//! These layers put their handles into the job's extensions: see [`JobResponder`].
//! [`LockLayer::with_semaphore`](crate::LockLayer::with_semaphore) lets several jobs of a key run at a time, across all processes.
//! Use it to limit the concurrent jobs of each tenant, for example.
//!
//! `Recurring` (feature `cron`) pushes a job for each time of a cron pattern in a time zone. Any number of processes may run it, and each
//! occurrence is pushed once.
//!
//! In Redis, one idle worker sleeps until the next job is due; in memory, all idle workers do. The timer follows the store's clock.
//! When a job with an earlier due time is pushed, the store wakes one worker through a separate connection. In case the sleeping worker has
//! died, a few others also check, 200 to 350 ms after the next job is due or the first lease has ended. Then a job that was pushed at least
//! 5 s before its due time is at most half a second late. Any other job is at most 5 s late. Since notifications
//! can get lost, each worker also checks every five seconds, in each partition of a [split](DelayQueue::split) queue. An idle worker makes
//! no other calls. A worker that has no capacity for due jobs wakes another one.
//!
//! In memory no notification gets lost, so an idle worker does not check periodically. A worker with running jobs does, because a job that
//! [blocks its thread](DelayQueueWorker#leases) can delay the notifications for jobs that it has just pushed.
//!
//! # Rate limits
//!
//! Put a [`RateLimitLayer`](crate::RateLimitLayer) in front of the service, let jobs [wait](crate::RateLimitLayer::wait) in it, and keep
//! the [concurrency](DelayQueueWorker::concurrency) small. The jobs then run at the full rate, by priority and then by due time. A job of
//! high priority waits for the jobs that are claimed already: about the concurrency divided by the rate. At 2 jobs a second and a
//! concurrency of 2 that is about one second. Let jobs wait for longer than that, so that no job is snoozed.
//!
//! Without `wait`, or when the wait times out, [`JobResponder`] makes the worker snooze each job over the limit. The order is then lost:
//!
//! * Order: after its snooze, a job takes its position among the jobs of its priority, by when it was first due. Until then it is not
//!   claimed, and newer jobs use the capacity that becomes free. If new jobs keep arriving, a job may be snoozed any number of times.
//! * Priority: a worker with a snoozed backlog runs the next job that returns, whatever its priority. A job of high priority is snoozed
//!   like the others, and may run after many jobs of normal priority.
//! * Cost: each snooze is a claim and a finish. With a large backlog a worker claims and snoozes many jobs for each job that it runs.
//!
//! # When the store fails
//!
//! If a store call fails or exceeds the [deadline](DelayQueue::deadline), it returns [`QueueError::Store`]. After several failures in a row
//! the [circuit](DelayQueue::circuit_breaker) opens: calls fail at once, and only periodic probes reach the store. Each partition of a
//! [split](DelayQueue::split) queue has its own circuit. Workers do not use it: they [retry](DelayQueueWorker#when-the-store-fails) until
//! the store works. The log has a line for the beginning and the end of each outage.
//!
//! # Metrics
//!
//! With the feature `metrics`, queues and workers record metrics through the `metrics` facade, all with the label `queue`. A metric that an
//! exporter has dropped after its idle timeout appears [again](crate::rate_limit#metrics) when it is next used.
//!
//! | | |
//! | --- | --- |
//! | `tollgate_jobs_total` | ended attempts, by `outcome`: `done`, `retried`, `snoozed`, `dead`, `cancelled`, `released`, `lease_lost` |
//! | `tollgate_job_leases_expired_total` | attempts whose lease expired before they ended. The next claim counts them, by `outcome`: `returned` (the job waits again, or is removed if it was cancelled) or `dead`. If the first worker comes back, it also counts the attempt as `lease_lost` |
//! | `tollgate_job_lateness_seconds` | a histogram: the time from due to claimed; for a snoozed job, from when it was first due |
//! | `tollgate_job_seconds` | a histogram: how long attempts ran |
//! | `tollgate_jobs_running` | jobs that are running in this process |
//! | `tollgate_jobs_oldest_due_seconds` | the age of the oldest due job that is not claimed, as the store reported it to a worker of this process. At most five seconds old, unless the store fails. A snoozed job that has returned counts from when it was first due. 0 if no job is due. **Also 0 after a worker has ended**, until another worker of this process makes a call |
//! | `tollgate_job_store_errors_total` | store calls that failed: of workers, of pushes, and of calls that read or change jobs |
//! | `tollgate_job_pushes_total` | pushed jobs, by `outcome`: `new`, `exists`, `full`, `failed` (the store failed, the circuit was open, or the push was dropped). Pushes in your own [pipeline](PreparedPush) are not counted |
//! | `tollgate_job_circuit_transitions_total` | [circuits](DelayQueue::circuit_breaker) that opened and closed, by `state`: `open`, `closed` |
//!
//! [`DelayQueue::counts`] returns how many jobs wait. Its [`oldest_due`](Counts::oldest_due) is the age of the oldest due job that is not
//! claimed, whether workers run or not. Use it for an alert on jobs without a worker: the gauge is set by workers, so it cannot show that
//! there are none.
//!
//! # Traces
//!
//! Each attempt runs in a [span](DelayQueueWorker::span), which begins a new trace, since the client that pushed the job did not wait for
//! it. The job's origin is in the header `traceparent`, in the W3C [trace context](https://www.w3.org/TR/trace-context/) format. The
//! span has it in the fields `link.trace_id` and `link.span_id`.
//!
//! With the feature `otel` and a layer of `tracing-opentelemetry` 0.34, the span also has an OpenTelemetry span link, and `Push::traced`
//! writes the header for the current span. This crate exports no spans itself and includes no SDK.
//!
//! # Payloads
//!
//! Payloads are JSON through serde with the feature `json`, or the format of your own [`Codec`]. The store does not parse them. If a worker
//! cannot decode a payload, the job is dead at once, [undecodable](Reason::Undecodable), with its bytes kept. To retry such jobs, set
//! [`on_undecodable`](DelayQueueWorker::on_undecodable).
//!
//! # Bounds
//!
//! A queue has at most [`max_jobs`](DelayQueue::max_jobs) jobs, and a job at most [`max_size`](DelayQueue::max_size) bytes of payload and
//! headers. Dead jobs are limited in [number and age](DelayQueue::keep_dead), and to half of `max_jobs`. In a [split](DelayQueue::split)
//! queue the limits on jobs and dead jobs apply to each partition. A delay is at most [`Due::MAX_DELAY`]. Each script handles about
//! [`MAX_BATCH`](store::MAX_BATCH) jobs at most, however many are due.
//!
//! # Durability
//!
//! Jobs in Redis are as durable as its settings make them. With `appendonly yes` and `appendfsync everysec` a crash of the server loses the
//! last second; with `always` it loses nothing. A failover loses writes that were not replicated. Use `maxmemory-policy noeviction`. The
//! keys of a queue expire 180 days after the last due time in it, and not while workers run. A queue that is unused for half a year
//! is therefore lost.
//!
//! # Large queues
//!
//! All keys of a queue are in one slot of a cluster. If a queue is too much for one node, [split](DelayQueue::split) it by job id.
//!
//! # Cancellation
//!
//! If you drop the future of a push, the job may or may not have been pushed. Push a [clone](Push) of it, or a job with the same id: while
//! the job waits or runs, no second one is added. If the job is done by then, it runs a second time, unless a
//! [unique key](Push::unique_for) outlasts your retries: `.unique_for(key, UniqueFor::Time(..))`.

mod backoff;
mod error;
mod id;
mod job;
mod limits;
mod outcome;
mod push;
mod queue;
mod queue_handle;
mod record;
mod removal;
#[cfg(feature = "cron")]
mod schedule;
pub mod store;

mod worker;

mod activity;
mod erased;
mod metrics;
mod notices;
mod responder;
mod trace;

pub use crate::store::circuit::CircuitBreaker;

pub use self::backoff::Backoff;
pub use self::error::QueueError;
pub use self::id::JobId;
#[cfg(all(test, feature = "redis"))]
pub(crate) use self::id::UniqueIds;
#[cfg(feature = "testing")]
pub(crate) use self::job::Canceller;
pub use self::job::{Cancellation, Extensions, Job};
pub use self::limits::MAX_ERROR_LEN;
pub use self::outcome::Outcome;
pub use self::push::{PreparedPush, Push, Pushed};
pub use self::queue::DelayQueue;
pub use self::record::{Due, FailureInfo, Headers, NewJob, Priority, Reason, State, StoredJob, Unique, UniqueFor};
pub use self::removal::{Cancel, Purge};
pub use self::responder::JobResponder;
#[cfg(feature = "cron")]
pub use self::schedule::{Recurring, Schedule};
pub use self::store::{Cancelled, Changed, Counts, DeadLimits};
pub use self::worker::events::{Event, Events};
pub use self::worker::{DelayQueueWorker, OnUndecodable, WorkerError};
pub use crate::codec::{Codec, Json};
