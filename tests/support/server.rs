//! Redis servers of our own: on free ports, in temporary folders, stopped with the value that stands for them.
//!
//! `redis-test` has a harness too, but it needs `redis-server` and `redis-cli` on the path whatever binary is to be tested,
//! waits by sleeping, and cannot start a server again on the same port.

use std::collections::BTreeSet;
use std::collections::hash_map::RandomState;
use std::env;
use std::fs;
use std::hash::BuildHasher;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{LazyLock, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

use redis::{Connection, FromRedisValue, RedisResult};
use tempfile::TempDir;

/// Arguments of a server that has every write on disk before it answers: [`RedisServer::kill`] costs it nothing.
pub const DURABLE: &[&str] = &["--appendonly", "yes", "--appendfsync", "always"];

/// How long the harness itself waits for anything.
const PATIENCE: Duration = Duration::from_secs(20);

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

    /// The same with arguments that are made anew for each try, for those that name a port too.
    pub fn start_with_each(mut args: impl FnMut() -> Vec<String>) -> Self {
        // Somebody else may take the port before the server does; then another one is tried.
        for _ in 0..10 {
            let port = free_port();
            let folder = tempfile::tempdir().expect("a temporary folder can be made");
            let mut all = words(&format!("--port {port} --bind 127.0.0.1 --appendonly no --unixsocket redis.sock"));
            all.extend(["--save".to_owned(), String::new()]);
            // Redis 6.2 lets everybody debug it, and does not know the setting.
            if version() >= (7, 0) {
                all.extend(words("--enable-debug-command local"));
            }
            all.extend(args());
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

    /// Where the server listens, too.
    pub fn unix_socket(&self) -> PathBuf {
        self.folder.path().join("redis.sock")
    }

    /// A plain connection of its own, to look at what the server holds.
    pub fn connection(&self) -> Connection {
        connect(self.port, PATIENCE).expect("the server accepts connections")
    }

    /// Sends a command, its words parted by spaces, on a connection of its own.
    pub fn query<T: FromRedisValue>(&self, command: &str) -> T {
        query(&mut self.connection(), command).unwrap_or_else(|error| panic!("{command}: {error}"))
    }

    /// Panics unless every key of the server has a time to live.
    pub fn every_key_expires(&self) {
        let mut connection = self.connection();
        for key in self.query::<Vec<String>>("KEYS *") {
            let ttl: i64 = redis::cmd("PTTL").arg(&key).query(&mut connection).expect("the server answers");
            // -2 is a key that has expired since it was listed.
            assert!(ttl >= 0 || ttl == -2, "{key} has no expiry: {ttl}");
        }
    }

    /// Whether the server answers at the moment.
    pub fn is_answering(&self) -> bool {
        is_answering(self.port)
    }

    /// What the server says to a command, as a text; an empty one if it says nothing or that something is wrong.
    pub fn text(&self, command: &str) -> String {
        connect(self.port, PATIENCE).and_then(|mut connection| query(&mut connection, command)).unwrap_or_default()
    }

    /// One line of INFO.
    pub fn info(&self, field: &str) -> Option<String> {
        line(&self.text("INFO"), field)
    }

    /// Whether `replicas` replicas have all that was written until now. One whose link is up may still be waiting for the first
    /// of it.
    pub fn is_followed_by(&self, replicas: usize) -> bool {
        let offset = |line: &str| line.split(',').find_map(|word| word.strip_prefix("offset=")?.parse::<u64>().ok());
        // A replica that has never said what it has is at 0.
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

    /// Ends the process as a crash would: nothing is said to anybody.
    pub fn kill(&mut self) {
        self.process.kill().expect("the server can be killed");
        self.process.wait().expect("the server can be waited for");
    }

    /// Starts the process again on the same port, after [`kill`](Self::kill), and waits until it answers. What it has on disk
    /// is there again, which is nothing unless it was started with [`DURABLE`].
    pub fn restart(&mut self) {
        self.process = spawn(self.port, &self.args, self.folder.path()).expect("the server starts again on its port");
    }

    /// The same on another port.
    pub fn restart_elsewhere(&mut self) {
        for _ in 0..10 {
            let (old, new) = (self.port.to_string(), free_port());
            for arg in self.args.iter_mut().filter(|arg| **arg == old) {
                *arg = new.to_string();
            }
            self.port = new;
            // Somebody else may have taken the port before the server does.
            if let Some(process) = spawn(new, &self.args, self.folder.path()) {
                self.process = process;
                return;
            }
        }
        panic!("{} does not start on another port", binary());
    }

    /// The same as [`restart`](Self::restart), but there is so much for it to read that it takes a minute or two, and that is not waited for: until it is over, the server says
    /// that it is loading. It does not read what it had.
    pub fn restart_slowly(&mut self) {
        let mut args = self.args.clone();
        args.extend(words("--appendonly yes --key-load-delay 1"));
        // Of an append-only file every server looks up after a thousand commands; of a snapshot Redis 6.2 does so after two megabytes.
        let commands = "*1\r\n$4\r\nPING\r\n".repeat(2_000_000);
        fs::write(self.folder.path().join("appendonly.aof"), commands).expect("a file can be written");
        self.process = run(&args, self.folder.path());
        wait_until("the server is loading", || {
            let answer = connect(self.port, PATIENCE).and_then(|mut connection| query::<()>(&mut connection, "PING"));
            answer.is_err_and(|error| error.code() == Some("LOADING"))
        });
    }

    /// Stops the process in its tracks (SIGSTOP): connections stay open and nothing answers.
    pub fn pause(&self) {
        self.signal("STOP");
    }

    /// Lets it go on (SIGCONT).
    pub fn resume(&self) {
        self.signal("CONT");
    }

    /// Ends the connections of all clients, which may come again.
    pub fn kill_clients(&self) -> u64 {
        self.query("CLIENT KILL TYPE normal SKIPME yes")
    }

    /// Lets all clients wait for their answers, those that connect meanwhile too.
    pub fn pause_clients(&self, time: Duration) {
        self.query::<()>(&format!("CLIENT PAUSE {}", time.as_millis()));
    }

    /// Forgets all scripts.
    pub fn flush_scripts(&self) {
        self.query::<()>("SCRIPT FLUSH");
    }

    /// Keeps the server busy with nothing, and returns when that is over.
    pub fn debug_sleep(&self, time: Duration) {
        self.query::<()>(&format!("DEBUG SLEEP {}", time.as_secs_f64()));
    }

    /// Sets how much memory the server may use; 0 is any.
    pub fn limit_memory(&self, bytes: u64) {
        self.query::<()>(&format!("CONFIG SET maxmemory {bytes}"));
    }

    /// How many connections clients have here, without those of this harness, of Sentinels and of other servers.
    pub fn clients(&self) -> usize {
        let mut connection = self.connection();
        let own: u64 = query(&mut connection, "CLIENT ID").expect("a client has an id");
        let list: String = query(&mut connection, "CLIENT LIST").expect("clients are listed");
        let own = format!("id={own} ");
        let is_client = |line: &&str| {
            let flags = line.split(' ').find_map(|word| word.strip_prefix("flags=")).unwrap_or_default();
            // Neither a replica nor a primary, nor a node that has moved keys here and keeps its connection for more.
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
        // It may have been killed already; there is nobody to tell either way.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Sends a command, its words parted by spaces.
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

/// Asks again and again until it is so.
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        sleep(Duration::from_millis(5));
    }
}

/// The server to test: `TOLLGATE_REDIS_SERVER`, or the `redis-server` that is installed.
pub fn binary() -> String {
    env::var("TOLLGATE_REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned())
}

/// Major and minor version of the [`binary`].
pub fn version() -> (u32, u32) {
    static VERSION: LazyLock<(u32, u32)> = LazyLock::new(|| {
        let output = Command::new(binary()).arg("--version").output().unwrap_or_else(|error| cannot_run(&error));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let numbers = text.split_once("v=").map(|(_, version)| version.split('.').map_while(|part| part.parse().ok()));
        let mut numbers = numbers.unwrap_or_else(|| panic!("{} does not say its version: {text}", binary()));
        (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default())
    });
    *VERSION
}

fn cannot_run(error: &std::io::Error) -> ! {
    panic!("{} cannot be run ({error}): `scripts/test` installs Redis, or set TOLLGATE_REDIS_SERVER", binary())
}

/// A port that nobody listens on, nor on the one 10,000 above, where nodes of a cluster talk to each other. Handed out once, so that
/// there is time to listen on it.
///
/// Not one of those that the system gives to outgoing connections: a server that is to come back on its port would find it
/// taken now and then.
pub fn free_port() -> u16 {
    static HANDED_OUT: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    let mut handed_out = HANDED_OUT.lock().expect("nobody panics");
    let is_free = |port| !handed_out.contains(&port) && TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok();
    let port = (0..1_000)
        .map(|_| 10_000 + (RandomState::new().hash_one(()) % 12_000) as u16)
        .find(|&port| is_free(port) && is_free(port + 10_000));
    if let Some(port) = port {
        handed_out.extend([port, port + 10_000]);
    }
    drop(handed_out);
    port.expect("there is a free port")
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

/// A server process that answers PING, or `None` if it ended before it did.
fn spawn(port: u16, args: &[String], folder: &Path) -> Option<Child> {
    let mut process = run(args, folder);
    let password = args.iter().skip_while(|arg| *arg != "--requirepass").nth(1).map(String::as_str);
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        if process.try_wait().expect("the process can be asked").is_some() {
            return None;
        }
        if is_answered_by(&process, port, password) {
            return Some(process);
        }
        sleep(Duration::from_millis(5));
    }
    let _ = process.kill();
    let _ = process.wait();
    panic!("{} was started and did not answer within {PATIENCE:?}", binary());
}

/// Whether it is this process that answers. Another server may have the port, which the process finds out in a moment.
fn is_answered_by(process: &Child, port: u16, password: Option<&str>) -> bool {
    let info = connect_as(password, port, Duration::from_millis(200)).and_then(|mut connection| {
        // Refused while data is read from disk.
        query::<()>(&mut connection, "PING")?;
        query::<String>(&mut connection, "INFO server")
    });
    info.is_ok_and(|info| line(&info, "process_id").is_some_and(|id| id == process.id().to_string()))
}

fn is_answering(port: u16) -> bool {
    let answer =
        connect(port, Duration::from_millis(200)).and_then(|mut connection| query::<()>(&mut connection, "PING"));
    // A server that wants a password is up as well; one that reads its data from disk is not.
    answer.map_or_else(|error| !error.is_io_error() && error.code() != Some("LOADING"), |()| true)
}

/// A connection on which nothing takes longer than `patience`.
fn connect(port: u16, patience: Duration) -> RedisResult<Connection> {
    connect_as(None, port, patience)
}

fn connect_as(password: Option<&str>, port: u16, patience: Duration) -> RedisResult<Connection> {
    let userinfo = password.map(|password| format!(":{password}@")).unwrap_or_default();
    let client = redis::Client::open(format!("redis://{userinfo}127.0.0.1:{port}/"))?;
    let connection = client.get_connection_with_timeout(patience)?;
    connection.set_read_timeout(Some(patience))?;
    Ok(connection)
}
