use std::future::Future;
use std::time::Duration;

use tollgate::lock::RunError;
use tollgate::{AnyBackend, BoxError, LockError, Locks};

/// Runs `lead` while this process is the leader, until `lead` returns. A shutdown of the backend ends the wait for the lock.
async fn campaign<F>(backend: AnyBackend, process: &str, lead: impl Fn(u64) -> F + Sync) -> Result<(), BoxError>
where
    F: Future<Output = Result<(), BoxError>> + Send,
{
    let locks = Locks::new(backend, "scheduler").ttl(Duration::from_secs(15)).holder(process);
    loop {
        let term = locks.lock("leader").wait(Duration::from_secs(3_600)).run(async |lease| lead(lease.fence()).await);
        match term.await {
            Ok(ended) => return ended,
            Err(RunError::Lock(LockError::Busy(_))) => {} // an hour as a follower
            Err(RunError::Lock(LockError::Closed(_))) => return Ok(()), // the shutdown of the backend
            Err(error) => {
                eprintln!("not the leader: {error}");
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    }
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let backend = tollgate::connect("redis://127.0.0.1/").await?;
    campaign(backend, "pod-7", async |fence| {
        println!("leader under fence {fence}");
        Ok(tokio::signal::ctrl_c().await?) // the work of the leader; in a pod, until SIGTERM
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::time::Instant;

    use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
    use tokio::task::JoinHandle;
    use tokio::time::timeout;

    use super::super::{SOON, backend, backend_at};
    use super::*;
    use crate::support::proxy::{Door, Proxy, Traffic};
    use crate::support::server::RedisServer;

    #[tokio::test(flavor = "multi_thread")]
    async fn follower_leads_after_a_clean_release() {
        let redis = RedisServer::start();
        let (tell, mut events) = unbounded_channel();
        let first = Process::start("first", backend(&redis).await, &tell);
        let first_fence = started(&mut events, "first").await;
        let second = Process::start("second", backend(&redis).await, &tell);
        assert!(timeout(Duration::from_millis(500), events.recv()).await.is_err(), "there is one leader");

        let since = Instant::now();
        first.task.abort();
        assert_eq!(next(&mut events).await, Event::Ended("first"));
        let second_fence = started(&mut events, "second").await;
        assert!(second_fence > first_fence, "{second_fence} follows {first_fence}");
        // Far sooner than the lease of 15 s ends.
        assert!(since.elapsed() < Duration::from_secs(5), "{:?}", since.elapsed());
        drop(second);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn unreachable_leader_stops_before_the_next_one_starts() {
        let redis = RedisServer::start();
        let proxy = Proxy::start(redis.port());
        let (tell, mut events) = unbounded_channel();
        let _first = Process::start("first", backend_at(&proxy.url()).await, &tell);
        let first_fence = started(&mut events, "first").await;
        let _second = Process::start("second", backend(&redis).await, &tell);

        let since = Instant::now();
        proxy.to_server(Traffic::Swallow);
        // Not `Closed`: the Redis of another test could take the port.
        proxy.door(Door::Silent);
        // The work of the first is dropped before the second starts: the events arrive in this order.
        assert_eq!(next(&mut events).await, Event::Ended("first"));
        let second_fence = started(&mut events, "second").await;
        assert!(second_fence > first_fence, "{second_fence} follows {first_fence}");
        // Within the ttl, and the time that its notification takes.
        assert!(since.elapsed() < Duration::from_secs(18), "{:?}", since.elapsed());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn end_of_the_work_ends_the_campaign() {
        let redis = RedisServer::start();
        let backend = backend(&redis).await;
        campaign(backend.clone(), "only", async |_| Ok(())).await.unwrap();
        let failed = campaign(backend, "only", async |_| Err("the disk is full".into())).await;
        assert_eq!(failed.unwrap_err().to_string(), "the disk is full");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn shutdown_of_the_backend_ends_a_follower() {
        let redis = RedisServer::start();
        let (tell, mut events) = unbounded_channel();
        let _leader = Process::start("leader", backend(&redis).await, &tell);
        started(&mut events, "leader").await;
        let backend = backend(&redis).await;
        let mut follower = Process::start("follower", backend.clone(), &tell);
        assert!(timeout(Duration::from_millis(200), &mut follower.task).await.is_err(), "it follows");
        backend.shutdown(Duration::from_secs(5)).await;
        timeout(SOON, &mut follower.task).await.expect("the campaign ends").unwrap();
    }

    #[derive(Debug, PartialEq, Eq)]
    enum Event {
        Started(&'static str, u64),
        Ended(&'static str),
    }

    /// A process that campaigns, and reports when it starts and ends the work of the leader. It stops when it is dropped.
    struct Process {
        task: JoinHandle<()>,
    }

    impl Process {
        fn start(name: &'static str, backend: AnyBackend, tell: &UnboundedSender<Event>) -> Self {
            let tell = tell.clone();
            let task = tokio::spawn(async move {
                let lead = |fence| {
                    let tell = tell.clone();
                    async move {
                        let _ = tell.send(Event::Started(name, fence));
                        let _ended = Ended(name, tell);
                        pending().await
                    }
                };
                campaign(backend, name, lead).await.unwrap();
            });
            Self { task }
        }
    }

    impl Drop for Process {
        fn drop(&mut self) {
            self.task.abort();
        }
    }

    /// Reports the end of the work when it is dropped.
    struct Ended(&'static str, UnboundedSender<Event>);

    impl Drop for Ended {
        fn drop(&mut self) {
            let _ = self.1.send(Event::Ended(self.0));
        }
    }

    async fn next(events: &mut UnboundedReceiver<Event>) -> Event {
        timeout(SOON, events.recv()).await.expect("something happens").expect("a process runs")
    }

    /// The fence of the leader that starts next.
    async fn started(events: &mut UnboundedReceiver<Event>, expected: &str) -> u64 {
        match next(events).await {
            Event::Started(name, fence) if name == expected => fence,
            other => panic!("{expected} has to start, not {other:?}"),
        }
    }
}
