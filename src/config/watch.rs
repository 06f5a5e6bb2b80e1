use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::blocking::{parse_blocking, read_blocking};
use super::current_rules::CurrentRules;
use super::error::RulesError;

/// Watches a rules file until it is dropped: see [`RulesHandle::watch`](super::RulesHandle::watch).
#[derive(Debug)]
#[must_use = "dropping this stops watching the file"]
pub struct RulesWatch {
    task: JoinHandle<()>,
}

/// How long a changed file must stay the same before its rules are loaded, because it may still be written.
const SETTLE_TIME: Duration = Duration::from_millis(100);

impl RulesWatch {
    pub(super) fn start(current: Arc<CurrentRules>, path: PathBuf, period: Duration) -> Self {
        let period = period.max(Duration::from_millis(1));
        Self { task: tokio::spawn(watch(current, path, period)) }
    }
}

impl Drop for RulesWatch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A version of the file, so that each version is loaded or logged only once.
#[derive(PartialEq)]
enum Version {
    // A digest, because modification times are too coarse and some tools preserve them.
    Read([u8; 32]),
    Unreadable(String),
}

async fn watch(current: Arc<CurrentRules>, path: PathBuf, period: Duration) {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut loaded = None;
    loop {
        ticks.tick().await;
        let (version, _) = read_version(&path).await;
        if loaded.as_ref() == Some(&version) {
            continue;
        }
        sleep(SETTLE_TIME).await;
        let (settled, bytes) = read_version(&path).await;
        if settled != version {
            continue;
        }
        loaded = Some(settled);
        let rules = match bytes {
            Ok(bytes) => parse_blocking(bytes, &path).await,
            Err(error) => Err(error),
        };
        match rules {
            Ok(rules) => current.reload(rules),
            Err(error) => {
                current.set_error(&error);
                let cause = std::error::Error::source(&error).map(tracing::field::display);
                tracing::error!(%error, cause, line = error.line(), "the rules stay unchanged: the file cannot be loaded");
            }
        }
    }
}

async fn read_version(path: &Path) -> (Version, Result<Vec<u8>, RulesError>) {
    let bytes = read_blocking(path).await;
    let version = match &bytes {
        Ok(bytes) => Version::Read(Sha256::digest(bytes).into()),
        Err(error) => {
            let cause = std::error::Error::source(error).map(ToString::to_string).unwrap_or_default();
            Version::Unreadable(format!("{error}: {cause}"))
        }
    };
    (version, bytes)
}
