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
    /// The body of a response from a layer: the body of the inner service, or the short text of a rejection.
    ///
    /// `ResponseBody` without a type parameter has no inner service and is always a rejection.
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
        // The body of the inner service, without a pending charge.
        Inner { #[pin] body: B },
        // Boxed to keep responses small, because they are moved often: with most bodies this type is as large as the inner body.
        Other { other: Pin<Box<Other<B>>> },
    }
}

pin_project! {
    #[derive(Debug)]
    #[project = OtherProj]
    enum Other<B> {
        // The body of the inner service, with a charge that is settled at its end.
        Charged { #[pin] body: B, charge: Charge },
        // The text of a rejection; `None` after it was read.
        Rejection { text: Option<Bytes> },
    }
}

/// A charge that is settled at the end of the body; `None` after that.
#[derive(Debug)]
struct Charge {
    #[cfg(feature = "grpc")]
    at_end: Option<AtEnd>,
}

impl Charge {
    #[inline]
    #[cfg(feature = "grpc")]
    fn taken_from(extensions: &mut Extensions) -> Option<Self> {
        // Nearly all responses have no extensions, so skip the lookup.
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

/// A body that is dropped before its end counts as failed, because it has no trailers.
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

    /// Wraps the body of `response` with the charge in its extensions, if there is one.
    #[inline]
    pub(crate) fn of(mut response: Response<B>) -> Response<Self> {
        let charge = Charge::taken_from(response.extensions_mut());
        // A single `map` moves the response only once.
        response.map(|body| match charge {
            None => Self::inner(body),
            Some(charge) => Self::other(Other::Charged { body, charge }),
        })
    }

    pub(crate) fn rejection(text: impl Into<Bytes>) -> Self {
        let text = text.into();
        Self::other(Other::Rejection { text: (!text.is_empty()).then_some(text) })
    }

    /// The body of the inner service, if it has no pending charge.
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

/// The inner body type of responses that have no inner service, such as those of
/// [`HttpResponder::respond_to`](crate::HttpResponder::respond_to). This type has no values.
#[derive(Clone, Copy, Debug)]
pub enum Never {}

impl Body for Never {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match *self {}
    }
}

/// For the rejections of your own [`Responder`](crate::responder::Responder).
impl<B> From<Bytes> for ResponseBody<B> {
    fn from(text: Bytes) -> Self {
        Self::rejection(text)
    }
}

/// For [`SameBody`](crate::responder::SameBody): the inner body is returned unboxed.
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

// Outer layers that respond themselves, for CORS or a timeout, create an empty body with `Default`.
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

/// The size of the rest of a body, after `len` bytes of it.
pub(in crate::http) fn size_after(whole: &SizeHint, len: u64) -> SizeHint {
    let mut rest = SizeHint::new();
    rest.set_lower(whole.lower().saturating_sub(len));
    if let Some(upper) = whole.upper() {
        rest.set_upper(upper.saturating_sub(len));
    }
    rest
}

/// The size of a stored body, with or without trailers.
pub(in crate::http) fn size_of_stored(len: u64, has_trailers: bool) -> SizeHint {
    if !has_trailers {
        return SizeHint::with_exact(len);
    }
    // HTTP/1 sends no trailers after a body of known length.
    let mut hint = SizeHint::new();
    hint.set_lower(len);
    hint
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn response_body_is_as_small_as_boxed_body() {
        type Boxed = Pin<Box<dyn Body<Data = Bytes, Error = std::convert::Infallible> + Send>>;
        assert_eq!(size_of::<ResponseBody<Boxed>>(), size_of::<Boxed>());
    }
}
