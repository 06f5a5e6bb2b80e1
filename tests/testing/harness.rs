//! Tests of the harness: servers, deployments, certificates and the proxy behave as other tests expect.

use crate::support;

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use support::cluster::Cluster;
use support::proxy::{Door, Proxy, Traffic};
use support::sentinel::SentinelDeployment;
use support::server::{DURABLE, RedisServer, free_port, query, wait_until};
use support::tls::TlsServer;

const SOON: Duration = Duration::from_millis(200);

#[test]
fn only_a_durable_server_keeps_its_data() {
    for (args, remembered) in [(DURABLE, Some(1)), (&[], None)] {
        let mut server = RedisServer::start_with(args);
        server.query::<()>("SET key 1");
        server.kill();
        assert!(!server.is_answering());
        server.restart();
        assert_eq!(server.query::<Option<u32>>("GET key"), remembered);
    }
}

/// If two servers start on one port at the same time, both get a reply on that port.
#[test]
fn server_on_a_taken_port_does_not_count_as_started() {
    let first = RedisServer::start();
    let args = || format!("--port {} --bind 127.0.0.1", first.port()).split(' ').map(str::to_owned).collect();
    assert!(RedisServer::try_start(first.port(), args(), tempfile::tempdir().unwrap()).is_none());
    // Further arguments may name a port too, which changes with the next try.
    let mut tries = 0;
    let second = RedisServer::start_with_each(|| {
        tries += 1;
        if tries == 1 { args() } else { Vec::new() }
    });
    assert_eq!(tries, 2);
    assert_ne!(first.info("process_id"), second.info("process_id"));
}

#[test]
fn server_with_a_password_counts_as_answering() {
    let server = RedisServer::start_with(&["--requirepass", "secret"]);
    assert!(server.is_answering());
    query::<()>(&mut server.connection(), "GET key").unwrap_err();
}

#[test]
fn ports_are_handed_out_once() {
    let ports: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> =
            (0..4).map(|_| scope.spawn(|| (0..100).map(|_| free_port()).collect::<Vec<_>>())).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    // Nodes of a cluster listen on this port, too.
    let all: BTreeSet<_> = ports.iter().flat_map(|port| [*port, port + 10_000]).collect();
    assert_eq!(all.len(), 2 * ports.len());
}

#[test]
fn faults_of_a_server_take_effect() {
    let server = RedisServer::start();
    let mut client = server.connection();
    // The connections that found the server up may take a moment to close.
    wait_until("the test has the only client", || server.clients() == 1);
    assert_eq!(server.kill_clients(), 1);
    query::<()>(&mut client, "PING").unwrap_err();

    let start = Instant::now();
    server.pause_clients(SOON);
    server.query::<()>("PING");
    assert!(start.elapsed() >= SOON);

    let start = Instant::now();
    server.debug_sleep(SOON);
    assert!(start.elapsed() >= SOON);

    server.limit_memory(1);
    let error = query::<()>(&mut server.connection(), "SET key value").unwrap_err();
    assert_eq!(error.code(), Some("OOM"));
    server.limit_memory(0);
    server.query::<()>("SET key value");

    server.pause();
    assert!(!server.is_answering());
    server.resume();
    wait_until("the server answers again", || server.is_answering());

    let socket = redis::Client::open(format!("redis+unix://{}", server.unix_socket().display())).unwrap();
    query::<()>(&mut socket.get_connection().unwrap(), "PING").unwrap();
}

#[test]
fn sentinels_announce_another_primary() {
    let mut deployment = SentinelDeployment::start();
    assert_eq!(deployment.primary_index(), 0);
    deployment.servers[0].query::<()>("SET key 1");
    deployment.fail_over();
    let (_, second) = deployment.wait_for_another_primary(deployment.servers[0].port());
    assert_ne!(second, 0);
    deployment.wait_until_whole();

    assert_eq!(deployment.kill_primary(), second);
    let (_, third) = deployment.wait_for_another_primary(deployment.servers[second].port());
    assert_ne!(third, second);
    assert_eq!(deployment.servers[third].query::<u32>("GET key"), 1);
    deployment.servers[second].restart();
    deployment.wait_until_whole();
}

#[test]
fn cluster_moves_slots_and_primaries() {
    // The slot of `{a}`, which belongs to the third primary.
    const SLOT: u16 = 15_495;
    let mut cluster = Cluster::start();
    assert_eq!(cluster.owner(SLOT), 2);
    // At once, although the first node may not know of the move yet.
    for to in [1, 2] {
        cluster.migrate(SLOT, to);
        assert_eq!(cluster.owner(SLOT), to);
        cluster.wait_until_whole();
    }
    for key in 0..25 {
        cluster.nodes[2].query::<()>(&format!("SET {{a}}:{key} 1"));
    }
    assert_eq!(cluster.slots_with_keys(2), [SLOT]);
    cluster.migrate(SLOT, 0);
    assert_eq!((cluster.owner(SLOT), cluster.slots_with_keys(2)), (0, vec![]));
    assert_eq!(cluster.nodes[0].query::<u32>("DBSIZE"), 25);
    cluster.wait_until_whole();

    cluster.fail_over(0);
    let (_, second) = cluster.wait_for_another_owner(SLOT, 0);
    assert_eq!(second, 3);
    cluster.wait_until_whole();

    cluster.nodes[second].kill();
    let (_, third) = cluster.wait_for_another_owner(SLOT, second);
    assert_eq!((third, cluster.nodes[third].query::<u32>("DBSIZE")), (0, 25));
    cluster.nodes[second].restart();
    cluster.wait_until_whole();
}

#[test]
fn servers_show_certificates() {
    let server = TlsServer::start(true);
    assert!(TcpStream::connect(("127.0.0.1", server.tls_port())).is_ok());
    for file in [server.certificates.authority(), server.certificates.client_certificate()] {
        assert!(std::fs::read_to_string(file).unwrap().contains("BEGIN CERTIFICATE"));
    }
}

/// A proxy in front of a listener.
fn echo() -> (Proxy, TcpListener) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let proxy = Proxy::start(listener.local_addr().unwrap().port());
    (proxy, listener)
}

/// Both ends of a connection through the proxy.
fn pair(proxy: &Proxy, listener: &TcpListener) -> (TcpStream, TcpStream) {
    let client = TcpStream::connect(("127.0.0.1", proxy.port())).unwrap();
    let server = listener.accept().unwrap().0;
    for stream in [&client, &server] {
        stream.set_read_timeout(Some(SOON)).unwrap();
    }
    (client, server)
}

/// The time that a byte takes from one end to the other, or the reason why it does not arrive.
fn carry(mut from: &TcpStream, mut to: &TcpStream) -> Result<Duration, io::ErrorKind> {
    let start = Instant::now();
    from.write_all(b"x").map_err(|error| error.kind())?;
    to.read_exact(&mut [0]).map_err(|error| error.kind())?;
    Ok(start.elapsed())
}

#[test]
fn proxy_delays_holds_and_swallows_one_direction() {
    let (proxy, listener) = echo();
    let (client, server) = pair(&proxy, &listener);
    carry(&client, &server).unwrap();
    carry(&server, &client).unwrap();

    proxy.to_server(Traffic::Delay(SOON / 2));
    assert!(carry(&client, &server).unwrap() >= SOON / 2);
    assert!(carry(&server, &client).unwrap() < SOON / 2);

    proxy.to_server(Traffic::Hold);
    assert_eq!(carry(&client, &server), Err(io::ErrorKind::WouldBlock));
    carry(&server, &client).unwrap();
    proxy.heal();
    // The byte was late, not lost.
    (&server).read_exact(&mut [0]).unwrap();

    proxy.to_client(Traffic::Swallow);
    assert_eq!(carry(&server, &client), Err(io::ErrorKind::WouldBlock));
    carry(&client, &server).unwrap();
    proxy.heal();
    assert_eq!(carry(&server, &client), Err(io::ErrorKind::WouldBlock), "there would be a gap");
    let (client, server) = pair(&proxy, &listener);
    carry(&server, &client).unwrap();
}

#[test]
fn proxy_ends_connections_in_every_way() {
    let (proxy, listener) = echo();
    let (client, server) = pair(&proxy, &listener);
    proxy.cut();
    assert_eq!(carry(&server, &client), Err(io::ErrorKind::UnexpectedEof));

    let (client, server) = pair(&proxy, &listener);
    carry(&client, &server).unwrap();
    proxy.reset();
    assert_eq!((&client).read(&mut [0]).unwrap_err().kind(), io::ErrorKind::ConnectionReset);

    let (client, server) = pair(&proxy, &listener);
    proxy.to_client(Traffic::End);
    assert_eq!((&client).read(&mut [0]).unwrap(), 0);
    carry(&client, &server).unwrap();
    proxy.heal();
    drop((client, server));
    wait_until("the proxy knows that its connections have ended", || proxy.connections() == 0);
}

#[test]
fn proxy_refuses_new_connections_or_lets_them_wait() {
    let (proxy, listener) = echo();
    proxy.door(Door::Silent);
    let client = TcpStream::connect(("127.0.0.1", proxy.port())).unwrap();
    client.set_read_timeout(Some(SOON)).unwrap();
    assert_eq!((&client).read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);

    proxy.door(Door::Closed);
    wait_until("connections are refused", || TcpStream::connect(("127.0.0.1", proxy.port())).is_err());
    proxy.door(Door::Open);
    wait_until("connections are accepted", || TcpStream::connect(("127.0.0.1", proxy.port())).is_ok());
    // That connection was only a try.
    drop(listener.accept().unwrap());
    let (client, server) = pair(&proxy, &listener);
    carry(&client, &server).unwrap();

    // Another process may listen on the port for a moment when the door is opened again.
    proxy.door(Door::Closed);
    let mut other = None;
    wait_until("the port is taken", || {
        other = TcpListener::bind(("127.0.0.1", proxy.port())).ok();
        other.is_some()
    });
    proxy.door(Door::Open);
    thread::sleep(SOON);
    drop(other);
    wait_until("connections are accepted", || TcpStream::connect(("127.0.0.1", proxy.port())).is_ok());
    drop(listener.accept().unwrap());

    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    proxy.lead_to(other.local_addr().unwrap().port());
    let (client, server) = pair(&proxy, &other);
    carry(&client, &server).unwrap();
}
