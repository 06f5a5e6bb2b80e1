//! What a URL says about where the data is.

use std::borrow::Cow;

use percent_encoding::percent_decode_str;
use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo};

use crate::error::ConfigError;

/// The port of a Sentinel whose address names none.
const SENTINEL_PORT: u16 = 26_379;

/// Where the data is, and how to log in there.
#[derive(Clone)]
pub(super) enum Target {
    /// One server.
    Server(ConnectionInfo),
    /// Whichever server the Sentinels call the primary of a service.
    Sentinel {
        sentinels: Vec<ConnectionAddr>,
        service: String,
        redis: RedisConnectionInfo,
        sentinel: RedisConnectionInfo,
    },
    /// The nodes of a cluster, found from any of these.
    Cluster { seeds: Vec<ConnectionAddr>, redis: RedisConnectionInfo },
}

impl Target {
    pub(super) fn parse(url: &str) -> Result<Self, ConfigError> {
        let (scheme, rest) = url.split_once(':').ok_or_else(|| invalid("it has no scheme such as `redis:`"))?;
        let kind = scheme.split_once('+').map(|(_, kind)| kind);
        let base = match (scheme.split('+').next().unwrap_or(scheme), kind) {
            ("unix", None) | ("redis" | "valkey", Some("unix")) => return server(url),
            ("redis" | "valkey", _) => "redis",
            ("rediss" | "valkeys", None | Some("sentinel" | "cluster")) if cfg!(feature = "tls") => "rediss",
            ("rediss" | "valkeys", None | Some("sentinel" | "cluster")) => {
                return Err(ConfigError::FeatureMissing { feature: "tls" });
            }
            _ => return Err(unknown(scheme)),
        };
        if rest.ends_with("#insecure") {
            return Err(invalid(
                "`#insecure` would trust anybody; trust the server's own authority with `ca_certificate`",
            ));
        }
        match kind {
            None => server(&format!("{base}:{rest}")),
            Some("sentinel") => sentinel(base, &Parts::split(rest)?),
            Some("cluster") => cluster(base, &Parts::split(rest)?),
            Some(_) => Err(unknown(scheme)),
        }
    }

    /// Changes how to log in to the servers that hold the data.
    pub(super) fn log_in(&mut self, change: impl FnOnce(RedisConnectionInfo) -> RedisConnectionInfo) {
        match self {
            Self::Server(info) => *info = info.clone().set_redis_settings(change(info.redis_settings().clone())),
            Self::Sentinel { redis, .. } | Self::Cluster { redis, .. } => *redis = change(redis.clone()),
        }
    }

    /// Whether connections are to be encrypted.
    #[cfg(feature = "tls")]
    pub(super) fn is_tls(&self) -> bool {
        let first = match self {
            Self::Server(info) => Some(info.addr()),
            Self::Sentinel { sentinels: addresses, .. } | Self::Cluster { seeds: addresses, .. } => addresses.first(),
        };
        matches!(first, Some(ConnectionAddr::TcpTls { .. }))
    }
}

/// `//userinfo@host,host/path?query`, cut in pieces.
struct Parts<'a> {
    // With its `@`.
    userinfo: &'a str,
    hosts: Vec<&'a str>,
    // Without the leading slash.
    path: &'a str,
    // With its `?`.
    query: &'a str,
}

impl<'a> Parts<'a> {
    fn split(rest: &'a str) -> Result<Self, ConfigError> {
        let rest = rest.strip_prefix("//").ok_or_else(|| invalid("`//` and a host should follow the scheme"))?;
        let rest = rest.split_once('#').map_or(rest, |(rest, _)| rest);
        let (rest, query) = rest.split_at(rest.find('?').unwrap_or(rest.len()));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (userinfo, hosts) = authority.split_at(authority.rfind('@').map_or(0, |at| at + 1));
        Ok(Self { userinfo, hosts: hosts.split(',').collect(), path, query })
    }

    /// What each host stands for, as the client reads it where it stands alone.
    fn each(&self, base: &str, default_port: Option<u16>, database: &str) -> Result<Vec<ConnectionInfo>, ConfigError> {
        let each = self.hosts.iter().map(|host| {
            if host.is_empty() {
                return Err(invalid("a host is missing"));
            }
            let names_port = host.rsplit(']').next().is_some_and(|end| end.contains(':'));
            let port = match default_port {
                Some(port) if !names_port => format!(":{port}"),
                _ => String::new(),
            };
            parse(&format!("{base}://{}{host}{port}/{database}{}", self.userinfo, self.query))
        });
        each.collect()
    }
}

fn server(url: &str) -> Result<Target, ConfigError> {
    parse(url).map(Target::Server)
}

fn sentinel(base: &str, parts: &Parts<'_>) -> Result<Target, ConfigError> {
    let (service, database) = parts.path.split_once('/').unwrap_or((parts.path, ""));
    let service = percent_decode_str(service).decode_utf8().map_err(|_| invalid("the service name is not UTF-8"))?;
    if service.is_empty() {
        return Err(invalid("the path should name the service that the Sentinels watch, as `/mymaster` does"));
    }
    let infos = parts.each(base, Some(SENTINEL_PORT), database)?;
    let redis = log_in_of(&infos);
    let sentinels = infos.into_iter().map(|info| info.addr().clone()).collect();
    // Sentinels have users of their own, and most have none.
    Ok(Target::Sentinel { sentinels, service: service.into_owned(), redis, sentinel: RedisConnectionInfo::default() })
}

fn cluster(base: &str, parts: &Parts<'_>) -> Result<Target, ConfigError> {
    let infos = parts.each(base, None, parts.path)?;
    let redis = log_in_of(&infos);
    if redis.db() != 0 {
        return Err(invalid("a cluster has no databases beside 0"));
    }
    Ok(Target::Cluster { seeds: infos.into_iter().map(|info| info.addr().clone()).collect(), redis })
}

fn log_in_of(infos: &[ConnectionInfo]) -> RedisConnectionInfo {
    infos.first().map(|info| info.redis_settings().clone()).unwrap_or_default()
}

fn parse(url: &str) -> Result<ConnectionInfo, ConfigError> {
    url.into_connection_info().map_err(|error| ConfigError::InvalidUrl { reason: reason(&error) })
}

/// What is wrong with a URL, without the part of the client's message that repeats a piece of it.
fn reason(error: &redis::RedisError) -> String {
    let text = error.to_string();
    let text = match error.detail() {
        Some(detail) => text.replace(detail, "..."),
        None => text,
    };
    // The client names its kind of error behind the sentence, which helps nobody here.
    text.split_once(" - ").map_or(text.as_str(), |(sentence, _)| sentence).to_owned()
}

fn invalid<'a>(reason: impl Into<Cow<'a, str>>) -> ConfigError {
    ConfigError::InvalidUrl { reason: reason.into().into_owned() }
}

fn unknown(scheme: &str) -> ConfigError {
    // Escaped and cut, since anything at all may stand before the first colon.
    ConfigError::UnknownScheme { scheme: scheme.escape_debug().take(32).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(addresses: &[ConnectionAddr]) -> Vec<String> {
        addresses.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_server() {
        let Target::Server(info) = Target::parse("valkey://ann:p%40ss@example.com:7000/3").unwrap() else { panic!() };
        assert_eq!(info.addr().to_string(), "example.com:7000");
        let redis = info.redis_settings();
        assert_eq!((redis.username(), redis.password(), redis.db()), (Some("ann"), Some("p@ss"), 3));
    }

    #[test]
    fn a_socket() {
        let Target::Server(info) = Target::parse("redis+unix:///run/redis.sock?db=2&pass=secret").unwrap() else {
            panic!()
        };
        assert_eq!(info.addr(), &ConnectionAddr::Unix("/run/redis.sock".into()));
        assert_eq!((info.redis_settings().db(), info.redis_settings().password()), (2, Some("secret")));
    }

    #[test]
    fn sentinels() {
        let url = "redis+sentinel://ann:a,b%2F@s1,[::1],s3:5000/my%20primary/4?protocol=resp3";
        let Target::Sentinel { sentinels, service, redis, sentinel } = Target::parse(url).unwrap() else { panic!() };
        assert_eq!(addresses(&sentinels), ["s1:26379", "::1:26379", "s3:5000"]);
        assert_eq!(service, "my primary");
        assert_eq!((redis.username(), redis.password(), redis.db()), (Some("ann"), Some("a,b/"), 4));
        assert_eq!(redis.protocol(), redis::ProtocolVersion::RESP3);
        assert_eq!(sentinel.password(), None);
    }

    #[test]
    fn a_cluster() {
        let Target::Cluster { seeds, redis } = Target::parse("redis+cluster://:secret@h1:7000,h2").unwrap() else {
            panic!()
        };
        assert_eq!(addresses(&seeds), ["h1:7000", "h2:6379"]);
        assert_eq!(redis.password(), Some("secret"));
    }

    #[cfg(feature = "tls")]
    #[test]
    fn each_has_an_encrypted_variant() {
        for url in ["rediss://h/", "valkeys://h/", "rediss+sentinel://a,b/service", "rediss+cluster://a,b"] {
            assert!(Target::parse(url).unwrap().is_tls(), "{url}");
        }
        for url in ["redis://h/", "redis+sentinel://a,b/service", "redis+cluster://a,b", "redis+unix:///s"] {
            assert!(!Target::parse(url).unwrap().is_tls(), "{url}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused_without_a_word_of_the_password() {
        for url in [
            "redis+sentinel://:hunter2@s1",
            "redis+sentinel://:hunter2@s1/",
            "redis+sentinel://:hunter2@s1,,s3/service",
            "redis+sentinel://:hunter2@s1:port/service",
            "redis+sentinel://:hunter2@s1/service/database",
            "redis+sentinel://:hunter2@s1/%ff",
            "redis+sentinel::hunter2@s1/service",
            "redis+cluster://:hunter2@",
            "redis+cluster://:hunter2@h1,h2/3",
            "redis+cluster://:hunter2@h1,h2:99999",
            "redis+cluster://:hunter2@h1,",
            "redis+cluster:///",
            "redis://:hunter2@h/0#insecure",
        ] {
            let error = Target::parse(url).err().unwrap_or_else(|| panic!("{url} is refused"));
            let ConfigError::InvalidUrl { reason } = &error else { panic!("{url}: {error:?}") };
            assert!(!reason.contains("hunter2"), "{reason}");
        }
        for url in ["redis+magic://h", "magic+cluster://h", "rediss+unix:///s", "http://h"] {
            assert!(matches!(Target::parse(url), Err(ConfigError::UnknownScheme { .. })), "{url}");
        }
    }
}
