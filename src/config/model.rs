//! The data model of a rules file, before it is validated as a whole. The docs of the module `config` describe the fields.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

use ::http::{HeaderName, Method};
use ipnet::IpNet;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer, StrDeserializer};
use serde::de::{Error, IntoDeserializer, MapAccess, SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};

use crate::http::{OnUnreadable, contain_entire_family};
use crate::on_failure::OnMissingKey;
use crate::rate_limit::{Mode, QuotaChange, RateLimitFallback};

#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    #[serde(default)]
    pub(super) policies: BTreeMap<String, PolicyDef>,
    #[serde(default)]
    pub(super) rules: Vec<RuleDef>,
    pub(super) client_ip: Option<ClientIpDef>,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PolicyDef {
    pub(super) limits: Vec<LimitDef>,
    #[serde(default, with = "ModeDef")]
    pub(super) mode: Mode,
    #[serde(default, with = "QuotaChangeDef")]
    pub(super) on_quota_change: QuotaChange,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LimitDef {
    pub(super) quota: u64,
    pub(super) per: Time,
    pub(super) algorithm: AlgorithmName,
    pub(super) burst: Option<u64>,
    pub(super) name: Option<Name>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum AlgorithmName {
    TokenBucket,
    FixedWindow,
    SlidingWindow,
    SlidingLog,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RuleDef {
    pub(super) path: String,
    pub(super) methods: Option<Vec<MethodName>>,
    pub(super) policy: Option<String>,
    pub(super) key: Option<KeyDef>,
    pub(super) policies: Option<Vec<CountDef>>,
    #[serde(default)]
    pub(super) unlimited: bool,
    pub(super) cost: Option<u64>,
    #[serde(default, with = "on_missing_key")]
    pub(super) on_missing_key: Option<OnMissingKey>,
    #[serde(default, with = "on_store_error")]
    pub(super) on_store_error: Option<RateLimitFallback>,
    pub(super) replicas: Option<u32>,
    pub(super) deadline: Option<Time>,
    pub(super) wait: Option<Time>,
    pub(super) charge: Option<ChargeName>,
}

impl RuleDef {
    /// The name of a rule in the log.
    pub(super) fn name(&self) -> String {
        let methods: Vec<&str> = self.methods.iter().flatten().map(|method| method.0.as_str()).collect();
        if methods.is_empty() { self.path.clone() } else { format!("{} {}", methods.join("|"), self.path) }
    }

    /// The policies of the rule with their keys.
    pub(super) fn counts(&self) -> impl Iterator<Item = (&String, &KeyDef)> {
        let one = self.policy.as_ref().zip(self.key.as_ref());
        one.into_iter().chain(self.policies.iter().flatten().map(|count| (&count.policy, &count.key)))
    }
}

/// Which responses are charged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ChargeName {
    #[default]
    Always,
    Failures,
    Successes,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CountDef {
    pub(super) policy: String,
    pub(super) key: KeyDef,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ClientIpDef {
    pub(super) trusted: Option<Vec<Net>>,
    pub(super) trusted_hops: Option<usize>,
    pub(super) header: Option<Header>,
    #[serde(default, with = "OnUnreadableDef")]
    pub(super) on_unreadable: OnUnreadable,
    pub(super) ipv6_prefix: Option<u8>,
}

/// Key extractors in order. The first that finds a key is used.
#[derive(Debug, PartialEq)]
pub(super) struct KeyDef(pub(super) Vec<KeyPart>);

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum KeyPart {
    Global,
    PeerIp,
    ClientIp,
    BearerToken,
    BasicUser,
    Header(Header),
}

impl<'de> Deserialize<'de> for KeyDef {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Parts;

        impl<'de> Visitor<'de> for Parts {
            type Value = Vec<KeyPart>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(
                    "`global`, `peer_ip`, `client_ip`, `bearer_token`, `basic_user`, a table with `header`, or a list of these",
                )
            }

            fn visit_str<E: Error>(self, name: &str) -> Result<Self::Value, E> {
                let name: StrDeserializer<'_, E> = name.into_deserializer();
                KeyPart::deserialize(name).map(|part| vec![part])
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                KeyPart::deserialize(MapAccessDeserializer::new(map)).map(|part| vec![part])
            }

            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Self::Value, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(seq))
            }
        }

        let parts = deserializer.deserialize_any(Parts)?;
        if parts.is_empty() {
            return Err(D::Error::custom("a list of keys needs at least one"));
        }
        if parts[..parts.len() - 1].contains(&KeyPart::Global) {
            return Err(D::Error::custom("every request has the key `global`, so no key can follow it"));
        }
        Ok(Self(parts))
    }
}

// The spellings of the crate's enums in a file.

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum ModeDef {
    Enforce,
    Shadow,
    Percent(u64),
}

impl ModeDef {
    fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Mode, D::Error> {
        Ok(match <Self as Deserialize>::deserialize(deserializer)? {
            Self::Enforce => Mode::Enforce,
            Self::Shadow => Mode::Shadow,
            Self::Percent(percent) => match u8::try_from(percent) {
                Ok(percent @ 0..=100) => Mode::Percent(percent),
                _ => return Err(D::Error::custom(format!("a percentage is 0 to 100, not {percent}"))),
            },
        })
    }
}

#[derive(Deserialize)]
#[serde(remote = "QuotaChange", rename_all = "snake_case")]
enum QuotaChangeDef {
    Keep,
    Reset,
    Proportional,
}

#[derive(Deserialize)]
#[serde(remote = "OnUnreadable", rename_all = "snake_case")]
enum OnUnreadableDef {
    Proxy,
    Reject,
}

#[derive(Deserialize)]
#[serde(remote = "OnMissingKey", rename_all = "snake_case")]
enum OnMissingKeyDef {
    Reject,
    Pass,
}

#[derive(Deserialize)]
#[serde(remote = "RateLimitFallback", rename_all = "snake_case")]
enum RateLimitFallbackDef {
    Local,
    Allow,
    Deny,
}

/// Deserializes an optional field of a type without serde support.
macro_rules! optional {
    ($module:ident: $type:ident as $def:literal) => {
        mod $module {
            use super::*;

            pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<$type>, D::Error> {
                #[derive(Deserialize)]
                struct Wrapper(#[serde(with = $def)] $type);

                Ok(Option::<Wrapper>::deserialize(deserializer)?.map(|Wrapper(value)| value))
            }
        }
    };
}

optional!(on_missing_key: OnMissingKey as "OnMissingKeyDef");
optional!(on_store_error: RateLimitFallback as "RateLimitFallbackDef");

/// Types that are parsed from text.
macro_rules! text {
    ($($name:ident($type:ty): $parse:expr;)*) => {$(
        #[derive(Clone, Debug, PartialEq)]
        pub(super) struct $name(pub(super) $type);

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                let parse: fn(&str) -> Result<$type, String> = $parse;
                parse(&text).map(Self).map_err(D::Error::custom)
            }
        }
    )*};
}

text! {
    Net(IpNet): net;
    Header(HeaderName): |text| {
        HeaderName::from_str(text).map_err(|_| format!("`{}` is not a header name", text.escape_debug()))
    };
    MethodName(Method): method;
    Name(String): |text| match name(text) {
        Ok(()) => Ok(text.to_owned()),
        Err(reason) => Err(reason),
    };
}

/// A duration, such as `250ms`, `90s` or `1h30m`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Time(pub(super) Duration);

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TimeVisitor;

        impl Visitor<'_> for TimeVisitor {
            type Value = Duration;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a time as text with its unit, such as \"250ms\", \"1s\", \"15m\", \"1h\" or \"1d\"")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Duration, E> {
                time(text).ok_or_else(|| E::invalid_value(Unexpected::Str(text), &self))
            }
        }

        deserializer.deserialize_str(TimeVisitor).map(Self)
    }
}

/// Numbers with their units, the larger units first.
fn time(text: &str) -> Option<Duration> {
    let units = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];
    let mut allowed = units.as_slice();
    let (mut rest, mut total_ms) = (text, 0_u64);
    while !rest.is_empty() {
        let digits = rest.find(|char: char| !char.is_ascii_digit())?;
        let number: u64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let unit_len = rest.find(|char: char| char.is_ascii_digit()).unwrap_or(rest.len());
        let index = allowed.iter().position(|(unit, _)| *unit == &rest[..unit_len])?;
        total_ms = total_ms.checked_add(number.checked_mul(allowed[index].1)?)?;
        (rest, allowed) = (&rest[unit_len..], &allowed[index + 1..]);
    }
    (!text.is_empty()).then(|| Duration::from_millis(total_ms))
}

fn net(text: &str) -> Result<IpNet, String> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Ok(address.into());
    }
    let net: IpNet = text.parse().map_err(|_| {
        format!("`{}` is not a network such as `10.0.0.0/8` or `2001:db8::/32`, nor an address", text.escape_debug())
    })?;
    if net != net.trunc() {
        return Err(format!("`{text}` is an address within a network; the network is `{}`", net.trunc()));
    }
    if contain_entire_family([net]) {
        return Err(format!(
            "`{text}` trusts every address, so each client could choose its own key; list only the networks of your proxies"
        ));
    }
    Ok(net)
}

/// Refuses lower-case letters: methods are case-sensitive, so a rule for `get` would match no request.
fn method(text: &str) -> Result<Method, String> {
    let method = Method::from_str(text).ok().filter(|_| !text.bytes().any(|byte| byte.is_ascii_lowercase()));
    method.ok_or_else(|| format!("`{}` is not a method such as `GET` or `POST`", text.escape_debug()))
}

/// Checks a name, which must be readable for clients and safe in stored keys without escaping.
pub(super) fn name(text: &str) -> Result<(), String> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if (1..=crate::Key::MAX_LEN).contains(&text.len()) && text.bytes().all(allowed) {
        Ok(())
    } else {
        let max = crate::Key::MAX_LEN;
        Err(format!(
            "a name is 1 to {max} letters, digits, `-`, `_` and `.`, not {:?}",
            text.chars().take(64).collect::<String>()
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        let cases = [("250ms", 250), ("1s", 1_000), ("15m", 900_000), ("1h", 3_600_000), ("1d", 86_400_000)];
        for (text, ms) in cases.into_iter().chain([("1h30m", 5_400_000), ("1s500ms", 1_500), ("0s", 0)]) {
            assert_eq!(time(text), Some(Duration::from_millis(ms)), "{text}");
        }
        for text in
            ["", "1", "s", "1 s", " 1s", "-1s", "1.5s", "1us", "30m1h", "1s1s", "1S", "99999999999999999999s", "1é"]
        {
            assert_eq!(time(text), None, "{text}");
        }
        assert_eq!(time(&format!("{}d", u64::MAX)), None);
    }
}
