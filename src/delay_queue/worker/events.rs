use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_core::Stream;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::broadcast::{Receiver, Sender};

use crate::delay_queue::id::JobId;
use crate::delay_queue::record::Reason;
use crate::error::StoreError;

/// How many events are buffered for a receiver. Beyond that the oldest are missed.
const BUFFER: usize = 1_024;

/// What happens in a worker. Results of jobs are reported after the store has recorded them.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// An attempt begins.
    Started {
        /// Which job.
        id: JobId,
        /// Which attempt this is, from 1.
        attempt: u16,
        /// How long after its due time the job was claimed.
        late: Duration,
    },
    /// The job is done.
    Done {
        /// Which job.
        id: JobId,
    },
    /// The attempt failed, and another one follows.
    Retried {
        /// Which job.
        id: JobId,
        /// The delay before the next attempt.
        delay: Duration,
        /// Why the attempt failed.
        error: Arc<str>,
    },
    /// The job waits, and the attempt does not count.
    Snoozed {
        /// Which job.
        id: JobId,
        /// How long it waits.
        delay: Duration,
    },
    /// The job is dead: it is not tried again.
    Dead {
        /// Which job.
        id: JobId,
        /// The kind of failure.
        reason: Reason,
        /// The error text.
        error: Arc<str>,
    },
    /// The job was cancelled, by its service or through the queue.
    Cancelled {
        /// Which job.
        id: JobId,
    },
    /// The worker released the job, which waits again with the same due time: the worker is shutting down, or the lease ended before the
    /// job could start.
    Released {
        /// Which job.
        id: JobId,
    },
    /// The lease of the job is lost: it could not be renewed in time, or the store has lost the job. Another worker may have the job, or
    /// have finished it.
    LeaseLost {
        /// Which job.
        id: JobId,
    },
    /// A claim of this worker found leases that had ended before their jobs finished: the workers of these jobs have died, stalled or lost
    /// the network. Cancelled jobs are removed. Other jobs with attempts left wait again.
    LeasesExpired {
        /// How many leases.
        jobs: usize,
        /// How many of their jobs are dead.
        dead: usize,
    },
    /// The store began to fail. In a [split](crate::delay_queue::DelayQueue::split) queue, it fails for at least one partition. The worker
    /// retries until the store works.
    StoreFailed {
        /// The error of the failed call.
        error: StoreError,
    },
    /// The store works again, for all partitions of the queue.
    StoreWorks,
    /// This many events were dropped, since they were not received in time.
    Missed(u64),
}

/// The [events](crate::delay_queue::DelayQueueWorker::events) of a worker, one by one or as a [`Stream`]. The buffer
/// holds 1,024 events. Beyond that, the oldest events are dropped.
///
/// ```
/// use tollgate::delay_queue::{DelayQueueWorker, Event};
/// use tollgate::{BoxError, DelayQueue, MemoryBackend};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> Result<(), BoxError> {
/// let queue = DelayQueue::<u32>::new(MemoryBackend::new(), "numbers");
/// queue.push(7).id("seven").await?;
/// let worker = DelayQueueWorker::new(queue, tower::service_fn(async |_| Ok::<_, BoxError>(())));
/// let mut events = worker.events();
/// tokio::spawn(worker.run_until(tokio::time::sleep(std::time::Duration::from_secs(1))));
///
/// let mut done = 0;
/// while let Some(event) = events.next().await {
///     if let Event::Done { id } = event {
///         assert_eq!(id.as_str(), "seven");
///         done += 1;
///     }
/// }
/// assert_eq!(done, 1);
/// # Ok(())
/// # }
/// ```
pub struct Events(NextEvent);

/// Waits for the next event, and returns the receiver with it.
type NextEvent = Pin<Box<dyn Future<Output = (Option<Event>, Receiver<Event>)> + Send + Sync>>;

impl Events {
    fn new(receiver: Receiver<Event>) -> Self {
        Self(Box::pin(receive(receiver)))
    }

    /// Waits for the next event; `None` when the worker has ended.
    ///
    /// # Cancellation
    ///
    /// Dropping the future loses no event.
    pub async fn next(&mut self) -> Option<Event> {
        poll_fn(|cx| Pin::new(&mut *self).poll_next(cx)).await
    }
}

impl Stream for Events {
    type Item = Event;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Event>> {
        let (event, receiver) = ready!(self.0.as_mut().poll(cx));
        *self = Self::new(receiver);
        Poll::Ready(event)
    }
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Events").finish_non_exhaustive()
    }
}

async fn receive(mut receiver: Receiver<Event>) -> (Option<Event>, Receiver<Event>) {
    let event = match receiver.recv().await {
        Ok(event) => Some(event),
        Err(RecvError::Lagged(missed)) => Some(Event::Missed(missed)),
        Err(RecvError::Closed) => None,
    };
    (event, receiver)
}

/// Sends the events of a worker.
#[derive(Clone, Debug)]
pub(crate) struct EventSender(Sender<Event>);

impl EventSender {
    pub(crate) fn new() -> Self {
        Self(Sender::new(BUFFER))
    }

    pub(crate) fn subscribe(&self) -> Events {
        Events::new(self.0.subscribe())
    }

    /// Sends an event if there are receivers.
    pub(crate) fn send(&self, event: impl FnOnce() -> Event) {
        if self.0.receiver_count() > 0 {
            // The last receiver may have gone meanwhile.
            let _ = self.0.send(event());
        }
    }
}
