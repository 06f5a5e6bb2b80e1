//! Reads and parses files without blocking a thread of the runtime.

use std::path::Path;

use super::error::RulesError;
use super::rules::{Rules, read};

/// Runs `work` on a thread that may block.
pub(super) async fn blocking<T: Send + 'static>(
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
