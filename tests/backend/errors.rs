//! Error replies of a server, and the kind of `StoreError` that each becomes. A fake server sends the replies that a real one cannot be
//! made to send.

use crate::support;

use std::error::Error;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use support::server::{RedisServer, free_port};
use tollgate::{ConfigError, ConnectError, Limiter, Policy, Quota, RedisBackend, RedisOptions, StoreError};

fn limiter(backend: &RedisBackend) -> Limiter<RedisBackend> {
    let policy = Policy::new("errors", Quota::per_minute(1_000).fixed_window());
    Limiter::new(backend.clone(), policy).deadline(Duration::from_secs(5))
}

async fn check(server: &RedisServer) -> Result<(), StoreError> {
    let backend = RedisBackend::connect(server.url()).await.expect("the server accepts the connection");
    limiter(&backend).check("alice").await.map(drop)
}

/// The message of the innermost error.
fn root(error: &dyn Error) -> String {
    error.source().map_or_else(|| error.to_string(), root)
}

#[tokio::test]
async fn full_memory_is_out_of_memory() {
    let server = RedisServer::start_with(&["--maxmemory", "1", "--maxmemory-policy", "noeviction"]);
    let error = check(&server).await.unwrap_err();
    assert!(error.is_out_of_memory(), "{error:?}");
}

#[tokio::test]
async fn read_only_replica_is_unavailable() {
    let primary = RedisServer::start();
    let replica = RedisServer::start_with(&["--replicaof", "127.0.0.1", &primary.port().to_string()]);
    let error = check(&replica).await.unwrap_err();
    assert!(error.is_unavailable(), "{error:?}");
    assert!(root(&error).contains("read only replica") || root(&error).contains("READONLY"), "{error:?}");
}

#[tokio::test]
async fn missing_and_wrong_passwords_are_unauthorized() {
    let server = RedisServer::start_with(&["--requirepass", "secret"]);
    let url = |userinfo: &str| format!("redis://{userinfo}127.0.0.1:{}/", server.port());
    for url in [url(""), url(":wrong@"), url("nobody:secret@")] {
        let error = RedisBackend::connect(&url).await.unwrap_err();
        let ConnectError::Credentials(failure) = error else { panic!("{url}: {error:?}") };
        assert!(failure.error().is_unauthorized(), "{url}: {failure:?}");
    }
    RedisBackend::connect(url(":secret@")).await.unwrap();
}

/// A full server answers any first command with this error. Regression: the error blamed the password or the database.
#[tokio::test]
async fn full_server_is_unavailable() {
    let server = RedisServer::start();
    server.query::<()>("ACL SETUSER shop on >secret ~* &* +@all");
    let urls = ["", "shop:secret@"].map(|userinfo| server.url().replace("://", &format!("://{userinfo}")));
    let earlier = RedisOptions::from_url(&urls[1]).unwrap().connections(1).connect().await.unwrap();
    let _ = limiter(&earlier).check("alice").await.unwrap();
    let mut connection = server.connection();
    let _: () = redis::cmd("CONFIG").arg(&["SET", "maxclients", "1"]).query(&mut connection).unwrap();
    for url in urls.iter().flat_map(|url| [url.clone(), format!("{url}3")]) {
        let options = || RedisOptions::from_url(&url).unwrap();
        let error = options().connect().await.unwrap_err();
        assert!(matches!(&error, ConnectError::Store(failure) if failure.error().is_unavailable()), "{url}: {error:?}");
        options().tolerate_outage(true).connect().await.unwrap();
    }
    // A backend that was connected before reports the same error after it is disconnected.
    let _: u32 = redis::cmd("CLIENT").arg(&["KILL", "TYPE", "normal", "SKIPME", "yes"]).query(&mut connection).unwrap();
    for _ in 0..3 {
        let error = limiter(&earlier).check("alice").await.unwrap_err();
        assert!(error.is_unavailable(), "{error:?}");
    }
    let _: () = redis::cmd("CONFIG").arg(&["SET", "maxclients", "100"]).query(&mut connection).unwrap();
    let error = RedisBackend::connect(urls[1].replace("secret", "wrong")).await.unwrap_err();
    assert!(matches!(error, ConnectError::Credentials(_)), "{error:?}");
}

#[tokio::test]
async fn missing_script_and_key_rights_fail_connecting() {
    let server = RedisServer::start();
    let mut connection = server.connection();
    for (user, rules) in [("clerk", ["+@all", "-@scripting", "~*"]), ("stranger", ["+@all", "+@scripting", "~other:*"])]
    {
        let mut command = redis::cmd("ACL");
        command.arg("SETUSER").arg(user).arg(&["on", ">secret"]).arg(&rules);
        let _: () = command.query(&mut connection).unwrap();
        let url = format!("redis://{user}:secret@127.0.0.1:{}/", server.port());
        let error = RedisBackend::connect(url).await.unwrap_err();
        assert!(
            matches!(&error, ConnectError::Permissions(failure) if failure.error().is_unauthorized()),
            "{user}: {error:?}"
        );
    }
}

/// The server reports this in a message without an error code.
#[tokio::test]
async fn commands_denied_inside_scripts_are_unauthorized() {
    let server = RedisServer::start();
    let mut connection = server.connection();
    let mut acl =
        |rules: &[&str]| redis::cmd("ACL").arg("SETUSER").arg("clerk").arg(rules).query::<()>(&mut connection);
    acl(&["on", ">secret", "~*", "+@all"]).unwrap();
    let url = format!("redis://clerk:secret@127.0.0.1:{}/", server.port());
    let limiter = limiter(&RedisBackend::connect(url).await.unwrap());
    let _ = limiter.check("alice").await.unwrap();
    for rules in [&["-get"][..], &["+get", "resetkeys", "%W~*"]] {
        if acl(rules).is_err() {
            // Keys that may be written and not read are new in Redis 7.
            continue;
        }
        let error = limiter.check("alice").await.unwrap_err();
        assert!(error.is_unauthorized(), "{rules:?}: {error:?}");
    }
}

#[tokio::test]
async fn changed_password_refuses_new_connections() {
    let server = RedisServer::start();
    let backend = RedisBackend::connect(server.url()).await.unwrap();
    let mut connection = server.connection();
    let _: () = redis::cmd("CONFIG").arg(&["SET", "requirepass", "new"]).query(&mut connection).unwrap();
    // Open connections stay authenticated. New ones are refused at once, with the reason.
    let _ = limiter(&backend).check("alice").await.unwrap();
    let error = RedisBackend::connect(server.url()).await.unwrap_err();
    assert!(matches!(&error, ConnectError::Credentials(failure) if failure.error().is_unauthorized()), "{error:?}");
}

#[tokio::test]
async fn refused_connection_is_unavailable() {
    let url = format!("redis://127.0.0.1:{}/", free_port());
    let start = Instant::now();
    let error = RedisBackend::connect(url).await.unwrap_err();
    let ConnectError::Store(failure) = &error else { panic!("{error:?}") };
    assert!(failure.error().is_unavailable(), "{error:?}");
    assert!(root(&error).to_lowercase().contains("connection refused"), "{error:?}");
    assert!(start.elapsed() < Duration::from_secs(1), "it was refused at once and took {:?}", start.elapsed());
}

#[tokio::test]
async fn silent_server_is_unavailable() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let url = format!("redis://{}/", listener.local_addr().unwrap());
    let start = Instant::now();
    let options = RedisOptions::from_url(url).unwrap().connect_timeout(Duration::from_millis(200));
    let error = options.clone().connect().await.unwrap_err();
    let ConnectError::Store(failure) = &error else { panic!("{error:?}") };
    // No command was sent, so the server cannot have acted.
    assert!(failure.error().is_unavailable(), "{error:?}");
    assert_eq!(root(&error), "no connection within 200ms");
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    let backend = options.tolerate_outage(true).connect().await.unwrap();
    let error = limiter(&backend).check("alice").await.unwrap_err();
    assert!(error.is_unavailable(), "{error:?}");
    assert_eq!(root(&error), "no connection within 200ms");
}

/// The error tells whether the reply missed the deadline or the response timeout.
#[tokio::test]
async fn late_reply_names_the_exceeded_timeout() {
    let server = RedisServer::start();
    let backend = RedisBackend::connect(server.url()).await.unwrap();
    assert!(limiter(&backend).check("alice").await.unwrap().is_allowed());
    server.pause();
    for (deadline, expected) in [(100, "no reply within the deadline of 100ms"), (5_000, "no reply within 500ms")] {
        let error = limiter(&backend).deadline(Duration::from_millis(deadline)).check("alice").await.unwrap_err();
        assert!(error.is_timeout(), "{error:?}");
        assert_eq!(root(&error), expected);
    }
    server.resume();
}

#[tokio::test]
async fn invalid_options_are_config_errors() {
    let options = || RedisOptions::from_url("redis://127.0.0.1/").unwrap();
    let cases = [
        (options().connections(0), ConfigError::ConnectionsOutOfRange { connections: 0, max: 1_024 }),
        (options().connections(1_025), ConfigError::ConnectionsOutOfRange { connections: 1_025, max: 1_024 }),
        (options().connections(u32::MAX), ConfigError::ConnectionsOutOfRange { connections: u32::MAX, max: 1_024 }),
        (options().connect_timeout(Duration::ZERO), ConfigError::ZeroTimeout { setting: "connect_timeout" }),
        (options().response_timeout(Duration::ZERO), ConfigError::ZeroTimeout { setting: "response_timeout" }),
    ];
    for (options, expected) in cases {
        let error = options.connect().await.unwrap_err();
        assert!(matches!(&error, ConnectError::Config(error) if *error == expected), "{error:?}");
    }
}

#[tokio::test]
async fn servers_before_6_2_are_unsupported() {
    for (version, will_do) in [("5.9.9", false), ("6.0.16", false), ("6.2.0", true), ("7.0.15", true)] {
        let info = format!("# Server\r\nredis_version:{version}\r\n");
        let result = RedisBackend::connect(serve(Some(info), "+OK")).await;
        let Err(error) = result else {
            assert!(will_do, "{version} is accepted");
            continue;
        };
        assert!(matches!(error, ConnectError::Unsupported(_)), "{version}: {error:?}");
        let reason = format!("{error:?}");
        assert!(!will_do && reason.contains(version) && reason.contains("6.2"), "{version}: {reason}");
    }
}

/// Replies of a server, and the error kind that each becomes.
#[tokio::test]
async fn replies_map_to_error_kinds() {
    type Is = fn(&StoreError) -> bool;
    let answers: [(&str, Is); 27] = [
        ("-LOADING Redis is loading the dataset in memory", StoreError::is_unavailable),
        (
            "-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
            StoreError::is_unavailable,
        ),
        ("-READONLY You can't write against a read only replica.", StoreError::is_unavailable),
        ("-CLUSTERDOWN The cluster is down", StoreError::is_unavailable),
        ("-MOVED 5798 127.0.0.1:7001", StoreError::is_unavailable),
        ("-BUSY Redis is busy running a script.", StoreError::is_unavailable),
        ("-MISCONF Redis is configured to save RDB snapshots", StoreError::is_unavailable),
        ("-NOAUTH Authentication required.", StoreError::is_unauthorized),
        ("-NOPERM this user has no permissions to run the 'evalsha' command", StoreError::is_unauthorized),
        // Rights that a script lacks, as worded by 7.0, by 7.2 and Valkey, and by 6.2.
        (
            "-ERR The user executing the script can't run this command or subcommand script: abc, on @user_script:1.",
            StoreError::is_unauthorized,
        ),
        (
            "-ERR The user executing the script can't access at least one of the keys mentioned in the command arguments \
             script: abc, on @user_script:1.",
            StoreError::is_unauthorized,
        ),
        (
            "-ERR ACL failure in script: User bob has no permissions to run the 'set' command script: abc, on @user_script:1.",
            StoreError::is_unauthorized,
        ),
        (
            "-ERR ACL failure in script: User bob has no permissions to access the 'a' key script: abc, on @user_script:1.",
            StoreError::is_unauthorized,
        ),
        (
            "-ERR Error running script (call to f_0): @user_script:1: @user_script: 1: The user executing the script can't \
             run this command or subcommand",
            StoreError::is_unauthorized,
        ),
        (
            "-@user_script: 1: The user executing the script can't run this command or subcommand",
            StoreError::is_unauthorized,
        ),
        ("-OOM command not allowed when used memory > 'maxmemory'.", StoreError::is_out_of_memory),
        ("-WRONGTYPE Operation against a key holding the wrong kind of value", StoreError::is_foreign_data),
        ("-TOLLGATE the value is not a fixed window of version 1", StoreError::is_foreign_data),
        // Errors inside a script, as worded before Redis 7.
        (
            "-ERR Error running script (call to f_0): @user_script:30: WRONGTYPE Operation against a key",
            StoreError::is_foreign_data,
        ),
        (
            "-ERR Error running script (call to f_0): @user_script:30: @user_script: 30: -OOM command not allowed",
            StoreError::is_out_of_memory,
        ),
        (
            "-ERR Error running script (call to f_0): @user_script:30: -READONLY You can't write against a read only",
            StoreError::is_unavailable,
        ),
        ("-@user_script: 108: -OOM command not allowed when used memory > 'maxmemory'.", StoreError::is_out_of_memory),
        ("-ERR some unknown error", is_other),
        (":1", is_other),
        ("+OK", is_other),
        ("*2\r\n:1\r\n:2", is_other),
        ("*4\r\n:1\r\n:-5\r\n:0\r\n:0", is_other),
    ];
    for (answer, is) in answers {
        let url = serve(None, answer);
        let backend = RedisOptions::from_url(url).unwrap().connections(1).connect().await.unwrap();
        let error = limiter(&backend).check("alice").await.unwrap_err();
        assert!(is(&error), "{answer}: {error:?}");
    }
}

#[tokio::test]
async fn non_protocol_replies_are_not_timeouts() {
    let url = serve(None, "HTTP/1.1 400 Bad Request");
    let backend = RedisOptions::from_url(url).unwrap().connections(1).connect().await.unwrap();
    for _ in 0..3 {
        // The stream is unusable after that, so the next call uses a new connection and fails as well.
        let error = limiter(&backend).check("alice").await.unwrap_err();
        assert!(!error.is_timeout(), "{error:?}");
    }
}

fn is_other(error: &StoreError) -> bool {
    !(error.is_timeout()
        || error.is_unavailable()
        || error.is_unauthorized()
        || error.is_out_of_memory()
        || error.is_foreign_data())
}

/// A server that accepts every client, answers `INFO` with `info` and every script with `answer`. It runs until the test process ends.
pub(crate) fn serve(info: Option<String>, answer: &str) -> String {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let url = format!("redis://{}/", listener.local_addr().unwrap());
    let info = info.map(|info| format!("${}\r\n{info}\r\n", info.len()));
    let answer = format!("{answer}\r\n");
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, info, answer) = (stream.unwrap(), info.clone(), answer.clone());
            thread::spawn(move || converse(stream, info.as_deref(), &answer));
        }
    });
    url
}

fn converse(mut stream: TcpStream, info: Option<&str>, answer: &str) {
    let mut received = [0; 65_536];
    while let Ok(bytes @ 1..) = stream.read(&mut received) {
        let text = String::from_utf8_lossy(&received[..bytes]);
        // The commands that a client sends before its first reply arrive in one read here.
        let commands = text.lines().filter(|line| line.starts_with('*')).count();
        let is_script = text.contains("EVAL") && !text.contains("{probe}");
        let reply = match info.filter(|_| text.lines().any(|line| line == "INFO")) {
            Some(info) => info.to_owned(),
            None if is_script => answer.to_owned(),
            None => "+OK\r\n".repeat(commands),
        };
        if stream.write_all(reply.as_bytes()).is_err() {
            return;
        }
    }
}
