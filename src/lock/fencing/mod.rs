//! The other side of a [fence](crate::Lease::fence): a service that refuses whoever comes too late.
//!
//! A holder that stood still, in a container that was paused or on a thread that was blocked, goes on where it was when it is
//! let go, and cannot know that its lock is somebody else's by now. What can know is what it talks to. [`FenceLayer`] is put in front of a
//! service that changes what the lock protects: it lets a request through if its fence is not smaller than the largest that was seen for its key.
//!
//! A database does this better, in the statement that changes something: `UPDATE .. SET fence = $1 .. WHERE id = 42 AND fence <= $1`. The layer
//! is for services that have no such place. What it does not do:
//!
//! * Each process remembers for itself, and forgets when it ends. Send all requests of one key to one process, or use a database.
//! * It judges requests when they come. A request that was let through may still be at work when one with a larger fence is: hold what
//!   takes long under a lock of the process, or let the handler compare again.
//! * It believes what it is told. Who sends a fence of the far future keeps all holders of that key out until the process ends, and with
//!   more keys than are remembered those of other keys, too: take fences only from callers that are trusted, and drop the field
//!   from requests of others.
//!
//! A fence of 2^53 or more is none: no store grants it.
//!
//! What is remembered is bounded. What is forgotten for that is not let through unseen: whoever has a key that is not remembered
//! needs a fence that is not smaller than the largest that was forgotten. Fences follow the clock of the store, so this turns away only leases that
//! are older than what was forgotten.
//!
//! ```
//! # #[cfg(feature = "http")] {
//! use http::{Request, Response, StatusCode};
//! use tollgate::http::{LOCK_FENCE, header, lock_fence};
//! use tollgate::lock::fencing::FenceLayer;
//! use tower::{ServiceBuilder, ServiceExt, service_fn};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
//! let service = ServiceBuilder::new()
//!     .layer(FenceLayer::new(header("order"), lock_fence))
//!     .service(service_fn(async |_: Request<String>| Ok::<_, tollgate::BoxError>(Response::new(String::new()))));
//!
//! // The holder of the lock says so with each request: `.header(LOCK_FENCE, lease.fence())`.
//! let write = async |fence: u64| {
//!     let request = Request::builder().header("order", "42").header(LOCK_FENCE, fence).body(String::new())?;
//!     Ok::<_, tollgate::BoxError>(service.clone().oneshot(request).await?.status())
//! };
//! assert_eq!(write(7).await?, StatusCode::OK);
//! assert_eq!(write(9).await?, StatusCode::OK);
//! assert_eq!(write(7).await?, StatusCode::PRECONDITION_FAILED);
//! # Ok(())
//! # }
//! # main().unwrap();
//! # }
//! ```
//!
//! A service that does not speak HTTP, and remembers less:
//!
//! ```
//! use tollgate::ErrorResponder;
//! use tollgate::lock::fencing::{FenceLayer, StaleFence};
//! use tower::{ServiceBuilder, ServiceExt, service_fn};
//!
//! struct Write {
//!     order: u64,
//!     fence: u64,
//! }
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
//! let layer = FenceLayer::new(|write: &Write| write.order, |write: &Write| Some(write.fence));
//! let service = ServiceBuilder::new()
//!     .layer(layer.capacity(1_000).responder(ErrorResponder))
//!     .service(service_fn(async |write: Write| Ok::<_, tollgate::BoxError>(write.order)));
//!
//! service.clone().oneshot(Write { order: 42, fence: 9 }).await?;
//! let error = service.oneshot(Write { order: 42, fence: 7 }).await.unwrap_err();
//! assert_eq!(error.downcast::<StaleFence>()?.largest(), 9);
//! # Ok(())
//! # }
//! ```
//!
//! # Cancellation
//!
//! A fence counts as seen when the service is called, also if the future is dropped.

mod fences;
mod future;
mod layer;
mod rejection;
mod service;

pub use self::future::FenceFuture;
pub use self::layer::FenceLayer;
pub use self::rejection::{MissingFence, Rejection, StaleFence};
pub use self::service::Fence;
