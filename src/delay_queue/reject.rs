use super::job::Job;
use crate::error::BoxError;
use crate::lock::{LeaseView, Occupy};
use crate::rate_limit::{Announce, RateLimitHandle, Standing};
use crate::reject::{AsError, Reject};

/// What the layers of this crate answer in front of a service of [jobs](Job): a rejection puts the job off, as with
/// [`AsError`](crate::reject::AsError), and one that is let through has what the layer knows of it in its [extensions](Job::extensions).
///
/// That is a [`RateLimitHandle`] of a [`RateLimitLayer`](crate::RateLimitLayer), by which the service says what the job has cost in the end, and a
/// [`LeaseView`] of a [`LockLayer`](crate::LockLayer), which has the fence of its lock.
///
/// ```
/// use tollgate::delay_queue::AsOutcome;
/// use tollgate::lock::LeaseView;
/// use tollgate::rate_limit::RateLimitHandle;
/// use tollgate::{BoxError, Job, LockLayer, MemoryBackend, Policy, Quota, RateLimitLayer};
/// use tower::{ServiceBuilder, service_fn};
///
/// async fn summarize(job: Job<String>) -> Result<(), BoxError> {
///     let fence = job.extensions().get::<LeaseView>().map(LeaseView::fence);
///     // UPDATE documents SET summary = .., fence = $1 WHERE fence <= $1
///     let tokens_used = 420;
///     if let Some(limit) = job.extensions().get::<RateLimitHandle>() {
///         limit.settle(tokens_used); // of the 1,000 that were reserved
///     }
///     # drop(fence);
///     Ok(())
/// }
///
/// let backend = MemoryBackend::new();
/// let tokens = Policy::new("tokens", Quota::per_minute(100_000).token_bucket());
/// let service = ServiceBuilder::new()
///     .layer(RateLimitLayer::new(backend.clone(), tokens).cost(|_: &Job<String>| 1_000).with_rejection(AsOutcome))
///     .layer(LockLayer::new(backend).key(|job: &Job<String>| job.to_string()).with_rejection(AsOutcome))
///     .service(service_fn(summarize));
/// # let _ = service;
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct AsOutcome;

impl<R, Res, E> Reject<R, Res, E> for AsOutcome
where
    R: Into<BoxError>,
    E: Into<BoxError>,
{
    type Response = Res;
    type Error = BoxError;

    fn reject(&self, rejection: R) -> Result<Res, BoxError> {
        Reject::<R, Res, E>::reject(&AsError, rejection)
    }

    fn response(&self, response: Res) -> Res {
        Reject::<R, Res, E>::response(&AsError, response)
    }

    fn error(&self, error: E) -> BoxError {
        Reject::<R, Res, E>::error(&AsError, error)
    }
}

impl<T, Res> Announce<Job<T>, Res> for AsOutcome {
    fn attaches(&self) -> bool {
        true
    }

    fn attach(&self, handle: RateLimitHandle, job: &mut Job<T>) {
        job.extensions_mut().insert(handle);
    }

    fn pass(&self, job: &mut Job<T>) {
        job.extensions_mut().remove::<RateLimitHandle>();
    }

    fn announces(&self) -> bool {
        false
    }

    /// Adds nothing: nobody reads what a job answers.
    fn announce(&self, _: &Standing<'_>, _: &mut Res) {}
}

impl<T, Res> Occupy<Job<T>, Res> for AsOutcome {
    fn attach(&self, lease: LeaseView, job: &mut Job<T>) {
        job.extensions_mut().insert(lease);
    }

    fn pass(&self, job: &mut Job<T>) {
        job.extensions_mut().remove::<LeaseView>();
    }
}
