//! A look at the server before the first decision: may we do what we need, is it recent enough, does it keep our keys?

use redis::{InfoDict, Value};

use super::connect_error::{Peer, another_kind, forbidden, node_of_a_cluster, unsupported};
use super::error::{code, is_unknown_command, store_error};
use super::keys::Keys;
use super::scripts::LuaScript;
use super::topology::Servers;
use crate::error::{ConnectError, StoreError};

/// The oldest release that has all the commands that the scripts use.
const OLDEST: (u32, u32) = (6, 2);

/// Runs a script that leaves nothing behind and says what the user may not run, and reads what the server says of itself if the user may.
pub(crate) async fn probe(servers: &Servers, peer: &Peer, keys: &Keys, script: &LuaScript) -> Result<(), ConnectError> {
    let key = keys.probe();
    match script.run_and_verify(servers, &key, &"").await {
        Ok(Value::BulkString(missing)) if !missing.is_empty() => {
            let error = format!("the user may not run {}", String::from_utf8_lossy(&missing).replace(' ', ", "));
            return Err(forbidden(peer, StoreError::unauthorized(error)));
        }
        Ok(_) => {}
        Err(error) => match code(&error) {
            Some("NOPERM") => return Err(forbidden(peer, store_error(error))),
            Some("MOVED") => return Err(node_of_a_cluster(peer)),
            _ if is_unknown_command(&error) => return Err(another_kind(peer, &error)),
            // A server that cannot serve at the moment may do so later.
            _ => tracing::warn!(%error, "redis does not run scripts at the moment"),
        },
    }
    match servers.send(&key, &redis::cmd("INFO")).await.and_then(|info| Ok(redis::from_redis_value(info)?)) {
        Ok(info) => look_at(&info, servers, peer),
        Err(error) => {
            tracing::debug!(%error, "redis does not tell its version and eviction policy");
            Ok(())
        }
    }
}

fn look_at(info: &InfoDict, servers: &Servers, peer: &Peer) -> Result<(), ConnectError> {
    let text = |name: &str| info.get::<String>(name);
    // Valkey says here which Redis it can stand in for.
    let version = text("redis_version").unwrap_or_default();
    let mut numbers = version.split('.').map_while(|number| number.parse::<u32>().ok());
    if let (Some(major), Some(minor)) = (numbers.next(), numbers.next())
        && (major, minor) < OLDEST
    {
        let (major, minor) = OLDEST;
        let remedy = format!("use Redis {major}.{minor} or later, or Valkey");
        return Err(unsupported(peer, format!("it is Redis {version}"), remedy));
    }
    if !servers.is_cluster() && text("cluster_enabled").as_deref() == Some("1") {
        return Err(node_of_a_cluster(peer));
    }
    let policy = text("maxmemory_policy").unwrap_or_default();
    // All our keys have a time to live, so the `volatile` policies may take them as well.
    if !matches!(&*policy, "" | "noeviction") && text("maxmemory").is_some_and(|bytes| bytes != "0") {
        tracing::warn!(
            maxmemory_policy = policy,
            "redis may evict keys of tollgate when memory is short, and then forgets what was counted: set `noeviction`"
        );
    }
    Ok(())
}
