use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::{Router, routing::post};
use base64::{Engine, prelude::BASE64_STANDARD};
use hmac::{Hmac, Mac};
use sha2::Sha256;
use tollgate::delay_queue::{Backoff, DelayQueueWorker, WorkerError};
use tollgate::{AnyBackend, BoxError, DelayQueue, GlobalKey, IdempotencyLayer, Job};
use tower::{ServiceBuilder, service_fn};

/// Lets signed requests pass, as Standard Webhooks defines them.
async fn verify(State(secret): State<Arc<[u8]>>, request: Request, next: Next) -> Result<Response, StatusCode> {
    let (head, body) = request.into_parts();
    let body = to_bytes(body, 1 << 20).await.map_err(|_| StatusCode::PAYLOAD_TOO_LARGE)?;
    let field = |name| head.headers.get(name).and_then(|value| value.to_str().ok()).ok_or(StatusCode::UNAUTHORIZED);
    let (id, sent, signatures) = (field("webhook-id")?, field("webhook-timestamp")?, field("webhook-signature")?);

    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let is_fresh = sent.parse().is_ok_and(|sent: u64| now.abs_diff(sent) <= 300);
    let mut mac = Hmac::<Sha256>::new_from_slice(&secret).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    mac.update(format!("{id}.{sent}.").as_bytes());
    mac.update(&body);
    let is_genuine = signatures.split(' ').any(|signature| {
        let decoded = signature.strip_prefix("v1,").and_then(|base64| BASE64_STANDARD.decode(base64).ok());
        decoded.is_some_and(|decoded| mac.clone().verify_slice(&decoded).is_ok())
    });
    if !is_fresh || !is_genuine {
        return Err(StatusCode::UNAUTHORIZED);
    }
    Ok(next.run(Request::from_parts(head, Body::from(body))).await)
}

async fn receive(State(events): State<DelayQueue<String>>, headers: HeaderMap, event: String) -> StatusCode {
    let Some(id) = headers.get("webhook-id").and_then(|id| id.to_str().ok()) else { return StatusCode::BAD_REQUEST };
    match events.push(event).id(id).await {
        Ok(_) => StatusCode::ACCEPTED,
        Err(_) => StatusCode::SERVICE_UNAVAILABLE, // not stored by the layer: the provider tries again
    }
}

fn app(backend: AnyBackend, events: DelayQueue<String>, secret: &[u8]) -> Router {
    let once = IdempotencyLayer::new(backend)
        .header("webhook-id")
        .scope(GlobalKey) // one provider
        .max_running_per_scope(10_000)
        .retention(Duration::from_secs(3 * 86_400)); // longer than the provider retries
    Router::new()
        .route("/webhook", post(receive))
        .layer(once)
        .layer(from_fn_with_state(Arc::from(secret), verify)) // outside of the idempotency layer
        .with_state(events)
}

fn events(backend: AnyBackend) -> DelayQueue<String> {
    DelayQueue::new(backend, "events").max_attempts(12)
}

/// Runs `handle` for each event until it succeeds, up to 12 times. `handle` may run again after a success,
/// so make its effects recognizable by `job.id()`.
async fn work<F>(
    events: DelayQueue<String>,
    handle: impl Fn(Job<String>) -> F + Clone + Send + 'static,
) -> Result<(), WorkerError>
where
    F: Future<Output = Result<(), BoxError>> + Send + 'static,
{
    let service = ServiceBuilder::new().timeout(Duration::from_secs(30)).service(service_fn(handle));
    DelayQueueWorker::new(events, service)
        .backoff(Backoff::exponential(Duration::from_secs(5), Duration::from_secs(3_600)).full_jitter())
        .run()
        .await
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;
    use tokio::time::timeout;

    use super::super::{App, Client, Reply, SOON, backend, eventually};
    use super::*;
    use crate::support::server::RedisServer;

    const SECRET: &[u8] = b"of the provider and the receiver";

    #[tokio::test(flavor = "multi_thread")]
    async fn event_becomes_one_job_which_is_retried() {
        let site = Site::start().await;
        let (tell, mut attempts) = mpsc::unbounded_channel();
        for _ in 0..2 {
            let tell = tell.clone();
            let queue = events(backend(&site.redis).await);
            tokio::spawn(work(queue, move |job: Job<String>| {
                let _ = tell.send((job.id().to_string(), job.attempt(), job.to_string()));
                let result = if job.attempt() == 1 { Err("the database is down".into()) } else { Ok(()) };
                std::future::ready(result)
            }));
        }

        assert_eq!(site.send(0, "evt_1", "paid", now()).await.status, 202);
        let again = site.send(1, "evt_1", "paid", now()).await;
        assert_eq!((again.status, again.header("idempotent-replayed")), (202, "true"));
        for attempt in 1..=2 {
            let seen = timeout(SOON, attempts.recv()).await.expect("the job runs").unwrap();
            assert_eq!(seen, ("evt_1".to_owned(), attempt, "paid".to_owned()));
        }
        let queue = events(backend(&site.redis).await);
        eventually("the job is done", async || queue.get("evt_1").await.unwrap().is_none()).await;

        // The provider repeats the event after the job is done. An event after it shows that no job of the first is left.
        assert_eq!(site.send(0, "evt_1", "paid", now()).await.status, 202);
        assert_eq!(queue.counts().await.unwrap(), Default::default());
        assert_eq!(site.send(1, "evt_2", "refunded", now()).await.status, 202);
        let seen = timeout(SOON, attempts.recv()).await.expect("the job runs").unwrap();
        assert_eq!(seen, ("evt_2".to_owned(), 1, "refunded".to_owned()));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn parallel_deliveries_become_one_job() {
        let site = Arc::new(Site::start().await);
        let mut deliveries = tokio::task::JoinSet::new();
        for number in 0..20 {
            let site = Arc::clone(&site);
            deliveries.spawn(async move { site.send(number, "evt_1", "paid", now()).await.status });
        }
        let statuses = deliveries.join_all().await;
        assert!(statuses.contains(&202), "{statuses:?}");
        // 409 while the first delivery runs: the provider tries again.
        assert!(statuses.iter().all(|status| [202, 409].contains(status)), "{statuses:?}");
        let queue = events(backend(&site.redis).await);
        assert_eq!(queue.counts().await.unwrap().waiting, 1);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn forged_event_reserves_no_id() {
        let site = Site::start().await;
        let addr = site.apps[0].addr;
        let sent = now().to_string();
        for signature in ["", "v1,", "v1,Zm9yZ2Vk", &sign("evt_1", now(), "another event")] {
            let headers = [("webhook-id", "evt_1"), ("webhook-timestamp", &sent), ("webhook-signature", signature)];
            assert_eq!(Client::new().post(addr, "/webhook", &headers, "forged").await.status, 401);
        }
        assert_eq!(site.send(0, "evt_1", "paid", now() - 301).await.status, 401, "a recorded request");
        let genuine = site.send(0, "evt_1", "paid", now()).await;
        assert_eq!((genuine.status, genuine.header("idempotent-replayed")), (202, ""));
        let job = events(backend(&site.redis).await).get("evt_1").await.unwrap().unwrap();
        assert_eq!(&*job.payload, br#""paid""#);
    }

    fn now() -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
    }

    fn sign(id: &str, sent: u64, event: &str) -> String {
        let mut mac = Hmac::<Sha256>::new_from_slice(SECRET).unwrap();
        mac.update(format!("{id}.{sent}.{event}").as_bytes());
        format!("v1,{}", BASE64_STANDARD.encode(mac.finalize().into_bytes()))
    }

    struct Site {
        redis: RedisServer,
        apps: [App; 2],
    }

    impl Site {
        async fn start() -> Self {
            let redis = RedisServer::start();
            let [one, two] = [backend(&redis).await, backend(&redis).await]
                .map(|backend| app(backend.clone(), events(backend), SECRET));
            Self { redis, apps: [App::serve(one).await, App::serve(two).await] }
        }

        async fn send(&self, instance: usize, id: &str, event: &str, sent: u64) -> Reply {
            // The provider sends a signature for its old secret, too.
            let signatures = format!("v1,b2xk {}", sign(id, sent, event));
            let sent = sent.to_string();
            let headers = [("webhook-id", id), ("webhook-timestamp", &sent), ("webhook-signature", &signatures)];
            Client::new().post(self.apps[instance % 2].addr, "/webhook", &headers, event).await
        }
    }
}
