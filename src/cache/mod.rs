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
//!
//! | option | default | meaning |
//! | --- | --- | --- |
//! | `fresh_for`, in [`Cache::new`] | | how long a value is served without a load |
//! | [`stale_for`](Cache::stale_for) | 0 | how long it is served after that, while it is loaded again |
//! | [`absent_for`](Cache::absent_for) | 10 s, at most `fresh_for` | how long the absence of a value is cached |
//! | [`jitter`](Cache::jitter) | 0.1 | by which part, at most, the time for which an entry is fresh is shortened at random |
//! | [`early_refresh`](Cache::early_refresh) | 1 | how early a fresh value is loaded again, as a multiple of the time that its last load took |
//! | [`soft_timeout`](Cache::soft_timeout) | 0 | how long a caller waits for a new value before it gets the stale one |
//! | [`error_for`](Cache::error_for) | 1 s | how long no load begins after a failed one |
//! | [`load_timeout`](Cache::load_timeout) | 30 s | how long a load may take |
//! | [`lease`](Cache::lease) | 2 s | how long a process may load without a renewal of its lease, before another process may load |
//! | [`exists_filter`](Cache::exists_filter) | none | an [`ExistsFilter`] with the keys that exist: other keys are absent without a load |
//! | [`max_len`](Cache::max_len) | 1 MiB | the largest encoded value |
//! | [`origin_limit`](Cache::origin_limit) | 16 | how many loads run in this process while the store fails |
//! | `local_tier` (feature `local-cache`) | none | how many values this process keeps too, and for how long |
//! | [`deadline`](Cache::deadline) | 100 ms | the deadline of a store call |
//! | [`circuit_breaker`](Cache::circuit_breaker) | 5 failures | when to stop calling a failing store |
//!
//! # Metrics
//!
//! With the feature `metrics`, a cache reports to the `metrics` facade. The label `cache` is its name; a key is never a label.
//!
//! | name | labels | counts |
//! | --- | --- | --- |
//! | `tollgate_cache_requests_total` | `cache`, `outcome`: `local` (fresh, from this process), `fresh`, `stale`, `loaded` (waited for a load), `excluded` (absent by the exists filter), `failed` | keys asked for by [`get_or_fill`](Cache::get_or_fill) and [`get_or_fill_all`](Cache::get_or_fill_all), and requests that a `CacheLayer` serves or rejects |
//! | `tollgate_cache_loads_total` | `cache`, `outcome`: `stored`, `not_stored` (uncached, too large, not encodable, or the store failed), `refused` (the lease had ended, for instance by an invalidation), `failed` | loads, one for each key of a batch |
//! | `tollgate_cache_load_seconds` | `cache` | how long they took, a histogram |
//! | `tollgate_cache_store_errors_total` | `cache` | store calls that failed or were late |
//! | `tollgate_cache_circuit_transitions_total` | `cache`, `state`: `open`, `closed` | circuits that opened and closed |
//!
//! See the [guide](crate::guide::cache) for stampedes, requests for missing keys and simultaneous expiry, and for failures and guarantees.

mod batch;
mod error;
pub mod exists_filter;
mod flights;
mod key;
mod load;
mod loaded;
mod loader;
#[cfg(feature = "local-cache")]
mod local;
mod lookup;
mod metrics;
mod options;
pub mod store;
mod store_client;
mod tags;
mod typed;

pub use self::error::CacheError;
pub use self::exists_filter::ExistsFilter;
#[cfg(feature = "http")]
pub(crate) use self::flights::LoadWaiter;
pub use self::key::CacheKey;
#[cfg(feature = "http")]
pub(crate) use self::load::Observed;
pub use self::loaded::Loaded;
#[cfg(feature = "http")]
pub(crate) use self::lookup::{Found, Lookup};
#[cfg(feature = "http")]
pub(crate) use self::metrics::Served;
pub use self::typed::Cache;
pub use crate::codec::{Codec, Json};
pub use crate::store::circuit::CircuitBreaker;
