//! What a layer answers when it turns a request away.

use crate::error::BoxError;

/// Turns a rejection into what the caller of the service gets, and passes on what the inner service answered.
///
/// A layer has one of these as its last type parameter. Two come with the crate: [`AsResponse`], which is the default and
/// needs the feature `http`, and [`AsError`].
///
/// `R` is the rejection, `Res` and `E` are the response and the error of the inner service.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot turn `{R}` into an answer of a service that answers `{Res}`",
    note = "the default answers with an HTTP response (feature `http`); for other services call `.with_rejection(AsError)`"
)]
pub trait Reject<R, Res, E> {
    /// What the service answers behind the layer.
    type Response;
    /// What the service fails with behind the layer.
    type Error;

    /// The answer to a request that was turned away.
    fn reject(&self, rejection: R) -> Result<Self::Response, Self::Error>;

    /// What a response of the inner service is passed on as.
    fn response(&self, response: Res) -> Self::Response;

    /// What a failure of the inner service is passed on as.
    fn error(&self, error: E) -> Self::Error;
}

/// A rejection becomes an error: a [`BoxError`] to downcast, beside the errors of the inner service.
#[derive(Clone, Copy, Debug, Default)]
pub struct AsError;

impl<R, Res, E> Reject<R, Res, E> for AsError
where
    R: Into<BoxError>,
    E: Into<BoxError>,
{
    type Response = Res;
    type Error = BoxError;

    fn reject(&self, rejection: R) -> Result<Res, BoxError> {
        Err(rejection.into())
    }

    fn response(&self, response: Res) -> Res {
        response
    }

    fn error(&self, error: E) -> BoxError {
        error.into()
    }
}

/// A rejection becomes an HTTP response, so the service fails only where the inner service does.
///
/// Implemented with the feature `http`; see the module `tollgate::http` for the responses.
#[derive(Clone, Copy, Debug, Default)]
pub struct AsResponse;
