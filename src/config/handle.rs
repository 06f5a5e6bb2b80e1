use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::Guard;

use super::blocking::blocking;
use super::current_rules::CurrentRules;
use super::error::RulesError;
use super::rules::{CompiledRules, Rules};
use super::watch::RulesWatch;

/// Holds the rules that layers enforce, and changes them at runtime.
///
/// All layers with this handle or a clone of it enforce its rules. A request is subject to the rules at its arrival, so a change applies
/// to later requests only. A policy keeps its counts if its name and the algorithms and windows of its limits stay the same. If its quotas
/// change, `on_quota_change` decides.
///
/// ```
/// use tollgate::MemoryBackend;
/// use tollgate::config::{Rules, RulesLayer};
///
/// # fn main() -> Result<(), tollgate::config::RulesError> {
/// let rules = |quota: u32| {
///     Rules::from_toml(&format!(
///         r#"
///         policies.api.limits = [{{ quota = {quota}, per = "1m", algorithm = "fixed_window" }}]
///         rules = [{{ path = "/{{*rest}}", policy = "api", key = "client_ip" }}]
///         "#
///     ))
/// };
/// let handle = rules(100)?.handle();
/// let layer = RulesLayer::new(MemoryBackend::new(), handle.clone());
/// handle.reload(rules(200)?);
/// assert_eq!(handle.rules(), rules(200)?);
/// # drop(layer);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct RulesHandle {
    current: Arc<CurrentRules>,
}

impl RulesHandle {
    /// Creates a handle with `rules`, like [`Rules::handle`].
    #[must_use]
    pub fn new(rules: Rules) -> Self {
        Self { current: Arc::new(CurrentRules::new(rules)) }
    }

    /// The current rules.
    #[must_use]
    pub fn rules(&self) -> Rules {
        self.current.rules()
    }

    pub(super) fn current(&self) -> Guard<Arc<CompiledRules>> {
        self.current.load()
    }

    /// Replaces the rules. Later requests are subject to `rules`.
    pub fn reload(&self, rules: Rules) {
        self.current.reload(rules);
    }

    /// Reads a file like [`Rules::from_path`] and replaces the rules. Does not block a runtime thread.
    ///
    /// # Errors
    ///
    /// As with [`Rules::from_path`]. Then the rules stay unchanged, and [`last_error`](Self::last_error) returns the error.
    ///
    /// # Panics
    ///
    /// If called outside a tokio runtime.
    pub async fn reload_path(&self, path: impl Into<PathBuf>) -> Result<(), RulesError> {
        let path = path.into();
        let rules = blocking(&path, |path| Rules::from_path(path)).await;
        rules.map(|rules| self.reload(rules)).inspect_err(|error| self.current.set_error(error))
    }

    /// Watches a file: checks it once per second, and loads the rules when the file changes.
    ///
    /// If the file is invalid, the rules stay unchanged. The error is logged once for each version of the file, and
    /// [`last_error`](Self::last_error) returns it.
    ///
    /// A change is loaded after two reads, 100 ms apart, return the same contents, because a file may still be written. For an atomic change,
    /// write another file and rename it.
    ///
    /// # Panics
    ///
    /// If called outside a tokio runtime.
    ///
    /// # Cancellation
    ///
    /// Dropping the returned guard stops watching the file.
    pub fn watch(&self, path: impl Into<PathBuf>) -> RulesWatch {
        self.watch_every(Duration::from_secs(1), path)
    }

    /// Like [`watch`](Self::watch), but checks the file at this interval, at most once per millisecond. The delay of 100 ms between two reads
    /// stays the same.
    ///
    /// # Panics
    ///
    /// If called outside a tokio runtime.
    pub fn watch_every(&self, interval: Duration, path: impl Into<PathBuf>) -> RulesWatch {
        RulesWatch::start(Arc::clone(&self.current), path.into(), interval)
    }

    /// The error of the last attempt to load rules. `None` if the last attempt succeeded, including by [`reload`](Self::reload).
    #[must_use]
    pub fn last_error(&self) -> Option<RulesError> {
        self.current.last_error()
    }
}

// Here and not in `rules.rs`, because `handle.rs` imports `rules.rs`, and files must not import each other.
impl Rules {
    /// Creates a handle, which can replace the rules while layers enforce them.
    #[must_use]
    pub fn handle(self) -> RulesHandle {
        RulesHandle::new(self)
    }
}

impl From<Rules> for RulesHandle {
    fn from(rules: Rules) -> Self {
        Self::new(rules)
    }
}

impl From<&RulesHandle> for RulesHandle {
    fn from(handle: &RulesHandle) -> Self {
        handle.clone()
    }
}

impl fmt::Debug for RulesHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RulesHandle").field("rules", &self.rules()).field("last_error", &self.last_error()).finish()
    }
}
