use std::pin::Pin;
use std::task::{Context, Poll, ready};

use ::http::{HeaderMap, Response};
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

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
        Inner { #[pin] body: B, at_end: Option<AtEnd> },
        // What the layer answered in its place; `None` once it was read.
        Rejection { text: Option<Bytes> },
    }
}

impl<B> ResponseBody<B> {
    pub(crate) fn inner(body: B) -> Self {
        Self { kind: Kind::Inner { body, at_end: None } }
    }

    /// The response as it is passed on, with the charge that waits for its end.
    pub(crate) fn of(mut response: Response<B>) -> Response<Self> {
        let at_end = response.extensions_mut().remove();
        response.map(|body| Self { kind: Kind::Inner { body, at_end } })
    }

    pub(crate) fn rejection(text: impl Into<Bytes>) -> Self {
        let text = text.into();
        Self { kind: Kind::Rejection { text: (!text.is_empty()).then_some(text) } }
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
            KindProj::Inner { body, at_end } => {
                let frame = ready!(body.poll_frame(cx));
                if at_end.is_some() {
                    let nothing = HeaderMap::new();
                    let end = match &frame {
                        Some(Ok(frame)) => frame.trailers_ref(),
                        Some(Err(_)) | None => Some(&nothing),
                    };
                    if let (Some(end), Some(at_end)) = (end, end.and_then(|_| at_end.take())) {
                        at_end.settle(end);
                    }
                }
                Poll::Ready(frame)
            }
            KindProj::Rejection { text } => Poll::Ready(text.take().map(|text| Ok(Frame::data(text)))),
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
