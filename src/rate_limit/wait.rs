//! Requests that wait for room in a queue.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::{Instant, timeout_at};

use super::decision::Decision;
use super::descriptor::{Descriptor, DescriptorList};
use super::evaluate::Evaluation;
use super::layer_config::{LayerConfig, WaitConfig};
use super::policy::Policy;
use super::rejection::Rejection;
use super::store::RateLimitStore;
use super::wait_queue::{CachedDenial, QueueKey, WaitQueues, Waiter};
use crate::key::Key;

impl Evaluation {
    /// How long to wait for room after a denial. `None` if that would last beyond `until`.
    fn pause(&self, until: Instant) -> Option<Duration> {
        let Err(Rejection::Limited(limited)) = &self.result else { return None };
        limited.retry_after().filter(|wait| after(Instant::now(), *wait) <= until)
    }
}

/// `now + time`, at most 30 years ahead, so that it does not overflow.
fn after(now: Instant, time: Duration) -> Instant {
    now + time.min(Duration::from_secs(86_400 * 365 * 30))
}

impl<B: RateLimitStore + Sync> LayerConfig<B> {
    /// Whether requests wait for this policy and key. For the key of the layer, pass the policy of the layer, even if a resolver chose
    /// another one.
    #[inline]
    pub(super) fn has_queue(&self, policy: &Policy, key: &Key) -> bool {
        self.wait_config.as_ref().is_some_and(|wait_config| wait_config.queues.has_queue(policy, key))
    }

    /// Whether a denied request should wait for room, as far as its first decision tells.
    #[inline]
    pub(super) fn can_wait(&self, decision: &Decision, cost: u64) -> bool {
        let Some(wait_config) = self.wait_config.as_ref().filter(|_| cost > 0) else { return false };
        decision.retry_after().is_some_and(|wait| wait <= wait_config.wait)
    }

    /// Evaluates a request that may have to wait for room, in the queue of the descriptor with the longest denial. If the
    /// only descriptor was denied when the request `arrived`, an unexpired denial replaces the first call.
    pub(super) async fn evaluate_with_wait(
        &self,
        mut descriptors: DescriptorList,
        cost: u64,
        arrived: Instant,
    ) -> Evaluation {
        // A cost of 0 needs no room.
        let Some(WaitConfig { wait, queues }) = self.wait_config.as_ref().filter(|_| cost > 0) else {
            return self.evaluate(descriptors, cost).await;
        };
        // Waiting does not help if a known policy can never allow this cost. The resolver may have a cached policy.
        if let Some(primary) = descriptors.iter_mut().find(|descriptor| self.is_unresolved(descriptor))
            && let Some(policy) = self.resolver.as_ref().and_then(|resolver| resolver.cached_policy(&primary.key))
        {
            primary.set_policy(policy);
        }
        if self.exceeds_capacity(&descriptors, cost) {
            return self.evaluate(descriptors, cost).await;
        }
        let denied = descriptors.take_denied(arrived.elapsed());
        let until = after(Instant::now(), *wait);
        let (waiter, visited, shadows) = (None, SmallVec::new(), Vec::new());
        let waiting = WaitingRequest { layer: self, queues, cost, until, descriptors, waiter, visited, shadows };
        waiting.evaluate(denied).await
    }

    /// The queue in which a descriptor waits.
    fn queue_key(&self, descriptor: &Descriptor) -> QueueKey {
        let policy = if descriptor.primary { &self.policy } else { descriptor.policy(&self.policy) };
        QueueKey::new(policy, &descriptor.key)
    }
}

/// A request that waits for room.
struct WaitingRequest<'a, B> {
    layer: &'a LayerConfig<B>,
    queues: &'a Arc<WaitQueues>,
    cost: u64,
    until: Instant,
    descriptors: DescriptorList,
    // Its position in a queue, once its turn has come.
    waiter: Option<Waiter>,
    // The queues in which its turn has come. It joins them again only after a new denial, so that it does not alternate between two
    // queues.
    visited: SmallVec<[QueueKey; 2]>,
    // The evaluated descriptors of shadow policies, which are checked only once. The resolver may choose a shadow policy for the key of the
    // layer.
    shadows: Vec<Descriptor>,
}

/// What a waiting request does next.
enum Next {
    Return(Evaluation),
    /// Call the store again.
    Retry,
    /// Wait in the queue of this denial. If the denial is from an evaluation of this request, that evaluation is the second field, with
    /// the instant at which room is expected.
    Queue(Descriptor, Option<(Instant, Evaluation)>),
}

impl<B: RateLimitStore + Sync> WaitingRequest<'_, B> {
    /// Calls the store until it admits the request, or the denial lasts too long. Waits in queues between the calls.
    async fn evaluate(mut self, mut denied: Option<DescriptorList>) -> Evaluation {
        loop {
            let denied = denied.take();
            if let Some(denial) = self.waiter.as_ref().and_then(|waiter| waiter.rejection(self.cost))
                && self.expires_in_time(&denial).is_none()
            {
                return self.reject_with(denial);
            }
            let mut next = match self.denial_ahead() {
                Some(denial) => Next::Queue(denial, None),
                None => self.call(denied).await,
            };
            if let Next::Queue(denial, evaluation) = next {
                next = self.wait_in_queue(denial, evaluation).await;
            }
            if let Next::Return(evaluation) = next {
                return evaluation;
            }
        }
    }

    /// Calls the store, unless `denied` has the first decision.
    async fn call(&mut self, denied: Option<DescriptorList>) -> Next {
        // The next call is due one wait after this instant, so that the round trip does not add to the wait.
        let called_at = Instant::now();
        let mut evaluation = match denied {
            Some(descriptors) => Evaluation { result: self.layer.combine(&descriptors, self.cost), descriptors },
            None => match self.query(called_at).await {
                Ok(evaluation) => evaluation,
                Err(next) => return next,
            },
        };
        let new_shadows = self.descriptors.take_shadows(&evaluation.descriptors);
        evaluation.descriptors.extend(self.shadows.clone());
        self.shadows.extend(new_shadows);
        let denial = strictest(evaluation.descriptors.iter().cloned());
        self.adjust_concurrency(&evaluation, denial.as_ref());
        let Some(denial) = denial else { return Next::Return(evaluation) };
        let queue_key = self.layer.queue_key(&denial);
        let own_waiter = self.waiter.as_ref().filter(|waiter| *waiter.queue_key() == queue_key);
        let Some(pause) = evaluation.pause(self.until) else {
            if let Some(waiter) = own_waiter {
                waiter.set_rejection(CachedDenial::new(denial), self.cost);
            }
            return Next::Return(evaluation);
        };
        let retry_at = after(called_at, pause);
        let Some(waiter) = own_waiter else { return Next::Queue(denial, Some((retry_at, evaluation))) };
        waiter.set_denial(CachedDenial::new(denial.clone()));
        if waiter.wait_again(retry_at, self.until).await { Next::Retry } else { self.reject_as_late(denial) }
    }

    /// Calls the store, and combines the decisions or applies the fallback.
    async fn query(&self, called_at: Instant) -> Result<Evaluation, Next> {
        if let Some(waiter) = &self.waiter {
            // The resolver has a deadline of its own.
            waiter.call_until(after(called_at, self.layer.deadline.saturating_mul(2)));
        }
        let mut undecided = self.descriptors.undecided();
        let queried = self.layer.query(&mut undecided, self.cost).await;
        if let (Err(_), Some(waiter)) = (&queried, &self.waiter) {
            waiter.narrow();
            // After a failed call, an unexpired denial still holds.
            if let Some(denial) = waiter.unexpired_denial() {
                return Err(match self.expires_in_time(&denial) {
                    Some(room) if waiter.wait_again(room, self.until).await => Next::Retry,
                    _ => self.reject_as_late(denial),
                });
            }
        }
        Ok(self.layer.finish(undecided, self.cost, queried).await)
    }

    /// After this request was admitted, lets more waiters of its queue call at the same time. After it was denied, lets only one waiter
    /// call.
    fn adjust_concurrency(&self, evaluation: &Evaluation, denial: Option<&Descriptor>) {
        let Some(waiter) = &self.waiter else { return };
        match denial {
            None => {
                if let Some(room) = self.room_for_more(evaluation, waiter.queue_key()) {
                    waiter.widen(room);
                }
            }
            Some(denial) if *waiter.queue_key() == self.layer.queue_key(denial) => waiter.narrow(),
            Some(_) => {}
        }
    }

    /// Waits until it is the turn of the request in the queue of `denial`.
    async fn wait_in_queue(&mut self, denial: Descriptor, evaluation: Option<(Instant, Evaluation)>) -> Next {
        // A waiter of one queue must not delay the waiters of another.
        self.waiter = None;
        let queue_key = self.layer.queue_key(&denial);
        let joined = self
            .expires_in_time(&denial)
            .and_then(|_| self.queues.join(queue_key.clone(), || CachedDenial::new(denial.clone())));
        let Some(joined) = joined else {
            return Next::Return(evaluation.map_or_else(|| self.reject_with(denial), |(_, evaluation)| evaluation));
        };
        if timeout_at(self.until, joined.wait_for_turn()).await.is_err() {
            return self.reject_as_late(denial);
        }
        // Only a waiter that joined an empty queue waits for its own denial to expire. For other waiters, that denial is out of date when
        // their turn comes.
        if let (Some((retry_at, _)), true) = (evaluation, joined.begins_queue())
            && !joined.wait_again(retry_at, self.until).await
        {
            return self.reject_as_late(denial);
        }
        self.visited.push(queue_key);
        self.waiter = Some(joined);
        Next::Retry
    }

    /// When the denial expires, if that is in time.
    fn expires_in_time(&self, denial: &Descriptor) -> Option<Instant> {
        let room = after(Instant::now(), self.layer.limited(denial, self.cost)?.retry_after()?);
        Some(room).filter(|room| *room <= self.until)
    }

    /// The longest denial of the queues with waiters before this request.
    fn denial_ahead(&self) -> Option<Descriptor> {
        if !self.queues.any_waiters() {
            return None;
        }
        let queue_keys = self.descriptors.iter().map(|descriptor| self.layer.queue_key(descriptor));
        let denials = queue_keys
            .filter(|queue_key| !self.visited.contains(queue_key))
            .filter_map(|queue_key| self.queues.denial(&queue_key, self.cost));
        strictest(denials)
    }

    /// How many more requests of this cost had room when this request was admitted, if that is known.
    fn room_for_more(&self, evaluation: &Evaluation, queue_key: &QueueKey) -> Option<u64> {
        let mut descriptors = evaluation.descriptors.iter();
        let descriptor = descriptors.find(|descriptor| self.layer.queue_key(descriptor) == *queue_key)?;
        let decision =
            descriptor.decision.as_ref().filter(|decision| evaluation.result.is_ok() && decision.is_allowed())?;
        decision.remaining()?.checked_div(self.cost)
    }

    /// Rejects the request, since it cannot wait any longer, with the latest denial of its queue.
    fn reject_as_late(&self, denial: Descriptor) -> Next {
        let latest = self.queues.denial(&self.layer.queue_key(&denial), self.cost);
        Next::Return(self.reject_with(latest.unwrap_or(denial)))
    }

    /// Rejects the request without a call, with the denial of another request for the same policy and key.
    fn reject_with(&self, denial: Descriptor) -> Evaluation {
        let descriptors = DescriptorList::One(denial);
        let result = self.layer.combine(&descriptors, self.cost);
        Evaluation { descriptors, result }
    }
}

/// The descriptor with the longest denial.
fn strictest(descriptors: impl Iterator<Item = Descriptor>) -> Option<Descriptor> {
    let denials = descriptors.filter(Descriptor::denies);
    denials.max_by_key(|descriptor| descriptor.decision.as_ref().map(Decision::strictness))
}
