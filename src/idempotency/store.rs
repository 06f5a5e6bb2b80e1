//! For people who write a backend: what idempotency needs from a store.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use super::checkpoint::Checkpoint;
use super::status::{OperationPage, OperationStatus};
use super::stored_response::StoredResponse;
use crate::error::StoreError;
use crate::key::Key;
use crate::reach::Reach;
use crate::store::cursor::Cursor;

pub use super::operation::Operation;
pub use crate::store::notifications::Notifications;
use crate::store::shutdown::ShutdownTarget;
pub use crate::store::token::Token;

/// What idempotency needs from a backend: one record for each operation. Every change of a record is one atomic step. While an attempt
/// holds an operation, only its token can renew, complete or release the operation.
///
/// ```text
///            begin                  complete
///   free ------------> in flight ------------> completed, with or without the response
///     ^                 |  ^   \
///     |     release     |  |    the lease ends without completion: outcome unknown
///     +-----------------+  |                      |
///                          +----------------------+  renew, complete: by the token that still holds it
///                                                    begin: by a new token that takes over
/// ```
///
/// Each attempt has its own [`Token`], and each call may be repeated with it. The backend owns the clock.
///
/// All backends pass the same contract tests. `tollgate::testing` (feature `testing`) has them for your own backend.
///
/// # Cancellation
///
/// If you drop a returned future, the call may or may not have been executed.
pub trait IdempotencyStore {
    /// Claims a free operation, or reports its state.
    ///
    /// If an operation was neither completed nor released before its lease ended, a claim that [takes over](Claim::takes_over)
    /// gets it. The operation may have had effects, so from then on only the same request can claim it, also after a release,
    /// until its record expires.
    ///
    /// The [head](Claim::head) is compared first. If it differs from the head of the request that began the operation, the reply is
    /// [`Begun::Mismatch`]. If the token already holds the operation in flight, the call renews the lease and returns the same reply.
    fn begin(&self, operation: &Operation, claim: &Claim) -> impl Future<Output = Result<Begun, StoreError>> + Send;

    /// The reply of [`begin`](Self::begin), if it is available without waiting. `None` if not, and then nothing was done: call
    /// [`begin`](Self::begin). Returns `None` by default.
    fn try_begin(&self, operation: &Operation, claim: &Claim) -> Option<Result<Begun, StoreError>> {
        let _ = (operation, claim);
        None
    }

    /// Renews the lease of an attempt: the lease then ends after its full length from now. False if the token no longer holds the
    /// operation. An ended lease is renewed, too, if no other attempt has taken over.
    ///
    /// The body fingerprint replaces the stored one, unless the stored one covers more of the body: renewals and checkpoints may arrive
    /// out of order.
    fn renew(
        &self,
        operation: &Operation,
        claim: &Claim,
        body_fingerprint: &BodyFingerprint,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Stores the progress of an attempt, and renews its lease for its full length from now. False if the token no longer holds the
    /// operation. A checkpoint with a smaller [number](Checkpoint::number) than the stored one changes nothing, and the reply is true. The
    /// body fingerprint is handled as in [`renew`](Self::renew).
    ///
    /// The checkpoint stays until the operation is completed, also after a release. A released operation with a checkpoint can
    /// only be claimed by the same request, and is remembered for as long as without the release.
    fn checkpoint(
        &self,
        operation: &Operation,
        claim: &Claim,
        body_fingerprint: &BodyFingerprint,
        checkpoint: &Checkpoint,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Stores the response of an attempt, also after its lease has ended. False if the token no longer holds the operation; then
    /// nothing changes. The head stays as it was at the beginning.
    fn complete(
        &self,
        operation: &Operation,
        token: &Token,
        completion: &Completion,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// The reply of [`complete`](Self::complete), if it is available without waiting. `None` if not, and then nothing was done:
    /// call [`complete`](Self::complete). Returns `None` by default.
    fn complete_now(
        &self,
        operation: &Operation,
        token: &Token,
        completion: &Completion,
    ) -> Option<Result<bool, StoreError>> {
        let _ = (operation, token, completion);
        None
    }

    /// Releases an operation, so that the next request executes it. True if the token held it, or no token did. In both cases the token can
    /// no longer claim the operation, even if its [`begin`](Self::begin) arrives later. This holds until another token claims or is
    /// released, the operation is forgotten, or the record expires.
    ///
    /// After a release, any request can claim the operation, unless the operation has a checkpoint or was taken over. Then only the same
    /// request can, for as long as the operation would have been remembered without the release. Its claim returns the stored body
    /// fingerprint.
    ///
    /// `claim` is the claim of the attempt. Only its token and its [bound](Claim::bound) matter.
    fn release(&self, operation: &Operation, claim: &Claim) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Notifications for a waiter, whenever the operation is completed or released. When the future is ready, no later completion or
    /// release is missed. Call [`begin`](Self::begin) again then, and after each notification. A store without notifications returns
    /// [`Notifications::none`].
    fn watch(&self, operation: &Operation) -> impl Future<Output = Notifications> + Send;

    /// The reach within which an operation is executed once.
    fn reach(&self) -> Reach;

    /// Adds work to the shutdown of the backend. The shutdown closes the work and waits until the work is idle: see
    /// [`backend`](crate::backend#shutdown). A store that wraps another one has to pass the call on. Defaults to nothing, for a store
    /// without a shutdown.
    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        let _ = target;
    }
}

/// What operators need from a backend, and requests do not: inspect an operation, forget it, or complete it by hand.
pub trait IdempotencyRegistry: IdempotencyStore {
    /// The state of an operation. `None` if it has no record.
    fn inspect(
        &self,
        operation: &Operation,
    ) -> impl Future<Output = Result<Option<OperationStatus>, StoreError>> + Send;

    /// Frees an operation for any request, if it still has the state and the fence in `status`. The check and the change are one
    /// atomic step. False if the operation has changed; then nothing changes. A repeated call returns the same until the next
    /// attempt begins.
    fn forget(&self, status: &OperationStatus) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Completes an operation with a response that is stored for `retention`, if its outcome is still unknown and it has the
    /// fence in `status`. The check and the change are one atomic step. The fingerprints of the request stay. The attempt that
    /// began the operation can no longer change it.
    ///
    /// Also replaces a response that an earlier call stored, if the operation is still [completed](super::OperationState::Completed) as
    /// in `status`.
    ///
    /// False if the operation has changed, or if `status` has another state; then nothing changes. A repeated call with the same
    /// response returns the same.
    fn complete_unknown(
        &self,
        status: &OperationStatus,
        response: &StoredResponse,
        retention: Duration,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// The operations of a scope, or all operations. Scans about `max` stored entries, and returns the operations found there with the
    /// next cursor.
    fn list(
        &self,
        scope: Option<&Key>,
        from: Cursor,
        max: usize,
    ) -> impl Future<Output = Result<OperationPage, StoreError>> + Send;
}

/// The parameters of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Claim {
    /// Identifies the attempt.
    pub token: Token,
    /// The fingerprint of the request without its body.
    pub head: Digest,
    /// How long the attempt may be silent before its outcome is unknown, from [`Claim::MIN_LEASE`] to [`Claim::MAX_LEASE`].
    pub lease: Duration,
    /// How long the record is stored after the lease, from [`Claim::MIN_RETENTION`] to [`Claim::MAX_RETENTION`].
    pub retention: Duration,
    /// Whether to execute an operation again whose outcome is unknown.
    pub takes_over: bool,
    /// The maximum number of records of the scope. `None` leaves only the limit of the store.
    pub bound: Option<RecordBound>,
}

/// The maximum number of records of a scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordBound {
    /// The scope whose records are counted together. It may be a part of the scope of an [`Operation`]: a layer counts by caller,
    /// over all routes.
    pub scope: Key,
    /// The maximum number. Operations that have a record already are not affected.
    pub max: u64,
}

impl Claim {
    /// A claim that does not take over, without a bound.
    #[must_use]
    pub const fn new(token: Token, head: Digest, lease: Duration, retention: Duration) -> Self {
        Self { token, head, lease, retention, takes_over: false, bound: None }
    }

    /// The shortest lease.
    pub const MIN_LEASE: Duration = Duration::from_millis(10);
    /// The longest lease.
    pub const MAX_LEASE: Duration = Duration::from_secs(86_400);
    /// The shortest retention of a record.
    pub const MIN_RETENTION: Duration = Duration::from_secs(1);
    /// The longest retention of a record.
    pub const MAX_RETENTION: Duration = Duration::from_secs(365 * 86_400);
}

/// The first half of a SHA-256. A layer keys the hash with its secret. Without a secret, a reader of the store can guess the request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Digest(pub [u8; 16]);

/// The fingerprint of a body, as far as the handler has read it.
///
/// The unread part cannot have influenced the handler. So a request is the same if its body begins with the same bytes. If the
/// handler has read the end, the body must end there, too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct BodyFingerprint {
    /// The number of bytes read.
    pub len: u64,
    /// Whether the handler has read the end. `None` if nothing was recorded yet.
    pub is_whole: Option<bool>,
    /// The digest of the bytes read.
    pub digest: Digest,
}

impl BodyFingerprint {
    /// The length of the stored form, in bytes.
    pub const BYTES: usize = 24;

    /// The stored form: see `lua/idempotency_begin.lua`.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0] = match self.is_whole {
            None => 0,
            Some(false) => 1,
            Some(true) => 2,
        };
        bytes[1..8].copy_from_slice(&self.len.to_le_bytes()[..7]);
        bytes[8..].copy_from_slice(&self.digest.0);
        bytes
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote; `None` for other bytes.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        let is_whole = match bytes[0] {
            0 => None,
            1 => Some(false),
            2 => Some(true),
            _ => return None,
        };
        let mut len = [0; 8];
        len[..7].copy_from_slice(&bytes[1..8]);
        let digest = Digest(bytes[8..].try_into().ok()?);
        Some(Self { len: u64::from_le_bytes(len), is_whole, digest })
    }

    /// Of two fingerprints of the same body, the one that covers more.
    pub(crate) fn or_more(self, other: Self) -> Self {
        if (self.len, self.is_whole) > (other.len, other.is_whole) { self } else { other }
    }
}

/// The result of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Completion {
    /// The response, or the mark that replaces a response that is not stored. Stores do not interpret it.
    pub response: Arc<[u8]>,
    /// Whether it is the whole response.
    pub is_kept: bool,
    /// The fingerprint of the body that the handler has read.
    pub body_fingerprint: BodyFingerprint,
    /// How long the result is stored, from [`Claim::MIN_RETENTION`] to [`Claim::MAX_RETENTION`].
    pub retention: Duration,
}

impl Completion {
    /// A whole response.
    #[must_use]
    pub fn new(response: impl Into<Arc<[u8]>>, body_fingerprint: BodyFingerprint, retention: Duration) -> Self {
        Self { response: response.into(), is_kept: true, body_fingerprint, retention }
    }
}

/// The result of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Begun {
    /// The token holds the operation.
    Granted {
        /// Larger than the fence of every earlier attempt.
        fence: u64,
        /// The number of the attempt, from 1. Earlier attempts count while they are remembered.
        attempt: u32,
        /// The known fingerprint of the body of earlier attempts. The body of this attempt must match it.
        body_fingerprint: BodyFingerprint,
        /// The last checkpoint of earlier attempts.
        checkpoint: Option<Checkpoint>,
    },
    /// The operation has no record, and its [scope](RecordBound) has reached its maximum.
    ScopeFull {
        /// When the scope may have room again, as far as the store knows.
        retry_after: Duration,
    },
    /// Another request used the same key.
    Mismatch,
    /// Another attempt is running.
    InFlight {
        /// Until the lease of that attempt ends, unless it is renewed.
        remaining: Duration,
        /// The fingerprint of its body, as far as it is known.
        body_fingerprint: BodyFingerprint,
    },
    /// The operation was begun, and its lease ended without a result.
    Unknown {
        /// Number of attempts.
        attempt: u32,
        /// The fingerprint of the body of the last attempt, as far as it is known.
        body_fingerprint: BodyFingerprint,
    },
    /// The operation is completed.
    Completed {
        /// The fingerprint of its body.
        body_fingerprint: BodyFingerprint,
        /// The stored response.
        response: Arc<[u8]>,
        /// Whether it is the whole response.
        is_kept: bool,
    },
}
