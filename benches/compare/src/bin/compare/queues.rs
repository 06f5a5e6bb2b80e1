//! Jobs on one Redis: pushed one by one and in bulk, done by a worker, and how late they are.

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
        let backend = RedisBackend::connect(url).await.expect("Redis lets us in");
        Self::Tollgate(
            DelayQueue::new(backend, name.to_owned()).deadline(Duration::from_secs(10)).max_jobs(100_000_000),
        )
    }

    pub async fn both(url: &str) -> [(&'static str, Self); 2] {
        [("tollgate", Self::tollgate(url, "jobs").await), ("apalis-redis", Self::apalis(url, "apalis").await)]
    }

    async fn apalis(url: &str, name: &str) -> Self {
        let connection = apalis_redis::connect(url).await.expect("Redis lets us in");
        Self::Apalis(RedisStorage::new(connection).with_config(Config::default().queue(name).batch_size(CONCURRENCY)))
    }

    /// Keeps one job that is due in a minute.
    pub async fn push(&mut self, payload: String) {
        match self {
            Self::Tollgate(queue) => {
                assert!(queue.push(payload).delay(MINUTE).await.expect("the job is kept").is_new())
            }
            Self::Apalis(storage) => {
                storage.push_task(TaskBuilder::new(payload).run_after(MINUTE).build()).await.expect("the job is kept");
            }
        }
    }

    /// Keeps so many jobs with their numbers, due after a while or at once.
    pub async fn push_all(&mut self, numbers: std::ops::Range<usize>, delay: Duration) {
        match self {
            Self::Tollgate(queue) => {
                let pushed = queue.push_all(numbers.map(|number| queue.push(number.to_string()).delay(delay))).await;
                assert!(pushed.iter().all(|pushed| pushed.as_ref().is_ok_and(Pushed::is_new)));
            }
            Self::Apalis(storage) => {
                let tasks = numbers.map(|number| TaskBuilder::new(number.to_string()).run_after(delay).build());
                let mut tasks = futures_util::stream::iter(tasks);
                storage.push_all(&mut tasks).await.expect("the jobs are kept");
            }
        }
    }

    /// Keeps a job that is due at an instant, and answers for when it was taken: some know whole seconds only.
    async fn push_at(&mut self, number: usize, due: SystemTime) -> SystemTime {
        match self {
            Self::Tollgate(queue) => {
                assert!(queue.push(number.to_string()).at(due).await.expect("the job is kept").is_new());
                due
            }
            Self::Apalis(storage) => {
                let second = due.duration_since(UNIX_EPOCH).expect("it is later than 1970").as_secs() + 1;
                let task = TaskBuilder::new(number.to_string()).run_at_timestamp(second).build();
                storage.push_task(task).await.expect("the job is kept");
                UNIX_EPOCH + Duration::from_secs(second)
            }
        }
    }

    /// Runs a worker, a hundred jobs at a time, until so many have run.
    pub async fn work(&self, tally: Arc<Tally>) {
        match self {
            Self::Tollgate(queue) => {
                let counted = Arc::clone(&tally);
                let service = service_fn(move |job: Job<String>| {
                    counted.ran(&job);
                    std::future::ready(Ok::<_, BoxError>(()))
                });
                let worker = DelayQueueWorker::new(queue.clone(), service).concurrency(CONCURRENCY);
                // In a task of its own, as in a program: what `block_on` runs is apart from all other tasks.
                let running = tokio::spawn(async move { worker.run_until(tally.all_ran.notified()).await });
                running.await.expect("the worker does not panic").expect("the worker works");
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
                running.await.expect("the worker does not panic").expect("the worker works");
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
        let mut ran = self.ran.lock().expect("nobody panics");
        ran.push((number, SystemTime::now(), Instant::now()));
        if ran.len() == self.runs.len() {
            self.all_ran.notify_one();
        }
    }

    /// Every job has to have run, and none twice.
    pub fn assert_once(&self) {
        assert!(self.runs.iter().all(|runs| runs.load(Ordering::Relaxed) == 1), "every job runs once");
    }

    /// Jobs a second from the first to the last.
    fn per_s(&self) -> f64 {
        self.assert_once();
        let ran = self.ran.lock().expect("nobody panics");
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

/// A call is a batch, and the rate one of jobs.
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

/// How late jobs are that are due at any time within `span`, while the worker has nothing else to do.
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
    working.await.expect("the worker works");
    tally.assert_once();
    let ran = tally.ran.lock().expect("nobody panics");
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
    let Queue::Tollgate(queue) = &queues[0].1 else { unreachable!("it is the first") };
    let one = async |id: &str| {
        queue.push("payload-7".to_owned()).delay(MINUTE).id(id).await.expect("the job is kept");
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
                "Jobs with a payload of about ten bytes, due in a minute, by the number of tasks that push. The ceiling is what `redis-benchmark -P 64 -c 50` gets out \
             of the script that keeps one job, on an empty database, as everybody begins on one.",
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
                "A thousand jobs with each call, by the number of tasks that push; the time is that of a call. The ceiling is that of jobs pushed one by one.",
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
                "One worker, a hundred jobs at a time, with 5,000 waiting that are all due: from the first to the last job. Every job has to run once. What is \
             done is forgotten, but for `apalis-redis`, which keeps it. There is no ceiling: what a claim takes out cannot be claimed again. (It moves all jobs that are due in one command, which Lua refuses for more than about 8,000.)",
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
                "Jobs that are due at any time within three seconds, while a worker has nothing else to do: median and 99th percentile of how much later than that they run. \
             `apalis-redis` knows whole seconds: its jobs are due at those, and its worker is told to look every 50 ms.",
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
        // What one leaves behind is neither work for the next nor in its way, and so with the ceiling.
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
