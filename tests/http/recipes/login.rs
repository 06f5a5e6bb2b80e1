use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Router, routing::post};
use tollgate::http::{failures, peer_ip};
use tollgate::rate_limit::RateLimited;
use tollgate::{AnyBackend, ConfigError, HttpResponder, Limiter, Policy, Quota, RateLimitFallback, RateLimitLayer};

async fn login(State(accounts): State<Arc<Limiter<AnyBackend>>>, body: String) -> Response {
    let (name, password) = body.split_once(':').unwrap_or((&body, ""));
    let Ok(decision) = accounts.check(name).await else {
        return StatusCode::SERVICE_UNAVAILABLE.into_response(); // no guesses while the store is down
    };
    let receipt = decision.receipt();
    if let Some(limited) = RateLimited::of(accounts.policy(), 1, decision) {
        return HttpResponder::new().respond_to(&limited, name).into_response();
    }
    if password != "correct" {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    if let Some(receipt) = receipt {
        let _ = accounts.settle(name, receipt, -1).await; // gives the unit back
    }
    "welcome".into_response()
}

fn app(backend: AnyBackend) -> Result<Router, ConfigError> {
    let accounts = Limiter::new(backend.clone(), Policy::new("account", Quota::per_hour(1_000).sliding_log()?));
    let guesses = RateLimitLayer::new(backend, Policy::new("login", Quota::per_minute(5).sliding_log()?))
        .key(peer_ip()) // ClientIp behind a proxy
        .charge_on(failures())
        .on_store_error(RateLimitFallback::Deny);
    Ok(Router::new().route("/login", post(login)).layer(guesses).with_state(Arc::new(accounts)))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::task::JoinSet;

    use super::super::{App, Client, Reply, backend};
    use super::*;
    use crate::support::server::RedisServer;

    #[tokio::test(flavor = "multi_thread")]
    async fn failures_count_across_instances() {
        let (_redis, apps) = start().await;
        let client = Client::new();
        for attempt in 0..5 {
            assert_eq!(login(&client, &apps[attempt % 2], "alice:wrong").await.status, 401);
        }
        for app in &apps {
            let denied = login(&client, app, "alice:correct").await;
            assert_eq!(denied.status, 429, "{denied:?}");
            let wait: u64 = denied.header("retry-after").parse().unwrap();
            assert!((1..=60).contains(&wait), "{wait}");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn successes_cost_nothing() {
        let (redis, apps) = start().await;
        let client = Client::new();
        for attempt in 0..30 {
            let reply = login(&client, &apps[attempt % 2], "alice:correct").await;
            assert_eq!((reply.status, reply.body.as_str()), (200, "welcome"));
        }
        // All failures are still there for the address, and 1,000 for the account.
        for _ in 0..5 {
            assert_eq!(login(&client, &apps[0], "alice:wrong").await.status, 401);
        }
        assert_eq!(login(&client, &apps[0], "alice:wrong").await.status, 429);
        let accounts =
            Limiter::new(backend(&redis).await, Policy::new("account", Quota::per_hour(1_000).sliding_log().unwrap()));
        assert_eq!(accounts.peek("alice").await.unwrap().remaining(), Some(995));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn parallel_guesses_get_no_extra_tries() {
        let (_redis, apps) = start().await;
        let client = Client::new();
        let mut guesses = JoinSet::new();
        for number in 0..20 {
            let (client, addr) = (client.clone(), apps[number % 2].addr);
            guesses.spawn(async move { client.post(addr, "/login", &[], "alice:wrong").await.status });
        }
        let statuses = guesses.join_all().await;
        assert_eq!(statuses.iter().filter(|status| **status == 401).count(), 5, "{statuses:?}");
        assert_eq!(statuses.iter().filter(|status| **status == 429).count(), 15, "{statuses:?}");
    }

    // Only on Linux does the whole of 127.0.0.0/8 belong to this machine by default.
    #[cfg(target_os = "linux")]
    #[tokio::test(flavor = "multi_thread")]
    async fn many_addresses_cannot_guess_one_account() {
        let (_redis, apps) = start().await;
        let mut addresses = JoinSet::new();
        // A few at a time: more would exceed the deadline of store calls on a busy machine.
        for fourth in 0..4 {
            let addr = apps[fourth % 2].addr;
            addresses.spawn(async move {
                for number in 0..50 {
                    let client = Client::at(Ipv4Addr::new(127, 0, fourth as u8 + 1, number));
                    for _ in 0..5 {
                        assert_eq!(client.post(addr, "/login", &[], "alice:wrong").await.status, 401);
                    }
                    assert_eq!(client.post(addr, "/login", &[], "alice:wrong").await.status, 429);
                }
            });
        }
        addresses.join_all().await;
        let fresh = Client::at(Ipv4Addr::new(127, 0, 9, 1));
        let denied = login(&fresh, &apps[0], "alice:correct").await;
        assert_eq!(denied.status, 429);
        assert!(denied.body.contains("account"), "{denied:?}");
        assert_eq!(login(&fresh, &apps[1], "bob:correct").await.status, 200, "another account");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn login_is_refused_while_the_store_is_down() {
        let (mut redis, apps) = start().await;
        let client = Client::new();
        assert_eq!(login(&client, &apps[0], "alice:correct").await.status, 200);
        redis.kill();
        for _ in 0..10 {
            assert_eq!(login(&client, &apps[0], "alice:correct").await.status, 503);
        }
    }

    async fn login(client: &Client, app: &App, body: &str) -> Reply {
        client.post(app.addr, "/login", &[], body).await
    }

    async fn start() -> (RedisServer, [App; 2]) {
        let redis = RedisServer::start();
        let [one, two] = [backend(&redis).await, backend(&redis).await].map(|backend| app(backend).unwrap());
        (redis, [App::serve(one).await, App::serve(two).await])
    }
}
