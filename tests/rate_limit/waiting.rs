//! Requests that wait for room: when they are admitted, in which order, and how many store calls they make.

use std::future::ready;
use std::pin::pin;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tollgate::rate_limit::store::RateLimitStore;
use tollgate::rate_limit::{DenyCache, Outcome, PolicyResolver, QuotaPrefetch, RateLimited};
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

/// Resolves every key to `policy`.
fn resolver(policy: Policy) -> PolicyResolver {
    PolicyResolver::new(move |_| ready(Ok::<_, BoxError>(policy.clone())))
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Services that record which calls they served, and when.
struct Calls {
    start: Instant,
    served: Arc<Mutex<Vec<(u64, u128)>>>,
}

impl Calls {
    fn new() -> Self {
        Self { start: Instant::now(), served: Arc::default() }
    }

    fn behind<B>(&self, layer: RateLimitLayer<B>) -> BoxCloneService<Call, (), BoxError>
    where
        B: RateLimitStore + Clone + Send + Sync + 'static,
    {
        let (start, served) = (self.start, Arc::clone(&self.served));
        let inner = service_fn(move |(_, number): Call| {
            served.lock().unwrap().push((number, start.elapsed().as_millis()));
            ready(Ok::<_, BoxError>(()))
        });
        BoxCloneService::new(layer.key(|(customer, _): &Call| *customer).responder(ErrorResponder).layer(inner))
    }

    fn served(&self) -> Vec<(u64, u128)> {
        self.served.lock().unwrap().clone()
    }
}

/// Returns the `retry_after` of a rejected call.
fn rejection(outcome: Result<(), BoxError>) -> Option<Duration> {
    outcome.err().map(|error| error.downcast::<RateLimited>().unwrap().retry_after().unwrap())
}

#[tokio::test(start_paused = true)]
async fn waiters_are_admitted_in_order_as_soon_as_there_is_room() {
    let calls = Calls::new();
    let store = FaultStore::new(MemoryBackend::new());
    let service = calls.behind(RateLimitLayer::new(store.clone(), policy()).wait(Duration::from_secs(10)));
    let mut waiting = JoinSet::new();
    for number in 0..50 {
        waiting.spawn(service.clone().oneshot((ACME, number)));
        // Some calls arrive while others wait, and some at the instant when there is room.
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
        // Timers have a resolution of one millisecond.
        assert!((due..due + 60).contains(after), "{number} after {after} ms");
    }
    let asked = store.faults().calls(Verb::Check);
    assert!(asked <= 3 * 50, "{asked} store calls for 50 calls");
}

/// Regression: only the first waiter called the store, so each call took a round trip of its own. One second over the limit left a queue
/// that never emptied. Most later calls were rejected although the load was below the limit.
#[tokio::test(start_paused = true)]
async fn wait_queue_drains_after_a_burst() {
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
    // The first windows have a queue. Afterwards there is none.
    let last_of_line = served.iter().rposition(|(number, after)| {
        let came = if *number < 1_100 { *number / 11 * 10 } else { 1_000 + (*number - 1_100) / 9 * 10 };
        *after > u128::from(came) + 10
    });
    assert!(last_of_line.is_some_and(|place| place < 2_100), "{last_of_line:?}");
    let asked = store.faults().calls(Verb::Check);
    assert!(asked < number * 11 / 10, "{asked} questions for {number} calls");
}

/// Regression: the latency of the store was added to each wait. A queue that five calls started lost a seventh of the quota's rate.
#[tokio::test(start_paused = true)]
async fn wait_queue_drains_despite_store_latency() {
    let calls = Calls::new();
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().delay(ms(5));
    let policy = Policy::new("calls", Quota::per_second(100).burst(1).unwrap().token_bucket());
    let service = calls.behind(RateLimitLayer::new(store.clone(), policy).wait(Duration::from_secs(2)));
    let mut waiting = JoinSet::new();
    // 80 calls per second.
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

/// Regression: waiters were held for their maximum wait. They called the store one after the other, and new calls joined the queue.
#[tokio::test(start_paused = true)]
async fn long_block_rejects_the_wait_queue_at_once() {
    let calls = Calls::new();
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().delay(ms(5));
    let second = Policy::new("second", Quota::per_second(400).burst(40).unwrap().token_bucket());
    let limiter = Limiter::new(store.get_ref().clone(), second.clone());
    let service = calls.behind(RateLimitLayer::new(store.clone(), second).wait(Duration::from_secs(2)));
    let hour = Duration::from_secs(3_600);
    let mut until = None;
    let mut waiting = JoinSet::new();
    // 420 calls per second.
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
                // These calls arrive after the earlier waiters have learned of the block.
                (tick > 62).then(|| (came.elapsed(), Instant::now(), error.downcast::<RateLimited>().unwrap()))
            });
        }
        sleep(ms(50)).await;
    }
    let mut refused = 0;
    while let Some(call) = waiting.join_next().await {
        let Some((took, at, limited)) = call.unwrap() else { continue };
        let (wait, left) = (limited.retry_after().unwrap(), until.unwrap() - at);
        assert_eq!(limited.decision().outcome(), Outcome::Blocked);
        assert!(took < ms(100) && wait.abs_diff(left) < ms(100), "{wait:?} of {left:?} after {took:?}");
        refused += 1;
    }
    assert_eq!(refused, 97 * 21);
}

/// A wait that is too long for an expensive call says nothing about the cheaper calls behind it.
#[tokio::test(start_paused = true)]
async fn cheap_waiter_is_not_rejected_with_an_expensive_one() {
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

/// The cached denial applies to new calls only until a waiter gets a different decision.
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
    // The next waiter costs less, so it calls the store.
    sleep(ms(50)).await;
    let start = Instant::now();
    let wait = rejection(service.clone().oneshot(4).await.map(drop)).unwrap();
    assert!(wait > Duration::from_secs(3_000) && start.elapsed() < ms(10), "{wait:?} after {:?}", start.elapsed());
    other.reset(Key::GLOBAL).await.unwrap();
    small.join_next().await.unwrap().unwrap().unwrap();
    sleep(ms(50)).await;
    assert!(!small.is_empty());
    service.oneshot(4).await.unwrap();
    while let Some(outcome) = small.join_next().await {
        outcome.unwrap().unwrap();
    }
}

/// Several waiters call the store at the same time. Denied waiters stay in front of waiters that have not called yet. Only a bounded number
/// of cheaper calls overtake an expensive one.
#[tokio::test(start_paused = true)]
async fn waiters_that_call_together_keep_their_order() {
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
        // Some calls give up, also during their own store call or those of their neighbours.
        match number % 6 {
            5 => leaving.push(tokio::spawn(timeout(ms(900 + 3 * number), call))),
            _ => drop(waiting.spawn(call)),
        }
        // The first call starts the queue.
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
    assert!(asked <= 2 * 60, "{asked} store calls for 60 calls");
}

/// Another process takes the room. The waiters that are denied at the same time continue to wait, and only the first one calls the store.
#[tokio::test(start_paused = true)]
async fn waiters_denied_together_continue_to_wait() {
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
    assert!(asked <= 35, "{asked} store calls in half a minute");
    while let Some(outcome) = waiting.join_next().await {
        outcome.unwrap().unwrap();
    }
    assert!(calls.served().is_sorted(), "{:?}", calls.served());
}

/// Regression: the rejection contained the wait of an old denial as if the store had just sent it.
#[tokio::test(start_paused = true)]
async fn rejected_waiter_gets_a_current_wait() {
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
    // When there is room, the first waiter calls the store. The reply arrives after the maximum wait of the second waiter.
    store.faults().delay(ms(30_000));
    let refused = rejection(second.await.unwrap()).unwrap();
    assert!(!refused.is_zero() && refused <= ms(1), "{refused:?}");
    first.await.unwrap().unwrap();
}

/// New calls do not overtake waiters, even if there is room that the waiters have not noticed.
#[tokio::test(start_paused = true)]
async fn new_call_does_not_overtake_waiters() {
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
async fn waiters_do_not_exceed_the_maximum_wait() {
    let calls = Calls::new();
    let service = calls.behind(RateLimitLayer::new(MemoryBackend::new(), policy()).wait(ms(450)));
    let waiting = (0..10).map(|number| {
        let service = service.clone();
        tokio::spawn(async move {
            let start = Instant::now();
            (rejection(service.oneshot((ACME, number)).await), start.elapsed())
        })
    });
    let waiting: Vec<_> = waiting.collect();
    for (number, outcome) in waiting.into_iter().enumerate() {
        let (refused, after) = outcome.await.unwrap();
        if number < 5 {
            assert_eq!(refused, None, "{number}");
        } else {
            assert!(refused.is_some_and(|wait| wait <= ms(100)), "{number} {refused:?}");
            // When the fifth call is admitted, the waiters behind it know that there is no room for another in time.
            assert!((ms(400)..ms(460)).contains(&after), "{number} after {after:?}");
        }
    }
    // If the wait is too long, the call is rejected at once.
    let hourly = Policy::new("hourly", Quota::per_hour(1).fixed_window());
    let service = calls.behind(RateLimitLayer::new(MemoryBackend::new(), hourly).wait(Duration::from_secs(60)));
    service.clone().oneshot((ACME, 0)).await.unwrap();
    let start = Instant::now();
    assert!(rejection(service.clone().oneshot((ACME, 1)).await).unwrap() > Duration::from_secs(3_000));
    assert_eq!(start.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn waiters_are_bounded_in_total() {
    for is_set_first in [false, true] {
        let calls = Calls::new();
        let layer = RateLimitLayer::new(MemoryBackend::new(), policy());
        let layer = match is_set_first {
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
        let start = Instant::now();
        for customer in [ACME, GLOBEX] {
            assert!(rejection(service.clone().oneshot((customer, 9)).await).is_some());
        }
        assert_eq!(start.elapsed(), Duration::ZERO);
        // The full queues do not hold up a customer that has room.
        service.clone().oneshot((INITECH, 0)).await.unwrap();
        while let Some(outcome) = waiting.join_next().await {
            outcome.unwrap().unwrap();
        }
        service.oneshot((ACME, 3)).await.unwrap();
        assert_eq!(calls.served().iter().filter(|(number, _)| *number == 9).count(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn cancelled_waiter_leaves_the_queue_uncharged() {
    let calls = Calls::new();
    let backend = MemoryBackend::new();
    let service = calls.behind(RateLimitLayer::new(backend.clone(), policy()).wait(Duration::from_secs(60)));
    service.clone().oneshot((ACME, 0)).await.unwrap();
    // The first waiter, one in the middle, and the last.
    let mut waiting: Vec<_> = (1..=5).map(|number| tokio::spawn(service.clone().oneshot((ACME, number)))).collect();
    sleep(ms(10)).await;
    for position in [4, 2, 0] {
        waiting.remove(position).abort();
    }
    for outcome in waiting {
        outcome.await.unwrap().unwrap();
    }
    let served: Vec<_> = calls.served().iter().map(|(number, after)| (*number, after / 100)).collect();
    assert_eq!(served, [(0, 0), (2, 1), (4, 2)]);
    // A queue without waiters is removed, so a new call is served at once.
    sleep(ms(100)).await;
    let limiter = Limiter::new(backend, policy());
    assert_eq!(limiter.peek(ACME).await.unwrap().remaining(), Some(1));
    assert!(timeout(ms(1), service.oneshot((ACME, 6))).await.unwrap().is_ok());
}

/// Regression: a future that was neither polled nor dropped blocked its key in this process, although the quota had room.
#[tokio::test(start_paused = true)]
async fn unpolled_waiter_holds_up_no_other() {
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
            // The future is last polled while its store call is in flight.
            assert!(timeout(ms(998), &mut aside).await.is_err());
            store.faults().delay(ms(50));
            assert!(timeout(ms(20), &mut aside).await.is_err());
            store.faults().heal();
        } else {
            // The future is last polled while it sleeps as the first waiter, or before its turn comes.
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
        // The future keeps its position in front of later calls.
        let last = tokio::spawn(service.clone().oneshot((ACME, 5)));
        sleep(ms(1)).await;
        assert!(!last.is_finished());
        aside.await.unwrap();
        last.await.unwrap().unwrap();
        numbers.extend([2, 5]);
        assert_eq!(calls.served().iter().map(|(number, _)| *number).collect::<Vec<_>>(), numbers, "{is_asking:?}");
        // Afterwards the queue is removed.
        sleep(ms(1_000)).await;
        let start = Instant::now();
        service.oneshot((ACME, 6)).await.unwrap();
        assert_eq!(start.elapsed(), Duration::ZERO);
    }
}

/// Regression: the waiters behind slept until the latest instant at which a stalled waiter could continue: a long deadline later.
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
        // This call arrives during the store call of the first waiter.
        let last = tokio::spawn(service.clone().oneshot((ACME, 9)));
        first.await.unwrap().unwrap();
        last.await.unwrap().unwrap();
        let (_, after) = calls.served()[2];
        let most = if unpolled == 1 { 500 } else { 1_500 };
        assert!(after < most, "{after} ms behind {unpolled}");
    }
}

/// Regression: the waiters behind slept until the deadline of the unpolled waiter's store call.
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
    // Another process takes the room.
    assert!(Limiter::new(store.get_ref().clone(), policy()).check(ACME).await.unwrap().is_allowed());
    assert!(timeout(ms(45), &mut aside).await.is_err());
    last.await.unwrap().unwrap();
    let (_, after) = calls.served()[1];
    assert!(after < 600, "after {after} ms");
}

/// Regression: two waiters call the store at the same time. The first is denied and sleeps, and the second is no longer polled. Once the
/// second was skipped, nothing woke the first.
#[tokio::test(start_paused = true)]
async fn refund_goes_to_the_first_polled_waiter() {
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().delay(ms(20));
    let minute = Policy::new("minute", Quota::per_minute(4).fixed_window());
    let other = Limiter::new(store.get_ref().clone(), minute.clone());
    // Each call gives its units back after the given number of milliseconds.
    let service = RateLimitLayer::new(store.clone(), minute)
        .wait(Duration::from_secs(90))
        .cost(|(cost, _): &Call| *cost)
        .charge_on(|_: Result<&(), &BoxError>| false)
        .responder(ErrorResponder)
        .layer(service_fn(async |(_, after): Call| {
            sleep(ms(after)).await;
            Ok::<_, BoxError>(())
        }));
    let start = Instant::now();
    let mut served = JoinSet::new();
    served.spawn(service.clone().oneshot((1, 800)));
    served.spawn(service.clone().oneshot((3, 80)));
    sleep(ms(30)).await;
    served.spawn(service.clone().oneshot((1, 60_000)));
    sleep(ms(30)).await;
    let first = tokio::spawn(service.clone().oneshot((1, 0)));
    sleep(ms(1)).await;
    let mut aside = pin!(service.clone().oneshot((1, 0)));
    // At 120 ms three units are given back and one waiter is admitted, so the next two waiters call the store at 140 ms.
    assert!(timeout(ms(90), &mut aside).await.is_err());
    assert_eq!(store.faults().calls(Verb::Check), 6);
    for _ in 0..2 {
        assert!(other.check(Key::GLOBAL).await.unwrap().is_allowed());
    }
    sleep(ms(50)).await;
    served.spawn(service.oneshot((1, 0)));
    first.await.unwrap().unwrap();
    // Within 20 ms, a waiter requests the unit that is given back at 840 ms.
    assert!(start.elapsed() < ms(900), "{:?}", start.elapsed());
}

/// A shadow policy counts each call once, however often it calls the store.
#[tokio::test(start_paused = true)]
async fn shadow_policy_counts_a_waiter_once() {
    let backend = MemoryBackend::new();
    let shadow = Policy::new("shadow", Quota::per_hour(100).fixed_window());
    let layer = RateLimitLayer::new(backend.clone(), policy()).and(shadow.clone().shadow(), |_: &Call| "all");
    let service = layer
        .wait(Duration::from_secs(10))
        .key(|(customer, _): &Call| *customer)
        .charge_on(|answer: Result<&u64, &BoxError>| *answer.unwrap() < 3)
        .responder(ErrorResponder)
        .layer(service_fn(async |(_, number): Call| Ok::<_, BoxError>(number)));
    // Another process sometimes takes the room.
    let other = Limiter::new(backend.clone(), policy());
    let mut waiting: JoinSet<_> = (0..5).map(|number| service.clone().oneshot((ACME, number))).collect();
    for _ in 0..10 {
        sleep(ms(50)).await;
        let _ = other.check(ACME).await.unwrap();
    }
    while let Some(outcome) = waiting.join_next().await {
        outcome.unwrap().unwrap();
    }
    // Refunds apply to the shadow policy as well.
    let left = Limiter::new(backend, shadow).peek("all").await.unwrap().remaining();
    assert_eq!(left, Some(97));
}

/// Regression: a call that waited for a limit of the resolver was admitted uncharged at its next turn, and so were the calls behind it.
#[tokio::test(start_paused = true)]
async fn waiters_are_held_to_the_resolved_policy() {
    let total = Policy::new("total", Quota::per_second(1_000).fixed_window());
    for with_total in [false, true] {
        let calls = Calls::new();
        let layer = RateLimitLayer::new(MemoryBackend::new(), policy().shadow());
        let layer = layer.resolver(resolver(policy())).wait(Duration::from_secs(10));
        let service = if with_total {
            let (start, served) = (calls.start, Arc::clone(&calls.served));
            let inner = service_fn(move |(_, number): Call| {
                served.lock().unwrap().push((number, start.elapsed().as_millis()));
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
        for (position, (_, after)) in served.iter().enumerate() {
            assert!(*after >= 100 * position as u128, "{served:?}");
        }
    }
}

/// The resolved policy is the shadow policy. Regression: it was charged again at each turn.
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
    // Another process sometimes takes the room, so the first waiter has to call the store more than once.
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
    assert_eq!(left, Some(97), "a refund applies once");
}

#[tokio::test(start_paused = true)]
async fn impossible_cost_and_store_error_are_not_waited_for() {
    let store = FaultStore::new(MemoryBackend::new());
    let layer = RateLimitLayer::new(store.clone(), policy()).wait(Duration::from_secs(60));
    let service = layer
        .max_waiters_in_total(1)
        .on_store_error(RateLimitFallback::Deny)
        .cost(|cost: &u64| *cost)
        .responder(ErrorResponder)
        .layer(service_fn(async |_: u64| Ok::<_, BoxError>(())));
    let start = Instant::now();
    let never = async || {
        let refused = service.clone().oneshot(2).await.unwrap_err().downcast::<RateLimited>().unwrap();
        assert_eq!(refused.retry_after(), None);
    };
    never().await;
    service.clone().oneshot(1).await.unwrap();
    assert_eq!(start.elapsed(), Duration::ZERO);
    let waiting = tokio::spawn(service.clone().oneshot(1));
    sleep(ms(10)).await;
    // A call above the quota does not get the cached denial of the waiters.
    never().await;
    assert_eq!(start.elapsed(), ms(10));
    store.faults().fail(Failure::Unavailable);
    assert!(waiting.await.unwrap().unwrap_err().is::<tollgate::StoreError>());
    assert!(start.elapsed() < ms(120));
}

/// The first waiter calls the store once a second. Regression: if the store failed at that moment, all waiters were rejected, admitted, or
/// moved to the local quota.
#[tokio::test(start_paused = true)]
async fn short_outage_does_not_empty_the_wait_queue() {
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
        // The next waiter becomes the first during the outage, and has no decision of its own yet.
        gone.abort();
        sleep(ms(1_500)).await;
        store.faults().heal();
        is_away.store(false, Relaxed);
        for outcome in waiting {
            outcome.await.unwrap().unwrap();
        }
        let served: Vec<_> = calls.served().iter().map(|(number, after)| (*number, after / 1_000)).collect();
        assert_eq!(served, [(0, 0), (1, 60), (2, 120)], "{then:?}, failing resolver: {is_resolver}");
    }
}

/// A denial of the local quota holds only until a refund in this process.
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
    let start = Instant::now();
    let mut served: JoinSet<_> = (0..10).map(|number| service.clone().oneshot((ACME, number))).collect();
    while let Some(number) = served.join_next().await {
        number.unwrap().unwrap();
    }
    assert!(start.elapsed() < ms(500), "{:?}", start.elapsed());
}

/// Regression: waiters and later calls waited for the end of the window, although units were given back before.
#[tokio::test(start_paused = true)]
async fn refund_wakes_a_waiter() {
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
            // The calls wait in the queue of the added policy.
            let each = RateLimitLayer::new(store.clone(), total).wait(Duration::from_secs(90));
            let each = each.and(minute.clone(), |(customer, _): &Call| *customer);
            let each = each.charge_on(|_: Result<&u64, &BoxError>| false);
            BoxCloneService::new(each.responder(ErrorResponder).layer(inner))
        } else {
            BoxCloneService::new(layer.responder(ErrorResponder).layer(inner))
        };
        // If the store replies late, several calls are denied before the first of them joins the queue.
        for delay in [0, 6] {
            store.faults().delay(ms(delay));
            let start = Instant::now();
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
            assert!(start.elapsed() < ms(500), "{:?}", start.elapsed());
            sleep(ms(10)).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn refund_of_two_units_admits_two_waiters() {
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
    let start = Instant::now();
    let mut served = JoinSet::new();
    served.spawn(service.clone().oneshot((ACME, 0)));
    sleep(ms(10)).await;
    // Both calls are denied before there is a queue, each with a wait of one minute.
    served.spawn(service.clone().oneshot((ACME, 1)));
    served.spawn(service.clone().oneshot((ACME, 2)));
    while let Some(number) = served.join_next().await {
        number.unwrap().unwrap();
    }
    assert!(start.elapsed() < ms(500), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn room_made_by_other_processes_is_found_within_a_second() {
    let calls = Calls::new();
    let store = FaultStore::new(MemoryBackend::new());
    let minute = Policy::new("minute", Quota::per_minute(1).fixed_window());
    let service = calls.behind(RateLimitLayer::new(store.clone(), minute.clone()).wait(Duration::from_secs(60)));
    service.clone().oneshot((ACME, 0)).await.unwrap();
    let waiting: Vec<_> = (1..=3).map(|number| tokio::spawn(service.clone().oneshot((ACME, number)))).collect();
    sleep(ms(10_500)).await;
    let asked = store.faults().calls(Verb::Check);
    assert!((10..=20).contains(&asked), "{asked} store calls in ten seconds");
    // Another process resets the key.
    Limiter::new(store.get_ref().clone(), minute).reset(ACME).await.unwrap();
    sleep(ms(1_010)).await;
    assert_eq!(calls.served().iter().map(|(number, _)| *number).collect::<Vec<_>>(), [0, 1]);
    waiting.iter().for_each(tokio::task::JoinHandle::abort);
}

/// Regression: if the call had several keys, it waited in the queue of another key.
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
    let start = Instant::now();
    let never = service.oneshot((ACME, 6)).await.unwrap_err().downcast::<RateLimited>().unwrap();
    assert_eq!((never.retry_after(), start.elapsed()), (None, Duration::ZERO));
    assert_eq!(never.violated().collect::<Vec<_>>(), ["plan", "total"]);
    waiting.await.unwrap().unwrap();
}

/// Regression: calls that were only over the limit were reported as store errors, which opened the circuit.
#[tokio::test(start_paused = true)]
async fn immediate_store_needs_no_deadline_to_wait() {
    for is_resolved in [false, true] {
        let calls = Calls::new();
        let layer = RateLimitLayer::new(MemoryBackend::new(), policy()).wait(Duration::from_secs(1));
        let layer = if is_resolved { layer.resolver(resolver(policy())) } else { layer };
        // A resolver call needs a deadline above zero, so this call fills the resolver's cache.
        calls.behind(layer.clone()).oneshot((ACME, 0)).await.unwrap();
        let service = calls.behind(layer.deadline(Duration::ZERO));
        for number in 1..=7 {
            service.clone().oneshot((ACME, number)).await.unwrap();
        }
        let served: Vec<_> = calls.served().iter().map(|(number, after)| (*number, after / 100)).collect();
        assert_eq!(served, (0..=7).map(|number| (number, u128::from(number))).collect::<Vec<_>>());
    }
}

/// Regression: if a call had several keys, it was always reported as a store error.
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
                let refused = rejection(service.clone().oneshot((customer, number)).await);
                assert_eq!(refused.is_some(), number >= 3, "{refused:?}");
            }
        }
        // A denied call is charged under none of the enforced policies. The shadow policy counts it.
        for policy in [total, trial] {
            let left = store.peek(policy, &Key::GLOBAL, 1).await.unwrap().remaining();
            assert_eq!(left, Some(if policy == total { 94 } else { 95 }));
        }
    }
    let policies = [&each, &total, &trial];
    decided(MemoryBackend::new(), policies).await;
    decided(DenyCache::new(QuotaPrefetch::new(MemoryBackend::new())), policies).await;
}

/// Regression: the shadow policies were not charged, and the result was a store error.
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

/// Regression: the cache was queried when the call arrived, and once more for the same decision.
#[tokio::test(start_paused = true)]
async fn cached_denial_is_looked_up_once() {
    // The store has latency, so only the cache can decide at once.
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().delay(ms(1));
    let second = Policy::new("second", Quota::per_second(1).fixed_window());
    let cache = DenyCache::new(store);
    let layer = RateLimitLayer::new(cache.clone(), second.clone());
    let (calls, limiter) = (Calls::new(), Limiter::new(cache.clone(), second));
    assert!(limiter.check(ACME).await.unwrap().is_allowed());
    assert!(!limiter.check(ACME).await.unwrap().is_allowed());
    assert_eq!((cache.stats().hits, cache.stats().misses), (0, 2));
    // The cached wait is too long for this layer.
    let short = calls.behind(layer.clone().wait(ms(10)));
    assert!(rejection(short.oneshot((ACME, 0)).await).is_some());
    assert_eq!((cache.stats().hits, cache.stats().misses), (1, 2));
    let mut long = calls.behind(layer.wait(Duration::from_secs(3)));
    // Part of the wait, or all of it, may be over when the response future is polled.
    for (number, idle) in [(1, 0), (2, 300), (3, 2_000)] {
        while limiter.check(ACME).await.unwrap().is_allowed() {}
        let (called, hits) = (Instant::now(), cache.stats().hits);
        let answer = long.ready().await.unwrap().call((ACME, number));
        sleep(ms(idle)).await;
        answer.await.unwrap();
        assert_eq!(cache.stats().hits, hits + 1, "{number}");
        assert!(called.elapsed() <= ms(idle.max(1_000) + 50), "{number} after {:?}", called.elapsed());
    }
}

/// Two layers act as two processes, and share the quota.
#[tokio::test(start_paused = true)]
async fn wait_queues_of_one_store_share_its_quota() {
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
    for (position, (_, after)) in served.iter().enumerate() {
        assert!(*after >= 100 * position as u128, "{served:?}");
    }
    assert!(served[19].1 < 2_000, "{served:?}");
}

/// A service that counts each call under the policy of `layer` for all customers together, and under `each` for its customer.
fn shared<B>(calls: &Calls, layer: RateLimitLayer<B>, each: Policy) -> BoxCloneService<Call, (), BoxError>
where
    B: RateLimitStore + Clone + Send + Sync + 'static,
{
    let (start, served) = (calls.start, Arc::clone(&calls.served));
    let inner = service_fn(move |(_, number): Call| {
        served.lock().unwrap().push((number, start.elapsed().as_millis()));
        ready(Ok::<_, BoxError>(()))
    });
    let layer = layer.and(each, |(customer, _): &Call| *customer);
    BoxCloneService::new(layer.responder(ErrorResponder).layer(inner))
}

/// Regression: all calls of a layer shared one queue. Calls waited behind others for limits that did not apply to them, and were rejected
/// with the waits of those limits.
#[tokio::test(start_paused = true)]
async fn waiting_customer_holds_up_no_other() {
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
    // A customer gets the wait of its own limit.
    Limiter::new(backend, each).block(INITECH, Duration::from_secs(300)).await.unwrap();
    let refused = rejection(service.clone().oneshot((INITECH, 20)).await).unwrap();
    assert!(refused > Duration::from_secs(299), "{refused:?}");
    let mut refused = Vec::new();
    while let Some(outcome) = waiting.join_next().await {
        refused.extend(rejection(outcome.unwrap()));
    }
    assert!(matches!(refused[..], [wait] if wait <= Duration::from_secs(1)), "{refused:?}");
    assert_eq!(calls.served().iter().map(|(number, _)| *number).collect::<Vec<_>>(), [0, 10, 1, 2]);
}

#[tokio::test(start_paused = true)]
async fn customers_waiting_for_one_limit_keep_their_order() {
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
    // New calls do not overtake the waiters, even if there is room that the waiters have not noticed.
    let waiting = tokio::spawn(service.clone().oneshot((ACME, 30)));
    sleep(ms(50)).await;
    Limiter::new(store.clone(), policy()).reset(Key::GLOBAL).await.unwrap();
    service.oneshot((GLOBEX, 31)).await.unwrap();
    waiting.await.unwrap().unwrap();
    assert_eq!(calls.served().iter().map(|(number, _)| *number).collect::<Vec<_>>(), (0..32).collect::<Vec<_>>());
    let asked = store.faults().calls(Verb::CheckAll);
    assert!(asked <= 3 * 30, "{asked} store calls for 30 calls");
}

/// When the turn of a waiter comes in one queue, it joins the queue of the other limit before it calls the store.
#[tokio::test(start_paused = true)]
async fn waiters_for_two_limits_keep_their_order_in_both() {
    let calls = Calls::new();
    let each = Policy::new("each", Quota::per_second(2).burst(1).unwrap().token_bucket());
    let service =
        shared(&calls, RateLimitLayer::new(MemoryBackend::new(), policy()).wait(Duration::from_secs(10)), each);
    let mut waiting = JoinSet::new();
    for number in 0..30 {
        // ACME makes a third of the calls.
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
    // Both limits are used fully. A customer that waits for its own limit holds up no other.
    assert!(others[19].1 <= 2_700, "{served:?}");
    assert!((4_500..5_000).contains(&acme[9].1), "{served:?}");
}

#[tokio::test(start_paused = true)]
async fn free_call_does_not_wait() {
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
        let start = Instant::now();
        service.clone().oneshot(0).await.unwrap();
        assert_eq!(start.elapsed(), Duration::ZERO);
        assert!(!waiting.is_finished());
        assert!(service.oneshot(1).await.unwrap_err().is::<RateLimited>(), "there is already one waiter");
        waiting.await.unwrap().unwrap();
    }
}
