//! Idempotency for HTTP services. The documentation is in `crate::idempotency`.

mod body;
mod classify;
mod execution;
mod fingerprint;
mod future;
mod handler;
mod key;
mod layer;
mod recorded_response;
mod responder;
mod service;
mod settle;
mod stream;

pub use self::body::IdempotentBody;
pub use self::fingerprint::FingerprintedBody;
pub use self::future::ResponseFuture as IdempotencyFuture;
pub use self::layer::{IdempotencyLayer, Unscoped};
pub use self::service::Idempotency;
