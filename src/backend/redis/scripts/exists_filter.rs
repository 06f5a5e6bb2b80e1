//! The scripts of filters of existing keys.

use std::time::Duration;

use redis::Value;

use super::lua_script::scripts;
use crate::backend::redis::codec::millis::millis;
use crate::backend::redis::topology::Servers;
use crate::cache::exists_filter::store::{ALLOCATION_STEP, BUILD_TTL, KeyBits, Layout, NewBits};
use crate::error::StoreError;

scripts! {
    /// The scripts of filters of existing keys.
    pub(crate) struct ExistsFilterScripts {
        allocate: "cache_filter_allocate.lua" after cache_filter_header;
        begin: "cache_filter_begin.lua" after cache_filter_header;
        add: "cache_filter_add.lua" after cache_filter_header;
        end: "cache_filter_end.lua" after cache_filter_header;
    }
}

/// Of several keys, the first has the ids of the versions. Callers pass it again in place of a version that does not exist.
impl ExistsFilterScripts {
    pub(crate) async fn allocate(&self, servers: &Servers, bits: &str, layout: &Layout) -> Result<Value, StoreError> {
        let args = (layout.blocks, layout.seed.as_slice(), ALLOCATION_STEP, millis(BUILD_TTL));
        self.allocate.call(servers, &[bits], args).await
    }

    /// The second key is that of the new version, the third that of the previous unfinished version.
    pub(crate) async fn begin(
        &self,
        servers: &Servers,
        keys: [&str; 3],
        (seen, start): (&[u8], &[u8]),
        ttl: Duration,
    ) -> Result<Value, StoreError> {
        self.begin.call(servers, &keys, (seen, start, keep_versions_ms(ttl))).await
    }

    /// The second key is that of the active version, the third that of the unfinished version.
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

    /// The second key is that of the unfinished version, the third that of the active version.
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
