//! Random calls of several fills, compared with a model, on memory and on Redis.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt::Debug;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tollgate::MemoryBackend;
use tollgate::cache::store::{CacheKey, CacheStore, Claim, Claimed, Content, EntryId, Mark, NewEntry, Token};

use crate::support::cluster::Cluster;
use crate::support::sentinel::SentinelDeployment;
use crate::support::server::RedisServer;
use crate::support::shared::patient;

/// Longer than a test.
const LONG: Duration = Duration::from_secs(600);
const KEYS: usize = 2;
const FILLS: usize = 4;

#[derive(Clone, Copy, Debug)]
enum Step {
    /// A fill looks and claims: a new one, or the same again.
    Claim {
        fill: usize,
        is_new: bool,
    },
    Put {
        fill: usize,
    },
    Release {
        fill: usize,
        mark: u8,
    },
    Renew {
        fill: usize,
    },
    Set,
    Invalidate,
    Expire,
    Evict,
}

fn steps() -> impl Strategy<Value = Vec<(usize, Step)>> {
    let fill = || 0..FILLS;
    let step = prop_oneof![
        6 => (fill(), any::<bool>()).prop_map(|(fill, is_new)| Step::Claim { fill, is_new }),
        6 => fill().prop_map(|fill| Step::Put { fill }),
        2 => (fill(), 0..3_u8).prop_map(|(fill, mark)| Step::Release { fill, mark }),
        1 => fill().prop_map(|fill| Step::Renew { fill }),
        1 => Just(Step::Set),
        3 => Just(Step::Invalidate),
        2 => Just(Step::Expire),
        1 => Just(Step::Evict),
    ];
    prop::collection::vec((0..KEYS, step), 1..40)
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Lease {
    #[default]
    Free,
    Held(Token),
    Failed,
    Uncached,
}

/// What a key should hold, and when it last changed.
#[derive(Debug, Default)]
struct Slot {
    entry: Option<(Token, bool)>,
    lease: Lease,
    /// The number of invalidations, and how many there were when a fill was granted.
    invalidations: u32,
    granted: HashMap<Token, u32>,
}

/// `evict` removes the lease of a key, as a server without memory may. `None` if the store cannot.
async fn run<S: CacheStore>(store: &S, steps: &[(usize, Step)], round: u64, evict: Option<&dyn Fn(&CacheKey)>) {
    let mut slots: [Slot; KEYS] = Default::default();
    let mut fills = [(); FILLS].map(|()| Token::random().unwrap());
    for (number, &(at, step)) in steps.iter().enumerate() {
        let (key, slot) = (CacheKey::new("model", format!("{round}:{at}")), &mut slots[at]);
        let entry = new_entry();
        match step {
            Step::Claim { fill, is_new } => {
                if is_new {
                    fills[fill] = Token::random().unwrap();
                }
                let token = fills[fill];
                let seen = slot.entry.map_or_else(EntryId::default, |(id, _)| EntryId::from(&id));
                let claimed = store.claim(&key, &seen, &Claim::new(token, LONG)).await.unwrap();
                let expected = match slot.lease {
                    Lease::Held(other) if other != token => matches!(claimed, Claimed::Busy { .. }),
                    Lease::Failed => matches!(claimed, Claimed::Marked(Mark::Failed { .. })),
                    Lease::Uncached => matches!(claimed, Claimed::Marked(Mark::Uncached { .. })),
                    Lease::Free | Lease::Held(_) => {
                        slot.granted.insert(token, slot.invalidations);
                        slot.lease = Lease::Held(token);
                        claimed == Claimed::Granted
                    }
                };
                assert!(expected, "step {number}: {claimed:?} with {slot:?}");
            }
            Step::Put { fill } => {
                let token = fills[fill];
                let is_stored = store.put(&key, &token, &entry).await.unwrap();
                let is_held = slot.lease == Lease::Held(token);
                let is_same = slot.entry.is_some_and(|(id, _)| id == token);
                assert_eq!(is_stored, is_held || is_same, "step {number}: {slot:?}");
                if is_held {
                    assert_eq!(slot.granted[&token], slot.invalidations, "a late fill was stored");
                    slot.entry = Some((token, true));
                    slot.lease = Lease::Free;
                }
            }
            Step::Release { fill, mark } => {
                let (mark, lease) = match mark {
                    0 => (None, Lease::Free),
                    1 => (Some(Mark::Failed { retry_after: LONG }), Lease::Failed),
                    _ => (Some(Mark::Uncached { remaining: LONG }), Lease::Uncached),
                };
                let is_held = slot.lease == Lease::Held(fills[fill]);
                assert_eq!(store.release(&key, &fills[fill], mark).await.unwrap(), is_held, "step {number}: {slot:?}");
                if is_held {
                    slot.lease = lease;
                    if lease == Lease::Uncached {
                        slot.entry = None;
                    }
                }
            }
            Step::Renew { fill } => {
                let is_held = slot.lease == Lease::Held(fills[fill]);
                let claim = Claim::new(fills[fill], LONG);
                assert_eq!(store.renew(&key, &claim).await.unwrap(), is_held, "step {number}: {slot:?}");
            }
            Step::Set => {
                let token = Token::random().unwrap();
                store.set(&key, &token, &entry).await.unwrap();
                slot.invalidations += 1;
                slot.entry = Some((token, true));
                slot.lease = Lease::Free;
            }
            Step::Invalidate => {
                store.invalidate(&key).await.unwrap();
                slot.invalidations += 1;
                slot.entry = None;
                slot.lease = Lease::Free;
            }
            Step::Expire => {
                store.expire(&key).await.unwrap();
                slot.invalidations += 1;
                slot.entry = slot.entry.map(|(id, _)| (id, false));
                slot.lease = Lease::Free;
            }
            Step::Evict => {
                if let Some(evict) = evict {
                    evict(&key);
                    slot.lease = Lease::Free;
                }
            }
        }
        let found = store.get(&key).await.unwrap();
        let expected = slot.entry.map(|(id, is_fresh)| (EntryId::from(&id), is_fresh));
        let found = found.map(|entry| {
            assert_eq!(entry.content, Content::Value("value".into()));
            (entry.id, !entry.fresh_for.is_zero())
        });
        assert_eq!(found, expected, "step {number}: {step:?}");
    }
}

fn new_entry() -> NewEntry {
    NewEntry::new(Some("value".into()), LONG, 2 * LONG, Duration::ZERO)
}

/// Runs traces until one fails. `PROPTEST_CASES` sets their number.
pub(crate) fn run_traces<T: Debug + Clone>(
    steps: impl Strategy<Value = Vec<T>>,
    cases: u32,
    mut check: impl FnMut(&[T], u64),
) {
    let config = Config {
        cases: std::env::var("PROPTEST_CASES").map_or(cases, |cases| cases.parse().unwrap()),
        ..Config::default()
    };
    let state = RefCell::new((0, &mut check));
    let result = TestRunner::new(config).run(&steps, |steps| {
        let (round, check) = &mut *state.borrow_mut();
        *round += 1;
        check(&steps, *round);
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn memory_agrees_with_the_model() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let backend = MemoryBackend::new();
    run_traces(steps(), 10_000, |steps, round| runtime.block_on(run(&backend, steps, round, None)));
}

#[test]
fn redis_agrees_with_the_model() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let server = RedisServer::start();
    let backend = runtime.block_on(patient(server.url()));
    let connection = RefCell::new(server.connection());
    let evict = |key: &CacheKey| {
        let lease = format!("tollgate:2:{{cache:{}:{}}}:lease", key.cache(), key.key());
        let _: u32 = redis::cmd("DEL").arg(lease).query(&mut *connection.borrow_mut()).unwrap();
    };
    run_traces(steps(), 1_000, |steps, round| runtime.block_on(run(&backend, steps, round, Some(&evict))));
}

/// The scripts are the same, but keys are on several nodes.
#[test]
fn cluster_and_sentinel_agree_with_the_model() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (cluster, deployment) = (Cluster::start(), SentinelDeployment::start());
    for url in [cluster.url(), deployment.url()] {
        let backend = runtime.block_on(patient(url));
        run_traces(steps(), 200, |steps, round| runtime.block_on(run(&backend, steps, round, None)));
    }
}
