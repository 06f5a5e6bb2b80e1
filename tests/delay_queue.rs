//! The contract of delay queues on the memory backend, on a paused clock, and on real Redis servers.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod support;

mod memory {
    tollgate::delay_queue_contract!(
        #[tokio::test(start_paused = true)]
        |claim| {
            let backend = tollgate::MemoryBackend::new();
            claim(backend.clone()).await;
        }
    );
}

mod redis_server {
    use crate::support::server::RedisServer;
    use tollgate::RedisBackend;

    tollgate::delay_queue_contract!(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        |claim| {
            let server = RedisServer::start();
            claim(RedisBackend::connect(server.url()).await.unwrap()).await;
            let mut connection = server.connection();
            let keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut connection).unwrap();
            for key in keys {
                let ttl: i64 = redis::cmd("PTTL").arg(&key).query(&mut connection).unwrap();
                // -2 is a key that has expired since it was listed.
                assert!(ttl >= 0 || ttl == -2, "{key} has no expiry: {ttl}");
            }
        }
    );
}

/// What the queue itself sees to, whatever keeps the jobs.
mod queue {
    use std::error::Error;
    use std::time::{Duration, SystemTime};

    use tollgate::delay_queue::{
        Cancelled, Changed, Claim, Codec, DeadLimits, DelayQueueStore, Due, Ending, Finish, QueueError, QueueKey,
        Reason, State, WorkerId,
    };
    use tollgate::{BoxError, ConfigError, DelayQueue, JobId, MemoryBackend};

    fn queue() -> DelayQueue<String> {
        DelayQueue::new(MemoryBackend::new(), "test")
    }

    #[tokio::test(start_paused = true)]
    async fn bad_input_is_refused_by_name() {
        let queue = queue().max_size(20).max_jobs(2);
        let push = || queue.push("x".to_owned());
        let century = Duration::from_secs(100 * 365 * 86_400);
        let error = push().delay(century).await.unwrap_err();
        assert!(matches!(error, QueueError::Config(ConfigError::DelayOutOfRange { .. })), "{error:?}");
        let error = push().id("").await.unwrap_err();
        assert!(matches!(error, QueueError::Config(ConfigError::EmptyJobId)), "{error:?}");
        let error = queue.push("x".repeat(19)).await.unwrap_err();
        assert!(matches!(error, QueueError::TooLarge { bytes: 21, max: 20 }), "{error:?}");
        assert!(push().header("name", "x".repeat(20)).await.unwrap_err().is_too_large());
        assert!(queue.replace("a", "x".repeat(19)).await.unwrap_err().is_too_large());
        let error = queue.reschedule("a", century).await.unwrap_err();
        assert!(matches!(error, QueueError::Config(ConfigError::DelayOutOfRange { .. })), "{error:?}");
        // None of it came as far as the store.
        assert_eq!(queue.counts().await.unwrap().waiting, 0);
        push().delay(Due::MAX_DELAY).await.unwrap();
        push().at(SystemTime::UNIX_EPOCH).max_attempts(0).await.unwrap();
        let error = push().await.unwrap_err();
        assert!(error.is_full() && error.source().is_none(), "{error}");
        let jobs = queue.list(State::Waiting, 0, 10).await.unwrap();
        assert!(jobs.iter().any(|job| job.max_attempts == 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_payload_that_cannot_be_encoded_is_not_pushed() {
        struct Never;
        impl Codec<u8> for Never {
            fn encode(&self, _: &u8) -> Result<Vec<u8>, BoxError> {
                Err("not today".into())
            }
            fn decode(&self, _: &[u8]) -> Result<u8, BoxError> {
                Err("never".into())
            }
        }
        let queue = DelayQueue::with_codec(MemoryBackend::new(), "test", Never);
        let error = queue.push(7).await.unwrap_err();
        assert_eq!(
            (error.to_string(), error.source().unwrap().to_string()),
            ("the payload cannot be encoded".to_owned(), "not today".to_owned())
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_split_queue_is_one_queue() {
        const JOBS: usize = 400;
        let backend = MemoryBackend::new();
        let queue = DelayQueue::<usize>::new(backend.clone(), "test").split(4);
        let name = |i: usize| format!("job-{i}");
        let pushed = queue.push_all((0..JOBS).map(|i| queue.push(i).id(name(i)))).await;
        for (i, pushed) in pushed.iter().enumerate() {
            let pushed = pushed.as_ref().unwrap();
            assert!(pushed.is_new() && *pushed.id() == JobId::from(name(i)), "in order: {pushed:?}");
        }
        for part in 0..4 {
            let waiting = backend.counts(&QueueKey::new("test").with_part(part)).await.unwrap().waiting;
            assert!(waiting > JOBS as u64 / 8, "{waiting} in part {part}");
        }
        assert!(!queue.push(1).id(name(1)).await.unwrap().is_new());
        let job = queue.get(name(7)).await.unwrap().unwrap();
        assert_eq!(queue.decode(&job).unwrap(), 7);
        assert_eq!(queue.promote(name(7)).await.unwrap(), Changed::Done);
        assert_eq!(queue.cancel(name(7)).await.unwrap(), Cancelled::Removed);
        queue.pause().await.unwrap();
        let counts = queue.counts().await.unwrap();
        assert!(counts.waiting == JOBS as u64 - 1 && counts.is_paused, "{counts:?}");
        assert_eq!(queue.drain().await.unwrap(), JOBS as u64 - 1);
    }

    #[tokio::test(start_paused = true)]
    async fn the_dead_are_replayed_as_a_filter_says() {
        const JOBS: usize = 600;
        let backend = MemoryBackend::new();
        let queue = DelayQueue::<usize>::new(backend.clone(), "test");
        let pushed = queue.push_all((0..JOBS).map(|i| queue.push(i))).await;
        assert!(pushed.iter().all(Result::is_ok));
        let claim = Claim {
            worker: WorkerId::random().unwrap(),
            limit: 256,
            lease: Duration::from_secs(60),
            dead: DeadLimits::default(),
        };
        let mut finishes = Vec::new();
        while queue.counts().await.unwrap().dead < JOBS as u64 {
            let claimed = backend.claim(&QueueKey::new("test"), &finishes, &claim).await.unwrap();
            let dead = |ticket| Finish { ticket, ending: Ending::Dead { reason: Reason::Refused, error: "no".into() } };
            finishes = claimed.jobs.iter().map(|job| dead(job.ticket())).collect();
        }
        let is_even = |job: &tollgate::delay_queue::StoredJob| queue.decode(job).unwrap().is_multiple_of(2);
        assert_eq!(queue.replay(250, is_even).await.unwrap(), 250);
        assert_eq!(queue.replay(usize::MAX, is_even).await.unwrap(), JOBS / 2 - 250);
        assert_eq!(queue.replay(usize::MAX, is_even).await.unwrap(), 0);
        assert_eq!(queue.forget(usize::MAX, |_| true).await.unwrap(), JOBS / 2);
        let counts = queue.counts().await.unwrap();
        assert_eq!((counts.waiting, counts.dead), (JOBS as u64 / 2, 0));
    }
}
