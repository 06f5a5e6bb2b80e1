use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use redis::Value;

use crate::backend::redis::batch::push::{PushBatcher, push};
use crate::backend::redis::codec::job::{PackedFinishes, PackedJobs, pack_lease, stored_job, when};
use crate::backend::redis::connection::subscriber::Interest;
use crate::backend::redis::error::unexpected_reply;
use crate::backend::redis::scripts::LuaScript;
use crate::backend::redis::{Inner, RedisBackend};
use crate::delay_queue::store::{
    Ack, Admission, Claim, Claimed, ClaimedJob, DelayQueueStore, Died, Expired, Extended, Finished, JobLease,
    MAX_BATCH, Notifications, QueueKey, WorkerId, batch_len,
};
use crate::delay_queue::{Cancelled, Changed, Counts, Due, JobId, NewJob, PreparedPush, Priority, State, StoredJob};
use crate::error::StoreError;
use crate::key::Key;
use crate::reach::Reach;
use crate::store::shutdown::ShutdownTarget;

impl DelayQueueStore for RedisBackend {
    async fn push(&self, queue: &QueueKey, jobs: &[NewJob], max_jobs: u64) -> Result<Vec<Admission>, StoreError> {
        let pushes = self.inner.pushes.get_or_init(|| {
            let Inner { servers, keys, scripts, auxiliary, .. } = &*self.inner;
            PushBatcher::new(Arc::clone(servers), Arc::clone(keys), Arc::clone(scripts), auxiliary.runtime())
        });
        // Held until the reply arrives. Without a permit, a single job is pushed in a batch.
        let permit = pushes.try_direct();
        if let ([job], None) = (jobs, &permit)
            && let Some(admission) = pushes.push(queue, job, max_jobs).await
        {
            return Ok(vec![admission?]);
        }
        let Inner { servers, keys, scripts, .. } = &*self.inner;
        let keys = keys.delay_queue(queue);
        let mut admissions = vec![Admission::Full; jobs.len()];
        // One call for each priority, usually one in all.
        for &priority in Priority::ALL {
            let indexes: Vec<_> = (0..jobs.len()).filter(|&i| jobs[i].priority == priority).collect();
            let mut rest = &indexes[..];
            while !rest.is_empty() {
                let (indexes, others) = rest.split_at(batch_len(rest.iter().map(|&i| jobs[i].size())));
                rest = others;
                let batch: Vec<_> = indexes.iter().map(|&i| &jobs[i]).collect();
                let answers = push(servers, scripts, &keys, max_jobs, &batch).await?;
                for (&i, answer) in indexes.iter().zip(answers) {
                    admissions[i] = answer;
                }
            }
        }
        Ok(admissions)
    }

    async fn claim(&self, queue: &QueueKey, finished: &[Ack], claim: &Claim) -> Result<Claimed, StoreError> {
        let Inner { servers, keys, scripts, auxiliary, .. } = &*self.inner;
        let keys = keys.delay_queue(queue);
        // A call that claims has the deadline of its worker. A call that only finishes jobs has the shorter response timeout, because it is
        // retried, preferably over another connection.
        let timeout = match claim.limit {
            0 => auxiliary.response_timeout(),
            _ => Claim::call_timeout(claim.lease).max(auxiliary.response_timeout()),
        };
        let (mut answers, mut rest) = (Vec::with_capacity(finished.len()), finished);
        loop {
            let (part, others) = rest.split_at(at_once(rest));
            rest = others;
            let packed_finishes = PackedFinishes::new(part);
            // Only the last call claims.
            let claim = Claim { limit: if rest.is_empty() { claim.limit.min(MAX_BATCH) } else { 0 }, ..*claim };
            let reply = scripts.delay_queue.claim(servers, &keys, &claim, &packed_finishes, timeout).await;
            let reply = reply.map_err(|error| {
                // Earlier calls may have finished jobs, and a script may have finished some before it met foreign data.
                if answers.is_empty() && !error.is_foreign_data() { error } else { error.in_doubt() }
            })?;
            let mut claimed = claimed(&reply, &packed_finishes).ok_or_else(|| unexpected_reply(&reply))?;
            answers.append(&mut claimed.finished);
            if rest.is_empty() {
                return Ok(Claimed { finished: answers, ..claimed });
            }
        }
    }

    async fn extend(
        &self,
        queue: &QueueKey,
        leases: &[JobLease],
        lease: Duration,
    ) -> Result<Vec<Extended>, StoreError> {
        // On the dedicated connections, so that renewals do not wait behind requests.
        let Inner { keys, scripts, auxiliary, .. } = &*self.inner;
        let keys = keys.delay_queue(queue);
        let mut extended = Vec::with_capacity(leases.len());
        for leases in leases.chunks(MAX_BATCH) {
            let packed_leases: Vec<_> = leases.iter().map(pack_lease).collect();
            let reply = scripts.delay_queue.extend(auxiliary.dedicated(), &keys, lease, &packed_leases).await?;
            for answer in array(&reply, leases.len())? {
                extended.push(match answer {
                    Value::Int(0) => Extended::Lost,
                    Value::Int(1) => Extended::Held,
                    Value::Int(2) => Extended::Cancelled,
                    _ => return Err(unexpected_reply(&reply)),
                });
            }
        }
        Ok(extended)
    }

    async fn watch(&self, queue: &QueueKey, worker: WorkerId) -> Notifications {
        let Inner { keys, auxiliary, .. } = &*self.inner;
        let wake = keys.delay_queue(queue).wake;
        auxiliary.subscriber().subscribe(format!("{wake}{worker}"), Interest::Changes).await
    }

    async fn get(&self, queue: &QueueKey, id: &JobId) -> Result<Option<StoredJob>, StoreError> {
        let reply = self.control(queue, &self.inner.scripts.delay_queue.get, id.as_bytes()).await?;
        match &reply {
            Value::Array(values) => match values.as_slice() {
                [] => Ok(None),
                [Value::Int(state @ 1..=3), Value::BulkString(record)] => {
                    let state = [State::Waiting, State::Running, State::Dead][*state as usize - 1];
                    stored_job(id.as_bytes(), record, state).map(Some).ok_or_else(foreign_job)
                }
                _ => Err(unexpected_reply(&reply)),
            },
            _ => Err(unexpected_reply(&reply)),
        }
    }

    async fn cancel(&self, queue: &QueueKey, id: &JobId, keeps_unique: bool) -> Result<Cancelled, StoreError> {
        match self
            .control(queue, &self.inner.scripts.delay_queue.cancel, (id.as_bytes(), u8::from(keeps_unique)))
            .await?
        {
            Value::Int(0) => Ok(Cancelled::Missing),
            Value::Int(1) => Ok(Cancelled::Removed),
            Value::Int(2) => Ok(Cancelled::Notified),
            Value::Int(3) => Ok(Cancelled::Dead),
            reply => Err(unexpected_reply(&reply)),
        }
    }

    async fn reschedule(&self, queue: &QueueKey, id: &JobId, due: Due) -> Result<Changed, StoreError> {
        changed(&self.control(queue, &self.inner.scripts.delay_queue.reschedule, (id.as_bytes(), when(due))).await?)
    }

    async fn replace(&self, queue: &QueueKey, id: &JobId, payload: &[u8]) -> Result<Changed, StoreError> {
        changed(&self.control(queue, &self.inner.scripts.delay_queue.replace, (id.as_bytes(), payload)).await?)
    }

    async fn counts(&self, queue: &QueueKey) -> Result<Counts, StoreError> {
        let reply = self.control(queue, &self.inner.scripts.delay_queue.counts, None::<u64>).await?;
        let numbers: Option<Vec<i64>> = array(&reply, 6)?
            .iter()
            .map(|value| match value {
                Value::Int(number) => Some(*number),
                _ => None,
            })
            .collect();
        let Some(&[waiting, due, running, dead, oldest, is_paused]) = numbers.as_deref() else {
            return Err(unexpected_reply(&reply));
        };
        let count = |number: i64| u64::try_from(number).unwrap_or_default();
        Ok(Counts {
            waiting: count(waiting),
            due: count(due),
            running: count(running),
            dead: count(dead),
            oldest_due: u64::try_from(oldest).ok().map(Duration::from_millis),
            is_paused: is_paused == 1,
        })
    }

    async fn list(
        &self,
        queue: &QueueKey,
        state: State,
        skip: u64,
        limit: usize,
    ) -> Result<Vec<StoredJob>, StoreError> {
        let index = match state {
            State::Waiting => 1,
            State::Running => 2,
            State::Dead => 3,
        };
        // The script counts in doubles, which are exact up to this number.
        let skip = skip.min(1 << 53);
        let reply =
            self.control(queue, &self.inner.scripts.delay_queue.list, (index, skip, limit.min(MAX_BATCH))).await?;
        let Value::Array(values) = &reply else { return Err(unexpected_reply(&reply)) };
        Ok(stored_jobs(values, state))
    }

    async fn pause(&self, queue: &QueueKey, is_paused: bool) -> Result<(), StoreError> {
        self.control(queue, &self.inner.scripts.delay_queue.pause, u8::from(is_paused)).await.map(drop)
    }

    async fn purge(&self, queue: &QueueKey, limit: usize, keeps_unique: bool) -> Result<usize, StoreError> {
        match self
            .control(queue, &self.inner.scripts.delay_queue.purge, (limit.min(MAX_BATCH), u8::from(keeps_unique)))
            .await?
        {
            Value::Int(removed @ 0..) => Ok(removed as usize),
            reply => Err(unexpected_reply(&reply)),
        }
    }

    async fn release_unique(&self, queue: &QueueKey, key: &Key) -> Result<bool, StoreError> {
        match self.control(queue, &self.inner.scripts.delay_queue.release_unique, key.as_bytes()).await? {
            Value::Int(was_held @ 0..=1) => Ok(was_held == 1),
            reply => Err(unexpected_reply(&reply)),
        }
    }

    async fn replay(&self, queue: &QueueKey, ids: &[JobId]) -> Result<Vec<bool>, StoreError> {
        self.each(queue, &self.inner.scripts.delay_queue.replay, ids).await
    }

    async fn forget(&self, queue: &QueueKey, ids: &[JobId]) -> Result<Vec<bool>, StoreError> {
        self.each(queue, &self.inner.scripts.delay_queue.forget, ids).await
    }

    fn reach(&self) -> Reach {
        Reach::Redis
    }

    fn identity(&self) -> Option<usize> {
        Some(Arc::as_ptr(&self.inner).addr())
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        self.inner.shutdown.add(target);
    }
}

impl RedisBackend {
    async fn control(
        &self,
        queue: &QueueKey,
        script: &LuaScript,
        args: impl redis::ToRedisArgs,
    ) -> Result<Value, StoreError> {
        let Inner { servers, keys, scripts, .. } = &*self.inner;
        scripts.delay_queue.control(servers, &keys.delay_queue(queue), script, args).await
    }

    async fn each(&self, queue: &QueueKey, script: &LuaScript, ids: &[JobId]) -> Result<Vec<bool>, StoreError> {
        let names: Vec<_> = ids.iter().take(MAX_BATCH).map(JobId::as_bytes).collect();
        if names.is_empty() {
            return Ok(Vec::new());
        }
        let reply = self.control(queue, script, &names).await?;
        match &reply {
            // The script answers for fewer jobs than requested if they are large.
            Value::Array(answers) if (1..=names.len()).contains(&answers.len()) => {
                Ok(answers.iter().map(|answer| *answer == Value::Int(1)).collect())
            }
            _ => Err(unexpected_reply(&reply)),
        }
    }
}

impl RedisBackend {
    /// Adds a push to your own pipeline, so that the job is pushed if and when the pipeline runs, also within MULTI.
    ///
    /// The reply is an array whose first element is a string. It is `1` if the job is new, and `0` if a job with this ID exists. It is `2`
    /// if the queue is full, and `3` if another job holds the unique key. After `3`, the next element is the ID of that job.
    ///
    /// ```no_run
    /// use tollgate::backend::redis::bb8_redis::redis;
    /// use tollgate::{DelayQueue, RedisBackend};
    ///
    /// # async fn example(mut connection: redis::aio::MultiplexedConnection) -> Result<(), tollgate::BoxError> {
    /// let backend = RedisBackend::connect("redis://127.0.0.1/").await?;
    /// let queue = DelayQueue::<u32>::new(backend.clone(), "orders");
    ///
    /// let job = queue.push(42).id("order:42").prepare()?;
    /// let mut pipeline = redis::pipe();
    /// pipeline.atomic().set("order:42", "unpaid").ignore();
    /// backend.push_in(&mut pipeline, &job);
    /// let _: redis::Value = pipeline.query_async(&mut connection).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// On a cluster, all keys of the pipeline must be in the slot of the queue. The pipeline contains the text of the script.
    pub fn push_in(&self, pipeline: &mut redis::Pipeline, job: &PreparedPush) {
        let Inner { servers, keys, scripts, .. } = &*self.inner;
        let PreparedPush { queue, job, max_jobs } = job;
        let jobs = [job];
        let command = scripts.delay_queue.push_command(
            servers,
            &keys.delay_queue(queue),
            job.priority as usize,
            *max_jobs,
            &PackedJobs(&jobs),
        );
        pipeline.add_command(command);
    }
}

/// How many acks of `finished` one call sends. A retry, snooze, release or death takes the server several times as long as a removal, and
/// no script may block the server for long.
fn at_once(finished: &[Ack]) -> usize {
    let mut others = 0;
    let is_short = |finish: &&Ack| {
        others += usize::from(!finish.kind.forgets());
        others <= MAX_BATCH / 4
    };
    finished.iter().take(MAX_BATCH).take_while(is_short).count()
}

/// The values of a reply, if it has `len` of them.
fn array(reply: &Value, len: usize) -> Result<&[Value], StoreError> {
    match reply {
        Value::Array(values) if values.len() == len => Ok(values),
        _ => Err(unexpected_reply(reply)),
    }
}

fn changed(reply: &Value) -> Result<Changed, StoreError> {
    match reply {
        Value::Int(0) => Ok(Changed::Missing),
        Value::Int(1) => Ok(Changed::Done),
        Value::Int(2) => Ok(Changed::Running),
        Value::Int(3) => Ok(Changed::Dead),
        _ => Err(unexpected_reply(reply)),
    }
}

/// Decodes the reply of `delay_queue_claim.lua`.
fn claimed(reply: &Value, finishes: &PackedFinishes) -> Option<Claimed> {
    let Value::Array(values) = reply else { return None };
    let [
        Value::BulkString(answers),
        Value::Int(now_us),
        Value::Int(more @ (0 | 1)),
        Value::Int(next_ms),
        Value::Int(oldest_ms),
        Value::Int(token),
        Value::Int(expired),
        Value::Array(died),
        claims @ ..,
    ] = values.as_slice()
    else {
        return None;
    };
    let finished = finishes.indexes.iter().map(|&index| match answers.get(index)? {
        b'0' => Some(Finished::Gone),
        b'1' => Some(Finished::Done),
        b'2' => Some(Finished::Dead),
        b'3' => Some(Finished::Lost),
        b'4' => Some(Finished::Cancelled),
        _ => None,
    });
    let expired = Expired { jobs: usize::try_from(*expired).ok()?, dead: died.len() / 2 };
    let died = died.chunks(2).map(|pair| match pair {
        [Value::BulkString(id), Value::Int(attempts)] => Some(Died::new(JobId::from_store(id)?, *attempts as u16)),
        _ => None,
    });
    let token = u64::try_from(*token).ok()?;
    let mut jobs = Vec::new();
    for pair in claims.chunks(2) {
        let [Value::Array(ids), Value::Array(records)] = pair else { return None };
        jobs.reserve(ids.len());
        // Skip unreadable jobs, so that the others run. Unreadable jobs become dead after their last attempt.
        let stored = ids.iter().zip(records).filter_map(|(id, record)| stored(id, record, State::Running));
        jobs.extend(stored.map(|job| ClaimedJob { token, job }));
    }
    Some(Claimed {
        finished: finished.collect::<Option<_>>()?,
        jobs,
        more: *more == 1,
        next: Some(Duration::from_millis(u64::try_from(*next_ms).ok()?)),
        oldest_due: u64::try_from(*oldest_ms).ok().map(Duration::from_millis),
        expired,
        // Skip malformed IDs: no job has one.
        died: died.flatten().collect(),
        now: UNIX_EPOCH + Duration::from_micros(u64::try_from(*now_us).ok()?),
    })
}

/// Decodes pairs of IDs and records. Skips unreadable jobs, so that the others are listed.
fn stored_jobs(values: &[Value], state: State) -> Vec<StoredJob> {
    values.chunks(2).filter_map(|pair| stored(pair.first()?, pair.get(1)?, state)).collect()
}

fn stored(id: &Value, record: &Value, state: State) -> Option<StoredJob> {
    match (id, record) {
        (Value::BulkString(id), Value::BulkString(record)) => stored_job(id, record, state),
        _ => None,
    }
}

fn foreign_job() -> StoreError {
    StoreError::foreign_data("a record does not hold a job of version 1")
}
