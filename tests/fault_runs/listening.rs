//! Whether a process receives the notifications of locks, operations and jobs in time after a fault, and the checks of the result.

use std::fmt;
use std::time::{Duration, Instant};

use super::deployment::Topology::{Cluster, Sentinel};
use super::deployment::{Deployment, Topology};
use super::support::waiting::{LATE, SOON, Waiting};

/// A fault of a server that sends notifications.
#[derive(Debug)]
pub struct ListeningFault {
    pub name: &'static str,
    pub on: Topology,
    /// Whether it is part of the short run.
    pub short: bool,
    /// Whether the URL of the process names only the server that the fault hits.
    knows_one: bool,
    /// Causes the fault on the server that sends all notifications; on a cluster, on the node with this index. Returns when notifications
    /// could arrive again.
    strike: fn(&mut Deployment, usize) -> Instant,
}

const fn fault(name: &'static str, on: Topology, strike: fn(&mut Deployment, usize) -> Instant) -> ListeningFault {
    ListeningFault { name, on, short: false, knows_one: false, strike }
}

/// All faults of notifications.
pub const LISTENING_FAULTS: &[ListeningFault] = &[
    ListeningFault { short: true, ..fault("a primary killed (SIGKILL)", Cluster, primary_killed) },
    ListeningFault { knows_one: true, ..fault("the only host of the URL killed (SIGKILL)", Cluster, primary_killed) },
    fault("the listening connections killed (CLIENT KILL)", Cluster, |d, _| {
        for node in d.primaries() {
            node.query::<()>("CLIENT KILL TYPE pubsub");
        }
        Instant::now()
    }),
    ListeningFault {
        short: true,
        ..fault("a primary back at another address (SIGKILL)", Cluster, |d, node| {
            d.cluster().readdress(node);
            Instant::now()
        })
    },
    fault("failover for no reason (CLUSTER FAILOVER)", Cluster, |d, node| {
        let cluster = d.cluster();
        let slot = cluster.slots_with_keys(node)[0];
        cluster.fail_over(node);
        cluster.wait_for_another_owner(slot, node).0
    }),
    fault("a primary stopped until there is another (SIGSTOP)", Cluster, |d, node| {
        let cluster = d.cluster();
        let slot = cluster.slots_with_keys(node)[0];
        cluster.nodes[node].pause();
        cluster.wait_for_another_owner(slot, node).0
    }),
    ListeningFault {
        short: true,
        ..fault("failover that is announced (SENTINEL FAILOVER)", Sentinel, |d, _| {
            let sentinel = d.sentinel();
            let old = sentinel.primary().port();
            sentinel.fail_over();
            sentinel.wait_for_another_primary(old).0
        })
    },
];

fn primary_killed(deployment: &mut Deployment, node: usize) -> Instant {
    let cluster = deployment.cluster();
    let slot = cluster.slots_with_keys(node)[0];
    cluster.wait_until_whole();
    cluster.nodes[node].kill();
    cluster.wait_for_another_owner(slot, node).0
}

/// The result of a run of a fault.
#[derive(Debug)]
pub struct ListeningRow {
    fault: &'static ListeningFault,
    before: Vec<(&'static str, Duration)>,
    after: Vec<(&'static str, Duration)>,
    complaints: Vec<String>,
}

impl ListeningRow {
    pub const HEAD: &str = "\
| fault | deployment | lock ms | operation ms | job ms | |
| --- | --- | ---: | ---: | ---: | --- |";

    pub fn failed(fault: &'static ListeningFault, complaint: String) -> Self {
        Self { fault, before: Vec::new(), after: Vec::new(), complaints: vec![complaint] }
    }

    pub fn complain(&mut self, complaint: String) {
        self.complaints.push(complaint);
    }

    pub fn complaints(&self) -> &[String] {
        &self.complaints
    }
}

impl fmt::Display for ListeningRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "| {} | {} ", self.fault.name, self.fault.on.name())?;
        for ((_, before), (_, after)) in self.before.iter().zip(&self.after) {
            write!(f, "| {} to {} ", before.as_millis(), after.as_millis())?;
        }
        write!(f, "| {} |", if self.complaints.is_empty() { "ok" } else { "FAILED" })
    }
}

/// Runs a fault once, on its own deployment.
pub fn run(fault: &'static ListeningFault) -> ListeningRow {
    let mut deployment = Deployment::start(fault.on);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime can be made");
    const NODE: usize = 0;
    let is_chosen = |tag: &str| match &deployment {
        Deployment::Cluster(cluster) => {
            cluster.owner(cluster.nodes[NODE].query(&format!("CLUSTER KEYSLOT {{{tag}}}"))) == NODE
        }
        _ => true,
    };
    let url = match &deployment {
        Deployment::Cluster(cluster) if fault.knows_one => {
            cluster.nodes[NODE].url().replace("redis:", "redis+cluster:")
        }
        deployment => deployment.url(),
    };
    let connect =
        async |url| tollgate::RedisBackend::connect(url).await.expect("the deployment accepts the connection");
    let mut waiting = runtime
        .block_on(async { Waiting::start(connect(deployment.url()).await, connect(url).await, is_chosen).await });
    let before = runtime.block_on(waiting.lateness());
    let back = (fault.strike)(&mut deployment, NODE);
    let after = runtime.block_on(async {
        tokio::time::sleep((back + SOON).saturating_duration_since(Instant::now())).await;
        waiting.lateness().await
    });
    let late = |when, lateness: &[(&str, Duration)]| {
        let late = lateness.iter().filter(|(_, late)| *late >= LATE);
        late.map(|(what, late)| format!("{when}, the notification of a {what} took {late:?}")).collect::<Vec<_>>()
    };
    let complaints = [late("before the fault", &before), late("after the fault", &after)].concat();
    ListeningRow { fault, before: before.to_vec(), after: after.to_vec(), complaints }
}
