use super::decision::{MissingKey, RateLimited};
use crate::error::{BoxError, StoreError};

/// Why a request was turned away. Each case is a type of its own, so "over the limit" and "the store is down" cannot be
/// confused.
#[derive(Debug)]
#[non_exhaustive]
pub enum Rejection {
    /// The request is over its limit.
    Limited(RateLimited),
    /// The request has no key, and the layer is told to [reject](super::OnMissingKey::Reject) such requests.
    MissingKey(MissingKey),
    /// The store failed, and the layer is told to [deny](super::OnStoreError::Deny) requests then.
    Store(StoreError),
}

impl From<Rejection> for BoxError {
    /// The error inside: [`RateLimited`], [`MissingKey`] or [`StoreError`], to be found by downcasting.
    fn from(rejection: Rejection) -> Self {
        match rejection {
            Rejection::Limited(error) => error.into(),
            Rejection::MissingKey(error) => error.into(),
            Rejection::Store(error) => error.into(),
        }
    }
}

/// Lets the response of an admitted or rejected request say how its limit stands.
///
/// Implemented for the same types as [`Reject`](crate::reject::Reject), which has the other half of the answer.
pub trait Announce<Res> {
    /// Adds to `response` what the client should know; `decision` is `None` where none could be made.
    fn announce(&self, policy: &super::Policy, decision: Option<&super::Decision>, response: &mut Res);
}

impl<Res> Announce<Res> for crate::reject::AsError {
    /// Adds nothing: a plain service has no place for it.
    fn announce(&self, _: &super::Policy, _: Option<&super::Decision>, _: &mut Res) {}
}
