//! The faults of processes that hold locks or wait for them.

use std::thread::sleep;
use std::time::{Duration, Instant};

use tollgate::lock::store::Claim;

use super::catalogue::{SECOND, Strike, cut, during, flushed, ms, stopped, trouble};
use super::deployment::Topology::{Cluster, Durable, Network, Sentinel, Standalone};
use super::deployment::{Deployment, Topology};
use super::lock_worker::Mode::{self, All, Fair, ReadWrite, Semaphore};
use super::lock_worker::{KEYS, LockWorker, TTL};
use super::support::cluster::Cluster as Nodes;
use super::support::proxy::{Door, Traffic};
use super::support::server::wait_until;

/// The number of processes that want the locks.
pub const WORKERS: usize = 4;

/// A fault while processes hold locks.
#[derive(Debug)]
pub struct LockFault {
    pub name: &'static str,
    pub on: Topology,
    pub mode: Mode,
    /// Whether it is part of the short run.
    pub short: bool,
    /// Set if the store may lose locks: how long clients may take to follow to the server that is authoritative afterwards. Until then, and
    /// for as long as a lease lasts, two processes may hold one lock. Their fences have to differ.
    pub forgets: Option<Duration>,
    pub loses: Loses,
    pub strike: fn(&mut Deployment, &mut [LockWorker]) -> Strike,
}

/// Which leases the holders lose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loses {
    /// None: leases are renewed for as long as they are held.
    Nothing,
    /// Some may be lost.
    Perhaps,
    /// At least this many: if fewer are lost, the fault had no effect. Writes after a lost lease are refused.
    AtLeast(usize),
}

const fn fault(
    name: &'static str,
    on: Topology,
    strike: fn(&mut Deployment, &mut [LockWorker]) -> Strike,
) -> LockFault {
    LockFault { name, on, mode: Mode::Plain, short: false, forgets: None, loses: Loses::Perhaps, strike }
}

impl LockFault {
    /// Returns how long after the store is back two processes may still hold one lock, with a margin for a busy machine.
    pub fn overlap(&self) -> Option<Duration> {
        self.forgets.map(|follow| follow + TTL + ms(500))
    }

    const fn short(mut self) -> Self {
        self.short = true;
        self
    }

    const fn of(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    const fn forgets(mut self, follow: Duration) -> Self {
        self.forgets = Some(follow);
        self
    }

    const fn loses(mut self, loses: Loses) -> Self {
        self.loses = loses;
        self
    }
}

/// All faults of locks.
pub const LOCK_FAULTS: &[LockFault] = &[
    fault("none", Standalone, |_, _| during(|| sleep(SECOND))).loses(Loses::Nothing),
    // The first holder continues before its lease ends. All others lose their leases.
    fault(STOPPED_HOLDERS, Standalone, holders_stopped).loses(Loses::AtLeast(4)).short(),
    fault(KILLED_HOLDERS, Standalone, holders_killed).loses(Loses::Nothing).short(),
    fault("runtimes blocked for 2 leases", Standalone, |_, workers| {
        during(|| {
            // Two workers are blocked at a time.
            for turn in 0..WORKERS + 2 {
                if turn >= 2 {
                    workers[turn - 2].go_on();
                }
                if let Some(worker) = workers.get_mut(turn) {
                    worker.hold();
                }
                sleep(TTL);
            }
        })
    })
    .loses(Loses::AtLeast(WORKERS)),
    fault("stopped for 300 ms (SIGSTOP)", Standalone, |d, _| stopped(d.server(), ms(300))),
    fault(STOPPED, Standalone, server_stopped),
    fault("clients paused for 1 s (CLIENT PAUSE)", Standalone, |d, _| {
        during(|| {
            d.server().pause_clients(SECOND);
            sleep(SECOND);
        })
    }),
    // Clients need no time to follow, since it is the same server.
    fault(EMPTIED, Standalone, server_restarted).forgets(Duration::ZERO).short(),
    fault("killed, restarted with its leases (SIGKILL)", Durable, server_restarted),
    fault(KILLED_CLIENTS, Standalone, clients_killed),
    fault("the listening connections killed 10 times (CLIENT KILL)", Standalone, |d, _| {
        let mut killed = 0;
        let strike = cut(10, || killed += d.server().query::<u64>("CLIENT KILL TYPE pubsub"));
        assert!(killed >= 10, "only {killed} connections were killed");
        strike
    })
    .loses(Loses::Nothing),
    fault("scripts flushed 100 times (SCRIPT FLUSH)", Standalone, |d, _| flushed(&[d.server()])).loses(Loses::Nothing),
    fault("out of memory for 1 s (maxmemory)", Standalone, |d, _| {
        during(|| {
            d.server().limit_memory(1);
            sleep(SECOND);
            d.server().limit_memory(0);
        })
    }),
    fault("20 ms late each way", Network, |d, _| {
        let late = Traffic::Delay(ms(20));
        trouble(d.proxy(), SECOND, |proxy| (proxy.to_server(late), proxy.to_client(late)))
    })
    .loses(Loses::Nothing),
    fault("requests held up for 1 s", Network, |d, _| {
        trouble(d.proxy(), SECOND, |proxy| proxy.to_server(Traffic::Hold))
    }),
    fault("answers swallowed for 2 s", Network, |d, _| {
        trouble(d.proxy(), 2 * SECOND, |proxy| proxy.to_client(Traffic::Swallow))
    }),
    fault("half open for 2 s: reset, then accepted and never answered", Network, |d, _| {
        trouble(d.proxy(), 2 * SECOND, |proxy| {
            proxy.door(Door::Silent);
            proxy.reset();
        })
    }),
    fault("refused for 1 s: reset, and no listener", Network, |d, _| {
        trouble(d.proxy(), SECOND, |proxy| {
            proxy.door(Door::Closed);
            proxy.reset();
        })
    }),
    fault(KILLED_PRIMARY, Sentinel, primary_killed).forgets(SECOND),
    fault("failover for no reason (SENTINEL FAILOVER)", Sentinel, |d, _| {
        let sentinel = d.sentinel();
        let old = sentinel.primary().port();
        let start = Instant::now();
        sentinel.fail_over();
        let (back, _) = sentinel.wait_for_another_primary(old);
        Strike { start, back, lost: None }
    })
    .forgets(SECOND)
    .short(),
    fault("primary stopped until there is another (SIGSTOP)", Sentinel, |d, _| {
        let sentinel = d.sentinel();
        let old = sentinel.primary_index();
        let start = Instant::now();
        sentinel.servers[old].pause();
        let (back, _) = sentinel.wait_for_another_primary(sentinel.servers[old].port());
        sleep(ms(300));
        sentinel.servers[old].resume();
        Strike { start, back, lost: None }
    })
    .forgets(SECOND),
    fault("primaries killed (SIGKILL)", Cluster, |d, _| {
        let cluster = d.cluster();
        // The node that has the first lock.
        let slot = slot(cluster, "a");
        let old = cluster.owner(slot);
        let start = Instant::now();
        cluster.nodes[old].kill();
        let (back, _) = cluster.wait_for_another_owner(slot, old);
        Strike { start, back, lost: None }
    })
    .forgets(SECOND),
    fault("failover for no reason (CLUSTER FAILOVER)", Cluster, |d, _| {
        let cluster = d.cluster();
        let slot = slot(cluster, "a");
        let old = cluster.owner(slot);
        let start = Instant::now();
        cluster.fail_over(old);
        let (back, _) = cluster.wait_for_another_owner(slot, old);
        Strike { start, back, lost: None }
    }),
    fault(MOVED_SLOTS, Cluster, slots_moved),
    fault(STOPPED_IN_QUEUE, Standalone, holders_stopped_in_queue).of(Fair).loses(Loses::AtLeast(3)),
    fault(KILLED_HOLDERS, Standalone, holders_killed_in_queue).of(Fair).loses(Loses::Nothing).short(),
    fault(STOPPED, Standalone, server_stopped).of(Fair),
    fault(EMPTIED, Standalone, server_restarted).of(Fair).forgets(Duration::ZERO),
    fault(KILLED_CLIENTS, Standalone, clients_killed).of(Fair),
    fault(KILLED_PRIMARY, Sentinel, primary_killed).of(Fair).forgets(SECOND),
    fault(MOVED_SLOTS, Cluster, slots_moved).of(Fair),
    fault(STOPPED_IN_QUEUE, Standalone, holders_stopped_in_queue).of(ReadWrite).loses(Loses::AtLeast(3)),
    fault(KILLED_HOLDERS, Standalone, holders_killed_in_queue).of(ReadWrite).loses(Loses::Nothing),
    fault(STOPPED, Standalone, server_stopped).of(ReadWrite),
    fault(EMPTIED, Standalone, server_restarted).of(ReadWrite).forgets(Duration::ZERO),
    fault(KILLED_CLIENTS, Standalone, clients_killed).of(ReadWrite).short(),
    fault(KILLED_PRIMARY, Sentinel, primary_killed).of(ReadWrite).forgets(SECOND),
    fault(MOVED_SLOTS, Cluster, slots_moved).of(ReadWrite),
    fault(STOPPED_HOLDERS, Standalone, holders_stopped).of(Semaphore).loses(Loses::AtLeast(4)),
    fault(KILLED_HOLDERS, Standalone, holders_killed).of(Semaphore).loses(Loses::Nothing),
    fault(STOPPED, Standalone, server_stopped).of(Semaphore),
    fault(EMPTIED, Standalone, server_restarted).of(Semaphore).forgets(Duration::ZERO).short(),
    fault(KILLED_CLIENTS, Standalone, clients_killed).of(Semaphore),
    fault(KILLED_PRIMARY, Sentinel, primary_killed).of(Semaphore).forgets(SECOND),
    fault(MOVED_SLOTS, Cluster, slots_moved).of(Semaphore),
    fault(STOPPED_HOLDERS, Standalone, holders_stopped).of(All).loses(Loses::AtLeast(4)).short(),
    fault(KILLED_HOLDERS, Standalone, holders_killed).of(All).loses(Loses::Nothing),
    fault(STOPPED, Standalone, server_stopped).of(All),
    fault(EMPTIED, Standalone, server_restarted).of(All).forgets(Duration::ZERO),
    fault(KILLED_CLIENTS, Standalone, clients_killed).of(All),
    fault(KILLED_PRIMARY, Sentinel, primary_killed).of(All).forgets(SECOND),
    fault(MOVED_SLOTS, Cluster, slots_moved).of(All),
];

const STOPPED_HOLDERS: &str = "holders stopped for 0.5 to 3 leases (SIGSTOP)";
const STOPPED_IN_QUEUE: &str = "holders stopped for 0.5 to 9 leases (SIGSTOP)";
const KILLED_HOLDERS: &str = "holders killed (SIGKILL)";
const STOPPED: &str = "stopped for 3 leases (SIGSTOP)";
const EMPTIED: &str = "killed, restarted empty at once (SIGKILL)";
const KILLED_CLIENTS: &str = "clients killed 10 times (CLIENT KILL)";
const KILLED_PRIMARY: &str = "primary killed (SIGKILL)";
const MOVED_SLOTS: &str = "the slots of the locks moved (CLUSTER SETSLOT, MIGRATE)";

fn holders_stopped(_: &mut Deployment, workers: &mut [LockWorker]) -> Strike {
    stop_one_by_one(workers, &[1, 2, 3, 4, 6])
}

/// The last holder is stopped for so long that its own queue position expires, if it was next, and another process gets the lock.
fn holders_stopped_in_queue(_: &mut Deployment, workers: &mut [LockWorker]) -> Strike {
    stop_one_by_one(workers, &[1, 2, 4, 18])
}

/// Stops the workers in turn, each for this many half leases.
fn stop_one_by_one(workers: &mut [LockWorker], halves: &[u32]) -> Strike {
    during(|| {
        for (turn, &halves) in halves.iter().enumerate() {
            let worker = &mut workers[turn % WORKERS];
            worker.hold();
            worker.process.pause();
            sleep(TTL / 2 * halves);
            worker.go_on();
            worker.process.resume();
            sleep(ms(50));
        }
    })
}

fn holders_killed(_: &mut Deployment, workers: &mut [LockWorker]) -> Strike {
    during(|| {
        for worker in workers.iter_mut().take(2) {
            worker.hold();
            worker.process.kill();
            sleep(ms(100));
        }
    })
}

/// The deployment is healthy again when the queue positions of the killed processes have expired.
fn holders_killed_in_queue(deployment: &mut Deployment, workers: &mut [LockWorker]) -> Strike {
    during(|| {
        holders_killed(deployment, workers);
        sleep(Claim::POSITION_TTL);
    })
}

fn server_stopped(deployment: &mut Deployment, _: &mut [LockWorker]) -> Strike {
    stopped(deployment.server(), TTL * 3)
}

fn server_restarted(deployment: &mut Deployment, _: &mut [LockWorker]) -> Strike {
    during(|| {
        deployment.server().kill();
        deployment.server().restart();
    })
}

fn clients_killed(deployment: &mut Deployment, _: &mut [LockWorker]) -> Strike {
    let mut killed = 0;
    let strike = cut(10, || killed += deployment.server().kill_clients());
    assert!(killed >= 10, "only {killed} connections were killed");
    strike
}

fn primary_killed(deployment: &mut Deployment, _: &mut [LockWorker]) -> Strike {
    let sentinel = deployment.sentinel();
    let old = sentinel.primary_index();
    let start = Instant::now();
    sentinel.servers[old].kill();
    let (back, _) = sentinel.wait_for_another_primary(sentinel.servers[old].port());
    Strike { start, back, lost: None }
}

fn slots_moved(deployment: &mut Deployment, _: &mut [LockWorker]) -> Strike {
    during(|| {
        let cluster = deployment.cluster();
        let start = Instant::now();
        while start.elapsed() < 2 * SECOND {
            for slot in KEYS.map(|key| slot(cluster, key)) {
                let to = (cluster.owner(slot) + 1) % 3;
                cluster.migrate(slot, to);
                // All nodes have to know the move: the next owner takes an epoch above all epochs known to it. A node that knows a higher
                // epoch would undo the move.
                wait_until("the move is known", || {
                    let mut views = cluster.nodes.iter().map(|node| cluster.views(node));
                    views.all(|views| views.iter().any(|view| view.index == to && view.has(slot)))
                });
            }
        }
    })
}

/// Returns the slot of a lock.
fn slot(cluster: &Nodes, key: &str) -> u16 {
    cluster.nodes[0].query(&format!("CLUSTER KEYSLOT {{lock:default:{key}}}"))
}

/// How soon all locks have to be granted again. The lease of the holder has to end, and waiters without a notification check once a second.
/// A connection attempt that began just before a network healed has to time out.
pub const RECOVERY: Duration = Duration::from_millis(500 + 1_000 + 1_000 + 500);
