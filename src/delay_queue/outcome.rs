use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::backoff::Backoff;
use super::record::{Due, FailureInfo, Reason};
use super::store::{AckKind, MAX_ERROR_LEN};
use crate::error::{BoxError, ContentionHint, causes};
use crate::idempotency::OperationError;
use crate::rate_limit::Denial;

/// An error that determines what becomes of a job. Any other error only says that the attempt has failed.
///
/// A service returns it as its error, or as any [source](Error::source) of its error, however deep. It is also found through wrappers that
/// display an inner error as their own, as `anyhow` and `#[error(transparent)]` do. The outermost one counts. A job with any other error is
/// tried again after the [backoff](super::DelayQueueWorker::backoff) of the worker. Errors of this crate's layers have their own rules: see
/// [`DelayQueueWorker`](super::DelayQueueWorker#what-becomes-of-a-job).
///
/// ```
/// use std::time::Duration;
/// use tollgate::BoxError;
/// use tollgate::delay_queue::{Job, Outcome};
///
/// async fn send(job: Job<String>) -> Result<(), BoxError> {
///     match job.as_str() {
///         "" => Err(Outcome::dead("no recipient").into()),
///         "later" => Err(Outcome::snooze(Duration::from_secs(60)).into()),
///         _ => Ok(()),
///     }
/// }
/// ```
#[derive(Debug)]
pub struct Outcome {
    detail: Detail,
}

/// The content of an [`Outcome`], and its [source](Error::source). A transparent wrapper hides the `Outcome`, but returns its source.
#[derive(Debug)]
struct Detail {
    kind: Kind,
    source: Option<BoxError>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Retry(Duration),
    Snooze(Duration),
    Dead(Box<str>),
    Cancel,
}

impl Outcome {
    const fn new(kind: Kind) -> Self {
        Self { detail: Detail { kind, source: None } }
    }

    /// The attempt failed, and the next one follows after `delay`. The job is dead if this was the last attempt.
    #[must_use]
    pub const fn retry_after(delay: Duration) -> Self {
        Self::new(Kind::Retry(delay))
    }

    /// The job waits for `delay`, at least 10 ms, and the attempt does not count. The due time does not change: after the delay, the job
    /// precedes jobs of its priority that are due later.
    #[must_use]
    pub const fn snooze(delay: Duration) -> Self {
        Self::new(Kind::Snooze(delay))
    }

    /// The job is dead, for the reason `why`: it is not tried again.
    #[must_use]
    pub fn dead(why: impl Into<Box<str>>) -> Self {
        Self::new(Kind::Dead(why.into()))
    }

    /// The job is cancelled: it is removed, and its unique key is free, as after [`cancel`](super::DelayQueue::cancel).
    #[must_use]
    pub const fn cancel() -> Self {
        Self::new(Kind::Cancel)
    }

    /// The cause. Its text is stored with the job if the job is tried again or dead. Defaults to none.
    #[must_use]
    pub fn because(mut self, error: impl Into<BoxError>) -> Self {
        self.detail.source = Some(error.into());
        self
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.detail.kind {
            Kind::Retry(delay) => write!(f, "the job is tried again after {delay:?}"),
            Kind::Snooze(delay) => write!(f, "the job is snoozed for {delay:?}"),
            Kind::Dead(why) => f.write_str(why),
            Kind::Cancel => f.write_str("the job is not needed any more"),
        }
    }
}

impl Error for Outcome {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.detail)
    }
}

impl fmt::Display for Detail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.kind {
            Kind::Retry(_) => "the attempt failed",
            Kind::Snooze(_) => "the attempt does not count",
            Kind::Dead(_) => "the job is dead",
            Kind::Cancel => "the job is cancelled",
        })
    }
}

impl Error for Detail {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().map(|source| &**source as _)
    }
}

/// What a failure means for a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FailureAction {
    Ack(AckKind),
    /// Over a rate limit, which has capacity for one more job after this time.
    Limited(Duration),
    /// Another job or client holds the lock or runs the operation. The job waits for about this time, at most [`MAX_BUSY_WAIT`].
    Busy(Duration),
    /// Cancelled by the service.
    Cancelled,
}

/// The longest wait for a lock or an operation, before `RetryStagger` adds a delay for other waiting jobs. Short, since the holder may
/// end at any time.
const MAX_BUSY_WAIT: Duration = Duration::from_secs(1);
/// Prevents claiming the same job in a busy loop.
const MIN_SNOOZE: Duration = Duration::from_millis(10);

impl FailureAction {
    /// The action for a failed attempt: from the error, or else a retry after the backoff.
    pub(crate) fn of(error: &BoxError, attempt: u16, backoff: &Backoff) -> Self {
        Self::from_error(error)
            .unwrap_or_else(|| Self::Ack(AckKind::Retry { delay: backoff.delay(attempt), error: error_text(error) }))
    }

    /// The action that an error or one of its causes determines.
    pub(crate) fn from_error(error: &BoxError) -> Option<Self> {
        causes(&**error).find_map(|cause| Self::from_cause(cause, error))
    }

    // Matches the sources of `Outcome` and of rejections: a transparent wrapper hides the error itself, but returns its source.
    fn from_cause(cause: &(dyn Error + 'static), error: &BoxError) -> Option<Self> {
        if let Some(detail) = cause.downcast_ref::<Detail>() {
            return Some(match &detail.kind {
                Kind::Retry(delay) => Self::Ack(AckKind::Retry { delay: bounded(*delay), error: error_text(error) }),
                Kind::Snooze(delay) => Self::Ack(AckKind::Snooze { delay: bounded(*delay).max(MIN_SNOOZE) }),
                Kind::Dead(_) => Self::Ack(AckKind::Dead { reason: Reason::Refused, error: error_text(error) }),
                Kind::Cancel => Self::Cancelled,
            });
        }
        if let Some(denial) = cause.downcast_ref::<Denial>() {
            return Some(match denial.wait() {
                Some(wait) => Self::Limited(bounded(wait).max(MIN_SNOOZE)),
                // The cost exceeds the limit, so it would never be allowed.
                None => Self::Ack(AckKind::Dead { reason: Reason::Refused, error: error_text(error) }),
            });
        }
        if let Some(OperationError::InFlight { remaining }) = cause.downcast_ref() {
            return Some(Self::busy(*remaining));
        }
        cause.downcast_ref().map(|ContentionHint(wait)| Self::busy(*wait))
    }

    fn busy(wait: Duration) -> Self {
        // `RetryStagger::contended_delay` may halve the wait, which must stay at least `MIN_SNOOZE`.
        Self::Busy(wait.clamp(2 * MIN_SNOOZE, MAX_BUSY_WAIT))
    }
}

fn bounded(delay: Duration) -> Duration {
    delay.min(Due::MAX_DELAY)
}

/// The text of an error and its causes, up to the length that is stored.
pub(crate) fn error_text(error: &BoxError) -> Arc<str> {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next.filter(|_| text.len() < MAX_ERROR_LEN) {
        // These sources add nothing to the text of the error above them.
        if !(cause.is::<Detail>() || cause.is::<Denial>() || cause.is::<ContentionHint>()) {
            text.push_str(": ");
            text.push_str(&cause.to_string());
        }
        next = cause.source();
    }
    text.truncate(FailureInfo::cut(&text).len());
    text.into()
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::lock::{Busy, LockError, LockKey, QueueFull};
    use crate::rate_limit::{Decision, LimitStatus, Policy, Quota, RateLimited};

    #[derive(Debug)]
    struct Wrapped(BoxError);

    impl fmt::Display for Wrapped {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("the mail was not sent")
        }
    }

    impl Error for Wrapped {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            Some(&*self.0)
        }
    }

    /// Displays another error as its own, as `anyhow` and `#[error(transparent)]` do: its source is that of the other error.
    #[derive(Debug)]
    struct Transparent(BoxError);

    impl fmt::Display for Transparent {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            self.0.fmt(f)
        }
    }

    impl Error for Transparent {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.0.source()
        }
    }

    fn action(error: impl Into<BoxError>) -> FailureAction {
        FailureAction::of(&error.into(), 1, &Backoff::fixed(Duration::ZERO))
    }

    #[test]
    fn contended_job_is_not_claimed_in_a_busy_loop() {
        let now = tokio::time::Instant::now();
        let FailureAction::Busy(wait) = action(OperationError::InFlight { remaining: Duration::ZERO }) else {
            panic!("expected `Busy`")
        };
        for _ in 0..100 {
            let delay = crate::delay_queue::worker::retry_stagger::RetryStagger::new(now).contended_delay(wait, now);
            assert!(delay >= MIN_SNOOZE, "{delay:?}");
        }
    }

    #[test]
    fn outcome_is_found_at_any_depth() {
        let delay = Duration::from_secs(7);
        let deep = || Wrapped(Box::new(Wrapped(Outcome::snooze(delay).into())));
        assert_eq!(action(Outcome::snooze(delay)), FailureAction::Ack(AckKind::Snooze { delay }));
        assert_eq!(action(deep()), FailureAction::Ack(AckKind::Snooze { delay }));
        assert_eq!(action(Wrapped(Outcome::cancel().into())), FailureAction::Cancelled);
    }

    #[test]
    fn snooze_has_a_minimum() {
        let snoozed = action(Outcome::snooze(Duration::ZERO));
        assert_eq!(snoozed, FailureAction::Ack(AckKind::Snooze { delay: MIN_SNOOZE }));
    }

    fn limited(decision: Decision) -> RateLimited {
        RateLimited::new(Policy::new("mails", Quota::per_hour(5).fixed_window()), 1, decision)
    }

    /// Jobs ran twenty times although the first attempt had returned `Outcome::dead`: with `anyhow` the outcome was not found.
    #[test]
    fn outcome_and_rejections_are_found_through_transparent_errors() {
        let wait = Duration::from_secs(7);
        let lock = LockKey::new("orders", "42");
        let full = LimitStatus::new(5, 0, wait, wait);
        let errors: [fn(LockKey, LimitStatus, Duration) -> BoxError; 11] = [
            |_, _, wait| Outcome::retry_after(wait).because("busy").into(),
            |_, _, wait| Outcome::snooze(wait).into(),
            |_, _, _| Outcome::dead("no such customer").because("404").into(),
            |_, _, _| Outcome::cancel().into(),
            |lock, _, _| Outcome::dead("no such order").because(Busy::new(lock, Duration::ZERO)).into(),
            |lock, _, _| Busy::new(lock, Duration::from_millis(300)).into(),
            |lock, _, wait| LockError::Busy(Busy::new(lock, wait)).into(),
            |lock, _, _| LockError::QueueFull(QueueFull::new(lock)).into(),
            |_, _, wait| OperationError::InFlight { remaining: wait }.into(),
            |_, full, _| limited(Decision::new([full])).into(),
            |_, _, _| limited(Decision::never([0])).into(),
        ];
        for make in errors {
            let error = || make(lock, full, wait);
            let bare = action(error());
            assert!(!matches!(&bare, FailureAction::Ack(AckKind::Retry { delay: Duration::ZERO, .. })), "{bare:?}");
            let within = || Transparent(Box::new(Transparent(error())));
            assert_eq!(action(within()), bare);
            assert_eq!(action(io::Error::other(error())), bare);
            assert_eq!(action(io::Error::other(within())), bare);

            // Each text appears once.
            let mut texts: Vec<String> = causes(&*error()).map(ToString::to_string).collect();
            let count = texts.len();
            texts.sort_unstable();
            texts.dedup();
            assert_eq!(texts.len(), count, "{texts:?}");
        }
    }

    #[test]
    fn other_failure_is_retried_and_noted_with_its_causes() {
        let error = "the mail was not sent: connection refused".into();
        assert_eq!(
            action(Wrapped("connection refused".into())),
            FailureAction::Ack(AckKind::Retry { delay: Duration::ZERO, error })
        );
        let FailureAction::Ack(AckKind::Dead { reason: Reason::Refused, error }) =
            action(Outcome::dead("no such customer").because("404"))
        else {
            panic!("expected `Dead`");
        };
        assert_eq!(&*error, "no such customer: 404");
    }

    #[test]
    fn note_is_cut_at_a_character_boundary() {
        let text = error_text(&"\u{e4}".repeat(MAX_ERROR_LEN).into());
        assert_eq!(text.len(), MAX_ERROR_LEN);
        let text = error_text(&format!("x{}", "\u{e4}".repeat(MAX_ERROR_LEN)).into());
        assert_eq!(text.len(), MAX_ERROR_LEN - 1);
    }
}
