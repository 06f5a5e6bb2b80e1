//! The scripts of idempotency.

use std::time::Duration;

use redis::Value;

use super::lua_script::scripts;
use crate::backend::redis::codec::millis::millis;
use crate::backend::redis::topology::Servers;
use crate::error::StoreError;
use crate::idempotency::store::{BodyFingerprint, Claim, Completion};
use crate::idempotency::{Checkpoint, StoredResponse};
use crate::store::token::Token;

/// How long a released attempt of an operation is remembered.
const KEEP_ATTEMPT_MS: u64 = 10 * 60 * 1_000;

scripts! {
    /// The scripts of idempotency.
    pub(crate) struct IdempotencyScripts {
        begin: "idempotency_begin.lua" after idempotency_record;
        renew: "idempotency_renew.lua";
        complete: "idempotency_complete.lua" after server_notify;
        release: "idempotency_release.lua" after server_notify;
        inspect: "idempotency_inspect.lua" after idempotency_record;
        forget: "idempotency_forget.lua" after server_notify idempotency_record;
        complete_unknown: "idempotency_complete_unknown.lua" after server_notify idempotency_record;
    }
}

impl IdempotencyScripts {
    pub(crate) async fn begin(
        &self,
        servers: &Servers,
        keys: [&str; 2],
        claim: &Claim,
        max: u64,
    ) -> Result<Value, StoreError> {
        let Claim { token, head, lease, retention, takes_over, .. } = claim;
        let times = (millis(*lease), millis(*retention));
        let args = (token.as_bytes().as_slice(), head.0.as_slice(), times, u8::from(*takes_over), max);
        self.begin.call(servers, &keys, args).await
    }

    pub(crate) async fn renew(
        &self,
        servers: &Servers,
        record: &str,
        claim: &Claim,
        body_fingerprint: &BodyFingerprint,
        checkpoint: Option<&Checkpoint>,
    ) -> Result<Value, StoreError> {
        let (token, body_fingerprint) = (claim.token.as_bytes().as_slice(), body_fingerprint.to_bytes());
        let checkpoint = checkpoint.map(Checkpoint::to_bytes);
        let times = (millis(claim.lease), millis(claim.retention));
        let args = (token, times, body_fingerprint.as_slice(), checkpoint.as_deref());
        self.renew.call(servers, &[record], args).await
    }

    pub(crate) async fn complete(
        &self,
        servers: &Servers,
        record: &str,
        token: &Token,
        completion: &Completion,
        (publish, channel): (&str, &str),
    ) -> Result<Value, StoreError> {
        let Completion { response, is_kept, body_fingerprint, retention } = completion;
        let state = completed_state(*is_kept);
        let body_fingerprint = body_fingerprint.to_bytes();
        let kept = (state, millis(*retention), body_fingerprint.as_slice(), &**response);
        let args = (token.as_bytes().as_slice(), kept, publish, channel);
        self.complete.call(servers, &[record], args).await
    }

    pub(crate) async fn release(
        &self,
        servers: &Servers,
        keys: [&str; 2],
        token: &Token,
        max: u64,
        (publish, channel): (&str, &str),
    ) -> Result<Value, StoreError> {
        let args = (token.as_bytes().as_slice(), KEEP_ATTEMPT_MS, publish, channel, max);
        self.release.call(servers, &keys, args).await
    }

    pub(crate) async fn inspect(&self, servers: &Servers, record: &str) -> Result<Value, StoreError> {
        self.inspect.call(servers, &[record], Checkpoint::MAX_LEN).await
    }

    pub(crate) async fn forget(
        &self,
        servers: &Servers,
        record: &str,
        (found, fence): (u8, u64),
        (publish, channel): (&str, &str),
    ) -> Result<Value, StoreError> {
        let args = (found, fence, KEEP_ATTEMPT_MS, publish, channel);
        self.forget.call(servers, &[record], args).await
    }

    pub(crate) async fn complete_unknown(
        &self,
        servers: &Servers,
        record: &str,
        (found, fence): (u8, u64),
        (answer, retention): (&StoredResponse, Duration),
        (publish, channel): (&str, &str),
    ) -> Result<Value, StoreError> {
        let new_state = completed_state(answer.is_kept());
        let args = (fence, found, new_state, millis(retention), &**answer.bytes(), publish, channel);
        self.complete_unknown.call(servers, &[record], args).await
    }
}

/// The state of an operation that is completed with or without a response that is kept: see `idempotency_complete.lua`.
const fn completed_state(is_kept: bool) -> u8 {
    if is_kept { 2 } else { 3 }
}
