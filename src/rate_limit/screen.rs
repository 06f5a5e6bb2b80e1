use std::fmt;
use std::sync::Arc;

use super::policy::Policy;
use super::resolver::{Question, Resolve};
use crate::key::{ExtractKey, Key};

/// What a layer finds out about a request before it asks the store: whether it has to, and about whom besides its key.
///
/// Made by [`RateLimitLayer::allow`](super::RateLimitLayer::allow), [`deny`](super::RateLimitLayer::deny) and
/// [`and`](super::RateLimitLayer::and). Others are taken by [`screen`](super::RateLimitLayer::screen): closures
/// `Fn(&Req, &mut Subjects) -> Screening` are screens.
pub trait Screen<Req> {
    /// Adds to `subjects` whom the request counts for, and says what is to happen to it.
    fn screen(&self, request: &Req, subjects: &mut Subjects) -> Screening;

    /// What a resolver is asked about the request. Only [`resolver_from`](super::RateLimitLayer::resolver_from) has something to ask.
    #[doc(hidden)]
    fn question(&self, request: &Req) -> Option<Question> {
        let _ = request;
        None
    }
}

/// What is to happen to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Screening {
    /// It is counted.
    Count,
    /// It passes uncounted.
    Pass,
    /// It is turned away.
    Deny,
}

/// Whom a request counts for, and by which policies.
#[derive(Clone, Debug, Default)]
pub struct Subjects {
    pub(super) found: Vec<(Policy, Option<Key>)>,
}

impl Subjects {
    /// Counts the request for `key` as well, by `policy`. If there is none, or an empty one, it is a request without a key, of which
    /// [`OnMissingKey`](super::OnMissingKey) says what happens to it.
    pub fn push(&mut self, policy: Policy, key: Option<Key>) {
        self.found.push((policy, key));
    }
}

impl<Req, F: Fn(&Req, &mut Subjects) -> Screening> Screen<Req> for F {
    fn screen(&self, request: &Req, subjects: &mut Subjects) -> Screening {
        self(request, subjects)
    }
}

/// No lists, and nobody but the [key](super::RateLimitLayer::key) of the layer.
impl<Req> Screen<Req> for () {
    fn screen(&self, _: &Req, _: &mut Subjects) -> Screening {
        Screening::Count
    }
}

/// Lets some requests pass uncounted: see [`RateLimitLayer::allow`](super::RateLimitLayer::allow).
#[derive(Debug)]
pub struct Allow<X, F> {
    pub(super) inner: Arc<X>,
    pub(super) listed: F,
}

impl<Req, X: Screen<Req>, F: Fn(&Req) -> bool> Screen<Req> for Allow<X, F> {
    fn screen(&self, request: &Req, subjects: &mut Subjects) -> Screening {
        if (self.listed)(request) { Screening::Pass } else { self.inner.screen(request, subjects) }
    }

    fn question(&self, request: &Req) -> Option<Question> {
        self.inner.question(request)
    }
}

/// Turns some requests away: see [`RateLimitLayer::deny`](super::RateLimitLayer::deny).
#[derive(Debug)]
pub struct Deny<X, F> {
    pub(super) inner: Arc<X>,
    pub(super) listed: F,
}

impl<Req, X: Screen<Req>, F: Fn(&Req) -> bool> Screen<Req> for Deny<X, F> {
    fn screen(&self, request: &Req, subjects: &mut Subjects) -> Screening {
        if (self.listed)(request) { Screening::Deny } else { self.inner.screen(request, subjects) }
    }

    fn question(&self, request: &Req) -> Option<Question> {
        self.inner.question(request)
    }
}

/// Counts a request for another subject as well: see [`RateLimitLayer::and`](super::RateLimitLayer::and) and
/// [`and_if_present`](super::RateLimitLayer::and_if_present).
#[derive(Debug)]
pub struct And<X, K> {
    pub(super) inner: Arc<X>,
    pub(super) policy: Policy,
    pub(super) key: K,
    /// Whether requests without such a key do not count for anybody here.
    pub(super) if_present: bool,
}

impl<Req, X: Screen<Req>, K: ExtractKey<Req>> Screen<Req> for And<X, K> {
    fn screen(&self, request: &Req, subjects: &mut Subjects) -> Screening {
        let screening = self.inner.screen(request, subjects);
        if screening == Screening::Count {
            let key = self.key.extract_key(request);
            if !self.if_present || key.as_ref().is_some_and(|key| !key.is_empty()) {
                subjects.push(self.policy.clone(), key);
            }
        }
        screening
    }

    fn question(&self, request: &Req) -> Option<Question> {
        self.inner.question(request)
    }
}

/// Asks a screen of one's own: see [`RateLimitLayer::screen`](super::RateLimitLayer::screen).
#[derive(Debug)]
pub struct Screened<X, S> {
    pub(super) inner: Arc<X>,
    pub(super) screen: S,
}

impl<Req, X: Screen<Req>, S: Screen<Req>> Screen<Req> for Screened<X, S> {
    fn screen(&self, request: &Req, subjects: &mut Subjects) -> Screening {
        match self.inner.screen(request, subjects) {
            Screening::Count => self.screen.screen(request, subjects),
            decided => decided,
        }
    }

    fn question(&self, request: &Req) -> Option<Question> {
        self.inner.question(request)
    }
}

/// Finds in a request what a resolver is asked by: see [`RateLimitLayer::resolver_from`](super::RateLimitLayer::resolver_from).
pub struct ResolveFrom<X, F, V> {
    pub(super) inner: Arc<X>,
    pub(super) input: F,
    pub(super) resolve: Option<Arc<Resolve<V>>>,
}

impl<Req, X, F, V> Screen<Req> for ResolveFrom<X, F, V>
where
    X: Screen<Req>,
    F: Fn(&Req) -> Option<V>,
    V: Clone + Send + Sync + 'static,
{
    fn screen(&self, request: &Req, subjects: &mut Subjects) -> Screening {
        self.inner.screen(request, subjects)
    }

    fn question(&self, request: &Req) -> Option<Question> {
        let resolve = self.resolve.as_ref()?;
        (self.input)(request).map(|input| Question::new(resolve, input))
    }
}

impl<X: fmt::Debug, F, V> fmt::Debug for ResolveFrom<X, F, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResolveFrom").field("inner", &self.inner).finish_non_exhaustive()
    }
}
