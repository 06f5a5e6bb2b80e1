//! The load: callers of services behind the layer, and a record of each call.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tollgate::backend::AnyBackend;
use tollgate::rate_limit::store::RateLimitStore;
use tollgate::rate_limit::{Decision, RateLimited, Receipt};
use tollgate::{BoxError, ErrorResponder, Key, Policy, Quota, RateLimitFallback, RateLimitLayer, StoreError};
use tower::util::BoxCloneSyncService;
use tower::{Layer, ServiceExt, service_fn};

use super::support::load::{self, Load};

/// The name of the policy.
pub const NAME: &str = "faults";
/// The quota of each key. A window begins with the first request and lasts a day, so practically none ends during a run.
pub const QUOTA: u64 = 100;
/// The decided calls for a key before the next key is used: a fifth of them is denied.
const TURNS: u64 = QUOTA * 5 / 4;
pub const CALLERS: u32 = 24;
/// The keys in use at the same time. Each has two callers.
const LANES: usize = CALLERS as usize / 2;
const PAUSE: Duration = Duration::from_millis(5);
/// What callers do about store errors.
const POLICIES: [RateLimitFallback; 3] = [RateLimitFallback::Deny, RateLimitFallback::Allow, RateLimitFallback::Local];

pub type Call = load::Call<Outcome>;

/// The result of the store for one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Seen {
    /// There was no store call: the circuit was open.
    #[default]
    NotAsked,
    /// There was no reply before the deadline.
    GivenUp,
    Admitted,
    Denied,
    Failed,
}

/// The response that the caller got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Served,
    Limited,
    StoreError,
    SomethingElse,
}

#[derive(Debug)]
pub struct Outcome {
    pub subject: String,
    pub policy: RateLimitFallback,
    pub seen: Seen,
    pub answer: Answer,
    /// Whether the inner service ran.
    pub ran: bool,
    /// The error of the store, or an unexpected error of the service.
    pub error: Option<String>,
}

impl Outcome {
    /// Whether the store decided.
    pub fn is_decided(&self) -> bool {
        matches!(self.seen, Seen::Admitted | Seen::Denied)
    }

    /// Describes the result of the store.
    pub fn failure(&self) -> String {
        format!("{:?} {}", self.seen, self.error.as_deref().unwrap_or_default())
    }

    /// Whether the policy for store errors was applied to store errors only.
    pub fn is_right(&self) -> bool {
        let answer = match (self.seen, self.policy) {
            (Seen::Admitted, _) => self.answer == Answer::Served,
            (Seen::Denied, _) => self.answer == Answer::Limited,
            (_, RateLimitFallback::Deny) => self.answer == Answer::StoreError,
            (_, RateLimitFallback::Allow) => self.answer == Answer::Served,
            // The local counts of this process are checked for each key.
            _ => matches!(self.answer, Answer::Served | Answer::Limited),
        };
        answer && self.ran == (self.answer == Answer::Served)
    }
}

#[derive(Debug, Default)]
struct Trace {
    seen: Seen,
    ran: bool,
    error: Option<String>,
}

tokio::task_local! {
    static TRACE: RefCell<Trace>;
}

fn note(change: impl FnOnce(&mut Trace)) {
    TRACE.with(|trace| change(&mut trace.borrow_mut()));
}

/// Units that the store admitted, by key. Known at any time.
pub type Admitted = Arc<Mutex<HashMap<String, u64>>>;

/// The services of the callers, and the units that the store admitted to them.
#[derive(Clone, Debug)]
pub struct Callers {
    services: [BoxCloneSyncService<String, (), BoxError>; 3],
    turns: Arc<[AtomicU64; LANES]>,
    pub admitted: Admitted,
}

impl Callers {
    pub fn new(backend: AnyBackend) -> Self {
        let admitted = Admitted::default();
        let witness = Witness { store: backend, admitted: Arc::clone(&admitted) };
        let policy = Policy::new(NAME, Quota::per_day(QUOTA as u64).fixed_window());
        let services = POLICIES.map(|on_store_error| {
            let layer = RateLimitLayer::new(witness.clone(), policy.clone())
                .key(|subject: &String| subject.clone())
                .on_store_error(on_store_error)
                .responder(ErrorResponder);
            let inner = service_fn(async |_: String| {
                note(|trace| trace.ran = true);
                Ok::<_, BoxError>(())
            });
            BoxCloneSyncService::new(layer.layer(inner))
        });
        Self { services, turns: Arc::new(std::array::from_fn(|_| AtomicU64::new(0))), admitted }
    }

    /// Starts all callers, which call until the load is stopped.
    pub fn start(&self) -> Load<Outcome> {
        let callers = self.clone();
        Load::start(
            CALLERS,
            |_| PAUSE,
            move |caller| {
                let callers = callers.clone();
                async move { callers.call(caller as usize).await }
            },
        )
    }

    async fn call(&self, caller: usize) -> Outcome {
        let (lane, kind) = (caller / 2 % LANES, caller % POLICIES.len());
        // Failed calls do not advance the lane, so a key that is half used up before a failover is half used up after it.
        let subject = format!("{lane}-{}", self.turns[lane].load(Ordering::Relaxed) / TURNS);
        let (answer, trace) = TRACE
            .scope(RefCell::default(), async {
                let answer = self.services[kind].clone().oneshot(subject.clone()).await;
                (answer, TRACE.with(RefCell::take))
            })
            .await;
        let Trace { seen, ran, mut error } = trace;
        let answer = match answer {
            Ok(()) => Answer::Served,
            Err(error) if error.is::<RateLimited>() => Answer::Limited,
            Err(error) if error.is::<StoreError>() => Answer::StoreError,
            Err(other) => {
                error = Some(format!("{other:?}"));
                Answer::SomethingElse
            }
        };
        let outcome = Outcome { subject, policy: POLICIES[kind], seen, answer, ran, error };
        if outcome.is_decided() {
            self.turns[lane].fetch_add(1, Ordering::Relaxed);
        }
        outcome
    }
}

/// A store that records its decisions.
#[derive(Clone, Debug)]
struct Witness {
    store: AnyBackend,
    admitted: Admitted,
}

impl RateLimitStore for Witness {
    async fn check(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, StoreError> {
        note(|trace| trace.seen = Seen::GivenUp);
        let decision = self.store.check(policy, key, cost).await;
        note(|trace| {
            trace.seen = match &decision {
                Ok(decision) if decision.is_allowed() => Seen::Admitted,
                Ok(_) => Seen::Denied,
                Err(_) => Seen::Failed,
            };
            trace.error = decision.as_ref().err().map(|error| format!("{error:?}"));
        });
        if decision.as_ref().is_ok_and(Decision::is_allowed) {
            let mut admitted = self.admitted.lock().expect("the mutex is not poisoned");
            *admitted.entry(key.as_str().to_owned()).or_default() += 1;
        }
        decision
    }

    async fn peek(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, StoreError> {
        self.store.peek(policy, key, cost).await
    }

    async fn settle(&self, policy: &Policy, key: &Key, receipt: Receipt, change: i64) -> Result<(), StoreError> {
        self.store.settle(policy, key, receipt, change).await
    }

    async fn block(&self, policy: &Policy, key: &Key, time: Duration) -> Result<(), StoreError> {
        self.store.block(policy, key, time).await
    }

    async fn reset(&self, policy: &Policy, key: &Key) -> Result<(), StoreError> {
        self.store.reset(policy, key).await
    }
}
