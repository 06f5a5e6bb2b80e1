use ::http::header::CONTENT_TYPE;
use ::http::{HeaderMap, HeaderValue};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;

/// Finds the trailers of gRPC-Web, which are the last message of a body, while the body is sent.
#[derive(Clone, Debug, Default)]
pub(crate) struct WebTrailers {
    is_text: bool,
    // The body contains invalid base64, so the rest of it cannot be parsed.
    is_invalid: bool,
    // The characters of an incomplete base64 quad, in a text body.
    quad: Vec<u8>,
    // The bytes of an incomplete message header: one byte of flags, and four of length.
    head: Vec<u8>,
    // The number of bytes of the message that have not arrived yet.
    rest: usize,
    trailers: Vec<u8>,
}

impl WebTrailers {
    const HEAD: usize = 5;
    const IS_TRAILERS: u8 = 0x80;
    /// The maximum number of bytes of trailers that are buffered. The status comes first, so it is among them.
    const MAX_TRAILERS: usize = 8_192;

    /// Creates the parser if these headers are of a gRPC-Web response.
    pub(crate) fn of(headers: &HeaderMap) -> Option<Self> {
        let content_type = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes)?;
        let kind = content_type.strip_prefix(b"application/grpc-web")?;
        Some(Self { is_text: kind.starts_with(b"-text"), ..Self::default() })
    }

    /// Reads a chunk of the body, and returns the status if the chunk completes the trailers.
    pub(crate) fn read(&mut self, bytes: &[u8]) -> Option<HeaderMap> {
        if !self.is_text {
            return self.read_messages(bytes);
        }
        if self.is_invalid {
            return None;
        }
        let mut decoded = Vec::with_capacity(bytes.len() / 4 * 3 + 3);
        for byte in bytes {
            self.quad.push(*byte);
            // Each message may end with padding, so decode quad by quad.
            if self.quad.len() == 4 {
                self.is_invalid = BASE64.decode_vec(&self.quad, &mut decoded).is_err();
                self.quad.clear();
                if self.is_invalid {
                    return None;
                }
            }
        }
        self.read_messages(&decoded)
    }

    fn read_messages(&mut self, mut bytes: &[u8]) -> Option<HeaderMap> {
        while !bytes.is_empty() {
            if self.head.len() < Self::HEAD {
                let (head, remaining) = bytes.split_at(bytes.len().min(Self::HEAD - self.head.len()));
                self.head.extend(head);
                bytes = remaining;
                if let [_, length @ ..] = &*self.head
                    && let Ok(length) = length.try_into()
                {
                    self.rest = u32::from_be_bytes(length) as usize;
                }
            }
            let (message, remaining) = bytes.split_at(bytes.len().min(self.rest));
            (self.rest, bytes) = (self.rest - message.len(), remaining);
            let is_trailers = self.head.first().is_some_and(|flags| flags & Self::IS_TRAILERS != 0);
            if is_trailers {
                let room = Self::MAX_TRAILERS - self.trailers.len();
                self.trailers.extend(&message[..message.len().min(room)]);
            }
            if self.head.len() == Self::HEAD && self.rest == 0 {
                if is_trailers {
                    return Some(self.status());
                }
                self.head.clear();
            }
        }
        None
    }

    fn status(&self) -> HeaderMap {
        let mut trailers = HeaderMap::new();
        for line in self.trailers.split(|byte| *byte == b'\n') {
            let mut parts = line.splitn(2, |byte| *byte == b':');
            if let (Some(name), Some(value)) = (parts.next(), parts.next())
                && name.eq_ignore_ascii_case(b"grpc-status")
                && let Ok(value) = HeaderValue::from_bytes(value.trim_ascii())
            {
                trailers.insert("grpc-status", value);
            }
        }
        trailers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_base64_is_not_buffered() {
        let mut trailers = WebTrailers { is_text: true, ..WebTrailers::default() };
        for _ in 0..1_000 {
            assert!(trailers.read(&[0x1f; 1_024]).is_none());
        }
        assert!(trailers.quad.capacity() <= 16, "{} bytes are buffered", trailers.quad.capacity());

        // After valid base64, this would end the body.
        let end = BASE64.encode(b"\x80\0\0\0\x0fgrpc-status:0\r\n");
        assert!(WebTrailers { is_text: true, ..WebTrailers::default() }.read(end.as_bytes()).is_some());
        assert!(trailers.read(end.as_bytes()).is_none());
    }
}
