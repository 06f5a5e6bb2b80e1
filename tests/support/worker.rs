//! This program, started again as a worker.

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::panic;
use std::process::{self, Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::Sender;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Has this process fail when anything in it panics, in whichever thread or task, whoever catches that.
pub fn end_at_panics() {
    let says = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        says(info);
        process::exit(101);
    }));
}

/// A process. Killed when dropped: a test that failed leaves none behind.
#[derive(Debug)]
pub struct Worker {
    process: Child,
    orders: Option<ChildStdin>,
    reader: Option<JoinHandle<()>>,
    is_killed: bool,
}

impl Worker {
    /// Starts it with `told` in the variable by which it knows that it is a worker. What it prints comes to `lines`, but for what `read`
    /// makes nothing of.
    pub fn start<T: Send + 'static>(
        variable: &str,
        told: &str,
        lines: Sender<T>,
        read: impl Fn(String) -> Option<T> + Send + 'static,
    ) -> Self {
        let mut process = Command::new(env::current_exe().expect("this program has a path"))
            .env(variable, told)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this program starts again");
        let out = BufReader::new(process.stdout.take().expect("it was asked for"));
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

    /// Stops it in its tracks (SIGSTOP).
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

    /// Writes a line to its standard input.
    pub fn order(&mut self, line: &str) {
        let orders = self.orders.as_mut().expect("it was not told to stop");
        writeln!(orders, "{line}").expect("the worker listens");
    }

    /// Ends its standard input, by which it knows that it is to stop.
    pub fn stop(&mut self) {
        self.orders = None;
    }

    /// Waits for the end, and until all lines of it were sent; says whether it came in time and was a good one, or that of a worker that
    /// was killed.
    pub fn has_ended_well(&mut self, patience: Duration) -> bool {
        let begun = Instant::now();
        let status = loop {
            match self.process.try_wait().expect("the worker can be waited for") {
                Some(status) => break status,
                None if begun.elapsed() > patience => return false,
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
