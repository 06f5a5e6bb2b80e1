//! A primary, two replicas, and three Sentinels that monitor them.

use std::fs;
use std::thread;
use std::time::Instant;

use redis::Connection;

use super::server::{RedisServer, folder_in_memory, free_port, query, version, wait_until, words};

/// The service name of the servers.
pub const SERVICE: &str = "orders";

const SERVERS: usize = 3;
const SENTINELS: usize = 3;

/// Two of three Sentinels agree that a primary is down if it has not answered for a second, or for two seconds with Redis 6.2.
#[derive(Debug)]
pub struct SentinelDeployment {
    /// The first server is the initial primary.
    pub servers: Vec<RedisServer>,
    pub sentinels: Vec<RedisServer>,
}

impl SentinelDeployment {
    /// Starts all servers, and waits until the replicas follow and the Sentinels know each other.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Like [`start`](Self::start), with further arguments for the servers.
    pub fn start_with(args: &[&str]) -> Self {
        // Replicas begin to follow at once, and are pinged every second.
        let mut all = vec!["--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0"];
        all.extend(["--repl-ping-replica-period", "1"]);
        all.extend(args);
        let primary = RedisServer::start_with(&all);
        let port = primary.port().to_string();
        all.extend(["--replicaof", "127.0.0.1", &port]);
        let mut servers = vec![primary];
        servers.extend(together(SERVERS - 1, |_| RedisServer::start_with(&all)));
        let deployment = Self { sentinels: start_sentinels(&servers), servers };
        deployment.wait_until_whole();
        deployment
    }

    /// `redis+sentinel://` with all Sentinels, the service and database 0.
    pub fn url(&self) -> String {
        let sentinels: Vec<_> = self.sentinels.iter().map(|node| format!("127.0.0.1:{}", node.port())).collect();
        format!("redis+sentinel://{}/{SERVICE}/0", sentinels.join(","))
    }

    /// The primary, according to the first Sentinel that answers.
    pub fn primary(&self) -> &RedisServer {
        &self.servers[self.primary_index()]
    }

    pub fn primary_index(&self) -> usize {
        let port = self.sentinels.iter().find_map(announced).expect("a Sentinel answers");
        self.servers.iter().position(|server| server.port() == port).expect("the primary is one of the servers")
    }

    /// Kills the primary as a crash would, and returns its index.
    pub fn kill_primary(&mut self) -> usize {
        let index = self.primary_index();
        self.servers[index].kill();
        index
    }

    /// Makes the Sentinels promote another server although the primary is healthy.
    pub fn fail_over(&self) {
        self.sentinels[0].query::<()>(&format!("SENTINEL FAILOVER {SERVICE}"));
    }

    /// Waits until a Sentinel announces a primary on another port than `old`. Returns the time and the index of the server.
    pub fn wait_for_another_primary(&self, old: u16) -> (Instant, usize) {
        let mut connections: Vec<Connection> = self.sentinels.iter().map(RedisServer::connection).collect();
        let mut port = old;
        wait_until("another primary is announced", || {
            let ports = connections.iter_mut().filter_map(ask);
            port = ports.into_iter().find(|port| *port != old).unwrap_or(old);
            port != old
        });
        let now = Instant::now();
        (now, self.servers.iter().position(|server| server.port() == port).expect("the primary is one of the servers"))
    }

    /// Waits until the replicas follow the primary that all Sentinels announce, and the Sentinels know all servers and each other.
    pub fn wait_until_whole(&self) {
        wait_until("the Sentinels know the replicas and each other", || {
            let primary = announced(&self.sentinels[0]);
            self.sentinels.iter().all(|sentinel| {
                let known = sentinel.text("INFO sentinel");
                announced(sentinel) == primary
                    && known.contains(&format!("status=ok,address=127.0.0.1:{}", primary.unwrap_or_default()))
                    && known.contains(&format!("slaves={},sentinels={SENTINELS}", SERVERS - 1))
            })
        });
        wait_until("the replicas follow", || self.primary().is_followed_by(SERVERS - 1));
    }
}

/// The port of the primary according to this Sentinel, if it answers.
fn announced(sentinel: &RedisServer) -> Option<u16> {
    sentinel.is_answering().then(|| ask(&mut sentinel.connection())).flatten()
}

fn ask(sentinel: &mut Connection) -> Option<u16> {
    let address: Option<(String, String)> =
        query(sentinel, &format!("SENTINEL GET-MASTER-ADDR-BY-NAME {SERVICE}")).unwrap_or_default();
    address.and_then(|(_, port)| port.parse().ok())
}

/// The configuration of each Sentinel names the others, since discovery takes seconds.
fn start_sentinels(servers: &[RedisServer]) -> Vec<RedisServer> {
    let id = |number: usize| format!("{:040x}", number + 1);
    // Redis 6.2 has fixed periods: one second between pings, and two seconds between the announcements of Sentinels.
    let can_hurry = version() >= (7, 0);
    let down_after = if can_hurry { 1_000 } else { 2_000 };
    for _ in 0..10 {
        let ports: Vec<u16> = (0..SENTINELS).map(|_| free_port()).collect();
        let sentinels = together(SENTINELS, |number| {
            let mut config = format!(
                "port {}\nbind 127.0.0.1\nsentinel myid {}\nsentinel monitor {SERVICE} 127.0.0.1 {} 2\n\
                 sentinel down-after-milliseconds {SERVICE} {down_after}\nsentinel failover-timeout {SERVICE} 3000\n\
                 sentinel parallel-syncs {SERVICE} {SERVERS}\n",
                ports[number],
                id(number),
                servers[0].port()
            );
            for replica in &servers[1..] {
                config += &format!("sentinel known-replica {SERVICE} 127.0.0.1 {}\n", replica.port());
            }
            for other in (0..SENTINELS).filter(|other| *other != number) {
                config += &format!("sentinel known-sentinel {SERVICE} 127.0.0.1 {} {}\n", ports[other], id(other));
            }
            let folder = folder_in_memory().expect("a temporary folder can be made");
            fs::write(folder.path().join("sentinel.conf"), config).expect("a file can be written");
            RedisServer::try_start(ports[number], words("sentinel.conf --sentinel"), folder)
        });
        // Another process may have taken a port before its Sentinel did.
        if sentinels.iter().all(Option::is_some) {
            let sentinels: Vec<RedisServer> = sentinels.into_iter().flatten().collect();
            // If a server reports that it is a primary, but a Sentinel takes it for a replica, the Sentinel demotes it after four publish
            // periods. Four periods have to be longer than the second in which the leader of a failover asks for roles. Otherwise a
            // Sentinel that has not heard of the failover yet undoes it.
            // Several pings have to fit into the time after which a server counts as down. Otherwise one late ping would be enough.
            if can_hurry {
                for sentinel in &sentinels {
                    sentinel.query::<()>("SENTINEL DEBUG PUBLISH-PERIOD 500 INFO-PERIOD 1000 PING-PERIOD 200");
                }
            }
            return sentinels;
        }
    }
    panic!("the Sentinels do not start");
}

/// Makes `number` values concurrently.
pub(super) fn together<T: Send>(number: usize, make: impl Fn(usize) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let made: Vec<_> = (0..number)
            .map(|number| {
                scope.spawn({
                    let make = &make;
                    move || make(number)
                })
            })
            .collect();
        made.into_iter().map(|made| made.join().expect("the thread does not panic")).collect()
    })
}
