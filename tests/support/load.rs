//! A steady load, with a record of each call.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio::time::sleep;

/// One call: its start, duration and outcome.
#[derive(Debug)]
pub struct Call<T> {
    pub since: Instant,
    pub took: Duration,
    pub outcome: T,
}

impl<T> Call<T> {
    pub fn ended(&self) -> Instant {
        self.since + self.took
    }
}

/// Callers that make one call after the other until [`stop`](Load::stop).
#[derive(Debug)]
pub struct Load<T> {
    stop: Arc<AtomicBool>,
    ended: Arc<AtomicUsize>,
    callers: JoinSet<Vec<Call<T>>>,
}

impl<T: Send + 'static> Load<T> {
    /// Starts `callers` callers. From the outcome of a call, `pause` determines the delay before the next call.
    pub fn start<F>(callers: u32, pause: fn(&T) -> Duration, ask: impl Fn(u32) -> F + Clone + Send + 'static) -> Self
    where
        F: Future<Output = T> + Send,
    {
        let (stop, ended) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let mut set = JoinSet::new();
        for caller in 0..callers {
            let (stop, ended, ask) = (Arc::clone(&stop), Arc::clone(&ended), ask.clone());
            set.spawn(async move {
                let mut calls = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    let since = Instant::now();
                    let outcome = ask(caller).await;
                    let took = since.elapsed();
                    let pause = pause(&outcome);
                    calls.push(Call { since, took, outcome });
                    ended.fetch_add(1, Ordering::Relaxed);
                    if !pause.is_zero() {
                        sleep(pause).await;
                    }
                }
                calls
            });
        }
        Self { stop, ended, callers: set }
    }

    /// Waits for `time`, and until `calls` further calls have started and ended.
    pub async fn goes_on(&self, time: Duration, calls: usize) {
        // Calls in flight have started before, so they do not count.
        let enough = self.ended.load(Ordering::Relaxed) + self.callers.len() + calls;
        let since = Instant::now();
        sleep(time).await;
        while self.ended.load(Ordering::Relaxed) < enough {
            assert!(since.elapsed() < Duration::from_secs(30), "too few calls complete");
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Stops the callers, and returns all calls when the last one has ended.
    pub async fn stop(self) -> Vec<Call<T>> {
        self.stop.store(true, Ordering::Relaxed);
        self.callers.join_all().await.into_iter().flatten().collect()
    }
}
