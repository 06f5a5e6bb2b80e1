//! tollgate
#![cfg_attr(docsrs, feature(doc_cfg))]

mod deadline;
mod error;
mod key;

pub mod backend;
#[cfg(feature = "grpc")]
pub mod grpc;
#[cfg(feature = "http")]
pub mod http;
pub mod rate_limit;
pub mod reject;

pub use self::backend::memory::MemoryBackend;
#[cfg(feature = "redis")]
pub use self::backend::redis::{RedisBackend, RedisOptions};
pub use self::backend::{AnyBackend, connect};
pub use self::error::{BoxError, ConfigError, ConnectError, StoreError};
pub use self::key::{Everyone, ExtractKey, IntoKey, Key, Or};
pub use self::rate_limit::{Limiter, OnMissingKey, OnStoreError, Policy, Quota, RateLimitLayer};
pub use self::reject::{AsError, AsResponse};
