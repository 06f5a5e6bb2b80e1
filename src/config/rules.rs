use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ::http::Method;
use ::http::header::AUTHORIZATION;
use matchit::{InsertError, Router};
use serde::Deserialize;

use super::error::RulesError;
use super::format::Format;
use super::key::RuleKey;
use super::model::{self, AlgorithmName, ChargeName, ClientIpDef, File, Header, KeyPart, LimitDef, PolicyDef, RuleDef};
use super::path::normalize;
use super::pattern::check_path;
use super::rule_matches::RuleMatches;
use super::tree::{ParseError, PathSegment, path};
use crate::error::ConfigError;
use crate::http::{ClientIp, ForwardingHeader, contain_entire_family};
use crate::on_failure::OnMissingKey;
use crate::rate_limit::{Limit, Policy, Quota, RateLimitFallback};

/// The rules of a file: which requests are limited, and how. See the [module docs](crate::config) for the format.
///
/// Rules are parsed and checked as a whole, and are immutable. A [`RulesHandle`](super::RulesHandle) replaces them at runtime. Two values
/// are equal if they have the same contents, in any format. Cheap to clone.
#[derive(Clone)]
pub struct Rules {
    pub(super) inner: Arc<CompiledRules>,
}

pub(super) struct CompiledRules {
    file: File,
    pub(super) rules: Vec<Rule>,
    pub(super) rule_matches: RuleMatches,
    routers: Routers,
}

/// The result of the lookup for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// The rule for the request, and a second one if the path without normalization matches another rule.
    Limited(usize, Option<usize>),
    /// An unlimited rule.
    Unlimited,
    /// No rule matches.
    Nothing,
}

/// The result of the lookup, and all rules that match the request.
pub(super) struct Matches {
    pub(super) found: Found,
    pub(super) matching: [Option<usize>; 2],
}

/// Routers from paths to indices of rules.
struct Routers {
    /// The rules for each method that a rule lists, and for HEAD.
    by_method: HashMap<Method, Router<usize>>,
    /// The rules for all other methods.
    others: Router<usize>,
}

/// One rule, ready to be enforced.
#[derive(Debug)]
pub(super) struct Rule {
    /// Empty if the rule is unlimited.
    pub(super) counts: Vec<(Policy, RuleKey)>,
    pub(super) cost: u64,
    pub(super) on_missing_key: OnMissingKey,
    pub(super) on_store_error: RateLimitFallback,
    pub(super) replicas: u32,
    pub(super) deadline: Option<Duration>,
    /// Zero if requests do not wait.
    pub(super) wait: Duration,
    pub(super) charge: ChargeName,
}

impl Rules {
    /// The maximum size of a file: 1 MiB.
    pub const MAX_LEN: usize = 1 << 20;
    /// The maximum number of different methods in the rules.
    pub const MAX_METHODS: usize = 32;
    /// How long after the first request under the rules the log lists the rules that no request has matched: one hour.
    pub const UNMATCHED_AFTER: Duration = Duration::from_secs(3_600);

    /// Reads rules in TOML.
    ///
    /// # Errors
    ///
    /// A [`RulesError`] with the reason and the position, if the rules are invalid.
    pub fn from_toml(text: &str) -> Result<Self, RulesError> {
        Self::parse(text, Format::Toml)
    }

    /// Reads rules in YAML 1.2. Anchors and aliases are supported, tags are not.
    ///
    /// # Errors
    ///
    /// As with [`from_toml`](Self::from_toml).
    pub fn from_yaml(text: &str) -> Result<Self, RulesError> {
        Self::parse(text, Format::Yaml)
    }

    /// Reads rules in JSON.
    ///
    /// # Errors
    ///
    /// As with [`from_toml`](Self::from_toml).
    pub fn from_json(text: &str) -> Result<Self, RulesError> {
        Self::parse(text, Format::Json)
    }

    /// Reads rules from a file with the extension `.toml`, `.yaml`, `.yml` or `.json`.
    ///
    /// Blocks the thread while it reads. [`RulesHandle::reload_path`](super::RulesHandle::reload_path) does not.
    ///
    /// # Errors
    ///
    /// As with [`from_toml`](Self::from_toml), and if the file cannot be read or has another extension.
    pub fn from_path(path: impl AsRef<Path>) -> Result<Self, RulesError> {
        let path = path.as_ref();
        Self::from_bytes(&read(path)?, path)
    }

    pub(super) fn from_bytes(bytes: &[u8], file: &Path) -> Result<Self, RulesError> {
        let format = Format::of(file).ok_or_else(|| {
            RulesError::new("unknown format: the extension must be `.toml`, `.yaml`, `.yml` or `.json`")
        });
        let text = |format| match std::str::from_utf8(bytes) {
            Ok(text) => Self::parse(text, format),
            Err(error) => {
                let text = String::from_utf8_lossy(&bytes[..error.valid_up_to()]);
                Err(RulesError::new("the file is not UTF-8").at(&text, text.len()))
            }
        };
        format.and_then(text).map_err(|error| error.in_file(file))
    }

    fn parse(text: &str, format: Format) -> Result<Self, RulesError> {
        if text.len() > Self::MAX_LEN {
            return Err(RulesError::new(format!("the rules have more than {} bytes", Self::MAX_LEN)));
        }
        // Some editors on Windows write a byte order mark.
        let body = text.strip_prefix('\u{feff}').unwrap_or(text);
        let bom_len = text.len() - body.len();
        if body.trim().is_empty() {
            return Err(RulesError::new("the file is empty"));
        }
        let rules_error = |error: ParseError| {
            let rules_error = RulesError::new(&error.message).in_field(path(&error.path()));
            error.offset.map_or(rules_error.clone(), |offset| rules_error.at(text, bom_len + offset))
        };
        let document = format.parse(body).map_err(rules_error)?;
        let file = File::deserialize(&document).map_err(rules_error)?;
        let inner = CompiledRules::new(file).map_err(|error| {
            let offset = document.locate(&error.path());
            rules_error(error.at(offset))
        })?;
        for unused in inner.unused() {
            tracing::warn!(policy = unused, "no rule uses a policy of the file; add a rule, or remove the policy");
        }
        if inner.file.client_ip.is_some() && !inner.has_key(&KeyPart::ClientIp) {
            tracing::warn!("no rule has the key `client_ip`, so the table `client_ip` has no effect");
        }
        if inner.has_key(&KeyPart::Header(Header(AUTHORIZATION))) {
            tracing::warn!(
                "a rule uses the header `authorization` as a key: a client gets a quota for each spelling of the scheme and for each \
                 password that it tries; use the key `bearer_token` or `basic_user`"
            );
        }
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The number of rules.
    #[must_use]
    pub fn len(&self) -> usize {
        self.inner.rules.len()
    }

    /// Always false, because a file without rules is an error.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.inner.rules.is_empty()
    }

    /// The policies that apply to a request with this method and path, for example to test a rules file.
    ///
    /// Empty if no rule matches or the rule is unlimited. If the path matches different rules before and after normalization, the policies
    /// of [both rules](crate::config#which-rule-applies).
    #[must_use]
    pub fn policies_for(&self, method: &Method, path: &str) -> Vec<&Policy> {
        let Found::Limited(index, other) = self.inner.find(method, path).found else { return Vec::new() };
        let policies = |index: usize| self.inner.rules[index].counts.iter().map(|(policy, _)| policy);
        let mut found: Vec<&Policy> = policies(index).collect();
        for policy in other.into_iter().flat_map(policies) {
            if !found.contains(&policy) {
                found.push(policy);
            }
        }
        found
    }
}

impl PartialEq for Rules {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner) || self.inner.file == other.inner.file
    }
}

impl fmt::Debug for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rules = f.debug_map();
        for (def, rule) in self.inner.file.rules.iter().zip(&self.inner.rules) {
            rules.entry(&def.path, rule);
        }
        rules.finish()
    }
}

/// Reads a file of at most [`Rules::MAX_LEN`] bytes.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, RulesError> {
    // Check before opening: opening a FIFO waits for a writer, and reading a device may never end.
    if std::fs::metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
        let message = "not a regular file: rules cannot be read from a directory, a FIFO, a socket or a device";
        return Err(RulesError::new(message).in_file(path));
    }
    let read = || {
        let mut bytes = Vec::new();
        std::fs::File::open(path)?.take(Rules::MAX_LEN as u64 + 1).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().map_err(|error| RulesError::unreadable(error).in_file(path))?;
    if bytes.len() > Rules::MAX_LEN {
        return Err(RulesError::new(format!("the file has more than {} bytes", Rules::MAX_LEN)).in_file(path));
    }
    Ok(bytes)
}

impl CompiledRules {
    fn new(file: File) -> Result<Self, ParseError> {
        let mut policies = BTreeMap::new();
        for (name, def) in &file.policies {
            let policy = policy(name, def).map_err(|error| error.within(name.as_str()).within("policies"))?;
            policies.insert(name.as_str(), policy);
        }
        let client_ip = match &file.client_ip {
            Some(def) => client_ip(def).map_err(|error| error.within("client_ip"))?,
            None => ClientIp::peer(),
        };
        if file.rules.is_empty() {
            return Err(ParseError::new("there are no rules"));
        }
        let mut rules = Vec::with_capacity(file.rules.len());
        for (index, def) in file.rules.iter().enumerate() {
            let rule = Rule::new(def, &policies, &client_ip);
            rules.push(rule.map_err(|error| error.within(index).within("rules"))?);
        }
        let routers = routers(&file.rules)?;
        Ok(Self { rule_matches: RuleMatches::new(rules.len()), rules, routers, file })
    }

    /// The rules that match the normalized path of a request and the path as the client spells it.
    ///
    /// Some routers decode a path and others do not. A client must not get a laxer rule by another spelling.
    pub(super) fn find(&self, method: &Method, path: &str) -> Matches {
        let router = self.routers.by_method.get(method).unwrap_or(&self.routers.others);
        let at = |path: &str| router.at(path).ok().map(|found| *found.value);
        let matching = match normalize(path) {
            Cow::Borrowed(path) => [at(path), None],
            Cow::Owned(normalized) => {
                let rule = at(&normalized);
                [rule, at(path).filter(|as_spelled| rule != Some(*as_spelled))]
            }
        };
        let is_limited = |index: &usize| !self.rules[*index].counts.is_empty();
        let mut limited = matching.into_iter().flatten().filter(is_limited);
        let found = match (limited.next(), limited.next()) {
            (Some(rule), other) => Found::Limited(rule, other),
            (None, _) if matching.iter().any(Option::is_some) => Found::Unlimited,
            (None, _) => Found::Nothing,
        };
        Matches { found, matching }
    }

    /// Records the rules that a request matches. After [`Rules::UNMATCHED_AFTER`], one request also logs the unmatched rules. A separate
    /// task for this log could outlive the rules.
    pub(super) fn record(&self, matches: &Matches) {
        if self.rule_matches.record(matches.matching, Rules::UNMATCHED_AFTER) {
            self.report_unmatched();
        }
    }

    /// Logs the rules that no request has matched.
    fn report_unmatched(&self) {
        let unmatched: Vec<&RuleDef> = self.rule_matches.unmatched().map(|index| &self.file.rules[index]).collect();
        if unmatched.is_empty() {
            return;
        }
        let names: Vec<String> = unmatched.iter().take(16).map(|rule| rule.name()).collect();
        tracing::warn!(
            count = unmatched.len(), rules = %names.join(", "),
            "no request has matched these rules since they were loaded, so they limit nothing: check the spelling of their paths, and \
             which path the layer sees; in a nested router the prefix is missing"
        );
    }

    /// Combines two rules: all policies of both, the stricter settings, and the deadline of the first. Requests do not wait: the rules are
    /// combined anew for each request, so each request would have its own wait queue.
    pub(super) fn combine(&self, index: usize, other: usize) -> Rule {
        let (first, second) = (&self.rules[index], &self.rules[other]);
        let mut counts = first.counts.clone();
        let has = |count| self.file.rules[index].counts().any(|own| own == count);
        let others = self.file.rules[other].counts().zip(&second.counts);
        counts.extend(others.filter(|(def, _)| !has(*def)).map(|(_, count)| count.clone()));
        Rule {
            counts,
            cost: first.cost.max(second.cost),
            on_missing_key: match (first.on_missing_key, second.on_missing_key) {
                (OnMissingKey::Reject, _) | (_, OnMissingKey::Reject) => OnMissingKey::Reject,
                (OnMissingKey::Pass, OnMissingKey::Pass) => OnMissingKey::Pass,
            },
            on_store_error: match (first.on_store_error, second.on_store_error) {
                (RateLimitFallback::Deny, _) | (_, RateLimitFallback::Deny) => RateLimitFallback::Deny,
                (RateLimitFallback::Local, _) | (_, RateLimitFallback::Local) => RateLimitFallback::Local,
                (RateLimitFallback::Allow, RateLimitFallback::Allow) => RateLimitFallback::Allow,
            },
            replicas: first.replicas.max(second.replicas),
            deadline: first.deadline,
            wait: Duration::ZERO,
            charge: if first.charge == second.charge { first.charge } else { ChargeName::Always },
        }
    }

    /// Whether a rule uses this key, also as a fallback.
    fn has_key(&self, part: &KeyPart) -> bool {
        self.file.rules.iter().flat_map(RuleDef::counts).any(|(_, key)| key.0.contains(part))
    }

    fn unused(&self) -> impl Iterator<Item = &str> {
        let used: HashSet<&str> =
            self.rules.iter().flat_map(|rule| &rule.counts).map(|(policy, _)| policy.name()).collect();
        self.file.policies.keys().map(String::as_str).filter(move |name| !used.contains(name))
    }
}

fn policy(name: &str, def: &PolicyDef) -> Result<Policy, ParseError> {
    model::name(name).map_err(ParseError::new)?;
    let invalid = |message: &str| Err(ParseError::new(message).within("limits"));
    let Some((first, others)) = def.limits.split_first() else { return invalid("a policy needs at least one limit") };
    if def.limits.len() > Policy::MAX_LIMITS {
        return invalid(&format!("a policy takes at most {} limits", Policy::MAX_LIMITS));
    }
    let at = |index: usize| move |error: ParseError| error.within(index).within("limits");
    let mut policy = named(Policy::new(name, limit(first).map_err(at(0))?), first);
    for (position, limit_def) in others.iter().enumerate() {
        let index = position + 1;
        let (limit, earlier) = (limit(limit_def).map_err(at(index))?, &def.limits[..index]);
        let is_same = |other: &LimitDef| {
            other.algorithm == limit_def.algorithm
                && other.per == limit_def.per
                && limit_def.algorithm != AlgorithmName::TokenBucket
        };
        if let Some(other) = earlier.iter().position(is_same) {
            let message =
                format!("limits[{other}] has the same window and algorithm, so one of the two limits has no effect");
            return Err(at(index)(ParseError::new(message)));
        }
        if let Some(name) = &limit_def.name
            && let Some(other) = earlier.iter().position(|other| other.name.as_ref() == Some(name))
        {
            return Err(at(index)(ParseError::new(format!("limits[{other}] has this name already")).within("name")));
        }
        policy = named(policy.limit(limit), limit_def);
    }
    Ok(policy.mode(def.mode).on_quota_change(def.on_quota_change))
}

fn named(policy: Policy, def: &LimitDef) -> Policy {
    match &def.name {
        Some(name) => policy.named(&name.0),
        None => policy,
    }
}

fn limit(def: &LimitDef) -> Result<Limit, ParseError> {
    let invalid = |field: &'static str| move |error: ConfigError| ParseError::new(error.to_string()).within(field);
    let quota = Quota::new(def.quota, def.per.0).map_err(|error| match error {
        ConfigError::QuotaOutOfRange { .. } => invalid("quota")(error),
        _ => invalid("per")(error),
    })?;
    match (def.algorithm, def.burst) {
        (AlgorithmName::TokenBucket, Some(burst)) => Ok(quota.burst(burst).map_err(invalid("burst"))?.token_bucket()),
        (_, Some(_)) => Err(ParseError::new("only a token bucket takes a burst").within("burst")),
        (AlgorithmName::TokenBucket, None) => Ok(quota.token_bucket()),
        (AlgorithmName::FixedWindow, None) => Ok(quota.fixed_window()),
        (AlgorithmName::SlidingWindow, None) => Ok(quota.sliding_window()),
        (AlgorithmName::SlidingLog, None) => quota.sliding_log().map_err(invalid("quota")),
    }
}

fn client_ip(def: &ClientIpDef) -> Result<ClientIp, ParseError> {
    let trusted = || def.trusted.iter().flatten().map(|net| net.0);
    if contain_entire_family(trusted()) {
        let message = "the networks together contain every address, so each client could choose its own key; list only the \
                       networks of your proxies";
        return Err(ParseError::new(message).within("trusted"));
    }
    let mut client_ip = match (&def.trusted, def.trusted_hops) {
        (Some(_), None) => ClientIp::trusting(trusted()),
        (None, Some(hops @ 1..=ClientIp::MAX_HOPS)) => ClientIp::trusting_hops(hops),
        (None, Some(_)) => {
            let message = format!("the number of trusted hops is 1 to {}", ClientIp::MAX_HOPS);
            return Err(ParseError::new(message).within("trusted_hops"));
        }
        (Some(_), Some(_)) => {
            let message = "use either `trusted`, with networks, or `trusted_hops`, with a number";
            return Err(ParseError::new(message).within("trusted_hops"));
        }
        (None, None) => return Err(ParseError::new("missing field `trusted`, or `trusted_hops`")),
    };
    if let Some(header) = &def.header {
        if def.trusted.as_ref().is_some_and(Vec::is_empty) {
            return Err(
                ParseError::new("a header is read only from trusted proxies, and `trusted` is empty").within("header")
            );
        }
        client_ip = client_ip.header(match header.0.as_str() {
            "x-forwarded-for" => ForwardingHeader::XForwardedFor,
            "forwarded" => ForwardingHeader::Forwarded,
            _ => ForwardingHeader::Single(header.0.clone()),
        });
    }
    client_ip = client_ip.on_unreadable(def.on_unreadable);
    match def.ipv6_prefix {
        Some(bits) => {
            client_ip.ipv6_prefix(bits).map_err(|error| ParseError::new(error.to_string()).within("ipv6_prefix"))
        }
        None => Ok(client_ip),
    }
}

impl Rule {
    fn new(def: &RuleDef, policies: &BTreeMap<&str, Policy>, client_ip: &ClientIp) -> Result<Self, ParseError> {
        check_path(&def.path).map_err(|message| ParseError::new(message).within("path"))?;
        check_methods(def)?;
        let (counts, cost) = (Self::counts(def, policies, client_ip)?, def.cost.unwrap_or(1));
        check_cost(cost, &counts)?;
        check_settings(def)?;
        Ok(Self {
            counts,
            cost,
            on_missing_key: def.on_missing_key.unwrap_or_default(),
            on_store_error: def.on_store_error.unwrap_or_default(),
            replicas: def.replicas.unwrap_or(1),
            deadline: def.deadline.map(|deadline| deadline.0),
            wait: def.wait.map_or(Duration::ZERO, |wait| wait.0),
            charge: def.charge.unwrap_or_default(),
        })
    }

    /// The policies of a rule with their keys. Empty if the rule is unlimited.
    fn counts(
        def: &RuleDef,
        policies: &BTreeMap<&str, Policy>,
        client_ip: &ClientIp,
    ) -> Result<Vec<(Policy, RuleKey)>, ParseError> {
        let find = |name: &str| {
            policies.get(name).cloned().ok_or_else(|| {
                let known = policies.keys().copied().take(16).collect::<Vec<_>>().join("`, `");
                let name = name.chars().take(64).collect::<String>();
                let known = if known.is_empty() { "there are none".into() } else { format!("there are `{known}`") };
                ParseError::new(format!("there is no policy {name:?}; {known}")).within("policy")
            })
        };
        let mut counts = Vec::new();
        match (&def.policy, &def.policies, def.unlimited) {
            (Some(name), None, false) => {
                let policy = find(name)?;
                let Some(key) = &def.key else {
                    return Err(ParseError::new(
                        "missing field `key`; use `global` for one key that all requests share",
                    ));
                };
                counts.push((policy, RuleKey::new(key, client_ip)));
            }
            (None, Some(_), false) if def.key.is_some() => {
                return Err(ParseError::new("each of `policies` has its own key").within("key"));
            }
            (None, Some(defs), false) if defs.is_empty() => {
                return Err(ParseError::new("a rule needs at least one policy").within("policies"));
            }
            (None, Some(defs), false) => {
                for (index, count) in defs.iter().enumerate() {
                    let at = |error: ParseError| error.within(index).within("policies");
                    let policy = find(&count.policy).map_err(at)?;
                    if defs[..index].iter().any(|other| other.policy == count.policy) {
                        let message = format!("the rule has the policy `{}` twice", count.policy);
                        return Err(at(ParseError::new(message).within("policy")));
                    }
                    counts.push((policy, RuleKey::new(&count.key, client_ip)));
                }
            }
            (None, None, true) => {
                check_unlimited(def)?;
            }
            (None, None, false) => {
                return Err(ParseError::new("a rule needs one of `policy`, `policies` and `unlimited = true`"));
            }
            (Some(_), Some(_), _) => {
                return Err(ParseError::new("a rule has either `policy` or `policies`").within("policies"));
            }
            (_, _, true) => {
                return Err(ParseError::new("a rule is either unlimited or has policies").within("unlimited"));
            }
        }
        Ok(counts)
    }
}

/// Rejects settings that have no effect in an unlimited rule.
fn check_unlimited(def: &RuleDef) -> Result<(), ParseError> {
    let unused = [
        ("key", def.key.is_some()),
        ("cost", def.cost.is_some()),
        ("on_missing_key", def.on_missing_key.is_some()),
        ("on_store_error", def.on_store_error.is_some()),
        ("replicas", def.replicas.is_some()),
        ("deadline", def.deadline.is_some()),
        ("wait", def.wait.is_some()),
        ("charge", def.charge.is_some()),
    ];
    if let Some((field, _)) = unused.into_iter().find(|(_, is_set)| *is_set) {
        return Err(ParseError::new("has no effect in an unlimited rule").within(field));
    }
    Ok(())
}

/// Rejects a cost that can never be charged.
fn check_cost(cost: u64, counts: &[(Policy, RuleKey)]) -> Result<(), ParseError> {
    if cost == 0 {
        return Err(ParseError::new("a cost of 0 is never counted; use `unlimited = true`").within("cost"));
    }
    // A quota of 0 denies everything on purpose.
    let too_small = |(_, limit): &(&Policy, &Limit)| limit.capacity() > 0 && limit.capacity() < cost;
    let mut limits = counts.iter().flat_map(|(policy, _)| policy.limits().iter().map(move |limit| (policy, limit)));
    if let Some((policy, limit)) = limits.find(too_small) {
        let message =
            format!("a cost of {cost} never fits into the {} of policy `{}`", limit.capacity(), policy.name());
        return Err(ParseError::new(message).within("cost"));
    }
    Ok(())
}

/// Rejects settings that have no effect.
fn check_settings(def: &RuleDef) -> Result<(), ParseError> {
    if def.replicas == Some(0) {
        return Err(ParseError::new("the number of replicas is at least 1").within("replicas"));
    }
    if def.replicas.is_some() && def.on_store_error.is_some_and(|then| then != RateLimitFallback::Local) {
        return Err(ParseError::new("has an effect only with `on_store_error = \"local\"`").within("replicas"));
    }
    if def.on_missing_key.is_some() && def.counts().all(|(_, key)| key.0.contains(&KeyPart::Global)) {
        return Err(ParseError::new("has no effect, because every request has a key").within("on_missing_key"));
    }
    if def.deadline.is_some_and(|deadline| deadline.0.is_zero()) {
        return Err(ParseError::new(ConfigError::ZeroTimeout { setting: "deadline" }.to_string()).within("deadline"));
    }
    if def.wait.is_some_and(|wait| wait.0.is_zero()) {
        return Err(ParseError::new("a wait of 0 has no effect; leave `wait` out").within("wait"));
    }
    Ok(())
}

fn check_methods(def: &RuleDef) -> Result<(), ParseError> {
    let Some(methods) = &def.methods else { return Ok(()) };
    if methods.is_empty() {
        return Err(ParseError::new("an empty list matches no request; leave `methods` out for all").within("methods"));
    }
    for (index, method) in methods.iter().enumerate() {
        if methods[..index].contains(method) {
            return Err(ParseError::new(format!("`{}` is listed twice", method.0)).within(index).within("methods"));
        }
    }
    Ok(())
}

/// Builds a router per method, so that only rules for the method of a request compete for the most specific path.
fn routers(rules: &[RuleDef]) -> Result<Routers, ParseError> {
    let at = |index: usize, field: PathSegment, message: String| {
        ParseError::new(message).within(field).within(index).within("rules")
    };
    let paths: Vec<Cow<'_, str>> = rules.iter().map(|def| normalize(&def.path)).collect();
    // The rule for a path and method. `None` stands for all methods that no other rule of the path lists.
    let mut covers: HashMap<(&str, Option<&Method>), usize> = HashMap::new();
    let mut named = BTreeSet::from(["HEAD"]);
    for (index, def) in rules.iter().enumerate() {
        let path = &*paths[index];
        let methods = def.methods.as_deref().unwrap_or_default();
        for (i, method) in methods.iter().enumerate() {
            named.insert(method.0.as_str());
            if named.len() > Rules::MAX_METHODS {
                let message = format!("the rules list more than {} different methods", Rules::MAX_METHODS);
                return Err(at(index, "methods".into(), message));
            }
            if let Some(other) = covers.insert((path, Some(&method.0)), index) {
                let message = format!("rules[{other}] has the same path and method");
                return Err(ParseError::new(message).within(i).within("methods").within(index).within("rules"));
            }
        }
        if def.methods.is_none()
            && let Some(other) = covers.insert((path, None), index)
        {
            return Err(at(
                index,
                "path".into(),
                format!("rules[{other}] has the same path and is for all methods too"),
            ));
        }
    }
    let covering = |path: &str, method: &Method| {
        let by_name = |method| covers.get(&(path, Some(method))).copied();
        // Servers handle HEAD like GET without the body, so a HEAD request may cost as much.
        let as_get = || (method == Method::HEAD).then(|| by_name(&Method::GET)).flatten();
        by_name(method).or_else(as_get).or_else(|| covers.get(&(path, None)).copied())
    };
    let router = |chosen: &dyn Fn(&str) -> Option<usize>| {
        let mut router = Router::new();
        for (index, path) in paths.iter().enumerate() {
            if chosen(path) == Some(index) {
                let inserted = router.insert(&**path, index);
                inserted.map_err(|error| at(index, "path".into(), explain(&error)))?;
            }
        }
        Ok(router)
    };
    // Also refuses conflicting rules that apply only to methods that no rule lists.
    let others = router(&|path| covers.get(&(path, None)).copied())?;
    let mut by_method = HashMap::new();
    for name in named {
        // The name comes from a parsed method, so parsing it again never fails.
        let Ok(method) = name.parse::<Method>() else { continue };
        let of_method = router(&|path| covering(path, &method))?;
        by_method.insert(method, of_method);
    }
    Ok(Routers { by_method, others })
}

fn explain(error: &InsertError) -> String {
    match error {
        InsertError::Conflict { with } => {
            format!("the path conflicts with `{with}`, which can match the same requests")
        }
        InsertError::InvalidParamSegment => "a parameter is the last part of a segment, and the only one in it".into(),
        InsertError::InvalidParam => {
            "a parameter is written `{name}` or, for the rest of a path, `{*name}`; braces are doubled: `{{` and `}}`"
                .into()
        }
        InsertError::InvalidCatchAll => "`{*name}` is the last part of a path".into(),
        _ => error.to_string(),
    }
}
