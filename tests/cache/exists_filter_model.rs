//! Random calls of two clients of a filter, on memory and on Redis, compared with the set of the keys that exist.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::time::Duration;

use futures_util::stream;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use redis::Commands;
use tokio::time::{Instant, sleep};
use tollgate::cache::exists_filter::store::ExistsFilterStore;
use tollgate::{BoxError, ExistsFilter, MemoryBackend};

use crate::model::run_traces as run_steps;
use crate::support::server::RedisServer;
use crate::support::shared::patient;

/// The value of the key with the ids as an addition without ids leaves it. The time is long ago, so that further ones do not wait.
pub(crate) const MISSED: &[u8] = &[1, 1, 0, 0, 0, 0, 0, 0];

const KEYS: u32 = 60;
const CLIENTS: usize = 2;

#[derive(Clone, Debug)]
enum Step {
    Add {
        client: usize,
        keys: Vec<u32>,
    },
    /// With these keys, besides those that exist and are kept.
    Rebuild {
        client: usize,
        keeps: bool,
        keys: Vec<u32>,
    },
    /// The stream of the rebuild fails.
    FailedRebuild {
        client: usize,
    },
    /// The server loses the version in use, or the ids of the versions.
    Evict {
        is_version: bool,
    },
    /// A client starts again, without its knowledge of the filter.
    Restart {
        client: usize,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let (client, keys) = (|| 0..CLIENTS, |most| prop::collection::vec(0..KEYS / 2, 0..most));
    let step = prop_oneof![
        8 => (client(), keys(4)).prop_map(|(client, keys)| Step::Add { client, keys }),
        3 => (client(), any::<bool>(), keys(10)).prop_map(|(client, keeps, keys)| Step::Rebuild { client, keeps, keys }),
        1 => client().prop_map(|client| Step::FailedRebuild { client }),
        1 => any::<bool>().prop_map(|is_version| Step::Evict { is_version }),
        1 => client().prop_map(|client| Step::Restart { client }),
    ];
    prop::collection::vec(step, 1..20)
}

/// The tests of keys that do not exist, and how many of these may exist.
#[derive(Default)]
struct FalsePositives {
    tests: u32,
    found: u32,
}

async fn run<S: ExistsFilterStore + Clone + Send + Sync + 'static>(
    store: &S,
    steps: &[Step],
    round: u64,
    evict: Option<&dyn Fn(u64, bool)>,
    counts: &mut FalsePositives,
) {
    let new = || {
        ExistsFilter::new(store.clone(), round, u64::from(KEYS))
            .visible_within(Duration::ZERO)
            .deadline(Duration::from_secs(60))
    };
    if let Some(evict) = evict {
        // Otherwise the first build waits.
        evict(round, false);
    }
    let mut clients = [(); CLIENTS].map(|()| new());
    // `None` without a filter.
    let mut exists: Option<HashSet<u32>> = None;
    for (number, step) in steps.iter().enumerate() {
        match step {
            Step::Add { client, keys } => {
                clients[*client].add_all(keys.iter().copied()).await.unwrap();
                exists.iter_mut().for_each(|exists| exists.extend(keys));
            }
            Step::Rebuild { client, keeps, keys } => {
                let mut all = exists.take().filter(|_| *keeps).unwrap_or_default();
                all.extend(keys);
                let keys = stream::iter(all.clone().into_iter().map(Ok::<_, BoxError>));
                assert_eq!(clients[*client].rebuild(keys).await.unwrap(), all.len() as u64);
                exists = Some(all);
            }
            Step::FailedRebuild { client } => {
                let keys = stream::iter([Ok(1), Err(BoxError::from("no"))]);
                clients[*client].rebuild(keys).await.unwrap_err();
            }
            Step::Evict { is_version } => {
                if let (Some(evict), Some(_)) = (evict, &exists) {
                    evict(round, *is_version);
                    exists = None;
                    if !is_version {
                        // For a second they still use the version.
                        clients = [(); CLIENTS].map(|()| new());
                    }
                }
            }
            Step::Restart { client } => clients[*client] = new(),
        }
        // The first knows the current version. Others may not know for a second that there is a filter.
        for (at, client) in [&new()].into_iter().chain(&clients).enumerate() {
            for key in 0..KEYS {
                let might_contain = client.might_contain(key).await.unwrap();
                match &exists {
                    Some(exists) if !exists.contains(&key) => {
                        counts.tests += u32::from(at == 0);
                        counts.found += u32::from(at == 0 && might_contain);
                    }
                    _ => assert!(might_contain, "step {number}: {key} may exist after {step:?}"),
                }
            }
        }
    }
}

/// Runs traces until one fails. `PROPTEST_CASES` sets their number.
fn run_traces(cases: u32, mut check: impl FnMut(&[Step], u64, &mut FalsePositives)) {
    let config = Config {
        cases: std::env::var("PROPTEST_CASES").map_or(cases, |cases| cases.parse().unwrap()),
        ..Config::default()
    };
    let state = RefCell::new((0, FalsePositives::default(), &mut check));
    let result = TestRunner::new(config).run(&steps(), |steps| {
        let (round, counts, check) = &mut *state.borrow_mut();
        *round += 1;
        check(&steps, *round, counts);
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
    let counts = &state.borrow().1;
    let rate = f64::from(counts.found) / f64::from(counts.tests);
    assert!(counts.tests > 10_000 && rate <= 0.015, "{rate} of {} absent keys", counts.tests);
}

#[test]
fn memory_agrees_with_the_set_of_keys() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let backend = MemoryBackend::new();
    run_traces(1_000, |steps, round, counts| runtime.block_on(run(&backend, steps, round, None, counts)));
}

#[test]
fn redis_agrees_with_the_set_of_keys() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let server = RedisServer::start();
    let backend = runtime.block_on(patient(server.url()));
    let evict = |round: u64, is_version: bool| {
        let name = format!("tollgate:2:{{cache_filter:{round}}}:");
        if is_version {
            for key in server.query::<Vec<String>>(&format!("KEYS {name}bits:*")) {
                server.query::<u32>(&format!("DEL {key}"));
            }
        } else {
            let () = server.connection().set_ex(name + "versions", MISSED, 60).unwrap();
        }
    };
    run_traces(60, |steps, round, counts| runtime.block_on(run(&backend, steps, round, Some(&evict), counts)));
    server.every_key_expires();
}

const MAX_AGE: Duration = Duration::from_secs(2);

/// A step of clients with local copies.
#[derive(Clone, Debug)]
enum CopyStep {
    Add { client: usize, key: u32 },
    Rebuild { client: usize, keys: Vec<u32> },
    Wait { ms: u64 },
}

fn copy_steps() -> impl Strategy<Value = Vec<CopyStep>> {
    let client = || 0..CLIENTS;
    let step = prop_oneof![
        4 => (client(), 0..KEYS / 2).prop_map(|(client, key)| CopyStep::Add { client, key }),
        1 => (client(), prop::collection::vec(0..KEYS / 2, 0..10))
            .prop_map(|(client, keys)| CopyStep::Rebuild { client, keys }),
        4 => (0..3_000_u64).prop_map(|ms| CopyStep::Wait { ms }),
    ];
    prop::collection::vec(step, 1..30)
}

/// A client may exclude a key only if it does not exist, or if the other client has added it less than the age of a copy ago.
async fn run_copies<S: ExistsFilterStore + Clone + Send + Sync + 'static>(store: &S, steps: &[CopyStep], round: u64) {
    let new = || {
        let filter = ExistsFilter::new(store.clone(), round, u64::from(KEYS));
        filter.visible_within(Duration::ZERO).deadline(Duration::from_secs(60)).local_copy(MAX_AGE)
    };
    let clients = [(); CLIENTS].map(|()| new());
    clients[0].rebuild(stream::iter([Ok::<_, BoxError>(0)])).await.unwrap();
    // When a key was added, and by which client.
    let mut exists = HashMap::from([(0, (Instant::now(), 0))]);
    for (number, step) in steps.iter().enumerate() {
        match step {
            CopyStep::Add { client, key } => {
                clients[*client].add(*key).await.unwrap();
                exists.entry(*key).or_insert((Instant::now(), *client));
                // It is in the copy of this client too.
                assert!(clients[*client].might_contain(*key).await.unwrap(), "step {number}: {step:?}");
            }
            CopyStep::Rebuild { client, keys } => {
                let all = keys.clone().into_iter().map(Ok::<_, BoxError>);
                clients[*client].rebuild(stream::iter(all)).await.unwrap();
                let added = |key: &u32| *exists.get(key).unwrap_or(&(Instant::now(), *client));
                exists = keys.iter().map(|key| (*key, added(key))).collect();
            }
            CopyStep::Wait { ms } => sleep(Duration::from_millis(*ms)).await,
        }
        for (client, filter) in clients.iter().enumerate() {
            for (key, (added, by)) in &exists {
                let begun = Instant::now();
                let is_known = *by == client || begun.duration_since(*added) >= MAX_AGE;
                let might_contain = filter.might_contain(*key).await.unwrap();
                assert!(might_contain || !is_known, "step {number}: client {client} excludes {key} after {step:?}");
            }
        }
    }
}

#[test]
fn local_copies_in_memory_agree_with_the_set_of_keys() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let backend = MemoryBackend::new();
    run_steps(copy_steps(), 500, |steps, round| runtime.block_on(run_copies(&backend, steps, round)));
}

/// In real time, so with few traces.
#[test]
fn local_copies_on_redis_agree_with_the_set_of_keys() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let server = RedisServer::start();
    let backend = runtime.block_on(patient(server.url()));
    run_steps(copy_steps(), 2, |steps, round| runtime.block_on(run_copies(&backend, steps, round)));
    server.every_key_expires();
}
