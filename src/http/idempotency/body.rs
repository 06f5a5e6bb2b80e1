use std::collections::VecDeque;
use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use ::http::HeaderMap;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tokio::sync::mpsc::Receiver;
use tokio::task::AbortHandle;

use crate::error::BoxError;
use crate::http::body::{ResponseBody, size_after, size_of_stored};
use crate::http::lock::{AbortMarker, AbortOutcome};

pin_project! {
    /// The body of a response from an [`IdempotencyLayer`](crate::IdempotencyLayer): that of the handler while it is recorded, or
    /// a stored one.
    pub struct IdempotentBody<B> {
        #[pin]
        kind: Kind<B>,
    }
}

pin_project! {
    #[project = KindProj]
    enum Kind<B> {
        // A response that is not recorded, or a rejection.
        Other { #[pin] body: ResponseBody<B> },
        // A complete body.
        Whole { chunks: Chunks, trailers: Option<HeaderMap> },
        // The first part of a body, and the pieces that its recording task still sends.
        Live {
            chunks: Chunks,
            pieces: Receiver<Piece>,
            hint: SizeHint,
            ended: bool,
            abort: Option<AbortOnDrop>,
            // Tells outer layers that the body was cut off.
            abort_marker: AbortMarker,
        },
    }
}

/// Parts of a body. Most bodies have one part, which needs no allocation.
#[derive(Default)]
pub(super) struct Chunks {
    first: Option<Bytes>,
    rest: VecDeque<Bytes>,
}

impl Chunks {
    pub(super) fn push(&mut self, chunk: Bytes) {
        if chunk.is_empty() {
            return;
        }
        if self.is_empty() {
            self.first = Some(chunk);
        } else {
            self.rest.push_back(chunk);
        }
    }

    fn pop(&mut self) -> Option<Bytes> {
        self.first.take().or_else(|| self.rest.pop_front())
    }

    pub(super) fn pop_last(&mut self) -> Option<Bytes> {
        self.rest.pop_back().or_else(|| self.first.take())
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Bytes> {
        self.first.iter().chain(&self.rest)
    }

    fn is_empty(&self) -> bool {
        self.first.is_none() && self.rest.is_empty()
    }
}

/// A part of a response on its way to the client.
pub(super) enum Piece {
    Data(Bytes),
    Trailers(HeaderMap),
    Failed(BoxError),
    End,
}

impl<B> IdempotentBody<B> {
    pub(crate) const fn other(body: ResponseBody<B>) -> Self {
        Self { kind: Kind::Other { body } }
    }

    pub(super) fn whole(chunks: Chunks, trailers: HeaderMap) -> Self {
        let trailers = (!trailers.is_empty()).then_some(trailers);
        Self { kind: Kind::Whole { chunks, trailers } }
    }

    /// `hint` is the size of the whole body.
    pub(super) const fn live(
        chunks: Chunks,
        pieces: Receiver<Piece>,
        hint: SizeHint,
        abort_marker: AbortMarker,
    ) -> Self {
        Self { kind: Kind::Live { chunks, pieces, hint, ended: false, abort: None, abort_marker } }
    }

    /// Aborts the recording task when this body is dropped.
    pub(super) fn aborts(&mut self, with: AbortOnDrop) {
        if let Kind::Live { abort, .. } = &mut self.kind {
            *abort = Some(with);
        }
    }
}

/// For the rejections of your own [`Responder`](crate::responder::Responder).
impl<B> From<Bytes> for IdempotentBody<B> {
    fn from(text: Bytes) -> Self {
        Self::other(text.into())
    }
}

// Outer layers that respond themselves, for CORS or a timeout, create an empty body with `Default`.
impl<B: Default> Default for IdempotentBody<B> {
    fn default() -> Self {
        Self::other(ResponseBody::default())
    }
}

impl<B> Body for IdempotentBody<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Poll::Ready(match self.project().kind.project() {
            KindProj::Other { body } => ready!(body.poll_frame(cx)).map(|frame| frame.map_err(Into::into)),
            KindProj::Whole { chunks, trailers } => {
                let next = chunks.pop().map(Frame::data);
                next.or_else(|| trailers.take().map(Frame::trailers)).map(Ok)
            }
            KindProj::Live { ended: true, .. } => None,
            KindProj::Live { chunks, pieces, hint, ended, abort, abort_marker } => {
                let piece = match chunks.pop() {
                    Some(chunk) => Piece::Data(chunk),
                    None => ready!(pieces.poll_recv(cx)).unwrap_or_else(|| {
                        // Has no effect if the task has reported the outcome already.
                        abort_marker.set(AbortOutcome::OutcomeUnknown);
                        Piece::Failed(BrokenOff.into())
                    }),
                };
                match piece {
                    Piece::Data(chunk) => {
                        *hint = size_after(hint, chunk.len() as u64);
                        if let Some(abort) = abort {
                            abort.handed_out(chunk.len() as u64);
                        }
                        Some(Ok(Frame::data(chunk)))
                    }
                    Piece::Trailers(trailers) => Some(Ok(Frame::trailers(trailers))),
                    Piece::Failed(error) => {
                        *ended = true;
                        Some(Err(error))
                    }
                    Piece::End => {
                        *ended = true;
                        None
                    }
                }
            }
        })
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Other { body } => body.is_end_stream(),
            Kind::Whole { chunks, trailers } => chunks.is_empty() && trailers.is_none(),
            Kind::Live { ended, .. } => *ended,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Other { body } => body.size_hint(),
            Kind::Whole { chunks, trailers } => {
                size_of_stored(chunks.iter().map(|chunk| chunk.len() as u64).sum(), trailers.is_some())
            }
            Kind::Live { hint, .. } => *hint,
        }
    }
}

impl<B> fmt::Debug for IdempotentBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match &self.kind {
            Kind::Other { .. } => "Other",
            Kind::Whole { .. } => "Whole",
            Kind::Live { .. } => "Live",
        };
        f.debug_struct("IdempotentBody").field("kind", &kind).finish_non_exhaustive()
    }
}

/// The handler was cancelled, or it panicked, while its response was being sent.
#[derive(Debug)]
struct BrokenOff;

impl fmt::Display for BrokenOff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the handler ended before its response was complete")
    }
}

impl Error for BrokenOff {}

/// Aborts a task if the body is dropped before the client has received all announced bytes. After them, a drop is no disconnect: a
/// client that counts the bytes does not wait for the end of the body.
pub(super) struct AbortOnDrop {
    task: AbortHandle,
    // How many announced bytes the client has not received yet.
    missing: Option<u64>,
}

impl AbortOnDrop {
    pub(super) const fn new(task: AbortHandle, len: Option<u64>) -> Self {
        Self { task, missing: len }
    }

    fn handed_out(&mut self, len: u64) {
        self.missing = self.missing.map(|missing| missing.saturating_sub(len));
    }
}

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        if self.missing != Some(0) {
            self.task.abort();
        }
    }
}
