use std::pin::Pin;
#[cfg(feature = "grpc")]
use std::task::ready;
use std::task::{Context, Poll};

#[cfg(feature = "grpc")]
use ::http::HeaderMap;
use ::http::Response;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

#[cfg(feature = "grpc")]
use super::charge::AtEnd;

pin_project! {
    /// The body of a response that came through a layer: that of the inner service, or the short text of a rejection.
    #[derive(Debug)]
    pub struct ResponseBody<B> {
        #[pin]
        kind: Kind<B>,
    }
}

pin_project! {
    #[derive(Debug)]
    #[project = KindProj]
    enum Kind<B> {
        // What the inner service answered.
        Inner { #[pin] body: B, pending: Pending },
        // What the layer answered in its place; `None` once it was read. Boxed, so that the bodies of the others are no larger.
        Rejection { text: Option<Box<Bytes>> },
    }
}

/// The charge that waits for the end of a body, if there is one. Takes no room without the feature that knows such charges.
#[derive(Debug, Default)]
struct Pending {
    #[cfg(feature = "grpc")]
    at_end: Option<Box<AtEnd>>,
}

impl Pending {
    #[inline]
    fn of<B>(response: &mut Response<B>) -> Self {
        #[cfg(not(feature = "grpc"))]
        let _ = response;
        Self {
            #[cfg(feature = "grpc")]
            at_end: response.extensions_mut().remove().map(Box::new),
        }
    }

    /// Settles the charge if this frame is the last one.
    #[cfg(feature = "grpc")]
    fn settle<E>(&mut self, frame: Option<&Result<Frame<Bytes>, E>>) {
        if self.at_end.is_some() {
            let nothing = HeaderMap::new();
            let end = match frame {
                Some(Ok(frame)) => frame.trailers_ref(),
                Some(Err(_)) | None => Some(&nothing),
            };
            if let (Some(end), Some(at_end)) = (end, end.and_then(|_| self.at_end.take())) {
                at_end.settle(end);
            }
        }
    }
}

impl<B> ResponseBody<B> {
    pub(crate) fn inner(body: B) -> Self {
        Self { kind: Kind::Inner { body, pending: Pending::default() } }
    }

    /// The response as it is passed on, with the charge that waits for its end.
    #[inline]
    pub(crate) fn of(mut response: Response<B>) -> Response<Self> {
        let pending = Pending::of(&mut response);
        response.map(|body| Self { kind: Kind::Inner { body, pending } })
    }

    pub(crate) fn rejection(text: impl Into<Bytes>) -> Self {
        let text = text.into();
        Self { kind: Kind::Rejection { text: (!text.is_empty()).then(|| Box::new(text)) } }
    }
}

// Layers above that answer by themselves, for CORS or a timeout, make an empty body this way.
impl<B: Default> Default for ResponseBody<B> {
    fn default() -> Self {
        Self::inner(B::default())
    }
}

impl<B: Body<Data = Bytes>> Body for ResponseBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project().kind.project() {
            #[cfg(not(feature = "grpc"))]
            KindProj::Inner { body, .. } => body.poll_frame(cx),
            #[cfg(feature = "grpc")]
            KindProj::Inner { body, pending } => {
                let frame = ready!(body.poll_frame(cx));
                pending.settle(frame.as_ref());
                Poll::Ready(frame)
            }
            KindProj::Rejection { text } => Poll::Ready(text.take().map(|text| Ok(Frame::data(*text)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Inner { body, .. } => body.is_end_stream(),
            Kind::Rejection { text } => text.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Inner { body, .. } => body.size_hint(),
            Kind::Rejection { text } => SizeHint::with_exact(text.as_ref().map_or(0, |text| text.len() as u64)),
        }
    }
}
