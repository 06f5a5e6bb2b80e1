//! A faulty network: a TCP proxy whose faults are switched while connections are open.

use std::collections::VecDeque;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use super::server::{free_port, wait_until};

/// How long the proxy waits before it tries to listen again.
const RETRY: Duration = Duration::from_millis(10);

/// What happens to the bytes of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Traffic {
    #[default]
    Forward,
    /// Bytes arrive later by this much.
    Delay(Duration),
    /// Bytes wait, and arrive when this fault ends. This is how TCP sees a network that is down for a while.
    Hold,
    /// Bytes vanish. A connection that has lost bytes never carries any again in this direction, because TCP leaves no gaps.
    Swallow,
    /// The stream ends: the receiver sees its end, and the sender sees a receiver that still reads.
    End,
}

/// What happens to new connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Door {
    #[default]
    Open,
    /// The connection is accepted, and no reply ever comes: half open.
    Silent,
    /// The connection is refused.
    Closed,
}

/// A proxy to a port of this machine. It stops when it is dropped. Its tasks have a runtime of their own, so tests that count tasks do not
/// count them.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    state: Arc<State>,
    // An `Option`, because a runtime must not be dropped inside a task; `Drop` takes it.
    runtime: Option<Runtime>,
}

#[derive(Debug)]
struct State {
    target: AtomicU16,
    connections: AtomicUsize,
    accepted: AtomicU64,
    door: watch::Sender<Door>,
    to_server: watch::Sender<Traffic>,
    to_client: watch::Sender<Traffic>,
    end: watch::Sender<Ended>,
    // Each connection has a clone.
    alive: Mutex<Arc<()>>,
}

/// How many times all connections were ended, and how they ended the last time.
#[derive(Clone, Copy, Debug, Default)]
struct Ended {
    times: u64,
    reset: bool,
}

impl Proxy {
    /// Starts a proxy to the port `target`, without faults.
    pub fn start(target: u16) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime can be made");
        let state = Arc::new(State {
            target: AtomicU16::new(target),
            connections: AtomicUsize::new(0),
            accepted: AtomicU64::new(0),
            door: watch::Sender::default(),
            to_server: watch::Sender::default(),
            to_client: watch::Sender::default(),
            end: watch::Sender::default(),
            alive: Mutex::default(),
        });
        let (port, listener) = (0..10)
            .find_map(|_| {
                let port = free_port();
                let _inside = runtime.enter();
                listen(port).ok().map(|listener| (port, listener))
            })
            .expect("there is a free port");
        runtime.spawn(serve(listener, port, Arc::clone(&state)));
        Self { port, state, runtime: Some(runtime) }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// Leads new connections to another port, as a moved address does.
    pub fn lead_to(&self, target: u16) {
        self.state.target.store(target, Ordering::Relaxed);
    }

    /// Sets what happens to the bytes from clients.
    pub fn to_server(&self, traffic: Traffic) {
        self.state.to_server.send_replace(traffic);
    }

    /// Sets what happens to the bytes from the server.
    pub fn to_client(&self, traffic: Traffic) {
        self.state.to_client.send_replace(traffic);
    }

    /// Sets what happens to new connections. It takes a moment until a closed port refuses them.
    pub fn door(&self, door: Door) {
        self.state.door.send_replace(door);
    }

    /// Ends all connections as a program does that closes them (FIN), and returns when they have ended.
    pub fn cut(&self) {
        self.end(false);
    }

    /// Ends all connections as a machine does that has lost their state (RST), and returns when they have ended.
    pub fn reset(&self) {
        self.end(true);
    }

    fn end(&self, reset: bool) {
        let alive = std::mem::take(&mut *self.state.alive.lock().expect("not poisoned"));
        self.state.end.send_modify(|ended| *ended = Ended { times: ended.times + 1, reset });
        wait_until("the connections have ended", || Arc::strong_count(&alive) == 1);
    }

    /// Removes all faults. Connections that have lost bytes stay broken.
    pub fn heal(&self) {
        self.to_server(Traffic::Forward);
        self.to_client(Traffic::Forward);
        self.door(Door::Open);
    }

    /// The number of open connections.
    pub fn connections(&self) -> usize {
        self.state.connections.load(Ordering::Relaxed)
    }

    /// The number of connections that were ever accepted.
    pub fn accepted(&self) -> u64 {
        self.state.accepted.load(Ordering::Relaxed)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn listen(port: u16) -> io::Result<TcpListener> {
    let socket = TcpSocket::new_v4()?;
    // The proxy may have used the port until a moment ago.
    socket.set_reuseaddr(true)?;
    socket.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port)))?;
    socket.listen(1024)
}

async fn serve(listener: TcpListener, port: u16, state: Arc<State>) {
    let mut door = state.door.subscribe();
    let mut listener = Some(listener);
    let mut connections = JoinSet::new();
    let mut is_stuck = false;
    loop {
        let now = *door.borrow_and_update();
        match now {
            Door::Closed => (listener, is_stuck) = (None, false),
            Door::Open | Door::Silent if listener.is_none() => match listen(port) {
                Ok(again) => (listener, is_stuck) = (Some(again), false),
                // Another process has taken the port meanwhile. Logged once, since the proxy retries until the port is free.
                Err(error) => {
                    if !is_stuck {
                        eprintln!("a proxy cannot listen on port {port} again: {error}");
                    }
                    is_stuck = true;
                }
            },
            Door::Open | Door::Silent => {}
        }
        let accepted = async {
            match &listener {
                Some(listener) => listener.accept().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = door.changed() => {}
            () = sleep(RETRY), if is_stuck => {}
            Some(_) = connections.join_next() => {}
            Ok((client, _)) = accepted => {
                let state = Arc::clone(&state);
                let (alive, end) = (Arc::clone(&*state.alive.lock().expect("not poisoned")), state.end.subscribe());
                connections.spawn(async move {
                    state.accepted.fetch_add(1, Ordering::Relaxed);
                    state.connections.fetch_add(1, Ordering::Relaxed);
                    connection(client, now, &state, end).await;
                    state.connections.fetch_sub(1, Ordering::Relaxed);
                    drop(alive);
                });
            }
        }
    }
}

async fn connection(mut client: TcpStream, door: Door, state: &State, mut end: watch::Receiver<Ended>) {
    let mut server = None;
    {
        let (client, server) = (&mut client, &mut server);
        let carried = async move {
            if door == Door::Silent {
                // Reads, to notice when the client gives up.
                let mut nothing = [0; 1024];
                while client.read(&mut nothing).await.is_ok_and(|read| read > 0) {}
                return;
            }
            let target = state.target.load(Ordering::Relaxed);
            let Ok(stream) = TcpStream::connect((Ipv4Addr::LOCALHOST, target)).await else { return };
            let server = server.insert(stream);
            let _ = (client.set_nodelay(true), server.set_nodelay(true));
            let (from_client, to_client) = client.split();
            let (from_server, to_server) = server.split();
            // A side that has ended its stream still receives the rest of the other stream.
            tokio::join!(
                carry(from_client, to_server, state.to_server.subscribe()),
                carry(from_server, to_client, state.to_client.subscribe()),
            );
        };
        tokio::select! {
            () = carried => return,
            _ = end.changed() => {}
        }
    }
    if end.borrow().reset {
        // With this setting, closing sends RST instead of FIN.
        let _ = client.set_zero_linger();
        let _ = server.map(|server| server.set_zero_linger());
    }
}

/// Forwards the bytes of one direction until the stream ends.
async fn carry(mut from: ReadHalf<'_>, mut to: WriteHalf<'_>, mut traffic: watch::Receiver<Traffic>) {
    // The bytes in transit, with their arrival times. If there are too many, the proxy stops reading.
    let mut under_way: VecDeque<(Instant, Vec<u8>)> = VecDeque::new();
    let mut buffer = vec![0; 16 * 1024];
    let (mut reads, mut lost, mut over) = (true, false, false);
    loop {
        let now = *traffic.borrow_and_update();
        lost |= now == Traffic::Swallow;
        if now == Traffic::End && !over {
            over = true;
            let _ = to.shutdown().await;
        }
        if over {
            under_way.clear();
        }
        if !reads && under_way.is_empty() {
            break;
        }
        let next = under_way.front().map(|(at, _)| *at);
        let held = now == Traffic::Hold;
        tokio::select! {
            // Before anything else: bytes that are sent after a fault was switched on are subject to it.
            biased;
            _ = traffic.changed() => {}
            read = from.read(&mut buffer), if reads && !held && under_way.len() < 4_096 => match read {
                Ok(read) if read > 0 => {
                    let late = if let Traffic::Delay(late) = now { late } else { Duration::ZERO };
                    if !lost && !over {
                        under_way.push_back((Instant::now() + late, buffer[..read].to_vec()));
                    }
                }
                _ => reads = false,
            },
            () = async { sleep_until(next.unwrap_or_else(Instant::now)).await }, if next.is_some() && !held => {
                let (_, bytes) = under_way.pop_front().expect("the queue is not empty");
                if !lost && to.write_all(&bytes).await.is_err() {
                    break;
                }
            }
        }
    }
    let _ = to.shutdown().await;
}
