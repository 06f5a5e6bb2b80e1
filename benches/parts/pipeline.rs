//! A minimal client that repeats the same calls in pipelines. It measures the maximum rate of a server.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

const CONNECTIONS: usize = 16;
/// How often a pipeline repeats all calls.
const TURNS: usize = 32;
const TIME: Duration = Duration::from_millis(500);

/// How many times per second the server answers all of `calls`, in their order. Each repetition in a pipeline has its own number in place
/// of `varied`. Every answer must be a number above 0.
pub(crate) fn per_s(port: u16, calls: &[Vec<Vec<u8>>], varied: &str) -> f64 {
    let ready = Barrier::new(CONNECTIONS);
    let rates = thread::scope(|scope| {
        let client = |connection| {
            let (ready, pipeline) = (&ready, pipeline(calls, varied, connection));
            scope.spawn(move || {
                let stream = TcpStream::connect(("127.0.0.1", port)).expect("the server accepts connections");
                let mut stream = BufReader::with_capacity(1 << 16, stream);
                // The first pipeline creates the keys, and is not measured.
                send(&mut stream, &pipeline, calls.len() * TURNS);
                ready.wait();
                let (begun, mut sent) = (Instant::now(), 0);
                while begun.elapsed() < TIME {
                    send(&mut stream, &pipeline, calls.len() * TURNS);
                    sent += TURNS;
                }
                sent as f64 / begun.elapsed().as_secs_f64()
            })
        };
        let clients: Vec<_> = (0..CONNECTIONS).map(client).collect();
        clients.into_iter().map(|client| client.join().expect("every call is answered")).collect::<Vec<_>>()
    });
    rates.iter().sum()
}

fn pipeline(calls: &[Vec<Vec<u8>>], varied: &str, connection: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for turn in 0..TURNS {
        let number = format!("{:0width$}", connection * TURNS + turn, width = varied.len());
        for call in calls {
            bytes.extend(format!("*{}\r\n", call.len()).bytes());
            for word in call {
                let word = replaced(word, varied.as_bytes(), number.as_bytes());
                bytes.extend(format!("${}\r\n", word.len()).bytes());
                bytes.extend(word);
                bytes.extend(b"\r\n");
            }
        }
    }
    bytes
}

fn replaced(word: &[u8], varied: &[u8], number: &[u8]) -> Vec<u8> {
    match word.windows(varied.len()).position(|part| part == varied) {
        Some(at) => [&word[..at], number, &word[at + varied.len()..]].concat(),
        None => word.to_vec(),
    }
}

fn send(stream: &mut BufReader<TcpStream>, pipeline: &[u8], answers: usize) {
    stream.get_mut().write_all(pipeline).expect("the server reads");
    let mut line = Vec::new();
    for _ in 0..answers {
        line.clear();
        stream.read_until(b'\n', &mut line).expect("the server answers");
        let is_above_0 = line.starts_with(b":") && !line.starts_with(b":-") && !line.starts_with(b":0");
        assert!(is_above_0, "not a number above 0: {}", String::from_utf8_lossy(&line));
    }
}
