use std::error::Error;
use std::fmt;

use super::error::LockError;
use super::lease::LeaseHandle;
use super::lease_guard::LeaseGuard;
use crate::error::BoxError;

/// Why a [`LockLayer`](super::LockLayer) rejected or cancelled a request.
#[derive(Debug)]
#[non_exhaustive]
pub enum Rejection {
    /// The lease was not granted, or was lost.
    Lock(LockError),
    /// The request has no key, and the layer [rejects](crate::OnMissingKey::Reject) such requests.
    MissingKey(MissingKey),
    /// The layer has as many running requests as allowed.
    Full(Full),
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lock(error) => fmt::Display::fmt(error, f),
            Self::MissingKey(error) => fmt::Display::fmt(error, f),
            Self::Full(error) => fmt::Display::fmt(error, f),
        }
    }
}

impl From<Rejection> for BoxError {
    /// The error inside: [`LockError`], [`MissingKey`] or [`Full`], for downcasting.
    fn from(rejection: Rejection) -> Self {
        match rejection {
            Rejection::Lock(error) => error.into(),
            Rejection::MissingKey(error) => error.into(),
            Rejection::Full(error) => error.into(),
        }
    }
}

/// The rejection of a request without a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MissingKey;

impl fmt::Display for MissingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the request carries no key to lock")
    }
}

impl Error for MissingKey {}

/// The rejection of a request by a layer with [`max_running`](super::LockLayer::max_running) running requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Full;

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("too many requests are being served")
    }
}

impl Error for Full {}

/// Tells a [`LockLayer`](super::LockLayer) which requests need a lock, and how long a response keeps it.
///
/// Implemented for the same types as [`Responder`](crate::responder::Responder), which makes the response.
///
/// With the default methods, every request takes the lock, handlers find no [`LeaseHandle`], and the
/// lock is released before the response body has ended. So over HTTP, do not implement this trait for another body or status: use
/// [`HttpResponder::map_rejection`](crate::HttpResponder::map_rejection).
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot decide which requests `{Req}` need a lock, and how long responses `{Res}` keep it",
    note = "the default responds with an HTTP response (feature `http`); for other services call `.responder(ErrorResponder)`",
    note = "your own responder has to implement `BindLease` and `Responder`; over HTTP, `HttpResponder::map_rejection` takes a closure"
)]
pub trait BindLease<Req, Res> {
    /// Whether the request changes nothing, so that it needs no lock. By default, no request is safe.
    fn is_safe(&self, request: &Req) -> bool {
        let _ = request;
        false
    }

    /// Adds a handle of its lease to a request. By default, does nothing.
    fn attach(&self, lease: LeaseHandle, request: &mut Req) {
        let _ = (lease, request);
    }

    /// Removes the lease handle of an outer layer from a request that passes without its own lock. By default, does nothing.
    fn pass(&self, request: &mut Req) {
        let _ = request;
    }

    /// Keeps the lock until `response` has ended. By default, releases the lock at once.
    fn bind(&self, stay: LeaseGuard, response: &mut Res) {
        let _ = response;
        drop(stay);
    }
}

impl<Req, Res> BindLease<Req, Res> for crate::responder::ErrorResponder {}
