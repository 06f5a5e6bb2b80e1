//! Where calls of one kind meet, to go together.
//!
//! A call that is nearly alone goes by itself and waits for nobody. Those beyond that wait until one of a few is back, and then
//! go as one: a call costs Redis more than what is asked in it. While there are such, and for a moment after, nobody goes alone.
//!
//! Where there are many they do not all go in one: nobody would be left to ask anything while it is away, and Redis would have nothing to do while
//! they are told and ask again. With a part of them in each call both are at work at the same time.
//!
//! One that is full would save nothing by waiting, so more of those may be on their way; where the way to Redis is long, as many as there is time
//! for. Those who wait longer than they may are not asked for, so no more are sent than a server can have answered that is well.

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

/// A call that is away for longer than this does not hold up the next one: its connection may be dead.
const LATE: Duration = Duration::from_millis(20);
/// With a longer round trip than this there may be more on their way: one more for each time. A server nearby that has much to do takes about as
/// long, and does less in the same time the more there are.
const NEARBY: Duration = Duration::from_millis(2);
/// How many may wait; more than that go by themselves.
const WAITING: usize = 4_096;
/// How many calls may be away altogether, late ones included.
const AWAY: usize = 64;

/// Takes in what may go together.
pub(crate) struct Batcher<W> {
    limits: BatchConfig,
    away: Arc<AtomicUsize>,
    crowd: Arc<RttEstimate>,
    waiting: mpsc::Sender<W>,
    quorum: Arc<Threshold>,
    idle: Idle,
    sender: AbortHandle,
    // Once the runtime has ended in which that was at work: what is, and what it takes in.
    successor: Mutex<Option<(mpsc::Sender<W>, AbortHandle)>>,
    start: Box<dyn Fn(mpsc::Receiver<W>) -> Task + Send + Sync>,
}

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// How calls go together.
#[derive(Clone, Copy)]
pub(crate) struct BatchConfig {
    /// While so many calls are on their way, nobody goes alone.
    pub(crate) max_unbatched: usize,
    /// For how long nobody goes alone after several were answered together: whoever is first to ask again is not the last, and
    /// would pay for a call of their own.
    pub(crate) linger: Duration,
    /// How many go together at the most.
    pub(crate) max_batch: usize,
    /// Into how many calls so many who are there are divided, if that leaves no more for each than may go together.
    pub(crate) split: fn(usize) -> usize,
    /// While so many calls of several are on their way, where so many are there, the next one has to be full. With two of them Redis has one to work
    /// on while the other one travels.
    pub(crate) max_in_flight: fn(usize) -> usize,
    /// As long as they are full, so many may be on their way.
    pub(crate) full: usize,
}

/// Wakes who sends the next call once so many wait for it.
struct Threshold {
    number: AtomicUsize,
    reached: Notify,
}

/// What is known of calls of several that are back.
struct RttEstimate {
    epoch: Instant,
    // When there was one for the last time, in us since `epoch`; zero if there never was.
    last: AtomicU64,
    // How long that one took, in us.
    round_trip: AtomicU64,
}

/// The place of a call that is on its way; one of several takes all places of those that go alone.
pub(crate) struct InFlightPermit {
    away: Arc<AtomicUsize>,
    places: usize,
}

impl<W: Send + 'static> Batcher<W> {
    /// Sends what has met until it is dropped. `send` says when Redis has answered, if it has, and tells those who have met
    /// when the thread is idle.
    pub(crate) fn new<F>(
        limits: BatchConfig,
        home: &RuntimeHandle,
        send: impl Fn(Vec<W>, Idle) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Option<Instant>> + Send + 'static,
    {
        let (waiting, arrivals) = mpsc::channel(WAITING);
        let away = Arc::default();
        let counted = Arc::clone(&away);
        let crowd =
            Arc::new(RttEstimate { epoch: Instant::now(), last: AtomicU64::new(0), round_trip: AtomicU64::new(0) });
        let idle = Idle::new();
        let (answered, teller) = (Arc::clone(&crowd), idle.clone());
        let send = move |batch: Vec<W>| {
            let several = (batch.len() > 1).then(|| Arc::clone(&answered));
            let (place, sent, teller) =
                (InFlightPermit::new(&counted, limits.max_unbatched).0, Instant::now(), teller.clone());
            let call = send(batch, teller.clone());
            async move {
                let answered = call.await;
                if let Some(crowd) = several {
                    crowd.is_back(sent, answered);
                }
                drop(place);
                teller.catch_up();
            }
        };
        let send = Arc::new(send);
        let quorum = Arc::new(Threshold { number: AtomicUsize::new(limits.max_batch), reached: Notify::new() });
        let (awaited, known, waited) = (Arc::clone(&quorum), Arc::clone(&crowd), idle.clone());
        let start = move |arrivals| -> Task {
            let send = Arc::clone(&send);
            let send = move |batch| send(batch);
            Box::pin(send_together(arrivals, limits, Arc::clone(&awaited), Arc::clone(&known), waited.clone(), send))
        };
        let sender = home.spawn(start(arrivals));
        Self { limits, away, crowd, waiting, quorum, idle, sender, successor: Mutex::default(), start: Box::new(start) }
    }

    /// A place for a call that may go by itself, unless so many are on their way that it had better wait for others.
    pub(crate) fn try_direct(&self) -> Option<InFlightPermit> {
        let (place, before) = InFlightPermit::new(&self.away, 1);
        let is_alone = before < self.limits.max_unbatched && !self.crowd.is_within(self.limits.linger);
        if is_alone {
            self.idle.catch_up();
        }
        is_alone.then_some(place)
    }

    /// What is answered to one of those that go together. `None` if it has to go by itself after all; an error if the runtime that
    /// sends them has ended.
    pub(crate) async fn submit<T>(&self, wait: impl FnOnce(oneshot::Sender<T>) -> W) -> Option<Result<T, RecvError>> {
        let (reply, answer) = oneshot::channel();
        let capacity = match self.waiting.try_send(wait(reply)) {
            Ok(()) => self.waiting.capacity(),
            // Too many wait.
            Err(TrySendError::Full(_)) => return None,
            Err(TrySendError::Closed(waiting)) => self.wait_elsewhere(waiting)?,
        };
        let number = WAITING - capacity;
        if number >= self.quorum.number.load(Ordering::Relaxed) {
            self.quorum.reached.notify_one();
        }
        // Not for each of them: it takes a look at the clock.
        if number % 8 == 1 {
            self.idle.catch_up();
        }
        Some(answer.await)
    }

    /// The same where the first runtime has ended: in that of the caller, or of whoever came first since. How many more may wait there.
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
        // What has no answer says nothing of the way to Redis, and nobody waits for one that takes longer.
        if let Some(answered) = answered {
            let took = answered.saturating_duration_since(sent).min(LATE);
            self.round_trip.store(took.as_micros() as u64, Ordering::Relaxed);
        }
        self.last.store(self.epoch.elapsed().as_micros() as u64 + 1, Ordering::Relaxed);
    }

    /// How many calls that are full may be on their way so that Redis need not wait for the next one: `near` of them if it is nearby.
    fn window(&self, near: usize) -> usize {
        near + (self.round_trip.load(Ordering::Relaxed) / NEARBY.as_micros() as u64) as usize
    }

    fn is_within(&self, time: Duration) -> bool {
        let last = self.last.load(Ordering::Relaxed);
        last > 0 && self.epoch.elapsed() < Duration::from_micros(last).saturating_add(time)
    }
}

impl InFlightPermit {
    /// And how many places were taken before.
    fn new(away: &Arc<AtomicUsize>, places: usize) -> (Self, usize) {
        let before = away.fetch_add(places, Ordering::Relaxed);
        (Self { away: Arc::clone(away), places }, before)
    }
}

impl Drop for InFlightPermit {
    fn drop(&mut self) {
        self.away.fetch_sub(self.places, Ordering::Relaxed);
    }
}

/// Waits until nobody waits any more, and an answer would be late: a connection that is dead, or a node that hangs, is to hold the place of a call for
/// no longer, or there are none left for the others, and what is given up in time is how a dead connection is found out. No timer is set while
/// somebody waits.
pub(crate) async fn given_up<W, T>(waiting: &mut [W], reply: fn(&mut W) -> &mut oneshot::Sender<T>) {
    let late = Instant::now() + LATE;
    for waiting in waiting {
        reply(waiting).closed().await;
    }
    sleep_until(late).await;
}

/// Sends what has met until nobody can ask any more.
async fn send_together<W, F>(
    mut arrivals: mpsc::Receiver<W>,
    limits: BatchConfig,
    quorum: Arc<Threshold>,
    crowd: Arc<RttEstimate>,
    idle: Idle,
    send: impl Fn(Vec<W>) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let mut calls = JoinSet::new();
    // When those were sent that are not known to be back or late, and how many are in each.
    let mut young = VecDeque::<(Instant, usize)>::new();
    // How many there were when the last call was sent: in it, in others and waiting. They are not forgotten at once, since some are always about to
    // ask again.
    let mut present = 0_usize;
    let share = |present: usize| present.div_ceil((limits.split)(present)).clamp(1, limits.max_batch);
    // Rings when one may be late. It is not set anew for each call: that wakes whoever waits for the sockets of this runtime.
    let mut alarm = pin!(sleep_until(Instant::now()));
    loop {
        quorum.number.store(limits.max_batch, Ordering::Relaxed);
        loop {
            let has_room = calls.len() < AWAY && young.len() < crowd.window(limits.full);
            if has_room && (young.len() < (limits.max_in_flight)(present) || arrivals.len() >= limits.max_batch) {
                break;
            }
            let oldest = young.front().map(|(sent, _)| *sent);
            tokio::select! {
                _ = calls.join_next() => drop(young.pop_front()),
                () = quorum.reached.notified(), if has_room => {}
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
        if crowd.is_within(limits.linger) && arrivals.len() < enough {
            // Those who were answered a moment ago may want something again: most of them come in time for the next call.
            quorum.number.store(enough, Ordering::Relaxed);
            let mut waited = pin!(idle.then(|| ()));
            while arrivals.len() < enough {
                tokio::select! {
                    () = &mut waited => break,
                    () = quorum.reached.notified() => {}
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
            // They are there already.
            arrivals.recv_many(&mut batch, others).await;
        }
        young.push_back((Instant::now(), batch.len()));
        // Some kilobytes that would be moved from hand to hand otherwise.
        calls.spawn(Box::pin(send(batch)));
    }
}

#[cfg(test)]
mod tests {
    use tokio::runtime::{Builder, Runtime};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_call_that_is_late_makes_room_for_the_next_one() {
        let (begun, (sent, mut times)) = (Instant::now(), mpsc::channel(8));
        let send = move |batch: Vec<oneshot::Sender<()>>, _| {
            let _ = sent.try_send((begun.elapsed().as_millis(), batch.len()));
            async move {
                // Those who wait hear nothing of it either.
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
        let meeting = Arc::new(Batcher::new(limits, &RuntimeHandle::here(), send));
        let late = LATE.as_millis();
        let mut waiting = JoinSet::new();
        for (comes, goes) in
            [(0, 0), (5, late), (late + 10, 2 * late), (10 * late, 10 * late), (10 * late + 1, 11 * late)]
        {
            let comes = begun + Duration::from_millis(comes as u64);
            tokio::time::sleep_until(comes).await;
            let meeting = Arc::clone(&meeting);
            waiting.spawn(async move { meeting.submit(|reply| reply).await });
            if comes.duration_since(begun).as_millis() != goes {
                assert!(tokio::time::timeout(Duration::from_millis(1), times.recv()).await.is_err());
            }
            assert_eq!(times.recv().await, Some((goes, 1)));
        }
    }

    /// All went together, so that either all of them or Redis had nothing to do.
    #[tokio::test(start_paused = true)]
    async fn half_of_those_who_are_there_go_in_each_of_two_calls() {
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
        let meeting = Arc::new(Batcher::new(limits, &RuntimeHandle::here(), send));
        let mut asking = JoinSet::new();
        for _ in 0..6 {
            let meeting = Arc::clone(&meeting);
            asking.spawn(async move { while meeting.submit(|reply| reply).await.is_some() {} });
        }
        let (first, mut oldest) = calls.recv().await.unwrap();
        let next = tokio::time::timeout(Duration::from_secs(1), calls.recv()).await;
        let (second, mut newest) = next.expect("all of them went in the first").unwrap();
        assert_eq!((first, second), (3, 3));
        for _ in 0..10 {
            oldest.send(()).unwrap();
            let (again, next) = calls.recv().await.unwrap();
            assert_eq!(again, 3, "those who were told, and all of them");
            (oldest, newest) = (newest, next);
        }
    }

    /// A runtime of so many threads beside that of the test.
    fn elsewhere(threads: usize) -> (Runtime, RuntimeHandle) {
        let runtime = Builder::new_multi_thread().worker_threads(threads).enable_time().build().unwrap();
        let home = {
            let _inside = runtime.enter();
            RuntimeHandle::here()
        };
        (runtime, home)
    }

    #[tokio::test]
    async fn whoever_asks_next_tells_those_whose_thread_is_blocked() {
        let (runtime, home) = elsewhere(1);
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
        let meeting = Batcher::new(limits, &home, send);
        let mut first = pin!(meeting.submit(|reply| reply));
        assert!(futures_util::poll!(&mut first).is_pending());
        has_begun.await.unwrap();
        tokio::time::sleep(Duration::from_millis(2)).await;
        assert!(futures_util::poll!(&mut first).is_pending());
        let mut next = pin!(meeting.submit(|reply| reply));
        assert!(futures_util::poll!(&mut next).is_pending());
        let told = tokio::time::timeout(Duration::from_secs(10), first).await;
        free.send(()).unwrap();
        next.await.unwrap().unwrap();
        runtime.shutdown_background();
        told.expect("nobody tells it").unwrap().unwrap();
    }

    /// A thread that keeps the answers of one call, and nobody who asks.
    #[tokio::test]
    async fn a_call_that_comes_back_tells_those_whose_thread_is_blocked() {
        let (runtime, home) = elsewhere(2);
        let (free, until_free) = std::sync::mpsc::channel::<()>();
        let (answer, answered) = oneshot::channel::<()>();
        let (begun, mut has_begun) = tokio::sync::mpsc::unbounded_channel();
        // What the second call has, and the first.
        let has = Mutex::new(vec![(None, Some(until_free)), (Some(answered), None)]);
        let send = move |batch: Vec<oneshot::Sender<()>>, idle: Idle| {
            let (answered, until_free) = has.lock().unwrap().pop().unwrap();
            let begun = begun.clone();
            async move {
                let told = idle.then(|| batch.into_iter().for_each(|reply| reply.send(()).unwrap()));
                let mut told = pin!(told);
                if let Some(until_free) = until_free {
                    assert!(futures_util::poll!(&mut told).is_pending());
                    begun.send(()).unwrap();
                    until_free.recv().unwrap();
                } else if let Some(answered) = answered {
                    begun.send(()).unwrap();
                    answered.await.unwrap();
                }
                told.await;
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
        let meeting = Batcher::new(limits, &home, send);
        let mut calls = Vec::new();
        for _ in 0..2 {
            let mut call = Box::pin(meeting.submit(|reply| reply));
            assert!(futures_util::poll!(&mut call).is_pending());
            has_begun.recv().await.unwrap();
            calls.push(call);
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
        let mut blocked = calls.pop().unwrap();
        assert!(futures_util::poll!(&mut blocked).is_pending());
        answer.send(()).unwrap();
        let told = tokio::time::timeout(Duration::from_secs(10), blocked).await;
        free.send(()).unwrap();
        runtime.shutdown_background();
        told.expect("nobody tells it").unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn only_answers_say_how_long_the_way_is() {
        let crowd = RttEstimate { epoch: Instant::now(), last: AtomicU64::new(0), round_trip: AtomicU64::new(0) };
        let sent = Instant::now();
        tokio::time::advance(Duration::from_millis(60)).await;
        crowd.is_back(sent, None);
        assert_eq!(crowd.window(2), 2);
        crowd.is_back(sent, Some(Instant::now()));
        assert_eq!(crowd.window(2), 12);
    }
}
