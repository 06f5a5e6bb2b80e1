use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::{Context, Poll};

use tower_service::Service;

use crate::delay_queue::job::Job;
use crate::error::BoxError;
use crate::panics::discard;

/// The instances of a worker's service. The worker claims a job only when an instance is ready for it.
pub(crate) struct ReadyServices<S> {
    // Makes new instances; `None` if there is only one instance.
    source: Option<Source<S>>,
    ready: Vec<S>,
    // The instance whose `poll_ready` is pending. It is polled before any other, since it may have a position in a wait queue.
    pending: Option<S>,
    idle: Vec<S>,
}

struct Source<S> {
    service: S,
    // A function pointer, so that only the constructor requires `S: Clone`.
    clone: fn(&S) -> S,
}

impl<S> ReadyServices<S> {
    pub(crate) const fn many(service: S, clone: fn(&S) -> S) -> Self {
        Self { source: Some(Source { service, clone }), ready: Vec::new(), pending: None, idle: Vec::new() }
    }

    pub(crate) fn single(service: S) -> Self {
        Self { source: None, ready: Vec::new(), pending: None, idle: vec![service] }
    }

    /// The number of ready instances.
    pub(crate) const fn ready(&self) -> usize {
        self.ready.len()
    }

    /// Polls instances until `wanted` are ready, or one is pending.
    pub(crate) fn fill<T>(&mut self, wanted: usize, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>>
    where
        S: Service<Job<T>, Error: Into<BoxError>>,
    {
        while self.ready.len() < wanted {
            let instance = self.pending.take().or_else(|| self.idle.pop());
            let instance = instance.or_else(|| self.source.as_ref().map(|source| (source.clone)(&source.service)));
            // There is only one instance, and it is in use or ready.
            let Some(mut instance) = instance else { break };
            match catch_unwind(AssertUnwindSafe(|| instance.poll_ready(cx))) {
                Ok(Poll::Ready(Ok(()))) => self.ready.push(instance),
                Ok(Poll::Ready(Err(error))) => return Poll::Ready(Err(error.into())),
                Ok(Poll::Pending) => {
                    self.pending = Some(instance);
                    return Poll::Pending;
                }
                Err(panic) => {
                    discard(panic);
                    return Poll::Ready(Err("the service panicked in `poll_ready`".into()));
                }
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Takes a ready instance.
    pub(crate) fn take(&mut self) -> Option<S> {
        self.ready.pop()
    }

    /// Puts back an instance that was given a job.
    pub(crate) fn put(&mut self, instance: S) {
        self.idle.push(instance);
    }

    /// Puts back an instance that has panicked, or drops it if new instances can be made.
    pub(crate) fn put_panicked(&mut self, instance: S) {
        if self.source.is_none() {
            self.idle.push(instance);
        }
    }

    /// Drops the ready and pending instances, since they may hold permits that other callers need. Keeps a single instance.
    pub(crate) fn drop_ready(&mut self) {
        if self.source.is_some() {
            self.ready.clear();
            self.pending = None;
        }
    }
}
