use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tollgate::grpc::GrpcResponder;
use tollgate::http::header;
use tollgate::{AnyBackend, BoxError, LockError, Locks, Policy, Quota, RateLimitLayer};
use tonic::service::Routes;
use tonic::transport::server::{Server, TcpIncoming};
use tonic::{Code, Status};

/// The fence of each order's last write, in place of your database.
#[derive(Clone, Default)]
struct Database(Arc<Mutex<HashMap<u64, u64>>>);

impl Database {
    /// UPDATE orders SET paid = true, fence = $2 WHERE id = $1 AND fence <= $2
    async fn pay(&self, order: u64, fence: u64) -> Result<(), Status> {
        let mut orders = self.0.lock().await;
        let written = orders.entry(order).or_default();
        if fence < *written {
            return Err(Status::aborted("a later call has changed this order"));
        }
        *written = fence;
        Ok(())
    }
}

#[derive(Clone)]
struct Orders {
    locks: Locks,
    database: Database,
}

impl Orders {
    fn new(backend: AnyBackend, database: Database) -> Self {
        Self { locks: Locks::new(backend, "orders").max_hold(Duration::from_secs(30)), database }
    }

    /// The body of `async fn pay(&self, request: Request<PayRequest>)`.
    async fn pay(&self, order: u64) -> Result<u64, Status> {
        let lock = self.locks.lock(order).wait(Duration::from_secs(2));
        let lease = lock.await.map_err(|error| match error {
            LockError::Busy(_) => Status::aborted("another call changes this order"),
            LockError::QueueFull(_) => Status::resource_exhausted("too many calls wait for this order"),
            _ => Status::new(Code::Unavailable, "the order cannot be locked"),
        })?;
        let paid = tokio::select! {
            paid = self.database.pay(order, lease.fence()) => paid,
            _ = lease.lost() => Err(Status::aborted("the lock was lost")),
        };
        let fence = lease.fence();
        let _ = lease.release().await;
        paid.map(|()| fence)
    }
}

/// Call it with `Routes::new(OrdersServer::new(orders))`.
async fn serve(backend: AnyBackend, services: Routes, incoming: TcpIncoming) -> Result<(), BoxError> {
    let tenants = Policy::new("tenant", Quota::per_second(100).token_bucket());
    let limit = RateLimitLayer::new(backend, tenants).key(header("x-tenant")).responder(GrpcResponder::new());
    Ok(Server::builder().layer(limit).add_routes(services).serve_with_incoming(incoming).await?)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::convert::Infallible;
    use std::net::{Ipv4Addr, SocketAddr};
    use std::pin::Pin;
    use std::task::{Context, Poll};
    use std::time::Instant;

    use http::uri::PathAndQuery;
    use http::{Request, Response};
    use tokio::task::{JoinHandle, JoinSet};
    use tonic::body::Body;
    use tonic::server::NamedService;
    use tonic::transport::{Channel, Endpoint};
    use tonic_types::StatusExt;
    use tower::{Service, service_fn};

    use super::super::backend;
    use super::*;
    use crate::servers::PlainText;
    use crate::support::server::RedisServer;

    #[tokio::test(flavor = "multi_thread")]
    async fn tenant_has_one_bucket_for_all_instances() {
        let (_redis, instances, _database) = start().await;
        let mut clients = [instances[0].client().await, instances[1].client().await];
        let start = Instant::now();
        let mut served = 0;
        let status = loop {
            match clients[served % 2].pay("acme", &served.to_string()).await {
                Ok(_) => served += 1,
                Err(status) => break status,
            }
            let refilled = start.elapsed().as_secs_f64() * 100.0;
            assert!(served as f64 <= 100.0 + refilled, "{served} were served with {refilled} refilled units");
            if served == 10_000 {
                panic!("the machine needs 10 ms for a call, so the bucket never empties");
            }
        };
        assert!(served >= 100, "{served} of 100 calls were served: {status}");
        assert_eq!(status.code(), Code::ResourceExhausted);
        let wait = status.get_details_retry_info().unwrap().retry_delay.unwrap();
        assert!(wait <= Duration::from_millis(10), "{wait:?}");
        assert!(clients[0].pay("globex", "1").await.is_ok(), "another tenant");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn calls_for_one_order_run_one_after_another() {
        let (_redis, instances, database) = start().await;
        let mut calls = JoinSet::new();
        for number in 0..20 {
            let mut client = instances[number % 2].client().await;
            calls.spawn(async move { client.pay("acme", "7").await.unwrap() });
        }
        let fences: BTreeSet<u64> = calls.join_all().await.iter().map(|fence| fence.parse().unwrap()).collect();
        assert_eq!(fences.len(), 20, "each call has a lease of its own: {fences:?}");
        assert_eq!(database.0.lock().await.get(&7), fences.last());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn call_for_a_locked_order_waits_two_seconds() {
        let (redis, instances, database) = start().await;
        let other = Orders::new(backend(&redis).await, database.clone());
        let mut client = instances[0].client().await;
        let held = other.locks.lock(7u64).await.unwrap();
        let start = Instant::now();
        let status = client.pay("acme", "7").await.unwrap_err();
        assert_eq!((status.code(), status.message()), (Code::Aborted, "another call changes this order"));
        assert!(start.elapsed() >= Duration::from_secs(2), "{:?}", start.elapsed());
        assert!(client.pay("acme", "8").await.is_ok(), "another order");

        let waiting = tokio::spawn(async move { client.pay("acme", "7").await });
        let first = held.fence();
        held.release().await.unwrap();
        let fence: u64 = waiting.await.unwrap().unwrap().parse().unwrap();
        assert!(fence > first, "{fence} is a later lease than {first}");
        let late = database.pay(7, first).await.unwrap_err();
        assert_eq!(late.message(), "a later call has changed this order");
    }

    async fn start() -> (RedisServer, [Instance; 2], Database) {
        let redis = RedisServer::start();
        let database = Database::default();
        let instances = [Instance::start(&redis, &database).await, Instance::start(&redis, &database).await];
        (redis, instances, database)
    }

    /// One process of the service. It stops when it is dropped.
    struct Instance {
        addr: SocketAddr,
        task: JoinHandle<()>,
    }

    impl Instance {
        async fn start(redis: &RedisServer, database: &Database) -> Self {
            let backend = backend(redis).await;
            let incoming = TcpIncoming::bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
            let addr = incoming.local_addr().unwrap();
            let services = Routes::new(OrdersServer(Orders::new(backend.clone(), database.clone())));
            Self { addr, task: tokio::spawn(async move { serve(backend, services, incoming).await.unwrap() }) }
        }

        async fn client(&self) -> Client {
            let channel = Endpoint::from_shared(format!("http://{}", self.addr)).unwrap().connect().await.unwrap();
            Client(tonic::client::Grpc::new(channel))
        }
    }

    impl Drop for Instance {
        fn drop(&mut self) {
            self.task.abort();
        }
    }

    struct Client(tonic::client::Grpc<Channel>);

    impl Client {
        async fn pay(&mut self, tenant: &'static str, order: &str) -> Result<String, Status> {
            let mut request = tonic::Request::new(order.to_owned());
            request.metadata_mut().insert("x-tenant", tenant.parse().unwrap());
            self.0.ready().await.map_err(|error| Status::unknown(error.to_string()))?;
            let path = PathAndQuery::from_static("/shop.Orders/Pay");
            self.0.unary(request, path, PlainText).await.map(tonic::Response::into_inner)
        }
    }

    /// What tonic generates from a protocol file, with the order and the fence as plain text.
    #[derive(Clone)]
    struct OrdersServer(Orders);

    impl NamedService for OrdersServer {
        const NAME: &'static str = "shop.Orders";
    }

    impl Service<Request<Body>> for OrdersServer {
        type Response = Response<Body>;
        type Error = Infallible;
        type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, request: Request<Body>) -> Self::Future {
            let orders = self.0.clone();
            Box::pin(async move {
                let pay = service_fn(move |order: tonic::Request<String>| {
                    let orders = orders.clone();
                    async move {
                        let order = order.into_inner().parse().map_err(|_| Status::invalid_argument("no order"))?;
                        Ok(tonic::Response::new(orders.pay(order).await?.to_string()))
                    }
                });
                Ok(tonic::server::Grpc::new(PlainText).unary(pay, request).await)
            })
        }
    }
}
