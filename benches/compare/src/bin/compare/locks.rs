//! Locks on one Redis: one lock per task, with a client of several worker threads and of one, and one lock for all tasks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rslock::{LockGuard, LockManager};
use serde_json::json;
use tokio::runtime::{Builder, Handle};
use tollgate::lock::Lease;
use tollgate::{Locks, RedisBackend};

use crate::Run;
use crate::bench::{Contender, Figures, load, take_turns};
use crate::ceiling::Cycle;
use crate::node::Node;
use crate::report::{Rank, Table};
use crate::server::RedisServer;

const TTL: Duration = Duration::from_secs(30);

#[derive(Clone)]
pub enum Locker {
    Tollgate(Locks),
    Rslock(LockManager),
}

impl Locker {
    pub async fn both(url: &str) -> [(&'static str, Self); 2] {
        let backend = RedisBackend::connect(url).await.expect("Redis accepts the connection");
        let locks =
            Locks::new(backend, "default").ttl(TTL).deadline(Duration::from_secs(10)).wait(Duration::from_secs(60));
        [("tollgate", Self::Tollgate(locks)), ("rslock", Self::Rslock(LockManager::new(vec![url.to_owned()])))]
    }

    /// Acquires the lock, and holds it.
    pub async fn hold(&self, key: &str) -> Held {
        match self {
            Self::Tollgate(locks) => Held::Tollgate(locks.lock(key).await.expect("the lock is granted")),
            Self::Rslock(manager) => Held::Rslock(manager.acquire(key, TTL).await.expect("the lock is granted")),
        }
    }

    /// Acquires the lock, checks that no other task holds it, and releases it.
    pub async fn cycle(&self, key: &str, inside: &AtomicU32) {
        let held = self.hold(key).await;
        let before = inside.fetch_add(1, Ordering::SeqCst);
        // Lets another holder run, if there is one.
        tokio::task::yield_now().await;
        let after = inside.fetch_sub(1, Ordering::SeqCst);
        held.give_back().await;
        assert!(before == 0 && after == 1, "two tasks hold the lock");
    }
}

/// A lock that is held.
pub enum Held {
    Tollgate(Lease),
    Rslock(LockGuard),
}

impl Held {
    pub async fn give_back(self) {
        match self {
            Self::Tollgate(lease) => drop(lease.release().await.expect("the lock is released")),
            Self::Rslock(guard) => guard.release().await,
        }
    }
}

/// Runs cycles of `tasks` tasks for `time`, with one lock per task or one for all.
pub async fn cycles(who: &'static str, locker: Locker, is_own: bool, tasks: u32, time: Duration) -> Figures {
    let one = Arc::new(AtomicU32::new(0));
    load(tasks, time, move |task, _| {
        let (locker, inside) = (locker.clone(), if is_own { Arc::default() } else { Arc::clone(&one) });
        let key = if is_own { format!("{who}-{task}") } else { who.to_owned() };
        async move { locker.cycle(&key, &inside).await }
    })
    .await
}

pub async fn tables(run: &mut Run) {
    let server = RedisServer::start();
    let node = Node::start(&server);
    let lockers = Locker::both(&server.url()).await;
    // Leaves the other core to the server.
    let one_thread = Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime starts");
    let url = server.url();
    let there = one_thread.spawn(async move { Locker::both(&url).await }).await.expect("Redis accepts the connection");
    let Locker::Tollgate(locks) = &lockers[0].1 else { unreachable!("Tollgate is the first") };
    let cycle = async |locks: &Locks| {
        let lease = locks.lock("7777777").await.expect("the lock is granted");
        lease.release().await.expect("the lock is released");
    };
    cycle(locks).await;
    let scripts = ["lock_acquire.lua", "lock_release.lua"];
    let ceiling = Cycle::record(&server, &scripts, "7777777", cycle(locks)).await;

    let by_tasks = &[1, 16, 64, 256][..];
    let here = Handle::current();
    let loads = [
        (true, &lockers, &here, by_tasks),
        (true, &there, one_thread.handle(), by_tasks),
        (false, &lockers, &here, &[64]),
    ];
    for (is_own, lockers, runtime, points) in loads {
        let time = run.time;
        let is_one_thread = runtime.id() != here.id();
        let mut contenders: Vec<_> = lockers
            .iter()
            .map(|(who, locker)| {
                let (who, locker, runtime) = (*who, locker.clone(), runtime.clone());
                Contender::new(who, move |tasks| {
                    let load = runtime.spawn(cycles(who, locker.clone(), is_own, tasks, time));
                    Box::pin(async move { load.await.expect("no task fails") })
                })
            })
            .collect();
        if let Some(node) = &node {
            contenders.push(Contender::new("redlock-node", move |tasks| {
                Box::pin(node.load("lock", tasks, time, json!({"own": is_own})))
            }));
        }
        let medians = take_turns(&mut contenders, points, run.rounds, |_| Some(ceiling.per_s())).await;
        let (name, title, text) = if is_one_thread {
            (
                "locks-one-thread",
                "Locks, uncontended, with one worker thread",
                "The same with a client runtime of one worker thread, so that each of two cores has one busy thread. \
                 With 16 tasks or more, two worker threads wake each other for a few tasks at a time, which costs \
                 `tollgate` and `rslock` more than it gains.",
            )
        } else if is_own {
            (
                "locks",
                "Locks, uncontended",
                "Lock and release cycles, one key for each task, with leases of 30 s. The ceiling is the rate of a minimal client. \
                 It sends the two calls of a single cycle, which acquire a free lock and release it, over 16 connections with 64 calls in a \
                 pipeline. Tollgate's concurrent cycles share calls, so they can exceed the ceiling.",
            )
        } else {
            (
                "locks-one",
                "One lock for 64 tasks",
                "All tasks want the same key repeatedly, and hold it only to check that no other task holds it. Tollgate hands the lock \
                 over to waiters inside the process, and asks Redis only now and then. The peers ask Redis for each grant, and retry \
                 after a pause, so they do different work. This table is about one process, and says nothing about locks that several \
                 processes want. The ceiling is that of the cycles above. The second table has the fewest and the most grants of a task \
                 in a round, and the longest cycle of all rounds, waiting included.",
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
            tells_shares: !is_own,
            ..Table::default()
        });
    }
    // Dropping a runtime may block, which async code must not do.
    one_thread.shutdown_background();
}
