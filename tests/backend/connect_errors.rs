//! The errors of connecting, word for word, as a user sees them.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::thread;
use std::time::{Duration, Instant};

use tollgate::{ConfigError, ConnectError, RedisOptions};

use crate::errors::serve;
use crate::support::cluster::Cluster;
use crate::support::sentinel::SERVICE;
use crate::support::server::{RedisServer, free_port, wait_until};
use crate::support::tls::{Certificates, TlsServer};

type Is = fn(&ConnectError) -> bool;

const STORE: Is = |error| matches!(error, ConnectError::Store(_));
const CREDENTIALS: Is = |error| matches!(error, ConnectError::Credentials(_));
const PERMISSIONS: Is = |error| matches!(error, ConnectError::Permissions(_));
const CERTIFICATE: Is = |error| matches!(error, ConnectError::Certificate(_));
const CLIENT_CERTIFICATE: Is = |error| matches!(error, ConnectError::ClientCertificate(_));
const TLS: Is = |error| matches!(error, ConnectError::Tls(_));
const UNSUPPORTED: Is = |error| matches!(error, ConnectError::Unsupported(_));

const PASS_CERTIFICATE: &str = "pass one to `RedisOptions::client_certificate`";
const ANNOUNCE_NODE: &str = "make that address reachable from this machine, or have the nodes announce another one \
                             (`cluster-announce-ip`, `cluster-announce-port`, `cluster-announce-hostname`)";

/// The timeout allows for unoptimized cryptography on a busy machine.
fn options(url: &str) -> RedisOptions {
    RedisOptions::from_url(url).unwrap().connect_timeout(Duration::from_secs(10))
}

/// Connects, and compares the error: what failed, the cause (all of it, or its beginning before a `*`), and the remedy.
async fn fails(options: RedisOptions, is: Is, headline: &str, cause: &str, remedy: &str) {
    let error = options.connect().await.expect_err(headline);
    assert!(is(&error), "{error:?}");
    assert_eq!(error.to_string(), format!("{headline}; {remedy}"));
    let levels: Vec<_> = std::iter::successors(std::error::Error::source(&error), |error| error.source()).collect();
    let [source] = &*levels else { panic!("{error:?} does not have exactly one cause: {levels:?}") };
    let source = source.to_string();
    match cause.strip_suffix('*') {
        Some(beginning) => assert!(source.starts_with(beginning), "{source}"),
        None => assert_eq!(source, cause),
    }
    assert_eq!(format!("{error:?}"), format!("{headline}: {source}; {remedy}"));
    // The message does not repeat its source.
    assert!(!error.to_string().contains(&source), "{error:?}");
}

/// `tolerate_outage` does not hide a mistake that no later attempt can fix.
async fn always_fails(options: RedisOptions, is: Is, headline: &str, cause: &str, remedy: &str) {
    fails(options.clone(), is, headline, cause, remedy).await;
    fails(options.tolerate_outage(true), is, headline, cause, remedy).await;
}

/// A server that sends `answer` to every client and closes the connection. It runs until the test process ends.
fn answers(answer: &'static str) -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            thread::spawn(move || {
                let mut received = [0; 4_096];
                if stream.read(&mut received).is_ok_and(|length| length > 0) {
                    let _ = stream.write_all(answer.as_bytes());
                }
            });
        }
    });
    port
}

#[tokio::test]
async fn absent_servers_are_named_with_the_remedy() {
    let port = free_port();
    let refused = ("connection refused", "start Redis there or correct the address");
    let headline = format!("cannot connect to redis at 127.0.0.1:{port}");
    fails(options(&format!("redis://:hunter2@127.0.0.1:{port}/")), STORE, &headline, refused.0, refused.1).await;
    let headline = format!("cannot connect to redis at [::1]:{port}");
    fails(options(&format!("redis://[::1]:{port}/")), STORE, &headline, "*", refused.1).await;
    let headline = format!("cannot connect to the cluster node at 127.0.0.1:{port}");
    fails(options(&format!("redis+cluster://127.0.0.1:{port}/")), STORE, &headline, refused.0, refused.1).await;
    let headline = format!("cannot connect to the Sentinel at 127.0.0.1:{port}");
    fails(options(&format!("redis+sentinel://127.0.0.1:{port}/a")), STORE, &headline, refused.0, refused.1).await;

    // A label of a host name has at most 63 bytes, so the lookup needs no name server.
    let host = "a".repeat(70);
    let headline = format!("cannot connect to redis at {host}:6379");
    let remedy = "correct the host name, or the name server of this machine";
    fails(options(&format!("redis://{host}/")), STORE, &headline, "failed to lookup address information*", remedy)
        .await;

    let remedy = "start Redis there or correct the path";
    let headline = "cannot connect to redis at /nowhere/redis.sock";
    fails(options("unix:///nowhere/redis.sock"), STORE, headline, "No such file or directory (os error 2)", remedy)
        .await;
}

#[tokio::test]
async fn silent_server_is_named_with_the_timeout() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let options = options(&format!("redis://127.0.0.1:{port}/?connect_timeout=200ms"));
    let headline = format!("cannot connect to redis at 127.0.0.1:{port}");
    let remedy = "make sure that Redis answers there and no firewall drops the packets, or raise `connect_timeout`";
    let options = options.connect_timeout(Duration::from_millis(200));
    let start = Instant::now();
    fails(options, STORE, &headline, "no connection within 200ms", remedy).await;
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}

#[tokio::test]
async fn refused_credentials_and_rights_name_the_remedy() {
    let server = RedisServer::start_with(&["--requirepass", "secret"]);
    let port = server.port();
    let redis = format!("redis at 127.0.0.1:{port}");
    let headline = format!("{redis} does not accept the user name or the password");
    let remedy = "correct them in the URL or with `RedisOptions::user`";
    let url = |userinfo: &str| format!("redis://{userinfo}127.0.0.1:{port}/");
    always_fails(options(&url("")), CREDENTIALS, &headline, "NOAUTH Authentication required.", remedy).await;
    always_fails(options(&url(":wrong@")), CREDENTIALS, &headline, "Password authentication failed", remedy).await;

    let server = RedisServer::start();
    let port = server.port();
    let redis = format!("redis at 127.0.0.1:{port}");
    server.query::<()>("ACL SETUSER clerk on >secret ~* +@all -append");
    let headline = format!("{redis} denies the user a permission that is needed");
    let remedy = "grant the permissions that the docs of `tollgate::backend::redis` list under `Servers`";
    let url = format!("redis://clerk:secret@127.0.0.1:{port}/");
    always_fails(options(&url), PERMISSIONS, &headline, "the user may not run APPEND", remedy).await;
    server.query::<()>("ACL SETUSER clerk on >secret ~* +@all -eval -evalsha");
    always_fails(options(&url), PERMISSIONS, &headline, "NOPERM *", remedy).await;
    server.query::<()>("ACL SETUSER clerk on >secret ~* +@all -select");
    let (cause, remedy) = ("Redis server refused to switch database: *", "grant it `+select`, or use database 0");
    always_fails(options(&format!("{url}?db=2")), PERMISSIONS, &headline, cause, remedy).await;
}

#[tokio::test]
async fn unsupported_servers_are_distinguished() {
    let url = serve(Some("# Server\r\nredis_version:5.0.14\r\n".to_owned()), "+OK");
    let port = url.rsplit(':').next().unwrap().trim_end_matches('/').to_owned();
    let headline = |port: &str| format!("cannot use redis at 127.0.0.1:{port}");
    let remedy = "use Redis 6.2 or later, or Valkey";
    always_fails(options(&url), UNSUPPORTED, &headline(&port), "it is Redis 5.0.14", remedy).await;

    let port = answers("HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n").to_string();
    let (cause, remedy) = ("an HTTP server answers there", "correct the port in the URL");
    for userinfo in ["", ":hunter2@", "shop:hunter2@"] {
        let url = format!("redis://{userinfo}127.0.0.1:{port}/");
        always_fails(options(&url), UNSUPPORTED, &headline(&port), cause, remedy).await;
    }
    let url = format!("rediss://127.0.0.1:{port}/");
    always_fails(options(&url), UNSUPPORTED, &headline(&port), cause, remedy).await;
    let url = format!("redis+cluster://127.0.0.1:{port}/");
    let node = format!("cannot use the cluster node at 127.0.0.1:{port}");
    always_fails(options(&url), UNSUPPORTED, &node, cause, remedy).await;

    let port = answers("SSH-2.0-OpenSSH_9.2\r\n").to_string();
    let cause = "the server does not speak the protocol of Redis";
    let remedy = "correct the host and the port in the URL";
    always_fails(options(&format!("redis://127.0.0.1:{port}/")), UNSUPPORTED, &headline(&port), cause, remedy).await;

    let server = RedisServer::start();
    let port = server.port().to_string();
    let cause = "it refuses the database: DB index is out of range";
    let url = format!("{}99", server.url());
    always_fails(options(&url), UNSUPPORTED, &headline(&port), cause, "use a database that it has").await;
}

#[tokio::test]
async fn untrusted_certificates_are_explained() {
    let server = TlsServer::start(false);
    let port = server.tls_port();
    let headline = format!("the certificate of redis at localhost:{port} cannot be trusted");
    let cause = "it is signed by no CA that this program trusts";
    let remedy = "pass the certificate of its CA to `RedisOptions::ca_certificate`";
    let others = fs::read(Certificates::for_names(&["localhost"]).authority()).unwrap();
    always_fails(options(&server.url()).ca_certificate(others), CERTIFICATE, &headline, cause, remedy).await;

    let server = TlsServer::start_with(Certificates::for_names(&["example.com"]), false);
    let headline = format!("the certificate of redis at localhost:{} cannot be trusted", server.tls_port());
    let authority = fs::read(server.certificates.authority()).unwrap();
    let cause = "certificate not valid for name \"localhost\"; certificate is only valid for *";
    let remedy = "connect by a name that it is for, or issue it for this one as well";
    always_fails(options(&server.url()).ca_certificate(authority), CERTIFICATE, &headline, cause, remedy).await;

    let server = TlsServer::start_with(Certificates::self_signed(&["localhost"]), false);
    let headline = format!("the certificate of redis at localhost:{} cannot be trusted", server.tls_port());
    let authority = fs::read(server.certificates.authority()).unwrap();
    let cause = "it is a CA certificate (`CA:TRUE`), which a server must not use";
    let remedy = "issue one with `basicConstraints=CA:FALSE` for the server, self-signed or signed by that CA";
    always_fails(options(&server.url()).ca_certificate(authority), CERTIFICATE, &headline, cause, remedy).await;
}

#[tokio::test]
async fn missing_client_certificate_is_named_by_each_tls_version() {
    for protocol in ["TLSv1.2", "TLSv1.3"] {
        let certificates = Certificates::for_names(&["localhost", "127.0.0.1"]);
        let server = TlsServer::start_as(certificates, true, &["--tls-protocols", protocol]);
        let headline = format!("redis at localhost:{} demands a client certificate that it trusts", server.tls_port());
        let authority = fs::read(server.certificates.authority()).unwrap();
        let options = || options(&server.url()).ca_certificate(authority.clone());
        let cause = "the handshake ended without one";
        always_fails(options(), CLIENT_CERTIFICATE, &headline, cause, PASS_CERTIFICATE).await;

        let others = Certificates::for_names(&["localhost"]);
        let read = |path| fs::read(path).unwrap();
        let options = options().client_certificate(read(others.client_certificate()), read(others.client_key()));
        let cause = "it rejected the certificate of this client with the alert *";
        let remedy = "pass a certificate from its CA to `RedisOptions::client_certificate`";
        always_fails(options, CLIENT_CERTIFICATE, &headline, cause, remedy).await;
    }
}

#[tokio::test]
async fn one_sided_encryption_is_named() {
    for mutual in [false, true] {
        let server = TlsServer::start(mutual);
        let port = server.tls_port();
        let cause = "the server speaks TLS on this port";
        let remedy = "use a `rediss` scheme instead of `redis` (feature `tls`), or its port without TLS";
        for userinfo in ["", ":hunter2@"] {
            let headline = format!("cannot agree on encryption with redis at 127.0.0.1:{port}");
            let url = format!("redis://{userinfo}127.0.0.1:{port}/");
            always_fails(options(&url), TLS, &headline, cause, remedy).await;
        }
        let headline = format!("cannot agree on encryption with the Sentinel at 127.0.0.1:{port}");
        always_fails(options(&format!("redis+sentinel://127.0.0.1:{port}/a")), TLS, &headline, cause, remedy).await;
        let headline = format!("cannot agree on encryption with the cluster node at 127.0.0.1:{port}");
        always_fails(options(&format!("redis+cluster://127.0.0.1:{port}/")), TLS, &headline, cause, remedy).await;
    }
    let cause = "the server does not speak TLS on this port";
    let remedy = "use its TLS port, or a `redis` scheme instead of `rediss`";
    for args in [&[][..], &["--requirepass", "secret"]] {
        let server = RedisServer::start_with(args);
        let authority = fs::read(Certificates::for_names(&["localhost"]).authority()).unwrap();
        let headline = format!("cannot agree on encryption with redis at localhost:{}", server.port());
        // Redis does not answer bytes that are no command, so this takes the whole timeout.
        let options = options(&format!("rediss://localhost:{}/", server.port())).ca_certificate(authority);
        let options = options.connect_timeout(Duration::from_secs(1));
        always_fails(options, TLS, &headline, cause, remedy).await;
    }
}

#[tokio::test]
async fn unusable_keys_are_refused_before_connecting() {
    let [made, other] = [(); 2].map(|()| Certificates::for_names(&["localhost"]));
    let certificate = fs::read_to_string(made.client_certificate()).unwrap();
    let key = fs::read_to_string(made.client_key()).unwrap();
    let others_key = fs::read_to_string(other.client_key()).unwrap();
    let encrypted = "the client's private key is encrypted: decrypt it with `openssl pkey -in FILE`";
    let no_key =
        "the client's private key: the text has no PEM block `PRIVATE KEY`; convert another format with `openssl pkey`";
    let no_certificate =
        "the client's certificate: the text has no PEM block `CERTIFICATE`; convert another format with `openssl x509`";
    for (certificate, key, expected) in [
        (
            &*certificate,
            &*others_key,
            "the client's private key belongs to another certificate: pass the key that its certificate was made with",
        ),
        (&certificate, &key.replace("PRIVATE", "ENCRYPTED PRIVATE"), encrypted),
        (
            &certificate,
            "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-256-CBC,00\n\nAAAA\n-----END RSA PRIVATE KEY-----\n",
            encrypted,
        ),
        (&certificate, &certificate, no_key),
        (&certificate, "hunter2", no_key),
        (&key, &key, no_certificate),
    ] {
        let options = options("rediss://localhost:1/").client_certificate(certificate, key);
        let error = options.tolerate_outage(true).connect().await.unwrap_err();
        let expected = ConfigError::InvalidCertificate { reason: expected.to_owned() };
        assert!(matches!(&error, ConnectError::Config(error) if *error == expected), "{error:?}");
        assert_eq!(error.to_string(), "the settings of the store cannot work");
        assert_eq!(format!("{error:?}"), format!("the settings of the store cannot work: {expected}"));
    }
}

/// The node announces an address on which nothing listens, as a node in a container does.
#[tokio::test]
async fn unreachable_announced_address_is_named() {
    let node = RedisServer::start_with(&["--cluster-enabled", "yes", "--cluster-announce-ip", "127.0.0.2"]);
    let slots: Vec<_> = (0..16_384).map(|slot| slot.to_string()).collect();
    node.query::<()>(&format!("CLUSTER ADDSLOTS {}", slots.join(" ")));
    let options = options(&node.url().replace("redis:", "redis+cluster:"));
    let headline = format!("cannot connect to the cluster node that is announced at 127.0.0.2:{}", node.port());
    fails(options, STORE, &headline, "connection refused", ANNOUNCE_NODE).await;
}

#[tokio::test]
async fn cluster_without_matching_certificate_is_refused() {
    let node =
        TlsServer::start_cluster_with(Certificates::for_names(&["localhost"]), &["--cluster-announce-ip", "127.0.0.1"]);
    let read = |path| fs::read(path).unwrap();
    let options = options(&format!("rediss+cluster://localhost:{}", node.tls_port()))
        .ca_certificate(read(node.certificates.authority()))
        .client_certificate(read(node.certificates.client_certificate()), read(node.certificates.client_key()));
    let address = format!("127.0.0.1:{}", node.tls_port());
    let headline = format!("the certificate of the cluster node that is announced at {address} cannot be trusted");
    let cause = "certificate not valid for name \"127.0.0.1\"; certificate is only valid for *";
    let remedy = "issue it for the announced address as well, or have the nodes announce a name that it is for \
                  (`cluster-announce-hostname` with `cluster-preferred-endpoint-type hostname`)";
    always_fails(options, CERTIFICATE, &headline, cause, remedy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cluster_is_used_although_a_node_is_down() {
    let mut cluster = Cluster::start();
    let down = cluster.primaries()[0];
    tokio::task::block_in_place(|| cluster.nodes[down].kill());
    // Before its replica is promoted, and after that.
    options(&cluster.url()).connect().await.unwrap();
    tokio::task::block_in_place(|| wait_until("the replica is promoted", || !cluster.primaries().contains(&down)));
    options(&cluster.url()).connect().await.unwrap();
}

#[tokio::test]
async fn unreachable_primary_of_sentinels_is_named() {
    let (sentinel, folder) = (free_port(), tempfile::tempdir().unwrap());
    let primary = free_port();
    let config = format!("port {sentinel}\nbind 127.0.0.1\nsentinel monitor {SERVICE} 127.0.0.1 {primary} 1\n");
    fs::write(folder.path().join("sentinel.conf"), config).unwrap();
    let args = ["sentinel.conf", "--sentinel"].map(str::to_owned).to_vec();
    let _sentinel = RedisServer::try_start(sentinel, args, folder).expect("the port is free");
    let options = |service| options(&format!("redis+sentinel://127.0.0.1:{sentinel}/{service}"));
    let headline = format!("cannot connect to the primary that the Sentinels announce at 127.0.0.1:{primary}");
    let remedy = "make that address reachable from this machine, or have the Sentinels announce another one \
                  (`sentinel monitor`, `replica-announce-ip`)";
    fails(options(SERVICE), STORE, &headline, "connection refused", remedy).await;
    let remedy = "correct the service in the path of the URL";
    let cause = "no Sentinel watches over `invoices`";
    always_fails(options("invoices"), UNSUPPORTED, "cannot use the primary of `invoices`", cause, remedy).await;
}
