//! Redis servers of our own: on free ports, in temporary folders, stopped with the value that stands for them.
//!
//! `redis-test` has a harness too, but it needs `redis-server` on the path whatever binary is to be tested, does not wait
//! for the server to answer, and cannot start one again on the same port.

use std::env;
use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::TempDir;

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

    /// Starts a server with further arguments, for instance `["--maxmemory", "2mb"]`.
    pub fn start_with(args: &[&str]) -> Self {
        let args: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
        // Somebody else may take the port before the server does; then another one is tried.
        for _ in 0..10 {
            let folder = tempfile::tempdir().expect("a temporary folder can be made");
            let port = free_port();
            if let Some(process) = spawn(port, &args, folder.path()) {
                return Self { process, port, args, folder };
            }
        }
        panic!("{} does not start: is it a Redis server, and is there memory left?", binary());
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// A plain connection of its own, to look at what the server holds.
    pub fn connection(&self) -> redis::Connection {
        let client = redis::Client::open(self.url()).expect("the URL is well-formed");
        client.get_connection().expect("the server accepts connections")
    }

    /// Ends the process as a crash would: nothing is said to anybody.
    pub fn kill(&mut self) {
        self.process.kill().expect("the server can be killed");
        self.process.wait().expect("the server can be waited for");
    }

    /// Starts the process again on the same port, after [`kill`](Self::kill), and waits until it answers.
    pub fn restart(&mut self) {
        self.process = spawn(self.port, &self.args, self.folder.path()).expect("the server starts again on its port");
    }

    /// Stops the process in its tracks (SIGSTOP): connections stay open and nothing answers.
    pub fn pause(&self) {
        self.signal("STOP");
    }

    /// Lets it go on (SIGCONT).
    pub fn resume(&self) {
        self.signal("CONT");
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

/// The server to test: `TOLLGATE_REDIS_SERVER`, or the `redis-server` that is installed.
pub fn binary() -> String {
    env::var("TOLLGATE_REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned())
}

pub fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("there is a free port");
    listener.local_addr().expect("a listener has an address").port()
}

/// A server process that answers PING, or `None` if it ended before it did.
fn spawn(port: u16, args: &[String], folder: &Path) -> Option<Child> {
    let log = fs::File::create(folder.join("server.log")).expect("a log file can be made");
    let mut process = Command::new(binary())
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
        .args(args)
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(Stdio::null())
        .spawn()
        .unwrap_or_else(|error| {
            panic!("{} cannot be run ({error}): `scripts/test` installs Redis, or set TOLLGATE_REDIS_SERVER", binary())
        });
    let client = redis::Client::open(format!("redis://127.0.0.1:{port}/")).expect("the URL is well-formed");
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(20) {
        if process.try_wait().expect("the process can be asked").is_some() {
            return None;
        }
        if let Ok(mut connection) = client.get_connection_with_timeout(Duration::from_millis(200)) {
            // A server that wants a password is up as well.
            match redis::cmd("PING").query::<String>(&mut connection) {
                Err(error) if error.is_io_error() => {}
                _ => return Some(process),
            }
        }
        sleep(Duration::from_millis(5));
    }
    let _ = process.kill();
    let _ = process.wait();
    panic!("{} was started and did not answer within 20 s", binary());
}
