//! Clients that retry, disconnect, and change their payloads.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::server::path;

const CLIENTS: u64 = 32;
/// How long a client waits, unless it disconnects on purpose.
const TIMEOUT: Duration = Duration::from_millis(2_500);
const BODIES: [&str; 2] = ["hundred", "thousand"];

/// One request and its response. The status is 0 if there was none.
pub struct Sent {
    pub operation: String,
    pub body: &'static str,
    pub status: u16,
    /// The last segment of the problem type.
    pub problem: String,
    pub is_replay: bool,
    pub text: String,
}

#[derive(Clone)]
pub struct Clients {
    servers: Arc<Mutex<Vec<SocketAddr>>>,
    next: Arc<AtomicU64>,
    operations: u64,
}

impl Clients {
    pub fn new(servers: Vec<SocketAddr>, operations: u64) -> Self {
        Self { servers: Arc::new(Mutex::new(servers)), next: Arc::default(), operations }
    }

    /// Sets the new address of a server.
    pub fn moved(&self, number: usize, to: SocketAddr) {
        self.servers.lock().expect("the mutex is not poisoned")[number] = to;
    }

    /// Sends requests until all operations were requested or the time is over.
    pub async fn ask(self, until: Instant) -> Vec<Sent> {
        let mut clients = JoinSet::new();
        for number in 0..CLIENTS {
            let this = self.clone();
            clients.spawn(async move {
                let (mut dice, mut sent) = (Dice(number), Vec::new());
                while Instant::now() < until {
                    let turn = this.next.fetch_add(1, Ordering::Relaxed);
                    if turn >= this.operations {
                        break;
                    }
                    this.operation(turn, &mut dice, &mut sent).await;
                }
                sent
            });
        }
        clients.join_all().await.into_iter().flatten().collect()
    }

    /// Sends a few requests for one operation, some of them concurrently, until one is answered. A few requests are for an earlier
    /// operation, mostly from before the last fault.
    async fn operation(&self, turn: u64, dice: &mut Dice, sent: &mut Vec<Sent>) {
        let (mut asked, before) = (JoinSet::new(), sent.len());
        for request in 0..2 + dice.below(4) {
            let turn = match dice.below(8) {
                _ if request == 0 => turn,
                0 => dice.below(turn + 1),
                1 | 2 => turn - dice.below(turn.min(300) + 1),
                _ => turn,
            };
            asked.spawn(self.request(turn, dice));
            if dice.below(2) == 0 {
                sent.extend(asked.join_next().await.map(|answer| answer.expect("no request panics")));
                sleep(Duration::from_millis(dice.below(20))).await;
            }
        }
        sent.extend(asked.join_all().await);
        for _ in 0..20 {
            let its = named(turn);
            if sent[before..].iter().any(|sent| sent.operation == its && !matches!(sent.status, 0 | 503)) {
                break;
            }
            sleep(Duration::from_millis(200)).await;
            sent.push(self.request(turn, dice).await);
        }
    }

    /// Repeats an operation with the same body until its outcome is known.
    pub async fn ask_again(self, operation: String, body: String) -> Vec<Sent> {
        let (mut dice, mut sent) = (Dice(0), Vec::new());
        for _ in 0..50 {
            let body = BODIES.into_iter().find(|known| *known == body).expect("the body is in `BODIES`");
            sent.push(self.send(operation.clone(), body, TIMEOUT, &mut dice).await);
            if sent.last().is_some_and(|sent| !matches!(sent.status, 0 | 503) && sent.problem != "in-flight") {
                break;
            }
            sleep(Duration::from_millis(200)).await;
        }
        sent
    }

    fn request(&self, turn: u64, dice: &mut Dice) -> impl Future<Output = Sent> + Send + use<> {
        let body = BODIES[usize::from(dice.below(10) == 0)];
        let time_limit = if dice.below(5) == 0 { Duration::from_millis(dice.below(30)) } else { TIMEOUT };
        self.send(named(turn), body, time_limit, dice)
    }

    fn send(
        &self,
        operation: String,
        body: &'static str,
        time_limit: Duration,
        dice: &mut Dice,
    ) -> impl Future<Output = Sent> + Send + use<> {
        let servers = self.servers.lock().expect("the mutex is not poisoned");
        let server = servers[dice.below(servers.len() as u64) as usize];
        async move {
            let answer = timeout(time_limit, send(server, &operation, body)).await.ok().and_then(Result::ok);
            let (status, problem, is_replay, text) = answer.unwrap_or_default();
            Sent { operation, body, status, problem, is_replay, text }
        }
    }
}

/// Returns the name of an operation. Several callers use the same key.
fn named(turn: u64) -> String {
    format!("caller-{}/key-{}", turn % 3, turn / 3)
}

type Answer = (u16, String, bool, String);

/// Sends a request on its own connection, which is closed if the future is dropped.
async fn send(server: SocketAddr, operation: &str, body: &str) -> std::io::Result<Answer> {
    let (caller, key) = operation.split_once('/').expect("an operation is a caller and a key");
    let mut connection = TcpStream::connect(server).await?;
    let (path, length) = (path(operation), body.len());
    let request = format!(
        "POST {path} HTTP/1.1\r\nhost: a\r\nauthorization: {caller}\r\nidempotency-key: \"{key}\"\r\n\
         content-type: text/plain\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
    );
    connection.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await?;
    let broken = || std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
    let (head, text) = answer.split_once("\r\n\r\n").ok_or_else(broken)?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or_else(broken)?;
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
    if length != Some(text.len()) {
        return Err(broken());
    }
    let problem = text.split_once("\"urn:tollgate:idempotency:").and_then(|(_, rest)| rest.split('"').next());
    let is_replay = head.contains("\r\nidempotent-replayed: true");
    Ok((status, problem.unwrap_or_default().to_owned(), is_replay, text.to_owned()))
}

/// Pseudo-random numbers (SplitMix64).
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }
}
