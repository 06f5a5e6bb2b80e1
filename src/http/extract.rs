//! What handlers of axum take as arguments.

use ::http::request::Parts;
use ::http::{Extensions, Request};
use axum::extract::rejection::ExtensionRejection;
use axum::extract::{FromRequestParts, MatchedPath, OptionalFromRequestParts};
use axum::{Extension, RequestPartsExt};

use crate::idempotency::IdempotencyHandle;
use crate::key::{ExtractKey, Key, Or, first_of, lack};
use crate::lock::LeaseHandle;
use crate::rate_limit::RateLimitHandle;

/// What a layer has left in the extensions of a request. An `Option` of it is for handlers whose requests may pass without: see the type.
/// Otherwise a request without is answered by 500.
macro_rules! from_extensions {
    ($($layer:literal $left:ty),+ $(,)?) => {$(
        #[doc = concat!("In a handler of axum, behind ", $layer, ". An `Option` of it where requests may pass without one; they are answered by 500 otherwise.")]
        impl<S: Send + Sync> FromRequestParts<S> for $left {
            type Rejection = ExtensionRejection;

            async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ExtensionRejection> {
                parts.extract::<Extension<Self>>().await.map(|Extension(left)| left)
            }
        }

        impl<S: Send + Sync> OptionalFromRequestParts<S> for $left {
            type Rejection = std::convert::Infallible;

            async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Self::Rejection> {
                Ok(parts.extensions.get().cloned())
            }
        }
    )+};
}

from_extensions! {
    "a `LockLayer`" LeaseHandle,
    "a `RateLimitLayer`" RateLimitHandle,
    "an `IdempotencyLayer`" IdempotencyHandle,
}

/// Counts by the route of axum that serves the request, `/users/{id}` for instance: all paths that it stands for together.
///
/// Behind a nested router the route is known by its whole path.
///
/// A request that no route matches has no key. `Router::layer` lets the layer see these as well, so that they are answered by 400 in the place of
/// 404 unless [`OnMissingKey`](crate::OnMissingKey) says otherwise. Either count only what a route matches, with `Router::route_layer`, or
/// name something for the rest to count by, with [`or`](MatchedPathKey::or).
///
/// ```
/// # #[cfg(feature = "axum")] {
/// use axum::{Router, routing::get};
/// use tollgate::http::{matched_path, peer_ip};
/// use tollgate::{MemoryBackend, Policy, Quota, RateLimitLayer};
///
/// let policy = Policy::new("per route", Quota::per_minute(100).fixed_window());
/// let layer = RateLimitLayer::new(MemoryBackend::new(), policy).key((matched_path(), peer_ip()));
/// let app: Router = Router::new().route("/users/{id}", get(async || "a user")).route_layer(layer);
/// # }
/// ```
#[must_use]
pub const fn matched_path() -> MatchedPathKey {
    MatchedPathKey
}

/// See [`matched_path`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct MatchedPathKey;

impl MatchedPathKey {
    /// Asks `fallback` where no route matches: see [`first_of`].
    pub fn or<F>(self, fallback: F) -> Or<Self, F> {
        first_of(self, fallback)
    }

    fn key_in(extensions: &Extensions) -> Option<Key> {
        let path = extensions.get().map(|path: &MatchedPath| Key::from(path.as_str()));
        if path.is_none() {
            lack::note("its extensions hold no `MatchedPath`; use `Router::route_layer`, or name a fallback with `or`");
        }
        path
    }
}

impl<B> ExtractKey<Request<B>> for MatchedPathKey {
    fn extract_key(&self, request: &Request<B>) -> Option<Key> {
        Self::key_in(request.extensions())
    }
}

/// What is left of a request in a handler that has its body.
impl ExtractKey<Parts> for MatchedPathKey {
    fn extract_key(&self, parts: &Parts) -> Option<Key> {
        Self::key_in(&parts.extensions)
    }
}
