//! A network that misbehaves: a TCP proxy whose faults are switched while connections are open.

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

/// How long a door that cannot be opened stays closed until it is tried again.
const RETRY: Duration = Duration::from_millis(10);

/// What becomes of the bytes that go in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Traffic {
    #[default]
    Forward,
    /// They arrive later by this much.
    Delay(Duration),
    /// They wait, and arrive when this is over: what TCP makes of a network that is down for a while.
    Hold,
    /// They vanish. A connection that has lost some never carries any again in this direction: TCP leaves no gaps.
    Swallow,
    /// There are no more: the sender is told that the receiver reads on, the receiver that the sender has ended.
    End,
}

/// What becomes of those who connect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Door {
    #[default]
    Open,
    /// They are connected, and nobody ever answers: half open.
    Silent,
    /// They are told that nobody listens.
    Closed,
}

/// Leads connections to a port of this machine. Stops with its value; its tasks are in a runtime of its own, so they are none
/// of those that a test counts.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    state: Arc<State>,
    // An `Option`, since a runtime must not be dropped where tasks run; `Drop` takes it.
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

/// How often connections were ended, and how the last time.
#[derive(Clone, Copy, Debug, Default)]
struct Ended {
    times: u64,
    reset: bool,
}

impl Proxy {
    /// A proxy in front of `target`, a port, that does nothing wrong yet.
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

    /// Leads those who connect from now on to another port, as an address that is moved does.
    pub fn lead_to(&self, target: u16) {
        self.state.target.store(target, Ordering::Relaxed);
    }

    /// What becomes of what clients send.
    pub fn to_server(&self, traffic: Traffic) {
        self.state.to_server.send_replace(traffic);
    }

    /// What becomes of what the server answers.
    pub fn to_client(&self, traffic: Traffic) {
        self.state.to_client.send_replace(traffic);
    }

    /// What becomes of those who connect from now on. A closed door takes a moment to shut.
    pub fn door(&self, door: Door) {
        self.state.door.send_replace(door);
    }

    /// Ends all connections as a program does that has no more to say (FIN), and returns when they have ended.
    pub fn cut(&self) {
        self.end(false);
    }

    /// Ends all connections as a machine does that has forgotten them (RST), and returns when they have ended.
    pub fn reset(&self) {
        self.end(true);
    }

    fn end(&self, reset: bool) {
        let alive = std::mem::take(&mut *self.state.alive.lock().expect("nobody panics"));
        self.state.end.send_modify(|ended| *ended = Ended { times: ended.times + 1, reset });
        wait_until("the connections have ended", || Arc::strong_count(&alive) == 1);
    }

    /// Everything is as it was in the beginning, for connections that are still sound.
    pub fn heal(&self) {
        self.to_server(Traffic::Forward);
        self.to_client(Traffic::Forward);
        self.door(Door::Open);
    }

    /// How many connections are open.
    pub fn connections(&self) -> usize {
        self.state.connections.load(Ordering::Relaxed)
    }

    /// How many connections were ever opened.
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
    // The port was ours a moment ago when a door is opened again.
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
                // Somebody has taken the port meanwhile. Said once, as it is tried until it is given back.
                Err(error) => {
                    if !is_stuck {
                        eprintln!("a proxy cannot open its door on port {port} again: {error}");
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
                let (alive, end) = (Arc::clone(&*state.alive.lock().expect("nobody panics")), state.end.subscribe());
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
                // Reads, so that it is noticed when the client gives up.
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
            // A side that has ended hears what the other still has to say.
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
        // Closing says RST instead of FIN then.
        let _ = client.set_zero_linger();
        let _ = server.map(|server| server.set_zero_linger());
    }
}

/// Carries bytes in one direction until there are no more.
async fn carry(mut from: ReadHalf<'_>, mut to: WriteHalf<'_>, mut traffic: watch::Receiver<Traffic>) {
    // What is on its way, and when it arrives. Bounded: when it is full nothing more is read.
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
            // First of all: bytes that are sent after a fault was switched on are subject to it.
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
                let (_, bytes) = under_way.pop_front().expect("there is a first one");
                if !lost && to.write_all(&bytes).await.is_err() {
                    break;
                }
            }
        }
    }
    let _ = to.shutdown().await;
}
