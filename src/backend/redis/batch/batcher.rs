//! Batches calls of one kind.
//!
//! While few calls are in flight, each call is sent directly and without a delay. Further calls share a batch, because a command costs
//! Redis more than its content. The batch waits for a return only if a few batches are already in flight. While a batch is in flight, and
//! shortly after, no call is sent directly.
//!
//! Many waiting calls are divided among several batches. With a single batch, the callers would be idle while Redis works, and Redis would
//! be idle while the callers get their replies and call again. With several batches, both work at the same time.
//!
//! A full batch gains nothing by waiting, so more full batches may be in flight: one more for each 2 ms of the round trip. Calls whose
//! callers have given up are not sent, except for releases of locks. So the calls in flight are never more than a healthy server can
//! answer.

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

use super::deferred::DeferredWork;
use crate::backend::redis::connection::runtime::RuntimeHandle;

/// A batch in flight for longer than this does not delay the next one, since its connection may be dead.
const LATE: Duration = Duration::from_millis(20);
/// For each such time in the measured round trip, one more full batch may be in flight. It is the round trip of a busy server nearby, where
/// more batches lower the throughput.
const NEARBY_ROUND_TRIP: Duration = Duration::from_millis(2);
/// Maximum number of queued calls. Further calls are not batched.
const MAX_QUEUED: usize = 4_096;
/// Maximum number of batches in flight, including late ones.
const MAX_IN_FLIGHT: usize = 64;

/// Collects calls and sends them in batches.
pub(crate) struct Batcher<W> {
    config: BatchConfig,
    in_flight: Arc<AtomicUsize>,
    last_batch: Arc<LastBatch>,
    queue: mpsc::Sender<W>,
    threshold: Arc<Threshold>,
    deferred: DeferredWork,
    task: AbortHandle,
    // The queue and the task that replace `queue` and `task` after their runtime has ended.
    successor: Mutex<Option<(mpsc::Sender<W>, AbortHandle)>>,
    make_task: Box<dyn Fn(mpsc::Receiver<W>) -> Task + Send + Sync>,
}

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The parameters of batches.
#[derive(Clone, Copy)]
pub(crate) struct BatchConfig {
    /// While this many direct calls are in flight, further calls are batched.
    pub(crate) max_unbatched: usize,
    /// How long after the return of a batch no call is sent directly. More of its callers are about to call again, and each direct call
    /// would cost Redis a command.
    pub(crate) linger: Duration,
    /// Maximum number of calls in a batch.
    pub(crate) max_batch: usize,
    /// Into how many batches the given number of callers is divided. `max_batch` takes precedence.
    pub(crate) split: fn(usize) -> usize,
    /// With the given number of callers, how many batches may be in flight before each further batch has to be full. With two, Redis works
    /// on one while the other is on the network.
    pub(crate) max_partial_in_flight: fn(usize) -> usize,
    /// How many full batches may be in flight. A long round trip adds to this.
    pub(crate) max_full_in_flight: usize,
}

/// Wakes the task that sends batches when enough calls are queued.
struct Threshold {
    count: AtomicUsize,
    reached: Notify,
}

/// When the last batch returned, and its round trip.
struct LastBatch {
    epoch: Instant,
    // When it returned, in µs since `epoch`, plus one. Zero: none has returned.
    last_return: AtomicU64,
    // The round trip of the last batch with a reply, in µs.
    round_trip: AtomicU64,
}

/// The permit of a call in flight. A batch takes as many permits as there are for direct calls, so no call is sent directly while it is in
/// flight.
pub(crate) struct InFlightGuard {
    in_flight: Arc<AtomicUsize>,
    permits: usize,
}

impl<W: Send + 'static> Batcher<W> {
    /// Sends batches until it is dropped. `send` replies to the callers when the thread is idle. It returns the time of the reply of Redis,
    /// or `None` without one.
    pub(crate) fn new<F>(
        config: BatchConfig,
        runtime: &RuntimeHandle,
        send: impl Fn(Vec<W>, DeferredWork) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Option<Instant>> + Send + 'static,
    {
        let (queue, queued) = mpsc::channel(MAX_QUEUED);
        let in_flight: Arc<AtomicUsize> = Arc::default();
        let last_batch = Arc::new(LastBatch {
            epoch: Instant::now(),
            last_return: AtomicU64::new(0),
            round_trip: AtomicU64::new(0),
        });
        let deferred = DeferredWork::new();
        let threshold = Arc::new(Threshold { count: AtomicUsize::new(config.max_batch), reached: Notify::new() });
        let send = {
            let (in_flight, last_batch, deferred) = (Arc::clone(&in_flight), Arc::clone(&last_batch), deferred.clone());
            move |batch: Vec<W>| {
                // A pause after the return follows only a batch of several calls.
                let last_batch = (batch.len() > 1).then(|| Arc::clone(&last_batch));
                let permit = InFlightGuard::new(&in_flight, config.max_unbatched).0;
                let (sent, deferred) = (Instant::now(), deferred.clone());
                let call = send(batch, deferred.clone());
                async move {
                    let replied_at = call.await;
                    if let Some(last_batch) = last_batch {
                        last_batch.record_return(sent, replied_at);
                    }
                    drop(permit);
                    deferred.run_late();
                }
            }
        };
        let send = Arc::new(send);
        let make_task = {
            let (threshold, last_batch, deferred) = (Arc::clone(&threshold), Arc::clone(&last_batch), deferred.clone());
            move |queued| -> Task {
                let send = Arc::clone(&send);
                let send = move |batch| send(batch);
                Box::pin(send_batches(
                    queued,
                    config,
                    Arc::clone(&threshold),
                    Arc::clone(&last_batch),
                    deferred.clone(),
                    send,
                ))
            }
        };
        let task = runtime.spawn(make_task(queued));
        let (successor, make_task) = (Mutex::default(), Box::new(make_task));
        Self { config, in_flight, last_batch, queue, threshold, deferred, task, successor, make_task }
    }

    /// A permit for a direct call, or `None` if the call should be batched.
    pub(crate) fn try_direct(&self) -> Option<InFlightGuard> {
        let (permit, before) = InFlightGuard::new(&self.in_flight, 1);
        let is_direct = before < self.config.max_unbatched && !self.last_batch.returned_within(self.config.linger);
        if is_direct {
            self.deferred.run_late();
        }
        is_direct.then_some(permit)
    }

    /// Adds a call to the next batch and waits for its reply. `None` if the call must be sent directly, and an error if the runtime that
    /// sends the batches has ended.
    pub(crate) async fn submit<T>(
        &self,
        make_call: impl FnOnce(oneshot::Sender<T>) -> W,
    ) -> Option<Result<T, RecvError>> {
        let (sender, reply) = oneshot::channel();
        let capacity = match self.queue.try_send(make_call(sender)) {
            Ok(()) => self.queue.capacity(),
            // Too many calls are queued.
            Err(TrySendError::Full(_)) => return None,
            Err(TrySendError::Closed(call)) => self.submit_to_successor(call)?,
        };
        let queued = MAX_QUEUED - capacity;
        if queued >= self.threshold.count.load(Ordering::Relaxed) {
            self.threshold.reached.notify_one();
        }
        // Not for each call, since this reads the clock.
        if queued % 8 == 1 {
            self.deferred.run_late();
        }
        Some(reply.await)
    }

    /// Queues a call after the first runtime has ended. The first such caller starts another task in its own runtime. Returns how many more
    /// calls may be queued.
    fn submit_to_successor(&self, call: W) -> Option<usize> {
        let mut successor = self.successor.lock().unwrap_or_else(PoisonError::into_inner);
        let (queue, _) = match successor.take() {
            Some(existing) if !existing.0.is_closed() => successor.insert(existing),
            _ => {
                let (queue, queued) = mpsc::channel(MAX_QUEUED);
                successor.insert((queue, tokio::spawn((self.make_task)(queued)).abort_handle()))
            }
        };
        queue.try_send(call).ok()?;
        Some(queue.capacity())
    }
}

impl<W> Drop for Batcher<W> {
    fn drop(&mut self) {
        self.task.abort();
        let successor = self.successor.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, successor)) = successor {
            successor.abort();
        }
    }
}

impl LastBatch {
    fn record_return(&self, sent: Instant, replied_at: Option<Instant>) {
        // Without a reply, the duration is no round trip. A batch that takes longer than `LATE` delays no other.
        if let Some(replied_at) = replied_at {
            let took = replied_at.saturating_duration_since(sent).min(LATE);
            self.round_trip.store(took.as_micros() as u64, Ordering::Relaxed);
        }
        self.last_return.store(self.epoch.elapsed().as_micros() as u64 + 1, Ordering::Relaxed);
    }

    /// How many full batches may be in flight: `nearby`, and one more for each `NEARBY_ROUND_TRIP` in the measured round trip.
    fn window(&self, nearby: usize) -> usize {
        nearby + (self.round_trip.load(Ordering::Relaxed) / NEARBY_ROUND_TRIP.as_micros() as u64) as usize
    }

    /// Whether a batch returned less than `time` ago.
    fn returned_within(&self, time: Duration) -> bool {
        let last = self.last_return.load(Ordering::Relaxed);
        last > 0 && self.epoch.elapsed() < Duration::from_micros(last).saturating_add(time)
    }
}

impl InFlightGuard {
    /// Takes the permits, and returns how many were taken before.
    fn new(in_flight: &Arc<AtomicUsize>, permits: usize) -> (Self, usize) {
        let before = in_flight.fetch_add(permits, Ordering::Relaxed);
        (Self { in_flight: Arc::clone(in_flight), permits }, before)
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.in_flight.fetch_sub(self.permits, Ordering::Relaxed);
    }
}

/// Waits until all callers have given up and the reply would be late. A call must not hold its permit longer, or a dead connection or a
/// stalled node would take all permits. It must not be cancelled earlier, because dead connections are detected by commands that are
/// cancelled late. No timer is set while a caller waits.
pub(crate) async fn until_abandoned<W, T>(calls: &mut [W], reply: fn(&mut W) -> &mut oneshot::Sender<T>) {
    let late = Instant::now() + LATE;
    for call in calls {
        reply(call).closed().await;
    }
    sleep_until(late).await;
}

/// Sends batches until the queue is closed.
async fn send_batches<W, F>(
    mut queued: mpsc::Receiver<W>,
    config: BatchConfig,
    threshold: Arc<Threshold>,
    last_batch: Arc<LastBatch>,
    deferred: DeferredWork,
    send: impl Fn(Vec<W>) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let mut calls = JoinSet::new();
    // The batches in flight that are not late: when each was sent, and its number of calls.
    let mut recent = VecDeque::<(Instant, usize)>::new();
    // The number of callers when the last batch was sent, in flight and queued. It decays slowly, because some callers are always about to
    // call again.
    let mut callers = 0_usize;
    let batch_size = |callers: usize| callers.div_ceil((config.split)(callers)).clamp(1, config.max_batch);
    // Fires when a batch may be late. It is set again only when it has fired: a reset wakes the thread that polls the sockets of this
    // runtime.
    let mut late_timer = pin!(sleep_until(Instant::now()));
    loop {
        threshold.count.store(config.max_batch, Ordering::Relaxed);
        loop {
            let has_room = calls.len() < MAX_IN_FLIGHT && recent.len() < last_batch.window(config.max_full_in_flight);
            if has_room && (recent.len() < (config.max_partial_in_flight)(callers) || queued.len() >= config.max_batch)
            {
                break;
            }
            let oldest = recent.front().map(|(sent, _)| *sent);
            tokio::select! {
                _ = calls.join_next() => drop(recent.pop_front()),
                () = threshold.reached.notified(), if has_room => {}
                () = &mut late_timer, if oldest.is_some() => {
                    let late = oldest.unwrap_or_else(Instant::now) + LATE;
                    if Instant::now() < late {
                        late_timer.as_mut().reset(late);
                    } else {
                        recent.pop_front();
                    }
                }
            }
        }
        let enough = batch_size(callers);
        if last_batch.returned_within(config.linger) && queued.len() < enough {
            // Callers that just got a reply may call again, most of them in time for this batch.
            threshold.count.store(enough, Ordering::Relaxed);
            let mut is_idle = pin!(deferred.when_idle(|| ()));
            while queued.len() < enough {
                tokio::select! {
                    () = &mut is_idle => break,
                    () = threshold.reached.notified() => {}
                }
            }
        }
        let first = tokio::select! {
            Some(_) = calls.join_next() => {
                recent.pop_front();
                continue;
            }
            first = queued.recv() => first,
        };
        let Some(first) = first else { return };
        let in_flight: usize = recent.iter().map(|(_, calls)| calls).sum();
        callers = (in_flight + 1 + queued.len()).max(callers - callers.div_ceil(8));
        let mut batch = Vec::with_capacity(config.max_batch);
        batch.push(first);
        let more = (batch_size(callers) - 1).min(queued.len());
        if more > 0 {
            // Does not wait: these calls are already in the queue.
            queued.recv_many(&mut batch, more).await;
        }
        recent.push_back((Instant::now(), batch.len()));
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
        let (start, (sent, mut times)) = (Instant::now(), mpsc::channel(8));
        let send = move |batch: Vec<oneshot::Sender<()>>, _| {
            let _ = sent.try_send((start.elapsed().as_millis(), batch.len()));
            async move {
                // Keep the reply channels open without an answer.
                let _batch = batch;
                std::future::pending().await
            }
        };
        let config = BatchConfig {
            max_unbatched: 0,
            linger: Duration::ZERO,
            max_batch: 8,
            split: |_| 1,
            max_partial_in_flight: |_| 1,
            max_full_in_flight: 1,
        };
        let batcher = Arc::new(Batcher::new(config, &RuntimeHandle::here(), send));
        let late = LATE.as_millis();
        let mut waiting = JoinSet::new();
        for (submitted_ms, sent_ms) in
            [(0, 0), (5, late), (late + 10, 2 * late), (10 * late, 10 * late), (10 * late + 1, 11 * late)]
        {
            let submitted = start + Duration::from_millis(submitted_ms as u64);
            tokio::time::sleep_until(submitted).await;
            let batcher = Arc::clone(&batcher);
            waiting.spawn(async move { batcher.submit(|reply| reply).await });
            if submitted_ms != sent_ms {
                assert!(tokio::time::timeout(Duration::from_millis(1), times.recv()).await.is_err());
            }
            assert_eq!(times.recv().await, Some((sent_ms, 1)));
        }
    }

    /// Regression: all callers went in one batch, so that either the callers or Redis were idle.
    #[tokio::test(start_paused = true)]
    async fn callers_are_divided_between_two_batches() {
        let (sent, mut calls) = mpsc::unbounded_channel();
        let send = move |batch: Vec<oneshot::Sender<()>>, deferred: DeferredWork| {
            let (answer, is_answered) = oneshot::channel::<()>();
            sent.send((batch.len(), answer)).unwrap();
            async move {
                let replied_at = is_answered.await.ok().map(|()| Instant::now());
                deferred.when_idle(|| batch.into_iter().for_each(|reply| reply.send(()).unwrap())).await;
                replied_at
            }
        };
        let config = BatchConfig {
            max_unbatched: 0,
            linger: Duration::from_secs(1),
            max_batch: 64,
            split: |_| 2,
            max_partial_in_flight: |_| 2,
            max_full_in_flight: 2,
        };
        let batcher = Arc::new(Batcher::new(config, &RuntimeHandle::here(), send));
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
    fn second_runtime(threads: usize) -> (Runtime, RuntimeHandle) {
        let runtime = Builder::new_multi_thread().worker_threads(threads).enable_time().build().unwrap();
        let handle = {
            let _inside = runtime.enter();
            RuntimeHandle::here()
        };
        (runtime, handle)
    }

    #[tokio::test]
    async fn next_call_delivers_replies_of_blocked_thread() {
        let (runtime, handle) = second_runtime(1);
        let (free, until_free) = std::sync::mpsc::channel::<()>();
        let (start, has_begun) = oneshot::channel();
        let blocks = Mutex::new(Some((until_free, start)));
        let send = move |batch: Vec<oneshot::Sender<()>>, deferred: DeferredWork| {
            if let Some((until_free, start)) = blocks.lock().unwrap().take() {
                tokio::spawn(async move {
                    start.send(()).unwrap();
                    until_free.recv().unwrap();
                });
            }
            async move {
                deferred.when_idle(|| batch.into_iter().for_each(|reply| reply.send(()).unwrap())).await;
                None
            }
        };
        let config = BatchConfig {
            max_unbatched: 0,
            linger: Duration::ZERO,
            max_batch: 8,
            split: |_| 1,
            max_partial_in_flight: |_| 1,
            max_full_in_flight: 1,
        };
        let batcher = Batcher::new(config, &handle, send);
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
        let (runtime, handle) = second_runtime(2);
        let (free, until_free) = std::sync::mpsc::channel::<()>();
        let (answer, replied_at) = oneshot::channel::<()>();
        let (start, mut has_begun) = tokio::sync::mpsc::unbounded_channel();
        // The second batch blocks its thread. The first, which is popped first, waits for its answer.
        let has = Mutex::new(vec![(None, Some(until_free)), (Some(replied_at), None)]);
        let send = move |batch: Vec<oneshot::Sender<()>>, deferred: DeferredWork| {
            let (replied_at, until_free) = has.lock().unwrap().pop().unwrap();
            let start = start.clone();
            async move {
                let delivery = deferred.when_idle(|| batch.into_iter().for_each(|reply| reply.send(()).unwrap()));
                let mut delivery = pin!(delivery);
                if let Some(until_free) = until_free {
                    assert!(futures_util::poll!(&mut delivery).is_pending());
                    start.send(()).unwrap();
                    until_free.recv().unwrap();
                } else if let Some(replied_at) = replied_at {
                    start.send(()).unwrap();
                    replied_at.await.unwrap();
                }
                delivery.await;
                None
            }
        };
        let config = BatchConfig {
            max_unbatched: 0,
            linger: Duration::ZERO,
            max_batch: 8,
            split: |_| 1,
            max_partial_in_flight: |_| 2,
            max_full_in_flight: 2,
        };
        let batcher = Batcher::new(config, &handle, send);
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
        let last_batch =
            LastBatch { epoch: Instant::now(), last_return: AtomicU64::new(0), round_trip: AtomicU64::new(0) };
        let sent = Instant::now();
        tokio::time::advance(Duration::from_millis(60)).await;
        last_batch.record_return(sent, None);
        assert_eq!(last_batch.window(2), 2);
        last_batch.record_return(sent, Some(Instant::now()));
        assert_eq!(last_batch.window(2), 12);
    }
}
