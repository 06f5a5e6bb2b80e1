//! Locks on one Redis: one for each task, and one that all of them want.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rslock::LockManager;
use serde_json::json;
use tollgate::{Locks, RedisBackend};

use crate::Run;
use crate::bench::{Contender, load, take_turns};
use crate::ceiling::Ceiling;
use crate::node::Node;
use crate::report::{Rank, Table};
use crate::server::RedisServer;

const TTL: Duration = Duration::from_secs(30);

#[derive(Clone)]
enum Locker {
    Tollgate(Locks),
    Rslock(LockManager),
}

impl Locker {
    /// Takes the lock, is alone with it, and gives it back.
    async fn cycle(&self, key: &str, inside: &AtomicU32) {
        let is_alone = || inside.fetch_add(1, Ordering::SeqCst) == 0 && inside.fetch_sub(1, Ordering::SeqCst) == 1;
        match self {
            Self::Tollgate(locks) => {
                let lease = locks.lock(key).await.expect("the lock is granted");
                assert!(is_alone(), "two hold the lock");
                lease.release().await.expect("the lock is given back");
            }
            Self::Rslock(manager) => {
                let guard = manager.acquire(key, TTL).await.expect("the lock is granted");
                assert!(is_alone(), "two hold the lock");
                guard.release().await;
            }
        }
    }
}

pub async fn tables(run: &mut Run) {
    let server = RedisServer::start();
    let node = Node::start(&server);
    let backend = RedisBackend::connect(server.url()).await.expect("Redis lets us in");
    let locks = Locks::new(backend).ttl(TTL).deadline(Duration::from_secs(10)).wait(Duration::from_secs(60));
    let cycle = async |locks: &Locks| {
        let lease = locks.lock("7777777").await.expect("the lock is granted");
        lease.release().await.expect("the lock is given back");
    };
    cycle(&locks).await;
    let ceiling = Ceiling::record(&server, "lock_acquire.lua", "7777777", cycle(&locks)).await.calls(2);
    let lockers =
        [("tollgate", Locker::Tollgate(locks)), ("rslock", Locker::Rslock(LockManager::new(vec![server.url()])))];

    for (is_own, points) in [(true, &[1, 16, 64, 256][..]), (false, &[64])] {
        let time = run.time;
        let mut contenders: Vec<_> = lockers
            .iter()
            .map(|(who, locker)| {
                let (who, locker) = (*who, locker.clone());
                Contender::new(who, move |tasks| {
                    let locker = locker.clone();
                    let one = Arc::new(AtomicU32::new(0));
                    Box::pin(load(tasks, time, move |task, _| {
                        let (locker, inside) = (locker.clone(), if is_own { Arc::default() } else { Arc::clone(&one) });
                        let key = if is_own { format!("{who}-{task}") } else { who.to_owned() };
                        async move { locker.cycle(&key, &inside).await }
                    }))
                })
            })
            .collect();
        if let Some(node) = &node {
            contenders.push(Contender::new("redlock (Node)", move |tasks| {
                Box::pin(node.load("lock", tasks, time, json!({"own": is_own})))
            }));
        }
        let medians = take_turns(&mut contenders, points, run.rounds, || is_own.then(|| ceiling.per_s())).await;
        let (name, title, text) = if is_own {
            (
                "locks",
                "Locks, uncontended",
                "Taken and given back, one key for each task, a lease of 30 s. The ceiling is half of what `redis-benchmark -P 64 -c 50` gets out of the \
                 script that takes a lock: a lone cycle calls one to take and one to give back, and those at the same time share calls.",
            )
        } else {
            (
                "locks-one",
                "One lock for 64 tasks",
                "All tasks want the same key, again and again, and nobody holds it longer than it takes to see that he is alone.",
            )
        };
        run.report.add(Table {
            name,
            title,
            text,
            unit: "tasks",
            points: points.to_vec(),
            headline: 64,
            rank: Rank::Rate,
            lines: contenders.into_iter().map(|contender| (contender.who, contender.apart)).collect(),
            medians,
        });
    }
}
