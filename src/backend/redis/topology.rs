//! Whoever holds the data: one server, the primary of a service, or the nodes of a cluster.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, RedisError, Value};

use super::cluster::{Cluster, slot};
use super::connection::pool::Pool;
use super::connection::pubsub::Source;
use super::connection::runtime::RuntimeHandle;
use super::replicated::{Outcome, Replicated};
use crate::lock::Replicas;

/// Connections to all servers there are, for one purpose.
#[derive(Clone)]
pub(crate) enum Servers {
    One(Pool),
    Cluster(Arc<Cluster>, Purpose),
}

/// What connections are for.
#[derive(Clone, Copy)]
pub(crate) enum Purpose {
    /// What requests ask for.
    Requests,
    /// What must not queue behind that.
    Dedicated,
}

/// The same for what replicas have to have, which holds its connections up.
#[derive(Clone)]
pub(crate) enum CarefulServers {
    One(Replicated),
    Cluster(Arc<Cluster>, CarefulLane),
}

/// What replicas have to have.
#[derive(Clone, Copy)]
pub(crate) enum CarefulLane {
    /// Leases that are granted.
    Grants,
    /// Those that are renewed, for which there has to be room in any case.
    Renewals,
}

/// Where a command goes, and who has to have what it writes.
#[derive(Clone, Copy)]
pub(crate) enum Delivery<'a> {
    Plain(&'a Servers),
    Replicated(&'a CarefulServers, Replicas),
}

/// Whether there has to be a connection to begin with.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConnectMode {
    Connected,
    Disconnected,
}

/// All ways to the servers.
pub(crate) struct Connections {
    pub(crate) requests: Servers,
    pub(crate) apart: Servers,
    pub(crate) grants: CarefulServers,
    pub(crate) renewals: CarefulServers,
    /// How long one answer is waited for.
    pub(crate) patience: Duration,
    pub(crate) source: Source,
    pub(crate) home: Arc<RuntimeHandle>,
}

impl Servers {
    /// Sends a command to whoever has a key, and waits for its answer.
    ///
    /// A failure after the command was sent leaves open whether it ran, so nothing is sent twice.
    pub(crate) async fn send(&self, key: &str, command: &Cmd) -> Result<Value, RedisError> {
        self.exchange(key, command, None).await
    }

    /// The same, for longer or less than commands are waited for otherwise.
    pub(crate) async fn exchange(
        &self,
        key: &str,
        command: &Cmd,
        patience: Option<Duration>,
    ) -> Result<Value, RedisError> {
        match self {
            Self::One(pool) => pool.exchange(command, false, patience).await,
            // Apart, so that who asks one server has no room for it to carry along.
            Self::Cluster(cluster, lane) => Box::pin(cluster.send(*lane, key, command, patience)).await,
        }
    }

    /// Waits for a connection, for those who are to look once more at what they send. On a cluster it is not known to which node.
    pub(crate) async fn connected(&self) -> Result<(), RedisError> {
        match self {
            Self::One(pool) => pool.connected().await,
            Self::Cluster(..) => Ok(()),
        }
    }

    /// Sends a command to one of the servers who have keys: to the one of this number or, if there is none, of the next one, and says which
    /// number that is. `None` if there is none of them either. A server keeps its number as long as it has its address.
    pub(crate) async fn send_to(
        &self,
        number: u32,
        command: impl Fn(u32) -> Cmd,
    ) -> Option<(u32, Result<Value, RedisError>)> {
        match self {
            Self::One(pool) if number == 0 => Some((0, pool.send(&command(0)).await)),
            Self::One(_) => None,
            Self::Cluster(cluster, lane) => cluster.send_to(*lane, number, command).await,
        }
    }

    /// Whether one script may touch all of these keys.
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
}

impl Delivery<'_> {
    /// Sends a command to whoever has a key, and waits for its answer; where `is_granted` says so of that, until replicas have what was written.
    pub(crate) async fn exchange(
        self,
        key: &str,
        command: &Cmd,
        is_granted: fn(&Value) -> bool,
    ) -> Result<Outcome, RedisError> {
        match self {
            Self::Plain(servers) => servers.send(key, command).await.map(Outcome::Replied),
            Self::Replicated(CarefulServers::One(careful), replicas) => {
                careful.exchange(command, false, replicas, is_granted).await
            }
            Self::Replicated(CarefulServers::Cluster(cluster, lane), replicas) => {
                Box::pin(cluster.send_carefully(*lane, key, command, replicas, is_granted)).await
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
