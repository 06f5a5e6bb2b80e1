//! One fault of locks, and the checks of its result.

use std::fmt;
use std::sync::mpsc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::deployment::Deployment;
use super::lock_catalogue::{LockFault, Loses, RECOVERY, WORKERS};
use super::lock_worker::{HoldRecord, KEYS, Line, LockWorker, TTL};
use super::support::processor::ProcessorMeter;
use super::support::server::{RedisServer, query};
use super::support::windows::now_us;

/// The load before a fault, and after all locks are granted again.
const BEFORE: Duration = Duration::from_millis(500);
const AFTER: Duration = Duration::from_millis(500);
/// If any process waited this long for a processor around the time at which a lease was lost, the loss may have that reason. A lease is
/// renewed after a third of its duration, and some of the waiting is not measured.
const STARVED: Duration = Duration::from_millis(100);
/// The minimum number of stays under each lock before a fault, and after the last lease that the store lost has ended.
const ENOUGH: usize = WORKERS * 5;
/// The load after the last lease that the store lost has ended.
const AFTERWARDS: Duration = Duration::from_secs(2);
/// How long workers may take to release everything, and servers to remove it.
const SETTLED: Duration = Duration::from_secs(5);

/// The result of a run of a fault.
#[derive(Debug)]
pub struct LockRow {
    fault: &'static LockFault,
    stays: usize,
    lost: usize,
    refused: u64,
    /// Overlapping stays and fences out of order that locks lost by the store explain.
    explained: usize,
    pub unexplained: usize,
    pub recovery: Duration,
    pub left: u64,
    complaints: Vec<String>,
}

impl LockRow {
    pub const HEAD: &str = "\
| fault | deployment | locks | stays | leases lost | refused by their fence | overlaps explained | unexplained | recovery ms | left over | |
| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |";

    const fn new(fault: &'static LockFault) -> Self {
        Self {
            fault,
            stays: 0,
            lost: 0,
            refused: 0,
            explained: 0,
            unexplained: 0,
            recovery: Duration::ZERO,
            left: 0,
            complaints: Vec::new(),
        }
    }

    pub fn failed(fault: &'static LockFault, complaint: String) -> Self {
        let mut row = Self::new(fault);
        row.complain(complaint);
        row
    }

    pub fn complain(&mut self, complaint: String) {
        self.complaints.push(complaint);
    }

    pub fn complaints(&self) -> &[String] {
        &self.complaints
    }

    fn must(&mut self, is_so: bool, complaint: impl FnOnce() -> String) {
        if !is_so {
            self.complaints.push(complaint());
        }
    }
}

impl fmt::Display for LockRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { fault, stays, lost, refused, explained, unexplained, left, .. } = self;
        let (name, on, recovery) = (fault.name, fault.on.name(), self.recovery.as_millis());
        let mode = fault.mode.name();
        let verdict = if self.complaints.is_empty() { "ok" } else { "FAILED" };
        write!(
            f,
            "| {name} | {on} | {mode} | {stays} | {lost} | {refused} | {explained} | {unexplained} | {recovery} | {left} "
        )?;
        write!(f, "| {verdict} |")
    }
}

/// Runs a fault once, on its own deployment.
pub fn run(fault: &'static LockFault) -> LockRow {
    let mut deployment = Deployment::start(fault.on);
    // The data that the locks protect is on a server without faults.
    let witness = RedisServer::start();
    let (sender, lines) = mpsc::channel();
    let (url, witness_url) = (deployment.url(), witness.url());
    let worker = |_| LockWorker::start(fault.mode, &url, &witness_url, sender.clone());
    let mut workers: Vec<LockWorker> = (0..WORKERS).map(worker).collect();
    drop(sender);
    let meter = ProcessorMeter::start();

    let mut stays = Vec::new();
    // Wait until all locks are in use.
    let start = Instant::now();
    let is_at_work = |stays: &[HoldRecord]| (0..KEYS.len()).all(|key| since(stays, key, 0).count() >= ENOUGH);
    while !is_at_work(&stays) && start.elapsed() < SETTLED {
        stays.extend(lines.recv_timeout(SETTLED).ok().map(stay));
    }
    sleep(BEFORE);
    let (zero, zero_us) = (Instant::now(), now_us());
    if fault.loses == Loses::Nothing {
        // One worker depends on renewals during the fault.
        workers[WORKERS - 1].stay();
    }
    let strike = (fault.strike)(&mut deployment, &mut workers);
    let us = |instant: Instant| zero_us + instant.saturating_duration_since(zero).as_micros() as u64;
    let back = us(strike.back);
    let is_well = |stays: &[HoldRecord]| (0..KEYS.len()).all(|key| since(stays, key, back).next().is_some());
    while !is_well(&stays) && strike.back.elapsed() < RECOVERY + AFTER {
        stays.extend(lines.recv_timeout(Duration::from_millis(50)).ok().map(stay));
    }
    let well = now_us();
    sleep(AFTER);
    if let Some(overlap) = fault.overlap() {
        let settled = strike.back + overlap;
        sleep(settled.saturating_duration_since(Instant::now()));
        // One worker depends on renewals again.
        workers[WORKERS - 1].stay();
        let is_enough = |stays: &[HoldRecord]| {
            (0..KEYS.len()).all(|key| since(stays, key, us(settled)).count() >= ENOUGH)
                && settled.elapsed() > AFTERWARDS
        };
        while !is_enough(&stays) && settled.elapsed() < AFTERWARDS + SETTLED {
            stays.extend(lines.recv_timeout(Duration::from_millis(50)).ok().map(stay));
        }
    }

    let mut row = LockRow::new(fault);
    workers.iter_mut().for_each(|worker| worker.process.stop());
    let ends_well = |worker: &mut LockWorker| worker.process.has_ended_well(SETTLED);
    let bad = workers.iter_mut().map(ends_well).filter(|is_good| !is_good).count();
    row.must(bad == 0, || format!("{bad} workers did not release everything and end"));
    let (mut tasks_left, mut sockets_left) = (0, 0);
    let mut ends = 0;
    for line in lines.try_iter() {
        match line {
            Line::HoldRecord(_) => stays.push(stay(line)),
            Line::End { tasks, sockets } => {
                tasks_left += tasks;
                sockets_left += sockets;
                ends += 1;
            }
        }
    }
    let killed = workers.iter().filter(|worker| worker.process.is_killed()).count();
    row.must(ends + killed == WORKERS, || {
        format!("{ends} of {} workers reported that they are done", WORKERS - killed)
    });
    row.must(tasks_left == 0, || format!("{tasks_left} tasks outlive the backend"));
    row.must(sockets_left == 0, || format!("{sockets_left} sockets outlive the backend"));

    judge(&mut row, &stays, us(strike.start), back, well);
    if fault.mode.permits() == 1 {
        changes(&mut row, &witness);
    }
    let waits = meter.stop();
    let at = |us: u64| {
        let (after, before) = (us.saturating_sub(zero_us), zero_us.saturating_sub(us));
        zero + Duration::from_micros(after) - Duration::from_micros(before)
    };
    // From the last renewal, if there was one, to the latest time for the next one.
    let around = |stay: &HoldRecord| (at(stay.until.max(stay.from)) - TTL, at(stay.until.max(stay.from)) + TTL);
    losses(&mut row, &stays, |stay| waits.between(around(stay).0, around(stay).1) > STARVED);
    let left = leftovers(&deployment, killed);
    row.must(left.is_empty(), || format!("left over: {}", left.join(", ")));
    row.left = tasks_left + sockets_left + left.len() as u64;
    row
}

/// Returns the stays under a lock that began at `from` or later.
fn since(stays: &[HoldRecord], key: usize, from: u64) -> impl Iterator<Item = &HoldRecord> {
    stays.iter().filter(move |stay| stay.key == key && stay.from >= from && stay.until > 0)
}

fn stay(line: Line) -> HoldRecord {
    match line {
        Line::HoldRecord(stay) => stay,
        Line::End { .. } => panic!("a worker ended before it was stopped"),
    }
}

/// Checks the stays. The instants of the fault are on the clock of the workers.
fn judge(row: &mut LockRow, stays: &[HoldRecord], start: u64, back: u64, well: u64) {
    row.stays = stays.len();
    // The leases that the store may have lost end within this time.
    let forgotten = row.fault.overlap().map(|overlap| start..=back + overlap.as_micros() as u64);
    for (key, name) in KEYS.iter().enumerate() {
        let mut stays: Vec<&HoldRecord> = stays.iter().filter(|stay| stay.key == key && stay.until > 0).collect();
        stays.sort_unstable_by_key(|stay| stay.fence);
        for pair in stays.windows(2) {
            row.must(pair[0].fence < pair[1].fence, || {
                format!("the fence {} of {name} was issued twice", pair[0].fence)
            });
        }
        for Overlap { at, complaint } in overlaps(&stays, row.fault.mode.permits()) {
            // A server that had lost the lock may have granted it again. A client may have handed over a lease while another server had
            // granted the lock to a different process. In both cases, the later of the two stays began in this time.
            let is_explained = forgotten.as_ref().is_some_and(|time| time.contains(&at));
            *if is_explained { &mut row.explained } else { &mut row.unexplained } += 1;
            row.must(is_explained, || complaint);
        }
        let next = stays.iter().map(|stay| stay.from).filter(|from| *from >= back).min();
        let recovery = next.map_or(Duration::MAX, |next| Duration::from_micros(next - back));
        row.must(recovery <= RECOVERY, || format!("{name} was not held for {recovery:?} after the store was back"));
        row.recovery = row.recovery.max(recovery);
        row.must(stays.iter().any(|stay| stay.until > well), || format!("{name} was not held in the end"));
        if let Some(forgotten) = &forgotten {
            let judged = stays.iter().filter(|stay| stay.from > *forgotten.end()).count();
            row.must(judged >= ENOUGH, || format!("only {judged} stays under {name} after the last lost lease ended"));
        }
        let before = stays.iter().filter(|stay| stay.from < start).count();
        row.must(before >= ENOUGH, || format!("only {before} stays under {name} before the fault"));
    }
}

/// A stay that exceeds the permits of a lock, or is out of order.
struct Overlap {
    /// When the later stay began.
    at: u64,
    complaint: String,
}

/// Returns the overlaps of stays under one lock, which are sorted by fence.
fn overlaps(stays: &[&HoldRecord], permits: usize) -> Vec<Overlap> {
    let mut overlaps = Vec::new();
    // The latest start of a stay, and the latest instant at which it was known to be held: for readers, and for others.
    let (mut readers, mut others) = ((0, 0), (0, 0));
    for stay in stays {
        if permits > 1 {
            // Of two concurrent holders, the holder with the larger fence may have received its reply first.
            let is_there = |other: &&&HoldRecord| other.from <= stay.from && other.until > stay.from;
            let there = stays.iter().filter(is_there).count() - usize::from(stay.until > stay.from);
            if there >= permits {
                overlaps.push(Overlap { at: stay.from, complaint: format!("{stay:?} began beside {there} others") });
            }
            continue;
        }
        let (last_from, last_until) =
            if stay.is_shared { others } else { (readers.0.max(others.0), readers.1.max(others.1)) };
        // A stay with a larger fence must begin later, and when no earlier holder believes to hold the lock.
        if stay.from <= last_from || stay.from < last_until {
            let (order, overlap) = (last_from.saturating_sub(stay.from), last_until.saturating_sub(stay.from));
            let complaint =
                format!("{stay:?} began {order} us before a smaller fence, {overlap} us before another holder ended");
            overlaps.push(Overlap { at: stay.from.max(last_from), complaint });
        }
        let last = if stay.is_shared { &mut readers } else { &mut others };
        *last = (last.0.max(stay.from), last.1.max(stay.until));
    }
    overlaps
}

/// Checks that as many leases were lost as expected. Losses of processes that waited for a processor prove nothing.
fn losses(row: &mut LockRow, stays: &[HoldRecord], is_starved: impl Fn(&HoldRecord) -> bool) {
    let lost: Vec<&HoldRecord> = stays.iter().filter(|stay| stay.is_lost).collect();
    row.lost = lost.len();
    let (all, refused) = (row.lost, row.refused);
    match row.fault.loses {
        Loses::Nothing => {
            let longest = stays.iter().map(|stay| stay.until.saturating_sub(stay.from)).max().unwrap_or_default();
            row.must(all > 0 || longest > TTL.as_micros() as u64, || {
                format!("no stay was longer than a lease; the longest took {longest} us")
            });
            let first = lost.into_iter().find(|stay| !is_starved(stay));
            row.must(first.is_none(), || format!("{all} leases were lost, first {first:?}"));
        }
        Loses::Perhaps => {}
        Loses::AtLeast(least) => {
            // A lock that was granted too late was never held.
            let held = lost.iter().filter(|stay| stay.until > 0).count();
            row.must(held >= least, || format!("only {held} leases were lost where at least {least} have to be"));
            row.must(refused > 0 || row.fault.mode.permits() > 1, || "no late write was refused".to_owned());
        }
    }
}

/// Checks that no change under a lock was lost, in spite of late writers.
fn changes(row: &mut LockRow, witness: &RedisServer) {
    let mut connection = witness.connection();
    for key in KEYS {
        let [value, writes, refused] = ["value", "writes", "refused"].map(|field| {
            let number: Option<u64> =
                query(&mut connection, &format!("HGET {key} {field}")).expect("the field is a number");
            number.unwrap_or_default()
        });
        row.must(value == writes && writes > 0, || format!("{value} of {writes} changes under {key} are stored"));
        row.refused += refused;
    }
}

/// Returns the leases and queue positions that are left after all processes have ended. Connections ended with their processes, which
/// report how many were left, including those for notifications.
fn leftovers(deployment: &Deployment, killed: usize) -> Vec<String> {
    let start = Instant::now();
    loop {
        let (mut left, mut positions) = (Vec::new(), Vec::new());
        for server in deployment.primaries() {
            let mut connection = server.connection();
            let keys: Vec<String> = query(&mut connection, "KEYS *").expect("keys are listed");
            for key in keys {
                if key.ends_with(":queue") || key.ends_with(":positions") {
                    positions.push(format!("a waiter in {key}"));
                    continue;
                }
                let value: Option<Vec<u8>> =
                    redis::cmd("GET").arg(&key).query(&mut connection).expect("the value is read");
                let ttl: i64 = redis::cmd("PTTL").arg(&key).query(&mut connection).expect("a key has a time to live");
                // The leases have 34 bytes each and follow 8 other bytes. A released lease may end at 0.
                let is_held = |value: Vec<u8>| {
                    value.get(8..).unwrap_or_default().chunks(34).any(|lease| !lease.starts_with(&[0; 7]))
                };
                if value.is_some_and(is_held) {
                    left.push(format!("a holder of {key}"));
                }
                if ttl == -1 {
                    left.push(format!("{key} without an expiry"));
                }
            }
        }
        // A cancelled waiter leaves the queue. Only the position of a killed process expires by itself.
        let is_in_queue = !positions.is_empty() && killed == 0;
        left.append(&mut positions);
        // The leases of killed processes expire by themselves. The next holder removes what is stored of them.
        if left.is_empty() || is_in_queue || start.elapsed() > SETTLED + TTL {
            return left;
        }
        sleep(Duration::from_millis(50));
    }
}
