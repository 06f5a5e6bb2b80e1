//! A process that takes locks. Under a lock, it changes data that refuses a smaller fence than it has seen. The harness may block, stop or
//! kill the process under a lock.
//!
//! Prints a line for each of its stays under a lock, and a last line when everything is released. All processes use the same clock.

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

/// The duration of a lease. It is renewed after a third of this time.
pub const TTL: Duration = Duration::from_millis(500);
pub const KEYS: [&str; 2] = ["a", "b"];
/// The permits of the semaphore.
const PERMITS: u32 = 2;
/// The tasks of each process, half of them for each key.
const TASKS: u64 = 4;
/// How long a worker may take until it blocks under a lock.
const BLOCK_TIMEOUT: Duration = Duration::from_secs(10);
/// The orders to a worker, and its reply to the first.
const HOLD: &str = "hold";
const GO_ON: &str = "go on";
const STAY: &str = "stay";
const HELD: &str = "held";
/// Marks a worker process. Contains the mode, the URL of the deployment, and the URL of the server with the protected data.
const WORKER: &str = "TOLLGATE_FAULTS_LOCK_WORKER";

/// How the locks are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Plain,
    Fair,
    /// Half of the stays read together, half of them write exclusively.
    ReadWrite,
    /// Two holders at a time.
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

    /// Returns how many holders other than readers a lock may have at the same time.
    pub fn permits(self) -> usize {
        if self == Self::Semaphore { PERMITS as usize } else { 1 }
    }
}

/// One stay under a lock. In microseconds: when the lease was received, and when it was last known to be held.
#[derive(Clone, Copy, Debug)]
pub struct HoldRecord {
    pub key: usize,
    pub fence: u64,
    pub from: u64,
    pub until: u64,
    /// Whether the lease was lost before its release.
    pub is_lost: bool,
    /// Whether it was shared with other readers.
    pub is_shared: bool,
}

/// A line that a worker prints.
#[derive(Clone, Copy, Debug)]
pub enum Line {
    HoldRecord(HoldRecord),
    /// Everything was released, and this many tasks and sockets were left.
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

/// Runs the worker if this process is one, and returns whether it is.
pub fn work_if_asked() -> bool {
    let Ok(settings) = env::var(WORKER) else { return false };
    end_at_panics();
    let [mode, url, witness] = settings.splitn(3, ' ').collect::<Vec<_>>()[..] else {
        panic!("incomplete worker settings: {settings}")
    };
    let mode = Mode::KNOWN.into_iter().find(|known| format!("{known:?}") == mode).expect("the mode is known");
    // A single thread, so that the whole worker can be blocked.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime can be made");
    let sockets = open_sockets();
    runtime.block_on(work(mode, url, witness));
    let left = || (runtime.metrics().num_alive_tasks(), open_sockets().saturating_sub(sockets));
    let since = Instant::now();
    while left() != (0, 0) && since.elapsed() < Duration::from_secs(3) {
        runtime.block_on(async { sleep(Duration::from_millis(10)).await });
    }
    let (tasks, sockets) = left();
    println!("{tasks} {sockets}");
    true
}

/// The orders from the harness.
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
                *self.may_go_on.lock().expect("the mutex is not poisoned") = true;
                self.goes_on.notify_all();
            }
            order => panic!("unknown order: {order}"),
        }
    }

    /// Blocks the whole runtime until the order to go on, so that no timer fires and no lease is renewed.
    fn block_runtime(&self) {
        let mut out = io::stdout().lock();
        writeln!(out, "{HELD}").and_then(|()| out.flush()).expect("the harness reads the output");
        let may_go_on = self.may_go_on.lock().expect("the mutex is not poisoned");
        let may_go_on = self.goes_on.wait_while(may_go_on, |may_go_on| !*may_go_on);
        *may_go_on.expect("the mutex is not poisoned") = false;
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
    let backend = tollgate::connect(url).await.expect("the deployment accepts the connection");
    let locks = Source::new(mode, backend);
    let client = redis::Client::open(witness).expect("the URL is well-formed");
    let guarded = client.get_multiplexed_async_connection().await.expect("the witness accepts the connection");
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

/// The source of the leases.
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

/// The leases of one stay.
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
        // The result does not matter, since the store is checked.
        match self {
            Self::One(lease) => drop(lease.release().await),
            Self::All(leases) => drop(leases.release().await),
        }
    }
}

/// The data that a lock protects. A client with a smaller fence than the data has seen can neither read nor change it.
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

    /// Returns the value, or -1 if it could not be read.
    async fn read(&mut self, lease: &Lease, reads: bool) -> i64 {
        let script = if reads { &self.look } else { &self.change };
        let key = lease.lock().key().as_str();
        script.key(key).arg(lease.fence()).arg("").invoke_async(&mut self.connection).await.unwrap_or(-1)
    }

    async fn write(&mut self, lease: &Lease, value: i64) {
        let key = lease.lock().key().as_str();
        let mut write = self.change.key(key);
        write.arg(lease.fence()).arg(value);
        // The result does not matter, since the data on the witness is checked.
        let _ = write.invoke_async::<i64>(&mut self.connection).await;
    }
}

/// No reader is refused, since readers come in any order. A reader raises the fence, so a later write with a smaller fence is refused.
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
            // The locks were shut down, or the wait timed out.
            sleep(Duration::from_millis(5)).await;
            continue;
        };
        let from = now_us();
        let mut until = 0;
        let mut check = |held: &Held| {
            // If the check succeeds, a caller may have relied on the lock at this instant.
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
            // Some stays are longer than a lease, and depend on renewals.
            let is_long = turn.is_multiple_of(64) || orders.stay.swap(false, Ordering::Relaxed);
            let stays = if is_long { TTL * 3 / 2 } else { Duration::from_millis(turn % 5) };
            let ends = Instant::now() + stays;
            while check(&held) && Instant::now() < ends {
                sleep(Duration::from_millis(1)).await;
            }
            let was_blocked = check(&held) && !reads && orders.hold.swap(false, Ordering::Relaxed);
            if was_blocked {
                orders.block_runtime();
            }
            // A stay that was blocked writes without another check of its lease, so only the fence protects the data. With several permits,
            // the data proves nothing.
            if (check(&held) || was_blocked) && !reads && mode.permits() == 1 {
                for (lease, value) in held.leases().iter().zip(values).filter(|(_, value)| *value >= 0) {
                    guarded.write(lease, value + 1).await;
                }
            }
            check(&held);
        }
        for lease in held.leases() {
            let is_lost = lease.check().is_err();
            // A worker that was stopped right after the grant never learned of it.
            if until > 0 || is_lost {
                let key =
                    KEYS.iter().position(|key| *key == lease.lock().key().as_str()).expect("the key is in `KEYS`");
                let (is_lost, reads) = (u8::from(is_lost), u8::from(reads));
                let mut out = io::stdout().lock();
                writeln!(out, "{key} {} {from} {until} {is_lost} {reads}", lease.fence())
                    .and_then(|()| out.flush())
                    .expect("the harness reads the output");
            }
        }
        match turn % 3 {
            0 => drop(held),
            1 => held.release().await,
            // Dropped during the release.
            _ => drop(DropAt::new(1, held.release()).await),
        }
        // Gives other waiters a chance.
        sleep(Duration::from_millis(1)).await;
    }
}

/// A worker process, and its replies.
#[derive(Debug)]
pub struct LockWorker {
    pub process: Worker,
    held: mpsc::Receiver<()>,
}

impl LockWorker {
    /// Starts the worker. When it is stopped, it releases everything and ends.
    pub fn start(mode: Mode, url: &str, witness: &str, lines: mpsc::Sender<Line>) -> Self {
        let (sender, held) = mpsc::channel();
        let process = Worker::start(WORKER, &format!("{mode:?} {url} {witness}"), lines, move |line| {
            if line == HELD {
                // The receiver is gone if the reply is too late.
                let _ = sender.send(());
            }
            Line::read(&line)
        });
        Self { process, held }
    }

    /// Blocks the worker under its next lock, and waits until it is blocked.
    pub fn hold(&mut self) {
        self.process.order(HOLD);
        self.held.recv_timeout(BLOCK_TIMEOUT).expect("the worker blocks under a lock");
    }

    /// Unblocks the worker, which then writes without another check of its lease.
    pub fn go_on(&mut self) {
        self.process.order(GO_ON);
    }

    /// Makes the next stay of the worker longer than a lease.
    pub fn stay(&mut self) {
        self.process.order(STAY);
    }
}
