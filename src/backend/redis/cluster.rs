//! The nodes of a cluster: who serves which slot, and what to do when that changes.
//!
//! The client library has a connection for clusters as well. It sends a command again when its answer is lost or late, which
//! could charge twice; while it reads the map anew it holds up the commands for all nodes, and it waits for nodes that hang;
//! and it does not notice a node that swallows commands. Here each node has a pool of its own, so that a node that is down
//! concerns its own slots only, and a command is sent again only after a node has said that it did not run it.

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

use super::connect_error::Peer;
use super::connection::connect::Connector;
use super::connection::handle::no_reply;
use super::connection::pool::{Pool, PoolOptions, no_connection};
use super::error::{at, unsent};
use super::replicated::{Outcome, Replicated};
use super::topology::{CarefulLane, ConnectMode, Purpose};
use crate::lock::Replicas;

const SLOTS: usize = 16_384;
/// How often a command follows MOVED and ASK at once. One move gives one of each; a command that meets more of them waits in between.
const REDIRECTIONS: u32 = 3;
/// The pause after TRYAGAIN, which a node says while it has some keys of a script and another node has the others; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
/// The longest pause: a call with a deadline of 100 ms should not spend the rest of it asleep once the slot has moved.
const LONGEST_REFUSAL_PAUSE: Duration = Duration::from_millis(8);
/// How long a command on [`Purpose::Dedicated`] follows refusals. Releases and renewals of locks then try fewer keys at a time, which a node accepts.
const BRIEFLY: Duration = Duration::from_millis(60);
/// How long a node may take to tell the map before another one is asked.
const PATIENCE: Duration = Duration::from_millis(200);
/// The pause between two looks at the map, however many commands ask for one; doubled while nobody tells it.
const REST: Duration = Duration::from_millis(50);
const LONGEST_REST: Duration = Duration::from_millis(500);

/// Host and port of a node.
pub(crate) type Address = (String, u16);

/// Where the connections to a node come from.
pub(crate) type Connectors = Box<dyn Fn(&Address) -> Result<Connector, RedisError> + Send + Sync>;

/// All nodes of one cluster.
pub(crate) struct Cluster {
    shared: Arc<Shared>,
    // Reads the map anew when somebody asks for it.
    reader: Mutex<AbortHandle>,
}

struct Shared {
    connectors: Connectors,
    // How many connections to each node, and how long opening one may take.
    connections: u32,
    terms: PoolOptions,
    seeds: Vec<Address>,
    map: RwLock<Arc<Map>>,
    // Connections to those who may know the map and serve nothing, while these fail: each failure would be news otherwise.
    seed_pools: Mutex<HashMap<Address, Pool>>,
    stale: Arc<Notify>,
    // Each time that the map was read.
    reads: watch::Sender<()>,
}

/// Who serves what.
struct Map {
    // Which of the nodes serves each slot; a number without a node behind it means none.
    owners: Arc<[u16]>,
    nodes: Vec<Node>,
    // Who else may know the map.
    replicas: Vec<Address>,
}

#[derive(Clone)]
struct Node {
    address: Address,
    requests: Pool,
    apart: Pool,
    grants: Replicated,
    renewals: Replicated,
}

impl Node {
    const fn pool(&self, lane: Purpose) -> &Pool {
        match lane {
            Purpose::Requests => &self.requests,
            Purpose::Dedicated => &self.apart,
        }
    }

    const fn careful(&self, lane: CarefulLane) -> &Replicated {
        match lane {
            CarefulLane::Grants => &self.grants,
            CarefulLane::Renewals => &self.renewals,
        }
    }
}

impl Purpose {
    /// How long a command follows refusals, if answers are waited for so long.
    fn follows(self, response: Duration) -> Duration {
        match self {
            Self::Requests => response,
            Self::Dedicated => response.min(BRIEFLY),
        }
    }
}

impl CarefulLane {
    fn follows(self, response: Duration) -> Duration {
        match self {
            Self::Grants => response,
            Self::Renewals => response.min(BRIEFLY),
        }
    }
}

impl Cluster {
    /// Reads the map from the first of the seeds that has it; in the background until one has, if there need not be one to begin with.
    pub(crate) async fn open(
        seeds: Vec<Address>,
        connectors: Connectors,
        connections: u32,
        terms: PoolOptions,
        start: ConnectMode,
    ) -> Result<Self, RedisError> {
        let nothing = Map { owners: vec![u16::MAX; SLOTS].into(), nodes: Vec::new(), replicas: Vec::new() };
        let stale = Arc::new(Notify::new());
        let map = RwLock::new(Arc::new(nothing));
        let (seed_pools, reads) = (Mutex::default(), watch::Sender::new(()));
        let shared =
            Shared { connectors, connections, terms, seeds, map, seed_pools, stale: Arc::clone(&stale), reads };
        match start {
            ConnectMode::Connected => shared.read_map(0).await?,
            ConnectMode::Disconnected => stale.notify_one(),
        }
        let shared = Arc::new(shared);
        let reader = Mutex::new(reader(&shared));
        Ok(Self { shared, reader })
    }

    /// Waits until there is a connection to each of the nodes that serve slots. Of those to which there is none, says why.
    pub(crate) async fn connected(&self) -> (usize, Vec<(Address, RedisError)>) {
        let map = self.shared.map();
        let mut waiting = JoinSet::new();
        for node in map.nodes.iter().cloned() {
            waiting.spawn(async move { (node.requests.connected().await, node.address) });
        }
        let mut failed = Vec::new();
        while let Some(outcome) = waiting.join_next().await {
            if let Ok((Err(error), address)) = outcome {
                failed.push((address.clone(), at(Peer::Node(tcp(&address)), error)));
            }
        }
        failed.sort_by(|(one, _), (other, _)| one.cmp(other));
        (map.nodes.len(), failed)
    }

    /// Has the map read in this runtime from now on if the one has ended in which that was done.
    fn read_on(&self) {
        let mut reading = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        if reading.is_finished() {
            *reading = reader(&self.shared);
        }
    }

    /// Sends a command to the node that serves the slot of a key, and waits for its answer.
    ///
    /// It is sent again only when a node says that it has not run it, and for no longer than answers are waited for.
    pub(crate) async fn send(
        &self,
        lane: Purpose,
        key: &str,
        command: &Cmd,
        patience: Option<Duration>,
    ) -> Result<Value, RedisError> {
        let mut route = self.route(key, lane.follows(self.shared.terms.response))?;
        loop {
            let (doubt, pool) = (route.doubt(), route.node.pool(lane));
            let answer = match patience {
                None => pool.exchange(command, route.asking, None).await,
                Some(_) => tokio::select! {
                    biased;
                    answer = pool.exchange(command, route.asking, patience) => answer,
                    waited = self.shared.replaced(slot(key), &route.node.address) => Err(no_reply(waited)),
                },
            };
            if let Some(answer) = route.heard(answer, doubt).await {
                return answer;
            }
        }
    }

    /// The same, and waits until replicas of that node have what it has granted.
    pub(crate) async fn send_carefully(
        &self,
        lane: CarefulLane,
        key: &str,
        command: &Cmd,
        replicas: Replicas,
        is_granted: fn(&Value) -> bool,
    ) -> Result<Outcome, RedisError> {
        let mut route = self.route(key, lane.follows(self.shared.terms.response))?;
        loop {
            let doubt = route.doubt();
            let answer = route.node.careful(lane).exchange(command, route.asking, replicas, is_granted).await;
            if let Some(answer) = route.heard(answer, doubt).await {
                return answer;
            }
        }
    }

    /// The way of a command that follows refusals for a while.
    fn route(&self, key: &str, follows: Duration) -> Result<Route<'_>, RedisError> {
        let node = self.shared.owner(slot(key)).ok_or_else(|| {
            self.read_on();
            self.shared.stale.notify_one();
            unsent((ErrorKind::ClusterConnectionNotFound, "no node serves the slot of this key").into())
        })?;
        let until = Instant::now() + follows;
        Ok(Route { cluster: self, node, asking: false, until, redirections: 0, pause: FIRST_PAUSE })
    }
}

/// Which node a command goes to next.
struct Route<'a> {
    cluster: &'a Cluster,
    node: Node,
    asking: bool,
    // When a refusal becomes the answer.
    until: Instant,
    redirections: u32,
    pause: Duration,
}

impl<'a> Route<'a> {
    fn doubt(&self) -> StaleMapGuard<'a> {
        StaleMapGuard { stale: &self.cluster.shared.stale, settled: false }
    }

    /// What the node says, or `None` if the command is to be sent again.
    async fn heard<T>(
        &mut self,
        answer: Result<T, RedisError>,
        doubt: StaleMapGuard<'_>,
    ) -> Option<Result<T, RedisError>> {
        match answer {
            Err(error) if concerns_the_map(&error) => {
                self.cluster.read_on();
                self.follow(error, doubt).await.err().map(Err)
            }
            answer => {
                doubt.settle();
                Some(answer)
            }
        }
    }

    /// Goes where a node says that it has not run a command, unless it says no such thing.
    async fn follow(&mut self, error: RedisError, doubt: StaleMapGuard<'_>) -> Result<(), RedisError> {
        let shared = &*self.cluster.shared;
        let (asking, address) = match (error.kind(), error.redirect_node()) {
            (ErrorKind::Server(ServerErrorKind::Moved), Some((address, _))) => (false, Some(address)),
            (ErrorKind::Server(ServerErrorKind::Ask), Some((address, _))) => (true, Some(address)),
            (ErrorKind::Server(ServerErrorKind::TryAgain), _) => (self.asking, None),
            _ => return Err(error),
        };
        if Instant::now() >= self.until {
            return Err(unsent(error));
        }
        if asking || address.is_none() {
            // One move at a time: the map stays right until the slot has moved for good.
            doubt.settle();
        }
        self.asking = asking;
        if let Some(address) = address {
            self.node = shared.node(&parse(address, &self.node.address)?)?;
            self.redirections += 1;
        }
        if address.is_none() || self.redirections > REDIRECTIONS {
            sleep(self.pause).await;
            self.pause = (self.pause * 2).min(LONGEST_REFUSAL_PAUSE);
        }
        Ok(())
    }
}

impl Cluster {
    /// The node that serves the slot of a channel, by the map.
    pub(crate) fn owner_of(&self, channel: &str) -> Option<Address> {
        self.shared.owner(slot(channel)).map(|node| node.address)
    }

    /// Where connections to a node come from.
    pub(crate) fn connector(&self, address: &Address) -> Result<Connector, RedisError> {
        (self.shared.connectors)(address)
    }

    /// Has the map read anew.
    pub(crate) fn doubt(&self) {
        self.read_on();
        self.shared.stale.notify_one();
    }

    /// Changes each time that the map was read, whether or not it is another one.
    pub(crate) fn reads(&self) -> watch::Receiver<()> {
        self.shared.reads.subscribe()
    }

    /// Sends a command to the node of this number, or of the next one that there is.
    pub(crate) async fn send_to(
        &self,
        lane: Purpose,
        number: u32,
        command: impl Fn(u32) -> Cmd,
    ) -> Option<(u32, Result<Value, RedisError>)> {
        let map = self.shared.map();
        if map.nodes.is_empty() {
            self.read_on();
            self.shared.stale.notify_one();
            let unknown = "no node of the cluster has answered yet";
            // Nobody else comes after.
            return Some((u32::MAX, Err((ErrorKind::ClusterConnectionNotFound, unknown).into())));
        }
        let (number, node) = numbered(&map.nodes, |node| &node.address).into_iter().find(|(own, _)| *own >= number)?;
        let doubt = StaleMapGuard { stale: &self.shared.stale, settled: false };
        let answer = node.pool(lane).send(&command(number)).await;
        if answer.is_ok() {
            doubt.settle();
        }
        Some((number, answer))
    }
}

/// The nodes in an order that does not depend on who serves what, each with a number of its own, which is none of those of others who come or go.
fn numbered<T>(nodes: &[T], address: impl Fn(&T) -> &Address) -> Vec<(u32, &T)> {
    let hash = |node| {
        let (host, port) = address(node);
        let [a, b, c, d, ..]: [u8; 32] = Sha256::digest(format!("{host}:{port}")).into();
        // Something is left that is larger than any.
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

    /// A node by its address. One that the map does not have yet is kept until the map is read again.
    fn node(&self, address: &Address) -> Result<Node, RedisError> {
        let known = |map: &Map| map.nodes.iter().find(|node| node.address == *address).cloned();
        if let Some(node) = known(&self.map()) {
            return Ok(node);
        }
        let mut map = self.map.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(node) = known(&map) {
            return Ok(node);
        }
        let node = self.open(address)?;
        let nodes = map.nodes.iter().chain([&node]).cloned().collect();
        *map = Arc::new(Map { owners: Arc::clone(&map.owners), nodes, replicas: map.replicas.clone() });
        Ok(node)
    }

    /// Waits until another node serves a slot than the one that has been asked, and says for how long. Whoever waits longer than commands do
    /// has the map read anew meanwhile: the node may be dead.
    async fn replaced(&self, slot: u16, asked: &Address) -> Duration {
        let begun = Instant::now();
        let owner = || self.owner(slot).map(|node| node.address);
        // Not the one that was asked, if it has been named by another node.
        let before = owner();
        sleep(self.terms.response).await;
        loop {
            let now = owner();
            if now.is_some() && now != before && now.as_ref() != Some(asked) {
                return begun.elapsed();
            }
            self.stale.notify_one();
            sleep(PATIENCE).await;
        }
    }

    fn open(&self, address: &Address) -> Result<Node, RedisError> {
        let connector = (self.connectors)(address)?;
        let siblings = Arc::default();
        let requests = Pool::lazy(connector.clone(), self.connections, self.terms.clone(), &siblings);
        let apart = Pool::lazy(connector.clone(), 1, self.terms.clone(), &siblings);
        let [grants, renewals] =
            [(); 2].map(|()| Replicated::new(connector.clone(), self.connections, self.terms.clone()));
        Ok(Node { address: address.clone(), requests, apart, grants, renewals })
    }

    /// Connections to somebody who is none of the nodes.
    fn stranger(&self, address: &Address) -> Result<Pool, RedisError> {
        let mut seed_pools = self.seed_pools.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = seed_pools.get(address) {
            return Ok(pool.clone());
        }
        let pool = Pool::lazy((self.connectors)(address)?, 1, self.terms.clone(), &Arc::default());
        seed_pools.insert(address.clone(), pool.clone());
        Ok(pool)
    }

    /// Keeps those strangers only that cannot be connected to, and may be asked again.
    fn forget_strangers(&self, map: &Map) {
        let mut seed_pools = self.seed_pools.lock().unwrap_or_else(PoisonError::into_inner);
        seed_pools.retain(|address, pool| {
            let is_asked = map.replicas.contains(address) || self.seeds.contains(address);
            is_asked && pool.is_in_trouble()
        });
    }

    /// Asks one node after the other for the map until one has it, and takes it over. A different one is first at each turn:
    /// a node that is cut off from the others does not know that it is wrong.
    async fn read_map(&self, turn: usize) -> Result<(), RedisError> {
        let map = self.map();
        let mut known: Vec<_> = map.nodes.iter().map(|node| (&node.address, Some(&node.requests))).collect();
        if !known.is_empty() {
            let first = turn % known.len();
            known.rotate_left(first);
        }
        let seed_pools = map.replicas.iter().chain(&self.seeds).map(|address| (address, None));
        let mut failure = None;
        for (address, pool) in known.into_iter().chain(seed_pools) {
            let answer = async {
                match pool {
                    Some(pool) => pool.send(&slots_command()).await,
                    None => self.stranger(address)?.send(&slots_command()).await,
                }
            };
            // Whoever is a stranger has to be connected to first.
            let patience = if pool.is_some() { PATIENCE } else { self.terms.connect + PATIENCE };
            let answer = timeout(patience, answer).await.unwrap_or_else(|_| Err(no_connection(patience)));
            match answer.and_then(|answer| self.read(&answer, address, &map)) {
                Ok(new) => {
                    self.forget_strangers(&new);
                    self.set_map(new);
                    self.reads.send_replace(());
                    return Ok(());
                }
                // What the first one says is about whom the user named.
                Err(error) => failure = failure.or_else(|| Some(at(Peer::Seed(tcp(address)), error))),
            }
        }
        Err(failure.unwrap_or_else(|| no_connection(self.terms.connect)))
    }

    /// What `CLUSTER SLOTS` says: `[first slot, last slot, [host, port, ...] of the primary, and of each replica]`.
    fn read(&self, answer: &Value, asked: &Address, old: &Map) -> Result<Map, RedisError> {
        let mut owners = vec![u16::MAX; SLOTS];
        let mut nodes = Vec::<Node>::new();
        let mut places = HashMap::<Address, u16>::new();
        let mut replicas = Vec::new();
        let ranges = match answer {
            Value::Array(ranges) if !ranges.is_empty() => ranges,
            Value::Array(_) => {
                return Err((ErrorKind::ClusterConnectionNotFound, "no slot of the cluster is served").into());
            }
            _ => return Err(unreadable()),
        };
        for range in ranges {
            let Value::Array(range) = range else { return Err(unreadable()) };
            let [Value::Int(first), Value::Int(last), primary, others @ ..] = &**range else {
                return Err(unreadable());
            };
            let (first, last) = (usize::try_from(*first), usize::try_from(*last));
            let (Ok(first), Ok(last @ ..SLOTS)) = (first, last) else { return Err(unreadable()) };
            let address = address(primary, asked).ok_or_else(unreadable)?;
            let place = match places.get(&address) {
                Some(&place) => place,
                None => {
                    let known = old.nodes.iter().find(|node| node.address == address);
                    let place = nodes.len() as u16;
                    nodes.push(known.map_or_else(|| self.open(&address), |node| Ok(node.clone()))?);
                    places.insert(address, place);
                    place
                }
            };
            owners.get_mut(first..=last).ok_or_else(unreadable)?.fill(place);
            replicas.extend(others.iter().filter_map(|node| self::address(node, asked)));
        }
        replicas.sort_unstable();
        replicas.dedup();
        Ok(Map { owners: owners.into(), nodes, replicas })
    }
}

fn reader(shared: &Arc<Shared>) -> AbortHandle {
    tokio::spawn(read_when_stale(Arc::downgrade(shared), Arc::clone(&shared.stale))).abort_handle()
}

/// Reads the map whenever it is in doubt, until there is nobody left to use it.
async fn read_when_stale(shared: Weak<Shared>, stale: Arc<Notify>) {
    let mut rest = REST;
    for turn in 1.. {
        stale.notified().await;
        let Some(shared) = shared.upgrade() else { return };
        match shared.read_map(turn).await {
            Ok(()) => rest = REST,
            Err(error) => {
                tracing::debug!(%error, "no node of the redis cluster tells who serves what");
                rest = (rest * 2).min(LONGEST_REST);
            }
        }
        if shared.map().nodes.is_empty() {
            // Nobody can ask for anything before there is one.
            stale.notify_one();
        }
        drop(shared);
        sleep(rest).await;
    }
}

/// Has the map read anew if a command is given up before its answer is there, or fails: the node may no longer be the one.
struct StaleMapGuard<'a> {
    stale: &'a Notify,
    settled: bool,
}

impl StaleMapGuard<'_> {
    fn settle(mut self) {
        self.settled = true;
    }
}

impl Drop for StaleMapGuard<'_> {
    fn drop(&mut self) {
        if !self.settled {
            self.stale.notify_one();
        }
    }
}

/// Whether an error says that the command went to the wrong place, or to nobody.
fn concerns_the_map(error: &RedisError) -> bool {
    use ServerErrorKind::{Ask, BusyLoading, ClusterDown, MasterDown, Moved, ReadOnly, TryAgain};
    match error.kind() {
        ErrorKind::Server(kind) => {
            matches!(kind, Moved | Ask | TryAgain | ClusterDown | MasterDown | ReadOnly | BusyLoading)
        }
        // Whatever was said to whoever wanted to connect is among these: nobody there has taken the command.
        _ => error.is_io_error() || error.is_timeout() || error.is_connection_dropped(),
    }
}

/// The slot of a key: of what is between its first braces, if anything is, as the Redis Cluster specification has it.
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

/// Host and port in the answer of a node. A node that does not know its own host means the one that it was asked by.
fn address(node: &Value, asked: &Address) -> Option<Address> {
    let Value::Array(node) = node else { return None };
    let [host, Value::Int(port), ..] = &**node else { return None };
    let host = match host {
        Value::BulkString(host) => std::str::from_utf8(host).ok()?,
        Value::SimpleString(host) => host,
        Value::Nil => "",
        _ => return None,
    };
    Some((known_host(host, asked), u16::try_from(*port).ok()?))
}

/// `host:port` in a redirection.
fn parse(address: &str, asked: &Address) -> Result<Address, RedisError> {
    let parsed = address.rsplit_once(':').and_then(|(host, port)| Some((known_host(host, asked), port.parse().ok()?)));
    parsed.ok_or_else(unreadable)
}

fn tcp((host, port): &Address) -> ConnectionAddr {
    ConnectionAddr::Tcp(host.clone(), *port)
}

fn known_host(host: &str, asked: &Address) -> String {
    if matches!(host, "" | "?") { asked.0.clone() } else { host.to_owned() }
}

fn unreadable() -> RedisError {
    (ErrorKind::UnexpectedReturnType, "the cluster describes itself in a way that cannot be read").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_the_specification() {
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
    fn nodes_keep_their_number_whoever_comes_and_goes() {
        let nodes: Vec<Address> = (7_000..7_100).map(|port| ("10.0.0.1".to_owned(), port)).collect();
        let all = numbered(&nodes, |node| node);
        assert!(all.is_sorted_by(|(one, _), (other, _)| one < other));
        let others: Vec<_> = nodes.iter().rev().step_by(3).cloned().collect();
        assert!(numbered(&others, |node| node).iter().all(|numbered| all.contains(numbered)));
        // Should two have the same, each is asked all the same.
        let twice = [nodes[0].clone(), nodes[0].clone()];
        let numbers: Vec<_> = numbered(&twice, |node| node).into_iter().map(|(number, _)| number).collect();
        assert_eq!(numbers[0] + 1, numbers[1]);
    }

    #[test]
    fn nodes_that_do_not_know_their_host_are_where_they_were_asked() {
        let asked = ("10.0.0.1".to_owned(), 7000);
        for (address, expected) in
            [("10.0.0.2:7001", "10.0.0.2"), (":7001", "10.0.0.1"), ("?:7001", "10.0.0.1"), ("::1:7001", "::1")]
        {
            assert_eq!(parse(address, &asked).unwrap(), (expected.to_owned(), 7001));
        }
        assert!(parse("10.0.0.2", &asked).is_err());
        assert!(parse("10.0.0.2:port", &asked).is_err());
    }
}
