//! Deployments that take too long to start for each test.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::task::block_in_place;
use tollgate::{RedisBackend, RedisOptions};

/// A [patient] backend with a key prefix of its own.
pub async fn connect(url: &str) -> RedisBackend {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let prefix = format!("t{}", NUMBER.fetch_add(1, Ordering::Relaxed));
    patient_options(url).prefix(prefix).connect().await.expect("the deployment accepts connections")
}

/// A backend that tolerates the delays of a busy machine. Not for servers that have to time out quickly.
pub async fn patient(url: impl AsRef<str>) -> RedisBackend {
    patient_options(url.as_ref()).connect().await.expect("the deployment accepts connections")
}

fn patient_options(url: &str) -> RedisOptions {
    let timeout = Duration::from_secs(10);
    RedisOptions::from_url(url).expect("a URL").connect_timeout(timeout).response_timeout(timeout)
}

/// A deployment for all tests that run at the same time, since it takes seconds to start. It stops with the last test.
pub struct Shared<T>(Mutex<Weak<T>>);

impl<T> Shared<T> {
    pub const fn new() -> Self {
        Self(Mutex::new(Weak::new()))
    }

    pub fn get(&self, start: impl FnOnce() -> T) -> Arc<T> {
        block_in_place(|| {
            let mut shared = self.0.lock().expect("a deployment starts");
            shared.upgrade().unwrap_or_else(|| {
                let started = Arc::new(start());
                *shared = Arc::downgrade(&started);
                started
            })
        })
    }
}
