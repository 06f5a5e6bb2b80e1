//! The deployments on which faults occur.

use std::collections::HashMap;

use super::load::NAME;
use super::support::cluster::Cluster;
use super::support::proxy::Proxy;
use super::support::sentinel::SentinelDeployment;
use super::support::server::{DURABLE, RedisServer, query};

/// The default number of connections of a backend to each server that decides.
pub const CONNECTIONS: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topology {
    Standalone,
    /// With an append-only file that is on disk before a reply is sent.
    Durable,
    /// Behind a faulty network.
    Network,
    Sentinel,
    Cluster,
}

impl Topology {
    pub fn name(self) -> &'static str {
        match self {
            Self::Standalone => "standalone",
            Self::Durable => "standalone, AOF",
            Self::Network => "standalone, proxy",
            Self::Sentinel => "Sentinel",
            Self::Cluster => "Cluster",
        }
    }
}

#[derive(Debug)]
pub enum Deployment {
    Standalone(RedisServer),
    Network(RedisServer, Proxy),
    Sentinel(SentinelDeployment),
    Cluster(Cluster),
}

impl Deployment {
    pub fn start(topology: Topology) -> Self {
        match topology {
            Topology::Standalone => Self::Standalone(RedisServer::start()),
            Topology::Durable => Self::Standalone(RedisServer::start_with(DURABLE)),
            Topology::Network => {
                let server = RedisServer::start();
                let proxy = Proxy::start(server.port());
                Self::Network(server, proxy)
            }
            Topology::Sentinel => Self::Sentinel(SentinelDeployment::start()),
            Topology::Cluster => Self::Cluster(Cluster::start()),
        }
    }

    pub fn url(&self) -> String {
        match self {
            Self::Standalone(server) => server.url(),
            Self::Network(_, proxy) => proxy.url(),
            Self::Sentinel(sentinel) => sentinel.url(),
            Self::Cluster(cluster) => cluster.url(),
        }
    }

    pub fn server(&mut self) -> &mut RedisServer {
        match self {
            Self::Standalone(server) | Self::Network(server, _) => server,
            Self::Sentinel(_) | Self::Cluster(_) => unreachable!("the fault is for one server"),
        }
    }

    pub fn proxy(&self) -> &Proxy {
        match self {
            Self::Network(_, proxy) => proxy,
            _ => unreachable!("the fault is for a network"),
        }
    }

    pub fn sentinel(&mut self) -> &mut SentinelDeployment {
        match self {
            Self::Sentinel(sentinel) => sentinel,
            _ => unreachable!("the fault is for Sentinel"),
        }
    }

    pub fn cluster(&mut self) -> &mut Cluster {
        match self {
            Self::Cluster(cluster) => cluster,
            _ => unreachable!("the fault is for a cluster"),
        }
    }

    /// Returns the servers whose counts are authoritative.
    pub fn primaries(&self) -> Vec<&RedisServer> {
        match self {
            Self::Standalone(server) | Self::Network(server, _) => vec![server],
            Self::Sentinel(sentinel) => vec![sentinel.primary()],
            Self::Cluster(cluster) => cluster.primaries().into_iter().map(|index| &cluster.nodes[index]).collect(),
        }
    }

    /// Returns the number of client connections to servers and Sentinels that are up.
    pub fn clients(&self) -> usize {
        let servers: Vec<&RedisServer> = match self {
            Self::Standalone(server) | Self::Network(server, _) => vec![server],
            Self::Sentinel(sentinel) => sentinel.servers.iter().chain(&sentinel.sentinels).collect(),
            Self::Cluster(cluster) => cluster.nodes.iter().collect(),
        };
        servers.into_iter().filter(|server| server.is_answering()).map(RedisServer::clients).sum()
    }

    /// Returns how many client connections are allowed: [`CONNECTIONS`] to each server that decides, and one to each Sentinel.
    pub fn most_clients(&self) -> usize {
        let watchers = if let Self::Sentinel(sentinel) = self { sentinel.sentinels.len() } else { 0 };
        self.primaries().len() * CONNECTIONS + watchers
    }

    /// Returns the stored used units, by key.
    pub fn stored(&self) -> HashMap<String, u64> {
        self.primaries().into_iter().flat_map(stored_on).collect()
    }
}

/// Returns the used units that this server has stored, by key.
pub fn stored_on(server: &RedisServer) -> HashMap<String, u64> {
    let mut connection = server.connection();
    // In a cluster, a replica redirects reads to its primary without this. Elsewhere it has no effect, or fails.
    let _: Result<(), _> = query(&mut connection, "READONLY");
    let keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut connection).expect("keys are listed");
    let mut pipe = redis::pipe();
    for key in &keys {
        pipe.get(key);
    }
    let values: Vec<Option<Vec<u8>>> = pipe.query(&mut connection).expect("values are read");
    let stored = keys.iter().zip(values).filter_map(|(key, value)| {
        let subject = key.split_once(&format!("{{rate_limit:{NAME}:"))?.1.split_once('}')?.0;
        // The value of a fixed window ends with the used units.
        let used = value?.last_chunk().map(|&used| f64::from_le_bytes(used) as u64);
        Some((subject.to_owned(), used.expect("a count has at least 8 bytes")))
    });
    stored.collect()
}
