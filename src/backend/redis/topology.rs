//! The servers with the data: one server, the primary of a Sentinel service, or the nodes of a cluster.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, RedisError, Value};

use super::cluster::{Cluster, slot};
use super::connection::pool::Pool;
use super::connection::pubsub::Source;
use super::connection::runtime::RuntimeHandle;
use super::purpose::{Purpose, ReplicatedPurpose};
use super::replicated::{Outcome, Replicated};
use crate::lock::store::Replicas;

/// Connections to all servers, for one purpose.
#[derive(Clone)]
pub(crate) enum Servers {
    One(Pool),
    Cluster(Arc<Cluster>, Purpose),
}

/// Connections for writes with replication. WAIT blocks them.
#[derive(Clone)]
pub(crate) enum ReplicatedServers {
    One(Replicated),
    Cluster(Arc<Cluster>, ReplicatedPurpose),
}

/// How to send a command, and how many replicas must have its writes.
#[derive(Clone, Copy)]
pub(crate) enum Delivery<'a> {
    Plain(&'a Servers),
    Replicated(&'a ReplicatedServers, Replicas),
}

/// All connections of a backend.
pub(crate) struct Connections {
    pub(crate) requests: Servers,
    pub(crate) dedicated: Servers,
    pub(crate) grants: ReplicatedServers,
    pub(crate) renewals: ReplicatedServers,
    /// How long to wait for one reply.
    pub(crate) response_timeout: Duration,
    pub(crate) source: Source,
    pub(crate) runtime: Arc<RuntimeHandle>,
}

impl Servers {
    /// Sends a command to the server of a key, and waits for its reply.
    ///
    /// If the connection fails after the command was sent, the command is not sent again, because it may have run.
    pub(crate) async fn send(&self, key: &str, command: &Cmd) -> Result<Value, RedisError> {
        self.exchange(key, command, None).await
    }

    /// Like [`send`](Self::send), with an optional timeout. If `timeout` exceeds the default one, the call fails once the default has
    /// passed and another server has taken over.
    pub(crate) async fn exchange(
        &self,
        key: &str,
        command: &Cmd,
        timeout: Option<Duration>,
    ) -> Result<Value, RedisError> {
        match self {
            Self::One(pool) => pool.exchange(command, false, timeout).await,
            // Boxed to keep the future small for a single server.
            Self::Cluster(cluster, purpose) => Box::pin(cluster.send(*purpose, key, command, timeout)).await,
        }
    }

    /// Waits until a connection is available, so that the caller can remove abandoned calls from a batch before it sends the batch. On a
    /// cluster it returns at once, since the node is not known yet.
    pub(crate) async fn connected(&self) -> Result<(), RedisError> {
        match self {
            Self::One(pool) => pool.connected().await,
            Self::Cluster(..) => Ok(()),
        }
    }

    /// Sends a command to the server with this number, or with the next higher one, and returns the number. `None` if there is none. A
    /// server keeps its number as long as it has its address.
    pub(crate) async fn send_to(
        &self,
        number: u32,
        command: impl Fn(u32) -> Cmd,
    ) -> Option<(u32, Result<Value, RedisError>)> {
        match self {
            Self::One(pool) if number == 0 => Some((0, pool.send(&command(0)).await)),
            Self::One(_) => None,
            Self::Cluster(cluster, purpose) => cluster.send_to(*purpose, number, command).await,
        }
    }

    /// Whether one script may access all of these keys.
    pub(crate) fn are_together<'a>(&self, keys: impl IntoIterator<Item = &'a str>) -> bool {
        match self {
            Self::One(_) => true,
            Self::Cluster(..) => {
                let mut slots = keys.into_iter().map(slot);
                let first = slots.next();
                slots.all(|slot| Some(slot) == first)
            }
        }
    }

    pub(crate) const fn is_cluster(&self) -> bool {
        matches!(self, Self::Cluster(..))
    }

    /// The command for notifications. A cluster sends each PUBLISH to all of its nodes.
    pub(crate) const fn publish_command(&self) -> &'static str {
        if self.is_cluster() { "SPUBLISH" } else { "PUBLISH" }
    }
}

impl Delivery<'_> {
    /// Sends a command to the server of a key, and waits for its reply. With [`Delivery::Replicated`], also waits until the replicas have
    /// the writes if `is_granted` is true for the reply.
    pub(crate) async fn exchange(
        self,
        key: &str,
        command: &Cmd,
        is_granted: fn(&Value) -> bool,
    ) -> Result<Outcome, RedisError> {
        match self {
            Self::Plain(servers) => servers.send(key, command).await.map(Outcome::Replied),
            Self::Replicated(ReplicatedServers::One(replicated), replicas) => {
                replicated.exchange(command, false, replicas, is_granted).await
            }
            Self::Replicated(ReplicatedServers::Cluster(cluster, purpose), replicas) => {
                Box::pin(cluster.send_replicated(*purpose, key, command, replicas, is_granted)).await
            }
        }
    }
}

impl fmt::Debug for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(pool) => fmt::Debug::fmt(pool, f),
            Self::Cluster(cluster, _) => fmt::Debug::fmt(cluster, f),
        }
    }
}
