//! The contract tests of [`CacheStore`]: each function tests one requirement. [`cache_contract!`](crate::cache_contract) runs them on a
//! backend.
//!
//! A test gets a store that no other test uses, and panics if the store violates the requirement. The tests wait on tokio's clock. They
//! take no time if it is paused, and up to some seconds otherwise.
#![allow(clippy::unwrap_used, reason = "a failed requirement panics at its line")]

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::cache::store::{
    CacheKey, CacheStore, Claim, Claimed, Content, Entry, EntryId, Mark, NewEntry, TagGeneration, Token,
};
use crate::key::Key;

/// A time that does not end during a test, even on a slow machine.
const LONG: Duration = Duration::from_secs(60);
/// A time whose end a test can wait for, with tolerance for a slow machine.
const SHORT: Duration = Duration::from_millis(1_500);

fn key(key: &str) -> CacheKey {
    CacheKey::new("contract", key)
}

fn claim(lease: Duration) -> Claim {
    Claim { token: Token::random().unwrap(), lease }
}

fn entry(value: &[u8]) -> NewEntry {
    NewEntry::new(Some(value.to_vec().into()), LONG, 2 * LONG, Duration::from_millis(7))
}

fn value(value: &[u8]) -> Content {
    Content::Value(value.to_vec().into())
}

async fn get<S: CacheStore>(store: &S, key: &CacheKey) -> Entry {
    store.get(key).await.unwrap().unwrap_or_else(|| panic!("{key} should have an entry"))
}

async fn id<S: CacheStore>(store: &S, key: &CacheKey) -> EntryId {
    store.get(key).await.unwrap().map_or_else(EntryId::default, |entry| entry.id)
}

/// Claims a key, for a caller that has seen the current entry.
async fn claim_current<S: CacheStore>(store: &S, key: &CacheKey, claim: &Claim) -> Claimed {
    store.claim(key, &id(store, key).await, claim).await.unwrap()
}

/// Claims a free key.
async fn acquire<S: CacheStore>(store: &S, key: &CacheKey, lease: Duration) -> Claim {
    let claim = claim(lease);
    assert_eq!(claim_current(store, key, &claim).await, Claimed::Granted, "{key} should be free");
    claim
}

async fn put<S: CacheStore>(store: &S, key: &CacheKey, claim: &Claim, entry: &NewEntry) -> bool {
    store.put(key, &claim.token, entry).await.unwrap()
}

/// A filled entry is returned unchanged, with its id, its age and its times.
pub async fn filled_entry_is_returned<S: CacheStore>(store: S) {
    assert_eq!(store.get(&key("a")).await.unwrap(), None);
    let all_bytes: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    for bytes in [b"".as_slice(), b"\0\r\n{}", &all_bytes] {
        let claim = acquire(&store, &key("a"), LONG).await;
        assert!(put(&store, &key("a"), &claim, &entry(bytes)).await);
        let Entry { id, content, age, fresh_for, expires_in, load_time, .. } = get(&store, &key("a")).await;
        assert_eq!((id, content), (EntryId::from(&claim.token), value(bytes)));
        assert!(age < LONG / 2 && fresh_for <= LONG && fresh_for > LONG / 2, "{age:?} {fresh_for:?}");
        assert!(expires_in <= 2 * LONG && expires_in > LONG, "{expires_in:?}");
        assert_eq!(load_time, Duration::from_millis(7));
    }
}

/// The absence of a value is an entry too.
pub async fn absence_is_an_entry<S: CacheStore>(store: S) {
    let claim = acquire(&store, &key("a"), LONG).await;
    assert!(put(&store, &key("a"), &claim, &NewEntry { value: None, ..entry(b"") }).await);
    assert_eq!(get(&store, &key("a")).await.content, Content::Absent);
}

/// The same key in another cache is another entry, and so is another key.
pub async fn caches_and_keys_are_separate<S: CacheStore>(store: S) {
    let all = [("a", "b"), ("b", "a"), ("a:b", ""), ("", "a:b"), ("a", ":b")];
    for (number, (cache, name)) in all.into_iter().enumerate() {
        let key = CacheKey::new(cache, name);
        let claim = acquire(&store, &key, LONG).await;
        assert!(put(&store, &key, &claim, &entry(&[number as u8])).await);
    }
    for (number, (cache, name)) in all.into_iter().enumerate() {
        assert_eq!(get(&store, &CacheKey::new(cache, name)).await.content, value(&[number as u8]));
    }
}

/// An entry becomes stale, and is removed after its time.
pub async fn entry_becomes_stale_and_expires<S: CacheStore>(store: S) {
    let claim = acquire(&store, &key("a"), LONG).await;
    let short = NewEntry { fresh_for: SHORT, ttl: 2 * SHORT, ..entry(b"a") };
    assert!(put(&store, &key("a"), &claim, &short).await);
    assert!(!get(&store, &key("a")).await.fresh_for.is_zero());
    sleep(SHORT + SHORT / 2).await;
    let stale = get(&store, &key("a")).await;
    assert!(stale.fresh_for.is_zero() && stale.age >= SHORT, "{stale:?}");
    assert!(!stale.expires_in.is_zero() && stale.expires_in <= SHORT, "{stale:?}");
    sleep(SHORT).await;
    assert_eq!(store.get(&key("a")).await.unwrap(), None);
}

/// While one load holds the lease, others learn for how long at most.
pub async fn lease_is_granted_once<S: CacheStore>(store: S) {
    let claim = acquire(&store, &key("a"), LONG).await;
    for _ in 0..3 {
        match claim_current(&store, &key("a"), &self::claim(LONG)).await {
            Claimed::Busy { remaining } => assert!(remaining <= LONG && remaining > LONG / 2, "{remaining:?}"),
            claimed => panic!("{claimed:?}"),
        }
        assert_eq!(claim_current(&store, &key("a"), &claim).await, Claimed::Granted, "the call may be repeated");
    }
    acquire(&store, &key("b"), LONG).await;
}

/// Of many racing claims one is granted.
pub async fn one_of_many_racing_claims_is_granted<S: CacheStore + Send + Sync + 'static>(store: S) {
    let store = Arc::new(store);
    for round in 0..20 {
        let key = CacheKey::new("race", round);
        let mut claims = JoinSet::new();
        for _ in 0..10 {
            let store = Arc::clone(&store);
            claims.spawn(async move { store.claim(&key, &EntryId::default(), &claim(LONG)).await.unwrap() });
        }
        let granted = claims.join_all().await.into_iter().filter(|claimed| *claimed == Claimed::Granted).count();
        assert_eq!(granted, 1);
    }
}

/// A caller who has not seen the current entry claims nothing.
pub async fn claim_needs_the_current_entry<S: CacheStore>(store: S) {
    let first = acquire(&store, &key("a"), LONG).await;
    assert!(put(&store, &key("a"), &first, &entry(b"a")).await);
    let late = store.claim(&key("a"), &EntryId::default(), &claim(LONG)).await.unwrap();
    assert_eq!(late, Claimed::Changed);
    let second = acquire(&store, &key("a"), LONG).await;
    assert!(put(&store, &key("a"), &second, &entry(b"b")).await);
    let late = store.claim(&key("a"), &EntryId::from(&first.token), &claim(LONG)).await.unwrap();
    assert_eq!(late, Claimed::Changed);
    acquire(&store, &key("a"), LONG).await;
}

/// The lease of a load that ended without a word is free after its time. The late load stores nothing.
pub async fn ended_lease_is_granted_again<S: CacheStore>(store: S) {
    let first = acquire(&store, &key("a"), SHORT).await;
    sleep(SHORT + SHORT / 2).await;
    assert!(!store.renew(&key("a"), &first).await.unwrap(), "an ended lease does not come back");
    assert!(!put(&store, &key("a"), &first, &entry(b"first")).await);
    let second = acquire(&store, &key("a"), LONG).await;
    assert!(!put(&store, &key("a"), &first, &entry(b"first")).await);
    assert!(!store.release(&key("a"), &first.token, None).await.unwrap());
    assert!(put(&store, &key("a"), &second, &entry(b"second")).await);
    assert_eq!(get(&store, &key("a")).await.content, value(b"second"));
}

/// A renewed lease lasts for its whole time again.
pub async fn renewed_lease_lasts<S: CacheStore>(store: S) {
    let claim = acquire(&store, &key("a"), SHORT).await;
    for _ in 0..4 {
        sleep(SHORT / 2).await;
        assert!(store.renew(&key("a"), &claim).await.unwrap());
    }
    assert!(put(&store, &key("a"), &claim, &entry(b"a")).await);
    assert!(!store.renew(&key("a"), &claim).await.unwrap(), "the lease has ended with the put");
}

/// A put may be repeated while its entry is the current one.
pub async fn put_can_be_repeated<S: CacheStore>(store: S) {
    let claim = acquire(&store, &key("a"), LONG).await;
    for _ in 0..3 {
        assert!(put(&store, &key("a"), &claim, &entry(b"a")).await);
    }
    let next = acquire(&store, &key("a"), LONG).await;
    assert!(put(&store, &key("a"), &next, &entry(b"b")).await);
    assert!(!put(&store, &key("a"), &claim, &entry(b"a")).await);
    assert_eq!(get(&store, &key("a")).await.content, value(b"b"));
}

/// A released lease is free at once, or leaves its mark for a while.
pub async fn release_leaves_its_mark<S: CacheStore>(store: S) {
    let claim = acquire(&store, &key("a"), LONG).await;
    assert!(store.release(&key("a"), &claim.token, None).await.unwrap());
    let claim = acquire(&store, &key("a"), LONG).await;
    assert!(store.release(&key("a"), &claim.token, Some(Mark::Failed { retry_after: SHORT })).await.unwrap());
    match claim_current(&store, &key("a"), &self::claim(LONG)).await {
        Claimed::Marked(Mark::Failed { retry_after }) => assert!(retry_after <= SHORT, "{retry_after:?}"),
        claimed => panic!("{claimed:?}"),
    }
    sleep(SHORT + SHORT / 2).await;
    let claim = acquire(&store, &key("a"), LONG).await;
    assert!(store.release(&key("a"), &claim.token, Some(Mark::Uncached { remaining: LONG })).await.unwrap());
    let marked = claim_current(&store, &key("a"), &self::claim(LONG)).await;
    assert!(matches!(marked, Claimed::Marked(Mark::Uncached { remaining }) if remaining <= LONG), "{marked:?}");
}

/// A value that is not cached removes the entry before it.
pub async fn uncached_mark_removes_the_entry<S: CacheStore>(store: S) {
    let claim = acquire(&store, &key("a"), LONG).await;
    assert!(put(&store, &key("a"), &claim, &entry(b"a")).await);
    let claim = acquire(&store, &key("a"), LONG).await;
    assert!(store.release(&key("a"), &claim.token, Some(Mark::Uncached { remaining: LONG })).await.unwrap());
    assert_eq!(store.get(&key("a")).await.unwrap(), None);
}

/// A failed refresh leaves the stale entry.
pub async fn mark_leaves_the_entry<S: CacheStore>(store: S) {
    let claim = acquire(&store, &key("a"), LONG).await;
    assert!(put(&store, &key("a"), &claim, &entry(b"a")).await);
    let claim = acquire(&store, &key("a"), LONG).await;
    assert!(store.release(&key("a"), &claim.token, Some(Mark::Failed { retry_after: LONG })).await.unwrap());
    assert_eq!(get(&store, &key("a")).await.content, value(b"a"));
}

/// After an invalidation there is no entry, and a load that began before it stores nothing.
pub async fn invalidation_beats_a_running_fill<S: CacheStore>(store: S) {
    let first = acquire(&store, &key("a"), LONG).await;
    assert!(put(&store, &key("a"), &first, &entry(b"a")).await);
    let late = acquire(&store, &key("a"), LONG).await;
    store.invalidate(&key("a")).await.unwrap();
    assert_eq!(store.get(&key("a")).await.unwrap(), None);
    assert!(!put(&store, &key("a"), &late, &entry(b"late")).await);
    assert!(!store.renew(&key("a"), &late).await.unwrap());
    assert_eq!(store.get(&key("a")).await.unwrap(), None);
    let next = acquire(&store, &key("a"), LONG).await;
    assert!(!put(&store, &key("a"), &late, &entry(b"late")).await);
    assert!(put(&store, &key("a"), &next, &entry(b"next")).await);
    assert_eq!(get(&store, &key("a")).await.content, value(b"next"));
}

/// An expired entry is stale but still there, and a load that began before stores nothing.
pub async fn expired_entry_is_stale<S: CacheStore>(store: S) {
    store.expire(&key("a")).await.unwrap();
    assert_eq!(store.get(&key("a")).await.unwrap(), None);
    let first = acquire(&store, &key("a"), LONG).await;
    assert!(put(&store, &key("a"), &first, &entry(b"a")).await);
    let late = acquire(&store, &key("a"), LONG).await;
    store.expire(&key("a")).await.unwrap();
    let stale = get(&store, &key("a")).await;
    assert_eq!((stale.content, stale.fresh_for), (value(b"a"), Duration::ZERO));
    assert!(stale.expires_in > LONG, "it is kept until its original end");
    assert!(!put(&store, &key("a"), &late, &entry(b"late")).await);
    let next = acquire(&store, &key("a"), LONG).await;
    assert!(put(&store, &key("a"), &next, &entry(b"next")).await);
    assert!(!get(&store, &key("a")).await.fresh_for.is_zero());
}

/// A value that is set replaces the entry, the lease and the mark.
pub async fn set_beats_a_running_fill<S: CacheStore>(store: S) {
    let late = acquire(&store, &key("a"), LONG).await;
    let token = Token::random().unwrap();
    store.set(&key("a"), &token, &entry(b"set")).await.unwrap();
    assert!(!put(&store, &key("a"), &late, &entry(b"late")).await);
    let found = get(&store, &key("a")).await;
    assert_eq!((found.id, found.content), (EntryId::from(&token), value(b"set")));

    let claim = acquire(&store, &key("a"), LONG).await;
    assert!(store.release(&key("a"), &claim.token, Some(Mark::Failed { retry_after: LONG })).await.unwrap());
    store.set(&key("a"), &Token::random().unwrap(), &entry(b"again")).await.unwrap();
    acquire(&store, &key("a"), LONG).await;
}

/// The tags of an entry are returned unchanged.
pub async fn tags_are_returned<S: CacheStore>(store: S) {
    let long = "x".repeat(Key::MAX_LEN);
    let all: Vec<_> = (0..TagGeneration::MAX)
        .map(|number| {
            let tag =
                [Key::from(""), Key::from("a:b"), Key::from(long.as_str()), Key::from(number as u64)][number.min(3)];
            TagGeneration::new(tag, Token::random().unwrap())
        })
        .collect();
    for (number, tags) in [&all[..0], &all[..1], &all].into_iter().enumerate() {
        for new in [entry(&[7; 300]), NewEntry { value: None, ..entry(b"") }] {
            let claim = acquire(&store, &key("a"), LONG).await;
            assert!(put(&store, &key("a"), &claim, &new.clone().tags(tags.to_vec())).await);
            let found = get(&store, &key("a")).await;
            assert_eq!(found.content, new.value.map_or(Content::Absent, Content::Value));
            assert_eq!(found.tags, tags, "{number}");
        }
    }
    store.expire(&key("a")).await.unwrap();
    let expired = get(&store, &key("a")).await;
    assert_eq!((expired.tags, expired.fresh_for), (all, Duration::ZERO));
}

/// The generation of a tag stays the same until the tag is invalidated, or its time has passed.
pub async fn generation_lasts_until_the_tag_is_invalidated<S: CacheStore>(store: S) {
    let new = || Token::random().unwrap();
    let (tag, other) = (key("tag"), CacheKey::new("other", "tag"));
    assert_eq!(store.generation(&tag).await.unwrap(), None);
    let first = new();
    assert_eq!(store.ensure_generation(&tag, &first, SHORT).await.unwrap(), first);
    assert_eq!(store.ensure_generation(&tag, &new(), LONG).await.unwrap(), first);
    let others = store.ensure_generation(&other, &new(), SHORT).await.unwrap();
    assert_ne!(others, first);
    assert_eq!(store.ensure_generation(&other, &new(), SHORT / 3).await.unwrap(), others);
    sleep(SHORT / 2).await;
    assert_eq!(store.generation(&other).await.unwrap(), Some(others), "a shorter time changes nothing");
    sleep(SHORT).await;
    assert_eq!(store.generation(&other).await.unwrap(), None);
    assert_ne!(store.ensure_generation(&other, &new(), SHORT).await.unwrap(), others);
    assert_eq!(store.generation(&tag).await.unwrap(), Some(first), "a longer time lasts");
    store.invalidate_tag(&tag).await.unwrap();
    assert_eq!(store.generation(&tag).await.unwrap(), None);
    assert_ne!(store.ensure_generation(&tag, &new(), LONG).await.unwrap(), first);
}

/// A waiter is notified of every change.
pub async fn watcher_is_notified<S: CacheStore>(store: S) {
    let mut notifications = store.watch(&key("a")).await;
    // Waits for the next notification, which other stores send earlier than this or not at all.
    let token = Token::random().unwrap();
    for change in 0..5 {
        let claim = claim(LONG);
        if change < 2 {
            assert_eq!(claim_current(&store, &key("a"), &claim).await, Claimed::Granted);
        }
        match change {
            0 => assert!(put(&store, &key("a"), &claim, &entry(b"a")).await),
            1 => assert!(store.release(&key("a"), &claim.token, None).await.unwrap()),
            2 => store.set(&key("a"), &token, &entry(b"a")).await.unwrap(),
            3 => store.expire(&key("a")).await.unwrap(),
            _ => store.invalidate(&key("a")).await.unwrap(),
        }
        timeout(LONG, notifications.next()).await.unwrap_or_else(|_| panic!("no notification of change {change}"));
    }
}
