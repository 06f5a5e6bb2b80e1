//! Why a request was rejected.

use std::error::Error;
use std::fmt;

use super::rate_limited::RateLimited;
use crate::error::{BoxError, StoreError};
use crate::key::missing_key;

/// Why a request was rejected. Each case has its own type, so "over the limit" and "the store is down" cannot be confused.
#[derive(Debug)]
#[non_exhaustive]
pub enum Rejection {
    /// The request is over its limit.
    Limited(RateLimited),
    /// The request has no key, and the layer is configured to [reject](crate::OnMissingKey::Reject) such requests.
    MissingKey(MissingKey),
    /// A [deny list](super::RateLimitLayer::deny) or a [filter](super::RateLimitLayer::filter) of the layer rejected the request.
    Denied(Denied),
    /// The store or the resolver failed, and the layer [denies](super::RateLimitFallback::Deny) the request.
    /// [`Local`](super::RateLimitFallback::Local) also denies a cost above the share of this process.
    Store(StoreError),
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Limited(error) => fmt::Display::fmt(error, f),
            Self::MissingKey(error) => fmt::Display::fmt(error, f),
            Self::Denied(error) => fmt::Display::fmt(error, f),
            Self::Store(error) => fmt::Display::fmt(error, f),
        }
    }
}

impl From<Rejection> for BoxError {
    /// Returns the inner error: [`RateLimited`], [`MissingKey`], [`Denied`] or [`StoreError`]. Downcast to find out which.
    fn from(rejection: Rejection) -> Self {
        match rejection {
            Rejection::Limited(error) => error.into(),
            Rejection::MissingKey(error) => error.into(),
            Rejection::Denied(error) => error.into(),
            Rejection::Store(error) => error.into(),
        }
    }
}

/// The rejection of a request that has no key.
///
/// If an extractor of this crate found no key because the server has not put an extension into the request, the message names that
/// extension. This applies to debug builds only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissingKey {
    hint: Option<&'static str>,
}

impl MissingKey {
    /// For the request that this thread handles at the moment.
    pub(super) fn new() -> Self {
        Self { hint: missing_key::recorded() }
    }
}

impl fmt::Display for MissingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the request carries no key to count it under")?;
        self.hint.map_or(Ok(()), |hint| write!(f, ": {hint}"))
    }
}

impl Error for MissingKey {}

/// The rejection of a request by a deny list or a filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Denied;

impl fmt::Display for Denied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the request is not allowed")
    }
}

impl Error for Denied {}
