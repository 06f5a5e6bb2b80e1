//! The identity of an operation.

use std::fmt;
use std::hash::{Hash, Hasher};

use crate::key::Key;

/// Identifies an operation: the key that the client chose, within the scope of the client.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Operation {
    scope: Key,
    key: Key,
}

// Hand-written, because a key is an array of the maximum length, and most keys are short.
impl Hash for Operation {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.scope.as_hashed().hash(state);
        self.key.as_hashed().hash(state);
    }
}

/// Stands for a colon within a scope. Keys do not contain this escape otherwise.
const COLON: &str = "%3A";

impl Operation {
    /// Parses the text of an operation from the log or from
    /// [`IdempotencyHandle::operation`](super::IdempotencyHandle::operation). `None` for other text.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        let (scope, key) = name.split_once(':')?;
        Some(Self { scope: Key::stored(&scope.replace(COLON, ":"))?, key: Key::stored(key)? })
    }

    /// The operation with this key, within this scope.
    pub fn new(scope: impl Into<Key>, key: impl Into<Key>) -> Self {
        Self { scope: scope.into(), key: key.into() }
    }

    /// The scope of the client.
    #[must_use]
    pub const fn scope(&self) -> &Key {
        &self.scope
    }

    /// The key that the client chose.
    #[must_use]
    pub const fn key(&self) -> &Key {
        &self.key
    }
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Operation({self})")
    }
}

/// The scope and the key, separated by a colon. Colons within the scope are escaped, so that [`parse`](Operation::parse) can find
/// the separator.
impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, part) in self.scope.as_str().split(':').enumerate() {
            f.write_str(if number > 0 { COLON } else { "" })?;
            f.write_str(part)?;
        }
        write!(f, ":{}", self.key)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn operation_parses_from_its_text(scope in "[a:%,é]{0,9}", path in "[/:a]{0,9}", key in "[b:%]{0,60}") {
            for scope in [Key::new(&scope), Key::from((&*scope, "POST", &*path))] {
                let operation = Operation::new(scope, &*key);
                prop_assert_eq!(Operation::parse(&operation.to_string()), Some(operation));
            }
        }

        #[test]
        fn any_text_parses_to_itself_or_none(name in ".{0,20}") {
            if let Some(operation) = Operation::parse(&name) {
                prop_assert_eq!(Operation::parse(&operation.to_string()), Some(operation));
            }
        }
    }
}
