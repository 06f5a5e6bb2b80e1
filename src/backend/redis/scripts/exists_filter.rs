//! The scripts of filters of existing keys.

use std::time::Duration;

use redis::Value;

use super::lua_script::{LuaScript, lua_file, scripts};
use crate::backend::redis::codec::millis::millis;
use crate::backend::redis::topology::Servers;
use crate::cache::exists_filter::store::{ALLOCATION_STEP, BUILD_TTL, KeyBits, Layout, NewBits};
use crate::error::StoreError;

scripts! {
    /// The scripts of filters of existing keys.
    struct ExistsFilterScripts {
        allocate: "cache_filter_allocate.lua", cache_filter: header;
        begin: "cache_filter_begin.lua", cache_filter: header;
        add: "cache_filter_add.lua", cache_filter: header;
        end: "cache_filter_end.lua", cache_filter: header;
    }
}

impl ExistsFilterScripts {
    pub(crate) async fn allocate(&self, servers: &Servers, bits: &str, layout: &Layout) -> Result<Value, StoreError> {
        let args = (layout.blocks, layout.seed.as_slice(), ALLOCATION_STEP, millis(BUILD_TTL));
        self.allocate.call(servers, &[bits], args).await
    }

    /// Keys: of the versions, the new version, and the previous unfinished version. For a version that does not exist, the caller passes
    /// the key of the versions.
    pub(crate) async fn begin(
        &self,
        servers: &Servers,
        keys: [&str; 3],
        (seen, start): (&[u8], &[u8]),
        ttl: Duration,
    ) -> Result<Value, StoreError> {
        self.begin.call(servers, &keys, (seen, start, keep_versions_ms(ttl))).await
    }

    /// Keys: of the versions, the active version, and the unfinished version. For a version that does not exist, the caller passes the key
    /// of the versions.
    pub(crate) async fn add(
        &self,
        servers: &Servers,
        keys: [&str; 3],
        seen: &[u8],
        bits: &NewBits,
    ) -> Result<Value, StoreError> {
        let (active, building) = (packed_bits(&bits.active), packed_bits(&bits.building));
        let build_ms = if bits.is_build { millis(BUILD_TTL) } else { 0 };
        let times = (millis(bits.ttl).max(1), build_ms, keep_versions_ms(bits.ttl));
        self.add.call(servers, &keys, (seen, active.as_slice(), building.as_slice(), times)).await
    }

    /// Keys: of the versions, the unfinished version, and the active version. For a version that does not exist, the caller passes the key
    /// of the versions.
    pub(crate) async fn end(
        &self,
        servers: &Servers,
        keys: [&str; 3],
        (seen, ended): (&[u8], &[u8]),
        is_complete: bool,
        ttl: Duration,
    ) -> Result<Value, StoreError> {
        let args = (seen, ended, u8::from(is_complete), millis(ttl).max(1), keep_versions_ms(ttl));
        self.end.call(servers, &keys, args).await
    }
}

/// How long the ids of the versions of a filter are kept: longer than each version, so that no version is in use without them.
fn keep_versions_ms(ttl: Duration) -> u64 {
    millis(ttl.saturating_add(BUILD_TTL).saturating_add(Duration::from_secs(60)))
}

/// The bits of keys as an argument of `add`.
fn packed_bits(keys: &[KeyBits]) -> Vec<u8> {
    keys.iter().flat_map(|bits| bits.block.to_le_bytes().into_iter().chain(bits.to_block())).collect()
}
