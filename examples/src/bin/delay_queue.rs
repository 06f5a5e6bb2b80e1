//! Sends mails later: a producer, and two workers that share a queue.
//!
//! ```text
//! cargo run -p tollgate-examples --bin delay_queue   the queue is kept in memory
//! TOLLGATE_STORE=redis://127.0.0.1/                  in Redis: start it twice, and both work on one queue
//! ```
//!
//! No mail goes out early. A failed mail is retried, a mail with a bad address becomes a dead job, and a cancelled mail is not sent.
//! The program ends when no mail is left, and prints how many it has sent. Ctrl-C ends it earlier, after the running jobs.

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};
use std::{env, iter};

use tollgate::BoxError;
use tollgate::delay_queue::{Backoff, DelayQueue, DelayQueueWorker, Job, Outcome};
use tower::{ServiceBuilder, service_fn};

const MAILS: u32 = 40;

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("The queue cannot be used: {}.", chain(&*error));
            ExitCode::FAILURE
        }
    }
}

/// An error and its causes, in one line.
fn chain(error: &(dyn Error + 'static)) -> String {
    let mut levels: Vec<_> = iter::successors(Some(error), |&error| error.source()).map(ToString::to_string).collect();
    // Errors of other crates may repeat their cause in their own text.
    levels.dedup();
    levels.join(": ")
}

/// Counts of all mails.
#[derive(Default)]
struct Tally {
    sent: AtomicU32,
    early: AtomicU32,
    retried: AtomicU32,
}

async fn send(job: Job<String>, tally: Arc<Tally>) -> Result<(), BoxError> {
    if SystemTime::now() + Duration::from_millis(1) < job.due_at() {
        tally.early.fetch_add(1, Ordering::Relaxed);
    }
    if !job.contains('@') {
        return Err(Outcome::dead("that is no address").into());
    }
    // The first attempt of every tenth mail meets a busy server.
    if job.ends_with("0@example.org") && job.attempt() == 1 {
        tally.retried.fetch_add(1, Ordering::Relaxed);
        return Err("the mail server is busy".into());
    }
    tokio::time::sleep(Duration::from_millis(5)).await;
    tally.sent.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

async fn run() -> Result<(), BoxError> {
    let store = env::var("TOLLGATE_STORE").unwrap_or_else(|_| "memory:".into());
    let backend = tollgate::connect(&store).await?;
    let queue = DelayQueue::<String>::new(backend.clone(), "example:mail").deadline(Duration::from_secs(2));

    let tally = Arc::new(Tally::default());
    let workers: Vec<_> = (0..2)
        .map(|_| {
            let tally = Arc::clone(&tally);
            let service = ServiceBuilder::new()
                .concurrency_limit(8)
                .timeout(Duration::from_secs(10))
                .service(service_fn(move |job| send(job, Arc::clone(&tally))));
            let worker = DelayQueueWorker::new(queue.clone(), service)
                .lease(Duration::from_secs(5))
                .backoff(Backoff::fixed(Duration::from_millis(200)));
            tokio::spawn(worker.run())
        })
        .collect();

    for mail in 0..MAILS {
        let delay = Duration::from_millis(u64::from(mail) * 20);
        queue.push(format!("{mail}@example.org")).delay(delay).await?;
    }
    queue.push("nobody".to_owned()).id("bad").await?;
    queue.push("unwanted@example.org".to_owned()).id("unwanted").delay(Duration::from_secs(60)).await?;
    println!("cancelled: {:?}", queue.cancel("unwanted").await?);

    // The queue is empty. Another process may have sent some of our mails.
    let all_done = async {
        while !queue.counts().await.is_ok_and(|counts| counts.waiting + counts.running == 0) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::select! {
        () = all_done => {}
        _ = tokio::signal::ctrl_c() => println!("stopping"),
    }
    // Ends the workers after their running jobs.
    println!("{}", backend.shutdown(Duration::from_secs(25)).await);
    for worker in workers {
        worker.await??;
    }

    let [sent, early, retried] = [&tally.sent, &tally.early, &tally.retried].map(|count| count.load(Ordering::Relaxed));
    println!("sent: {sent}, tried again: {retried}, early: {early}");
    let dead = queue.dead(0, 10).await?;
    for job in &dead {
        println!("dead: {}, {}", job.id, job.failure.as_ref().map_or("", |failure| &failure.error));
    }
    queue.forget(dead.len(), |_| true).await?;
    Ok(())
}
