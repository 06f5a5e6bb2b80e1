use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::backoff::Backoff;
use super::record::{Due, Reason};
use super::store::{AckKind, MAX_NOTE};
use crate::error::{BoxError, ContentionHint, causes};
use crate::idempotency::OperationError;
use crate::rate_limit::Denial;

/// Says what becomes of a job, in the place of an error that says no more than that it has failed.
///
/// A service answers with it as its error, or with an error that has it as its [source](Error::source), however deep, or that shows it as its own, as
/// `anyhow` and `#[error(transparent)]` do. The outermost one counts. What is neither is tried again after the [backoff](super::DelayQueueWorker::backoff) of the worker, but for what the layers of this crate
/// say: see [`DelayQueueWorker`](super::DelayQueueWorker#what-becomes-of-a-job).
///
/// ```
/// use std::time::Duration;
/// use tollgate::BoxError;
/// use tollgate::delay_queue::{Job, Outcome};
///
/// async fn send(job: Job<String>) -> Result<(), BoxError> {
///     match job.as_str() {
///         "" => Err(Outcome::dead("there is nobody to send it to").into()),
///         "later" => Err(Outcome::snooze(Duration::from_secs(60)).into()),
///         _ => Ok(()),
///     }
/// }
/// ```
#[derive(Debug)]
pub struct Outcome {
    said: Said,
}

/// What an [`Outcome`] says, as an error of its own beneath it: whoever wraps that one and passes on its source hides it, but not this.
#[derive(Debug)]
struct Said {
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
        Self { said: Said { kind, source: None } }
    }

    /// The attempt has failed, and the next one is to be made after `delay`; the job is dead if this was the last one.
    #[must_use]
    pub const fn retry_after(delay: Duration) -> Self {
        Self::new(Kind::Retry(delay))
    }

    /// The job waits for `delay`, at least 10 ms, and the attempt does not count. Then it goes before jobs of its priority that are due later; until
    /// then these may run.
    #[must_use]
    pub const fn snooze(delay: Duration) -> Self {
        Self::new(Kind::Snooze(delay))
    }

    /// The job will not be tried again, for this reason.
    #[must_use]
    pub fn dead(why: impl Into<Box<str>>) -> Self {
        Self::new(Kind::Dead(why.into()))
    }

    /// The job is not to be done any more, and forgotten. Its unique key is free, as after [`cancel`](super::DelayQueue::cancel).
    #[must_use]
    pub const fn cancel() -> Self {
        Self::new(Kind::Cancel)
    }

    /// What has led to it, which is noted with the job. Defaults to nothing.
    #[must_use]
    pub fn because(mut self, error: impl Into<BoxError>) -> Self {
        self.said.source = Some(error.into());
        self
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.said.kind {
            Kind::Retry(delay) => write!(f, "to be tried again after {delay:?}"),
            Kind::Snooze(delay) => write!(f, "put off for {delay:?}"),
            Kind::Dead(why) => f.write_str(why),
            Kind::Cancel => f.write_str("not to be done any more"),
        }
    }
}

impl Error for Outcome {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.said)
    }
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.kind {
            Kind::Retry(_) => "the attempt has failed",
            Kind::Snooze(_) => "the attempt does not count",
            Kind::Dead(_) => "the job is dead",
            Kind::Cancel => "the job is forgotten",
        })
    }
}

impl Error for Said {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().map(|source| &**source as _)
    }
}

/// What a failure means for a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FailureAction {
    Ends(AckKind),
    /// Over a limit that has room for the next one after this time.
    Limited(Duration),
    /// Somebody else is at it for so long at the most, and may be done at any time.
    Busy(Duration),
    /// Forgotten.
    Cancelled,
}

/// How long a job waits at the most for what somebody else has, if it is alone in that. It may be given back at any time.
const LONGEST_FOR_LOCK: Duration = Duration::from_secs(1);
/// No less, so that it is not claimed in a circle.
const SHORTEST_SNOOZE: Duration = Duration::from_millis(10);

impl FailureAction {
    /// What follows from the failure of an attempt.
    pub(crate) fn of(error: &BoxError, attempt: u16, backoff: &Backoff) -> Self {
        Self::said(error)
            .unwrap_or_else(|| Self::Ends(AckKind::Retry { delay: backoff.delay(attempt), error: note(error) }))
    }

    /// What an error says of the job, if it says more than that the attempt has failed.
    pub(crate) fn said(error: &BoxError) -> Option<Self> {
        causes(&**error).find_map(|cause| Self::of_one(cause, error))
    }

    /// Looks for what lies beneath the errors that say something of a job, since those themselves may be hidden.
    fn of_one(cause: &(dyn Error + 'static), whole: &BoxError) -> Option<Self> {
        if let Some(said) = cause.downcast_ref::<Said>() {
            return Some(match &said.kind {
                Kind::Retry(delay) => Self::Ends(AckKind::Retry { delay: bounded(*delay), error: note(whole) }),
                Kind::Snooze(delay) => Self::Ends(AckKind::Snooze { delay: bounded(*delay).max(SHORTEST_SNOOZE) }),
                Kind::Dead(_) => Self::Ends(AckKind::Dead { reason: Reason::Refused, error: note(whole) }),
                Kind::Cancel => Self::Cancelled,
            });
        }
        if let Some(denial) = cause.downcast_ref::<Denial>() {
            return Some(match denial.wait() {
                Some(wait) => Self::Limited(bounded(wait).max(SHORTEST_SNOOZE)),
                // It asks for more than there ever is.
                None => Self::Ends(AckKind::Dead { reason: Reason::Refused, error: note(whole) }),
            });
        }
        if let Some(OperationError::InFlight { remaining }) = cause.downcast_ref() {
            return Some(Self::busy(*remaining));
        }
        cause.downcast_ref().map(|ContentionHint(wait)| Self::busy(*wait))
    }

    fn busy(wait: Duration) -> Self {
        // Half of it is waited for at the least.
        Self::Busy(wait.clamp(2 * SHORTEST_SNOOZE, LONGEST_FOR_LOCK))
    }
}

fn bounded(delay: Duration) -> Duration {
    delay.min(Due::MAX_DELAY)
}

/// What there is to say about an error and its sources, up to as much as is kept.
pub(crate) fn note(error: &BoxError) -> Arc<str> {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next.filter(|_| text.len() < MAX_NOTE) {
        // What these say the error above them has said already.
        if !(cause.is::<Said>() || cause.is::<Denial>() || cause.is::<ContentionHint>()) {
            text.push_str(": ");
            text.push_str(&cause.to_string());
        }
        next = cause.source();
    }
    let end = (0..=MAX_NOTE.min(text.len())).rev().find(|&end| text.is_char_boundary(end)).unwrap_or_default();
    text.truncate(end);
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

    /// Shows another error as its own, as `anyhow` and `#[error(transparent)]` do: its source is that of the other.
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

    fn verdict(error: impl Into<BoxError>) -> FailureAction {
        FailureAction::of(&error.into(), 1, &Backoff::fixed(Duration::ZERO))
    }

    #[test]
    fn what_is_about_to_be_free_is_not_asked_for_in_a_circle() {
        let now = tokio::time::Instant::now();
        let FailureAction::Busy(wait) = verdict(OperationError::InFlight { remaining: Duration::ZERO }) else {
            panic!("it is")
        };
        for _ in 0..100 {
            let delay = crate::delay_queue::worker::running_job::RetryStagger::new(now).turn(wait, now);
            assert!(delay >= SHORTEST_SNOOZE, "{delay:?}");
        }
    }

    #[test]
    fn an_outcome_is_found_however_deep_it_lies() {
        let delay = Duration::from_secs(7);
        let deep = || Wrapped(Box::new(Wrapped(Outcome::snooze(delay).into())));
        assert_eq!(verdict(Outcome::snooze(delay)), FailureAction::Ends(AckKind::Snooze { delay }));
        assert_eq!(verdict(deep()), FailureAction::Ends(AckKind::Snooze { delay }));
        assert_eq!(verdict(Wrapped(Outcome::cancel().into())), FailureAction::Cancelled);
    }

    #[test]
    fn snoozed_job_waits_for_a_moment_at_least() {
        let snoozed = verdict(Outcome::snooze(Duration::ZERO));
        assert_eq!(snoozed, FailureAction::Ends(AckKind::Snooze { delay: SHORTEST_SNOOZE }));
    }

    fn limited(decision: Decision) -> RateLimited {
        RateLimited::new(Policy::new("mails", Quota::per_hour(5).fixed_window()), 1, decision)
    }

    /// The story of jobs that ran twenty times, though the first attempt had said that they were dead: with `anyhow` what it had said was not seen.
    #[test]
    fn what_says_something_of_a_job_is_heard_through_what_shows_it_as_its_own() {
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
            let bare = verdict(error());
            assert!(!matches!(&bare, FailureAction::Ends(AckKind::Retry { delay: Duration::ZERO, .. })), "{bare:?}");
            let within = || Transparent(Box::new(Transparent(error())));
            assert_eq!(verdict(within()), bare);
            assert_eq!(verdict(io::Error::other(error())), bare);
            assert_eq!(verdict(io::Error::other(within())), bare);

            // And no text is there twice.
            let mut texts: Vec<String> = causes(&*error()).map(ToString::to_string).collect();
            let count = texts.len();
            texts.sort_unstable();
            texts.dedup();
            assert_eq!(texts.len(), count, "{texts:?}");
        }
    }

    #[test]
    fn any_other_failure_is_tried_again_and_noted_with_its_causes() {
        let error = "the mail was not sent: nobody listens".into();
        assert_eq!(
            verdict(Wrapped("nobody listens".into())),
            FailureAction::Ends(AckKind::Retry { delay: Duration::ZERO, error })
        );
        let FailureAction::Ends(AckKind::Dead { reason: Reason::Refused, error }) =
            verdict(Outcome::dead("no such customer").because("404"))
        else {
            panic!("it is dead");
        };
        assert_eq!(&*error, "no such customer: 404");
    }

    #[test]
    fn what_is_noted_ends_between_two_letters() {
        let text = note(&"\u{e4}".repeat(MAX_NOTE).into());
        assert_eq!(text.len(), MAX_NOTE);
        let text = note(&format!("x{}", "\u{e4}".repeat(MAX_NOTE)).into());
        assert_eq!(text.len(), MAX_NOTE - 1);
    }
}
