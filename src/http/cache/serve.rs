//! Responds to a GET or HEAD request: from the cache, by its own load, or by the load of another request.

use std::sync::Arc;
use std::time::Duration;

use ::http::header::{CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE};
use ::http::{HeaderMap, Request, Response, StatusCode};
use bytes::Bytes;
use http_body::Body;
use tokio::sync::oneshot;
use tower_service::Service;

use super::body::CachedBody;
use super::origin::{Origin, OwnResponse, Place, SharedRequest};
use super::policy::is_failure;
use super::request::Read;
use super::settings::Shared;
use super::status::{CacheStatus, write_age};
use super::stored::{Stored, StoredResponse, Varies};
use crate::cache::{CacheError, Found, LoadWaiter, Lookup, Observed, Served};
use crate::error::{BoxError, StoreError};
use crate::responder::Responder;

/// A request that the cache may answer.
pub(super) struct Reader<S, B, K, A> {
    pub(super) shared: Arc<Shared<K, A>>,
    pub(super) shared_request: SharedRequest<S, B>,
    pub(super) read: Read,
}

/// The result for one place.
enum Step<R, E> {
    Done(OwnResponse<R, E>),
    /// Header fields select the response. Look it up at this place.
    Variant(Place),
    /// Call the inner service for this request alone.
    Pass(CacheStatus),
}

/// A stored response with its age.
struct Candidate {
    stored: Arc<Stored>,
    /// The time since the response was stored.
    age: Duration,
    is_local: bool,
}

/// How a stored response may be used.
enum Use {
    Fresh,
    /// Serve it, and load a new one in the background.
    Refresh,
    /// Load a new one, and serve this one if that fails.
    IfError,
    No,
}

impl Candidate {
    fn response(&self) -> Option<&StoredResponse> {
        match &*self.stored {
            Stored::Response(response) => Some(response),
            Stored::Varies(_) => None,
        }
    }
}

impl<S, B, K, A, R> Reader<S, B, K, A>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    B: Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
    A: Responder<CacheError, Response<R>, S::Error, Response = Response<CachedBody<R>>, Error = S::Error>,
{
    #[expect(clippy::manual_async_fn, reason = "an `async fn` holds what it is given twice")]
    pub(super) fn respond(self) -> impl Future<Output = OwnResponse<R, S::Error>> {
        async move {
            if self.shared.settings.uncached.has(&self.read.uri) {
                return Box::pin(self.pass(CacheStatus::Miss)).await;
            }
            let looked = self.shared.cache.look_up(self.read.uri).await;
            let place = Place::Uri(self.read.uri);
            if let Ok(Lookup { found: Some(found), .. }) = &looked
                && let Some((candidate, Use::Fresh)) = self.candidate(&place, found)
                && candidate.response().is_some()
            {
                return Ok(self.hit(&candidate));
            }
            // Boxed to keep the future of a hit small.
            Box::pin(self.respond_after(place, looked)).await
        }
    }

    /// Looks for the response under the URI, and then under the variant if request header fields select the response.
    async fn respond_after(
        self,
        mut place: Place,
        mut looked: Result<Lookup<Stored>, StoreError>,
    ) -> OwnResponse<R, S::Error> {
        for _ in 0..2 {
            match self.step(&place, looked).await {
                Step::Done(response) => return response,
                Step::Variant(next) => place = next,
                Step::Pass(status) => return self.pass(status).await,
            }
            if self.shared.settings.uncached.has(&place.key()) {
                break;
            }
            looked = self.shared.cache.look_up(place.key()).await;
        }
        self.pass(CacheStatus::Miss).await
    }

    async fn step(&self, place: &Place, looked: Result<Lookup<Stored>, StoreError>) -> Step<R, S::Error> {
        let (before, candidate) = match looked {
            Err(error) => (Observed::StoreFailed(error), None),
            Ok(Lookup { id, found }) => match found.and_then(|found| self.candidate(place, &found)) {
                None => (Observed::Entry(id), None),
                Some((candidate, usable)) => {
                    if let Stored::Varies(varies) = &*candidate.stored {
                        return self.variant(place, varies);
                    }
                    match usable {
                        Use::Fresh => return Step::Done(Ok(self.hit(&candidate))),
                        Use::Refresh if self.read.is_head || self.read.no_store => {
                            return Step::Done(Ok(self.hit(&candidate)));
                        }
                        Use::Refresh => {
                            let response = self.hit(&candidate);
                            // If the load does not begin, for instance in a shutdown, the response is still good.
                            let _ = self.load(place, Observed::Entry(id), true);
                            return Step::Done(Ok(response));
                        }
                        Use::IfError => (Observed::Entry(id), Some(candidate)),
                        Use::No => (Observed::Entry(id), None),
                    }
                }
            },
        };
        let status = if candidate.is_some() { CacheStatus::Stale } else { CacheStatus::Miss };
        if self.read.is_head || self.read.no_store {
            return Step::Pass(status);
        }
        match self.load(place, before, false) {
            Ok((load, own_response)) => self.wait(place, load, own_response, candidate, status).await,
            Err(error) => self.fail(error, candidate),
        }
    }

    /// The entry, if it is for this request.
    fn candidate(&self, place: &Place, found: &Found<Stored>) -> Option<(Candidate, Use)> {
        let refreshes_early = self.shared.cache.refreshes_early(found);
        let (fresh_for, age, is_local) = (found.fresh_for(), found.age(), found.is_local);
        let stored = Arc::clone(found.value.as_ref()?);
        let usable = match &*stored {
            Stored::Varies(_) => matches!(place, Place::Uri(_)).then_some(Use::Fresh)?,
            Stored::Response(response) if response.selection != place.selection() => return None,
            Stored::Response(StoredResponse { times, .. }) => {
                let stale = age.saturating_sub(times.fresh_for);
                match stale {
                    // The jitter of the cache may end the fresh time early.
                    Duration::ZERO if fresh_for.is_zero() || refreshes_early => Use::Refresh,
                    Duration::ZERO => Use::Fresh,
                    _ if stale <= times.while_revalidate => Use::Refresh,
                    _ if stale <= times.if_error => Use::IfError,
                    _ => Use::No,
                }
            }
        };
        Some((Candidate { stored, age, is_local }, usable))
    }

    fn variant(&self, place: &Place, varies: &Varies) -> Step<R, S::Error> {
        let Place::Uri(uri) = *place else { return Step::Pass(CacheStatus::Miss) };
        let Some(selection) = self.shared_request.selection(&varies.vary) else { return Step::Pass(CacheStatus::Miss) };
        let (variant_key, vary) = (varies.variant_key(uri, selection), varies.vary.clone());
        Step::Variant(Place::Variant { uri, variant_key, vary, selection })
    }

    /// Joins the load of a place, or starts it with this request.
    #[expect(clippy::type_complexity, reason = "the waiter and the response of this request")]
    fn load(
        &self,
        place: &Place,
        before: Observed,
        is_background: bool,
    ) -> Result<(LoadWaiter<Stored>, oneshot::Receiver<OwnResponse<R, S::Error>>), CacheError> {
        // From here on the request may wait: for another request, or for another process.
        self.shared_request.release_permit();
        let (response_sender, own_response) = oneshot::channel();
        let origin = Origin {
            shared_request: self.shared_request.share(),
            place: place.clone(),
            response_sender,
            settings: Arc::clone(&self.shared.settings),
            cache: Arc::downgrade(&self.shared.cache),
        };
        let load = self.shared.cache.join_or_load(place.key(), before, is_background, || origin.load())?;
        Ok((load, own_response))
    }

    /// Waits for the response to this request or, if it joined the load of another request, for the stored response.
    async fn wait(
        &self,
        place: &Place,
        load: LoadWaiter<Stored>,
        own_response: oneshot::Receiver<OwnResponse<R, S::Error>>,
        candidate: Option<Candidate>,
        status: CacheStatus,
    ) -> Step<R, S::Error> {
        // Fails if the load did not send this request, or if the inner service timed out or panicked.
        if let Ok(own_response) = own_response.await {
            return self.finish(load, own_response, candidate, status).await;
        }
        match load.outcome().await {
            Ok(Some(stored)) => match &*stored {
                Stored::Varies(varies) => self.variant(place, varies),
                Stored::Response(response) if response.selection == place.selection() => {
                    self.shared.cache.count(Served::Loaded);
                    Step::Done(Ok(self.stored(response, Duration::ZERO, CacheStatus::Collapsed)))
                }
                Stored::Response(_) => Step::Pass(CacheStatus::Miss),
            },
            Ok(None) => Step::Pass(CacheStatus::Miss),
            Err(error) => self.fail(error, candidate),
        }
    }

    /// The response to this request, whose load may still be reading it.
    async fn finish(
        &self,
        load: LoadWaiter<Stored>,
        own_response: OwnResponse<R, S::Error>,
        candidate: Option<Candidate>,
        status: CacheStatus,
    ) -> Step<R, S::Error> {
        let mut response = match (own_response, candidate) {
            (Ok(response), candidate) => {
                let has_failed = is_failure(response.status());
                match candidate.filter(|_| has_failed) {
                    Some(candidate) => return Step::Done(Ok(self.hit(&candidate))),
                    None => response,
                }
            }
            (Err(_), Some(candidate)) => return Step::Done(Ok(self.hit(&candidate))),
            (Err(error), None) => {
                self.shared.cache.count(Served::Failed);
                return Step::Done(Err(self.shared.responder.error(error)));
            }
        };
        self.shared.cache.count(Served::Loaded);
        status.write(response.headers_mut());
        if self.read.conditions.is_not_modified(response.status(), response.headers()) {
            let (parts, body) = response.into_parts();
            drop(body);
            // The client needs no body, but the load needs a caller.
            let _ = load.outcome().await;
            return Step::Done(Ok(not_modified(Response::from_parts(parts, ()))));
        }
        response.body_mut().keep_load(load);
        Step::Done(Ok(response))
    }

    fn fail(&self, error: CacheError, candidate: Option<Candidate>) -> Step<R, S::Error> {
        match candidate {
            Some(candidate) => Step::Done(Ok(self.hit(&candidate))),
            None => {
                self.shared.cache.count(Served::Failed);
                Step::Done(self.shared.responder.reject(error))
            }
        }
    }

    /// Calls the inner service for this request alone.
    async fn pass(self, status: CacheStatus) -> OwnResponse<R, S::Error> {
        let responder = &self.shared.responder;
        let Some(pending) = self.shared_request.take() else { return responder.reject(CacheError::Panicked) };
        let response = pending.call().await.map_err(|error| responder.error(error))?;
        let mut response = responder.response(response);
        status.write(response.headers_mut());
        Ok(response)
    }

    fn hit(&self, candidate: &Candidate) -> Response<CachedBody<R>> {
        let Some(response) = candidate.response() else { return Response::new(Bytes::new().into()) };
        self.shared.cache.count(match candidate {
            Candidate { age, .. } if *age > response.times.fresh_for => Served::Stale,
            Candidate { is_local: true, .. } => Served::Local,
            Candidate { .. } => Served::Fresh,
        });
        let status = CacheStatus::Hit { age: candidate.age, fresh_for: response.times.fresh_for };
        self.stored(response, candidate.age, status)
    }

    /// A stored response, for this request.
    fn stored(&self, stored: &StoredResponse, age: Duration, status: CacheStatus) -> Response<CachedBody<R>> {
        let recorded = &stored.recorded;
        let mut response = Response::new(());
        *response.status_mut() = recorded.status;
        *response.headers_mut() = recorded.headers.clone();
        write_age(stored.times.initial_age.saturating_add(age), response.headers_mut());
        status.write(response.headers_mut());
        if self.read.conditions.is_not_modified(recorded.status, &recorded.headers) {
            return not_modified(response);
        }
        if !self.read.is_head {
            return response.map(|()| CachedBody::whole(recorded.body.clone(), recorded.trailers.clone()));
        }
        if recorded.status != StatusCode::NO_CONTENT {
            response.headers_mut().insert(CONTENT_LENGTH, recorded.body.len().into());
        }
        response.map(|()| CachedBody::whole(Bytes::new(), HeaderMap::new()))
    }
}

/// RFC 9110, section 15.4.5: without the fields that describe the body.
fn not_modified<B>(mut response: Response<()>) -> Response<CachedBody<B>> {
    *response.status_mut() = StatusCode::NOT_MODIFIED;
    for name in [CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE] {
        response.headers_mut().remove(name);
    }
    response.map(|()| CachedBody::whole(Bytes::new(), HeaderMap::new()))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use tower::service_fn;

    use super::super::request::Plan;
    use super::*;
    use crate::backend::memory::MemoryBackend;
    use crate::http::cache::CacheLayer;
    use crate::key::Key;

    /// A larger allocation is not in the thread cache of glibc, and then costs as much as the rest of a hit.
    #[test]
    fn future_of_a_hit_is_small() {
        let layer = CacheLayer::new(MemoryBackend::new(), "pages").public();
        let shared = Arc::new(layer.into_shared());
        let request = Request::new(axum::body::Body::empty());
        let Plan::Read(read) = Plan::of(&request, Some(Key::GLOBAL), &shared.settings) else { panic!("it is a GET") };
        let inner = service_fn(async |_: Request<axum::body::Body>| {
            Ok::<_, Infallible>(Response::new(axum::body::Body::empty()))
        });
        let future =
            Reader { shared: Arc::clone(&shared), shared_request: SharedRequest::new(inner, request), read }.respond();
        assert!(size_of_val(&future) <= 1_032, "{} bytes", size_of_val(&future));
    }
}
