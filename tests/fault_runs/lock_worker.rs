//! A process that takes locks, and changes under them what refuses a smaller fence than it has seen. It may be told to stand still under a
//! lock, and be stopped or killed there.
//!
//! Prints a line for each of its stays under a lock, and a last one when it has given back everything. The times are those of one clock for all
//! processes.

use std::env;
use std::io::{self, Write};
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use redis::Script;
use redis::aio::MultiplexedConnection;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tollgate::backend::AnyBackend;
use tollgate::lock::{MultiLease, RwLocks, Semaphore};
use tollgate::{Lease, LockError, Locks};

use super::run::open_sockets;
use super::support::locks::{DropAt, GUARDED};
use super::support::windows::now_us;
use super::support::worker::{Worker, end_at_panics};

/// How long a lease lasts. It is renewed after a third of that.
pub const TTL: Duration = Duration::from_millis(500);
pub const KEYS: [&str; 2] = ["a", "b"];
/// Of a semaphore.
const PERMITS: u32 = 2;
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
    /// Half of the stays read together, half of them write alone.
    ReadWrite,
    /// Two at a time.
    Semaphore,
    /// All keys together.
    All,
}

impl Mode {
    const KNOWN: [Self; 5] = [Self::Plain, Self::Fair, Self::ReadWrite, Self::Semaphore, Self::All];

    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Fair => "fair",
            Self::ReadWrite => "read/write",
            Self::Semaphore => "semaphore of 2",
            Self::All => "both at once",
        }
    }

    /// How many who do not read may have a lock at the same time.
    pub fn permits(self) -> usize {
        if self == Self::Semaphore { PERMITS as usize } else { 1 }
    }
}

/// One stay under a lock, in microseconds: from when the lease was there until it was last known to be ours.
#[derive(Clone, Copy, Debug)]
pub struct HoldRecord {
    pub key: usize,
    pub fence: u64,
    pub from: u64,
    pub until: u64,
    /// Whether the lease was lost before it could be given back.
    pub is_lost: bool,
    /// Whether it was shared with other readers.
    pub is_shared: bool,
}

/// What a worker has to say.
#[derive(Clone, Copy, Debug)]
pub enum Line {
    HoldRecord(HoldRecord),
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
            [key, fence, from, until, is_lost, is_shared] => {
                let (key, is_lost, is_shared) = (key as usize, is_lost == 1, is_shared == 1);
                Some(Self::HoldRecord(HoldRecord { key, fence, from, until, is_lost, is_shared }))
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
    let mode = Mode::KNOWN.into_iter().find(|known| format!("{known:?}") == mode).expect("the mode is known");
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
    let locks = Source::new(mode, backend);
    let client = redis::Client::open(witness).expect("the URL is well-formed");
    let guarded = client.get_multiplexed_async_connection().await.expect("the witness lets us in");
    let guarded = Guarded::new(guarded);
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        tasks.spawn(stay(mode, locks.clone(), guarded.clone(), Arc::clone(&orders), task));
    }
    while !orders.stop.load(Ordering::Relaxed) {
        sleep(Duration::from_millis(10)).await;
    }
    locks.shutdown().await;
    while let Some(end) = tasks.join_next().await {
        end.expect("no task panics");
    }
}

/// Where leases come from.
#[derive(Clone, Debug)]
enum Source {
    Locks(Locks),
    ReadWrite(RwLocks),
    Semaphore(Semaphore),
    All(Locks),
}

impl Source {
    fn new(mode: Mode, backend: AnyBackend) -> Self {
        let wait = Duration::from_secs(60);
        match mode {
            Mode::Plain => Self::Locks(Locks::new(backend, "default").ttl(TTL).wait(wait)),
            Mode::Fair => Self::Locks(Locks::new(backend, "default").ttl(TTL).wait(wait).fair()),
            Mode::ReadWrite => Self::ReadWrite(RwLocks::new(backend, "rw_locks").ttl(TTL).wait(wait)),
            Mode::Semaphore => Self::Semaphore(Semaphore::new(backend, "semaphores", PERMITS).ttl(TTL).wait(wait)),
            Mode::All => Self::All(Locks::new(backend, "default").ttl(TTL).wait(wait)),
        }
    }

    async fn take(&self, key: &'static str, reads: bool) -> Result<Held, LockError> {
        match self {
            Self::Locks(locks) => locks.lock(key).await.map(Held::One),
            Self::ReadWrite(locks) if reads => locks.read(key).await.map(Held::One),
            Self::ReadWrite(locks) => locks.write(key).await.map(Held::One),
            Self::Semaphore(semaphore) => semaphore.acquire(key).await.map(Held::One),
            Self::All(locks) => locks.lock_all(KEYS).await.map(Held::All),
        }
    }

    async fn shutdown(&self) {
        match self {
            Self::Locks(locks) | Self::All(locks) => locks.shutdown().await,
            Self::ReadWrite(locks) => locks.shutdown().await,
            Self::Semaphore(semaphore) => semaphore.shutdown().await,
        }
    }
}

/// What somebody has for a stay.
#[derive(Debug)]
enum Held {
    One(Lease),
    All(MultiLease),
}

impl Held {
    fn leases(&self) -> &[Lease] {
        match self {
            Self::One(lease) => slice::from_ref(lease),
            Self::All(leases) => leases.leases(),
        }
    }

    fn is_held(&self) -> bool {
        match self {
            Self::One(lease) => lease.check().is_ok(),
            Self::All(leases) => leases.check().is_ok(),
        }
    }

    async fn release(self) {
        // What counts is what the store has.
        match self {
            Self::One(lease) => drop(lease.release().await),
            Self::All(leases) => drop(leases.release().await),
        }
    }
}

/// What a lock protects: read and changed by whoever has no smaller fence than it has seen.
#[derive(Clone, Debug)]
struct Guarded {
    connection: MultiplexedConnection,
    change: Arc<Script>,
    look: Arc<Script>,
}

impl Guarded {
    fn new(connection: MultiplexedConnection) -> Self {
        Self { connection, change: Arc::new(Script::new(GUARDED)), look: Arc::new(Script::new(SEEN)) }
    }

    /// What is there, or -1 if it cannot be told.
    async fn read(&mut self, lease: &Lease, reads: bool) -> i64 {
        let script = if reads { &self.look } else { &self.change };
        let key = lease.lock().key().as_str();
        script.key(key).arg(lease.fence()).arg("").invoke_async(&mut self.connection).await.unwrap_or(-1)
    }

    async fn write(&mut self, lease: &Lease, value: i64) {
        let key = lease.lock().key().as_str();
        let mut write = self.change.key(key);
        write.arg(lease.fence()).arg(value);
        // What counts is what the witness has.
        let _ = write.invoke_async::<i64>(&mut self.connection).await;
    }
}

/// Readers come in any order, so none is refused; but a writer with a smaller fence is after it.
const SEEN: &str = r"
if tonumber(ARGV[1]) > tonumber(redis.call('HGET', KEYS[1], 'fence') or 0) then
  redis.call('HSET', KEYS[1], 'fence', ARGV[1])
end
return tonumber(redis.call('HGET', KEYS[1], 'value') or 0)";

async fn stay(mode: Mode, locks: Source, mut guarded: Guarded, orders: Arc<Orders>, task: u64) {
    let key = KEYS[task as usize % KEYS.len()];
    let mut turn = u64::from(std::process::id()) + task;
    while !orders.stop.load(Ordering::Relaxed) {
        turn += 1;
        let reads = mode == Mode::ReadWrite && (turn / 4).is_multiple_of(2);
        let Ok(held) = locks.take(key, reads).await else {
            // It was shut down, or waited in vain.
            sleep(Duration::from_millis(5)).await;
            continue;
        };
        let from = now_us();
        let mut until = 0;
        let mut check = |held: &Held| {
            // Whoever is told that the lock is theirs after this instant may have relied on it then.
            let now = now_us();
            let is_held = held.is_held();
            if is_held {
                until = now;
            }
            is_held
        };
        if check(&held) {
            let mut values = Vec::new();
            for lease in held.leases() {
                values.push(guarded.read(lease, reads).await);
            }
            // Some stay for longer than a lease lasts, and live on renewals.
            let is_long = turn.is_multiple_of(64) || orders.stay.swap(false, Ordering::Relaxed);
            let stays = if is_long { TTL * 3 / 2 } else { Duration::from_millis(turn % 5) };
            let ends = Instant::now() + stays;
            while check(&held) && Instant::now() < ends {
                sleep(Duration::from_millis(1)).await;
            }
            let stood_still = check(&held) && !reads && orders.hold.swap(false, Ordering::Relaxed);
            if stood_still {
                orders.stand_still();
            }
            // And one that does not look again before it writes: all that is left is the fence. With several at a time that says nothing.
            if (check(&held) || stood_still) && !reads && mode.permits() == 1 {
                for (lease, value) in held.leases().iter().zip(values).filter(|(_, value)| *value >= 0) {
                    guarded.write(lease, value + 1).await;
                }
            }
            check(&held);
        }
        for lease in held.leases() {
            let is_lost = lease.check().is_err();
            // Whoever was stopped as soon as it had the lock was never told that it has it.
            if until > 0 || is_lost {
                let key = KEYS.iter().position(|key| *key == lease.lock().key().as_str()).expect("it is one of ours");
                let (is_lost, reads) = (u8::from(is_lost), u8::from(reads));
                let mut out = io::stdout().lock();
                writeln!(out, "{key} {} {from} {until} {is_lost} {reads}", lease.fence())
                    .and_then(|()| out.flush())
                    .expect("somebody listens");
            }
        }
        match turn % 3 {
            0 => drop(held),
            1 => held.release().await,
            // Dropped on the way.
            _ => drop(DropAt::new(1, held.release()).await),
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
