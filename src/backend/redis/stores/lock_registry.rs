//! Inspects and releases locks for operators.

use std::time::Duration;

use futures_util::future::try_join_all;
use redis::Value;

use crate::backend::redis::error::{store_error, unexpected_reply};
use crate::backend::redis::scripts::lock::lock_kind;
use crate::backend::redis::topology::Servers;
use crate::backend::redis::{Inner, RedisBackend};
use crate::error::StoreError;
use crate::key::Key;
use crate::lock::store::LockRegistry;
use crate::lock::{Cursor, ForceReleased, LockHolder, LockKey, LockPage, LockStatus};

impl LockRegistry for RedisBackend {
    async fn inspect(&self, lock: &LockKey) -> Result<LockStatus, StoreError> {
        let Inner { keys, scripts, auxiliary, .. } = &*self.inner;
        let (lease, names) = (keys.lease(lock), keys.names(lock));
        let reply = scripts.lock.inspect(auxiliary.dedicated(), [&lease, &names], LockStatus::MAX_HOLDERS).await?;
        status(lock, &reply).ok_or_else(|| unexpected_reply(&reply))
    }

    async fn force_release(&self, lock: &LockKey) -> Result<ForceReleased, StoreError> {
        let Inner { keys, scripts, auxiliary, .. } = &*self.inner;
        let publish = auxiliary.dedicated().publish_command();
        let (lease, channel) = (keys.lease(lock), keys.free_channel(lock));
        let reply = scripts.lock.force_release(auxiliary.dedicated(), &lease, &channel, publish).await?;
        let released = match &reply {
            Value::Array(values) => match values.as_slice() {
                [holders, fence] => number(holders).zip(number(fence)),
                _ => None,
            },
            _ => None,
        };
        let (holders, fence) = released.ok_or_else(|| unexpected_reply(&reply))?;
        scripts.lock.floor.raise(fence, 1);
        Ok(ForceReleased { holders: holders as usize, fence })
    }

    async fn list(&self, name: &Key, from: Cursor, max: usize) -> Result<LockPage, StoreError> {
        let Inner { keys, auxiliary, .. } = &*self.inner;
        let (leases, next) = scan(auxiliary.dedicated(), from, &keys.leases(name), max).await?;
        // SCAN returns at most one hash bucket more than `COUNT`, so `max` bounds the concurrent calls.
        let found = leases.iter().filter_map(|lease| keys.lock_of(name, lease));
        let statuses = try_join_all(found.map(|lock| async move {
            match LockRegistry::inspect(self, &lock).await {
                // Skip a key with data of another program, so that the page still shows the other locks.
                Err(error) if error.is_foreign_data() => Ok(None),
                status => status.map(Some),
            }
        }));
        let statuses = statuses.await?.into_iter().flatten();
        Ok(LockPage { locks: statuses.filter(LockStatus::is_held).collect(), next })
    }
}

fn status(lock: &LockKey, reply: &Value) -> Option<LockStatus> {
    let Value::Array(values) = reply else { return None };
    let [last_fence, holder_count, kind, holders @ ..] = values.as_slice() else { return None };
    let holders = holders.chunks(4).map(|holder| {
        let [fence, remaining_ms, held_ms, name] = holder else { return None };
        let Value::BulkString(name) = name else { return None };
        Some(LockHolder {
            fence: number(fence)?,
            remaining: Duration::from_millis(number(remaining_ms)?),
            held_for: Duration::from_millis(number(held_ms)?),
            name: (!name.is_empty()).then(|| String::from_utf8_lossy(name).into_owned()),
        })
    });
    let (last_fence, holder_count) = (number(last_fence)?, number(holder_count)? as usize);
    let kind = if holder_count > 0 { Some(lock_kind(number(kind)?)?) } else { None };
    Some(LockStatus { lock: *lock, last_fence, kind, holder_count, holders: holders.collect::<Option<_>>()? })
}

/// Scans about `max` keys. Returns the keys that match the pattern, and the next cursor.
pub(crate) async fn scan(
    servers: &Servers,
    from: Cursor,
    pattern: &str,
    max: usize,
) -> Result<(Vec<String>, Option<Cursor>), StoreError> {
    let command = |part| {
        // A cursor of another server is meaningless here.
        let position = if part == from.part { from.position } else { 0 };
        let mut command = redis::cmd("SCAN");
        command.arg(position).arg("MATCH").arg(pattern).arg("COUNT").arg(max);
        command
    };
    let Some((part, reply)) = servers.send_to(from.part, command).await else { return Ok((Vec::new(), None)) };
    let reply = reply.map_err(store_error)?;
    let (position, keys) = scanned(&reply).ok_or_else(|| unexpected_reply(&reply))?;
    let next = if position > 0 {
        Some(Cursor { part, position })
    } else {
        // The next call finds out whether there is another server.
        servers.is_cluster().then_some(Cursor { part: part + 1, position: 0 })
    };
    Ok((keys, next))
}

/// The next cursor, and keys.
fn scanned(reply: &Value) -> Option<(u64, Vec<String>)> {
    let Value::Array(values) = reply else { return None };
    let [Value::BulkString(position), Value::Array(keys)] = values.as_slice() else { return None };
    let position = std::str::from_utf8(position).ok()?.parse().ok()?;
    let keys = keys.iter().map(|key| match key {
        Value::BulkString(key) => Some(String::from_utf8_lossy(key).into_owned()),
        _ => None,
    });
    Some((position, keys.collect::<Option<_>>()?))
}

fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Int(number) => u64::try_from(*number).ok(),
        _ => None,
    }
}
