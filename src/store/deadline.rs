use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use pin_project_lite::pin_project;
use tokio::time::{Instant, Sleep, sleep};

use crate::error::{ConfigError, StoreError};

/// The default deadline of a store call.
pub(crate) const DEFAULT_DEADLINE: Duration = Duration::from_millis(100);

pin_project! {
    /// A store call that fails after its deadline.
    ///
    /// The timer starts only when the call is pending, so a backend that replies at once has no timer cost. If the timer wakes late because the
    /// process was suspended, the reply may have arrived meanwhile. So the call gets another tenth of the deadline to read it.
    pub(crate) struct Deadline<F> {
        #[pin]
        call: F,
        timeout: Duration,
        #[pin]
        timer: Option<Sleep>,
        is_extended: bool,
    }
}

/// Refuses a deadline of zero, within which no store can reply.
pub(crate) fn require_nonzero_deadline(deadline: Duration) -> Result<(), StoreError> {
    if deadline.is_zero() { Err(StoreError::other(ConfigError::ZeroTimeout { setting: "deadline" })) } else { Ok(()) }
}

/// Makes a store call within a deadline. A deadline of zero is an error with every backend, even if the backend replies at once.
pub(crate) async fn call_within<T>(
    deadline: Duration,
    call: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    require_nonzero_deadline(deadline)?;
    Deadline::new(call, deadline).await
}

impl<F> Deadline<F> {
    pub(crate) fn new(call: F, timeout: Duration) -> Self {
        Self { call, timeout, timer: None, is_extended: false }
    }
}

impl<F, T> Future for Deadline<F>
where
    F: Future<Output = Result<T, StoreError>>,
{
    type Output = Result<T, StoreError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        if let Poll::Ready(reply) = this.call.poll(cx) {
            return Poll::Ready(reply);
        }
        if this.timer.is_none() {
            this.timer.set(Some(sleep(*this.timeout)));
        }
        let Some(mut timer) = this.timer.as_pin_mut() else { return Poll::Pending };
        while timer.as_mut().poll(cx).is_ready() {
            let (now, grace) = (Instant::now(), *this.timeout / 10);
            if *this.is_extended || now < timer.deadline() + grace {
                let timeout = this.timeout;
                return Poll::Ready(Err(StoreError::late(format!("no reply within the deadline of {timeout:?}"))));
            }
            *this.is_extended = true;
            timer.as_mut().reset(now + grace);
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::error::Error;
    use std::future::{pending, ready};
    use std::pin::pin;

    #[tokio::test(start_paused = true)]
    async fn hanging_call_fails_at_deadline() {
        let start = tokio::time::Instant::now();
        let error = Deadline::new(pending::<Result<(), _>>(), Duration::from_millis(100)).await.unwrap_err();
        assert!(error.is_timeout());
        assert_eq!(error.source().unwrap().to_string(), "no reply within the deadline of 100ms");
        assert_eq!(start.elapsed(), Duration::from_millis(100));
    }

    #[tokio::test(start_paused = true)]
    async fn late_timer_leaves_time_to_read_reply() {
        for (delay, expected) in [(5, Ok(155)), (20, Err(160))] {
            let start = Instant::now();
            let reply = async move {
                sleep(Duration::from_millis(150 + delay)).await;
                Ok(())
            };
            let mut call = pin!(Deadline::new(reply, Duration::from_millis(100)));
            tokio::select! {
                biased;
                _ = &mut call => panic!("the reply has not arrived yet"),
                () = ready(()) => {}
            }
            tokio::time::advance(Duration::from_millis(150)).await;
            let reply = call.await;
            let elapsed = start.elapsed().as_millis();
            assert_eq!(reply.map(|()| elapsed).map_err(|_| elapsed), expected);
        }
    }

    #[tokio::test]
    async fn immediate_reply_meets_zero_deadline() {
        Deadline::new(ready(Ok(())), Duration::ZERO).await.unwrap();
    }
}
