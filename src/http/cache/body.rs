use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use ::http::HeaderMap;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tokio::sync::mpsc::UnboundedReceiver;

use super::stored::Stored;
use crate::cache::LoadWaiter;
use crate::error::BoxError;
use crate::http::body::{ResponseBody, size_after, size_of_stored};

pin_project! {
    /// The body of a response from a [`CacheLayer`](crate::CacheLayer): the body of the inner service, a stored body, or a rejection.
    pub struct CachedBody<B> {
        #[pin]
        kind: Kind<B>,
    }
}

pin_project! {
    #[project = KindProj]
    enum Kind<B> {
        // A response that is not stored, or a rejection.
        Other { #[pin] body: ResponseBody<B> },
        // A stored body.
        Whole { data: Option<Bytes>, trailers: Option<HeaderMap> },
        // A body that a load reads and stores.
        Live { pieces: UnboundedReceiver<Piece<B>>, hint: SizeHint, load: Option<LoadWaiter<Stored>> },
        // The rest of a live body, after its load has stopped reading. The body is not stored.
        Rest { body: Pin<Box<B>> },
        Ended,
    }
}

/// A part of a body that a load reads.
pub(super) enum Piece<B> {
    Data(Bytes),
    Trailers(HeaderMap),
    Failed(BoxError),
    /// The rest of the body, which the load does not read.
    Rest(Pin<Box<B>>),
    End,
}

impl<B> CachedBody<B> {
    pub(crate) const fn other(body: ResponseBody<B>) -> Self {
        Self { kind: Kind::Other { body } }
    }

    pub(super) fn whole(data: Bytes, trailers: HeaderMap) -> Self {
        let trailers = (!trailers.is_empty()).then_some(trailers);
        Self { kind: Kind::Whole { data: (!data.is_empty()).then_some(data), trailers } }
    }

    /// `hint` is the size of the whole body.
    pub(super) const fn live(pieces: UnboundedReceiver<Piece<B>>, hint: SizeHint) -> Self {
        Self { kind: Kind::Live { pieces, hint, load: None } }
    }

    /// A load without callers is cancelled, so this body counts as a caller until it ends or is dropped.
    pub(super) fn keep_load(&mut self, waiter: LoadWaiter<Stored>) {
        if let Kind::Live { load, .. } = &mut self.kind {
            *load = Some(waiter);
        }
    }
}

/// For the rejections of your own [`Responder`](crate::responder::Responder).
impl<B> From<Bytes> for CachedBody<B> {
    fn from(text: Bytes) -> Self {
        Self::other(text.into())
    }
}

// Outer layers that respond themselves, for CORS or a timeout, create an empty body with `Default`.
impl<B: Default> Default for CachedBody<B> {
    fn default() -> Self {
        Self::other(ResponseBody::default())
    }
}

impl<B> Body for CachedBody<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        loop {
            let next = match self.as_mut().project().kind.project() {
                KindProj::Other { body } => return body.poll_frame(cx).map_err(Into::into),
                KindProj::Whole { data, trailers } => {
                    let next = data.take().map(Frame::data);
                    return Poll::Ready(next.or_else(|| trailers.take().map(Frame::trailers)).map(Ok));
                }
                KindProj::Rest { body } => return body.as_mut().poll_frame(cx).map_err(Into::into),
                KindProj::Ended => return Poll::Ready(None),
                KindProj::Live { pieces, hint, .. } => {
                    match ready!(pieces.poll_recv(cx)).unwrap_or_else(|| Piece::Failed(BrokenOff.into())) {
                        Piece::Data(data) => {
                            *hint = size_after(hint, data.len() as u64);
                            return Poll::Ready(Some(Ok(Frame::data(data))));
                        }
                        Piece::Trailers(trailers) => return Poll::Ready(Some(Ok(Frame::trailers(trailers)))),
                        last => last,
                    }
                }
            };
            let (kind, result) = match next {
                Piece::Rest(body) => (Kind::Rest { body }, None),
                Piece::Failed(error) => (Kind::Ended, Some(Some(Err(error)))),
                _ => (Kind::Ended, Some(None)),
            };
            self.set(Self { kind });
            if let Some(result) = result {
                return Poll::Ready(result);
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Other { body } => body.is_end_stream(),
            Kind::Whole { data, trailers } => data.is_none() && trailers.is_none(),
            Kind::Live { .. } => false,
            Kind::Rest { body } => body.is_end_stream(),
            Kind::Ended => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Other { body } => body.size_hint(),
            Kind::Whole { data, trailers } => {
                size_of_stored(data.as_ref().map_or(0, |data| data.len() as u64), trailers.is_some())
            }
            Kind::Live { hint, .. } => *hint,
            Kind::Rest { body } => body.size_hint(),
            Kind::Ended => SizeHint::with_exact(0),
        }
    }
}

impl<B> fmt::Debug for CachedBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match &self.kind {
            Kind::Other { .. } => "Other",
            Kind::Whole { .. } => "Whole",
            Kind::Live { .. } => "Live",
            Kind::Rest { .. } => "Rest",
            Kind::Ended => "Ended",
        };
        f.debug_struct("CachedBody").field("kind", &kind).finish_non_exhaustive()
    }
}

/// The load ended before the body was complete.
#[derive(Debug)]
struct BrokenOff;

impl fmt::Display for BrokenOff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the load ended before the response was complete")
    }
}

impl Error for BrokenOff {}
