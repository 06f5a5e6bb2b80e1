//! A steady load, with a record of each call.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio::time::sleep;

/// One call: when it began, how long it took, and what came of it.
#[derive(Debug)]
pub struct Call<T> {
    pub begun: Instant,
    pub took: Duration,
    pub outcome: T,
}

impl<T> Call<T> {
    pub fn ended(&self) -> Instant {
        self.begun + self.took
    }
}

/// Callers that ask one call after the other until they are told to stop.
#[derive(Debug)]
pub struct Load<T> {
    stop: Arc<AtomicBool>,
    callers: JoinSet<Vec<Call<T>>>,
}

impl<T: Send + 'static> Load<T> {
    /// Each of `callers` asks, and `pause` says from the outcome how long it waits before it asks again.
    pub fn start<F>(callers: u32, pause: fn(&T) -> Duration, ask: impl Fn(u32) -> F + Clone + Send + 'static) -> Self
    where
        F: Future<Output = T> + Send,
    {
        let stop = Arc::new(AtomicBool::new(false));
        let mut set = JoinSet::new();
        for caller in 0..callers {
            let (stop, ask) = (Arc::clone(&stop), ask.clone());
            set.spawn(async move {
                let mut calls = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    let begun = Instant::now();
                    let outcome = ask(caller).await;
                    let took = begun.elapsed();
                    let pause = pause(&outcome);
                    calls.push(Call { begun, took, outcome });
                    if !pause.is_zero() {
                        sleep(pause).await;
                    }
                }
                calls
            });
        }
        Self { stop, callers: set }
    }

    /// All calls, once the last of them is over.
    pub async fn stop(self) -> Vec<Call<T>> {
        self.stop.store(true, Ordering::Relaxed);
        self.callers.join_all().await.into_iter().flatten().collect()
    }
}
