//! When this machine ran nobody: without that, a neighbour who takes the processor is told from a decision that is late.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// From when to when.
pub type Stall = (Instant, Instant);

/// A thread that sleeps for a moment and is woken late when there is no processor for it.
#[derive(Debug)]
pub struct StallMeter {
    stop: Arc<AtomicBool>,
    stalls: Arc<Mutex<Vec<Stall>>>,
    thread: Option<JoinHandle<()>>,
}

impl StallMeter {
    const NAP: Duration = Duration::from_millis(2);

    /// Notes what is longer than `threshold`.
    pub fn start(threshold: Duration) -> Self {
        let (stop, stalls) = (Arc::new(AtomicBool::new(false)), Arc::<Mutex<Vec<Stall>>>::default());
        let (stopped, noted) = (Arc::clone(&stop), Arc::clone(&stalls));
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                let asleep = Instant::now();
                thread::sleep(Self::NAP);
                let awake = Instant::now();
                if awake - asleep > Self::NAP + threshold {
                    noted.lock().expect("nobody panics").push((asleep, awake));
                }
            }
        });
        Self { stop, stalls, thread: Some(thread) }
    }

    /// All that were noted.
    pub fn stop(mut self) -> Vec<Stall> {
        self.end();
        std::mem::take(&mut *self.stalls.lock().expect("nobody panics"))
    }

    fn end(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for StallMeter {
    fn drop(&mut self) {
        self.end();
    }
}
