use tower::{Layer, ServiceExt, service_fn};

use super::*;
use crate::{BoxError, ErrorResponder, Locks, MemoryBackend, Policy, Quota, RateLimitLayer};

struct Nothing;

impl Work for Nothing {
    fn close(&self) {}

    fn is_idle(&self) -> bool {
        true
    }

    fn wait_idle(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(std::future::ready(()))
    }

    fn left(&self) -> ShutdownReport {
        ShutdownReport::default()
    }
}

#[test]
fn registry_does_not_grow_with_dropped_owners() {
    let registry = ShutdownRegistry::default();
    for _ in 0..10_000 {
        registry.add(&ShutdownTarget::new(&Arc::new(Nothing)));
        assert!(registry.len() <= MIN_PRUNE, "{}", registry.len());
    }
    let alive: Vec<_> = (0..1_000).map(|_| Arc::new(Nothing)).collect();
    alive.iter().for_each(|work| registry.add(&ShutdownTarget::new(work)));
    assert_eq!(registry.targets().len(), 1_000, "live owners are kept");
    drop(alive);
    for _ in 0..10_000 {
        registry.add(&ShutdownTarget::new(&Arc::new(Nothing)));
    }
    assert!(registry.len() <= 2 * 1_000 + MIN_PRUNE, "{}", registry.len());
}

#[test]
fn report_is_one_line_with_each_kind() {
    let report = ShutdownReport { workers: 1, jobs: 2, leases: 1, corrections: 3, handlers: 1, loads: 1 };
    assert_eq!(
        report.to_string(),
        "the shutdown is incomplete: it left 1 running worker, 2 unfinished jobs, 1 held lease, 3 corrections in flight, \
         1 running handler, 1 running load"
    );
}

#[tokio::test]
async fn clones_and_services_are_in_the_shutdown_once() {
    let backend = MemoryBackend::new();
    let locks = Locks::new(backend.clone(), "orders");
    let _clones = [locks.clone(), locks.clone().fair()];
    let layer = RateLimitLayer::new(backend.clone(), Policy::new("api", Quota::per_hour(100).fixed_window()))
        .responder(ErrorResponder)
        .charge_on(|_: Result<&(), &BoxError>| false);
    for _ in 0..10 {
        let service = layer.layer(service_fn(async |()| Ok::<_, BoxError>(())));
        service.oneshot(()).await.unwrap();
        layer.clone().cost(|(): &()| 2).layer(service_fn(async |()| Ok::<_, BoxError>(()))).oneshot(()).await.unwrap();
    }
    assert_eq!(backend.shutdown_targets(), 2);
}
