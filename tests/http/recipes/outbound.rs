use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, Response};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tollgate::{AnyBackend, BoxError, ConfigError, ErrorResponder, Policy, Quota, RateLimitFallback, RateLimitLayer};
use tower::util::BoxCloneSyncService;
use tower::{Service, ServiceBuilder, ServiceExt};

type ApiClient = BoxCloneSyncService<Request<Body>, Response<Incoming>, BoxError>;

/// A client of the API, whose calls wait for up to `wait`.
fn client(backend: AnyBackend, wait: Duration) -> Result<ApiClient, ConfigError> {
    // Ten per second for all processes together. While Redis is down, each of four processes has a quarter, 150 per minute.
    let allowed = Policy::new("their-api", Quota::per_minute(600).burst(1)?.token_bucket());
    let limit = RateLimitLayer::new(backend, allowed)
        .wait(wait)
        .replicas(4) // while Redis is down, each of four processes has its share
        .on_store_error(RateLimitFallback::Local)
        .responder(ErrorResponder);
    let service = ServiceBuilder::new()
        .layer(limit)
        .timeout(Duration::from_secs(10)) // inside of the limit: waiting does not count
        .service(Client::builder(TokioExecutor::new()).build_http());
    Ok(BoxCloneSyncService::new(service))
}

async fn call(client: &mut ApiClient, uri: &str) -> Result<Response<Incoming>, BoxError> {
    client.ready().await?.call(Request::get(uri).body(Body::empty())?).await
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Instant;

    use axum::{Router, routing::get};
    use tokio::task::JoinSet;
    use tollgate::rate_limit::RateLimited;

    use super::super::{App, backend};
    use super::*;
    use crate::support::server::RedisServer;

    #[tokio::test(flavor = "multi_thread")]
    async fn processes_share_the_quota_of_the_api() {
        let redis = RedisServer::start();
        let api = Api::start().await;
        let wait = Duration::from_secs(30);
        let processes = [client(backend(&redis).await, wait).unwrap(), client(backend(&redis).await, wait).unwrap()];
        let start = Instant::now();
        let mut calls = JoinSet::new();
        for number in 0..20 {
            let (mut client, uri) = (processes[number % 2].clone(), api.uri());
            calls.spawn(async move { call(&mut client, &uri).await.unwrap().status() });
        }
        let statuses = calls.join_all().await;
        assert!(statuses.iter().all(|status| *status == 200), "{statuses:?}");
        assert_eq!(api.calls(), 20);
        // The first call is immediate, and each of the others a tenth of a second later. The clock of Redis may run a bit differently.
        assert!(start.elapsed() >= Duration::from_millis(1_890), "{:?}", start.elapsed());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn call_fails_when_its_wait_is_over() {
        let redis = RedisServer::start();
        let api = Api::start().await;
        let client = client(backend(&redis).await, Duration::from_secs(1)).unwrap();
        let start = Instant::now();
        let mut calls = JoinSet::new();
        for _ in 0..40 {
            let (mut client, uri) = (client.clone(), api.uri());
            calls.spawn(async move { call(&mut client, &uri).await.map(drop) });
        }
        let results = calls.join_all().await;
        let time = start.elapsed();
        let errors: Vec<_> = results.into_iter().filter_map(Result::err).collect();
        for error in &errors {
            let limited = error.downcast_ref::<RateLimited>().unwrap_or_else(|| panic!("{error:?}"));
            assert!(limited.retry_after().is_some_and(|wait| wait <= Duration::from_millis(100)), "{limited:?}");
        }
        assert_eq!(api.calls(), 40 - errors.len(), "a call that failed was not sent");
        assert!(errors.len() >= 28, "{} of 40 calls failed within {time:?}", errors.len());
        assert!(time < Duration::from_secs(5), "{time:?}");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn outage_leaves_each_process_a_quarter() {
        let mut redis = RedisServer::start();
        let api = Api::start().await;
        let mut client = client(backend(&redis).await, Duration::from_secs(30)).unwrap();
        call(&mut client, &api.uri()).await.unwrap();
        redis.kill();
        let start = Instant::now();
        for _ in 0..6 {
            assert_eq!(call(&mut client, &api.uri()).await.unwrap().status(), 200);
        }
        // 2.5 per second, and the first at once.
        assert!(start.elapsed() >= Duration::from_millis(1_990), "{:?}", start.elapsed());
        assert_eq!(api.calls(), 7);
    }

    /// The API of the third party.
    struct Api {
        app: App,
        calls: Arc<AtomicUsize>,
    }

    impl Api {
        async fn start() -> Self {
            let calls = Arc::new(AtomicUsize::new(0));
            let counted = Arc::clone(&calls);
            let customers = get(async move || {
                counted.fetch_add(1, Ordering::Relaxed);
                "customers"
            });
            Self { app: App::serve(Router::new().route("/v1/customers", customers)).await, calls }
        }

        fn uri(&self) -> String {
            format!("http://{}/v1/customers", self.app.addr)
        }

        fn calls(&self) -> usize {
            self.calls.load(Ordering::Relaxed)
        }
    }
}
