//! The leak matrix: which responses reach a client other than their own, for every combination of what decides about it. The oracle follows
//! RFC 9111, and not the code of the layer.

use std::collections::BTreeSet;

use http::header::HeaderName;
use http::{HeaderValue, Request};
use tokio::time::sleep;
use tollgate::CacheLayer;
use tollgate::MemoryBackend;
use tollgate::http::header;
use tower::Layer;

use crate::http::{App, Origin, boxed, field, ms, respond, send};

/// One cell of the matrix.
#[derive(Clone, Copy, Debug)]
struct Case {
    /// Of Alice and of Bob.
    methods: [&'static str; 2],
    sets_cookie: bool,
    /// Alice and Bob send different credentials.
    authorization: bool,
    cookie: bool,
    control: &'static str,
    vary: &'static str,
    per_principal: bool,
    /// Bob's request comes while that of Alice runs.
    at_once: bool,
    /// The layer has a default time.
    default_time: bool,
}

const CONTROLS: [&str; 13] = [
    "",
    "max-age=60",
    "public",
    "public, max-age=60",
    "s-maxage=60",
    "private",
    "private, max-age=60",
    "no-store",
    "no-store, max-age=60",
    "no-cache, max-age=60",
    "max-age=60, PRIVATE=\"x\"",
    "max-age=0",
    "must-revalidate, max-age=60",
];
const METHODS: [[&str; 2]; 8] = [
    ["GET", "GET"],
    ["GET", "HEAD"],
    ["HEAD", "GET"],
    ["HEAD", "HEAD"],
    ["GET", "POST"],
    ["POST", "GET"],
    ["POST", "POST"],
    ["OPTIONS", "OPTIONS"],
];
const VARIES: [&str; 5] = ["", "*", "accept", "x-who", "accept, X-Who"];

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for bits in 0..64_u32 {
        let bit = |i: u32| bits >> i & 1 == 1;
        for methods in METHODS {
            for control in CONTROLS {
                for vary in VARIES {
                    cases.push(Case {
                        methods,
                        sets_cookie: bit(0),
                        authorization: bit(1),
                        cookie: bit(2),
                        control,
                        vary,
                        per_principal: bit(3),
                        at_once: bit(4),
                        default_time: bit(5),
                    });
                }
            }
        }
    }
    cases
}

/// Whether Bob may get the response to Alice, by RFC 9111. Both send `X-Who` with their names, and the same `Accept`.
fn may_share(case: &Case) -> bool {
    let directives: Vec<String> = case
        .control
        .split(',')
        .map(|directive| directive.trim().split('=').next().unwrap_or_default().to_ascii_lowercase())
        .collect();
    let says = |name: &str| directives.iter().any(|directive| directive == name);
    // Section 3: the method is understood, and nothing forbids storing. `no-cache` (5.2.2.4) needs a validation for each use.
    let is_understood = case.methods[0] == "GET" && ["GET", "HEAD"].contains(&case.methods[1]);
    let is_storable = is_understood && !says("no-store") && !says("private") && !says("no-cache");
    // Section 3, last item, and section 4.2.
    let is_fresh = if says("max-age") || says("s-maxage") { !case.control.contains("=0") } else { case.default_time };
    // Section 4.1.
    let selects = case.vary.to_ascii_lowercase();
    let is_selected = selects != "*" && !selects.contains("x-who");
    // Section 3.5 allows more: `public`, `s-maxage` and `must-revalidate`. The layer promises not to use that.
    let has_credentials = case.authorization;
    // Section 7.3 advises against it.
    is_storable && is_fresh && is_selected && !has_credentials && !case.sets_cookie && !case.per_principal
}

fn app(case: Case, origin: &Origin) -> App {
    let service = origin.service(move |request, _| {
        let who = request.headers()["x-who"].clone();
        let body = if request.method() == "HEAD" { String::new() } else { who.to_str().unwrap().to_owned() };
        let mut response = respond(200, &[], body);
        response.headers_mut().insert("x-owner", who);
        let mut add = |name: HeaderName, value: &'static str| {
            if !value.is_empty() {
                response.headers_mut().append(name, HeaderValue::from_static(value));
            }
        };
        add(http::header::CACHE_CONTROL, case.control);
        add(http::header::VARY, case.vary);
        add(http::header::SET_COOKIE, if case.sets_cookie { "session=1" } else { "" });
        response
    });
    let layer = CacheLayer::new(MemoryBackend::new(), "pages");
    let layer = if case.default_time { layer.fresh_for(ms(60_000)) } else { layer };
    if case.per_principal {
        boxed(layer.per(header("x-who")).layer(service))
    } else {
        boxed(layer.public().layer(service))
    }
}

fn request_of(case: Case, method: &str, who: &'static str) -> Request<axum::body::Body> {
    let mut fields = vec![("x-who", who), ("accept", "text/plain")];
    if case.authorization {
        fields.push(("authorization", who));
    }
    if case.cookie {
        fields.push(("cookie", who));
    }
    crate::http::request(method, "/", &fields)
}

/// Alice asks, and then Bob. Returns whether Bob got her response.
async fn run(case: Case) -> bool {
    let origin = Origin::default();
    let app = app(case, &origin);
    let alice = send(&app, request_of(case, case.methods[0], "alice"));
    let bob = async {
        if case.at_once {
            sleep(ms(50)).await;
        }
        send(&app, request_of(case, case.methods[1], "bob")).await
    };
    let (alice, bob) = if case.at_once { tokio::join!(alice, bob) } else { (alice.await, bob.await) };
    assert_eq!(field(&alice.0, "x-owner"), "alice", "{case:?}");
    let owner = field(&bob.0, "x-owner");
    for (method, owner, body) in [(case.methods[0], "alice", &*alice.1), (case.methods[1], owner, &*bob.1)] {
        assert_eq!(body, if method == "HEAD" { "" } else { owner }, "{case:?}");
    }
    let is_shared = owner == "alice";
    assert_eq!(origin.calls(), if is_shared { 1 } else { 2 }, "{case:?}");
    is_shared
}

#[tokio::test(start_paused = true)]
async fn no_response_reaches_another_client() {
    let mut shared = BTreeSet::new();
    for case in cases() {
        let is_shared = run(case).await;
        assert!(!is_shared || may_share(&case), "leak: {case:?}");
        // The matrix must not pass because nothing is ever stored. RFC 9111 does not forbid to share with a request that has a cookie, and a
        // HEAD request does not wait for a GET.
        let is_required = !case.cookie && (case.methods[1] == "GET" || !case.at_once);
        if may_share(&case) && is_required {
            assert!(is_shared, "not shared: {case:?}");
            shared.insert(case.control);
        }
    }
    assert_eq!(shared.len(), 6, "{shared:?}");
}
