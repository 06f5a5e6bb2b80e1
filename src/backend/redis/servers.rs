//! Whoever holds the data: one server, the primary of a service, or the nodes of a cluster.

use std::fmt;

use redis::{Cmd, RedisError, Value};

use super::cluster::{Cluster, slot};
use super::pool::Pool;

pub(super) enum Servers {
    One(Pool),
    Cluster(Cluster),
}

impl Servers {
    /// Sends a command to whoever has a key, and waits for its answer.
    ///
    /// A failure after the command was sent leaves open whether it ran, so nothing is sent twice.
    pub(super) async fn send(&self, key: &str, command: &Cmd) -> Result<Value, RedisError> {
        match self {
            Self::One(pool) => pool.send(command).await,
            Self::Cluster(cluster) => cluster.send(key, command).await,
        }
    }

    /// Whether one script may touch all of these keys.
    pub(super) fn are_together<'a>(&self, keys: impl IntoIterator<Item = &'a str>) -> bool {
        match self {
            Self::One(_) => true,
            Self::Cluster(_) => {
                let mut slots = keys.into_iter().map(slot);
                let first = slots.next();
                slots.all(|slot| Some(slot) == first)
            }
        }
    }
}

impl fmt::Debug for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(pool) => fmt::Debug::fmt(pool, f),
            Self::Cluster(cluster) => fmt::Debug::fmt(cluster, f),
        }
    }
}
