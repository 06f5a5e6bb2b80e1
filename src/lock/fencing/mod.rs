//! The receiving side of a [fence](crate::Lease::fence): a service that refuses late lock holders.
//!
//! A stalled holder, for instance in a paused container or on a blocked thread, continues without knowing that it lost its lock.
//! Its requests can be refused at their target. Put [`FenceLayer`] in front of the service that changes the protected data. It
//! admits a request if its fence is not smaller than the largest one for its key.
//!
//! A database does this better, in the statement that changes the data:
//! `UPDATE .. SET fence = $1 .. WHERE id = 42 AND fence <= $1`. The layer is for services without such a statement. Its limits:
//!
//! * Each process has its own table, and loses it when it ends. Send all requests of one key to one process, or use a database.
//! * It checks requests when they arrive. An admitted request may still run while one with a larger fence does. Run long changes
//!   under a lock of the process, or let the handler compare the fence again.
//! * It trusts the fences it gets. A fence of the far future shuts out all holders of that key until the process ends. With more
//!   keys than the capacity it also shuts out other keys. Accept fences only from trusted callers, and remove the header from
//!   other requests.
//!
//! Stores never grant a fence of 2^53 or more.
//!
//! The table is bounded. A request of a key that is no longer remembered needs a fence that is not smaller than the largest
//! forgotten one. Fences follow the clock of the store, so this rejects only leases that are older than the forgotten ones.
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
//! A service without HTTP, and with a smaller table:
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
//! assert_eq!(error.downcast::<StaleFence>()?.min(), 9);
//! # Ok(())
//! # }
//! ```
//!
//! # Cancellation
//!
//! A fence is recorded when the service is called, even if the future is dropped.

mod fences;
mod future;
mod layer;
mod rejection;
mod service;

pub use self::future::FenceFuture;
pub use self::layer::FenceLayer;
pub use self::rejection::{MissingFence, Rejection, StaleFence};
pub use self::service::Fence;
