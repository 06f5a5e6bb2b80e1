//! The maximum rate of the server for a script. `redis-benchmark` sends the same call as Tollgate. If several scripts belong together, a
//! minimal client sends the same calls.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::pipeline;
use crate::server::{RedisServer, binary};

/// A script call that `redis-benchmark` repeats.
pub struct Ceiling {
    port: u16,
    /// The arguments of EVALSHA.
    words: Vec<String>,
    /// How many different numbers the calls use.
    numbers: u32,
}

/// A sequence of calls of several scripts, which is repeated.
pub struct Cycle {
    port: u16,
    calls: Vec<Vec<Vec<u8>>>,
    varied: String,
}

impl Cycle {
    /// Records what the server receives while `act` runs, and keeps the first call of each of `scripts`. Each repetition has its own number
    /// in place of `varied`.
    pub async fn record(server: &RedisServer, scripts: &[&str], varied: &str, act: impl Future<Output = ()>) -> Self {
        let hashes: Vec<String> = scripts.iter().map(|script| load_script(server, &source(script))).collect();
        let monitor = monitor(server);
        act.await;
        let calls = hashes.iter().zip(sent(monitor, server, &hashes)).map(|(hash, words)| {
            let mut call = vec![b"EVALSHA".to_vec(), hash.clone().into_bytes()];
            call.extend(words);
            call
        });
        Self { port: server.port(), calls: calls.collect(), varied: varied.to_owned() }
    }

    /// Sequences per second.
    pub fn per_s(&self) -> f64 {
        pipeline::per_s(self.port, &self.calls, &self.varied)
    }
}

impl Ceiling {
    /// Records what the server receives while `act` runs, and keeps the call of `script`, a file in `lua/`. In its keys and arguments, each
    /// call of the benchmark has one of 10,000 numbers in place of `varied`.
    pub async fn record(server: &RedisServer, script: &str, varied: &str, act: impl Future<Output = ()>) -> Self {
        let source = source(script);
        let hash = load_script(server, &source);
        let monitor = monitor(server);
        act.await;
        let words = sent(monitor, server, &[hash]).remove(0);
        let keys: usize = String::from_utf8_lossy(&words[0]).parse().expect("the number of keys");
        // redis-benchmark cannot send binary arguments, so extra first lines of the script set them.
        let mut preset = String::new();
        for (at, word) in words.iter().skip(1 + keys).enumerate() {
            if word.iter().any(|byte| !byte.is_ascii_graphic()) {
                let bytes: String = word.iter().map(|byte| format!("\\{byte:03}")).collect();
                let _ = writeln!(preset, "ARGV[{}] = '{bytes}'", at + 1);
            }
        }
        let mut all = vec![load_script(server, &format!("{preset}{source}"))];
        for word in &words {
            let word = String::from_utf8_lossy(word);
            let word = if word.chars().any(|sign| !sign.is_ascii_graphic()) { "preset".into() } else { word };
            all.push(word.replace(varied, "__rand_int__"));
        }
        Self { port: server.port(), words: all, numbers: 10_000 }
    }

    /// Uses this many different numbers instead.
    pub fn numbers(mut self, numbers: u32) -> Self {
        self.numbers = numbers;
        self
    }

    /// Calls per second.
    pub fn per_s(&self) -> f64 {
        let binary = binary();
        let name = if binary.contains("valkey") { "valkey-benchmark" } else { "redis-benchmark" };
        let benchmark =
            env::var("TOLLGATE_REDIS_BENCHMARK").map_or(Path::new(&binary).with_file_name(name), Into::into);
        let output = Command::new(&benchmark)
            .args([
                "-p",
                &self.port.to_string(),
                "-c",
                "50",
                "-P",
                "64",
                "-n",
                "100000",
                "-r",
                &self.numbers.to_string(),
                "--csv",
            ])
            .arg("EVALSHA")
            .args(&self.words)
            .output()
            .unwrap_or_else(|error| {
                panic!("{} cannot be run ({error}): set TOLLGATE_REDIS_BENCHMARK", benchmark.display())
            });
        let text = String::from_utf8_lossy(&output.stdout);
        // The last line begins with the command and the requests per second, each in quotes.
        let rate = text.lines().last().and_then(|line| line.split("\",\"").nth(1)).and_then(|rate| rate.parse().ok());
        rate.unwrap_or_else(|| panic!("redis-benchmark printed no rate: {text}"))
    }
}

/// The script after its includes, as the crate sends it.
fn source(script: &str) -> String {
    let read = |file: &str| {
        let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../lua").join(file));
        text.unwrap_or_else(|error| panic!("lua/{file} cannot be read: {error}"))
    };
    let script = read(script);
    let includes =
        script.lines().filter_map(|line| line.strip_prefix("-- Includes ")).flat_map(|names| names.split(", "));
    includes.map(|name| read(&format!("includes/{name}.lua"))).collect::<String>() + &script
}

fn load_script(server: &RedisServer, source: &str) -> String {
    let hash = redis::cmd("SCRIPT").arg("LOAD").arg(source).query(&mut server.connection());
    hash.expect("the script loads")
}

/// The lines of MONITOR from now on.
fn monitor(server: &RedisServer) -> BufReader<TcpStream> {
    let stream = TcpStream::connect(("127.0.0.1", server.port())).expect("the server accepts connections");
    stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout can be set");
    let mut reader = BufReader::new(stream);
    reader.get_mut().write_all(b"MONITOR\r\n").expect("the server reads");
    let mut line = String::new();
    reader.read_line(&mut line).expect("the server answers");
    reader
}

/// The arguments after each hash in the first call of its script.
fn sent(mut monitor: BufReader<TcpStream>, server: &RedisServer, hashes: &[String]) -> Vec<Vec<Vec<u8>>> {
    let end = "no more of the script";
    let _: String = redis::cmd("ECHO").arg(end).query(&mut server.connection()).expect("the server answers");
    let mut all = vec![Vec::new(); hashes.len()];
    while all.iter().any(Vec::is_empty) {
        let mut line = String::new();
        monitor.read_line(&mut line).expect("MONITOR sends a line");
        assert!(!line.contains(end), "a script was not called");
        let words = words(&line);
        for (hash, sent) in hashes.iter().zip(&mut all).filter(|(_, sent)| sent.is_empty()) {
            if let Some(at) = words.iter().position(|word| word == hash.as_bytes()) {
                *sent = words[at + 1..].to_vec();
            }
        }
    }
    all
}

/// The quoted words of a line of MONITOR.
fn words(line: &str) -> Vec<Vec<u8>> {
    let mut bytes = line.bytes();
    let (mut words, mut word) = (Vec::new(), None::<Vec<u8>>);
    while let Some(byte) = bytes.next() {
        let Some(open) = &mut word else {
            if byte == b'"' {
                word = Some(Vec::new());
            }
            continue;
        };
        match byte {
            b'"' => words.extend(word.take()),
            b'\\' => open.push(match bytes.next() {
                Some(b'n') => b'\n',
                Some(b'r') => b'\r',
                Some(b't') => b'\t',
                Some(b'a') => 7,
                Some(b'b') => 8,
                Some(b'x') => {
                    let mut digit =
                        || (bytes.next().unwrap_or_default() as char).to_digit(16).unwrap_or_default() as u8;
                    let high = digit();
                    high * 16 + digit()
                }
                other => other.unwrap_or_default(),
            }),
            byte => open.push(byte),
        }
    }
    words
}
