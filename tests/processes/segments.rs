//! A stock of 1,000 in 20 segments of 50, sold by eight processes through locks on one Redis: exactly 1,000 are sold.
//!
//! The program starts itself again as the sellers. A seller reads what is left of a segment, waits, and writes the new value under the lock
//! of that segment. Without the lock, these three steps would sell too much.

use crate::support;

use std::env;
use std::process::{Command, Stdio};
use std::time::Duration;

use redis::AsyncCommands;
use support::server::RedisServer;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tollgate::lock::Segmented;
use tollgate::{Locks, RedisBackend};

const SELLERS: usize = 8;
const TASKS: u32 = 4;
const SEGMENTS: u16 = 20;
const STOCK: u32 = 50;
/// Marks a seller process. Contains the URL of its server.
const SELLER: &str = "TOLLGATE_TEST_SELLER";

pub(crate) const TESTS: &[(&str, fn())] =
    &[("eight_processes_sell_exactly_the_stock", eight_processes_sell_exactly_the_stock)];

/// Runs the seller if this process is one, and returns whether it is.
pub(crate) fn is_worker() -> bool {
    let Ok(url) = env::var(SELLER) else { return false };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    println!("{}", runtime.block_on(sell(&url)));
    true
}

/// Sells until nothing is left in any segment. Returns how much this process has sold.
async fn sell(url: &str) -> u32 {
    let backend = RedisBackend::connect(url).await.unwrap();
    let locks = Locks::new(backend, "default").wait(Duration::from_secs(60)).deadline(Duration::from_secs(5));
    let client = redis::Client::open(url).unwrap();
    let connection = client.get_multiplexed_async_connection().await.unwrap();
    let mut tasks = JoinSet::new();
    for _ in 0..TASKS {
        let (stock, mut connection) = (Segmented::new(&locks, "sku:1", SEGMENTS), connection.clone());
        tasks.spawn(async move {
            let mut sold = 0;
            let mut is_left = [true; SEGMENTS as usize];
            while is_left.contains(&true) {
                let segment = stock.any().among(|index| is_left[usize::from(index)]).await.unwrap();
                let key = format!("stock:{}", segment.index());
                let left: u32 = connection.get(&key).await.unwrap();
                sleep(Duration::from_millis(1)).await;
                if left == 0 {
                    is_left[usize::from(segment.index())] = false;
                } else {
                    let _: () = connection.set(&key, left - 1).await.unwrap();
                    sold += 1;
                }
                segment.release().await.unwrap();
            }
            sold
        });
    }
    tasks.join_all().await.into_iter().sum()
}

fn eight_processes_sell_exactly_the_stock() {
    let server = RedisServer::start();
    let mut connection = server.connection();
    for segment in 0..SEGMENTS {
        let _: () = redis::cmd("SET").arg(format!("stock:{segment}")).arg(STOCK).query(&mut connection).unwrap();
    }
    let sellers: Vec<_> = (0..SELLERS)
        .map(|_| {
            let mut seller = Command::new(env::current_exe().unwrap());
            seller.env(SELLER, server.url()).stdout(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    let sold: Vec<u32> = sellers
        .into_iter()
        .map(|seller| {
            let output = seller.wait_with_output().unwrap();
            assert!(output.status.success(), "a seller failed");
            String::from_utf8_lossy(&output.stdout).trim().parse().unwrap()
        })
        .collect();
    println!("sold by each: {sold:?}");
    assert_eq!(sold.iter().sum::<u32>(), u32::from(SEGMENTS) * STOCK);
    assert!(sold.iter().filter(|sold| **sold > 0).count() > 1, "only one process has sold anything");
}
