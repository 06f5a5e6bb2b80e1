//! A process that takes locks, and changes under them what refuses a smaller fence than it has seen. It may be told to stand still under a
//! lock, and be stopped or killed there.
//!
//! Prints a line for each of its stays under a lock, and a last one when it has given back everything. The times are those of one clock for all
//! processes.

use std::env;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use redis::Script;
use redis::aio::MultiplexedConnection;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tollgate::{Lease, Locks};

use super::run::open_sockets;
use super::support::locks::{DropAt, GUARDED};
use super::support::windows::now_us;
use super::support::worker::{Worker, end_at_panics};

/// How long a lease lasts. It is renewed after a third of that.
pub const TTL: Duration = Duration::from_millis(500);
pub const KEYS: [&str; 2] = ["a", "b"];
/// In each process, half of them for each key.
const TASKS: u64 = 4;
/// How long a worker may take until it has a lock, and stands still under it.
const PATIENCE: Duration = Duration::from_secs(10);
/// What the harness says to a worker, and what the worker answers to the first.
const HOLD: &str = "hold";
const GO_ON: &str = "go on";
const STAY: &str = "stay";
const HELD: &str = "held";
/// Tells the program that it is a worker: the mode, the URL of the deployment, and that of the server that is changed under the locks.
const WORKER: &str = "TOLLGATE_FAULTS_LOCK_WORKER";

/// How the locks are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Plain,
    Fair,
}

impl Mode {
    const ALL: [Self; 2] = [Self::Plain, Self::Fair];

    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Fair => "fair",
        }
    }
}

/// One stay under a lock, in microseconds: from when the lease was there until it was last known to be ours.
#[derive(Clone, Copy, Debug)]
pub struct Stay {
    pub key: usize,
    pub fence: u64,
    pub from: u64,
    pub until: u64,
    /// Whether the lease was lost before it could be given back.
    pub is_lost: bool,
}

/// What a worker has to say.
#[derive(Clone, Copy, Debug)]
pub enum Line {
    Stay(Stay),
    /// Everything was given back, and so many tasks and sockets were left.
    End {
        tasks: u64,
        sockets: u64,
    },
}

impl Line {
    fn read(line: &str) -> Option<Self> {
        let numbers: Vec<u64> = line.split(' ').map_while(|number| number.parse().ok()).collect();
        match numbers[..] {
            [key, fence, from, until, is_lost] => {
                Some(Self::Stay(Stay { key: key as usize, fence, from, until, is_lost: is_lost == 1 }))
            }
            [tasks, sockets] => Some(Self::End { tasks, sockets }),
            _ => None,
        }
    }
}

/// Does the work if this process is a worker.
pub fn work_if_asked() -> bool {
    let Ok(told) = env::var(WORKER) else { return false };
    end_at_panics();
    let [mode, url, witness] = told.splitn(3, ' ').collect::<Vec<_>>()[..] else { panic!("told too little: {told}") };
    let mode = Mode::ALL.into_iter().find(|known| format!("{known:?}") == mode).expect("the mode is known");
    // One thread, so that it can be blocked as a whole.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime can be made");
    let sockets = open_sockets();
    runtime.block_on(work(mode, url, witness));
    let left = || (runtime.metrics().num_alive_tasks(), open_sockets().saturating_sub(sockets));
    let begun = Instant::now();
    while left() != (0, 0) && begun.elapsed() < Duration::from_secs(3) {
        runtime.block_on(async { sleep(Duration::from_millis(10)).await });
    }
    let (tasks, sockets) = left();
    println!("{tasks} {sockets}");
    true
}

/// What the harness has said.
#[derive(Debug, Default)]
struct Orders {
    stop: AtomicBool,
    hold: AtomicBool,
    stay: AtomicBool,
    may_go_on: Mutex<bool>,
    goes_on: Condvar,
}

impl Orders {
    fn hear(&self, order: &str) {
        match order {
            HOLD => self.hold.store(true, Ordering::Relaxed),
            STAY => self.stay.store(true, Ordering::Relaxed),
            GO_ON => {
                *self.may_go_on.lock().expect("nobody panics") = true;
                self.goes_on.notify_all();
            }
            order => panic!("nobody knows how to {order}"),
        }
    }

    /// Stands still with the whole runtime, so that no timer fires and nothing is renewed, until it is told to go on.
    fn stand_still(&self) {
        let mut out = io::stdout().lock();
        writeln!(out, "{HELD}").and_then(|()| out.flush()).expect("somebody listens");
        let may_go_on = self.may_go_on.lock().expect("nobody panics");
        let may_go_on = self.goes_on.wait_while(may_go_on, |may_go_on| !*may_go_on);
        *may_go_on.expect("nobody panics") = false;
    }
}

async fn work(mode: Mode, url: &str, witness: &str) {
    let orders = Arc::new(Orders::default());
    let heard = Arc::clone(&orders);
    thread::spawn(move || {
        for line in io::stdin().lines().map_while(Result::ok) {
            heard.hear(&line);
        }
        heard.stop.store(true, Ordering::Relaxed);
    });
    let backend = tollgate::connect(url).await.expect("the deployment lets us in");
    let locks = Locks::new(backend).ttl(TTL).wait(Duration::from_secs(60));
    let locks = if mode == Mode::Fair { locks.fair() } else { locks };
    let client = redis::Client::open(witness).expect("the URL is well-formed");
    let guarded = client.get_multiplexed_async_connection().await.expect("the witness lets us in");
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        tasks.spawn(stay(locks.clone(), guarded.clone(), Arc::clone(&orders), task));
    }
    while !orders.stop.load(Ordering::Relaxed) {
        sleep(Duration::from_millis(10)).await;
    }
    locks.shutdown().await;
    while let Some(end) = tasks.join_next().await {
        end.expect("no task panics");
    }
}

async fn stay(locks: Locks, mut guarded: MultiplexedConnection, orders: Arc<Orders>, task: u64) {
    let key = task as usize % KEYS.len();
    let script = Script::new(GUARDED);
    let mut turn = u64::from(std::process::id()) + task;
    while !orders.stop.load(Ordering::Relaxed) {
        turn += 1;
        let Ok(lease) = locks.lock(KEYS[key]).await else {
            // It was shut down, or waited in vain.
            sleep(Duration::from_millis(5)).await;
            continue;
        };
        let from = now_us();
        let mut until = 0;
        let mut check = |lease: &Lease| {
            // Whoever is told that the lock is theirs after this instant may have relied on it then.
            let now = now_us();
            let is_held = lease.check().is_ok();
            if is_held {
                until = now;
            }
            is_held
        };
        if check(&lease) {
            let read: i64 =
                script.key(KEYS[key]).arg(lease.fence()).arg("").invoke_async(&mut guarded).await.unwrap_or(-1);
            // Some stay for longer than a lease lasts, and live on renewals.
            let is_long = turn.is_multiple_of(64) || orders.stay.swap(false, Ordering::Relaxed);
            let stays = if is_long { TTL * 3 / 2 } else { Duration::from_millis(turn % 5) };
            let ends = Instant::now() + stays;
            while check(&lease) && Instant::now() < ends {
                sleep(Duration::from_millis(1)).await;
            }
            let stood_still = check(&lease) && orders.hold.swap(false, Ordering::Relaxed);
            if stood_still {
                orders.stand_still();
            }
            // And one that does not look again before it writes: all that is left is the fence.
            if (check(&lease) || stood_still) && read >= 0 {
                let mut write = script.key(KEYS[key]);
                write.arg(lease.fence()).arg(read + 1);
                // What counts is what the witness has.
                let _ = write.invoke_async::<i64>(&mut guarded).await;
            }
            check(&lease);
        }
        let is_lost = lease.check().is_err();
        // Whoever was stopped as soon as it had the lock was never told that it has it.
        if until > 0 || is_lost {
            let mut out = io::stdout().lock();
            let line = format!("{key} {} {from} {until} {}", lease.fence(), u8::from(is_lost));
            writeln!(out, "{line}").and_then(|()| out.flush()).expect("somebody listens");
        }
        match turn % 3 {
            0 => drop(lease),
            1 => drop(lease.release().await),
            // Dropped on the way.
            _ => drop(DropAt::new(1, lease.release()).await),
        }
        // Others have a chance as well.
        sleep(Duration::from_millis(1)).await;
    }
}

/// A worker, and what it answers.
#[derive(Debug)]
pub struct LockWorker {
    pub process: Worker,
    held: mpsc::Receiver<()>,
}

impl LockWorker {
    /// Starts it. It is told to stop to give back everything and end.
    pub fn start(mode: Mode, url: &str, witness: &str, lines: mpsc::Sender<Line>) -> Self {
        let (sender, held) = mpsc::channel();
        let process = Worker::start(WORKER, &format!("{mode:?} {url} {witness}"), lines, move |line| {
            if line == HELD {
                // Nobody waits for what comes too late.
                let _ = sender.send(());
            }
            Line::read(&line)
        });
        Self { process, held }
    }

    /// Has it stand still under the next lock that it has, and waits until it does.
    pub fn hold(&mut self) {
        self.process.order(HOLD);
        self.held.recv_timeout(PATIENCE).expect("the worker stands still under a lock");
    }

    /// Lets it go on after that. It writes then without another look at its lease.
    pub fn go_on(&mut self) {
        self.process.order(GO_ON);
    }

    /// Has it stay under its next lock for longer than a lease lasts.
    pub fn stay(&mut self) {
        self.process.order(STAY);
    }
}
