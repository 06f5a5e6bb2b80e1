use std::fmt;
use std::sync::{Arc, OnceLock};

use ::http::{Method, Request};
use arc_swap::ArcSwapOption;
use tower_layer::Layer;

use super::charge::RuleCharge;
use super::handle::RulesHandle;
use super::key::RuleKey;
use super::rule_matches::count_unmatched;
use super::rules::{CompiledRules, Found, Rule};
use super::service::RulesService;
use crate::error::ConfigError;
use crate::key::ExtractKey;
use crate::rate_limit::store::RateLimitStore;
use crate::rate_limit::{
    ChargeAlways, CircuitBreaker, Descriptors, FilterAction, LayerOptions, Policy, RateLimit, RateLimitLayer,
    RequestCost, RequestFilter, SharedState,
};
use crate::reach::Reach;
use crate::responder::HttpResponder;

/// Enforces [`Rules`](super::Rules) in front of an HTTP service. See the [module docs](crate::config) for examples.
///
/// All clones of this layer and all their services share the same rules and counts. Requests that no rule matches pass uncounted.
///
/// The rules share one circuit breaker for the backend, one local store for its outages, and the bound on [corrections in
/// flight](crate::rate_limit::RateLimitHandle::MAX_PENDING).
#[must_use]
pub struct RulesLayer<B, A = HttpResponder> {
    pub(super) shared: Arc<Shared<B, A>>,
}

/// The state that the clones of a layer and its services share.
pub(super) struct Shared<B, A> {
    backend: B,
    pub(super) handle: RulesHandle,
    common: SharedState,
    pub(super) responder: A,
    active: ArcSwapOption<Active<B, A>>,
}

/// The limits of one version of the rules.
struct Active<B, A> {
    rules: Arc<CompiledRules>,
    /// By index of the rule, and created on first use.
    limits: Box<[OnceLock<RuleLimit<(), B, A>>]>,
}

/// The limit of one rule.
pub(super) enum RuleLimit<S, B, A> {
    Always(Limit<S, B, A, ChargeAlways>),
    /// A separate variant, because a charge that depends on the response needs a handle for each request.
    ByResponse(Limit<S, B, A, RuleCharge>),
}

type Limit<S, B, A, R> = RateLimit<S, B, RuleKey, LayerOptions<RuleCost, A, R, ExtraLimits>>;

impl<S, B: Clone, A: Clone> RuleLimit<S, B, A> {
    /// Enforces a limited rule, whose first policy and key are `policy` and `key`.
    fn new(inner: S, shared: &Shared<B, A>, rule: &Rule, policy: &Policy, key: &RuleKey) -> Self {
        let Rule { counts, cost, on_missing_key, on_store_error, replicas, deadline, wait, charge } = rule;
        let layer = RateLimitLayer::new(shared.backend.clone(), policy.clone())
            .key(key.clone())
            .cost(RuleCost(*cost))
            .filtered_by(ExtraLimits(counts[1..].to_vec()))
            .on_missing_key(*on_missing_key)
            .on_store_error(*on_store_error)
            .replicas(*replicas)
            .wait(*wait)
            .with_shared(&shared.common)
            .responder(shared.responder.clone());
        let layer = match deadline {
            Some(deadline) => layer.deadline(*deadline),
            None => layer,
        };
        match RuleCharge::new(*charge) {
            None => Self::Always(RateLimit::new(inner, layer)),
            Some(charge) => Self::ByResponse(RateLimit::new(inner, layer.charge_on(charge))),
        }
    }
}

impl<B, A> RuleLimit<(), B, A> {
    fn wrap<S>(&self, inner: S) -> RuleLimit<S, B, A> {
        match self {
            Self::Always(limit) => RuleLimit::Always(limit.around(inner)),
            Self::ByResponse(limit) => RuleLimit::ByResponse(limit.around(inner)),
        }
    }
}

impl<B> RulesLayer<B> {
    /// Creates a layer that enforces `rules`, either [`Rules`](super::Rules) or a [`RulesHandle`], with the counts in `backend`.
    pub fn new(backend: B, rules: impl Into<RulesHandle>) -> Self {
        let common = SharedState::new(CircuitBreaker::new());
        Self::of(backend, rules.into(), common, Default::default())
    }
}

impl<B, A> RulesLayer<B, A> {
    fn of(backend: B, handle: RulesHandle, common: SharedState, responder: A) -> Self {
        Self { shared: Arc::new(Shared { backend, handle, common, responder, active: ArcSwapOption::empty() }) }
    }

    /// Checks that the backend shares its counts at least as widely as `needed`. This catches a memory backend where a distributed one is
    /// needed.
    ///
    /// # Errors
    ///
    /// [`ConfigError::ReachTooSmall`] if the reach of the backend is less.
    pub fn require(self, needed: Reach) -> Result<Self, ConfigError>
    where
        B: RateLimitStore,
    {
        self.shared.backend.reach().require(needed)?;
        Ok(self)
    }

    /// The handle, which replaces the rules at runtime.
    #[must_use]
    pub fn handle(&self) -> RulesHandle {
        self.shared.handle.clone()
    }

    /// Waits until no [correction](crate::rate_limit::RateLimitHandle) of any rule is in flight. See [`RateLimitLayer::wait_idle`].
    ///
    /// Call it before the program ends, after it has stopped accepting requests. It covers all clones of this layer that were made after
    /// [`circuit_breaker`](Self::circuit_breaker) was set.
    pub async fn wait_idle(&self) {
        self.shared.common.wait_idle().await;
    }
}

impl<B: Clone, A> RulesLayer<B, A> {
    /// Sets the responder, which turns rejections into responses. Defaults to [`HttpResponder`].
    pub fn responder<A2>(self, responder: A2) -> RulesLayer<B, A2> {
        let Shared { backend, handle, common, .. } = &*self.shared;
        RulesLayer::of(backend.clone(), handle.clone(), common.clone(), responder)
    }
}

impl<B: Clone, A: Clone> RulesLayer<B, A> {
    /// Sets the circuit breaker, which stops calls to a failing store for all rules together. Defaults to [`CircuitBreaker::new`].
    pub fn circuit_breaker(self, breaker: CircuitBreaker) -> Self {
        let Shared { backend, handle, responder, .. } = &*self.shared;
        Self::of(backend.clone(), handle.clone(), SharedState::new(breaker), responder.clone())
    }
}

impl<B: Clone, A: Clone> Shared<B, A> {
    /// Wraps `inner` in the limit of the rule that matches, or of both if two match. Returns `inner` as an error if there is no limit.
    pub(super) fn limit<S>(&self, method: &Method, path: &str, inner: S) -> Result<RuleLimit<S, B, A>, S> {
        self.limit_by(&self.handle.current(), method, path, inner)
    }

    /// Like [`limit`](Self::limit), with `rules`, which were current when the request arrived.
    fn limit_by<S>(
        &self,
        rules: &Arc<CompiledRules>,
        method: &Method,
        path: &str,
        inner: S,
    ) -> Result<RuleLimit<S, B, A>, S> {
        let matches = rules.find(method, path);
        rules.record(&matches);
        let (index, other) = match matches.found {
            Found::Limited(index, other) => (index, other),
            Found::Unlimited => return Err(inner),
            Found::Nothing => {
                count_unmatched();
                return Err(inner);
            }
        };
        let Some((policy, key)) = rules.rules[index].counts.first() else { return Err(inner) };
        if let Some(other) = other {
            // Not cached: clients rarely send such a path by chance, and there may be many pairs of rules.
            return Ok(RuleLimit::new(inner, self, &rules.combine(index, other), policy, key));
        }
        let active = self.active.load();
        match &*active {
            Some(active) if Arc::ptr_eq(&active.rules, rules) => Ok(active.limit(self, index, policy, key).wrap(inner)),
            _ => Ok(self.activate(rules).limit(self, index, policy, key).wrap(inner)),
        }
    }

    /// Returns the limits of `rules`. Makes them the active limits, unless newer rules have replaced `rules`.
    fn activate(&self, rules: &Arc<CompiledRules>) -> Arc<Active<B, A>> {
        let new = Arc::new(Active::new(Arc::clone(rules)));
        let mut limits = Arc::clone(&new);
        // Limits of the same rules or of newer rules are not replaced: later requests would not see the waiters in their wait queues.
        self.active.rcu(|active| {
            let same = active.as_ref().filter(|active| Arc::ptr_eq(&active.rules, rules));
            limits = Arc::clone(same.unwrap_or(&new));
            let keep = same.is_some() || !Arc::ptr_eq(&self.handle.current(), rules);
            if keep { active.clone() } else { Some(Arc::clone(&new)) }
        });
        limits
    }
}

impl<B, A> Active<B, A> {
    fn new(rules: Arc<CompiledRules>) -> Self {
        let limits = rules.rules.iter().map(|_| OnceLock::new()).collect();
        Self { rules, limits }
    }
}

impl<B: Clone, A: Clone> Active<B, A> {
    fn limit(&self, shared: &Shared<B, A>, index: usize, policy: &Policy, key: &RuleKey) -> &RuleLimit<(), B, A> {
        self.limits[index].get_or_init(|| RuleLimit::new((), shared, &self.rules.rules[index], policy, key))
    }
}

/// The cost of a rule.
pub(super) struct RuleCost(u64);

impl<Req> RequestCost<Req> for RuleCost {
    fn cost(&self, _: &Req) -> u64 {
        self.0
    }
}

/// The policies of a rule after the first.
pub(super) struct ExtraLimits(Vec<(Policy, RuleKey)>);

impl<B> RequestFilter<Request<B>> for ExtraLimits {
    fn filter(&self, request: &Request<B>, descriptors: &mut Descriptors) -> FilterAction {
        for (policy, key) in &self.0 {
            descriptors.push(policy.clone(), key.extract_key(request));
        }
        FilterAction::Limit
    }
}

impl<S, B, A> Layer<S> for RulesLayer<B, A> {
    type Service = RulesService<S, B, A>;

    fn layer(&self, inner: S) -> Self::Service {
        RulesService::new(inner, self.clone())
    }
}

// By hand: `derive` would require `B: Clone` and `A: Clone`.
impl<B, A> Clone for RulesLayer<B, A> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<B, A> fmt::Debug for RulesLayer<B, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RulesLayer").field("rules", &self.shared.handle.rules()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryBackend;
    use crate::config::Rules;

    fn rules(quota: u64) -> Rules {
        let text = format!(
            r#"
            policies.api.limits = [{{ quota = {quota}, per = "1m", algorithm = "fixed_window" }}]
            rules = [{{ path = "/", policy = "api", key = "global", wait = "5s" }}]
            "#
        );
        Rules::from_toml(&text).unwrap()
    }

    /// Regression: concurrent requests each created limits with their own wait queues, and later requests saw only the last ones.
    #[test]
    fn concurrent_activations_share_limits() {
        let shared = RulesLayer::new(MemoryBackend::new(), rules(1)).shared;
        let rules = shared.handle.current();
        let first = shared.activate(&rules);
        assert!(Arc::ptr_eq(&first, &shared.activate(&rules)));
        assert!(shared.limit(&Method::GET, "/", ()).is_ok());
        assert!(first.limits[0].get().is_some(), "a request uses these limits");
    }

    /// Regression: a request under old rules replaced the limits of the new rules, and the next request created the new limits again.
    #[test]
    fn request_under_old_rules_keeps_new_limits() {
        let shared = RulesLayer::new(MemoryBackend::new(), rules(1)).shared;
        let send = |rules: &Arc<CompiledRules>| assert!(shared.limit_by(rules, &Method::GET, "/", ()).is_ok());
        let old = shared.handle.rules().inner;
        send(&old);
        let old_limits = shared.active.load_full().unwrap();
        shared.handle.reload(rules(2));
        let new = shared.handle.rules().inner;
        send(&new);
        let new_limits = shared.active.load_full().unwrap();
        assert!(Arc::ptr_eq(&new_limits.rules, &new) && !Arc::ptr_eq(&new_limits, &old_limits));
        send(&old);
        send(&new);
        assert!(Arc::ptr_eq(&shared.active.load_full().unwrap(), &new_limits));
    }
}
