use std::time::Duration;

use super::MemoryBackend;
use crate::cache::exists_filter::store::{
    Added, Block, ExistsFilterStore, FilterStatus, Layout, NewBits, Token, VersionIds,
};
use crate::error::StoreError;
use crate::key::Key;
use crate::reach::Reach;

impl ExistsFilterStore for MemoryBackend {
    async fn status(&self, filter: &Key) -> Result<FilterStatus, StoreError> {
        Ok(self.inner.filters.status(filter))
    }

    async fn read_block(&self, filter: &Key, version: &Token, block: u32) -> Result<Option<Block>, StoreError> {
        Ok(self.inner.filters.read_block(filter, version, block))
    }

    async fn read_blocks(
        &self,
        filter: &Key,
        version: &Token,
        first: u32,
        count: u32,
    ) -> Result<Option<Vec<Block>>, StoreError> {
        Ok(self.inner.filters.read_blocks(filter, version, first, count))
    }

    async fn allocate(&self, filter: &Key, version: &Token, layout: &Layout) -> Result<bool, StoreError> {
        self.inner.filters.allocate(filter, version, layout)
    }

    async fn begin_build(
        &self,
        filter: &Key,
        seen: &VersionIds,
        version: &Token,
        _: Duration,
    ) -> Result<bool, StoreError> {
        Ok(self.inner.filters.begin_build(filter, seen, version))
    }

    async fn add_bits(&self, filter: &Key, seen: &VersionIds, bits: &NewBits) -> Result<Added, StoreError> {
        Ok(self.inner.filters.add_bits(filter, seen, bits))
    }

    async fn end_build(
        &self,
        filter: &Key,
        seen: &VersionIds,
        is_complete: bool,
        ttl: Duration,
    ) -> Result<bool, StoreError> {
        Ok(self.inner.filters.end_build(filter, seen, is_complete, ttl))
    }

    fn reach(&self) -> Reach {
        Reach::Process
    }
}
