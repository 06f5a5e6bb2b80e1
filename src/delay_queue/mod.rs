//! Jobs that run later, on time, and are never lost.
//!
//! A [`DelayQueue`] keeps jobs in a backend until they are due: in this process ([`MemoryBackend`](crate::MemoryBackend)) or in Redis, where any
//! number of processes push and claim. There is nothing to run beside them: no scheduler, no leader, no reaper.
//!
//! # What it promises, and what not
//!
//! * At least once, on one Redis primary: a job that was pushed stays until it is done, cancelled or dead, whoever dies meanwhile. What
//!   Redis itself loses is lost: see [durability](#durability).
//! * Never early: a delay counts by the store's clock, to the millisecond. The clock of whoever pushes or claims does not matter.
//! * A job is in one state, and every change of it is one atomic step. Only the holder of the last lease can finish it, and each claim
//!   of a job has a larger [fencing token](Job::fence) than all before it.
//! * A job that kills its worker each time is dead when its attempts are over, since an attempt counts as soon as it is claimed.
//! * Not exactly once: a worker that dies or stands still leaves a job that is done again. Let the [fence](Job::fence) or the id refuse
//!   what was done already.
//! * Not in time where the store's clock is set back: what is due, and what a worker that died had, comes later by as much.
//! * Not in order, but for jobs of the same millisecond, which are taken by their ids.
//!
//! # Examples
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
//! With everything said:
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
//! [`push_all`](DelayQueue::push_all) pushes many at once.
//!
//! # A job and its states
//!
//! A job waits until it is due, runs under a lease that is extended, and is gone when it is done. A failure lets it wait again, for as long as
//! the worker says; the last of its attempts leaves it among the dead, which are kept for somebody to [look at](DelayQueue::dead),
//! [replay](DelayQueue::replay) or [forget](DelayQueue::forget), by a filter or by their ids. Giving a job back spends no attempt.
//!
//! | | waiting | running | dead | done, or never there |
//! | --- | --- | --- | --- | --- |
//! | push with its id | `Exists` | `Exists`; new if it is cancelled, and claimed when that run has ended | new again | new |
//! | [`cancel`](DelayQueue::cancel) | removed | its worker is told; not tried again | `Dead` | `Missing` |
//! | [`reschedule`](DelayQueue::reschedule), [`promote`](DelayQueue::promote), [`replace`](DelayQueue::replace) | done | `Running` | `Dead` | `Missing` |
//! | [`replay_ids`](DelayQueue::replay_ids) | `false` | `false` | waits again, unless its unique key is taken | `false` |
//! | [`forget_ids`](DelayQueue::forget_ids) | `false` | `false` | removed | `false` |
//!
//! # Working
//!
//! A [`DelayQueueWorker`] gives jobs to any tower service, from as many processes as there are:
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
//!         None => Err(Outcome::dead("that is no address").into()),
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> Result<(), BoxError> {
//! let backend = MemoryBackend::new();
//! let queue = DelayQueue::<String>::new(backend.clone(), "mail");
//! queue.push("alice@example.org".to_owned()).delay(Duration::from_secs(60)).await?;
//!
//! let mails = Policy::new("mails", Quota::per_second(100).token_bucket());
//! let limit = RateLimitLayer::new(backend.clone(), mails).wait(Duration::from_secs(10)); // jobs wait for room in their order
//! let service = ServiceBuilder::new()
//!     .layer(limit.responder(JobResponder)) // without room in that time: later, and no attempt
//!     .layer(LockLayer::new(backend).key(|job: &Job<String>| job.to_string()).responder(JobResponder)) // one at a time for each address
//!     .concurrency_limit(16) // decides how many jobs are claimed
//!     .timeout(Duration::from_secs(30)) // a failure, and tried again
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
//! What those layers know of a job is in its extensions: see [`JobResponder`]. [`LockLayer::with_semaphore`](crate::LockLayer::with_semaphore) lets several
//! jobs of a key run at a time, in all processes together: so many of each tenant, say.
//!
//! What repeats itself is pushed by `Recurring` (feature `cron`): a cron pattern in a time zone, by any number of processes, and there once.
//!
//! Whoever waits for jobs sleeps until the next one is due, by a timer of its own that is set by the store's clock. A job that comes earlier
//! wakes one worker, by a message on a connection of its own. A few of the others look as well 200 to 350 ms after the next job is
//! due or the first lease has ended, in case that worker has died. If it has, a job that was pushed at least 5 s before it is due is at most half
//! a second late, and any other at most 5 s. Messages get lost, so each worker looks every five seconds in any
//! case, in each part of a [split](DelayQueue::split) queue, and that is all that an idle one does. A worker that has no time for what is due
//! lets another one know. Within a process nothing gets lost, and an idle worker does nothing. One whose jobs run looks there, too: a job that
//! [blocks its thread](DelayQueueWorker#leases) may hold up what it has pushed itself.
//!
//! # Rate limits
//!
//! Put a [`RateLimitLayer`](crate::RateLimitLayer) in front of the service, let jobs [wait](crate::RateLimitLayer::wait) in it, and keep the
//! [concurrency](DelayQueueWorker::concurrency) small. The jobs then run at the full rate, by priority and then by when they are due. A job of high priority
//! waits for the jobs that are claimed already: about the concurrency divided by the rate. At 2 jobs a second and a concurrency of 2 that is about one
//! second. Let jobs wait for longer than that, so that none is snoozed.
//!
//! Without `wait`, or if the wait is over, [`JobResponder`] has the worker snooze each job over the limit. The order is not kept then:
//!
//! * Order: when its snooze is over a job has its place among the jobs of its priority, by when it was first due. Until then it is not claimed, and newer
//!   jobs take the room that comes free. With new jobs all the time a job may be snoozed any number of times.
//! * Priority: a worker with a snoozed backlog runs whichever job returns when there is room. A job of high priority is snoozed like the others, and may
//!   run after many jobs of normal priority.
//! * Cost: each snooze is a claim and a finish. With a large backlog a worker claims and snoozes many jobs for each job that it runs.
//!
//! # When the store fails
//!
//! A call that the store fails, or that takes longer than the [deadline](DelayQueue::deadline), is a [`QueueError::Store`]. After some of them in a row the
//! [circuit](DelayQueue::circuit_breaker) is open, and whoever pushes is told so at once, but for a probe now and then; each part of a [split](DelayQueue::split) queue has one. Workers are not behind it: they
//! [ask](DelayQueueWorker#when-the-store-fails) until the store works. The log has a line for each time that an outage begins and ends.
//!
//! # Metrics
//!
//! With the feature `metrics` queues and workers count with the `metrics` facade, all with the label `queue`. A metric that an
//! exporter has dropped after its idle timeout appears [again](crate::rate_limit#metrics) when it is next used.
//!
//! | | |
//! | --- | --- |
//! | `tollgate_jobs_total` | attempts that are over, by `outcome`: `done`, `retried`, `snoozed`, `dead`, `cancelled`, `released`, `lease_lost` |
//! | `tollgate_job_leases_expired_total` | attempts that ended without a word of their worker, as whoever claims next has found: by `outcome`, `returned` (the job waits again, or is gone if it was cancelled) or `dead`. A worker that comes back counts its own one as `lease_lost`, too |
//! | `tollgate_job_lateness_seconds` | a histogram: how long after it was due a job was claimed; of a snoozed job since it was first due |
//! | `tollgate_job_seconds` | a histogram: how long attempts ran |
//! | `tollgate_jobs_running` | jobs that run in this process |
//! | `tollgate_jobs_oldest_due_seconds` | for how long the oldest job that nobody has claimed is due: as the store has said to a worker of this process within five seconds, unless it fails. A snoozed job that has returned counts since it was first due. 0 if nothing is due, **and when a worker has ended**, until another one of this process has asked |
//! | `tollgate_job_store_errors_total` | calls that the store has failed: of workers, of those who push, and of those who change or look at what is there |
//! | `tollgate_job_pushes_total` | jobs that were pushed, by `outcome`: `new`, `exists`, `full`, `failed` (by the store, or it was not asked, or nobody waited for its answer). Not those of a [pipeline](PreparedPush) of one's own |
//! | `tollgate_job_circuit_transitions_total` | [circuits](DelayQueue::circuit_breaker) that opened and closed, by `state`: `open`, `closed` |
//!
//! How many wait is what [`DelayQueue::counts`] says, and in [`oldest_due`](Counts::oldest_due) for how long the oldest one that nobody has claimed is due,
//! whether there are workers or not. An alert for jobs that nobody works off asks for that: a gauge that workers set cannot tell that there are none.
//!
//! # Traces
//!
//! Each attempt runs in a [span](DelayQueueWorker::span), which begins a trace of its own: whoever pushed the job has not waited for it.
//! A header `traceparent`, as the W3C's [trace context](https://www.w3.org/TR/trace-context/) writes it, says where the job comes
//! from, in the fields `link.trace_id` and `link.span_id`.
//!
//! With the feature `otel` and a layer of `tracing-opentelemetry` 0.34, that is a span link of OpenTelemetry, too, and `Push::traced` writes the
//! header for the current span. Nothing of that is exported by this crate: no SDK comes along.
//!
//! # Payloads
//!
//! JSON by serde with the feature `json`, or whatever a [`Codec`] says. The store does not look into them. One that cannot be read by the
//! worker is dead at once, [undecodable](Reason::Undecodable), with its bytes kept, unless the worker is told to
//! [try it again](DelayQueueWorker::on_undecodable).
//!
//! # Bounds
//!
//! A queue has at most [`max_jobs`](DelayQueue::max_jobs), a job at most [`max_size`](DelayQueue::max_size) bytes of payload and headers, and the
//! dead are at most [so many for so long](DelayQueue::keep_dead), and half of all jobs. In a [split](DelayQueue::split) queue both are counted in each
//! part. A delay is at most [`Due::MAX_DELAY`]. Every script is about
//! [`MAX_BATCH`] jobs at the most, however many are due.
//!
//! # Durability
//!
//! Redis keeps what its own settings say: with `appendonly yes` and `appendfsync everysec` a crash of the server loses the last second, with
//! `always` nothing; a failover loses what replication had not carried. Use `maxmemory-policy noeviction`. The keys of a queue last 180
//! days beyond the last time at which something in them is due, and for as long as there are workers: a queue that nobody looks at
//! for half a year is forgotten.
//!
//! # Large queues
//!
//! All of a queue lies in one slot of a cluster. One that is too much for a node is [split](DelayQueue::split) by the ids of its jobs.
//!
//! # Cancellation
//!
//! Dropping the future of a push may or may not have pushed. Push a [clone](Push) of it again, or one with the same id: there is one while it
//! waits or runs. One that is done by then runs a second time, unless a [unique key](Push::unique_for) is kept for longer than pushes
//! are tried again: `.unique_for(key, UniqueFor::Time(..))`.

mod backoff;
mod codec;
mod error;
mod id;
mod job;
mod outcome;
mod push;
mod queue;
mod record;
mod removal;
#[cfg(feature = "cron")]
mod schedule;
mod store;

mod worker;

mod erased;
mod metrics;
mod notices;
mod responder;
mod trace;

pub use crate::store::circuit::CircuitBreaker;

pub use self::backoff::Backoff;
pub use self::codec::{Codec, Json};
pub use self::error::QueueError;
pub use self::id::JobId;
#[cfg(all(test, feature = "redis"))]
pub(crate) use self::id::UniqueIds;
#[cfg(feature = "testing")]
pub(crate) use self::job::Canceller;
pub use self::job::{Cancellation, Extensions, Job};
pub use self::outcome::Outcome;
pub use self::push::{PreparedPush, Push, Pushed};
pub use self::queue::DelayQueue;
pub use self::record::{Due, FailureInfo, Headers, NewJob, Priority, Reason, StoredJob, Unique, UniqueFor};
pub use self::removal::{Cancel, Purge};
pub use self::responder::JobResponder;
#[cfg(feature = "cron")]
pub use self::schedule::{Recurring, Schedule};
#[cfg(feature = "redis")]
pub(crate) use self::store::batch_len;
pub use self::store::{
    Ack, AckKind, Admission, Cancelled, Changed, Claim, Claimed, ClaimedJob, Counts, DeadLimits, DelayQueueStore, Died,
    Expired, Extended, Finished, JobLease, MAX_BATCH, MAX_NOTE, QueueKey, State, WorkerId,
};
pub use self::worker::events::{Event, Events};
pub use self::worker::{DelayQueueWorker, OnUndecodable, WorkerError};
