//! Jobs on one Redis: pushed one by one and in bulk, run by a worker, and how late they are.

use std::future::ready;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use apalis::prelude::{BackendExt, Data, ParallelizeExt, TaskBuilder, TaskSink, WorkerBuilder, WorkerBuilderExt};
use apalis_redis::{Config, RedisStorage};
use serde_json::json;
use tokio::sync::Notify;
use tollgate::delay_queue::{DelayQueueWorker, Job, Pushed};
use tollgate::{BoxError, DelayQueue, RedisBackend};
use tower::service_fn;

use crate::Run;
use crate::bench::{Contender, Figures, figures, load, take_turns};
use crate::ceiling::Ceiling;
use crate::node::Node;
use crate::report::{Rank, Table};
use crate::server::RedisServer;

const CONCURRENCY: usize = 100;
pub const BATCH: usize = 1_000;
pub const MINUTE: Duration = Duration::from_secs(60);

#[derive(Clone)]
pub enum Queue {
    Tollgate(DelayQueue<String>),
    Apalis(RedisStorage<String>),
}

impl Queue {
    pub async fn tollgate(url: &str, name: &str) -> Self {
        let backend = RedisBackend::connect(url).await.expect("Redis accepts the connection");
        Self::Tollgate(
            DelayQueue::new(backend, name.to_owned()).deadline(Duration::from_secs(10)).max_jobs(100_000_000),
        )
    }

    pub async fn both(url: &str) -> [(&'static str, Self); 2] {
        [("tollgate", Self::tollgate(url, "jobs").await), ("apalis-redis", Self::apalis(url, "apalis").await)]
    }

    async fn apalis(url: &str, name: &str) -> Self {
        let connection = apalis_redis::connect(url).await.expect("Redis accepts the connection");
        Self::Apalis(RedisStorage::new(connection).with_config(Config::default().queue(name).batch_size(CONCURRENCY)))
    }

    /// Pushes one job that is due in a minute.
    pub async fn push(&mut self, payload: String) {
        match self {
            Self::Tollgate(queue) => {
                assert!(queue.push(payload).delay(MINUTE).await.expect("the job is stored").is_new())
            }
            Self::Apalis(storage) => {
                storage
                    .push_task(TaskBuilder::new(payload).run_after(MINUTE).build())
                    .await
                    .expect("the job is stored");
            }
        }
    }

    /// Pushes jobs with these numbers as payloads, due after `delay`.
    pub async fn push_all(&mut self, numbers: std::ops::Range<usize>, delay: Duration) {
        match self {
            Self::Tollgate(queue) => {
                let pushed = queue.push_all(numbers.map(|number| queue.push(number.to_string()).delay(delay))).await;
                assert!(pushed.iter().all(|pushed| pushed.as_ref().is_ok_and(Pushed::is_new)));
            }
            Self::Apalis(storage) => {
                let tasks = numbers.map(|number| TaskBuilder::new(number.to_string()).run_after(delay).build());
                let mut tasks = futures_util::stream::iter(tasks);
                storage.push_all(&mut tasks).await.expect("the jobs are stored");
            }
        }
    }

    /// Pushes a job that is due at an instant. Returns the instant that the queue uses, because some queues have whole seconds only.
    async fn push_at(&mut self, number: usize, due: SystemTime) -> SystemTime {
        match self {
            Self::Tollgate(queue) => {
                assert!(queue.push(number.to_string()).at(due).await.expect("the job is stored").is_new());
                due
            }
            Self::Apalis(storage) => {
                let second = due.duration_since(UNIX_EPOCH).expect("the clock is after 1970").as_secs() + 1;
                let task = TaskBuilder::new(number.to_string()).run_at_timestamp(second).build();
                storage.push_task(task).await.expect("the job is stored");
                UNIX_EPOCH + Duration::from_secs(second)
            }
        }
    }

    /// Runs a worker, a hundred jobs at a time, until all jobs of the tally have run.
    pub async fn work(&self, tally: Arc<Tally>) {
        match self {
            Self::Tollgate(queue) => {
                let counted = Arc::clone(&tally);
                let service = service_fn(move |job: Job<String>| {
                    counted.ran(&job);
                    std::future::ready(Ok::<_, BoxError>(()))
                });
                let worker = DelayQueueWorker::new(queue.clone(), service).concurrency(CONCURRENCY);
                // Spawned, as in a program: the future of `block_on` does not run on a worker thread.
                let running = tokio::spawn(async move { worker.run_until(tally.all_ran.notified()).await });
                running.await.expect("the worker does not panic").expect("the worker does not fail");
            }
            Self::Apalis(storage) => {
                async fn run(job: String, tally: Data<Arc<Tally>>) {
                    tally.ran(&job);
                }
                let all_ran = Arc::clone(&tally);
                let worker = WorkerBuilder::new("compare")
                    .backend(storage.clone().poll_with_interval(Duration::from_millis(50)))
                    .data(tally)
                    .concurrency(CONCURRENCY)
                    .parallelize(tokio::spawn)
                    .build(run);
                let running = tokio::spawn(worker.run_until(async move {
                    all_ran.all_ran.notified().await;
                    Ok::<_, std::io::Error>(())
                }));
                running.await.expect("the worker does not panic").expect("the worker does not fail");
            }
        }
    }
}

/// Which jobs have run, and when.
pub struct Tally {
    runs: Vec<AtomicU32>,
    ran: Mutex<Vec<(usize, SystemTime, Instant)>>,
    all_ran: Notify,
}

impl Tally {
    pub fn new(jobs: usize) -> Arc<Self> {
        let runs = (0..jobs).map(|_| AtomicU32::new(0)).collect();
        Arc::new(Self { runs, ran: Mutex::new(Vec::with_capacity(jobs)), all_ran: Notify::new() })
    }

    fn ran(&self, payload: &str) {
        let number: usize = payload.parse().expect("the payload is a number");
        self.runs[number].fetch_add(1, Ordering::Relaxed);
        let mut ran = self.ran.lock().expect("no task panics");
        ran.push((number, SystemTime::now(), Instant::now()));
        if ran.len() == self.runs.len() {
            self.all_ran.notify_one();
        }
    }

    /// Asserts that every job has run exactly once.
    pub fn assert_once(&self) {
        assert!(self.runs.iter().all(|runs| runs.load(Ordering::Relaxed) == 1), "every job runs once");
    }

    /// Jobs per second, from the first job to the last.
    fn per_s(&self) -> f64 {
        self.assert_once();
        let ran = self.ran.lock().expect("no task panics");
        let (first, last) = (ran.iter().map(|ran| ran.2).min(), ran.iter().map(|ran| ran.2).max());
        let took = first.zip(last).map_or(Duration::ZERO, |(first, last)| last - first);
        (ran.len() - 1) as f64 / took.as_secs_f64()
    }
}

pub async fn push(queue: Queue, tasks: u32, time: Duration) -> Figures {
    load(tasks, time, move |task, _| {
        let mut queue = queue.clone();
        async move { queue.push(format!("payload-{task}")).await }
    })
    .await
}

/// Each call pushes a batch. The rate counts jobs.
pub async fn bulk(queue: Queue, tasks: u32, time: Duration) -> Figures {
    let batches = load(tasks, time, move |_, _| {
        let mut queue = queue.clone();
        async move { queue.push_all(0..BATCH, MINUTE).await }
    })
    .await;
    Figures { per_s: batches.per_s * BATCH as f64, ..batches }
}

async fn process(mut queue: Queue, jobs: usize) -> Figures {
    for from in (0..jobs).step_by(BATCH) {
        queue.push_all(from..jobs.min(from + BATCH), Duration::ZERO).await;
    }
    let tally = Tally::new(jobs);
    queue.work(Arc::clone(&tally)).await;
    Figures { per_s: tally.per_s(), ..Figures::default() }
}

/// The lateness of jobs that are due within `span` ms, while the worker has no other work.
async fn late(mut queue: Queue, jobs: usize, span: u64) -> Figures {
    let tally = Tally::new(jobs);
    let working = {
        let (queue, tally) = (queue.clone(), Arc::clone(&tally));
        tokio::spawn(async move { queue.work(tally).await })
    };
    let begin = SystemTime::now() + Duration::from_secs(1);
    let mut due = Vec::new();
    for number in 0..jobs {
        // Spread without a pattern: 7,919 is prime.
        due.push(queue.push_at(number, begin + Duration::from_millis(number as u64 * 7_919 % span)).await);
    }
    working.await.expect("the worker does not fail");
    tally.assert_once();
    let ran = tally.ran.lock().expect("no task panics");
    let late = ran.iter().map(|&(number, at, _)| at.duration_since(due[number]).expect("no job is early"));
    figures(Duration::from_secs(1), late)
}

const fn late_jobs(is_quick: bool) -> usize {
    if is_quick { 300 } else { 1_000 }
}

pub async fn tables(run: &mut Run) {
    let server = RedisServer::start();
    let node = Node::start(&server);
    let (url, time) = (server.url(), run.time);
    let queues = Queue::both(&url).await;
    let Queue::Tollgate(queue) = &queues[0].1 else { unreachable!("Tollgate is the first") };
    let one = async |id: &str| {
        queue.push("payload-7".to_owned()).delay(MINUTE).id(id).await.expect("the job is stored");
    };
    one("1").await;
    let ceiling =
        Ceiling::record(&server, "delay_queue_push.lua", "7777777", one("7777777")).await.numbers(1_000_000_000);

    type Load = fn(Queue, u32, Duration, bool) -> crate::bench::Loaded<'static>;
    // Name, title, text and unit.
    type Words = [&'static str; 4];
    let tables: [(Words, &[u32], Rank, Load); 4] = [
        (
            [
                "queue-push",
                "Jobs pushed one by one",
                "Jobs with a payload of about ten bytes, due in a minute, by the number of tasks that push. The ceiling is the rate of \
                 `redis-benchmark -P 64 -c 50` with the script that pushes one job. It begins with an empty database, like every \
                 contender.",
                "tasks",
            ],
            &[1, 64, 256],
            Rank::Rate,
            |queue, tasks, time, _| Box::pin(push(queue, tasks, time)),
        ),
        (
            [
                "queue-bulk",
                "Jobs pushed in bulk",
                "A thousand jobs per call, by the number of tasks that push; the time is that of a call. The ceiling is that of jobs \
                 pushed one by one.",
                "tasks",
            ],
            &[8],
            Rank::Rate,
            |queue, tasks, time, _| Box::pin(bulk(queue, tasks, time)),
        ),
        (
            [
                "queue-process",
                "Jobs done by a worker",
                "One worker runs 5,000 jobs that are all due, a hundred at a time. The rate is from the first to the last job. Every job \
                 must run once. Done jobs are deleted, except by `apalis-redis`, which keeps them. It also moves all due jobs in one \
                 command, which Lua refuses for more than about 8,000. There is no ceiling, because a job that is claimed cannot be \
                 claimed again.",
                "jobs at a time",
            ],
            &[100],
            Rank::Rate,
            |queue, _, _, _| Box::pin(process(queue, 5_000)),
        ),
        (
            [
                "queue-late",
                "How late jobs are",
                "Jobs that are due within three seconds, while a worker has no other work: the median and the 99th \
                 percentile of their lateness. The brackets have the range of the latter. `apalis-redis` has whole \
                 seconds: its jobs are due at full seconds, and its worker polls every 50 ms.",
                "jobs at a time",
            ],
            &[100],
            Rank::Late,
            |queue, _, _, is_quick| Box::pin(late(queue, late_jobs(is_quick), 3_000)),
        ),
    ];
    let is_quick = run.is_quick;
    for ([name, title, text, unit], points, rank, measure) in tables {
        let mut contenders: Vec<_> = queues
            .iter()
            .map(|(who, queue)| Contender::new(who, move |point| measure(queue.clone(), point, time, is_quick)))
            .collect::<Vec<_>>();
        if let Some(node) = &node {
            contenders.push(Contender::new("bullmq-node", move |point| {
                Box::pin(async move {
                    match name {
                        "queue-push" => node.load("push", point, time, json!({})).await,
                        "queue-bulk" => {
                            let batches = node.load("bulk", point, time, json!({"batch": BATCH})).await;
                            Figures { per_s: batches.per_s * BATCH as f64, ..batches }
                        }
                        "queue-process" => node.figures(json!({"do": "process", "jobs": 5_000})).await,
                        _ => node.figures(json!({"do": "late", "jobs": late_jobs(is_quick), "span": 3_000})).await,
                    }
                })
            }));
        }
        // Empty the database before each turn and each ceiling, so that jobs left behind affect no other measurement.
        let flush = || server.query::<()>("FLUSHALL");
        let mut contenders: Vec<_> = contenders
            .into_iter()
            .map(|contender| {
                contender.prepared(move |_| {
                    flush();
                    Box::pin(ready(()))
                })
            })
            .collect();
        let before = |_| {
            ["queue-push", "queue-bulk"].contains(&name).then(|| {
                flush();
                ceiling.per_s()
            })
        };
        let rounds = if rank == Rank::Late { run.rounds.min(3) } else { run.rounds };
        let medians = take_turns(&mut contenders, points, rounds, before).await;
        run.report.add(Table {
            name,
            title,
            text,
            unit,
            points: points.to_vec(),
            headline: *points.last().unwrap_or(&1),
            rank,
            lines: contenders.into_iter().map(|contender| (contender.who, contender.apart)).collect(),
            medians,
            ..Table::default()
        });
    }
}
