use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use redis::{Cmd, Value};

use crate::backend::redis::connection::subscriber::Interest;
use crate::backend::redis::error::{store_error, unexpected_reply};
use crate::backend::redis::{Inner, RedisBackend};
use crate::cache::store::{
    CacheKey, CacheStore, Claim, Claimed, Content, Entry, EntryId, Mark, NewEntry, Notifications, TagGeneration, Token,
};
use crate::error::StoreError;
use crate::key::Key;
use crate::reach::Reach;
use crate::store::shutdown::ShutdownTarget;

impl CacheStore for RedisBackend {
    async fn get(&self, key: &CacheKey) -> Result<Option<Entry>, StoreError> {
        let Inner { servers, keys, server_clock, .. } = &*self.inner;
        let entry = keys.cache_entry(key);
        if server_clock.now_ms().is_none() {
            let reply = servers.send(&entry, &redis::cmd("TIME")).await.map_err(store_error)?;
            server_clock.set(milliseconds(&reply).ok_or_else(|| unexpected_reply(&reply))?);
        }
        let mut get = Cmd::with_capacity(2, entry.len() + 3);
        get.arg("GET").arg(&entry);
        match servers.send(&entry, &get).await.map_err(store_error)? {
            Value::Nil => Ok(None),
            Value::BulkString(bytes) => Ok(Some(decode(bytes, server_clock.estimate_ms()))),
            reply => Err(unexpected_reply(&reply)),
        }
    }

    async fn claim(&self, key: &CacheKey, seen: &EntryId, claim: &Claim) -> Result<Claimed, StoreError> {
        let Inner { servers, keys, scripts, server_clock, .. } = &*self.inner;
        let reply = scripts.cache.claim(servers, &keys.cache(key), seen, claim).await?;
        let Some([state, ms, now_ms]) = integers(&reply) else { return Err(unexpected_reply(&reply)) };
        server_clock.set(now_ms);
        let time = Duration::from_millis(ms);
        match state {
            0 => Ok(Claimed::Changed),
            1 => Ok(Claimed::Granted),
            2 => Ok(Claimed::Busy { remaining: time }),
            3 => Ok(Claimed::Marked(Mark::Failed { retry_after: time })),
            4 => Ok(Claimed::Marked(Mark::Uncached { remaining: time })),
            _ => Err(unexpected_reply(&reply)),
        }
    }

    async fn renew(&self, key: &CacheKey, claim: &Claim) -> Result<bool, StoreError> {
        let Inner { keys, scripts, auxiliary, .. } = &*self.inner;
        is_done(&scripts.cache.renew(auxiliary.dedicated(), &keys.cache(key), claim).await?)
    }

    async fn put(&self, key: &CacheKey, token: &Token, entry: &NewEntry) -> Result<bool, StoreError> {
        self.store_entry(key, token, true, entry).await
    }

    async fn release(&self, key: &CacheKey, token: &Token, mark: Option<Mark>) -> Result<bool, StoreError> {
        let Inner { servers, keys, scripts, .. } = &*self.inner;
        is_done(&scripts.cache.release(servers, &keys.cache(key), token, mark).await?)
    }

    async fn set(&self, key: &CacheKey, token: &Token, entry: &NewEntry) -> Result<(), StoreError> {
        self.store_entry(key, token, false, entry).await.map(drop)
    }

    async fn invalidate(&self, key: &CacheKey) -> Result<(), StoreError> {
        let Inner { servers, keys, scripts, .. } = &*self.inner;
        scripts.cache.invalidate(servers, &keys.cache(key), true).await.map(drop)
    }

    async fn expire(&self, key: &CacheKey) -> Result<(), StoreError> {
        let Inner { servers, keys, scripts, .. } = &*self.inner;
        scripts.cache.invalidate(servers, &keys.cache(key), false).await.map(drop)
    }

    async fn generation(&self, tag: &CacheKey) -> Result<Option<Token>, StoreError> {
        let Inner { servers, keys, .. } = &*self.inner;
        let key = keys.generation(tag);
        match servers.send(&key, redis::cmd("GET").arg(&key)).await.map_err(store_error)? {
            Value::BulkString(bytes) => Ok(Token::from_bytes(&bytes)),
            Value::Nil => Ok(None),
            reply => Err(unexpected_reply(&reply)),
        }
    }

    async fn ensure_generation(&self, tag: &CacheKey, new: &Token, ttl: Duration) -> Result<Token, StoreError> {
        let Inner { servers, keys, scripts, .. } = &*self.inner;
        let reply = scripts.cache.generation(servers, &keys.generation(tag), new, ttl).await?;
        let Value::BulkString(bytes) = &reply else { return Err(unexpected_reply(&reply)) };
        Token::from_bytes(bytes).ok_or_else(|| unexpected_reply(&reply))
    }

    async fn invalidate_tag(&self, tag: &CacheKey) -> Result<(), StoreError> {
        let Inner { servers, keys, .. } = &*self.inner;
        let key = keys.generation(tag);
        servers.send(&key, redis::cmd("UNLINK").arg(&key)).await.map_err(store_error).map(drop)
    }

    async fn watch(&self, key: &CacheKey) -> Notifications {
        let Inner { keys, auxiliary, .. } = &*self.inner;
        auxiliary.subscriber().subscribe(keys.cache(key).changed, Interest::Changes).await
    }

    fn reach(&self) -> Reach {
        Reach::Redis
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        self.inner.shutdown.add(target);
    }
}

impl RedisBackend {
    async fn store_entry(
        &self,
        key: &CacheKey,
        token: &Token,
        is_load: bool,
        entry: &NewEntry,
    ) -> Result<bool, StoreError> {
        let Inner { servers, keys, scripts, server_clock, .. } = &*self.inner;
        let reply = scripts.cache.put(servers, &keys.cache(key), token, is_load, entry).await?;
        let Some([stored, now_ms]) = integers(&reply) else { return Err(unexpected_reply(&reply)) };
        server_clock.set(now_ms);
        Ok(stored == 1)
    }
}

/// The length of the header of an entry: see `cache_put.lua`.
const HEADER: usize = 45;

/// Decodes an entry, as `cache_put.lua` describes it.
fn decode(bytes: Vec<u8>, now_ms: u64) -> Entry {
    let bytes = Bytes::from(bytes);
    // Of a value that is too short, the same bytes as GETRANGE returns in `cache_claim.lua`.
    let id = EntryId::new(&bytes[bytes.len().min(2)..bytes.len().min(18)]);
    let Some((content, tags)) = decode_content(&bytes) else {
        return Entry::new(id, Content::Unreadable);
    };
    let time = |at: Range<usize>| little_endian(&bytes[at]);
    let since = |at| Duration::from_millis(now_ms.saturating_sub(time(at)));
    let until = |at| Duration::from_millis(time(at).saturating_sub(now_ms));
    Entry::new(id, content)
        .times(since(18..25), until(25..32), until(32..39))
        .load_time(Duration::from_millis(time(39..43)))
        .tags(tags)
}

/// The content and the tags of an entry. `None` if it cannot be read.
fn decode_content(bytes: &Bytes) -> Option<(Content, Vec<TagGeneration>)> {
    let start = HEADER + little_endian(bytes.get(43..HEADER)?) as usize;
    let tags = decode_tags(bytes.get(HEADER..start)?)?;
    match bytes.first_chunk()? {
        [1, 0] if bytes.len() == start => Some((Content::Absent, tags)),
        [1, 1] => Some((Content::Value(bytes.slice(start..)), tags)),
        _ => None,
    }
}

fn decode_tags(mut bytes: &[u8]) -> Option<Vec<TagGeneration>> {
    let mut tags = Vec::new();
    while let Some((&len, rest)) = bytes.split_first() {
        let (tag, rest) = rest.split_at_checked(len.into())?;
        let (generation, rest) = rest.split_at_checked(16)?;
        tags.push(TagGeneration::new(Key::stored(std::str::from_utf8(tag).ok()?)?, Token::from_bytes(generation)?));
        bytes = rest;
    }
    Some(tags)
}

fn little_endian(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

/// The integers of a reply. A negative one is 0: PTTL of a key without an expiry is -1.
pub(super) fn integers<const N: usize>(reply: &Value) -> Option<[u64; N]> {
    let Value::Array(values) = reply else { return None };
    let integers: Option<Vec<u64>> = values
        .iter()
        .map(|value| match value {
            Value::Int(integer) => Some((*integer).try_into().unwrap_or_default()),
            _ => None,
        })
        .collect();
    integers?.try_into().ok()
}

/// The reply of TIME, in milliseconds.
pub(super) fn milliseconds(reply: &Value) -> Option<u64> {
    let Value::Array(values) = reply else { return None };
    let [Value::BulkString(seconds), Value::BulkString(micros)] = values.as_slice() else { return None };
    let decimal = |text: &[u8]| std::str::from_utf8(text).ok()?.parse::<u64>().ok();
    Some(decimal(seconds)? * 1_000 + decimal(micros)? / 1_000)
}

pub(super) fn is_done(reply: &Value) -> Result<bool, StoreError> {
    match reply {
        Value::Int(done) => Ok(*done == 1),
        reply => Err(unexpected_reply(reply)),
    }
}
