//! One fault on one deployment, and the checks of its result.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tollgate::RateLimitFallback;

use super::catalogue::{Fails, Fault, Loses, Strike, missing};
use super::deployment::{CONNECTIONS, Deployment};
use super::load::{Answer, CALLERS, Call, Callers, QUOTA, Seen};
use super::support::processor::{ProcessorMeter, Waits};

/// The deadline of a decision, and what a busy machine may add to it.
const LIMIT: Duration = Duration::from_millis(100 + 50);
/// The load before a fault.
const BEFORE: Duration = Duration::from_millis(500);
/// The load after the recovery, when no call may fail.
const AFTER: Duration = Duration::from_millis(500);
/// A call that waited this long for a processor may fail for that reason, so its failure is ignored.
const STARVED: Duration = Duration::from_millis(30);
/// How long the circuit stays open after failed calls: their deadline, the time until the next probe, and a margin.
const CIRCUIT: Duration = Duration::from_millis(100 + 100 + 50);
/// How long connections may take to close.
const SETTLED: Duration = Duration::from_secs(3);

/// The results of one or several runs of a fault.
#[derive(Debug)]
pub struct Row {
    fault: &'static Fault,
    calls: usize,
    admitted: usize,
    failed: usize,
    late: usize,
    slowest: Duration,
    pub recovery: Duration,
    /// Units that were admitted beyond the quota.
    excess: u64,
    /// Units that were admitted and later lost by the store.
    lost: u64,
    /// Units beyond the quota that lost counts do not explain.
    pub over_admitted: u64,
    /// Connections and tasks, before the fault and after it.
    connections: (usize, usize),
    tasks: (usize, usize),
    pub leaked: u64,
    pub longest_wait: Duration,
    complaints: Vec<String>,
}

impl Row {
    pub const HEAD: &str = "\
| fault | deployment | calls | admitted | failed | late | slowest ms | waited ms | recovery ms | lost | excess | connections | tasks | leaked | |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- | ---: | --- |";

    pub fn new(fault: &'static Fault) -> Self {
        Self {
            fault,
            calls: 0,
            admitted: 0,
            failed: 0,
            late: 0,
            slowest: Duration::ZERO,
            recovery: Duration::ZERO,
            excess: 0,
            lost: 0,
            over_admitted: 0,
            connections: (0, 0),
            tasks: (0, 0),
            leaked: 0,
            longest_wait: Duration::ZERO,
            complaints: Vec::new(),
        }
    }

    pub fn add(&mut self, round: Self) {
        self.calls += round.calls;
        self.admitted += round.admitted;
        self.failed += round.failed;
        self.late += round.late;
        self.slowest = self.slowest.max(round.slowest);
        self.recovery = self.recovery.max(round.recovery);
        self.excess += round.excess;
        self.lost += round.lost;
        self.over_admitted += round.over_admitted;
        (self.connections, self.tasks) = (round.connections, round.tasks);
        self.leaked += round.leaked;
        self.longest_wait = self.longest_wait.max(round.longest_wait);
        self.complaints.extend(round.complaints);
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

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { fault, calls, admitted, failed, late, excess, lost, leaked, .. } = self;
        let (slowest, recovery) = (self.slowest.as_millis(), self.recovery.as_millis());
        let verdict = if self.complaints.is_empty() { "ok" } else { "FAILED" };
        write!(f, "| {} | {} | {calls} | {admitted} | {failed} | {late} ", fault.name, fault.on.name())?;
        let ((connections, still), (tasks, alive)) = (self.connections, self.tasks);
        let waited = self.longest_wait.as_millis();
        write!(
            f,
            "| {slowest} | {waited} | {recovery} | {lost} | {excess} | {connections} to {still} | {tasks} to {alive} "
        )?;
        write!(f, "| {leaked} | {verdict} |")
    }
}

/// Runs a fault once, on its own deployment.
pub fn run(fault: &'static Fault) -> Row {
    let mut deployment = Deployment::start(fault.on);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime can be made");
    let sockets = open_sockets();
    let backend = runtime.block_on(tollgate::connect(deployment.url())).expect("the deployment accepts the connection");
    let callers = Callers::new(backend);

    let meter = ProcessorMeter::start();
    // Connections that are opened on first use are open after this load.
    let mut calls = for_a_while(&runtime, &callers, BEFORE);
    let tasks = runtime.metrics().num_alive_tasks();
    let clients = deployment.clients();

    let load = runtime.block_on(async { callers.start() });
    sleep(BEFORE);
    let strike = (fault.strike)(&mut deployment, &callers.admitted);
    let well = strike.back + fault.recovery;
    sleep((well + AFTER).saturating_duration_since(Instant::now()));
    calls.extend(runtime.block_on(load.stop()));

    let waits = meter.stop();
    let admitted = callers.admitted.lock().expect("the mutex is not poisoned").clone();
    let mut row = judge(fault, &strike, &calls, &waits, &admitted, &deployment.stored());
    // Some connections are opened on first use. Each has a task, and no other tasks may be added.
    let most = clients.max(deployment.most_clients());
    let more_clients = more_than(most, || deployment.clients());
    let still = deployment.clients();
    let more_tasks = more_than((tasks + still).saturating_sub(clients), || runtime.metrics().num_alive_tasks());
    (row.connections, row.tasks) = ((clients, still), (tasks, runtime.metrics().num_alive_tasks()));
    row.must(more_clients == 0, || format!("{more_clients} connections more than the {most} allowed"));
    row.must(more_tasks == 0, || format!("{more_tasks} tasks more than before"));

    // When the last clone of the backend is dropped, all tasks and sockets end.
    drop(callers);
    let tasks_left = more_than(0, || runtime.metrics().num_alive_tasks());
    let sockets_left = more_than(sockets, open_sockets);
    row.must(tasks_left == 0, || format!("{tasks_left} tasks outlive the backend"));
    row.must(sockets_left == 0, || format!("{sockets_left} sockets outlive the backend"));
    row.leaked = (more_tasks + more_clients + tasks_left + sockets_left) as u64;
    row
}

fn for_a_while(runtime: &Runtime, callers: &Callers, time: Duration) -> Vec<Call> {
    let load = runtime.block_on(async { callers.start() });
    sleep(time);
    runtime.block_on(load.stop())
}

fn judge(
    fault: &'static Fault,
    strike: &Strike,
    calls: &[Call],
    waits: &Waits,
    admitted: &HashMap<String, u64>,
    stored: &HashMap<String, u64>,
) -> Row {
    let mut row = Row::new(fault);
    let failed = || calls.iter().filter(|call| !call.outcome.is_decided());
    row.calls = calls.len();
    row.admitted = calls.iter().filter(|call| call.outcome.seen == Seen::Admitted).count();
    row.failed = failed().count();
    // The time for which the call did not wait for a processor is its own.
    let waited = |call: &Call| waits.between(call.since, call.ended());
    let starved = |call: &Call| {
        // The circuit is open because of earlier calls.
        let before = if call.outcome.seen == Seen::NotAsked { CIRCUIT } else { Duration::ZERO };
        waits.between(call.since.checked_sub(before).unwrap_or(call.since), call.ended()) > STARVED
    };
    row.late = calls.iter().filter(|call| call.took > LIMIT && call.took.saturating_sub(waited(call)) > LIMIT).count();
    row.longest_wait = waits.longest();
    row.slowest = calls.iter().map(|call| call.took).max().unwrap_or_default();
    let last = failed().filter(|call| !starved(call)).max_by_key(|call| call.ended());
    row.recovery = last.map_or(Duration::ZERO, |call| call.ended().saturating_duration_since(strike.back));

    // Time.
    let (late, slowest, recovery) = (row.late, row.slowest, row.recovery);
    row.must(late == 0, || format!("{late} decisions were late, the slowest by {:?}", slowest - LIMIT));
    row.must(recovery <= fault.recovery, || {
        let asked = failed().filter(|call| call.outcome.seen != Seen::NotAsked).max_by_key(|call| call.ended());
        let why = asked.map(|call| call.outcome.failure()).unwrap_or_default();
        format!("calls failed for {recovery:?} after the store was back; the last store call failed with {why}")
    });
    let well = strike.back + fault.recovery;
    let judged = calls.iter().filter(|call| call.since > well).count();
    row.must(judged > 200, || format!("only {judged} calls after the recovery"));

    // Failures.
    let early = failed().filter(|call| call.ended() < strike.start && !starved(call)).count();
    let all = row.failed;
    let first = || failed().map(|call| format!("{:?}", call.outcome)).next().unwrap_or_default();
    row.must(early == 0, || format!("{early} calls failed before the fault, first {}", first()));
    match fault.fails {
        Fails::Nothing => {
            let all = failed().filter(|call| !starved(call)).count();
            row.must(all == 0, || format!("{all} calls failed, first {}", first()));
        }
        Fails::Some => row.must(all > 0, || "no call failed, so the fault had no effect".to_owned()),
        Fails::Perhaps => {}
        Fails::InFlight(cuts) => {
            let asked = failed().filter(|call| call.outcome.seen != Seen::NotAsked).count();
            let most = (cuts * CALLERS) as usize * CONNECTIONS;
            row.must(all > 0, || "no call failed, so the fault had no effect".to_owned());
            row.must(asked <= most, || format!("{asked} calls failed where at most {most} may, first {}", first()));
        }
    }
    let wrong: Vec<_> = calls.iter().filter(|call| !call.outcome.is_right()).collect();
    row.must(wrong.is_empty(), || {
        format!(
            "{} calls were answered wrongly, first {:?}: {}",
            wrong.len(),
            wrong[0].outcome,
            wrong[0].outcome.failure()
        )
    });

    // Counts.
    let over = |units: &HashMap<String, u64>| units.values().map(|units| units.saturating_sub(QUOTA)).sum::<u64>();
    row.excess = over(admitted);
    let forgotten = missing(admitted, stored);
    row.lost = strike.lost.as_ref().map_or(forgotten, |lost| missing(&lost.admitted, &lost.kept));
    row.over_admitted = over_admitted(fault, strike, calls, admitted, stored);
    let (excess, over_admitted) = (row.excess, row.over_admitted);
    row.must(over_admitted == 0, || format!("{over_admitted} of {excess} units beyond the quota are not explained"));
    row.must(fault.loses != Loses::Nothing || forgotten == 0, || format!("{forgotten} units were lost"));
    let mut since: HashMap<String, u64> = HashMap::new();
    for call in calls.iter().filter(|call| call.since > well && call.outcome.seen == Seen::Admitted) {
        *since.entry(call.outcome.subject.clone()).or_default() += 1;
    }
    let misplaced = missing(&since, stored);
    row.must(misplaced == 0, || format!("{misplaced} units admitted after the recovery are not stored"));
    // A call without a reply may have been charged, but only once.
    let mut charged: HashMap<String, u64> = admitted.clone();
    for call in failed().filter(|call| call.outcome.seen != Seen::NotAsked) {
        *charged.entry(call.outcome.subject.clone()).or_default() += 1;
    }
    let twice = missing(stored, &charged);
    row.must(twice == 0, || format!("{twice} units were charged without a request"));
    // The units that this process admitted by itself.
    let mut local: HashMap<String, u64> = HashMap::new();
    for call in failed().filter(|call| call.outcome.policy == RateLimitFallback::Local) {
        *local.entry(call.outcome.subject.clone()).or_default() += u64::from(call.outcome.answer == Answer::Served);
    }
    let over_local = over(&local);
    row.must(over_local == 0, || format!("the local counts admitted {over_local} units beyond the quota"));
    row
}

/// Returns the units beyond the quotas of their keys that lost counts do not explain.
fn over_admitted(
    fault: &Fault,
    strike: &Strike,
    calls: &[Call],
    admitted: &HashMap<String, u64>,
    stored: &HashMap<String, u64>,
) -> u64 {
    let of = |units: &HashMap<String, u64>, subject: &str| units.get(subject).copied().unwrap_or_default();
    // A primary that was replaced and lives on may have admitted units that are unknown to the new one, but only in this time.
    let mut meanwhile: HashMap<String, u64> = HashMap::new();
    let well = strike.back + fault.recovery;
    let is_meanwhile = |call: &&Call| call.since <= well && call.ended() >= strike.start;
    for call in calls.iter().filter(|call| call.outcome.seen == Seen::Admitted).filter(is_meanwhile) {
        *meanwhile.entry(call.outcome.subject.clone()).or_default() += 1;
    }
    let over = admitted.iter().map(|(subject, &units)| {
        let (explained, before) = match &strike.lost {
            _ if fault.loses == Loses::Nothing => (0, 0),
            Some(lost) => {
                let before = of(&lost.admitted, subject);
                (before.saturating_sub(of(&lost.kept, subject)), before)
            }
            None => (units.saturating_sub(of(stored, subject)).min(of(&meanwhile, subject)), 0),
        };
        // Units beyond the quota before the loss have no explanation.
        units.saturating_sub(QUOTA + explained).max(before.saturating_sub(QUOTA))
    });
    over.sum()
}

/// Returns how many more than `expected` there are, once there are none or the time to settle is over.
fn more_than(expected: usize, count: impl Fn() -> usize) -> usize {
    let start = Instant::now();
    loop {
        let more = count().saturating_sub(expected);
        if more == 0 || start.elapsed() > SETTLED {
            return more;
        }
        sleep(Duration::from_millis(20));
    }
}

/// Returns the number of open sockets of this process, or 0 if the platform does not tell.
pub fn open_sockets() -> usize {
    let Ok(descriptors) = fs::read_dir("/proc/self/fd") else { return 0 };
    let targets = descriptors.filter_map(|descriptor| fs::read_link(descriptor.ok()?.path()).ok());
    targets.filter(|target| target.to_string_lossy().starts_with("socket:")).count()
}
