//! The result of a handler.

use ::http::Response;
use bytes::Bytes;
use http_body::Body;

use super::classify::has_lost_its_lock;
use super::detach::Answer;
use super::execution::Execution;
use super::settings::Settings;
use super::settle::Outcome;
use super::stream::ResponseStart;
use crate::error::BoxError;

/// The state of a handler that has returned.
#[expect(clippy::large_enum_variant, reason = "nearly all values are the large variant, and no future holds one")]
pub(super) enum HandlerOutcome<R, E> {
    /// The whole response. It is sent after it is stored.
    Complete(Outcome, Answer<R, E>),
    /// A response whose body continues. Boxed, so that whole responses need no room for it.
    Streaming(Box<ResponseStart<R>>),
    /// The handler was dropped while it ran, its response was discarded, or the handler was not started.
    Aborted,
}

impl<R, E> HandlerOutcome<R, E>
where
    R: Body<Data = Bytes>,
    R::Error: Into<BoxError>,
    E: 'static,
{
    /// Reads the ready part of a response, which usually is the whole. `result` is `None` if the handler was stopped.
    pub(super) fn of(settings: &Settings, execution: &Execution, result: Option<Result<Response<R>, E>>) -> Self {
        let response = match result {
            Some(Ok(response)) => response,
            Some(Err(error)) => {
                let outcome = if has_lost_its_lock(&error) { Outcome::Unknown } else { Outcome::Failed };
                return Self::Complete(outcome, Err(error));
            }
            None => return Self::Aborted,
        };
        let is_unrouted = execution.is_unrouted(response.status());
        let mut start = ResponseStart::new(response, settings, is_unrouted);
        if start.read_ready() {
            let (outcome, response) = start.into_whole();
            Self::Complete(outcome, Ok(response))
        } else {
            Self::Streaming(Box::new(start))
        }
    }
}
