//! A cache whose misses are loaded once, by all processes together.
//!
//! ```
//! use std::time::Duration;
//! use tollgate::{BoxError, Cache};
//!
//! async fn load(id: u64) -> Result<Option<String>, BoxError> {
//!     Ok((id == 1).then(|| "Alice".to_owned())) // from the database
//! }
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), BoxError> {
//! let backend = tollgate::connect("memory:").await?; // or "redis://127.0.0.1/"
//! let users = Cache::<String>::new(backend, "users", Duration::from_secs(300)).stale_for(Duration::from_secs(3_600));
//!
//! let alice = users.get_or_fill("1", || load(1)).await?;
//! assert_eq!(alice.as_deref().map(String::as_str), Some("Alice"));
//! assert!(users.get_or_fill("2", || load(2)).await?.is_none());
//! users.invalidate("1").await?;
//! # Ok(())
//! # }
//! ```

mod error;
mod fill;
mod flights;
mod key;
mod loaded;
mod options;
pub mod store;
mod store_client;
mod typed;

pub use self::error::CacheError;
pub use self::key::CacheKey;
pub use self::loaded::Loaded;
pub use self::typed::Cache;
pub use crate::codec::{Codec, Json};
pub use crate::store::circuit::CircuitBreaker;
