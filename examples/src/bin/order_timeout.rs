//! Cancels orders that are not paid in time. A payment cancels the job that would cancel the order.
//!
//! ```text
//! cargo run -p tollgate-examples --bin order_timeout   the queue is kept in memory
//! TOLLGATE_STORE=redis://127.0.0.1/                    in Redis
//! ```
//!
//! Each order is either paid or cancelled, also if it is paid in the last moment. A payment removes the job, so only unpaid orders reach
//! the worker.

use std::collections::HashMap;
use std::error::Error;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use std::{env, iter};

use tokio::time::sleep;
use tollgate::BoxError;
use tollgate::delay_queue::{Cancelled, DelayQueue, DelayQueueWorker, Job};
use tower::service_fn;

const ORDERS: u32 = 60;
const TIME_TO_PAY: Duration = Duration::from_millis(300);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    Open,
    Paid,
    Cancelled,
}

/// Stands for a database that changes an order only while it is open.
#[derive(Clone, Default)]
struct Orders(Arc<Mutex<HashMap<u32, Order>>>);

impl Orders {
    fn insert(&self, id: u32) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(id, Order::Open);
    }

    /// `UPDATE orders SET state = $1 WHERE id = $2 AND state = 'open'`
    fn close(&self, id: u32, state: Order) -> bool {
        let mut orders = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let order = orders.get_mut(&id).filter(|order| **order == Order::Open);
        order.map(|order| *order = state).is_some()
    }

    fn count(&self, state: Order) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).values().filter(|order| **order == state).count()
    }
}

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

async fn run() -> Result<(), BoxError> {
    let store = env::var("TOLLGATE_STORE").unwrap_or_else(|_| "memory:".into());
    let queue =
        DelayQueue::<u32>::new(tollgate::connect(&store).await?, "example:unpaid").deadline(Duration::from_secs(2));
    let orders = Orders::default();

    let (taken_away, came) = (AtomicU32::new(0), Arc::new(AtomicU32::new(0)));

    let (database, counted) = (orders.clone(), Arc::clone(&came));
    let cancel = service_fn(move |job: Job<u32>| {
        counted.fetch_add(1, Ordering::Relaxed);
        // Jobs run at least once: a second run must change nothing.
        database.close(*job, Order::Cancelled);
        std::future::ready(Ok::<_, BoxError>(()))
    });
    let worker = DelayQueueWorker::new(queue.clone(), cancel);

    let shop = async {
        for order in 0..ORDERS {
            orders.insert(order);
            queue.push(order).id(format!("order:{order}")).delay(TIME_TO_PAY).await?;
            sleep(Duration::from_millis(5)).await;
        }
        Ok::<_, BoxError>(())
    };
    let customers = async {
        // Every second order is paid, some of them just before or just after the deadline.
        for order in (0..ORDERS).step_by(2) {
            sleep(Duration::from_millis(10 + u64::from(order) / 10)).await;
            if orders.close(order, Order::Paid) {
                let cancelled = queue.cancel(format!("order:{order}")).await?;
                // In the last moment the job may run already, or not be pushed yet.
                taken_away.fetch_add(u32::from(cancelled == Cancelled::Removed), Ordering::Relaxed);
            }
        }
        Ok::<_, BoxError>(())
    };
    let all = async {
        tokio::try_join!(shop, customers)?;
        sleep(TIME_TO_PAY * 2).await;
        Ok::<_, BoxError>(())
    };
    let (end, ended) = tokio::sync::oneshot::channel();
    let (worked, done) = tokio::join!(
        worker.run_until(async {
            let _ = ended.await;
        }),
        async {
            let done = all.await;
            let _ = end.send(());
            done
        }
    );
    worked?;
    done?;

    let [open, paid, cancelled] = [Order::Open, Order::Paid, Order::Cancelled].map(|state| orders.count(state));
    println!("orders: {ORDERS}, paid: {paid}, cancelled: {cancelled}, open: {open}");
    let [taken_away, came] = [&taken_away, &*came].map(|count| count.load(Ordering::Relaxed));
    println!("jobs taken away by paying: {taken_away}, jobs that came to the worker: {came}");
    println!("jobs left: {}", queue.counts().await?.waiting);
    Ok(())
}
