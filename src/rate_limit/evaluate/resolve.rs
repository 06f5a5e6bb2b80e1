//! The first phase: the resolver chooses the policy of the layer's key.

use std::error::Error;

use crate::error::StoreError;
use crate::key::Key;
use crate::rate_limit::descriptor::Descriptor;
use crate::rate_limit::layer_config::LayerConfig;
use crate::rate_limit::policy::Policy;
use crate::rate_limit::resolver::{PolicyResolver, Resolved, ResolverCall};
use crate::store::deadline::{Deadline, require_nonzero_deadline};

impl<B> LayerConfig<B> {
    /// Sets the policy of the layer's key, if there is a resolver.
    pub(super) async fn resolve(&self, descriptors: &mut [Descriptor]) -> Result<(), StoreError> {
        let Some(resolver) = &self.resolver else { return Ok(()) };
        let Some(primary) = descriptors.iter_mut().find(|descriptor| descriptor.primary) else { return Ok(()) };
        let policy = match resolver.cached_policy(&primary.key) {
            Some(policy) => policy,
            None => match resolver.question(&primary.key, primary.question.as_ref()) {
                Some(question) => self.call_resolver(resolver, &primary.key, &question).await?,
                // The request has no input for the resolver, or it had a cached policy that has expired since.
                None => primary.policy(&self.policy).clone(),
            },
        };
        primary.set_policy(policy);
        Ok(())
    }

    /// Calls the resolver and records the outcome. An error may concern only one key. It never concerns the store.
    async fn call_resolver(
        &self,
        resolver: &PolicyResolver,
        key: &Key,
        question: &ResolverCall,
    ) -> Result<Policy, StoreError> {
        self.require_time()?;
        match Deadline::new(resolver.resolve(key, question, self.deadline / 2), self.deadline).await {
            // A cached policy is no success of the resolver.
            Ok(Resolved::Cached(policy)) => Ok(policy),
            Ok(Resolved::Fresh(policy)) => {
                if resolver.outage().record_success() {
                    tracing::info!(policy = self.policy.name(), "rate limit resolver answers again");
                }
                Ok(policy)
            }
            Ok(Resolved::Stale(policy, error)) => {
                self.resolver_failed(resolver, &error, true);
                Ok(policy)
            }
            Err(error) => {
                self.resolver_failed(resolver, &error, false);
                Err(error)
            }
        }
    }

    /// Fails if the deadline leaves no time for a call.
    pub(super) fn require_time(&self) -> Result<(), StoreError> {
        require_nonzero_deadline(self.deadline).inspect_err(|error| self.shared.circuits.store.failed(self, error))
    }

    /// Logs once per outage, with the fallback for keys without a stale policy, whether or not this key has one.
    fn resolver_failed(&self, resolver: &PolicyResolver, error: &StoreError, old_answer: bool) {
        self.policy.metrics().resolver_failed();
        if resolver.outage().record_failure() {
            // The text of the error itself is about a store.
            let cause =
                error.source().map_or_else(|| "the resolver did not answer in time".to_owned(), ToString::to_string);
            let (policy, then) = (self.policy.name(), self.effective_fallback());
            tracing::warn!(policy, cause, ?then, old_answer, "rate limit resolver fails");
        }
    }
}
