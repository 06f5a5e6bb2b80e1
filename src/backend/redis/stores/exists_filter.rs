use std::time::Duration;

use redis::{Cmd, Value};

use super::cache::{integers, is_done, milliseconds};
use crate::backend::redis::error::{store_error, unexpected_reply};
use crate::backend::redis::keys::Keys;
use crate::backend::redis::{Inner, RedisBackend};
use crate::cache::exists_filter::store::{
    Added, Block, ExistsFilterStore, FilterStatus, Layout, NewBits, Token, Version, VersionIds,
};
use crate::error::StoreError;
use crate::key::Key;
use crate::reach::Reach;

impl ExistsFilterStore for RedisBackend {
    async fn status(&self, filter: &Key) -> Result<FilterStatus, StoreError> {
        let Inner { servers, keys, .. } = &*self.inner;
        let versions = keys.filter_versions(filter);
        let mut get = Cmd::with_capacity(2, versions.len() + 3);
        get.arg("GET").arg(&versions);
        let ids = match servers.send(&versions, &get).await.map_err(store_error)? {
            Value::Nil => VersionIds::default(),
            Value::BulkString(value) => decode_ids(&value).ok_or_else(not_ids)?,
            reply => return Err(unexpected_reply(&reply)),
        };
        let active = self.version(filter, ids.active, true).await?;
        let building = self.version(filter, ids.building, false).await?;
        Ok(FilterStatus::new(ids, active, building))
    }

    async fn read_block(&self, filter: &Key, version: &Token, block: u32) -> Result<Option<Block>, StoreError> {
        let start = Layout::HEADER_LEN + Layout::BLOCK_LEN * block as usize;
        let bits = self.inner.keys.filter_bits(filter, version);
        // Past the end, Redis returns fewer bytes, and the result is `None`.
        Ok(self.read(&bits, start, Layout::BLOCK_LEN).await?.try_into().ok())
    }

    async fn read_blocks(
        &self,
        filter: &Key,
        version: &Token,
        first: u32,
        count: u32,
    ) -> Result<Option<Vec<Block>>, StoreError> {
        let (start, len) =
            (Layout::HEADER_LEN + Layout::BLOCK_LEN * first as usize, Layout::BLOCK_LEN * count as usize);
        if len == 0 {
            return Ok(Some(Vec::new()));
        }
        let bytes = self.read(&self.inner.keys.filter_bits(filter, version), start, len).await?;
        Ok((bytes.len() == len).then(|| bytes.as_chunks().0.to_vec()))
    }

    async fn allocate(&self, filter: &Key, version: &Token, layout: &Layout) -> Result<bool, StoreError> {
        let Inner { servers, keys, scripts, .. } = &*self.inner;
        is_done(&scripts.exists_filter.allocate(servers, &keys.filter_bits(filter, version), layout).await?)
    }

    async fn begin_build(
        &self,
        filter: &Key,
        seen: &VersionIds,
        version: &Token,
        ttl: Duration,
    ) -> Result<bool, StoreError> {
        let Inner { servers, keys, scripts, .. } = &*self.inner;
        let filter_keys = FilterKeys::new(keys, filter, seen);
        let since = VersionIds::new(seen.active, Some(*version));
        let (seen, since) = (encode_ids(seen), encode_ids(&since));
        let bits = keys.filter_bits(filter, version);
        let redis_keys: [&str; 3] = [&filter_keys.versions, &bits, filter_keys.building()];
        is_done(&scripts.exists_filter.begin(servers, redis_keys, (&seen, &since), ttl).await?)
    }

    async fn add_bits(&self, filter: &Key, seen: &VersionIds, bits: &NewBits) -> Result<Added, StoreError> {
        let Inner { servers, keys, scripts, .. } = &*self.inner;
        let filter_keys = FilterKeys::new(keys, filter, seen);
        let redis_keys: [&str; 3] = [&filter_keys.versions, filter_keys.active(), filter_keys.building()];
        let reply = scripts.exists_filter.add(servers, redis_keys, &encode_ids(seen), bits).await?;
        match integers::<3>(&reply) {
            Some([0, ..]) => Ok(Added::Changed),
            Some([1, active, building]) => Ok(Added::Done { active: active == 1, building: building == 1 }),
            Some([2, ms, _]) => Ok(Added::Missing { missing_for: Duration::from_millis(ms) }),
            _ => Err(unexpected_reply(&reply)),
        }
    }

    async fn end_build(
        &self,
        filter: &Key,
        seen: &VersionIds,
        is_complete: bool,
        ttl: Duration,
    ) -> Result<bool, StoreError> {
        let Inner { servers, keys, scripts, .. } = &*self.inner;
        let filter_keys = FilterKeys::new(keys, filter, seen);
        let (seen, ended) = (encode_ids(seen), encode_ids(&seen.after_build(is_complete)));
        let redis_keys: [&str; 3] = [&filter_keys.versions, filter_keys.building(), filter_keys.active()];
        is_done(&scripts.exists_filter.end(servers, redis_keys, (&seen, &ended), is_complete, ttl).await?)
    }

    fn reach(&self) -> Reach {
        Reach::Redis
    }
}

/// The Redis keys of a filter: of its version ids, and of the bits of each version.
struct FilterKeys {
    versions: String,
    active: Option<String>,
    building: Option<String>,
}

impl FilterKeys {
    fn new(keys: &Keys, filter: &Key, ids: &VersionIds) -> Self {
        let bits = |version: &Option<Token>| version.as_ref().map(|version| keys.filter_bits(filter, version));
        Self { versions: keys.filter_versions(filter), active: bits(&ids.active), building: bits(&ids.building) }
    }

    /// The key of the active version. Without an active version, the key of the version ids, only to fill the argument.
    fn active(&self) -> &str {
        self.active.as_deref().unwrap_or(&self.versions)
    }

    /// Likewise the key of the unfinished version.
    fn building(&self) -> &str {
        self.building.as_deref().unwrap_or(&self.versions)
    }
}

impl RedisBackend {
    /// The header of a version. `None` if it is missing or damaged, or if its state (active or unfinished) is not `is_active`.
    async fn version(
        &self,
        filter: &Key,
        version: Option<Token>,
        is_active: bool,
    ) -> Result<Option<Version>, StoreError> {
        let Some(version) = version else { return Ok(None) };
        let bits = self.inner.keys.filter_bits(filter, &version);
        let header = match self.read(&bits, 0, Layout::HEADER_LEN).await {
            Err(error) if error.is_foreign_data() => return Ok(None),
            header => header?,
        };
        let decoded = header.as_slice().try_into().ok().and_then(decode_header);
        let Some((mut version, since_ms)) = decoded.filter(|(_, since)| since.is_some() == is_active) else {
            return Ok(None);
        };
        if let Some(since_ms) = since_ms {
            version.age = Duration::from_millis(self.server_ms(&bits).await?.saturating_sub(since_ms));
        }
        Ok(Some(version))
    }

    async fn read(&self, bits: &str, start: usize, len: usize) -> Result<Vec<u8>, StoreError> {
        let mut range = Cmd::with_capacity(4, bits.len() + 32);
        range.arg("GETRANGE").arg(bits).arg(start).arg(start + len - 1);
        match self.inner.servers.send(bits, &range).await.map_err(store_error)? {
            Value::BulkString(bytes) => Ok(bytes),
            reply => Err(unexpected_reply(&reply)),
        }
    }

    /// The time of the server in milliseconds since 1970.
    async fn server_ms(&self, key: &str) -> Result<u64, StoreError> {
        let Inner { servers, server_clock, .. } = &*self.inner;
        if let Some(now_ms) = server_clock.now_ms() {
            return Ok(now_ms);
        }
        let reply = servers.send(key, &redis::cmd("TIME")).await.map_err(store_error)?;
        let now_ms = milliseconds(&reply).ok_or_else(|| unexpected_reply(&reply))?;
        server_clock.set(now_ms);
        Ok(now_ms)
    }
}

fn not_ids() -> StoreError {
    StoreError::foreign_data(
        "the key with the versions of an exists filter holds other data; delete it, and rebuild the filter",
    )
}

/// The value with the ids of the versions: see `cache_filter_header.lua`. Empty for no versions.
fn encode_ids(ids: &VersionIds) -> Vec<u8> {
    if *ids == VersionIds::default() {
        return Vec::new();
    }
    let mut value = vec![1];
    for id in [ids.active, ids.building] {
        value.extend_from_slice(id.as_ref().map_or(&[0_u8; 16], Token::as_bytes).as_slice());
    }
    value
}

fn decode_ids(value: &[u8]) -> Option<VersionIds> {
    let [1, ids @ ..] = value else { return None };
    if ids.len() == 7 {
        // There are no ids. The value is the time at which an addition found no versions.
        return Some(VersionIds::default());
    }
    let [active, building] = ids.as_chunks::<16>().0 else { return None };
    let id = |bytes: &[u8; 16]| Token::from_bytes(bytes).filter(|_| *bytes != [0; 16]);
    (ids.len() == 32).then(|| VersionIds::new(id(active), id(building)))
}

/// Decodes a header: see `cache_filter_header.lua`. Returns the version and, if it is active, the time in milliseconds at which it became
/// active.
fn decode_header(header: &[u8; Layout::HEADER_LEN]) -> Option<(Version, Option<u64>)> {
    let number = |at: std::ops::Range<usize>| header[at].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    let is_active = match header.first_chunk::<6>()? {
        b"TGEF\x01R" => true,
        b"TGEF\x01B" => false,
        _ => return None,
    };
    let blocks = u32::try_from(number(8..12)).ok().filter(|blocks| (1..=Layout::MAX_BLOCKS).contains(blocks))?;
    let layout = Layout::new(blocks, *header[12..].first_chunk()?);
    let version = Version::new(layout, number(28..35), number(35..42), Duration::ZERO);
    Some((version, is_active.then(|| number(42..49))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_survive_their_encoding() {
        let [a, b] = [1, 2].map(|byte| Token::from_bytes(&[byte; 16]));
        for ids in [VersionIds::new(a, b), VersionIds::new(a, None), VersionIds::new(None, b)] {
            assert_eq!(decode_ids(&encode_ids(&ids)), Some(ids));
        }
        assert!(encode_ids(&VersionIds::default()).is_empty());
        assert_eq!(decode_ids(&[1; 8]), Some(VersionIds::default()));
        for damaged in [b"".as_slice(), b"1", &[1; 7], &[2; 8], &[1; 9], &[1; 32], &[1; 34], &[2; 33]] {
            assert_eq!(decode_ids(damaged), None, "{damaged:?}");
        }
    }
}
