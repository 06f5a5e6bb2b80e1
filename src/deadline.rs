use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use pin_project_lite::pin_project;
use tokio::time::{Sleep, sleep};

use crate::error::StoreError;

pin_project! {
    /// A store call that is given up when its time is over.
    ///
    /// The timer is only set once the call has to wait, so a backend that answers at once pays nothing for its deadline.
    pub(crate) struct Deadline<F> {
        #[pin]
        call: F,
        limit: Duration,
        #[pin]
        timer: Option<Sleep>,
    }
}

impl<F> Deadline<F> {
    pub(crate) fn new(call: F, limit: Duration) -> Self {
        Self { call, limit, timer: None }
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
        match this.timer.as_pin_mut().map(|timer| timer.poll(cx)) {
            Some(Poll::Ready(())) => {
                Poll::Ready(Err(StoreError::late(format!("no answer within the deadline of {:?}", this.limit))))
            }
            Some(Poll::Pending) | None => Poll::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::error::Error;
    use std::future::{pending, ready};

    #[tokio::test(start_paused = true)]
    async fn a_call_that_hangs_is_given_up_on_time() {
        let start = tokio::time::Instant::now();
        let error = Deadline::new(pending::<Result<(), _>>(), Duration::from_millis(100)).await.unwrap_err();
        assert!(error.is_timeout());
        assert_eq!(error.source().unwrap().to_string(), "no answer within the deadline of 100ms");
        assert_eq!(start.elapsed(), Duration::from_millis(100));
    }

    #[tokio::test]
    async fn an_answer_that_is_there_needs_no_time() {
        Deadline::new(ready(Ok(())), Duration::ZERO).await.unwrap();
    }
}
