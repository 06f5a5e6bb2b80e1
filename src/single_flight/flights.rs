//! The calls in progress: at most one for each key.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;
use tokio::task::JoinSet;
use tracing::{Instrument, Span};

use super::error::SingleFlightError;
use crate::key::Key;
use crate::panics::discard_joined;

/// Identifies a call. A service may accept several types of requests, whose responses may have different types.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct CallId {
    request: TypeId,
    key: Key,
}

impl CallId {
    pub(super) fn new<Req: 'static>(key: Key) -> Self {
        Self { request: TypeId::of::<Req>(), key }
    }
}

/// The result of a call. The type of the response is erased, since one table holds calls with different response types.
type Outcome = Result<Arc<dyn Any + Send + Sync>, SingleFlightError>;
type Running = HashMap<CallId, Arc<watch::Sender<Option<Outcome>>>>;

/// The calls of a service. Each clone of the service and each [`Waiter`] has a clone of this value. Dropping the last clone cancels the
/// calls in progress.
#[derive(Clone, Default)]
pub(super) struct Flights {
    running: Arc<Mutex<Running>>,
    tasks: Arc<Mutex<JoinSet<()>>>,
}

/// The innermost call that the current task is a part of, and its outer calls.
struct Chain {
    // The address of `Flights::running`, which identifies the service.
    table: usize,
    id: CallId,
    outer: Option<Arc<Self>>,
}

tokio::task_local! {
    static CHAIN: Arc<Chain>;
}

impl Flights {
    /// Joins the call with this id, or starts `call`. `None` if the current task is a part of this call, which would wait for itself.
    pub(super) fn join_or_start<T, F>(&self, id: CallId, call: impl FnOnce() -> F) -> Option<Waiter>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, SingleFlightError>> + Send + 'static,
    {
        let outer = CHAIN.try_with(Arc::clone).ok();
        let table = Arc::as_ptr(&self.running).addr();
        let mut next = outer.as_deref();
        while let Some(chain) = next {
            if chain.table == table && chain.id == id {
                return None;
            }
            next = chain.outer.as_deref();
        }
        let mut running = lock(&self.running);
        if let Some(outcome) = running.get(&id) {
            return Some(Waiter { outcome: outcome.subscribe(), _flights: self.clone() });
        }
        let (outcome, waiter) = watch::channel(None);
        let outcome = Arc::new(outcome);
        running.insert(id, Arc::clone(&outcome));
        drop(running);
        let landing = RemoveOnEnd { running: Arc::clone(&self.running), id, outcome };
        let chain = Arc::new(Chain { table, id, outer });
        // Each response is cloned under a lock, so that it need not be `Sync`.
        let call = call();
        let call =
            async move { call.await.map(|response| Arc::new(Mutex::new(response)) as Arc<dyn Any + Send + Sync>) };
        self.spawn(landing.run(CHAIN.scope(chain, call)));
        Some(Waiter { outcome: waiter, _flights: self.clone() })
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = lock(&self.tasks);
        while let Some(result) = tasks.try_join_next() {
            discard_joined(result);
        }
        tasks.spawn(task.instrument(Span::current()));
    }
}

/// A caller that waits for the outcome of a call.
pub(super) struct Waiter {
    outcome: watch::Receiver<Option<Outcome>>,
    // Keeps the call running while a caller waits, also if the service is dropped.
    _flights: Flights,
}

impl Waiter {
    /// The response of the call.
    pub(super) async fn response<T: Clone + Send + 'static>(mut self) -> Result<T, SingleFlightError> {
        // Fails if the task has panicked, which drops the sender.
        let outcome = self.outcome.wait_for(Option::is_some).await.map_err(|_| SingleFlightError::Aborted)?.clone();
        let response = outcome.unwrap_or(Err(SingleFlightError::Aborted))?;
        // The id contains the type of the request, which determines the type of the response.
        let response = response.downcast::<Mutex<T>>().map_err(|_| SingleFlightError::Aborted)?;
        let response = lock(&response).clone();
        Ok(response)
    }
}

/// Removes a call from the table when it ends, also if its task panics or is aborted.
struct RemoveOnEnd {
    running: Arc<Mutex<Running>>,
    id: CallId,
    outcome: Arc<watch::Sender<Option<Outcome>>>,
}

impl RemoveOnEnd {
    /// Runs a call until it ends or its last caller has gone.
    async fn run(self, call: impl Future<Output = Outcome> + Send) {
        let mut call = Box::pin(call);
        let outcome = loop {
            tokio::select! {
                outcome = &mut call => break outcome,
                () = self.outcome.closed() => {
                    let mut running = lock(&self.running);
                    // A caller may have joined meanwhile.
                    if self.outcome.receiver_count() == 0 {
                        running.remove(&self.id);
                        return;
                    }
                }
            }
        };
        let sender = Arc::clone(&self.outcome);
        // Later requests start the next call.
        drop(self);
        sender.send_replace(Some(outcome));
    }
}

impl Drop for RemoveOnEnd {
    fn drop(&mut self) {
        let mut running = lock(&self.running);
        // The next call with this id may have begun.
        if running.get(&self.id).is_some_and(|outcome| Arc::ptr_eq(outcome, &self.outcome)) {
            running.remove(&self.id);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
