//! One call of the inner service, whose response is stored if possible.

use std::error::Error;
use std::fmt;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, SystemTime};

use ::http::header::CONTENT_LENGTH;
use ::http::response::Parts;
use ::http::{HeaderMap, Request, Response, StatusCode};
use bytes::Bytes;
use http_body::Body;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout_at};
use tower_service::Service;

use super::body::CachedBody;
use super::policy::{Times, UNCACHED_BRIEFLY_FOR, UNCACHED_FOR, Verdict, judge};
use super::request::Conditions;
use super::settings::Settings;
use super::stored::{Stored, StoredCodec, StoredResponse, Varies};
use super::tee::Tee;
use super::vary::Vary;
use crate::cache::{Cache, Loaded};
use crate::error::BoxError;
use crate::http::body::ResponseBody;
use crate::http::idempotency::recorded_response::Recorder;
use crate::key::Key;

/// A request with an instance of the inner service. The caller and its load share the two. The one that takes them sends the request.
pub(super) struct SharedRequest<S, B>(Arc<Mutex<Option<PendingRequest<S, B>>>>);

pub(super) struct PendingRequest<S, B> {
    inner: S,
    // Whether `inner` has reported ready. It may then hold a permit, for example of a concurrency limit.
    is_ready: bool,
    pub(super) request: Request<B>,
}

impl<S, B> SharedRequest<S, B> {
    pub(super) fn new(ready: S, request: Request<B>) -> Self {
        Self(Arc::new(Mutex::new(Some(PendingRequest { inner: ready, is_ready: true, request }))))
    }

    pub(super) fn share(&self) -> Self {
        Self(Arc::clone(&self.0))
    }

    /// `None` if it was taken before.
    pub(super) fn take(&self) -> Option<PendingRequest<S, B>> {
        self.lock().take()
    }

    /// The values of the request in the fields that select a response. `None` if the request was taken.
    pub(super) fn selection(&self, vary: &Vary) -> Option<Key> {
        self.lock().as_ref().map(|pending| vary.selection(pending.request.headers()))
    }

    /// Replaces the instance that has reported ready by its clone, which frees its permit. The request may wait long for the load of
    /// another request.
    pub(super) fn release_permit(&self)
    where
        S: Clone,
    {
        if let Some(pending) = self.lock().as_mut().filter(|pending| pending.is_ready) {
            pending.inner = pending.inner.clone();
            pending.is_ready = false;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<PendingRequest<S, B>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: Service<Request<B>>, B> PendingRequest<S, B> {
    /// Calls the inner service when it is ready.
    pub(super) async fn call(mut self) -> Result<S::Response, S::Error> {
        if !self.is_ready {
            poll_fn(|cx| self.inner.poll_ready(cx)).await?;
        }
        self.inner.call(self.request).await
    }
}

/// Where the response to a request is stored.
#[derive(Clone)]
pub(super) enum Place {
    /// Under the URI.
    Uri(Key),
    /// The fields in `vary` select the response.
    Variant { uri: Key, variant_key: Key, vary: Vary, selection: Key },
}

impl Place {
    pub(super) const fn key(&self) -> Key {
        match self {
            Self::Uri(uri) => *uri,
            Self::Variant { variant_key, .. } => *variant_key,
        }
    }

    /// The selection of the responses that this request may have.
    pub(super) const fn selection(&self) -> Key {
        match self {
            Self::Uri(_) => Key::EMPTY,
            Self::Variant { selection, .. } => *selection,
        }
    }
}

/// How long the names of the `Vary` fields of a URI are stored. After that, all responses of the URI are loaded again.
const VARIES_FOR: Duration = Duration::from_secs(86_400);

/// The response for the caller whose request was sent.
pub(super) type OwnResponse<R, E> = Result<Response<CachedBody<R>>, E>;

/// A load.
pub(super) struct Origin<S, B, R, E> {
    pub(super) shared_request: SharedRequest<S, B>,
    pub(super) place: Place,
    pub(super) response_sender: oneshot::Sender<OwnResponse<R, E>>,
    pub(super) settings: Arc<Settings>,
    // Weak, since the cache owns the task of the load, and the load must not keep the cache alive.
    pub(super) cache: Weak<Cache<Stored, StoredCodec>>,
}

impl<S, B, R> Origin<S, B, R, S::Error>
where
    S: Service<Request<B>, Response = Response<R>>,
    R: Body<Data = Bytes>,
    R::Error: Into<BoxError>,
{
    /// Calls the inner service. The caller gets its response even if it is not stored.
    pub(super) async fn load(self) -> Result<Loaded<Stored>, OriginFailed> {
        let Some(mut pending) = self.shared_request.take() else { return Ok(Loaded::nothing(UNCACHED_BRIEFLY_FOR)) };
        Conditions::remove(pending.request.headers_mut());
        let fields = pending.request.headers().clone();
        let until = Instant::now() + self.settings.load_timeout;
        let response = match timeout_at(until, pending.call()).await {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => {
                self.give(Err(error));
                return Err(OriginFailed::Error);
            }
            Err(_) => return Err(OriginFailed::TimedOut),
        };
        let (parts, body) = response.into_parts();
        match judge(parts.status, &parts.headers, self.settings.fresh_for, SystemTime::now()) {
            Verdict::Store { times, vary } => self.store(parts, body, (times, vary), &fields, until).await,
            Verdict::Uncached { mark } => Ok(self.give_uncached(parts, body, mark)),
            Verdict::Failed => {
                let status = parts.status;
                self.give(Ok(Response::from_parts(parts, CachedBody::other(ResponseBody::inner(body)))));
                Err(OriginFailed::Status(status))
            }
        }
    }

    /// Sends the response to the caller, which may have gone.
    fn give(self, own_response: OwnResponse<R, S::Error>) {
        let _ = self.response_sender.send(own_response);
    }

    fn give_uncached(self, parts: Parts, body: R, mark: Duration) -> Loaded<Stored> {
        self.settings.uncached.insert(self.place.key(), mark);
        self.give(Ok(Response::from_parts(parts, CachedBody::other(ResponseBody::inner(body)))));
        Loaded::nothing(mark)
    }

    /// Streams the response to the caller, and records it.
    async fn store(
        self,
        parts: Parts,
        body: R,
        (times, vary): (Times, Vary),
        fields: &HeaderMap,
        until: Instant,
    ) -> Result<Loaded<Stored>, OriginFailed> {
        let mut recorder = Recorder::new(parts.status, &parts.headers, false, self.settings.max_response);
        let Some(target) = Target::new(&self.place, &vary, fields) else {
            // `Vary` names a field that the stored `Varies` does not. Remove the `Varies`, so that the next load stores a new one.
            if let (Place::Variant { uri, .. }, Some(cache)) = (&self.place, self.cache.upgrade()) {
                forget(&cache, *uri).await;
            }
            return Ok(self.give_uncached(parts, body, UNCACHED_BRIEFLY_FOR));
        };
        let announced = parts.headers.get(CONTENT_LENGTH).and_then(|len| len.to_str().ok()?.parse().ok());
        if !recorder.fits() || announced.is_some_and(|len: u64| len > self.settings.max_response as u64) {
            return Ok(self.give_uncached(parts, body, UNCACHED_FOR));
        }
        let (pieces, receiver) = mpsc::unbounded_channel();
        let live = CachedBody::live(receiver, body.size_hint());
        let mut tee = Tee::new(body, pieces);
        let Self { response_sender, settings, cache, place, .. } = self;
        let _ = response_sender.send(Ok(Response::from_parts(parts, live)));
        // A body that takes too long is streamed to its client, and is not a failure.
        let read = timeout_at(until, tee.read(&mut recorder, announced)).await.unwrap_or(Ok(None));
        let Some(chunks) = read.map_err(OriginFailed::Body)? else {
            settings.uncached.insert(place.key(), UNCACHED_FOR);
            return Ok(Loaded::nothing(UNCACHED_FOR));
        };
        let (record, _) = recorder.finish(chunks.iter(), true);
        let response = StoredResponse::new(times, target.selection, Bytes::from_owner(record));
        let Some(response) = response else { return Ok(Loaded::nothing(UNCACHED_FOR)) };
        let loaded = Loaded::value(Stored::Response(response)).fresh_for(times.fresh_for).stale_for(times.stale_for());
        let value = target.put(loaded, cache).await;
        drop(tee);
        Ok(value)
    }
}

/// Removes the entry of a URI. If the entry is a `Varies`, its variants stay stored, but no request finds them any more.
pub(super) async fn forget(cache: &Cache<Stored, StoredCodec>, uri: Key) {
    if let Err(error) = cache.invalidate(uri).await {
        tracing::debug!(key = %uri, %error, "cached response is not removed");
    }
}

/// Where a new response is stored.
struct Target {
    selection: Key,
    // For the first response with `Vary` of a URI: the key of the variant, and the entry of the URI.
    new: Option<(Key, Varies)>,
}

impl Target {
    /// `None` if `vary` names a field that `place` does not know, or if there is no randomness for a nonce.
    fn new(place: &Place, vary: &Vary, fields: &HeaderMap) -> Option<Self> {
        match place {
            Place::Variant { vary: known, selection, .. } => {
                vary.is_within(known).then_some(Self { selection: *selection, new: None })
            }
            Place::Uri(_) if vary.is_empty() => Some(Self { selection: Key::EMPTY, new: None }),
            Place::Uri(uri) => {
                let selection = vary.selection(fields);
                let varies = Varies { vary: vary.clone(), nonce: getrandom::u64().ok()? };
                let variant_key = varies.variant_key(*uri, selection);
                Some(Self { selection, new: Some((variant_key, varies)) })
            }
        }
    }

    /// Returns the value for the place of the load. For the first response with `Vary` of a URI, stores the response under the key of the
    /// variant, and returns the `Varies`.
    async fn put(self, loaded: Loaded<Stored>, cache: Weak<Cache<Stored, StoredCodec>>) -> Loaded<Stored> {
        let Some((variant_key, varies)) = self.new else { return loaded };
        // No other load has this key, since its nonce is new. If the entry of the URI is invalidated meanwhile, `varies` is not stored.
        if let Some(cache) = cache.upgrade()
            && let Err(error) = cache.set(variant_key, loaded).await
        {
            tracing::debug!(key = %variant_key, %error, "response is not cached");
        }
        Loaded::value(Stored::Varies(varies)).fresh_for(VARIES_FOR).stale_for(Duration::ZERO)
    }
}

/// Why a load failed, and has no response to share.
#[derive(Debug)]
pub(super) enum OriginFailed {
    Error,
    TimedOut,
    Status(StatusCode),
    Body(super::tee::BrokenBody),
}

impl fmt::Display for OriginFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Error => f.write_str("the inner service failed"),
            Self::TimedOut => f.write_str("the inner service did not respond in time"),
            Self::Status(status) => write!(f, "the inner service responded with {status}"),
            Self::Body(error) => write!(f, "{error}"),
        }
    }
}

impl Error for OriginFailed {}
