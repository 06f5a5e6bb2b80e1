use std::net::SocketAddr;

use axum::body::Bytes;
use axum::http::header::{CONTENT_TYPE, HeaderValue};
use axum::{Router, routing::get};
use tollgate::http::{ClientIp, header};
use tollgate::rate_limit::Rejection;
use tollgate::{AnyBackend, BoxError, HttpResponder, Policy, Quota, RateLimitLayer};

fn app(backend: AnyBackend) -> Result<Router, BoxError> {
    let by_ip = ClientIp::trusting(["127.0.0.1/32".parse()?]); // the address from which nginx connects
    let json = HttpResponder::new().map_rejection(|rejection: &Rejection, mut response| {
        let body = match rejection {
            Rejection::Limited(limited) => {
                format!(r#"{{"error":"rate_limited","retry_after":{}}}"#, limited.retry_after_secs().unwrap_or(0))
            }
            _ => r#"{"error":"rejected"}"#.to_owned(),
        };
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        *response.body_mut() = Bytes::from(body);
        response
    });
    let per_key = Policy::new("api", Quota::per_second(10).burst(20)?.token_bucket());
    let per_address = Policy::new("address", Quota::per_minute(1_200).fixed_window());
    let limit = RateLimitLayer::new(backend, per_key)
        .key(header("x-api-key").or(by_ip.clone()))
        .and(per_address, by_ip) // because a client can make up keys
        .responder(json);
    Ok(Router::new().route("/", get(async || "hello\n")).layer(limit))
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let backend = tollgate::connect("redis://127.0.0.1/").await?;
    let app = app(backend)?.into_make_service_with_connect_info::<SocketAddr>();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    Ok(axum::serve(listener, app).await?)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{self, Write};
    use std::net::{Ipv4Addr, TcpStream};
    use std::process::{Child, Command, Stdio};
    use std::sync::Once;
    use std::time::Instant;

    use tempfile::TempDir;

    use super::super::{App, Client, Reply, backend, blocks};
    use super::*;
    use crate::support::server::{RedisServer, free_port, wait_until};

    #[tokio::test(flavor = "multi_thread")]
    async fn key_has_one_bucket_for_all_instances() {
        let site = Site::start().await;
        let alice = [("x-api-key", "alice")];
        let denied = site.exhaust(Ipv4Addr::new(127, 0, 0, 2), |_| alice.to_vec()).await;
        assert_eq!(denied.header("content-type"), "application/json");
        assert_eq!(denied.header("retry-after"), "1");
        assert!(denied.header("ratelimit").contains(r#""api";r=0;t="#), "{denied:?}");
        assert_eq!(denied.body, r#"{"error":"rate_limited","retry_after":1}"#);

        let bob = site.get(0, Ipv4Addr::new(127, 0, 0, 2), &[("x-api-key", "bob")]).await;
        assert_eq!((bob.status, bob.body.as_str()), (200, "hello\n"));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn request_without_key_counts_by_client_address() {
        let site = Site::start().await;
        // A header of the client's own must not give it another address: each request pretends a new one.
        let lies: Vec<String> = (0..100).map(|last| format!("203.0.113.{last}")).collect();
        let lie = |number: usize| vec![("x-forwarded-for", lies[number % lies.len()].as_str())];
        let denied = site.exhaust(Ipv4Addr::new(127, 0, 0, 2), lie).await;
        assert_eq!(denied.body, r#"{"error":"rate_limited","retry_after":1}"#);
        assert_eq!(site.get(1, Ipv4Addr::new(127, 0, 0, 3), &[]).await.status, 200, "another address");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn made_up_keys_do_not_escape_the_address_limit() {
        let site = Site::start().await;
        let address = Ipv4Addr::new(127, 0, 0, 2);
        let mut served = 0;
        let denied = loop {
            let reply = site.get(served, address, &[("x-api-key", &format!("made-up-{served}"))]).await;
            if reply.status != 200 {
                break reply;
            }
            served += 1;
            // Twice the quota, because a window may end meanwhile.
            assert!(served <= 2_400, "the address has no limit");
        };
        assert!(served >= 1_200, "{served} of 1,200 requests were served");
        assert_eq!(denied.status, 429);
        assert!(denied.body.starts_with(r#"{"error":"rate_limited","retry_after":"#), "{denied:?}");
        assert_eq!(site.get(0, Ipv4Addr::new(127, 0, 0, 3), &[("x-api-key", "alice")]).await.status, 200);
    }

    /// Two instances of the app, each behind an nginx with the configuration of the guide.
    struct Site {
        _redis: RedisServer,
        instances: [(App, Option<Nginx>); 2],
    }

    impl Site {
        async fn start() -> Self {
            let redis = RedisServer::start();
            let is_there = Nginx::is_installed();
            if !is_there {
                static NOTE: Once = Once::new();
                // Not `eprintln`, which the test harness hides.
                let note = "nginx is not installed: the tests send the X-Forwarded-For that nginx would send";
                NOTE.call_once(|| drop(writeln!(io::stderr(), "recipes::nginx: {note}")));
            }
            let mut instances = Vec::new();
            for _ in 0..2 {
                let app = App::serve(app(backend(&redis).await).unwrap()).await;
                let nginx = is_there.then(|| Nginx::start(app.addr));
                instances.push((app, nginx));
            }
            let instances = instances.try_into().unwrap_or_else(|_| unreachable!("two were made"));
            Self { _redis: redis, instances }
        }

        /// A request of the client at `ip` to an instance.
        async fn get(&self, instance: usize, ip: Ipv4Addr, headers: &[(&str, &str)]) -> Reply {
            match &self.instances[instance % 2] {
                (_, Some(nginx)) => Client::at(ip).get(nginx.addr(), "/", headers).await,
                (app, None) => {
                    let own = headers.iter().find(|(name, _)| *name == "x-forwarded-for");
                    let chain = own.map_or(ip.to_string(), |(_, chain)| format!("{chain}, {ip}"));
                    let mut sent: Vec<_> =
                        headers.iter().filter(|(name, _)| *name != "x-forwarded-for").copied().collect();
                    sent.push(("x-forwarded-for", &chain));
                    Client::new().get(app.addr, "/", &sent).await
                }
            }
        }

        /// Sends requests to both instances until one is denied, and checks how many were served: the burst of 20, and ten per second.
        async fn exhaust<'a>(&self, ip: Ipv4Addr, headers: impl Fn(usize) -> Vec<(&'a str, &'a str)>) -> Reply {
            let start = Instant::now();
            let mut served = 0;
            loop {
                let reply = self.get(served, ip, &headers(served)).await;
                let refilled = start.elapsed().as_secs_f64() * 10.0;
                if reply.status != 200 {
                    assert!(served >= 20, "{served} of 20 requests were served: {reply:?}");
                    assert_eq!(reply.status, 429);
                    return reply;
                }
                served += 1;
                assert!(served as f64 <= 20.0 + refilled, "{served} were served with {refilled} refilled units");
            }
        }
    }

    struct Nginx {
        process: Child,
        port: u16,
        _folder: TempDir,
    }

    impl Nginx {
        /// Elsewhere than on Linux, a client has no second address.
        fn is_installed() -> bool {
            let version = Command::new("nginx").arg("-v").stdout(Stdio::null()).stderr(Stdio::null()).status();
            cfg!(target_os = "linux") && version.is_ok_and(|status| status.success())
        }

        fn start(app: SocketAddr) -> Self {
            let port = free_port();
            let folder = tempfile::tempdir().expect("a temporary folder can be made");
            let of_guide = blocks("nginx").next().expect("the guide has the configuration");
            let server = of_guide
                .replace("listen 80;", &format!("listen 127.0.0.1:{port};"))
                .replace("http://127.0.0.1:3000;", &format!("http://{app};"));
            assert!(server.contains(&port.to_string()) && server.contains(&app.to_string()), "{server}");
            let paths =
                ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"].map(|kind| format!("{kind}_temp_path {kind};"));
            let rest = "daemon off; master_process off; pid nginx.pid; error_log stderr; events {}";
            let configuration = format!("{rest} http {{ access_log off; {}\n{server}\n}}", paths.concat());
            fs::write(folder.path().join("nginx.conf"), configuration).expect("a file can be written");
            let process = Command::new("nginx").arg("-p").arg(folder.path()).args(["-c", "nginx.conf"]).spawn();
            let nginx = Self { process: process.expect("nginx starts"), port, _folder: folder };
            wait_until("nginx listens", || TcpStream::connect(nginx.addr()).is_ok());
            nginx
        }

        fn addr(&self) -> SocketAddr {
            (Ipv4Addr::LOCALHOST, self.port).into()
        }
    }

    impl Drop for Nginx {
        fn drop(&mut self) {
            // It may have ended already.
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }
}
