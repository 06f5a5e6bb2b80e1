//! Measures how long this program and its servers were ready to run but had no processor, because other processes used it. Such a wait
//! delays a decision without being its fault.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How often the meter samples.
const TICK: Duration = Duration::from_millis(20);
/// Servers come and go, so the meter searches for them every so many ticks.
const SEARCH: u32 = 20;

/// A period without a processor.
#[derive(Clone, Copy, Debug)]
struct Wait {
    from: Instant,
    to: Instant,
    length: Duration,
}

/// All periods without a processor, as far as the system reports them, which Linux does.
#[derive(Debug, Default)]
pub struct Waits(Vec<Wait>);

impl Waits {
    /// An upper bound of the time without a processor between two instants.
    pub fn between(&self, since: Instant, ended: Instant) -> Duration {
        let overlap = |wait: &Wait| {
            let (from, to) = (wait.from.max(since), wait.to.min(ended));
            wait.length.min(to.saturating_duration_since(from))
        };
        self.0.iter().map(overlap).sum()
    }

    pub fn longest(&self) -> Duration {
        self.0.iter().map(|wait| wait.length).max().unwrap_or_default()
    }
}

/// A thread that records the periods without a processor.
#[derive(Debug)]
pub struct ProcessorMeter {
    stop: Arc<AtomicBool>,
    waits: Arc<Mutex<Vec<Wait>>>,
    thread: Option<JoinHandle<()>>,
}

impl ProcessorMeter {
    pub fn start() -> Self {
        let (stop, waits) = (Arc::new(AtomicBool::new(false)), Arc::<Mutex<Vec<Wait>>>::default());
        let (stopped, noted) = (Arc::clone(&stop), Arc::clone(&waits));
        let thread = thread::spawn(move || {
            let mut servers = Vec::new();
            let mut before = HashMap::new();
            let mut asked = Instant::now();
            for tick in 0_u32.. {
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                if tick % SEARCH == 0 {
                    servers = children();
                }
                // One thread of this program and one server make a decision.
                let own = longest(&mut before, &folders(Path::new("/proc/self/task")));
                let length = own + longest(&mut before, &servers);
                let now = Instant::now();
                // If the whole machine stands still, no thread waits for a processor, but `sleep` takes longer.
                let length = length.max((now - asked).saturating_sub(2 * TICK));
                if !length.is_zero() && tick > 0 {
                    let from = asked.checked_sub(length).unwrap_or(asked);
                    noted.lock().expect("not poisoned").push(Wait { from, to: now, length });
                }
                asked = now;
                thread::sleep(TICK);
            }
        });
        Self { stop, waits, thread: Some(thread) }
    }

    pub fn stop(mut self) -> Waits {
        self.end();
        Waits(std::mem::take(&mut *self.waits.lock().expect("not poisoned")))
    }

    fn end(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for ProcessorMeter {
    fn drop(&mut self) {
        self.end();
    }
}

/// The longest wait of any of these tasks since the previous sample.
fn longest(before: &mut HashMap<PathBuf, u64>, of: &[PathBuf]) -> Duration {
    let mut longest = 0;
    for folder in of {
        // Nanoseconds on a processor, and nanoseconds of waiting for one.
        let Ok(text) = fs::read_to_string(folder.join("schedstat")) else { continue };
        let Some(waited) = text.split(' ').nth(1).and_then(|waited| waited.parse().ok()) else { continue };
        let known = before.insert(folder.clone(), waited).unwrap_or(waited);
        longest = longest.max(waited.saturating_sub(known));
    }
    Duration::from_nanos(longest)
}

/// The child processes of this process.
fn children() -> Vec<PathBuf> {
    let own = std::process::id().to_string();
    let mut processes = folders(Path::new("/proc"));
    // `pid (name) state parent ...`
    processes.retain(|process| {
        let stat = fs::read_to_string(process.join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)) == Some(&own)
    });
    processes
}

fn folders(parent: &Path) -> Vec<PathBuf> {
    fs::read_dir(parent).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())).collect()
}
