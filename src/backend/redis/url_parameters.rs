//! The parameters after the `?` of a URL.

use std::time::Duration;

use percent_encoding::percent_decode_str;
use redis::{ProtocolVersion, RedisConnectionInfo};

use super::option_checks::{check_connections, check_timeout};
use crate::error::ConfigError;

/// All parameters, for error messages.
const KNOWN: &str = "user, pass, protocol, db, prefix, connections, connect_timeout, response_timeout";

/// The values of the parameters. A missing parameter is `None`.
#[derive(Default)]
pub(crate) struct Parameters {
    user: Option<String>,
    pass: Option<String>,
    protocol: Option<ProtocolVersion>,
    db: Option<i64>,
    pub(crate) prefix: Option<String>,
    pub(crate) connections: Option<u32>,
    pub(crate) connect_timeout: Option<Duration>,
    pub(crate) response_timeout: Option<Duration>,
}

impl Parameters {
    pub(crate) fn parse(query: &str) -> Result<Self, ConfigError> {
        let mut parameters = Self::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            // The error must not repeat a pair without `=`: it may be the rest of a password that contains a `&`.
            let (name, value) = pair
                .split_once('=')
                .ok_or_else(|| ConfigError::invalid_url("each parameter is written as `name=value`, such as `db=3`"))?;
            parameters.add(name, value)?;
        }
        Ok(parameters)
    }

    fn add(&mut self, name: &str, value: &str) -> Result<(), ConfigError> {
        match name {
            "user" => set(&mut self.user, name, text(name, value)),
            "pass" => set(&mut self.pass, name, text(name, value)),
            "protocol" => set(&mut self.protocol, name, protocol(value)),
            "db" => set(&mut self.db, name, database(value)),
            "prefix" => set(&mut self.prefix, name, text(name, value)),
            "connections" => set(&mut self.connections, name, connections(value)),
            "connect_timeout" => set(&mut self.connect_timeout, name, timeout("connect_timeout", value)),
            "response_timeout" => set(&mut self.response_timeout, name, timeout("response_timeout", value)),
            _ if name.len() <= 32 && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte)) => {
                Err(ConfigError::invalid_url(format!("unknown parameter `{name}`; known parameters: {KNOWN}")))
            }
            _ => Err(ConfigError::invalid_url(format!("it has an unknown parameter; known parameters: {KNOWN}"))),
        }
    }

    /// Merges user, password, database and protocol into the login from the rest of the URL. Contradictions are errors.
    pub(crate) fn change_login(
        &self,
        mut redis: RedisConnectionInfo,
        names_database: bool,
    ) -> Result<RedisConnectionInfo, ConfigError> {
        if let Some(user) = &self.user {
            agree(redis.username().is_none_or(|other| other == user), "the user before the `@`", "user")?;
            redis = redis.set_username(user);
        }
        if let Some(pass) = &self.pass {
            agree(redis.password().is_none_or(|other| other == pass), "the password before the `@`", "pass")?;
            redis = redis.set_password(pass);
        }
        if redis.username().is_some() && redis.password().is_none() {
            return Err(ConfigError::invalid_url(
                "it names a user without a password, so the client would not log in; add the password, or any text for a `nopass` user",
            ));
        }
        if let Some(db) = self.db {
            agree(!names_database || redis.db() == db, "the database in the path", "db")?;
            redis = redis.set_db(db);
        }
        if redis.db() < 0 {
            return Err(ConfigError::invalid_url("a database is a number from 0 on"));
        }
        Ok(match self.protocol {
            Some(protocol) => redis.set_protocol(protocol),
            None => redis,
        })
    }
}

fn set<T>(setting: &mut Option<T>, name: &str, value: Result<T, ConfigError>) -> Result<(), ConfigError> {
    if setting.is_some() {
        return Err(ConfigError::invalid_url(format!("the parameter `{name}` is repeated; known parameters: {KNOWN}")));
    }
    *setting = Some(value?);
    Ok(())
}

fn agree(does: bool, part: &str, name: &str) -> Result<(), ConfigError> {
    if does {
        return Ok(());
    }
    Err(ConfigError::invalid_url(format!("{part} and the parameter `{name}` differ; leave one of them out")))
}

/// Percent-decodes a value. A `+` stays a `+`, which is more frequent in passwords than a space.
fn text(name: &str, value: &str) -> Result<String, ConfigError> {
    let decoded = percent_decode_str(value).decode_utf8();
    decoded
        .map(String::from)
        .map_err(|_| ConfigError::invalid_url(format!("`{name}` is not UTF-8 when percent-decoded")))
}

fn protocol(value: &str) -> Result<ProtocolVersion, ConfigError> {
    match value {
        "resp2" | "2" => Ok(ProtocolVersion::RESP2),
        "resp3" | "3" => Ok(ProtocolVersion::RESP3),
        _ => Err(ConfigError::invalid_url("`protocol` is `resp2` or `resp3`")),
    }
}

fn database(value: &str) -> Result<i64, ConfigError> {
    let number = value.parse::<u32>().map(i64::from);
    number.map_err(|_| ConfigError::invalid_url("`db` is the number of a database, such as 0"))
}

fn connections(value: &str) -> Result<u32, ConfigError> {
    let number = value.parse().map_err(|_| ConfigError::invalid_url("`connections` is a number, such as 3"))?;
    check_connections(number)?;
    Ok(number)
}

fn timeout(name: &'static str, value: &str) -> Result<Duration, ConfigError> {
    let unit = value.find(|digit: char| !digit.is_ascii_digit()).unwrap_or(value.len());
    let (number, unit) = value.split_at(unit);
    let duration = number.parse::<u64>().ok().and_then(|number| match unit {
        "ms" => Some(Duration::from_millis(number)),
        "s" => Some(Duration::from_secs(number)),
        "m" => number.checked_mul(60).map(Duration::from_secs),
        _ => None,
    });
    let duration = duration.ok_or_else(|| {
        ConfigError::invalid_url(format!("`{name}` is a duration in `ms`, `s` or `m`, such as `100ms` or `2s`"))
    })?;
    check_timeout(name, duration)?;
    Ok(duration)
}
