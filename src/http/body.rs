#[cfg(feature = "grpc")]
use std::borrow::Cow;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

#[cfg(feature = "grpc")]
use ::http::HeaderMap;
use ::http::{Extensions, Response};
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

#[cfg(feature = "grpc")]
use super::charge::AtEnd;

pin_project! {
    /// The body of a response that came through a layer: that of the inner service, or the short text of a rejection. Where there is no inner
    /// service it is such a text.
    #[derive(Debug)]
    pub struct ResponseBody<B = Never> {
        #[pin]
        kind: Kind<B>,
    }
}

pin_project! {
    #[derive(Debug)]
    #[project = KindProj]
    enum Kind<B> {
        // What the inner service answered, and nothing waits for its end.
        Inner { #[pin] body: B },
        // Anything else, behind a pointer: with most bodies a response is as large as that of the inner service then, and responses are
        // moved about a lot.
        Other { other: Pin<Box<Other<B>>> },
    }
}

pin_project! {
    #[derive(Debug)]
    #[project = OtherProj]
    enum Other<B> {
        // What the inner service answered, with a charge that waits for the end of it.
        Charged { #[pin] body: B, charge: Charge },
        // What the layer answered in its place; `None` once it was read.
        Rejection { text: Option<Bytes> },
    }
}

/// The charge that waits for the end of a body, until it was settled.
#[derive(Debug)]
struct Charge {
    #[cfg(feature = "grpc")]
    at_end: Option<AtEnd>,
}

impl Charge {
    #[inline]
    #[cfg(feature = "grpc")]
    fn taken_from(extensions: &mut Extensions) -> Option<Self> {
        // Of nearly all responses it is known at a glance that there is none.
        let at_end = if extensions.is_empty() { None } else { extensions.remove() };
        at_end.map(|at_end| Self { at_end: Some(at_end) })
    }

    #[cfg(not(feature = "grpc"))]
    const fn taken_from(_: &mut Extensions) -> Option<Self> {
        None
    }

    /// Settles the charge if this frame is the last one.
    fn settle<E>(&mut self, frame: Option<&Result<Frame<Bytes>, E>>) {
        #[cfg(not(feature = "grpc"))]
        let _ = frame;
        #[cfg(feature = "grpc")]
        if let Some(at_end) = &mut self.at_end {
            let end = match frame {
                Some(Ok(frame)) => at_end.trailers(frame),
                Some(Err(_)) | None => Some(Cow::Owned(HeaderMap::new())),
            };
            if let Some(end) = end
                && let Some(at_end) = self.at_end.take()
            {
                at_end.settle(&end);
            }
        }
    }
}

/// A body that is not read to its end has no trailers, as one that breaks off.
#[cfg(feature = "grpc")]
impl Drop for Charge {
    fn drop(&mut self) {
        if let Some(at_end) = self.at_end.take() {
            at_end.settle(&HeaderMap::new());
        }
    }
}

impl<B> ResponseBody<B> {
    #[inline]
    pub(crate) fn inner(body: B) -> Self {
        Self { kind: Kind::Inner { body } }
    }

    /// The response as it is passed on, with the charge that waits for its end.
    #[inline]
    pub(crate) fn of(mut response: Response<B>) -> Response<Self> {
        let charge = Charge::taken_from(response.extensions_mut());
        // In one place, so that the response is moved once.
        response.map(|body| match charge {
            None => Self::inner(body),
            Some(charge) => Self::other(Other::Charged { body, charge }),
        })
    }

    pub(crate) fn rejection(text: impl Into<Bytes>) -> Self {
        let text = text.into();
        Self::other(Other::Rejection { text: (!text.is_empty()).then_some(text) })
    }

    /// The body of the inner service, if there is nothing else to this one.
    #[inline]
    #[cfg(feature = "axum")]
    fn into_inner(self) -> Result<B, Self> {
        match self.kind {
            Kind::Inner { body } => Ok(body),
            kind @ Kind::Other { .. } => Err(Self { kind }),
        }
    }

    fn other(other: Other<B>) -> Self {
        Self { kind: Kind::Other { other: Box::pin(other) } }
    }
}

/// The body of an inner service where there is none, as with the answers that handlers give by
/// [`HttpResponder::answer_to`](crate::HttpResponder::answer_to). There is no value of it.
#[derive(Clone, Copy, Debug)]
pub enum Never {}

impl Body for Never {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match *self {}
    }
}

/// The body of a rejection of one's own.
impl<B> From<Bytes> for ResponseBody<B> {
    fn from(text: Bytes) -> Self {
        Self::rejection(text)
    }
}

/// For [`SameBody`](crate::responder::SameBody): what the router answered stays as it is.
#[cfg(feature = "axum")]
impl From<ResponseBody<Self>> for axum::body::Body {
    #[inline]
    fn from(body: ResponseBody<Self>) -> Self {
        match body.into_inner() {
            Ok(inner) => inner,
            Err(body) => Self::new(body),
        }
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
            KindProj::Inner { body } => body.poll_frame(cx),
            KindProj::Other { other } => match other.as_mut().project() {
                OtherProj::Charged { body, charge } => {
                    let frame = ready!(body.poll_frame(cx));
                    charge.settle(frame.as_ref());
                    Poll::Ready(frame)
                }
                OtherProj::Rejection { text } => Poll::Ready(text.take().map(|text| Ok(Frame::data(text)))),
            },
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Inner { body } => body.is_end_stream(),
            Kind::Other { other } => match &**other {
                Other::Charged { body, .. } => body.is_end_stream(),
                Other::Rejection { text } => text.is_none(),
            },
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Inner { body } => body.size_hint(),
            Kind::Other { other } => match &**other {
                Other::Charged { body, .. } => body.size_hint(),
                Other::Rejection { text } => SizeHint::with_exact(text.as_ref().map_or(0, |text| text.len() as u64)),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boxed_body_is_no_larger_behind_a_layer() {
        type Boxed = Pin<Box<dyn Body<Data = Bytes, Error = std::convert::Infallible> + Send>>;
        assert_eq!(size_of::<ResponseBody<Boxed>>(), size_of::<Boxed>());
    }
}
