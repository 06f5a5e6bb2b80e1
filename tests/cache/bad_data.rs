//! Bad input: hostile names of keys and tags, extreme times, and data in Redis that another program has changed.

use std::time::Duration;

use futures_util::stream;
use proptest::prelude::*;
use redis::Commands;
use tokio::runtime::Runtime;
use tollgate::cache::{CacheError, Loaded};
use tollgate::{BoxError, Cache, ExistsFilter, Key, MemoryBackend, RedisBackend};

use crate::exists_filter_model::MISSED;
use crate::model::run_traces;
use crate::support::server::RedisServer;
use crate::support::shared::patient;

const MINUTE: Duration = Duration::from_secs(60);
const CENTURY: Duration = Duration::from_secs(100 * 365 * 86_400);

/// Names which would be taken for others without an escape, or which are too long for one.
fn hostile_names() -> Vec<Key> {
    let long = |end: &str| "x".repeat(1 << 20) + end;
    let plain =
        ["", " ", "a", "a:b", "{a}", "a}", "}:entry", "}:lease", "*", "?", "[a]", "%", "%7D", "\0", "\r\nGET b\r\n"];
    let other = ["\"\\", "ключ", "\u{202e}a", "\u{10ffff}", "a,b", "null", "0", "00", "-1", "🦀"];
    let names = plain.into_iter().chain(other).map(Key::from);
    names.chain([long(""), long("y")].map(Key::from)).chain([Key::from(("a", "b")), Key::from(("a,b", ""))]).collect()
}

async fn hostile_names_are_separate<S>(store: S)
where
    S: tollgate::cache::store::CacheStore + tollgate::cache::exists_filter::store::ExistsFilterStore + Clone,
    S: Send + Sync + 'static,
{
    let names = hostile_names();
    let filter = ExistsFilter::new(store.clone(), "hostile", 1_000).visible_within(Duration::ZERO);
    filter.rebuild(stream::iter(names.iter().copied().map(Ok::<_, BoxError>))).await.unwrap();
    for cache_name in ["a", "", "a:b", "a}", "}"] {
        let cache = Cache::<usize>::new(store.clone(), cache_name, MINUTE).exists_filter(&filter);
        for (number, name) in names.iter().enumerate() {
            let tagged = cache.tagged([*name]);
            let load = async move || Ok::<_, BoxError>(number);
            assert_eq!(tagged.get_or_fill(*name, load).await.unwrap().as_deref(), Some(&number), "{name:?}");
        }
        for (number, name) in names.iter().enumerate() {
            assert_eq!(cache.get(*name).await.unwrap().as_deref(), Some(&number), "{cache_name:?} {name:?}");
        }
        // The first half by their keys, and the others by their tags.
        for (number, name) in names.iter().enumerate() {
            if number < names.len() / 2 {
                cache.invalidate(*name).await.unwrap();
            } else {
                cache.invalidate_tag(*name).await.unwrap();
            }
            assert_eq!(cache.get(*name).await.unwrap(), None, "{name:?}");
            for (later, name) in names.iter().enumerate().skip(number + 1) {
                assert_eq!(cache.get(*name).await.unwrap().as_deref(), Some(&later), "{name:?}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn hostile_names_are_separate_in_memory() {
    hostile_names_are_separate(MemoryBackend::new()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_names_are_separate_on_redis() {
    let server = RedisServer::start();
    hostile_names_are_separate(patient(server.url()).await).await;
    server.every_key_expires();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn extreme_times_are_accepted_or_refused() {
    let server = RedisServer::start();
    let backend = patient(server.url()).await;
    let load = async || Ok::<_, BoxError>(1);
    let zero = Cache::<u32>::new(backend.clone(), "zero", Duration::ZERO);
    let error = zero.get_or_fill("a", load).await.unwrap_err();
    assert!(matches!(error, CacheError::Config(_)), "{error:?}");
    for (name, time) in [("century", CENTURY), ("forever", Duration::MAX)] {
        let cache = Cache::<u32>::new(backend.clone(), name, time).deadline(MINUTE);
        let cache = cache.stale_for(time).absent_for(time).error_for(time);
        let times = Loaded::value(2).fresh_for(time).stale_for(time);
        assert_eq!(cache.get_or_fill("a", load).await.unwrap().as_deref(), Some(&1));
        cache.set("a", times).await.unwrap();
        assert_eq!(cache.get("a").await.unwrap().as_deref(), Some(&2));
        cache.set("a", Loaded::absent()).await.unwrap();
        assert_eq!(cache.get("a").await.unwrap(), None);
        let failing = async || Err::<u32, _>(BoxError::from("no"));
        assert!(cache.get_or_fill("b", failing).await.is_err());
        let filter = ExistsFilter::new(backend.clone(), name, 10).deadline(MINUTE);
        let filter = filter.visible_within(Duration::ZERO).ttl(time);
        filter.rebuild(stream::iter([Ok::<_, BoxError>(1)])).await.unwrap();
        for filter in [filter.clone(), filter.clone().local_copy(time), filter.local_copy(Duration::ZERO)] {
            filter.add(2).await.unwrap();
            for _ in 0..20 {
                assert!(filter.might_contain(2).await.unwrap() && !filter.might_contain(3).await.unwrap());
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    }
    server.every_key_expires();
    // A value that is fresh for no time is for its callers.
    let cache = Cache::<u32>::new(backend, "moment", MINUTE).deadline(MINUTE);
    let moment = async || Ok::<_, BoxError>(Loaded::value(1).fresh_for(Duration::ZERO));
    assert_eq!(cache.get_or_fill("a", moment).await.unwrap().as_deref(), Some(&1));
    cache.set("a", Loaded::value(2).fresh_for(Duration::ZERO)).await.unwrap();
    tokio::time::sleep(Duration::from_millis(5)).await;
    assert_eq!(cache.get_or_fill("a", async || Ok::<_, BoxError>(3)).await.unwrap().as_deref(), Some(&3));
}

/// What another program does to the value of a key.
#[derive(Clone, Debug)]
enum Damage {
    Replace(Vec<u8>),
    Truncate(usize),
    Overwrite(usize, Vec<u8>),
    Append(Vec<u8>),
    List,
}

fn damage() -> impl Strategy<Value = Vec<Damage>> {
    let bytes = |most| prop::collection::vec(any::<u8>(), 1..most);
    let damage = prop_oneof![
        1 => bytes(200).prop_map(Damage::Replace),
        1 => (0..100_usize).prop_map(Damage::Truncate),
        5 => (0..100_usize, bytes(12)).prop_map(|(at, bytes)| Damage::Overwrite(at, bytes)),
        1 => bytes(50).prop_map(Damage::Append),
        1 => Just(Damage::List),
    ];
    prop::collection::vec(damage, 1..4)
}

impl Damage {
    fn apply(&self, connection: &mut redis::Connection, key: &str) {
        // Fails after a list, which no longer is a string.
        let mut value: Vec<u8> = connection.get(key).unwrap_or_default();
        match self {
            Self::Replace(bytes) => value.clone_from(bytes),
            Self::Truncate(len) => value.truncate(*len),
            Self::Overwrite(at, bytes) => {
                let at = (*at).min(value.len());
                value.splice(at..(at + bytes.len()).min(value.len()), bytes.iter().copied());
            }
            Self::Append(bytes) => value.extend(bytes),
            Self::List => {
                // In one step, since a load may store an entry in between.
                let mut list = redis::pipe();
                let () = list.atomic().del(key).rpush(key, 1).pexpire(key, 60_000).query(connection).unwrap();
                return;
            }
        }
        let () = connection.pset_ex(key, value, 60_000).unwrap();
    }
}

/// Runs `check` on a server with random damages.
fn with_damages(cases: u32, check: impl AsyncFn(&RedisBackend, &mut redis::Connection, &[Damage], u64)) {
    let runtime: Runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let server = RedisServer::start();
    let backend = runtime.block_on(patient(server.url()));
    let mut connection = server.connection();
    run_traces(damage(), cases, |damages, round| {
        runtime.block_on(check(&backend, &mut connection, damages, round));
    });
}

/// A damaged entry, or generation of its tag, is a miss, a typed error or, if only its body was replaced, another value. It can be replaced.
#[test]
fn damaged_entry_panics_nowhere() {
    with_damages(500, async |backend, connection, damages, round| {
        for part in [format!("{round}}}:entry"), format!("{round}}}:generation"), format!("{round}}}:lease")] {
            let cache =
                Cache::<u64>::new(backend.clone(), "damaged", MINUTE).stale_for(MINUTE).load_timeout(MINUTE / 200);
            #[cfg(feature = "local-cache")]
            let cache = cache.local_tier(10, MINUTE);
            let cache = cache.tagged([round]);
            let fill = async |value: u64| cache.get_or_fill(round, async move || Ok::<_, BoxError>(value)).await;
            cache.invalidate(round).await.unwrap();
            assert_eq!(fill(round).await.unwrap().as_deref(), Some(&round));
            let key = format!("tollgate:2:{{cache:damaged:{part}");
            for damage in damages {
                damage.apply(connection, &key);
                let other = Cache::<u64>::new(backend.clone(), "damaged", MINUTE).load_timeout(MINUTE / 200);
                // An entry of the wrong type is an error of the store.
                let _value_or_error = other.get(round).await;
                let filled = other.get_or_fill(round, async move || Ok::<_, BoxError>(round)).await;
                assert!(filled.is_ok() || part.ends_with("lease"), "{filled:?}");
                let _value_or_error = (fill(round).await, cache.expire(round).await);
            }
            let _: u32 = connection.del(&key).unwrap();
            cache.invalidate_tag(round).await.unwrap();
            cache.invalidate(round).await.unwrap();
            // A load that waited for a damaged lease may still run, with the older loader.
            let filled = fill(round + 1).await.unwrap().as_deref().copied();
            assert!(filled == Some(round) || filled == Some(round + 1), "{part}: {filled:?}");
            cache.invalidate(round).await.unwrap();
        }
    });
}

/// So is a damaged filter, which a rebuild replaces.
#[test]
fn damaged_filter_panics_nowhere() {
    with_damages(200, async |backend, connection, damages, round| {
        let new = || ExistsFilter::new(backend.clone(), round, 10).visible_within(Duration::ZERO);
        let versions = format!("tollgate:2:{{cache_filter:{round}}}:versions");
        let () = connection.set_ex(&versions, MISSED, 60).unwrap();
        for is_bits in [true, false] {
            let keys = || stream::iter((0..10_u64).map(Ok::<_, BoxError>));
            new().rebuild(keys()).await.unwrap();
            let all: Vec<String> =
                redis::cmd("KEYS").arg(format!("*cache_filter:{round}}}*")).query(connection).unwrap();
            let key = all.iter().find(|key| key.contains(":bits:") == is_bits).unwrap();
            for damage in damages {
                damage.apply(connection, key);
                let filters = [new(), new().local_copy(MINUTE)];
                for filter in filters {
                    for key in 0..3_u64 {
                        // Foreign data counts as no filter.
                        filter.might_contain(key).await.unwrap();
                    }
                    let _stats_or_error = filter.stats().await;
                    // An addition without ids waits, which would take long here.
                    if is_bits {
                        let _added_or_error = filter.add(1).await;
                    }
                    tokio::task::yield_now().await;
                }
            }
            for key in all {
                let _: u32 = connection.del(key).unwrap();
            }
            let () = connection.set_ex(&versions, MISSED, 60).unwrap();
            let repaired = new();
            repaired.rebuild(keys()).await.unwrap();
            assert!(repaired.might_contain(1_u64).await.unwrap());
        }
    });
}
