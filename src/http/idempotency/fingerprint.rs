use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use ::http::{HeaderName, Request, Uri};
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use sha2::{Digest as _, Sha256};
use tokio::sync::Notify;
use tokio::task::consume_budget;
use tokio::time::{Instant, timeout_at};

use crate::idempotency::store::{BodyFingerprint, Digest};
use crate::idempotency::{HasBodyFingerprint, Operation, OperationContext};
use crate::key::Key;

/// The keyed hash of fingerprints. It does not contain the secret, and has no `Debug`.
#[derive(Clone)]
pub(super) struct Fingerprints {
    keyed: Sha256,
}

impl Fingerprints {
    pub(super) fn new(secret: &[u8]) -> Self {
        // The key fills one block of SHA-256, so it is hashed only once.
        let mut key = [0; 64];
        key[..32].copy_from_slice(&Sha256::digest(secret));
        Self { keyed: Sha256::new_with_prefix(key) }
    }

    /// The fingerprint of a request without its body, and the start of the hash of its body. Both include the operation, so equal
    /// requests of two operations have different fingerprints.
    pub(super) fn of<B>(
        &self,
        operation: &Operation,
        request: &Request<B>,
        headers: &[HeaderName],
    ) -> (Digest, RunningFingerprint) {
        let mut hash = self.keyed.clone();
        let path = original_uri(request).path_and_query().map_or("", |path| path.as_str());
        let [scope, key] = [operation.scope(), operation.key()].map(Key::as_bytes);
        let fields = [scope, key, request.method().as_str().as_bytes(), path.as_bytes()];
        // The lengths come first, so that no two lists of fields have the same bytes.
        hash.update(fields.map(len).as_flattened());
        fields.iter().for_each(|field| hash.update(field));
        for name in headers {
            let values = request.headers().get_all(name);
            hash.update((values.iter().count() as u32).to_le_bytes());
            for value in values {
                hash.update(len(value.as_bytes()));
                hash.update(value);
            }
        }
        (digest(hash.clone()), RunningFingerprint::new(hash))
    }
}

/// The URI of the request, before a router removed a prefix.
pub(in crate::http) fn original_uri<B>(request: &Request<B>) -> &Uri {
    #[cfg(feature = "axum")]
    if let Some(original) = request.extensions().get::<axum::extract::OriginalUri>() {
        return &original.0;
    }
    request.uri()
}

/// Whether an outer axum router has found the route. A route that ends with a wildcard may lead to another router.
pub(super) fn has_route<B>(request: &Request<B>) -> bool {
    #[cfg(feature = "axum")]
    if let Some(path) = request.extensions().get::<axum::extract::MatchedPath>() {
        return !path.as_str().contains("{*");
    }
    let _ = request;
    false
}

/// The length of a field. All fields are shorter than 4 GiB.
fn len(field: &[u8]) -> [u8; 4] {
    (field.len() as u32).to_le_bytes()
}

/// The first half of the hash. The other half stays secret, so that a reader of the store cannot extend the hash without the key.
fn digest(hash: Sha256) -> Digest {
    let hash: [u8; 32] = hash.finalize().into();
    Digest(std::array::from_fn(|i| hash[i]))
}

/// The state of a request body: the part that the handler has read, and whether the handler may continue.
pub(super) struct RunningFingerprint {
    progress: Mutex<Progress>,
    rejected: Notify,
}

/// Why the handler must not read the end of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyRejection {
    /// It differs from the body of the previous attempt.
    Differs,
    TooLarge,
}

struct Progress {
    // The fingerprint of the previous attempt.
    before: BodyFingerprint,
    max_len: u64,
    hash: Sha256,
    len: u64,
    is_whole: bool,
    has_failed: bool,
    // Whether the body was polled. A router without a route for the request does not poll it.
    is_polled: bool,
    // Whether the handler has dropped the body.
    is_dropped: bool,
    rejection: Option<BodyRejection>,
}

impl Progress {
    /// Whether the body matches that of the previous attempt, as far as that attempt has read it. Later parts have nothing to match.
    fn is_confirmed(&self) -> bool {
        let BodyFingerprint { len, is_whole, .. } = self.before;
        let is_shorter = self.len < len || (self.len == len && is_whole == Some(true) && !self.is_whole);
        !is_shorter && self.rejection != Some(BodyRejection::Differs)
    }
}

impl RunningFingerprint {
    fn new(hash: Sha256) -> Self {
        let (before, max_len) = (BodyFingerprint::default(), u64::MAX);
        let [is_whole, has_failed, is_polled, is_dropped] = [false; 4];
        let progress =
            Progress { before, max_len, hash, len: 0, is_whole, has_failed, is_polled, is_dropped, rejection: None };
        Self { progress: Mutex::new(progress), rejected: Notify::new() }
    }

    fn begin(&self, before: BodyFingerprint, max_len: u64, is_whole: bool) {
        let mut progress = self.progress();
        progress.before = before;
        progress.max_len = max_len;
        progress.is_whole = is_whole;
        progress.rejection = (is_whole && before.len > 0).then_some(BodyRejection::Differs);
    }

    /// The hash to start the body from. Call this before any part is read.
    fn hash(&self) -> Sha256 {
        self.progress().hash.clone()
    }

    /// The hash of the part that was read, and its length.
    fn so_far(&self) -> (Sha256, u64) {
        let progress = self.progress();
        (progress.hash.clone(), progress.len)
    }

    /// Records that the unread part differs from the body of the previous attempt.
    pub(super) fn reject_as_different(&self) {
        self.progress().rejection = Some(BodyRejection::Differs);
    }

    /// No code panics while it holds the lock, so a poisoned state is intact.
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the body failed before the handler had read all of it.
    pub(super) fn has_failed(&self) -> bool {
        self.progress().has_failed
    }

    /// Whether an inner service has polled the body.
    pub(super) fn is_polled(&self) -> bool {
        self.progress().is_polled
    }

    /// Whether the handler reads no more of the body. Then the body can neither fail nor be rejected any more.
    pub(super) fn is_final(&self) -> bool {
        let progress = self.progress();
        progress.is_whole || progress.is_dropped
    }

    /// Why the handler must not read the end of the body.
    pub(super) fn rejection(&self) -> Option<BodyRejection> {
        self.progress().rejection
    }

    /// Resolves when the handler must not read the end of the body.
    pub(super) async fn until_rejected(&self) {
        while self.rejection().is_none() {
            self.rejected.notified().await;
        }
    }

    /// Records a frame. False if the handler must not get it.
    fn record<E>(&self, frame: Option<&Result<Frame<Bytes>, E>>, is_end: bool) -> bool {
        let mut progress = self.progress();
        let BodyFingerprint { len, is_whole, digest: expected } = progress.before;
        let mut differs = false;
        match frame {
            Some(Ok(frame)) => {
                if let Some(data) = frame.data_ref() {
                    let missing = len.saturating_sub(progress.len);
                    let (old, new) = data.split_at(usize::try_from(missing).unwrap_or(usize::MAX).min(data.len()));
                    progress.hash.update(old);
                    if !old.is_empty() && old.len() as u64 == missing {
                        differs |= digest(progress.hash.clone()) != expected;
                    }
                    differs |= is_whole == Some(true) && !new.is_empty();
                    progress.hash.update(new);
                    progress.len += data.len() as u64;
                }
                progress.is_whole |= frame.is_trailers() || is_end;
            }
            Some(Err(_)) => progress.has_failed = true,
            None => progress.is_whole |= !progress.has_failed,
        }
        differs |= progress.is_whole && progress.len < len;
        if differs {
            progress.rejection = Some(BodyRejection::Differs);
        } else if progress.len > progress.max_len {
            progress.rejection = Some(BodyRejection::TooLarge);
        }
        if progress.rejection.is_some() {
            self.rejected.notify_one();
        }
        progress.rejection.is_none()
    }
}

impl HasBodyFingerprint for RunningFingerprint {
    fn body_fingerprint(&self) -> BodyFingerprint {
        let progress = self.progress();
        if !progress.is_confirmed() {
            return progress.before;
        }
        let digest = digest(progress.hash.clone());
        BodyFingerprint { len: progress.len, is_whole: Some(progress.is_whole), digest }
    }

    fn is_confirmed(&self) -> bool {
        self.progress().is_confirmed()
    }

    fn restarted(&self) -> Self {
        Self::new(self.hash())
    }
}

pin_project! {
    /// The body of a request behind an [`IdempotencyLayer`](crate::IdempotencyLayer). It hashes the part that the handler reads,
    /// for the fingerprint.
    pub struct FingerprintedBody<B> {
        #[pin]
        body: Sent<B>,
        context: Option<Arc<OperationContext<RunningFingerprint>>>,
        is_polled: bool,
    }

    impl<B> PinnedDrop for FingerprintedBody<B> {
        fn drop(this: Pin<&mut Self>) {
            if let Some(context) = this.project().context {
                context.body().progress().is_dropped = true;
            }
        }
    }
}

pin_project! {
    #[project = SentProj]
    enum Sent<B> {
        // The layer does not read the rest after the handler.
        Owned { #[pin] body: B },
        // The body must match that of the previous attempt, so the layer compares the part that the handler does not read.
        Shared { body: Arc<Shared<B>> },
    }
}

/// Never contended: see [`UnreadBody`].
type Shared<B> = Mutex<Pin<Box<B>>>;

fn lock<B>(body: &Shared<B>) -> MutexGuard<'_, Pin<Box<B>>> {
    body.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<B: Body> Body for Sent<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        match self.project() {
            SentProj::Owned { body } => body.poll_frame(cx),
            SentProj::Shared { body } => lock(body).as_mut().poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Owned { body } => body.is_end_stream(),
            Self::Shared { body } => lock(body).is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Owned { body } => body.size_hint(),
            Self::Shared { body } => lock(body).size_hint(),
        }
    }
}

/// The unread part of a body. It is compared after the handler has dropped the body.
pub(super) trait UnreadBody: Send + Sync {
    /// Whether it matches the body of the previous attempt; `None` if it breaks off or stalls.
    fn is_same<'a>(
        &'a mut self,
        fingerprint: &'a RunningFingerprint,
        compare_timeouts: CompareTimeouts,
    ) -> Pin<Box<dyn Future<Output = Option<bool>> + Send + 'a>>;
}

impl<B: Body<Data = Bytes> + Send> UnreadBody for Shared<B> {
    fn is_same<'a>(
        &'a mut self,
        fingerprint: &'a RunningFingerprint,
        compare_timeouts: CompareTimeouts,
    ) -> Pin<Box<dyn Future<Output = Option<bool>> + Send + 'a>> {
        let body = self.get_mut().unwrap_or_else(PoisonError::into_inner).as_mut();
        Box::pin(
            async move { is_same(body, &fingerprint.body_fingerprint(), fingerprint, compare_timeouts).await.ok() },
        )
    }
}

impl<B> FingerprintedBody<B> {
    /// A body without a fingerprint.
    pub(super) const fn passed(body: B) -> Self {
        Self { body: Sent::Owned { body }, context: None, is_polled: false }
    }
}

impl<B: Body<Data = Bytes> + Send + 'static> FingerprintedBody<B> {
    /// `before` is the fingerprint of the previous attempt. If the body must match it, this also returns the body, so that the layer can
    /// compare the part that the handler leaves unread.
    pub(super) fn new(
        body: B,
        before: BodyFingerprint,
        max_len: u64,
        context: Arc<OperationContext<RunningFingerprint>>,
    ) -> (Self, Option<Arc<dyn UnreadBody>>) {
        context.body().begin(before, max_len, body.is_end_stream());
        let (body, rest) = if context.body().is_confirmed() {
            (Sent::Owned { body }, None)
        } else {
            let body = Arc::new(Mutex::new(Box::pin(body)));
            (Sent::Shared { body: Arc::clone(&body) }, Some(body as _))
        };
        (Self { body, context: Some(context), is_polled: false }, rest)
    }
}

impl<B: Body<Data = Bytes>> Body for FingerprintedBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let mut this = self.project();
        if !*this.is_polled {
            *this.is_polled = true;
            if let Some(context) = &this.context {
                context.body().progress().is_polled = true;
            }
        }
        let frame = ready!(this.body.as_mut().poll_frame(cx));
        if let Some(context) = this.context
            && !context.body().record(frame.as_ref(), this.body.is_end_stream())
        {
            // The execution is notified, and drops the handler.
            return Poll::Pending;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl<B> std::fmt::Debug for FingerprintedBody<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FingerprintedBody").finish_non_exhaustive()
    }
}

/// The timeouts of a comparison.
#[derive(Clone, Copy)]
pub(super) struct CompareTimeouts {
    /// The maximum time between two parts that are not empty.
    pub(super) stall: Duration,
    /// The maximum total time.
    pub(super) total: Duration,
}

/// Why a comparison failed.
#[derive(Debug)]
pub(super) enum CompareError {
    BrokenOff,
    TooSlow,
}

/// Whether a request body matches `body_fingerprint`, that of the previous attempt. `fingerprint` covers the part that the handler has read
/// already, if any, and `body` is the rest. Reads no more than necessary, and buffers nothing.
pub(super) async fn is_same<B: Body<Data = Bytes>>(
    body: B,
    body_fingerprint: &BodyFingerprint,
    fingerprint: &RunningFingerprint,
    compare_timeouts: CompareTimeouts,
) -> Result<bool, CompareError> {
    let Some(is_whole) = body_fingerprint.is_whole else { return Ok(true) };
    let (mut hash, len) = fingerprint.so_far();
    let mut body = pin!(body);
    let mut missing = body_fingerprint.len.saturating_sub(len);
    let mut progressed = Instant::now();
    let end = progressed + compare_timeouts.total;
    while missing > 0 || (is_whole && !body.is_end_stream()) {
        // A body with endless empty frames must yield to other tasks and to the timers.
        consume_budget().await;
        let frame =
            timeout_at(end.min(progressed + compare_timeouts.stall), poll_fn(|cx| body.as_mut().poll_frame(cx))).await;
        let Some(frame) = frame.map_err(|_| CompareError::TooSlow)? else { break };
        let Ok(data) = frame.map_err(|_| CompareError::BrokenOff)?.into_data() else { continue };
        if !data.is_empty() {
            progressed = Instant::now();
        }
        let part = usize::try_from(missing).unwrap_or(usize::MAX).min(data.len());
        if is_whole && part < data.len() {
            return Ok(false);
        }
        hash.update(&data[..part]);
        missing -= part as u64;
    }
    Ok(missing == 0 && digest(hash) == body_fingerprint.digest)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http_body_util::{BodyExt, Full};
    use proptest::prelude::*;

    use super::*;
    use crate::MemoryBackend;
    use crate::idempotency::Coordinator;
    use crate::idempotency::store::Claim;
    use crate::store::token::Token;

    const PACE: CompareTimeouts = CompareTimeouts { stall: Duration::from_secs(60), total: Duration::from_secs(60) };

    fn made(request: &Request<()>, headers: &[HeaderName]) -> (Digest, RunningFingerprint) {
        Fingerprints::new(b"").of(&Operation::new("a", "k"), request, headers)
    }

    fn context() -> Arc<OperationContext<RunningFingerprint>> {
        let (operation, (head, fingerprint)) = (Operation::new("a", "k"), made(&post("/"), &[]));
        let (lease, retention) = (Claim::MIN_LEASE, Claim::MIN_RETENTION);
        let claim = Claim::new(Token::random().unwrap(), head, lease, retention);
        OperationContext::new(&Coordinator::new(MemoryBackend::new()), operation, claim, fingerprint)
    }

    fn post(uri: &str) -> Request<()> {
        Request::post(uri).body(()).unwrap()
    }

    #[test]
    fn different_requests_have_different_heads() {
        let accept = [HeaderName::from_static("accept"), HeaderName::from_static("x-b")];
        let (base, _) = made(&post("/a?b=c"), &accept);
        assert_eq!(made(&post("/a?b=c"), &accept).0, base);
        assert_eq!(made(&post("http://elsewhere/a?b=c"), &accept).0, base);
        let with = |name: &str, value: &str| Request::post("/a?b=c").header(name, value).body(()).unwrap();
        assert_eq!(made(&with("x-c", "d"), &accept).0, base, "`x-c` is not in the fingerprint");
        let others = [
            post("/a?b=d"),
            post("/a"),
            Request::patch("/a?b=c").body(()).unwrap(),
            with("accept", ""),
            with("x-b", ""),
            with("accept", "x"),
        ];
        let mut digests: Vec<_> = others.iter().map(|request| made(request, &accept).0.0).collect();
        digests.push(base.0);
        digests.push(Fingerprints::new(b"secret").of(&Operation::new("a", "k"), &post("/a?b=c"), &accept).0.0);
        digests.push(Fingerprints::new(b"").of(&Operation::new("b", "k"), &post("/a?b=c"), &accept).0.0);
        let count = digests.len();
        digests.sort_unstable();
        digests.dedup();
        assert_eq!(digests.len(), count);
    }

    /// Reads frames of `sizes` bytes each, and returns the resulting fingerprint.
    async fn read(bytes: &[u8], sizes: &[usize], before: BodyFingerprint) -> BodyFingerprint {
        let (mut rest, mut frames) = (bytes, Vec::new());
        for size in sizes {
            let (frame, others) = rest.split_at((*size).min(rest.len()));
            frames.push(Ok::<_, Infallible>(Frame::data(Bytes::copy_from_slice(frame))));
            rest = others;
        }
        let stream = http_body_util::StreamBody::new(futures_util::stream::iter(frames));
        let context = context();
        let mut body = pin!(FingerprintedBody::new(stream, before, u64::MAX, Arc::clone(&context)).0);
        for _ in sizes {
            body.frame().await.unwrap().unwrap();
        }
        if rest.is_empty() {
            assert!(body.frame().await.is_none());
        }
        context.body().body_fingerprint()
    }

    /// A next attempt after one with the fingerprint `before`: its context, whether `bytes` match, and its body in chunks.
    async fn next(
        bytes: &[u8],
        chunk: usize,
        before: &BodyFingerprint,
    ) -> (Arc<OperationContext<RunningFingerprint>>, bool, impl Body<Data = Bytes, Error = Infallible> + Send + use<>)
    {
        let context = context();
        let same = is_same(Full::new(Bytes::copy_from_slice(bytes)), before, context.body(), PACE).await.unwrap();
        let frames: Vec<_> = bytes.chunks(chunk).map(Bytes::copy_from_slice).map(Frame::data).map(Ok).collect();
        (context, same, http_body_util::StreamBody::new(futures_util::stream::iter(frames)))
    }

    proptest! {
        #[test]
        fn body_is_same_if_its_read_part_is_same(
            bytes in prop::collection::vec(0..3_u8, 0..60),
            other in prop::collection::vec(0..3_u8, 0..60),
            sizes in prop::collection::vec(0..20_usize, 0..6),
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            runtime.block_on(async {
                let (_, fingerprint) = made(&post("/"), &[]);
                let body_fingerprint = read(&bytes, &sizes, BodyFingerprint::default()).await;
                let len = usize::try_from(body_fingerprint.len).unwrap();
                let expected = if body_fingerprint.is_whole == Some(true) { other == bytes } else { other.starts_with(&bytes[..len]) };
                let same = is_same(Full::new(Bytes::from(other)), &body_fingerprint, &fingerprint, PACE).await.unwrap();
                prop_assert_eq!(same, expected, "{:?}", body_fingerprint);
                prop_assert!(is_same(Full::new(Bytes::from(bytes)), &body_fingerprint, &fingerprint, PACE).await.unwrap());
                Ok(())
            })?;
        }

        #[test]
        fn next_attempt_does_not_see_end_of_different_body(
            bytes in prop::collection::vec(0..2_u8, 0..20),
            other in prop::collection::vec(0..2_u8, 0..20),
            sizes in prop::collection::vec(0..9_usize, 0..6),
            chunk in 1..9_usize,
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            runtime.block_on(async {
                let before = read(&bytes, &sizes, BodyFingerprint::default()).await;
                let (context, same, body) = next(&other, chunk, &before).await;
                let (body, _) = FingerprintedBody::new(body, before, u64::MAX, Arc::clone(&context));
                let seen = futures_util::FutureExt::now_or_never(body.collect()).map(|body| body.unwrap().to_bytes());
                prop_assert_eq!(seen.is_some(), same, "{:?}", before);
                prop_assert_eq!(context.body().rejection(), (!same).then_some(BodyRejection::Differs));
                if let Some(seen) = seen {
                    prop_assert_eq!(seen, other);
                }
                Ok(())
            })?;
        }

        #[test]
        fn unread_part_of_next_attempt_is_compared(
            bytes in prop::collection::vec(0..2_u8, 0..20),
            other in prop::collection::vec(0..2_u8, 0..20),
            sizes in prop::collection::vec(0..9_usize, 0..6),
            chunk in 1..9_usize,
            frames_read in 0..6_usize,
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            runtime.block_on(async {
                let before = read(&bytes, &sizes, BodyFingerprint::default()).await;
                let (context, same, body) = next(&other, chunk, &before).await;
                let (mut body, rest) = FingerprintedBody::new(body, before, u64::MAX, Arc::clone(&context));
                for _ in 0..frames_read {
                    drop(futures_util::FutureExt::now_or_never(body.frame()));
                }
                let is_confirmed = context.body().is_confirmed();
                prop_assert!(!is_confirmed || same);
                let mut rest = rest.filter(|_| !is_confirmed && context.body().rejection().is_none());
                if let Some(rest) = &mut rest {
                    prop_assert!(Arc::get_mut(rest).is_none(), "the handler still holds the body");
                    drop(body);
                    let rest = Arc::get_mut(rest).unwrap().is_same(context.body(), PACE).await;
                    prop_assert_eq!(rest, Some(same), "{:?}", before);
                    prop_assert_eq!(context.body().body_fingerprint(), before, "the fingerprint does not grow");
                }
                Ok(())
            })?;
        }
    }
}
