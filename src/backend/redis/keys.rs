//! Every shape of a stored key. The only place where keys are spelled.

use crate::key::Key;
use crate::rate_limit::{Algorithm, Policy};

/// The version of the layout of keys. Goes up when two releases must not read each other's keys.
const LAYOUT: &str = "1";

/// The keys below one prefix.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    // `<prefix>:<layout>:`, percent-encoded.
    root: String,
}

impl Keys {
    pub(super) fn new(prefix: &str) -> Self {
        Self { root: format!("{}:{LAYOUT}:", Key::new(prefix)) }
    }

    /// `<prefix>:1:{rate_limit:<policy>:<subject>}:<fixed or log>:<window in us>`.
    ///
    /// The window is part of the key, so a changed window starts afresh instead of reading times of another scale.
    pub(super) fn rate_limit(&self, policy: &Policy, subject: &Key) -> String {
        let part = match policy.limit().algorithm() {
            Algorithm::FixedWindow => "fixed",
            Algorithm::SlidingLog => "log",
        };
        let window_us = policy.limit().quota().window_us().to_string();
        [&self.root, "{rate_limit:", policy.name(), ":", subject.as_str(), "}:", part, ":", &window_us].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rate_limit::Quota;

    fn key(prefix: &str, policy: &str, subject: &str) -> String {
        let policy = Policy::new(policy, Quota::per_minute(5).fixed_window());
        Keys::new(prefix).rate_limit(&policy, &Key::from(subject))
    }

    #[test]
    fn keys_are_readable() {
        assert_eq!(key("tollgate", "api", "alice"), "tollgate:1:{rate_limit:api:alice}:fixed:60000000");
    }

    #[test]
    fn nobody_can_move_a_slot() {
        for (prefix, policy, subject) in [("{a}", "api", "alice"), ("t", "{a}", "alice"), ("t", "api", "}{a}")] {
            let key = key(prefix, policy, subject);
            assert_eq!((key.matches('{').count(), key.matches('}').count()), (1, 1), "{key}");
        }
    }

    #[test]
    fn a_name_cannot_run_into_the_subject() {
        assert_ne!(key("t", "a:b", "c"), key("t", "a", "b:c"));
    }

    #[test]
    fn keys_are_bounded() {
        let long = "x".repeat(1 << 20);
        assert!(key(&long, &long, &long).len() < 256);
    }
}
