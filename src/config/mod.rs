//! Rules in a file, in TOML, YAML or JSON, enforced on HTTP services and changed while the program runs.
//!
//! [`Rules`] say which requests are limited, by method and path, and how. [`RulesLayer`] enforces them as
//! [`RateLimitLayer`](crate::RateLimitLayer) would, and a [`RulesHandle`] changes them: by [hand](RulesHandle::reload), or by
//! following a [file](RulesHandle::watch).
//!
//! # Examples
//!
//! All that can be said, in TOML:
//!
//! ```
//! # fn main() -> Result<(), tollgate::config::RulesError> {
//! let rules = tollgate::config::Rules::from_toml(r#"
//! [policies.api]                         # a name: letters, digits, `-`, `_` and `.`
//! limits = [                             # all of them have to have room; at most 16
//!   { quota = 10, per = "1s", burst = 20, algorithm = "token_bucket" },
//!   { quota = 1000, per = "1h", algorithm = "fixed_window", name = "hourly" },
//! ]
//! mode = { percent = 10 }                # or "enforce", the default, or "shadow"
//! on_quota_change = "keep"               # the default; or "reset" or "proportional"
//!
//! [policies.address]
//! limits = [{ quota = 300, per = "1m", algorithm = "sliding_window" }]
//!
//! [policies.login]
//! limits = [{ quota = 5, per = "15m", algorithm = "sliding_log" }]
//!
//! [[rules]]
//! path = "/api/{*rest}"                  # all below /api/
//! methods = ["GET", "POST"]              # all methods if left out
//! policies = [                           # several, each with its key, and charged together or not at all
//!   { policy = "api", key = [{ header = "x-api-key" }, "client_ip"] },   # the address of those who have no key
//!   { policy = "address", key = "client_ip" },                           # since anybody can make up keys
//! ]
//!
//! [[rules]]
//! path = "/api/export/{id}"              # more specific, so it wins
//! policy = "address"                     # or one
//! key = "client_ip"
//! cost = 5                               # units per request; 1 if left out
//! wait = "2s"                            # for room, instead of being turned away at once
//! replicas = 3                           # that share the quota while each counts for itself ("local"); 1 if left out
//!
//! [[rules]]
//! path = "/login"
//! policy = "login"
//! key = "client_ip"
//! charge = "failures"                    # or "successes", or "always", the default
//! on_missing_key = "reject"              # the default; or "shared" or "pass"
//! on_store_error = "deny"                # or "local", the default, or "allow"
//! deadline = "50ms"                      # for a decision; 100ms if left out
//!
//! [[rules]]
//! path = "/api/health"
//! unlimited = true                       # passes uncounted
//!
//! [client_ip]                            # whom the key "client_ip" believes; nobody if left out
//! trusted = ["10.0.0.0/8", "2001:db8::1"]  # or trusted_hops = 2, which has a risk
//! header = "x-forwarded-for"             # the default; or "forwarded", or a header that holds one address
//! on_unreadable = "peer"                 # the default; or "reject"
//! ipv6_prefix = 64                       # the default
//! "#)?;
//!
//! assert_eq!(rules.len(), 4);
//! let policies = rules.policies_for(&http::Method::GET, "/api/orders");
//! assert_eq!(policies.iter().map(|policy| policy.name()).collect::<Vec<_>>(), ["api", "address"]);
//! # Ok(())
//! # }
//! ```
//!
//! The same file in front of an axum router, followed while the program runs:
//!
//! ```no_run
//! use axum::{Router, routing::get};
//! use tollgate::config::{Rules, RulesLayer};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
//! let backend = tollgate::connect("redis://127.0.0.1/").await?;
//! let layer = RulesLayer::new(backend, Rules::from_path("rules.toml")?);
//! let _watch = layer.handle().watch("rules.toml"); // until it is dropped
//! let app: Router = Router::new().route("/api/{id}", get(async || "hello")).layer(layer);
//! # drop(app);
//! # Ok(())
//! # }
//! ```
//!
//! # The file
//!
//! YAML and JSON have the same fields as TOML, and none that are not listed here.
//!
//! | field | says |
//! | --- | --- |
//! | `policies.<name>` | a [`Policy`](crate::Policy); policies of the same name, with limits of the same algorithms and windows in the same order, share their counts, also across reloads and processes |
//! | `policies.<name>.limits` | a list of limits |
//! | `policies.<name>.mode` | `enforce`, `shadow` or `{ percent = 0..=100 }`: see [`Mode`](crate::rate_limit::Mode) |
//! | `policies.<name>.on_quota_change` | `keep`, `reset` or `proportional`: see [`QuotaChange`](crate::rate_limit::QuotaChange) |
//! | `limits[].quota` | units; 0 denies everything, also with a `burst` |
//! | `limits[].per` | the window, a time |
//! | `limits[].algorithm` | `token_bucket`, `fixed_window`, `sliding_window` or `sliding_log`: see [`Quota`](crate::Quota); there is no default |
//! | `limits[].burst` | the size of a token bucket; the quota if left out |
//! | `limits[].name` | what clients read: see [`Policy::named`](crate::Policy::named) |
//! | `rules[].path` | a pattern: `/users/{id}` for one segment, `/files/{*rest}` for at least one; at most 25 parameters for a segment, and 1,024 bytes |
//! | `rules[].methods` | a list of methods; all if left out |
//! | `rules[].policy`, `rules[].key` | what counts the requests, and for whom |
//! | `rules[].policies` | in their place a list of tables with `policy` and `key` each: see [`RateLimitLayer::and`](crate::RateLimitLayer::and) |
//! | `rules[].unlimited` | in their place `true`: the requests pass uncounted |
//! | `rules[].cost` | units per request, 1 or more |
//! | `rules[].charge` | which answers are charged: `always`, `failures` (a status of 400 and above) or `successes`; see [`http`](crate::http::failures), and where the answer is one of gRPC, with its feature, the status of the call counts, as in `grpc::failures` |
//! | `rules[].on_missing_key` | `reject`, `shared` or `pass`: for each of the keys, see [`OnMissingKey`](crate::OnMissingKey); not where every request has a key, as `global` is |
//! | `rules[].on_store_error` | `local`, `allow` or `deny`: see [`OnStoreError`](crate::OnStoreError) |
//! | `rules[].replicas` | see [`RateLimitLayer::replicas`](crate::RateLimitLayer::replicas); not beside another `on_store_error` than `local` |
//! | `rules[].deadline` | a time: see [`RateLimitLayer::deadline`](crate::RateLimitLayer::deadline) |
//! | `rules[].wait` | a time that requests may wait for room, 1,000 of each rule at once: see [`RateLimitLayer::wait`](crate::RateLimitLayer::wait) |
//! | `client_ip.trusted` | a list of networks and addresses, but not of all there are: see [`ClientIp`](crate::http::ClientIp) |
//! | `client_ip.trusted_hops` | in its place, how many proxies are trusted: see [`ClientIp::trusting_hops`](crate::http::ClientIp::trusting_hops) for the risk |
//! | `client_ip.header` | `x-forwarded-for`, `forwarded`, or the name of a header that holds [one address](crate::http::ClientIp::single_header); `cloudfront-viewer-address` holds a port, too |
//! | `client_ip.on_unreadable` | `peer` or `reject`: see [`OnUnreadable`](crate::http::OnUnreadable) |
//! | `client_ip.ipv6_prefix` | see [`ClientIp::ipv6_prefix`](crate::http::ClientIp::ipv6_prefix) |
//!
//! A time is text with units, the larger ones first: `250ms`, `1s`, `15m`, `1h30m`, `1d`. A key is `global`, `peer_ip`,
//! `client_ip`, [`bearer_token`](crate::http::bearer_token), [`basic_user`](crate::http::basic_user), `{ header = "<name>" }`, or a list of
//! these of which the first that a request has counts. It is never left
//! out, since everybody would share one quota then. A header counts what the client [claims](crate::http::header): unless the layer is behind
//! whatever checks it, let the address count as well, as above.
//!
//! # Which rule applies
//!
//! Of the rules that cover the method of a request and whose pattern matches its path, the one with the most specific path:
//! text goes before a parameter, and before the rest of a path. (A parameter and the rest of a path in the same place, as in `/users/{id}` and
//! `/users/{*rest}`, or two parameters of other names, are refused for the same method.) Of two rules with the same path, the one that names
//! the method. A rule for some methods takes nothing away from less specific rules for the others. A rule that names `GET`
//! covers `HEAD` too, unless another rule of the same path names it. A request that no rule matches passes
//! uncounted, and so does one with another path: `/api/{*rest}` matches neither `/api` nor `/api/`.
//!
//! The wildcards and parameters of other systems are refused, and the error has the right spelling. They would be text that no request has, and the
//! limit would be off. So are the signs of regular expressions that stand unescaped in no path: `[`, `]`, `\`, `^`, `|`, and `$` at the end.
//!
//! | written elsewhere | here |
//! | --- | --- |
//! | `/api/*`, `/api/**`, `/api/*rest`, `/api/.*` | `/api/{*rest}` |
//! | `/users/*/orders` | `/users/{name}/orders` |
//! | `/users/:id`, `/users/<id>`, `/users/{id:[0-9]+}` | `/users/{id}` |
//! | `/users/[0-9]+`, `/users/\d+$` | `/users/{id}` |
//! | `/(users\|groups)/all` | two rules, `/users/all` and `/groups/all` |
//! | the sign `*`, or a segment that begins with `:` or `<` | `%2A`, `%3A`, `%3C`, and so with the others: an escaped sign is text, and matches the sign in whatever way a request spells it |
//!
//! A path is the whole path of a request, never a prefix of it. The log has one warning with the rules that no request has matched in the
//! [first hour](Rules::UNMATCHED_AFTER) after they were loaded. This may be nothing: a rule for a rare request is among them.
//!
//! The path is that which the layer sees: without the prefix where it stands in a nested axum router. How it is spelled makes no difference
//! (RFC 3986, 6.2.2), in patterns as in requests: `/größe` matches `/gr%C3%B6%C3%9Fe`, which is what browsers send, and `/users/%6de` is
//! `/users/me`. `%2F` stays what it is, part of a segment, and so does `%25`, so that nothing is decoded twice. Case counts, and so do `.`, `..`
//! and empty segments.
//!
//! Routers do not agree on that: axum matches the path as it is spelled, and takes `/users/%6de` to the handler of `/users/{id}`. So a request
//! whose path finds one rule as it is spelled, and another in its usual spelling, is counted by both or, where one of the two is `unlimited` or
//! missing, by the other. It is charged the higher `cost`, the stricter of their settings for missing keys, failing stores, replicas and charges hold, and it
//! does not wait. Where a policy of the cheaper rule never admits the higher cost, such a spelling is turned away for good.
//!
//! A layer that changes paths has to stand outside of this one. If tower-http's `NormalizePathLayer` stands inside, `/orders/` finds no rule
//! here, passes uncounted, and is served as `/orders`. Let `NormalizePathLayer` wrap the service that `RulesLayer` has made. Axum's
//! `Router::layer` does not help, since it runs after the router has chosen a route.
//!
//! # Metrics
//!
//! With the feature `metrics` the [metrics of rate limits](crate::rate_limit#metrics) are those of rules, too, and there is one more:
//!
//! | name | labels | counts |
//! | --- | --- | --- |
//! | `tollgate_rules_unmatched_requests_total` | | requests that no rule matches, which pass uncounted; those of an `unlimited` rule are not among them |
//!
//! # When the store fails
//!
//! What happens then is the choice of each rule (`on_store_error`, `replicas`, `deadline`): a login can be closed while the rest falls back.
//! Whether the store is [asked at all](RulesLayer::circuit_breaker) is found out for all rules together, since it is one store: where requests
//! of one rule have failed often enough, those of the others do not wait for it either. A decision that takes longer than the deadline of its rule is
//! such a failure, so a rule whose deadline is shorter than the store is quick takes the store from all others. Rules count together, too, while
//! they count in this process.
//!
//! # What is refused
//!
//! Everything that is not known or makes no sense, with its place, before any of it is enforced: see [`RulesError`]. Files are
//! bounded, and so is what aliases in YAML may stand for. Rules are read from a regular file or a link to one: a directory, a FIFO, a socket
//! or a device is refused. A policy that no rule uses is a warning in the log, and so is
//! a `client_ip` where no rule has the key of that name. So is the header `authorization` as a key.
//!
//! # Changing the rules
//!
//! A change takes effect for all requests that arrive after it, as a whole, and drops none. Where there is something wrong with
//! the new rules the old ones stay. Counts and blocks are kept for policies whose limits have the same algorithms and windows, in the same order; a
//! policy that has other limits than before, or more of them, starts afresh: see [`QuotaChange`](crate::rate_limit::QuotaChange). Requests that
//! wait go on to wait under the old rules, in a line of their own. Which warnings about
//! [addresses](crate::http::ClientIp#what-is-logged) were given is forgotten.

mod charge;
mod error;
mod format;
mod future;
mod handle;
mod key;
mod layer;
mod model;
mod path;
mod pattern;
mod rules;
mod service;
mod tree;
mod usage;
mod watch;

pub use self::error::RulesError;
pub use self::future::ResponseFuture;
pub use self::handle::RulesHandle;
pub use self::layer::RulesLayer;
pub use self::rules::Rules;
pub use self::service::RulesService;
pub use self::watch::RulesWatch;
