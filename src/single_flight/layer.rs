use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tower_layer::Layer;

use super::service::SingleFlight;
use crate::key::{ExtractKey, GlobalKey, Key, Undecided};

/// Makes equal requests in this process share one call of the inner service. See the [module](crate::single_flight).
///
/// Clones of one service share their calls. Two services share none, even if the same layer made them.
#[must_use]
pub struct SingleFlightLayer<K, P = Undecided> {
    key: Arc<K>,
    principal: Arc<P>,
    pub(super) call_timeout: Duration,
}

/// The default of [`SingleFlightLayer::call_timeout`].
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

impl<K> SingleFlightLayer<K> {
    /// Requests with the same key share a call. `key` is a closure, or another [`ExtractKey`](crate::ExtractKey). Call
    /// [`public`](Self::public) or [`per`](Self::per) before you use the layer.
    pub fn new(key: K) -> Self {
        Self { key: Arc::new(key), principal: Arc::new(Undecided), call_timeout: CALL_TIMEOUT }
    }

    /// All callers share responses. Only for responses that do not depend on the caller.
    pub fn public(self) -> SingleFlightLayer<K, GlobalKey> {
        self.per(GlobalKey)
    }

    /// Only callers with the same principal share responses: a user, a tenant, or whatever else decides about the response. A request
    /// without a principal calls the inner service directly.
    ///
    /// The principal must be checked before this layer. If callers can choose it, a caller gets the responses of another one.
    pub fn per<P>(self, principal: P) -> SingleFlightLayer<K, P> {
        SingleFlightLayer { key: self.key, principal: Arc::new(principal), call_timeout: self.call_timeout }
    }
}

impl<K, P> SingleFlightLayer<K, P> {
    /// How long a shared call may take. After that it is dropped, all its callers get [`SingleFlightError::TimedOut`], and the next request
    /// with its key starts another call. Defaults to 30 seconds.
    ///
    /// The time counts from the start of the call, and not from the arrival of a caller. A request without a key or principal is not
    /// limited.
    ///
    /// [`SingleFlightError::TimedOut`]: super::SingleFlightError::TimedOut
    pub fn call_timeout(self, time: Duration) -> Self {
        Self { call_timeout: time, ..self }
    }

    /// The key of a call. `None` if the request has no key or no principal. An empty one counts as missing.
    pub(super) fn key<Req>(&self, request: &Req) -> Option<Key>
    where
        K: ExtractKey<Req>,
        P: ExtractKey<Req>,
    {
        let key = self.key.extract_key(request).filter(|key| !key.is_empty())?;
        let principal = self.principal.extract_key(request).filter(|key| !key.is_empty())?;
        Some(Key::from((key, principal)))
    }
}

impl<S, K, P> Layer<S> for SingleFlightLayer<K, P> {
    type Service = SingleFlight<S, K, P>;

    fn layer(&self, inner: S) -> Self::Service {
        SingleFlight::new(inner, self.clone())
    }
}

// Not derived, which would require the extractors to be `Clone`.
impl<K, P> Clone for SingleFlightLayer<K, P> {
    fn clone(&self) -> Self {
        Self { key: Arc::clone(&self.key), principal: Arc::clone(&self.principal), call_timeout: self.call_timeout }
    }
}

impl<K, P> fmt::Debug for SingleFlightLayer<K, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SingleFlightLayer").field("call_timeout", &self.call_timeout).finish_non_exhaustive()
    }
}
