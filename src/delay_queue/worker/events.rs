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

/// How many events wait for whoever listens, before the oldest are missed.
const WAITING: usize = 1_024;

/// What a worker tells. What becomes of a job is told when the store has noted it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// An attempt begins.
    Started {
        /// Which job.
        id: JobId,
        /// Which attempt this is, from 1.
        attempt: u16,
        /// How long after it was due it was claimed.
        late: Duration,
    },
    /// The job is done.
    Done {
        /// Which job.
        id: JobId,
    },
    /// The attempt has failed, and there will be another one.
    Retried {
        /// Which job.
        id: JobId,
        /// After how long.
        delay: Duration,
        /// Why it has failed.
        error: Arc<str>,
    },
    /// The job waits, and the attempt does not count.
    Snoozed {
        /// Which job.
        id: JobId,
        /// For how long.
        delay: Duration,
    },
    /// The job will not be tried again.
    Dead {
        /// Which job.
        id: JobId,
        /// What kind of end this is.
        reason: Reason,
        /// Why.
        error: Arc<str>,
    },
    /// The service has said that the job is not to be done any more, or somebody has cancelled it.
    Cancelled {
        /// Which job.
        id: JobId,
    },
    /// The job waits as before, since the worker ends, or since its lease had ended before it could begin.
    Released {
        /// Which job.
        id: JobId,
    },
    /// Somebody else has the job, or will have it, since its lease could not be extended in time, or the store has forgotten it.
    LeaseLost {
        /// Which job.
        id: JobId,
    },
    /// So many leases had ended without a word when this worker claimed: those who held them have died, stood still or were cut off. The
    /// jobs wait again, or are gone if somebody has cancelled them, but for those whose last attempt it was.
    LeasesExpired {
        /// How many.
        jobs: usize,
        /// How many of these are dead.
        dead: usize,
    },
    /// The store begins to fail, in the first part of the queue where it is [split](crate::delay_queue::DelayQueue::split). It is asked again until it works.
    StoreFailed {
        /// How.
        error: StoreError,
    },
    /// The store works again, in all parts of the queue.
    StoreWorks,
    /// So many events were not picked up in time.
    Missed(u64),
}

/// What a worker [tells](crate::delay_queue::DelayQueueWorker::events), one by one or as a [`Stream`]. The oldest are missed when 1,024 wait.
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
pub struct Events(Receiving);

/// Waits for an event, and gives the receiver back with it.
type Receiving = Pin<Box<dyn Future<Output = (Option<Event>, Receiver<Event>)> + Send + Sync>>;

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

/// Where a worker tells what happens.
#[derive(Debug)]
pub(crate) struct EventSender(Sender<Event>);

impl EventSender {
    pub(crate) fn new() -> Self {
        Self(Sender::new(WAITING))
    }

    pub(crate) fn listen(&self) -> Events {
        Events::new(self.0.subscribe())
    }

    /// Tells it to those who listen, if anybody does.
    pub(crate) fn tell(&self, event: impl FnOnce() -> Event) {
        if self.0.receiver_count() > 0 {
            // Whoever listened may have left meanwhile.
            let _ = self.0.send(event());
        }
    }
}
