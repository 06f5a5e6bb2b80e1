//! Finds out which protocol a server speaks after an unclear failure to connect.

use std::io;
use std::time::Duration;

use redis::ConnectionAddr;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// The longest time for one request.
const MAX_EXCHANGE_TIME: Duration = Duration::from_millis(500);
/// The client stops reading a reply at this length. The certificates of common servers are shorter.
const MAX_REPLY_LENGTH: usize = 64 * 1_024;

/// The protocol of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Redis,
    Http,
    Tls {
        /// Whether the server requests a client certificate with TLS 1.2. With TLS 1.3 this is not known here: the alert that ended the
        /// failed connection tells it.
        wants_certificate: bool,
    },
}

/// Sends `PING` in plain text. If the reply is unclear, sends a TLS ClientHello over another connection. Neither request has credentials.
pub(crate) async fn diagnose(address: &ConnectionAddr, time_limit: Duration) -> Option<Protocol> {
    let (ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. }) = address else { return None };
    let time_limit = time_limit.min(MAX_EXCHANGE_TIME);
    let plain = exchange_bytes((host, *port), b"PING\r\n", time_limit, |reply| !reply.is_empty()).await;
    match &*plain {
        reply if reply.starts_with(b"HTTP/") => return Some(Protocol::Http),
        [b'+' | b'-', ..] => return Some(Protocol::Redis),
        _ => {}
    }
    let tls = exchange_bytes((host, *port), CLIENT_HELLO, time_limit, is_complete).await;
    // An HTTP server that has not replied to `PING` may reply to the bytes of the ClientHello, which include a line feed.
    if tls.starts_with(b"HTTP/") {
        return Some(Protocol::Http);
    }
    let is_tls = matches!(&*tls, [ALERT | HANDSHAKE, 3, ..]) || matches!(&*plain, [ALERT, 3, ..]);
    is_tls.then(|| Protocol::Tls { wants_certificate: messages(&tls).contains(&CERTIFICATE_REQUEST) })
}

/// Sends a request and reads the reply until `is_enough` returns true for it, the server closes the connection, or the time is up.
async fn exchange_bytes(
    server: (&str, u16),
    request: &[u8],
    time_limit: Duration,
    is_enough: fn(&[u8]) -> bool,
) -> Vec<u8> {
    let mut reply = Vec::new();
    let exchange = async {
        let stream = TcpStream::connect(server).await?;
        stream.writable().await?;
        // The send buffer of a new connection has room for the whole request.
        stream.try_write(request)?;
        let mut received = [0; 4_096];
        while !is_enough(&reply) && reply.len() < MAX_REPLY_LENGTH {
            stream.readable().await?;
            match stream.try_read(&mut received) {
                Ok(0) => break,
                Ok(length) => reply.extend_from_slice(&received[..length]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    };
    // After a timeout, use the bytes received so far.
    let _ = timeout(time_limit, exchange).await;
    reply
}

/// Types of TLS records.
const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
/// Types of TLS handshake messages.
const CERTIFICATE_REQUEST: u8 = 13;
const SERVER_HELLO_DONE: u8 = 14;

/// Whether the reply does not begin with a handshake record, or includes ServerHelloDone, after which the server waits for the client.
fn is_complete(reply: &[u8]) -> bool {
    reply.first().is_some_and(|&first| first != HANDSHAKE) || messages(reply).contains(&SERVER_HELLO_DONE)
}

/// The types of the complete handshake messages in a reply. In TLS 1.2 they are not encrypted.
fn messages(mut reply: &[u8]) -> Vec<u8> {
    let mut payload = Vec::new();
    while let [HANDSHAKE, 3, _, high, low, rest @ ..] = reply
        && let Some((record, following)) = rest.split_at_checked(usize::from(u16::from_be_bytes([*high, *low])))
    {
        payload.extend_from_slice(record);
        reply = following;
    }
    let (mut types, mut payload) = (Vec::new(), &*payload);
    while let [kind, high, middle, low, rest @ ..] = payload
        && let Some(following) = rest.get(u32::from_be_bytes([0, *high, *middle, *low]) as usize..)
    {
        types.push(*kind);
        payload = following;
    }
    types
}

/// A ClientHello that offers TLS 1.2 with common ciphers. The handshake is never finished, so the random bytes need not be random.
#[rustfmt::skip]
const CLIENT_HELLO: &[u8] = &[
    // A record with one handshake message, ClientHello, of TLS 1.2.
    22, 3, 1, 0, 106, 1, 0, 0, 102, 3, 3,
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32,
    // No session. Ciphers: ECDHE with ECDSA or RSA, each with AES-GCM or ChaCha20; and RSA key exchange with AES-GCM. No compression.
    0,
    0, 16, 0xc0, 0x2b, 0xc0, 0x2c, 0xc0, 0x2f, 0xc0, 0x30, 0xcc, 0xa9, 0xcc, 0xa8, 0x00, 0x9c, 0x00, 0x9d,
    1, 0,
    // Extensions: groups x25519, P-256 and P-384; uncompressed points; signatures with ECDSA, RSA-PSS and RSA; empty renegotiation info.
    0, 45,
    0, 10, 0, 8, 0, 6, 0, 29, 0, 23, 0, 24,
    0, 11, 0, 2, 1, 0,
    0, 13, 0, 18, 0, 16, 4, 3, 5, 3, 8, 4, 8, 5, 8, 6, 4, 1, 5, 1, 6, 1,
    0xff, 0x01, 0, 1, 0,
];

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::time::Instant;

    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    use super::*;

    #[test]
    fn client_hello_lengths_are_consistent() {
        let length = |at: usize| usize::from(u16::from_be_bytes([CLIENT_HELLO[at], CLIENT_HELLO[at + 1]]));
        assert_eq!(length(3), CLIENT_HELLO.len() - 5);
        assert_eq!(length(7), CLIENT_HELLO.len() - 9);
        assert_eq!(messages(CLIENT_HELLO), [1]);
        let extensions = 11 + 32 + 1 + 2 + 16 + 2;
        assert_eq!(length(extensions), CLIENT_HELLO.len() - extensions - 2);
    }

    #[test]
    fn messages_span_records_and_cut_ones_are_ignored() {
        // A message of three bytes in two records, and the head of another one.
        let reply = [22, 3, 3, 0, 5, 2, 0, 0, 3, 9, 22, 3, 3, 0, 6, 9, 9, 13, 0, 0, 1];
        assert_eq!(messages(&reply), [2]);
        for end in 0..reply.len() {
            assert!(messages(&reply[..end]).is_empty(), "{end}");
        }
    }

    /// Sends the same reply to each connection, and keeps the connection open.
    async fn server(reply: &'static [u8]) -> ConnectionAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            let mut open_streams = Vec::new();
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                stream.write_all(reply).await.unwrap();
                open_streams.push(stream);
            }
        });
        ConnectionAddr::Tcp(address.ip().to_string(), address.port())
    }

    #[tokio::test]
    async fn replies_identify_the_protocol() {
        let time_limit = Duration::from_millis(300);
        for (reply, expected) in [
            (&b"+PONG\r\n"[..], Some(Protocol::Redis)),
            (b"-NOAUTH Authentication required.\r\n", Some(Protocol::Redis)),
            (b"HTTP/1.1 400 Bad Request\r\n\r\n", Some(Protocol::Http)),
            (&[21, 3, 1, 0, 2, 2, 70], Some(Protocol::Tls { wants_certificate: false })),
            (&[22, 3, 3, 0, 8, 13, 0, 0, 0, 14, 0, 0, 0], Some(Protocol::Tls { wants_certificate: true })),
            (b"SSH-2.0-OpenSSH_9.2\r\n", None),
            (b"", None),
        ] {
            let started = Instant::now();
            assert_eq!(diagnose(&server(reply).await, time_limit).await, expected, "{reply:?}");
            assert!(started.elapsed() < Duration::from_secs(3), "{reply:?}");
        }
    }
}
