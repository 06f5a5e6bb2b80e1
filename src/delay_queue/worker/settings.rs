//! The settings of a worker.

use std::sync::Arc;
use std::time::Duration;

use tracing::Span;

use super::events::EventSender;
use crate::delay_queue::backoff::Backoff;
use crate::delay_queue::job::Job;
use crate::delay_queue::trace;

pub(crate) struct Settings<T> {
    pub(crate) concurrency: usize,
    pub(crate) lease: Duration,
    pub(crate) max_runtime: Option<Duration>,
    pub(crate) abort_after: Duration,
    pub(crate) grace: Duration,
    pub(crate) backoff: Backoff,
    pub(crate) on_undecodable: OnUndecodable,
    pub(crate) span: Option<Arc<MakeSpan<T>>>,
    pub(crate) events: EventSender,
}

type MakeSpan<T> = dyn Fn(&Job<T>) -> Span + Send + Sync;

impl<T> Settings<T> {
    /// Creates the span of an attempt.
    pub(crate) fn span(&self, queue: &str, job: &Job<T>) -> Span {
        let span = self.span.as_ref().map_or_else(|| trace::span(queue, job), |make| make(job));
        #[cfg(feature = "otel")]
        trace::link(&span, job.headers());
        span
    }
}

/// How a worker handles a job whose payload it cannot decode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnUndecodable {
    /// The job is dead at once, [undecodable](crate::delay_queue::Reason::Undecodable).
    #[default]
    Dead,
    /// As after an error of the service: the job is tried again after the [backoff](super::DelayQueueWorker::backoff). After the last attempt it is dead:
    /// [undecodable](crate::delay_queue::Reason::Undecodable) if the last attempt could not decode it either. Use this during a rolling update, while
    /// workers of the old release may claim jobs of the new one.
    Retry,
}
