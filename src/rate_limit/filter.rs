use std::fmt;
use std::sync::Arc;

use super::policy::Policy;
use super::resolver::{Resolve, ResolverCall};
use crate::key::{ExtractKey, Key};

/// Decides before the store call whether a request is counted, and under which keys besides the key of the layer.
///
/// Created by [`RateLimitLayer::allow`](super::RateLimitLayer::allow), [`deny`](super::RateLimitLayer::deny) and
/// [`and`](super::RateLimitLayer::and). To add your own, pass a closure `Fn(&Req, &mut Descriptors) -> FilterAction` to
/// [`filter`](super::RateLimitLayer::filter).
pub trait RequestFilter<Req> {
    /// Adds further policies and keys of the request to `descriptors`, and returns what happens to the request.
    fn filter(&self, request: &Req, descriptors: &mut Descriptors) -> FilterAction;

    /// Returns the resolver call for the request. `None` without [`resolver_from`](super::RateLimitLayer::resolver_from).
    #[doc(hidden)]
    fn question(&self, request: &Req) -> Option<ResolverCall> {
        let _ = request;
        None
    }
}

/// What happens to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FilterAction {
    /// It is counted.
    Limit,
    /// It passes uncounted.
    Bypass,
    /// It is rejected.
    Deny,
}

/// The further descriptors of a request. Each is a policy and a key under which the request is counted.
#[derive(Clone, Debug, Default)]
pub struct Descriptors {
    pub(super) added: Vec<(Policy, Option<Key>)>,
}

impl Descriptors {
    /// Counts the request under `key` by `policy` as well. If `key` is `None` or empty, the request is one without a key, to which
    /// [`OnMissingKey`](crate::OnMissingKey) applies.
    pub fn push(&mut self, policy: Policy, key: Option<Key>) {
        self.added.push((policy, key));
    }
}

impl<Req, F: Fn(&Req, &mut Descriptors) -> FilterAction> RequestFilter<Req> for F {
    fn filter(&self, request: &Req, descriptors: &mut Descriptors) -> FilterAction {
        self(request, descriptors)
    }
}

/// No filter: requests are counted only under the [key](super::RateLimitLayer::key) of the layer.
impl<Req> RequestFilter<Req> for () {
    fn filter(&self, _: &Req, _: &mut Descriptors) -> FilterAction {
        FilterAction::Limit
    }
}

/// Lets listed requests pass uncounted: see [`RateLimitLayer::allow`](super::RateLimitLayer::allow).
#[derive(Debug)]
pub struct AllowList<X, F> {
    pub(super) inner: Arc<X>,
    pub(super) listed: F,
}

impl<Req, X: RequestFilter<Req>, F: Fn(&Req) -> bool> RequestFilter<Req> for AllowList<X, F> {
    fn filter(&self, request: &Req, descriptors: &mut Descriptors) -> FilterAction {
        if (self.listed)(request) { FilterAction::Bypass } else { self.inner.filter(request, descriptors) }
    }

    fn question(&self, request: &Req) -> Option<ResolverCall> {
        self.inner.question(request)
    }
}

/// Rejects listed requests: see [`RateLimitLayer::deny`](super::RateLimitLayer::deny).
#[derive(Debug)]
pub struct DenyList<X, F> {
    pub(super) inner: Arc<X>,
    pub(super) listed: F,
}

impl<Req, X: RequestFilter<Req>, F: Fn(&Req) -> bool> RequestFilter<Req> for DenyList<X, F> {
    fn filter(&self, request: &Req, descriptors: &mut Descriptors) -> FilterAction {
        if (self.listed)(request) { FilterAction::Deny } else { self.inner.filter(request, descriptors) }
    }

    fn question(&self, request: &Req) -> Option<ResolverCall> {
        self.inner.question(request)
    }
}

/// Counts a request under another policy and key as well: see [`RateLimitLayer::and`](super::RateLimitLayer::and) and
/// [`and_if_present`](super::RateLimitLayer::and_if_present).
#[derive(Debug)]
pub struct WithLimit<X, K> {
    pub(super) inner: Arc<X>,
    pub(super) policy: Policy,
    pub(super) key: K,
    /// Whether a request without this key skips this policy. If false, `OnMissingKey` applies to the request.
    pub(super) if_present: bool,
}

impl<Req, X: RequestFilter<Req>, K: ExtractKey<Req>> RequestFilter<Req> for WithLimit<X, K> {
    fn filter(&self, request: &Req, descriptors: &mut Descriptors) -> FilterAction {
        let action = self.inner.filter(request, descriptors);
        if action == FilterAction::Limit {
            let key = self.key.extract_key(request);
            if !self.if_present || key.as_ref().is_some_and(|key| !key.is_empty()) {
                descriptors.push(self.policy.clone(), key);
            }
        }
        action
    }

    fn question(&self, request: &Req) -> Option<ResolverCall> {
        self.inner.question(request)
    }
}

/// Calls your own filter: see [`RateLimitLayer::filter`](super::RateLimitLayer::filter).
#[derive(Debug)]
pub struct WithFilter<X, S> {
    pub(super) inner: Arc<X>,
    pub(super) filter: S,
}

impl<Req, X: RequestFilter<Req>, S: RequestFilter<Req>> RequestFilter<Req> for WithFilter<X, S> {
    fn filter(&self, request: &Req, descriptors: &mut Descriptors) -> FilterAction {
        match self.inner.filter(request, descriptors) {
            FilterAction::Limit => self.filter.filter(request, descriptors),
            decided => decided,
        }
    }

    fn question(&self, request: &Req) -> Option<ResolverCall> {
        self.inner.question(request)
    }
}

/// Extracts the input of a resolver from a request: see [`RateLimitLayer::resolver_from`](super::RateLimitLayer::resolver_from).
pub struct ResolveFrom<X, F, V> {
    pub(super) inner: Arc<X>,
    pub(super) input: F,
    pub(super) resolve: Option<Arc<Resolve<V>>>,
}

impl<Req, X, F, V> RequestFilter<Req> for ResolveFrom<X, F, V>
where
    X: RequestFilter<Req>,
    F: Fn(&Req) -> Option<V>,
    V: Clone + Send + Sync + 'static,
{
    fn filter(&self, request: &Req, descriptors: &mut Descriptors) -> FilterAction {
        self.inner.filter(request, descriptors)
    }

    fn question(&self, request: &Req) -> Option<ResolverCall> {
        let resolve = self.resolve.as_ref()?;
        (self.input)(request).map(|input| ResolverCall::new(resolve, input))
    }
}

impl<X: fmt::Debug, F, V> fmt::Debug for ResolveFrom<X, F, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResolveFrom").field("inner", &self.inner).finish_non_exhaustive()
    }
}
