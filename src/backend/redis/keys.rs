//! The names of all keys and channels in Redis. No other module composes them, except the channels of workers: the stores and scripts
//! append the ID of a worker.

use std::borrow::Cow;

use smallvec::{SmallVec, smallvec};

use crate::cache::store::CacheKey;
use crate::delay_queue::store::QueueKey;
use crate::idempotency::Operation;
use crate::key::Key;
use crate::lock::LockKey;
use crate::rate_limit::Policy;
use crate::store::token::Token;

/// The version of the layout of keys. It is raised if two releases must not read each other's keys.
const LAYOUT: &str = "2";

/// The number of partitions of the idempotency records. Each partition is in one slot of a cluster.
pub(crate) const PARTITIONS: u64 = 64;

/// The partition of an operation. It is the same for all processes, so the hash has no random key. FNV-1a alone would put sequential keys
/// into few partitions, since their last bytes hardly reach the upper bits. The finalizer of MurmurHash3 spreads them.
fn partition(scope: &str, key: &str) -> String {
    let bytes = scope.bytes().chain([b':']).chain(key.bytes());
    let hash =
        bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    let spread = [0xff51_afd7_ed55_8ccd_u64, 0xc4ce_b9fe_1a85_ec53]
        .into_iter()
        .fold(hash, |hash, factor| (hash ^ (hash >> 33)).wrapping_mul(factor));
    (((spread ^ (spread >> 33)) >> 32) % PARTITIONS).to_string()
}

const HEX: &[u8; 16] = b"0123456789abcdef";

/// The keys with one prefix.
#[derive(Clone, Debug)]
pub(crate) struct Keys {
    // `<prefix>:<layout>:`, percent-encoded.
    root: String,
}

impl Keys {
    pub(crate) fn new(prefix: &str) -> Self {
        Self { root: format!("{}:{LAYOUT}:", Key::new(prefix)) }
    }

    /// The key for the script that tests the permissions at startup. The script leaves no value there.
    pub(crate) fn probe(&self) -> String {
        [&self.root, "{probe}"].concat()
    }

    /// `<prefix>:2:{rate_limit:<policy>:<key>}:<shape>:counts`, and for each sliding log of the policy
    /// `...{...}:<shape>:log:<window in us>`. If several logs have the same window, the further ones end with `:2` and so on.
    ///
    /// The shape stands for the algorithms and windows of the limits, so limits that cannot share counts have different keys.
    pub(crate) fn rate_limit(&self, policy: &Policy, key: &Key) -> SmallVec<[String; 1]> {
        let mut keys = smallvec![self.counts(policy, key)];
        let mut windows = SmallVec::<[u64; 4]>::new();
        for log in policy.logs() {
            windows.push(log.span);
            let number = match windows.iter().filter(|window| **window == log.span).count() {
                1 => String::new(),
                number => format!(":{number}"),
            };
            let mut key = self.rate_limit_prefix(policy, key);
            key.extend(["log:", &log.span.to_string(), &number]);
            keys.push(key);
        }
        keys
    }

    /// The key of the counts: the first key of [`rate_limit`](Self::rate_limit), and the only key of a policy without sliding logs.
    pub(crate) fn counts(&self, policy: &Policy, key: &Key) -> String {
        let mut key = self.rate_limit_prefix(policy, key);
        key.push_str("counts");
        key
    }

    /// The common prefix of these keys. The string has capacity for most of their endings.
    fn rate_limit_prefix(&self, policy: &Policy, key: &Key) -> String {
        let (name, key, shape) = (policy.name(), key.as_str(), policy.shape());
        let mut text = String::with_capacity(self.root.len() + name.len() + key.len() + shape.len() + 48);
        for piece in [&self.root, "{rate_limit:", name, ":", key, "}:", shape, ":"] {
            text.push_str(piece);
        }
        text
    }

    /// `<prefix>:2:{lock:<name>:<key>}:lease`.
    pub(crate) fn lease(&self, lock: &LockKey) -> String {
        self.lock(lock, "lease")
    }

    /// `<prefix>:2:{idempotency:<part>}:<scope>:<key>:record`.
    ///
    /// The `<part>` is the partition of the operation, and determines the slot on a cluster. So a record shares a slot with the set
    /// [`records`](Self::records) of its caller in this partition.
    pub(crate) fn idempotency(&self, operation: &Operation) -> String {
        self.operation(operation, "record")
    }

    /// The channel `<prefix>:2:{idempotency:<part>}:<scope>:<key>:done`.
    pub(crate) fn done(&self, operation: &Operation) -> String {
        self.operation(operation, "done")
    }

    /// The `SCAN` pattern for the records of a scope, or of all scopes.
    pub(crate) fn operations(&self, scope: Option<&Key>) -> String {
        let start = literal(&[&self.root, "{idempotency:"].concat());
        match scope {
            Some(scope) => [&start, "*}:", &literal(&escape_part(scope)), ":*:record"].concat(),
            None => start + "*}:*:record",
        }
    }

    /// The key of the set of a caller's records: `<prefix>:2:{idempotency}:<scope>:records`. On a cluster, each partition has its own:
    /// `<prefix>:2:{idempotency:<part>}:<scope>:records`.
    pub(crate) fn records(&self, scope: &Key, operation: &Operation, is_cluster: bool) -> String {
        let scope = escape_part(scope);
        if is_cluster {
            let part = partition(&escape_part(operation.scope()), operation.key().as_str());
            return [&self.root, "{idempotency:", &part, "}:", &scope, ":records"].concat();
        }
        [&self.root, "{idempotency}:", &scope, ":records"].concat()
    }

    /// The operation of a record.
    pub(crate) fn operation_of(&self, record: &str) -> Option<Operation> {
        let name = record.strip_prefix(&self.root)?.strip_prefix("{idempotency:")?.strip_suffix(":record")?;
        let (_, name) = name.split_once("}:")?;
        Operation::parse(name)
    }

    fn operation(&self, operation: &Operation, part: &str) -> String {
        let (scope, key) = (escape_part(operation.scope()), operation.key().as_str());
        [&self.root, "{idempotency:", &self::partition(&scope, key), "}:", &scope, ":", key, ":", part].concat()
    }

    /// `<prefix>:2:{cache:<cache>:<key>}:<part>`.
    pub(crate) fn cache(&self, key: &CacheKey) -> CacheKeys {
        CacheKeys {
            entry: self.cache_entry(key),
            lease: self.cache_part(key, "}:lease"),
            changed: self.cache_part(key, "}:changed"),
        }
    }

    /// `<prefix>:2:{cache:<cache>:<key>}:entry`.
    pub(crate) fn cache_entry(&self, key: &CacheKey) -> String {
        self.cache_part(key, "}:entry")
    }

    fn cache_part(&self, key: &CacheKey, part: &str) -> String {
        [&self.root, "{cache:", &escape_part(key.cache()), ":", key.key().as_str(), part].concat()
    }

    /// `<prefix>:2:{cache:<cache>:<tag>}:generation`.
    pub(crate) fn generation(&self, tag: &CacheKey) -> String {
        self.cache_part(tag, "}:generation")
    }

    /// The key of the ids of a filter's versions: `<prefix>:2:{cache_filter:<filter>}:versions`.
    pub(crate) fn filter_versions(&self, filter: &Key) -> String {
        [&self.root, "{cache_filter:", filter.as_str(), "}:versions"].concat()
    }

    /// The key of a version: `<prefix>:2:{cache_filter:<filter>}:bits:<version>`.
    pub(crate) fn filter_bits(&self, filter: &Key, version: &Token) -> String {
        let mut key = [&self.root, "{cache_filter:", filter.as_str(), "}:bits:"].concat();
        key.extend(
            version
                .as_bytes()
                .iter()
                .flat_map(|byte| [byte >> 4, byte & 15])
                .map(|half| char::from(HEX[usize::from(half)])),
        );
        key
    }

    /// The channel `<prefix>:2:{lock:<name>:<key>}:free`.
    pub(crate) fn free_channel(&self, lock: &LockKey) -> String {
        self.lock(lock, "free")
    }

    /// The channel `<prefix>:2:{lock:<name>:<key>}:asked`.
    pub(crate) fn release_requests(&self, lock: &LockKey) -> String {
        self.lock(lock, "asked")
    }

    /// `<prefix>:2:{delay_queue:<name>}:<part>`, and for the further partitions of a split queue `...{delay_queue:<name>#<number>}:<part>`.
    pub(crate) fn delay_queue(&self, queue: &QueueKey) -> QueueKeys {
        let tag = match queue.partition() {
            0 => [&self.root, "{delay_queue:", queue.name().as_str(), "}:"].concat(),
            // A name includes `#` only as the first character of a digest, so two queues never have the same tag.
            part => [&self.root, "{delay_queue:", queue.name().as_str(), "#", &part.to_string(), "}:"].concat(),
        };
        let key = |part: &str| [&tag, part].concat();
        QueueKeys {
            jobs: key("jobs"),
            due: [key("due:high"), key("due:normal"), key("due:low")],
            leases: key("leases"),
            dead: key("dead"),
            unique: key("unique"),
            unique_ends: key("unique_ends"),
            cancels: key("cancels"),
            snoozed: key("snoozed"),
            state: key("state"),
            idle: key("idle"),
            runs: key("runs"),
            wake: key("wake:"),
        }
    }

    /// `<prefix>:2:{lock:<name>:<key>}:queue` and `...:positions`.
    pub(crate) fn queue(&self, lock: &LockKey) -> [String; 2] {
        [self.lock(lock, "queue"), self.lock(lock, "positions")]
    }

    /// `<prefix>:2:{lock:<name>:<key>}:names`.
    pub(crate) fn names(&self, lock: &LockKey) -> String {
        self.lock(lock, "names")
    }

    /// The `SCAN` pattern for the leases of a name.
    pub(crate) fn leases(&self, name: &Key) -> String {
        literal(&[&self.root, "{lock:", &escape_part(name), ":"].concat()) + "*}:lease"
    }

    /// Parses the key of a lease. Returns its lock if the lock has this name.
    pub(crate) fn lock_of(&self, name: &Key, lease: &str) -> Option<LockKey> {
        let start = [&self.root, "{lock:", &escape_part(name), ":"].concat();
        let key = lease.strip_prefix(&start)?.strip_suffix("}:lease")?;
        Some(LockKey::new(*name, Key::stored(key)?))
    }

    fn lock(&self, lock: &LockKey, part: &str) -> String {
        let mut names = LockNames::for_locks(self, 1);
        names.push(lock, part);
        names.text().to_owned()
    }
}

/// Keys of several locks, concatenated in one buffer.
pub(crate) struct LockNames<'a> {
    keys: &'a Keys,
    // One buffer, so that UTF-8 is validated once for all keys.
    text: Vec<u8>,
    ends: Vec<usize>,
}

impl<'a> LockNames<'a> {
    /// Reserves capacity for `count` keys of usual length.
    pub(crate) fn for_locks(keys: &'a Keys, count: usize) -> Self {
        Self { keys, text: Vec::with_capacity(count * (keys.root.len() + 64)), ends: Vec::with_capacity(count) }
    }

    pub(crate) fn push_lease(&mut self, lock: &LockKey) {
        self.push(lock, "lease");
    }

    /// Adds the channel of releases.
    pub(crate) fn push_free(&mut self, lock: &LockKey) {
        self.push(lock, "free");
    }

    fn push(&mut self, lock: &LockKey, part: &str) {
        let (name, key) = (lock.name().as_bytes(), lock.key().as_bytes());
        self.text.extend_from_slice(self.keys.root.as_bytes());
        self.text.extend_from_slice(b"{lock:");
        match name.contains(&b':') {
            true => self.text.extend_from_slice(escape_part(lock.name()).as_bytes()),
            false => self.text.extend_from_slice(name),
        }
        self.text.push(b':');
        self.text.extend_from_slice(key);
        self.text.extend_from_slice(b"}:");
        self.text.extend_from_slice(part.as_bytes());
        self.ends.push(self.text.len());
    }

    fn text(&self) -> &str {
        std::str::from_utf8(&self.text).expect("keys are ASCII by construction")
    }

    pub(crate) fn to_vec(&self) -> Vec<&str> {
        let (text, mut start) = (self.text(), 0);
        self.ends.iter().map(|end| &text[std::mem::replace(&mut start, *end)..*end]).collect()
    }
}

/// A `SCAN` pattern that matches exactly this text.
fn literal(text: &str) -> String {
    let mut pattern = String::with_capacity(text.len() + 10);
    for sign in text.chars() {
        if matches!(sign, '*' | '?' | '[' | ']' | '\\' | '^') {
            pattern.push('\\');
        }
        pattern.push(sign);
    }
    pattern
}

/// Escapes the colons of a part that another part follows, so that `a:b` and `c` differ from `a` and `b:c`.
fn escape_part(part: &Key) -> Cow<'_, str> {
    let part = part.as_str();
    // Unambiguous, because a `Key` never contains `%3A`.
    if part.contains(':') { part.replace(':', "%3A").into() } else { part.into() }
}

/// The keys of an entry: see the headers of the scripts.
pub(crate) struct CacheKeys {
    pub(crate) entry: String,
    pub(crate) lease: String,
    // The channel of the waiters.
    pub(crate) changed: String,
}

/// The keys of a queue: see the headers of the scripts.
pub(crate) struct QueueKeys {
    pub(crate) jobs: String,
    // By priority, the highest first.
    pub(crate) due: [String; 3],
    pub(crate) leases: String,
    pub(crate) dead: String,
    pub(crate) unique: String,
    pub(crate) unique_ends: String,
    pub(crate) cancels: String,
    pub(crate) snoozed: String,
    pub(crate) state: String,
    pub(crate) idle: String,
    // The key of the runs: groups of 16 waiting jobs with normal priority, one due time, and ids that differ only in the last character.
    pub(crate) runs: String,
    // The prefix of the channels of workers.
    pub(crate) wake: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rate_limit::Quota;
    use std::time::Duration;

    /// The shape of a fixed window of a minute. It is part of the data format: a different digest would reset all counts.
    const FIXED_MINUTE: &str = "AI4BFwVH";

    fn counts_key(prefix: &str, policy: &str, key: &str) -> String {
        let policy = Policy::new(policy, Quota::per_minute(5).fixed_window());
        Keys::new(prefix).rate_limit(&policy, &Key::from(key)).remove(0)
    }

    #[test]
    fn keys_are_readable() {
        assert_eq!(
            counts_key("tollgate", "api", "alice"),
            format!("tollgate:2:{{rate_limit:api:alice}}:{FIXED_MINUTE}:counts")
        );
    }

    #[test]
    fn each_log_has_a_key() {
        let log = |minutes: u64| Quota::new(5, Duration::from_secs(60 * minutes)).unwrap().sliding_log().unwrap();
        let policy = Policy::new("api", log(1)).limit(log(2)).limit(Quota::per_day(9).token_bucket()).limit(log(1));
        let keys = Keys::new("tollgate").rate_limit(&policy, &Key::from("alice"));
        let parts: Vec<_> = keys.iter().map(|key| key.rsplit_once("}:").unwrap().1).collect();
        let parts: Vec<_> = parts.iter().map(|part| part.split_once(':').unwrap().1).collect();
        assert_eq!(parts, ["counts", "log:60000000", "log:120000000", "log:60000000:2"]);
    }

    #[test]
    fn braces_cannot_change_the_slot() {
        for (prefix, policy, key) in [("{a}", "api", "alice"), ("t", "{a}", "alice"), ("t", "api", "}{a}")] {
            let key = counts_key(prefix, policy, key);
            assert_eq!((key.matches('{').count(), key.matches('}').count()), (1, 1), "{key}");
        }
    }

    #[test]
    fn policy_name_and_key_are_kept_apart() {
        assert_ne!(counts_key("t", "a:b", "c"), counts_key("t", "a", "b:c"));
    }

    /// Regression: an operation of the scope `alice:b` equalled one of `alice` whose key began with `b:`.
    #[test]
    fn names_and_scopes_do_not_run_into_keys() {
        let lease = |name: &str, key: &str| Keys::new("t").lease(&LockKey::new(name, key));
        let record = |scope: &str, key: &str| Keys::new("t").idempotency(&Operation::new(scope, key));
        for key in [&lease as &dyn Fn(&str, &str) -> String, &record] {
            assert_ne!(key("a:b", "c"), key("a", "b:c"));
            assert_ne!(key("a:", "c"), key("a", ":c"));
            assert_ne!(key("a%3Ab", "c"), key("a:b", "c"));
        }
    }

    #[test]
    fn lock_with_any_name_has_one_slot() {
        let lease = |name: &str, key: &str| Keys::new("t").lease(&LockKey::new(name, key));
        assert_eq!(lease("orders", "order:42"), "t:2:{lock:orders:order:42}:lease");
        assert_eq!(Keys::new("t").free_channel(&LockKey::new("orders", "order:42")), "t:2:{lock:orders:order:42}:free");
        let long = "}{".repeat(10_000);
        for key in [lease("{a}", "b"), lease("a", "}{b}"), lease(&long, &long), lease("", "")] {
            assert_eq!((key.matches('{').count(), key.matches('}').count()), (1, 1), "{key}");
            assert!(key.len() < 256);
        }
    }

    #[test]
    fn operation_with_any_name_has_one_slot() {
        let key = |scope: &str, key: &str| Keys::new("t").idempotency(&Operation::new(scope, key));
        assert_eq!(key("alice", "8e03978e"), "t:2:{idempotency:45}:alice:8e03978e:record");
        assert_eq!(Keys::new("t").done(&Operation::new("alice", "8e")), "t:2:{idempotency:44}:alice:8e:done");
        let long = "}{".repeat(10_000);
        for key in [key("{a}", "b"), key("a", "}{b}"), key(&long, &long), key("", "")] {
            assert_eq!((key.matches('{').count(), key.matches('}').count()), (1, 1), "{key}");
            assert!(key.len() < 256);
        }
    }

    /// Each partition has an equal share of a caller's limit. If partitions filled unevenly, keys would be rejected far below the limit.
    #[test]
    fn sequential_keys_fill_parts_evenly() {
        let mut parts = std::collections::HashMap::<_, usize>::new();
        for number in 0..10_000 {
            *parts.entry(partition("alice", &format!("order-{number}"))).or_default() += 1;
        }
        let (fewest, max) = (parts.values().min(), parts.values().max());
        assert_eq!(parts.len(), PARTITIONS as usize);
        assert!(fewest > Some(&100) && max < Some(&210), "{fewest:?} to {max:?} keys are in a part");
    }

    #[test]
    fn operation_is_read_from_the_name_of_its_record() {
        let keys = Keys::new("t*");
        for operation in
            [Operation::new(("ali:ce", "POST", "/a*b"), "k:1"), Operation::new("", ""), Operation::new("%3A", "é{")]
        {
            assert_eq!(keys.operation_of(&keys.idempotency(&operation)), Some(operation));
        }
        for other in ["t:2:{idempotency:1}:a:b:record", "t%2A:2:{idempotency:1}:a:b:done", "t%2A:2:{lock:a:b}:record"] {
            assert_eq!(keys.operation_of(other), None, "{other}");
        }
    }

    #[test]
    fn keys_are_bounded() {
        let long = "x".repeat(1 << 20);
        assert!(counts_key(&long, &long, &long).len() < 256);
    }
}
