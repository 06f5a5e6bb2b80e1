use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use pin_project_lite::pin_project;
use tokio::time::{Instant, Sleep, sleep};

use crate::error::{ConfigError, StoreError};

pin_project! {
    /// A store call that is given up when its time is over.
    ///
    /// The timer is only set once the call has to wait, so a backend that answers at once pays nothing for its deadline. Where that wakes up
    /// late, because the process stood still, the answer may have come meanwhile: it has a tenth of the time to be read.
    pub(crate) struct Deadline<F> {
        #[pin]
        call: F,
        limit: Duration,
        #[pin]
        timer: Option<Sleep>,
        is_extended: bool,
    }
}

/// Refuses to ask a store that would have no time to answer.
pub(crate) fn require_nonzero_deadline(deadline: Duration) -> Result<(), StoreError> {
    if deadline.is_zero() { Err(StoreError::other(ConfigError::ZeroTimeout { setting: "deadline" })) } else { Ok(()) }
}

impl<F> Deadline<F> {
    pub(crate) fn new(call: F, limit: Duration) -> Self {
        Self { call, limit, timer: None, is_extended: false }
    }
}

impl<F, T> Future for Deadline<F>
where
    F: Future<Output = Result<T, StoreError>>,
{
    type Output = Result<T, StoreError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        if let Poll::Ready(answer) = this.call.poll(cx) {
            return Poll::Ready(answer);
        }
        if this.timer.is_none() {
            this.timer.set(Some(sleep(*this.limit)));
        }
        let Some(mut timer) = this.timer.as_pin_mut() else { return Poll::Pending };
        while timer.as_mut().poll(cx).is_ready() {
            let (now, grace) = (Instant::now(), *this.limit / 10);
            if *this.is_extended || now < timer.deadline() + grace {
                let limit = this.limit;
                return Poll::Ready(Err(StoreError::late(format!("no answer within the deadline of {limit:?}"))));
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
    async fn a_call_that_hangs_is_given_up_on_time() {
        let start = tokio::time::Instant::now();
        let error = Deadline::new(pending::<Result<(), _>>(), Duration::from_millis(100)).await.unwrap_err();
        assert!(error.is_timeout());
        assert_eq!(error.source().unwrap().to_string(), "no answer within the deadline of 100ms");
        assert_eq!(start.elapsed(), Duration::from_millis(100));
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_that_stood_still_looks_for_an_answer_before_it_gives_up() {
        for (after, ends) in [(5, Ok(155)), (20, Err(160))] {
            let start = Instant::now();
            let answer = async move {
                sleep(Duration::from_millis(150 + after)).await;
                Ok(())
            };
            let mut call = pin!(Deadline::new(answer, Duration::from_millis(100)));
            tokio::select! {
                biased;
                _ = &mut call => panic!("it is not there yet"),
                () = ready(()) => {}
            }
            tokio::time::advance(Duration::from_millis(150)).await;
            let answer = call.await;
            let ended = start.elapsed().as_millis();
            assert_eq!(answer.map(|()| ended).map_err(|_| ended), ends);
        }
    }

    #[tokio::test]
    async fn an_answer_that_is_there_needs_no_time() {
        Deadline::new(ready(Ok(())), Duration::ZERO).await.unwrap();
    }
}
