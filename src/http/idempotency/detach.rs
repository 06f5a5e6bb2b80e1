//! A request with a record, which continues in a new task if its caller drops it.

use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use ::http::Response;
use tokio::runtime::Handle;
use tracing::{Instrument as _, Span};

use super::body::IdempotentBody;
use crate::lock::Held;

pub(super) type Answer<R, E> = Result<Response<IdempotentBody<R>>, E>;

/// A request with a record. Its caller polls it. If the caller drops it after the handler has started, it continues in a new task.
pub(super) struct DetachableFuture<R, E> {
    // `None` after it has returned its response, or has panicked.
    work: Option<Work<Answer<R, E>>>,
    mode: DetachMode,
    // The locks of the caller, which a new task keeps.
    locks: Held,
    // The runtime and the span of a new task. Set when the future is first pending with a started handler.
    detach_context: Option<DetachContext>,
}

type Work<T> = Pin<Box<dyn Detach<Output = T>>>;

/// Whether a dropped future continues in a new task, because its handler has started.
pub(super) enum DetachMode {
    Yes,
    /// Once this flag is set.
    When(Arc<AtomicBool>),
}

type DetachContext = (Handle, Span);

fn detach_context() -> Option<DetachContext> {
    Some((Handle::try_current().ok()?, Span::current()))
}

/// A future that can continue in a new task.
trait Detach: Future + Send {
    fn detach(self: Pin<Box<Self>>, locks: Held, runtime: &Handle, span: Span);
}

impl<F: Future + Send + 'static> Detach for F {
    fn detach(self: Pin<Box<Self>>, locks: Held, runtime: &Handle, span: Span) {
        let work = locks.detached(async move { drop(self.await) });
        drop(runtime.spawn(work.instrument(span)));
    }
}

impl<R, E> DetachableFuture<R, E> {
    /// `work` is large, so the caller boxes it.
    pub(super) fn new<F>(work: Pin<Box<F>>, mode: DetachMode) -> Self
    where
        F: Future<Output = Answer<R, E>> + Send + 'static,
    {
        Self { work: Some(work), mode, locks: Held::current(), detach_context: None }
    }

    fn detaches(&self) -> bool {
        match &self.mode {
            DetachMode::Yes => true,
            DetachMode::When(flag) => flag.load(Ordering::Acquire),
        }
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Answer<R, E>> {
        // If this poll panics, `self.work` stays `None`.
        let mut work = self.work.take().expect("ResponseFuture polled after completion");
        let polled = work.as_mut().poll(cx);
        if polled.is_pending() {
            if self.detach_context.is_none() && self.detaches() {
                self.detach_context = detach_context();
            }
            self.work = Some(work);
        }
        polled
    }
}

impl<R, E> Drop for DetachableFuture<R, E> {
    fn drop(&mut self) {
        if let Some(work) = self.work.take()
            && self.detaches()
            && let Some((runtime, span)) = self.detach_context.take().or_else(detach_context)
        {
            work.detach(mem::take(&mut self.locks), &runtime, span);
        }
    }
}
