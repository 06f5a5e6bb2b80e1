use std::error::Error;
use std::fmt;

use super::error::LockError;
use super::layer::LeaseGuard;
use super::lease::LeaseHandle;
use crate::error::BoxError;

/// Why a request was turned away by a [`LockLayer`](super::LockLayer), or cancelled.
#[derive(Debug)]
#[non_exhaustive]
pub enum Rejection {
    /// There is no lease, or no longer one.
    Lock(LockError),
    /// The request has no key, and the layer is told to [reject](super::OnMissingKey::Reject) such requests.
    MissingKey(MissingKey),
    /// So many requests of the layer are at work that one more is not let in.
    Full(Full),
}

impl From<Rejection> for BoxError {
    /// The error inside: [`LockError`], [`MissingKey`] or [`Full`], to be found by downcasting.
    fn from(rejection: Rejection) -> Self {
        match rejection {
            Rejection::Lock(error) => error.into(),
            Rejection::MissingKey(error) => error.into(),
            Rejection::Full(error) => error.into(),
        }
    }
}

/// The rejection of a request that has no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MissingKey;

impl fmt::Display for MissingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the request carries no key to lock")
    }
}

impl Error for MissingKey {}

/// The rejection of a request by a layer that has as many requests at work as it
/// [may have](super::LockLayer::max_running).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Full;

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("too many requests are being served")
    }
}

impl Error for Full {}

/// What a lock has to do with requests and responses of one kind.
///
/// Implemented for the same types as [`Responder`](crate::responder::Responder), which has the other half of the answer.
///
/// A method that is left out changes what the lock protects: every request takes it then, handlers find no [`LeaseHandle`], and it is given back
/// before the body of the answer has ended. Over HTTP an answer of your own passes them on to [`HttpResponder`](crate::responder::HttpResponder), as in the
/// [examples](crate::responder#examples).
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not say which of the requests `{Req}` need a lock, and how long the answers `{Res}` keep it",
    note = "the default answers with an HTTP response (feature `http`); for other services call `.responder(ErrorResponder)`",
    note = "an answer of your own for a lock implements `BindLease` beside `Responder`; over HTTP all of its methods are passed on to `HttpResponder`, or the lock is given back before the body of the answer has ended"
)]
pub trait BindLease<Req, Res> {
    /// Whether the request changes nothing, so that it needs no lock. Unless told otherwise every request may.
    fn is_safe(&self, request: &Req) -> bool {
        let _ = request;
        false
    }

    /// Gives a request a look at its lease. Unless told otherwise there is no place for that.
    fn attach(&self, lease: LeaseHandle, request: &mut Req) {
        let _ = (lease, request);
    }

    /// Takes from a request that passes without its lock the look at the lease of a layer further out, which it would take for its own. Unless told otherwise
    /// there is none.
    fn pass(&self, request: &mut Req) {
        let _ = request;
    }

    /// Lets `response` keep the lock until it has come to its end. Unless told otherwise it has, when it is there.
    fn occupy(&self, stay: LeaseGuard, response: &mut Res) {
        let _ = response;
        drop(stay);
    }
}

impl<Req, Res> BindLease<Req, Res> for crate::responder::ErrorResponder {}
