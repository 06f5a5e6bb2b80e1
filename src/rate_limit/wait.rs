//! Requests that wait for room in a queue.

use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::{Instant, timeout_at};

use super::decision::Decision;
use super::descriptor::{Descriptor, Descriptors};
use super::evaluate::Evaluation;
use super::layer::{LayerConfig, WaitConfig};
use super::policy::Policy;
use super::rejection::Rejection;
use super::store::RateLimitStore;
use super::wait_queue::{CachedDenial, QueueKey, WaitQueues, Waiter};
use crate::key::Key;

impl Evaluation {
    /// How long to wait for room after a denial, if that is over before `until`.
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
    /// Whether requests wait for this policy and key. For the key of the layer, `policy` is the policy of the layer, whatever a resolver
    /// returns.
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

    /// Evaluates a request that may have to wait for room, in the queue of the descriptor with the longest denial. A denial from when the
    /// request `arrived`, if any, is used instead of a first call.
    pub(super) async fn evaluate_with_wait(
        &self,
        mut descriptors: Descriptors,
        cost: u64,
        arrived: Instant,
    ) -> Evaluation {
        // A cost of 0 needs no room.
        let Some(WaitConfig { wait, queues }) = self.wait_config.as_ref().filter(|_| cost > 0) else {
            return self.evaluate(descriptors, cost).await;
        };
        // If the capacity is exceeded, as far as is known, waiting does not help.
        if let Some(primary) = descriptors.iter_mut().find(|descriptor| self.is_unresolved(descriptor))
            && let Some(policy) = self.resolver.as_ref().and_then(|resolver| resolver.cached_policy(&primary.key))
        {
            primary.count_by(policy);
        }
        if self.exceeds_capacity(&descriptors, cost) {
            return self.evaluate(descriptors, cost).await;
        }
        let until = after(Instant::now(), *wait);
        let mut waiter: Option<Waiter> = None;
        // The queues in which its turn has come. It joins them again only after a new denial, so that it does not alternate between two
        // queues.
        let mut visited: SmallVec<[QueueKey; 2]> = SmallVec::new();
        // Shadow policies are checked once. For the key of the layer, the resolver decides whether its policy is one.
        let mut shadows: Vec<Descriptor> = Vec::new();
        let mut denied = descriptors.take_denied(arrived.elapsed());
        // When the denial expires, if that is in time.
        let expires_in_time = |denial: &Descriptor| {
            let room = after(Instant::now(), self.limited(denial, cost)?.retry_after()?);
            Some(room).filter(|room| *room <= until)
        };
        loop {
            let denied = denied.take();
            if let Some(denial) = waiter.as_ref().and_then(|waiter| waiter.rejection(cost))
                && expires_in_time(&denial).is_none()
            {
                return self.reject_with(denial, cost);
            }
            let (denial, evaluation) = match self.denial_ahead(queues, &descriptors, &visited, cost) {
                Some(denial) => (denial, None),
                None => {
                    // The next call is due one wait after this instant, so that the round trip does not add to the wait.
                    let called_at = Instant::now();
                    if let Some(waiter) = &waiter {
                        // The resolver has a deadline of its own.
                        waiter.call_until(after(called_at, self.deadline.saturating_mul(2)));
                    }
                    let mut evaluation = match denied {
                        Some(descriptors) => Evaluation { result: self.combine(&descriptors, cost), descriptors },
                        None => {
                            let mut undecided = descriptors.undecided();
                            let queried = self.query(&mut undecided, cost).await;
                            // If a call before the denial has expired fails, the denial still holds.
                            if let (Err(_), Some(waiter)) = (&queried, &waiter) {
                                waiter.narrow();
                                if let Some(denial) = waiter.unexpired_denial() {
                                    match expires_in_time(&denial) {
                                        Some(room) if waiter.wait_again(room, until).await => continue,
                                        _ => return self.reject_with(self.latest_denial(queues, denial, cost), cost),
                                    }
                                }
                            }
                            self.finish(undecided, cost, queried).await
                        }
                    };
                    let new_shadows = descriptors.take_shadows(&evaluation.descriptors);
                    evaluation.descriptors.extend(shadows.clone());
                    shadows.extend(new_shadows);
                    let denial = strictest(evaluation.descriptors.iter().cloned());
                    match (&waiter, &denial) {
                        (Some(waiter), Some(denial)) if *waiter.queue_key() == self.queue_key(denial) => {
                            waiter.narrow();
                        }
                        (Some(waiter), None) => {
                            if let Some(room) = self.room_for_more(&evaluation, waiter.queue_key(), cost) {
                                waiter.widen(room);
                            }
                        }
                        _ => {}
                    }
                    let Some(denial) = denial else { return evaluation };
                    let own_waiter = waiter.as_ref().filter(|waiter| *waiter.queue_key() == self.queue_key(&denial));
                    let Some(pause) = evaluation.pause(until) else {
                        if let Some(waiter) = own_waiter {
                            waiter.set_rejection(CachedDenial::new(denial), cost);
                        }
                        return evaluation;
                    };
                    if let Some(waiter) = own_waiter {
                        waiter.set_denial(CachedDenial::new(denial.clone()));
                        if waiter.wait_again(after(called_at, pause), until).await {
                            continue;
                        }
                        return self.reject_with(self.latest_denial(queues, denial, cost), cost);
                    }
                    (denial, Some((after(called_at, pause), evaluation)))
                }
            };
            // A waiter of one queue must not delay the waiters of another.
            drop(waiter.take());
            let queue_key = self.queue_key(&denial);
            let joined = expires_in_time(&denial)
                .and_then(|_| queues.join(queue_key.clone(), || CachedDenial::new(denial.clone())));
            let Some(joined) = joined else {
                return evaluation.map_or_else(|| self.reject_with(denial, cost), |(_, evaluation)| evaluation);
            };
            if timeout_at(until, joined.wait_for_turn()).await.is_err() {
                return self.reject_with(self.latest_denial(queues, denial, cost), cost);
            }
            // The waiters before it may have used room of which it does not know.
            if let (Some((retry_at, _)), true) = (evaluation, joined.begins_queue())
                && !joined.wait_again(retry_at, until).await
            {
                return self.reject_with(self.latest_denial(queues, denial, cost), cost);
            }
            visited.push(queue_key);
            waiter = Some(joined);
        }
    }

    /// The latest denial of its queue, for a request with an older one.
    fn latest_denial(&self, queues: &WaitQueues, denial: Descriptor, cost: u64) -> Descriptor {
        queues.denial(&self.queue_key(&denial), cost).unwrap_or(denial)
    }

    /// How many more such requests had room when this one was admitted, as far as known.
    fn room_for_more(&self, evaluation: &Evaluation, queue_key: &QueueKey, cost: u64) -> Option<u64> {
        let descriptor = evaluation.descriptors.iter().find(|descriptor| self.queue_key(descriptor) == *queue_key)?;
        let decision =
            descriptor.decision.as_ref().filter(|decision| evaluation.result.is_ok() && decision.is_allowed())?;
        decision.remaining()?.checked_div(cost)
    }

    /// The queue in which a descriptor waits.
    fn queue_key(&self, descriptor: &Descriptor) -> QueueKey {
        let policy = if descriptor.primary { &self.policy } else { descriptor.policy(&self.policy) };
        QueueKey::new(policy, &descriptor.key)
    }

    /// The longest denial of the queues with waiters before this request.
    fn denial_ahead(
        &self,
        queues: &WaitQueues,
        descriptors: &[Descriptor],
        visited: &[QueueKey],
        cost: u64,
    ) -> Option<Descriptor> {
        if !queues.any_waiters() {
            return None;
        }
        let queue_keys = descriptors
            .iter()
            .map(|descriptor| self.queue_key(descriptor))
            .filter(|queue_key| !visited.contains(queue_key));
        strictest(queue_keys.filter_map(|queue_key| queues.denial(&queue_key, cost)))
    }

    /// Rejects a request without a call, with the denial of another request for the same policy and key.
    fn reject_with(&self, denial: Descriptor, cost: u64) -> Evaluation {
        let descriptors = Descriptors::One(denial);
        let result = self.combine(&descriptors, cost);
        Evaluation { descriptors, result }
    }
}

/// The descriptor with the longest denial.
fn strictest(descriptors: impl Iterator<Item = Descriptor>) -> Option<Descriptor> {
    let denials = descriptors.filter(Descriptor::denies);
    denials.max_by_key(|descriptor| descriptor.decision.as_ref().map(Decision::strictness))
}
