//! Peers from npm, in a separate process.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::Mutex;

use crate::bench::Figures;
use crate::server::RedisServer;

/// The process is killed on drop.
pub struct Node {
    talk: Mutex<(ChildStdin, Lines<BufReader<ChildStdout>>)>,
    _process: Child,
}

impl Node {
    /// Returns `None`, and prints why, if Node or the packages are missing.
    pub fn start(server: &RedisServer) -> Option<Self> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("node");
        if !folder.join("node_modules").exists() {
            println!("SKIPPED peers on Node: there is no node_modules in benches/compare/node");
            return None;
        }
        let spawned = Command::new("node")
            .arg("peers.mjs")
            .arg(server.port().to_string())
            .current_dir(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn();
        let Ok(mut process) = spawned else {
            println!("SKIPPED peers on Node: there is no node");
            return None;
        };
        let stdin = process.stdin.take().expect("the stream is piped");
        let stdout = process.stdout.take().expect("the stream is piped");
        Some(Self { talk: Mutex::new((stdin, BufReader::new(stdout).lines())), _process: process })
    }

    /// Runs a load, and panics if the peer fails.
    pub async fn ask(&self, what: Value) -> Value {
        let mut talk = self.talk.lock().await;
        let line = format!("{what}\n");
        talk.0.write_all(line.as_bytes()).await.expect("node reads");
        let answer = talk.1.next_line().await.expect("node answers").expect("node has not failed");
        let answer: Value = serde_json::from_str(&answer).expect("node answers in JSON");
        assert!(answer["failed"].is_null(), "{}", answer["failed"].as_str().unwrap_or_default());
        answer
    }

    pub async fn figures(&self, what: Value) -> Figures {
        let answer = self.ask(what).await;
        let of = |field: &str| answer[field].as_f64().unwrap_or_default();
        let count = |field: &str| answer[field].as_u64().unwrap_or_default();
        Figures {
            calls: count("calls"),
            per_s: of("per_s"),
            p50_us: of("p50_us"),
            p99_us: of("p99_us"),
            longest_us: of("longest_us"),
            fewest: count("fewest"),
            most: count("most"),
            ..Figures::default()
        }
    }

    /// Runs a load with `in_flight` concurrent calls for `time`. `more` has further parameters.
    pub async fn load(&self, what: &str, in_flight: u32, time: Duration, more: Value) -> Figures {
        let mut asked = json!({"do": what, "inFlight": in_flight, "ms": time.as_millis() as u64});
        if let (Some(asked), Value::Object(more)) = (asked.as_object_mut(), more) {
            asked.extend(more);
        }
        self.figures(asked).await
    }
}
