//! The contract tests of [`LockRegistry`]: each function tests one requirement. [`lock_registry_contract!`](crate::lock_registry_contract)
//! runs them on a backend.
//!
//! A test gets a store that no other test uses, and panics if the store violates the requirement. The tests wait on tokio's clock. They
//! take no time if it is paused, and up to some seconds otherwise.
#![allow(clippy::unwrap_used, reason = "a failed requirement panics at its line")]

use std::collections::HashMap;
use std::future::{Future, IntoFuture};
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use crate::lock::store::{LockRegistry, LockStore};
use crate::lock::{Cursor, LockAdmin, LockError, LockStatus, Locks, LossReason, Semaphore};
use crate::testing::observed::Observed;

/// The longest duration of a wait that must end.
const LONG: Duration = Duration::from_secs(20);

fn locks<S: LockStore + Clone + Send + Sync + 'static>(store: &S) -> Locks {
    Locks::new(store.clone(), "orders").deadline(Duration::from_secs(10))
}

fn admin<S: LockRegistry + Clone + Sync>(store: &S) -> LockAdmin<S> {
    LockAdmin::new(store.clone(), "orders").deadline(LONG)
}

/// Waits for background work.
async fn until<F: Future<Output = bool>>(what: &str, mut is_so: impl FnMut() -> F) {
    let so = async {
        while !is_so().await {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LONG, so).await.unwrap_or_else(|_| panic!("not {what} within {LONG:?}"));
}

/// An operator can see the holder of a lock, with its name if it has one, until the holder releases the lock.
pub async fn holder_can_be_inspected<S: LockRegistry + Clone + Send + Sync + 'static>(store: S) {
    let admin = &admin(&store);
    let status = admin.inspect("a").await.unwrap();
    assert!(!status.is_held() && status.holders.is_empty() && status.last_fence == 0, "{status:?}");

    let long = "ä".repeat(100);
    let locks = locks(&store).ttl(Duration::from_secs(20));
    let (nameless, named, longer) =
        (locks, self::locks(&store).holder("billing {7f9c}\n"), self::locks(&store).holder(&long));
    let mut last = 0;
    for (locks, name) in [(&nameless, None), (&named, Some("billing {7f9c}\n")), (&longer, Some(&long[..128]))] {
        let lease = locks.lock("a").await.unwrap();
        until("named", || async {
            let status = admin.inspect("a").await.unwrap();
            status.is_held() && status.holders[0].name.as_deref() == name
        })
        .await;
        let status = admin.inspect("a").await.unwrap();
        assert_eq!((status.holder_count, status.holders.len()), (1, 1));
        let holder = &status.holders[0];
        assert_eq!(holder.fence, lease.fence());
        assert!(holder.fence > last && status.last_fence >= holder.fence, "{status:?}");
        assert!(holder.remaining > Duration::from_secs(10) && holder.remaining <= Duration::from_secs(30));
        assert!(holder.held_for < LONG, "{holder:?}");
        last = status.last_fence;
        lease.release().await.unwrap();
        assert!(!admin.inspect("a").await.unwrap().is_held());
    }
    // The same key in another namespace is another lock.
    let _lease = named.lock("a").await.unwrap();
    let other = LockAdmin::new(store.clone(), "others");
    assert!(!other.inspect("a").await.unwrap().is_held());
}

/// An operator can see all holders of a semaphore, up to a maximum number, each with its own name.
pub async fn permit_holders_are_listed_separately<S: LockRegistry + Clone + Send + Sync + 'static>(store: S) {
    let names = ["north", "east", "south"];
    let client = |name| {
        Semaphore::new(store.clone(), "semaphores", 200).deadline(LONG).ttl(Duration::from_secs(20)).holder(name)
    };
    let clients = names.map(client);
    let admin = LockAdmin::new(store.clone(), "semaphores").deadline(LONG);
    let mut permits = Vec::new();
    let mut named = HashMap::new();
    for round in 0..150 {
        let permit = clients[round % 3].acquire("a").await.unwrap();
        named.insert(permit.fence(), names[round % 3]);
        permits.push(permit);
    }
    assert_eq!(named.len(), 150, "each has its own fence");
    until("named", || async { admin.inspect("a").await.unwrap().holders.iter().all(|holder| holder.name.is_some()) })
        .await;
    let status = admin.inspect("a").await.unwrap();
    assert_eq!((status.holder_count, status.holders.len()), (150, LockStatus::MAX_HOLDERS));
    let mut fences: Vec<u64> = status.holders.iter().map(|holder| holder.fence).collect();
    fences.sort_unstable();
    fences.dedup();
    assert_eq!(fences.len(), LockStatus::MAX_HOLDERS, "a holder is listed twice");
    for holder in &status.holders {
        assert_eq!(holder.name.as_deref(), named.get(&holder.fence).copied(), "{holder:?}");
    }
    drop(permits);
    until("released", || async { !admin.inspect("a").await.unwrap().is_held() }).await;
}

/// After a forced release, waiters can acquire the lock at once, with a larger fence. The previous holder notices the loss at its next
/// renewal.
pub async fn lock_can_be_force_released<S: LockRegistry + Clone + Send + Sync + 'static>(store: S) {
    let (here, there) = (locks(&store).ttl(Duration::from_secs(3)), locks(&store).wait(LONG));
    let admin = admin(&store);
    let unheld = admin.force_release("a").await.unwrap();
    assert_eq!(unheld.holders, 0);
    let lease = here.lock("a").await.unwrap();
    assert!(lease.fence() > unheld.fence);
    let waiter = tokio::spawn(there.lock("a").into_future());
    sleep(Duration::from_millis(300)).await;
    let released = admin.force_release("a").await.unwrap();
    assert!(released.holders == 1 && released.fence >= lease.fence(), "{released:?}");
    let next = timeout(Duration::from_secs(2), waiter).await.expect("the waiter gets a notification").unwrap().unwrap();
    assert!(next.fence() > released.fence);
    let lost = timeout(Duration::from_secs(3), lease.lost()).await.expect("the holder renews its lease");
    assert_eq!(lost.reason(), LossReason::Taken);
    // The late release of the previous holder does not affect the new one.
    drop(lease);
    sleep(Duration::from_millis(100)).await;
    assert!(next.check().is_ok());
    assert!(matches!(here.try_lock("a").await, Err(LockError::Busy(_))));
    next.release().await.unwrap();
}

/// After a forced release, the first queued waiter gets the lock at once. The release notifies all waiters, since it does not single out
/// one.
pub async fn first_waiter_gets_a_force_released_lock<S: LockRegistry + Clone + Send + Sync + 'static>(store: S) {
    let admin = admin(&store);
    let store = Observed::new(store);
    let (here, there) = (locks(&store).fair().wait(LONG), locks(&store).fair().wait(LONG));
    let mut took = Vec::new();
    // On a busy machine, notified waiters are in time in at least one of a few tries. Waiters that only poll are late in all of them.
    while took.last().is_none_or(|took| *took >= Duration::from_millis(500)) {
        assert!(took.len() < 5, "the notifications took {took:?}");
        let lease = here.lock("a").await.unwrap();
        let mut waiters = Vec::new();
        let start = Instant::now();
        for count in 1..=2 {
            waiters.push(tokio::spawn(there.lock("a").into_future()));
            store.has_line_of(count).await;
        }
        let second = waiters.pop().unwrap();
        admin.force_release("a").await.unwrap();
        let next = timeout(LONG, waiters.pop().unwrap()).await.unwrap().unwrap().unwrap();
        // A waiter without a notification polls half a second after its last poll, which was not before `start`.
        took.push(start.elapsed());
        assert!(next.fence() > lease.fence());
        assert!(!second.is_finished(), "the second waiter comes after the first");
        next.release().await.unwrap();
        timeout(LONG, second).await.unwrap().unwrap().unwrap().release().await.unwrap();
    }
}

/// A list contains every held lock, page by page, and no other.
pub async fn held_locks_are_listed<S: LockRegistry + Clone + Send + Sync + 'static>(store: S) {
    let (locks, admin) = (locks(&store), admin(&store));
    let odd = ["", "a b", "x:y", "*", "[a]", "}{", "\\", "ä", &"long".repeat(100)];
    let mut leases = Vec::new();
    for key in odd {
        leases.push(locks.lock(key).await.unwrap());
    }
    for i in 0..300_u32 {
        leases.push(locks.lock(i).await.unwrap());
    }
    for key in ["free", "also free"] {
        locks.lock(key).await.unwrap().release().await.unwrap();
    }
    let mut others = Vec::new();
    for name in ["order", "orders:x", "orders*", "o?ders"] {
        others.push(Locks::new(store.clone(), name).deadline(Duration::from_secs(10)).lock("a").await.unwrap());
    }
    for max in [1, 7, 1_000] {
        let mut found = HashMap::new();
        let (mut next, mut pages) = (Some(Cursor::default()), 0);
        while let Some(from) = next {
            let page = admin.list(from, max).await.unwrap();
            for status in page.locks {
                found.insert(status.lock, status.holders[0].fence);
            }
            next = page.next;
            pages += 1;
            assert!(pages < 3_000, "the list does not end");
        }
        let expected: HashMap<_, _> = leases.iter().map(|lease| (*lease.lock(), lease.fence())).collect();
        assert_eq!(found, expected, "{max} at a time");
    }
    let past = Cursor { part: u32::MAX, position: 0 };
    assert_eq!(admin.list(past, 10).await.unwrap().next, None);
    // A namespace that looks like a pattern matches only itself.
    let admin = LockAdmin::new(store, "o?ders");
    let mut found = 0;
    let mut next = Some(Cursor::default());
    while let Some(from) = next {
        let page = admin.list(from, 100).await.unwrap();
        found += page.locks.len();
        next = page.next;
    }
    assert_eq!(found, 1);
}
