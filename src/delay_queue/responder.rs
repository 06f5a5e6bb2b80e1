use super::job::Job;
use crate::error::BoxError;
use crate::lock::{BindLease, LeaseHandle};
use crate::rate_limit::{AnnotateResponse, LimitInfo, RateLimitHandle};
use crate::responder::{ErrorResponder, Responder};

/// The responder of layers in front of a service of [jobs](Job). A rejection becomes an error, as with
/// [`ErrorResponder`](crate::responder::ErrorResponder). The worker then snoozes the job, or makes it dead if the limit can never allow it.
///
/// Each layer adds a handle to the [extensions](Job::extensions) of the job. A [`RateLimitLayer`](crate::RateLimitLayer) adds a
/// [`RateLimitHandle`], with which the service reports the final cost. A [`LockLayer`](crate::LockLayer) adds a [`LeaseHandle`], which has
/// the fence of the lock.
///
/// ```
/// use tollgate::delay_queue::JobResponder;
/// use tollgate::lock::LeaseHandle;
/// use tollgate::rate_limit::RateLimitHandle;
/// use tollgate::{BoxError, Job, LockLayer, MemoryBackend, Policy, Quota, RateLimitLayer};
/// use tower::{ServiceBuilder, service_fn};
///
/// async fn summarize(job: Job<String>) -> Result<(), BoxError> {
///     let fence = job.extensions().get::<LeaseHandle>().map(LeaseHandle::fence);
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
///     .layer(RateLimitLayer::new(backend.clone(), tokens).cost(|_: &Job<String>| 1_000).responder(JobResponder))
///     .layer(LockLayer::new(backend, "mail").key(|job: &Job<String>| job.to_string()).responder(JobResponder))
///     .service(service_fn(summarize));
/// # let _ = service;
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct JobResponder;

impl<R, Res, E> Responder<R, Res, E> for JobResponder
where
    R: Into<BoxError>,
    E: Into<BoxError>,
{
    type Response = Res;
    type Error = BoxError;

    fn reject(&self, rejection: R) -> Result<Res, BoxError> {
        Responder::<R, Res, E>::reject(&ErrorResponder, rejection)
    }

    fn response(&self, response: Res) -> Res {
        Responder::<R, Res, E>::response(&ErrorResponder, response)
    }

    fn error(&self, error: E) -> BoxError {
        Responder::<R, Res, E>::error(&ErrorResponder, error)
    }
}

impl<T, Res> AnnotateResponse<Job<T>, Res> for JobResponder {
    fn attaches(&self) -> bool {
        true
    }

    fn attach(&self, handle: RateLimitHandle, job: &mut Job<T>) {
        job.extensions_mut().insert(handle);
    }

    fn pass(&self, job: &mut Job<T>) {
        job.extensions_mut().remove::<RateLimitHandle>();
    }

    fn annotates(&self) -> bool {
        false
    }

    /// Adds nothing, since the worker discards the response of a job.
    fn annotate(&self, _: &LimitInfo<'_>, _: &mut Res) {}
}

impl<T, Res> BindLease<Job<T>, Res> for JobResponder {
    fn attach(&self, lease: LeaseHandle, job: &mut Job<T>) {
        job.extensions_mut().insert(lease);
    }

    fn pass(&self, job: &mut Job<T>) {
        job.extensions_mut().remove::<LeaseHandle>();
    }
}
