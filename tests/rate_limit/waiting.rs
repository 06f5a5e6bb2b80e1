//! Requests that wait for room instead of being turned away: when they come through, in which order, and what that asks of the store.

use std::future::ready;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tollgate::rate_limit::{DenyCache, Outcome, PolicyResolver, QuotaPrefetch, RateLimitStore, RateLimited};
use tollgate::testing::{Failure, FaultStore, Verb};
use tollgate::{
    BoxError, ErrorResponder, Key, Limiter, MemoryBackend, Policy, Quota, RateLimitFallback, RateLimitLayer,
};
use tower::util::BoxCloneService;
use tower::{Layer, Service as _, ServiceExt, service_fn};

const ACME: u64 = 1;
const GLOBEX: u64 = 2;
const INITECH: u64 = 3;

/// A customer and a number.
type Call = (u64, u64);

/// One call every 100 ms for each customer.
fn policy() -> Policy {
    Policy::new("calls", Quota::per_second(10).burst(1).unwrap().token_bucket())
}

/// Says the same of everybody.
fn resolver(policy: Policy) -> PolicyResolver {
    PolicyResolver::new(move |_| ready(Ok::<_, BoxError>(policy.clone())))
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Services that say what came through, and when.
struct Calls {
    begun: Instant,
    served: Arc<Mutex<Vec<(u64, u128)>>>,
}

impl Calls {
    fn new() -> Self {
        Self { begun: Instant::now(), served: Arc::default() }
    }

    fn behind<B>(&self, layer: RateLimitLayer<B>) -> BoxCloneService<Call, (), BoxError>
    where
        B: RateLimitStore + Clone + Send + Sync + 'static,
    {
        let (begun, served) = (self.begun, Arc::clone(&self.served));
        let inner = service_fn(move |(_, number): Call| {
            served.lock().unwrap().push((number, begun.elapsed().as_millis()));
            ready(Ok::<_, BoxError>(()))
        });
        BoxCloneService::new(layer.key(|(customer, _): &Call| *customer).responder(ErrorResponder).layer(inner))
    }

    fn served(&self) -> Vec<(u64, u128)> {
        self.served.lock().unwrap().clone()
    }
}

/// What a call was told that was turned away.
fn refusal(outcome: Result<(), BoxError>) -> Option<Duration> {
    outcome.err().map(|error| error.downcast::<RateLimited>().unwrap().retry_after().unwrap())
}

#[tokio::test(start_paused = true)]
async fn they_come_through_in_their_order_as_soon_as_there_is_room() {
    let calls = Calls::new();
    let store = FaultStore::new(MemoryBackend::new());
    let service = calls.behind(RateLimitLayer::new(store.clone(), policy()).wait(Duration::from_secs(10)));
    let mut waiting = JoinSet::new();
    for number in 0..50 {
        waiting.spawn(service.clone().oneshot((ACME, number)));
        // Some come when others wait, also at the instant when there is room.
        let pause = match number {
            0..20 => 0,
            20 => 85,
            _ => 1,
        };
        sleep(ms(pause)).await;
    }
    while let Some(outcome) = waiting.join_next().await {
        outcome.unwrap().unwrap();
    }
    let served = calls.served();
    assert_eq!(served.iter().map(|(number, _)| *number).collect::<Vec<_>>(), (0..50).collect::<Vec<_>>());
    for (number, after) in &served {
        let due = u128::from(*number) * 100;
        // Timers are in whole milliseconds.
        assert!((due..due + 60).contains(after), "{number} after {after} ms");
    }
    let asked = store.faults().calls(Verb::Check);
    assert!(asked <= 3 * 50, "{asked} questions for 50 calls");
}

/// The first of a line alone asked, so that each call took a round trip of its own: one second over the limit left a line that nothing ended, and most who
/// came later were turned away below the limit.
#[tokio::test(start_paused = true)]
async fn a_line_ends_where_there_is_room_for_all_who_come() {
    let calls = Calls::new();
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().delay(ms(5));
    let second = Policy::new("second", Quota::per_second(1_000).fixed_window());
    let service = calls.behind(RateLimitLayer::new(store.clone(), second).wait(Duration::from_secs(2)));
    let mut waiting = JoinSet::new();
    let mut number = 0;
    for tick in 0..600 {
        for _ in 0..if tick < 100 { 11 } else { 9 } {
            waiting.spawn(service.clone().oneshot((ACME, number)));
            number += 1;
        }
        sleep(ms(10)).await;
    }
    while let Some(outcome) = waiting.join_next().await {
        outcome.unwrap().unwrap();
    }
    let served = calls.served();
    assert!(served.is_sorted_by_key(|(number, _)| *number), "{served:?}");
    // Some of the first windows find a line; then there is none any more.
    let last_of_line = served.iter().rposition(|(number, after)| {
        let came = if *number < 1_100 { *number / 11 * 10 } else { 1_000 + (*number - 1_100) / 9 * 10 };
        *after > u128::from(came) + 10
    });
    assert!(last_of_line.is_some_and(|place| place < 2_100), "{last_of_line:?}");
    let asked = store.faults().calls(Verb::Check);
    assert!(asked < u64::from(number) * 11 / 10, "{asked} questions for {number} calls");
}

/// The time that an answer takes came on top of each wait: a line that five calls began at once lost a seventh of what the quota lets through.
#[tokio::test(start_paused = true)]
async fn wait_queue_ends_once_there_is_room_for_all() {
    let calls = Calls::new();
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().delay(ms(5));
    let policy = Policy::new("calls", Quota::per_second(100).burst(1).unwrap().token_bucket());
    let service = calls.behind(RateLimitLayer::new(store.clone(), policy).wait(Duration::from_secs(2)));
    let mut waiting = JoinSet::new();
    // 80 a second.
    for number in 0..800 {
        for _ in 0..if number == 0 { 5 } else { 1 } {
            let call = service.clone().oneshot((ACME, number));
            waiting.spawn(async move {
                let came = Instant::now();
                call.await.unwrap();
                (number, came.elapsed())
            });
        }
        sleep(if number % 2 == 0 { ms(12) } else { ms(13) }).await;
    }
    while let Some(call) = waiting.join_next().await {
        let (number, took) = call.unwrap();
        assert!(number < 400 || took < ms(50), "{number} after {took:?}");
    }
}

/// They were held for as long as they may wait, one after the other asked the store, and those who came went on to join them.
#[tokio::test(start_paused = true)]
async fn a_line_whose_room_is_too_far_away_ends_at_once() {
    let calls = Calls::new();
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().delay(ms(5));
    let second = Policy::new("second", Quota::per_second(400).burst(40).unwrap().token_bucket());
    let limiter = Limiter::new(store.get_ref().clone(), second.clone());
    let service = calls.behind(RateLimitLayer::new(store.clone(), second).wait(Duration::from_secs(2)));
    let hour = Duration::from_secs(3_600);
    let mut until = None;
    let mut waiting = JoinSet::new();
    // 420 a second.
    for tick in 0..160 {
        if tick == 60 {
            limiter.block(ACME, hour).await.unwrap();
            until = Some(Instant::now() + hour);
        }
        for number in 0..21 {
            let call = service.clone().oneshot((ACME, number));
            waiting.spawn(async move {
                let came = Instant::now();
                let error = call.await.err()?;
                // Those who come when all who were there have heard of it.
                (tick > 62).then(|| (came.elapsed(), Instant::now(), error.downcast::<RateLimited>().unwrap()))
            });
        }
        sleep(ms(50)).await;
    }
    let mut refused = 0;
    while let Some(call) = waiting.join_next().await {
        let Some((took, at, limited)) = call.unwrap() else { continue };
        let (told, left) = (limited.retry_after().unwrap(), until.unwrap() - at);
        assert_eq!(limited.decision().outcome(), Outcome::Blocked);
        assert!(took < ms(100) && told.abs_diff(left) < ms(100), "{told:?} of {left:?} after {took:?}");
        refused += 1;
    }
    assert_eq!(refused, 97 * 21);
}

/// What takes too long for somebody who needs much says nothing to those behind who need less.
#[tokio::test(start_paused = true)]
async fn who_needs_less_is_not_turned_away_with_who_needs_more() {
    let store = FaultStore::new(MemoryBackend::new());
    let second = Policy::new("second", Quota::per_second(1).burst(10).unwrap().token_bucket());
    let other = Limiter::new(store.get_ref().clone(), second.clone());
    let service = RateLimitLayer::new(store.clone(), second)
        .wait(Duration::from_secs(5))
        .deadline(Duration::from_secs(1))
        .cost(|cost: &u64| *cost)
        .responder(ErrorResponder)
        .layer(service_fn(async |cost: u64| Ok::<_, BoxError>(cost)));
    let take_all = async || while other.check(Key::GLOBAL).await.unwrap().is_allowed() {};
    take_all().await;
    let large = tokio::spawn(service.clone().oneshot(4));
    sleep(ms(1)).await;
    let small = tokio::spawn(service.clone().oneshot(1));
    sleep(ms(3_900)).await;
    take_all().await;
    store.faults().delay(ms(200));
    assert!(large.await.unwrap().is_err());
    assert!(!small.is_finished());
    let newcomer = tokio::spawn(service.oneshot(1));
    small.await.unwrap().unwrap();
    newcomer.await.unwrap().unwrap();
}

/// It is what newcomers are told only until somebody of the line is told something else.
#[tokio::test(start_paused = true)]
async fn cached_wait_is_forgotten_after_an_admission() {
    let store = FaultStore::new(MemoryBackend::new());
    let second = Policy::new("second", Quota::per_second(1).burst(10).unwrap().token_bucket());
    let other = Limiter::new(store.get_ref().clone(), second.clone());
    let service = RateLimitLayer::new(store.clone(), second)
        .wait(Duration::from_secs(5))
        .deadline(Duration::from_secs(1))
        .cost(|cost: &u64| *cost)
        .responder(ErrorResponder)
        .layer(service_fn(async |cost: u64| Ok::<_, BoxError>(cost)));
    while other.check(Key::GLOBAL).await.unwrap().is_allowed() {}
    let large = tokio::spawn(service.clone().oneshot(4));
    sleep(ms(1)).await;
    let mut small: JoinSet<_> = (0..3).map(|_| service.clone().oneshot(1)).collect();
    sleep(ms(3_000)).await;
    other.block(Key::GLOBAL, Duration::from_secs(3_600)).await.unwrap();
    store.faults().delay(ms(200));
    assert!(large.await.unwrap().is_err());
    // The next of the line costs less, so it asks.
    sleep(ms(50)).await;
    let begun = Instant::now();
    let told = refusal(service.clone().oneshot(4).await.map(drop)).unwrap();
    assert!(told > Duration::from_secs(3_000) && begun.elapsed() < ms(10), "{told:?} after {:?}", begun.elapsed());
    other.reset(Key::GLOBAL).await.unwrap();
    small.join_next().await.unwrap().unwrap().unwrap();
    sleep(ms(50)).await;
    assert!(!small.is_empty());
    service.oneshot(4).await.unwrap();
    while let Some(outcome) = small.join_next().await {
        outcome.unwrap().unwrap();
    }
}

/// Several of a line have asked at once: those who had no room are in front of those who have not asked yet, and one who needs more is passed by no line of
/// others who need less.
#[tokio::test(start_paused = true)]
async fn those_who_were_asked_about_at_once_keep_their_places() {
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().delay(ms(5));
    let served = Arc::new(Mutex::new(Vec::new()));
    let inner = service_fn({
        let served = Arc::clone(&served);
        move |(_, number): Call| {
            served.lock().unwrap().push(number);
            ready(Ok::<_, BoxError>(()))
        }
    });
    let second = Policy::new("second", Quota::per_second(10).fixed_window());
    let service = RateLimitLayer::new(store.clone(), second.clone())
        .wait(Duration::from_secs(60))
        .cost(|(_, number): &Call| if *number % 10 == 7 { 8 } else { 1 })
        .responder(ErrorResponder)
        .layer(inner);
    let other = Limiter::new(store.clone(), second);
    while other.check(Key::GLOBAL).await.unwrap().is_allowed() {}
    let mut waiting = JoinSet::new();
    let mut leaving = Vec::new();
    for number in 0..60 {
        let call = service.clone().oneshot((ACME, number));
        // Some give up, also while they or those around them are asked about.
        match number % 6 {
            5 => leaving.push(tokio::spawn(timeout(ms(900 + 3 * u64::from(number)), call))),
            _ => drop(waiting.spawn(call)),
        }
        // The line begins with the first.
        sleep(ms(if number == 0 { 10 } else { 1 })).await;
    }
    while let Some(outcome) = waiting.join_next().await {
        outcome.unwrap().unwrap();
    }
    let served = served.lock().unwrap().clone();
    let (large, small) = served.iter().partition::<Vec<u64>, _>(|number| *number % 10 == 7);
    assert!(large.is_sorted() && small.is_sorted(), "{served:?}");
    for number in large {
        let passed_by = served.iter().take_while(|other| **other != number).filter(|other| **other > number).count();
        assert!(passed_by < 10, "{number}: {served:?}");
    }
    let asked = store.faults().calls(Verb::Check);
    assert!(asked <= 2 * 60, "{asked} questions for 60 calls");
}

/// As another process does: those who are denied at the same time go on to wait, and the first of them alone asks.
#[tokio::test(start_paused = true)]
async fn those_whose_room_is_taken_while_they_ask_wait_as_before() {
    let calls = Calls::new();
    let store = FaultStore::new(MemoryBackend::new());
    let minute = Policy::new("minute", Quota::per_minute(100).fixed_window());
    let service = calls.behind(RateLimitLayer::new(store.clone(), minute.clone()).wait(Duration::from_secs(150)));
    let other = Limiter::new(store.get_ref().clone(), minute);
    let take_all = async || while other.check(ACME).await.unwrap().is_allowed() {};
    take_all().await;
    store.faults().delay(ms(5));
    let mut waiting = JoinSet::new();
    for number in 0..50 {
        waiting.spawn(service.clone().oneshot((ACME, number)));
        sleep(ms(10)).await;
    }
    while calls.served().len() < 3 {
        sleep(ms(1)).await;
    }
    take_all().await;
    let (served, asked) = (calls.served().len(), store.faults().calls(Verb::Check));
    sleep(Duration::from_secs(30)).await;
    assert_eq!(calls.served().len(), served);
    let asked = store.faults().calls(Verb::Check) - asked;
    assert!(asked <= 35, "{asked} questions in half a minute");
    while let Some(outcome) = waiting.join_next().await {
        outcome.unwrap().unwrap();
    }
    assert!(calls.served().is_sorted(), "{:?}", calls.served());
}

/// It was told how long to wait as if that had been said just now.
#[tokio::test(start_paused = true)]
async fn who_waits_in_vain_is_not_told_a_wait_that_is_over() {
    let calls = Calls::new();
    let store = FaultStore::new(MemoryBackend::new());
    let minute = Policy::new("minute", Quota::per_minute(1).fixed_window());
    let layer = RateLimitLayer::new(store.clone(), minute).wait(ms(61_000)).deadline(Duration::from_secs(60));
    let service = calls.behind(layer);
    service.clone().oneshot((ACME, 0)).await.unwrap();
    let first = tokio::spawn(service.clone().oneshot((ACME, 1)));
    sleep(ms(1)).await;
    let second = tokio::spawn(service.clone().oneshot((ACME, 2)));
    sleep(ms(59_800)).await;
    // Where there is room the first asks, and is answered when the time of the second is over.
    store.faults().delay(ms(30_000));
    let refused = refusal(second.await.unwrap()).unwrap();
    assert!(!refused.is_zero() && refused <= ms(1), "{refused:?}");
    first.await.unwrap().unwrap();
}

/// Also where there is room of which those who wait do not know yet.
#[tokio::test(start_paused = true)]
async fn nobody_passes_those_who_wait() {
    let calls = Calls::new();
    let backend = MemoryBackend::new();
    let service = calls.behind(RateLimitLayer::new(backend.clone(), policy()).wait(Duration::from_secs(10)));
    service.clone().oneshot((ACME, 0)).await.unwrap();
    let first = tokio::spawn(service.clone().oneshot((ACME, 1)));
    sleep(ms(50)).await;
    Limiter::new(backend, policy()).reset(ACME).await.unwrap();
    service.clone().oneshot((ACME, 2)).await.unwrap();
    first.await.unwrap().unwrap();
    assert_eq!(calls.served().iter().map(|(number, _)| *number).collect::<Vec<_>>(), [0, 1, 2]);
}

#[tokio::test(start_paused = true)]
async fn nobody_waits_longer_than_they_may() {
    let calls = Calls::new();
    let service = calls.behind(RateLimitLayer::new(MemoryBackend::new(), policy()).wait(ms(450)));
    let waiting = (0..10).map(|number| {
        let service = service.clone();
        tokio::spawn(async move {
            let begun = Instant::now();
            (refusal(service.oneshot((ACME, number)).await), begun.elapsed())
        })
    });
    let waiting: Vec<_> = waiting.collect();
    for (number, outcome) in waiting.into_iter().enumerate() {
        let (refused, after) = outcome.await.unwrap();
        if number < 5 {
            assert_eq!(refused, None, "{number}");
        } else {
            assert!(refused.is_some_and(|wait| wait <= ms(100)), "{number} {refused:?}");
            // When the last one came through, those behind know that there is no time for another.
            assert!((ms(400)..ms(460)).contains(&after), "{number} after {after:?}");
        }
    }
    // What would take too long is known at once.
    let hourly = Policy::new("hourly", Quota::per_hour(1).fixed_window());
    let service = calls.behind(RateLimitLayer::new(MemoryBackend::new(), hourly).wait(Duration::from_secs(60)));
    service.clone().oneshot((ACME, 0)).await.unwrap();
    let begun = Instant::now();
    assert!(refusal(service.clone().oneshot((ACME, 1)).await).unwrap() > Duration::from_secs(3_000));
    assert_eq!(begun.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn no_more_wait_than_may() {
    for is_said_first in [false, true] {
        let calls = Calls::new();
        let layer = RateLimitLayer::new(MemoryBackend::new(), policy());
        let layer = match is_said_first {
            true => layer.max_waiters_in_total(3).wait(Duration::from_secs(5)),
            false => layer.wait(Duration::from_secs(5)).max_waiters_in_total(3),
        };
        let service = calls.behind(layer);
        service.clone().oneshot((ACME, 0)).await.unwrap();
        service.clone().oneshot((GLOBEX, 0)).await.unwrap();
        let mut waiting = JoinSet::new();
        for (customer, number) in [(ACME, 1), (GLOBEX, 1), (ACME, 2)] {
            waiting.spawn(service.clone().oneshot((customer, number)));
            sleep(ms(1)).await;
        }
        let begun = Instant::now();
        for customer in [ACME, GLOBEX] {
            assert!(refusal(service.clone().oneshot((customer, 9)).await).is_some());
        }
        assert_eq!(begun.elapsed(), Duration::ZERO);
        // Who has a line of others in front does not hold up whoever needs not wait.
        service.clone().oneshot((INITECH, 0)).await.unwrap();
        while let Some(outcome) = waiting.join_next().await {
            outcome.unwrap().unwrap();
        }
        service.oneshot((ACME, 3)).await.unwrap();
        assert_eq!(calls.served().iter().filter(|(number, _)| *number == 9).count(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn who_gives_up_leaves_the_line_and_is_charged_nothing() {
    let calls = Calls::new();
    let backend = MemoryBackend::new();
    let service = calls.behind(RateLimitLayer::new(backend.clone(), policy()).wait(Duration::from_secs(60)));
    service.clone().oneshot((ACME, 0)).await.unwrap();
    // The first of a line, one in its middle, and its last.
    let mut waiting: Vec<_> = (1..=5).map(|number| tokio::spawn(service.clone().oneshot((ACME, number)))).collect();
    sleep(ms(10)).await;
    for place in [4, 2, 0] {
        waiting.remove(place).abort();
    }
    for outcome in waiting {
        outcome.await.unwrap().unwrap();
    }
    let served: Vec<_> = calls.served().iter().map(|(number, after)| (*number, after / 100)).collect();
    assert_eq!(served, [(0, 0), (2, 1), (4, 2)]);
    // A line that nobody stands in any more is gone: who comes then is turned away as the first one was.
    sleep(ms(100)).await;
    let limiter = Limiter::new(backend, policy());
    assert_eq!(limiter.peek(ACME).await.unwrap().remaining(), Some(1));
    assert!(timeout(ms(1), service.oneshot((ACME, 6))).await.unwrap().is_ok());
}

/// Its key was shut out of the process for as long as somebody kept the future, though the quota had room.
#[tokio::test(start_paused = true)]
async fn who_is_neither_polled_nor_dropped_holds_up_nobody() {
    let second = Policy::new("second", Quota::per_second(1).fixed_window());
    for is_asking in [None, Some(false), Some(true)] {
        let calls = Calls::new();
        let store = FaultStore::new(MemoryBackend::new());
        let service = calls.behind(RateLimitLayer::new(store.clone(), second.clone()).wait(Duration::from_secs(10)));
        service.clone().oneshot((ACME, 0)).await.unwrap();
        let first = is_asking.is_none().then(|| tokio::spawn(service.clone().oneshot((ACME, 1))));
        sleep(ms(1)).await;
        let mut aside = pin!(service.clone().oneshot((ACME, 2)));
        if is_asking == Some(true) {
            // The answer is on its way when nobody polls it any more.
            assert!(timeout(ms(998), &mut aside).await.is_err());
            store.faults().delay(ms(50));
            assert!(timeout(ms(20), &mut aside).await.is_err());
            store.faults().heal();
        } else {
            // Or it pauses, or comes to its turn.
            assert!(timeout(ms(1), &mut aside).await.is_err());
        }
        let others: Vec<_> = [3, 4].map(|number| tokio::spawn(service.clone().oneshot((ACME, number)))).into();
        for other in others {
            timeout(ms(4_000), other).await.unwrap().unwrap().unwrap();
        }
        if let Some(first) = first {
            first.await.unwrap().unwrap();
        }
        let mut numbers: Vec<u64> = calls.served().iter().map(|(number, _)| *number).collect();
        assert_eq!(numbers, if is_asking.is_none() { vec![0, 1, 3, 4] } else { vec![0, 3, 4] }, "{is_asking:?}");
        // It has its place yet, in front of those who came later.
        let last = tokio::spawn(service.clone().oneshot((ACME, 5)));
        sleep(ms(1)).await;
        assert!(!last.is_finished());
        aside.await.unwrap();
        last.await.unwrap().unwrap();
        numbers.extend([2, 5]);
        assert_eq!(calls.served().iter().map(|(number, _)| *number).collect::<Vec<_>>(), numbers, "{is_asking:?}");
        // And the line is gone.
        sleep(ms(1_000)).await;
        let begun = Instant::now();
        service.oneshot((ACME, 6)).await.unwrap();
        assert_eq!(begun.elapsed(), Duration::ZERO);
    }
}

/// Those behind slept until whoever had the turn before would have gone on at the latest: a long deadline later.
#[tokio::test(start_paused = true)]
async fn wait_queue_skips_stalled_waiter() {
    for unpolled in [1, 2] {
        let calls = Calls::new();
        let store = FaultStore::new(MemoryBackend::new());
        let layer = RateLimitLayer::new(store.clone(), policy()).wait(Duration::from_secs(4));
        let service = calls.behind(layer.deadline(Duration::from_secs(8)));
        service.clone().oneshot((ACME, 0)).await.unwrap();
        let first = tokio::spawn(service.clone().oneshot((ACME, 1)));
        sleep(ms(1)).await;
        let mut aside: Vec<_> =
            (0..unpolled).map(|number| Box::pin(service.clone().oneshot((ACME, 2 + number)))).collect();
        for request in &mut aside {
            assert!(timeout(ms(1), request).await.is_err());
        }
        store.faults().delay(ms(50));
        sleep(ms(110)).await;
        // It comes while the first is asked about.
        let last = tokio::spawn(service.clone().oneshot((ACME, 9)));
        first.await.unwrap().unwrap();
        last.await.unwrap().unwrap();
        let (_, after) = calls.served()[2];
        let most = if unpolled == 1 { 500 } else { 1_500 };
        assert!(after < most, "{after} ms behind {unpolled}");
    }
}

/// Those behind slept until it would have had its answer at the latest.
#[tokio::test(start_paused = true)]
async fn waiter_unpolled_after_a_store_call_is_skipped() {
    let calls = Calls::new();
    let store = FaultStore::new(MemoryBackend::new());
    let layer = RateLimitLayer::new(store.clone(), policy()).wait(Duration::from_secs(4));
    let service = calls.behind(layer.deadline(Duration::from_secs(8)));
    service.clone().oneshot((ACME, 0)).await.unwrap();
    let mut aside = pin!(service.clone().oneshot((ACME, 1)));
    assert!(timeout(ms(50), &mut aside).await.is_err());
    store.faults().delay(ms(50));
    assert!(timeout(ms(60), &mut aside).await.is_err());
    let last = tokio::spawn(service.clone().oneshot((ACME, 2)));
    // Somebody else takes the room.
    assert!(Limiter::new(store.get_ref().clone(), policy()).check(ACME).await.unwrap().is_allowed());
    assert!(timeout(ms(45), &mut aside).await.is_err());
    last.await.unwrap().unwrap();
    let (_, after) = calls.served()[1];
    assert!(after < 600, "after {after} ms");
}

/// Two of a line ask at once: the first is denied and pauses, and the other one is not polled any more. Once that one was passed by, nothing woke the first.
#[tokio::test(start_paused = true)]
async fn refund_goes_to_the_first_polled_waiter() {
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().delay(ms(20));
    let minute = Policy::new("minute", Quota::per_minute(4).fixed_window());
    let other = Limiter::new(store.get_ref().clone(), minute.clone());
    // Everybody gives back what they took, after so long.
    let service = RateLimitLayer::new(store.clone(), minute)
        .wait(Duration::from_secs(90))
        .cost(|(cost, _): &Call| *cost)
        .charge_on(|_: Result<&(), &BoxError>| false)
        .responder(ErrorResponder)
        .layer(service_fn(async |(_, after): Call| {
            sleep(ms(after.into())).await;
            Ok::<_, BoxError>(())
        }));
    let begun = Instant::now();
    let mut served = JoinSet::new();
    served.spawn(service.clone().oneshot((1, 800)));
    served.spawn(service.clone().oneshot((3, 80)));
    sleep(ms(30)).await;
    served.spawn(service.clone().oneshot((1, 60_000)));
    sleep(ms(30)).await;
    let first = tokio::spawn(service.clone().oneshot((1, 0)));
    sleep(ms(1)).await;
    let mut aside = pin!(service.clone().oneshot((1, 0)));
    // Three are given back at 120 ms, and one of the line is admitted, so that the next two are asked about at 140 ms.
    assert!(timeout(ms(90), &mut aside).await.is_err());
    assert_eq!(store.faults().calls(Verb::Check), 6);
    for _ in 0..2 {
        assert!(other.check(Key::GLOBAL).await.unwrap().is_allowed());
    }
    sleep(ms(50)).await;
    served.spawn(service.oneshot((1, 0)));
    first.await.unwrap().unwrap();
    // What is given back at 840 ms is asked for in 20 ms.
    assert!(begun.elapsed() < ms(900), "{:?}", begun.elapsed());
}

/// A shadow counts whoever comes, and that is once, however often they have to ask.
#[tokio::test(start_paused = true)]
async fn who_waits_is_counted_once_by_those_who_have_no_say() {
    let backend = MemoryBackend::new();
    let shadow = Policy::new("shadow", Quota::per_hour(100).fixed_window());
    let layer = RateLimitLayer::new(backend.clone(), policy()).and(shadow.clone().shadow(), |_: &Call| "all");
    let service = layer
        .wait(Duration::from_secs(10))
        .key(|(customer, _): &Call| *customer)
        .charge_on(|answer: Result<&u64, &BoxError>| *answer.unwrap() < 3)
        .responder(ErrorResponder)
        .layer(service_fn(async |(_, number): Call| Ok::<_, BoxError>(number)));
    // Somebody else takes the room now and then.
    let other = Limiter::new(backend.clone(), policy());
    let mut waiting: JoinSet<_> = (0..5).map(|number| service.clone().oneshot((ACME, number))).collect();
    for _ in 0..10 {
        sleep(ms(50)).await;
        let _ = other.check(ACME).await.unwrap();
    }
    while let Some(outcome) = waiting.join_next().await {
        outcome.unwrap().unwrap();
    }
    // And what is given back is given back everywhere.
    let left = Limiter::new(backend, shadow).peek("all").await.unwrap().remaining();
    assert_eq!(left, Some(97));
}

/// A request that waited for a limit which only the resolver enforces went by without it at its next turn, uncharged, and so did those behind.
#[tokio::test(start_paused = true)]
async fn who_waits_is_held_to_what_the_resolver_says() {
    let total = Policy::new("total", Quota::per_second(1_000).fixed_window());
    for with_total in [false, true] {
        let calls = Calls::new();
        let layer = RateLimitLayer::new(MemoryBackend::new(), policy().shadow());
        let layer = layer.resolver(resolver(policy())).wait(Duration::from_secs(10));
        let service = if with_total {
            let (begun, served) = (calls.begun, Arc::clone(&calls.served));
            let inner = service_fn(move |(_, number): Call| {
                served.lock().unwrap().push((number, begun.elapsed().as_millis()));
                ready(Ok::<_, BoxError>(()))
            });
            let layer = layer.key(|(customer, _): &Call| *customer).and(total.clone(), tollgate::GlobalKey);
            BoxCloneService::new(layer.responder(ErrorResponder).layer(inner))
        } else {
            calls.behind(layer)
        };
        let mut waiting: JoinSet<_> = (0..20).map(|number| service.clone().oneshot((ACME, number))).collect();
        while let Some(outcome) = waiting.join_next().await {
            outcome.unwrap().unwrap();
        }
        let served = calls.served();
        assert_eq!(served.len(), 20);
        for (place, (_, after)) in served.iter().enumerate() {
            assert!(*after >= 100 * place as u128, "{served:?}");
        }
    }
}

/// The other way round: it was charged anew at each turn.
#[tokio::test(start_paused = true)]
async fn waiter_without_enforced_policy_is_counted_once() {
    let backend = MemoryBackend::new();
    let plan = Policy::new("plan", Quota::per_hour(100).fixed_window());
    let service = RateLimitLayer::new(backend.clone(), plan.clone())
        .resolver(resolver(plan.clone().shadow()))
        .and(policy(), |_: &Call| "all")
        .wait(Duration::from_secs(10))
        .key(|(customer, _): &Call| *customer)
        .charge_on(|answer: Result<&u64, &BoxError>| *answer.unwrap() < 3)
        .responder(ErrorResponder)
        .layer(service_fn(async |(_, number): Call| Ok::<_, BoxError>(number)));
    // Somebody else takes the room now and then, so that the first of the line has to ask more than once.
    let other = Limiter::new(backend.clone(), policy());
    let mut waiting: JoinSet<_> = (0..5).map(|number| service.clone().oneshot((ACME, number))).collect();
    for _ in 0..10 {
        sleep(ms(50)).await;
        let _ = other.check("all").await.unwrap();
    }
    while let Some(outcome) = waiting.join_next().await {
        outcome.unwrap().unwrap();
    }
    let left = Limiter::new(backend, plan).peek(ACME).await.unwrap().remaining();
    assert_eq!(left, Some(97), "and what is given back is given back once");
}

#[tokio::test(start_paused = true)]
async fn what_never_fits_and_a_store_that_fails_are_not_waited_for() {
    let store = FaultStore::new(MemoryBackend::new());
    let layer = RateLimitLayer::new(store.clone(), policy()).wait(Duration::from_secs(60));
    let service = layer
        .max_waiters_in_total(1)
        .on_store_error(RateLimitFallback::Deny)
        .cost(|cost: &u64| *cost)
        .responder(ErrorResponder)
        .layer(service_fn(async |_: u64| Ok::<_, BoxError>(())));
    let begun = Instant::now();
    let never = async || {
        let refused = service.clone().oneshot(2).await.unwrap_err().downcast::<RateLimited>().unwrap();
        assert_eq!(refused.retry_after(), None);
    };
    never().await;
    service.clone().oneshot(1).await.unwrap();
    assert_eq!(begun.elapsed(), Duration::ZERO);
    let waiting = tokio::spawn(service.clone().oneshot(1));
    sleep(ms(10)).await;
    // Nor is it told what those are told who wait.
    never().await;
    assert_eq!(begun.elapsed(), ms(10));
    store.faults().fail(Failure::Unavailable);
    assert!(waiting.await.unwrap().unwrap_err().is::<tollgate::StoreError>());
    assert!(begun.elapsed() < ms(120));
}

/// The first of the line looks once a second. Where the store failed at that moment, the whole line was emptied: turned away, let go, or given another quota.
#[tokio::test(start_paused = true)]
async fn a_store_that_fails_for_a_moment_empties_no_line() {
    let minute = Policy::new("minute", Quota::per_minute(1).fixed_window());
    let all = [RateLimitFallback::Deny, RateLimitFallback::Allow, RateLimitFallback::Local];
    for (then, is_resolver) in all.into_iter().flat_map(|then| [(then, false), (then, true)]) {
        let calls = Calls::new();
        let store = FaultStore::new(MemoryBackend::new());
        let is_away = Arc::new(AtomicBool::new(false));
        let plans = PolicyResolver::new({
            let (is_away, minute) = (Arc::clone(&is_away), minute.clone());
            move |_| ready(if is_away.load(Relaxed) { Err("away") } else { Ok(minute.clone()) })
        });
        let layer = RateLimitLayer::new(store.clone(), minute.clone()).wait(Duration::from_secs(150));
        let layer = layer.resolver(plans.clone()).on_store_error(then);
        let service = calls.behind(layer);
        service.clone().oneshot((ACME, 0)).await.unwrap();
        let gone = tokio::spawn(service.clone().oneshot((ACME, 9)));
        sleep(ms(1)).await;
        let waiting: Vec<_> = (1..=2).map(|number| tokio::spawn(service.clone().oneshot((ACME, number)))).collect();
        sleep(ms(9_999)).await;
        if is_resolver {
            is_away.store(true, Relaxed);
            plans.forget(&Key::from(ACME));
        } else {
            store.faults().fail(Failure::Unavailable);
        }
        // Who comes to its turn meanwhile has been told nothing itself.
        gone.abort();
        sleep(ms(1_500)).await;
        store.faults().heal();
        is_away.store(false, Relaxed);
        for outcome in waiting {
            outcome.await.unwrap().unwrap();
        }
        let served: Vec<_> = calls.served().iter().map(|(number, after)| (*number, after / 1_000)).collect();
        assert_eq!(served, [(0, 0), (1, 60), (2, 120)], "{then:?}, of a resolver: {is_resolver}");
    }
}

/// What this process has said itself holds no longer than it wants to.
#[tokio::test(start_paused = true)]
async fn refund_during_an_outage_reaches_waiters() {
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().fail(Failure::Unavailable);
    let minute = Policy::new("minute", Quota::per_minute(1).fixed_window());
    let service = RateLimitLayer::new(store, minute)
        .wait(Duration::from_secs(90))
        .charge_on(|_: Result<&u64, &BoxError>| false)
        .responder(ErrorResponder)
        .layer(service_fn(async |(_, number): Call| {
            sleep(ms(10)).await;
            Ok::<_, BoxError>(number)
        }));
    let begun = Instant::now();
    let mut served: JoinSet<_> = (0..10).map(|number| service.clone().oneshot((ACME, number))).collect();
    while let Some(number) = served.join_next().await {
        number.unwrap().unwrap();
    }
    assert!(begun.elapsed() < ms(500), "{:?}", begun.elapsed());
}

/// They waited for the end of the window, however early the room came back, and so did all who came behind.
#[tokio::test(start_paused = true)]
async fn what_a_request_gives_back_is_had_by_those_who_wait() {
    let minute = Policy::new("minute", Quota::per_minute(1).fixed_window());
    for several in [false, true] {
        let store = FaultStore::new(MemoryBackend::new());
        let layer = RateLimitLayer::new(store.clone(), minute.clone()).wait(Duration::from_secs(90));
        let layer = layer.key(|(customer, _): &Call| *customer).charge_on(|_: Result<&u64, &BoxError>| false);
        let inner = service_fn(async |(_, number): Call| {
            sleep(ms(10)).await;
            Ok::<_, BoxError>(number)
        });
        let total = Policy::new("total", Quota::per_second(1_000).fixed_window());
        let service = if several {
            // Those who wait do so in the line of what was added.
            let each = RateLimitLayer::new(store.clone(), total).wait(Duration::from_secs(90));
            let each = each.and(minute.clone(), |(customer, _): &Call| *customer);
            let each = each.charge_on(|_: Result<&u64, &BoxError>| false);
            BoxCloneService::new(each.responder(ErrorResponder).layer(inner))
        } else {
            BoxCloneService::new(layer.responder(ErrorResponder).layer(inner))
        };
        // Where the answers of the store take their time, several are denied before the first of them stands in the line.
        for delay in [0, 6] {
            store.faults().delay(ms(delay));
            let begun = Instant::now();
            let mut served = JoinSet::new();
            for number in 0..10 {
                served.spawn(service.clone().oneshot((ACME, number)));
                sleep(ms(4)).await;
            }
            let mut order = Vec::new();
            while let Some(number) = served.join_next().await {
                order.push(number.unwrap().unwrap());
            }
            if delay == 0 {
                assert_eq!(order, (0..10).collect::<Vec<_>>());
            }
            assert!(begun.elapsed() < ms(500), "{:?}", begun.elapsed());
            sleep(ms(10)).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_given_back_for_several_is_had_by_several() {
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().delay(ms(5));
    let minute = Policy::new("minute", Quota::per_minute(2).fixed_window());
    let service = RateLimitLayer::new(store, minute)
        .wait(Duration::from_secs(90))
        .cost(|(_, number): &Call| if *number == 0 { 2 } else { 1 })
        .charge_on(|answer: Result<&u64, &BoxError>| *answer.unwrap() != 0)
        .responder(ErrorResponder)
        .layer(service_fn(async |(_, number): Call| {
            sleep(ms(30)).await;
            Ok::<_, BoxError>(number)
        }));
    let begun = Instant::now();
    let mut served = JoinSet::new();
    served.spawn(service.clone().oneshot((ACME, 0)));
    sleep(ms(10)).await;
    // Both are denied before there is a line, and each is told to wait for a minute.
    served.spawn(service.clone().oneshot((ACME, 1)));
    served.spawn(service.clone().oneshot((ACME, 2)));
    while let Some(number) = served.join_next().await {
        number.unwrap().unwrap();
    }
    assert!(begun.elapsed() < ms(500), "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn room_that_others_make_is_found_within_a_second() {
    let calls = Calls::new();
    let store = FaultStore::new(MemoryBackend::new());
    let minute = Policy::new("minute", Quota::per_minute(1).fixed_window());
    let service = calls.behind(RateLimitLayer::new(store.clone(), minute.clone()).wait(Duration::from_secs(60)));
    service.clone().oneshot((ACME, 0)).await.unwrap();
    let waiting: Vec<_> = (1..=3).map(|number| tokio::spawn(service.clone().oneshot((ACME, number)))).collect();
    sleep(ms(10_500)).await;
    let asked = store.faults().calls(Verb::Check);
    assert!((10..=20).contains(&asked), "{asked} questions in ten seconds");
    // As another process would.
    Limiter::new(store.get_ref().clone(), minute).reset(ACME).await.unwrap();
    sleep(ms(1_010)).await;
    assert_eq!(calls.served().iter().map(|(number, _)| *number).collect::<Vec<_>>(), [0, 1]);
    waiting.iter().for_each(tokio::task::JoinHandle::abort);
}

/// It stood in the line of somebody else, if it counted for others as well.
#[tokio::test(start_paused = true)]
async fn request_above_the_resolved_quota_does_not_wait() {
    let plan = Policy::new("plan", Quota::per_hour(5).fixed_window());
    let layer = RateLimitLayer::new(MemoryBackend::new(), Policy::new("plan", Quota::per_hour(100).fixed_window()));
    let service = layer
        .resolver(resolver(plan))
        .and(Policy::new("total", Quota::per_second(10).burst(10).unwrap().token_bucket()), tollgate::GlobalKey)
        .wait(Duration::from_secs(60))
        .key(|(customer, _): &Call| *customer)
        .cost(|(_, cost): &Call| *cost)
        .responder(ErrorResponder)
        .layer(service_fn(async |_: Call| Ok::<_, BoxError>(())));
    service.clone().oneshot((ACME, 1)).await.unwrap();
    service.clone().oneshot((GLOBEX, 5)).await.unwrap();
    let waiting = tokio::spawn(service.clone().oneshot((INITECH, 5)));
    sleep(ms(10)).await;
    assert!(!waiting.is_finished());
    let begun = Instant::now();
    let never = service.oneshot((ACME, 6)).await.unwrap_err().downcast::<RateLimited>().unwrap();
    assert_eq!((never.retry_after(), begun.elapsed()), (None, Duration::ZERO));
    assert_eq!(never.violated().collect::<Vec<_>>(), ["plan", "total"]);
    waiting.await.unwrap().unwrap();
}

/// Whoever was merely over the limit was told that the store has failed, and that opened the circuit.
#[tokio::test(start_paused = true)]
async fn immediate_store_needs_no_deadline_to_wait() {
    for is_resolved in [false, true] {
        let calls = Calls::new();
        let layer = RateLimitLayer::new(MemoryBackend::new(), policy()).wait(Duration::from_secs(1));
        let layer = if is_resolved { layer.resolver(resolver(policy())) } else { layer };
        // A resolver that has to be asked does need time.
        calls.behind(layer.clone()).oneshot((ACME, 0)).await.unwrap();
        let service = calls.behind(layer.deadline(Duration::ZERO));
        for number in 1..=7 {
            service.clone().oneshot((ACME, number)).await.unwrap();
        }
        let served: Vec<_> = calls.served().iter().map(|(number, after)| (*number, after / 100)).collect();
        assert_eq!(served, (0..=7).map(|number| (number, u128::from(number))).collect::<Vec<_>>());
    }
}

/// Where a request counts for several, everybody was told that the store has failed.
#[tokio::test(start_paused = true)]
async fn immediate_store_needs_no_deadline_for_several_policies() {
    let each = Policy::new("each", Quota::per_hour(3).fixed_window());
    let total = Policy::new("total", Quota::per_hour(100).fixed_window());
    let trial = Policy::new("trial", Quota::per_hour(100).fixed_window()).shadow();
    async fn decided<B>(store: B, [each, total, trial]: [&Policy; 3])
    where
        B: RateLimitStore + Clone + Send + Sync + 'static,
    {
        let inner = || service_fn(async |_: Call| Ok::<_, BoxError>(()));
        let layer =
            RateLimitLayer::new(store.clone(), total.clone()).deadline(Duration::ZERO).responder(ErrorResponder);
        let layer = layer.and(each.clone(), |(customer, _): &Call| *customer);
        let services = [
            BoxCloneService::new(layer.clone().layer(inner())),
            BoxCloneService::new(layer.and(trial.clone(), tollgate::GlobalKey).layer(inner())),
        ];
        for (service, customer) in services.into_iter().zip([ACME, GLOBEX]) {
            for number in 0..5 {
                let refused = refusal(service.clone().oneshot((customer, number)).await);
                assert_eq!(refused.is_some(), number >= 3, "{refused:?}");
            }
        }
        // All of them or none.
        for policy in [total, trial] {
            let left = store.peek(policy, &Key::GLOBAL, 1).await.unwrap().remaining();
            assert_eq!(left, Some(if policy == total { 94 } else { 95 }));
        }
    }
    let policies = [&each, &total, &trial];
    decided(MemoryBackend::new(), policies).await;
    decided(DenyCache::new(QuotaPrefetch::new(MemoryBackend::new())), policies).await;
}

/// They were not counted, and the store was said to fail.
#[tokio::test(start_paused = true)]
async fn immediate_store_needs_no_deadline_for_shadow_policies() {
    let hourly = |name: &str| Policy::new(name, Quota::per_hour(3).fixed_window()).shadow();
    let (each, total) = (hourly("each"), hourly("total"));
    for then in [RateLimitFallback::Deny, RateLimitFallback::Allow, RateLimitFallback::Local] {
        let store = MemoryBackend::new();
        let calls = Calls::new();
        let layer = RateLimitLayer::new(store.clone(), total.clone()).deadline(Duration::ZERO).on_store_error(then);
        let service = shared(&calls, layer, each.clone());
        for number in 0..2 {
            service.clone().oneshot((ACME, number)).await.unwrap();
        }
        for (policy, key) in [(&each, Key::from(ACME)), (&total, Key::GLOBAL)] {
            assert_eq!(store.peek(policy, &key, 1).await.unwrap().remaining(), Some(1), "{then:?}: {}", policy.name());
        }
    }
}

/// It was asked when the request came, and once more for the same answer.
#[tokio::test(start_paused = true)]
async fn what_a_cache_remembers_is_asked_for_once() {
    // One that has to be waited for, so that the cache alone knows anything at once.
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().delay(ms(1));
    let second = Policy::new("second", Quota::per_second(1).fixed_window());
    let cache = DenyCache::new(store);
    let layer = RateLimitLayer::new(cache.clone(), second.clone());
    let (calls, limiter) = (Calls::new(), Limiter::new(cache.clone(), second));
    assert!(limiter.check(ACME).await.unwrap().is_allowed());
    assert!(!limiter.check(ACME).await.unwrap().is_allowed());
    assert_eq!((cache.stats().hits, cache.stats().misses), (0, 2));
    // Too long to wait for.
    let hasty = calls.behind(layer.clone().wait(ms(10)));
    assert!(refusal(hasty.oneshot((ACME, 0)).await).is_some());
    assert_eq!((cache.stats().hits, cache.stats().misses), (1, 2));
    let mut patient = calls.behind(layer.wait(Duration::from_secs(3)));
    // Some of the wait, or all of it, may be over when the answer is asked for.
    for (number, idle) in [(1, 0), (2, 300), (3, 2_000)] {
        while limiter.check(ACME).await.unwrap().is_allowed() {}
        let (called, hits) = (Instant::now(), cache.stats().hits);
        let answer = patient.ready().await.unwrap().call((ACME, number));
        sleep(ms(idle)).await;
        answer.await.unwrap();
        assert_eq!(cache.stats().hits, hits + 1, "{number}");
        assert!(called.elapsed() <= ms(idle.max(1_000) + 50), "{number} after {:?}", called.elapsed());
    }
}

/// As in two processes: together they get what there is.
#[tokio::test(start_paused = true)]
async fn lines_of_one_store_share_its_quota() {
    let calls = Calls::new();
    let backend = MemoryBackend::new();
    let mut waiting = JoinSet::new();
    for process in 0..2 {
        let service = calls.behind(RateLimitLayer::new(backend.clone(), policy()).wait(Duration::from_secs(10)));
        waiting.extend((0..10).map(|number| service.clone().oneshot((ACME, 10 * process + number))));
    }
    while let Some(outcome) = waiting.join_next().await {
        outcome.unwrap().unwrap();
    }
    let served = calls.served();
    for (place, (_, after)) in served.iter().enumerate() {
        assert!(*after >= 100 * place as u128, "{served:?}");
    }
    assert!(served[19].1 < 2_000, "{served:?}");
}

/// Behind `total` for all customers together, and the limit of each.
fn shared<B>(calls: &Calls, layer: RateLimitLayer<B>, each: Policy) -> BoxCloneService<Call, (), BoxError>
where
    B: RateLimitStore + Clone + Send + Sync + 'static,
{
    let (begun, served) = (calls.begun, Arc::clone(&calls.served));
    let inner = service_fn(move |(_, number): Call| {
        served.lock().unwrap().push((number, begun.elapsed().as_millis()));
        ready(Ok::<_, BoxError>(()))
    });
    let layer = layer.and(each, |(customer, _): &Call| *customer);
    BoxCloneService::new(layer.responder(ErrorResponder).layer(inner))
}

/// All requests of a layer stood in one line, whosever limit they waited for: others waited behind them, and were told of limits that were not theirs.
#[tokio::test(start_paused = true)]
async fn a_customer_who_waits_holds_up_no_other() {
    let calls = Calls::new();
    let backend = MemoryBackend::new();
    let total = Policy::new("total", Quota::per_second(1_000).fixed_window());
    let each = Policy::new("each", Quota::per_second(1).burst(1).unwrap().token_bucket());
    let layer = RateLimitLayer::new(backend.clone(), total).wait(Duration::from_secs(2));
    let service = shared(&calls, layer, each.clone());
    let mut waiting: JoinSet<_> = (0..4).map(|number| service.clone().oneshot((ACME, number))).collect();
    sleep(ms(1)).await;
    service.clone().oneshot((GLOBEX, 10)).await.unwrap();
    assert_eq!(calls.served(), [(0, 0), (10, 1)]);
    // Of their own limit they are told, whatever others wait for.
    Limiter::new(backend, each).block(INITECH, Duration::from_secs(300)).await.unwrap();
    let refused = refusal(service.clone().oneshot((INITECH, 20)).await).unwrap();
    assert!(refused > Duration::from_secs(299), "{refused:?}");
    let mut refused = Vec::new();
    while let Some(outcome) = waiting.join_next().await {
        refused.extend(refusal(outcome.unwrap()));
    }
    assert!(matches!(refused[..], [wait] if wait <= Duration::from_secs(1)), "{refused:?}");
    assert_eq!(calls.served().iter().map(|(number, _)| *number).collect::<Vec<_>>(), [0, 10, 1, 2]);
}

#[tokio::test(start_paused = true)]
async fn customers_who_wait_for_the_same_limit_keep_their_order() {
    let calls = Calls::new();
    let store = FaultStore::new(MemoryBackend::new());
    let each = Policy::new("each", Quota::per_second(1_000).fixed_window());
    let layer = RateLimitLayer::new(store.clone(), policy()).wait(Duration::from_secs(10));
    let service = shared(&calls, layer, each);
    let mut waiting = JoinSet::new();
    for number in 0..30 {
        waiting.spawn(service.clone().oneshot((number % 7, number)));
        sleep(ms(1)).await;
    }
    while let Some(outcome) = waiting.join_next().await {
        outcome.unwrap().unwrap();
    }
    // Nobody passes them, also where there is room of which they do not know yet.
    let waiting = tokio::spawn(service.clone().oneshot((ACME, 30)));
    sleep(ms(50)).await;
    Limiter::new(store.clone(), policy()).reset(Key::GLOBAL).await.unwrap();
    service.oneshot((GLOBEX, 31)).await.unwrap();
    waiting.await.unwrap().unwrap();
    assert_eq!(calls.served().iter().map(|(number, _)| *number).collect::<Vec<_>>(), (0..32).collect::<Vec<_>>());
    let asked = store.faults().calls(Verb::CheckAll);
    assert!(asked <= 3 * 30, "{asked} questions for 30 calls");
}

/// Who has come to their turn in one line stands in another one before they are asked about.
#[tokio::test(start_paused = true)]
async fn those_who_wait_for_two_limits_keep_their_order_in_both() {
    let calls = Calls::new();
    let each = Policy::new("each", Quota::per_second(2).burst(1).unwrap().token_bucket());
    let service =
        shared(&calls, RateLimitLayer::new(MemoryBackend::new(), policy()).wait(Duration::from_secs(10)), each);
    let mut waiting = JoinSet::new();
    for number in 0..30 {
        // The first one sends a third of them.
        let customer = if number % 3 == 0 { ACME } else { 100 + number };
        waiting.spawn(service.clone().oneshot((customer, number)));
        sleep(ms(1)).await;
    }
    while let Some(outcome) = waiting.join_next().await {
        outcome.unwrap().unwrap();
    }
    let served = calls.served();
    let (acme, others) = served.iter().partition::<Vec<&(u64, u128)>, _>(|(number, _)| number % 3 == 0);
    for (calls, of) in [(&acme, "one customer"), (&others, "the others")] {
        assert!(calls.is_sorted(), "{of}: {served:?}");
    }
    // As much as the two limits let through, and none is held up by the customer who has a limit of their own to wait for.
    assert!(others[19].1 <= 2_700, "{served:?}");
    assert!((4_500..5_000).contains(&acme[9].1), "{served:?}");
}

#[tokio::test(start_paused = true)]
async fn what_costs_nothing_waits_for_nobody() {
    let own = RateLimitLayer::new(MemoryBackend::new(), policy());
    let total = Policy::new("total", Quota::per_second(1_000).fixed_window());
    let several = RateLimitLayer::new(MemoryBackend::new(), total).and(policy(), |_: &u64| ACME);
    let inner = || service_fn(async |_: u64| Ok::<_, BoxError>(()));
    let services: [BoxCloneService<u64, (), BoxError>; 2] = [
        BoxCloneService::new(
            own.wait(Duration::from_secs(9))
                .max_waiters_in_total(1)
                .cost(|cost: &u64| *cost)
                .responder(ErrorResponder)
                .layer(inner()),
        ),
        BoxCloneService::new(
            several
                .wait(Duration::from_secs(9))
                .max_waiters_in_total(1)
                .cost(|cost: &u64| *cost)
                .responder(ErrorResponder)
                .layer(inner()),
        ),
    ];
    for service in services {
        service.clone().oneshot(1).await.unwrap();
        let waiting = tokio::spawn(service.clone().oneshot(1));
        sleep(ms(1)).await;
        let begun = Instant::now();
        service.clone().oneshot(0).await.unwrap();
        assert_eq!(begun.elapsed(), Duration::ZERO);
        assert!(!waiting.is_finished());
        assert!(service.oneshot(1).await.unwrap_err().is::<RateLimited>(), "the only place is taken");
        waiting.await.unwrap().unwrap();
    }
}
