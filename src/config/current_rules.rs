//! The rules that a handle holds, which a watched file replaces.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::{ArcSwap, Guard};

use super::error::RulesError;
use super::rules::{CompiledRules, Rules};

pub(super) struct CurrentRules {
    rules: ArcSwap<CompiledRules>,
    last_error: Mutex<Option<RulesError>>,
}

impl CurrentRules {
    pub(super) fn new(rules: Rules) -> Self {
        Self { rules: ArcSwap::new(rules.inner), last_error: Mutex::default() }
    }

    pub(super) fn rules(&self) -> Rules {
        Rules { inner: self.rules.load_full() }
    }

    pub(super) fn load(&self) -> Guard<Arc<CompiledRules>> {
        self.rules.load()
    }

    pub(super) fn reload(&self, rules: Rules) {
        *self.error() = None;
        if self.rules() != rules {
            let count = rules.len();
            self.rules.store(rules.inner);
            tracing::info!(rules = count, "the rules were changed");
        }
    }

    pub(super) fn last_error(&self) -> Option<RulesError> {
        self.error().clone()
    }

    pub(super) fn set_error(&self, error: &RulesError) {
        *self.error() = Some(error.clone());
    }

    fn error(&self) -> MutexGuard<'_, Option<RulesError>> {
        self.last_error.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
