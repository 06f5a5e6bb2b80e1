//! Rate limits for HTTP services from a TOML, YAML or JSON file, which can be reloaded at runtime.
//!
//! [`Rules`] define which requests are limited, by method and path, and how. [`RulesLayer`] enforces them like a
//! [`RateLimitLayer`](crate::RateLimitLayer). A [`RulesHandle`] replaces them: either you call [`reload`](RulesHandle::reload), or it
//! [watches](RulesHandle::watch) the file.
//!
//! # Examples
//!
//! All options, in TOML:
//!
//! ```
//! # fn main() -> Result<(), tollgate::config::RulesError> {
//! let rules = tollgate::config::Rules::from_toml(r#"
//! [policies.api]                         # a name: letters, digits, `-`, `_` and `.`
//! limits = [                             # a request needs room in all of them; at most 16
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
//! path = "/api/{*rest}"                  # all paths below /api/
//! methods = ["GET", "POST"]              # defaults to all methods
//! policies = [                           # several policies, each with its key; a request is charged to all or none
//!   { policy = "api", key = [{ header = "x-api-key" }, "client_ip"] },   # without the header, the address
//!   { policy = "address", key = "client_ip" },                           # because a client can invent API keys
//! ]
//!
//! [[rules]]
//! path = "/api/export/{id}"              # more specific, so it takes precedence
//! policy = "address"                     # a single policy
//! key = "client_ip"
//! cost = 5                               # units per request; defaults to 1
//! wait = "2s"                            # how long a request may wait for room; by default it is rejected at once
//! replicas = 3                           # processes that share the quota while the store fails ("local"); defaults to 1
//!
//! [[rules]]
//! path = "/login"
//! policy = "login"
//! key = "client_ip"
//! charge = "failures"                    # or "successes", or "always", the default
//! on_missing_key = "reject"              # the default; or "pass"
//! on_store_error = "deny"                # or "local", the default, or "allow"
//! deadline = "50ms"                      # for a decision; defaults to 100ms
//!
//! [[rules]]
//! path = "/api/health"
//! unlimited = true                       # passes uncounted
//!
//! [client_ip]                            # the proxies that the key "client_ip" trusts; defaults to none
//! trusted = ["10.0.0.0/8", "2001:db8::1"]  # or trusted_hops = 2, which has a risk
//! header = "x-forwarded-for"             # the default; or "forwarded", or a header that holds one address
//! on_unreadable = "proxy"                # the default; or "reject"
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
//! The same file in front of an axum router, reloaded when it changes:
//!
//! ```no_run
//! use axum::{Router, routing::get};
//! use tollgate::config::{Rules, RulesLayer};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
//! let backend = tollgate::connect("redis://127.0.0.1/").await?;
//! let layer = RulesLayer::new(backend, Rules::from_path("rules.toml")?);
//! let _watch = layer.handle().watch("rules.toml"); // watches until it is dropped
//! let app: Router = Router::new().route("/api/{id}", get(async || "hello")).layer(layer);
//! # drop(app);
//! # Ok(())
//! # }
//! ```
//!
//! # The file
//!
//! YAML and JSON have the same fields as TOML. Unknown fields are refused.
//!
//! | field | value |
//! | --- | --- |
//! | `policies.<name>` | a [`Policy`](crate::Policy); policies with the same name, and with limits of the same algorithms and windows in the same order, share their counts, also across reloads and processes |
//! | `policies.<name>.limits` | a list of limits |
//! | `policies.<name>.mode` | `enforce`, `shadow` or `{ percent = 0..=100 }`: see [`Mode`](crate::rate_limit::Mode) |
//! | `policies.<name>.on_quota_change` | `keep`, `reset` or `proportional`: see [`QuotaChange`](crate::rate_limit::QuotaChange) |
//! | `limits[].quota` | units, at most 2^53 - 1; 0 denies everything, also with a `burst` |
//! | `limits[].per` | the window, a time |
//! | `limits[].algorithm` | `token_bucket`, `fixed_window`, `sliding_window` or `sliding_log`: see [`Quota`](crate::Quota); there is no default |
//! | `limits[].burst` | the size of a token bucket; defaults to the quota |
//! | `limits[].name` | the name that clients read: see [`Policy::named`](crate::Policy::named) |
//! | `rules[].path` | a pattern: `/users/{id}` for one segment, `/files/{*rest}` for at least one; at most 25 parameters like `{id}`, and 1,024 bytes |
//! | `rules[].methods` | a list of methods; defaults to all |
//! | `rules[].policy`, `rules[].key` | the policy and the key of a request |
//! | `rules[].policies` | instead of `policy` and `key`, a list of tables with a `policy` and a `key` each: see [`RateLimitLayer::and`](crate::RateLimitLayer::and) |
//! | `rules[].unlimited` | instead of `policy` and `key`, `true`: the requests pass uncounted |
//! | `rules[].cost` | units per request, 1 or more |
//! | `rules[].charge` | which responses are charged: `always`, `failures` (a status of 400 or above) or `successes`; see [`http::failures`](crate::http::failures). With the feature `grpc`, a gRPC response is charged by the status of the call, as with `grpc::failures` |
//! | `rules[].on_missing_key` | `reject` or `pass`, for each of the keys: see [`OnMissingKey`](crate::OnMissingKey); not allowed if every request has a key, as with `global` |
//! | `rules[].on_store_error` | `local`, `allow` or `deny`: see [`RateLimitFallback`](crate::RateLimitFallback) |
//! | `rules[].replicas` | see [`RateLimitLayer::replicas`](crate::RateLimitLayer::replicas); only with the `on_store_error` `local` |
//! | `rules[].deadline` | a time: see [`RateLimitLayer::deadline`](crate::RateLimitLayer::deadline) |
//! | `rules[].wait` | how long a request may wait for room, at most 1,000 requests of a rule at once: see [`RateLimitLayer::wait`](crate::RateLimitLayer::wait) |
//! | `client_ip.trusted` | a list of networks and addresses, but not of all addresses: see [`ClientIp`](crate::http::ClientIp) |
//! | `client_ip.trusted_hops` | instead of `trusted`, the number of trusted proxies: see [`ClientIp::trusting_hops`](crate::http::ClientIp::trusting_hops) for the risk |
//! | `client_ip.header` | `x-forwarded-for`, `forwarded`, or the name of a header that holds [one address](crate::http::ClientIp::single_header); `cloudfront-viewer-address` holds a port, too |
//! | `client_ip.on_unreadable` | `proxy` or `reject`: see [`OnUnreadable`](crate::http::OnUnreadable) |
//! | `client_ip.ipv6_prefix` | see [`ClientIp::ipv6_prefix`](crate::http::ClientIp::ipv6_prefix) |
//!
//! A time is text with units, the larger ones first: `250ms`, `1s`, `15m`, `1h30m`, `1d`.
//!
//! A key is `global`, `peer_ip`, `client_ip`, [`bearer_token`](crate::http::bearer_token), [`basic_user`](crate::http::basic_user) or
//! `{ header = "<name>" }`, or a list of these. From a list, the first key that a request has is used. A key is required, because without
//! one all clients would share one quota. A header is the client's [claim](crate::http::header): unless an outer layer checks it, add a
//! policy for the address, as above.
//!
//! # Which rule applies
//!
//! A rule matches a request if it covers the method and its pattern matches the path. These steps choose among the rules that match:
//!
//! * The most specific path takes precedence: literal text is more specific than a parameter or the rest of a path. Two rules for the same
//!   method are refused if one has a parameter where the other has the rest of a path, as in `/users/{id}` and `/users/{*rest}`. They are
//!   also refused if their parameters at the same position have different names.
//! * If two rules have the same path, the rule that lists the method takes precedence.
//! * A rule for some methods does not affect less specific rules for the other methods.
//! * A rule that lists `GET` also covers `HEAD`, unless another rule with the same path lists `HEAD`.
//!
//! A request that no rule matches passes uncounted. `/api/{*rest}` matches neither `/api` nor `/api/`.
//!
//! The wildcards and parameters of other systems are refused, and the error suggests the right pattern. They would be literal text that no
//! request contains, so the limit would not apply. Characters of regular expressions that no path contains unescaped are refused, too: `[`,
//! `]`, `\`, `^`, `|`, and `$` at the end.
//!
//! | elsewhere | here |
//! | --- | --- |
//! | `/api/*`, `/api/**`, `/api/*rest`, `/api/.*` | `/api/{*rest}` |
//! | `/users/*/orders` | `/users/{name}/orders` |
//! | `/users/:id`, `/users/<id>`, `/users/{id:[0-9]+}` | `/users/{id}` |
//! | `/users/[0-9]+`, `/users/\d+$` | `/users/{id}` |
//! | `/(users\|groups)/all` | two rules, `/users/all` and `/groups/all` |
//! | the character `*`, or a segment that begins with `:` or `<` | `%2A`, `%3A`, `%3C`, and so on: an escaped character is text, and matches the character in any spelling |
//!
//! A pattern matches the whole path of a request, never a prefix. One warning lists the rules that no request has matched in the
//! [first hour](Rules::UNMATCHED_AFTER) after they were loaded. A rule for rare requests may be listed although it is correct.
//!
//! The layer matches the path that it sees, which has no prefix in a nested axum router. Patterns and requests are normalized (RFC 3986,
//! 6.2.2):
//! `/größe` matches `/gr%C3%B6%C3%9Fe`, which browsers send, and `/users/%6de` is `/users/me`. `%2F` stays part of a segment, and `%25`
//! stays escaped, so nothing is decoded twice. Case, `.`, `..` and empty segments are significant.
//!
//! Routers do not agree on normalization: axum does not decode the path, and routes `/users/%6de` to the handler of `/users/{id}`. So a
//! path can match one rule before normalization and another one after it. Then the policies of both rules apply. If one of the two is
//! `unlimited` or missing, only the other applies. The request costs the higher `cost` and does not wait. The stricter settings apply for
//! missing keys, store errors, replicas and charges. If a policy of the cheaper rule can never admit the higher cost, such a spelling is
//! always rejected.
//!
//! A layer that changes paths must be outside this one. If tower-http's `NormalizePathLayer` is inside, `/orders/` matches no rule, passes
//! uncounted, and is served as `/orders`. So wrap the service of `RulesLayer` in `NormalizePathLayer`. Axum's `Router::layer` does not help,
//! because it runs after routing.
//!
//! # Metrics
//!
//! With the feature `metrics`, rules have the [metrics of rate limits](crate::rate_limit#metrics) and one more:
//!
//! | name | labels | counts |
//! | --- | --- | --- |
//! | `tollgate_rules_unmatched_requests_total` | | requests that no rule matches, so they pass uncounted; not those of `unlimited` rules |
//!
//! # When the store fails
//!
//! Each rule has its own `on_store_error`, `replicas` and `deadline`. For example, a login can be denied while other requests fall back to
//! local counts.
//!
//! All rules share one [circuit breaker](RulesLayer::circuit_breaker), because they share one store: if enough requests of one rule fail,
//! the other rules stop calling the store, too. A decision that takes longer than the deadline of its rule counts as a failure. So a rule
//! whose deadline is shorter than the latency of the store can open the circuit for all rules. The rules also share their local counts.
//!
//! # Validation
//!
//! Unknown fields and contradictory values are refused, with their position, before any rule is enforced: see [`RulesError`]. The size of a
//! file and of the data that YAML aliases expand to is limited. Rules are read from a regular file or a link to one, and not from a
//! directory, a FIFO, a socket or a device.
//!
//! These are logged as warnings: a policy that no rule uses, a `client_ip` table if no rule has that key, and the header `authorization` as
//! a key.
//!
//! # Reloading
//!
//! A reload replaces all rules at once for later requests, and drops no request. If the new rules are invalid, the old ones stay. A policy
//! keeps its counts and blocks if its limits have the same algorithms and windows in the same order. Otherwise it starts with new counts:
//! see [`QuotaChange`](crate::rate_limit::QuotaChange). Waiting requests stay under the old rules and in the old wait queues. Warnings
//! about [addresses](crate::http::ClientIp#logs) are logged anew.

mod blocking;
mod charge;
mod current_rules;
mod error;
mod format;
mod future;
mod handle;
mod key;
mod layer;
mod model;
mod path;
mod pattern;
mod rule_matches;
mod rules;
mod service;
mod tree;
mod watch;

pub use self::error::RulesError;
pub use self::future::ResponseFuture;
pub use self::handle::RulesHandle;
pub use self::layer::RulesLayer;
pub use self::rules::Rules;
pub use self::service::RulesService;
pub use self::watch::RulesWatch;
