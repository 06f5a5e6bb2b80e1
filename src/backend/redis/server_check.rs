//! Checks the server at startup: permissions, version and eviction policy.

use redis::{InfoDict, Value};

use super::connect_error::{forbidden, node_of_a_cluster, unsupported, wrong_server_kind};
use super::error::{code, is_unknown_command, store_error};
use super::keys::Keys;
use super::peer::Peer;
use super::scripts::LuaScript;
use super::topology::Servers;
use crate::error::{ConnectError, StoreError};

/// The oldest release with all commands that the scripts use.
const OLDEST: (u32, u32) = (6, 2);

/// Runs a script that reports missing permissions and leaves nothing behind. Then reads `INFO`, if the user may run it.
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
            _ if is_unknown_command(&error) => return Err(wrong_server_kind(peer, &error)),
            // A server that cannot serve now may do so later.
            _ => tracing::warn!(%error, "redis cannot run scripts at the moment"),
        },
    }
    match servers.send(&key, &redis::cmd("INFO")).await.and_then(|info| Ok(redis::from_redis_value(info)?)) {
        Ok(info) => check_info(&info, servers, peer),
        Err(error) => {
            tracing::debug!(%error, "cannot read the version and eviction policy of redis");
            Ok(())
        }
    }
}

fn check_info(info: &InfoDict, servers: &Servers, peer: &Peer) -> Result<(), ConnectError> {
    let text = |name: &str| info.get::<String>(name);
    // Valkey reports the Redis version that it is compatible with.
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
    // All keys have a time to live, so the `volatile` policies can evict them, too.
    if !matches!(&*policy, "" | "noeviction") && text("maxmemory").is_some_and(|bytes| bytes != "0") {
        tracing::warn!(
            maxmemory_policy = policy,
            "redis may evict keys of tollgate when memory is short, which resets their counts; set `maxmemory-policy noeviction`"
        );
    }
    Ok(())
}
