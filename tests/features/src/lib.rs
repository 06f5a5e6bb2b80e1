//! Errors for missing features, and the first program of the docs with only the features that it names.
#![cfg(test)]

#[cfg(feature = "first-program")]
mod first_program;

use tollgate::{AnyBackend, ConfigError, ConnectError};

/// Why nothing is connected to.
async fn refusal(url: &str) -> ConfigError {
    match tollgate::connect(url).await {
        Err(ConnectError::Config(error)) => error,
        other => panic!("{url}: {other:?}"),
    }
}

#[tokio::test]
async fn memory_needs_no_feature() {
    assert!(matches!(tollgate::connect("memory:").await, Ok(AnyBackend::Memory(_))));
}

#[cfg(not(feature = "redis"))]
#[tokio::test]
async fn redis_needs_a_feature() {
    let missing = ConfigError::FeatureMissing { feature: "redis" };
    for scheme in ["redis", "rediss", "valkey", "valkeys", "unix", "redis+unix", "redis+sentinel", "rediss+cluster"] {
        assert_eq!(refusal(&format!("{scheme}://127.0.0.1:1/")).await, missing, "{scheme}");
    }
    for (url, scheme) in [("http://127.0.0.1/", "http"), ("redi:", "redi")] {
        assert_eq!(refusal(url).await, ConfigError::UnknownScheme { scheme: scheme.to_owned() }, "{url}");
    }
    for url in ["me\nmory:", "secret@host:6379"] {
        let ConfigError::InvalidUrl { reason } = refusal(url).await else { panic!("{url} has no scheme") };
        assert!(!reason.contains("secret"), "{reason}");
    }
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn encryption_needs_a_feature() {
    let missing = ConfigError::FeatureMissing { feature: "tls" };
    let urls = [
        "rediss://127.0.0.1:1/",
        "valkeys://127.0.0.1:1/",
        "rediss+sentinel://127.0.0.1:1/service",
        "valkeys+cluster://127.0.0.1:1",
    ];
    for url in urls {
        assert_eq!(refusal(url).await, missing, "{url}");
        assert_eq!(tollgate::RedisOptions::from_url(url).err(), Some(missing.clone()), "{url}");
    }
    // This URL needs no feature. No server listens there.
    let error = tollgate::connect("redis://127.0.0.1:1/").await.unwrap_err();
    assert!(matches!(error, ConnectError::Store(_)), "{error:?}");
}
