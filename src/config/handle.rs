use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::{ArcSwap, Guard};

use super::error::RulesError;
use super::rules::{CompiledRules, Rules, read};
use super::watch::RulesWatch;

/// Holds the rules that layers enforce, and changes them at runtime.
///
/// All layers with this handle or a clone of it enforce its rules. A request is subject to the rules at its arrival, and later requests to the
/// new rules. A policy keeps its counts if its name and the algorithms and windows of its limits stay the same. If its quotas change,
/// `on_quota_change` decides.
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
    state: Arc<State>,
}

struct State {
    rules: ArcSwap<CompiledRules>,
    last_error: Mutex<Option<RulesError>>,
}

impl RulesHandle {
    /// Creates a handle with `rules`, like [`Rules::handle`].
    #[must_use]
    pub fn new(rules: Rules) -> Self {
        Self { state: Arc::new(State { rules: ArcSwap::new(rules.inner), last_error: Mutex::default() }) }
    }

    /// The current rules.
    #[must_use]
    pub fn rules(&self) -> Rules {
        Rules { inner: self.state.rules.load_full() }
    }

    pub(super) fn current(&self) -> Guard<Arc<CompiledRules>> {
        self.state.rules.load()
    }

    /// Replaces the rules. Later requests are subject to `rules`.
    pub fn reload(&self, rules: Rules) {
        *self.error() = None;
        if self.rules() != rules {
            let count = rules.len();
            self.state.rules.store(rules.inner);
            tracing::info!(rules = count, "the rules were changed");
        }
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
        rules.map(|rules| self.reload(rules)).inspect_err(|error| self.set_error(error))
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
        RulesWatch::start(self.clone(), path.into(), interval)
    }

    /// The error of the last attempt to load rules. `None` if the last attempt succeeded, including by [`reload`](Self::reload).
    #[must_use]
    pub fn last_error(&self) -> Option<RulesError> {
        self.error().clone()
    }

    pub(super) fn set_error(&self, error: &RulesError) {
        *self.error() = Some(error.clone());
    }

    fn error(&self) -> MutexGuard<'_, Option<RulesError>> {
        self.state.last_error.lock().unwrap_or_else(PoisonError::into_inner)
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

/// Runs `work` on a thread that may block.
async fn blocking<T: Send + 'static>(
    path: &Path,
    work: impl FnOnce(&Path) -> Result<T, RulesError> + Send + 'static,
) -> Result<T, RulesError> {
    let owned = path.to_owned();
    let result = tokio::task::spawn_blocking(move || work(&owned)).await;
    // The runtime is shutting down, or the parser has panicked. Such a bug must not end the task that watches the file.
    result.unwrap_or_else(|error| Err(RulesError::unreadable(error.into()).in_file(path)))
}

pub(super) async fn read_blocking(path: &Path) -> Result<Vec<u8>, RulesError> {
    blocking(path, read).await
}

/// Parses the contents of a file.
pub(super) async fn parse_blocking(bytes: Vec<u8>, path: &Path) -> Result<Rules, RulesError> {
    blocking(path, move |path| Rules::from_bytes(&bytes, path)).await
}
