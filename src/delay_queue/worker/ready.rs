use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::{Context, Poll};

use tower_service::Service;

use crate::delay_queue::job::Job;
use crate::error::BoxError;
use crate::panics::discard;

/// Instances of a service, as many as jobs are about to be given to one.
///
/// Each job is given to an instance that has said to be ready for it, before the job is claimed.
pub(crate) struct ReadyServices<S> {
    // Where instances come from; `None` if there is one and no other.
    source: Option<Source<S>>,
    ready: Vec<S>,
    // The one that is being waited for. Another one must not be asked before it: it may have a place in a line.
    waiting: Option<S>,
    unasked: Vec<S>,
}

struct Source<S> {
    service: S,
    // So that nobody else has to know that it can be cloned.
    clone: fn(&S) -> S,
}

impl<S> ReadyServices<S> {
    pub(crate) const fn many(service: S, clone: fn(&S) -> S) -> Self {
        Self { source: Some(Source { service, clone }), ready: Vec::new(), waiting: None, unasked: Vec::new() }
    }

    pub(crate) fn single(service: S) -> Self {
        Self { source: None, ready: Vec::new(), waiting: None, unasked: vec![service] }
    }

    /// How many instances are ready.
    pub(crate) const fn ready(&self) -> usize {
        self.ready.len()
    }

    /// Asks instances whether they are ready until so many are, or one is to be waited for.
    pub(crate) fn fill<T>(&mut self, wanted: usize, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>>
    where
        S: Service<Job<T>, Error: Into<BoxError>>,
    {
        while self.ready.len() < wanted {
            let instance = self.waiting.take().or_else(|| self.unasked.pop());
            let instance = instance.or_else(|| self.source.as_ref().map(|source| (source.clone)(&source.service)));
            // The only one there is has been asked already.
            let Some(mut instance) = instance else { break };
            match catch_unwind(AssertUnwindSafe(|| instance.poll_ready(cx))) {
                Ok(Poll::Ready(Ok(()))) => self.ready.push(instance),
                Ok(Poll::Ready(Err(error))) => return Poll::Ready(Err(error.into())),
                Ok(Poll::Pending) => {
                    self.waiting = Some(instance);
                    return Poll::Pending;
                }
                Err(panic) => {
                    discard(panic);
                    return Poll::Ready(Err("the service panicked when it was asked whether it is ready".into()));
                }
            }
        }
        Poll::Ready(Ok(()))
    }

    /// An instance that is ready.
    pub(crate) fn take(&mut self) -> Option<S> {
        self.ready.pop()
    }

    /// Takes back an instance that was given a job.
    pub(crate) fn put(&mut self, instance: S) {
        self.unasked.push(instance);
    }

    /// Takes back an instance that has panicked, where there is no other one.
    pub(crate) fn put_damaged(&mut self, instance: S) {
        if self.source.is_none() {
            self.unasked.push(instance);
        }
    }

    /// Lets go of what instances that are ready keep others from, such as permits.
    pub(crate) fn rest(&mut self) {
        if self.source.is_some() {
            self.ready.clear();
            self.waiting = None;
        }
    }
}
