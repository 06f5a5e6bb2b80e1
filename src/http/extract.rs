//! Extractors for axum handlers.

use ::http::request::Parts;
use ::http::{Extensions, Request};
use axum::extract::rejection::ExtensionRejection;
use axum::extract::{FromRequestParts, MatchedPath, OptionalFromRequestParts};
use axum::{Extension, RequestPartsExt};

use crate::idempotency::IdempotencyHandle;
use crate::key::{ExtractKey, Key, Or, first_of, missing_key};
use crate::lock::LeaseHandle;
use crate::rate_limit::RateLimitHandle;

/// Extracts the handle that a layer has inserted into the extensions of a request.
macro_rules! from_extensions {
    ($($layer:literal $handle:ty),+ $(,)?) => {$(
        #[doc = concat!(
            "An extractor for axum handlers behind ",
            $layer,
            ". If requests may pass without it, extract an `Option`. Otherwise such requests get a response of 500."
        )]
        impl<S: Send + Sync> FromRequestParts<S> for $handle {
            type Rejection = ExtensionRejection;

            async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ExtensionRejection> {
                parts.extract::<Extension<Self>>().await.map(|Extension(handle)| handle)
            }
        }

        impl<S: Send + Sync> OptionalFromRequestParts<S> for $handle {
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

/// Counts by the axum route that serves the request, such as `/users/{id}`: all paths of the route share one key.
///
/// In a nested router the key is the whole path of the route.
///
/// A request that no route matches has no key. With `Router::layer` such requests reach the layer, which by default responds with 400 instead
/// of 404: see [`OnMissingKey`](crate::OnMissingKey). Use `Router::route_layer` to count only requests that a route matches, or set another
/// key for the rest with [`or`](MatchedPathKey::or).
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
    /// Uses `fallback` for requests that no route matches: see [`first_of`].
    pub fn or<F>(self, fallback: F) -> Or<Self, F> {
        first_of(self, fallback)
    }

    fn key_in(extensions: &Extensions) -> Option<Key> {
        let path = extensions.get().map(|path: &MatchedPath| Key::from(path.as_str()));
        if path.is_none() {
            missing_key::record(
                "its extensions hold no `MatchedPath`; use `Router::route_layer`, or set a fallback with `or`",
            );
        }
        path
    }
}

impl<B> ExtractKey<Request<B>> for MatchedPathKey {
    fn extract_key(&self, request: &Request<B>) -> Option<Key> {
        Self::key_in(request.extensions())
    }
}

/// For handlers that take the parts of a request without its body.
impl ExtractKey<Parts> for MatchedPathKey {
    fn extract_key(&self, parts: &Parts) -> Option<Key> {
        Self::key_in(&parts.extensions)
    }
}
