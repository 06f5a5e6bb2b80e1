//! The scripts of cached values.

use std::time::Duration;

use redis::Value;

use super::lua_script::scripts;
use crate::backend::redis::codec::millis::millis;
use crate::backend::redis::keys::CacheKeys;
use crate::backend::redis::topology::Servers;
use crate::cache::store::{Claim, EntryId, Mark, NewEntry, TagGeneration};
use crate::error::StoreError;
use crate::store::token::Token;

scripts! {
    /// The scripts of cached values.
    pub(crate) struct CacheScripts {
        claim: "cache_claim.lua";
        renew: "cache_renew.lua";
        put: "cache_put.lua" after server_notify;
        release: "cache_release.lua" after server_notify;
        invalidate: "cache_invalidate.lua" after server_notify;
        generation: "cache_generation.lua";
    }
}

impl CacheScripts {
    pub(crate) async fn claim(
        &self,
        servers: &Servers,
        keys: &CacheKeys,
        seen: &EntryId,
        claim: &Claim,
    ) -> Result<Value, StoreError> {
        let args = (claim.token.as_bytes().as_slice(), seen.as_bytes(), millis(claim.lease));
        self.claim.call(servers, &[&keys.entry, &keys.lease], args).await
    }

    pub(crate) async fn renew(&self, servers: &Servers, keys: &CacheKeys, claim: &Claim) -> Result<Value, StoreError> {
        let args = (claim.token.as_bytes().as_slice(), millis(claim.lease));
        self.renew.call(servers, &[&keys.lease], args).await
    }

    pub(crate) async fn put(
        &self,
        servers: &Servers,
        keys: &CacheKeys,
        token: &Token,
        is_load: bool,
        entry: &NewEntry,
    ) -> Result<Value, StoreError> {
        let NewEntry { value, fresh_for, ttl, load_time, tags } = entry;
        let times = (millis(*fresh_for), millis(*ttl).max(1), millis(*load_time).min(u32::MAX.into()));
        let (is_value, value) = (u8::from(value.is_some()), value.as_deref().unwrap_or_default());
        let (publish, token) = (servers.publish_command(), token.as_bytes().as_slice());
        let args = (token, u8::from(is_load), is_value, times, encode_tags(tags), value, publish, &keys.changed);
        self.put.call(servers, &[&keys.entry, &keys.lease], args).await
    }

    pub(crate) async fn release(
        &self,
        servers: &Servers,
        keys: &CacheKeys,
        token: &Token,
        mark: Option<Mark>,
    ) -> Result<Value, StoreError> {
        let (mark, time) = match mark {
            None => ("", Duration::ZERO),
            Some(Mark::Failed { retry_after }) => ("F", retry_after),
            Some(Mark::Uncached { remaining }) => ("U", remaining),
        };
        let args = (token.as_bytes().as_slice(), mark, millis(time).max(1), servers.publish_command(), &keys.changed);
        self.release.call(servers, &[&keys.lease, &keys.entry], args).await
    }

    /// Removes an entry, or makes it stale.
    pub(crate) async fn invalidate(
        &self,
        servers: &Servers,
        keys: &CacheKeys,
        is_hard: bool,
    ) -> Result<Value, StoreError> {
        let args = (u8::from(is_hard), servers.publish_command(), &keys.changed);
        self.invalidate.call(servers, &[&keys.entry, &keys.lease], args).await
    }

    pub(crate) async fn generation(
        &self,
        servers: &Servers,
        key: &str,
        new: &Token,
        ttl: Duration,
    ) -> Result<Value, StoreError> {
        self.generation.call(servers, &[key], (new.as_bytes().as_slice(), millis(ttl).max(1))).await
    }
}

/// The tags of an entry, as `cache_put.lua` describes them.
fn encode_tags(tags: &[TagGeneration]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for TagGeneration { tag, generation } in tags {
        bytes.push(tag.as_str().len() as u8);
        bytes.extend_from_slice(tag.as_str().as_bytes());
        bytes.extend_from_slice(generation.as_bytes());
    }
    bytes
}
