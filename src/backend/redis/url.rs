//! Parses URLs of Redis servers.

use percent_encoding::percent_decode_str;
use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo};

use super::url_parameters::Parameters;
use crate::error::ConfigError;

/// The default port of a Sentinel.
const SENTINEL_PORT: u16 = 26_379;

/// The servers of a URL, and how to log in to them.
#[derive(Clone)]
pub(crate) enum Target {
    /// One server.
    Server(ConnectionInfo),
    /// The server that the Sentinels name as the primary of a service.
    Sentinel {
        sentinels: Vec<ConnectionAddr>,
        service: String,
        redis: RedisConnectionInfo,
        sentinel: RedisConnectionInfo,
    },
    /// The nodes of a cluster, found through any of these seeds.
    Cluster { seeds: Vec<ConnectionAddr>, redis: RedisConnectionInfo },
}

impl Target {
    /// Parses a URL into its servers and its parameters. Every scheme accepts the same parameters.
    pub(crate) fn parse(url: &str) -> Result<(Self, Parameters), ConfigError> {
        let (scheme, rest) = url.split_once(':').ok_or_else(ConfigError::no_scheme)?;
        if rest.ends_with("#insecure") {
            return Err(ConfigError::invalid_url(
                "`#insecure` would accept any certificate; give the authority of your server to `RedisOptions::ca_certificate` instead",
            ));
        }
        let kind = scheme.split_once('+').map(|(_, kind)| kind);
        let (base, kind) = match (scheme.split('+').next().unwrap_or(scheme), kind) {
            ("unix", None) | ("redis" | "valkey", Some("unix")) => ("unix", Some("unix")),
            ("redis" | "valkey", None | Some("sentinel" | "cluster")) => ("redis", kind),
            ("rediss" | "valkeys", None | Some("sentinel" | "cluster")) if cfg!(feature = "tls") => ("rediss", kind),
            ("rediss" | "valkeys", None | Some("sentinel" | "cluster")) => {
                return Err(ConfigError::FeatureMissing { feature: "tls" });
            }
            _ => return Err(ConfigError::unknown_scheme(scheme)),
        };
        if rest.contains('#') {
            return Err(ConfigError::invalid_url(
                "it has a `#`, which has to be written as `%23` in a name or password",
            ));
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        if query.contains('@') && !rest.contains('@') {
            // The part of a password after an unescaped `?` looks like a parameter. So the error must not quote even parameter names.
            return Err(ConfigError::invalid_url(
                "it has a `?` before an `@`: write `?` in a password as `%3F`, `@` in a parameter as `%40`",
            ));
        }
        let parameters = Parameters::parse(query)?;
        let mut target = match kind {
            Some("sentinel") => sentinel(base, &Parts::split(rest)?)?,
            Some("cluster") => cluster(base, &Parts::split(rest)?)?,
            _ => server(&format!("{base}:{rest}"))?,
        };
        let redis = parameters.change_login(target.redis().clone(), path_names_database(kind, rest))?;
        if matches!(target, Self::Cluster { .. }) && redis.db() != 0 {
            return Err(ConfigError::invalid_url("a cluster has only database 0, so its URL can name no other one"));
        }
        target.change_login(|_| redis);
        Ok((target, parameters))
    }

    fn redis(&self) -> &RedisConnectionInfo {
        match self {
            Self::Server(info) => info.redis_settings(),
            Self::Sentinel { redis, .. } | Self::Cluster { redis, .. } => redis,
        }
    }

    /// Changes the login of the data servers.
    pub(crate) fn change_login(&mut self, change: impl FnOnce(RedisConnectionInfo) -> RedisConnectionInfo) {
        match self {
            Self::Server(info) => *info = info.clone().set_redis_settings(change(info.redis_settings().clone())),
            Self::Sentinel { redis, .. } | Self::Cluster { redis, .. } => *redis = change(redis.clone()),
        }
    }

    /// Whether connections are encrypted.
    #[cfg(feature = "tls")]
    pub(crate) fn is_tls(&self) -> bool {
        let first = match self {
            Self::Server(info) => Some(info.addr()),
            Self::Sentinel { sentinels: addresses, .. } | Self::Cluster { seeds: addresses, .. } => addresses.first(),
        };
        matches!(first, Some(ConnectionAddr::TcpTls { .. }))
    }
}

/// The parts of `//userinfo@host,host/path`.
struct Parts<'a> {
    // With the `@`.
    userinfo: &'a str,
    hosts: Vec<&'a str>,
    // Without the leading slash.
    path: &'a str,
}

impl<'a> Parts<'a> {
    fn split(rest: &'a str) -> Result<Self, ConfigError> {
        let rest = rest
            .strip_prefix("//")
            .ok_or_else(|| ConfigError::invalid_url("`//` and a host should follow the scheme"))?;
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (userinfo, hosts) = authority.split_at(authority.rfind('@').map_or(0, |at| at + 1));
        Ok(Self { userinfo, hosts: hosts.split(',').collect(), path })
    }

    /// For each host, builds a URL with the same login and database, and lets the client library parse it.
    fn parse_hosts(
        &self,
        base: &str,
        default_port: Option<u16>,
        database: &str,
    ) -> Result<Vec<ConnectionInfo>, ConfigError> {
        let each = self.hosts.iter().map(|host| {
            if host.is_empty() {
                return Err(ConfigError::invalid_url("a host is missing"));
            }
            let names_port = host.rsplit(']').next().is_some_and(|end| end.contains(':'));
            let port = match default_port {
                Some(port) if !names_port => format!(":{port}"),
                _ => String::new(),
            };
            parse(&format!("{base}://{}{host}{port}/{database}", self.userinfo))
        });
        each.collect()
    }
}

/// Whether the path of a URL names a database. The path of a Unix socket URL is the path of the socket.
fn path_names_database(kind: Option<&str>, rest: &str) -> bool {
    let path = rest.trim_start_matches('/').split_once('/').map_or("", |(_, path)| path);
    let database = match kind {
        Some("sentinel") => path.split_once('/').map_or("", |(_, database)| database),
        Some("unix") => "",
        _ => path,
    };
    !database.trim_matches('/').is_empty()
}

fn server(url: &str) -> Result<Target, ConfigError> {
    parse(url).map(Target::Server)
}

fn sentinel(base: &str, parts: &Parts<'_>) -> Result<Target, ConfigError> {
    let (service, database) = parts.path.split_once('/').unwrap_or((parts.path, ""));
    let service = percent_decode_str(service)
        .decode_utf8()
        .map_err(|_| ConfigError::invalid_url("the service name is not UTF-8"))?;
    if service.is_empty() {
        return Err(ConfigError::invalid_url(
            "the path should name the service that the Sentinels watch, as `/mymaster` does",
        ));
    }
    let infos = parts.parse_hosts(base, Some(SENTINEL_PORT), database)?;
    let redis = login_of(&infos);
    let sentinels = infos.into_iter().map(|info| info.addr().clone()).collect();
    // The login of the URL is for the data servers. Sentinels have their own users, and most require no login.
    Ok(Target::Sentinel { sentinels, service: service.into_owned(), redis, sentinel: RedisConnectionInfo::default() })
}

fn cluster(base: &str, parts: &Parts<'_>) -> Result<Target, ConfigError> {
    let infos = parts.parse_hosts(base, None, parts.path)?;
    let redis = login_of(&infos);
    Ok(Target::Cluster { seeds: infos.into_iter().map(|info| info.addr().clone()).collect(), redis })
}

fn login_of(infos: &[ConnectionInfo]) -> RedisConnectionInfo {
    infos.first().map(|info| info.redis_settings().clone()).unwrap_or_default()
}

fn parse(url: &str) -> Result<ConnectionInfo, ConfigError> {
    url.into_connection_info().map_err(|error| ConfigError::InvalidUrl { reason: reason(&error) })
}

/// Describes an invalid URL, without the part of the client library's message that repeats a piece of the URL.
fn reason(error: &redis::RedisError) -> String {
    let text = error.to_string();
    let text = match error.detail() {
        Some(detail) => text.replace(detail, "..."),
        None => text,
    };
    // The client library appends its kind of error, which does not help the user.
    text.split_once(" - ").map_or(text.as_str(), |(sentence, _)| sentence).to_owned()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn addresses(addresses: &[ConnectionAddr]) -> Vec<String> {
        addresses.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn server_url() {
        let (Target::Server(info), _) = Target::parse("valkey://ann:p%40ss@example.com:7000/3").unwrap() else {
            panic!()
        };
        assert_eq!(info.addr().to_string(), "example.com:7000");
        let redis = info.redis_settings();
        assert_eq!((redis.username(), redis.password(), redis.db()), (Some("ann"), Some("p@ss"), 3));
    }

    #[test]
    fn socket_url() {
        let url = "redis+unix:///run/redis.sock?db=2&pass=secret";
        let (Target::Server(info), _) = Target::parse(url).unwrap() else { panic!() };
        assert_eq!(info.addr(), &ConnectionAddr::Unix("/run/redis.sock".into()));
        assert_eq!((info.redis_settings().db(), info.redis_settings().password()), (2, Some("secret")));
    }

    #[test]
    fn sentinels() {
        let url = "redis+sentinel://ann:a,b%2F@s1,[::1],s3:5000/my%20primary/4?protocol=resp3";
        let (Target::Sentinel { sentinels, service, redis, sentinel }, _) = Target::parse(url).unwrap() else {
            panic!()
        };
        assert_eq!(addresses(&sentinels), ["s1:26379", "::1:26379", "s3:5000"]);
        assert_eq!(service, "my primary");
        assert_eq!((redis.username(), redis.password(), redis.db()), (Some("ann"), Some("a,b/"), 4));
        assert_eq!(redis.protocol(), redis::ProtocolVersion::RESP3);
        assert_eq!(sentinel.password(), None);
    }

    #[test]
    fn cluster_url() {
        let url = "redis+cluster://:secret@h1:7000,h2";
        let (Target::Cluster { seeds, redis }, _) = Target::parse(url).unwrap() else { panic!() };
        assert_eq!(addresses(&seeds), ["h1:7000", "h2:6379"]);
        assert_eq!(redis.password(), Some("secret"));
    }

    #[cfg(feature = "tls")]
    #[test]
    fn each_topology_has_an_encrypted_scheme() {
        for url in ["rediss://h/", "valkeys://h/", "rediss+sentinel://a,b/service", "rediss+cluster://a,b"] {
            assert!(Target::parse(url).unwrap().0.is_tls(), "{url}");
        }
        for url in ["redis://h/", "redis+sentinel://a,b/service", "redis+cluster://a,b", "redis+unix:///s"] {
            assert!(!Target::parse(url).unwrap().0.is_tls(), "{url}");
        }
    }

    #[test]
    fn invalid_urls_are_refused_without_the_password() {
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
            "redis://:hunter2@h/0#anything",
            "redis://:hunter#2@h/0",
            "redis://:x?hunter2@h/0",
            "redis://:x?hunter2=hunter2@h/0",
            "redis://:x?y&hunter2=1@h/0",
            "redis://h/0?hunter2",
            "redis://h/0?pass=hunter2&dbb=1",
            "redis://h/0?pass=hunter2%ff",
            "redis://h/0?pass=hunter2&pass=hunter2",
            "redis://h/0?db=hunter2",
            "redis://h/0?connections=hunter2",
            "redis://h/0?connect_timeout=hunter2",
            "redis://h/0?protocol=hunter2",
            "redis://:hunter2@h/0?pass=other",
            "redis://hunter2:x@h/0?user=other",
            "redis://:hunter2@h/-1",
            "hunter2@h:6379",
            ":hunter2@h:6379",
        ] {
            let error = Target::parse(url).err().unwrap_or_else(|| panic!("{url} should be refused"));
            let ConfigError::InvalidUrl { reason } = &error else { panic!("{url}: {error:?}") };
            assert!(!reason.contains("hunter2"), "{reason}");
        }
        for url in ["redis+magic://h", "magic+cluster://h", "rediss+unix:///s", "http://h"] {
            assert!(matches!(Target::parse(url), Err(ConfigError::UnknownScheme { .. })), "{url}");
        }
    }

    #[test]
    fn parameters_work_in_every_scheme() {
        let query = "user=ann&pass=p%40s%3Fs+w&protocol=resp3&prefix=my%20shop&connections=7\
                     &connect_timeout=2s&response_timeout=250ms";
        for (url, database) in [
            ("redis://h/?db=3&", 3),
            ("valkey://h?db=3&", 3),
            ("redis://h/3?db=3&", 3),
            ("redis://h/3?", 3),
            #[cfg(feature = "tls")]
            ("rediss://h/?db=3&", 3),
            #[cfg(feature = "tls")]
            ("valkeys://h/?db=3&", 3),
            ("unix:///s?db=3&", 3),
            ("redis+unix:///s?db=3&", 3),
            ("valkey+unix:///s?db=3&", 3),
            ("redis+sentinel://s1,s2/service?db=3&", 3),
            ("redis+sentinel://s1,s2/service/3?db=3&", 3),
            ("redis+cluster://h1,h2?db=0&", 0),
        ] {
            let (mut target, parameters) = Target::parse(&format!("{url}{query}")).unwrap();
            target.change_login(|redis| {
                assert_eq!((redis.username(), redis.password()), (Some("ann"), Some("p@s?s+w")), "{url}");
                assert_eq!((redis.db(), redis.protocol()), (database, redis::ProtocolVersion::RESP3), "{url}");
                redis
            });
            assert_eq!(parameters.prefix.as_deref(), Some("my shop"), "{url}");
            assert_eq!(parameters.connections, Some(7), "{url}");
            assert_eq!(parameters.connect_timeout, Some(Duration::from_secs(2)), "{url}");
            assert_eq!(parameters.response_timeout, Some(Duration::from_millis(250)), "{url}");
        }
    }

    #[test]
    fn mistakes_in_parameters_are_named() {
        let known = "user, pass, protocol, db, prefix, connections, connect_timeout, response_timeout";
        let no_password = "it names a user without a password, so the client would not log in; add the password, or any text for a `nopass` user";
        for (url, expected) in [
            ("redis://h/?dbb=1", &*format!("unknown parameter `dbb`; known parameters: {known}")),
            ("redis+cluster://h/?DB=0", &format!("unknown parameter `DB`; known parameters: {known}")),
            ("redis://h/?a%20b=1", &format!("it has an unknown parameter; known parameters: {known}")),
            ("unix:///s?db=1&db=1", &format!("the parameter `db` is repeated; known parameters: {known}")),
            ("redis://h/?db", "each parameter is written as `name=value`, such as `db=3`"),
            ("redis://h/1?db=2", "the database in the path and the parameter `db` differ; leave one of them out"),
            ("redis://h/0?db=2", "the database in the path and the parameter `db` differ; leave one of them out"),
            (
                "redis+sentinel://h/service/1?db=2",
                "the database in the path and the parameter `db` differ; leave one of them out",
            ),
            ("redis+cluster://h?db=1", "a cluster has only database 0, so its URL can name no other one"),
            ("redis+cluster://h/1", "a cluster has only database 0, so its URL can name no other one"),
            ("redis://a@h?user=b", "the user before the `@` and the parameter `user` differ; leave one of them out"),
            ("redis://ann@h", no_password),
            ("redis://ann:@h", no_password),
            ("redis://h?user=ann", no_password),
            ("unix:///s?user=ann", no_password),
            ("redis+sentinel://ann@s1,s2/service", no_password),
            ("redis+cluster://h1,h2?user=ann", no_password),
            (
                "redis://:a@h?pass=b",
                "the password before the `@` and the parameter `pass` differ; leave one of them out",
            ),
            ("redis://h?protocol=4", "`protocol` is `resp2` or `resp3`"),
            ("redis://h?db=-1", "`db` is the number of a database, such as 0"),
            ("redis://h?connections=many", "`connections` is a number, such as 3"),
            (
                "redis://h?connect_timeout=2",
                "`connect_timeout` is a duration in `ms`, `s` or `m`, such as `100ms` or `2s`",
            ),
            (
                "redis://h?connect_timeout=1.5s",
                "`connect_timeout` is a duration in `ms`, `s` or `m`, such as `100ms` or `2s`",
            ),
            ("redis://h?prefix=%ff", "`prefix` is not UTF-8 when percent-decoded"),
        ] {
            let error = Target::parse(url).err().unwrap_or_else(|| panic!("{url} should be refused"));
            assert_eq!(error, ConfigError::invalid_url(expected), "{url}");
        }
    }

    #[test]
    fn settings_out_of_range_have_own_errors() {
        for (url, expected) in [
            ("redis://h?connections=0", ConfigError::ConnectionsOutOfRange { connections: 0, max: 1_024 }),
            ("redis://h?connections=1025", ConfigError::ConnectionsOutOfRange { connections: 1_025, max: 1_024 }),
            ("redis://h?connect_timeout=0s", ConfigError::ZeroTimeout { setting: "connect_timeout" }),
            ("redis://h?response_timeout=0ms", ConfigError::ZeroTimeout { setting: "response_timeout" }),
        ] {
            assert_eq!(Target::parse(url).err(), Some(expected), "{url}");
        }
    }
}
