//! Reads a body for its client and for the store at the same time.

use std::error::Error;
use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;

use ::http::HeaderMap;
use ::http::header::{CACHE_CONTROL, SET_COOKIE};
use bytes::Bytes;
use http_body::Body;
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::consume_budget;

use super::body::Piece;
use crate::error::BoxError;
use crate::http::idempotency::recorded_response::Recorder;

/// The memory of a part besides its bytes: its allocation, two handles, and its slot in the channel. About 200 bytes.
pub(super) const PART_COST: usize = 256;

/// A body that is read for the store, and sent to its client.
///
/// The client gets the end of the body when this value is dropped, after the load has recorded the body. If the client got the end earlier,
/// it could leave, and a load without a client is cancelled. If this value is dropped before the body has ended, for instance because the
/// load has timed out, the client reads the rest itself.
pub(super) struct Tee<B> {
    body: Option<Pin<Box<B>>>,
    // The part that may be the last one. It is sent together with the end, because a client that counts bytes may leave after it.
    held: Option<Bytes>,
    has_failed: bool,
    trailers: Option<HeaderMap>,
    // Unbounded, because the client may be slower than the inner service. The size limit of a stored response also limits this buffer.
    pieces: UnboundedSender<Piece<B>>,
}

impl<B> Tee<B> {
    pub(super) fn new(body: B, pieces: UnboundedSender<Piece<B>>) -> Self {
        Self { body: Some(Box::pin(body)), held: None, has_failed: false, trailers: None, pieces }
    }

    /// Sends a piece, unless the client has gone.
    fn send(&self, piece: Piece<B>) {
        let _ = self.pieces.send(piece);
    }

    fn send_held(&mut self) {
        if let Some(data) = self.held.take() {
            self.send(Piece::Data(data));
        }
        if let Some(trailers) = self.trailers.take() {
            self.send(Piece::Trailers(trailers));
        }
    }
}

impl<B> Tee<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    /// Reads the body to its end, and records it. `None` if it must not be stored, for instance because it is too large. `announced` is the
    /// length in `Content-Length`.
    pub(super) async fn read(
        &mut self,
        recorder: &mut Recorder,
        announced: Option<u64>,
    ) -> Result<Option<Vec<Bytes>>, BrokenBody> {
        let (mut chunks, mut received, mut parts) = (Vec::new(), 0_u64, 0);
        while let Some(body) = self.body.as_mut() {
            // A body that is always ready must yield to other tasks and to the timers.
            consume_budget().await;
            match poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
                None => self.body = None,
                Some(Err(error)) => {
                    self.body = None;
                    self.send_held();
                    self.send(Piece::Failed(error.into()));
                    self.has_failed = true;
                    return Err(BrokenBody::Failed);
                }
                Some(Ok(frame)) => {
                    let is_over = body.is_end_stream() || body.size_hint().exact() == Some(0);
                    let data = frame.into_data().unwrap_or_else(|frame| {
                        self.trailers = frame.into_trailers().ok();
                        Bytes::new()
                    });
                    if let Some(trailers) = &self.trailers {
                        recorder.set_trailers(trailers);
                        // Some clients treat trailers as header fields.
                        if trailers.contains_key(SET_COOKIE) || trailers.contains_key(CACHE_CONTROL) {
                            return Ok(None);
                        }
                    }
                    if !data.is_empty() {
                        recorder.count_data(&data);
                        parts += 1;
                        received += data.len() as u64;
                        chunks.push(data.clone());
                        self.pass_on(data, is_over || announced.is_some_and(|len| received >= len));
                    }
                    if !recorder.fits_with(PART_COST.saturating_mul(parts)) {
                        return Ok(None);
                    }
                }
            }
        }
        match announced.filter(|len| *len != received) {
            Some(_) => Err(BrokenBody::Length),
            None => Ok(Some(chunks)),
        }
    }

    fn pass_on(&mut self, data: Bytes, may_be_over: bool) {
        if let Some(before) = self.held.take() {
            self.send(Piece::Data(before));
        }
        if may_be_over {
            self.held = Some(data);
        } else {
            self.send(Piece::Data(data));
        }
    }
}

impl<B> Drop for Tee<B> {
    fn drop(&mut self) {
        if self.has_failed {
            return;
        }
        self.send_held();
        let last = self.body.take().map_or(Piece::End, Piece::Rest);
        self.send(last);
    }
}

/// Why a body is broken, and so not stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BrokenBody {
    Failed,
    Length,
}

impl fmt::Display for BrokenBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Failed => "the body of the response failed",
            Self::Length => "the body of the response has another length than its header announces",
        })
    }
}

impl Error for BrokenBody {}
