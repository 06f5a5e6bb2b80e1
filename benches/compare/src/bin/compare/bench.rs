//! Contenders, and the order in which they are measured.

use std::any::Any;
use std::fs;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tokio::task::JoinSet;

/// The result of one load, or the median of several.
#[derive(Clone, Copy, Debug, Default)]
pub struct Figures {
    pub calls: u64,
    pub per_s: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    pub longest_us: f64,
    /// The fewest and the most calls of a task.
    pub fewest: u64,
    pub most: u64,
    /// The average number of busy processors.
    pub busy: Processors,
}

pub type Loaded<'a> = Pin<Box<dyn Future<Output = Figures> + Send + 'a>>;
pub type Prepared<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// A library that is measured.
pub struct Contender<'a> {
    pub who: &'static str,
    /// Why the contender does not compete: wrong answers, another guarantee, or because it is a baseline.
    pub apart: Option<String>,
    load: Box<dyn Fn(u32) -> Loaded<'a> + 'a>,
    prepare: Option<Box<dyn Fn(u32) -> Prepared<'a> + 'a>>,
}

impl<'a> Contender<'a> {
    pub fn new(who: &'static str, load: impl Fn(u32) -> Loaded<'a> + 'a) -> Self {
        Self { who, apart: None, load: Box::new(load), prepare: None }
    }

    /// Sets the work that precedes each load and is not measured.
    pub fn prepared(mut self, prepare: impl Fn(u32) -> Prepared<'a> + 'a) -> Self {
        self.prepare = Some(Box::new(prepare));
        self
    }

    pub fn apart(mut self, why: Option<String>) -> Self {
        self.apart = why;
        self
    }
}

/// A number of processors, or processor seconds: of the Redis servers, and of their clients. Clients are this process and others that it
/// has started.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Processors {
    pub clients: f64,
    pub servers: f64,
}

impl Processors {
    /// The processor seconds that the process with this id has used, and those of its children that it has waited for.
    pub fn seconds_of(process: u32) -> [f64; 2] {
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        let fields = stat.rsplit_once(") ").map(|(_, rest)| rest.split(' ').collect::<Vec<_>>()).unwrap_or_default();
        let seconds =
            |at: usize| fields.get(at).and_then(|ticks| ticks.parse::<f64>().ok()).unwrap_or_default() / 100.0;
        [seconds(11) + seconds(12), seconds(13) + seconds(14)]
    }

    /// The processor seconds used so far, with a resolution of 10 ms. Zero without `/proc`.
    pub fn used() -> Self {
        let mut used = Self::default();
        let own = std::process::id().to_string();
        for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else { continue };
            let Some((name, rest)) = stat.rsplit_once(") ") else { continue };
            let fields: Vec<&str> = rest.split(' ').collect();
            let seconds =
                |at: usize| fields.get(at).and_then(|ticks| ticks.parse::<f64>().ok()).unwrap_or_default() / 100.0;
            let is_own = entry.file_name() == *own;
            if is_own {
                // Includes the children that have ended.
                used.clients += (11..15).map(seconds).sum::<f64>();
            } else if fields.get(1) == Some(&&*own) {
                let seconds = seconds(11) + seconds(12);
                if name.ends_with("-server") { used.servers += seconds } else { used.clients += seconds }
            }
        }
        used
    }

    /// The average number of busy processors since `before`, which was `time` ago.
    pub fn since(self, before: Self, time: Duration) -> Self {
        let time = time.as_secs_f64();
        Self { clients: (self.clients - before.clients) / time, servers: (self.servers - before.servers) / time }
    }
}

/// The medians of one contender at one point.
#[derive(Clone, Copy, Debug)]
pub struct Median {
    pub figures: Figures,
    /// The minimum and the maximum of all rounds.
    pub per_s: [f64; 2],
    pub p99_us: [f64; 2],
    /// The ratio to the ceiling of the same round.
    pub ceiling_ratio: Option<f64>,
}

/// Measures all contenders in turn at every point for a number of rounds, and returns the medians by point and contender. A round at a
/// point begins with the ceiling, if there is one. The first contender changes from round to round, and every second round has the reverse
/// order, so no contender always follows the same one. An extra first round warms up. A contender that fails no longer competes.
pub async fn take_turns(
    contenders: &mut [Contender<'_>],
    points: &[u32],
    rounds: usize,
    ceiling: impl Fn(u32) -> Option<f64>,
) -> Vec<Vec<Median>> {
    let mut all = vec![vec![Vec::new(); contenders.len()]; points.len()];
    for round in 0..=rounds {
        for (&point, taken) in points.iter().zip(&mut all) {
            // The first round is not recorded.
            let ceiling = (round > 0).then(|| ceiling(point)).flatten();
            let count = contenders.len();
            for turn in 0..count {
                let at = whose_turn(round, turn, count);
                let contender = &contenders[at];
                let measured = async {
                    if let Some(prepare) = &contender.prepare {
                        prepare(point).await;
                    }
                    let (begun, before) = (Instant::now(), Processors::used());
                    let mut figures = (contender.load)(point).await;
                    // Some loads measure their processor time themselves.
                    if figures.busy == Processors::default() {
                        figures.busy = Processors::used().since(before, begun.elapsed());
                    }
                    figures
                };
                let figures = AssertUnwindSafe(measured).catch_unwind().await.unwrap_or_else(|panic| {
                    println!("FAILED who={} at={point}: {}", contenders[at].who, said(&*panic));
                    contenders[at].apart = Some(format!("failed at {point}, {}", said(&*panic)));
                    Figures::default()
                });
                if round > 0 {
                    taken[at].push((figures, ceiling.map(|ceiling| figures.per_s / ceiling)));
                }
            }
        }
    }
    let spread = |taken: &Vec<(Figures, Option<f64>)>, of: fn(&Figures) -> f64| {
        let values = || taken.iter().map(|(figures, _)| of(figures));
        [values().fold(f64::INFINITY, f64::min), values().fold(0.0, f64::max)]
    };
    let median_of = |taken: &Vec<(Figures, Option<f64>)>| Median {
        figures: Figures {
            calls: taken.iter().map(|(figures, _)| figures.calls).sum(),
            per_s: median(taken.iter().map(|(figures, _)| figures.per_s)),
            p50_us: median(taken.iter().map(|(figures, _)| figures.p50_us)),
            p99_us: median(taken.iter().map(|(figures, _)| figures.p99_us)),
            longest_us: taken.iter().map(|(figures, _)| figures.longest_us).fold(0.0, f64::max),
            fewest: median(taken.iter().map(|(figures, _)| figures.fewest as f64)) as u64,
            most: median(taken.iter().map(|(figures, _)| figures.most as f64)) as u64,
            busy: Processors {
                clients: median(taken.iter().map(|(figures, _)| figures.busy.clients)),
                servers: median(taken.iter().map(|(figures, _)| figures.busy.servers)),
            },
        },
        per_s: spread(taken, |figures| figures.per_s),
        p99_us: spread(taken, |figures| figures.p99_us),
        ceiling_ratio: taken.iter().map(|(_, ratio)| *ratio).collect::<Option<Vec<_>>>().map(median),
    };
    all.iter().map(|point| point.iter().map(median_of).collect()).collect()
}

/// The message of a panic.
fn said(panic: &(dyn Any + Send)) -> &str {
    panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

/// Runs `in_flight` concurrent calls for `time`. Each call gets the number of its task and the number of earlier calls of that task. The
/// time of each call is measured.
pub async fn load<F>(in_flight: u32, time: Duration, call: impl Fn(u32, u64) -> F + Clone + Send + 'static) -> Figures
where
    F: Future<Output = ()> + Send,
{
    let mut tasks = JoinSet::new();
    let begun = Instant::now();
    for task in 0..in_flight {
        let call = call.clone();
        tasks.spawn(async move {
            let mut took = Vec::new();
            while begun.elapsed() < time {
                let called = Instant::now();
                call(task, took.len() as u64).await;
                took.push(called.elapsed());
            }
            took
        });
    }
    let took = tasks.join_all().await;
    let elapsed = begun.elapsed();
    let calls = || took.iter().map(|took| took.len() as u64);
    let (fewest, most) = (calls().min().unwrap_or_default(), calls().max().unwrap_or_default());
    Figures { fewest, most, ..figures(elapsed, took.into_iter().flatten()) }
}

/// The figures of calls that took these times each, and `elapsed` in total.
pub fn figures(elapsed: Duration, took: impl Iterator<Item = Duration>) -> Figures {
    let mut took: Vec<Duration> = took.collect();
    if took.is_empty() {
        return Figures::default();
    }
    let mut us = |share: usize| {
        let rank = (took.len() * share / 100).min(took.len() - 1);
        took.select_nth_unstable(rank).1.as_secs_f64() * 1e6
    };
    let (p50_us, p99_us, longest_us) = (us(50), us(99), us(100));
    Figures {
        calls: took.len() as u64,
        per_s: took.len() as f64 / elapsed.as_secs_f64(),
        p50_us,
        p99_us,
        longest_us,
        ..Figures::default()
    }
}

pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// Maps the calls of all tasks to pseudo-random numbers.
pub fn scatter(task: u32, turn: u64) -> u64 {
    ((u64::from(task) << 40) + turn).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32
}

/// The contender for this turn of a round.
const fn whose_turn(round: usize, turn: usize, count: usize) -> usize {
    (round / 2 + if round % 2 == 0 { turn } else { count - 1 - turn }) % count
}
