//! Where calls of one kind meet, to go together.
//!
//! A call that is nearly alone goes by itself and waits for nobody. Those beyond that wait until one of a few is back, and then
//! go as one: a call costs Redis more than what is asked in it. While there are such, and for a moment after, nobody goes alone.
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
use tokio::task::{AbortHandle, JoinSet, yield_now};
use tokio::time::{Instant, sleep_until};

use super::home::Home;

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
pub(super) struct Meeting<W> {
    limits: Limits,
    away: Arc<AtomicUsize>,
    crowd: Arc<Crowd>,
    waiting: mpsc::Sender<W>,
    // Told when there are enough for a call that is full.
    full: Arc<Notify>,
    sender: AbortHandle,
    // Once the runtime has ended in which that was at work: what is, and what it takes in.
    successor: Mutex<Option<(mpsc::Sender<W>, AbortHandle)>>,
    start: Box<dyn Fn(mpsc::Receiver<W>) -> Task + Send + Sync>,
}

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// How calls go together.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    /// While so many calls are on their way, nobody goes alone.
    pub(super) alone: usize,
    /// For how long nobody goes alone after several were answered together: whoever is first to ask again is not the last, and
    /// would pay for a call of their own.
    pub(super) busy: Duration,
    /// How many go together at the most.
    pub(super) together: usize,
    /// While so many calls of several are on their way, the next one has to be full. With two of them Redis has one to work on while the other
    /// one travels.
    pub(super) calls: usize,
    /// As long as they are full, so many may be on their way.
    pub(super) full: usize,
}

/// What is known of calls of several that are back.
struct Crowd {
    epoch: Instant,
    // When there was one for the last time, in us since `epoch`; zero if there never was.
    last: AtomicU64,
    // How long that one took, in us.
    round_trip: AtomicU64,
}

/// The place of a call that is on its way; one of several takes all places of those that go alone.
pub(super) struct Away {
    away: Arc<AtomicUsize>,
    places: usize,
}

impl<W: Send + 'static> Meeting<W> {
    /// Sends what has met until it is dropped. `send` says whether Redis has answered.
    pub(super) fn new<F>(limits: Limits, home: &Home, send: impl Fn(Vec<W>) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = bool> + Send + 'static,
    {
        let (waiting, arrivals) = mpsc::channel(WAITING);
        let away = Arc::default();
        let counted = Arc::clone(&away);
        let crowd = Arc::new(Crowd { epoch: Instant::now(), last: AtomicU64::new(0), round_trip: AtomicU64::new(0) });
        let answered = Arc::clone(&crowd);
        let send = move |batch: Vec<W>| {
            let several = (batch.len() > 1).then(|| Arc::clone(&answered));
            let (place, sent, call) = (Away::new(&counted, limits.alone).0, Instant::now(), send(batch));
            async move {
                let is_answered = call.await;
                if let Some(crowd) = several {
                    crowd.is_back(sent, is_answered);
                }
                drop(place);
            }
        };
        let (full, send) = (Arc::new(Notify::new()), Arc::new(send));
        let (told, known) = (Arc::clone(&full), Arc::clone(&crowd));
        let start = move |arrivals| -> Task {
            let send = Arc::clone(&send);
            let send = move |batch| send(batch);
            Box::pin(send_together(arrivals, limits, Arc::clone(&told), Arc::clone(&known), send))
        };
        let sender = home.spawn(start(arrivals));
        Self { limits, away, crowd, waiting, full, sender, successor: Mutex::default(), start: Box::new(start) }
    }

    /// A place for a call that may go by itself, unless so many are on their way that it had better wait for others.
    pub(super) fn alone(&self) -> Option<Away> {
        let (place, before) = Away::new(&self.away, 1);
        (before < self.limits.alone && !self.crowd.is_within(self.limits.busy)).then_some(place)
    }

    /// What is answered to one of those that go together. `None` if it has to go by itself after all; an error if the runtime that
    /// sends them has ended.
    pub(super) async fn join<T>(&self, wait: impl FnOnce(oneshot::Sender<T>) -> W) -> Option<Result<T, RecvError>> {
        let (reply, answer) = oneshot::channel();
        let capacity = match self.waiting.try_send(wait(reply)) {
            Ok(()) => self.waiting.capacity(),
            // Too many wait.
            Err(TrySendError::Full(_)) => return None,
            Err(TrySendError::Closed(waiting)) => self.wait_elsewhere(waiting)?,
        };
        if WAITING - capacity >= self.limits.together {
            self.full.notify_one();
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

impl<W> Drop for Meeting<W> {
    fn drop(&mut self) {
        self.sender.abort();
        let successor = self.successor.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, successor)) = successor {
            successor.abort();
        }
    }
}

impl Crowd {
    fn is_back(&self, sent: Instant, is_answered: bool) {
        // What has no answer says nothing of the way to Redis, and nobody waits for one that takes longer.
        if is_answered {
            self.round_trip.store(sent.elapsed().min(LATE).as_micros() as u64, Ordering::Relaxed);
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

impl Away {
    /// And how many places were taken before.
    fn new(away: &Arc<AtomicUsize>, places: usize) -> (Self, usize) {
        let before = away.fetch_add(places, Ordering::Relaxed);
        (Self { away: Arc::clone(away), places }, before)
    }
}

impl Drop for Away {
    fn drop(&mut self) {
        self.away.fetch_sub(self.places, Ordering::Relaxed);
    }
}

/// Waits until nobody waits any more, and an answer would be late: a connection that is dead, or a node that hangs, is to hold the place of a call for
/// no longer, or there are none left for the others, and what is given up in time is how a dead connection is found out. No timer is set while
/// somebody waits.
pub(super) async fn given_up<W, T>(waiting: &mut [W], reply: fn(&mut W) -> &mut oneshot::Sender<T>) {
    let late = Instant::now() + LATE;
    for waiting in waiting {
        reply(waiting).closed().await;
    }
    sleep_until(late).await;
}

/// Sends what has met until nobody can ask any more.
async fn send_together<W, F>(
    mut arrivals: mpsc::Receiver<W>,
    limits: Limits,
    full: Arc<Notify>,
    crowd: Arc<Crowd>,
    send: impl Fn(Vec<W>) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let mut calls = JoinSet::new();
    // When those were sent that are not known to be back or late.
    let mut young = VecDeque::<Instant>::new();
    // Rings when one may be late. It is not set anew for each call: that wakes whoever waits for the sockets of this runtime.
    let mut alarm = pin!(sleep_until(Instant::now()));
    loop {
        loop {
            let has_room = calls.len() < AWAY && young.len() < crowd.window(limits.full);
            if has_room && (young.len() < limits.calls || arrivals.len() >= limits.together) {
                break;
            }
            let oldest = young.front().copied();
            tokio::select! {
                _ = calls.join_next() => drop(young.pop_front()),
                () = full.notified(), if has_room => {}
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
        if crowd.is_within(limits.busy) {
            // Those who were answered a moment ago may want something again: most of them come in time for the next call.
            yield_now().await;
        }
        let mut batch = Vec::with_capacity(limits.together);
        tokio::select! {
            Some(_) = calls.join_next() => {
                young.pop_front();
                continue;
            }
            number = arrivals.recv_many(&mut batch, limits.together) => if number == 0 {
                return;
            }
        }
        young.push_back(Instant::now());
        // Some kilobytes that would be moved from hand to hand otherwise.
        calls.spawn(Box::pin(send(batch)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_call_that_is_late_makes_room_for_the_next_one() {
        let (begun, (sent, mut times)) = (Instant::now(), mpsc::channel(8));
        let send = move |batch: Vec<oneshot::Sender<()>>| {
            let _ = sent.try_send((begun.elapsed().as_millis(), batch.len()));
            async move {
                // Those who wait hear nothing of it either.
                let _batch = batch;
                std::future::pending().await
            }
        };
        let limits = Limits { alone: 0, busy: Duration::ZERO, together: 8, calls: 1, full: 1 };
        let meeting = Arc::new(Meeting::new(limits, &Home::here(), send));
        let late = LATE.as_millis();
        let mut waiting = JoinSet::new();
        for (comes, goes) in
            [(0, 0), (5, late), (late + 10, 2 * late), (10 * late, 10 * late), (10 * late + 1, 11 * late)]
        {
            let comes = begun + Duration::from_millis(comes as u64);
            tokio::time::sleep_until(comes).await;
            let meeting = Arc::clone(&meeting);
            waiting.spawn(async move { meeting.join(|reply| reply).await });
            if comes.duration_since(begun).as_millis() != goes {
                assert!(tokio::time::timeout(Duration::from_millis(1), times.recv()).await.is_err());
            }
            assert_eq!(times.recv().await, Some((goes, 1)));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn only_answers_say_how_long_the_way_is() {
        let crowd = Crowd { epoch: Instant::now(), last: AtomicU64::new(0), round_trip: AtomicU64::new(0) };
        let sent = Instant::now();
        tokio::time::advance(Duration::from_millis(60)).await;
        crowd.is_back(sent, false);
        assert_eq!(crowd.window(2), 2);
        crowd.is_back(sent, true);
        assert_eq!(crowd.window(2), 12);
    }
}
