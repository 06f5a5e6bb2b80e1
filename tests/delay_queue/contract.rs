//! The delay queue contract on the memory backend, with a paused clock, and on real Redis servers.

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
                // -2: the key has expired since it was listed.
                assert!(ttl >= 0 || ttl == -2, "{key} has no expiry: {ttl}");
            }
        }
    );
}

/// Behavior of `DelayQueue` that does not depend on the store.
mod queue {
    use std::error::Error;
    use std::fmt;
    use std::future::{IntoFuture, ready};
    use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};
    use std::time::{Duration, SystemTime};

    use tokio::time::{Instant, sleep};
    use tollgate::delay_queue::store::{
        Ack, AckKind, Admission, Claim, Claimed, DelayQueueStore, MAX_BATCH, QueueKey, WorkerId,
    };
    use tollgate::delay_queue::{
        Cancelled, Changed, CircuitBreaker, Codec, Due, NewJob, Priority, QueueError, Reason, State, UniqueFor,
    };
    use tollgate::testing::{Failure, FaultStore, Faults, Verb};
    use tollgate::{
        AnyBackend, BoxError, ConfigError, DelayQueue, DelayQueueWorker, Job, JobId, MemoryBackend, StoreError,
    };
    use tower::service_fn;

    use crate::support::stores::delegate_queue;

    fn queue() -> DelayQueue<String> {
        DelayQueue::new(MemoryBackend::new(), "test")
    }

    #[tokio::test(start_paused = true)]
    async fn invalid_input_is_rejected_with_its_own_error() {
        let queue = queue().max_size(20).max_jobs(2);
        let push = || queue.push("x".to_owned());
        let century = Duration::from_secs(100 * 365 * 86_400);
        let error = push().delay(century).await.unwrap_err();
        assert!(matches!(error, QueueError::Config(ConfigError::DelayOutOfRange { .. })), "{error:?}");
        let longer = Due::MAX_DELAY + Duration::from_secs(1);
        let unique = push().unique_for("x", UniqueFor::Time(longer)).await;
        for error in [push().delay(longer).await.unwrap_err(), unique.unwrap_err()] {
            let expected = "a delay or unique-key time of 316224001s is longer than 316224000s (3660 days)";
            assert_eq!(error.to_string(), expected);
        }
        let error = push().id("").await.unwrap_err();
        assert!(matches!(error, QueueError::Config(ConfigError::EmptyJobId)), "{error:?}");
        let error = queue.push("x".repeat(19)).await.unwrap_err();
        assert!(matches!(error, QueueError::TooLarge { bytes: 21, max: 20 }), "{error:?}");
        assert!(push().header("name", "x".repeat(20)).await.unwrap_err().is_too_large());
        assert!(queue.replace("a", "x".repeat(19)).await.unwrap_err().is_too_large());
        let error = queue.reschedule("a", century).await.unwrap_err();
        assert!(matches!(error, QueueError::Config(ConfigError::DelayOutOfRange { .. })), "{error:?}");
        // None of these calls reached the store.
        assert_eq!(queue.counts().await.unwrap().waiting, 0);
        push().delay(Due::MAX_DELAY).await.unwrap();
        push().at(SystemTime::UNIX_EPOCH).max_attempts(0).await.unwrap();
        let error = push().await.unwrap_err();
        assert!(error.is_full() && error.source().is_none(), "{error}");
        let jobs = queue.list(State::Waiting, 0, 10).await.unwrap();
        assert!(jobs.iter().any(|job| job.max_attempts == 1));
    }

    #[tokio::test(start_paused = true)]
    async fn unencodable_payload_is_not_pushed() {
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

    /// An error of a codec, with a cause.
    #[derive(Debug)]
    struct Unreadable(std::num::ParseIntError);

    impl fmt::Display for Unreadable {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("no such order")
        }
    }

    impl Error for Unreadable {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            Some(&self.0)
        }
    }

    /// A codec that encodes only zero, and decodes nothing.
    struct Broken;

    impl Codec<u8> for Broken {
        fn encode(&self, payload: &u8) -> Result<Vec<u8>, BoxError> {
            if *payload == 0 { Ok(b"x".to_vec()) } else { Err(Unreadable("x".parse::<u8>().unwrap_err()).into()) }
        }

        fn decode(&self, bytes: &[u8]) -> Result<u8, BoxError> {
            Ok(str::from_utf8(bytes)?.parse().map_err(Unreadable)?)
        }
    }

    /// Regression: a codec error reached the caller of a push, and the note of a job, without its type and causes.
    #[tokio::test(start_paused = true)]
    async fn codec_error_keeps_its_type_and_causes() {
        let queue = DelayQueue::with_codec(MemoryBackend::new(), "test", Broken);
        let push = queue.push(7);
        let clone = push.clone();
        let many = queue.push_all([queue.push(7)]).await.remove(0).unwrap_err();
        let errors =
            [push.await.unwrap_err(), clone.await.unwrap_err(), many, queue.replace("a", 7).await.unwrap_err()];
        for error in errors {
            let QueueError::Encode(codec) = &error else { panic!("{error:?}") };
            assert!(codec.is::<Unreadable>(), "{codec:?}");
            let cause = error.source().and_then(Error::source).expect("the error has a cause");
            assert!(cause.is::<std::num::ParseIntError>(), "{cause:?}");
        }
        let id = *queue.push(0).await.unwrap().id();
        let worker = DelayQueueWorker::new(queue.clone(), service_fn(async |_: Job<u8>| Ok::<_, BoxError>(())));
        worker.run_until(sleep(Duration::from_secs(1))).await.unwrap();
        let failure = queue.get(id).await.unwrap().unwrap().failure.unwrap();
        assert_eq!(
            (failure.reason, &*failure.error),
            (Reason::Undecodable, "no such order: invalid digit found in string")
        );
    }

    #[tokio::test(start_paused = true)]
    async fn partitioned_queue_behaves_as_one_queue() {
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
            let waiting = backend.counts(&QueueKey::new("test").with_partition(part)).await.unwrap().waiting;
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
        assert_eq!(queue.purge().await.unwrap(), JOBS as u64 - 1);
    }

    #[tokio::test(start_paused = true)]
    async fn looking_up_many_unique_jobs_blocks_no_other_call() {
        const JOBS: usize = 20;
        let queue = DelayQueue::<usize>::new(MemoryBackend::new(), "test").split(1_024);
        let turns = Arc::new(AtomicUsize::new(0));
        let other = tokio::spawn({
            let turns = Arc::clone(&turns);
            async move {
                loop {
                    turns.fetch_add(1, Ordering::Relaxed);
                    tokio::task::yield_now().await;
                }
            }
        });
        let pushed = queue.push_all((0..JOBS).map(|i| queue.push(i).unique(i))).await;
        assert!(pushed.iter().all(|pushed| pushed.as_ref().unwrap().is_new()));
        let turns = turns.load(Ordering::Relaxed);
        assert!(turns >= JOBS / 2, "{turns}");
        other.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn unique_keys_hold_across_partitions() {
        let queue = DelayQueue::<u8>::new(MemoryBackend::new(), "test").split(64);
        for user in 0..20 {
            let first = queue.push(1).unique(user).await.unwrap();
            let second = queue.push(2).unique(user).await.unwrap();
            assert!(first.is_new() && !second.is_new() && first.id() == second.id(), "{first:?} {second:?}");
            assert!(queue.get(first).await.unwrap().is_some());
        }
        assert_eq!(queue.counts().await.unwrap().waiting, 20);
    }

    #[tokio::test(start_paused = true)]
    async fn push_of_another_queue_is_rejected() {
        let backend = MemoryBackend::new();
        let mail = DelayQueue::<u8>::new(backend.clone(), "mail");
        let orders = DelayQueue::<u8>::new(backend, "orders");
        let elsewhere = DelayQueue::<u8>::new(MemoryBackend::new(), "mail");
        let pushes =
            [orders.push(1), elsewhere.push(2), mail.clone().split(2).push(3), mail.clone().max_jobs(9).push(4)];
        let answers = mail.push_all(pushes).await;
        for (answer, name) in answers.iter().zip(["orders", "mail", "mail"]) {
            let Err(QueueError::Config(ConfigError::OtherQueue { queue, other })) = answer else {
                panic!("{answer:?}")
            };
            assert_eq!((&**queue, &**other), ("mail", name));
        }
        let text = answers[2].as_ref().unwrap_err().to_string();
        assert!(text.ends_with("number of partitions"), "{text}");
        assert!(answers[3].as_ref().unwrap().is_new());
        for (queue, waiting) in [(mail, 1), (orders, 0), (elsewhere, 0)] {
            assert_eq!(queue.counts().await.unwrap().waiting, waiting, "{queue:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn push_of_another_handle_to_the_same_queue_is_accepted() {
        async fn answer(here: &MemoryBackend, there: AnyBackend) -> bool {
            let (here, there) = (DelayQueue::<u8>::new(here.clone(), "mail"), DelayQueue::<u8>::new(there, "mail"));
            let answers = here.push_all([there.push(1)]).await;
            match answers.as_slice() {
                [Ok(pushed)] => pushed.is_new(),
                [Err(QueueError::Config(ConfigError::OtherQueue { .. }))] => false,
                _ => panic!("{answers:?}"),
            }
        }
        let backend = MemoryBackend::new();
        assert!(answer(&backend, AnyBackend::Memory(backend.clone())).await);
        assert!(!answer(&backend, AnyBackend::Memory(MemoryBackend::new())).await);
    }

    #[tokio::test(start_paused = true)]
    async fn cloned_push_is_the_same_job_until_it_is_changed() {
        let store = FaultStore::new(MemoryBackend::new());
        let faults = store.faults();
        for parts in [1, 8] {
            let queue = DelayQueue::<u8>::new(store.clone(), ("retried", parts)).split(parts);
            let push = queue.push(1).unique("a");
            faults.lose_replies();
            let error = push.clone().await.unwrap_err();
            assert!(matches!(&error, QueueError::Store(error) if error.is_timeout()), "{error:?}");
            faults.heal();
            let again = push.clone().clone().await.unwrap();
            let at_once = queue.push_all([push.clone(), push.clone().priority(Priority::Low).unique("b")]).await;
            let [same, other] = at_once.as_slice() else { panic!("{at_once:?}") };
            assert!(!again.is_new() && same.as_ref().unwrap() == &again && other.as_ref().unwrap().is_new());
            assert_eq!(push.prepare().unwrap().job.id, *again.id());
            assert_eq!(queue.counts().await.unwrap().waiting, 2);
        }
    }

    /// A push whose reply was lost is pushed again, possibly after the job is done.
    #[tokio::test(start_paused = true)]
    async fn done_job_is_pushed_again_unless_its_key_is_timed() {
        let store = FaultStore::new(MemoryBackend::new());
        let faults = store.faults();
        let queue = DelayQueue::<u8>::new(store, "test");
        let hour = Duration::from_secs(3_600);
        let pushes = [queue.push(1), queue.push(2).unique("a"), queue.push(3).unique_for("b", UniqueFor::Time(hour))];
        for (push, runs) in pushes.iter().zip([2, 2, 1]) {
            let ran = Arc::new(AtomicU8::new(0));
            for retries in 0..2 {
                faults.lose_replies();
                assert!(push.clone().await.is_err());
                faults.heal();
                let waits = queue.counts().await.unwrap().waiting;
                // While the job waits there is only one, however often it is pushed.
                assert!(!push.clone().await.unwrap().is_new(), "retry {retries}");
                assert_eq!(queue.counts().await.unwrap().waiting, waits);
                let counted = Arc::clone(&ran);
                let service = service_fn(move |_: Job<u8>| {
                    counted.fetch_add(1, Ordering::Relaxed);
                    ready(Ok::<_, BoxError>(()))
                });
                let worker = DelayQueueWorker::new(queue.clone(), service);
                worker.run_until(sleep(Duration::from_secs(60))).await.unwrap();
            }
            assert_eq!(ran.load(Ordering::Relaxed), runs);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn hanging_store_receives_only_probes_until_it_replies() {
        let store = FaultStore::new(MemoryBackend::new());
        let faults = store.faults();
        let queue = DelayQueue::<u8>::new(store, "test");
        let clone = queue.clone();
        faults.hang();
        let start = Instant::now();
        for number in 0..20 {
            let error = if number % 2 == 0 { queue.push(1).await } else { clone.push(1).await }.unwrap_err();
            let QueueError::Store(error) = error else { panic!("{error:?}") };
            assert_eq!((error.is_timeout(), error.is_unavailable()), (number < 5, number >= 5), "{number}: {error}");
        }
        // Five pushes waited for the deadline.
        assert_eq!((start.elapsed(), faults.calls(Verb::Push)), (Duration::from_millis(500), 5));

        // No other call reaches the store either, except one probe per interval.
        assert!(queue.counts().await.is_err() && queue.purge().await.is_err());
        assert!(queue.get("a").await.is_err() && queue.cancel("a").await.is_err());
        assert!(queue.promote("a").await.is_err() && queue.replace("a", 1).await.is_err());
        assert!(queue.list(State::Waiting, 0, 1).await.is_err() && queue.pause().await.is_err());
        assert!(queue.replay(1, |_| true).await.is_err() && queue.forget(1, |_| true).await.is_err());
        assert_eq!(faults.total_calls(), 5);
        sleep(Duration::from_millis(101)).await;
        let (probe, other) = tokio::join!(queue.counts(), queue.push(1).into_future());
        assert!(probe.is_err() && other.is_err());
        assert_eq!((faults.total_calls(), faults.calls(Verb::Control)), (6, 1));

        faults.heal();
        sleep(Duration::from_millis(101)).await;
        assert_eq!(queue.cancel("a").await.unwrap(), Cancelled::Missing);
        assert!(queue.push(1).await.unwrap().is_new() && clone.push(2).await.unwrap().is_new());
    }

    /// Otherwise a moment of failure would fail all remaining jobs of a million.
    #[tokio::test(start_paused = true)]
    async fn bulk_push_survives_a_short_store_failure() {
        const BATCHES: usize = 20;
        for fault in [Faults::hang, |faults: &Faults| faults.fail(Failure::Unavailable)] {
            let store = FaultStore::new(MemoryBackend::new());
            let faults = store.faults();
            let queue = DelayQueue::<usize>::new(store, "test");
            fault(&faults);
            let heal = async {
                sleep(Duration::from_millis(650)).await;
                faults.heal();
            };
            let pushes: Vec<_> = (0..BATCHES * MAX_BATCH).map(|i| queue.push(i)).collect();
            let (answers, ()) = tokio::join!(queue.push_all(pushes), heal);
            let failed = answers.iter().filter(|answer| answer.is_err()).count() / MAX_BATCH;
            // Five failures open the circuit, and then one probe fails in each interval.
            assert!((5..=11).contains(&failed), "{failed} batches failed");
            assert_eq!(faults.calls(Verb::Push), BATCHES as u64, "each batch is sent once");
            let waiting = queue.counts().await.unwrap().waiting;
            assert_eq!(waiting, ((BATCHES - failed) * MAX_BATCH) as u64);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn bulk_push_does_not_wait_long_for_the_store() {
        let store = FaultStore::new(MemoryBackend::new());
        let faults = store.faults();
        let queue = DelayQueue::<usize>::new(store.clone(), "test");
        faults.fail(Failure::Unavailable);
        let start = Instant::now();
        let answers = queue.push_all((0..100 * MAX_BATCH).map(|i| queue.push(i))).await;
        assert!(answers.iter().all(Result::is_err));
        assert_eq!((start.elapsed().as_millis(), faults.calls(Verb::Push)), (1_000, 15));

        // Nor does it wait for a distant probe.
        let breaker = CircuitBreaker::new().failures(1).probe_interval(Duration::from_secs(3_600));
        let queue = DelayQueue::<usize>::new(store, "test").circuit_breaker(breaker);
        let start = Instant::now();
        let answers = queue.push_all((0..MAX_BATCH + 1).map(|i| queue.push(i))).await;
        assert!(answers.iter().all(Result::is_err) && start.elapsed().is_zero());
        assert_eq!(faults.calls(Verb::Push), 16);
    }

    /// A backend of two nodes, the first of which is down.
    struct OneNode {
        backend: MemoryBackend,
    }

    impl DelayQueueStore for OneNode {
        delegate_queue!(backend: extend, watch, get, cancel, reschedule, replace, counts, list, purge, release_unique, replay, forget, scope);

        async fn push(&self, queue: &QueueKey, jobs: &[NewJob], max_jobs: u64) -> Result<Vec<Admission>, StoreError> {
            match queue.partition() {
                0 => Err(StoreError::unavailable("the node is down")),
                _ => self.backend.push(queue, jobs, max_jobs).await,
            }
        }

        async fn pause(&self, queue: &QueueKey, is_paused: bool) -> Result<(), StoreError> {
            match queue.partition() {
                0 => Err(StoreError::unavailable("the node is down")),
                _ => self.backend.pause(queue, is_paused).await,
            }
        }

        async fn claim(&self, queue: &QueueKey, finished: &[Ack], claim: &Claim) -> Result<Claimed, StoreError> {
            self.backend.claim(queue, finished, claim).await
        }
    }

    /// A backend that records the size of each push in bytes.
    struct Weighing {
        backend: MemoryBackend,
        batches: Arc<Mutex<Vec<usize>>>,
    }

    impl DelayQueueStore for Weighing {
        delegate_queue!(backend: extend, watch, get, cancel, reschedule, replace, counts, list, pause, purge, release_unique, replay, forget, scope);

        async fn push(&self, queue: &QueueKey, jobs: &[NewJob], max_jobs: u64) -> Result<Vec<Admission>, StoreError> {
            self.batches.lock().unwrap().push(jobs.iter().map(NewJob::size).sum());
            self.backend.push(queue, jobs, max_jobs).await
        }

        async fn claim(&self, queue: &QueueKey, finished: &[Ack], claim: &Claim) -> Result<Claimed, StoreError> {
            self.backend.claim(queue, finished, claim).await
        }
    }

    #[tokio::test(start_paused = true)]
    async fn large_jobs_are_pushed_a_megabyte_at_a_time() {
        let (backend, batches) = (MemoryBackend::with_capacity(1_000_000), Arc::<Mutex<Vec<_>>>::default());
        let queue = DelayQueue::<String>::new(Weighing { backend, batches: Arc::clone(&batches) }, "test");
        let queue = queue.max_size(2 * 1_024 * 1_024);
        let sizes: Vec<usize> = [vec![60_000; 100], vec![10; 300], vec![1_500_000, 10]].concat();
        let answers = queue.push_all(sizes.iter().map(|&size| queue.push("x".repeat(size)))).await;
        assert!(answers.iter().all(|answer| answer.as_ref().unwrap().is_new()));
        let batches = batches.lock().unwrap().clone();
        assert_eq!(batches.iter().sum::<usize>(), sizes.iter().map(|size| size + 2).sum::<usize>());
        let large = batches.iter().filter(|&&bytes| bytes > 1_024 * 1_024).collect::<Vec<_>>();
        assert!(large == [&1_500_002] && batches.len() <= 10, "{batches:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn failing_partition_does_not_fail_pushes_to_others() {
        let backend = MemoryBackend::new();
        let queue = DelayQueue::<usize>::new(OneNode { backend: backend.clone() }, "test").split(2);
        let jobs = 20 * MAX_BATCH;
        let answers = queue.push_all((0..jobs).map(|i| queue.push(i))).await;
        let new = answers.iter().flatten().filter(|pushed| pushed.is_new()).count();
        let there = backend.counts(&QueueKey::new("test").with_partition(1)).await.unwrap().waiting;
        assert!(new > jobs / 3 && new as u64 == there, "{new} of {jobs}, {there} are stored");

        // Single pushes fail at once, and only those to the failing partition.
        let queue = queue.circuit_breaker(CircuitBreaker::new().failures(1));
        let start = Instant::now();
        let mut failed = 0;
        for i in 0..100 {
            failed += usize::from(queue.push(i).await.is_err());
        }
        assert!((20..80).contains(&failed) && start.elapsed().is_zero(), "{failed} after {:?}", start.elapsed());
    }

    /// Regression: the partitions after it could be neither paused nor resumed while its node was down.
    #[tokio::test(start_paused = true)]
    async fn failing_partition_does_not_stop_others_from_pausing() {
        let backend = MemoryBackend::new();
        let queue = DelayQueue::<usize>::new(OneNode { backend: backend.clone() }, "test").split(3);
        for is_paused in [true, false] {
            let result = if is_paused { queue.pause().await } else { queue.resume().await };
            assert!(matches!(result, Err(QueueError::Store(_))), "{result:?}");
            for part in [1, 2] {
                let counts = backend.counts(&QueueKey::new("test").with_partition(part)).await.unwrap();
                assert_eq!(counts.is_paused, is_paused, "part {part}");
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn circuit_breaker_off_sends_every_call() {
        let store = FaultStore::new(MemoryBackend::new());
        let faults = store.faults();
        let queue = DelayQueue::<u8>::new(store, "test").circuit_breaker(CircuitBreaker::off());
        faults.fail(Failure::Unavailable);
        for _ in 0..20 {
            queue.push(1).await.unwrap_err();
        }
        faults.heal();
        queue.push(1).await.unwrap();
        assert_eq!(faults.calls(Verb::Push), 21);
    }

    #[tokio::test(start_paused = true)]
    async fn worker_is_independent_of_the_circuit_of_pushes() {
        let store = FaultStore::new(MemoryBackend::new());
        let faults = store.faults();
        let breaker = CircuitBreaker::new().failures(1).probe_interval(Duration::from_secs(3_600));
        let queue = DelayQueue::<u8>::new(store, "test").circuit_breaker(breaker);
        queue.push(1).await.unwrap();
        faults.fail(Failure::Unavailable);
        queue.counts().await.unwrap_err();
        faults.heal();
        assert!(queue.push(2).await.is_err(), "the circuit is open for an hour");
        let (done, mut seen) = tokio::sync::mpsc::unbounded_channel();
        let service = service_fn(move |job: Job<u8>| {
            let sent = done.send(*job);
            async move { sent.map_err(BoxError::from) }
        });
        DelayQueueWorker::new(queue, service).run_until(sleep(Duration::from_millis(10))).await.unwrap();
        assert_eq!(seen.recv().await, Some(1));
    }

    #[tokio::test(start_paused = true)]
    async fn replaced_payload_is_limited_like_a_push() {
        let queue = DelayQueue::<String>::new(MemoryBackend::new(), "test").max_size(100);
        // The quotation marks take two bytes.
        queue.push("a".repeat(48)).header("name", "x".repeat(46)).id("a").await.unwrap();
        let error = queue.replace("a", "b".repeat(49)).await.unwrap_err();
        assert_eq!(error.to_string(), "the job is too large: 101 bytes, and the limit is 100 bytes");
        assert_eq!(queue.replace("a", "c".repeat(48)).await.unwrap(), Changed::Done);

        // The capacity of the backend is a limit too.
        let queue = DelayQueue::<String>::new(MemoryBackend::with_capacity(1), "test");
        queue.push("a".repeat(1_000)).id("a").await.unwrap();
        let error = queue.replace("a", "b".repeat(2_000)).await.unwrap_err();
        assert!(matches!(&error, QueueError::Store(error) if error.is_out_of_memory()), "{error:?}");
        let job = queue.get("a").await.unwrap().unwrap();
        assert_eq!(queue.decode(&job).unwrap(), "a".repeat(1_000));
    }

    /// A caller may push an existing job again to make sure of it.
    #[tokio::test(start_paused = true)]
    async fn repeated_push_takes_no_capacity() {
        let backend = MemoryBackend::with_capacity(2);
        let queue = DelayQueue::<String>::new(backend.clone(), "test");
        for _ in 0..2 {
            for id in ["a", "b"] {
                queue.push("x".repeat(1_000)).id(id).await.unwrap();
            }
            assert_eq!(backend.jobs(), 2);
        }
        for (id, size) in [("c", 0), ("c", 1_000)] {
            let error = queue.push("x".repeat(size)).id(id).await.unwrap_err();
            assert!(matches!(&error, QueueError::Store(error) if error.is_out_of_memory()), "{error:?}");
        }
        // A dead job makes room for its own replacement, if that is no larger.
        let claim = Claim::new(WorkerId::random().unwrap(), 1, Duration::from_secs(60));
        let key = QueueKey::new("test");
        let claimed = backend.claim(&key, &[], &claim).await.unwrap().jobs.pop().unwrap();
        let kind = AckKind::Dead { reason: Reason::Failed, error: "it failed".into() };
        let finish = Ack::new(claimed.lease(), kind);
        backend.claim(&key, &[finish], &Claim::new(claim.worker, 0, claim.lease)).await.unwrap();
        assert_eq!(queue.counts().await.unwrap().dead, 1);
        let id = claimed.job.id;
        assert!(queue.push("y".repeat(4_000)).id(id).await.is_err());
        assert!(queue.push("y".repeat(500)).id(id).await.unwrap().is_new());
        assert_eq!((backend.jobs(), queue.counts().await.unwrap().dead), (2, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn timed_unique_keys_are_bounded_in_memory() {
        let backend = MemoryBackend::with_capacity(10);
        let queue = DelayQueue::<u32>::new(backend.clone(), "test");
        let minute = Duration::from_secs(60);
        let push = async |user: u32| queue.push(user).unique_for(user, UniqueFor::Time(minute)).await;
        for user in 0..10 {
            let pushed = push(user).await.unwrap();
            assert_eq!(queue.cancel(pushed).keep_unique().await.unwrap(), Cancelled::Removed);
        }
        let error = push(10).await.unwrap_err();
        assert!(matches!(&error, QueueError::Store(error) if error.is_out_of_memory()), "{error:?}");
        assert_eq!(backend.jobs(), 0);
        tokio::time::advance(2 * minute).await;
        let claim = Claim::new(WorkerId::random().unwrap(), 1, minute);
        backend.claim(&QueueKey::new("test"), &[], &claim).await.unwrap();
        assert!(push(10).await.unwrap().is_new());
    }

    #[tokio::test(start_paused = true)]
    async fn replay_skips_dead_jobs_whose_key_is_taken() {
        let backend = MemoryBackend::new();
        let queue = DelayQueue::<usize>::new(backend.clone(), "test").max_attempts(1);
        for i in 0..3 {
            queue.push(i).unique("user").await.unwrap();
            let service = tower::service_fn(async |_| Err::<(), _>("no"));
            DelayQueueWorker::new(queue.clone(), service)
                .run_until(tokio::time::sleep(Duration::from_secs(1)))
                .await
                .unwrap();
        }
        assert_eq!(queue.replay(10, |_| true).await.unwrap(), 1);
        assert_eq!(queue.replay(10, |_| true).await.unwrap(), 0);
        let counts = queue.counts().await.unwrap();
        assert_eq!((counts.waiting, counts.dead), (1, 2));
    }

    /// Whatever the limit, and however many jobs cannot be replayed.
    #[tokio::test(start_paused = true)]
    async fn replay_continues_past_jobs_whose_key_is_taken() {
        for blocked in [1, MAX_BATCH + 50] {
            let backend = MemoryBackend::new();
            let queue = DelayQueue::<usize>::new(backend.clone(), "test");
            for i in 0..blocked {
                queue.push(i).unique("user").await.unwrap();
                kill(&backend, &QueueKey::new("test")).await;
            }
            let free = [queue.push(blocked).await.unwrap(), queue.push(blocked + 1).await.unwrap()];
            kill(&backend, &QueueKey::new("test")).await;
            queue.push(0).unique("user").await.unwrap();
            for job in free {
                let mut looked = 0;
                let replayed = queue.replay(1, |_| {
                    looked += 1;
                    true
                });
                assert_eq!(replayed.await.unwrap(), 1);
                assert_eq!(looked, blocked + 1, "each job is examined once, and none after the replayed one");
                assert_eq!(queue.get(job).await.unwrap().unwrap().state, State::Waiting);
            }
            assert_eq!(queue.replay(1, |_| true).await.unwrap(), 0);
            assert_eq!(queue.forget(2, |_| true).await.unwrap(), 2.min(blocked));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn replay_and_forget_apply_their_filter() {
        const JOBS: usize = 600;
        let backend = MemoryBackend::new();
        let queue = DelayQueue::<usize>::new(backend.clone(), "test");
        let pushed = queue.push_all((0..JOBS).map(|i| queue.push(i))).await;
        assert!(pushed.iter().all(Result::is_ok));
        let claim = Claim::new(WorkerId::random().unwrap(), 256, Duration::from_secs(60));
        let mut finishes = Vec::new();
        while queue.counts().await.unwrap().dead < JOBS as u64 {
            let claimed = backend.claim(&QueueKey::new("test"), &finishes, &claim).await.unwrap();
            let dead = |lease| Ack::new(lease, AckKind::Dead { reason: Reason::Refused, error: "no".into() });
            finishes = claimed.jobs.iter().map(|job| dead(job.lease())).collect();
        }
        let is_even = |job: &tollgate::delay_queue::StoredJob| queue.decode(job).unwrap().is_multiple_of(2);
        assert_eq!(queue.replay(250, is_even).await.unwrap(), 250);
        assert_eq!(queue.replay(usize::MAX, is_even).await.unwrap(), JOBS / 2 - 250);
        assert_eq!(queue.replay(usize::MAX, is_even).await.unwrap(), 0);
        assert_eq!(queue.forget(usize::MAX, |_| true).await.unwrap(), JOBS / 2);
        let counts = queue.counts().await.unwrap();
        assert_eq!((counts.waiting, counts.dead), (JOBS as u64 / 2, 0));
    }

    /// Whatever the number of dead jobs, and however early the others have died.
    #[tokio::test(start_paused = true)]
    async fn dead_job_is_replayed_or_forgotten_by_its_id() {
        const JOBS: usize = 1_000;
        let backend = MemoryBackend::new();
        let store = FaultStore::new(backend.clone());
        let faults = store.faults();
        for parts in [1, 3] {
            let queue = DelayQueue::<usize>::new(store.clone(), ("test", parts)).split(parts);
            let name = |i: usize| format!("job-{i}");
            queue.push_all((0..JOBS).map(|i| queue.push(i).id(name(i)))).await;
            while queue.counts().await.unwrap().waiting > 0 {
                for part in 0..parts {
                    kill(&backend, &QueueKey::new(*queue.name()).with_partition(part)).await;
                }
            }
            queue.push(0).id("waits").await.unwrap();
            let ids = [name(JOBS - 1), "waits".to_owned(), "is not there".to_owned(), name(JOBS - 2)];
            let before = faults.calls(Verb::Control);
            assert_eq!(queue.replay_ids(ids.clone()).await.unwrap(), [true, false, false, true]);
            // A waiting job is not removed.
            let ids = [ids[0].clone(), name(JOBS - 3), ids[1].clone()];
            assert_eq!(queue.forget_ids(ids).await.unwrap(), [false, true, false]);
            let calls = faults.calls(Verb::Control) - before;
            assert!(calls <= 2 * u64::from(parts), "{calls} calls for {parts} parts");
            assert_eq!(queue.get(name(JOBS - 3)).await.unwrap(), None);
            let counts = queue.counts().await.unwrap();
            assert_eq!((counts.waiting, counts.dead), (3, JOBS as u64 - 3));
        }
    }

    /// An operator knows the ids of jobs from a log, or from a table of the application.
    #[tokio::test(start_paused = true)]
    async fn job_is_found_by_the_text_of_its_id() {
        for parts in [1, 7] {
            let queue = queue().split(parts);
            for id in [JobId::from(("welcome", 42)), "a b".into(), "x".repeat(100).into(), JobId::unique().unwrap()] {
                let pushed = queue.push(String::new()).id(id).await.unwrap();
                let shown = pushed.id().as_str().to_owned();
                let found: JobId = shown.parse().unwrap();
                assert_eq!(queue.get(found).await.unwrap().unwrap().id.to_string(), shown);
                assert_eq!(queue.cancel(found).await.unwrap(), Cancelled::Removed, "{shown}");
            }
        }
        for garbage in ["a b", "{a}", "%7b", "#digest", &"x".repeat(100)] {
            let error = garbage.parse::<JobId>().unwrap_err();
            assert_eq!(
                error.to_string(),
                "not the text of a key: parse accepts only text that `as_str` or `Display` returns"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn dead_jobs_leave_room_for_others() {
        let queue = DelayQueue::<u8>::new(MemoryBackend::new(), "test").max_jobs(10).max_attempts(1);
        for i in 0..10 {
            queue.push(i).await.unwrap();
        }
        let error = queue.push(10).await.unwrap_err();
        assert_eq!(
            error.to_string(),
            "the queue is full: it, or the partition of the job, has 10 jobs, dead ones included; raise `max_jobs` or forget dead jobs"
        );
        let service = service_fn(async |_: Job<u8>| Err::<(), _>("no"));
        DelayQueueWorker::new(queue.clone(), service).run_until(sleep(Duration::from_secs(1))).await.unwrap();
        assert_eq!(queue.counts().await.unwrap().dead, 5);
        assert!(queue.push(10).await.unwrap().is_new());
    }

    /// A backend that gets a push from another client during every purge.
    struct Busy {
        backend: MemoryBackend,
    }

    impl DelayQueueStore for Busy {
        delegate_queue!(backend: push, extend, watch, get, cancel, reschedule, replace, counts, list, pause, release_unique, replay, forget, scope);

        async fn claim(&self, queue: &QueueKey, finished: &[Ack], claim: &Claim) -> Result<Claimed, StoreError> {
            self.backend.claim(queue, finished, claim).await
        }

        async fn purge(&self, queue: &QueueKey, limit: usize, keeps_unique: bool) -> Result<usize, StoreError> {
            let job = NewJob::new(JobId::unique()?, *b"1");
            self.backend.push(queue, &[job], u64::MAX).await?;
            sleep(Duration::from_millis(10)).await;
            self.backend.purge(queue, limit, keeps_unique).await
        }
    }

    #[tokio::test(start_paused = true)]
    async fn purge_removes_as_many_jobs_as_were_waiting() {
        const JOBS: usize = 2 * MAX_BATCH + 10;
        for parts in [1, 3] {
            let backend = MemoryBackend::new();
            let queue = DelayQueue::<usize>::new(Busy { backend: backend.clone() }, "test").split(parts);
            let purge = async || tokio::time::timeout(Duration::from_secs(60), queue.purge()).await.unwrap().unwrap();
            assert_eq!(purge().await, 0);
            let pushed = queue.push_all((0..JOBS).map(|i| queue.push(i).delay(Duration::from_secs(60)))).await;
            assert!(pushed.iter().all(Result::is_ok));
            assert_eq!(purge().await, JOBS as u64);
            // As many jobs as were pushed meanwhile.
            let left = queue.counts().await.unwrap().waiting;
            assert!((1..10).contains(&left), "{left}");
        }
    }

    /// Moves the waiting jobs to the dead jobs.
    async fn kill(backend: &MemoryBackend, queue: &QueueKey) {
        let lease = Duration::from_secs(60);
        let claim = Claim::new(WorkerId::random().unwrap(), MAX_BATCH, lease);
        let claimed = backend.claim(queue, &[], &claim).await.unwrap();
        let kind = AckKind::Dead { reason: Reason::Failed, error: "poison".into() };
        let finish = |job: tollgate::delay_queue::store::ClaimedJob| Ack::new(job.lease(), kind.clone());
        let finished: Vec<_> = claimed.jobs.into_iter().map(finish).collect();
        backend.claim(queue, &finished, &Claim::new(claim.worker, 0, lease)).await.unwrap();
    }

    /// A backend that replies for at most `most` dead jobs per call.
    struct Terse {
        backend: MemoryBackend,
        most: usize,
    }

    impl Terse {
        fn some<'a>(&self, ids: &'a [JobId]) -> &'a [JobId] {
            &ids[..ids.len().min(self.most)]
        }
    }

    impl DelayQueueStore for Terse {
        delegate_queue!(backend: push, extend, watch, get, cancel, reschedule, replace, counts, list, pause, purge, release_unique, scope);

        async fn claim(&self, queue: &QueueKey, finished: &[Ack], claim: &Claim) -> Result<Claimed, StoreError> {
            self.backend.claim(queue, finished, claim).await
        }

        async fn replay(&self, queue: &QueueKey, ids: &[JobId]) -> Result<Vec<bool>, StoreError> {
            self.backend.replay(queue, self.some(ids)).await
        }

        async fn forget(&self, queue: &QueueKey, ids: &[JobId]) -> Result<Vec<bool>, StoreError> {
            self.backend.forget(queue, self.some(ids)).await
        }
    }

    #[tokio::test(start_paused = true)]
    async fn dead_jobs_are_replayed_in_several_calls() {
        let backend = MemoryBackend::new();
        let queue = |most| DelayQueue::<u32>::new(Terse { backend: backend.clone(), most }, "test");
        let (queue, silent) = (queue(3), queue(0));
        let ids = || (0..10).map(|i| JobId::new(format!("job-{i}")));
        queue.push_all(ids().map(|id| queue.push(1).id(id))).await;
        kill(&backend, &QueueKey::new("test")).await;
        let unanswered = [silent.replay_ids(ids()).await.map(drop), silent.forget(10, |_| true).await.map(drop)];
        assert!(unanswered.iter().all(Result::is_err), "{unanswered:?}");
        assert_eq!(queue.replay_ids(ids()).await.unwrap(), [true; 10]);
        kill(&backend, &QueueKey::new("test")).await;
        assert_eq!(queue.forget_ids(ids().take(4)).await.unwrap(), [true; 4]);
        assert_eq!(queue.replay(4, |_| true).await.unwrap(), 4);
        let counts = queue.counts().await.unwrap();
        assert_eq!((counts.waiting, counts.dead), (4, 2));
    }

    /// A backend with fast workers: a replayed job is dead again before the next call.
    struct Poisoned {
        backend: MemoryBackend,
    }

    impl DelayQueueStore for Poisoned {
        delegate_queue!(backend: push, extend, watch, get, cancel, reschedule, replace, counts, list, pause, purge, release_unique, forget, scope);

        async fn claim(&self, queue: &QueueKey, finished: &[Ack], claim: &Claim) -> Result<Claimed, StoreError> {
            self.backend.claim(queue, finished, claim).await
        }

        async fn replay(&self, queue: &QueueKey, ids: &[JobId]) -> Result<Vec<bool>, StoreError> {
            let answers = self.backend.replay(queue, ids).await;
            tokio::time::advance(Duration::from_millis(1)).await;
            kill(&self.backend, queue).await;
            answers
        }
    }

    #[tokio::test(start_paused = true)]
    async fn job_that_dies_again_is_replayed_once_per_call() {
        let backend = MemoryBackend::new();
        for parts in [1, 3] {
            let queue =
                DelayQueue::<String>::new(Poisoned { backend: backend.clone() }, ("poisoned", parts)).split(parts);
            for id in 0..300 {
                queue.push("x".to_owned()).id(format!("{id}")).await.unwrap();
            }
            for part in 0..parts {
                for _ in 0..2 {
                    kill(&backend, &QueueKey::new(*queue.name()).with_partition(part)).await;
                }
            }
            assert_eq!(queue.counts().await.unwrap().dead, 300);
            let mut looked = 0;
            let replayed = queue.replay(1_000, |_| {
                looked += 1;
                assert!(looked <= 300, "a job is examined again");
                true
            });
            assert_eq!(replayed.await.unwrap(), 300);
            // The jobs are dead again, and can be removed.
            assert_eq!(queue.forget(1_000, |_| true).await.unwrap(), 300);
        }
    }
}
