//! A filter of keys that exist, so that requests for other keys do not reach the origin.
//!
//! ```
//! use std::time::Duration;
//! use tollgate::{BoxError, Cache, ExistsFilter};
//! # use std::{pin::Pin, task::{Context, Poll}};
//! # struct Ids(std::vec::IntoIter<u64>);
//! # impl futures_core::Stream for Ids {
//! #     type Item = Result<u64, BoxError>;
//! #     fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> { Poll::Ready(self.0.next().map(Ok)) }
//! # }
//! # fn all_ids() -> Ids { Ids(vec![1, 2, 3].into_iter()) }
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> Result<(), BoxError> {
//! let backend = tollgate::connect("memory:").await?; // or "redis://127.0.0.1/"
//! let known = ExistsFilter::new(backend.clone(), "users", 1_000_000);
//! let users = Cache::<String>::new(backend, "users", Duration::from_secs(300)).exists_filter(&known);
//!
//! // Once, and then for instance every night: a stream of all ids in the database.
//! known.rebuild(all_ids()).await?;
//!
//! // Before you commit a new row:
//! known.add(4).await?;
//!
//! assert!(known.might_contain(4).await?);
//! assert!(!known.might_contain(99).await?);
//! let load = || async { Err::<String, _>(BoxError::from("the origin is not called")) };
//! assert!(users.get_or_fill(99, load).await?.is_none());
//! # Ok(())
//! # }
//! ```
//!
//! | option | default | meaning |
//! | --- | --- | --- |
//! | `capacity`, in [`ExistsFilter::new`] | | the number of keys for which the next rebuild makes room |
//! | [`error_rate`](ExistsFilter::error_rate) | 0.01 | the part of absent keys that are false positives when the filter has `capacity` keys |
//! | [`ttl`](ExistsFilter::ttl) | 30 days | how long the filter is kept after the last addition or rebuild |
//! | [`visible_within`](ExistsFilter::visible_within) | 10 s | the longest time from the addition of a key until a query finds its row |
//! | [`deadline`](ExistsFilter::deadline) | 100 ms | the deadline of a store call |
//! | [`circuit_breaker`](ExistsFilter::circuit_breaker) | after 5 failures | when tests of keys stop calling a failing store |
//! | [`local_copy`](ExistsFilter::local_copy) | none | the largest age of a copy in this process, which tests of keys then read |
//!
//! # Size and cost
//!
//! The filter is a split-block Bloom filter (Putze, Sanders and Singler, "Cache-, Hash- and Space-Efficient Bloom Filters", 2007; also in
//! Apache Impala and Parquet) in a plain Redis string. It needs no Redis module. A test of a key reads 32 bytes with one GETRANGE. About
//! twice per second, a process also reads which version of the filter is in use, with two or three more commands. An addition is one
//! script, for up to 128 keys.
//!
//! | error rate | bits for each key | a million keys | part of the bits that is set at the capacity |
//! | --- | --- | --- | --- |
//! | 0.05 | 7.2 | 0.9 MB | 0.67 |
//! | 0.01 | 10.5 | 1.3 MB | 0.53 |
//! | 0.001 | 16.9 | 2.1 MB | 0.38 |
//! | 0.0001 | 26.3 | 3.3 MB | 0.26 |
//!
//! A filter has at most 32 MiB, enough for 25 million keys with the default error rate; [`rebuild`](ExistsFilter::rebuild) refuses larger
//! ones. Split more keys over several filters, for instance by a hash. [`bytes`](ExistsFilter::bytes) computes the size. During a rebuild,
//! the store has both versions.
//!
//! A rebuild allocates the new version in steps of 1 MiB. In some of these steps Redis copies the whole string, and serves no other command
//! meanwhile. With Redis 7.0 on a busy machine with two cores, the longest step took 5 ms for 4 MiB, 25 ms for 16 MiB and 48 ms for 32 MiB.
//! So rebuild a filter of many MiB while there is little traffic, or split the keys.
//!
//! With more keys than its capacity, the filter still contains each of them, but it excludes fewer absent keys. It cannot forget a key: a
//! deleted row may still be contained until the next rebuild. If it has so many keys that its error rate is larger than
//! [`error_rate`](ExistsFilter::error_rate), each process logs one warning, which suggests a rebuild with a larger capacity.
//!
//! # What "absent" means
//!
//! A key that the filter excludes was not added to it since the last rebuild, and was not in the stream of that rebuild. The filter
//! excludes no key:
//!
//! * before the first rebuild is complete;
//! * after the `ttl` of the filter, if nothing was added meanwhile;
//! * if Redis has evicted the filter, or its data is damaged. The next rebuild repairs it. If the Redis key with the ids of its versions
//!   holds other data, additions and rebuilds fail until you delete that Redis key.
//!
//! A key that exists may be excluded if:
//!
//! * the row was visible before its [`add`](ExistsFilter::add), or `add` failed and the row was created all the same;
//! * a failover has lost the addition, or an operator has restored an older copy of the data. Rebuild the filter then;
//! * a row took longer than [`visible_within`](ExistsFilter::visible_within) after its addition to become visible, and a rebuild read the
//!   rows meanwhile. Run the query of a rebuild on the primary database: a replica may lag by more than that;
//! * this process has a [local copy](ExistsFilter::local_copy), and another process has added the key, or rebuilt the filter, less than
//!   `max_age` ago;
//! * another program has changed the bits.
//!
//! If Redis evicts only the Redis key with the ids of the versions, other processes may still use a version that additions do not find. A
//! process uses ids for at most one second, so additions and rebuilds that find no ids wait until 1.25 seconds after the first of them. The
//! Redis key then holds the time at which the ids were first missed, so that later additions do not wait.
//!
//! # Cancellation
//!
//! If you drop a future of `add`, the key may or may not have been added. An unfinished rebuild leaves the old filter in use, and its own
//! version expires after an hour. A filter with a local copy has at most one task, which ends with the last clone of the filter.
//!
//! # Metrics
//!
//! With the feature `metrics`. The label `filter` is the name of the filter.
//!
//! | name | labels | value |
//! | --- | --- | --- |
//! | `tollgate_exists_filter_fill_ratio` | `filter` | a gauge: the part of the bits that is set, from 0 to 1, read about twice per second while the filter is used |
//! | `tollgate_exists_filter_store_errors_total` | `filter` | store calls that failed or were late |
//! | `tollgate_exists_filter_circuit_transitions_total` | `filter`, `state`: `open`, `closed` | circuits that opened and closed |

mod error;
mod filter;
mod layout;
mod local_copy;
mod metrics;
mod rebuild;
mod settings;
mod sizing;
mod stats;
pub mod store;
mod store_client;

pub use self::error::ExistsFilterError;
pub use self::filter::ExistsFilter;
pub use self::stats::ExistsFilterStats;
