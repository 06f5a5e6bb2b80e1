//! The faults of rate limits.

use std::collections::HashMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

use self::Fails::{InFlight, Perhaps};
use self::Loses::{Nothing, Unreplicated, Unsaved};
use super::deployment::Topology::{Cluster, Durable, Network, Sentinel, Standalone};
use super::deployment::{Deployment, Topology, stored_on};
use super::load::Admitted;
use super::support::proxy::{Door, Proxy, Traffic};
use super::support::server::{RedisServer, wait_until};

/// A fault of a deployment that serves rate limits.
#[derive(Debug)]
pub struct Fault {
    pub name: &'static str,
    pub on: Topology,
    /// Whether it is part of the short run.
    pub short: bool,
    /// How soon all calls have to succeed again.
    pub recovery: Duration,
    pub fails: Fails,
    pub loses: Loses,
    pub strike: fn(&mut Deployment, &Admitted) -> Strike,
}

/// Which calls may fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fails {
    Nothing,
    /// Calls in flight when connections are cut, this many times: at most one call per caller and connection each time. Besides these, only
    /// calls that the open circuit rejects.
    InFlight(u32),
    /// Some calls fail. If none does, the fault had no effect.
    Some,
    /// Some calls may fail until the new primary is known.
    Perhaps,
}

/// Which counts are lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loses {
    Nothing,
    /// Counts that no replica had.
    Unreplicated,
    /// Counts that were not on disk.
    Unsaved,
}

/// The result of a fault.
#[derive(Debug)]
pub struct Strike {
    pub start: Instant,
    /// When the store could serve again.
    pub back: Instant,
    /// The units that the store lost, if they could be counted at that moment.
    pub lost: Option<Lost>,
}

/// The units at the moment of a loss, by key.
#[derive(Debug)]
pub struct Lost {
    /// Units that had been admitted.
    pub admitted: HashMap<String, u64>,
    /// Units that are still stored.
    pub kept: HashMap<String, u64>,
}

const fn fault(
    name: &'static str,
    on: Topology,
    fails: Fails,
    loses: Loses,
    strike: fn(&mut Deployment, &Admitted) -> Strike,
) -> Fault {
    Fault { name, on, short: false, recovery: SECOND, fails, loses, strike }
}

impl Fault {
    const fn short(mut self) -> Self {
        self.short = true;
        self
    }

    /// For networks that swallow data: a connection attempt that began just before the network healed has to time out first, which takes a
    /// second.
    const fn after_a_timeout(mut self) -> Self {
        self.recovery = Duration::from_secs(2);
        self
    }
}

pub const SECOND: Duration = Duration::from_secs(1);

pub const fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

/// All faults of rate limits.
pub const FAULTS: &[Fault] = &[
    fault("none", Standalone, Fails::Nothing, Nothing, |_, _| during(|| sleep(SECOND))).short(),
    fault("stopped for 300 ms (SIGSTOP)", Standalone, Fails::Some, Nothing, |d, _| stopped(d.server(), ms(300)))
        .short(),
    fault("stopped for 2.5 s (SIGSTOP)", Standalone, Fails::Some, Nothing, |d, _| stopped(d.server(), ms(2_500)))
        .short(),
    fault("killed, restarted empty (SIGKILL)", Standalone, Fails::Some, Unsaved, |d, admitted| {
        emptied(d.server(), admitted)
    })
    .short(),
    fault("killed, restarted with its counts (SIGKILL)", Durable, Fails::Some, Nothing, |d, _| restarted(d.server()))
        .short(),
    fault("clients killed (CLIENT KILL)", Standalone, InFlight(1), Nothing, |d, _| {
        cut(1, || d.server().kill_clients())
    })
    .short(),
    fault("clients killed 10 times (CLIENT KILL)", Standalone, InFlight(10), Nothing, |d, _| {
        cut(10, || d.server().kill_clients())
    }),
    fault("clients paused for 1 s (CLIENT PAUSE)", Standalone, Fails::Some, Nothing, |d, _| {
        during(|| {
            d.server().pause_clients(SECOND);
            sleep(SECOND);
        })
    })
    .short(),
    fault("scripts flushed 100 times (SCRIPT FLUSH)", Standalone, Fails::Nothing, Nothing, |d, _| {
        flushed(&[d.server()])
    })
    .short(),
    fault("busy for 1 s (DEBUG SLEEP)", Standalone, Fails::Some, Nothing, |d, _| {
        during(|| d.server().debug_sleep(SECOND))
    })
    .short(),
    fault("out of memory for 1 s (maxmemory)", Standalone, Fails::Some, Nothing, |d, _| {
        during(|| {
            d.server().limit_memory(1);
            sleep(SECOND);
            d.server().limit_memory(0);
        })
    })
    .short(),
    fault("20 ms late each way", Network, Fails::Nothing, Nothing, |d, _| {
        let late = Traffic::Delay(ms(20));
        trouble(d.proxy(), SECOND, |proxy| (proxy.to_server(late), proxy.to_client(late)))
    })
    .short(),
    fault("200 ms late each way", Network, Fails::Some, Nothing, |d, _| {
        let late = Traffic::Delay(ms(200));
        trouble(d.proxy(), SECOND, |proxy| (proxy.to_server(late), proxy.to_client(late)))
    }),
    fault("requests held up for 1 s", Network, Fails::Some, Nothing, |d, _| {
        trouble(d.proxy(), SECOND, |proxy| proxy.to_server(Traffic::Hold))
    }),
    fault("answers held up for 1 s", Network, Fails::Some, Nothing, |d, _| {
        trouble(d.proxy(), SECOND, |proxy| proxy.to_client(Traffic::Hold))
    }),
    fault("requests swallowed for 2 s", Network, Fails::Some, Nothing, |d, _| {
        trouble(d.proxy(), 2 * SECOND, |proxy| proxy.to_server(Traffic::Swallow))
    })
    .after_a_timeout()
    .short(),
    fault("answers swallowed for 2 s", Network, Fails::Some, Nothing, |d, _| {
        trouble(d.proxy(), 2 * SECOND, |proxy| proxy.to_client(Traffic::Swallow))
    })
    .after_a_timeout()
    .short(),
    fault("both swallowed for 2 s", Network, Fails::Some, Nothing, |d, _| {
        let lost = Traffic::Swallow;
        trouble(d.proxy(), 2 * SECOND, |proxy| (proxy.to_server(lost), proxy.to_client(lost)))
    })
    .after_a_timeout(),
    fault("connections reset (RST)", Network, InFlight(1), Nothing, |d, _| cut(1, || d.proxy().reset())).short(),
    fault("connections closed (FIN)", Network, InFlight(1), Nothing, |d, _| cut(1, || d.proxy().cut())),
    fault("answers cut off for 1 s (FIN one way)", Network, Fails::Some, Nothing, |d, _| {
        trouble(d.proxy(), SECOND, |proxy| proxy.to_client(Traffic::End))
    }),
    fault("requests cut off for 1 s (FIN one way)", Network, Fails::Some, Nothing, |d, _| {
        trouble(d.proxy(), SECOND, |proxy| proxy.to_server(Traffic::End))
    }),
    fault("half open for 2 s: reset, then accepted and never answered", Network, Fails::Some, Nothing, |d, _| {
        trouble(d.proxy(), 2 * SECOND, |proxy| {
            proxy.door(Door::Silent);
            proxy.reset();
        })
    })
    .after_a_timeout()
    .short(),
    fault("refused for 1 s: reset, and no listener", Network, Fails::Some, Nothing, |d, _| {
        trouble(d.proxy(), SECOND, |proxy| {
            proxy.door(Door::Closed);
            proxy.reset();
        })
    }),
    fault("primary killed (SIGKILL)", Sentinel, Fails::Some, Unreplicated, |d, admitted| {
        let sentinel = d.sentinel();
        let old = sentinel.primary_index();
        let start = Instant::now();
        let lost = last_words(&sentinel.servers[old], &others(&sentinel.servers, &[old]), &[], admitted);
        sentinel.servers[old].kill();
        let (back, _) = sentinel.wait_for_another_primary(sentinel.servers[old].port());
        Strike { start, back, lost: Some(lost) }
    })
    .short(),
    fault("primary killed, replicas 300 ms behind", Sentinel, Fails::Some, Unreplicated, |d, admitted| {
        let sentinel = d.sentinel();
        let old = sentinel.primary_index();
        // A slow connection between the primary and its replicas.
        let line = Proxy::start(sentinel.servers[old].port());
        for replica in others(&sentinel.servers, &[old]) {
            replica.query::<()>(&format!("REPLICAOF 127.0.0.1 {}", line.port()));
            wait_until("the replica follows", || replica.info("master_link_status").is_some_and(|link| link == "up"));
        }
        line.to_client(Traffic::Hold);
        sleep(ms(300));
        let start = Instant::now();
        let lost = last_words(&sentinel.servers[old], &others(&sentinel.servers, &[old]), &[], admitted);
        sentinel.servers[old].kill();
        line.reset();
        let (back, _) = sentinel.wait_for_another_primary(sentinel.servers[old].port());
        Strike { start, back, lost: Some(lost) }
    }),
    fault("failover for no reason (SENTINEL FAILOVER)", Sentinel, Perhaps, Unreplicated, |d, _| {
        let sentinel = d.sentinel();
        let old = sentinel.primary().port();
        let start = Instant::now();
        sentinel.fail_over();
        let (back, _) = sentinel.wait_for_another_primary(old);
        Strike { start, back, lost: None }
    })
    .short(),
    Fault {
        // Without the announcement, the backend would follow at its next query of the Sentinels, which it sends every 0.4 s.
        recovery: ms(250),
        ..fault("failover that is announced (SENTINEL FAILOVER)", Sentinel, Perhaps, Unreplicated, |d, _| {
            let sentinel = d.sentinel();
            let old = sentinel.primary().port();
            let start = Instant::now();
            sentinel.fail_over();
            let (back, _) = sentinel.wait_for_another_primary(old);
            Strike { start, back, lost: None }
        })
    },
    fault("primary stopped until there is another (SIGSTOP)", Sentinel, Fails::Some, Unreplicated, |d, _| {
        let sentinel = d.sentinel();
        let old = sentinel.primary_index();
        let start = Instant::now();
        sentinel.servers[old].pause();
        let (back, _) = sentinel.wait_for_another_primary(sentinel.servers[old].port());
        sleep(ms(300));
        sentinel.servers[old].resume();
        Strike { start, back, lost: None }
    }),
    fault("all Sentinels killed (SIGKILL)", Sentinel, Fails::Nothing, Nothing, |d, _| {
        during(|| {
            d.sentinel().sentinels.iter_mut().for_each(RedisServer::kill);
            sleep(SECOND);
            d.sentinel().sentinels.iter_mut().for_each(RedisServer::restart);
        })
    }),
    fault("a replica killed (SIGKILL)", Sentinel, Fails::Nothing, Nothing, |d, _| {
        during(|| {
            let sentinel = d.sentinel();
            let replica = (sentinel.primary_index() + 1) % 3;
            sentinel.servers[replica].kill();
            sleep(SECOND);
        })
    }),
    fault("clients killed (CLIENT KILL)", Sentinel, InFlight(1), Nothing, |d, _| {
        cut(1, || d.sentinel().primary().kill_clients())
    }),
    fault("scripts flushed 100 times (SCRIPT FLUSH)", Sentinel, Fails::Nothing, Nothing, |d, _| {
        flushed(&[d.sentinel().primary()])
    }),
    fault("a primary killed (SIGKILL)", Cluster, Fails::Some, Unreplicated, |d, admitted| {
        let cluster = d.cluster();
        let slot = cluster.slots_with_keys(0)[0];
        let replica = cluster.replica_of(0);
        let start = Instant::now();
        let (replicas, rest) = ([&cluster.nodes[replica]], others(&cluster.nodes, &[0, replica]));
        let lost = last_words(&cluster.nodes[0], &replicas, &rest, admitted);
        cluster.nodes[0].kill();
        let (back, _) = cluster.wait_for_another_owner(slot, 0);
        Strike { start, back, lost: Some(lost) }
    })
    .short(),
    fault("failover for no reason (CLUSTER FAILOVER)", Cluster, Perhaps, Nothing, |d, _| {
        let cluster = d.cluster();
        let slot = cluster.slots_with_keys(0)[0];
        let start = Instant::now();
        cluster.fail_over(0);
        let (back, _) = cluster.wait_for_another_owner(slot, 0);
        Strike { start, back, lost: None }
    })
    .short(),
    fault("slots moved (CLUSTER SETSLOT, MIGRATE)", Cluster, Fails::Nothing, Nothing, |d, _| {
        during(|| {
            let cluster = d.cluster();
            let start = Instant::now();
            while start.elapsed() < 2 * SECOND {
                for from in 0..3 {
                    // Slots in use are among them. Each slot moves around the cluster.
                    for slot in cluster.slots_with_keys(from).into_iter().rev().take(20) {
                        cluster.migrate(slot, (from + 1) % 3);
                    }
                }
            }
        })
    })
    .short(),
    fault("a primary stopped for 500 ms (SIGSTOP)", Cluster, Fails::Some, Nothing, |d, _| {
        stopped(&d.cluster().nodes[0], ms(500))
    }),
    fault("a primary stopped until there is another (SIGSTOP)", Cluster, Fails::Some, Unreplicated, |d, _| {
        let cluster = d.cluster();
        let slot = cluster.slots_with_keys(0)[0];
        let start = Instant::now();
        cluster.nodes[0].pause();
        let (back, _) = cluster.wait_for_another_owner(slot, 0);
        sleep(ms(300));
        cluster.nodes[0].resume();
        Strike { start, back, lost: None }
    }),
    fault("a replica killed (SIGKILL)", Cluster, Fails::Nothing, Nothing, |d, _| {
        during(|| {
            let cluster = d.cluster();
            let replica = cluster.replica_of(0);
            cluster.nodes[replica].kill();
            sleep(2 * SECOND);
        })
    }),
    fault("clients killed (CLIENT KILL)", Cluster, InFlight(1), Nothing, |d, _| {
        cut(1, || d.cluster().nodes.iter().map(RedisServer::kill_clients).sum::<u64>())
    }),
    fault("scripts flushed 100 times (SCRIPT FLUSH)", Cluster, Fails::Nothing, Nothing, |d, _| {
        flushed(&d.cluster().nodes.iter().collect::<Vec<_>>())
    }),
];

/// Runs a fault that is over when `trouble` returns.
pub fn during(trouble: impl FnOnce()) -> Strike {
    let start = Instant::now();
    trouble();
    Strike { start, back: Instant::now(), lost: None }
}

pub fn stopped(server: &RedisServer, time: Duration) -> Strike {
    during(|| {
        server.pause();
        sleep(time);
        server.resume();
    })
}

fn restarted(server: &mut RedisServer) -> Strike {
    during(|| {
        server.kill();
        sleep(ms(500));
        server.restart();
    })
}

/// Restarts a server that stores nothing on disk, so all units admitted until then are lost.
fn emptied(server: &mut RedisServer, admitted: &Admitted) -> Strike {
    let start = Instant::now();
    let admitted = until_stopped(server, admitted);
    Strike { lost: Some(Lost { admitted, kept: HashMap::new() }), start, ..restarted(server) }
}

pub fn cut<T>(times: u32, mut cut: impl FnMut() -> T) -> Strike {
    during(|| {
        cut();
        for _ in 1..times {
            sleep(ms(150));
            cut();
        }
    })
}

pub fn flushed(servers: &[&RedisServer]) -> Strike {
    during(|| {
        for _ in 0..100 {
            servers.iter().for_each(|server| server.flush_scripts());
            sleep(ms(10));
        }
    })
}

pub fn trouble<T>(proxy: &Proxy, time: Duration, begin: impl FnOnce(&Proxy) -> T) -> Strike {
    during(|| {
        begin(proxy);
        sleep(time);
        proxy.heal();
    })
}

/// Returns all servers except these.
fn others<'a>(servers: &'a [RedisServer], but: &[usize]) -> Vec<&'a RedisServer> {
    servers.iter().enumerate().filter(|(index, _)| !but.contains(index)).map(|(_, server)| server).collect()
}

/// Stops a server before it is killed, and returns the units that had been admitted by then.
fn until_stopped(server: &RedisServer, admitted: &Admitted) -> HashMap<String, u64> {
    server.pause();
    // Its last replies arrive, here and at its replicas.
    sleep(ms(100));
    admitted.lock().expect("the mutex is not poisoned").clone()
}

/// Stops a primary before it is killed. Returns the units that it admitted, and how many of them its replicas have. Units on the `rest` of
/// a cluster are not lost either.
fn last_words(primary: &RedisServer, replicas: &[&RedisServer], rest: &[&RedisServer], admitted: &Admitted) -> Lost {
    let admitted = until_stopped(primary, admitted);
    // The replica with the most units is promoted.
    let stored = replicas.iter().map(|replica| stored_on(replica)).max_by_key(|stored| stored.values().sum::<u64>());
    let mut stored = stored.unwrap_or_default();
    for (subject, used) in rest.iter().flat_map(|server| stored_on(server)) {
        let known = stored.entry(subject).or_default();
        *known = used.max(*known);
    }
    Lost { admitted, kept: stored }
}

/// Returns the units that were admitted and are not stored.
pub fn missing(admitted: &HashMap<String, u64>, stored: &HashMap<String, u64>) -> u64 {
    let used = |subject| stored.get(subject).copied().unwrap_or_default();
    admitted.iter().map(|(subject, units)| units.saturating_sub(used(subject))).sum()
}
