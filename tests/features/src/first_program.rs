//! The first program of the docs, as it stands there.

use std::sync::LazyLock;
use std::time::Duration;
use std::{net, thread};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

mod program {
    include!(concat!(env!("OUT_DIR"), "/first_program.rs"));
}

/// The address of the program. The system does not assign the same free port again for a while.
fn address() -> &'static str {
    static ADDRESS: LazyLock<String> = LazyLock::new(|| {
        let listener = net::TcpListener::bind("127.0.0.1:0").expect("a port is free");
        listener.local_addr().expect("it has an address").to_string()
    });
    &ADDRESS
}

#[tokio::test]
async fn it_serves_with_the_features_that_it_names() {
    let manifest = include_str!(concat!(env!("OUT_DIR"), "/first_program.toml"));
    // As the feature `first-program` of this package has it.
    assert!(manifest.contains("features = [\"axum\"]"), "{manifest}");

    thread::spawn(program::main);
    let connected = tokio::time::timeout(Duration::from_secs(10), async {
        loop {
            match TcpStream::connect(address()).await {
                Ok(stream) => return stream,
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    });
    let mut stream = connected.await.expect("it listens");
    stream.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("hello\n"), "{answer}");
}
