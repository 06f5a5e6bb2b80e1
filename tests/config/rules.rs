//! Rules in files: their meaning, refused files, enforcement, and reloads while requests are served.

use std::convert::Infallible;
use std::fs;
use std::future::ready;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::routing::get;
use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use proptest::prelude::*;
use tollgate::config::{Rules, RulesError, RulesHandle, RulesLayer};
use tollgate::grpc::GrpcResponder;
use tollgate::http::PeerAddr;
use tollgate::rate_limit::store::RateLimitStore;
use tollgate::rate_limit::{CircuitBreaker, Decision, Mode, QuotaChange, RateLimitHandle, Receipt};
use tollgate::testing::{Failure, FaultStore, Verb};
use tollgate::{Key, MemoryBackend, Policy, Quota, StoreError};
use tower::{Layer, Service, ServiceExt, service_fn};

// The meaning of files.

#[test]
fn all_formats_are_equivalent() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/config");
    let [toml, yaml, json] =
        ["toml", "yaml", "json"].map(|format| Rules::from_path(folder.join("rules").with_extension(format)).unwrap());
    assert_eq!(toml, yaml);
    assert_eq!(yaml, json);
    assert_ne!(toml, simple("fixed_window", 1));

    let policies: Vec<Policy> = toml.policies_for(&Method::POST, "/api/x").into_iter().cloned().collect();
    let api = Policy::new("api", Quota::per_second(10).burst(20).unwrap().token_bucket())
        .limit(Quota::per_hour(1_000).fixed_window())
        .named("hourly")
        .mode(Mode::Shadow)
        .on_quota_change(QuotaChange::Proportional);
    assert_eq!(policies, [api, Policy::new("total", Quota::per_minute(5_000).sliding_window())]);
    let login = Policy::new("login", Quota::new(5, Duration::from_secs(900)).unwrap().sliding_log().unwrap());
    assert_eq!(toml.policies_for(&Method::POST, "/login"), [&login.mode(Mode::Percent(10))]);
    assert_eq!(toml.policies_for(&Method::GET, "/api/health"), [] as [&Policy; 0]);
}

#[test]
fn path_with_more_parameters_than_the_router_names_is_refused() {
    let rules = |parameters: usize, end: &str| {
        let path: String = (0..parameters).map(|i| format!("/{{p{i}}}")).collect();
        Rules::from_toml(&format!(
            r#"
            policies.all.limits = [{LIMIT}]
            rules = [{{ path = "{path}{end}", policy = "all", key = "global" }}]
            "#
        ))
    };
    for (end, requested) in [("", ""), ("/{*rest}", "/x/x"), ("/{{text}}", "/{text}")] {
        let path = "/x".repeat(25) + requested;
        assert_eq!(names(&rules(25, end).unwrap(), &path), ["all"], "{path}");
        let error = rules(26, end).unwrap_err();
        assert_eq!(error.field(), Some("rules[0].path"), "{error}");
        assert!(error.to_string().contains("a path has at most 25 parameters"), "{error}");
    }
}

#[test]
fn most_specific_path_for_the_method_wins() {
    let rules = rules_of(&[
        ("/{*rest}", None, "all"),
        ("/", None, "root"),
        ("/users/{id}", None, "user"),
        ("/users/me", None, "me"),
        ("/users/me", Some("DELETE"), "me_delete"),
        ("/login", Some("POST"), "login"),
        ("/files/{name}", Some("GET"), "file"),
        ("/files/{name}", Some("HEAD"), "file_head"),
        ("/docs/{name}", Some("GET"), "doc"),
    ]);
    let cases = [
        ("GET", "/", "root"),
        ("GET", "/x/y", "all"),
        ("GET", "/users/7", "user"),
        ("GET", "/users/me", "me"),
        ("DELETE", "/users/me", "me_delete"),
        ("DELETE", "/users/7", "user"),
        ("POST", "/login", "login"),
        // A rule for one method does not affect the other methods.
        ("GET", "/login", "all"),
        ("PROPFIND", "/login", "all"),
        // Servers answer HEAD with the handler for GET.
        ("HEAD", "/docs/x", "doc"),
        ("HEAD", "/files/x", "file_head"),
        ("HEAD", "/users/me", "me"),
        ("POST", "/docs/x", "all"),
    ];
    for (method, path, policy) in cases {
        let found = rules.policies_for(&method.parse().unwrap(), path);
        let names: Vec<&str> = found.iter().map(|policy| policy.name()).collect();
        assert_eq!(names, [policy], "{method} {path}");
    }
    let none = rules_of(&[("/api/{*rest}", Some("GET"), "api")]);
    for (method, path) in [("POST", "/api/x"), ("GET", "/api"), ("GET", "/API/x"), ("GET", "*"), ("GET", "")] {
        assert!(none.policies_for(&method.parse().unwrap(), path).is_empty(), "{method} {path}");
    }
}

/// Routers decode the paths that they pass to handlers. Regression: one escaped letter bypassed the more specific rule. Characters outside
/// of ASCII are always sent escaped.
#[tokio::test]
async fn path_matches_in_any_encoding() {
    let rules = rules_of(&[
        ("/export/pdf", None, "pdf"),
        ("/export/{kind}", None, "any"),
        ("/größe/{*rest}", None, "size"),
        ("/caf%c3%a9", Some("GET"), "coffee"),
        ("/%61bout", None, "about"),
    ]);
    let cases: [(&str, &[&str]); 14] = [
        ("/export/pdf", &["pdf"]),
        // A router that does not decode paths calls the other handler, so both rules apply.
        ("/export/%70df", &["pdf", "any"]),
        ("/%65xport/pd%66", &["pdf"]),
        ("/export/%50df", &["any"]),
        ("/export/a%2Fpdf", &["any"]),
        ("/export/%2570df", &["any"]),
        ("/export%2Fpdf", &[]),
        ("/gr%C3%B6%C3%9Fe/1", &["size"]),
        ("/gr%c3%b6%c3%9fe/1", &["size"]),
        ("/größe/1", &["size"]),
        ("/caf%C3%A9", &["coffee"]),
        ("/café", &["coffee"]),
        ("/about", &["about"]),
        ("/%", &[]),
    ];
    for (path, policies) in cases {
        assert_eq!(names(&rules, path), policies, "{path}");
    }
    let twice = RulesError::message(
        &Rules::from_toml(&format!(
            "[policies.a]\nlimits = [{LIMIT}]\n\
         [[rules]]\npath = \"/a\"\npolicy = \"a\"\nkey = \"global\"\n\
         [[rules]]\npath = \"/%61\"\npolicy = \"a\"\nkey = \"global\"\n"
        ))
        .unwrap_err(),
    )
    .to_owned();
    assert!(twice.contains("rules[0] has the same path"), "{twice}");

    let service = RulesLayer::new(MemoryBackend::new(), rules).layer(hello());
    for (path, left) in [("/export/pdf", r#""pdf""#), ("/export/%70df", r#""pdf""#)] {
        let answer = service.clone().oneshot(Request::get(path).body(()).unwrap()).await.unwrap();
        assert!(answer.headers()["ratelimit-policy"].to_str().unwrap().starts_with(left), "{path}");
    }
}

/// The axum router matches undecoded paths. Regression: one escaped letter combined the handler of one rule with the quota of another.
#[tokio::test]
async fn no_encoding_selects_a_laxer_rule() {
    let rules = Rules::from_toml(
        r#"
        [policies.all]
        limits = [{ quota = 3, per = "1h", algorithm = "fixed_window" }]
        [policies.user]
        limits = [{ quota = 2, per = "1h", algorithm = "fixed_window" }]
        [policies.me]
        limits = [{ quota = 100, per = "1h", algorithm = "fixed_window" }]
        [[rules]]
        path = "/api/{*rest}"
        policy = "all"
        key = "global"
        cost = 2
        [[rules]]
        path = "/api/health"
        unlimited = true
        [[rules]]
        path = "/api/export"
        policies = [{ policy = "me", key = "global" }, { policy = "all", key = "global" }]
        [[rules]]
        path = "/users/{name}"
        policy = "user"
        key = "global"
        on_store_error = "deny"
        [[rules]]
        path = "/users/me"
        policy = "me"
        key = "peer_ip"
        on_missing_key = "pass"
        on_store_error = "allow"
        wait = "1s"
        charge = "failures"
        "#,
    )
    .unwrap();
    assert_eq!(names(&rules, "/api/%68ealth"), ["all"]);
    assert_eq!(names(&rules, "/users/%6de"), ["me", "user"]);
    assert_eq!(names(&rules, "/api/%65xport"), ["me", "all"]);

    let app = || {
        let route = |name: &'static str| get(async move || name);
        let router = Router::new().route("/api/health", route("health")).route("/api/{id}", route("id"));
        let router = router.route("/users/me", route("me")).route("/users/{name}", route("name"));
        router.layer(RulesLayer::new(MemoryBackend::new(), rules.clone()))
    };
    let ask = async |app: &Router, path: &str| {
        let request = Request::get(path).extension(PeerAddr(([192, 0, 2, 1], 4711).into())).body(Body::empty());
        let answer = app.clone().oneshot(request.unwrap()).await.unwrap();
        let status = answer.status().as_u16();
        (status, String::from_utf8(answer.into_body().collect().await.unwrap().to_bytes().into()).unwrap())
    };
    let app_of_health = app();
    for _ in 0..5 {
        assert_eq!(ask(&app_of_health, "/api/health").await, (200, "health".into()));
    }
    assert_eq!(ask(&app_of_health, "/api/%68ealth").await, (200, "id".into()));
    assert_eq!(ask(&app_of_health, "/api/%68ealth").await.0, 429);

    // Charged once, at the higher cost.
    let app_of_export = app();
    assert_eq!(ask(&app_of_export, "/api/%65xport").await, (200, "id".into()));
    assert_eq!(ask(&app_of_export, "/api/%65xport").await.0, 429);
    assert_eq!(ask(&app_of_export, "/api/1").await.0, 429);
    let app_of_users = app();
    for _ in 0..2 {
        assert_eq!(ask(&app_of_users, "/users/%6de").await, (200, "name".into()));
    }
    assert_eq!(ask(&app_of_users, "/users/7").await.0, 429, "the quota for other users is used up");
    assert_eq!(ask(&app_of_users, "/users/%6de").await.0, 429);
    assert_eq!(ask(&app_of_users, "/users/me").await, (200, "me".into()));

    // The stricter settings of the two rules apply.
    let without_peer = Request::get("/users/%6de").body(Body::empty()).unwrap();
    assert_eq!(app().oneshot(without_peer).await.unwrap().status(), StatusCode::BAD_REQUEST);
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().fail(Failure::Unavailable);
    let service = RulesLayer::new(store, rules.clone()).layer(hello());
    for (path, expected) in [("/users/me", 200), ("/users/%6de", 503), ("/users/7", 503)] {
        let peer = PeerAddr(([192, 0, 2, 1], 4711).into());
        let request = Request::get(path).extension(peer).body(()).unwrap();
        assert_eq!(service.clone().oneshot(request).await.unwrap().status(), expected, "{path}");
    }
}

// Refused files.

/// A TOML file, the text of its error, the field, and the line.
type Bad = (&'static str, &'static str, &'static str, usize);

const LIMIT: &str = r#"{ quota = 1, per = "1s", algorithm = "fixed_window" }"#;

#[rustfmt::skip]
const BAD: &[Bad] = &[
    // The document.
    ("", "the file is empty", "", 0),
    (" \n\t\n", "the file is empty", "", 0),
    ("# nothing\n", "there are no rules", "", 1),
    ("[policies.a]\nlimits = [LIMIT]\n", "there are no rules", "", 1),
    ("\nrules = [", "unclosed array", "", 2),
    ("x = 1\n", "unknown field `x`, expected one of `policies`, `rules`, `client_ip`", "x", 1),
    ("POLICY\n[policies.a]\nlimits = []\nRULE", "duplicate key", "", 3),
    ("rules = 7", "invalid type: integer `7`, expected a sequence", "rules", 1),
    // Policies.
    ("[policies.a]\nRULE", "missing field `limits`", "policies.a", 1),
    ("[policies.a]\nlimits = []\nRULE", "a policy needs at least one limit", "policies.a.limits", 2),
    ("[policies.a]\nlimits = [MANY]\nRULE", "a policy takes at most 16 limits", "policies.a.limits", 2),
    ("[policies.a]\nmood = 1\nlimits = [LIMIT]\nRULE", "unknown field `mood`", "policies.a.mood", 2),
    ("[policies.a]\nlimits = [{ quota = 1, per = \"1s\" }]\nRULE", "missing field `algorithm`", "policies.a.limits[0]", 2),
    ("[policies.a]\nlimits = [\n  LIMIT,\n  { quota = 1, per = \"1s\", algorithm = \"magic\" },\n]\nRULE", "unknown variant `magic`, expected one of `token_bucket`", "policies.a.limits[1].algorithm", 4),
    ("[policies.a]\nlimits = [{ quota = 1, per = \"1s\", algorithm = \"fixed_window\", burst = 2 }]\nRULE", "only a token bucket takes a burst", "policies.a.limits[0].burst", 2),
    ("[policies.a]\nlimits = [{ quota = 1, per = \"1s\", algorithm = \"token_bucket\", burst = 0 }]\nRULE", "a burst of 0 denies every request; if you want this, set a quota of 0", "policies.a.limits[0].burst", 2),
    ("[policies.a]\nlimits = [{ quota = 9007199254740992, per = \"1s\", algorithm = \"fixed_window\" }]\nRULE", "9007199254740992 units cannot be counted exactly; a quota or a burst is at most 9007199254740991", "policies.a.limits[0].quota", 2),
    ("[policies.a]\nlimits = [{ quota = 1, per = \"1s\", algorithm = \"token_bucket\", burst = 9007199254740992 }]\nRULE", "9007199254740992 units cannot be counted exactly; a quota or a burst is at most 9007199254740991", "policies.a.limits[0].burst", 2),
    ("[policies.a]\nlimits = [{ quota = 1, per = \"1d\", algorithm = \"token_bucket\", burst = 4000 }]\nRULE", "a bucket of 4000 takes longer than 3660 days to fill", "policies.a.limits[0].burst", 2),
    ("[policies.a]\nlimits = [{ quota = 1, per = \"5ms\", algorithm = \"fixed_window\" }]\nRULE", "a window of 5ms is not between 10ms and 3660 days", "policies.a.limits[0].per", 2),
    ("[policies.a]\nlimits = [{ quota = 1, per = \"3661d\", algorithm = \"fixed_window\" }]\nRULE", "is not between 10ms and 3660 days", "policies.a.limits[0].per", 2),
    ("[policies.a]\nlimits = [{ quota = 1, per = 60, algorithm = \"fixed_window\" }]\nRULE", "invalid type: integer `60`, expected a time as text with its unit", "policies.a.limits[0].per", 2),
    ("[policies.a]\nlimits = [{ quota = 1, per = \"1 fortnight\", algorithm = \"fixed_window\" }]\nRULE", "invalid value: string \"1 fortnight\", expected a time", "policies.a.limits[0].per", 2),
    ("[policies.a]\nlimits = [{ quota = -1, per = \"1s\", algorithm = \"fixed_window\" }]\nRULE", "invalid value: integer `-1`, expected u64", "policies.a.limits[0].quota", 2),
    ("[policies.a]\nlimits = [{ quota = 1.5, per = \"1s\", algorithm = \"fixed_window\" }]\nRULE", "invalid type: floating point `1.5`, expected u64", "policies.a.limits[0].quota", 2),
    ("[policies.a]\nlimits = [{ quota = 1979-05-27, per = \"1s\", algorithm = \"fixed_window\" }]\nRULE", "invalid type: a date or time, expected u64", "policies.a.limits[0].quota", 2),
    ("[policies.a]\nlimits = [{ quota = 10001, per = \"1s\", algorithm = \"sliding_log\" }]\nRULE", "a sliding log remembers every request, so its quota is at most 10000", "policies.a.limits[0].quota", 2),
    ("[policies.a]\nlimits = [LIMIT, LIMIT]\nRULE", "limits[0] has the same window and algorithm", "policies.a.limits[1]", 2),
    ("[policies.a]\nlimits = [{ quota = 1, per = \"1s\", algorithm = \"fixed_window\", name = \"n\" },\n{ quota = 1, per = \"2s\", algorithm = \"fixed_window\", name = \"n\" }]\nRULE", "limits[0] has this name already", "policies.a.limits[1].name", 3),
    ("[policies.a]\nlimits = [LIMIT]\nmode = \"off\"\nRULE", "unknown variant `off`, expected one of `enforce`, `shadow`, `percent`", "policies.a.mode", 3),
    ("[policies.a]\nlimits = [LIMIT]\nmode = { percent = 101 }\nRULE", "a percentage is 0 to 100, not 101", "policies.a.mode", 3),
    ("[policies.a]\nlimits = [LIMIT]\nmode = \"percent\"\nRULE", "invalid type: unit variant, expected newtype variant", "policies.a.mode", 3),
    ("[policies.a]\nlimits = [LIMIT]\nmode = { percent = 1, shadow = true }\nRULE", "expected a table with one field, found 2 fields", "policies.a.mode", 3),
    ("[policies.a]\nlimits = [LIMIT]\non_quota_change = \"forget\"\nRULE", "unknown variant `forget`", "policies.a.on_quota_change", 3),
    ("[policies.\"a b\"]\nlimits = [LIMIT]\nRULE", "a name is 1 to 47 letters, digits", "policies.\"a b\"", 1),
    // Rules.
    ("POLICY\nRULE\nmethod = \"GET\"", "unknown field `method`", "rules[0].method", 7),
    ("POLICY\n[[rules]]\npolicy = \"a\"\nkey = \"global\"", "missing field `path`", "rules[0]", 3),
    ("POLICY\n[[rules]]\npath = \"/\"\npolicy = \"b\"\nkey = \"global\"", "there is no policy \"b\"; there are `a`", "rules[0].policy", 5),
    ("POLICY\n[[rules]]\npath = \"/\"\npolicy = \"a\"", "missing field `key`", "rules[0]", 3),
    ("POLICY\n[[rules]]\npath = \"/\"", "a rule needs one of `policy`, `policies` and `unlimited = true`", "rules[0]", 3),
    ("POLICY\n[[rules]]\npath = \"/\"\nunlimited = true\npolicy = \"a\"", "a rule is either unlimited or has policies", "rules[0].unlimited", 5),
    ("POLICY\n[[rules]]\npath = \"/\"\nunlimited = true\ncost = 2", "has no effect in an unlimited rule", "rules[0].cost", 6),
    ("POLICY\nRULE\npolicies = []", "a rule has either `policy` or `policies`", "rules[0].policies", 7),
    ("POLICY\n[[rules]]\npath = \"/\"\npolicies = []", "a rule needs at least one policy", "rules[0].policies", 5),
    ("POLICY\n[[rules]]\npath = \"/\"\npolicies = [{ policy = \"a\" }]", "missing field `key`", "rules[0].policies[0]", 5),
    ("POLICY\n[[rules]]\npath = \"/\"\nkey = \"global\"\npolicies = [{ policy = \"a\", key = \"global\" }]", "each of `policies` has its own key", "rules[0].key", 5),
    ("POLICY\n[[rules]]\npath = \"/\"\npolicies = [{ policy = \"a\", key = \"global\" },\n{ policy = \"a\", key = \"peer_ip\" }]", "the rule has the policy `a` twice", "rules[0].policies[1].policy", 6),
    ("POLICY\nRULE\nRULE", "rules[0] has the same path and is for all methods too", "rules[1].path", 8),
    ("POLICY\nRULE\nmethods = [\"GET\"]\nRULE\nmethods = [\"PUT\",\n\"GET\"]", "rules[0] has the same path and method", "rules[1].methods[1]", 13),
    ("POLICY\nRULE\nmethods = []", "an empty list matches no request", "rules[0].methods", 7),
    ("POLICY\nRULE\nmethods = [\"GET\", \"GET\"]", "`GET` is listed twice", "rules[0].methods[1]", 7),
    ("POLICY\nRULE\nmethods = [\"get\"]", "`get` is not a method such as `GET`", "rules[0].methods[0]", 7),
    ("POLICY\nRULE\nmethods = [\"G T\"]", "`G T` is not a method", "rules[0].methods[0]", 7),
    ("POLICY\nRULE\nmethods = \"GET\"", "invalid type: string \"GET\", expected a sequence", "rules[0].methods", 7),
    ("POLICY\n[[rules]]\npath = \"api\"\npolicy = \"a\"\nkey = \"global\"", "a path begins with `/`", "rules[0].path", 4),
    ("POLICY\n[[rules]]\npath = \"/a?b=1\"\npolicy = \"a\"\nkey = \"global\"", "the path of a request never contains '?'", "rules[0].path", 4),
    ("POLICY\n[[rules]]\npath = \"/{id\"\npolicy = \"a\"\nkey = \"global\"", "a parameter is written `{name}`", "rules[0].path", 4),
    ("POLICY\n[[rules]]\npath = \"/{*rest}/x\"\npolicy = \"a\"\nkey = \"global\"", "`{*name}` is the last part of a path", "rules[0].path", 4),
    ("POLICY\n[[rules]]\npath = \"/{id}\"\nunlimited = true\n[[rules]]\npath = \"/{name}\"\nunlimited = true", "the path conflicts with `/{id}`", "rules[1].path", 7),
    ("POLICY\n[[rules]]\npath = \"/users/{id}\"\nunlimited = true\n[[rules]]\npath = \"/users/{*rest}\"\nunlimited = true", "the path conflicts with `/users/{id}`", "rules[1].path", 7),
    ("POLICY\nRULE\ncost = 0", "a cost of 0 is never counted", "rules[0].cost", 7),
    ("POLICY\nRULE\ncost = 2", "a cost of 2 never fits into the 1 of policy `a`", "rules[0].cost", 7),
    ("POLICY\nRULE\nreplicas = 0", "the number of replicas is at least 1", "rules[0].replicas", 7),
    ("POLICY\nRULE\nreplicas = 2\non_store_error = \"deny\"", "has an effect only with `on_store_error = \"local\"`", "rules[0].replicas", 7),
    ("POLICY\nRULE\non_store_error = \"allow\"\nreplicas = 1", "has an effect only with `on_store_error = \"local\"`", "rules[0].replicas", 8),
    ("POLICY\nRULE\non_missing_key = \"pass\"", "has no effect, because every request has a key", "rules[0].on_missing_key", 7),
    ("POLICY\n[[rules]]\npath = \"/\"\npolicies = [{ policy = \"a\", key = [\"peer_ip\", \"global\"] }]\non_missing_key = \"reject\"", "has no effect, because every request has a key", "rules[0].on_missing_key", 6),
    ("POLICY\nRULE\ncharge = \"never\"", "unknown variant `never`, expected one of `always`, `failures`, `successes`", "rules[0].charge", 7),
    ("POLICY\n[[rules]]\npath = \"/\"\nunlimited = true\ncharge = \"always\"", "has no effect in an unlimited rule", "rules[0].charge", 6),
    ("POLICY\n[[rules]]\npath = \"/\"\nunlimited = true\nwait = \"1s\"", "has no effect in an unlimited rule", "rules[0].wait", 6),
    ("POLICY\nRULE\nwait = \"0s\"", "a wait of 0 has no effect", "rules[0].wait", 7),
    ("POLICY\nRULE\nwait = 2", "a time as text with its unit", "rules[0].wait", 7),
    ("POLICY\nRULE\ndeadline = \"0s\"", "a `deadline` of zero leaves no time", "rules[0].deadline", 7),
    ("POLICY\nRULE\non_store_error = \"explode\"", "unknown variant `explode`, expected one of `local`, `allow`, `deny`", "rules[0].on_store_error", 7),
    ("POLICY\nRULE\non_missing_key = 1", "invalid type: integer `1`", "rules[0].on_missing_key", 7),
    // Keys.
    ("POLICY\n[[rules]]\npath = \"/\"\npolicy = \"a\"\nkey = \"ip\"", "unknown variant `ip`, expected one of `global`, `peer_ip`, `client_ip`, `bearer_token`, `basic_user`, `header`", "rules[0].key", 6),
    ("POLICY\n[[rules]]\npath = \"/\"\npolicy = \"a\"\nkey = []", "a list of keys needs at least one", "rules[0].key", 6),
    ("POLICY\n[[rules]]\npath = \"/\"\npolicy = \"a\"\nkey = [\"global\", \"peer_ip\"]", "no key can follow it", "rules[0].key", 6),
    ("POLICY\n[[rules]]\npath = \"/\"\npolicy = \"a\"\nkey = { header = \"x y\" }", "`x y` is not a header name", "rules[0].key.header", 6),
    ("POLICY\n[[rules]]\npath = \"/\"\npolicy = \"a\"\nkey = { header = \"x\", prefix = \"y\" }", "unexpected field `prefix`", "rules[0].key.prefix", 6),
    ("POLICY\n[[rules]]\npath = \"/\"\npolicy = \"a\"\nkey = [{ cookie = \"y\" }]", "unknown variant `cookie`", "rules[0].key[0].cookie", 6),
    // Addresses.
    ("[client_ip]\ntrusted = [\"10.0.0.0/33\"]", "`10.0.0.0/33` is not a network", "client_ip.trusted[0]", 2),
    ("[client_ip]\ntrusted = [\"10.1.2.3/8\"]", "the network is `10.0.0.0/8`", "client_ip.trusted[0]", 2),
    ("[client_ip]\ntrusted = [\"10.0.0.0/8\", \"0.0.0.0/0\"]", "`0.0.0.0/0` trusts every address", "client_ip.trusted[1]", 2),
    ("[client_ip]\ntrusted = [\"::/0\"]", "`::/0` trusts every address", "client_ip.trusted[0]", 2),
    ("[client_ip]\ntrusted = [\"::ffff:0.0.0.0/96\"]", "trusts every address", "client_ip.trusted[0]", 2),
    ("[client_ip]\ntrusted = [\"0.0.0.0/1\", \"128.0.0.0/1\"]", "the networks together contain every address", "client_ip.trusted", 2),
    ("[client_ip]\ntrusted = [\"10.0.0.0/8\", \"8000::/1\", \"::/2\", \"4000::/2\"]", "the networks together contain every address", "client_ip.trusted", 2),
    ("[client_ip]\ntrusted = []\nheader = \"forwarded\"", "a header is read only from trusted proxies", "client_ip.header", 3),
    ("[client_ip]\ntrusted = [\"10.0.0.1\"]\nheader = \"\"", "`` is not a header name", "client_ip.header", 3),
    ("[client_ip]\ntrusted = []\nipv6_prefix = 8", "an IPv6 prefix of 8 bits is not between 32 and 128", "client_ip.ipv6_prefix", 3),
    ("[client_ip]\nheader = \"forwarded\"", "missing field `trusted`, or `trusted_hops`", "client_ip", 1),
    ("[client_ip]\ntrusted_hops = 0", "the number of trusted hops is 1 to 64", "client_ip.trusted_hops", 2),
    ("[client_ip]\ntrusted_hops = 65", "the number of trusted hops is 1 to 64", "client_ip.trusted_hops", 2),
    ("[client_ip]\ntrusted_hops = -1", "invalid value", "client_ip.trusted_hops", 2),
    ("[client_ip]\ntrusted = [\"10.0.0.0/8\"]\ntrusted_hops = 1", "use either `trusted`, with networks, or `trusted_hops`", "client_ip.trusted_hops", 3),
    ("[client_ip]\ntrusted_hops = 1\non_unreadable = \"pass\"", "unknown variant `pass`, expected `proxy` or `reject`", "client_ip.on_unreadable", 3),
    // Patterns of other systems.
    ("POLICY\n[[rules]]\npath = \"/api/*\"\npolicy = \"a\"\nkey = \"global\"", "write `/api/{*rest}`", "rules[0].path", 4),
    ("POLICY\n[[rules]]\npath = \"/api/**\"\npolicy = \"a\"\nkey = \"global\"", "write `/api/{*rest}`", "rules[0].path", 4),
    ("POLICY\n[[rules]]\npath = \"/api/*rest\"\npolicy = \"a\"\nkey = \"global\"", "write `/api/{*rest}`", "rules[0].path", 4),
    ("POLICY\n[[rules]]\npath = \"/api/.*\"\npolicy = \"a\"\nkey = \"global\"", "write `/api/{*rest}`", "rules[0].path", 4),
    ("POLICY\n[[rules]]\npath = \"/users/:id\"\npolicy = \"a\"\nkey = \"global\"", "write `/users/{id}`", "rules[0].path", 4),
];

#[test]
fn errors_name_the_field_and_line() {
    let many: Vec<String> =
        (1..=17).map(|s| format!(r#"{{ quota = 1, per = "{s}s", algorithm = "fixed_window" }}"#)).collect();
    for (text, what, field, line) in BAD {
        let text = text
            .replace("POLICY", "[policies.a]\nlimits = [LIMIT]")
            .replace("RULE", "[[rules]]\npath = \"/\"\npolicy = \"a\"\nkey = \"global\"")
            .replace("MANY", &many.join(", "))
            .replace("LIMIT", LIMIT);
        let error = Rules::from_toml(&text).expect_err(&text);
        assert!(error.message().contains(what), "{text}\n{error}");
        assert_eq!(error.field().unwrap_or_default(), *field, "{text}\n{error}");
        assert_eq!(error.line().unwrap_or_default(), *line, "{text}\n{error}");
        assert!(error.to_string().contains(what) && !error.to_string().ends_with('.'), "{error}");
    }
}

/// The result for a text, the text of its error, and the line and column.
type Wrong = (Result<Rules, RulesError>, &'static str, (usize, usize));

#[test]
fn error_position_is_known_in_every_format() {
    let yaml = "policies:\n  a:\n    limits:\n      - { quota: 1, per: 1s, algorithm: fixed_window }\n      \
                - { quota: 1, per: 1h,\n          algorithm: fixed_window, burst: 5 }\nrules: [{ path: /, unlimited: true }]";
    let json = "{\"policies\":{\"a\":{\"limits\":[{\"quota\":1,\"per\":\"1s\",\"algorithm\":\"fixed_window\"},\n \
                {\"quota\":1,\"per\":\"1h\",\n  \"algorithm\":\"fixed_window\", \"burst\":5}]}},\n\
                \"rules\":[{\"path\":\"/\",\"unlimited\":true}]}";
    let place = |error: &RulesError| (error.line().unwrap(), error.column().unwrap());
    for (error, expected) in
        [(Rules::from_yaml(yaml).unwrap_err(), (6, 43)), (Rules::from_json(json).unwrap_err(), (3, 39))]
    {
        assert_eq!(error.message(), "only a token bucket takes a burst", "{error}");
        assert_eq!(error.field(), Some("policies.a.limits[1].burst"));
        assert_eq!(place(&error), expected, "{error}");
    }
    let cases: &[Wrong] = &[
        (Rules::from_yaml("rules:\n  - path: /\n    limit: 5\n"), "unknown field `limit`", (3, 5)),
        (Rules::from_json("{\"rules\": [\n  {\"path\": \"/\", \"limit\": 5}]}"), "unknown field `limit`", (2, 17)),
        (Rules::from_yaml("a: [1,\n"), "unclosed bracket '['", (1, 4)),
        (Rules::from_json("{\"rules\": [1,\n ]}"), "expected value", (2, 2)),
        (Rules::from_json("{} x"), "trailing characters", (1, 4)),
        (Rules::from_json("{\"rules\": [], \"rules\": []}"), "`rules` is given twice", (1, 24)),
        (Rules::from_yaml("rules: []\nrules: []\n"), "`rules` is given twice", (2, 1)),
        (Rules::from_yaml("rules: []\n---\nrules: []\n"), "the file has more than one document", (2, 1)),
        (Rules::from_yaml("rules: !secret []\n"), "tags are not supported", (1, 16)),
        (Rules::from_yaml("a: &a [*a]\n"), "alias", (1, 8)),
        (Rules::from_yaml("? [1]\n: 2\n"), "a field name must be text", (1, 3)),
        (Rules::from_yaml("rules: *nothing\n"), "unknown anchor", (1, 8)),
        // If the only method is removed and its field stays, the rule would apply to all methods.
        (Rules::from_yaml("rules:\n  - path: /\n    methods:\n    unlimited: true\n"), "missing value", (3, 12)),
        (
            Rules::from_json("{\"rules\": [{\"path\": \"/\", \"methods\": null, \"unlimited\": true}]}"),
            "missing value",
            (1, 37),
        ),
        (Rules::from_yaml("rules:\n  - path: /é\tx\n"), "the path of a request never contains '\\t'", (2, 11)),
        (Rules::from_toml("\u{feff}rules = [{ path = \"/\", é = 1 }]"), "", (1, 25)),
    ];
    for (result, what, expected) in cases {
        let error = result.as_ref().unwrap_err();
        assert!(error.message().contains(what), "{error}");
        assert_eq!(place(error), *expected, "{error}");
    }
}

#[test]
fn unreadable_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let error = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        let error = Rules::from_path(&path).unwrap_err();
        assert_eq!(error.file(), Some(path.as_path()));
        error
    };
    assert_eq!(
        error("rules.ini", b"").message(),
        "unknown format: the extension must be `.toml`, `.yaml`, `.yml` or `.json`"
    );
    assert_eq!(error("rules", b"").line(), None);
    let not_text = error("rules.toml", b"# a\n# \xff\n");
    assert_eq!((not_text.message(), not_text.line(), not_text.column()), ("the file is not UTF-8", Some(2), Some(3)));
    let large = vec![b'#'; Rules::MAX_LEN + 1];
    assert_eq!(error("large.toml", &large).message(), "the file has more than 1048576 bytes");
    assert!(Rules::from_toml(&"#".repeat(Rules::MAX_LEN + 1)).unwrap_err().message().contains("1048576"));
    let wrong = error("rules.yml", b"rules: [{}]");
    let file = folder.path().join("rules.yml");
    assert_eq!(wrong.to_string(), format!("{}:1:9: rules[0]: missing field `path`", file.display()));

    let missing = Rules::from_path(folder.path().join("missing.toml")).unwrap_err();
    let cause = std::error::Error::source(&missing).unwrap().downcast_ref::<std::io::Error>().unwrap();
    assert_eq!(cause.kind(), std::io::ErrorKind::NotFound);
    fn portable<T: std::error::Error + Send + Sync + 'static>() {}
    portable::<RulesError>();
}

/// Regression: the parsed tables were dropped recursively, and a stack overflow aborts the process.
#[test]
fn deep_tables_of_dotted_keys_are_refused_before_allocation() {
    let small_stack = std::thread::Builder::new().stack_size(256 * 1_024);
    let tried = small_stack.spawn(|| {
        for parts in [1, 11, 32, 79] {
            let key = vec!["k"; parts].join(".");
            for tables in [1, 3, 31, 80] {
                let inline = format!("{}1{}", format!("{{ {key} = ").repeat(tables), " }".repeat(tables));
                for (text, depth) in [
                    (format!("{key} = {inline}"), parts * (tables + 1) - 1),
                    (format!("[{key}]\n{key} = 1\n{key}2 = [0, {inline}]"), parts * (tables + 2)),
                ] {
                    let error = Rules::from_toml(&text).unwrap_err().to_string();
                    let is_too_deep = error.contains("lists and tables are nested more than 32 levels deep");
                    assert_eq!(is_too_deep, depth > 32, "{depth} levels: {error}");
                }
            }
        }
    });
    tried.unwrap().join().unwrap();
}

#[test]
fn slow_files_are_refused_in_time() {
    let start = Instant::now();
    let mut bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n".to_owned();
    for level in 1..20 {
        let below = vec![format!("*a{}", level - 1); 10].join(",");
        bomb.push_str(&format!("a{level}: &a{level} [{below}]\n"));
    }
    assert!(Rules::from_yaml(&bomb).unwrap_err().message().contains("too much"));
    let long = format!("a: &a {}\nb: [{}*a]", "x".repeat(400_000), "*a,".repeat(100_000));
    assert!(Rules::from_yaml(&long).unwrap_err().message().contains("too much"));
    let nested_anchors: String = (0..30).map(|i| format!("{}a{i}: &a{i}\n", " ".repeat(i))).collect();
    assert!(Rules::from_yaml(&nested_anchors).is_err());
    for depth in [33, 10_000, 500_000] {
        let lists = |open: &str, close: &str| format!("{}{}", open.repeat(depth), close.repeat(depth));
        assert!(Rules::from_json(&lists("[", "]")).is_err());
        assert!(Rules::from_json(&"{\"a\":".repeat(depth.min(200_000))).is_err());
        assert!(Rules::from_yaml(&lists("[", "]")).is_err());
        assert!(Rules::from_yaml(&"- ".repeat(depth)).is_err());
        assert!(Rules::from_toml(&format!("a = {}", lists("[", "]"))).is_err());
        assert!(Rules::from_toml(&format!("[{}a]", "a.".repeat(depth))).is_err());
    }
    let flat = format!("[{}1]", "1,".repeat(500_000));
    assert!(Rules::from_json(&flat).is_err() && Rules::from_yaml(&flat).is_err());
    assert!(Rules::from_toml(&format!("a = {flat}")).is_err());
    let keys: String = (0..80_000).map(|i| format!("a{i} = 1\n")).collect();
    assert!(Rules::from_toml(&keys).is_err());
    let methods: String =
        (0..14_000).map(|i| format!("[[rules]]\npath=\"/{i}\"\nunlimited=true\nmethods=[\"M{i}\"]\n")).collect();
    assert!(Rules::from_toml(&methods).unwrap_err().message().contains("more than 32 different methods"));
    let paths: String = (0..18_000).map(|i| format!("[[rules]]\npath=\"/{{a}}/{i}\"\nunlimited=true\n")).collect();
    assert_eq!(Rules::from_toml(&paths).unwrap().len(), 18_000);
    // This takes seconds on an idle machine. If the time for any file grew quadratically, it would take far longer than the limit.
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_make_the_parsers_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let folder = tempfile::tempdir().unwrap();
        for name in ["r.toml", "r.yaml", "r.json"] {
            let path = folder.path().join(name);
            fs::write(&path, &bytes).unwrap();
            prop_assert!(Rules::from_path(&path).is_err());
        }
    }

    #[test]
    fn no_text_makes_the_parsers_panic(text in r#"([\[\]{}:,"'&*!|>#=\\ \n-]|[a-c0-9.]|\t|rules|policies|path|limits|é){0,60}"#) {
        for rules in [Rules::from_toml(&text), Rules::from_yaml(&text), Rules::from_json(&text)] {
            let _ = rules.map_err(|error| error.to_string());
        }
    }

    #[test]
    fn damaged_file_is_read_or_refused(at in 0..2_000_usize, len in 0..20_usize, put in "[\\[\\]{}:,\"'&*\n -]{0,4}") {
        let files = [
            (include_str!("rules.toml"), Rules::from_toml as fn(&str) -> Result<Rules, RulesError>),
            (include_str!("rules.yaml"), Rules::from_yaml),
            (include_str!("rules.json"), Rules::from_json),
        ];
        for (text, parse) in files {
            let at = at % text.len();
            let damaged = format!("{}{put}{}", &text[..at], &text[(at + len).min(text.len())..]);
            if let Err(error) = parse(&damaged) {
                let lines = damaged.split('\n').count();
                prop_assert!(error.line().is_none_or(|line| line >= 1 && line <= lines), "{error}\n{damaged}");
            }
        }
    }

    #[test]
    fn any_path_is_matched_or_not(path in "[/a-c{}*%é]{0,20}", pattern in "/[/a-c{}*]{0,12}") {
        let text = format!("rules = [{{ path = {pattern:?}, unlimited = true }}]");
        if let Ok(rules) = Rules::from_toml(&text) {
            let _ = rules.policies_for(&Method::GET, &path);
        }
    }
}

// Enforcement.

#[tokio::test(start_paused = true)]
async fn each_rule_limits_the_requests_that_it_matches() {
    let rules = Rules::from_toml(
        r#"
        policies.api.limits = [{ quota = 10, per = "1m", algorithm = "fixed_window" }]
        policies.total.limits = [{ quota = 3, per = "1m", algorithm = "fixed_window" }]
        rules = [
            { path = "/api/{*rest}", policy = "api", key = [{ header = "x-api-key" }, "peer_ip"], cost = 5 },
            { path = "/both", policies = [{ policy = "api", key = { header = "x-api-key" } }, { policy = "total", key = "global" }] },
            { path = "/api/health", unlimited = true },
        ]
        "#,
    );
    let service = RulesLayer::new(MemoryBackend::new(), rules.unwrap()).layer(hello());
    let ask = async |path: &str, api_key: &str| {
        let request = Request::get(path).extension(PeerAddr("203.0.113.7:1".parse().unwrap()));
        let request = if api_key.is_empty() { request } else { request.header("x-api-key", api_key) };
        let response = service.clone().oneshot(request.body(()).unwrap()).await.unwrap();
        let fields = response.headers().get_all("ratelimit").iter().map(|line| line.to_str().unwrap().to_owned());
        (response.status().as_u16(), fields.collect::<Vec<_>>().join(" "))
    };
    let answer = |status: u16, fields: &str| (status, fields.to_owned());
    assert_eq!(ask("/api/a", "k1").await, answer(200, r#""api";r=5;t=60"#));
    assert_eq!(ask("/api/b", "k1").await, answer(200, r#""api";r=0;t=60"#));
    assert_eq!(ask("/api/a", "k1").await.0, 429);
    assert_eq!(
        ask("/api/a", "").await,
        answer(200, r#""api";r=5;t=60"#),
        "counted under the address without the header"
    );
    assert_eq!(ask("/both", "k1").await.0, 429, "rules of the same policy count together");
    for _ in 0..3 {
        assert_eq!(ask("/both", "k2").await.0, 200);
    }
    assert_eq!(ask("/both", "k3").await.0, 429, "all keys share the second policy");
    assert_eq!(ask("/both", "").await.0, 400, "a request without a key is rejected by default");
    for path in ["/api/health", "/elsewhere", "/"] {
        assert_eq!(ask(path, "k1").await, answer(200, ""), "{path}");
    }
}

#[tokio::test(start_paused = true)]
async fn each_rule_has_its_on_store_error() {
    let rules = Rules::from_toml(
        r#"
        policies.a.limits = [{ quota = 2, per = "1m", algorithm = "fixed_window" }]
        rules = [
            { path = "/login", policy = "a", key = "global", on_store_error = "deny" },
            { path = "/open", policy = "a", key = "global", on_store_error = "allow" },
            { path = "/local", policy = "a", key = "global" },
            { path = "/also", policy = "a", key = "global", replicas = 2 },
            { path = "/keyless", policy = "a", key = "peer_ip", on_missing_key = "pass" },
        ]
        "#,
    )
    .unwrap();
    let layer = RulesLayer::new(Failing, rules.clone());
    let service = layer.layer(hello());
    assert_eq!(status(&service, "/login").await, 503);
    for _ in 0..9 {
        assert_eq!(status(&service, "/open").await, 200);
    }
    assert_eq!(status(&service, "/keyless").await, 200);
    assert_eq!(status(&service, "/local").await, 200);
    assert_eq!(status(&service, "/also").await, 429, "rules with the same policy share the local count");
    layer.handle().reload(simple("sliding_window", 1));
    layer.handle().reload(rules);
    assert_eq!(status(&service, "/local").await, 200);
    assert_eq!(status(&service, "/local").await, 429, "a reload keeps the local count");
}

#[tokio::test(start_paused = true)]
async fn rules_have_their_own_deadlines_and_share_a_circuit() {
    let rules = Rules::from_toml(
        r#"
        policies.a.limits = [{ quota = 5, per = "1m", algorithm = "fixed_window" }]
        rules = [
            { path = "/quick", policy = "a", key = "global", on_store_error = "deny", deadline = "20ms" },
            { path = "/usual", policy = "a", key = "global", on_store_error = "deny" },
            { path = "/open", policy = "a", key = "global", on_store_error = "allow" },
        ]
        "#,
    );
    let store = FaultStore::new(MemoryBackend::new());
    let breaker = CircuitBreaker::new().failures(2).probe_interval(Duration::from_secs(5));
    let service = RulesLayer::new(store.clone(), rules.unwrap()).circuit_breaker(breaker).layer(hello());
    let ask = async |path: &str| {
        let start = tokio::time::Instant::now();
        (status(&service, path).await, start.elapsed().as_millis())
    };
    store.faults().hang();
    assert_eq!(ask("/quick").await, (503, 20));
    assert_eq!(ask("/usual").await, (503, 100));
    // Two calls have failed, so the circuit is open: no rule waits, with any `on_store_error`.
    let asked = store.faults().calls(Verb::Check);
    for (path, answer) in [("/quick", 503), ("/usual", 503), ("/open", 200)] {
        assert_eq!(ask(path).await, (answer, 0), "{path}");
    }
    assert_eq!(store.faults().calls(Verb::Check), asked);
    // The probe of one rule closes the circuit for all rules.
    store.faults().heal();
    store.faults().delay(Duration::from_millis(1));
    tokio::time::advance(Duration::from_secs(5)).await;
    for (path, answer) in [("/quick", 200), ("/usual", 200), ("/open", 200)] {
        assert_eq!(ask(path).await, (answer, 1), "{path}");
    }
}

#[tokio::test(start_paused = true)]
async fn client_ip_key_is_the_client_behind_trusted_proxies() {
    let file = |client_ip: &str| {
        let text = format!(
            r#"
            policies.a.limits = [{{ quota = 1, per = "1m", algorithm = "fixed_window" }}]
            rules = [{{ path = "/", policy = "a", key = "client_ip" }}]
            {client_ip}
            "#
        );
        RulesLayer::new(MemoryBackend::new(), Rules::from_toml(&text).unwrap()).layer(hello())
    };
    let xff = file(r#"client_ip = { trusted = ["10.0.0.0/8"], ipv6_prefix = 48 }"#);
    let forwarded = file(r#"client_ip = { trusted = ["10.0.0.0/8"], header = "forwarded" }"#);
    let single = file(r#"client_ip = { trusted = ["10.0.0.0/8"], header = "x-real-ip" }"#);
    let no_proxy = file("");
    let hops = file("client_ip = { trusted_hops = 2 }");
    let cloudfront = file(r#"client_ip = { trusted = ["10.0.0.0/8"], header = "cloudfront-viewer-address" }"#);
    let strict = file(r#"client_ip = { trusted = ["10.0.0.0/8"], on_unreadable = "reject" }"#);
    let cases = [
        (&hops, "192.0.2.1:1", "x-forwarded-for", "6.6.6.6, 203.0.113.7, 198.51.100.1", 200),
        (&hops, "192.0.2.2:1", "x-forwarded-for", "6.6.6.7, 203.0.113.7, 198.51.100.2", 429),
        (&hops, "192.0.2.2:1", "x-forwarded-for", "6.6.6.7, 203.0.113.8, 198.51.100.2", 200),
        (&cloudfront, "10.0.0.1:1", "cloudfront-viewer-address", "2001:db8:a::1:50001", 200),
        (&cloudfront, "10.0.0.1:1", "cloudfront-viewer-address", "2001:db8:b::1:50001", 200),
        (&cloudfront, "10.0.0.1:1", "cloudfront-viewer-address", "2001:db8:b::1:443", 429),
        (&strict, "10.0.0.1:1", "x-forwarded-for", "unknown", 400),
        (&strict, "10.0.0.1:1", "x-forwarded-for", "203.0.113.7", 200),
        // Clients behind a proxy are counted separately, and their own claims are ignored.
        (&xff, "10.0.0.1:1", "x-forwarded-for", "203.0.113.7", 200),
        (&xff, "10.0.0.2:1", "x-forwarded-for", "198.51.100.7, 203.0.113.7", 429),
        (&xff, "10.0.0.1:1", "x-forwarded-for", "203.0.113.8", 200),
        // A peer that is not a trusted proxy is the client.
        (&xff, "192.0.2.1:1", "x-forwarded-for", "203.0.113.9", 200),
        (&xff, "192.0.2.1:2", "x-forwarded-for", "203.0.113.10", 429),
        // IPv6 clients are counted by network.
        (&xff, "10.0.0.1:1", "x-forwarded-for", "2001:db8:0:1::1", 200),
        (&xff, "10.0.0.1:1", "x-forwarded-for", "2001:db8:0:2::1", 429),
        (&xff, "10.0.0.1:1", "x-forwarded-for", "2001:db8:1:2::1", 200),
        // Only the configured header is read.
        (&forwarded, "10.0.0.1:1", "forwarded", "for=203.0.113.7", 200),
        (&forwarded, "10.0.0.1:1", "forwarded", "for=203.0.113.7;proto=https", 429),
        (&forwarded, "10.0.0.1:1", "forwarded", "for=203.0.113.8", 200),
        (&single, "10.0.0.1:1", "x-real-ip", "203.0.113.7", 200),
        (&single, "10.0.0.1:1", "x-real-ip", "203.0.113.8", 200),
        (&single, "10.0.0.1:1", "x-real-ip", "203.0.113.8", 429),
        // Without `client_ip`, no proxy is trusted.
        (&no_proxy, "10.0.0.1:1", "x-forwarded-for", "203.0.113.7", 200),
        (&no_proxy, "10.0.0.1:1", "x-forwarded-for", "203.0.113.8", 429),
    ];
    for (service, peer, header, value, status) in cases {
        let request = Request::get("/").extension(PeerAddr(peer.parse().unwrap())).header(header, value);
        let response = service.clone().oneshot(request.body(()).unwrap()).await.unwrap();
        assert_eq!(response.status().as_u16(), status, "{peer} {header}: {value}");
    }
}

/// If the whole header were the key, each spelling of the scheme and each password would have its own quota.
#[tokio::test(start_paused = true)]
async fn credentials_are_keys_of_rules() {
    let file = |key: &str| {
        let text = format!(
            r#"
            policies.a.limits = [{{ quota = 1, per = "1m", algorithm = "fixed_window" }}]
            rules = [{{ path = "/", policy = "a", key = {key} }}]
            "#
        );
        RulesLayer::new(MemoryBackend::new(), Rules::from_toml(&text).unwrap()).layer(hello())
    };
    let (token, user) = (file("\"bearer_token\""), file("[\"basic_user\", \"peer_ip\"]"));
    let cases = [
        (&token, "Bearer abc", 200),
        (&token, "bearer abc", 429),
        (&token, "BEARER  abc", 429),
        (&token, "Bearer abd", 200),
        (&token, "Basic YWxpY2U6YQ==", 400),
        // alice:a, alice:bb and bob:a.
        (&user, "Basic YWxpY2U6YQ==", 200),
        (&user, "basic YWxpY2U6YmI=", 429),
        (&user, "Basic Ym9iOmE=", 200),
        (&user, "Bearer abc", 200),
        (&user, "Bearer abd", 429),
    ];
    for (service, value, status) in cases {
        let peer = PeerAddr("203.0.113.7:1".parse().unwrap());
        let request = Request::get("/").extension(peer).header("authorization", value);
        let response = service.clone().oneshot(request.body(()).unwrap()).await.unwrap();
        assert_eq!(response.status().as_u16(), status, "{value}");
    }
}

/// Regression: a path pattern in the syntax of another system was matched as plain text, so its limit never applied.
#[tokio::test(start_paused = true)]
async fn escaped_pattern_characters_match_literally() {
    let rules = rules_of(&[
        ("/calc/%2A", None, "times"),
        ("/%3Aid", None, "colon"),
        ("/orders:cancel", None, "cancel"),
        ("/s/%5B%5D%5C%5E%7C%24", None, "signs"),
    ]);
    let names = |path: &str| -> Vec<String> {
        rules.policies_for(&Method::GET, path).into_iter().map(|policy| policy.name().to_owned()).collect()
    };
    for (path, policy) in [
        ("/calc/*", "times"),
        ("/calc/%2a", "times"),
        ("/:id", "colon"),
        ("/%3Aid", "colon"),
        ("/s/%5B%5D%5C%5E%7C%24", "signs"),
        // Some clients send these characters unescaped.
        (r"/s/[]\^|$", "signs"),
        ("/orders:cancel", "cancel"),
        ("/orders%3Acancel", "cancel"),
    ] {
        assert_eq!(names(path), [policy], "{path}");
    }
    assert!(names("/calc/7").is_empty() && names("/7").is_empty());
}

/// Regression: the program blocked until another process wrote into the FIFO.
#[cfg(unix)]
#[tokio::test]
async fn irregular_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("rules.toml");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    let socket = folder.path().join("socket.toml");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let device = folder.path().join("device.toml");
    std::os::unix::fs::symlink("/dev/zero", &device).unwrap();
    let directory = folder.path().join("directory.toml");
    std::fs::create_dir(&directory).unwrap();
    let handle = rules_of(&[("/", None, "a")]).handle();
    for path in [fifo, socket, device, directory] {
        let error = Rules::from_path(&path).unwrap_err();
        assert!(error.message().contains("a regular file"), "{error}");
        assert_eq!(error.file(), Some(&*path));
        assert!(handle.reload_path(&path).await.is_err());
        let watch = handle.watch_every(Duration::from_millis(1), &path);
        while handle.last_error().is_none_or(|error| error.file() != Some(&*path)) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        drop(watch);
    }
    let link = folder.path().join("link.toml");
    let file = folder.path().join("file");
    std::fs::write(&file, "policies.a.limits = []\nrules = []").unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    assert!(
        !Rules::from_path(&link).unwrap_err().message().contains("a regular file"),
        "a link to a regular file is accepted"
    );
}

#[tokio::test(start_paused = true)]
async fn rule_can_charge_by_the_response() {
    let rules = |charge: &str| {
        Rules::from_toml(&format!(
            r#"
            policies.a.limits = [{{ quota = 2, per = "1h", algorithm = "fixed_window" }}]
            policies.b.limits = [{{ quota = 2, per = "1h", algorithm = "fixed_window" }}]
            rules = [{{
                path = "/{{*rest}}",
                policies = [{{ policy = "a", key = "global" }}, {{ policy = "b", key = "global" }}],
                charge = "{charge}",
            }}]
            "#
        ))
        .unwrap()
    };
    // A service whose path selects the response.
    let service = service_fn(async |request: Request<()>| {
        let grpc = |response: http::response::Builder| response.header("content-type", "application/grpc+proto");
        let (response, trailer) = match request.uri().path() {
            "/200" => (Response::builder(), None),
            "/401" => (Response::builder().status(401), None),
            "/503" => (Response::builder().status(503), None),
            "/grpc/headers/0" => (grpc(Response::builder()).header("grpc-status", "0"), None),
            "/grpc/headers/16" => (grpc(Response::builder()).header("grpc-status", "16"), None),
            "/grpc/trailers/0" => (grpc(Response::builder()), Some("0")),
            "/grpc/trailers/16" => (grpc(Response::builder()), Some("16")),
            "/grpc/web/0" | "/grpc/web/16" => {
                let response = Response::builder().header("content-type", "application/grpc-web+proto");
                let status = request.uri().path().trim_start_matches("/grpc/web/");
                let message = format!("\u{0}\u{0}\u{0}{}grpc-status:{status}", char::from(12 + status.len() as u8));
                let body = Full::from([&[0x80], message.as_bytes()].concat());
                return Ok(response.body(body.with_trailers(ready(None))).unwrap());
            }
            _ => return Err("it failed"),
        };
        let trailers =
            trailer.map(|status| HeaderMap::from_iter([("grpc-status".parse().unwrap(), status.parse().unwrap())]));
        Ok(response.body(Full::<Bytes>::default().with_trailers(ready(trailers.map(Ok)))).unwrap())
    });
    let cases = [
        ("/200", false),
        ("/401", true),
        ("/503", true),
        ("/error", true),
        ("/grpc/headers/0", false),
        ("/grpc/headers/16", true),
        ("/grpc/trailers/0", false),
        ("/grpc/trailers/16", true),
        ("/grpc/web/0", false),
        ("/grpc/web/16", true),
    ];
    for (path, failed) in cases {
        for (charge, charged) in [("failures", failed), ("successes", !failed), ("always", true)] {
            let layer = RulesLayer::new(MemoryBackend::new(), rules(charge));
            let limited = layer.layer(service);
            let mut passed = 0;
            for _ in 0..5 {
                if let Ok(answer) = limited.clone().oneshot(Request::get(path).body(()).unwrap()).await {
                    passed += u32::from(answer.status() != StatusCode::TOO_MANY_REQUESTS);
                    answer.into_body().collect().await.unwrap();
                } else {
                    passed += 1;
                }
                // Corrections are sent in the background.
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            assert_eq!(passed, if charged { 2 } else { 5 }, "{charge} {path}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn rule_can_let_requests_wait() {
    let rules = Rules::from_toml(
        r#"
        policies.a.limits = [{ quota = 1, per = "10s", algorithm = "fixed_window" }]
        rules = [
            { path = "/patient", policy = "a", key = "global", wait = "25s" },
            { path = "/at-once", policy = "a", key = "global" },
        ]
        "#,
    );
    let service = RulesLayer::new(MemoryBackend::new(), rules.unwrap()).layer(hello());
    let since = tokio::time::Instant::now();
    assert_eq!(status(&service, "/patient").await, 200);
    assert_eq!(status(&service, "/at-once").await, 429);
    // The first two waiters get room in time, and are served in order.
    let waiting = [(); 3].map(|()| {
        let service = service.clone();
        async move { (status(&service, "/patient").await, since.elapsed().as_secs()) }
    });
    let [first, second, third] = waiting.map(tokio::spawn);
    assert_eq!(first.await.unwrap(), (200, 10));
    assert_eq!(second.await.unwrap(), (200, 20));
    assert_eq!(third.await.unwrap().0, 429);
}

#[tokio::test(start_paused = true)]
async fn rejections_use_the_configured_responder() {
    let layer = RulesLayer::new(MemoryBackend::new(), simple("fixed_window", 0)).responder(GrpcResponder::default());
    let handle = layer.handle();
    let service = layer.layer(hello());
    let request = || Request::get("/x").body(()).unwrap();
    let response = service.clone().oneshot(request()).await.unwrap();
    assert_eq!((response.status().as_u16(), &response.headers()["grpc-status"]), (200, &"8".parse().unwrap()));
    handle.reload(simple("fixed_window", 1));
    let response = service.oneshot(request()).await.unwrap();
    assert_eq!(response.headers().get("grpc-status"), None, "the handle of the layer reloads its services");
}

#[tokio::test(start_paused = true)]
async fn ready_instance_is_called() {
    for path in ["/limited", "/unmatched"] {
        let rules = Rules::from_toml(
            r#"
            policies.a.limits = [{ quota = 100, per = "1m", algorithm = "fixed_window" }]
            rules = [{ path = "/limited", policy = "a", key = "global" }]
            "#,
        );
        let clones = Arc::new(AtomicU64::new(0));
        let strict = Strict { ready: false, clones: Arc::clone(&clones) };
        let mut service = RulesLayer::new(MemoryBackend::new(), rules.unwrap()).layer(strict);
        for _ in 0..3 {
            service.ready().await.unwrap().call(Request::get(path).body(()).unwrap()).await.unwrap();
        }
        assert_eq!(clones.load(Ordering::Relaxed), 3, "one clone for each call");
    }
}

// Reloads.

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn reloads_under_load_drop_nothing_and_keep_counts() {
    let folder = tempfile::tempdir().unwrap();
    let rules = |turn: usize| {
        // `steady` stays the same while the other policy and rule change.
        format!(
            r#"
            policies.steady.limits = [{{ quota = 100, per = "1h", algorithm = "fixed_window" }}]
            policies.other.limits = [{{ quota = {}, per = "1h", algorithm = "{}" }}]
            [[rules]]
            path = "/steady"
            policy = "steady"
            key = "global"
            [[rules]]
            path = "/other{}"
            policy = "other"
            key = [{{ header = "x-user" }}, "global"]
            "#,
            turn + 1,
            ["fixed_window", "token_bucket", "sliding_window"][turn % 3],
            ["", "/{id}", "/{*rest}"][turn % 3],
        )
    };
    let handle = Rules::from_toml(&rules(0)).unwrap().handle();
    let app: Router = Router::new()
        .route("/steady", get(async || "steady"))
        .route("/other/{id}", get(async || "other"))
        .layer(RulesLayer::new(MemoryBackend::new(), &handle));

    let stop = Arc::new(AtomicBool::new(false));
    let mut tasks = Vec::new();
    for task in 0..4 {
        let (app, stop) = (app.clone(), Arc::clone(&stop));
        tasks.push(tokio::spawn(async move {
            let (mut asked, mut admitted) = (0_u64, 0_u64);
            while !stop.load(Ordering::Relaxed) {
                let path = if (asked + task) % 2 == 0 { "/steady" } else { "/other/7" };
                let request = Request::get(path).body(Body::empty()).unwrap();
                let status = app.clone().oneshot(request).await.unwrap().status();
                assert!(matches!(status, StatusCode::OK | StatusCode::TOO_MANY_REQUESTS), "{status}");
                admitted += u64::from(path == "/steady" && status == StatusCode::OK);
                asked += 1;
                tokio::task::yield_now().await;
            }
            (asked, admitted)
        }));
    }
    let file = folder.path().join("rules.toml");
    let mut refused = 0;
    for turn in 1..=1_000 {
        if turn % 5 == 0 {
            fs::write(&file, "rules = [").unwrap();
            let before = handle.rules();
            handle.reload_path(&file).await.unwrap_err();
            assert_eq!(handle.rules(), before);
            assert_eq!(handle.last_error().unwrap().line(), Some(1));
            refused += 1;
        } else {
            fs::write(&file, rules(turn)).unwrap();
            handle.reload_path(&file).await.unwrap();
            assert!(handle.last_error().is_none());
        }
    }
    stop.store(true, Ordering::Relaxed);
    let (mut asked, mut admitted) = (0, 0);
    for task in tasks {
        let (of_task, admitted_of_task) = task.await.unwrap();
        asked += of_task;
        admitted += admitted_of_task;
    }
    println!("requests={asked} admitted={admitted} reloads=1000 refused={refused}");
    assert_eq!(admitted, 100, "of {asked} requests: neither more nor less than the quota");
}

#[tokio::test(start_paused = true)]
async fn wait_idle_awaits_pending_corrections() {
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().delay(Duration::from_millis(50));
    let layer = RulesLayer::new(store.clone(), simple("fixed_window", 9));
    let service = layer.layer(service_fn(async |request: Request<()>| {
        request.extensions().get::<RateLimitHandle>().unwrap().refund(1);
        Ok::<_, Infallible>(Response::new(String::new()))
    }));
    let policy = Policy::new("a", Quota::per_hour(9).fixed_window());
    let left = async || store.get_ref().peek(&policy, &Key::GLOBAL, 1).await.unwrap().remaining();
    assert_eq!(status(&service, "/x").await, 200);
    // `wait_idle` also covers rules that are no longer in force.
    layer.handle().reload(simple("fixed_window", 8));
    assert_eq!(left().await, Some(8));
    layer.wait_idle().await;
    assert_eq!(left().await, Some(9));
}

#[tokio::test]
async fn request_in_flight_keeps_the_rules_of_its_arrival() {
    let gate = Arc::new(tokio::sync::Notify::new());
    let layer = RulesLayer::new(Gated(MemoryBackend::new(), Arc::clone(&gate)), simple("fixed_window", 1));
    let handle = layer.handle();
    let service = layer.layer(hello());
    let first = tokio::spawn(service.clone().oneshot(Request::get("/x").body(()).unwrap()));
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
    assert!(!first.is_finished(), "the store has not answered");
    handle.reload(simple("fixed_window", 0));
    gate.notify_waiters();
    assert_eq!(first.await.unwrap().unwrap().status(), StatusCode::OK, "the rules at its arrival allow one request");
    assert_eq!(status(&service, "/x").await, 429, "the new rules allow none");
}

#[tokio::test]
async fn watched_file_is_followed_while_it_is_valid() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rules.yaml");
    let write = |quota: &str| {
        let text = format!(
            "policies: {{ a: {{ limits: [{{ quota: {quota}, per: 1h, algorithm: fixed_window }}] }} }}\n\
             rules: [{{ path: '/{{*rest}}', policy: a, key: global }}]\n"
        );
        let fresh = folder.path().join("fresh");
        fs::write(&fresh, &text).unwrap();
        fs::rename(&fresh, &file).unwrap();
        text
    };
    let rules = |text: &str| Rules::from_yaml(text).unwrap();

    let (one, two) = (write("1"), write("2"));
    // The file changed after these rules were loaded, so the first check has to find the change.
    let handle = rules(&one).handle();
    let watch = handle.watch_every(Duration::from_millis(5), &file);
    until(|| handle.rules() == rules(&two)).await;

    write("many");
    until(|| handle.last_error().is_some()).await;
    let error = handle.last_error().unwrap();
    assert_eq!((error.line(), error.file()), (Some(1), Some(file.as_path())));
    assert_eq!(error.field(), Some("policies.a.limits[0].quota"));
    assert_eq!(handle.rules(), rules(&two), "a bad file changes nothing");

    fs::remove_file(&file).unwrap();
    until(|| handle.last_error().is_some_and(|error| std::error::Error::source(&error).is_some())).await;
    assert_eq!(handle.rules(), rules(&two), "a missing file changes nothing");

    let three = write("3");
    until(|| handle.rules() == rules(&three)).await;
    assert!(handle.last_error().is_none());

    drop(watch);
    write("4");
    tokio::time::sleep(Duration::from_millis(150)).await;
    assert_eq!(handle.rules(), rules(&three), "the file is no longer watched");
}

/// Regression: the burst next to a quota of 0 was refused, and the old quota stayed in force.
#[tokio::test]
async fn zero_quota_closes_a_burst_in_a_watched_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rules.toml");
    let write = |quota: u32| {
        let text = format!(
            r#"
            policies.api.limits = [{{ quota = {quota}, per = "1s", burst = 20, algorithm = "token_bucket" }}]
            rules = [{{ path = "/{{*rest}}", policy = "api", key = "global" }}]
            "#
        );
        let fresh = folder.path().join("fresh");
        fs::write(&fresh, &text).unwrap();
        fs::rename(&fresh, &file).unwrap();
        Rules::from_toml(&text)
    };
    let handle = write(10).unwrap().handle();
    let service = RulesLayer::new(MemoryBackend::new(), handle.clone()).layer(hello());
    assert_eq!(status(&service, "/x").await, 200);
    let _watch = handle.watch_every(Duration::from_millis(5), &file);

    let closed = write(0).unwrap();
    until(|| handle.rules() == closed).await;
    let answer = service.oneshot(Request::get("/x").body(()).unwrap()).await.unwrap();
    assert_eq!(answer.status(), 429);
    assert!(!answer.headers().contains_key("retry-after"), "no wait helps");
}

/// Regression: a watcher with a short interval loaded the first half of the file.
#[tokio::test]
async fn partially_written_file_is_not_loaded() {
    let [before, first, second] =
        ["/before", "/first", "/second"].map(|path| format!("[[rules]]\npath = {path:?}\nunlimited = true\n"));
    let both = Rules::from_toml(&format!("{first}{second}")).unwrap();
    // On a busy machine, the time between the two writes may exceed the time for which a change has to last.
    for _ in 0..20 {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("rules.toml");
        let handle = Rules::from_toml(&before).unwrap().handle();
        let started = Instant::now();
        fs::write(&file, &first).unwrap();
        let _watch = handle.watch_every(Duration::from_millis(10), &file);
        tokio::time::sleep(Duration::from_millis(50)).await;
        fs::write(&file, format!("{first}{second}")).unwrap();
        let in_time = started.elapsed() < Duration::from_millis(90);
        until(|| handle.rules() != Rules::from_toml(&before).unwrap()).await;
        if in_time {
            return assert_eq!(handle.rules(), both);
        }
    }
    panic!("the machine is too busy to write two halves within 90 ms");
}

#[tokio::test]
async fn watcher_ends_with_its_guard() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rules.toml");
    fs::write(&file, "").unwrap();
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    let handle = simple("fixed_window", 1).handle();
    let watch = handle.watch_every(Duration::from_millis(1), &file);
    until(|| handle.last_error().is_some()).await;
    assert_eq!(tasks(), before + 1);
    drop(watch);
    until(|| tasks() == before).await;
}

// Helpers.

fn simple(algorithm: &str, quota: u32) -> Rules {
    Rules::from_toml(&format!(
        r#"
        policies.a.limits = [{{ quota = {quota}, per = "1h", algorithm = "{algorithm}" }}]
        rules = [{{ path = "/{{*rest}}", policy = "a", key = "global" }}]
        "#
    ))
    .unwrap()
}

/// Rules with a path, a method and a policy each.
fn rules_of(rules: &[(&str, Option<&str>, &str)]) -> Rules {
    let mut text = String::new();
    for (path, method, policy) in rules {
        text.push_str(&format!("[policies.{policy}]\nlimits = [{LIMIT}]\n"));
        text.push_str(&format!("[[rules]]\npath = {path:?}\npolicy = {policy:?}\nkey = \"global\"\n"));
        text.push_str(&method.map_or(String::new(), |method| format!("methods = [{method:?}]\n")));
    }
    Rules::from_toml(&text).unwrap()
}

/// Returns the names of the policies that count a request for this path.
fn names<'a>(rules: &'a Rules, path: &str) -> Vec<&'a str> {
    rules.policies_for(&Method::GET, path).into_iter().map(Policy::name).collect()
}

fn hello() -> impl Service<Request<()>, Response = Response<String>, Error = Infallible, Future: Send> + Clone {
    service_fn(async |_: Request<()>| Ok(Response::new("hello".to_owned())))
}

async fn status<S, B>(service: &S, path: &str) -> u16
where
    S: Service<Request<()>, Response = Response<B>> + Clone,
    S::Error: std::fmt::Debug,
{
    let request = Request::get(path).body(()).unwrap();
    service.clone().oneshot(request).await.unwrap().status().as_u16()
}

async fn until(condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < deadline, "the condition was not met within 20 s");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[derive(Clone)]
struct Failing;

impl RateLimitStore for Failing {
    async fn check(&self, _: &Policy, _: &Key, _: u64) -> Result<Decision, StoreError> {
        Err(StoreError::unavailable("connection refused"))
    }

    async fn peek(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, StoreError> {
        self.check(policy, key, cost).await
    }

    async fn settle(&self, _: &Policy, _: &Key, _: Receipt, _: i64) -> Result<(), StoreError> {
        Ok(())
    }

    async fn block(&self, _: &Policy, _: &Key, _: Duration) -> Result<(), StoreError> {
        Ok(())
    }

    async fn reset(&self, _: &Policy, _: &Key) -> Result<(), StoreError> {
        Ok(())
    }
}

/// Waits for a notification before it decides.
#[derive(Clone)]
struct Gated(MemoryBackend, Arc<tokio::sync::Notify>);

impl RateLimitStore for Gated {
    async fn check(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, StoreError> {
        self.1.notified().await;
        self.0.check(policy, key, cost).await
    }

    async fn peek(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, StoreError> {
        self.0.peek(policy, key, cost).await
    }

    async fn settle(&self, policy: &Policy, key: &Key, receipt: Receipt, change: i64) -> Result<(), StoreError> {
        self.0.settle(policy, key, receipt, change).await
    }

    async fn block(&self, policy: &Policy, key: &Key, time: Duration) -> Result<(), StoreError> {
        self.0.block(policy, key, time).await
    }

    async fn reset(&self, policy: &Policy, key: &Key) -> Result<(), StoreError> {
        self.0.reset(policy, key).await
    }
}

/// Panics if an instance is called before it was polled ready.
struct Strict {
    ready: bool,
    clones: Arc<AtomicU64>,
}

impl Clone for Strict {
    fn clone(&self) -> Self {
        self.clones.fetch_add(1, Ordering::Relaxed);
        Self { ready: false, clones: Arc::clone(&self.clones) }
    }
}

impl Service<Request<()>> for Strict {
    type Response = Response<String>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Response<String>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        assert!(self.ready, "this instance was not polled ready");
        self.ready = false;
        std::future::ready(Ok(Response::new(String::new())))
    }
}

#[test]
fn handle_can_be_created_before_or_after_its_layer() {
    let handle: RulesHandle = simple("fixed_window", 1).into();
    let layer = RulesLayer::new(MemoryBackend::new(), &handle);
    layer.handle().reload(simple("fixed_window", 2));
    assert_eq!(handle.rules(), simple("fixed_window", 2));
}
