//! The contract tests of [`ExistsFilterStore`]: each function tests one requirement.
//! [`exists_filter_contract!`](crate::exists_filter_contract) runs them on a backend.
//!
//! A test gets a store that no other test uses, and panics if the store violates the requirement. The tests wait on tokio's clock. They
//! take no time if it is paused, and up to some seconds otherwise.
#![allow(clippy::unwrap_used, reason = "a failed requirement panics at its line")]

use std::time::Duration;

use tokio::time::sleep;

use crate::cache::exists_filter::store::{
    Added, Block, ExistsFilterStore, FilterStatus, KeyBits, Layout, MAX_KEYS, NewBits, Token, VersionIds,
};
use crate::key::Key;

/// A time that does not end during a test, even on a slow machine.
const LONG: Duration = Duration::from_secs(600);
/// A time whose end a test can wait for, with tolerance for a slow machine.
const SHORT: Duration = Duration::from_millis(1_500);
/// A small filter.
const SMALL: Layout = Layout::new(100, *b"seed of contract");

fn filter() -> Key {
    Key::from("contract")
}

fn locate(layout: &Layout, key: &str) -> KeyBits {
    layout.locate(&Key::from(key))
}

async fn status<S: ExistsFilterStore>(store: &S) -> FilterStatus {
    store.status(&filter()).await.unwrap()
}

/// Allocates a hidden version.
async fn allocate<S: ExistsFilterStore>(store: &S, layout: &Layout) -> Token {
    let version = Token::random().unwrap();
    for _ in 0..1_000 {
        if store.allocate(&filter(), &version, layout).await.unwrap() {
            return version;
        }
    }
    panic!("a version of {} bytes is never complete", layout.bytes());
}

/// Begins a build, and returns the ids since then.
async fn begin<S: ExistsFilterStore>(store: &S, layout: &Layout) -> VersionIds {
    let version = allocate(store, layout).await;
    let seen = status(store).await.ids;
    assert!(store.begin_build(&filter(), &seen, &version, LONG).await.unwrap());
    VersionIds::new(seen.active, Some(version))
}

async fn end<S: ExistsFilterStore>(store: &S, ids: &VersionIds, is_complete: bool) -> bool {
    store.end_build(&filter(), ids, is_complete, LONG).await.unwrap()
}

/// Builds an active version, and returns the ids since then.
async fn build<S: ExistsFilterStore>(store: &S, layout: &Layout, keys: &[&str]) -> VersionIds {
    let ids = begin(store, layout).await;
    let bits = NewBits::built(keys.iter().map(|key| locate(layout, key)).collect(), LONG);
    let added = add(store, &ids, &bits).await;
    assert!(matches!(added, Added::Done { building: true, .. }), "{added:?}");
    assert!(end(store, &ids, true).await);
    ids.after_build(true)
}

async fn add<S: ExistsFilterStore>(store: &S, ids: &VersionIds, bits: &NewBits) -> Added {
    store.add_bits(&filter(), ids, bits).await.unwrap()
}

async fn block<S: ExistsFilterStore>(store: &S, version: Option<Token>, block: u32) -> Option<Block> {
    store.read_block(&filter(), &version.unwrap(), block).await.unwrap()
}

/// Whether a version has all bits of a key. `None` if it has no such block.
async fn has<S: ExistsFilterStore>(store: &S, version: Option<Token>, layout: &Layout, key: &str) -> Option<bool> {
    let bits = locate(layout, key);
    block(store, version, bits.block).await.map(|block| bits.are_set_in(&block))
}

/// A store has no versions at first, and changes nothing for versions that it does not have.
pub async fn new_filter_has_no_versions<S: ExistsFilterStore>(store: S) {
    assert_eq!(status(&store).await, FilterStatus::default());
    let unknown = Token::random().unwrap();
    assert_eq!(block(&store, Some(unknown), 0).await, None);
    for ids in [VersionIds::new(Some(unknown), None), VersionIds::new(None, Some(unknown))] {
        let bits = NewBits::added(vec![locate(&SMALL, "a")], vec![locate(&SMALL, "a")], LONG);
        assert!(matches!(add(&store, &ids, &bits).await, Added::Missing { .. }));
        assert!(!end(&store, &VersionIds::new(Some(unknown), Some(unknown)), true).await);
    }
    assert!(!store.begin_build(&filter(), &VersionIds::default(), &unknown, LONG).await.unwrap());
    assert_eq!(status(&store).await, FilterStatus::default());
}

/// A version is hidden until its build begins, and not active until its build ends.
pub async fn version_is_active_after_its_build<S: ExistsFilterStore>(store: S) {
    let version = allocate(&store, &SMALL).await;
    assert_eq!(status(&store).await, FilterStatus::default());
    assert!(store.begin_build(&filter(), &VersionIds::default(), &version, LONG).await.unwrap());
    let building = status(&store).await;
    assert_eq!((building.ids, building.active), (VersionIds::new(None, Some(version)), None));
    assert_eq!(building.building.unwrap().layout, SMALL);
    assert!(end(&store, &building.ids, true).await);
    let ready = status(&store).await;
    assert_eq!((ready.ids, ready.building), (VersionIds::new(Some(version), None), None));
    assert_eq!(ready.active.unwrap().layout, SMALL);
}

/// Exactly the bits of the added keys are set, in both versions.
pub async fn bits_are_set_in_both_versions<S: ExistsFilterStore>(store: S) {
    let other = Layout::new(7, [3; 16]);
    build(&store, &SMALL, &["old"]).await;
    let ids = begin(&store, &other).await;
    let keys: Vec<_> = (0..MAX_KEYS as u32).map(Key::from).collect();
    let bits = |layout: &Layout| keys.iter().map(|key| layout.locate(key)).collect::<Vec<_>>();
    let new = NewBits::added(bits(&SMALL), bits(&other), LONG);
    for _ in 0..2 {
        assert_eq!(add(&store, &ids, &new).await, Added::Done { active: true, building: true });
    }
    let mut active = bits(&SMALL);
    active.push(locate(&SMALL, "old"));
    for (version, layout, bits) in [(ids.active, SMALL, active), (ids.building, other, bits(&other))] {
        let mut expected = vec![[0_u8; Layout::BLOCK_LEN]; layout.blocks as usize];
        for bits in &bits {
            let block = &mut expected[bits.block as usize];
            block.iter_mut().zip(bits.to_block()).for_each(|(byte, bits)| *byte |= bits);
        }
        for (number, expected) in (0..).zip(&expected) {
            assert_eq!(block(&store, version, number).await.as_ref(), Some(expected), "block {number}");
        }
        assert_eq!(block(&store, version, layout.blocks).await, None, "past the end");
    }
}

/// A version counts its set bits, and the keys that have set one.
pub async fn set_bits_are_counted<S: ExistsFilterStore>(store: S) {
    let ids = build(&store, &SMALL, &["a", "b", "a"]).await;
    let active = status(&store).await.active.unwrap();
    let mut expected = [locate(&SMALL, "a"), locate(&SMALL, "b")].map(|bits| (bits.block, bits.to_block()));
    expected.sort_unstable();
    assert_ne!(expected[0].0, expected[1].0, "the keys are in different blocks");
    assert_eq!((active.keys, active.bits), (2, 16));
    for _ in 0..2 {
        add(&store, &ids, &NewBits::added(vec![locate(&SMALL, "c")], Vec::new(), LONG)).await;
        let active = status(&store).await.active.unwrap();
        assert_eq!((active.keys, active.bits), (3, 24));
    }
}

/// Nothing is added for a caller that has not seen the current versions.
pub async fn addition_needs_the_current_versions<S: ExistsFilterStore>(store: S) {
    let first = build(&store, &SMALL, &[]).await;
    let second = begin(&store, &SMALL).await;
    let bits = NewBits::added(vec![locate(&SMALL, "a")], Vec::new(), LONG);
    assert_eq!(add(&store, &first, &bits).await, Added::Changed);
    assert_eq!(has(&store, first.active, &SMALL, "a").await, Some(false));
    assert!(end(&store, &second, true).await);
    for old in [first, second] {
        assert_eq!(add(&store, &old, &bits).await, Added::Changed);
    }
    let current = second.after_build(true);
    assert_eq!(add(&store, &current, &bits).await, Added::Done { active: true, building: false });
    assert_eq!(has(&store, current.active, &SMALL, "a").await, Some(true));
}

/// A replaced version is gone at once.
pub async fn replaced_version_is_gone<S: ExistsFilterStore>(store: S) {
    let first = build(&store, &SMALL, &["a"]).await;
    assert_eq!(has(&store, first.active, &SMALL, "a").await, Some(true));
    let second = build(&store, &SMALL, &["b"]).await;
    assert_eq!(has(&store, first.active, &SMALL, "a").await, None);
    assert_eq!(has(&store, second.active, &SMALL, "a").await, Some(false));
    assert_eq!(has(&store, second.active, &SMALL, "b").await, Some(true));
}

/// An abandoned version is gone, and the active one stays.
pub async fn abandoned_version_is_gone<S: ExistsFilterStore>(store: S) {
    let ids = begin(&store, &SMALL).await;
    assert!(end(&store, &ids, false).await);
    assert_eq!(status(&store).await, FilterStatus::default());
    let first = build(&store, &SMALL, &["a"]).await;
    let second = begin(&store, &SMALL).await;
    for _ in 0..2 {
        assert!(end(&store, &second, false).await, "the call may be repeated");
    }
    assert_eq!(block(&store, second.building, 0).await, None);
    assert_eq!(status(&store).await.ids, first);
    assert_eq!(has(&store, first.active, &SMALL, "a").await, Some(true));
}

/// A build that begins later replaces the one before.
pub async fn later_build_replaces_an_earlier_one<S: ExistsFilterStore>(store: S) {
    let first = begin(&store, &SMALL).await;
    let second = begin(&store, &SMALL).await;
    assert_eq!(block(&store, first.building, 0).await, None);
    assert_eq!(add(&store, &first, &NewBits::built(vec![locate(&SMALL, "a")], LONG)).await, Added::Changed);
    assert!(!end(&store, &first, true).await);
    assert!(!end(&store, &first, false).await);
    assert!(end(&store, &second, true).await);
    assert_eq!(status(&store).await.ids, second.after_build(true));
}

/// The beginning and the end of a build may be repeated.
pub async fn build_steps_can_be_repeated<S: ExistsFilterStore>(store: S) {
    let version = allocate(&store, &SMALL).await;
    let ids = VersionIds::new(None, Some(version));
    for _ in 0..2 {
        assert!(store.begin_build(&filter(), &VersionIds::default(), &version, LONG).await.unwrap());
    }
    add(&store, &ids, &NewBits::built(vec![locate(&SMALL, "a")], LONG)).await;
    for _ in 0..2 {
        assert!(end(&store, &ids, true).await);
    }
    assert_eq!(has(&store, Some(version), &SMALL, "a").await, Some(true));
}

/// A large version is allocated in several calls, without set bits.
pub async fn large_version_has_all_blocks<S: ExistsFilterStore>(store: S) {
    let layout = Layout::new(100_000, [1; 16]);
    let ids = build(&store, &layout, &["a"]).await;
    let bits = locate(&layout, "a");
    for number in [0, 1, 32_765, 32_766, 65_000, 99_999, bits.block] {
        let expected = if number == bits.block { bits.to_block() } else { [0; Layout::BLOCK_LEN] };
        assert_eq!(block(&store, ids.active, number).await, Some(expected), "block {number}");
    }
    assert_eq!(block(&store, ids.active, 100_000).await, None);
}

/// Several blocks are read at once. A part of them is not returned if others are missing.
pub async fn blocks_are_read_together<S: ExistsFilterStore>(store: S) {
    let layout = Layout::new(5_000, [2; 16]);
    let ids = build(&store, &layout, &["a", "b", "c"]).await;
    let version = ids.active.unwrap();
    let read = async |first, count| store.read_blocks(&filter(), &version, first, count).await.unwrap();
    let all = read(0, 5_000).await.unwrap();
    for key in ["a", "b", "c"] {
        let bits = locate(&layout, key);
        assert_eq!(all[bits.block as usize], bits.to_block(), "{key}");
        assert_eq!(read(bits.block, 1).await, Some(vec![bits.to_block()]), "{key}");
    }
    assert_eq!(all.iter().flatten().map(|byte| byte.count_ones()).sum::<u32>(), 24);
    assert_eq!(read(4_990, 10).await, Some(all[4_990..].to_vec()));
    assert_eq!(read(17, 0).await, Some(Vec::new()));
    for (first, count) in [(4_990, 11), (5_000, 1), (0, 5_001)] {
        assert_eq!(read(first, count).await, None, "{first} {count}");
    }
    let unknown = Token::random().unwrap();
    assert_eq!(store.read_blocks(&filter(), &unknown, 0, 1).await.unwrap(), None);
}

/// Without versions, an addition changes nothing, and its reply says for how long there have been none. A build may begin all the same.
pub async fn addition_finds_out_that_versions_are_missing<S: ExistsFilterStore>(store: S) {
    let unknown = VersionIds::new(Some(Token::random().unwrap()), None);
    let bits = NewBits::added(Vec::new(), Vec::new(), LONG);
    let missing = async |seen: &VersionIds| match add(&store, seen, &bits).await {
        Added::Missing { missing_for } => missing_for,
        added => panic!("{added:?}"),
    };
    missing(&unknown).await;
    sleep(SHORT).await;
    for seen in [VersionIds::default(), unknown] {
        // Not much less, since a server counts whole milliseconds.
        assert!(missing(&seen).await >= SHORT - Duration::from_millis(2));
        assert_eq!(status(&store).await, FilterStatus::default());
    }
    let ids = begin(&store, &SMALL).await;
    assert_eq!(add(&store, &VersionIds::default(), &bits).await, Added::Changed);
    assert!(end(&store, &ids, false).await);
    missing(&VersionIds::default()).await;
    let ids = build(&store, &SMALL, &["a"]).await;
    assert_eq!(add(&store, &unknown, &bits).await, Added::Changed);
    assert_eq!(add(&store, &ids, &bits).await, Added::Done { active: true, building: false });
}

/// Filters with other names have other keys.
pub async fn filters_are_separate<S: ExistsFilterStore>(store: S) {
    let ids = build(&store, &SMALL, &["a"]).await;
    for name in ["other", "", "contract}", "a:b"].map(Key::from) {
        assert_eq!(store.status(&name).await.unwrap(), FilterStatus::default());
        assert_eq!(store.read_block(&name, &ids.active.unwrap(), 0).await.unwrap(), None);
    }
}

/// A version expires after its time. An addition keeps it for its whole time again.
pub async fn version_expires<S: ExistsFilterStore>(store: S) {
    let ids = begin(&store, &SMALL).await;
    assert!(store.end_build(&filter(), &ids, true, SHORT).await.unwrap());
    let ids = ids.after_build(true);
    for _ in 0..3 {
        sleep(SHORT / 2).await;
        let bits = NewBits::added(vec![locate(&SMALL, "a")], Vec::new(), SHORT);
        assert_eq!(add(&store, &ids, &bits).await, Added::Done { active: true, building: false });
    }
    assert!(status(&store).await.active.unwrap().age >= SHORT);
    sleep(SHORT + SHORT / 2).await;
    assert_eq!(status(&store).await.active, None);
    assert_eq!(has(&store, ids.active, &SMALL, "a").await, None);
    // The next build does not need it.
    let next = build(&store, &SMALL, &[]).await;
    assert_eq!(status(&store).await.ids, next);
}
