use std::time::Duration;

use futures_util::future::try_join_all;
use redis::Value;

use super::lock_registry::scan;
use crate::backend::redis::connection::subscriber::Interest;
use crate::backend::redis::error::{is_refused_for_now, unexpected_reply};
use crate::backend::redis::keys::PARTITIONS;
use crate::backend::redis::{Inner, RedisBackend};
use crate::error::StoreError;
use crate::idempotency::store::{
    Begun, BodyFingerprint, Claim, Completion, IdempotencyRegistry, IdempotencyStore, Notifications, Token,
};
use crate::idempotency::{
    Checkpoint, Cursor, Operation, OperationPage, OperationState, OperationStatus, StoredResponse,
};
use crate::key::Key;
use crate::reach::Reach;
use crate::store::shutdown::ShutdownTarget;

impl IdempotencyStore for RedisBackend {
    async fn begin(&self, operation: &Operation, claim: &Claim) -> Result<Begun, StoreError> {
        let Inner { servers, keys, scripts, .. } = &*self.inner;
        let record = keys.idempotency(operation);
        let (records, max) = self.count_key_and_max(&record, operation, claim);
        let reply = scripts.idempotency.begin(servers, [&record, &records], claim, max).await?;
        begun(&reply).ok_or_else(|| unexpected_reply(&reply))
    }

    async fn renew(
        &self,
        operation: &Operation,
        claim: &Claim,
        body_fingerprint: &BodyFingerprint,
    ) -> Result<bool, StoreError> {
        let Inner { keys, scripts, auxiliary, .. } = &*self.inner;
        is_done(
            &scripts
                .idempotency
                .renew(auxiliary.dedicated(), &keys.idempotency(operation), claim, body_fingerprint, None)
                .await?,
        )
    }

    async fn checkpoint(
        &self,
        operation: &Operation,
        claim: &Claim,
        body_fingerprint: &BodyFingerprint,
        checkpoint: &Checkpoint,
    ) -> Result<bool, StoreError> {
        let Inner { servers, keys, scripts, .. } = &*self.inner;
        let record = keys.idempotency(operation);
        is_done(&scripts.idempotency.renew(servers, &record, claim, body_fingerprint, Some(checkpoint)).await?)
    }

    async fn complete(
        &self,
        operation: &Operation,
        token: &Token,
        completion: &Completion,
    ) -> Result<bool, StoreError> {
        // Not on the dedicated connections: a large response would delay the renewals there.
        let Inner { servers, keys, scripts, .. } = &*self.inner;
        let (record, channel) = (keys.idempotency(operation), keys.done(operation));
        let publish = (self.publish(), &*channel);
        is_done(&scripts.idempotency.complete(servers, &record, token, completion, publish).await?)
    }

    async fn release(&self, operation: &Operation, claim: &Claim) -> Result<bool, StoreError> {
        let Inner { keys, scripts, auxiliary, .. } = &*self.inner;
        let (record, channel) = (keys.idempotency(operation), keys.done(operation));
        let (records, max) = self.count_key_and_max(&record, operation, claim);
        let publish = (self.publish(), &*channel);
        let release = |records, max| {
            scripts.idempotency.release(auxiliary.dedicated(), [&record, records], &claim.token, max, publish)
        };
        let reply = match release(&records, max).await {
            // While a slot moves, a node may have only one of the two keys. Then release the record alone. If the record was
            // counted, it counts until the end that its claim has set.
            Err(error) if is_refused_for_now(&error) => release(&record, 0).await?,
            reply => reply?,
        };
        is_done(&reply)
    }

    async fn watch(&self, operation: &Operation) -> Notifications {
        let Inner { keys, auxiliary, .. } = &*self.inner;
        auxiliary.subscriber().subscribe(keys.done(operation), Interest::Changes).await
    }

    fn reach(&self) -> Reach {
        Reach::Redis
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        self.inner.shutdown.add(target);
    }
}

impl RedisBackend {
    /// The key of the set that counts the records of a caller, and the largest number of records. Without a bound, the number is 0, and the
    /// key is that of the record itself: a script with only one key works while its slot moves.
    fn count_key_and_max(&self, record: &str, operation: &Operation, claim: &Claim) -> (String, u64) {
        let Some(bound) = claim.bound.as_ref().filter(|bound| bound.max > 0) else { return (record.to_owned(), 0) };
        let Inner { servers, keys, .. } = &*self.inner;
        // All keys of a script share a slot, so on a cluster each partition counts its own records.
        let is_cluster = servers.is_cluster();
        let max = if is_cluster { partition_max(bound.max) } else { bound.max };
        (keys.records(&bound.scope, operation, is_cluster), max.min(MOST_COUNTED))
    }
}

/// Lua's numbers are exact only up to this one. Larger bounds are lowered to it, and no caller reaches it.
const MOST_COUNTED: u64 = 1 << 53;

/// The bound of one partition of a cluster: an equal share of `max`, and four standard deviations more. Keys fall on partitions at random,
/// and without this room, a partition would be full before the caller has `max` records. All partitions together admit more than `max`.
fn partition_max(max: u64) -> u64 {
    let fair = max.div_ceil(PARTITIONS);
    fair.saturating_add(4 * fair.isqrt()).saturating_add(1)
}

impl IdempotencyRegistry for RedisBackend {
    async fn inspect(&self, operation: &Operation) -> Result<Option<OperationStatus>, StoreError> {
        let Inner { keys, scripts, auxiliary, .. } = &*self.inner;
        let reply = scripts.idempotency.inspect(auxiliary.dedicated(), &keys.idempotency(operation)).await?;
        status(operation, &reply).ok_or_else(|| unexpected_reply(&reply))
    }

    async fn forget(&self, status: &OperationStatus) -> Result<bool, StoreError> {
        let Inner { keys, scripts, auxiliary, .. } = &*self.inner;
        let OperationStatus { operation, state, fence, .. } = status;
        let (record, channel) = (keys.idempotency(operation), keys.done(operation));
        let (found, publish) = ((state_code(*state), *fence), (self.publish(), &*channel));
        is_done(&scripts.idempotency.forget(auxiliary.dedicated(), &record, found, publish).await?)
    }

    async fn complete_unknown(
        &self,
        status: &OperationStatus,
        response: &StoredResponse,
        retention: Duration,
    ) -> Result<bool, StoreError> {
        let OperationStatus { operation, state, fence, .. } = status;
        if !matches!(state, OperationState::Unknown { .. } | OperationState::Completed { .. }) {
            return Ok(false);
        }
        // Not on the dedicated connections: a large response would delay the renewals there.
        let Inner { servers, keys, scripts, .. } = &*self.inner;
        let (record, channel) = (keys.idempotency(operation), keys.done(operation));
        let (found, kept, publish) = ((state_code(*state), *fence), (response, retention), (self.publish(), &*channel));
        is_done(&scripts.idempotency.complete_unknown(servers, &record, found, kept, publish).await?)
    }

    async fn list(&self, scope: Option<&Key>, from: Cursor, max: usize) -> Result<OperationPage, StoreError> {
        let Inner { keys, auxiliary, .. } = &*self.inner;
        let (records, next) = scan(auxiliary.dedicated(), from, &keys.operations(scope), max).await?;
        // One SCAN returns at most about `max` keys (its `COUNT`), so the number of concurrent calls is bounded.
        let found = records.iter().filter_map(|record| keys.operation_of(record));
        let statuses = try_join_all(found.map(|operation| async move {
            match IdempotencyRegistry::inspect(self, &operation).await {
                // Foreign data must not fail the whole list.
                Err(error) if error.is_foreign_data() => Ok(None),
                status => status,
            }
        }));
        let operations = statuses.await?.into_iter().flatten().collect();
        Ok(OperationPage { operations, next })
    }
}

/// The number of the state in `idempotency_inspect.lua`.
const fn state_code(state: OperationState) -> u8 {
    match state {
        OperationState::Free => 0,
        OperationState::InFlight { .. } => 1,
        OperationState::Completed { is_kept: true } => 2,
        OperationState::Completed { is_kept: false } => 3,
        OperationState::Unknown { .. } => 4,
    }
}

/// The reply of `idempotency_inspect.lua`; `None` if it is malformed.
fn status(operation: &Operation, reply: &Value) -> Option<Option<OperationStatus>> {
    let Value::Array(values) = reply else { return None };
    let [Value::Int(state), fence, attempts, lasts_ms, kept_ms, Value::BulkString(checkpoint)] = values.as_slice()
    else {
        return values.is_empty().then_some(None);
    };
    let lasts = Duration::from_millis(number(lasts_ms)?);
    let state = match state {
        0 => OperationState::Free,
        1 => OperationState::InFlight { remaining: lasts },
        2 | 3 => OperationState::Completed { is_kept: *state == 2 },
        4 => OperationState::Unknown { since: lasts },
        _ => return None,
    };
    Some(Some(OperationStatus {
        operation: *operation,
        state,
        fence: number(fence)?,
        attempts: number(attempts)?.try_into().ok()?,
        checkpoint: if checkpoint.is_empty() { None } else { Some(Checkpoint::from_bytes(checkpoint)?) },
        kept_for: Duration::from_millis(number(kept_ms)?),
    }))
}

fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Int(number) => u64::try_from(*number).ok(),
        _ => None,
    }
}

/// The reply of `idempotency_begin.lua`.
fn begun(reply: &Value) -> Option<Begun> {
    let Value::Array(values) = reply else { return None };
    let body_fingerprint = |value: &Value| match value {
        Value::BulkString(bytes) => BodyFingerprint::from_bytes(bytes),
        _ => None,
    };
    Some(match values.as_slice() {
        [Value::Int(0)] => Begun::Mismatch,
        [Value::Int(1), fence, attempt, body, Value::BulkString(checkpoint)] => Begun::Granted {
            fence: number(fence)?,
            attempt: number(attempt)?.try_into().ok()?,
            body_fingerprint: body_fingerprint(body)?,
            checkpoint: if checkpoint.is_empty() { None } else { Some(Checkpoint::from_bytes(checkpoint)?) },
        },
        [Value::Int(6), remaining_ms] => Begun::ScopeFull { retry_after: Duration::from_millis(number(remaining_ms)?) },
        [Value::Int(2), remaining_ms, body] => Begun::InFlight {
            remaining: Duration::from_millis(number(remaining_ms)?),
            body_fingerprint: body_fingerprint(body)?,
        },
        [Value::Int(3), attempt, body] => {
            Begun::Unknown { attempt: number(attempt)?.try_into().ok()?, body_fingerprint: body_fingerprint(body)? }
        }
        [Value::Int(state @ (4 | 5)), body, Value::BulkString(response)] => Begun::Completed {
            body_fingerprint: body_fingerprint(body)?,
            response: response.as_slice().into(),
            is_kept: *state == 4,
        },
        _ => return None,
    })
}

fn is_done(reply: &Value) -> Result<bool, StoreError> {
    match reply {
        Value::Int(done @ (0 | 1)) => Ok(*done == 1),
        _ => Err(unexpected_reply(reply)),
    }
}
