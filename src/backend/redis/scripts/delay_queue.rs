//! The scripts of delay queues.

use std::time::Duration;

use redis::{Cmd, ToRedisArgs, Value};

use super::lua_script::{LuaScript, scripts};
use crate::backend::redis::codec::job::{PackedFinishes, PackedJobs};
use crate::backend::redis::codec::millis::millis;
use crate::backend::redis::error;
use crate::backend::redis::keys::QueueKeys;
use crate::backend::redis::topology::Servers;
use crate::delay_queue::store::Claim;
use crate::error::StoreError;

/// How long the keys of a queue outlive the time at which their last entry is due.
const KEEP_JOBS_MS: u64 = 180 * 86_400 * 1_000;

scripts! {
    /// The scripts of delay queues.
    pub(crate) struct DelayQueueScripts {
        push: "delay_queue_push.lua" after server_notify delay_queue_time delay_queue_wake;
        claim: "delay_queue_claim.lua"
            after server_notify delay_queue_time delay_queue_keys delay_queue_record delay_queue_runs
                delay_queue_unique delay_queue_wake delay_queue_rare delay_queue_settle delay_queue_fetch
                delay_queue_finish delay_queue_reclaim delay_queue_take;
        extend: "delay_queue_extend.lua" after delay_queue_time;
        get: "delay_queue_get.lua"
            after delay_queue_time delay_queue_keys delay_queue_record delay_queue_runs delay_queue_find;
        cancel: "delay_queue_cancel.lua"
            after delay_queue_time delay_queue_keys delay_queue_record delay_queue_runs delay_queue_split
                delay_queue_find delay_queue_unique delay_queue_free;
        reschedule: "delay_queue_reschedule.lua"
            after server_notify delay_queue_time delay_queue_keys delay_queue_record delay_queue_runs
                delay_queue_split delay_queue_find delay_queue_wake delay_queue_state;
        replace: "delay_queue_replace.lua"
            after delay_queue_time delay_queue_keys delay_queue_record delay_queue_runs delay_queue_find;
        counts: "delay_queue_counts.lua" after delay_queue_time delay_queue_keys;
        list: "delay_queue_list.lua" after delay_queue_time delay_queue_keys delay_queue_record delay_queue_runs;
        pause: "delay_queue_pause.lua"
            after server_notify delay_queue_time delay_queue_keys delay_queue_wake delay_queue_state;
        purge: "delay_queue_purge.lua"
            after delay_queue_time delay_queue_keys delay_queue_record delay_queue_runs delay_queue_split
                delay_queue_unique delay_queue_free;
        release_unique: "delay_queue_release_unique.lua" after delay_queue_time delay_queue_keys delay_queue_unique;
        replay: "delay_queue_replay.lua"
            after server_notify delay_queue_time delay_queue_keys delay_queue_record delay_queue_unique
                delay_queue_wake delay_queue_state;
        forget: "delay_queue_forget.lua"
            after delay_queue_time delay_queue_keys delay_queue_record delay_queue_unique delay_queue_free;
    }
}

impl DelayQueueScripts {
    /// Pushes jobs of one priority, at most 256: see the header of `delay_queue_push.lua`.
    pub(crate) async fn push(
        &self,
        servers: &Servers,
        keys: &QueueKeys,
        priority: usize,
        max_jobs: u64,
        jobs: &PackedJobs<'_>,
    ) -> Result<Value, StoreError> {
        let (names, args) = push_call(servers, keys, priority, max_jobs, jobs);
        self.push.call(servers, &names, args).await
    }

    /// The same as a command for a pipeline, with the text of the script.
    pub(crate) fn push_command(
        &self,
        servers: &Servers,
        keys: &QueueKeys,
        priority: usize,
        max_jobs: u64,
        jobs: &PackedJobs<'_>,
    ) -> Cmd {
        let (names, args) = push_call(servers, keys, priority, max_jobs, jobs);
        self.push.eval(&names, &args)
    }

    /// Finishes and claims jobs. If no reply arrives within `timeout`, the claimed jobs belong to no worker until their lease ends.
    pub(crate) async fn claim(
        &self,
        servers: &Servers,
        keys: &QueueKeys,
        claim: &Claim,
        finished: &PackedFinishes,
        timeout: Duration,
    ) -> Result<Value, StoreError> {
        let Claim { worker, limit, lease, dead } = claim;
        let limits = (limit, millis(*lease), dead.count, millis(dead.age));
        let args = (KEEP_JOBS_MS, servers.publish_command(), &keys.wake, worker.to_string(), limits, finished);
        let reply = self.claim.run_with_timeout(servers, &all_of(keys), &args, Some(timeout)).await;
        reply.map_err(error::store_error)
    }

    pub(crate) async fn extend(
        &self,
        servers: &Servers,
        keys: &QueueKeys,
        lease: Duration,
        tickets: &[Vec<u8>],
    ) -> Result<Value, StoreError> {
        let names = [keys.leases.as_str(), &keys.jobs, &keys.cancels];
        let tickets: Vec<_> = tickets.iter().map(Vec::as_slice).collect();
        self.extend.call(servers, &names, (KEEP_JOBS_MS, millis(lease), tickets)).await
    }

    /// Calls one of the scripts above that inspect and administer jobs, with the arguments of its own.
    pub(crate) async fn control(
        &self,
        servers: &Servers,
        keys: &QueueKeys,
        script: &LuaScript,
        args: impl ToRedisArgs,
    ) -> Result<Value, StoreError> {
        let args = (KEEP_JOBS_MS, servers.publish_command(), &keys.wake, args);
        script.call(servers, &all_of(keys), args).await
    }
}

/// The keys and arguments of `push`.
fn push_call<'a>(
    servers: &Servers,
    keys: &'a QueueKeys,
    priority: usize,
    max_jobs: u64,
    jobs: &'a PackedJobs<'a>,
) -> ([&'a str; 8], impl ToRedisArgs + use<'a>) {
    let QueueKeys { jobs: records, due, dead, unique, unique_ends, state, idle, runs, wake, .. } = keys;
    let names = [records, &due[priority], dead, unique, unique_ends, state, idle, runs].map(String::as_str);
    (names, (KEEP_JOBS_MS, max_jobs, servers.publish_command(), wake.as_str(), jobs))
}

/// The keys in the order of `delay_queue_keys.lua`.
fn all_of(keys: &QueueKeys) -> [&str; 12] {
    let QueueKeys { jobs, due: [high, normal, low], leases, dead, unique, cancels, state, idle, runs, snoozed, .. } =
        keys;
    [jobs, high, normal, low, leases, dead, unique, cancels, state, idle, runs, snoozed].map(String::as_str)
}
