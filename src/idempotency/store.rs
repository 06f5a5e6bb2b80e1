use std::fmt;
use std::future::Future;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use super::checkpoint::Checkpoint;
use crate::error::StoreError;
use crate::key::Key;
use crate::lock::{Notifications, Reach, Token};

/// What idempotency needs of a backend: one record for each operation, every change of it one atomic step that only the token
/// which has it may take.
///
/// ```text
///            begin                  complete
///   free ------------> in flight ------------> completed, with its answer or without
///     ^                 |  ^   \
///     |     release     |  |    the lease ends without a word: outcome unknown
///     +-----------------+  |                      |
///                          +----------------------+  renew, complete: by the token that has it still
///                                                    begin: by another one that takes over
/// ```
///
/// Each attempt has a [`Token`] of its own, and everything may be asked again with it. The backend keeps the time.
/// Every backend passes the same contract tests, which `tollgate::testing` (feature `testing`) has for others.
///
/// # Cancellation
///
/// Dropping a returned future may or may not have done what was asked.
pub trait IdempotencyStore {
    /// Claims an operation that is free, or says how far it is.
    ///
    /// One that was begun and neither completed nor given back in time is claimed if the claim [takes over](Claim::takes_over). From then on
    /// something may have come of it, so it is that of the same request until its record ends, also when it is given back.
    ///
    /// A head other than that of the request which has begun it is a [mismatch](Begun::Mismatch) before anything else is said. Where the
    /// token has it in flight already, the lease lasts its whole time again and the answer is the one that was given before.
    fn begin(&self, operation: &Operation, claim: &Claim) -> impl Future<Output = Result<Begun, StoreError>> + Send;

    /// What [`begin`](Self::begin) answers, if that need not be waited for. `None`, with nothing done, says nothing: ask
    /// [`begin`](Self::begin) then. A store need not have this.
    fn begin_now(&self, operation: &Operation, claim: &Claim) -> Option<Result<Begun, StoreError>> {
        let _ = (operation, claim);
        None
    }

    /// Lets the lease of an attempt last its whole time from now on. False if the operation is not the token's any more. A lease
    /// that has ended comes back, as long as nobody has taken over.
    ///
    /// The payload takes the place of the one that is known, unless that knows more of the body: renewals and checkpoints may come in another
    /// order than they were sent in.
    fn renew(
        &self,
        operation: &Operation,
        claim: &Claim,
        payload: &Payload,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Puts down how far an attempt has come, and lets its lease last its whole time from now on. False if the operation is not the
    /// token's any more. One with a smaller [number](Checkpoint::number) than that which is there changes nothing. The payload is taken as
    /// by a [renewal](Self::renew).
    ///
    /// It stays until the operation is completed: also when the attempt is given back, which is then still the operation of
    /// the same request, and for as long as it would have been remembered without that.
    fn checkpoint(
        &self,
        operation: &Operation,
        claim: &Claim,
        payload: &Payload,
        checkpoint: &Checkpoint,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Keeps the answer of an attempt, also one whose lease has ended. False if the operation is not the token's any more: nothing
    /// is changed then. The head stays the one that was there at the beginning.
    fn complete(
        &self,
        operation: &Operation,
        token: &Token,
        completion: &Completion,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// What [`complete`](Self::complete) answers, if that need not be waited for. `None`, with nothing done, says nothing: ask
    /// [`complete`](Self::complete) then. A store need not have this.
    fn complete_now(
        &self,
        operation: &Operation,
        token: &Token,
        completion: &Completion,
    ) -> Option<Result<bool, StoreError>> {
        let _ = (operation, token, completion);
        None
    }

    /// Gives an operation back, so that the next request begins it again. True if it was the token's or nobody's; either way the
    /// token cannot claim it any more, wherever a [`begin`](Self::begin) may still be on its way, until another one is given back.
    ///
    /// It is any request's then, unless it has a checkpoint or was taken over: the next one has to be the same, for as long as it would have
    /// been remembered without that, and is told the payload that is known.
    ///
    /// The claim is that of the attempt. Only its token and its [bound](Claim::bound) matter.
    fn release(&self, operation: &Operation, claim: &Claim) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Wake-ups for somebody who waits for an operation to be completed or given back. The future is ready once neither can be missed
    /// any more: the caller asks again then, and after each wake-up. A store that cannot tell answers [`Notifications::none`].
    fn watch(&self, operation: &Operation) -> impl Future<Output = Notifications> + Send;

    /// Among whom an operation is done once.
    fn scope(&self) -> Reach;
}

/// Which operation: what the client calls it, within the scope that is the client's own.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Operation {
    scope: Key,
    key: Key,
}

// By hand: a key is an array of its longest length, and most are short.
impl Hash for Operation {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.scope.as_hashed().hash(state);
        self.key.as_hashed().hash(state);
    }
}

/// A colon within a scope. A key never has such an escape of its own.
const COLON: &str = "%3A";

impl Operation {
    /// The operation that prints as `name`: in the log, and as [`IdempotencyHandle::operation`](super::IdempotencyHandle::operation) does. `None` if
    /// none does.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        let (scope, key) = name.split_once(':')?;
        Some(Self { scope: Key::stored(&scope.replace(COLON, ":"))?, key: Key::stored(key)? })
    }

    /// The operation that whoever has `scope` calls `key`.
    pub fn new(scope: impl Into<Key>, key: impl Into<Key>) -> Self {
        Self { scope: scope.into(), key: key.into() }
    }

    /// Who calls it so.
    #[must_use]
    pub const fn scope(&self) -> &Key {
        &self.scope
    }

    /// What it is called.
    #[must_use]
    pub const fn key(&self) -> &Key {
        &self.key
    }
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Operation({self})")
    }
}

/// The scope and the key, with a colon between. One within the scope is escaped, so that [`parse`](Operation::parse) can tell them apart.
impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, part) in self.scope.as_str().split(':').enumerate() {
            f.write_str(if number > 0 { COLON } else { "" })?;
            f.write_str(part)?;
        }
        write!(f, ":{}", self.key)
    }
}

/// What an attempt asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Claim {
    /// Who asks.
    pub token: Token,
    /// What is known of the request before its body is read.
    pub head: Digest,
    /// How long the attempt is taken to be alive without a word, from [`Claim::MIN_LEASE`] to [`Claim::MAX_LEASE`].
    pub lease: Duration,
    /// How long the record is kept after the lease, from [`Claim::MIN_RETENTION`] to [`Claim::MAX_RETENTION`].
    pub retention: Duration,
    /// Whether to begin anew what was begun and neither completed nor given back before its lease ended.
    pub takes_over: bool,
    /// How many records the scope of the claim may have. `None` sets no bound beside that of the store.
    pub bound: Option<RecordBound>,
}

/// How many records a scope may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordBound {
    /// Whose records are counted together. This may be a part of the scope of an [`Operation`]: to a layer it is the caller, on whatever route.
    pub scope: Key,
    /// How many there may be. An operation that has a record already is always answered.
    pub most: u64,
}

impl Claim {
    /// A claim that takes over nothing.
    #[must_use]
    pub const fn new(token: Token, head: Digest, lease: Duration, retention: Duration) -> Self {
        Self { token, head, lease, retention, takes_over: false, bound: None }
    }

    /// The shortest lease there is.
    pub const MIN_LEASE: Duration = Duration::from_millis(10);
    /// The longest lease there is.
    pub const MAX_LEASE: Duration = Duration::from_secs(86_400);
    /// The shortest time that a record is kept.
    pub const MIN_RETENTION: Duration = Duration::from_secs(1);
    /// The longest time that a record is kept.
    pub const MAX_RETENTION: Duration = Duration::from_secs(365 * 86_400);
}

/// Half of a keyed SHA-256: enough to tell requests apart, and nothing that a request could be guessed from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Digest(pub [u8; 16]);

/// The fingerprint of a body, as far as the handler has read it.
///
/// What a handler has not read cannot have changed what it did. So a request is the same if its body begins the same, and ends
/// there too where the handler has seen the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Payload {
    /// How many bytes were read.
    pub len: u64,
    /// Whether that was all of it; `None` if nothing was noted yet.
    pub is_whole: Option<bool>,
    /// The digest of these bytes.
    pub digest: Digest,
}

impl Payload {
    /// How many bytes a payload has in a store.
    pub const BYTES: usize = 24;

    /// As it lies in a store: see `lua/idempotency_begin.lua`.
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

    /// What [`to_bytes`](Self::to_bytes) has written; `None` if it was not that.
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

    /// The one of two of the same body that knows more of it.
    pub(crate) fn or_more(self, other: Self) -> Self {
        if (self.len, self.is_whole) > (other.len, other.is_whole) { self } else { other }
    }
}

/// What an attempt leaves behind.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Completion {
    /// The answer, or what there is to say about one that was too large; the store does not look into it.
    pub answer: Arc<[u8]>,
    /// Whether that is all of the answer.
    pub is_kept: bool,
    /// What the handler has read of the body.
    pub payload: Payload,
    /// How long it is kept, from [`Claim::MIN_RETENTION`] to [`Claim::MAX_RETENTION`].
    pub retention: Duration,
}

impl Completion {
    /// An answer that is kept whole.
    #[must_use]
    pub fn new(answer: impl Into<Arc<[u8]>>, payload: Payload, retention: Duration) -> Self {
        Self { answer: answer.into(), is_kept: true, payload, retention }
    }
}

/// What came of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Begun {
    /// The operation is the token's to do.
    Granted {
        /// Larger than that of every attempt before.
        fence: u64,
        /// 1 for the first attempt, as far as is remembered.
        attempt: u32,
        /// What is known of the body that came with the attempt before: that of this one has to be the same.
        payload: Payload,
        /// How far the attempts before have come.
        checkpoint: Option<Checkpoint>,
    },
    /// There is no record of it, and no more of them are kept for its [scope](RecordBound).
    ScopeFull {
        /// When there may be room again, as far as the store knows.
        retry_after: Duration,
    },
    /// Another request has the same key.
    Mismatch,
    /// Somebody is doing it.
    InFlight {
        /// For how long at the most, unless the lease is renewed.
        remaining: Duration,
        /// What is known so far of the body that came with it.
        payload: Payload,
    },
    /// It was begun, and whoever did so was not heard of in time.
    Unknown {
        /// How many attempts there were.
        attempt: u32,
        /// What is known of the body that came with it.
        payload: Payload,
    },
    /// It is done.
    Completed {
        /// The body that came with it.
        payload: Payload,
        /// What was answered.
        answer: Arc<[u8]>,
        /// Whether that is all of the answer.
        is_kept: bool,
    },
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_operation_is_known_by_its_name(scope in "[a:%,é]{0,9}", path in "[/:a]{0,9}", key in "[b:%]{0,60}") {
            for scope in [Key::new(&scope), Key::from((&*scope, "POST", &*path))] {
                let operation = Operation::new(scope, &*key);
                prop_assert_eq!(Operation::parse(&operation.to_string()), Some(operation));
            }
        }

        #[test]
        fn any_text_is_the_name_of_an_operation_or_none(name in ".{0,20}") {
            if let Some(operation) = Operation::parse(&name) {
                prop_assert_eq!(Operation::parse(&operation.to_string()), Some(operation));
            }
        }
    }
}
