//! The task that subscribes at one server: its connection, its channels, and how it reconnects.

use std::collections::HashSet;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use redis::RedisError;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::channels::Shared;
use super::pubsub::{Event, Refusal, Server, SubscribeOutcome, SubscriptionConnection};
use super::timeout_error::no_connection;

/// The pause after a failed attempt to connect. Doubles with each further failure.
const MIN_PAUSE: Duration = Duration::from_millis(10);
const MAX_PAUSE: Duration = Duration::from_millis(500);
/// How long a connection must last after a confirmation to count as stable. A connection that ends sooner counts as a failure.
const STABLE_AFTER: Duration = Duration::from_secs(1);
/// How often to request a read of the slot map while a node accepts no connection.
const MAP_REFRESH_INTERVAL: Duration = Duration::from_secs(1);
/// When to retry refused channels: an operator has to grant the permission first.
const REFUSED_RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// How many channels to subscribe to at once.
const CHUNK_SIZE: usize = 256;

/// The channels of one connection.
#[derive(Default)]
pub(crate) struct Subscriptions {
    pub(crate) confirmed: HashSet<Arc<str>>,
    // Channels that the Redis user may not use, and when to retry them.
    pub(crate) refused: Vec<Arc<str>>,
    pub(crate) retry_at: Option<Instant>,
    // When the first channel was confirmed.
    confirmed_at: Option<Instant>,
    // Whether the failure to subscribe has been logged.
    is_failing: bool,
}

/// Subscribes at a server, and reconnects, until no channel is assigned to the server any more.
pub(crate) async fn run(shared: Arc<Shared>, server: Server) {
    let (mut pause, mut is_failing) = (Duration::ZERO, false);
    loop {
        let mut subscriptions = Subscriptions { is_failing, ..Subscriptions::default() };
        let failure = match open(&shared, &server).await {
            Ok(listener) => match listen(&shared, &server, listener, &mut subscriptions).await {
                // No channel is assigned to the server any more. The next one starts another task.
                Ok(()) => return,
                Err(error) => error,
            },
            Err(error) => error,
        };
        is_failing = subscriptions.is_failing;
        let name = shared.source.name(&server);
        if subscriptions.is_stable() {
            pause = Duration::ZERO;
            tracing::debug!(server = name, error = %failure, "the connection with the subscriptions is gone");
        } else {
            shared.metrics.subscription_failed();
            if !std::mem::replace(&mut is_failing, true) {
                tracing::warn!(server = name, error = %failure, "cannot subscribe to redis; waiters and workers poll meanwhile");
            }
        }
        shared.resubscribe_all(&server);
        drop(shared.take_unused(&server, Instant::now()));
        if shared.remove_link_if_idle(&server) {
            return;
        }
        // Another node may have taken over.
        shared.source.refresh_map();
        pause = (pause * 2).clamp(MIN_PAUSE, MAX_PAUSE);
        sleep(pause).await;
    }
}

/// Connects to a server, within the timeout.
async fn open(shared: &Arc<Shared>, server: &Server) -> Result<SubscriptionConnection, RedisError> {
    let (weak, from) = (Arc::downgrade(shared), server.clone());
    let on_event = move |event: Event<'_>| {
        if let Some(shared) = weak.upgrade() {
            shared.handle_event(&from, event);
        }
    };
    let open_timeout = shared.source.open_timeout();
    let mut opened = pin!(timeout(open_timeout, SubscriptionConnection::open(&shared.source, server, on_event)));
    loop {
        match timeout(MAP_REFRESH_INTERVAL, &mut opened).await {
            Ok(outcome) => return outcome.unwrap_or_else(|_| Err(no_connection(open_timeout))),
            // Another node may take over meanwhile.
            Err(_) => shared.source.refresh_map(),
        }
    }
}

/// Runs until the connection breaks or there are no channels any more.
async fn listen(
    shared: &Shared,
    server: &Server,
    mut listener: SubscriptionConnection,
    subscriptions: &mut Subscriptions,
) -> Result<(), RedisError> {
    shared.resubscribe_all(server);
    let wake = shared.wake(server);
    let interval = shared.source.ping_interval();
    let mut ping_at = Instant::now() + interval;
    loop {
        let next = sync(shared, server, &mut listener, subscriptions).await?;
        if subscriptions.confirmed.is_empty() && shared.remove_link_if_idle(server) {
            return Ok(());
        }
        let (retry_at, stable_at) = (subscriptions.retry_at, subscriptions.log_recovery(shared, server));
        tokio::select! {
            error = listener.ended() => return Err(error),
            () = wake.notified() => {}
            () = sleep_until([next, retry_at, stable_at].into_iter().flatten().fold(ping_at, Instant::min)) => {}
        }
        if Instant::now() >= ping_at {
            ping_at = Instant::now() + interval;
            timeout(shared.source.reply_timeout(), listener.ping()).await.map_err(|_| no_reply())??;
        }
    }
}

/// Subscribes to new channels and unsubscribes from unused ones. Returns the time at which the next channel becomes unused.
pub(crate) async fn sync(
    shared: &Shared,
    server: &Server,
    listener: &mut SubscriptionConnection,
    subscriptions: &mut Subscriptions,
) -> Result<Option<Instant>, RedisError> {
    let (now, reply_timeout) = (Instant::now(), shared.source.reply_timeout());
    let (unused, next) = shared.take_unused(server, now);
    let unused: Vec<_> = unused.into_iter().filter(|name| subscriptions.confirmed.remove(name)).collect();
    for names in unused.chunks(CHUNK_SIZE) {
        timeout(reply_timeout, listener.unsubscribe(names)).await.map_err(|_| no_reply())??;
    }
    let is_due = subscriptions.retry_at.take_if(|at| *at <= now).is_some();
    let retry = if is_due { std::mem::take(&mut subscriptions.refused) } else { Vec::new() };
    let (new, includes_refused) = shared.take_to_subscribe(server, retry);
    let mut missing = None;
    for names in new.chunks(CHUNK_SIZE) {
        let outcome = timeout(reply_timeout, listener.subscribe(names)).await.map_err(|_| no_reply())??;
        let SubscribeOutcome { refusal, moved } = outcome;
        let refused = refusal.as_ref().map(|refusal| &*refusal.channels).unwrap_or_default();
        let is_confirmed = |name: &&Arc<str>| !refused.contains(name) && !moved.contains(name);
        let names: Vec<_> = names.iter().filter(is_confirmed).cloned().collect();
        subscriptions.confirmed(shared, server, &names);
        if !moved.is_empty() {
            shared.refused_by_node(server, &moved);
        }
        if let Some(Refusal { channels, missing: missing_permission }) = refusal {
            subscriptions.refused.extend(channels);
            missing = Some(missing_permission);
        }
    }
    match missing {
        Some(missing_permission) => {
            subscriptions.retry_at.get_or_insert(now + REFUSED_RETRY_INTERVAL);
            shared.record_missing_permission(missing_permission);
        }
        None if !new.is_empty() => shared.record_allowed(includes_refused),
        None => {}
    }
    Ok(next)
}

impl Subscriptions {
    fn confirmed(&mut self, shared: &Shared, server: &Server, names: &[Arc<str>]) {
        if names.is_empty() {
            return;
        }
        self.confirmed_at.get_or_insert_with(Instant::now);
        self.confirmed.extend(names.iter().cloned());
        shared.record_confirmed(server, names);
    }

    /// Whether the connection has lasted long enough.
    fn is_stable(&self) -> bool {
        self.confirmed_at.is_some_and(|at| at.elapsed() >= STABLE_AFTER)
    }

    /// Logs the recovery once the connection is stable, if the failure was logged. Returns the time of the next check.
    fn log_recovery(&mut self, shared: &Shared, server: &Server) -> Option<Instant> {
        if !self.is_failing {
            return None;
        }
        if self.is_stable() {
            self.is_failing = false;
            tracing::info!(server = shared.source.name(server), "subscribed to redis again");
            return None;
        }
        self.confirmed_at.map(|at| at + STABLE_AFTER)
    }
}

fn no_reply() -> RedisError {
    std::io::Error::from(std::io::ErrorKind::TimedOut).into()
}
