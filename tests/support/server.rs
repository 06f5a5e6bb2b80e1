//! Redis servers for tests, on free ports and in temporary folders. A server stops when its value is dropped.
//!
//! `redis-test` has a harness too. It needs `redis-server` and `redis-cli` on the path whatever binary is under test, waits by sleeping,
//! and cannot restart a server on the same port.

use std::collections::BTreeSet;
use std::collections::hash_map::RandomState;
use std::env;
use std::fs;
use std::hash::BuildHasher;
use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{LazyLock, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

use redis::{Connection, FromRedisValue, RedisResult};
use tempfile::TempDir;
use tokio::net::TcpSocket;

/// Arguments of a server that writes to disk before it replies, so that [`RedisServer::kill`] loses no data.
pub const DURABLE: &[&str] = &["--appendonly", "yes", "--appendfsync", "always"];

/// The timeout of everything that the harness waits for.
const TIMEOUT: Duration = Duration::from_secs(20);

/// A temporary folder, in memory where the system has such a file system.
///
/// A Redis that saves its view of a cluster, or a Sentinel that saves its state, waits until it is on disk. That takes milliseconds, and
/// sometimes more than 100 on a shared disk, and meanwhile it serves nobody.
pub fn folder_in_memory() -> io::Result<TempDir> {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())
}

/// A server process. Killed, and its folder removed, when dropped.
#[derive(Debug)]
pub struct RedisServer {
    process: Child,
    port: u16,
    args: Vec<String>,
    folder: TempDir,
}

impl RedisServer {
    /// Starts a server that keeps nothing on disk.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts a server with further arguments, for instance `["--maxmemory", "2mb"]` or [`DURABLE`].
    pub fn start_with(args: &[&str]) -> Self {
        Self::start_with_each(|| args.iter().map(|&arg| arg.to_owned()).collect())
    }

    /// Like [`start_with`](Self::start_with), with arguments that are made for each try, since they may name a port.
    pub fn start_with_each(mut args: impl FnMut() -> Vec<String>) -> Self {
        // Another process may take the port before the server does. The next try has another port.
        for _ in 0..10 {
            let port = free_port();
            let own = args();
            let folder =
                if own.iter().any(|arg| arg == "--appendonly") { tempfile::tempdir() } else { folder_in_memory() };
            let folder = folder.expect("a temporary folder can be made");
            let mut all = words(&format!("--port {port} --bind 127.0.0.1 --appendonly no --unixsocket redis.sock"));
            all.extend(["--save".to_owned(), String::new()]);
            // Redis 6.2 allows DEBUG to all clients, and does not know the setting.
            if version() >= (7, 0) {
                all.extend(words("--enable-debug-command local"));
            }
            all.extend(own);
            if let Some(server) = Self::try_start(port, all, folder) {
                return server;
            }
        }
        panic!("{} does not start: is it a Redis server, and is there memory left?", binary());
    }

    /// Starts the binary with exactly these arguments, which make it listen on `port`; `None` if it ends before it answers.
    pub fn try_start(port: u16, args: Vec<String>, folder: TempDir) -> Option<Self> {
        let process = spawn(port, &args, folder.path())?;
        Some(Self { process, port, args, folder })
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// The Unix socket, on which the server listens too.
    pub fn unix_socket(&self) -> PathBuf {
        self.folder.path().join("redis.sock")
    }

    /// A new plain connection, to inspect the data of the server.
    pub fn connection(&self) -> Connection {
        connect(self.port, TIMEOUT).expect("the server accepts connections")
    }

    /// Sends a command, with its words separated by spaces, on a new connection.
    pub fn query<T: FromRedisValue>(&self, command: &str) -> T {
        query(&mut self.connection(), command).unwrap_or_else(|error| panic!("{command}: {error}"))
    }

    /// Panics unless every key of the server has a time to live.
    pub fn every_key_expires(&self) {
        let mut connection = self.connection();
        for key in self.query::<Vec<String>>("KEYS *") {
            let ttl: i64 = redis::cmd("PTTL").arg(&key).query(&mut connection).expect("the server answers");
            // -2: the key has expired since it was listed.
            assert!(ttl >= 0 || ttl == -2, "{key} has no expiry: {ttl}");
        }
    }

    /// Whether the server answers at the moment.
    pub fn is_answering(&self) -> bool {
        is_answering(self.port)
    }

    /// The reply of the server to a command, as text. Empty if there is an error or no reply.
    pub fn text(&self, command: &str) -> String {
        connect(self.port, TIMEOUT).and_then(|mut connection| query(&mut connection, command)).unwrap_or_default()
    }

    /// One line of INFO.
    pub fn info(&self, field: &str) -> Option<String> {
        line(&self.text("INFO"), field)
    }

    /// Whether `replicas` replicas have everything that was written so far. A replica whose link is up may still be waiting for its first
    /// data.
    pub fn is_followed_by(&self, replicas: usize) -> bool {
        let offset = |line: &str| line.split(',').find_map(|word| word.strip_prefix("offset=")?.parse::<u64>().ok());
        // A replica that has never acknowledged anything is at 0.
        let written = self.info("master_repl_offset").and_then(|offset| offset.parse().ok()).unwrap_or(u64::MAX).max(1);
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(2) {
            let info = self.text("INFO replication");
            let follow =
                |line: &&str| line.starts_with("slave") && offset(line).is_some_and(|offset| offset >= written);
            if info.lines().filter(follow).count() == replicas {
                return true;
            }
            sleep(Duration::from_millis(5));
        }
        false
    }

    /// Kills the process as a crash would, without a shutdown.
    pub fn kill(&mut self) {
        self.process.kill().expect("the server can be killed");
        self.process.wait().expect("the server can be waited for");
    }

    /// Starts the process again on the same port after [`kill`](Self::kill), and waits until it answers. It has the data on its disk again:
    /// none, unless it was started with [`DURABLE`].
    pub fn restart(&mut self) {
        self.process = spawn(self.port, &self.args, self.folder.path()).expect("the server starts again on its port");
    }

    /// Like [`restart`](Self::restart), on another port.
    pub fn restart_elsewhere(&mut self) {
        for _ in 0..10 {
            let (old, new) = (self.port.to_string(), free_port());
            for arg in self.args.iter_mut().filter(|arg| **arg == old) {
                *arg = new.to_string();
            }
            self.port = new;
            // Another process may have taken the port before the server does.
            if let Some(process) = spawn(new, &self.args, self.folder.path()) {
                self.process = process;
                return;
            }
        }
        panic!("{} does not start on another port", binary());
    }

    /// Like [`restart`](Self::restart), but the server loads data for a minute or two, and this method does not wait for the end. Until
    /// then the server replies LOADING. It does not load its former data.
    pub fn restart_slowly(&mut self) {
        let mut args = self.args.clone();
        args.extend(words("--appendonly yes --key-load-delay 1"));
        // During the load of an append-only file, every server serves clients after a thousand commands. During the load of a snapshot,
        // Redis 6.2 does so after two megabytes.
        let commands = "*1\r\n$4\r\nPING\r\n".repeat(2_000_000);
        fs::write(self.folder.path().join("appendonly.aof"), commands).expect("a file can be written");
        self.process = run(&args, self.folder.path());
        wait_until("the server is loading", || {
            let answer = connect(self.port, TIMEOUT).and_then(|mut connection| query::<()>(&mut connection, "PING"));
            answer.is_err_and(|error| error.code() == Some("LOADING"))
        });
    }

    /// Suspends the process (SIGSTOP): connections stay open and nothing answers.
    pub fn pause(&self) {
        self.signal("STOP");
    }

    /// Resumes the process (SIGCONT).
    pub fn resume(&self) {
        self.signal("CONT");
    }

    /// Ends the connections of all clients, which may reconnect.
    pub fn kill_clients(&self) -> u64 {
        self.query("CLIENT KILL TYPE normal SKIPME yes")
    }

    /// Delays the replies to all clients, including clients that connect meanwhile.
    pub fn pause_clients(&self, time: Duration) {
        self.query::<()>(&format!("CLIENT PAUSE {}", time.as_millis()));
    }

    /// Forgets all scripts.
    pub fn flush_scripts(&self) {
        self.query::<()>("SCRIPT FLUSH");
    }

    /// Blocks the server for this time, and returns afterwards.
    pub fn debug_sleep(&self, time: Duration) {
        self.query::<()>(&format!("DEBUG SLEEP {}", time.as_secs_f64()));
    }

    /// Limits the memory of the server. 0 means no limit.
    pub fn limit_memory(&self, bytes: u64) {
        self.query::<()>(&format!("CONFIG SET maxmemory {bytes}"));
    }

    /// The number of client connections, without the connections of this harness, of Sentinels and of other servers.
    pub fn clients(&self) -> usize {
        let mut connection = self.connection();
        let own: u64 = query(&mut connection, "CLIENT ID").expect("a client has an id");
        let list: String = query(&mut connection, "CLIENT LIST").expect("clients are listed");
        let own = format!("id={own} ");
        let is_client = |line: &&str| {
            let flags = line.split(' ').find_map(|word| word.strip_prefix("flags=")).unwrap_or_default();
            // Neither a replica nor a primary, nor a node that has moved keys here and keeps its connection.
            let is_server = flags.contains(['S', 'M']) || line.contains(" cmd=restore");
            !is_server && !line.contains(" name=sentinel-") && !line.starts_with(&own)
        };
        list.lines().filter(is_client).count()
    }

    fn signal(&self, name: &str) {
        let pid = self.process.id().to_string();
        let status = Command::new("kill").args([&format!("-{name}"), &pid]).status().expect("there is a kill command");
        assert!(status.success(), "the server takes signal {name}");
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        // The server may have been killed already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Sends a command, with its words separated by spaces.
pub fn query<T: FromRedisValue>(connection: &mut Connection, command: &str) -> RedisResult<T> {
    let mut words = command.split(' ');
    redis::cmd(words.next().unwrap_or_default()).arg(words.collect::<Vec<_>>()).query(connection)
}

/// The value of `field:value` in a text of such lines.
pub(super) fn line(text: &str, field: &str) -> Option<String> {
    text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).map(str::to_owned)
}

pub(super) fn words(text: &str) -> Vec<String> {
    text.split(' ').map(str::to_owned).collect()
}

/// Polls until the condition holds.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}");
        sleep(Duration::from_millis(5));
    }
}

/// The server under test: `TOLLGATE_REDIS_SERVER`, or the installed `redis-server`.
pub fn binary() -> String {
    env::var("TOLLGATE_REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned())
}

/// Major and minor version of the [`binary`].
pub fn version() -> (u32, u32) {
    static VERSION: LazyLock<(u32, u32)> = LazyLock::new(|| {
        let output = Command::new(binary()).arg("--version").output().unwrap_or_else(|error| cannot_run(&error));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let numbers = text.split_once("v=").map(|(_, version)| version.split('.').map_while(|part| part.parse().ok()));
        let mut numbers = numbers.unwrap_or_else(|| panic!("{} prints no version: {text}", binary()));
        (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default())
    });
    *VERSION
}

fn cannot_run(error: &io::Error) -> ! {
    panic!("{} cannot be run ({error}): `scripts/test` installs Redis, or set TOLLGATE_REDIS_SERVER", binary())
}

/// A free port. The port 10,000 above, where nodes of a cluster talk to each other, is free too. Each port is handed out once, so that
/// there is time to listen on it.
///
/// Never a port that the system gives to outgoing connections. Otherwise a server that restarts on its port would find it taken now and
/// then.
pub fn free_port() -> u16 {
    static HANDED_OUT: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    let mut handed_out = HANDED_OUT.lock().expect("not poisoned");
    let is_free = |port| !handed_out.contains(&port) && can_be_bound(port);
    let port = (0..1_000)
        .map(|_| 10_000 + (RandomState::new().hash_one(()) % 12_000) as u16)
        .find(|&port| is_free(port) && is_free(port + 10_000));
    if let Some(port) = port {
        handed_out.extend([port, port + 10_000]);
    }
    drop(handed_out);
    port.expect("there is a free port")
}

/// Binds the port, but does not listen on it: a process that another test starts at this moment would inherit the listener for an instant,
/// and the port would accept connections although no server is there.
fn can_be_bound(port: u16) -> bool {
    let socket = TcpSocket::new_v4().expect("a socket can be made");
    socket.set_reuseaddr(true).expect("the option exists");
    socket.bind((Ipv4Addr::LOCALHOST, port).into()).is_ok()
}

fn run(args: &[String], folder: &Path) -> Child {
    let log = fs::File::create(folder.join("server.log")).expect("a log file can be made");
    Command::new(binary())
        .args(args)
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(Stdio::null())
        .spawn()
        .unwrap_or_else(|error| cannot_run(&error))
}

/// A server process that answers PING, or `None` if the process ends before that.
fn spawn(port: u16, args: &[String], folder: &Path) -> Option<Child> {
    let mut process = run(args, folder);
    let password = args.iter().skip_while(|arg| *arg != "--requirepass").nth(1).map(String::as_str);
    let start = Instant::now();
    while start.elapsed() < TIMEOUT {
        if process.try_wait().expect("the process has a status").is_some() {
            return None;
        }
        if is_answered_by(&process, port, password) {
            return Some(process);
        }
        sleep(Duration::from_millis(5));
    }
    let _ = process.kill();
    let _ = process.wait();
    panic!("{} was started and did not answer within {TIMEOUT:?}", binary());
}

/// Whether this process is the one answering. Another server may have the port, and then this process ends in a moment.
fn is_answered_by(process: &Child, port: u16, password: Option<&str>) -> bool {
    let info = connect_as(password, port, Duration::from_millis(200)).and_then(|mut connection| {
        // Redis refuses PING while it loads data from disk.
        query::<()>(&mut connection, "PING")?;
        query::<String>(&mut connection, "INFO server")
    });
    info.is_ok_and(|info| line(&info, "process_id").is_some_and(|id| id == process.id().to_string()))
}

fn is_answering(port: u16) -> bool {
    let answer =
        connect(port, Duration::from_millis(200)).and_then(|mut connection| query::<()>(&mut connection, "PING"));
    // A server that requires a password is up as well. A server that loads data from disk is not.
    answer.map_or_else(|error| !error.is_io_error() && error.code() != Some("LOADING"), |()| true)
}

/// A connection with this timeout for connecting and for each reply.
fn connect(port: u16, timeout: Duration) -> RedisResult<Connection> {
    connect_as(None, port, timeout)
}

fn connect_as(password: Option<&str>, port: u16, timeout: Duration) -> RedisResult<Connection> {
    let userinfo = password.map(|password| format!(":{password}@")).unwrap_or_default();
    let client = redis::Client::open(format!("redis://{userinfo}127.0.0.1:{port}/"))?;
    let connection = client.get_connection_with_timeout(timeout)?;
    connection.set_read_timeout(Some(timeout))?;
    Ok(connection)
}
