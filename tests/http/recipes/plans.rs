use std::collections::HashSet;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::routing::{get, post};
use tokio::sync::RwLock;
use tollgate::http::{header, peer_ip};
use tollgate::rate_limit::PolicyResolver;
use tollgate::{AnyBackend, BoxError, Key, Limiter, Policy, Quota, RateLimitLayer};

/// The API keys that have paid, in place of your database.
#[derive(Clone, Default)]
struct Customers(Arc<RwLock<HashSet<String>>>);

#[derive(Clone)]
struct Plans {
    customers: Customers,
    free: Limiter<AnyBackend>,
    pro: Limiter<AnyBackend>,
}

impl Plans {
    async fn of(&self, api_key: &str) -> Result<&Limiter<AnyBackend>, BoxError> {
        let has_paid = self.customers.0.read().await.contains(api_key); // SELECT ..
        Ok(if has_paid { &self.pro } else { &self.free })
    }
}

fn api_key(headers: &HeaderMap) -> Option<&str> {
    headers.get("x-api-key")?.to_str().ok()
}

async fn usage(
    State((plans, _)): State<(Plans, PolicyResolver<String>)>,
    headers: HeaderMap,
) -> Result<String, StatusCode> {
    let api_key = api_key(&headers).ok_or(StatusCode::UNAUTHORIZED)?;
    let limiter = plans.of(api_key).await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    // `header` counts under a digest of the value, so that no secret is stored.
    let decision = limiter.peek(Key::digest(api_key)).await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    let remaining = decision.remaining().unwrap_or(0);
    let reset = decision.reset_after().as_micros().div_ceil(1_000_000); // rounded up, like `t` in the `RateLimit` field
    Ok(format!(r#"{{"limit":{},"remaining":{remaining},"reset_seconds":{reset}}}"#, decision.capacity()))
}

async fn upgrade(State((plans, resolver)): State<(Plans, PolicyResolver<String>)>, headers: HeaderMap) -> StatusCode {
    let Some(api_key) = api_key(&headers) else { return StatusCode::UNAUTHORIZED };
    plans.customers.0.write().await.insert(api_key.to_owned()); // UPDATE ..
    resolver.forget(&Key::digest(api_key)); // in this process
    StatusCode::NO_CONTENT
}

fn app(backend: AnyBackend, customers: Customers) -> Router {
    let [free, pro] = [100, 10_000]
        .map(|quota| Limiter::new(backend.clone(), Policy::new("plan", Quota::per_hour(quota).fixed_window())));
    let policy = free.policy().clone();
    let plans = Plans { customers, free, pro };
    let resolver = PolicyResolver::of_input({
        let plans = plans.clone();
        move |api_key: String| {
            let plans = plans.clone();
            async move { Ok::<_, BoxError>(plans.of(&api_key).await?.policy().clone()) }
        }
    });
    let per_address = Policy::new("address", Quota::per_minute(1_200).fixed_window());
    let limit = RateLimitLayer::new(backend, policy)
        .key(header("x-api-key"))
        .and(per_address, peer_ip()) // because a client can make up keys; ClientIp behind a proxy
        .resolver_from(|request: &Request| api_key(request.headers()).map(str::to_owned), resolver.clone());
    let api = Router::new().route("/search", get(async || "found")).layer(limit);
    Router::new().route("/usage", get(usage)).route("/upgrade", post(upgrade)).with_state((plans, resolver)).merge(api)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::super::{App, Client, Reply, backend};
    use super::*;
    use crate::support::server::RedisServer;

    #[tokio::test(flavor = "multi_thread")]
    async fn usage_of_both_instances_is_shared_and_free() {
        let site = Site::start().await;
        for instance in 0..2 {
            assert_eq!(site.usage(instance, "alice").await, (100, 100));
        }
        for request in 0..4 {
            assert_eq!(site.search(request, "alice").await.body, "found");
        }
        for instance in 0..10 {
            assert_eq!(site.usage(instance, "alice").await, (100, 96), "a peek costs nothing");
        }
        assert_eq!(site.usage(0, "bob").await, (100, 100));
        assert_eq!(Client::new().get(site.apps[0].addr, "/usage", &[]).await.status, 401);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn upgrade_keeps_what_was_used() {
        let site = Site::start().await;
        for request in 0..100 {
            assert_eq!(site.search(request, "alice").await.status, 200);
        }
        for instance in 0..2 {
            assert_eq!(site.search(instance, "alice").await.status, 429);
        }
        let used = site.usage(0, "alice").await.1.abs_diff(100);
        assert_eq!(used, 100, "a denied request costs nothing");

        let headers = [("x-api-key", "alice")];
        assert_eq!(Client::new().post(site.apps[0].addr, "/upgrade", &headers, "").await.status, 204);
        assert_eq!(site.search(0, "alice").await.status, 200, "the instance that handled the upgrade");
        for instance in 0..2 {
            assert_eq!(site.usage(instance, "alice").await, (10_000, 9_899));
        }
        assert_eq!(site.search(1, "alice").await.status, 429, "the other instance has cached the plan for a minute");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn made_up_keys_do_not_escape_the_address_limit() {
        let site = Site::start().await;
        let mut served = 0;
        while site.search(served, &format!("made-up-{served}")).await.status == 200 {
            served += 1;
            // Twice the quota, because a window may end meanwhile.
            assert!(served <= 2_400, "the address has no limit");
        }
        assert!(served >= 1_200, "{served} of 1,200 requests were served");
    }

    /// Two instances with one Redis and one database.
    struct Site {
        _redis: RedisServer,
        apps: [App; 2],
        client: Client,
    }

    impl Site {
        async fn start() -> Self {
            let redis = RedisServer::start();
            let customers = Customers::default();
            let [one, two] =
                [backend(&redis).await, backend(&redis).await].map(|backend| app(backend, customers.clone()));
            Self { _redis: redis, apps: [App::serve(one).await, App::serve(two).await], client: Client::new() }
        }

        async fn search(&self, instance: usize, api_key: &str) -> Reply {
            self.client.get(self.apps[instance % 2].addr, "/search", &[("x-api-key", api_key)]).await
        }

        /// The limit, and what is left of it.
        async fn usage(&self, instance: usize, api_key: &str) -> (u64, u64) {
            let reply = self.client.get(self.apps[instance % 2].addr, "/usage", &[("x-api-key", api_key)]).await;
            assert_eq!(reply.status, 200);
            let usage: Value = serde_json::from_str(&reply.body).unwrap();
            assert!(usage["reset_seconds"].as_u64().unwrap() <= 3_600, "{usage}");
            (usage["limit"].as_u64().unwrap(), usage["remaining"].as_u64().unwrap())
        }
    }
}
