//! Several futures at the same time.

use std::future::{Future, poll_fn};
use std::task::Poll;

/// Waits for all of several futures at the same time. Returns their results in order.
pub(crate) async fn together<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut futures: Vec<_> = futures.into_iter().map(|future| Some(Box::pin(future))).collect();
    let mut outcomes: Vec<_> = futures.iter().map(|_| None).collect();
    poll_fn(|cx| {
        for (future, outcome) in futures.iter_mut().zip(&mut outcomes) {
            if let Some(Poll::Ready(ready)) = future.as_mut().map(|future| future.as_mut().poll(cx)) {
                (*future, *outcome) = (None, Some(ready));
            }
        }
        if futures.iter().all(Option::is_none) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    outcomes.into_iter().flatten().collect()
}
