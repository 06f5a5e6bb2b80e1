//! A Redis Cluster of three primaries with one replica each.

use std::time::Instant;

use redis::{Connection, Value};

use super::sentinel::together;
use super::server::{RedisServer, line, query, wait_until};

const PRIMARIES: usize = 3;
const NODES: usize = 2 * PRIMARIES;
/// The number of slots of a cluster.
pub const SLOTS: u16 = 16_384;

/// Nodes that detect the failure of another node after a second.
#[derive(Debug)]
pub struct Cluster {
    /// The first three are the initial primaries. Each of the others is the replica of the node three positions before it.
    pub nodes: Vec<RedisServer>,
    ids: Vec<String>,
}

/// A node as another node sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    pub index: usize,
    /// The index of its primary, if it is a replica.
    pub primary: Option<usize>,
    /// The first and last slot of each range, for a primary.
    pub slots: Vec<(u16, u16)>,
    flags: String,
    /// If two nodes claim a slot, the higher epoch is right.
    epoch: u64,
}

impl View {
    pub fn has(&self, slot: u16) -> bool {
        self.slots.iter().any(|&(first, last)| first <= slot && slot <= last)
    }
}

impl Cluster {
    /// Starts all nodes, and waits until each node serves and each replica follows.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Like [`start`](Self::start), with further arguments for the nodes.
    pub fn start_with(args: &[&str]) -> Self {
        let mut all = vec!["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"];
        all.extend(["--cluster-node-timeout", "1000"]);
        all.extend(["--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0"]);
        all.extend(["--repl-ping-replica-period", "1"]);
        all.extend(args);
        let nodes = together(NODES, |_| RedisServer::start_with(&all));
        let ids: Vec<String> = nodes.iter().map(|node| node.query("CLUSTER MYID")).collect();
        for (index, node) in nodes.iter().enumerate().take(PRIMARIES) {
            // Distinct epochs, so that there are no conflicts when the nodes meet.
            node.query::<()>(&format!("CLUSTER SET-CONFIG-EPOCH {}", index + 1));
            let share = |index: usize| index * usize::from(SLOTS) / PRIMARIES;
            // Redis 6.2 has no ADDSLOTSRANGE.
            let slots: Vec<_> = (share(index)..share(index + 1)).map(|slot| slot.to_string()).collect();
            node.query::<()>(&format!("CLUSTER ADDSLOTS {}", slots.join(" ")));
        }
        // Every node meets every other node, since gossip takes longer.
        for (index, node) in nodes.iter().enumerate() {
            for other in &nodes[index + 1..] {
                node.query::<()>(&format!("CLUSTER MEET 127.0.0.1 {}", other.port()));
            }
        }
        let cluster = Self { nodes, ids };
        wait_until("the nodes know each other", || cluster.nodes.iter().all(|node| cluster.views(node).len() == NODES));
        for index in PRIMARIES..NODES {
            let primary = &cluster.ids[index - PRIMARIES];
            cluster.nodes[index].query::<()>(&format!("CLUSTER REPLICATE {primary}"));
        }
        cluster.wait_until_whole();
        cluster
    }

    /// `redis+cluster://` with all nodes.
    pub fn url(&self) -> String {
        let nodes: Vec<_> = self.nodes.iter().map(|node| format!("127.0.0.1:{}", node.port())).collect();
        format!("redis+cluster://{}/", nodes.join(","))
    }

    /// All nodes that `node` has met, as it sees them.
    pub fn views(&self, node: &RedisServer) -> Vec<View> {
        self.read(&node.text("CLUSTER NODES"))
    }

    fn read(&self, nodes: &str) -> Vec<View> {
        nodes.lines().filter_map(|line| self.view(line)).collect()
    }

    /// `id address flags primary-id ping pong epoch link slot first-last [slot->-id] ...`
    fn view(&self, line: &str) -> Option<View> {
        let words: Vec<_> = line.split(' ').collect();
        let index_of = |id: &str| self.ids.iter().position(|known| known == id);
        let slots = words.get(8..).unwrap_or_default().iter().filter(|range| !range.starts_with('['));
        let range = |range: &&str| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            Some((first.parse().ok()?, last.parse().ok()?))
        };
        Some(View {
            index: index_of(words.first()?)?,
            primary: index_of(words.get(3)?),
            slots: slots.filter_map(range).collect(),
            flags: (*words.get(2)?).to_owned(),
            epoch: words.get(6)?.parse().ok()?,
        })
    }

    /// The index of the primary that has the slot, by each node's view of itself. Its view of others may predate a move of the slot. Waits
    /// until a primary claims the slot.
    pub fn owner(&self, slot: u16) -> usize {
        let mut owner = None;
        wait_until(&format!("a primary has slot {slot}"), || {
            let answering = (0..self.nodes.len()).filter(|&index| self.nodes[index].is_answering());
            let claims = answering.filter_map(|index| self.view_of_itself(index)).filter(|view| view.has(slot));
            owner = claims.max_by_key(|view| view.epoch).map(|view| view.index);
            owner.is_some()
        });
        owner.expect("a primary has the slot")
    }

    /// The indices of the nodes with slots, as the first node that answers sees them.
    pub fn primaries(&self) -> Vec<usize> {
        let views = self.living().map(|node| self.views(node)).find(|views| !views.is_empty()).unwrap_or_default();
        views.into_iter().filter(|view| !view.slots.is_empty()).map(|view| view.index).collect()
    }

    /// The index of a replica of the primary.
    pub fn replica_of(&self, primary: usize) -> usize {
        let views = self.views(&self.nodes[primary]);
        views.into_iter().find(|view| view.primary == Some(primary)).expect("each primary has a replica").index
    }

    /// Makes the replica of the primary take over, without loss of data.
    pub fn fail_over(&self, primary: usize) {
        self.nodes[self.replica_of(primary)].query::<()>("CLUSTER FAILOVER");
    }

    /// Waits until a node sees another owner of the slot than `old`. Returns the time and the index of the new owner.
    pub fn wait_for_another_owner(&self, slot: u16, old: usize) -> (Instant, usize) {
        let mut connections: Vec<_> = self.living().map(RedisServer::connection).collect();
        let mut owner = old;
        wait_until("the slot has another owner", || {
            let views = connections
                .iter_mut()
                .map(|node| self.read(&query::<String>(node, "CLUSTER NODES").unwrap_or_default()));
            let owners = views.filter_map(|views| views.into_iter().find(|view| view.has(slot)));
            owner = owners.map(|view| view.index).find(|owner| *owner != old).unwrap_or(old);
            owner != old
        });
        (Instant::now(), owner)
    }

    /// Waits until all nodes serve all slots and agree on their owners, and each primary has a replica that follows.
    pub fn wait_until_whole(&self) {
        wait_until("the cluster is whole", || {
            let sorted = |node| {
                let mut views = self.views(node);
                for view in &mut views {
                    // Each node marks itself as `myself`, and an epoch may change without a change of slots.
                    view.flags = view.flags.replace("myself,", "");
                    view.epoch = 0;
                }
                views.sort_by_key(|view| view.index);
                views
            };
            let views = sorted(&self.nodes[0]);
            let whole = views.iter().filter(|view| view.flags == "slave").count() == NODES - PRIMARIES
                && views.iter().filter(|view| view.flags == "master" && !view.slots.is_empty()).count() == PRIMARIES;
            whole
                && self.nodes.iter().all(|node| {
                    sorted(node) == views
                        && line(&node.text("CLUSTER INFO"), "cluster_state").is_some_and(|state| state == "ok")
                })
                && views
                    .iter()
                    .filter(|view| view.primary.is_none())
                    .all(|view| self.nodes[view.index].is_followed_by(1))
        });
    }

    /// Begins to move a slot to another primary, and returns the index of its owner.
    pub fn open(&self, slot: u16, to: usize) -> usize {
        let from = self.owner(slot);
        assert_ne!(from, to, "slot {slot} is there already");
        let mut source = self.nodes[from].connection();
        let mut target = self.nodes[to].connection();
        must(&mut target, &format!("CLUSTER SETSLOT {slot} IMPORTING {}", self.ids[from]));
        must(&mut source, &format!("CLUSTER SETSLOT {slot} MIGRATING {}", self.ids[to]));
        from
    }

    /// Moves a slot with all its keys to another primary, as `redis-cli --cluster reshard` does. Clients get ASK for keys that have moved
    /// already, and MOVED in the end.
    pub fn migrate(&self, slot: u16, to: usize) {
        let from = self.open(slot, to);
        self.move_keys(slot, from, to);
        self.close(slot, from, to);
    }

    /// Moves all keys of a slot that was [opened](Self::open).
    pub fn move_keys(&self, slot: u16, from: usize, to: usize) {
        let mut source = self.nodes[from].connection();
        loop {
            let keys: Vec<String> =
                query(&mut source, &format!("CLUSTER GETKEYSINSLOT {slot} 10")).expect("keys are listed");
            if keys.is_empty() {
                break;
            }
            let port = self.nodes[to].port().to_string();
            let mut migrate = redis::cmd("MIGRATE");
            migrate.arg(&["127.0.0.1", &port, "", "0", "5000", "KEYS"]).arg(keys);
            let _: Value = migrate.query(&mut source).expect("keys move");
        }
    }

    /// Ends the move of a slot.
    pub fn close(&self, slot: u16, from: usize, to: usize) {
        let mut source = self.nodes[from].connection();
        let mut target = self.nodes[to].connection();
        // The target first: for a moment both nodes have the slot, instead of none.
        must(&mut target, &format!("CLUSTER SETSLOT {slot} NODE {}", self.ids[to]));
        must(&mut source, &format!("CLUSTER SETSLOT {slot} NODE {}", self.ids[to]));
    }

    /// Kills a node, starts it again at another address, and waits until all nodes know that address.
    pub fn readdress(&mut self, index: usize) {
        self.nodes[index].kill();
        self.nodes[index].restart_elsewhere();
        let address = format!(" 127.0.0.1:{}@", self.nodes[index].port());
        wait_until("all nodes know the new address", || {
            self.nodes.iter().all(|node| node.text("CLUSTER NODES").contains(&address))
        });
    }

    /// The slots of a primary that have keys.
    pub fn slots_with_keys(&self, primary: usize) -> Vec<u16> {
        let node = &self.nodes[primary];
        let slots = self.view_of_itself(primary).map(|view| view.slots).unwrap_or_default();
        let slots: Vec<u16> = slots.into_iter().flat_map(|(first, last)| first..=last).collect();
        let mut pipe = redis::pipe();
        for slot in &slots {
            pipe.cmd("CLUSTER").arg("COUNTKEYSINSLOT").arg(slot);
        }
        let counts: Vec<u64> = pipe.query(&mut node.connection()).expect("keys are counted");
        slots.into_iter().zip(counts).filter(|(_, count)| *count > 0).map(|(slot, _)| slot).collect()
    }

    /// A node as it sees itself.
    fn view_of_itself(&self, index: usize) -> Option<View> {
        self.views(&self.nodes[index]).into_iter().find(|view| view.index == index)
    }

    fn living(&self) -> impl Iterator<Item = &RedisServer> {
        self.nodes.iter().filter(|node| node.is_answering())
    }
}

fn must(connection: &mut Connection, command: &str) -> Value {
    query(connection, command).unwrap_or_else(|error| panic!("{command}: {error}"))
}
