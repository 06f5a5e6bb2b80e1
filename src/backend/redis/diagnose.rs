//! What a server speaks, where a connection to it has failed in a way that does not say.

use std::io;
use std::time::Duration;

use redis::ConnectionAddr;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// The longest time for each of the two questions.
const LONGEST_QUESTION: Duration = Duration::from_millis(500);
/// More than the certificates of any server.
const LONGEST_ANSWER: usize = 64 * 1_024;

/// What a server speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Speaks {
    Redis,
    Http,
    Tls {
        /// Whether it asks its clients for a certificate. Known of TLS 1.2 only; with TLS 1.3 the alert of a server says so.
        wants_certificate: bool,
    },
}

/// Asks a server, over connections of its own, without any credentials: first in plain text, then in TLS.
pub(crate) async fn diagnose(address: &ConnectionAddr, within: Duration) -> Option<Speaks> {
    let (ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. }) = address else { return None };
    let within = within.min(LONGEST_QUESTION);
    let plain = ask((host, *port), b"PING\r\n", within, |answer| !answer.is_empty()).await;
    match &*plain {
        answer if answer.starts_with(b"HTTP/") => return Some(Speaks::Http),
        [b'+' | b'-', ..] => return Some(Speaks::Redis),
        _ => {}
    }
    let secret = ask((host, *port), CLIENT_HELLO, within, is_complete).await;
    // HTTP servers may wait for more of a line, and end it here.
    if secret.starts_with(b"HTTP/") {
        return Some(Speaks::Http);
    }
    let is_tls = matches!(&*secret, [ALERT | HANDSHAKE, 3, ..]) || matches!(&*plain, [ALERT, 3, ..]);
    is_tls.then(|| Speaks::Tls { wants_certificate: messages(&secret).contains(&CERTIFICATE_REQUEST) })
}

/// What a server answers until it is enough, there is no more, or the time is up.
async fn ask(server: (&str, u16), question: &[u8], within: Duration, is_enough: fn(&[u8]) -> bool) -> Vec<u8> {
    let mut answer = Vec::new();
    let exchange = async {
        let stream = TcpStream::connect(server).await?;
        stream.writable().await?;
        // A connection that was just opened has room for all of it.
        stream.try_write(question)?;
        let mut received = [0; 4_096];
        while !is_enough(&answer) && answer.len() < LONGEST_ANSWER {
            stream.readable().await?;
            match stream.try_read(&mut received) {
                Ok(0) => break,
                Ok(length) => answer.extend_from_slice(&received[..length]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    };
    // Whatever has come by then is looked at.
    let _ = timeout(within, exchange).await;
    answer
}

/// The types of TLS records...
const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
/// ...and of handshake messages.
const CERTIFICATE_REQUEST: u8 = 13;
const SERVER_HELLO_DONE: u8 = 14;

/// Whether the server waits for us now, or will have no more of this.
fn is_complete(answer: &[u8]) -> bool {
    answer.first().is_some_and(|&first| first != HANDSHAKE) || messages(answer).contains(&SERVER_HELLO_DONE)
}

/// The types of the handshake messages that a server has sent in full. In TLS 1.2 they are not encrypted.
fn messages(mut answer: &[u8]) -> Vec<u8> {
    let mut payload = Vec::new();
    while let [HANDSHAKE, 3, _, high, low, rest @ ..] = answer
        && let Some((record, others)) = rest.split_at_checked(usize::from(u16::from_be_bytes([*high, *low])))
    {
        payload.extend_from_slice(record);
        answer = others;
    }
    let (mut types, mut payload) = (Vec::new(), &*payload);
    while let [kind, high, middle, low, rest @ ..] = payload
        && let Some(others) = rest.get(u32::from_be_bytes([0, *high, *middle, *low]) as usize..)
    {
        types.push(*kind);
        payload = others;
    }
    types
}

/// The first message of a client that offers TLS 1.2 with the usual ciphers. No handshake is finished with it, so its randomness is none.
#[rustfmt::skip]
const CLIENT_HELLO: &[u8] = &[
    // A record with one handshake message, ClientHello, of TLS 1.2.
    22, 3, 1, 0, 106, 1, 0, 0, 102, 3, 3,
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32,
    // No session. Ciphers: ECDHE with ECDSA or RSA; AES-GCM or ChaCha20; RSA with AES-GCM. No compression.
    0,
    0, 16, 0xc0, 0x2b, 0xc0, 0x2c, 0xc0, 0x2f, 0xc0, 0x30, 0xcc, 0xa9, 0xcc, 0xa8, 0x00, 0x9c, 0x00, 0x9d,
    1, 0,
    // Extensions: groups x25519, P-256 and P-384; uncompressed points; signatures with ECDSA, RSA-PSS and RSA.
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
    fn client_hello_has_its_lengths() {
        let length = |at: usize| usize::from(u16::from_be_bytes([CLIENT_HELLO[at], CLIENT_HELLO[at + 1]]));
        assert_eq!(length(3), CLIENT_HELLO.len() - 5);
        assert_eq!(length(7), CLIENT_HELLO.len() - 9);
        assert_eq!(messages(CLIENT_HELLO), [1]);
        let extensions = 11 + 32 + 1 + 2 + 16 + 2;
        assert_eq!(length(extensions), CLIENT_HELLO.len() - extensions - 2);
    }

    #[test]
    fn messages_are_read_over_records_and_cut_ones_are_not() {
        // A message of three bytes in two records, and the head of another one.
        let answer = [22, 3, 3, 0, 5, 2, 0, 0, 3, 9, 22, 3, 3, 0, 6, 9, 9, 13, 0, 0, 1];
        assert_eq!(messages(&answer), [2]);
        for end in 0..answer.len() {
            assert!(messages(&answer[..end]).is_empty(), "{end}");
        }
    }

    /// Answers each connection with the same, and keeps it open.
    async fn server(answer: &'static [u8]) -> ConnectionAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            let mut kept = Vec::new();
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                stream.write_all(answer).await.unwrap();
                kept.push(stream);
            }
        });
        ConnectionAddr::Tcp(address.ip().to_string(), address.port())
    }

    #[tokio::test]
    async fn servers_are_known_by_their_answers() {
        let within = Duration::from_millis(300);
        for (answer, expected) in [
            (&b"+PONG\r\n"[..], Some(Speaks::Redis)),
            (b"-NOAUTH Authentication required.\r\n", Some(Speaks::Redis)),
            (b"HTTP/1.1 400 Bad Request\r\n\r\n", Some(Speaks::Http)),
            (&[21, 3, 1, 0, 2, 2, 70], Some(Speaks::Tls { wants_certificate: false })),
            (&[22, 3, 3, 0, 8, 13, 0, 0, 0, 14, 0, 0, 0], Some(Speaks::Tls { wants_certificate: true })),
            (b"SSH-2.0-OpenSSH_9.2\r\n", None),
            (b"", None),
        ] {
            let begun = Instant::now();
            assert_eq!(diagnose(&server(answer).await, within).await, expected, "{answer:?}");
            assert!(begun.elapsed() < Duration::from_secs(3), "{answer:?}");
        }
    }
}
