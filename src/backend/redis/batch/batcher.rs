//! Batches calls of one kind.
//!
//! While few calls are in flight, each call goes directly and without a delay. Further calls wait until one of a few batches returns, and
//! then share a batch, because a command costs Redis more than its content. While a batch is in flight, and for a moment after, no call
//! goes directly.
//!
//! Many waiting calls are divided among several batches. With a single batch, the callers would be idle while Redis works, and Redis would
//! be idle while the callers get their replies and call again. With a part of the callers in each batch, both work at the same time.
//!
//! A full batch gains nothing by waiting, so more full batches may be in flight. With a long round trip, as many are in flight as fit into
//! it. Calls whose callers have given up are not sent, except for releases of locks. This limits the calls in flight to the number that a
//! healthy server can answer.

use std::collections::VecDeque;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::oneshot::error::RecvError;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep_until};

use super::deferred::Idle;
use crate::backend::redis::connection::runtime::RuntimeHandle;

/// A batch in flight for longer than this does not delay the next one, since its connection may be dead.
const LATE: Duration = Duration::from_millis(20);
/// Each time that this fits into the round trip, one more full batch may be in flight. A busy server nearby takes about as long, and more
/// batches in flight would lower its throughput.
const NEARBY: Duration = Duration::from_millis(2);
/// Maximum number of waiting calls. Further calls go directly.
const WAITING: usize = 4_096;
/// Maximum number of batches in flight, including late ones.
const AWAY: usize = 64;

/// Collects calls and sends them in batches.
pub(crate) struct Batcher<W> {
    limits: BatchConfig,
    away: Arc<AtomicUsize>,
    rtt: Arc<RttEstimate>,
    waiting: mpsc::Sender<W>,
    threshold: Arc<Threshold>,
    idle: Idle,
    sender: AbortHandle,
    // The queue and the task that replace `waiting` and `sender` after their runtime has ended.
    successor: Mutex<Option<(mpsc::Sender<W>, AbortHandle)>>,
    start: Box<dyn Fn(mpsc::Receiver<W>) -> Task + Send + Sync>,
}

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The parameters of batches.
#[derive(Clone, Copy)]
pub(crate) struct BatchConfig {
    /// While this many direct calls are in flight, further calls are batched.
    pub(crate) max_unbatched: usize,
    /// How long after the return of a batch no call goes directly. More of its callers are about to call again, and each direct call
    /// would cost Redis a command.
    pub(crate) linger: Duration,
    /// Maximum number of calls in a batch.
    pub(crate) max_batch: usize,
    /// Into how many batches the given number of callers is divided. `max_batch` takes precedence.
    pub(crate) split: fn(usize) -> usize,
    /// With the given number of callers, how many batches may be in flight before each further batch has to be full. With two, Redis works
    /// on one while the other is on the network.
    pub(crate) max_in_flight: fn(usize) -> usize,
    /// How many batches may be in flight if the further ones are full. A long round trip adds to this.
    pub(crate) full: usize,
}

/// Wakes the sender of batches when enough calls are waiting.
struct Threshold {
    number: AtomicUsize,
    reached: Notify,
}

/// The last batch that returned.
struct RttEstimate {
    epoch: Instant,
    // When it returned, in µs since `epoch`, plus one. Zero: none has returned.
    last: AtomicU64,
    // The round trip of the last batch with a reply, in µs.
    round_trip: AtomicU64,
}

/// The permit of a call in flight. A batch takes as many permits as there are for direct calls.
pub(crate) struct InFlightPermit {
    away: Arc<AtomicUsize>,
    permits: usize,
}

impl<W: Send + 'static> Batcher<W> {
    /// Sends batches until it is dropped. `send` answers the callers when the thread is idle, and returns when Redis replied, if it did.
    pub(crate) fn new<F>(
        limits: BatchConfig,
        runtime: &RuntimeHandle,
        send: impl Fn(Vec<W>, Idle) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Option<Instant>> + Send + 'static,
    {
        let (waiting, arrivals) = mpsc::channel(WAITING);
        let away = Arc::default();
        let counted = Arc::clone(&away);
        let rtt =
            Arc::new(RttEstimate { epoch: Instant::now(), last: AtomicU64::new(0), round_trip: AtomicU64::new(0) });
        let idle = Idle::new();
        let (answered, deferred) = (Arc::clone(&rtt), idle.clone());
        let send = move |batch: Vec<W>| {
            let several = (batch.len() > 1).then(|| Arc::clone(&answered));
            let (permit, sent, deferred) =
                (InFlightPermit::new(&counted, limits.max_unbatched).0, Instant::now(), deferred.clone());
            let call = send(batch, deferred.clone());
            async move {
                let answered = call.await;
                if let Some(rtt) = several {
                    rtt.is_back(sent, answered);
                }
                drop(permit);
                deferred.catch_up();
            }
        };
        let send = Arc::new(send);
        let threshold = Arc::new(Threshold { number: AtomicUsize::new(limits.max_batch), reached: Notify::new() });
        let (awaited, known, waited) = (Arc::clone(&threshold), Arc::clone(&rtt), idle.clone());
        let start = move |arrivals| -> Task {
            let send = Arc::clone(&send);
            let send = move |batch| send(batch);
            Box::pin(send_together(arrivals, limits, Arc::clone(&awaited), Arc::clone(&known), waited.clone(), send))
        };
        let sender = runtime.spawn(start(arrivals));
        Self {
            limits,
            away,
            rtt,
            waiting,
            threshold,
            idle,
            sender,
            successor: Mutex::default(),
            start: Box::new(start),
        }
    }

    /// A permit for a direct call, or `None` if the call should be batched.
    pub(crate) fn try_direct(&self) -> Option<InFlightPermit> {
        let (permit, before) = InFlightPermit::new(&self.away, 1);
        let is_alone = before < self.limits.max_unbatched && !self.rtt.is_within(self.limits.linger);
        if is_alone {
            self.idle.catch_up();
        }
        is_alone.then_some(permit)
    }

    /// Adds a call to the next batch and waits for its answer. `None` if the call has to go directly, and an error if the runtime that
    /// sends the batches has ended.
    pub(crate) async fn submit<T>(&self, wait: impl FnOnce(oneshot::Sender<T>) -> W) -> Option<Result<T, RecvError>> {
        let (reply, answer) = oneshot::channel();
        let capacity = match self.waiting.try_send(wait(reply)) {
            Ok(()) => self.waiting.capacity(),
            // Too many calls are waiting.
            Err(TrySendError::Full(_)) => return None,
            Err(TrySendError::Closed(waiting)) => self.wait_elsewhere(waiting)?,
        };
        let number = WAITING - capacity;
        if number >= self.threshold.number.load(Ordering::Relaxed) {
            self.threshold.reached.notify_one();
        }
        // Not for each call, since this reads the clock.
        if number % 8 == 1 {
            self.idle.catch_up();
        }
        Some(answer.await)
    }

    /// Queues a call after the first runtime has ended. The batches are then sent in the runtime of the first caller that finds no sender.
    /// Returns how many more calls may wait.
    fn wait_elsewhere(&self, waiting: W) -> Option<usize> {
        let mut successor = self.successor.lock().unwrap_or_else(PoisonError::into_inner);
        let (sender, _) = match successor.take() {
            Some(known) if !known.0.is_closed() => successor.insert(known),
            _ => {
                let (sender, arrivals) = mpsc::channel(WAITING);
                successor.insert((sender, tokio::spawn((self.start)(arrivals)).abort_handle()))
            }
        };
        sender.try_send(waiting).ok()?;
        Some(sender.capacity())
    }
}

impl<W> Drop for Batcher<W> {
    fn drop(&mut self) {
        self.sender.abort();
        let successor = self.successor.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, successor)) = successor {
            successor.abort();
        }
    }
}

impl RttEstimate {
    fn is_back(&self, sent: Instant, answered: Option<Instant>) {
        // Without a reply, the duration says nothing about the round trip. A batch that takes longer than `LATE` delays no other.
        if let Some(answered) = answered {
            let took = answered.saturating_duration_since(sent).min(LATE);
            self.round_trip.store(took.as_micros() as u64, Ordering::Relaxed);
        }
        self.last.store(self.epoch.elapsed().as_micros() as u64 + 1, Ordering::Relaxed);
    }

    /// How many full batches may be in flight, so that Redis need not wait for the next: `near` if the server is nearby.
    fn window(&self, near: usize) -> usize {
        near + (self.round_trip.load(Ordering::Relaxed) / NEARBY.as_micros() as u64) as usize
    }

    fn is_within(&self, time: Duration) -> bool {
        let last = self.last.load(Ordering::Relaxed);
        last > 0 && self.epoch.elapsed() < Duration::from_micros(last).saturating_add(time)
    }
}

impl InFlightPermit {
    /// The permits, and how many were taken before.
    fn new(away: &Arc<AtomicUsize>, permits: usize) -> (Self, usize) {
        let before = away.fetch_add(permits, Ordering::Relaxed);
        (Self { away: Arc::clone(away), permits }, before)
    }
}

impl Drop for InFlightPermit {
    fn drop(&mut self) {
        self.away.fetch_sub(self.permits, Ordering::Relaxed);
    }
}

/// Waits until all callers have given up and the reply would be late. A dead connection or a stalled node may hold the permit of a call for
/// no longer, or the other calls would run out of permits. Besides, a command that is abandoned late is how dead connections are detected.
/// No timer is set while a caller waits.
pub(crate) async fn given_up<W, T>(waiting: &mut [W], reply: fn(&mut W) -> &mut oneshot::Sender<T>) {
    let late = Instant::now() + LATE;
    for waiting in waiting {
        reply(waiting).closed().await;
    }
    sleep_until(late).await;
}

/// Sends batches until the queue is closed.
async fn send_together<W, F>(
    mut arrivals: mpsc::Receiver<W>,
    limits: BatchConfig,
    threshold: Arc<Threshold>,
    rtt: Arc<RttEstimate>,
    idle: Idle,
    send: impl Fn(Vec<W>) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let mut calls = JoinSet::new();
    // The batches that are neither back nor late: when each was sent, and its number of calls.
    let mut young = VecDeque::<(Instant, usize)>::new();
    // The number of callers when the last batch was sent: in it, in other batches, and waiting. It decays slowly, because some callers are
    // always about to call again.
    let mut present = 0_usize;
    let share = |present: usize| present.div_ceil((limits.split)(present)).clamp(1, limits.max_batch);
    // Fires when a batch may be late. It is not reset for each batch, because a reset wakes the thread that polls this runtime's sockets.
    let mut alarm = pin!(sleep_until(Instant::now()));
    loop {
        threshold.number.store(limits.max_batch, Ordering::Relaxed);
        loop {
            let has_room = calls.len() < AWAY && young.len() < rtt.window(limits.full);
            if has_room && (young.len() < (limits.max_in_flight)(present) || arrivals.len() >= limits.max_batch) {
                break;
            }
            let oldest = young.front().map(|(sent, _)| *sent);
            tokio::select! {
                _ = calls.join_next() => drop(young.pop_front()),
                () = threshold.reached.notified(), if has_room => {}
                () = &mut alarm, if oldest.is_some() => {
                    let late = oldest.unwrap_or_else(Instant::now) + LATE;
                    if Instant::now() < late {
                        alarm.as_mut().reset(late);
                    } else {
                        young.pop_front();
                    }
                }
            }
        }
        let enough = share(present);
        if rtt.is_within(limits.linger) && arrivals.len() < enough {
            // Callers that were just answered may call again, most of them in time for this batch.
            threshold.number.store(enough, Ordering::Relaxed);
            let mut waited = pin!(idle.then(|| ()));
            while arrivals.len() < enough {
                tokio::select! {
                    () = &mut waited => break,
                    () = threshold.reached.notified() => {}
                }
            }
        }
        let first = tokio::select! {
            Some(_) = calls.join_next() => {
                young.pop_front();
                continue;
            }
            first = arrivals.recv() => first,
        };
        let Some(first) = first else { return };
        let asked: usize = young.iter().map(|(_, number)| number).sum();
        present = (asked + 1 + arrivals.len()).max(present - present.div_ceil(8));
        let mut batch = Vec::with_capacity(limits.max_batch);
        batch.push(first);
        let others = (share(present) - 1).min(arrivals.len());
        if others > 0 {
            // Does not wait: these calls are already in the queue.
            arrivals.recv_many(&mut batch, others).await;
        }
        young.push_back((Instant::now(), batch.len()));
        // Boxed, because the future has some kilobytes that would be moved several times otherwise.
        calls.spawn(Box::pin(send(batch)));
    }
}

#[cfg(test)]
mod tests {
    use tokio::runtime::{Builder, Runtime};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn late_batch_makes_room_for_the_next() {
        let (begun, (sent, mut times)) = (Instant::now(), mpsc::channel(8));
        let send = move |batch: Vec<oneshot::Sender<()>>, _| {
            let _ = sent.try_send((begun.elapsed().as_millis(), batch.len()));
            async move {
                // Keep the reply channels open without an answer.
                let _batch = batch;
                std::future::pending().await
            }
        };
        let limits = BatchConfig {
            max_unbatched: 0,
            linger: Duration::ZERO,
            max_batch: 8,
            split: |_| 1,
            max_in_flight: |_| 1,
            full: 1,
        };
        let batcher = Arc::new(Batcher::new(limits, &RuntimeHandle::here(), send));
        let late = LATE.as_millis();
        let mut waiting = JoinSet::new();
        for (comes, goes) in
            [(0, 0), (5, late), (late + 10, 2 * late), (10 * late, 10 * late), (10 * late + 1, 11 * late)]
        {
            let comes = begun + Duration::from_millis(comes as u64);
            tokio::time::sleep_until(comes).await;
            let batcher = Arc::clone(&batcher);
            waiting.spawn(async move { batcher.submit(|reply| reply).await });
            if comes.duration_since(begun).as_millis() != goes {
                assert!(tokio::time::timeout(Duration::from_millis(1), times.recv()).await.is_err());
            }
            assert_eq!(times.recv().await, Some((goes, 1)));
        }
    }

    /// Regression: all callers went in one batch, so that either the callers or Redis were idle.
    #[tokio::test(start_paused = true)]
    async fn callers_are_divided_between_two_batches() {
        let (sent, mut calls) = mpsc::unbounded_channel();
        let send = move |batch: Vec<oneshot::Sender<()>>, idle: Idle| {
            let (answer, is_answered) = oneshot::channel::<()>();
            sent.send((batch.len(), answer)).unwrap();
            async move {
                let answered = is_answered.await.ok().map(|()| Instant::now());
                idle.then(|| batch.into_iter().for_each(|reply| reply.send(()).unwrap())).await;
                answered
            }
        };
        let limits = BatchConfig {
            max_unbatched: 0,
            linger: Duration::from_secs(1),
            max_batch: 64,
            split: |_| 2,
            max_in_flight: |_| 2,
            full: 2,
        };
        let batcher = Arc::new(Batcher::new(limits, &RuntimeHandle::here(), send));
        let mut callers = JoinSet::new();
        for _ in 0..6 {
            let batcher = Arc::clone(&batcher);
            callers.spawn(async move { while batcher.submit(|reply| reply).await.is_some() {} });
        }
        let (first, mut oldest) = calls.recv().await.unwrap();
        let next = tokio::time::timeout(Duration::from_secs(1), calls.recv()).await;
        let (second, mut newest) = next.expect("all callers went in the first batch").unwrap();
        assert_eq!((first, second), (3, 3));
        for _ in 0..10 {
            oldest.send(()).unwrap();
            let (again, next) = calls.recv().await.unwrap();
            assert_eq!(again, 3, "all callers of the batch that returned, and no others");
            (oldest, newest) = (newest, next);
        }
    }

    /// A second runtime, with this number of threads.
    fn elsewhere(threads: usize) -> (Runtime, RuntimeHandle) {
        let runtime = Builder::new_multi_thread().worker_threads(threads).enable_time().build().unwrap();
        let handle = {
            let _inside = runtime.enter();
            RuntimeHandle::here()
        };
        (runtime, handle)
    }

    #[tokio::test]
    async fn next_call_delivers_replies_of_blocked_thread() {
        let (runtime, handle) = elsewhere(1);
        let (free, until_free) = std::sync::mpsc::channel::<()>();
        let (begun, has_begun) = oneshot::channel();
        let blocks = Mutex::new(Some((until_free, begun)));
        let send = move |batch: Vec<oneshot::Sender<()>>, idle: Idle| {
            if let Some((until_free, begun)) = blocks.lock().unwrap().take() {
                tokio::spawn(async move {
                    begun.send(()).unwrap();
                    until_free.recv().unwrap();
                });
            }
            async move {
                idle.then(|| batch.into_iter().for_each(|reply| reply.send(()).unwrap())).await;
                None
            }
        };
        let limits = BatchConfig {
            max_unbatched: 0,
            linger: Duration::ZERO,
            max_batch: 8,
            split: |_| 1,
            max_in_flight: |_| 1,
            full: 1,
        };
        let batcher = Batcher::new(limits, &handle, send);
        let mut first = pin!(batcher.submit(|reply| reply));
        assert!(futures_util::poll!(&mut first).is_pending());
        has_begun.await.unwrap();
        tokio::time::sleep(Duration::from_millis(2)).await;
        assert!(futures_util::poll!(&mut first).is_pending());
        let mut next = pin!(batcher.submit(|reply| reply));
        assert!(futures_util::poll!(&mut next).is_pending());
        let outcome = tokio::time::timeout(Duration::from_secs(10), first).await;
        free.send(()).unwrap();
        next.await.unwrap().unwrap();
        runtime.shutdown_background();
        outcome.expect("the reply was not delivered").unwrap().unwrap();
    }

    /// A blocked thread has the replies of one batch, and no further call arrives.
    #[tokio::test]
    async fn returning_batch_delivers_replies_of_blocked_thread() {
        let (runtime, handle) = elsewhere(2);
        let (free, until_free) = std::sync::mpsc::channel::<()>();
        let (answer, answered) = oneshot::channel::<()>();
        let (begun, mut has_begun) = tokio::sync::mpsc::unbounded_channel();
        // The second batch blocks its thread. The first, which is popped first, waits for its answer.
        let has = Mutex::new(vec![(None, Some(until_free)), (Some(answered), None)]);
        let send = move |batch: Vec<oneshot::Sender<()>>, idle: Idle| {
            let (answered, until_free) = has.lock().unwrap().pop().unwrap();
            let begun = begun.clone();
            async move {
                let delivery = idle.then(|| batch.into_iter().for_each(|reply| reply.send(()).unwrap()));
                let mut delivery = pin!(delivery);
                if let Some(until_free) = until_free {
                    assert!(futures_util::poll!(&mut delivery).is_pending());
                    begun.send(()).unwrap();
                    until_free.recv().unwrap();
                } else if let Some(answered) = answered {
                    begun.send(()).unwrap();
                    answered.await.unwrap();
                }
                delivery.await;
                None
            }
        };
        let limits = BatchConfig {
            max_unbatched: 0,
            linger: Duration::ZERO,
            max_batch: 8,
            split: |_| 1,
            max_in_flight: |_| 2,
            full: 2,
        };
        let batcher = Batcher::new(limits, &handle, send);
        let mut calls = Vec::new();
        for _ in 0..2 {
            let mut call = Box::pin(batcher.submit(|reply| reply));
            assert!(futures_util::poll!(&mut call).is_pending());
            has_begun.recv().await.unwrap();
            calls.push(call);
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
        let mut blocked = calls.pop().unwrap();
        assert!(futures_util::poll!(&mut blocked).is_pending());
        answer.send(()).unwrap();
        let outcome = tokio::time::timeout(Duration::from_secs(10), blocked).await;
        free.send(()).unwrap();
        runtime.shutdown_background();
        outcome.expect("the reply was not delivered").unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn round_trip_is_measured_by_replies_only() {
        let rtt = RttEstimate { epoch: Instant::now(), last: AtomicU64::new(0), round_trip: AtomicU64::new(0) };
        let sent = Instant::now();
        tokio::time::advance(Duration::from_millis(60)).await;
        rtt.is_back(sent, None);
        assert_eq!(rtt.window(2), 2);
        rtt.is_back(sent, Some(Instant::now()));
        assert_eq!(rtt.window(2), 12);
    }
}
