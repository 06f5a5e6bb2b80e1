//! Starts this program again as a worker process.

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::panic;
use std::process::{self, Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::Sender;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Makes this process fail if anything in it panics, in any thread or task, even if the panic is caught.
pub fn end_at_panics() {
    let says = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        says(info);
        process::exit(101);
    }));
}

/// A worker process. It is killed when dropped, so a failed test leaves none behind.
#[derive(Debug)]
pub struct Worker {
    process: Child,
    orders: Option<ChildStdin>,
    reader: Option<JoinHandle<()>>,
    is_killed: bool,
}

impl Worker {
    /// Starts the process with `settings` in the variable that marks it as a worker. The lines that it prints go to `lines`, except those for
    /// which `read` returns `None`.
    pub fn start<T: Send + 'static>(
        variable: &str,
        settings: &str,
        lines: Sender<T>,
        read: impl Fn(String) -> Option<T> + Send + 'static,
    ) -> Self {
        let mut process = Command::new(env::current_exe().expect("this program has a path"))
            .env(variable, settings)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this program starts again");
        let out = BufReader::new(process.stdout.take().expect("stdout is piped"));
        let reader = thread::spawn(move || {
            for line in out.lines().map_while(Result::ok).filter_map(read) {
                if lines.send(line).is_err() {
                    return;
                }
            }
        });
        let orders = process.stdin.take();
        Self { process, orders, reader: Some(reader), is_killed: false }
    }

    /// Suspends the process (SIGSTOP).
    pub fn pause(&self) {
        self.signal("STOP");
    }

    pub fn resume(&self) {
        self.signal("CONT");
    }

    fn signal(&self, name: &str) {
        let pid = self.process.id().to_string();
        let status = Command::new("kill").args([&format!("-{name}"), &pid]).status().expect("there is a kill command");
        assert!(status.success(), "the worker takes signal {name}");
    }

    pub fn kill(&mut self) {
        let ended = self.process.try_wait().expect("the worker can be waited for");
        assert_eq!(ended, None, "the worker has ended before it was killed");
        self.is_killed = true;
        self.process.kill().expect("the worker can be killed");
    }

    pub fn is_killed(&self) -> bool {
        self.is_killed
    }

    /// Writes a line to the standard input of the process.
    pub fn order(&mut self, line: &str) {
        let orders = self.orders.as_mut().expect("the worker was not stopped");
        writeln!(orders, "{line}").expect("the worker listens");
    }

    /// Closes the standard input of the process, which tells it to stop.
    pub fn stop(&mut self) {
        self.orders = None;
    }

    /// Waits until the process has ended and all its lines were sent. Returns whether it ended in time, and either successfully or by a
    /// kill.
    pub fn has_ended_well(&mut self, timeout: Duration) -> bool {
        let since = Instant::now();
        let status = loop {
            match self.process.try_wait().expect("the worker can be waited for") {
                Some(status) => break status,
                None if since.elapsed() > timeout => return false,
                None => thread::sleep(Duration::from_millis(10)),
            }
        };
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
        self.is_killed || status.success()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
