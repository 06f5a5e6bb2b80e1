use std::path::{Path, PathBuf};
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::handle::{RulesHandle, contents, parsed};

/// Follows a file of rules until it is dropped: see [`RulesHandle::watch`].
#[derive(Debug)]
#[must_use = "the file is followed no longer than this lives"]
pub struct RulesWatch {
    task: JoinHandle<()>,
}

/// How long a change has to last.
const SETTLED: Duration = Duration::from_millis(100);

impl RulesWatch {
    pub(super) fn start(handle: RulesHandle, path: PathBuf, every: Duration) -> Self {
        let every = every.max(Duration::from_millis(1));
        Self { task: tokio::spawn(follow(handle, path, every)) }
    }
}

impl Drop for RulesWatch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What was seen last, so that nothing is said or done about it twice.
#[derive(PartialEq)]
enum Version {
    // By its contents: times are too coarse, and some tools keep them.
    Read([u8; 32]),
    Unreadable(String),
}

async fn follow(handle: RulesHandle, path: PathBuf, every: Duration) {
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut seen = None;
    loop {
        ticks.tick().await;
        let (version, _) = look(&path).await;
        if seen.as_ref() == Some(&version) {
            continue;
        }
        sleep(SETTLED).await;
        let (settled, bytes) = look(&path).await;
        if settled != version {
            // Still being written.
            continue;
        }
        seen = Some(settled);
        let rules = match bytes {
            Ok(bytes) => parsed(bytes, &path).await,
            Err(error) => Err(error),
        };
        match rules {
            Ok(rules) => handle.reload(rules),
            Err(error) => {
                handle.refuse(&error);
                let cause = std::error::Error::source(&error).map(tracing::field::display);
                tracing::error!(%error, cause, line = error.line(), "the rules stay as they are: {error}");
            }
        }
    }
}

async fn look(path: &Path) -> (Version, Result<Vec<u8>, super::RulesError>) {
    let bytes = contents(path).await;
    let version = match &bytes {
        Ok(bytes) => Version::Read(Sha256::digest(bytes).into()),
        Err(error) => {
            let cause = std::error::Error::source(error).map(ToString::to_string).unwrap_or_default();
            Version::Unreadable(format!("{error}: {cause}"))
        }
    };
    (version, bytes)
}
