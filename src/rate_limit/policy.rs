use std::sync::Arc;

use super::decision::Decision;
use super::quota::Limit;
use crate::key::Key;

/// A named limit. The name is what clients read in the `RateLimit` fields and what keeps the counts of two policies apart.
///
/// Two policies of the same name and window on the same backend share their counts, in one process or in many: this is how
/// replicas agree. Changing the number of units keeps what has been counted; changing the window or the algorithm starts
/// afresh.
///
/// Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    name: String,
    limit: Limit,
    // What clients are told of the policy with every answer, once it was written down.
    #[cfg(feature = "http")]
    announcement: std::sync::OnceLock<String>,
}

impl PartialEq for Inner {
    fn eq(&self, other: &Self) -> bool {
        (&self.name, self.limit) == (&other.name, other.limit)
    }
}

impl Eq for Inner {}

impl Policy {
    /// A policy called `name` that enforces `limit`.
    ///
    /// Take a short name of letters, digits, `-`, `_` and `.`. Any other byte is percent-encoded, and a name of more than
    /// [`Key::MAX_LEN`] bytes is replaced by its digest, since names become part of stored keys.
    pub fn new(name: impl AsRef<str>, limit: Limit) -> Self {
        let name = name.as_ref();
        // A colon separates the name from the subject in a stored key, so a name holds none.
        let escaped = Key::new(name).as_str().replace(':', "%3A");
        let fits = escaped.len() <= Key::MAX_LEN;
        let name = if fits { escaped } else { Key::digest(name).as_str().to_owned() };
        let inner = Inner {
            name,
            limit,
            #[cfg(feature = "http")]
            announcement: std::sync::OnceLock::new(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// The name, as clients and stores see it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The limit that it enforces.
    #[must_use]
    pub fn limit(&self) -> Limit {
        self.inner.limit
    }

    /// The answer to a cost that can never be admitted, however long the client waits; there is no need to ask a store.
    pub(crate) fn rule_out(&self, cost: u32) -> Option<Decision> {
        let limit = self.inner.limit.quota().limit();
        (limit == 0 || cost > limit).then(|| Decision::never(limit))
    }

    /// The text that `write` makes of the policy, kept for the next time.
    #[cfg(feature = "http")]
    pub(crate) fn announcement(&self, write: impl FnOnce() -> String) -> &str {
        self.inner.announcement.get_or_init(write)
    }

    /// Whether two policies count in the same place, so that a count made under one is valid under the other.
    pub(crate) fn shares_counts_with(&self, other: &Policy) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
            || (self.inner.limit.algorithm() == other.inner.limit.algorithm()
                && self.inner.limit.quota().window() == other.inner.limit.quota().window()
                && self.inner.name == other.inner.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rate_limit::Quota;

    #[test]
    fn names_stay_short_printable_and_without_separators() {
        let limit = Quota::per_second(1).fixed_window();
        assert_eq!(Policy::new("api", limit).name(), "api");
        assert_eq!(Policy::new("a:b{c}", limit).name(), "a%3Ab%7Bc%7D");
        for long in ["x".repeat(1 << 20), ":".repeat(40), "{".repeat(20)] {
            let name = Policy::new(&long, limit).name().to_owned();
            assert!(name.len() <= Key::MAX_LEN && !name.contains([':', '{']), "{name}");
        }
    }
}
