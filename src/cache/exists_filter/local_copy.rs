//! A copy of a filter in this process.

use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::layout::{Block, KeyBits, Layout};
use super::store::Token;
use super::store_client::{MAX_AGE, StoreClient};
use crate::error::StoreError;
use crate::key::Key;

/// The largest filter of which there is a copy, in bytes.
const MAX_BYTES: u64 = 16 << 20;
/// How many blocks are read in one call: 128 KiB.
const CHUNK: u32 = 4_096;
/// The shortest time from one refresh to the next.
const MIN_PAUSE: Duration = Duration::from_millis(250);

/// The copy of a filter, and the task that refreshes it.
pub(super) struct LocalCopy {
    max_age: Duration,
    state: Arc<State>,
    // At most one task, which ends with this value.
    refresh_task: Mutex<JoinSet<()>>,
}

/// The state of a [`LocalCopy`], which its task shares.
#[derive(Default)]
struct State(RwLock<Copies>);

#[derive(Default)]
struct Copies {
    used: Option<Current>,
    // The copy that the task is reading. Additions of this process go to this copy too.
    loading: Option<Bits>,
    // When the next refresh is due. `None`: at once.
    refresh_at: Option<Instant>,
    is_warned: bool,
}

/// A complete copy.
struct Current {
    bits: Bits,
    // The number of set bits that the store had before the copy was read. Bits are never cleared, so the store still has the same bits if
    // their number is the same.
    set_bits: u64,
    // The latest known time at which the copy had all bits of the store.
    complete_at: Instant,
}

struct Bits {
    version: Token,
    layout: Layout,
    blocks: Vec<Block>,
}

impl LocalCopy {
    pub(super) fn new(max_age: Duration) -> Self {
        Self { max_age, state: Arc::default(), refresh_task: Mutex::default() }
    }

    /// Whether the copy may contain a key. `None` without a copy that is recent enough.
    pub(super) fn might_contain(&self, client: &StoreClient, key: &Key) -> Option<bool> {
        let now = Instant::now();
        let (might_contain, is_due) = {
            let copies = self.state.read();
            let used =
                copies.used.as_ref().filter(|used| now.saturating_duration_since(used.complete_at) < self.max_age);
            (
                used.map(|used| used.bits.might_contain(key)),
                copies.refresh_at.is_none_or(|refresh_at| refresh_at <= now),
            )
        };
        if is_due {
            self.start_refresh(client, now);
        }
        might_contain
    }

    /// Adds keys after they were added to the active version in the store. A copy of another version does not get them, so it is removed.
    pub(super) fn add(&self, active: Option<&Token>, keys: &[KeyBits]) {
        let mut copies = self.state.write();
        copies.used.take_if(|used| Some(&used.bits.version) != active);
        copies.loading.take_if(|loading| Some(&loading.version) != active);
        let Copies { used, loading, .. } = &mut *copies;
        for bits in used.iter_mut().map(|used| &mut used.bits).chain(loading) {
            keys.iter().for_each(|key| bits.add(key));
        }
    }

    /// Removes the copy, and discards the copy that a refresh is reading.
    pub(super) fn clear(&self) {
        let mut copies = self.state.write();
        *copies = Copies { is_warned: copies.is_warned, ..Copies::default() };
    }

    fn start_refresh(&self, client: &StoreClient, now: Instant) {
        let mut refresh = self.refresh_task.lock().unwrap_or_else(PoisonError::into_inner);
        while refresh.try_join_next().is_some() {}
        if !refresh.is_empty() {
            return;
        }
        let pause = (self.max_age / 2).max(MIN_PAUSE);
        self.state.write().refresh_at = Some(now + pause);
        let (client, state) = (client.clone(), Arc::clone(&self.state));
        refresh.spawn(async move {
            if let Err(error) = state.refresh(&client).await {
                state.write().loading = None;
                tracing::debug!(filter = %client.filter, %error, "local copy of an exists filter is not refreshed");
            }
        });
    }
}

impl State {
    /// Brings the copy up to date, or removes it if the filter is missing or too large for a copy.
    async fn refresh(&self, client: &StoreClient) -> Result<(), StoreError> {
        let known = client.current_status().await?;
        let Some((version, active)) = known.status.ids.active.zip(known.status.active) else {
            self.write().used = None;
            return Ok(());
        };
        let (layout, set_bits, complete_at) = (active.layout, active.bits, known.read);
        {
            let mut copies = self.write();
            if complete_at.elapsed() > MAX_AGE {
                // The store may have lost the ids since. Additions of this process then found no version, so this version lacks them.
                return Ok(());
            }
            if layout.bytes() > MAX_BYTES {
                copies.used = None;
                if !std::mem::replace(&mut copies.is_warned, true) {
                    let (filter, bytes) = (&client.filter, layout.bytes());
                    tracing::warn!(%filter, bytes, "exists filter is too large for a local copy: each test calls the store");
                }
                return Ok(());
            }
            if let Some(used) = &mut copies.used
                && used.bits.version == version
                && used.set_bits == set_bits
            {
                used.complete_at = complete_at;
                return Ok(());
            }
            copies.loading = Some(Bits::new(version, layout));
        }
        for first in (0..layout.blocks).step_by(CHUNK as usize) {
            let count = CHUNK.min(layout.blocks - first);
            let Some(blocks) = client.call(client.store.read_blocks(&client.filter, &version, first, count)).await?
            else {
                // Replaced or lost meanwhile: the next refresh reads the status again.
                self.write().loading = None;
                return Ok(());
            };
            // `None` if the copy was removed meanwhile.
            let mut copies = self.write();
            let Some(loading) = &mut copies.loading else { return Ok(()) };
            loading.merge(first, &blocks);
        }
        let mut copies = self.write();
        if let Some(bits) = copies.loading.take() {
            copies.used = Some(Current { bits, set_bits, complete_at });
        }
        Ok(())
    }

    /// No code panics in the middle of a change, so a poisoned copy is intact.
    fn read(&self) -> RwLockReadGuard<'_, Copies> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Copies> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Bits {
    fn new(version: Token, layout: Layout) -> Self {
        Self { version, layout, blocks: vec![[0; Layout::BLOCK_LEN]; layout.blocks as usize] }
    }

    fn might_contain(&self, key: &Key) -> bool {
        let bits = self.layout.locate(key);
        self.blocks.get(bits.block as usize).is_none_or(|block| bits.are_set_in(block))
    }

    fn add(&mut self, key: &KeyBits) {
        self.merge(key.block, &[key.to_block()]);
    }

    /// Sets the bits that are set in these blocks.
    fn merge(&mut self, first: u32, blocks: &[Block]) {
        for (own, new) in self.blocks.iter_mut().skip(first as usize).zip(blocks) {
            own.iter_mut().zip(new).for_each(|(own, new)| *own |= new);
        }
    }
}
