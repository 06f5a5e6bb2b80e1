//! Notifications for waiters.

use std::any::Any;
use std::fmt;
use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use smallvec::{SmallVec, smallvec};
use tokio::sync::watch;
use tokio::time::sleep;

/// Notifies a waiter when to look again: see [`LockStore::watch`](crate::lock::store::LockStore::watch).
pub struct Notifications {
    changes: SmallVec<[watch::Receiver<()>; 1]>,
    // The messages alone, if `changes` also reports possible losses of messages.
    messages: Option<watch::Receiver<()>>,
    // Ends the subscriptions when it is dropped. Declared after the receivers, so that these are dropped first and no longer counted.
    keep: SmallVec<[Arc<dyn Any + Send + Sync>; 1]>,
}

/// How long notifications of several sources are merged, at most.
const LONGEST_LULL_US: u32 = 4_000;

impl Notifications {
    /// Notifies whenever `changes` changes. Dropping the notifications drops `keep`.
    #[must_use]
    pub fn new(changes: watch::Receiver<()>, keep: Arc<dyn Any + Send + Sync>) -> Self {
        Self { changes: smallvec![changes], messages: None, keep: smallvec![keep] }
    }

    /// For a store that also notifies of possible losses of messages: `messages` changes only with a message.
    #[must_use]
    pub fn with_messages(mut self, messages: watch::Receiver<()>) -> Self {
        self.messages = Some(messages);
        self
    }

    /// Whether there was a notification since the last call of [`next`](Self::next), or may have been one.
    #[must_use]
    pub fn may_have_changed(&self) -> bool {
        self.changes.is_empty() || self.changes.iter().any(|changes| changes.has_changed().unwrap_or(true))
    }

    /// Whether there was a message since the subscription, or may have been one. Without [`with_messages`](Self::with_messages): since the
    /// last call of [`next`](Self::next).
    #[must_use]
    pub fn has_message(&self) -> bool {
        let mut messages = self.messages.iter().chain(self.changes.iter().filter(|_| self.messages.is_none()));
        messages.any(|messages| messages.has_changed().unwrap_or(true))
    }

    /// No notifications: the waiter has to poll.
    #[must_use]
    pub const fn none() -> Self {
        Self { changes: SmallVec::new_const(), messages: None, keep: SmallVec::new_const() }
    }

    /// Merges several sources. Notifications within a short random delay become one. The delay differs, so that waiters do not all continue
    /// at the same time.
    #[must_use]
    pub fn any(several: impl IntoIterator<Item = Self>) -> Self {
        let mut all = Self::none();
        for Self { changes, keep, .. } in several {
            all.changes.extend(changes);
            all.keep.extend(keep);
        }
        all
    }

    /// Waits for a notification since the last call.
    pub async fn next(&mut self) {
        loop {
            let gone = match &mut *self.changes {
                [] => std::future::pending().await,
                [one] => match one.changed().await {
                    Ok(()) => return,
                    Err(_) => 0,
                },
                several => {
                    let mut changes: Vec<_> = several.iter_mut().map(|changes| Box::pin(changes.changed())).collect();
                    let (at, is_notified) = poll_fn(|cx| {
                        let polls = changes.iter_mut().map(|change| change.as_mut().poll(cx));
                        let changed = polls.enumerate().find_map(|(at, poll)| match poll {
                            Poll::Ready(outcome) => Some((at, outcome.is_ok())),
                            Poll::Pending => None,
                        });
                        changed.map_or(Poll::Pending, Poll::Ready)
                    })
                    .await;
                    if is_notified {
                        break;
                    }
                    at
                }
            };
            // The sender is gone.
            self.changes.remove(gone);
        }
        let share = getrandom::u32().unwrap_or_default();
        sleep(Duration::from_micros(u64::from(share % LONGEST_LULL_US))).await;
        self.changes.iter_mut().for_each(watch::Receiver::mark_unchanged);
    }
}

impl fmt::Debug for Notifications {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Notifications").field("is_notified", &!self.changes.is_empty()).finish()
    }
}
