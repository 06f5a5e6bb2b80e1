//! Decisions in the memory of one process, without a store: a token bucket for each of 10,000 client names.

use std::future::ready;
use std::num::NonZeroU32;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use governor::{DefaultKeyedRateLimiter, RateLimiter};
use tollgate::{Key, Limiter, MemoryBackend, Policy, Quota};

use crate::Run;
use crate::bench::{Contender, Figures, figures, scatter, take_turns};
use crate::report::{Rank, Table};

const KEYS: u64 = 10_000;
/// Calls that are timed together, because reading the clock takes about as long as one call.
const BATCH: u32 = 1_000;
const GENEROUS: u32 = 1_000_000_000;

/// Decides about batches of calls.
trait Decide: Send + Sync {
    /// How many calls of a batch are allowed.
    fn admitted(&self, thread: u32, batch: u64) -> u32;
}

struct Ours<N, F>(Vec<N>, F);

impl<N: Send + Sync, F: AsyncFn(&N) -> bool + Send + Sync> Decide for Ours<N, F> {
    fn admitted(&self, thread: u32, batch: u64) -> u32 {
        now(async {
            let mut admitted = 0;
            for turn in 0..BATCH {
                admitted += u32::from(self.1(&self.0[at(thread, batch, turn, self.0.len())]).await);
            }
            admitted
        })
    }
}

struct Governor(DefaultKeyedRateLimiter<String>, Vec<String>);

impl Decide for Governor {
    fn admitted(&self, thread: u32, batch: u64) -> u32 {
        (0..BATCH).map(|turn| u32::from(self.0.check_key(&self.1[at(thread, batch, turn, self.1.len())]).is_ok())).sum()
    }
}

fn at(thread: u32, batch: u64, turn: u32, keys: usize) -> usize {
    scatter(thread, batch * u64::from(BATCH) + u64::from(turn)) as usize % keys
}

/// Polls a call once. The memory backend never waits.
pub fn now<T>(call: impl Future<Output = T>) -> T {
    match pin!(call).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(answer) => answer,
        Poll::Pending => panic!("the memory backend did not answer at once"),
    }
}

/// All buckets refill `burst` in a day, so none refills during a trial with a `burst` below a thousand.
fn deciders(keys: u64, burst: u32) -> [(&'static str, Arc<dyn Decide>); 4] {
    let names = || (0..keys).map(|key| format!("client-{key}"));
    let bucket = Quota::per_day(burst.into()).token_bucket();
    let limiter = || Limiter::new(MemoryBackend::new(), Policy::new("memory", bucket));
    let (yes_or_no, told, prepared) = (limiter(), limiter(), limiter());
    let yes_or_no = async move |name: &String| yes_or_no.try_acquire(name).await.expect("memory does not fail");
    let told = async move |name: &String| told.check(name).await.expect("memory does not fail").is_allowed();
    let prepared = async move |key: &Key| prepared.try_acquire(*key).await.expect("memory does not fail");
    let quota = governor::Quota::with_period(Duration::from_secs(86_400) / burst).expect("the period is above zero");
    let quota = quota.allow_burst(NonZeroU32::new(burst).expect("above zero"));
    [
        ("tollgate", Arc::new(Ours(names().collect(), yes_or_no))),
        ("tollgate-decisions", Arc::new(Ours(names().collect(), told))),
        ("tollgate-prepared", Arc::new(Ours(names().map(Key::from).collect(), prepared))),
        ("governor", Arc::new(Governor(RateLimiter::keyed(quota), names().collect()))),
    ]
}

fn decide(decider: &Arc<dyn Decide>, threads: u32, time: Duration) -> Figures {
    let begun = Instant::now();
    let running: Vec<_> = (0..threads)
        .map(|number| {
            let decider = Arc::clone(decider);
            thread::spawn(move || {
                let mut took = Vec::new();
                while begun.elapsed() < time {
                    let called = Instant::now();
                    assert_eq!(decider.admitted(number, took.len() as u64), BATCH, "the quota is out of reach");
                    took.push(called.elapsed());
                }
                took
            })
        })
        .collect();
    let took: Vec<_> = running.into_iter().flat_map(|thread| thread.join().expect("no call fails")).collect();
    let batches = figures(begun.elapsed(), took.into_iter());
    let (calls, share) = (f64::from(BATCH), 1.0 / f64::from(BATCH));
    Figures { per_s: batches.per_s * calls, p50_us: batches.p50_us * share, p99_us: batches.p99_us * share, ..batches }
}

/// How many calls beyond the quota are allowed when two threads request all of it each.
fn over_admitted(decider: &Arc<dyn Decide>, burst: u32) -> i64 {
    let threads: Vec<_> = (0..2)
        .map(|_| {
            let decider = Arc::clone(decider);
            thread::spawn(move || (0..u64::from(burst)).map(|batch| i64::from(decider.admitted(0, batch))).sum::<i64>())
        })
        .collect();
    let admitted: i64 = threads.into_iter().map(|thread| thread.join().expect("no call fails")).sum();
    // The calls exhaust the quota of each of the ten keys.
    admitted - i64::from(burst) * 10
}

pub async fn table(run: &mut Run) {
    const BURST: u32 = 100;
    let verdicts = deciders(10, BURST).map(|(who, decider)| {
        let over = over_admitted(&decider, BURST);
        println!("TRIAL table=memory who={who} over_admitted={over}");
        (over != 0).then(|| format!("not exact: {over:+} admissions of {}", BURST * 10))
    });
    let time = run.time / 2;
    let mut contenders: Vec<_> = deciders(KEYS, GENEROUS)
        .into_iter()
        .zip(verdicts)
        .map(|((who, decider), verdict)| {
            Contender::new(who, move |threads| Box::pin(ready(decide(&decider, threads, time)))).apart(verdict)
        })
        .collect();
    let points = [1, 2];
    let medians = take_turns(&mut contenders, &points, run.rounds, |_| None).await;
    run.report.add(Table {
        name: "memory",
        title: "Decisions in memory",
        text: "A token bucket for each of 10,000 client names, all calls allowed, by threads. `tollgate` and `governor` \
               only allow or deny; `tollgate-decisions` returns everything that the header fields of a response need. \
               All but `tollgate-prepared` get a `String` that exists before, from which ours make a `Key` in each \
               call. `tollgate-prepared` gets the `Key`. The time of a call is that of a thousand, divided.",
        unit: "threads",
        points: points.to_vec(),
        headline: 1,
        rank: Rank::Rate,
        lines: contenders.into_iter().map(|contender| (contender.who, contender.apart)).collect(),
        medians,
        ..Table::default()
    });
}
