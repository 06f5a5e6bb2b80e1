//! Idempotency for HTTP services. The documentation is in `crate::idempotency`.

mod body;
mod classify;
mod detach;
mod execution;
pub(in crate::http) mod fingerprint;
mod future;
pub(in crate::http) mod handler;
mod handler_outcome;
mod key;
mod layer;
pub(in crate::http) mod recorded_response;
mod responder;
mod service;
mod settings;
mod settle;
mod stream;

pub use self::body::IdempotentBody;
pub use self::fingerprint::FingerprintedBody;
pub use self::future::ResponseFuture as IdempotencyFuture;
pub use self::layer::{IdempotencyLayer, Unscoped};
pub use self::service::Idempotency;
