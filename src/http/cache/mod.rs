//! Responses of HTTP services in a cache. The documentation is at [`CacheLayer`].

mod body;
mod cache_control;
mod future;
mod layer;
mod origin;
mod policy;
mod request;
mod responder;
mod serve;
mod service;
mod settings;
mod status;
mod stored;
mod tee;
mod uncached;
mod vary;

pub use self::body::CachedBody;
pub use self::future::ResponseFuture as CacheFuture;
pub use self::layer::CacheLayer;
pub use self::service::CacheService;
pub use crate::key::Undecided;
