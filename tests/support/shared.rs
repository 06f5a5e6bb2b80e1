//! What is too slow to start to be started for each test.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use tokio::task::block_in_place;
use tollgate::{RedisBackend, RedisOptions};

/// A backend with keys of its own.
pub async fn connect(url: &str) -> RedisBackend {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let prefix = format!("t{}", NUMBER.fetch_add(1, Ordering::Relaxed));
    let backend = RedisOptions::from_url(url).expect("a URL").prefix(prefix).connect().await;
    backend.expect("the deployment lets us in")
}

/// A deployment for all tests that run at the same time, since it takes seconds to start. Stops with the last of them.
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
