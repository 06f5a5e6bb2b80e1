use ::http::header::CONTENT_TYPE;
use ::http::{HeaderMap, HeaderValue};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;

/// Looks for the trailers of gRPC-Web, which are the last message of a body, while that passes.
#[derive(Clone, Debug, Default)]
pub(crate) struct WebTrailers {
    is_text: bool,
    // Something was no base64, so nothing behind it can be read.
    is_broken: bool,
    // Of text, what has come of four characters.
    quad: Vec<u8>,
    // What has come of the head of a message: a byte of flags, and its length in four.
    head: Vec<u8>,
    // How much of the message is to come.
    rest: usize,
    trailers: Vec<u8>,
}

impl WebTrailers {
    const HEAD: usize = 5;
    const IS_TRAILERS: u8 = 0x80;
    /// How many bytes of trailers are kept to be read. The status comes first.
    const MOST: usize = 8_192;

    /// Of an answer with these headers, if it is one of gRPC-Web.
    pub(crate) fn of(headers: &HeaderMap) -> Option<Self> {
        let content_type = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes)?;
        let kind = content_type.strip_prefix(b"application/grpc-web")?;
        Some(Self { is_text: kind.starts_with(b"-text"), ..Self::default() })
    }

    /// The status that the trailers name, if they end with these bytes of the body.
    pub(crate) fn read(&mut self, bytes: &[u8]) -> Option<HeaderMap> {
        if !self.is_text {
            return self.read_messages(bytes);
        }
        if self.is_broken {
            return None;
        }
        let mut decoded = Vec::with_capacity(bytes.len() / 4 * 3 + 3);
        for byte in bytes {
            self.quad.push(*byte);
            // By fours, as there may be padding behind each message.
            if self.quad.len() == 4 {
                self.is_broken = BASE64.decode_vec(&self.quad, &mut decoded).is_err();
                self.quad.clear();
                if self.is_broken {
                    return None;
                }
            }
        }
        self.read_messages(&decoded)
    }

    fn read_messages(&mut self, mut bytes: &[u8]) -> Option<HeaderMap> {
        while !bytes.is_empty() {
            if self.head.len() < Self::HEAD {
                let (head, behind) = bytes.split_at(bytes.len().min(Self::HEAD - self.head.len()));
                self.head.extend(head);
                bytes = behind;
                if let [_, length @ ..] = &*self.head
                    && let Ok(length) = length.try_into()
                {
                    self.rest = u32::from_be_bytes(length) as usize;
                }
            }
            let (message, behind) = bytes.split_at(bytes.len().min(self.rest));
            (self.rest, bytes) = (self.rest - message.len(), behind);
            let is_trailers = self.head.first().is_some_and(|flags| flags & Self::IS_TRAILERS != 0);
            if is_trailers {
                let room = Self::MOST - self.trailers.len();
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
    fn nothing_is_kept_of_what_is_no_base64() {
        let mut trailers = WebTrailers { is_text: true, ..WebTrailers::default() };
        for _ in 0..1_000 {
            assert!(trailers.read(&[0x1f; 1_024]).is_none());
        }
        assert!(trailers.quad.capacity() <= 16, "{} bytes are kept", trailers.quad.capacity());

        // What would have been an end, had all before it been base64.
        let end = BASE64.encode(b"\x80\0\0\0\x0fgrpc-status:0\r\n");
        assert!(WebTrailers { is_text: true, ..WebTrailers::default() }.read(end.as_bytes()).is_some());
        assert!(trailers.read(end.as_bytes()).is_none());
    }
}
