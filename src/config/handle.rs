use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::{ArcSwap, Guard};

use super::error::RulesError;
use super::rules::{CompiledRules, Rules, read};
use super::watch::RulesWatch;

/// Holds the rules that layers enforce, to change them while they do.
///
/// All layers that were made of a handle, or of a clone of it, follow it. A request is judged by the rules that hold when it arrives, and by no
/// others; the next one sees the new rules. What has been counted stays counted for policies that keep their
/// name and the algorithms and windows of their limits; what becomes of it when the numbers change, `on_quota_change` says.
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
    /// Holds `rules`; so does [`Rules::handle`].
    #[must_use]
    pub fn new(rules: Rules) -> Self {
        Self { state: Arc::new(State { rules: ArcSwap::new(rules.inner), last_error: Mutex::default() }) }
    }

    /// The rules that hold now.
    #[must_use]
    pub fn rules(&self) -> Rules {
        Rules { inner: self.state.rules.load_full() }
    }

    pub(super) fn current(&self) -> Guard<Arc<CompiledRules>> {
        self.state.rules.load()
    }

    /// Enforces `rules` from now on.
    pub fn reload(&self, rules: Rules) {
        *self.error() = None;
        if self.rules() != rules {
            let count = rules.len();
            self.state.rules.store(rules.inner);
            tracing::info!(rules = count, "the rules were changed");
        }
    }

    /// Reads a file as [`Rules::from_path`] does, and enforces what it says from now on. Blocks no thread of the runtime.
    ///
    /// # Errors
    ///
    /// As with [`Rules::from_path`]. The rules stay as they are then, and the error is the [last](Self::last_error) one.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    pub async fn reload_path(&self, path: impl Into<PathBuf>) -> Result<(), RulesError> {
        let path = path.into();
        let rules = blocking(&path, |path| Rules::from_path(path)).await;
        rules.map(|rules| self.reload(rules)).inspect_err(|error| self.refuse(error))
    }

    /// Follows a file from now on: looks at it once a second, and enforces what it says when that changes.
    ///
    /// If there is something wrong with the file the rules stay as they are. The error is in the log, once for each version of the
    /// file, and can be [asked for](Self::last_error).
    ///
    /// A change counts once two looks, 100 ms apart, see the same, so that a file that is just being written is not taken for a whole one. To be sure
    /// write another file and rename it.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    ///
    /// # Cancellation
    ///
    /// The file is followed until the guard that this returns is dropped.
    pub fn watch(&self, path: impl Into<PathBuf>) -> RulesWatch {
        self.watch_every(Duration::from_secs(1), path)
    }

    /// The same as [`watch`](Self::watch), looking at the file as often as this, but no more than once a millisecond. A change counts 100 ms after it
    /// was seen, however often that is.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    pub fn watch_every(&self, interval: Duration, path: impl Into<PathBuf>) -> RulesWatch {
        RulesWatch::start(self.clone(), path.into(), interval)
    }

    /// What was wrong with the file that was read last; `None` if it, or whatever was [loaded](Self::reload) since, is in force.
    #[must_use]
    pub fn last_error(&self) -> Option<RulesError> {
        self.error().clone()
    }

    pub(super) fn refuse(&self, error: &RulesError) {
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

/// Does something with a file where it may block.
async fn blocking<T: Send + 'static>(
    path: &Path,
    work: impl FnOnce(&Path) -> Result<T, RulesError> + Send + 'static,
) -> Result<T, RulesError> {
    let owned = path.to_owned();
    let done = tokio::task::spawn_blocking(move || work(&owned)).await;
    // The runtime is being shut down, or the parser has panicked, which is a bug but not one to die of.
    done.unwrap_or_else(|error| Err(RulesError::unreadable(error.into()).in_file(path)))
}

/// The bytes of a file.
pub(super) async fn contents(path: &Path) -> Result<Vec<u8>, RulesError> {
    blocking(path, read).await
}

/// The rules in bytes that were read from a file.
pub(super) async fn parsed(bytes: Vec<u8>, path: &Path) -> Result<Rules, RulesError> {
    blocking(path, move |path| Rules::from_bytes(&bytes, path)).await
}
