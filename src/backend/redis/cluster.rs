//! The nodes of a cluster: which node serves which slot, and how commands follow changes.
//!
//! The client library has a connection for clusters, too. It repeats a command whose reply is lost or late, which could charge twice.
//! While it reads the slot map, it holds up the commands for all nodes, and it waits for nodes that hang. It does not notice a node
//! that drops all packets. Here each node has its own pool, so a node that is down affects only its own slots. A command is repeated
//! only after a node has replied that the command did not run.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::Duration;

use crc16::{State, XMODEM};
use redis::{Cmd, ConnectionAddr, ErrorKind, RedisError, ServerErrorKind, Value};
use sha2::{Digest, Sha256};
use tokio::sync::{Notify, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, timeout};

use super::address::Address;
use super::connection::connector::Connector;
use super::connection::pool::{Pool, PoolOptions};
use super::connection::timeout_error::{no_connection, no_reply};
use super::error::{not_executed, with_peer};
use super::peer::Peer;
use super::purpose::{ConnectMode, Purpose, ReplicatedPurpose};
use super::replicated::{Outcome, Replicated};
use crate::lock::store::Replicas;

const SLOTS: usize = 16_384;
/// How often a command follows MOVED and ASK without a pause. One migration causes one of each. After more of them, the command pauses
/// first.
const REDIRECTIONS: u32 = 3;
/// The pause after TRYAGAIN, which a node returns while the keys of a script are split between two nodes. Doubles each time.
const MIN_PAUSE: Duration = Duration::from_millis(2);
/// The longest pause. It is short, so that a call with a deadline of 100 ms still has time for its command when the migration ends.
const MAX_PAUSE: Duration = Duration::from_millis(8);
/// How long a command on [`Purpose::Dedicated`] or [`ReplicatedPurpose::Renewals`] follows refusals. Then releases and renewals of locks
/// are sent again with one lock per command, which a node accepts during a migration, too.
const SHORT_FOLLOW_TIMEOUT: Duration = Duration::from_millis(60);
/// How long to wait for the slot map of one node before the next node is asked.
const MAP_TIMEOUT: Duration = Duration::from_millis(200);
/// The pause between two reads of the map, however many commands request one. Doubles after each failure.
const REFRESH_PAUSE: Duration = Duration::from_millis(50);
const MAX_REFRESH_PAUSE: Duration = Duration::from_millis(500);

/// Creates the connector of a node.
pub(crate) type ConnectorFactory = Box<dyn Fn(&Address) -> Result<Connector, RedisError> + Send + Sync>;

/// All nodes of one cluster.
pub(crate) struct Cluster {
    shared: Arc<Shared>,
    // The task that reads the map on request.
    reader: Mutex<AbortHandle>,
}

struct Shared {
    connectors: ConnectorFactory,
    // How many connections to each node, and their timeouts.
    connections: u32,
    options: PoolOptions,
    seeds: Vec<Address>,
    map: RwLock<Arc<Map>>,
    // Pools of seeds and replicas that fail. They are kept between reads of the map, since each new pool would log its failure again.
    seed_pools: Mutex<HashMap<Address, Pool>>,
    stale: Arc<Notify>,
    // Changes after each read of the map.
    map_reads: watch::Sender<()>,
}

/// Which node serves which slot.
struct Map {
    // The index of the node that serves each slot. An index out of bounds means none.
    owners: Arc<[u16]>,
    nodes: Vec<Node>,
    // Replicas, which may know the map, too.
    replicas: Vec<Address>,
}

#[derive(Clone)]
struct Node {
    address: Address,
    requests: Pool,
    dedicated: Pool,
    grants: Replicated,
    renewals: Replicated,
}

impl Node {
    const fn pool(&self, purpose: Purpose) -> &Pool {
        match purpose {
            Purpose::Requests => &self.requests,
            Purpose::Dedicated => &self.dedicated,
        }
    }

    const fn replicated(&self, purpose: ReplicatedPurpose) -> &Replicated {
        match purpose {
            ReplicatedPurpose::Grants => &self.grants,
            ReplicatedPurpose::Renewals => &self.renewals,
        }
    }
}

impl Purpose {
    /// How long a command follows refusals, given the response timeout.
    fn follow_timeout(self, response: Duration) -> Duration {
        match self {
            Self::Requests => response,
            Self::Dedicated => response.min(SHORT_FOLLOW_TIMEOUT),
        }
    }
}

impl ReplicatedPurpose {
    fn follow_timeout(self, response: Duration) -> Duration {
        match self {
            Self::Grants => response,
            Self::Renewals => response.min(SHORT_FOLLOW_TIMEOUT),
        }
    }
}

impl Cluster {
    /// Reads the map from the first seed that returns one. With [`ConnectMode::Disconnected`], a background task tries until it succeeds.
    pub(crate) async fn open(
        seeds: Vec<Address>,
        connectors: ConnectorFactory,
        connections: u32,
        options: PoolOptions,
        mode: ConnectMode,
    ) -> Result<Self, RedisError> {
        let nothing = Map { owners: vec![u16::MAX; SLOTS].into(), nodes: Vec::new(), replicas: Vec::new() };
        let stale = Arc::new(Notify::new());
        let map = RwLock::new(Arc::new(nothing));
        let (seed_pools, map_reads) = (Mutex::default(), watch::Sender::new(()));
        let shared =
            Shared { connectors, connections, options, seeds, map, seed_pools, stale: Arc::clone(&stale), map_reads };
        match mode {
            ConnectMode::Connected => shared.read_map(0).await?,
            ConnectMode::Disconnected => stale.notify_one(),
        }
        let shared = Arc::new(shared);
        let reader = Mutex::new(reader(&shared));
        Ok(Self { shared, reader })
    }

    /// Waits for a connection to each node that serves slots. Returns the number of nodes, and the failures.
    pub(crate) async fn connected(&self) -> (usize, Vec<(Address, RedisError)>) {
        let map = self.shared.map();
        let mut waiting = JoinSet::new();
        for node in map.nodes.iter().cloned() {
            waiting.spawn(async move { (node.requests.connected().await, node.address) });
        }
        let mut failed = Vec::new();
        while let Some(outcome) = waiting.join_next().await {
            if let Ok((Err(error), address)) = outcome {
                failed.push((address.clone(), with_peer(Peer::Node(tcp(&address)), error)));
            }
        }
        failed.sort_by(|(one, _), (other, _)| one.cmp(other));
        (map.nodes.len(), failed)
    }

    /// If the runtime of the reader has ended, starts a reader in the current one.
    fn ensure_reader(&self) {
        let mut reading = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        if reading.is_finished() {
            *reading = reader(&self.shared);
        }
    }

    /// Sends a command to the node that serves the slot of a key, and waits for its reply.
    ///
    /// The command is repeated only after a node has replied that it did not run, and only within the `follow_timeout` of its purpose.
    pub(crate) async fn send(
        &self,
        purpose: Purpose,
        key: &str,
        command: &Cmd,
        timeout_override: Option<Duration>,
    ) -> Result<Value, RedisError> {
        let mut route = self.route(key, purpose.follow_timeout(self.shared.options.response))?;
        loop {
            let (stale_guard, pool) = (route.stale_guard(), route.node.pool(purpose));
            let reply = match timeout_override {
                None => pool.exchange(command, route.asking, None).await,
                Some(_) => tokio::select! {
                    biased;
                    reply = pool.exchange(command, route.asking, timeout_override) => reply,
                    waited = self.shared.replaced(slot(key), &route.node.address) => Err(no_reply(waited)),
                },
            };
            if let Some(reply) = route.handle_reply(reply, stale_guard).await {
                return reply;
            }
        }
    }

    /// Like [`send`](Self::send), and waits until replicas of the node have the granted writes.
    pub(crate) async fn send_replicated(
        &self,
        purpose: ReplicatedPurpose,
        key: &str,
        command: &Cmd,
        replicas: Replicas,
        is_granted: fn(&Value) -> bool,
    ) -> Result<Outcome, RedisError> {
        let mut route = self.route(key, purpose.follow_timeout(self.shared.options.response))?;
        loop {
            let stale_guard = route.stale_guard();
            let reply = route.node.replicated(purpose).exchange(command, route.asking, replicas, is_granted).await;
            if let Some(reply) = route.handle_reply(reply, stale_guard).await {
                return reply;
            }
        }
    }

    /// The route of a command that follows refusals for `follow_timeout`.
    fn route(&self, key: &str, follow_timeout: Duration) -> Result<Route<'_>, RedisError> {
        let node = self.shared.owner(slot(key)).ok_or_else(|| {
            self.ensure_reader();
            self.shared.stale.notify_one();
            not_executed((ErrorKind::ClusterConnectionNotFound, "no node serves the slot of this key").into())
        })?;
        let until = Instant::now() + follow_timeout;
        Ok(Route { cluster: self, node, asking: false, until, redirections: 0, pause: MIN_PAUSE })
    }
}

/// The next node of a command.
struct Route<'a> {
    cluster: &'a Cluster,
    node: Node,
    asking: bool,
    // After this time, the caller gets a refusal as the result.
    until: Instant,
    redirections: u32,
    pause: Duration,
}

impl<'a> Route<'a> {
    fn stale_guard(&self) -> StaleMapGuard<'a> {
        StaleMapGuard { stale: &self.cluster.shared.stale, confirmed: false }
    }

    /// The result for the caller, or `None` if the command has to be sent again.
    async fn handle_reply<T>(
        &mut self,
        reply: Result<T, RedisError>,
        stale_guard: StaleMapGuard<'_>,
    ) -> Option<Result<T, RedisError>> {
        match reply {
            Err(error) if is_map_error(&error) => {
                self.cluster.ensure_reader();
                self.follow(error, stale_guard).await.err().map(Err)
            }
            reply => {
                stale_guard.confirm();
                Some(reply)
            }
        }
    }

    /// Follows a refusal to the next node. Returns the error if it names no next step, or if the time is over.
    async fn follow(&mut self, error: RedisError, stale_guard: StaleMapGuard<'_>) -> Result<(), RedisError> {
        let shared = &*self.cluster.shared;
        let (asking, address) = match (error.kind(), error.redirect_node()) {
            (ErrorKind::Server(ServerErrorKind::Moved), Some((address, _))) => (false, Some(address)),
            (ErrorKind::Server(ServerErrorKind::Ask), Some((address, _))) => (true, Some(address)),
            (ErrorKind::Server(ServerErrorKind::TryAgain), _) => (self.asking, None),
            _ => return Err(error),
        };
        if Instant::now() >= self.until {
            return Err(not_executed(error));
        }
        if asking || address.is_none() {
            // The map stays correct until the slot has finally moved.
            stale_guard.confirm();
        }
        self.asking = asking;
        if let Some(address) = address {
            self.node = shared.node(&parse(address, &self.node.address)?)?;
            self.redirections += 1;
        }
        if address.is_none() || self.redirections > REDIRECTIONS {
            sleep(self.pause).await;
            self.pause = (self.pause * 2).min(MAX_PAUSE);
        }
        Ok(())
    }
}

impl Cluster {
    /// The node that serves the slot of a channel, according to the map.
    pub(crate) fn owner_of(&self, channel: &str) -> Option<Address> {
        self.shared.owner(slot(channel)).map(|node| node.address)
    }

    /// Creates the connector of a node.
    pub(crate) fn connector(&self, address: &Address) -> Result<Connector, RedisError> {
        (self.shared.connectors)(address)
    }

    /// Requests a read of the map.
    pub(crate) fn refresh_map(&self) {
        self.ensure_reader();
        self.shared.stale.notify_one();
    }

    /// Changes after each read of the map, even if the map is the same.
    pub(crate) fn map_reads(&self) -> watch::Receiver<()> {
        self.shared.map_reads.subscribe()
    }

    /// Sends a command to the first node whose number (see `numbered`) is at least `number`, and returns its number and reply. `None` if
    /// there is none.
    pub(crate) async fn send_to(
        &self,
        purpose: Purpose,
        number: u32,
        command: impl Fn(u32) -> Cmd,
    ) -> Option<(u32, Result<Value, RedisError>)> {
        let map = self.shared.map();
        if map.nodes.is_empty() {
            self.ensure_reader();
            self.shared.stale.notify_one();
            let unknown = "no node of the cluster has answered yet";
            // The highest number: the caller's iteration ends here.
            return Some((u32::MAX, Err((ErrorKind::ClusterConnectionNotFound, unknown).into())));
        }
        let (number, node) = numbered(&map.nodes, |node| &node.address).into_iter().find(|(own, _)| *own >= number)?;
        let stale_guard = StaleMapGuard { stale: &self.shared.stale, confirmed: false };
        let reply = node.pool(purpose).send(&command(number)).await;
        if reply.is_ok() {
            stale_guard.confirm();
        }
        Some((number, reply))
    }
}

/// The nodes in an order that does not depend on slots. Each has a number that stays the same when other nodes come and go.
fn numbered<T>(nodes: &[T], address: impl Fn(&T) -> &Address) -> Vec<(u32, &T)> {
    let hash = |node| {
        let (host, port) = address(node);
        let [a, b, c, d, ..]: [u8; 32] = Sha256::digest(format!("{host}:{port}")).into();
        // At most half of the range, so adding 1 below cannot overflow.
        u32::from_be_bytes([a, b, c, d]) >> 1
    };
    let mut nodes: Vec<_> = nodes.iter().map(|node| (hash(node), node)).collect();
    nodes.sort_by(|(one, a), (other, b)| one.cmp(other).then_with(|| address(a).cmp(address(b))));
    let mut free = 0;
    for (number, _) in &mut nodes {
        *number = free.max(*number);
        free = *number + 1;
    }
    nodes
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.reader.get_mut().unwrap_or_else(PoisonError::into_inner).abort();
    }
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let map = self.shared.map();
        f.debug_map().entries(map.nodes.iter().map(|node| (&node.address, &node.requests))).finish()
    }
}

impl Shared {
    fn map(&self) -> Arc<Map> {
        Arc::clone(&self.map.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn set_map(&self, map: Map) {
        *self.map.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(map);
    }

    fn owner(&self, slot: u16) -> Option<Node> {
        let map = self.map();
        map.nodes.get(usize::from(map.owners[usize::from(slot)])).cloned()
    }

    /// The node with this address. If the map has none, adds it until the next read replaces the map.
    fn node(&self, address: &Address) -> Result<Node, RedisError> {
        let existing = |map: &Map| map.nodes.iter().find(|node| node.address == *address).cloned();
        if let Some(node) = existing(&self.map()) {
            return Ok(node);
        }
        let mut map = self.map.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(node) = existing(&map) {
            return Ok(node);
        }
        let node = self.open(address)?;
        let nodes = map.nodes.iter().chain([&node]).cloned().collect();
        *map = Arc::new(Map { owners: Arc::clone(&map.owners), nodes, replicas: map.replicas.clone() });
        Ok(node)
    }

    /// Waits for the response timeout, and then until the map assigns the slot to a new node other than `target`. Returns how long both
    /// took. After the response timeout, it keeps requesting reads of the map, since `target` may be dead.
    async fn replaced(&self, slot: u16, target: &Address) -> Duration {
        let started = Instant::now();
        let owner = || self.owner(slot).map(|node| node.address);
        // May differ from `target` after a redirection.
        let before = owner();
        sleep(self.options.response).await;
        loop {
            let now = owner();
            if now.is_some() && now != before && now.as_ref() != Some(target) {
                return started.elapsed();
            }
            self.stale.notify_one();
            sleep(MAP_TIMEOUT).await;
        }
    }

    fn open(&self, address: &Address) -> Result<Node, RedisError> {
        let connector = (self.connectors)(address)?;
        let server_state = Arc::default();
        let requests = Pool::lazy(connector.clone(), self.connections, self.options.clone(), &server_state);
        let dedicated = Pool::lazy(connector.clone(), 1, self.options.clone(), &server_state);
        let [grants, renewals] =
            [(); 2].map(|()| Replicated::new(connector.clone(), self.connections, self.options.clone()));
        Ok(Node { address: address.clone(), requests, dedicated, grants, renewals })
    }

    /// A pool of one connection for a seed or replica.
    fn seed_pool(&self, address: &Address) -> Result<Pool, RedisError> {
        let mut seed_pools = self.seed_pools.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = seed_pools.get(address) {
            return Ok(pool.clone());
        }
        let pool = Pool::lazy((self.connectors)(address)?, 1, self.options.clone(), &Arc::default());
        seed_pools.insert(address.clone(), pool.clone());
        Ok(pool)
    }

    /// Keeps only pools that fail to connect and may be needed again.
    fn prune_seed_pools(&self, map: &Map) {
        let mut seed_pools = self.seed_pools.lock().unwrap_or_else(PoisonError::into_inner);
        seed_pools.retain(|address, pool| {
            let is_needed = map.replicas.contains(address) || self.seeds.contains(address);
            is_needed && pool.is_failing()
        });
    }

    /// Asks the nodes for the map, one after the other, and stores the first map that it gets. Each attempt begins with another node,
    /// because a node that is cut off from the others returns a wrong map.
    async fn read_map(&self, attempt: usize) -> Result<(), RedisError> {
        let map = self.map();
        let mut existing: Vec<_> = map.nodes.iter().map(|node| (&node.address, Some(&node.requests))).collect();
        if !existing.is_empty() {
            let first = attempt % existing.len();
            existing.rotate_left(first);
        }
        let seed_pools = map.replicas.iter().chain(&self.seeds).map(|address| (address, None));
        let mut failure = None;
        for (address, pool) in existing.into_iter().chain(seed_pools) {
            let reply = async {
                match pool {
                    Some(pool) => pool.send(&slots_command()).await,
                    None => self.seed_pool(address)?.send(&slots_command()).await,
                }
            };
            // Pools of seeds and replicas have to connect first.
            let map_timeout = if pool.is_some() { MAP_TIMEOUT } else { self.options.connect + MAP_TIMEOUT };
            let reply = timeout(map_timeout, reply).await.unwrap_or_else(|_| Err(no_connection(map_timeout)));
            match reply.and_then(|reply| self.read(&reply, address, &map)) {
                Ok(new) => {
                    self.prune_seed_pools(&new);
                    self.set_map(new);
                    self.map_reads.send_replace(());
                    return Ok(());
                }
                // At startup, the first error is about a seed, which the user configured.
                Err(error) => failure = failure.or_else(|| Some(with_peer(Peer::Seed(tcp(address)), error))),
            }
        }
        Err(failure.unwrap_or_else(|| no_connection(self.options.connect)))
    }

    /// Parses the reply to `CLUSTER SLOTS`: `[first slot, last slot, [host, port, ...] of the primary, and of each replica]`.
    fn read(&self, reply: &Value, sender: &Address, old: &Map) -> Result<Map, RedisError> {
        let mut owners = vec![u16::MAX; SLOTS];
        let mut nodes = Vec::<Node>::new();
        let mut indexes = HashMap::<Address, u16>::new();
        let mut replicas = Vec::new();
        let ranges = match reply {
            Value::Array(ranges) if !ranges.is_empty() => ranges,
            Value::Array(_) => {
                return Err((ErrorKind::ClusterConnectionNotFound, "no node of the cluster serves any slot").into());
            }
            _ => return Err(malformed_reply()),
        };
        for range in ranges {
            let Value::Array(range) = range else { return Err(malformed_reply()) };
            let [Value::Int(first), Value::Int(last), primary, replica_entries @ ..] = &**range else {
                return Err(malformed_reply());
            };
            let (first, last) = (usize::try_from(*first), usize::try_from(*last));
            let (Ok(first), Ok(last @ ..SLOTS)) = (first, last) else { return Err(malformed_reply()) };
            let address = address(primary, sender).ok_or_else(malformed_reply)?;
            let index = match indexes.get(&address) {
                Some(&index) => index,
                None => {
                    let existing = old.nodes.iter().find(|node| node.address == address);
                    let index = nodes.len() as u16;
                    nodes.push(existing.map_or_else(|| self.open(&address), |node| Ok(node.clone()))?);
                    indexes.insert(address, index);
                    index
                }
            };
            owners.get_mut(first..=last).ok_or_else(malformed_reply)?.fill(index);
            replicas.extend(replica_entries.iter().filter_map(|node| self::address(node, sender)));
        }
        replicas.sort_unstable();
        replicas.dedup();
        Ok(Map { owners: owners.into(), nodes, replicas })
    }
}

fn reader(shared: &Arc<Shared>) -> AbortHandle {
    tokio::spawn(read_when_stale(Arc::downgrade(shared), Arc::clone(&shared.stale))).abort_handle()
}

/// Reads the map on each request, until the cluster is dropped.
async fn read_when_stale(shared: Weak<Shared>, stale: Arc<Notify>) {
    let mut pause = REFRESH_PAUSE;
    for attempt in 1.. {
        stale.notified().await;
        let Some(shared) = shared.upgrade() else { return };
        match shared.read_map(attempt).await {
            Ok(()) => pause = REFRESH_PAUSE,
            Err(error) => {
                tracing::debug!(%error, "cannot read the slot map of the redis cluster");
                pause = (pause * 2).min(MAX_REFRESH_PAUSE);
            }
        }
        if shared.map().nodes.is_empty() {
            // Without nodes, the reader continues even if no command requests a read.
            stale.notify_one();
        }
        drop(shared);
        sleep(pause).await;
    }
}

/// Requests a read of the map if a command fails or is abandoned before its reply: the node may no longer serve the slot.
struct StaleMapGuard<'a> {
    stale: &'a Notify,
    confirmed: bool,
}

impl StaleMapGuard<'_> {
    fn confirm(mut self) {
        self.confirmed = true;
    }
}

impl Drop for StaleMapGuard<'_> {
    fn drop(&mut self) {
        if !self.confirmed {
            self.stale.notify_one();
        }
    }
}

/// Whether an error can mean that the map is old: the command went to the wrong node, or its node failed.
fn is_map_error(error: &RedisError) -> bool {
    use ServerErrorKind::{Ask, BusyLoading, ClusterDown, MasterDown, Moved, ReadOnly, TryAgain};
    match error.kind() {
        ErrorKind::Server(kind) => {
            matches!(kind, Moved | Ask | TryAgain | ClusterDown | MasterDown | ReadOnly | BusyLoading)
        }
        // Includes failures to connect, in which case no node has received the command.
        _ => error.is_io_error() || error.is_timeout() || error.is_connection_dropped(),
    }
}

/// The slot of a key, from the text between its first braces if there is any, as in the Redis Cluster specification.
pub(crate) fn slot(key: &str) -> u16 {
    let tag = key.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map(|(tag, _)| tag);
    let hashed = tag.filter(|tag| !tag.is_empty()).unwrap_or(key);
    State::<XMODEM>::calculate(hashed.as_bytes()) % SLOTS as u16
}

fn slots_command() -> Cmd {
    let mut command = redis::cmd("CLUSTER");
    command.arg("SLOTS");
    command
}

/// Host and port in the reply of a node. A node that does not know its own host is at the host of `sender`.
fn address(node: &Value, sender: &Address) -> Option<Address> {
    let Value::Array(node) = node else { return None };
    let [host, Value::Int(port), ..] = &**node else { return None };
    let host = match host {
        Value::BulkString(host) => std::str::from_utf8(host).ok()?,
        Value::SimpleString(host) => host,
        Value::Nil => "",
        _ => return None,
    };
    Some((known_host(host, sender), u16::try_from(*port).ok()?))
}

/// `host:port` in a redirection.
fn parse(address: &str, sender: &Address) -> Result<Address, RedisError> {
    let parsed = address.rsplit_once(':').and_then(|(host, port)| Some((known_host(host, sender), port.parse().ok()?)));
    parsed.ok_or_else(malformed_reply)
}

fn tcp((host, port): &Address) -> ConnectionAddr {
    ConnectionAddr::Tcp(host.clone(), *port)
}

fn known_host(host: &str, sender: &Address) -> String {
    if matches!(host, "" | "?") { sender.0.clone() } else { host.to_owned() }
}

fn malformed_reply() -> RedisError {
    (ErrorKind::UnexpectedReturnType, "unexpected reply to CLUSTER SLOTS, or unexpected redirection").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_match_the_specification() {
        // `CLUSTER KEYSLOT` of Redis 7.0.15.
        for (key, expected) in [
            ("123456789", 12_739),
            ("foo", 12_182),
            ("{foo}bar", 12_182),
            ("a{foo}{bar}", 12_182),
            ("a{}foo", slot_of_whole("a{}foo")),
            ("a{foo", slot_of_whole("a{foo")),
        ] {
            assert_eq!(slot(key), expected, "{key}");
        }
    }

    fn slot_of_whole(key: &str) -> u16 {
        State::<XMODEM>::calculate(key.as_bytes()) % 16_384
    }

    #[test]
    fn node_numbers_are_stable() {
        let nodes: Vec<Address> = (7_000..7_100).map(|port| ("10.0.0.1".to_owned(), port)).collect();
        let all = numbered(&nodes, |node| node);
        assert!(all.is_sorted_by(|(one, _), (other, _)| one < other));
        let some: Vec<_> = nodes.iter().rev().step_by(3).cloned().collect();
        assert!(numbered(&some, |node| node).iter().all(|numbered| all.contains(numbered)));
        // If two nodes had the same number, each would still be reached.
        let twice = [nodes[0].clone(), nodes[0].clone()];
        let numbers: Vec<_> = numbered(&twice, |node| node).into_iter().map(|(number, _)| number).collect();
        assert_eq!(numbers[0] + 1, numbers[1]);
    }

    #[test]
    fn missing_host_means_the_replying_node() {
        let sender = ("10.0.0.1".to_owned(), 7000);
        for (address, expected) in
            [("10.0.0.2:7001", "10.0.0.2"), (":7001", "10.0.0.1"), ("?:7001", "10.0.0.1"), ("::1:7001", "::1")]
        {
            assert_eq!(parse(address, &sender).unwrap(), (expected.to_owned(), 7001));
        }
        assert!(parse("10.0.0.2", &sender).is_err());
        assert!(parse("10.0.0.2:port", &sender).is_err());
    }
}
