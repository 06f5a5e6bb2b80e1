//! The failure of a store.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use super::cause::BoxError;

/// The backend failed, so there is no decision.
///
/// A `StoreError` never means "denied": a request over its limit gets a [`Decision`](crate::rate_limit::Decision). The type is opaque.
/// Its predicates are stable. Its wording, and the type of its [`source`](Error::source), are not.
#[derive(Clone)]
pub struct StoreError {
    kind: Kind,
    // Whether the call certainly had no effect.
    is_refusal: bool,
    source: Option<Arc<dyn Error + Send + Sync>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Timeout,
    Unavailable,
    Unauthorized,
    OutOfMemory,
    ForeignData,
    Other,
}

impl StoreError {
    /// No reply came within the deadline. The call may have had an effect.
    #[must_use]
    pub fn timeout() -> Self {
        Self { kind: Kind::Timeout, is_refusal: false, source: None }
    }

    /// A timeout, with a description of what was late as its source.
    pub(crate) fn late(source: impl Into<BoxError>) -> Self {
        Self::with_source(Kind::Timeout, source)
    }

    /// The backend is unreachable, or cannot serve now.
    pub fn unavailable(source: impl Into<BoxError>) -> Self {
        Self::with_source(Kind::Unavailable, source)
    }

    /// The same failure, of a call that was not sent and so had no effect. A timeout becomes `Unavailable`.
    #[cfg(feature = "redis")]
    pub(crate) fn before_sending(self) -> Self {
        match self.kind {
            Kind::Timeout | Kind::Unavailable => Self { kind: Kind::Unavailable, is_refusal: true, ..self },
            _ => self,
        }
    }

    /// The same failure, but part of the call may have had an effect: in another store, in an earlier call, or before the script failed.
    pub(crate) fn in_doubt(self) -> Self {
        Self { is_refusal: false, ..self }
    }

    /// The backend rejects the credentials, or they do not permit the call.
    pub fn unauthorized(source: impl Into<BoxError>) -> Self {
        Self::with_source(Kind::Unauthorized, source)
    }

    /// Like [`unauthorized`](Self::unauthorized), after part of the call may have had an effect.
    #[cfg(feature = "redis")]
    pub(crate) fn unauthorized_in_part(source: impl Into<BoxError>) -> Self {
        Self::unauthorized(source).in_doubt()
    }

    /// The backend has no memory for the write.
    pub fn out_of_memory(source: impl Into<BoxError>) -> Self {
        Self::with_source(Kind::OutOfMemory, source)
    }

    /// The key holds data that this version of Tollgate did not write and cannot read.
    pub fn foreign_data(source: impl Into<BoxError>) -> Self {
        Self::with_source(Kind::ForeignData, source)
    }

    /// Any other failure.
    pub fn other(source: impl Into<BoxError>) -> Self {
        Self::with_source(Kind::Other, source)
    }

    fn with_source(kind: Kind, source: impl Into<BoxError>) -> Self {
        let is_refusal = matches!(kind, Kind::Unauthorized | Kind::OutOfMemory | Kind::ForeignData);
        Self { kind, is_refusal, source: Some(Arc::from(source.into())) }
    }

    /// Whether no reply came in time. The call may have had an effect.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        self.kind == Kind::Timeout
    }

    /// Whether the backend is down, unreachable, still loading or not accepting writes. Retry later.
    #[must_use]
    pub fn is_unavailable(&self) -> bool {
        self.kind == Kind::Unavailable
    }

    /// Whether the credentials are wrong, missing or insufficient. Retries fail until an operator changes them.
    #[must_use]
    pub fn is_unauthorized(&self) -> bool {
        self.kind == Kind::Unauthorized
    }

    /// Whether the backend has no memory left for writes.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        self.kind == Kind::OutOfMemory
    }

    /// Whether the key holds data of another program, or of a version of Tollgate that this one cannot read.
    #[must_use]
    pub fn is_foreign_data(&self) -> bool {
        self.kind == Kind::ForeignData
    }

    /// Whether the call was not sent or was refused, so that it certainly had no effect.
    pub(crate) const fn is_refusal(&self) -> bool {
        self.is_refusal
    }
}

impl fmt::Debug for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreError").field("kind", &self.kind).field("source", &self.source).finish()
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            Kind::Timeout => "the store did not answer in time",
            Kind::Unavailable => "the store is unavailable",
            Kind::Unauthorized => "the store refused the credentials",
            Kind::OutOfMemory => "the store is out of memory",
            Kind::ForeignData => "the key holds data that this version of tollgate cannot read",
            Kind::Other => "the store failed",
        })
    }
}

impl Error for StoreError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().map(|source| &**source as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_in_doubt_is_no_refusal() {
        for error in [StoreError::unauthorized(""), StoreError::out_of_memory(""), StoreError::foreign_data("")] {
            let kind = error.kind;
            assert!(error.is_refusal());
            let error = error.in_doubt();
            assert!(!error.is_refusal() && error.kind == kind, "{error:?}");
        }
    }

    #[test]
    fn each_level_displays_only_itself() {
        let error = StoreError::unavailable("connection refused");
        assert_eq!(error.to_string(), "the store is unavailable");
        assert_eq!(error.source().unwrap().to_string(), "connection refused");
    }
}
