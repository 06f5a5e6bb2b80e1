//! Idempotency for services that speak HTTP. The docs are in `crate::idempotency`.

mod answer;
mod body;
mod fingerprint;
mod future;
mod guard;
mod key;
mod layer;
mod reject;
mod run;
mod service;

pub use self::body::IdempotentBody;
pub use self::fingerprint::FingerprintedBody;
pub use self::future::ResponseFuture as IdempotencyFuture;
pub use self::layer::{IdempotencyLayer, Unscoped};
pub use self::service::Idempotency;
