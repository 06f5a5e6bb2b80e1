//! Spans as exported with OpenTelemetry: the span of a job links to the span that pushed it.

use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::time::Duration;

use opentelemetry::trace::{SpanId, TraceFlags, TraceId, TraceState, TracerProvider};
use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracerProvider, SpanData};
use tollgate::delay_queue::{DelayQueueWorker, Job};
use tollgate::rate_limit::PolicyResolver;
use tollgate::{DelayQueue, ErrorResponder, GlobalKey, Key, LockLayer, MemoryBackend, Policy, Quota, RateLimitLayer};
use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
use tracing::Instrument;
use tracing_subscriber::layer::SubscriberExt;

const TRACEPARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// Runs `body` and returns the exported spans.
fn spans(body: impl Future<Output = ()>) -> Vec<SpanData> {
    let exporter = InMemorySpanExporter::default();
    let provider = SdkTracerProvider::builder().with_simple_exporter(exporter.clone()).build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || runtime.block_on(body));
    drop(runtime);
    exporter.get_finished_spans().unwrap()
}

fn queue() -> DelayQueue<u32> {
    DelayQueue::new(MemoryBackend::new(), "traced")
}

type Answer = Ready<Result<(), Infallible>>;

fn worker(
    queue: &DelayQueue<u32>,
) -> DelayQueueWorker<u32, impl Service<Job<u32>, Response = (), Error = Infallible, Future = Answer> + Clone> {
    DelayQueueWorker::new(queue.clone(), service_fn(|_: Job<u32>| ready(Ok(()))))
}

fn jobs(spans: &[SpanData]) -> Vec<&SpanData> {
    spans.iter().filter(|span| span.name == "job").collect()
}

#[test]
fn job_span_links_to_the_span_that_pushed_it() {
    let spans = spans(async {
        let queue = queue();
        let pushing = tracing::info_span!("pushing");
        let push = pushing.in_scope(|| queue.push(7).traced());
        push.await.unwrap();
        drop(pushing);
        worker(&queue).run_until(tokio::time::sleep(Duration::from_secs(1))).await.unwrap();
    });
    let pushing = &spans.iter().find(|span| span.name == "pushing").unwrap().span_context;
    let [job] = jobs(&spans)[..] else { panic!("one attempt is one span: {spans:?}") };
    assert_ne!(job.span_context.trace_id(), pushing.trace_id(), "the job has its own trace");
    let [link] = &job.links[..] else { panic!("one link: {:?}", job.links) };
    assert_eq!(
        (link.span_context.trace_id(), link.span_context.span_id(), link.span_context.trace_flags()),
        (pushing.trace_id(), pushing.span_id(), pushing.trace_flags())
    );
}

/// Otherwise, all jobs of a worker would be in one trace, which ends with the worker.
#[test]
fn job_span_is_not_a_child_of_its_worker() {
    let spans = spans(async {
        let queue = queue();
        queue.push(7).await.unwrap();
        let running = worker(&queue).run_until(tokio::time::sleep(Duration::from_secs(1)));
        running.instrument(tracing::info_span!("worker")).await.unwrap();
    });
    let around = &spans.iter().find(|span| span.name == "worker").unwrap().span_context;
    let [job] = jobs(&spans)[..] else { panic!("one attempt is one span: {spans:?}") };
    assert_ne!(job.span_context.trace_id(), around.trace_id());
    assert_eq!(job.parent_span_id, SpanId::INVALID);
}

/// A handler that is detached from its client, and a resolver that is detached from its caller.
#[test]
fn detached_work_belongs_to_the_trace_of_its_request() {
    let spans = spans(async {
        let inner = async |name: &'static str| {
            tokio::task::yield_now().await;
            drop(tracing::info_span!("inside", name));
        };
        let plan = Policy::new("plan", Quota::per_hour(10).fixed_window());
        let plans = PolicyResolver::new({
            let plan = plan.clone();
            move |_: Key| {
                let plan = plan.clone();
                async move {
                    inner("resolver").await;
                    Ok::<_, Infallible>(plan)
                }
            }
        });
        let service = ServiceBuilder::new()
            .layer(RateLimitLayer::new(MemoryBackend::new(), plan).resolver(plans).responder(ErrorResponder))
            .layer(LockLayer::new(MemoryBackend::new(), "requests").key(GlobalKey).responder(ErrorResponder).detached())
            .service_fn(move |()| async move {
                inner("handler").await;
                Ok::<_, Infallible>(())
            });
        service.oneshot(()).instrument(tracing::info_span!("request")).await.unwrap();
    });
    let request = &spans.iter().find(|span| span.name == "request").unwrap().span_context;
    let inside: Vec<_> = spans.iter().filter(|span| span.name == "inside").collect();
    assert_eq!(inside.len(), 2, "{spans:?}");
    assert!(inside.iter().all(|span| span.span_context.trace_id() == request.trace_id()), "{spans:?}");
}

#[test]
fn trace_headers_of_another_system_become_a_link() {
    let spans = spans(async {
        let queue = queue();
        queue.push(7).header("traceparent", TRACEPARENT).header("tracestate", "vendor=1").await.unwrap();
        let worker = worker(&queue).span(|job| tracing::info_span!("job", number = **job));
        worker.run_until(tokio::time::sleep(Duration::from_secs(1))).await.unwrap();
    });
    let link = &jobs(&spans)[0].links[0].span_context;
    assert_eq!(link.trace_id(), TraceId::from_hex("4bf92f3577b34da6a3ce929d0e0e4736").unwrap());
    assert_eq!(link.span_id(), SpanId::from_hex("00f067aa0ba902b7").unwrap());
    assert_eq!((link.trace_flags(), link.is_remote()), (TraceFlags::SAMPLED, true));
    assert_eq!(*link.trace_state(), TraceState::from_key_value([("vendor", "1")]).unwrap());
}

#[test]
fn invalid_trace_context_makes_no_link() {
    let spans = spans(async {
        let queue = queue();
        // There is no current span here.
        let push = queue.push(7).traced();
        let job = push.clone().prepare().unwrap().job;
        assert!(job.headers.is_empty());
        push.await.unwrap();
        queue.push(8).header("traceparent", "00-1-2-3").await.unwrap();
        worker(&queue).run_until(tokio::time::sleep(Duration::from_secs(1))).await.unwrap();
    });
    let jobs = jobs(&spans);
    assert_eq!(jobs.len(), 2);
    assert!(jobs.iter().all(|job| job.links.is_empty()));
}
