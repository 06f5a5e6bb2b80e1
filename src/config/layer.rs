use std::fmt;
use std::sync::{Arc, OnceLock};

use ::http::{Method, Request};
use arc_swap::ArcSwapOption;
use tower_layer::Layer;

use super::charge::RuleCharge;
use super::handle::RulesHandle;
use super::key::RuleKey;
use super::rules::{CompiledRules, Found, Rule};
use super::service::RulesService;
use super::usage::count_unmatched;
use crate::error::ConfigError;
use crate::key::ExtractKey;
use crate::lock::Reach;
use crate::rate_limit::{
    ChargeAlways, CircuitBreaker, FilterAction, Policy, RateLimit, RateLimitLayer, RateLimitStore, RequestCost,
    RequestFilter, SharedState, Subjects,
};
use crate::responder::HttpResponder;

/// Enforces [`Rules`](super::Rules) in front of an HTTP service. See the [module docs](crate::config) for examples.
///
/// All clones of this layer, and all services that they make, count together and follow the same rules. Requests that no
/// rule matches pass uncounted. Rules share one circuit to the backend, the counts of the time in which it fails, and the room for
/// [corrections](crate::rate_limit::RateLimitHandle::MAX_PENDING) that are under way.
#[must_use]
pub struct RulesLayer<B, A = HttpResponder> {
    pub(super) shared: Arc<Shared<B, A>>,
}

/// What the clones of a layer and its services share.
pub(super) struct Shared<B, A> {
    backend: B,
    pub(super) handle: RulesHandle,
    common: SharedState,
    pub(super) answer: A,
    active: ArcSwapOption<Active<B, A>>,
}

/// The limits that a set of rules asks for.
struct Active<B, A> {
    rules: Arc<CompiledRules>,
    /// By number of the rule; made when it is first needed.
    limits: Box<[OnceLock<RuleLimit<(), B, A>>]>,
}

/// The limit of one rule.
pub(super) enum RuleLimit<S, B, A> {
    Always(Limit<S, B, A, ChargeAlways>),
    /// Of its own, since to ask for answers takes a handle for each request.
    ByAnswer(Limit<S, B, A, RuleCharge>),
}

type Limit<S, B, A, R> = RateLimit<S, B, RuleKey, RuleCost, A, R, ExtraLimits>;

impl<S, B: Clone, A: Clone> RuleLimit<S, B, A> {
    /// Enforces a rule that counts somebody, by `policy` and `key` first of all.
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
            .having(&shared.common)
            .responder(shared.answer.clone());
        let layer = match deadline {
            Some(deadline) => layer.deadline(*deadline),
            None => layer,
        };
        match RuleCharge::new(*charge) {
            None => Self::Always(RateLimit::new(inner, layer)),
            Some(charge) => Self::ByAnswer(RateLimit::new(inner, layer.charge_on(charge))),
        }
    }
}

impl<B, A> RuleLimit<(), B, A> {
    fn around<S>(&self, inner: S) -> RuleLimit<S, B, A> {
        match self {
            Self::Always(limit) => RuleLimit::Always(limit.around(inner)),
            Self::ByAnswer(limit) => RuleLimit::ByAnswer(limit.around(inner)),
        }
    }
}

impl<B> RulesLayer<B> {
    /// Enforces `rules`, or whatever rules a [`RulesHandle`] holds, on what `backend` counts.
    pub fn new(backend: B, rules: impl Into<RulesHandle>) -> Self {
        let common = SharedState::new(CircuitBreaker::new());
        Self::of(backend, rules.into(), common, Default::default())
    }
}

impl<B, A> RulesLayer<B, A> {
    fn of(backend: B, handle: RulesHandle, common: SharedState, answer: A) -> Self {
        Self { shared: Arc::new(Shared { backend, handle, common, answer, active: ArcSwapOption::empty() }) }
    }

    /// Makes sure that quotas hold as far as they are meant to, so that the memory backend is not taken for a distributed one.
    ///
    /// # Errors
    ///
    /// [`ConfigError::ScopeTooSmall`] if they hold among fewer than `scope` says.
    pub fn require(self, scope: Reach) -> Result<Self, ConfigError>
    where
        B: RateLimitStore,
    {
        self.shared.backend.scope().require(scope)?;
        Ok(self)
    }

    /// To change the rules.
    #[must_use]
    pub fn handle(&self) -> RulesHandle {
        self.shared.handle.clone()
    }

    /// Waits until no [correction](crate::rate_limit::RateLimitHandle) is under way any more, by whichever rules: for the end of a program, once it
    /// takes no more requests. For all clones of this layer that were made after its [`circuit_breaker`](Self::circuit_breaker) was said. See
    /// [`RateLimitLayer::wait_idle`].
    pub async fn wait_idle(&self) {
        self.shared.common.wait_idle().await;
    }
}

impl<B: Clone, A> RulesLayer<B, A> {
    /// What a rejection becomes. Defaults to [`HttpResponder`].
    pub fn responder<A2>(self, answer: A2) -> RulesLayer<B, A2> {
        let Shared { backend, handle, common, .. } = &*self.shared;
        RulesLayer::of(backend.clone(), handle.clone(), common.clone(), answer)
    }
}

impl<B: Clone, A: Clone> RulesLayer<B, A> {
    /// When the layer stops to ask a store that fails, for all rules together. Defaults to [`CircuitBreaker::new`].
    pub fn circuit_breaker(self, breaker: CircuitBreaker) -> Self {
        let Shared { backend, handle, answer, .. } = &*self.shared;
        Self::of(backend.clone(), handle.clone(), SharedState::new(breaker), answer.clone())
    }
}

impl<B: Clone, A: Clone> Shared<B, A> {
    /// Puts `inner` behind the limit of the rule that matches, or of both if two do, or gives it back where there is none.
    pub(super) fn limit<S>(&self, method: &Method, path: &str, inner: S) -> Result<RuleLimit<S, B, A>, S> {
        self.limit_by(&self.handle.current(), method, path, inner)
    }

    /// The same by rules that held when the request arrived.
    fn limit_by<S>(
        &self,
        rules: &Arc<CompiledRules>,
        method: &Method,
        path: &str,
        inner: S,
    ) -> Result<RuleLimit<S, B, A>, S> {
        let matches = rules.find(method, path);
        rules.note(&matches);
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
            // Made for the request: hardly anybody sends such a path by chance, and there may be many pairs of rules.
            return Ok(RuleLimit::new(inner, self, &rules.both(index, other), policy, key));
        }
        let active = self.active.load();
        match &*active {
            Some(active) if Arc::ptr_eq(&active.rules, rules) => {
                Ok(active.limit(self, index, policy, key).around(inner))
            }
            _ => Ok(self.renewed(rules).limit(self, index, policy, key).around(inner)),
        }
    }

    /// The limits that these rules ask for, where others were active.
    fn renewed(&self, rules: &Arc<CompiledRules>) -> Arc<Active<B, A>> {
        let new = Arc::new(Active::new(Arc::clone(rules)));
        let mut found = Arc::clone(&new);
        // Nobody replaces limits of the same rules, or of rules that came later: those who wait in their lines would not be seen from then on.
        self.active.rcu(|active| {
            let same = active.as_ref().filter(|active| Arc::ptr_eq(&active.rules, rules));
            found = Arc::clone(same.unwrap_or(&new));
            let stays = same.is_some() || !Arc::ptr_eq(&self.handle.current(), rules);
            if stays { active.clone() } else { Some(Arc::clone(&new)) }
        });
        found
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

/// The cost that a rule names.
pub(super) struct RuleCost(u32);

impl<Req> RequestCost<Req> for RuleCost {
    fn cost(&self, _: &Req) -> u32 {
        self.0
    }
}

/// All policies of a rule but the first.
pub(super) struct ExtraLimits(Vec<(Policy, RuleKey)>);

impl<B> RequestFilter<Request<B>> for ExtraLimits {
    fn filter(&self, request: &Request<B>, subjects: &mut Subjects) -> FilterAction {
        for (policy, key) in &self.0 {
            subjects.push(policy.clone(), key.extract_key(request));
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

// By hand: `derive` would ask for `B: Clone` and `A: Clone`.
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

    fn rules(quota: u32) -> Rules {
        let text = format!(
            r#"
            policies.api.limits = [{{ quota = {quota}, per = "1m", algorithm = "fixed_window" }}]
            rules = [{{ path = "/", policy = "api", key = "global", wait = "5s" }}]
            "#
        );
        Rules::from_toml(&text).unwrap()
    }

    /// Each had limits of its own, with a line of its own, and the last one's were those of whoever came next.
    #[test]
    fn all_who_find_the_same_rules_new_have_the_same_limits() {
        let shared = RulesLayer::new(MemoryBackend::new(), rules(1)).shared;
        let rules = shared.handle.current();
        let first = shared.renewed(&rules);
        assert!(Arc::ptr_eq(&first, &shared.renewed(&rules)));
        assert!(shared.limit(&Method::GET, "/", ()).is_ok());
        assert!(first.limits[0].get().is_some(), "a request is limited by these");
    }

    /// It put the limits of the old rules in the place of the new ones, and the next request made these anew.
    #[test]
    fn a_request_that_arrived_before_the_rules_changed_leaves_those_of_the_new_rules_alone() {
        let shared = RulesLayer::new(MemoryBackend::new(), rules(1)).shared;
        let ask = |rules: &Arc<CompiledRules>| assert!(shared.limit_by(rules, &Method::GET, "/", ()).is_ok());
        let old = shared.handle.rules().inner;
        ask(&old);
        let of_old = shared.active.load_full().unwrap();
        shared.handle.reload(rules(2));
        let new = shared.handle.rules().inner;
        ask(&new);
        let of_new = shared.active.load_full().unwrap();
        assert!(Arc::ptr_eq(&of_new.rules, &new) && !Arc::ptr_eq(&of_new, &of_old));
        ask(&old);
        ask(&new);
        assert!(Arc::ptr_eq(&shared.active.load_full().unwrap(), &of_new));
    }
}
